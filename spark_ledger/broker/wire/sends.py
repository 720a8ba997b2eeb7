"""Frequent frames, read and made without protobuf: successive SENDs of lone messages, receipts,
MESSAGEs, ids in ACKs. Pure.

A lone message is one that its client sent outside of a batch. Frames take most of its time.
Protobuf reads the first SEND of a producer. The producer's later SENDs have the same shape: only
numbers and values differ. Always true: for a frame that is read here, protobuf would give the same
fields; a frame of another shape is left to protobuf. Frames made here have the bytes that protobuf
would make.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from bookie_server.api.entry import Buffer, crc32c
from spark_ledger.broker.wire.commands import unsigned
from spark_ledger.broker.wire.frames import SIZES, Span
from spark_ledger.topic.entry import pulsar_batch, pulsar_codecs
from spark_ledger.topic.entry.pulsar_batch import varint

KEY_BYTES = 6
"""The length of `Shape.key`: the beginning of a SEND's command, with a producer id up to 127."""
_RECEIPT, _MESSAGE = b"\x08\x07\x3a", b"\x08\x09\x4a"
"""How SEND_RECEIPT and MESSAGE begin in protobuf: the type, then the tag of the type's field."""
_NAME_BYTES_MAX = 127
_NUMBER_BYTES_MAX = 9
_TIME_BYTES_MAX = 7
"""The bytes of a publish time up to the year 19,800: a later time is left to protobuf."""
_METADATA_BYTES_MAX = 1024
"""Longer metadata is left to protobuf, which reads it faster than the loop in Python."""
ALIKE_IDS_MIN = 10
"""For fewer ids of an ACK numpy takes longer than a loop."""
UNPACKED_MAX = 4 << 20
"""Protobuf reads messages that have more bytes than this decompressed."""
_SMALL_BYTES = 4096
"""Up to this size a copy costs less than a view."""
_COMPRESSION, _UNCOMPRESSED_SIZE = 0x40, 0x48
_SEQUENCE_ID, _PUBLISH_TIME, _PARTITION_KEY, _EVENT_TIME = 0x10, 0x18, 0x32, 0x60
"""Tags of fields of a message's metadata: the field's number and its kind."""
_NUMBERS = frozenset((_SEQUENCE_ID, _PUBLISH_TIME, _COMPRESSION, _UNCOMPRESSED_SIZE, _EVENT_TIME))
_SCHEMA_VERSION = b"\x82\x01"
_KEY_IS_BASE64_FIELDS = (b"\x88\x01\x00", b"\x88\x01\x01")  # false, true


class Send(NamedTuple):
    producer_id: int
    sequence_id: int
    highest_sequence_id: int
    is_chunk: bool


@dataclass(slots=True)
class Alike:
    """SENDs of one shape that were read, their batches, and the sequence ids in the batches (0 if
    the caller does not ask for sequence ids)."""

    sends: list[Send] = field(default_factory=list)
    batches: list[bytes] = field(default_factory=list)
    sequence_ids: list[int] = field(default_factory=list)
    unpacked: int = 0
    """The size that the compressed batches have after they are decompressed."""


