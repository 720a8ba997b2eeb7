"""A task's columns as they are stored: with the entry's types, without columns of nulls only.

Always true: a column gets the type that message_batch.py names, or an error names the column; a
column that is null in every row is left out; the bytes of text and binary are not copied if their
layout is the entry's. `row_bytes` gives the bytes by which each row makes an entry larger.
"""

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_ledger import errors
from spark_ledger.topic.entry.arrow_arrays import (
    BYTES,
    OFFSET_BYTES,
    OFFSET_LISTS,
    TEXT,
    is_any,
    offsets_of,
)
from spark_ledger.topic.entry.message_batch import (
    EVENT_TIME,
    HEADERS,
    HEADERS_TYPE,
    KEY,
    TYPED_NAMES,
    TYPES,
    VALUE,
)

COLUMN_BYTES_MAX = (1 << 31) - (1 << 20)  # what 32-bit offsets can address
ROW_BYTES_MIN = 32  # a row's nulls in key, event time and headers of other rows take 17 bytes
OVERHEAD_BYTES_MAX = 1024  # of an entry with one row's key and value: header, schema, framing
FIELD_OVERHEAD_BYTES_MAX = 512  # of each further field, also a nested one, without its name

_FIXED_WIDTH = (pa.types.is_primitive, pa.types.is_fixed_size_binary, pa.types.is_decimal)

Sizes = npt.NDArray[np.int64]
MaybeColumn: TypeAlias = pa.Array | None


def stored_batches(
    keys: MaybeColumn,
    values: pa.Array | pa.RecordBatch,
    event_times: MaybeColumn,
    headers: MaybeColumn,
) -> Iterator[pa.RecordBatch]:
    """The rows with columns of the entry's types, in parts that 32-bit offsets can address.

    `values` is the column `value`, or a record batch of the topic's own columns. Raises
    errors.ColumnTypeMismatch; ValueError for columns of unequal length or with a reserved name.
    """
    typed = isinstance(values, pa.RecordBatch)
    columns_given = {KEY: keys, EVENT_TIME: event_times, HEADERS: headers}
    columns = {name: column for name, column in columns_given.items() if column is not None}
    rows = values.num_rows if typed else len(values)
    for name, column in columns.items():
        if len(column) != rows:
            raise ValueError(f"{len(column)} of {name} for {rows} rows")
    for common, part in _addressable_parts(columns, values):
        yield _typed_batch(common, part) if typed else _untyped_batch(common, part)


