"""The payload of an entry of a topic: a message batch, rows of one partition as Arrow.

    0        4     5       6          8           12       16          24           32
    +--------+-----+-------+----------+-----------+--------+-----------+------------+----------
    | "SLM1" | ver | flags | reserved | partition | rows   | first row | written ms | Arrow IPC
    +--------+-----+-------+----------+-----------+--------+-----------+------------+----------

Little-endian; partition and rows unsigned 32-bit, first row and written ms signed 64-bit. `first
row` counts from the segment's first row, `written ms` is the writer's clock. Flags and reserved
are 0; a reader refuses flags it does not know. What follows is an Arrow IPC *stream* of one record
batch with the columns `key: binary` and `value: binary`, both nullable, its buffers compressed or
not as the stream says. Null is kept apart from empty: a null value is a tombstone, as in Kafka.
Later columns (event time, headers, typed ones) are more columns of the stream.

The entry's header has the payload's CRC; there is none here.
"""

import struct
from dataclasses import dataclass

import pyarrow as pa

from bookie_server.api.entry import Buffer
from spark_ledger import errors

MAGIC = b"SLM1"
VERSION = 1
HEADER_BYTES = 32
SCHEMA = pa.schema([pa.field("key", pa.binary()), pa.field("value", pa.binary())])
COMPRESSIONS = ("none", "lz4", "zstd")
OVERHEAD_BYTES_MAX = 1024  # of headers, schema and framing around one row's bytes

_HEADER = struct.Struct("<4sBBHIIqq")
assert _HEADER.size == HEADER_BYTES


@dataclass(frozen=True, slots=True)
class MessageBatch:
    """`record_batch` has the columns key and value (binary). `first_row` counts from the
    segment's first row."""

    partition: int
    first_row: int
    written_ms: int
    record_batch: pa.RecordBatch

    @property
    def rows(self) -> int:
        return int(self.record_batch.num_rows)


def encode_batch(
    record_batch: pa.RecordBatch,
    *,
    partition: int,
    first_row: int,
    written_ms: int,
    compression: str = "none",
) -> list[Buffer]:
    """The payload's buffers, in order; their concatenation is the payload."""
    rows = record_batch.num_rows
    body = encode_body(record_batch, compression)
    return [encode_header(partition, rows, first_row, written_ms), body]


def encode_header(partition: int, rows: int, first_row: int, written_ms: int) -> bytes:
    """The first HEADER_BYTES of a payload."""
    return _HEADER.pack(MAGIC, VERSION, 0, 0, partition, rows, first_row, written_ms)


def encode_body(record_batch: pa.RecordBatch, compression: str = "none") -> memoryview:
    """The Arrow IPC stream of one record batch of SCHEMA, read-only, so that a ledger's writer
    takes it without a copy. Raises ValueError for a compression that is none of COMPRESSIONS."""
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression is one of {COMPRESSIONS}, got {compression!r}")
    codec = None if compression == "none" else compression
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_stream(sink, SCHEMA, options=options) as stream:
        stream.write_batch(record_batch)
    return memoryview(sink.getvalue()).toreadonly()


def decode_batch(payload: Buffer) -> MessageBatch:
    """The batch in an entry's payload; uncompressed columns are views of it, not copies.

    Raises errors.UnsupportedFormat for another magic, version or flags, a header that does not
    fit the rows, or a damaged stream.
    """
    view = memoryview(payload)
    try:
        magic, version, flags, _, partition, rows, first_row, written_ms = _HEADER.unpack_from(view)
        if (magic, version, flags) != (MAGIC, VERSION, 0):
            raise errors.UnsupportedFormat(
                f"an entry with magic {magic!r}, version {version}, flags {flags} was met where"
                " a message batch was expected"
            )
        with pa.ipc.open_stream(pa.py_buffer(view[HEADER_BYTES:])) as stream:
            record_batch = stream.read_next_batch()
        columns = [record_batch.column(name) for name in SCHEMA.names]
    except (struct.error, pa.ArrowException, KeyError, StopIteration, OSError) as error:
        raise errors.UnsupportedFormat(f"a damaged message batch: {error}") from error
    if record_batch.num_rows != rows:
        raise errors.UnsupportedFormat(
            f"a message batch of {record_batch.num_rows} rows says {rows} in its header"
        )
    kept = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
    return MessageBatch(partition, first_row, written_ms, kept)
