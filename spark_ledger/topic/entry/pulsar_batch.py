"""Batches as Pulsar's producers send them: checked, framed in entries, and made of columns. Pure.

pulsar_message.proto shows the bytes; pulsar_columns.py decodes them. Always true: a batch is stored
and dispatched byte for byte; sizes that a batch declares are compared with its bytes before they
are used. Each chunk of a message is stored as it came, with an offset of its own; the last chunk,
whose offset has the message's row, names the offsets of the chunks before it (docs/topics.md, "The
payload of an entry"). So a message is complete when its last chunk is stored; chunks that no last
chunk names have no row. Earlier versions stored a chunked message as one, in one entry, with one
offset.
"""

import struct
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import pyarrow as pa
from google.protobuf.message import DecodeError

from bookie_server.api.entry import Buffer, crc32c
from spark_ledger import errors
from spark_ledger.topic.entry import pulsar_codecs
from spark_ledger.topic.entry.message_batch import (
    EVENT_TIME,
    HEADERS,
    KEY,
    VALUE,
)
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata, SingleMessageMetadata

MAGIC = 0x0E01
CHUNKS_MAGIC, EARLIER_MAGIC, LAST_MAGIC = 0x0E43, 0x0E44, 0x0E45
UNCOMPRESSED_BYTES_MAX = 128 << 20
CHUNKED_BYTES_MAX = (2 << 30) - (16 << 20)
"""Of a chunked message, compressed or not: it becomes a value in Arrow, with 32-bit offsets."""
TIME_MS_MAX = (2**63 - 1) // 1000
"""The last time that microseconds in 64 bits reach: 294,000 years from 1970."""
CHUNKS_MAX = 4096
"""Of a message: its last chunk has the offsets of all others beside it in its entry."""
HEAD = struct.Struct(">HII")  # magic, CRC, size of the metadata
CRC_FROM = 6
_BEGINS = MAGIC.to_bytes(2, "big")
_PRODUCER_NAME, _NAME_AT, _NAME_BYTES_MAX = 0x0A, HEAD.size + 2, 127
"""The tag of metadata's first field, the position of its text, and the largest size in one byte."""
_SIZE = struct.Struct(">I")
_WORD = 2**64 - 1
WALKED_MESSAGES_MAX, WALKED_BYTES_MAX = 20_000, 8 << 20
"""Of a batch, decompressed, whose messages a broker walks in one step: 11 ms of Python, and up to
15 ms to decompress them. The C++ client makes batches of 1,000 messages, and of 128 KiB."""
MESSAGE_BYTES_MIN = 6
"""Of a message in a batch: 4 bytes with the size of its metadata, and the size of its value in
that."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch with its parsed metadata; its payload, which may be compressed, begins at
    `payload_at` of `data`. A chunked message that was put together has the metadata of its last
    chunk, and the payload of all chunks."""

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
    def last_sequence_id(self) -> int:
        """The sequence id of its last message: the highest that the batch names or, if its client
        names none (the C++ client, and clients built on it), the highest of the messages' own."""
        metadata = self.metadata
        if not self.walks:
            return max(int(metadata.sequence_id), int(metadata.highest_sequence_id))
        try:
            messages = messages_in(bytes(payload_of(self)), self.messages)
            ids = (message.sequence_id for message, _ in messages)
            return int(max(metadata.sequence_id, *ids))
        except errors.BadEntry:  # its reader meets the error
            return int(metadata.sequence_id)

    @property
    def walks(self) -> bool:
        """Whether its messages must be walked to know `last_sequence_id`."""
        return not (self.metadata.highest_sequence_id or self.messages == 1 or self.encrypted)

    @property
    def is_chunk(self) -> bool:
        """Whether it is a chunk of a message, as its producer sends it."""
        return bool(self.metadata.HasField("chunk_id")) and self.metadata.num_chunks_from_msg > 1

    @property
    def encrypted(self) -> bool:
        return len(self.metadata.encryption_keys) > 0


