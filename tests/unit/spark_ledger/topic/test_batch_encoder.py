import random
from datetime import date

import pyarrow as pa
import pytest

from spark_ledger import errors
from spark_ledger.topic.entry import key_filter, row_columns
from spark_ledger.topic.entry.batch_encoder import ENTRY_BYTES, SHARE_BYTES, BatchEncoder
from spark_ledger.topic.entry.message_batch import HEADERS_TYPE, TYPES, column_of
from spark_ledger.topic.entry.routing import Router, Routing
from tests.kit.message_batches import decode_batch


def encoder_of(partitions=1, task_index=0, routing=Routing.HASH, **options):
    return BatchEncoder(Router(routing, partitions, task_index), lambda: 5, **options)


def decoded(entry, share=0):
    payload = b"".join(entry.payload([0] * len(entry.shares)))
    assert len(payload) == entry.payload_bytes
    return decode_batch(payload, partition=entry.shares[share].partition)


def shares_of(entries):
    """(partition, record batch) of all shares, in the order in which they were emitted."""
    return [
        (share.partition, decoded(entry, at).record_batch)
        for entry in entries
        for at, share in enumerate(entry.shares)
    ]


def values_of(entries):
    return [v for _, batch in shares_of(entries) for v in batch["value"].to_pylist()]


def binary(values):
    return pa.array(values, pa.binary())


def test_rows_are_gathered_over_calls_until_an_entry_is_full():
    encoder = encoder_of(1, 0)
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
    encoder = encoder_of(4, 2)
    keys = [b"k%d" % (i % 10) for i in range(1000)] + [None] * 10
    values = [b"%d" % i for i in range(1010)]

    list(encoder.add(binary(keys[:500]), binary(values[:500])))
    list(encoder.add(binary(keys[500:]), binary(values[500:])))
    entries = list(encoder.flush())

    partitions = [partition for partition, _ in shares_of(entries)]
    assert partitions == sorted(set(partitions))
    assert len(partitions) > 2
    seen = {}
    for partition, batch in shares_of(entries):
        for key, value in zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True):
            seen.setdefault(key, []).append((partition, int(value)))
    assert sum(map(len, seen.values())) == 1010
    for key, places in seen.items():
        assert len({partition for partition, _ in places}) == 1
        assert [n for _, n in places] == sorted(n for _, n in places)
        if key is None:
            assert places[0][0] == 2


def test_rows_of_one_partition_keep_their_order_where_only_some_calls_have_keys():
    encoder = encoder_of(4, 2)
    values = [b"%d" % i for i in range(40)]

    for start in range(0, 40, 10):  # the keyless calls go to partition 2 as a whole
        keys = [b"k%d" % i for i in range(10)] if start % 20 == 0 else [None] * 10
        list(encoder.add(binary(keys), binary(values[start : start + 10])))
    entries = list(encoder.flush())

    of_partition = {}
    for partition, batch in shares_of(entries):
        of_partition.setdefault(partition, []).extend(map(int, batch["value"].to_pylist()))
    assert len(of_partition[2]) > 20, "rows with keys are among them"
    for numbers in of_partition.values():
        assert numbers == sorted(numbers)


def test_a_row_too_big_is_refused_before_anything_of_its_call_is_taken():
    encoder = encoder_of(1, 0, entry_bytes_max=10_000)
    list(encoder.add(None, binary([b"before"])))

    with pytest.raises(errors.MessageTooBig, match=r"LEDGER_WRITE.MESSAGE_TOO_BIG"):
        encoder.add(None, binary([b"small", b"x" * 9_000]))

    assert values_of(encoder.flush()) == [b"before"]


def test_a_row_larger_than_an_entry_usually_is_gets_an_entry_of_its_own():
    encoder = encoder_of(1, 0)
    rows = [b"a", b"x" * (2 * ENTRY_BYTES), b"b"]

    entries = [*encoder.add(None, binary(rows)), *encoder.flush()]

    assert [entry.rows for entry in entries] == [1, 1, 1]
    assert values_of(entries) == rows


def test_what_is_gathered_stays_within_its_bytes():
    encoder = encoder_of(50, 0, gather_bytes_max=100_000)
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
    encoder = encoder_of(2, 0)
    column = pa.array(["zz", "ab", None, "cd"], pa.string()).cast(pa.binary())
    column = pa.array(column.to_pylist(), kind) if kind == pa.binary(2) else column.cast(kind)

    list(encoder.add(column.slice(1), column.slice(1)))

    assert sorted(values_of(encoder.flush()), key=str) == sorted([b"ab", None, b"cd"], key=str)


