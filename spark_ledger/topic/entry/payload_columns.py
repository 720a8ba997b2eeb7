"""The columns of a topic's rows, converted to the schema of a write or a read.

Always true: columns are found by name without regard to case; a column that is missing is null. A
value that the schema's type does not hold is never changed: it is an error. A null in a column that
the schema declares NOT NULL is an error too. Work is done on whole columns: a column that has the
schema's type is not copied, and a nested column keeps the buffers of its parts that do not change.
"""

from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from spark_ledger import errors
from spark_ledger.topic.entry.arrow_arrays import BYTES, LISTS, TEXT, is_any


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The rows of `batch` with exactly the columns of the canonical `schema`, in the schema's
    order.

    Raises errors.SchemaIncompatible, which names the column.
    """
    indexes = {field.name.lower(): i for i, field in enumerate(batch.schema)}
    columns = []
    for field in schema:
        index = indexes.get(field.name.lower())
        column = pa.nulls(batch.num_rows, pa.null()) if index is None else batch.column(index)
        columns.append(_conform_field(column, field, field.name))
    if not columns:
        return batch.select([])
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def check_convertible(canonical: pa.Schema, declared: pa.Schema) -> None:
    """Checks that rows of the `canonical` schema can be converted to `declared`. Raises
    errors.SchemaMissingColumn or errors.SchemaTypeMismatch for the first column that cannot."""
    types = {field.name.lower(): field.type for field in canonical}
    for field in declared:
        kind = types.get(field.name.lower())
        if kind is None:
            raise errors.SchemaMissingColumn(
                f"no version of the schema has a column {field.name!r}",
                f"Declare only columns among: {', '.join(canonical.names)}.",
            )
        try:
            _conform(pa.array([], kind), field.type, field.name)
        except errors.SchemaIncompatible as error:
            raise errors.SchemaTypeMismatch(
                error.what, f"Declare the column as {kind}, and cast it afterwards."
            ) from error


def _conform_field(column: pa.Array, field: pa.Field, path: str, null_structs: int = 0) -> pa.Array:
    """`null_structs`: how many rows are null because the struct around the field is null."""
    conformed = _conform(column, field.type, path)
    if not field.nullable and conformed.null_count > null_structs:
        raise errors.SchemaIncompatible(
            f"column {path!r} is NOT NULL in the schema, but null in"
            f" {conformed.null_count - null_structs} of {len(conformed)} rows",
            "Give every row a value in this column.",
        )
    return conformed


def _conform(column: pa.Array, kind: pa.DataType, path: str) -> pa.Array:
    column_type = column.type
    if column_type == kind:
        return column
    if pa.types.is_null(column_type):
        return pa.nulls(len(column), kind)
    if pa.types.is_dictionary(column_type):
        return _conform(column.dictionary_decode(), kind, path)
    if pa.types.is_struct(column_type) and pa.types.is_struct(kind):
        return _conform_struct(column, kind, path)
    if pa.types.is_map(column_type) and pa.types.is_map(kind):
        return _conform_map(column, kind, path)
    if is_any(column_type, LISTS) and pa.types.is_list(kind):
        return _conform_list(column, kind, path)
    return _cast(column, kind, path)


def _conform_struct(column: pa.StructArray, kind: pa.StructType, path: str) -> pa.Array:
    indexes = {field.name.lower(): i for i, field in enumerate(column.type)}
    null_mask = _null_mask(column)
    children = []
    for field in kind:
        index = indexes.get(field.name.lower())
        child = pa.nulls(len(column), pa.null()) if index is None else column.field(index)
        if not field.nullable and null_mask is not None:  # null structs may have null fields
            child = pc.if_else(null_mask, pa.scalar(None, child.type), child)
        children.append(
            _conform_field(child, field, f"{path}.{field.name}", null_structs=column.null_count)
        )
    return pa.StructArray.from_arrays(children, fields=list(kind), mask=null_mask)


def _conform_list(column: pa.Array, kind: pa.ListType, path: str) -> pa.Array:
    if not pa.types.is_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    offsets, first, last = _offsets(column)
    items = _conform_field(
        column.values.slice(first, last - first), kind.value_field, f"{path}.element"
    )
    return pa.ListArray.from_arrays(offsets, items, type=kind, mask=_null_mask(column))


def _conform_map(column: pa.MapArray, kind: pa.MapType, path: str) -> pa.Array:
    offsets, first, last = _offsets(column)
    keys = _conform_field(column.keys.slice(first, last - first), kind.key_field, f"{path}.key")
    items = _conform_field(
        column.items.slice(first, last - first), kind.item_field, f"{path}.value"
    )
    return pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=_null_mask(column))


class _Offsets(NamedTuple):
    """Of a column of lists: `offsets` are the positions at which each row's items begin, counted
    from the first row's items. The items [first, last) of the column are those of all rows."""

    offsets: pa.Array
    first: int
    last: int


def _offsets(column: pa.Array) -> _Offsets:
    offsets = column.offsets
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    return _Offsets(pc.subtract(offsets, offsets[0]), first, last)


def _null_mask(column: pa.Array) -> pa.BooleanArray | None:
    return column.is_null() if column.null_count else None


def _cast(column: pa.Array, kind: pa.DataType, path: str) -> pa.Array:
    if not _is_castable(column.type, kind):
        raise errors.SchemaIncompatible(f"column {path!r} is {column.type}, not {kind}")
    try:
        cast = column.cast(kind)
        if pa.types.is_floating(kind):
            _check_same(cast.cast(column.type), column)
        return cast
    except pa.ArrowInvalid as error:
        raise errors.SchemaIncompatible(
            f"column {path!r} of type {column.type} has values that {kind} does not hold: {error}",
            "Read with the wider type; a running query uses the new type after its next start.",
        ) from error


def _is_castable(column_type: pa.DataType, kind: pa.DataType) -> bool:
    """Whether values of `column_type` may become values of `kind`: both types are of text, of
    bytes, of times, or of numbers of one sort."""
    if is_any(column_type, TEXT):
        return bool(pa.types.is_string(kind))
    if is_any(column_type, BYTES):
        return bool(pa.types.is_binary(kind))
    if pa.types.is_timestamp(column_type) and pa.types.is_timestamp(kind):
        return (column_type.tz is None) == (kind.tz is None) and column_type.unit == kind.unit
    if pa.types.is_decimal128(column_type) and pa.types.is_decimal128(kind):
        return bool(column_type.scale == kind.scale)
    alike = (pa.types.is_signed_integer, pa.types.is_floating)
    return any(test(column_type) and test(kind) for test in alike)


def _check_same(converted: pa.Array, column: pa.Array) -> None:
    """Raises ArrowInvalid if narrowing changed a float; NaN is equal to NaN here."""
    nan = pc.and_(pc.is_nan(converted), pc.is_nan(column))
    if pc.all(pc.or_(pc.equal(converted, column), nan)).as_py() is False:
        raise pa.ArrowInvalid("a number would lose digits")
