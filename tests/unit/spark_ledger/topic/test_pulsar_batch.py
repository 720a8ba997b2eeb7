"""Batches of Pulsar's producers: what is decoded of them, and what is refused."""

import zlib
from base64 import b64encode

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spark_ledger import errors
from spark_ledger.topic.entry import pulsar_batch, pulsar_columns
from spark_ledger.topic.entry.message_batch import (
    TYPES,
    Share,
    column_of,
    decode_header,
)
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata, SingleMessageMetadata
from tests.kit.pulsar_batches import batch_of, chunked, decode_entry, lone, message, whole_of
from tests.unit.spark_ledger.topic.batches import CODECS, data, entry_of

MESSAGES = st.lists(
    st.builds(
        message,
        value=st.none() | st.binary(max_size=40),
        key=st.none() | st.text(max_size=8),
        properties=st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3),
        event_ms=st.integers(0, 2**40),
    ),
    min_size=1,
    max_size=20,
)


def of_rows(rows, written_ms, first_row):
    """All that is made of rows, in one step."""
    made = pulsar_batch.encode_rows([rows], written_ms, first_row)
    return [one for one in made if one is not None]


def rows_of(batch):
    return pulsar_columns.decode_batches([pulsar_batch.parse(batch, check=True)])


def encoded(rows, first_row):
    made = of_rows(rows, [3] * rows.num_rows, first_row)
    return [pulsar_batch.parse(one.data) for one in made]


def plain(found):
    return {name: column_of(found, name).to_pylist() for name in TYPES}


@settings(deadline=None, max_examples=50)
@given(MESSAGES, st.sampled_from(sorted(CODECS)))
def test_what_a_producer_sent_is_what_is_decoded(messages, codec):
    number, compress = CODECS[codec]
    found = plain(rows_of(batch_of(messages, compression=number, compress=compress)))
    assert found["value"] == [one.value for one in messages]
    assert found["key"] == [None if one.key is None else one.key.encode() for one in messages]
    assert [None if t is None else round(t.timestamp() * 1000) for t in found["event_time"]] == [
        one.event_ms or None for one in messages
    ]
    assert found["headers"] == [
        [{"key": k, "value": v.encode()} for k, v in one.properties.items()] or None
        for one in messages
    ]


@pytest.mark.parametrize("count", [1, 2, 500])
def test_event_times_before_1970_are_read_and_those_beyond_microseconds_are_null(count):
    sent = {2**64 - 86_400_000: -86_400_000_000, 2**63: None, 2**62: None, 2**63 - 1: None, 7: 7000}
    for event_ms, us in sent.items():
        batch = batch_of([message(b"v", event_ms=event_ms)] * count)
        found = column_of(rows_of(batch), "event_time").view(pa.int64())
        assert found.to_pylist() == [us] * count


def test_a_lone_message_has_its_key_and_properties_in_the_metadata_of_the_batch():
    found = plain(rows_of(lone(message(b"v", "k", {"a": "b"}, 1000), publish_ms=7)))
    assert (found["key"], found["value"]) == ([b"k"], [b"v"])
    assert found["headers"] == [[{"key": "a", "value": b"b"}]]


def test_a_tombstone_is_null_and_an_empty_value_is_not():
    found = plain(rows_of(batch_of([message(None, "k"), message(b"", "k")])))
    assert found["value"] == [None, b""]


def test_a_key_of_bytes_is_what_it_was_before_base64():
    found = rows_of(batch_of([message(b"v", "/w==", base64=True)]))
    assert found.column("key").to_pylist() == [b"\xff"]


