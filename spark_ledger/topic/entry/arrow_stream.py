"""Arrow IPC streams of one record batch, checked before their bytes are believed. Pure.

    continuation (4) | size (4) | schema | continuation | size | record batch's message | body

Always true: a batch that `read_batch` returns was validated in full: a column's offsets are within
its buffers. Before anything is decompressed, the sizes that the buffers declare are checked:
together they are at most `bytes_max`. Arrow decompresses a buffer to exactly its declared size, or
raises. No writer of ours makes a stream of another shape (with dictionaries, or with the framing
before Arrow 0.15). Text need not be UTF-8: Spark's columns may hold any bytes as text.
"""

import struct
from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa

from bookie_server.api.entry import Buffer
from spark_ledger import errors
from spark_ledger.topic.entry.arrow_arrays import TEXT, is_any

UNPACKED_BYTES_MAX = 256 << 20
"""The largest size of an entry's columns, decompressed. A writer makes entries of 2 MiB, or of one
larger row; every row fits into an entry without compression."""
ROWS_MAX = 1 << 24
"""The most rows of a stream. A row takes some bytes, so an entry of 2 MiB has far fewer rows."""
FAULTS = (
    *(pa.ArrowException, StopIteration, OSError),
    *(struct.error, ValueError, OverflowError, IndexError),
)
"""The errors that malformed bytes raise."""

_CONTINUATION = 0xFFFFFFFF
_FRAME = struct.Struct("<II")
_U16, _I32, _U32, _I64 = map(struct.Struct, ("<H", "<i", "<I", "<q"))
_RECORD_BATCH = 3  # MessageHeader in Arrow's Message.fbs
_HEADER_TYPE, _HEADER, _BODY_BYTES = 1, 2, 3  # fields of a Message
_LENGTH, _BUFFERS, _COMPRESSION = 0, 2, 3  # fields of a RecordBatch
_BUFFER = struct.Struct("<qq")
_NOT_COMPRESSED = -1

FieldChoice = Callable[[pa.Schema], Sequence[int]]
"""The indices of the fields to read."""


def read_batch(
    stream: Buffer,
    choose: FieldChoice | None = None,
    *,
    bytes_max: int = UNPACKED_BYTES_MAX,
    rows_max: int = ROWS_MAX,
    use_threads: bool = True,
) -> tuple[int, pa.RecordBatch | None]:
    """The number of rows of the stream's record batch, and the batch with the fields that `choose`
    returns (None: all fields). If `choose` returns no field, the batch is None. Columns that are
    not compressed are views of `stream`. Raises errors.BadEntry, and the errors of `choose`."""
    body = pa.py_buffer(stream)
    try:
        with _open_stream(body, fields=None, use_threads=use_threads) as reader:
            schema = reader.schema
            _check_text(list(schema))
            indices = range(len(schema)) if choose is None else choose(schema)
            rows = _check_sizes(memoryview(stream), bytes_max, rows_max)
            if len(indices) == len(schema):
                batch = reader.read_next_batch()
        if not indices:
            return rows, None
        if len(indices) < len(schema):
            with _open_stream(body, fields=list(indices), use_threads=use_threads) as reader:
                batch = reader.read_next_batch()
        _validate(batch)
    except FAULTS as error:
        raise errors.BadEntry(f"a damaged Arrow stream: {error}") from error
    if batch.num_rows != rows:
        raise errors.BadEntry(f"a damaged Arrow stream of {batch.num_rows} rows declares {rows}")
    return rows, batch


def _check_text(fields: Iterable[pa.Field]) -> None:
    """Raises UnicodeDecodeError, a ValueError, if a name or a zone is not text."""
    for field in fields:
        _, kind = field.name, field.type  # Arrow decodes the name here
        if pa.types.is_timestamp(kind):
            str(kind.tz)
        elif kind.num_fields:
            _check_text(map(kind.field, range(kind.num_fields)))


def _open_stream(
    body: pa.Buffer, fields: list[int] | None, use_threads: bool
) -> pa.RecordBatchStreamReader:
    options = pa.ipc.IpcReadOptions(
        ensure_native_endian=False,  # Arrow would swap bytes before any check
        use_threads=use_threads,
        included_fields=fields,
    )
    return pa.ipc.open_stream(body, options=options)


def _validate(batch: pa.RecordBatch) -> None:
    """Raises pa.ArrowInvalid."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        batch.validate()  # the views below need valid buffers
        types = [_as_bytes(kind) for kind in batch.schema.types]
        if types == batch.schema.types:
            raise
        for column, kind in zip(batch.columns, types, strict=True):
            column.view(kind).validate(full=True)


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """The type with bytes in place of text, since Arrow's validation demands UTF-8 of text."""
    if is_any(kind, TEXT):
        return pa.binary() if pa.types.is_string(kind) else pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_as_bytes(kind.value_type)))
    if pa.types.is_map(kind):
        key, item = (
            field.with_type(_as_bytes(field.type)) for field in (kind.key_field, kind.item_field)
        )
        return pa.map_(key, item)
    return kind


