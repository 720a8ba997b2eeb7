"""Batches as Pulsar's producers send them: checked, framed in entries, and made of columns. Pure.

pulsar_message.proto shows the bytes; pulsar_columns.py decodes them. Always true: a batch is stored
and dispatched byte for byte; sizes that a batch says of itself are compared with what there is
before they are used. A chunked message is stored as one, with all its chunks as they came:

    magic 0x0e43 (2) | size of a chunk (4) | chunk | size (4) | chunk | ...

big-endian. So it is there or not, in one entry, and one row with one offset, as a lone message.
"""

import struct
import zlib
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
from google.protobuf.message import DecodeError

from bookie_server.api.checksum import crc32c
from bookie_server.api.entry import Buffer
from spark_ledger import errors
from spark_ledger.topic.entry.message_batch import (
    EVENT_TIME,
    HEADERS,
    KEY,
    VALUE,
)
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata, SingleMessageMetadata

MAGIC = 0x0E01
CHUNKS_MAGIC = 0x0E43
UNCOMPRESSED_BYTES_MAX = 128 << 20
HEAD = struct.Struct(">HII")  # magic, CRC, size of the metadata
CRC_FROM = 6
_SIZE = struct.Struct(">I")
_NONE, _LZ4, _ZLIB, _ZSTD, _SNAPPY = range(5)
_ARROW_CODECS = {_LZ4: "lz4_raw", _ZSTD: "zstd", _SNAPPY: "snappy"}


class Damaged(errors.UnsupportedFormat):
    """Bytes that are no batch, or not what they say."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch with its metadata read; its payload, which may be compressed, begins at
    `payload_at` of `data`. Of a chunked message that was stored it is the last chunk's metadata,
    and the payload is that of all chunks."""

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
        readable = min(size, UNCOMPRESSED_BYTES_MAX)
        return not self.batched or self.messages * _SIZE.size <= readable

    @property
    def last_sequence_id(self) -> int:
        """That of its last message: of a batch the highest it names or, where its client names none
        (the one in C++, and those built on it), its messages' own."""
        said = self.metadata
        if said.highest_sequence_id or self.messages == 1 or self.encrypted:
            return max(int(said.sequence_id), int(said.highest_sequence_id))
        try:
            return max(int(said.sequence_id), *_sequence_ids(self))
        except (Damaged, struct.error, DecodeError):  # who reads it is told
            return int(said.sequence_id)

    @property
    def is_chunk(self) -> bool:
        """Whether it is a chunk of a message, as its producer sends it."""
        return bool(self.metadata.HasField("chunk_id")) and self.metadata.num_chunks_from_msg > 1

    @property
    def encrypted(self) -> bool:
        return len(self.metadata.encryption_keys) > 0


def parse(data: bytes | memoryview, *, check: bool = False) -> Batch:
    """The batch in `data`, or the chunked message that was stored; with `check` it comes from a
    client: it is no such message, and its CRC is compared. Raises Damaged."""
    try:
        magic, crc, size = HEAD.unpack_from(data)
    except struct.error as error:
        raise Damaged(f"a damaged batch of {len(data)} bytes: {error}") from error
    if magic == CHUNKS_MAGIC and not check:
        chunks = [parse(one) for one in chunks_of(data)]
        payload = b"".join(memoryview(one.data)[one.payload_at :] for one in chunks)
        return Batch(payload, chunks[-1].metadata, 0)
    if magic != MAGIC:
        raise Damaged(f"a batch with magic {magic:#06x}, not {MAGIC:#06x}")
    end = HEAD.size + size
    if end > len(data):
        raise Damaged(f"a damaged batch of {len(data)} bytes: {size} of metadata")
    if check and crc32c(memoryview(data)[CRC_FROM:]) != crc:
        raise Damaged("a damaged batch: its checksum is another")
    try:
        metadata = MessageMetadata.FromString(bytes(data[HEAD.size : end]))
    except DecodeError as error:
        raise Damaged(f"a damaged batch: {error}") from error
    return Batch(data, metadata, end)


def built(metadata: MessageMetadata, payload: bytes) -> bytes:
    """The bytes of a batch."""
    head = metadata.SerializeToString()
    rest = b"".join((_SIZE.pack(len(head)), head, payload))
    return b"".join((MAGIC.to_bytes(2, "big"), _SIZE.pack(crc32c(rest)), rest))


def joined(chunks: Sequence[bytes]) -> bytes:
    """A chunked message as it is stored."""
    parts = [CHUNKS_MAGIC.to_bytes(2, "big")]
    for one in chunks:
        parts += (_SIZE.pack(len(one)), one)
    return b"".join(parts)


def chunks_of(data: Buffer) -> list[memoryview]:
    """What a client gets of what is stored: the chunks of a message, or the batch as it is. Raises
    Damaged."""
    view = memoryview(data)
    if int.from_bytes(view[:2], "big") != CHUNKS_MAGIC:
        return [view]
    found, at = list[memoryview](), 2
    while at + _SIZE.size <= len(view):
        (size,) = _SIZE.unpack_from(view, at)
        at += _SIZE.size + size
        found.append(view[at - size : at])
    if at != len(view) or not found:
        raise Damaged(f"a damaged chunked message of {len(view)} bytes")
    return found


