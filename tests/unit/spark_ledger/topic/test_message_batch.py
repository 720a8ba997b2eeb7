import struct
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from spark_ledger import errors
from spark_ledger.topic.entry.message_batch import (
    COMPRESSIONS,
    HEADER_BYTES,
    HEADERS_TYPE,
    SCHEMA,
    SHARE_BYTES,
    TYPES,
    Share,
    column_of,
    decode_header,
    encode_body,
    encode_header,
)
from tests.kit.message_batches import decode_batch, encode_batch

# What version 1 wrote for partition 3, first row 70, written at 1000 ms, row (b"k", b"v").
VERSION_1 = bytes.fromhex(
    "534c4d310100000003000000010000004600000000000000e803000000000000"
    "ffffffff980000001000000000000a000c000600050008000a000000000104000c0000000800080000000400"
    "0800000004000000020000004000000004000000d8ffffff0000010410000000180000000400000000000000"
    "0500000076616c7565000000ccffffff100014000800060007000c0000001000100000000000010410000000"
    "180000000400000000000000030000006b6579000400040004000000ffffffffd80000001400000000000000"
    "0c0016000600050008000c000c0000000003040018000000200000000000000000000a0018000c0004000800"
    "0a0000007c000000100000000100000000000000000000000600000000000000000000000000000000000000"
    "0000000000000000080000000000000008000000000000000100000000000000100000000000000000000000"
    "0000000010000000000000000800000000000000180000000000000001000000000000000000000002000000"
    "010000000000000000000000000000000100000000000000000000000000000000000000010000006b000000"
    "0000000000000000010000007600000000000000ffffffff00000000"
)
SHARES = (Share(2, 2, 70), Share(7, 1, 0), Share(300, 3, 1 << 40))


def batch(keys, values):
    return pa.RecordBatch.from_arrays(
        [pa.array(keys, pa.binary()), pa.array(values, pa.binary())], schema=SCHEMA
    )


def encoded(rows, compression="none", shares=None, **options):
    shares = shares or [Share(3, rows.num_rows, 70)]
    return b"".join(encode_batch(rows, shares, written_ms=1000, compression=compression, **options))


def six_rows():
    return batch([b"k%d" % n for n in range(6)], [b"v%d" % n for n in range(6)])


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_batch_survives_its_payload_and_null_is_kept_apart_from_empty(compression):
    rows = batch([b"k", None, b""], [None, b"", b"v" * 1000])

    found = decode_batch(encoded(rows, compression))

    assert found.record_batch.equals(rows)
    assert (found.partition, found.first_row, found.rows, found.written_ms) == (3, 70, 3, 1000)
    assert (found.typed, found.schema_version) == (False, 0)


def test_what_version_1_wrote_is_read():
    found = decode_batch(VERSION_1)

    assert found.record_batch.to_pydict() == {"key": [b"k"], "value": [b"v"]}
    assert (found.partition, found.first_row, found.written_ms) == (3, 70, 1000)


def test_all_columns_survive_a_payload_and_one_that_is_not_there_is_null():
    when = datetime(2024, 5, 17, 1, 2, 3, 456789, UTC)
    headers = [[{"key": "a", "value": b"1"}, {"key": "a", "value": None}], []]
    rows = pa.RecordBatch.from_arrays(
        [
            pa.array([b"x", None], pa.binary()),
            pa.array([when, None], TYPES["event_time"]),
            pa.array(headers, HEADERS_TYPE),
        ],
        names=["value", "event_time", "headers"],
    )

    found = decode_batch(encoded(rows)).record_batch

    assert found.to_pydict() == {
        "value": [b"x", None],
        "event_time": [when, None],
        "headers": headers,
    }
    assert column_of(found, "key").to_pylist() == [None, None]
    assert column_of(found, "value").to_pylist() == [b"x", None]


def test_a_column_that_is_not_there_costs_nothing():
    values = pa.array([b"v" * 90] * 1000, pa.binary())
    rows = pa.RecordBatch.from_arrays([values], names=["value"])

    assert len(encoded(rows)) < 1000 * (90 + 4) + 600


def test_a_topics_own_columns_come_with_the_version_of_their_schema():
    rows = pa.RecordBatch.from_pydict({"__key": [b"k", None], "n": [1, 2], "value": ["a", "b"]})

    found = decode_batch(encoded(rows, typed=True, schema_version=65535))

    assert found.record_batch.equals(rows)
    assert (found.typed, found.schema_version) == (True, 65535)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_of_a_shared_entry_each_partition_gets_its_rows(compression):
    payload = encoded(six_rows(), compression, SHARES)

    found = [decode_batch(payload, partition=share.partition) for share in SHARES]

    assert [one.record_batch["value"].to_pylist() for one in found] == [
        [b"v0", b"v1"],
        [b"v2"],
        [b"v3", b"v4", b"v5"],
    ]
    assert [Share(one.partition, one.rows, one.first_row) for one in found] == list(SHARES)
    assert decode_header(payload).shares == SHARES