class Shape:
    """The shape of a producer's lone messages. `counted`: their SENDs have the field num_messages;
    `name` is the producer's name in their metadata."""

    def __init__(self, producer_id: int, sequence_id: int, counted: bool, name: str) -> None:
        self.name = name
        self.producer_id = producer_id
        self._rest = b"\x18\x01" if counted else b""
        ids = b"\x08" + varint(producer_id) + b"\x10"
        size = len(ids) + len(varint(sequence_id)) + len(self._rest)
        self._head = b"\x08\x06\x32" + varint(size) + ids
        self._command_bytes = 4 + size  # a SEND with a longer or shorter id has another shape
        self.key = self._head[:KEY_BYTES]
        self._metadata = b"\x0a" + varint(len(name)) + name.encode()

    @staticmethod
    def of(send: Send, counted: bool, name: str) -> "Shape | None":
        """The shape of a SEND; None: such messages are left to protobuf."""
        if not name.isascii() or len(name) > _NAME_BYTES_MAX:
            return None
        return Shape(send.producer_id, send.sequence_id, counted, name)

    def read(
        self,
        data: bytes,
        spans: Sequence[Span],
        at: int,
        size_max: int,
        after: int | None,
        batch_max: int,
    ) -> Alike:
        """The successive frames of this shape from span `at` on. Their batches have `size_max`
        bytes together, at most, and each has `batch_max`; the compressed batches have UNPACKED_MAX
        bytes at most, decompressed. The sequence ids in the messages are above `after` and rise: a
        frame with another id ends the read. `after` None: sequence ids are not read from
        messages."""
        alike, head, rest = Alike(), self._head, self._rest
        number, number_at = -1, len(head)
        for begin, batch_at, end in islice(spans, at, None):
            last = batch_at - len(rest)
            size = end - batch_at
            size_max -= size
            if (
                size_max < 0
                or size > batch_max
                or batch_at - begin != self._command_bytes
                or not data.startswith(head, begin)
                or not data.startswith(rest, last)
            ):
                break
            number += 1  # as a rule this is the next id; else the id is decoded
            if data[begin + number_at : last] != varint(number):
                number = _number(data[begin + number_at : last])
            batch = data[batch_at:end]
            sequence_id = _sequence_id_of(batch, self._metadata, after is not None, alike)
            if number < 0 or sequence_id < 0 or (after is not None and sequence_id <= after):
                break
            if after is not None:
                after = sequence_id
            alike.sends.append(tuple.__new__(Send, (self.producer_id, number, 0, False)))
            alike.batches.append(batch)
            alike.sequence_ids.append(sequence_id)
        return alike


def _number(data: bytes) -> int:
    """The number that these bytes encode; below 0: not a number, or a number of more than 63
    bits."""
    if not data or len(data) > _NUMBER_BYTES_MAX or data[-1] > 127:
        return -1
    number = 0
    for byte in reversed(data):
        number = number << 7 | byte & 127
    return number if varint(number) == data else -1


def _sequence_id_of(batch: bytes, metadata: bytes, numbered: bool, alike: Alike) -> int:
    """The sequence id of a lone message with metadata that begins with `metadata`; 0 unless
    `numbered`. Below 0: the batch is no such message, or is damaged. The decompressed size of a
    compressed batch is added to `alike.unpacked`."""
    begin = pulsar_batch.HEAD.size
    if not batch.startswith(metadata, begin):
        return -1
    magic, crc, size = pulsar_batch.HEAD.unpack_from(batch)
    at, end, sequence_id = begin + len(metadata), begin + size, 0
    kind = unpacked = 0
    if size > _METADATA_BYTES_MAX:
        return -1
    try:
        while at < end:
            tag = batch[at]
            at += 1
            if tag in _NUMBERS:
                first = at
                while batch[at] > 127:
                    at += 1
                    if at > end:
                        return -1
                at += 1
                if at - first > (_TIME_BYTES_MAX if tag == _PUBLISH_TIME else _NUMBER_BYTES_MAX):
                    return -1
                if (
                    numbered
                    and tag == _SEQUENCE_ID
                    and (sequence_id := _number(batch[first:at])) < 0
                ):
                    return -1
                if tag == _COMPRESSION:
                    kind = _number(batch[first:at])
                elif tag == _UNCOMPRESSED_SIZE:
                    unpacked = _number(batch[first:at])
            elif tag == _PARTITION_KEY and batch[at] <= 127:
                at += 1 + batch[at]
            elif batch[at - 1 : at + 2] in _KEY_IS_BASE64_FIELDS:
                at += 2
            elif batch.startswith(_SCHEMA_VERSION, at - 1) and batch[at + 1] <= 127:
                at += 2 + batch[at + 1]
            else:
                return -1
    except IndexError:
        return -1
    if magic != pulsar_batch.MAGIC or at != end or end > len(batch):
        return -1
    if kind:
        alike.unpacked += unpacked
        if kind not in pulsar_codecs.KINDS or unpacked < 0 or alike.unpacked > UNPACKED_MAX:
            return -1
        if pulsar_codecs.fault_of(kind, memoryview(batch)[end:], unpacked) is not None:
            return -1
    checked = pulsar_batch.CRC_START
    rest = batch[checked:] if len(batch) <= _SMALL_BYTES else memoryview(batch)[checked:]
    return sequence_id if crc32c(rest) == crc else -1