def test_an_entry_keeps_the_bytes_and_the_boundaries_of_several_batches():
    first, second = batch_of([message(b"a"), message(b"b")], publish_ms=10), lone(message(b"c"))
    entry = entry_of((2, first), (1, second))
    header = decode_header(entry)
    body = memoryview(entry)[header.body_at :]
    assert [(n, bytes(data)) for n, data in pulsar_batch.split_frames(body, 3)] == [
        (2, first),
        (1, second),
    ]
    assert (header.rows, header.shares, header.written_ms) == (3, (Share(2, 3, 5),), 9)
    assert decode_entry(entry, header)[0].column("value").to_pylist() == [b"a", b"b", b"c"]
    assert decode_entry(entry, header)[1].tolist() == [10, 10, 1]


@pytest.mark.parametrize("others", [1, 300])
def test_a_chunked_message_is_one_row_among_others_whichever_way_they_are_decoded(others):
    value = bytes(range(256)) * 9
    parts = chunked(value, 4, key="k", compression=2, compress=zlib.compress)
    many = batch_of([message(b"a")] * others, producer="q", sequence_id=1)
    last = lone(message(b"z"), sequence_id=6)
    entry = entry_of((others, many), (1, whole_of(parts)), (1, last))
    header = decode_header(entry)
    found, times = decode_entry(entry, header)
    assert found.column("value").to_pylist() == [*[b"a"] * others, value, b"z"]
    assert found.column("key").to_pylist() == [*[None] * others, b"k", None]
    assert len(times) == others + 2
    body = memoryview(entry)[header.body_at :]
    batches = pulsar_batch.producers_of(body, header.rows)
    ids = [(batch.metadata.producer_name, batch.last_sequence_id) for batch in batches]
    assert ids == [("q", others), ("p", 5), ("p", 6)]  # by which a successor knows what is stored