def parse(data: bytes | memoryview, *, check: bool = False) -> Batch:
    """The batch in `data`, or a chunked message that was stored as one. With `check` the bytes come
    from a client: no such message is taken, and the CRC is compared. Raises errors.BadEntry."""
    try:
        magic, crc, size = HEAD.unpack_from(data)
    except struct.error as error:
        raise errors.BadEntry(f"a damaged batch of {len(data)} bytes: {error}") from error
    if magic == CHUNKS_MAGIC and not check:
        chunks = [parse(chunk) for chunk in chunks_of(data)]
        payload = b"".join(memoryview(chunk.data)[chunk.payload_at :] for chunk in chunks)
        return Batch(payload, chunks[-1].metadata, 0)
    if magic != MAGIC:
        raise errors.BadEntry(f"a batch with magic {magic:#06x}, not {MAGIC:#06x}")
    end = HEAD.size + size
    if end > len(data):
        raise errors.BadEntry(f"a damaged batch of {len(data)} bytes: {size} of metadata")
    if check and crc32c(memoryview(data)[CRC_FROM:]) != crc:
        raise errors.BadEntry("a damaged batch: its checksum does not match")
    try:
        metadata = MessageMetadata.FromString(bytes(data[HEAD.size : end]))
    except DecodeError as error:
        raise errors.BadEntry(f"a damaged batch: {error}") from error
    return Batch(data, metadata, end)


def built(metadata: MessageMetadata, payload: Buffer) -> bytes:
    """The bytes of a batch."""
    head = metadata.SerializeToString()
    rest = b"".join((_SIZE.pack(len(head)), head, payload))
    return b"".join((MAGIC.to_bytes(2, "big"), _SIZE.pack(crc32c(rest)), rest))


# -- chunks of a message as they are stored --------------------------------------------------------

_EARLIER_BEGINS, _LAST_BEGINS = EARLIER_MAGIC.to_bytes(2, "big"), LAST_MAGIC.to_bytes(2, "big")


def earlier_chunk(chunk: bytes) -> bytes:
    """A chunk that is not the last one."""
    return _EARLIER_BEGINS + chunk


def last_chunk(offsets: Sequence[int], chunk: bytes) -> bytes:
    """The last chunk; the chunks before it have these offsets, in order."""
    named = struct.pack(f">{len(offsets)}Q", *offsets)
    return b"".join((_LAST_BEGINS, _SIZE.pack(len(offsets)), named, chunk))


def is_earlier_chunk(data: Buffer) -> bool:
    """Whether it has an offset but no row."""
    return bytes(data[:2]) == _EARLIER_BEGINS


def is_last_chunk(data: Buffer) -> bool:
    """Whether its row needs other chunks."""
    return bytes(data[:2]) == _LAST_BEGINS


def earlier_offsets(data: Buffer) -> tuple[int, ...]:
    """The offsets of the chunks before a last chunk, in order. Raises errors.BadEntry."""
    return _named(memoryview(data))[0]


def chunk_in(data: Buffer) -> memoryview:
    """The chunk, as its producer sent it. Raises errors.BadEntry."""
    view = memoryview(data)
    return view[2:] if is_earlier_chunk(view) else view[_named(view)[1] :]


def payload_of_chunk(data: Buffer) -> memoryview:
    """The part of its message that an earlier chunk has. Raises errors.BadEntry."""
    chunk = chunk_in(data)
    return chunk[parse(chunk).payload_at :]


def put_together(earlier: Sequence[Buffer], data: Buffer, *, value: bool = True) -> Batch:
    """The message of a last chunk, put together with the payloads of the chunks before it; without
    `value` only its metadata. Raises errors.BadEntry."""
    last = parse(chunk_in(data))
    if not value:
        last.metadata.compression = pulsar_codecs.NONE
        return Batch(b"", last.metadata, 0)
    size = sum(map(len, earlier)) + len(last.data) - last.payload_at
    if size > CHUNKED_BYTES_MAX:
        raise errors.BadEntry(f"a message of {size} bytes in chunks, at most {CHUNKED_BYTES_MAX}")
    payload = b"".join((*earlier, memoryview(last.data)[last.payload_at :]))
    return Batch(payload, last.metadata, 0)


def _named(view: memoryview) -> tuple[tuple[int, ...], int]:
    """The offsets that a last chunk names, and the position after them."""
    at = 2 + _SIZE.size
    if len(view) < at or not is_last_chunk(view):
        raise errors.BadEntry(f"a damaged last chunk of {len(view)} bytes")
    (count,) = _SIZE.unpack_from(view, 2)
    end = at + 8 * count
    if count > CHUNKS_MAX or end > len(view):
        raise errors.BadEntry(
            f"a damaged last chunk of {len(view)} bytes: {count} chunks before it"
        )
    offsets = struct.unpack_from(f">{count}Q", view, at)
    if any(after <= before for before, after in pairwise(offsets)):
        raise errors.BadEntry(
            "a damaged last chunk: the offsets of the chunks before it do not rise"
        )
    return offsets, end


