"""The slot of each message's key, which decides the Key_Shared consumer of the message; and the
batches that are cut out of a batch of Spark. Pure.

Always true: equal key bytes have one slot, whether Spark or a client of Pulsar wrote them. A
client's batch has one slot, as with Pulsar: that of its ordering key, else of its key, else of its
producer and sequence id. Each row of Spark has its own slot; a row without a key has the slot of
its block of offsets, so that neighbouring rows stay together. A cut batch has neighbouring rows,
byte for byte, and its id is the offset of its first message.
"""

from base64 import b64decode
from binascii import Error as BadBase64
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mmh3
import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from bookie_server.api.entry import Buffer
from spark_ledger import errors
from spark_ledger.broker.log.tail import Stored
from spark_ledger.topic.entry import pulsar_batch, pulsar_codecs
from spark_ledger.topic.entry.pulsar_columns import keys_in
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata

SLOTS = 65_536
_POSITIVE = 0x7FFFFFFF
NO_KEY = b"NONE_KEY"
BLOCK_ROWS = 8
"""How many neighbouring rows without a key share a slot."""
_SPREAD = 40_503
"""SLOTS divided by the golden ratio: successive blocks are spread evenly over all slots."""
KEPT_ROWS_MAX = 50_000
"""How many rows have their slots kept in memory: some 100 bytes each."""


def slot_of(key: bytes) -> int:
    """From 1 to SLOTS - 1: 0 means "no slot" to Pulsar."""
    return (mmh3.hash(key, 0, False) & _POSITIVE) % SLOTS or 1


def key_of(metadata: MessageMetadata) -> bytes:
    """The bytes of the key by which a batch with this metadata is dispatched."""
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


class KeyedBatch(NamedTuple):
    """`slots` has one slot for all messages, or one for each message. In the second case, `ends`
    has the position in the payload at which each message ends, `distinct` has each slot once, and
    `indices` has for each message the index of its slot in `distinct`."""

    slots: tuple[int, ...]
    ends: Sequence[int] = ()
    distinct: Sequence[int] = ()
    indices: npt.NDArray[np.int64] = np.zeros(0, np.int64)
    metadata: MessageMetadata | None = None
    """The metadata of the batch, or of the batch that was last cut out of it."""
    first_id: int = 0
    """The sequence id of the first message."""
    payload_at: int = 0


def keyed(batch: Stored) -> KeyedBatch:
    """The batch with its slots; a batch that cannot be decoded has one slot."""
    if batch.messages == 1 and not batch.batched and batch.is_plain:
        return KeyedBatch((slot_of_lone(batch),))
    data: Buffer = batch.data
    try:
        if not batch.is_plain:
            if pulsar_batch.is_earlier_chunk(data) or pulsar_batch.is_last_chunk(data):
                data = pulsar_batch.chunk_in(data)
            data = pulsar_batch.chunks_of(data)[0]
        parsed = pulsar_batch.parse(memoryview(data))
        metadata = parsed.metadata
        if not batch.batched:
            return KeyedBatch((_slot_by(metadata, batch.offset),))
        if not _has_rows(metadata):
            return KeyedBatch((slot_of(key_of(metadata)),))
        keys, ends = keys_in(parsed)
    except errors.BadEntry:
        return KeyedBatch((slot_of(NO_KEY),))
    slots = [
        slot_of_offset(offset) if key is None else slot_of(key)
        for offset, key in enumerate(keys, batch.offset)
    ]
    return keyed_by(slots)._replace(
        ends=ends,
        metadata=metadata,
        first_id=metadata.sequence_id,
        payload_at=parsed.payload_at,
    )


def _has_rows(metadata: MessageMetadata) -> bool:
    """Whether the batch with this metadata has rows of Spark whose keys can be read."""
    is_of_spark = metadata.producer_name == pulsar_batch.PRODUCER and not metadata.encryption_keys
    return is_of_spark and metadata.compression == pulsar_codecs.NONE