def receipts(batches: Iterable[tuple[Send, int]], ledger: int, partition: int) -> bytes:
    """The SEND_RECEIPT frames of batches. Each batch is given by its SEND and by the entry in its
    message id."""
    place = b"\x08" + varint(ledger) + b"\x10"
    partition_field = b"\x18" + varint(unsigned(partition))
    out: list[bytes] = []
    lengths = None  # `before` and `between` are made for numbers of these lengths
    before = between = b""
    for (producer_id, sequence_id, highest, _), entry in batches:
        number, at = varint(sequence_id), varint(entry)
        last = b"\x20" + varint(highest) if highest else b""
        if lengths != (producer_id, len(number), len(at), len(last)):
            lengths = (producer_id, len(number), len(at), len(last))
            producer = b"\x08" + varint(producer_id) + b"\x10"
            place_bytes = len(place) + len(at) + len(partition_field)
            between = b"\x1a" + varint(place_bytes) + place
            size = len(producer) + len(number) + len(between) - len(place) + place_bytes + len(last)
            command_size = len(_RECEIPT) + 1 + size
            head = SIZES.pack(command_size + 4, command_size)
            before = head + _RECEIPT + varint(size) + producer
        out += (before, number, between, at, partition_field, last)
    return b"".join(out)


def entries_of(ack: Any, ledger: int) -> list[int]:
    """The entries in the ids of an individual ACK, if all ids have this ledger, an entry, nothing
    else, and one length; else an empty list, as for fewer than ALIKE_IDS_MIN ids."""
    count = len(ack.message_id)
    if count < ALIKE_IDS_MIN:
        return []
    data, begin = ack.SerializeToString(), len(b"\x08\x10\x00") + len(varint(ack.consumer_id))
    size = data[begin + 1]
    front = b"".join((b"\x1a", bytes((size,)), b"\x08", varint(ledger), b"\x10"))
    width = size + 2 - len(front)
    if not 0 < width <= _NUMBER_BYTES_MAX or len(data) < begin + count * (size + 2):
        return []
    ids = np.frombuffer(data, np.uint8, count * (size + 2), begin).reshape(count, size + 2)
    digits = ids[:, len(front) :].astype(np.int64)
    is_last = np.arange(width) == width - 1
    if (ids[:, : len(front)] != np.frombuffer(front, np.uint8)).any():
        return []
    if ((digits < 128) != is_last).any():
        return []
    entries: list[int] = ((digits & 127) << (7 * np.arange(width))).sum(axis=1).tolist()
    return entries


class Messages:
    """The MESSAGEs of one consumer. `epoch`: how often the consumer has asked for all messages
    again; its client drops messages of an earlier epoch. None: the client does not count this."""

    def __init__(self, consumer_id: int, ledger: int, partition: int) -> None:
        self._consumer = b"\x08" + varint(consumer_id) + b"\x12"
        self._place = b"\x08" + varint(ledger) + b"\x10"
        self._partition_field = b"\x18" + varint(unsigned(partition))
        self.epoch: int | None = None

    def command(self, entry: int, ack_set: Iterable[int], redeliveries: int = 0) -> bytes:
        """The command that precedes a batch with this entry in its message id. `ack_set`: words
        with a bit for each message that is not acknowledged; empty: the consumer gets all
        messages."""
        at = varint(entry)
        place = varint(len(self._place) + len(at) + len(self._partition_field))
        words = b"".join(b"\x20" + varint(unsigned(word)) for word in ack_set)
        epoch = b"" if self.epoch is None else b"\x28" + varint(self.epoch)
        count = b"\x18" + varint(redeliveries)
        parts = (self._consumer, place, self._place, at, self._partition_field, count, words, epoch)
        body = b"".join(parts)
        return b"".join((_MESSAGE, varint(len(body)), body))

    def lone_frames(self, entries: Iterable[int], batches: Iterable[Buffer]) -> bytes:
        """The frames of messages that were not sent before, each with its command."""
        out: list[Buffer] = []
        at_bytes = size = -1  # lengths of the last message's entry and batch
        head = before = after = b""
        for entry, batch in zip(entries, batches, strict=True):
            at = varint(entry)
            if len(at) != at_bytes or len(batch) != size:
                at_bytes, size = len(at), len(batch)
                before, _, after = self.command(entry, ()).partition(self._place + at)
                before += self._place
                command_bytes = len(before) + at_bytes + len(after)
                head = SIZES.pack(command_bytes + 4 + size, command_bytes) + before
            out += (head, at, after, batch)
        return b"".join(out)
