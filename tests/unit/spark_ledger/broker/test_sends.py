"""SENDs and receipts by hand, beside protobuf."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_ledger import errors
from spark_ledger.broker.wire.commands import BaseCommand, MessageId, command
from spark_ledger.broker.wire.frames import PulsarFrameReader, encode
from spark_ledger.broker.wire.sends import Messages, Send, Shape, entries_of, receipts
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.pulsar_batch import varint
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata
from tests.kit.pulsar_batches import batch_of, chunked, lone, message

NUMBERS = st.one_of(
    st.integers(0, 300), st.integers(0, 2**64 - 1), st.sampled_from([2**63 - 1, 2**63, 2**64 - 1])
)
FIELDS = {
    "producer_id": NUMBERS,
    "sequence_id": NUMBERS,
    "num_messages": st.integers(-(2**31), 2**31 - 1),
    "txnid_most_bits": NUMBERS,
    "highest_sequence_id": NUMBERS,
    "is_chunk": st.booleans(),
}
SENDS = st.fixed_dictionaries({}, optional=FIELDS).map(lambda said: command("send", **said))
CUTS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=3)


def damaged(data, changes):
    found = bytearray(data)
    for at, byte in changes:
        if found:
            found[at % len(found)] = byte
    return bytes(found)


def by_protobuf(command_, batch):
    """How a lone message was sent, and the sequence id that it says; None of any other frame."""
    try:
        found = BaseCommand.FromString(command_)
        parsed = pulsar_batch.parse(batch, check=True)
    except (DecodeError, errors.BadEntry):
        return None
    if found.type != 6 or not found.HasField("send"):
        return None
    said, part = parsed.metadata, found.send
    if parsed.batched or parsed.is_chunk or said.HasField("txnid_most_bits"):
        return None
    if pulsar_batch.fault_of(parsed) is not None:
        return None
    if part.HasField("txnid_most_bits"):
        return None
    ids = (part.producer_id, part.sequence_id, part.highest_sequence_id)
    return Send(*ids, part.is_chunk), said.producer_name, parsed.last_sequence_id


def stream_of(frames):
    return PulsarFrameReader().split(b"".join(frames))


def read_of(shape, frames, *, size_max=1 << 20, after=-1, batch_max=1 << 20):
    return shape.read(*stream_of(frames), 0, size_max, after, batch_max)


def sent(producer_id, sequence_id, batch, **said):
    ids = {"producer_id": producer_id, "sequence_id": sequence_id, **said}
    return encode(command("send", **ids), batch)


METADATA = st.builds(
    MessageMetadata,
    producer_name=st.sampled_from(["p", "other", "é"]),
    sequence_id=NUMBERS,
    publish_time=st.one_of(st.none(), NUMBERS),
    partition_key=st.one_of(st.none(), st.text(max_size=4)),
    partition_key_b64_encoded=st.one_of(st.none(), st.booleans()),
    event_time=st.one_of(st.none(), NUMBERS),
    compression=st.one_of(st.none(), st.integers(0, 6)),
    uncompressed_size=st.one_of(st.none(), st.integers(0, 2**32 - 1), st.integers(0, 2000)),
    num_messages_in_batch=st.one_of(st.none(), st.integers(0, 3)),
    highest_sequence_id=st.one_of(st.none(), NUMBERS),
    uuid=st.one_of(st.none(), st.text(max_size=2)),
)


@settings(deadline=None, max_examples=400)
@given(
    NUMBERS,
    st.sampled_from(["p", "other"]),
    st.integers(0, 300),
    SENDS,
    METADATA,
    CUTS,
    CUTS,
    st.booleans(),
)
def test_what_is_read_is_what_protobuf_reads(
    producer_id, name, number, said, metadata, cuts, more_cuts, alike
):
    shape = Shape.of(Send(producer_id, number, 0, False), True, name)
    if alike:  # what is damaged is near to what is read
        said = command("send", producer_id=producer_id, sequence_id=number, num_messages=1)
        metadata = MessageMetadata(producer_name=name, sequence_id=number, publish_time=1000)
    whole = pulsar_batch.build_batch(metadata, b"value")
    head = damaged(whole[6 : -len(b"value")], more_cuts)
    crc = pulsar_batch.crc32c(head + b"value").to_bytes(4, "big")  # of what is damaged, too
    batch = whole[:2] + crc + head + b"value"
    body = damaged(said.SerializeToString(), cuts)
    sizes = (4 + len(body) + len(batch)).to_bytes(4, "big") + len(body).to_bytes(4, "big")
    found = read_of(shape, [sizes + body + batch, sent(1, 1, lone(message(b"x")))])
    if found.sends and found.batches[0] == batch:
        expected = by_protobuf(body, batch)
        assert (found.sends[0], name, found.sequence_ids[0]) == expected
        unpacked = pulsar_batch.unpacked_bytes(pulsar_batch.parse(batch))
        assert max(found.unpacked, len(b"value")) == max(unpacked, len(b"value"))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**63 - 10), st.sampled_from([1, 2]), st.booleans())
def test_lone_messages_that_follow_each_other_are_read_by_hand(first, step, counted):
    counted = {"num_messages": 1} if counted else {}
    numbers = [first + step * i for i in range(4)]
    numbers = [one for one in numbers if len(varint(one)) == len(varint(first))]
    batches = [lone(message(b"x" * (one % 7), key="k"), sequence_id=one) for one in numbers]
    frames = [sent(3, *one, **counted) for one in zip(numbers, batches, strict=True)]
    found = read_of(Shape.of(Send(3, first, 0, False), bool(counted), "p"), frames)
    assert [one.sequence_id for one in found.sends] == found.sequence_ids == numbers
    assert found.batches == batches


def test_reading_ends_where_a_frame_looks_otherwise():
    def good(number):
        return sent(3, number, lone(message(b"abc"), sequence_id=number), num_messages=1)

    data = lone(message(b"abc"), sequence_id=7)
    others = {
        "another producer": sent(4, 7, data, num_messages=1),
        "a batch of several": sent(3, 7, batch_of([message(b"a")]), num_messages=1),
        "a chunk": sent(3, 7, chunked(b"ab", 2)[0], num_messages=1),
        "with properties": sent(3, 7, lone(message(b"a", properties={"a": "b"})), num_messages=1),
        "damaged": sent(3, 7, data[:-1] + b"d", num_messages=1),
        "cut": sent(3, 7, data[:15], num_messages=1),
        "too large": sent(3, 7, lone(message(bytes(3000)), sequence_id=7), num_messages=1),
        "its sequence id again": good(6),
        "another magic": sent(3, 7, b"\x0e\x43" + data[2:], num_messages=1),
        "a highest id": sent(3, 7, data, num_messages=1, highest_sequence_id=9),
        "without its number": sent(3, 7, data),
        "no batch": sent(3, 7, b"", num_messages=1),
        "another command": encode(command("ping")),
    }
    shape = Shape.of(Send(3, 5, 0, False), True, "p")
    for what, other in others.items():
        found = read_of(shape, [good(5), good(6), other, good(8)], size_max=2000, after=4)
        assert found.sequence_ids == [5, 6], what
    assert Shape.of(Send(3, 5, 0, False), True, "é") is None


@settings(deadline=None, max_examples=100)
@given(
    NUMBERS,
    st.integers(-1, 2**31 - 1),
    st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS), max_size=5),
)
def test_receipts_are_the_bytes_that_protobuf_makes(ledger, partition, batches):
    expected, given_ = [], []
    for producer_id, sequence_id, highest, entry in batches:
        place = MessageId(ledgerId=ledger, entryId=entry, partition=partition)
        ids = {"producer_id": producer_id, "sequence_id": sequence_id, "message_id": place}
        if highest:
            ids["highest_sequence_id"] = highest
        expected.append(encode(command("send_receipt", **ids)))
        given_.append((Send(producer_id, sequence_id, highest, False), entry))
    assert receipts(given_, ledger, partition) == b"".join(expected)


@settings(deadline=None, max_examples=100)
@given(
    NUMBERS,
    NUMBERS,
    st.integers(-1, 2**31 - 1),
    NUMBERS,
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=12),
    st.none() | NUMBERS,
)
def test_messages_are_the_bytes_that_protobuf_makes(
    consumer, ledger, partition, entry, acks, epoch
):
    place = MessageId(ledgerId=ledger, entryId=entry, partition=partition)
    ids = {"consumer_id": consumer, "message_id": place, "redelivery_count": 0}
    if epoch is not None:
        ids["consumer_epoch"] = epoch
    expected = command("message", **ids, ack_set=acks).SerializeToString()
    messages = Messages(consumer, ledger, partition)
    messages.epoch = epoch
    assert messages.command(entry, acks) == expected


@pytest.mark.parametrize("version", [b"", bytes(8), bytes(127)])
def test_lone_messages_with_the_version_of_a_schema_are_read_by_hand(version):
    said = MessageMetadata(producer_name="p", sequence_id=1, publish_time=7, partition_key="k")
    field = b"\x82\x01" + varint(len(version)) + version
    versioned = MessageMetadata.FromString(said.SerializeToString() + field)
    batch = pulsar_batch.build_batch(versioned, b"x")
    frame = encode(command("send", producer_id=3, sequence_id=1, num_messages=1), batch)
    found = read_of(Shape(3, 1, True, "p"), [frame])
    assert (found.batches, found.sequence_ids) == ([batch], [1])
    cut = damaged(batch, [(batch.index(field) + 2, 0x40)])  # it says more than there is
    frame = encode(command("send", producer_id=3, sequence_id=1, num_messages=1), cut)
    assert read_of(Shape(3, 1, True, "p"), [frame]).batches == []


IDS = st.builds(
    MessageId,
    ledgerId=st.sampled_from([8, 300, 2**40]),
    entryId=st.one_of(st.integers(0, 2**21), st.sampled_from([2**63 - 1, 2**64 - 1])),
    partition=st.sampled_from([-1, 0]) | st.none(),
    batch_index=st.sampled_from([-1, 0]) | st.none(),
    ack_set=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=1),
)
PLAIN_IDS = st.integers(1, 9).flatmap(
    lambda width: st.lists(st.integers(2 ** (7 * width - 7), 2 ** (7 * width) - 1), min_size=10)
)


@settings(max_examples=300)
@given(ids=st.lists(IDS, max_size=12), entries=PLAIN_IDS, consumer_id=NUMBERS, place=NUMBERS)
def test_the_entries_of_an_ack_are_read_if_its_ids_have_nothing_else(
    ids, entries, consumer_id, place
):
    def read(ids):
        fields = {"consumer_id": consumer_id, "ack_type": 0, "request_id": 3}
        return entries_of(command("ack", message_id=ids, **fields).ack, 300)

    plain = [MessageId(ledgerId=300, entryId=entry) for entry in entries]
    assert read(plain) == entries
    place %= len(plain)
    for id_ in ids:
        only_entry = MessageId(ledgerId=300, entryId=id_.entryId)
        expected = [*entries[:place], id_.entryId, *entries[place:]] if id_ == only_entry else []
        assert read([*plain[:place], id_, *plain[place:]]) in ([], expected)
    assert read(plain[:9]) == []
