"""The Arrow types of shapes: raw, as values are decoded, and of the columns of a read. Pure.

Always true: the types of columns are canonical (topic/schema/records.py), and every column, field,
element and value may be null. The columns are those of Spark's from_avro, but for TIME, which
from_avro gives as a number. A raw type has no logical types, except that JSON's decimals are
decimals; a union of several branches is a struct with a member for each branch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pyarrow as pa

from spark_ledger.topic.schema.column_schemas import kind_of
from spark_ledger.topic.schema.rules import widens
from spark_ledger.topic.schema.shapes import NO_DEFAULT, Field, ValueShape

_SIMPLE = {
    "null": pa.null(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "fixed": pa.binary(),
    "string": pa.string(),
    "enum": pa.string(),
}
_LOGICAL = {
    "date": pa.date32(),
    "time-millis": pa.time64("ns"),
    "time-micros": pa.time64("ns"),
    "timestamp-millis": pa.timestamp("us", tz="UTC"),
    "timestamp-micros": pa.timestamp("us", tz="UTC"),
    "local-timestamp-millis": pa.timestamp("us"),
    "local-timestamp-micros": pa.timestamp("us"),
}
_JOINED = (({"int", "long"}, pa.int64()), ({"float", "double"}, pa.float64()))
"""The kinds of two branches whose union is one column of numbers, and the column's type."""
_NUMBERS = frozenset(("int", "long", "float", "double"))


def raw_type(shape: ValueShape, *, of_json: bool = False) -> pa.DataType:
    """The type of decoded values, before the reader's schema is applied."""
    if shape.kind == "union":
        branches = shape.branches
        if len(branches) == 1:
            return raw_type(branches[0], of_json=of_json)
        return _members([raw_type(branch, of_json=of_json) for branch in branches])
    if shape.logical == "decimal" and of_json:
        return pa.decimal128(shape.precision, shape.scale)
    if shape.kind == "record":
        return pa.struct([(f.name, raw_type(f.shape, of_json=of_json)) for f in shape.fields])
    if shape.kind in ("array", "map"):
        return _nested(shape.kind, raw_type(shape.inner[0], of_json=of_json))
    return _SIMPLE[shape.kind]


def column_type(shape: ValueShape) -> pa.DataType:
    """The type of the column that a read gives. A column that is always null is text."""
    if shape.column is not None and shape.kind != "map":
        return shape.column
    if shape.kind == "union":
        branches = shape.branches
        if not branches:
            return _SIMPLE["string"]
        if len(branches) == 1:
            return column_type(branches[0])
        return joined_type(shape) or _members([column_type(branch) for branch in branches])
    if shape.kind == "record":
        return pa.struct([(field.name, column_type(field.shape)) for field in shape.fields])
    if shape.kind in ("array", "map"):
        return _nested(shape.kind, column_type(shape.inner[0]), shape.column or pa.string())
    if shape.logical == "decimal":
        return pa.decimal128(shape.precision, shape.scale)
    if shape.kind == "null":
        return pa.string()
    return _LOGICAL.get(shape.logical) or _SIMPLE[shape.kind]


def shape_of_columns(columns: Iterable[pa.Field]) -> ValueShape:
    """The shape of JSON objects with values for Spark's columns, as column_schemas.py describes
    them. All columns may be null."""
    fields = (Field(column.name, _shape_of(column.type), default=None) for column in columns)
    return ValueShape("record", fields=tuple(fields))


def _shape_of(kind: pa.DataType) -> ValueShape:
    if pa.types.is_struct(kind):
        return shape_of_columns(kind)
    if pa.types.is_list(kind):
        return ValueShape("array", inner=(_shape_of(kind.value_type),))
    if pa.types.is_map(kind) and pa.types.is_nested(kind.key_type):
        pairs = shape_of_columns([kind.key_field, kind.item_field])
        return ValueShape("array", inner=(pairs,), column=kind)
    if pa.types.is_map(kind):
        return ValueShape("map", inner=(_shape_of(kind.item_type),), column=kind.key_type)
    return ValueShape(kind_of(kind), column=kind)


def beside_columns(columns: ValueShape, shape: ValueShape) -> ValueShape:
    """The shape that has the values of Spark's columns and of a client's schema that fits them:
    the type of the column, or the client's type if it is wider, and the fields of both."""
    if len(shape.branches) == 1:
        (shape,) = shape.branches
    if columns.kind == shape.kind == "record":
        return ValueShape("record", fields=tuple(_joined_fields(columns.fields, shape.fields)))
    if columns.kind == shape.kind and columns.inner and columns.kind != "union":
        inner = columns.inner[0]
        if columns.kind == "map" or columns.column is None:
            inner = beside_columns(inner, shape.inner[0])
        return replace(columns, inner=(inner,))
    is_number = columns.column is not None and shape.kind in _NUMBERS
    return shape if is_number and widens(columns.column, column_type(shape)) else columns


def _joined_fields(columns: Sequence[Field], fields: Sequence[Field]) -> Iterable[Field]:
    """Names of columns count without regard to case. What Spark's rows lack is null in them."""
    by_name = {column.name.lower(): column for column in columns}
    for field in fields:
        column = by_name.pop(field.name.lower(), None)
        if column is None:
            yield _may_lack(field)
        else:
            aliases = (field.name, *field.aliases)
            yield replace(column, shape=beside_columns(column.shape, field.shape), aliases=aliases)
    yield from by_name.values()


def joined(shape: ValueShape, other: ValueShape) -> ValueShape:
    """The shape, with what only the `other` has: fields of records, symbols of enums, a wider type
    of numbers. A field that values of one of the two lack is null in them."""
    shape, other = (s.branches[0] if len(s.branches) == 1 else s for s in (shape, other))
    if shape.kind != other.kind:
        is_wider = {shape.kind, other.kind} <= _NUMBERS and not (shape.logical or other.logical)
        return other if is_wider and widens(column_type(shape), column_type(other)) else shape
    if shape.kind in ("array", "map"):
        return replace(shape, inner=(joined(shape.inner[0], other.inner[0]),))
    if shape.kind == "enum":
        return replace(shape, symbols=tuple(dict.fromkeys((*shape.symbols, *other.symbols))))
    if shape.kind != "record":
        return shape
    by_name = {field.name.lower(): field for field in other.fields}
    fields = []
    for field in map(_may_lack, shape.fields):
        beside = by_name.pop(field.name.lower(), None)
        if beside is not None:
            aliases = dict.fromkeys((*field.aliases, beside.name, *beside.aliases))
            both = joined(field.shape, beside.shape)
            field = replace(field, shape=both, aliases=tuple(aliases))
        fields.append(field)
    return replace(shape, fields=(*fields, *map(_may_lack, by_name.values())))


def _may_lack(field: Field) -> Field:
    return replace(field, default=None) if field.default is NO_DEFAULT else field


def joined_type(union: ValueShape) -> pa.DataType | None:
    """The type of the one column of numbers that a union of two kinds of numbers has."""
    branches = union.branches
    kinds = {branch.kind for branch in branches if not branch.logical}
    if len(branches) == 2:
        return next((kind for names, kind in _JOINED if kinds == names), None)
    return None


def _members(types: list[pa.DataType]) -> pa.DataType:
    if not types:
        return _SIMPLE["null"]
    return pa.struct([(f"member{i}", kind) for i, kind in enumerate(types)])


def _nested(kind: str, inner: pa.DataType, key: pa.DataType = _SIMPLE["string"]) -> pa.DataType:
    if kind == "array":
        return pa.list_(pa.field("element", inner))
    return pa.map_(pa.field("key", key, nullable=False), pa.field("value", inner))
