"""SENDs and receipts by hand, beside protobuf."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_ledger.broker.wire.commands import BaseCommand, MessageId, command
from spark_ledger.broker.wire.frames import encode
from spark_ledger.broker.wire.sends import Send, receipts, send_of
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata
from tests.kit.pulsar_batches import batch_of, chunked, lone, message

NUMBERS = st.one_of(
    st.integers(0, 300), st.integers(0, 2**64 - 1), st.sampled_from([2**63 - 1, 2**63, 2**64 - 1])
)
FIELDS = {
    "producer_id": NUMBERS,
    "sequence_id": NUMBERS,
    "num_messages": st.integers(-(2**31), 2**31 - 1),
    "txnid_least_bits": NUMBERS,
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


def by_protobuf(data):
    """The SEND that protobuf reads, or None."""
    try:
        found = BaseCommand.FromString(data)
    except DecodeError:
        return None
    if found.type != 6 or not found.HasField("send"):
        return None
    part = found.send
    ids = (part.producer_id, part.sequence_id, part.highest_sequence_id)
    return Send(*ids, part.is_chunk)


@settings(deadline=None, max_examples=300)
@given(SENDS, CUTS, st.binary(max_size=12))
def test_what_is_read_of_a_send_is_what_protobuf_reads(sent, changes, after):
    data = damaged(sent.SerializeToString(), changes)
    found = send_of(b"before" + data + after, 6, 6 + len(data))
    assert found is None or found == by_protobuf(data)


@pytest.mark.parametrize("size", [5, 127, 128, 2**40])
def test_what_clients_send_as_a_rule_is_read_by_hand(size):
    said = command("send", producer_id=3, sequence_id=size, num_messages=1).SerializeToString()
    assert send_of(said, 0, len(said)) == Send(3, size, 0, False)
    for one in (lone(message(b"x"), sequence_id=size), lone(message(b"x" * 9000, key="k"))):
        assert pulsar_batch.lone_of(one, numbered=True) is not None


METADATA = st.builds(
    MessageMetadata,
    producer_name=st.text(max_size=4),
    sequence_id=NUMBERS,
    publish_time=NUMBERS,
    partition_key=st.one_of(st.none(), st.text(max_size=4)),
    event_time=st.one_of(st.none(), NUMBERS),
    compression=st.one_of(st.none(), st.integers(0, 4)),
    num_messages_in_batch=st.one_of(st.none(), st.integers(0, 3)),
    highest_sequence_id=st.one_of(st.none(), NUMBERS),
    uuid=st.one_of(st.none(), st.text(max_size=2)),
)


@settings(deadline=None, max_examples=300)
@given(METADATA, CUTS, st.booleans())
def test_what_is_read_of_a_lone_message_is_what_protobuf_reads(said, changes, whole):
    data = pulsar_batch.built(said, b"value")
    if not whole:  # what its metadata says is damaged, and its checksum is right
        end = len(data) - len(b"value")
        head = damaged(data[6:end], changes)
        crc = pulsar_batch.crc32c(head + b"value").to_bytes(4, "big")
        data = data[:2] + crc + head + b"value"
    found = pulsar_batch.lone_of(data, numbered=True)
    if found is None:
        return
    parsed = pulsar_batch.parse(data, check=True)
    assert found == (parsed.metadata.producer_name, parsed.last_sequence_id)
    assert not (parsed.batched or parsed.is_chunk or parsed.encrypted)
    assert parsed.plausible and not parsed.metadata.HasField("txnid_most_bits")


def test_what_is_no_lone_message_or_damaged_is_not_read_by_hand():
    data = lone(message(b"abc"))
    assert pulsar_batch.lone_of(data, numbered=True) == ("p", 0)
    others = [data[:-1] + b"d", data[:15], b"", b"\x0e\x43" + data[2:], batch_of([message(b"a")])]
    for one in [*others, chunked(b"ab", 2)[0], lone(message(b"a", properties={"a": "b"}))]:
        assert pulsar_batch.lone_of(one, numbered=True) is None


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
