"""Batches as Pulsar's producers send them: checked, decoded to columns, and made of columns. Pure.

pulsar_message.proto shows the bytes. Always true: a batch is stored and dispatched byte for byte;
what is decoded of it is exactly its messages in their order; sizes that a batch says of itself are
compared with what there is before they are used. A message without a key, or with a null one, has a
null key; one whose value is null (a tombstone) a null value; a property is a header; event time 0
means none. A batch that is encrypted cannot be decoded here: only its consumers can.
"""

import struct
import zlib
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError

from bookie_server.api.checksum import crc32c
from bookie_server.api.entry import Buffer
from spark_ledger import errors
from spark_ledger.topic.entry.arrow_arrays import of_list
from spark_ledger.topic.entry.message_batch import (
    EVENT_TIME,
    HEADERS,
    HEADERS_TYPE,
    KEY,
    TYPES,
    VALUE,
    Longs,
)
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata, SingleMessageMetadata

MAGIC = 0x0E01
UNCOMPRESSED_BYTES_MAX = 128 << 20
_HEAD = struct.Struct(">HII")  # magic, CRC, size of the metadata
_CRC_FROM = 6
_SIZE = struct.Struct(">I")
_NONE, _LZ4, _ZLIB, _ZSTD, _SNAPPY = range(5)
_ARROW_CODECS = {_LZ4: "lz4_raw", _ZSTD: "zstd", _SNAPPY: "snappy"}


class Damaged(errors.UnsupportedFormat):
    """Bytes that are no batch, or not what they say."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch with its metadata read; its payload, which may be compressed, begins at
    `payload_at` of `data`."""

    data: bytes | memoryview
    metadata: MessageMetadata
    payload_at: int

    @property
    def messages(self) -> int:
        return max(1, self.metadata.num_messages_in_batch) if self.batched else 1

    @property
    def batched(self) -> bool:
        """Whether its payload has metadata of each message."""
        return bool(self.metadata.HasField("num_messages_in_batch"))

    @property
    def plausible(self) -> bool:
        """Whether its payload can have so many messages: each takes some bytes."""
        size = max(int(self.metadata.uncompressed_size), len(self.data) - self.payload_at)
        return not self.batched or self.messages * _SIZE.size <= size

    @property
    def last_sequence_id(self) -> int:
        """That of its last message: of a batch the highest it names."""
        said = self.metadata
        return max(int(said.sequence_id), int(said.highest_sequence_id))

    @property
    def encrypted(self) -> bool:
        return len(self.metadata.encryption_keys) > 0


def parse(data: bytes | memoryview, *, check: bool = False) -> Batch:
    """The batch in `data`; with `check` its CRC is compared. Raises Damaged."""
    try:
        magic, crc, size = _HEAD.unpack_from(data)
    except struct.error as error:
        raise Damaged(f"a damaged batch of {len(data)} bytes: {error}") from error
    if magic != MAGIC:
        raise Damaged(f"a batch with magic {magic:#06x}, not {MAGIC:#06x}")
    end = _HEAD.size + size
    if end > len(data):
        raise Damaged(f"a damaged batch of {len(data)} bytes: {size} of metadata")
    if check and crc32c(memoryview(data)[_CRC_FROM:]) != crc:
        raise Damaged("a damaged batch: its checksum is another")
    try:
        metadata = MessageMetadata.FromString(bytes(data[_HEAD.size : end]))
    except DecodeError as error:
        raise Damaged(f"a damaged batch: {error}") from error
    return Batch(data, metadata, end)


def built(metadata: MessageMetadata, payload: bytes) -> bytes:
    """The bytes of a batch."""
    head = metadata.SerializeToString()
    rest = b"".join((_SIZE.pack(len(head)), head, payload))
    return b"".join((MAGIC.to_bytes(2, "big"), _SIZE.pack(crc32c(rest)), rest))


def decoded(batches: Sequence[Batch], columns: Collection[str] | None = None) -> pa.RecordBatch:
    """The messages of all, in order, in columns of message_batch.TYPES; those that are null in
    every row are left out, and so are those that are not among `columns`. Raises Damaged."""
    rows = _Rows(columns)
    for batch in batches:
        before = rows.count
        rows.add(batch)
        if rows.count - before != batch.messages:
            raise Damaged(f"a batch of {rows.count - before} messages says {batch.messages}")
    return rows.record_batch()