def chunks_of(data: Buffer) -> list[memoryview]:
    """The parts in which a client gets a batch that is stored by itself: the batch as it is, or the
    chunks of a message that was stored as one. Raises errors.BadEntry."""
    view = memoryview(data)
    if int.from_bytes(view[:2], "big") != CHUNKS_MAGIC:
        return [view]
    chunks, at = list[memoryview](), 2
    while at + _SIZE.size <= len(view):
        (size,) = _SIZE.unpack_from(view, at)
        at += _SIZE.size + size
        chunks.append(view[at - size : at])
    if at != len(view) or not chunks:
        raise errors.BadEntry(f"a damaged chunked message of {len(view)} bytes")
    return chunks


# -- the payload of a batch ----------------------------------------------------------------------


def payload_of(batch: Batch) -> Buffer:
    """The payload, decompressed. Raises errors.BadEntry, errors.UnsupportedFormat."""
    if batch.encrypted:
        raise errors.UnsupportedFormat(
            "a batch of encrypted messages was met",
            "Read the topic with a Pulsar consumer that has the key, or give onBadEntry=skip or"
            " raw.",
        )
    data = memoryview(batch.data)[batch.payload_at :]
    kind, size = batch.metadata.compression, batch.metadata.uncompressed_size
    if kind == pulsar_codecs.NONE:
        return data
    if (fault := fault_of(batch)) is not None:
        raise errors.BadEntry(fault)
    return pulsar_codecs.decompressed(kind, data, size) if data else b""


def unpacked_bytes(batch: Batch) -> int:
    """The size of the decompressed payload, as the batch declares it."""
    size = len(batch.data) - batch.payload_at
    if batch.metadata.compression == pulsar_codecs.NONE or batch.encrypted:
        return size
    return int(batch.metadata.uncompressed_size)


def fault_of(batch: Batch, *, whole: bool = True) -> str | None:
    """Why a batch cannot be decoded, if that shows without decompressing it. Not `whole`: its
    payload is a chunk."""
    metadata, payload = batch.metadata, memoryview(batch.data)[batch.payload_at :]
    kind, size = metadata.compression, unpacked_bytes(batch)
    if kind not in pulsar_codecs.KINDS:
        return f"a batch with the unknown compression {kind}"
    most = CHUNKED_BYTES_MAX if batch.is_chunk else UNCOMPRESSED_BYTES_MAX
    if size > most:
        return f"a batch of {size} bytes, decompressed; at most {most} are taken"
    if batch.encrypted:
        return None
    fault = None
    if kind != pulsar_codecs.NONE and whole:
        fault = pulsar_codecs.fault_of(kind, payload, size)
    elif kind != pulsar_codecs.NONE and not metadata.chunk_id:
        fault = pulsar_codecs.fault_of_begin(kind, payload, size)
    if fault is not None:
        return fault
    if batch.batched and whole:
        if batch.messages * MESSAGE_BYTES_MIN > size:
            return f"a batch of {size} bytes cannot have {batch.messages} messages"
        if kind == pulsar_codecs.NONE:
            return _fault_of_first(batch)
    return None


def fault_of_walk(batch: Batch) -> str | None:
    """Why the broker cannot look for its last sequence id, which deduplication needs."""
    size = unpacked_bytes(batch)
    if not batch.walks or (batch.messages <= WALKED_MESSAGES_MAX and size <= WALKED_BYTES_MAX):
        return None
    return (
        f"a batch of {batch.messages} messages and {size} bytes, decompressed, that does not name"
        f" its highest sequence id: at most {WALKED_MESSAGES_MAX} messages and {WALKED_BYTES_MAX}"
        " bytes are taken with deduplication: make smaller batches"
    )


def messages_in(data: bytes, count: int) -> Iterator[tuple[SingleMessageMetadata, int]]:
    """The metadata of each of the messages in a batch's payload, decompressed, and where its value
    begins. Raises errors.BadEntry."""
    at, total = 0, len(data)
    read, size_at = SingleMessageMetadata.FromString, _SIZE.unpack_from
    try:
        for _ in range(count):
            begin = at + _SIZE.size + size_at(data, at)[0]
            message = read(data[at + _SIZE.size : begin])
            at = begin + message.payload_size
            if not begin <= at <= total:
                raise errors.BadEntry(f"a damaged batch: a message of {message.payload_size} bytes")
            yield message, begin
    except (struct.error, DecodeError) as error:
        raise errors.BadEntry(f"a damaged batch: {error}") from error
    if at != total:
        raise errors.BadEntry(f"a damaged batch: {total - at} bytes after its last message")


def untimely(batch: Batch) -> str | None:
    """Why its publish time cannot be the time of a row. Batches stored before this check may have
    such a time."""
    ms = batch.metadata.publish_time
    return None if ms <= TIME_MS_MAX else f"a publish time of {ms} ms, at most {TIME_MS_MAX}"


