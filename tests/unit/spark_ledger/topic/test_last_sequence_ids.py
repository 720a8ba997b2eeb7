"""The last sequence id of a batch whose client does not name it: its messages are walked."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_ledger import errors
from spark_ledger.topic.entry import pulsar_batch, pulsar_columns
from spark_ledger.topic.entry.message_batch import SEQUENCE_ID
from spark_ledger.topic.entry.pulsar_batch import WALKED_BYTES_MAX, WALKED_MESSAGES_MAX, build_batch
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata, SingleMessageMetadata
from tests.unit.spark_ledger.topic.batches import CODECS

IDS = st.none() | st.integers(0, 300) | st.sampled_from([2**63 - 1, 2**63, 2**64 - 1])
MESSAGES = st.lists(st.tuples(IDS, st.binary(max_size=30), st.text(max_size=4)), max_size=9)
CUTS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=2)


def batch_with(codec, messages, sequence_id=7, cuts=(), count=None):
    """A batch of messages, each an id, a value and a property; `cuts` change bytes of it."""
    compression, compress = CODECS[codec]
    payload = bytearray()
    for number, value, text in messages:
        one = SingleMessageMetadata(payload_size=len(value), sequence_id=number)
        one.properties.add(key=text, value=text)
        head = one.SerializeToString()
        payload += struct.pack(">I", len(head)) + head + value
    for at, byte in cuts:
        if payload:
            payload[at % len(payload)] = byte
    said = MessageMetadata(
        producer_name="p",
        sequence_id=sequence_id,
        publish_time=1,
        num_messages_in_batch=len(messages) if count is None else count,
        compression=compression,
        uncompressed_size=len(payload),
    )
    return pulsar_batch.parse(build_batch(said, compress(bytes(payload))))


def of_columns(batch):
    """The highest sequence id of the column that protobuf finds message by message. (Batches of
    more than 128 messages are decoded together, which passes over damage in properties.)"""
    first = batch.metadata.sequence_id
    if batch.messages == 1:
        return first
    try:
        payloads = [pulsar_batch.payload_of(batch)]
        made = pulsar_columns.decode_one_by_one([batch], payloads, {SEQUENCE_ID})
        ids = made.column(SEQUENCE_ID).to_pylist()
    except errors.BadEntry:
        return first
    return max(first, *(number & 2**64 - 1 for number in ids))


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(sorted(CODECS)), MESSAGES, st.integers(0, 100), CUTS, st.sampled_from([1, 40])
)
def test_a_walk_finds_what_decoding_all_messages_finds(codec, messages, first, cuts, times):
    batch = batch_with(codec, messages * times, first, cuts)
    assert batch.last_sequence_id == of_columns(batch)


@pytest.mark.parametrize(
    ("codec", "count", "size", "walked"),
    [
        ("none", WALKED_MESSAGES_MAX, 1, True),
        ("none", WALKED_MESSAGES_MAX + 1, 1, False),
        ("zstd", 100, WALKED_BYTES_MAX // 101, True),
        ("zstd", 100, WALKED_BYTES_MAX // 100, False),
    ],
)
def test_what_takes_long_to_walk_has_a_fault(codec, count, size, walked):
    batch = batch_with(codec, [(None, bytes(size), "")] * count)
    fault = pulsar_batch.fault_of_walk(batch)
    assert (fault is None) is walked
    assert walked or f"a batch of {count} messages" in fault


def test_a_batch_that_names_its_highest_sequence_id_has_no_such_fault():
    batch = batch_with("none", [(None, b"x", "")] * (WALKED_MESSAGES_MAX + 1))
    batch.metadata.highest_sequence_id = 10**6
    assert pulsar_batch.fault_of_walk(batch) is None
    assert batch.last_sequence_id == 10**6