class _Rows:
    """Messages on their way into columns."""

    def __init__(self, columns: Collection[str] | None) -> None:
        self.count = 0
        self._wanted = {name for name in TYPES if columns is None or name in columns}
        self._values: list[bytes | memoryview | None] = []
        self._keys: list[bytes | None] = []
        self._event_ms: list[int] = []
        self._header_ends: list[int] = [0]
        self._names: list[str] = []
        self._texts: list[bytes] = []

    def add(self, batch: Batch) -> None:
        if batch.encrypted:
            raise errors.UnsupportedFormat(
                "a batch of encrypted messages was met",
                "Read the topic with a Pulsar consumer that has the key.",
            )
        data = payload_of(batch)
        if not batch.batched:
            self._take(batch.metadata, data)
            return
        try:
            self._take_all(data, batch.messages)
        except (struct.error, DecodeError) as error:
            raise Damaged(f"a damaged batch: {error}") from error

    def _take_all(self, data: bytes, messages: int) -> None:
        at, total = 0, len(data)
        take, read, size_at = self._take, SingleMessageMetadata.FromString, _SIZE.unpack_from
        value_only = self._wanted == {VALUE}
        for _ in range(messages):
            begin = at + 4 + size_at(data, at)[0]
            one = read(data[at + 4 : begin])
            at = begin + one.payload_size
            if not begin <= at <= total:
                raise Damaged(f"a damaged batch: a message of {one.payload_size} bytes")
            if value_only:
                self._values.append(None if one.null_value else data[begin:at])
            else:
                take(one, data[begin:at])
        if value_only:
            self.count += messages
        if at != total:
            raise Damaged(f"a damaged batch: {total - at} bytes after its last message")

    def _take(self, said: MessageMetadata | SingleMessageMetadata, value: bytes) -> None:
        self.count += 1
        wanted = self._wanted
        if VALUE in wanted:
            self._values.append(None if said.null_value else value)
        if KEY in wanted:
            self._keys.append(_key(said) if said.HasField("partition_key") else None)
        if EVENT_TIME in wanted:
            self._event_ms.append(said.event_time)
        if HEADERS in wanted:
            properties = said.properties
            if properties:
                self._names += [each.key for each in properties]
                self._texts += [each.value.encode() for each in properties]
            self._header_ends.append(len(self._names))

    def record_batch(self) -> pa.RecordBatch:
        made: dict[str, pa.Array] = {}
        if any(key is not None for key in self._keys):
            made[KEY] = of_list(self._keys, TYPES[KEY])
        if any(value is not None for value in self._values):
            made[VALUE] = of_list(self._values, TYPES[VALUE])
        if any(self._event_ms):
            made[EVENT_TIME] = _times(self._event_ms)
        if self._names:
            made[HEADERS] = self._headers()
        if not made:
            empty = pa.StructArray.from_buffers(pa.struct([]), self.count, [None])
            return pa.RecordBatch.from_struct_array(empty)
        return pa.RecordBatch.from_arrays(list(made.values()), names=list(made))

    def _headers(self) -> pa.Array:
        """A list for each message; null where it has no property."""
        pairs = pa.StructArray.from_arrays(
            [of_list(self._names, pa.string()), of_list(self._texts, pa.binary())],
            fields=list(HEADERS_TYPE.value_type),
        )
        ends = np.array(self._header_ends, dtype=np.int32)
        there = np.diff(ends) > 0
        bits = pa.py_buffer(np.packbits(there, bitorder="little"))
        offsets = pa.py_buffer(ends)
        return pa.Array.from_buffers(HEADERS_TYPE, self.count, [bits, offsets], children=[pairs])


def _key(said: MessageMetadata | SingleMessageMetadata) -> bytes | None:
    if said.null_partition_key:
        return None
    if said.partition_key_b64_encoded:
        try:
            return b64decode(said.partition_key, validate=True)
        except ValueError as error:
            raise Damaged(f"a damaged batch: a key that is not base64: {error}") from error
    key: str = said.partition_key
    return key.encode()


def _times(event_ms: list[int]) -> pa.Array:
    """Microseconds; null where the message has none."""
    try:
        ms = np.array(event_ms, dtype=np.int64)
    except OverflowError as error:
        raise Damaged(f"a damaged batch: an event time beyond 64 bits: {error}") from error
    there = pa.py_buffer(np.packbits(ms != 0, bitorder="little"))
    values = pa.py_buffer(np.ascontiguousarray(ms * 1000))
    return pa.Array.from_buffers(TYPES[EVENT_TIME], len(ms), [there, values])


def payload_of(batch: Batch) -> bytes:
    """What a batch says, decompressed. Raises Damaged."""
    data = memoryview(batch.data)[batch.payload_at :]
    kind, size = batch.metadata.compression, batch.metadata.uncompressed_size
    if kind == _NONE:
        return bytes(data)
    if size > UNCOMPRESSED_BYTES_MAX:
        raise Damaged(f"a batch of {size} bytes, at most {UNCOMPRESSED_BYTES_MAX} are taken")
    if not size:
        return b""
    return _decompressed(kind, data, size)


def _decompressed(kind: int, data: memoryview, size: int) -> bytes:
    try:
        if kind == _ZLIB:
            found = zlib.decompressobj().decompress(data, size + 1)
        elif kind in _ARROW_CODECS:
            codec = pa.Codec(_ARROW_CODECS[kind])
            found = codec.decompress(data, decompressed_size=size, asbytes=True)
        else:
            raise Damaged(f"a batch with the unknown compression {kind}")
    except (zlib.error, pa.ArrowException, OSError) as error:
        raise Damaged(f"a damaged batch: {error}") from error
    if len(found) != size:
        raise Damaged(f"a batch of {len(found)} bytes says {size}")
    return found