def _fault_of_first(batch: Batch) -> str | None:
    """The fault of an uncompressed payload whose first message would end beyond it: such bytes are
    not messages."""
    size = len(batch.data) - batch.payload_at
    (head,) = _SIZE.unpack_from(batch.data, batch.payload_at)
    if head > size - _SIZE.size:
        return f"a batch of {size} bytes whose first message has {head} bytes of metadata"
    return None


# -- several batches in an entry ---------------------------------------------------------------

_FRAME = struct.Struct("<II")


def framed(batches: Iterable[tuple[int, bytes]]) -> list[Buffer]:
    """The body of an entry that has these batches, each with its number of messages; see
    message_batch."""
    parts: list[Buffer] = []
    for messages, data in batches:
        parts += (_FRAME.pack(len(data), messages), data)
    return parts


def unframed(body: memoryview, rows: int) -> Iterator[tuple[int, memoryview]]:
    """The batches of an entry of `rows` rows, each with its number of messages. Raises
    errors.BadEntry."""
    at, total = 0, 0
    while at < len(body):
        if at + _FRAME.size > len(body):
            raise errors.BadEntry("a damaged entry: a batch without its size")
        size, messages = _FRAME.unpack_from(body, at)
        at += _FRAME.size
        if not size or not messages or at + size > len(body):
            raise errors.BadEntry(
                f"a damaged entry: a batch of {messages} messages in {size} bytes"
            )
        yield messages, body[at : at + size]
        at += size
        total += messages
    if total != rows:
        raise errors.BadEntry(f"an entry of {total} messages declares {rows} rows")


def producers_of(body: memoryview, rows: int) -> Iterator[Batch]:
    """The last batch of each producer of an entry, in their order; a chunked message counts with
    its last chunk. The batches are of a topic with deduplication: the sequence ids of a producer
    rise, so as a rule only its last batch is read. Raises errors.BadEntry."""
    last = dict[bytes | int, memoryview]()
    for number, (_, data) in enumerate(unframed(body, rows)):
        if data[:2] != _EARLIER_BEGINS:
            name = _name_of(data) or number
            last.pop(name, None)
            last[name] = data
    for data in last.values():
        yield parse(chunk_in(data) if is_last_chunk(data) else data)


def _name_of(data: memoryview) -> bytes:
    """The name of the batch's producer, read without protobuf; empty if the batch does not begin as
    clients begin it."""
    if len(data) > _NAME_AT and data[:2] == _BEGINS and data[_NAME_AT - 2] == _PRODUCER_NAME:
        size = data[_NAME_AT - 1]
        return bytes(data[_NAME_AT : _NAME_AT + size]) if size <= _NAME_BYTES_MAX else b""
    return b""


# -- rows that Spark wrote, for a Pulsar consumer --------------------------------------------------

PRODUCER = "spark-ledger"
CLIENT_BYTES_MAX = (5 << 20) - (16 << 10)
"""Of a batch, or a chunk; a frame has little beside it. Clients take so much, the Java client not a
byte more."""
CHUNK_BYTES_MIN = 1 << 20
_CHUNKS_SAY_BYTES = 128


class Encoded(NamedTuple):
    """Rows for a consumer: a batch or, if not `batched`, one row as a message by itself."""

    rows: int
    data: bytes
    batched: bool


def encoded(
    steps: Iterable[pa.RecordBatch], written_ms: Sequence[int], first_row: int
) -> Iterator[Encoded | None]:
    """The rows (columns of TYPES) of all steps, written at these times, as batches that a Pulsar
    consumer understands, each of at most CLIENT_BYTES_MAX, with sequence ids that count from
    `first_row`. The time of a batch is that of its newest row. A larger row is a message in chunks,
    all chunks together (see `chunks_of`). Yields None after each step and each chunk, so that the
    caller may do something else in between."""
    parts, values = list[bytes](), list[Any]()
    for rows in steps:
        more = _listed(rows, VALUE)
        parts += _messages(rows, more, first_row + len(values))
        values += more
        yield None
    if sum(map(len, parts)) <= CLIENT_BYTES_MAX:  # as a rule
        yield _together(parts, written_ms, first_row)
        return
    begins = list(accumulate((3 if value else 2 for value in values), initial=0))
    sizes = [sum(map(len, parts[at:end])) for at, end in pairwise(begins)]
    start = 0
    for end in _ends(sizes):
        row, ms = first_row + start, written_ms[start:end]
        row_parts = parts[begins[start] : begins[end]]
        if sizes[start] > CLIENT_BYTES_MAX:
            chunks = list[bytes]()
            for chunk in by_itself(row_parts, max(0, *ms), row):
                chunks.append(chunk)
                yield None
            yield Encoded(1, chunks[0] if len(chunks) == 1 else b"".join(_joined(chunks)), False)
        else:
            yield _together(row_parts, ms, row)
        start = end


