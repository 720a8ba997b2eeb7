"""Messages found together are those that protobuf finds one by one, or they are found that way."""

import struct
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_ledger import errors
from spark_ledger.topic.entry import pulsar_batch, pulsar_columns
from spark_ledger.topic.entry.message_batch import CLIENT_VERSION, PRODUCER_NAME, SEQUENCE_ID
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata, SingleMessageMetadata
from tests.kit.pulsar_batches import batch_of, lone, message

SETS = [["value"], ["key", "value"], ["headers"], ["event_time", PRODUCER_NAME], [SEQUENCE_ID]]
SIZE = struct.Struct(">I")


def varint(number):
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def text(tag, value):
    return bytes([tag]) + varint(len(value)) + value


PAIRS = st.tuples(st.binary(max_size=3), st.binary(max_size=200))
VALUES = st.binary(max_size=20) | st.just(bytes(40)) | st.just(b"\0\0\0\x02\x18\1x\0\0\0\x02\x18\0")
FIELDS = {
    "size": lambda size: b"\x18" + varint(size),
    "key": lambda key: text(0x12, key),
    "event": lambda ms: b"\x28" + varint(ms),
    "base64": lambda on: b"\x30" + varint(on),
    "ordering": lambda key: text(0x3A, key),
    "compacted": lambda on: b"\x20" + varint(on),
    "sequence": lambda one: b"\x40" + varint(one),
    "null": lambda on: b"\x48" + varint(on),
    "null key": lambda on: b"\x50" + varint(on),
    "unknown": lambda some: text(0x62, some),
}
TAIL = st.fixed_dictionaries(
    {},
    optional={
        "compacted": st.integers(0, 1),
        "event": st.integers(0, 2**55),
        "ordering": st.binary(max_size=5),
        "sequence": st.integers(0, 2**64 - 1) | st.integers(0, 1000),
        "null": st.integers(0, 2),
        "null key": st.integers(0, 1),
    },
)


@st.composite
def messages(draw, odd):
    """The bytes of a message as some client might make them."""
    value = draw(VALUES)
    head = b"".join(
        text(0x0A, text(0x0A, name) + text(0x12, said))
        for name, said in draw(st.lists(PAIRS, max_size=3))
    )
    fields = []
    if draw(st.booleans()):
        fields.append(FIELDS["key"](draw(st.binary(max_size=140))))
    fields.append(FIELDS["size"](len(value)))
    fields += [FIELDS[name](one) for name, one in draw(TAIL).items()]
    if odd and draw(st.booleans()):
        fields = draw(st.permutations([*fields, *draw(st.lists(st.sampled_from(fields)))]))
    if odd and draw(st.booleans()):
        fields.append(FIELDS["unknown"](b"x"))
    head += b"".join(fields)
    return SIZE.pack(len(head)) + head + value


@st.composite
def batches(draw, odd=False, batched=True):
    if not batched or draw(st.integers(0, 3)) == 0:
        one = message(draw(VALUES), draw(st.none() | st.text(max_size=4)), {"a": "b"}, 5)
        return lone(one, producer=draw(st.sampled_from("pq")), sequence_id=7)
    parts = draw(st.lists(messages(odd), min_size=1, max_size=6))
    metadata = MessageMetadata(
        producer_name=draw(st.sampled_from("pq")),
        sequence_id=draw(st.integers(0, 2**64 - 1)),
        publish_time=1,
        num_messages_in_batch=len(parts),
    )
    return pulsar_batch.build_batch(metadata, b"".join(parts))


def one_by_one(found, columns):
    payloads = [pulsar_batch.payload_of(batch) for batch in found]
    wanted = set(pulsar_columns.ALL_TYPES if columns is None else columns)
    return pulsar_columns.decode_one_by_one(found, payloads, wanted)


def together(found, columns=None):
    """None: they are odd."""
    wanted = set(pulsar_columns.ALL_TYPES if columns is None else columns)
    try:
        payloads = [pulsar_batch.payload_of(batch) for batch in found]
        made = pulsar_columns.decode_together(found, payloads, wanted)
    except pulsar_columns.OddMessages:
        return None
    made.validate()
    return made


def shown(made):
    """With text as bytes: a client may send text that is not UTF-8."""

    def as_bytes(column):
        if pa.types.is_string(column.type):
            return column.view(pa.binary()).to_pylist()
        if not pa.types.is_list(column.type):
            return (
                column.cast(pa.int64()) if column.type == pa.timestamp("us", "UTC") else column
            ).to_pylist()
        pairs, ends = column.values, column.offsets.to_pylist()
        names, texts = as_bytes(pairs.field(0)), as_bytes(pairs.field(1))
        rows = [list(zip(names[a:b], texts[a:b], strict=True)) for a, b in pairwise(ends)]
        there = column.is_valid().to_pylist()
        return [row if held else None for row, held in zip(rows, there, strict=True)]

    return {name: as_bytes(made.column(name)) for name in made.schema.names}


@settings(deadline=None, max_examples=200)
@given(st.lists(batches(), min_size=1, max_size=4), st.sampled_from([None, *SETS]))
def test_messages_found_together_are_those_that_are_found_one_by_one(sent, columns):
    found = [pulsar_batch.parse(one, check=True) for one in sent]
    made = together(found, columns)
    if made is not None:
        assert shown(made) == shown(one_by_one(found, columns))