def test_a_partition_that_a_shared_entry_has_no_rows_of_is_an_error():
    payload = encoded(six_rows(), shares=SHARES)

    with pytest.raises(errors.UnsupportedFormat, match="has none of partition 3"):
        decode_batch(payload, partition=3)
    with pytest.raises(ValueError, match="which of 3 partitions"):
        decode_batch(payload)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("shares", [None, SHARES])
@pytest.mark.parametrize("wanted", [["value"], ["key"], ["value", "key"], ["headers"], []])
def test_only_the_columns_asked_for_are_read(compression, shares, wanted):
    payload = encoded(six_rows(), compression, shares)

    found = decode_batch(payload, partition=300, columns=wanted).record_batch

    assert sorted(found.schema.names) == sorted({"key", "value"} & {*wanted})
    assert found.num_rows == (3 if shares else 6)
    assert column_of(found, "value").null_count == (0 if "value" in wanted else found.num_rows)


def test_a_column_not_asked_for_is_not_decompressed():
    rows = batch([b"k" * 100] * 1000, [b"v" * 100] * 1000)
    payload = bytearray(encoded(rows, "zstd"))
    at = payload.index(struct.pack("<I", 0xFD2FB528))  # a frame of zstd: the first are the key's
    payload[at : at + 4] = b"xxxx"

    assert decode_batch(payload, columns=["value"]).record_batch["value"][999].as_py() == b"v" * 100
    with pytest.raises(errors.UnsupportedFormat, match="damaged"):
        decode_batch(payload)


def test_uncompressed_columns_are_views_of_the_payload():
    payload = encoded(batch([b"k"] * 1000, [b"v" * 100] * 1000))
    before = pa.total_allocated_bytes()

    found = decode_batch(payload)

    assert pa.total_allocated_bytes() - before < 1000
    assert found.rows == 1000


def test_a_slice_is_encoded_without_the_rows_around_it():
    rows = batch([b"a"] * 1000, [b"x" * 100] * 1000)

    payload = encoded(rows.slice(500, 2))

    assert len(payload) < 1000
    assert decode_batch(payload).record_batch.equals(rows.slice(500, 2))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_what_is_encoded_is_read_only_so_a_ledgers_writer_does_not_copy_it(compression):
    parts = encode_batch(
        batch([b"k"], [b"v"]), [Share(0, 1, 0)], written_ms=0, compression=compression
    )
    assert all(memoryview(part).readonly for part in parts)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_the_buffers_of_a_body_are_the_stream_that_arrow_writes(compression):
    for rows in (
        batch([], []),
        batch([b"k", None], [None, b"v" * 100_000]),
        batch([b"k"] * 20_000, [b"v" * 100] * 20_000).slice(7, 19_000),
        batch([b"k"] * 20_000, [b"v" * 100] * 20_000).slice(7, 100),
    ):
        whole = pa.BufferOutputStream()
        codec = None if compression == "none" else compression
        options = pa.ipc.IpcWriteOptions(compression=codec)
        with pa.ipc.new_stream(whole, rows.schema, options=options) as stream:
            stream.write_batch(rows)

        assert b"".join(encode_body(rows, compression)) == whole.getvalue().to_pybytes()


def test_the_bytes_of_a_large_column_are_not_copied_to_encode_it():
    rows = batch([b"k"] * 1000, [b"v" * 1000] * 1000)
    values = rows.column("value").buffers()[2]
    before = pa.total_allocated_bytes()

    body = encode_body(rows)

    assert pa.total_allocated_bytes() - before < 100_000
    (large,) = [part for part in body if len(part) >= 1_000_000]
    assert pa.py_buffer(large).address == values.address
    assert len(body) == 3


def test_what_is_encoded_keeps_no_memory_of_rows_that_are_not_in_it():
    before = pa.total_allocated_bytes()
    rows = batch([b"k"] * 4000, [b"v" * 1000] * 4000)

    body = encode_body(rows.slice(500, 1000))
    del rows

    assert sum(map(len, body)) > 1_000_000
    assert pa.total_allocated_bytes() - before < 1_500_000


def test_a_header_has_these_bytes():
    assert encode_header([Share(3, 2, 70)], 1000).hex() == (
        "534c4d310200000003000000020000004600000000000000e803000000000000"
    )
    assert encode_header([Share(3, 2, 70)], 1000, typed=True, schema_version=5).hex() == (
        "534c4d310202050003000000020000004600000000000000e803000000000000"
    )


def test_the_header_and_index_of_a_shared_entry_have_these_bytes():
    assert encode_header(SHARES, 1000).hex() == (
        "534c4d310201000003000000060000000000000000000000e803000000000000"
        "02000000020000004600000000000000"
        "07000000010000000000000000000000"
        "2c010000030000000000000000010000"
    )


def test_the_header_of_rows_written_at_several_times_has_these_bytes():
    assert encode_header([Share(3, 2, 70)], 1000, times=[(1, 999), (1, 1000)]).hex() == (
        "534c4d310204000003000000020000004600000000000000e803000000000000"
        "02000000000000000000000000000000"
        "0100000000000000e703000000000000"
        "0100000000000000e803000000000000"
    )