@pytest.mark.parametrize("column", [pa.array([1]), pa.array([[b"a"]]), pa.array([True])])
def test_a_column_of_another_type_is_refused(column):
    with pytest.raises(errors.ColumnTypeMismatch, match=r"column value .* text or binary"):
        encoder_of(1, 0).add(None, column)


def test_columns_of_unequal_length_and_an_unknown_compression_are_refused():
    with pytest.raises(ValueError, match="1 of key for 2 rows"):
        encoder_of(1, 0).add(binary([b"a"]), binary([b"a", b"b"]))
    with pytest.raises(errors.BadConfig, match="gzip"):
        encoder_of(1, 0, compression="gzip")


def test_no_rows_make_no_entries():
    encoder = encoder_of(3, 0)

    assert [*encoder.add(binary([]), binary([])), *encoder.flush()] == []


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("entry_bytes_max", [8_192, 1 << 20, 16 << 20])
def test_the_largest_row_that_is_taken_fits_into_an_entry(entry_bytes_max, compression):
    encoder = encoder_of(entry_bytes_max=entry_bytes_max, compression=compression)
    room = entry_bytes_max - 1024 - 8
    key = random.Random(7).randbytes(room // 2)
    value = random.Random(8).randbytes(room - room // 2)

    entries = [*encoder.add(binary([key]), binary([value])), *encoder.flush()]

    assert entries[0].payload_bytes + 64 <= entry_bytes_max
    with pytest.raises(errors.MessageTooBig):
        encoder.add(binary([key]), binary([value + b"x"]))


# -- entries of several partitions ----------------------------------------------------------------


def test_small_shares_of_many_partitions_come_in_one_entry_and_large_ones_on_their_own():
    encoder = encoder_of(100)
    keys = [b"k%d" % n for n in range(500)] + [b"hot"] * 700
    list(encoder.add(binary(keys), binary([b"x" * 100] * len(keys))))

    entries = list(encoder.flush())

    assert [len(entry.shares) == 1 for entry in entries] == [True, False]
    (hot,) = entries[0].shares
    assert hot.rows >= 700
    partitions = [share.partition for share in entries[1].shares]
    assert partitions == sorted(partitions)
    assert hot.partition not in partitions
    assert sum(entry.rows for entry in entries) == 1200


def test_two_hundred_tasks_over_a_hundred_partitions_make_two_hundred_entries():
    def entries_of(task_index):
        encoder = encoder_of(100, task_index)
        keys = binary([b"%d-%d" % (task_index, n) for n in range(500)])
        return [*encoder.add(keys, keys), *encoder.flush()]

    assert sum(len(entries_of(task_index)) for task_index in range(200)) == 200


def test_a_share_says_its_part_of_the_payloads_bytes():
    encoder = encoder_of(2, routing=Routing.COLUMN)
    rows = binary([b"x" * 3000, b"x" * 1000])
    list(encoder.add(None, rows, partitions=pa.array([0, 1], pa.int32())))

    (entry,) = encoder.flush()

    first, second = (share.bytes for share in entry.shares)
    assert 2.9 < first / second < 3.1
    assert first + second == len(b"".join(entry.payload([0, 0])))


def test_a_lone_small_share_is_an_entry_of_its_own():
    encoder = encoder_of(8, 3)
    list(encoder.add(None, binary([b"a"])))

    (entry,) = encoder.flush()

    assert [share.partition for share in entry.shares] == [3]
    assert decode_batch(b"".join(entry.payload([9]))).first_row == 9


def test_when_memory_is_used_up_by_many_small_shares_they_leave_together_in_order():
    encoder = encoder_of(200, gather_bytes_max=1 << 20)
    rng = random.Random(7)
    sent = [b"%d" % rng.randrange(50_000) for _ in range(30_000)]
    entries = []
    for start in range(0, len(sent), 5000):
        part = binary(sent[start : start + 5000])
        entries += encoder.add(
            part, binary([b"%08d" % n + b"x" * 100 for n in range(start, start + 5000)])
        )
        assert encoder.gathered_bytes <= 1 << 20
    middle = list(entries)
    entries += encoder.flush()

    assert len(middle) > 1
    assert all(len(entry.shares) > 1 for entry in middle)
    assert all(entry.payload_bytes > 128 << 10 for entry in middle)
    seen = {}
    for partition, batch in shares_of(entries):
        seen.setdefault(partition, []).extend(int(v[:8]) for v in batch["value"].to_pylist())
    assert sorted(n for rows in seen.values() for n in rows) == list(range(len(sent)))
    assert all(rows == sorted(rows) for rows in seen.values())


def test_rows_that_wait_for_others_do_not_hold_on_to_the_memory_of_those_that_went():
    encoder = encoder_of(2, routing=Routing.COLUMN, gather_bytes_max=1 << 20)
    places = pa.array([0] * 999 + [1], pa.int32())
    values = binary([b"x" * 1000] * 1000)
    before = pa.total_allocated_bytes()

    for _ in range(100):
        for _entry in encoder.add(None, values, partitions=places):
            pass

    assert pa.total_allocated_bytes() - before < 3 << 20
    assert sum(entry.rows for entry in encoder.flush()) >= 100


def test_many_tiny_calls_hold_little_more_than_their_rows():
    encoder = encoder_of(gather_bytes_max=1 << 20)
    entries = []
    for n in range(3000):
        entries += encoder.add(None, binary([b"%d" % n]))
        assert max(len(g.parts) for g in encoder._gathered.values()) <= 1024
    entries += encoder.flush()

    assert [int(v) for v in values_of(entries)] == list(range(3000))


# -- what is small enough to be no entry at all ----------------------------------------------------


def test_a_task_that_wrote_little_has_it_as_one_small_entry_for_each_partition():
    encoder = encoder_of(3)
    keys = binary([b"a", b"b", b"c", b"d"])
    list(encoder.add(keys, keys))

    entries = encoder.flush_small(8192)

    assert sum(entry.payload_bytes for entry in entries) <= 8192
    assert all(len(entry.shares) == 1 for entry in entries)
    assert sorted(values_of(entries)) == [b"a", b"b", b"c", b"d"]
    assert list(encoder.flush()) == []


@pytest.mark.parametrize("rows", [[b"x" * 9000], [b"%d" % n for n in range(100)]])
def test_what_is_too_much_for_that_stays_gathered(rows):
    encoder = encoder_of(50)
    list(encoder.add(binary(rows), binary(rows)))

    assert encoder.flush_small(8192) is None
    assert sorted(values_of(encoder.flush())) == sorted(rows)


def test_nothing_is_small_once_an_entry_came_out():
    encoder = encoder_of()
    entries = list(encoder.add(None, binary([b"a", b"x" * ENTRY_BYTES])))

    assert len(entries) == 1
    assert encoder.flush_small(4 * ENTRY_BYTES) is None


# -- columns ---------------------------------------------------------------------------------------


def test_columns_that_some_calls_lack_are_null_there_and_absent_where_all_lack_them():
    encoder = encoder_of()
    when = pa.array([1_700_000_000_123_456], TYPES["event_time"])
    headers = pa.array([[{"key": "a", "value": b"1"}]], HEADERS_TYPE)
    list(encoder.add(None, binary([b"a"])))
    list(encoder.add(binary([None]), binary([b"b"]), event_times=when))
    list(encoder.add(None, binary([b"c"]), headers=headers))

    (entry,) = encoder.flush()
    batch = decoded(entry).record_batch

    assert batch.schema.names == ["value", "event_time", "headers"]
    assert batch["value"].to_pylist() == [b"a", b"b", b"c"]
    assert batch["event_time"].cast(pa.int64()).to_pylist() == [None, 1_700_000_000_123_456, None]
    assert batch["headers"].to_pylist() == [None, None, headers[0].as_py()]
    assert column_of(batch, "key").null_count == 3


@pytest.mark.parametrize(
    ("micros", "bounds"),
    [
        ([1_999, 5_000, None], (1, 5)),
        ([1_999, 5_001], (1, 6)),
        ([-1], (-1, 0)),
        ([None], None),
    ],
)
def test_an_entry_says_between_which_event_times_its_rows_are(micros, bounds):
    encoder = encoder_of()
    list(
        encoder.add(
            None, binary([b"a"] * len(micros)), event_times=pa.array(micros, TYPES["event_time"])
        )
    )

    ((share,),) = [entry.shares for entry in encoder.flush()]

    assert share.event_ms == bounds


def test_each_share_says_its_own_event_times():
    encoder = encoder_of(3, routing=Routing.COLUMN)
    times = pa.array([1000, 9000, 4000, None], pa.timestamp("ms"))
    places = pa.array([2, 0, 2, 1])
    list(encoder.add(None, binary([b"a"] * 4), event_times=times, partitions=places))

    (entry,) = encoder.flush()

    assert [share.event_ms for share in entry.shares] == [(9000, 9000), None, (1000, 4000)]


def test_a_topics_own_columns_are_gathered_by_key_with_their_schemas_version():
    encoder = encoder_of(4, schema_version=7)
    keys = binary([b"%d" % (n % 9) for n in range(100)])
    own = pa.RecordBatch.from_pydict(
        {"n": range(100), "tags": [["t"] * (n % 3) for n in range(100)], "key": ["u"] * 100}
    )
    list(encoder.add(keys, own))

    entries = list(encoder.flush())

    assert all((entry.typed, entry.schema_version) == (True, 7) for entry in entries)
    found = pa.concat_tables(pa.Table.from_batches([batch]) for _, batch in shares_of(entries))
    assert found.schema.names == ["__key", "n", "tags", "key"]
    assert found.sort_by("n").drop_columns("__key").equals(pa.Table.from_batches([own]))
    assert all(
        int(k) == n % 9
        for k, n in zip(found["__key"].to_pylist(), found["n"].to_pylist(), strict=True)
    )


def test_a_task_writes_rows_of_one_kind():
    own = pa.RecordBatch.from_pydict({"n": [1]})
    encoder = encoder_of()
    list(encoder.add(None, own))

    for other in (binary([b"v"]), pa.RecordBatch.from_pydict({"n": ["x"]})):
        with pytest.raises(ValueError, match="cannot write rows of"):
            encoder.add(None, other)
    assert sum(entry.rows for entry in encoder.flush()) == 1


@pytest.mark.parametrize("name", ["__key", "__eventTime", "__messageProperties"])
def test_a_topics_own_column_cannot_have_the_name_of_another(name):
    with pytest.raises(ValueError, match=name):
        encoder_of().add(None, pa.RecordBatch.from_pydict({name: [1]}))


def test_headers_of_every_layout_are_taken_and_what_is_none_is_refused():
    pair = [{"key": "a", "value": "1"}]
    element = pa.struct([("key", pa.string()), ("value", pa.string())])
    layouts = [
        pa.array([[("a", "1")]], pa.map_(pa.string(), pa.string())),
        pa.array([pair], pa.list_(pa.field("element", element))),
        pa.array([pair], pa.large_list(element)),
    ]
    encoder = encoder_of()
    for headers in layouts:
        list(encoder.add(None, binary([b"v"]), headers=headers))
    (entry,) = encoder.flush()

    assert decoded(entry).record_batch["headers"].to_pylist() == [[{"key": "a", "value": b"1"}]] * 3
    for wrong in (pa.array([[{"name": "a", "value": b"1"}]]), pa.array([["a"]]), pa.array([1])):
        with pytest.raises(errors.ColumnTypeMismatch, match="column headers"):
            encoder_of().add(None, binary([b"v"]), headers=wrong)
    with pytest.raises(errors.ColumnTypeMismatch, match="column event_time"):
        encoder_of().add(None, binary([b"v"]), event_times=pa.array([1]))


def test_an_entry_takes_no_more_than_was_counted_whatever_its_columns():
    rng = random.Random(3)
    kinds = [
        pa.int8(), pa.float64(), pa.bool_(), pa.string(), pa.large_binary(), pa.date32(),
        pa.decimal128(30, 3), pa.list_(pa.int16()),
        pa.struct([("a", pa.string()), ("b", pa.bool_())]),
        pa.map_(pa.string(), pa.list_(pa.binary())), pa.null(), pa.large_list(pa.string()),
        pa.timestamp("us"), pa.binary(3),
    ]  # fmt: skip
    for _ in range(200):
        rows = rng.randrange(1, 300)
        chosen = rng.sample(kinds, rng.randrange(1, 6))
        batch = pa.RecordBatch.from_arrays(
            [pa.array([made(kind, rng) for _ in range(rows + 5)], kind) for kind in chosen],
            names=[f"c{at}" for at in range(len(chosen))],
        ).slice(3, rows)
        counted = int(row_columns.row_bytes(batch).sum())
        encoder = encoder_of(entry_bytes_max=1 << 24)
        (entry,) = [*encoder.add(None, batch), *encoder.flush()]

        assert entry.payload_bytes <= counted + row_columns.overhead_bytes_max(batch.schema)
        assert decoded(entry).record_batch.equals(batch)


def made(kind, rng):
    """A value of that Arrow type, or None."""
    if rng.random() < 0.2 or pa.types.is_null(kind):
        return None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [made(kind.value_type, rng) for _ in range(rng.randrange(4))]
    if pa.types.is_map(kind):
        return [(f"k{n}", made(kind.item_type, rng)) for n in range(rng.randrange(3))]
    if pa.types.is_struct(kind):
        return {field.name: made(field.type, rng) for field in kind}
    if pa.types.is_fixed_size_binary(kind):
        return rng.randbytes(kind.byte_width)
    if pa.types.is_string(kind):
        return "x" * rng.randrange(20)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return rng.randbytes(rng.randrange(20))
    if pa.types.is_date(kind):
        return date(2024, 1, 1 + rng.randrange(28))
    return pa.scalar(rng.randrange(100)).cast(kind).as_py()


def test_an_entry_of_the_largest_row_of_all_columns_fits():
    entry_bytes_max = 16 << 10
    names = "n" * 200
    own = pa.RecordBatch.from_pydict({names: [b"v"], "tags": [[{"a": "b", "c": ["d"]}]]})
    extra = dict(
        event_times=pa.array([1], TYPES["event_time"]),
        headers=pa.array([[{"key": "a", "value": b"1"}]], HEADERS_TYPE),
    )

    def size_of(length):
        column = pa.array([random.Random(1).randbytes(length)], pa.binary())
        encoder = encoder_of(entry_bytes_max=entry_bytes_max, compression="zstd")
        rows = encoder.add(binary([b"k"]), own.set_column(0, names, column), **extra)
        (entry,) = [*rows, *encoder.flush()]
        return entry.payload_bytes

    taken = 0
    for length in range(0, entry_bytes_max, 64):
        try:
            taken = size_of(length)
        except errors.MessageTooBig:
            break
        assert taken + 64 <= entry_bytes_max
    assert taken > entry_bytes_max // 2


# -- keys ------------------------------------------------------------------------------------------


def test_an_entry_of_one_partition_has_a_filter_of_its_keys():
    encoder = encoder_of(2, key_filters=True)
    keys = [b"k%d" % n for n in range(60_000)] + [None]
    values = [b"x" * 100] * len(keys)
    entries = [*encoder.add(binary(keys), binary(values)), *encoder.flush()]

    assert len(entries) > 2
    for number, entry in enumerate(entries):
        (share,) = entry.shares
        held = [k for k in decoded(entry).record_batch["key"].to_pylist() if k is not None]
        payload = key_filter.encode_filters([(share.partition, number, share.key_filter)])
        filters = key_filter.KeyFilters(payload)
        for key in held[::100]:
            hashes = key_filter.hashes_of([key])
            assert filters.might_contain(share.partition, [number], hashes).all()
        assert len(share.key_filter) <= 1.5 * (len(held) + 1) + 8


@pytest.mark.parametrize("routing", [Routing.HASH, Routing.SPARK, Routing.ROUND_ROBIN])
def test_filters_are_the_same_however_rows_are_routed_and_none_when_switched_off(routing):
    keys = binary([b"k%d" % n for n in range(1000)])
    values = binary([b"x" * 1000] * 1000)
    on, off = (encoder_of(1, routing=routing, key_filters=on) for on in (True, False))

    (with_filter,) = [*on.add(keys, values), *on.flush()]
    (without,) = [*off.add(keys, values), *off.flush()]

    expected = key_filter.key_filter(key_filter.hashes_of(keys.to_pylist()))
    assert with_filter.shares[0].key_filter == expected
    assert without.shares[0].key_filter is None


def test_an_entry_without_keys_has_the_filter_that_no_key_passes():
    encoder = encoder_of(key_filters=True)
    (entry,) = [*encoder.add(None, binary([b"x" * SHARE_BYTES])), *encoder.flush()]

    assert entry.shares[0].key_filter == b""


# -- partitions ------------------------------------------------------------------------------------


def test_rows_that_name_a_partition_that_is_none_are_refused_before_any_is_taken():
    encoder = encoder_of(4, routing=Routing.COLUMN)
    rows = binary([b"a", b"b"])

    for wrong, told in (
        (4, "partition 4, but the topic has 4"),
        (-1, "partition -1"),
        (None, "null"),
    ):
        with pytest.raises(errors.PartitionInvalid, match=told):
            encoder.add(None, rows, partitions=pa.array([0, wrong], pa.int32()))
    with pytest.raises(errors.ColumnTypeMismatch, match="partition is missing"):
        encoder.add(None, rows)
    with pytest.raises(ValueError, match="1 partitions for 2 rows"):
        encoder.add(None, rows, partitions=pa.array([0], pa.int32()))
    assert list(encoder.flush()) == []