def union(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """The rows of all batches, with the columns of all batches; null where a batch lacks a
    column."""
    if len(batches) == 1:
        return batches[0]
    schema = batches[0].schema
    for batch in batches[1:]:
        if batch.schema != schema:
            schema_of_all = _union_schema([batch.schema for batch in batches])
            columns = [
                pa.concat_arrays([_column(batch, f) for batch in batches]) for f in schema_of_all
            ]
            return pa.RecordBatch.from_arrays(columns, schema=schema_of_all)
    (joined,) = pa.Table.from_batches(batches, schema).combine_chunks().to_batches()
    return joined


def row_bytes(batch: pa.RecordBatch) -> Sizes:
    """An upper bound of the bytes that each row takes in an entry, without the columns that only
    other rows of the entry have. With these columns a row takes less than twice as many bytes,
    since each row counts as ROW_BYTES_MIN at least."""
    total, *others = map(_sizes, batch.columns)
    for sizes in others:
        total += sizes
    return np.maximum(total, ROW_BYTES_MIN, out=total)


def overhead_bytes_max(schema: pa.Schema) -> int:
    """How many bytes an entry with one row of these columns takes beyond its `row_bytes`, at
    most."""
    field_bytes = (_field_overhead(field) for field in schema if field.name not in (KEY, VALUE))
    return OVERHEAD_BYTES_MAX + sum(field_bytes)


def as_binary(column: pa.Array, name: str) -> pa.Array:
    """The column as `binary`, without a copy of its bytes where the type allows.

    Raises errors.ColumnTypeMismatch for anything but text, binary and null columns.
    """
    kind = column.type
    if pa.types.is_binary(kind):
        return column
    if not (pa.types.is_null(kind) or is_any(kind, TEXT) or is_any(kind, BYTES)):
        raise errors.ColumnTypeMismatch(
            f"column {name} is of type {kind}, but key and value must be text or binary",
            column=name,
        )
    return column.cast(pa.binary())


def _addressable_parts(
    columns: Mapping[str, pa.Array], values: pa.Array | pa.RecordBatch
) -> Iterator[tuple[Mapping[str, pa.Array], pa.Array | pa.RecordBatch]]:
    """The columns and values, cut into halves until 32-bit offsets can address each part."""
    rows = values.num_rows if isinstance(values, pa.RecordBatch) else len(values)
    largest = max([values.nbytes, *(column.nbytes for column in columns.values())])
    if rows <= 1 or largest <= COLUMN_BYTES_MAX:
        yield columns, values
        return
    for start, end in ((0, rows // 2), (rows // 2, rows)):
        halves = {name: column.slice(start, end - start) for name, column in columns.items()}
        yield from _addressable_parts(halves, values.slice(start, end - start))


def _untyped_batch(columns: Mapping[str, pa.Array], values: pa.Array) -> pa.RecordBatch:
    all_columns = {**_common_columns(columns), VALUE: as_binary(values, VALUE)}
    names = [name for name in TYPES if name in all_columns]
    return pa.RecordBatch.from_arrays([all_columns[name] for name in names], names=names)


def _typed_batch(columns: Mapping[str, pa.Array], payload: pa.RecordBatch) -> pa.RecordBatch:
    common = {TYPED_NAMES[name]: column for name, column in _common_columns(columns).items()}
    names = payload.schema.names
    bad_names = [name for name in names if name in TYPED_NAMES.values() or names.count(name) > 1]
    if bad_names or not names:
        raise ValueError(f"a topic's own columns cannot be called {bad_names}, of {names}")
    own_columns = [
        _plain_column(column, name) for column, name in zip(payload.columns, names, strict=True)
    ]
    return pa.RecordBatch.from_arrays([*common.values(), *own_columns], names=[*common, *names])


def _common_columns(columns: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
    """Key, event time and headers, with the entry's types; columns of nulls only are left out."""
    converted = {name: _CONVERSIONS[name](column, name) for name, column in columns.items()}
    return {name: column for name, column in converted.items() if column.null_count < len(column)}


def _as_event_time(column: pa.Array, name: str) -> pa.Array:
    kind = column.type
    if kind == TYPES[EVENT_TIME]:
        return column
    if not (pa.types.is_timestamp(kind) or pa.types.is_null(kind)):
        raise errors.ColumnTypeMismatch(
            f"column {name} is of type {kind}, but must be a timestamp", column=name
        )
    return column.cast(TYPES[EVENT_TIME], safe=False)


def _as_headers(column: pa.Array, name: str) -> pa.Array:
    if column.type == HEADERS_TYPE:
        return column
    try:
        if not _is_headers(column.type):
            raise pa.ArrowInvalid("not a list of key and value")
        return column.cast(HEADERS_TYPE)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise errors.ColumnTypeMismatch(
            f"column {name} is of type {column.type}, but must be an array of structs of key and"
            " value",
            column=name,
        ) from error


def _is_headers(kind: pa.DataType) -> bool:
    """Whether the type is null, a map, or a list of structs of key and value."""
    if pa.types.is_null(kind) or pa.types.is_map(kind):
        return True
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    item = kind.value_type
    return pa.types.is_struct(item) and {field.name for field in item} == {"key", "value"}


_CONVERSIONS = {KEY: as_binary, EVENT_TIME: _as_event_time, HEADERS: _as_headers}


def _plain_column(column: pa.Array, name: str) -> pa.Array:
    """One of the topic's own columns, converted if `_sizes` does not support its layout."""
    if pa.types.is_dictionary(column.type):
        return _plain_column(column.cast(column.type.value_type), name)
    if pa.types.is_string_view(column.type):
        return column.cast(pa.string())
    if pa.types.is_binary_view(column.type):
        return column.cast(pa.binary())
    _sizes(column.slice(0, 0), name)
    return column


def _sizes(column: pa.Array, name: str = "") -> Sizes:
    """The size of each value, with a byte for its bit in the null map if the column has nulls. The
    caller may change the array."""
    sizes = _content_sizes(column, name)
    if column.null_count:
        sizes += 1
    return sizes


def _content_sizes(column: pa.Array, name: str) -> Sizes:
    kind = column.type
    if is_any(kind, OFFSET_BYTES):
        offsets = offsets_of(column)
        lengths: Sizes = np.subtract(offsets[1:], offsets[:-1], dtype=np.int64)
        lengths += offsets.itemsize
        return lengths
    if is_any(kind, OFFSET_LISTS):
        offsets = offsets_of(column)
        ends = np.concatenate([[0], np.cumsum(_sizes(_items(column), name))])
        return np.asarray(np.diff(ends[offsets]), dtype=np.int64) + offsets.itemsize
    if pa.types.is_struct(kind):
        fields = (column.field(i) for i in range(kind.num_fields))
        return sum((_sizes(child, name) for child in fields), np.zeros(len(column), np.int64))
    if pa.types.is_null(kind):
        return np.zeros(len(column), dtype=np.int64)
    if is_any(kind, _FIXED_WIDTH):
        return np.full(len(column), -(-kind.bit_width // 8), dtype=np.int64)
    raise errors.ColumnTypeMismatch(
        f"column {name} has the type {kind}, which is not stored",
        "Cast it to numbers, text, binary, times, or arrays, structs and maps of these.",
        column=name,
    )


def _items(column: pa.Array) -> pa.Array:
    """The items of all lists, to which the offsets refer."""
    if pa.types.is_map(column.type):
        fields = [column.type.key_field, column.type.item_field]
        return pa.StructArray.from_arrays([column.keys, column.items], fields=fields)
    return column.values


def _field_overhead(field: pa.Field) -> int:
    kind = field.type
    inner = [kind.field(i) for i in range(kind.num_fields)]
    return FIELD_OVERHEAD_BYTES_MAX + 4 * len(field.name) + sum(map(_field_overhead, inner))


def _column(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    index = batch.schema.get_field_index(field.name)
    return pa.nulls(batch.num_rows, field.type) if index < 0 else batch.column(index)


def _union_schema(schemas: list[pa.Schema]) -> pa.Schema:
    """Every field of the schemas. Raises ValueError if two fields of one name have different
    types."""
    fields: dict[str, pa.Field] = {}
    for schema in schemas:
        for field in schema:
            if fields.setdefault(field.name, field).type != field.type:
                raise ValueError(f"column {field.name} was {fields[field.name].type}: {field.type}")
    names = [name for name in (*TYPES, *TYPED_NAMES.values()) if name in fields]
    other_names = [name for name in fields if name not in names]
    return pa.schema([fields[name] for name in (*names, *other_names)])


def event_bounds_ms(times: pa.Array) -> tuple[int, int] | None:
    """The least event time of the rows, rounded down to milliseconds, and the greatest, rounded up;
    None if no row has an event time."""
    import pyarrow.compute as pc  # loaded only here: loading it takes 35 ms

    bounds = pc.min_max(times.cast(pa.int64()))
    low, high = bounds["min"].as_py(), bounds["max"].as_py()
    if low is None:
        return None
    return low // 1000, -(-high // 1000)