def test_columns_that_nobody_asks_for_are_not_made():
    entry = entry_of((1, batch_of([message(b"v", "k")])))
    header = decode_header(entry)
    assert decode_entry(entry, header, ["key"])[0].schema.names == ["key"]
    assert decode_entry(entry, header, [])[0].num_rows == 1


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=30) | st.none(), min_size=1, max_size=9), st.booleans())
def test_rows_of_columns_come_back_from_the_batch_that_is_made_of_them(values, with_keys):
    columns = {"value": pa.array(values, pa.binary())}
    if with_keys:
        columns["key"] = pa.array([b"\xff%d" % i for i in range(len(values))], pa.binary())
        columns["headers"] = pa.array(
            [[{"key": "a", "value": b"b"}]] * len(values), TYPES["headers"]
        )
        columns["event_time"] = pa.array([5_000_000] * len(values)).cast(TYPES["event_time"])
    rows = pa.RecordBatch.from_pydict(columns)
    (made,) = encoded(rows, 100)
    assert (made.messages, made.metadata.sequence_id, made.metadata.publish_time) == (
        len(values),
        100,
        3,
    )
    assert plain(pulsar_columns.decode_batches([made])) == plain(rows)


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "key": st.none() | st.binary(max_size=200) | st.text().map(str.encode),
            "value": st.none() | st.binary(max_size=300),
            "event_time": st.none() | st.integers(-5000, 2**60) | st.integers(-(2**63), 2**63 - 1),
            "headers": st.none()
            | st.lists(
                st.fixed_dictionaries(
                    {"key": st.none() | st.text(max_size=9), "value": st.none() | st.binary()}
                ),
                max_size=3,
            ),
        }
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=100)
@given(ROWS, st.integers(0, 2**40), st.integers(0, 5))
def test_what_is_made_of_rows_is_what_protobuf_makes_of_them(rows, first_row, cut):
    columns = {
        name: pa.array([row[name] for row in rows], kind)
        for name, kind in (*TYPES.items(), ("event_time", pa.int64()))
    }
    columns["event_time"] = columns["event_time"].view(TYPES["event_time"])
    batch = pa.RecordBatch.from_pydict(columns).slice(cut)  # with offsets in its buffers
    if not batch.num_rows:
        return
    (made,) = encoded(batch, first_row)
    expected = b""
    for i, row in enumerate(rows[cut:]):
        said = SingleMessageMetadata(sequence_id=first_row + i, payload_size=0)
        if row["value"] is None:
            said.null_value = True
        else:
            said.payload_size = len(row["value"])
        if row["key"] is not None:
            try:
                said.partition_key = row["key"].decode()
            except UnicodeDecodeError:
                said.partition_key = b64encode(row["key"]).decode()
                said.partition_key_b64_encoded = True
        if row["event_time"] is not None and row["event_time"] // 1000:
            said.event_time = (row["event_time"] // 1000) % 2**64
        for pair in row["headers"] or ():
            text = (pair["value"] or b"").decode(errors="replace")
            said.properties.add(key=pair["key"] or "", value=text)
        head = said.SerializeToString()
        expected += len(head).to_bytes(4, "big") + head + (row["value"] or b"")
    assert bytes(pulsar_batch.payload_of(made)) == expected


def rows_sized(*sizes, **more):
    columns = {"value": pa.array([bytes([65 + i]) * n for i, n in enumerate(sizes)], pa.binary())}
    return pa.RecordBatch.from_pydict({**columns, **more})


@pytest.mark.parametrize(
    ("sizes", "batches"),
    [
        ([400, 400, 400], [(2, True), (1, True)]),
        ([900, 10, 900, 10], [(2, True), (2, True)]),
        ([2000, 10, 10], [(1, False), (2, True)]),
        ([10, 2000, 2000, 10], [(1, True), (1, False), (1, False), (1, True)]),
        ([5000], [(1, False)]),
    ],
)
def test_batches_of_rows_are_as_large_as_clients_take_and_larger_rows_are_in_chunks(
    monkeypatch, sizes, batches
):
    monkeypatch.setattr(pulsar_batch, "CLIENT_BYTES_MAX", 1000)
    monkeypatch.setattr(pulsar_batch, "CHUNK_BYTES_MIN", 100)
    rows = rows_sized(*sizes)
    made = list(of_rows(rows, range(len(sizes)), 7))
    assert [(one.rows, one.batched) for one in made] == batches
    frames = [chunk for one in made for chunk in pulsar_batch.chunks_of(one.data)]
    assert max(map(len, frames)) < 1100
    found = pulsar_columns.decode_batches([pulsar_batch.parse(one.data) for one in made])
    assert found.column("value").to_pylist() == rows.column("value").to_pylist()
    times = [int(ms) for ms in pulsar_columns.publish_times(map(pulsar_batch.parse, data(made)))]
    ends = [sum(count for count, _ in batches[: i + 1]) for i in range(len(batches))]
    assert times == [end - 1 for end in ends]


def test_a_row_in_chunks_has_its_key_headers_and_event_time_in_each(monkeypatch):
    monkeypatch.setattr(pulsar_batch, "CLIENT_BYTES_MAX", 1000)
    monkeypatch.setattr(pulsar_batch, "CHUNK_BYTES_MIN", 100)
    rows = rows_sized(
        3000,
        key=pa.array([b"\xff"], pa.binary()),
        headers=pa.array([[{"key": "a", "value": b"b"}]], TYPES["headers"]),
        event_time=pa.array([-5_000_000]).cast(TYPES["event_time"]),
    )
    (made,) = of_rows(rows, [3], 41)
    chunks = [pulsar_batch.parse(one, check=True) for one in pulsar_batch.chunks_of(made.data)]
    said = [chunk.metadata for chunk in chunks]
    assert [one.chunk_id for one in said] == list(range(len(said)))
    assert {(one.uuid, one.num_chunks_from_msg, one.total_chunk_msg_size) for one in said} == {
        ("spark-ledger-41", len(said), 3000)
    }
    assert all(chunk.is_chunk and not chunk.batched for chunk in chunks)
    assert plain(pulsar_columns.decode_batches([pulsar_batch.parse(made.data)])) == plain(rows)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.none() | st.integers(-(2**63) + 1000, 2**63 - 1), min_size=1))
