"""The slot of each message's key, by which a Key_Shared consumer gets it. Pure.

Always true: equal key bytes have one slot, whichever world wrote them. A client's batch has the
slot of its metadata, as with Pulsar: its ordering key, else its key, else its producer and sequence
id. Of Spark's rows each has a slot of its own; a row without a key is spread by its offset.
"""

from base64 import b64decode
from binascii import Error as BadBase64
from collections.abc import Sequence

import mmh3

from spark_ledger import errors
from spark_ledger.broker.owner.tail import Stored
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.message_batch import KEY
from spark_ledger.topic.entry.pulsar_columns import decoded
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata

SLOTS = 65_536
_POSITIVE = 0x7FFFFFFF
NO_KEY = b"NONE_KEY"


def slot_of(key: bytes) -> int:
    """From 1 to SLOTS - 1: 0 means "no slot" to Pulsar."""
    return (mmh3.hash(key, 0, False) & _POSITIVE) % SLOTS or 1


def key_of(metadata: MessageMetadata) -> bytes:
    """The bytes of the key by which a batch with that metadata is dispatched."""
    if metadata.HasField("ordering_key"):
        return bytes(metadata.ordering_key)
    if metadata.HasField("partition_key"):
        key: str | bytes = metadata.partition_key  # bytes: not UTF-8
        text = key.encode() if isinstance(key, str) else key
        if not metadata.partition_key_b64_encoded:
            return text
        try:
            return b64decode(text, validate=True)
        except BadBase64:
            return text
    if metadata.producer_name:
        return f"{metadata.producer_name}-{metadata.sequence_id}".encode()
    return NO_KEY


def slots_of(batch: Stored) -> Sequence[int]:
    """The slots of a batch's messages: one slot for all messages, or one for each. A batch that
    cannot be decoded has one slot."""
    data = batch.data
    if pulsar_batch.is_earlier_chunk(data) or pulsar_batch.is_last_chunk(data):
        data = pulsar_batch.chunk_in(data)
    try:
        parsed = pulsar_batch.parse(pulsar_batch.chunks_of(data)[0])
        metadata = parsed.metadata
        is_of_spark = metadata.producer_name == pulsar_batch.PRODUCER
        if not is_of_spark or parsed.encrypted:
            return (slot_of(key_of(metadata)),)
        if not batch.batched:
            if metadata.HasField("partition_key"):
                return (slot_of(key_of(metadata)),)
            return (_slot_of_offset(batch.offset),)
        columns = decoded([parsed], (KEY,))
    except errors.BadEntry:
        return (slot_of(NO_KEY),)
    at = columns.schema.get_field_index(KEY)
    if at < 0:
        return [_slot_of_offset(batch.offset + i) for i in range(batch.messages)]
    keys = columns.column(at).to_pylist()
    return [
        _slot_of_offset(batch.offset + i) if key is None else slot_of(key)
        for i, key in enumerate(keys)
    ]


def _slot_of_offset(offset: int) -> int:
    return slot_of(offset.to_bytes(8, "little"))