def slot_of_lone(batch: Stored) -> int:
    """The slot of a message outside of batches, in one frame."""
    data, begin = batch.data, pulsar_batch.HEAD.size
    end = begin + int.from_bytes(data[begin - 4 : begin], "big")
    try:
        return _slot_by(MessageMetadata.FromString(data[begin:end]), batch.offset)
    except DecodeError:
        return slot_of(NO_KEY)


def _slot_by(metadata: MessageMetadata, offset: int) -> int:
    """The slot of a message outside of batches with this metadata."""
    if not metadata.HasField("partition_key") and _has_rows(metadata):
        return slot_of_offset(offset)
    return slot_of(key_of(metadata))


def keyed_by(slots: Sequence[int]) -> KeyedBatch:
    """The KeyedBatch of a batch whose messages have these slots."""
    distinct, indices = np.unique(np.array(slots, np.int64), return_inverse=True)
    return KeyedBatch(tuple(slots), (), distinct.tolist(), indices)


def slots_of(batch: Stored) -> tuple[int, ...]:
    """The slots of a batch's messages: one slot for all messages, or one for each."""
    return keyed(batch).slots


def slot_of_offset(offset: int) -> int:
    """The slot of a row of Spark without a key."""
    return offset // BLOCK_ROWS * _SPREAD % SLOTS or 1


class Place(NamedTuple):
    """The key under which a batch is kept. Its offset is not enough: batches may be cut from an
    entry in two ways."""

    offset: int
    messages: int
    bytes: int


class KeyedBatches:
    """A cache of the batches that were used last, of KEPT_ROWS_MAX rows at most: a batch whose rows
    go to several consumers is used several times."""

    def __init__(self, keyed: Callable[[Stored], KeyedBatch] = keyed) -> None:
        self._keyed = keyed
        self._kept: OrderedDict[Place, KeyedBatch] = OrderedDict()
        self.rows = 0

    def of(self, batch: Stored) -> KeyedBatch:
        if batch.messages == 1:
            return self._keyed(batch)
        place = Place(batch.offset, batch.messages, len(batch.data))
        keyed_batch = self._kept.get(place)
        if keyed_batch is None:
            keyed_batch = self._keyed(batch)
            if len(keyed_batch.slots) > 1:
                self._keep(place, keyed_batch)
        return keyed_batch

    def _keep(self, place: Place, batch: KeyedBatch) -> None:
        self._kept[place] = batch
        self.rows += len(batch.slots)
        while self.rows > KEPT_ROWS_MAX and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self.rows -= len(oldest.slots)

    def cut(self, batch: Stored, offset: int, messages: int) -> bytes:
        """The messages from `offset` on as a new batch."""
        keyed_batch = self.of(batch)
        metadata, ends = keyed_batch.metadata, keyed_batch.ends
        assert metadata is not None, "only Spark's batches are cut"
        index = offset - batch.offset
        begin = ends[index - 1] if index else 0
        metadata.sequence_id = keyed_batch.first_id + index
        metadata.highest_sequence_id = metadata.sequence_id + messages - 1
        metadata.num_messages_in_batch = messages
        payload = memoryview(batch.data)[keyed_batch.payload_at :]
        return pulsar_batch.build_batch(metadata, payload[begin : ends[index + messages - 1]])

    def has_rows_of_spark(self, batch: Stored) -> bool:
        """Whether the batch has several rows of Spark, which `lone` can turn into messages."""
        return batch.messages > 1 and len(self.of(batch).ends) > 0

    def lone(self, batch: Stored, offset: int) -> bytes:
        """The row at the offset as a message outside of a batch."""
        keyed_batch = self.of(batch)
        metadata, ends = keyed_batch.metadata, keyed_batch.ends
        assert metadata is not None, "only Spark's batches are taken apart"
        index, payload_at = offset - batch.offset, keyed_batch.payload_at
        begin = payload_at + (ends[index - 1] if index else 0)
        row = bytes(batch.data[begin : payload_at + ends[index]])
        ((single, value_at),) = pulsar_batch.messages_in(row, 1)
        parts = (b"", single.SerializeToString(), row[value_at:])
        sequence_id = keyed_batch.first_id + index
        (message,) = pulsar_batch.lone_message(
            parts, metadata.publish_time, sequence_id, metadata.schema_version
        )
        return message