def test_each_row_has_the_time_it_was_written_at():
    times = [(1, 400), (3, 1000), (2, 700)]
    assert decode_batch(encoded(six_rows(), times=times)).times_ms.tolist() == [
        *(400, 1000, 1000, 1000, 700, 700),
    ]
    payload = encoded(six_rows(), shares=SHARES, times=times)
    found = [decode_batch(payload, partition=share.partition) for share in SHARES]
    assert [one.times_ms.tolist() for one in found] == [[400, 1000], [1000], [1000, 700, 700]]
    assert {one.written_ms for one in found} == {1000}


def test_rows_that_were_written_at_one_time_have_no_times():
    payload = encoded(six_rows(), times=[(6, 1000)])
    assert payload == encoded(six_rows())
    assert decode_batch(payload).times_ms is None


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, 0), (0, 1), (0, 0xFFFFFFFF), (16, 0), (16, 3), (32, 0xFFFFFFFF)],
    ids=["none", "fewer", "too many", "of no rows", "of more rows", "of rows beyond 32 bits"],
)
@pytest.mark.parametrize("shares", [None, SHARES])
def test_damaged_times_are_refused(at, value, shares):
    payload = bytearray(encoded(six_rows(), shares=shares, times=[(2, 1000), (4, 1)]))
    first = HEADER_BYTES + SHARE_BYTES * len(shares or ())
    struct.pack_into("<I", payload, first + at, value)

    with pytest.raises(errors.UnsupportedFormat, match=r"damaged message batch: .*times"):
        decode_batch(payload, partition=300)


@pytest.mark.parametrize("shares", [None, SHARES])
def test_what_follows_the_header_is_an_arrow_stream_that_any_client_reads(shares):
    payload = encoded(six_rows(), shares=shares)
    header = decode_header(payload)

    table = pa.ipc.open_stream(payload[header.body_at :]).read_all()

    assert table.num_rows == header.rows == 6
    assert table.column("value").to_pylist() == [b"v%d" % n for n in range(6)]


@pytest.mark.parametrize(("at", "bits"), [(0, 0xFF), (4, 0xFF), (5, 9), (5, 16), (5, 0x80)])
def test_another_magic_version_or_flag_is_refused(at, bits):
    payload = bytearray(encoded(batch([b"k"], [b"v"])))
    payload[at] ^= bits

    with pytest.raises(errors.UnsupportedFormat, match="message batch was expected"):
        decode_batch(payload)


def test_version_1_knew_no_flags():
    payload = bytearray(VERSION_1)
    payload[5] = 2

    with pytest.raises(errors.UnsupportedFormat, match="message batch was expected"):
        decode_batch(payload)


@pytest.mark.parametrize("shares", [None, SHARES])
@pytest.mark.parametrize("kept", [0, 10, HEADER_BYTES, HEADER_BYTES + 20, 300])
def test_a_batch_cut_short_is_refused(kept, shares):
    payload = encoded(batch([b"k"] * 6, [b"v" * 500] * 6), shares=shares)

    with pytest.raises(errors.UnsupportedFormat, match="damaged"):
        decode_batch(payload[:kept], partition=300)


@pytest.mark.parametrize("shares", [None, SHARES])
@pytest.mark.parametrize("columns", [None, ["key"]])
def test_a_header_that_counts_other_rows_than_there_are_is_refused(shares, columns):
    shares = shares or [Share(300, 6, 0)]
    payload = encoded(six_rows().slice(1), shares=shares)

    with pytest.raises(errors.UnsupportedFormat, match="5 rows has 6"):
        decode_batch(payload, partition=300, columns=columns)


@pytest.mark.parametrize(
    ("share", "field", "value"),
    [(1, 0, 2), (1, 0, 300), (0, 4, 3), (0, 4, 0), (2, 4, 0xFFFFFFFF)],
    ids=["a partition twice", "falling", "more rows", "no rows", "rows beyond 32 bits"],
)
def test_a_damaged_index_is_refused(share, field, value):
    payload = bytearray(encoded(six_rows(), shares=SHARES))
    struct.pack_into("<I", payload, HEADER_BYTES + share * SHARE_BYTES + field, value)

    with pytest.raises(errors.UnsupportedFormat, match="damaged message batch: an index"):
        decode_batch(payload, partition=300)


def test_an_index_of_no_or_too_many_shares_is_refused():
    for count in (0, 0xFFFFFFFF):
        payload = bytearray(encoded(six_rows(), shares=SHARES))
        struct.pack_into("<I", payload, 8, count)
        with pytest.raises(errors.UnsupportedFormat, match=f"index of {count} shares"):
            decode_batch(payload, partition=300)


def test_a_known_column_of_another_type_is_refused():
    rows = pa.RecordBatch.from_pydict({"value": [1, 2]})

    with pytest.raises(errors.UnsupportedFormat, match="column value is int64, not binary"):
        decode_batch(encoded(rows))


def test_an_unknown_compression_is_refused():
    with pytest.raises(ValueError, match="'gzip'"):
        encoded(batch([b"k"], [b"v"]), "gzip")