def _joined(chunks: Sequence[bytes]) -> Iterator[bytes]:
    """A message in chunks as one batch that is stored by itself; `chunks_of` takes it apart."""
    yield CHUNKS_MAGIC.to_bytes(2, "big")
    for chunk in chunks:
        yield _SIZE.pack(len(chunk))
        yield chunk


def _together(parts: Sequence[bytes], written_ms: Sequence[int], first_row: int) -> Encoded:
    """One batch of the rows, which were written at these times."""
    count = len(written_ms)
    metadata = MessageMetadata(
        producer_name=PRODUCER,
        sequence_id=first_row,
        highest_sequence_id=first_row + count - 1,
        publish_time=max(0, *written_ms),
        num_messages_in_batch=count,
    )
    return Encoded(count, built(metadata, b"".join(parts)), True)


def _ends(sizes: Sequence[int]) -> Iterator[int]:
    """The indices at which batches of these messages end."""
    size = 0
    for i, more in enumerate(sizes):
        if size and size + more > CLIENT_BYTES_MAX:
            yield i
            size = 0
        size += more
    if sizes:
        yield len(sizes)


def by_itself(message: Sequence[bytes], written_ms: int, row: int) -> Iterator[bytes]:
    """A message (its parts, as `_messages` gives them) outside of a batch: in chunks if its value
    is large. Each chunk has the key and headers, even if they take more than CLIENT_BYTES_MAX."""
    single = SingleMessageMetadata.FromString(message[1])
    value = memoryview(message[2] if len(message) > 2 else b"")
    metadata = MessageMetadata(
        producer_name=PRODUCER,
        sequence_id=row,
        publish_time=written_ms,
        properties=single.properties,
    )
    for name in ("partition_key", "partition_key_b64_encoded", "event_time", "null_value"):
        if single.HasField(name):
            setattr(metadata, name, getattr(single, name))
    size = max(CHUNK_BYTES_MIN, CLIENT_BYTES_MAX - metadata.ByteSize() - _CHUNKS_SAY_BYTES)
    count = -(-len(value) // size)
    if count <= 1:
        yield built(metadata, value)
        return
    metadata.uuid = f"{PRODUCER}-{row}"
    metadata.num_chunks_from_msg = count
    metadata.total_chunk_msg_size = metadata.uncompressed_size = len(value)
    for i in range(count):
        metadata.chunk_id = i
        yield built(metadata, value[i * size : (i + 1) * size])


def _messages(rows: pa.RecordBatch, values: Sequence[Any], first_row: int) -> Iterator[bytes]:
    """Each row as the size of its SingleMessageMetadata, the metadata, and the value unless it is
    empty: the bytes that protobuf would make, in less than half of its time."""
    properties = _properties(rows)
    times = _listed(rows, EVENT_TIME)
    keys, base64 = _texts(_listed(rows, KEY))
    size = _SIZE.pack
    for i, value in enumerate(values):
        head = properties[i]
        key, time = keys[i], times[i]
        if key is not None:
            head += b"\x12" + varint(len(key)) + key
        head += b"\x18" + varint(len(value)) if value else b"\x18\x00"
        if time is not None and (ms := time // 1000):  # 0 means no event time
            head += b"\x28" + varint(ms & _WORD)  # before 1970: two's complement, in 64 bits
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
    values: list[Any] = (column.view(pa.int64()) if name == EVENT_TIME else column).to_pylist()
    return values


def _texts(keys: list[bytes | None]) -> tuple[list[bytes | None], set[int]]:
    """Keys that are text as they are, other keys in base64, as a client's `partition_key` shows
    them; and the rows with a key in base64."""
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
    """The headers of each row as properties; U+FFFD replaces bytes that are not UTF-8."""
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
    of_rows, start = [], 0
    for length in column.value_lengths().to_pylist():
        end = start + (length or 0)
        of_rows.append(b"".join(made[start:end]))
        start = end
    return of_rows


def varint(number: int) -> bytes:
    """A number, 0 or more, as protobuf writes it."""
    if number < len(_LAST):
        return _LAST[number]
    return _MORE[number & 127] + _rest(number >> 7)


@lru_cache(maxsize=4096)
def _rest(number: int) -> bytes:
    """The bytes after the first one, cached: consecutive numbers mostly share them."""
    return varint(number)


_LAST = [bytes([low]) for low in range(128)]
_MORE = [bytes([low | 128]) for low in range(128)]
