"""The payload of an entry of a topic: a message batch, rows as Arrow, of one partition or several.

docs/topics.md ("The payload of an entry") has the picture, the flags and the columns. Always true:
`first row` counts from the first row of the partition's segment. With the flag OFFSET `first row`
is an offset, so that a reader with an old log notices that rows of others came before the entry.
A reader refuses flags that it does not know. A column that is not in the stream is null in every
row. Null is not empty: a null value is a tombstone, as in Kafka. Version 1, which is still read,
had neither flags nor absent columns. The payload's CRC is in the entry's header, not here.
"""

import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bookie_server.api.entry import Buffer
from spark_ledger import errors
from spark_ledger.topic.entry.arrow_stream import read_batch

MAGIC = b"SLM1"
VERSION = 2
HEADER_BYTES = 32
SHARE_BYTES = 16
TIMES_BYTES = 16
CHUNKS_BYTES = 32
SHARED, TYPED, TIMES, BATCHES, OFFSET, CHUNKS = 1, 2, 4, 8, 16, 32
SCHEMA_VERSION_MAX = 0xFFFF
COMPRESSIONS = ("none", "lz4", "zstd")
JOINED_BYTES_MAX = 64 << 10
KEPT_RATIO_MAX = 1.5
"""The body of an entry may keep this many times its size in memory."""

KEY, VALUE, EVENT_TIME, HEADERS = "key", "value", "event_time", "headers"
HEADERS_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
TYPES: dict[str, pa.DataType] = {
    KEY: pa.binary(),
    VALUE: pa.binary(),
    EVENT_TIME: pa.timestamp("us", tz="UTC"),
    HEADERS: HEADERS_TYPE,
}
TYPED_NAMES = {KEY: "__key", EVENT_TIME: "__eventTime", HEADERS: "__messageProperties"}
"""In a typed batch, the names of the columns that are not the topic's own."""
PRODUCER_NAME, SEQUENCE_ID, CLIENT_VERSION = "producer_name", "sequence_id", "client_version"
PRODUCERS_TYPES: dict[str, pa.DataType] = {
    PRODUCER_NAME: pa.string(),
    SEQUENCE_ID: pa.int64(),
    CLIENT_VERSION: pa.int32(),
}
"""The columns that only batches of Pulsar's producers have, beside TYPES. CLIENT_VERSION is the
clients' number of the schema that the message names; -1 if the message names no number."""
SCHEMA = pa.schema([(KEY, pa.binary()), (VALUE, pa.binary())])

_VERSION_1 = (1, 0)
_FLAGS = (
    *range((SHARED | TYPED | TIMES) + 1),
    *(BATCHES | flags for flags in (0, OFFSET, CHUNKS, OFFSET | CHUNKS)),
)
"""The combinations of flags that a reader understands."""
_HEADER_STRUCT = struct.Struct("<4sBBHIIqq")
_SHARE_DTYPE = np.dtype([("partition", "<u4"), ("rows", "<u4"), ("first_row", "<i8")])
_COUNT_STRUCT = struct.Struct("<I12x")
_TIME_RUN_DTYPE = np.dtype([("rows", "<u4"), ("zero", "<u4"), ("ms", "<i8")])
_CHUNKS_STRUCT = struct.Struct("<I4xqqq")
_TYPED_TYPES = {TYPED_NAMES[name]: kind for name, kind in TYPES.items() if name != VALUE}
assert _HEADER_STRUCT.size == HEADER_BYTES
assert _SHARE_DTYPE.itemsize == SHARE_BYTES
assert _COUNT_STRUCT.size == _TIME_RUN_DTYPE.itemsize == TIMES_BYTES
assert _CHUNKS_STRUCT.size == CHUNKS_BYTES

TimeRuns = Sequence[tuple[int, int]]
"""All rows of an entry as runs: the number of rows, and the time in ms at which they were written.
"""
Longs = npt.NDArray[np.int64]
EarlierPayloads = Mapping[int, Sequence[Buffer]]
"""For each row of an entry that is at the last chunk of a message: the payloads of the chunks
before."""
Body = tuple[memoryview, ...]
"""The payload after the header, in read-only buffers; joined, they are the Arrow stream."""


ROWLESS_KEPT_MAX = 256
"""How many `Rowless` a partition keeps; beyond this number, the two oldest are joined."""