def payload_of(batch: Batch) -> Buffer:
    """What a batch says, decompressed. Raises Damaged, errors.UnsupportedFormat."""
    if batch.encrypted:
        raise errors.UnsupportedFormat(
            "a batch of encrypted messages was met",
            "Read the topic with a Pulsar consumer that has the key.",
        )
    data = memoryview(batch.data)[batch.payload_at :]
    kind, size = batch.metadata.compression, batch.metadata.uncompressed_size
    if kind == _NONE:
        return data
    if size > UNCOMPRESSED_BYTES_MAX:
        raise Damaged(f"a batch of {size} bytes, at most {UNCOMPRESSED_BYTES_MAX} are taken")
    if not size:
        return b""
    return _decompressed(kind, data, size)


def _sequence_ids(batch: Batch) -> Iterator[int]:
    """Of the messages of a batch, 0 of one that says none. Raises Damaged, struct.error,
    DecodeError."""
    data, at = payload_of(batch), 0
    for _ in range(batch.messages):
        begin = at + _SIZE.size + _SIZE.unpack_from(data, at)[0]
        one = SingleMessageMetadata.FromString(bytes(data[at + _SIZE.size : begin]))
        at = begin + one.payload_size
        yield one.sequence_id


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


def framed(batches: Iterable[tuple[int, bytes]]) -> list[Buffer]:
    """The body of an entry that has these batches, of so many messages each; see message_batch."""
    parts: list[Buffer] = []
    for messages, data in batches:
        parts += (_FRAME.pack(len(data), messages), data)
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
    for batch in parsed(body, rows):
        yield batch.metadata.producer_name, batch.last_sequence_id


def parsed(body: memoryview, rows: int) -> list[Batch]:
    """The batches of an entry of so many rows. Raises Damaged."""
    found = []
    for messages, data in unframed(body, rows):
        batch = parse(data)
        if batch.messages != messages:
            raise Damaged(f"a batch of {batch.messages} messages says {messages} in its entry")
        found.append(batch)
    return found


# -- rows that Spark wrote, for a Pulsar consumer --------------------------------------------------

PRODUCER = "spark-ledger"


def encoded(rows: pa.RecordBatch, written_ms: int, first_row: int) -> bytes:
    """The rows (columns of TYPES) as a batch that a Pulsar consumer understands, with sequence ids
    that count from `first_row`; the last of them was written then."""
    count = rows.num_rows
    metadata = MessageMetadata(
        producer_name=PRODUCER,
        sequence_id=first_row,
        highest_sequence_id=first_row + count - 1,
        publish_time=max(0, written_ms),
        num_messages_in_batch=count,
    )
    return built(metadata, b"".join(_messages(rows, first_row)))


def _messages(rows: pa.RecordBatch, first_row: int) -> Iterator[bytes]:
    """Each row as SingleMessageMetadata and value. What protobuf would make of each, in less than
    half of its time."""
    properties = _properties(rows)
    values, times = _listed(rows, VALUE), _listed(rows, EVENT_TIME)
    keys, base64 = _texts(_listed(rows, KEY))
    size = _SIZE.pack
    for i, value in enumerate(values):
        head = properties[i]
        key, time = keys[i], times[i]
        if key is not None:
            head += b"\x12" + varint(len(key)) + key
        head += b"\x18" + varint(len(value)) if value else b"\x18\x00"
        if time is not None and time >= 1000:
            head += b"\x28" + varint(time // 1000)
        if i in base64:
            head += b"\x30\x01"
        head += b"\x40" + varint(first_row + i)
        if value is None:
            head += b"\x48\x01"
        yield size(len(head))
        yield head
        if value:
            yield value


def _listed(rows: pa.RecordBatch, name: str) -> list[Any]:
    at = rows.schema.get_field_index(name)
    if at < 0:
        return [None] * rows.num_rows
    column = rows.column(at)
    found: list[Any] = (column.view(pa.int64()) if name == EVENT_TIME else column).to_pylist()
    return found


def _texts(keys: list[bytes | None]) -> tuple[list[bytes | None], set[int]]:
    """Keys that are text as they are; others in base64, which a client's `partition_key` shows as
    such, and which rows these are."""
    if b"".join(key for key in keys if key).isascii():
        return keys, set()
    texts, base64 = list(keys), set[int]()
    for i, key in enumerate(keys):
        if key is None or _is_text(key):
            continue
        texts[i] = b64encode(key)
        base64.add(i)
    return texts, base64


def _is_text(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True


def _properties(rows: pa.RecordBatch) -> list[bytes]:
    """The headers of each row as properties; text that is not UTF-8 has U+FFFD in its place."""
    at = rows.schema.get_field_index(HEADERS)
    if at < 0:
        return [b""] * rows.num_rows
    column = rows.column(at)
    pairs = column.flatten()
    names = [(name or "").encode() for name in pairs.field(0).to_pylist()]
    texts = [text or b"" for text in pairs.field(1).to_pylist()]
    if not b"".join(texts).isascii():
        texts = [text.decode(errors="replace").encode() for text in texts]
    made = []
    for name, text in zip(names, texts, strict=True):
        pair = b"".join((b"\x0a", varint(len(name)), name, b"\x12", varint(len(text)), text))
        made.append(b"\x0a" + varint(len(pair)) + pair)
    found, start = [], 0
    for length in column.value_lengths().to_pylist():
        end = start + (length or 0)
        found.append(b"".join(made[start:end]))
        start = end
    return found


def varint(number: int) -> bytes:
    """A number, 0 or more, as protobuf writes it."""
    if number < len(_LAST):
        return _LAST[number]
    return _MORE[number & 127] + _rest(number >> 7)


@lru_cache(maxsize=4096)
def _rest(number: int) -> bytes:
    """Numbers that follow each other have it in common."""
    return varint(number)


_LAST = [bytes([low]) for low in range(128)]
_MORE = [bytes([low | 128]) for low in range(128)]