@example([None, -1, -1000, -1001, 0, 999, 1000, -(2**63) + 1000, 2**63 - 1])
def test_event_times_of_rows_are_read_as_they_were_sent_to_the_millisecond(times):
    columns = {
        "value": pa.array([b"v"] * len(times), pa.binary()),
        "event_time": pa.array(times, pa.int64()).view(TYPES["event_time"]),
    }
    found = pulsar_columns.decode_batches(encoded(pa.RecordBatch.from_pydict(columns), 0))
    expected = [None if us is None or not us // 1000 else us // 1000 * 1000 for us in times]
    assert column_of(found, "event_time").view(pa.int64()).to_pylist() == expected


@pytest.mark.parametrize("publish_ms", [2**62, 2**63 - 1, 2**63, 2**64 - 1])
def test_publish_times_that_were_stored_and_that_no_timestamp_reaches_are_the_last_one(publish_ms):
    batch = pulsar_batch.parse(lone(message(b"v"), publish_ms=publish_ms))
    assert pulsar_batch.fault_of_publish_time(batch) is not None
    (found,) = pulsar_columns.publish_times([batch])
    assert 0 < int(found) * 1000 < 2**63


def test_a_batch_is_the_bytes_that_the_protocol_says():
    said = MessageMetadata(producer_name="p", sequence_id=7, publish_time=1)
    assert pulsar_batch.build_batch(said, b"v") == bytes.fromhex(
        "0e01 85f66587 00000007 0a0170 1007 1801 76"
    )


DAMAGES = {
    "empty": lambda good: b"",
    "another magic": lambda good: b"\x0e\x02" + good[2:],
    "cut": lambda good: good[:-1],
    "another byte": lambda good: good[:-1] + bytes([good[-1] ^ 1]),
    "metadata beyond its end": lambda good: good[:6] + b"\x7f\xff\xff\xff" + good[10:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_batch_is_refused(damage):
    with pytest.raises(errors.UnsupportedFormat):
        rows_of(DAMAGES[damage](batch_of([message(b"v")])))


@pytest.mark.parametrize(
    "batch",
    [
        batch_of([message(b"v")], count=2),
        batch_of([message(b"v"), message(b"w")], count=1),
        batch_of([message(b"v")], compression=3, compress=lambda data: b"no zstd"),
        batch_of([message(b"v")], compression=2, compress=lambda data: zlib.compress(data + b"x")),
        batch_of([message(b"v")], compression=9),
        batch_of([message(b"v")], uncompressed=1 << 31, compression=3),
        batch_of([message(b"v")], encrypted=True),
    ],
    ids=["fewer", "more", "codec", "longer", "unknown codec", "too large", "encrypted"],
)
def test_a_batch_that_is_not_what_it_says_is_an_error_and_never_rows(batch):
    with pytest.raises(errors.UnsupportedFormat):
        rows_of(batch)


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_an_entry_that_ends_early_is_an_error(cut):
    entry = entry_of((2, batch_of([message(b"a"), message(b"b")])))[:-cut]
    with pytest.raises(errors.UnsupportedFormat):
        decode_entry(entry, decode_header(entry))[0]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("names_highest", [True, False])
def test_the_last_sequence_id_of_a_batch_is_that_of_its_last_message(codec, names_highest):
    compression, compress = CODECS[codec]
    batch = batch_of(
        [message(b"a"), message(None), message(b"c", "k")],
        sequence_id=70,
        names_highest=names_highest,
        compression=compression,
        compress=compress,
    )
    assert pulsar_batch.parse(batch).last_sequence_id == 72


def test_a_batch_that_cannot_be_read_has_the_sequence_id_that_it_names():
    for batch in (
        batch_of([message(b"a"), message(b"b")], sequence_id=7, names_highest=False, count=900),
        batch_of([message(b"a")] * 2, sequence_id=7, names_highest=False, encrypted=True),
    ):
        assert pulsar_batch.parse(batch).last_sequence_id == 7