class Rowless(NamedTuple):
    """Offsets without a row: those of all chunks of a message but the last chunk. Of the places
    [lo, hi) (rows of a segment, or offsets) `number` places have no row; the first and the last
    place are among these. Counts of whole ranges are exact. Counts within a range assume that the
    places without a row are spread evenly, which is true if the chunks of a message follow each
    other, as a single producer sends them."""

    lo: int = 0
    hi: int = 0
    number: int = 0

    def with_next(self, place: int) -> "Rowless":
        """These places and one more: `place`, which is after all these and has no row."""
        return Rowless(self.lo if self.number else place, place + 1, self.number + 1)

    def shift(self, by: int) -> "Rowless":
        return Rowless(self.lo + by, self.hi + by, self.number) if self.number else NO_ROWLESS

    def count_between(self, lo: int, hi: int) -> int:
        """An estimate of how many places in [lo, hi) have no row; the counts of adjacent ranges add
        up exactly."""
        return self._below(hi) - self._below(lo) if lo < hi else 0

    def _below(self, place: int) -> int:
        inside = min(place, self.hi) - self.lo
        return self.number * inside // (self.hi - self.lo) if inside > 0 else 0


NO_ROWLESS = Rowless()


def count_rowless(groups: Iterable[Rowless], lo: int, hi: int) -> int:
    return sum(rowless.count_between(lo, hi) for rowless in groups)


def append_rowless(groups: tuple[Rowless, ...], more: Rowless, start: int) -> tuple[Rowless, ...]:
    """`groups`, then `more`; without groups that end at `start` or earlier."""
    remaining = [rowless for rowless in (*groups, more) if rowless.number and rowless.hi > start]
    while len(remaining) > ROWLESS_KEPT_MAX:
        first, second = remaining[:2]
        remaining[:2] = [Rowless(first.lo, second.hi, first.number + second.number)]
    return tuple(remaining)


class Share(NamedTuple):
    """Rows of a partition in an entry; the first of them is row `first_row` of the partition's
    segment."""

    partition: int
    rows: int
    first_row: int


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """The fields before the body, which begins at `body_at`. `index` has the partition, rows and
    first_row of each share; `times` has rows and ms of each run (None without the flag TIMES). With
    `has_batches` the body has batches of Pulsar's producers, and `chunks` of them are chunks of
    messages; otherwise the body is an Arrow stream. `rowless` are the offsets without a row in the
    segment, up to the entry's end. With `at_offset` first_row is the offset of the first row."""

    index: npt.NDArray[np.void]
    times: npt.NDArray[np.void] | None
    written_ms: int
    typed: bool
    schema_version: int
    body_at: int
    has_batches: bool = False
    chunks: int = 0
    rowless: Rowless = NO_ROWLESS
    at_offset: bool = False

    @property
    def shares(self) -> tuple[Share, ...]:
        return tuple(map(Share._make, self.index.tolist()))

    @property
    def rows(self) -> int:
        return int(self.index["rows"].sum(dtype=np.int64))

    def each_ms(self) -> Longs | None:
        """The time at which each row of the stream was written; None: all rows at `written_ms`."""
        if self.times is None:
            return None
        return np.repeat(self.times["ms"], self.times["rows"])


def client_version(name: bytes) -> int | None:
    """The clients' number of the schema that a batch names; None without a name, -1 for a name that
    is no number. Clients write the number in 8 bytes, big-endian."""
    number = int.from_bytes(name, "big") if len(name) == 8 else -1
    return None if not name else number if number < 1 << 31 else -1


def column_of(record_batch: pa.RecordBatch, name: str) -> pa.Array:
    """A column of TYPES or _TYPED_TYPES by its name; a column of nulls if the batch lacks it."""
    index = record_batch.schema.get_field_index(name)
    if index >= 0:
        return record_batch.column(index)
    return pa.nulls(record_batch.num_rows, TYPES.get(name) or _TYPED_TYPES[name])