# -- what the message of a record batch declares ---------------------------------------------------
#
# Arrow checks the flatbuffer when it reads the message, but then decompresses at once. So the few
# fields with sizes are read here, before Arrow reads the message. Every position is checked to be
# within the message.


def _check_sizes(stream: memoryview, bytes_max: int, rows_max: int) -> int:
    """The number of rows. Raises errors.BadEntry for too many rows or bytes, and FAULTS."""
    _, end = _message(stream, at=0)
    message, end = _message(stream, end)
    (table,) = _U32.unpack_from(message)
    kind_at, header_at = (
        _field_position(message, table, _HEADER_TYPE),
        _field_position(message, table, _HEADER),
    )
    if not kind_at or not header_at or message[kind_at] != _RECORD_BATCH:
        kind = message[kind_at] if kind_at else 0
        raise errors.BadEntry(
            f"a damaged Arrow stream whose second message is of kind {kind}, not a record batch"
        )
    body_bytes = _number(message, table, _BODY_BYTES)
    if not 0 <= body_bytes <= len(stream) - end:
        raise errors.BadEntry(
            f"a damaged Arrow stream declares a body of {body_bytes} bytes, but has"
            f" {len(stream) - end} bytes"
        )
    batch = header_at + _U32.unpack_from(message, header_at)[0]
    rows = _number(message, batch, _LENGTH)
    if not 0 <= rows <= rows_max:
        raise errors.BadEntry(
            f"a damaged Arrow stream declares {rows} rows, at most {rows_max} are read"
        )
    if _field_position(message, batch, _COMPRESSION):
        body = stream[end : end + body_bytes]
        _check_unpacked(body, _buffers(message, batch), bytes_max)
    return rows


def _message(stream: memoryview, at: int) -> tuple[memoryview, int]:
    """The message after the continuation and size at this position, and the message's end."""
    continuation, size = _FRAME.unpack_from(stream, at)
    begin = at + _FRAME.size
    if continuation != _CONTINUATION or not 0 < size <= len(stream) - begin:
        raise errors.BadEntry(f"a damaged Arrow stream with a message of {size} bytes at byte {at}")
    return stream[begin : begin + size], begin + size


def _field_position(message: memoryview, table: int, field: int) -> int:
    """The position of a table's field; 0 if the field is absent: it then has its default."""
    vtable = table - _I32.unpack_from(message, table)[0]
    if vtable < 0:  # Python would count the position from the end
        raise ValueError(f"a position before the message: {vtable}")
    slot = 4 + 2 * field
    if slot >= _U16.unpack_from(message, vtable)[0]:
        return 0
    offset: int = _U16.unpack_from(message, vtable + slot)[0]
    return table + offset if offset else 0


def _number(message: memoryview, table: int, field: int) -> int:
    at = _field_position(message, table, field)
    number: int = _I64.unpack_from(message, at)[0] if at else 0
    return number


def _buffers(message: memoryview, batch: int) -> memoryview:
    """The offset and length of each buffer, as bytes; Arrow compares these with the body."""
    at = _field_position(message, batch, _BUFFERS)
    if not at:
        return message[:0]
    at += _U32.unpack_from(message, at)[0]
    (count,) = _U32.unpack_from(message, at)
    buffer_records = message[at + _U32.size :][: _BUFFER.size * count]
    if len(buffer_records) != _BUFFER.size * count:
        raise errors.BadEntry(f"a damaged Arrow stream declares {count} buffers")
    return buffer_records


def _check_unpacked(body: memoryview, buffers: memoryview, bytes_max: int) -> None:
    """Checks the unpacked sizes. A compressed buffer begins with its unpacked size, or with -1 if
    the buffer is not compressed."""
    total = 0
    for offset, length in _BUFFER.iter_unpack(buffers):
        if not 0 <= offset <= len(body) or not 0 <= length <= len(body) - offset:
            raise errors.BadEntry("a damaged Arrow stream has a buffer that is not within its body")
        if not length:
            continue
        (size,) = _I64.unpack_from(body, offset)
        if length < _I64.size or size < _NOT_COMPRESSED:
            raise errors.BadEntry(f"a damaged Arrow stream has a buffer of {size} bytes, unpacked")
        total += max(size, 0)
    if total > bytes_max:
        raise errors.BadEntry(
            f"a damaged Arrow stream of {total} bytes, decompressed; at most {bytes_max} are read"
        )
