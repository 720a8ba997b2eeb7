import random

import pyarrow as pa
import pytest

from spark_ledger import errors
from spark_ledger.topic.batch_encoder import ENTRY_BYTES, BatchEncoder
from spark_ledger.topic.message_batch import decode_batch


def decoded(entry, first_row=0):
    return decode_batch(b"".join(entry.payload(first_row)))


def values_of(entries):
    return [v for entry in entries for v in decoded(entry).record_batch["value"].to_pylist()]


def binary(values):
    return pa.array(values, pa.binary())


def test_rows_are_gathered_over_calls_until_an_entry_is_full():
    encoder = BatchEncoder(1, 0, lambda: 5)
    rows = [b"%06d" % i + b"x" * 194 for i in range(20_000)]

    entries = []
    for start in range(0, len(rows), 1000):
        part = binary(rows[start : start + 1000])
        entries += encoder.add(part, part)
    full = len(entries)
    entries += encoder.flush()

    assert values_of(entries) == rows
    sizes = [entry.payload_bytes for entry in entries[:full]]
    assert all(ENTRY_BYTES * 0.99 < size < ENTRY_BYTES + 2000 for size in sizes)
    assert encoder.gathered_bytes == 0


def test_rows_go_to_their_keys_partition_in_the_order_they_came():
    encoder = BatchEncoder(4, 2, lambda: 5)
    keys = [b"k%d" % (i % 10) for i in range(1000)] + [None] * 10
    values = [b"%d" % i for i in range(1010)]

    list(encoder.add(binary(keys[:500]), binary(values[:500])))
    list(encoder.add(binary(keys[500:]), binary(values[500:])))
    entries = list(encoder.flush())

    assert [entry.partition for entry in entries] == sorted(e.partition for e in entries)
    seen = {}
    for entry in entries:
        batch = decoded(entry).record_batch
        for key, value in zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True):
            seen.setdefault(key, []).append((entry.partition, int(value)))
    assert sum(map(len, seen.values())) == 1010
    for key, places in seen.items():
        assert len({partition for partition, _ in places}) == 1
        assert [n for _, n in places] == sorted(n for _, n in places)
        if key is None:
            assert places[0][0] == 2


def test_a_row_too_big_is_refused_before_anything_of_its_call_is_taken():
    encoder = BatchEncoder(1, 0, lambda: 5, entry_bytes_max=10_000)
    list(encoder.add(None, binary([b"before"])))

    with pytest.raises(errors.MessageTooBig, match=r"LEDGER_WRITE.MESSAGE_TOO_BIG"):
        encoder.add(None, binary([b"small", b"x" * 9_000]))

    assert values_of(encoder.flush()) == [b"before"]


def test_a_row_larger_than_an_entry_usually_is_gets_an_entry_of_its_own():
    encoder = BatchEncoder(1, 0, lambda: 5)
    rows = [b"a", b"x" * (2 * ENTRY_BYTES), b"b"]

    entries = [*encoder.add(None, binary(rows)), *encoder.flush()]

    assert [entry.rows for entry in entries] == [1, 1, 1]
    assert values_of(entries) == rows


def test_what_is_gathered_stays_within_its_bytes():
    encoder = BatchEncoder(50, 0, lambda: 5, gather_bytes_max=100_000)
    keys = binary([b"%d" % (i % 200) for i in range(5000)])
    values = binary([b"x" * 100] * 5000)

    entries = list(encoder.add(keys, values))

    assert encoder.gathered_bytes <= 100_000
    assert sum(entry.rows for entry in [*entries, *encoder.flush()]) == 5000


@pytest.mark.parametrize(
    "kind",
    [pa.binary(), pa.large_binary(), pa.string(), pa.large_string(), pa.binary_view(),
     pa.string_view(), pa.binary(2)],
)  # fmt: skip
def test_text_and_binary_of_every_layout_is_taken(kind):
    encoder = BatchEncoder(2, 0, lambda: 5)
    column = pa.array(["zz", "ab", None, "cd"], pa.string()).cast(pa.binary())
    column = pa.array(column.to_pylist(), kind) if kind == pa.binary(2) else column.cast(kind)

    list(encoder.add(column.slice(1), column.slice(1)))

    assert sorted(values_of(encoder.flush()), key=str) == sorted([b"ab", None, b"cd"], key=str)


@pytest.mark.parametrize("column", [pa.array([1]), pa.array([[b"a"]]), pa.array([True])])
def test_a_column_of_another_type_is_refused(column):
    with pytest.raises(errors.ColumnTypeMismatch, match=r"column value .* text or binary"):
        BatchEncoder(1, 0, lambda: 5).add(None, column)


def test_columns_of_unequal_length_and_an_unknown_compression_are_refused():
    with pytest.raises(ValueError, match="1 keys for 2 values"):
        BatchEncoder(1, 0, lambda: 5).add(binary([b"a"]), binary([b"a", b"b"]))
    with pytest.raises(errors.BadConfig, match="gzip"):
        BatchEncoder(1, 0, lambda: 5, compression="gzip")


def test_no_rows_make_no_entries():
    encoder = BatchEncoder(3, 0, lambda: 5)

    assert [*encoder.add(binary([]), binary([])), *encoder.flush()] == []


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("entry_bytes_max", [8_192, 1 << 20, 16 << 20])
def test_the_largest_row_that_is_taken_fits_into_an_entry(entry_bytes_max, compression):
    encoder = BatchEncoder(
        1, 0, lambda: 5, entry_bytes_max=entry_bytes_max, compression=compression
    )
    room = entry_bytes_max - 1024 - 8
    key = random.Random(7).randbytes(room // 2)
    value = random.Random(8).randbytes(room - room // 2)

    entries = [*encoder.add(binary([key]), binary([value])), *encoder.flush()]

    assert entries[0].payload_bytes + 64 <= entry_bytes_max
    with pytest.raises(errors.MessageTooBig):
        encoder.add(binary([key]), binary([value + b"x"]))