def encode_header(
    shares: Sequence[Share],
    written_ms: int,
    *,
    typed: bool = False,
    schema_version: int = 0,
    times: TimeRuns = (),
    has_batches: bool = False,
    chunks: int = 0,
    rowless: Rowless = NO_ROWLESS,
    at_offset: bool = False,
) -> bytes:
    """The bytes before the body: with an index if there are several shares, with `times` if there
    are several times. With `has_batches` there must be a single share, untyped, and no times.
    `chunks`, `rowless` and `at_offset` are as in Header."""
    assert shares, "an entry has rows"
    rows = sum(share.rows for share in shares)
    flags, runs = TYPED if typed else 0, b""
    if has_batches:
        assert len(shares) == 1 and not (typed or times), "a batch is of one partition"
        flags = BATCHES | (OFFSET if at_offset else 0)
    if chunks or rowless.number:
        assert has_batches, "chunks are batches"
        flags, runs = flags | CHUNKS, _CHUNKS_STRUCT.pack(chunks, *rowless)
    if len(times) > 1:
        written = np.array([(count, 0, ms) for count, ms in times], dtype=_TIME_RUN_DTYPE)
        flags, runs = flags | TIMES, _COUNT_STRUCT.pack(len(written)) + written.tobytes()
        assert sum(count for count, _ in times) == rows, "every row has a time"
        assert written_ms == max(ms for _, ms in times), "the header has the last time"
    if len(shares) == 1:
        (share,) = shares
        return _HEADER_STRUCT.pack(MAGIC, VERSION, flags, schema_version, *share, written_ms) + runs
    index = np.array([tuple(share) for share in shares], dtype=_SHARE_DTYPE)
    assert bool((np.diff(index["partition"].astype(np.int64)) > 0).all()), "partitions rise"
    counts = (len(shares), rows, 0)
    head = _HEADER_STRUCT.pack(MAGIC, VERSION, flags | SHARED, schema_version, *counts, written_ms)
    return head + index.tobytes() + runs


def encode_body(record_batch: pa.RecordBatch, compression: str = "none") -> Body:
    """The Arrow IPC stream of one record batch in read-only buffers, which a ledger's writer takes
    without a copy. Large buffers are the batch's own memory and must not be changed. If this memory
    is more than KEPT_RATIO_MAX times the batch, the stream is a copy instead. Raises ValueError for
    a compression that is not in COMPRESSIONS."""
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression is one of {COMPRESSIONS}, got {compression!r}")
    codec = None if compression == "none" else compression
    stream = _BufferList()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    sink = pa.PythonFile(stream, mode="w")
    with pa.ipc.new_stream(sink, record_batch.schema, options=options) as writer:
        writer.write_batch(record_batch)
    if (
        codec is None
        and record_batch.get_total_buffer_size() > KEPT_RATIO_MAX * record_batch.nbytes
    ):
        return (memoryview(b"".join(stream.parts)),)
    return _join_small(stream.parts)


class _BufferList:
    """A file for Arrow that keeps the written buffers as they are."""

    closed = False

    def __init__(self) -> None:
        self.parts: list[Buffer] = []

    def write(self, part: Buffer) -> None:
        self.parts.append(part)

    def flush(self) -> None:
        """Does nothing: `write` keeps every buffer at once."""

    def close(self) -> None:
        """Does nothing: the written buffers stay."""


def _join_small(parts: list[Buffer]) -> Body:
    """The same bytes, with small neighbours joined: a copy costs less than to send each buffer."""
    body: list[memoryview] = []
    small_parts: list[Buffer] = []
    for part in parts:
        if len(part) < JOINED_BYTES_MAX:
            small_parts.append(part)
            continue
        if small_parts:
            body.append(memoryview(b"".join(small_parts)))
        body.append(memoryview(part).toreadonly())
        small_parts = []
    return (*body, memoryview(b"".join(small_parts))) if small_parts else tuple(body)


def decode_header(payload: Buffer) -> Header:
    """The payload's header. Raises errors.UnsupportedFormat for a later version or flags of a later
    version, errors.BadEntry for another magic and for contradictions."""
    view = memoryview(payload)
    try:
        magic, version, flags, schema, partition, rows, first_row, written_ms = (
            _HEADER_STRUCT.unpack_from(view)
        )
    except struct.error as error:
        raise errors.BadEntry(f"a damaged message batch: {error}") from error
    _check_readable(magic, version, flags)
    body_at = HEADER_BYTES
    if flags & SHARED:
        body_at += partition * SHARE_BYTES
        index = _index(view[HEADER_BYTES:body_at], partition, rows)
    else:
        index = np.array([(partition, rows, first_row)], dtype=_SHARE_DTYPE)
    times = None
    if flags & TIMES:
        times = _times(view[body_at:], rows)
        body_at += TIMES_BYTES * (1 + len(times))
    chunks, rowless = 0, NO_ROWLESS
    if flags & CHUNKS:
        chunks, rowless = _chunks(view[body_at:])
        body_at += CHUNKS_BYTES
    typed, batches, at_offset = (bool(flags & flag) for flag in (TYPED, BATCHES, OFFSET))
    rest = (typed, schema, body_at, batches, chunks, rowless, at_offset)
    return Header(index, times, written_ms, *rest)