@settings(deadline=None, max_examples=200)
@given(st.lists(batches(odd=True), min_size=1, max_size=3))
def test_odd_messages_are_found_as_protobuf_says_or_left_to_it(sent):
    found = [pulsar_batch.parse(one, check=True) for one in sent]
    made = together(found)
    if made is not None:
        assert shown(made) == shown(one_by_one(found, None))
    assert shown(pulsar_columns.decode_batches(found)) == shown(one_by_one(found, None))


@settings(deadline=None, max_examples=200)
@given(batches(), st.data())
def test_damage_is_never_rows_that_protobuf_does_not_find(sent, data):
    found = pulsar_batch.parse(sent)
    damaged = bytearray(sent)
    at = data.draw(st.integers(found.payload_at, len(sent)))
    if at == len(sent):
        damaged.append(data.draw(st.integers(0, 255)))
    else:
        damaged[at] = data.draw(st.integers(0, 255))
    found = [pulsar_batch.parse(bytes(damaged))]
    made = together(found)
    if made is not None:
        assert shown(made) == shown(one_by_one(found, None))


def test_messages_have_the_number_of_the_schema_that_their_batch_names():
    names = [b"", (7).to_bytes(8, "big"), b"\0\x07", bytes([255] * 8)]
    for count in (2, 100):
        sent = [batch_of([message(b"v")] * count, schema_version=name) for name in names]
        found = [pulsar_batch.parse(batch) for batch in sent]
        columns = pulsar_columns.decode_batches(found, [CLIENT_VERSION])
        expected = [number for number in (None, 7, -1, -1) for _ in range(count)]
        assert columns.column(CLIENT_VERSION).to_pylist() == expected
        assert not pulsar_columns.decode_batches(found[:1], [CLIENT_VERSION]).schema.names


def test_damage_in_properties_that_are_not_asked_for_leaves_the_other_columns_as_they_are():
    sent = bytearray(batch_of([message(b"v%d" % i, f"k{i}", {"n": ""}) for i in range(300)]))
    sent[sent.rindex(b"\x0a\x01n\x12\x00") + 3] = 0  # the tag of the last one's text
    found = [pulsar_batch.parse(bytes(sent))]
    with pytest.raises(errors.BadEntry):
        pulsar_columns.decode_batches(found)
    made = pulsar_columns.decode_batches(found, ["key", "value"])
    assert made.column("value").to_pylist() == [b"v%d" % i for i in range(300)]
    assert made.column("key").to_pylist() == [b"k%d" % i for i in range(300)]


def test_what_usual_clients_send_is_found_together():
    full = [message(b"v" * i, f"k{i}", {"n": "1", "unit": "C"}, 2**41 + i) for i in range(300)]
    mixed = [
        message(None),
        message(b"\0" * 99),
        message(b"", ""),
        message(b"x", "eA==", base64=True),
    ]
    found = [
        pulsar_batch.parse(one)
        for one in (batch_of(full, sequence_id=10), lone(full[9]), batch_of(mixed), lone(mixed[0]))
    ]
    made = together(found)
    assert made is not None
    assert shown(made) == shown(one_by_one(found, None))
    assert made.column("value").null_count == 2
    assert made.column("key").to_pylist()[-2] == b"x"


def test_a_value_that_looks_like_messages_is_a_value():
    inner = b"".join(SIZE.pack(2) + b"\x18\0" for _ in range(5))
    sent = [message(inner, "k"), message(b"v"), message(inner, "l", {"a": "b"})]
    made = together([pulsar_batch.parse(batch_of(sent))])
    assert made is not None
    assert made.column("value").to_pylist() == [inner, b"v", inner]
    assert made.column("key").to_pylist() == [b"k", None, b"l"]
    assert made.column("headers").to_pylist() == [None, None, [{"key": "a", "value": b"b"}]]


def test_a_batch_that_ends_within_a_message_is_damaged_although_the_next_goes_on_there():
    whole = batch_of([message(b"v%d" % i) for i in range(200)], count=199)
    more = batch_of([message(b"w")], count=2)
    with pytest.raises(errors.UnsupportedFormat):
        pulsar_columns.decode_batches([pulsar_batch.parse(whole), pulsar_batch.parse(more)])


def test_a_name_that_is_not_utf_8_and_one_that_comes_twice_are_kept():
    said = SingleMessageMetadata(payload_size=0)
    head = text(0x0A, text(0x0A, b"\xff") + text(0x12, b"\xfe")) * 2 + said.SerializeToString()
    metadata = MessageMetadata(num_messages_in_batch=1)
    batch = pulsar_batch.parse(pulsar_batch.build_batch(metadata, SIZE.pack(len(head)) + head))
    expected = [[(b"\xff", b"\xfe")] * 2]
    assert shown(together([batch], ["headers"]))["headers"] == expected
    assert shown(one_by_one([batch], ["headers"]))["headers"] == expected


def test_the_producer_and_the_sequence_id_of_each_message_are_columns():
    sent = [
        batch_of([message(b"a")] * 150, producer="p", sequence_id=40),
        lone(message(b"b"), producer="q", sequence_id=3),
    ]
    found = [pulsar_batch.parse(one) for one in sent]
    made = pulsar_columns.decode_batches(found, [PRODUCER_NAME, SEQUENCE_ID])
    assert made.column(PRODUCER_NAME).to_pylist() == ["p"] * 150 + ["q"]
    assert made.column(SEQUENCE_ID).to_pylist() == [*range(40, 190), 3]