# -- several batches in an entry ---------------------------------------------------------------

_FRAME = struct.Struct("<II")


def framed(batches: Sequence[tuple[int, bytes]]) -> list[Buffer]:
    """The body of an entry that has these batches, of so many messages each; see message_batch."""
    parts: list[Buffer] = []
    for messages, data in batches:
        parts.append(_FRAME.pack(len(data), messages))
        parts.append(data)
    return parts


def unframed(body: memoryview, rows: int) -> Iterator[tuple[int, memoryview]]:
    """The batches of an entry of so many rows, with the messages of each. Raises Damaged."""
    at, found = 0, 0
    while at < len(body):
        if at + _FRAME.size > len(body):
            raise Damaged("a damaged entry: a batch without its size")
        size, messages = _FRAME.unpack_from(body, at)
        at += _FRAME.size
        if not size or not messages or at + size > len(body):
            raise Damaged(f"a damaged entry: a batch of {messages} messages in {size} bytes")
        yield messages, body[at : at + size]
        at += size
        found += messages
    if found != rows:
        raise Damaged(f"an entry of {found} messages says {rows} rows")


def producers_of(body: memoryview, rows: int) -> Iterator[tuple[str, int]]:
    """The producer of each batch of an entry, and the batch's last sequence id. Raises Damaged."""
    for batch in _parsed(body, rows):
        yield batch.metadata.producer_name, batch.last_sequence_id


def decode_entry(
    body: memoryview, rows: int, columns: Collection[str] | None = None
) -> pa.RecordBatch:
    """All rows of an entry whose body has batches. Raises Damaged, errors.UnsupportedFormat."""
    if columns is not None and not any(name in TYPES for name in columns):
        empty = pa.StructArray.from_buffers(pa.struct([]), rows, [None])
        return pa.RecordBatch.from_struct_array(empty)
    return decoded(_parsed(body, rows), columns)


def publish_ms(body: memoryview, rows: int) -> Longs:
    """When each row of such an entry was published, by its producer's clock. Raises Damaged."""
    batches = _parsed(body, rows)
    times = [min(one.metadata.publish_time, 2**63 - 1) for one in batches]
    counts = [one.messages for one in batches]
    return np.repeat(np.array(times, dtype=np.int64), counts)


def _parsed(body: memoryview, rows: int) -> list[Batch]:
    found = []
    for messages, data in unframed(body, rows):
        batch = parse(data)
        if batch.messages != messages:
            raise Damaged(f"a batch of {batch.messages} messages says {messages} in its entry")
        found.append(batch)
    return found


# -- rows that Spark wrote, for a Pulsar consumer --------------------------------------------------

PRODUCER = "spark-ledger"


def encoded(rows: pa.RecordBatch, times_ms: Sequence[int], first_row: int) -> bytes:
    """The rows (columns of TYPES) as a batch that a Pulsar consumer understands, with sequence ids
    that count from `first_row`, written at these times; the batch has the last of them."""
    count = rows.num_rows
    keys, values, times, headers = (_listed(rows, name, count) for name in TYPES_IN_ORDER)
    parts: list[bytes] = []
    for i in range(count):
        said = SingleMessageMetadata(sequence_id=first_row + i)
        value = values[i]
        said.payload_size = 0 if value is None else len(value)
        if value is None:
            said.null_value = True
        if keys[i] is not None:
            _put_key(said, keys[i])
        if times[i] is not None and times[i] >= 1000:
            said.event_time = times[i] // 1000
        for header in headers[i] or ():
            text = (header["value"] or b"").decode(errors="replace")
            said.properties.add(key=header["key"] or "", value=text)
        head = said.SerializeToString()
        parts += (_SIZE.pack(len(head)), head, value or b"")
    metadata = MessageMetadata(
        producer_name=PRODUCER,
        sequence_id=first_row,
        highest_sequence_id=first_row + count - 1,
        publish_time=max(0, max(times_ms)),
        num_messages_in_batch=count,
    )
    return built(metadata, b"".join(parts))


TYPES_IN_ORDER = (KEY, VALUE, EVENT_TIME, HEADERS)


def _listed(rows: pa.RecordBatch, name: str, count: int) -> list[Any]:
    at = rows.schema.get_field_index(name)
    if at < 0:
        return [None] * count
    column = rows.column(at)
    found: list[Any] = (column.cast(pa.int64()) if name == EVENT_TIME else column).to_pylist()
    return found


def _put_key(said: SingleMessageMetadata, key: bytes) -> None:
    """Text as it is; other bytes in base64, which a client's `partition_key` shows as such."""
    try:
        said.partition_key = key.decode()
    except UnicodeDecodeError:
        said.partition_key = b64encode(key).decode()
        said.partition_key_b64_encoded = True