def _check_readable(magic: bytes, version: int, flags: int) -> None:
    """Raises errors.UnsupportedFormat, errors.BadEntry."""
    is_readable = (version, flags) == _VERSION_1 or (version == VERSION and flags in _FLAGS)
    if magic == MAGIC and is_readable:
        return
    what = (
        f"an entry with magic {magic!r}, version {version}, flags {flags} was met where a message"
        " batch was expected"
    )
    is_later = version > VERSION or (version == VERSION and flags >= 2 * CHUNKS)
    raise errors.UnsupportedFormat(what) if magic == MAGIC and is_later else errors.BadEntry(what)


def decode_body_and_times(
    payload: Buffer, header: Header, columns: Collection[str] | None = None
) -> tuple[pa.RecordBatch, Longs | None]:
    """All rows of an entry whose body is an Arrow stream, of all partitions, and the time at which
    each row was written (None: all rows at the header's `written_ms`). Uncompressed columns are
    views of the payload, not copies; columns that are not among `columns` (None: all columns) are
    not decompressed. Raises errors.BadEntry for a header that does not fit the rows, and for a
    stream that is damaged or has columns of other types."""
    assert not header.has_batches, "pulsar_parts.py decodes batches"
    body = memoryview(payload)[header.body_at :]
    return _read_body(body, header, columns), header.each_ms()


def _times(view: memoryview, rows: int) -> npt.NDArray[np.void]:
    """The runs in `view`, which begins with their number."""
    if len(view) < TIMES_BYTES:
        raise errors.BadEntry("a damaged message batch: no count of its times")
    (count,) = _COUNT_STRUCT.unpack_from(view)
    run_bytes = view[TIMES_BYTES : TIMES_BYTES * (1 + count)]
    if not count or len(run_bytes) != TIMES_BYTES * count:
        raise errors.BadEntry(f"a damaged message batch: {count} times")
    runs = np.frombuffer(run_bytes, dtype=_TIME_RUN_DTYPE)
    if not runs["rows"].all() or int(runs["rows"].sum(dtype=np.int64)) != rows:
        raise errors.BadEntry(f"a damaged message batch: {count} times that are not of {rows} rows")
    return runs


def _chunks(view: memoryview) -> tuple[int, Rowless]:
    if len(view) < CHUNKS_BYTES:
        raise errors.BadEntry("a damaged message batch: no count of its chunks")
    chunks, *rest = _CHUNKS_STRUCT.unpack_from(view)
    rowless = Rowless(*rest)
    if not 0 <= rowless.lo <= rowless.lo + rowless.number <= rowless.hi:
        raise errors.BadEntry(f"a damaged message batch: {rowless}")
    return chunks, rowless


def _index(view: memoryview, count: int, rows: int) -> npt.NDArray[np.void]:
    if not count or len(view) != count * SHARE_BYTES:
        raise errors.BadEntry(f"a damaged message batch: an index of {count} shares")
    index = np.frombuffer(view, dtype=_SHARE_DTYPE)
    is_rising = bool((np.diff(index["partition"].astype(np.int64)) > 0).all())
    if not is_rising or not index["rows"].all() or int(index["rows"].sum(dtype=np.int64)) != rows:
        raise errors.BadEntry(
            f"a damaged message batch: an index of {count} shares that are not {rows} rows of"
            " rising partitions"
        )
    return index


def _read_body(view: memoryview, header: Header, columns: Collection[str] | None) -> pa.RecordBatch:
    rows, batch = read_batch(view, lambda schema: _choose_fields(schema, header, columns))
    if rows != header.rows:
        raise errors.BadEntry(f"a message batch of {rows} rows has {header.rows} in its header")
    if batch is None:
        empty = pa.StructArray.from_buffers(pa.struct([]), rows, [None])
        batch = pa.RecordBatch.from_struct_array(empty)
    return batch


def _choose_fields(schema: pa.Schema, header: Header, columns: Collection[str] | None) -> list[int]:
    """The indices of the stream's fields to read. Raises errors.BadEntry if a field with a name in
    TYPES (in a typed batch: in _TYPED_TYPES) has another type than there."""
    types = _TYPED_TYPES if header.typed else TYPES
    indices = []
    for index, field in enumerate(schema):
        kind = types.get(field.name)
        if kind is None and not header.typed:
            continue
        if kind is not None and field.type != kind:
            raise errors.BadEntry(
                f"a message batch whose column {field.name} is {field.type}, not {kind}"
            )
        if columns is None or field.name in columns:
            indices.append(index)
    return indices
