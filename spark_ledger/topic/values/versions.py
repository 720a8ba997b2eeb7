"""The columns that values of a client's schema have. Pure.

    JSON, AVRO of a record         a column for each field
    JSON, AVRO of another type     a column `value`
    KEY_VALUE                      two columns, `key` and `value`
    STRING, BOOLEAN, INT8 ...      a column `value`
    PROTOBUF and all other types   a column `value` of bytes

Always true: a version's columns are a record, so that a version is resolved to another by the rules
for records (resolution.py). The key of KEY_VALUE is in the value's bytes (INLINE, each part behind
its length), or is the message's key (SEPARATED).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from spark_ledger.topic.schema.client_schemas import (
    AVRO_TYPES,
    ClientSchema,
    ClientSchemaType,
    key_and_value,
)
from spark_ledger.topic.schema.records import canonical
from spark_ledger.topic.schema.shapes import Field, ValueShape, shape_of
from spark_ledger.topic.values.types import column_type

JSON, AVRO, PLAIN = "json", "avro", "plain"
KEY_COLUMN, VALUE_COLUMN = "key", "value"
_Type = ClientSchemaType
PLAIN_SHAPES: Mapping[ClientSchemaType, tuple[str, str]] = {
    _Type.STRING: ("string", ""),
    _Type.BOOLEAN: ("boolean", ">u1"),
    _Type.INT8: ("int", ">i1"),
    _Type.INT16: ("int", ">i2"),
    _Type.INT32: ("int", ">i4"),
    _Type.INT64: ("long", ">i8"),
    _Type.FLOAT: ("float", ">f4"),
    _Type.DOUBLE: ("double", ">f8"),
}
"""Of primitive types the kind of the column, and of numbers the type of the bytes."""
_ENCODING = "kv.encoding.type"


@dataclass(frozen=True, slots=True)
class ValuePart:
    """Bytes that become columns: the fields of `shape`, a record; with `column` one column of this
    name and shape. `number` is the type of a plain number's bytes."""

    encoding: str
    shape: ValueShape
    column: str = ""
    number: str = ""

    @property
    def fields(self) -> tuple[Field, ...]:
        return (Field(self.column, self.shape),) if self.column else self.shape.fields


@dataclass(frozen=True, slots=True)
class Version:
    """How values of a version become columns. `parts` are one, or the key's and the value's."""

    parts: tuple[ValuePart, ...]
    is_inline: bool = False

    @property
    def record(self) -> ValueShape:
        return ValueShape(
            "record", fields=tuple(field for part in self.parts for field in part.fields)
        )

    @property
    def has_columns(self) -> bool:
        """Whether the values have other columns than their bytes."""
        return any(part.column != VALUE_COLUMN or part.shape.kind != "bytes" for part in self.parts)

    @property
    def needs_key(self) -> bool:
        """Whether a column is made of the message's key."""
        return len(self.parts) > 1 and not self.is_inline


def version_of(schema: ClientSchema) -> Version:
    """Raises errors.SchemaUnreadable, errors.SchemaTypeMismatch for a schema without columns."""
    if schema.kind is not _Type.KEY_VALUE:
        return Version((_part(schema, VALUE_COLUMN, is_alone=True),))
    key, value = key_and_value(schema)
    parts = (_part(key, KEY_COLUMN), _part(value, VALUE_COLUMN))
    return Version(parts, is_inline=schema.properties.get(_ENCODING) != "SEPARATED")


def columns_of(record: ValueShape) -> pa.Schema:
    """The columns of a read, canonical. Raises errors.SchemaReservedColumn,
    errors.SchemaUnknownColumn, errors.SchemaTypeMismatch, errors.SchemaMissingColumn."""
    return canonical(pa.schema([(f.name, column_type(f.shape)) for f in record.fields]))


def _part(schema: ClientSchema, column: str, *, is_alone: bool = False) -> ValuePart:
    if schema.kind in AVRO_TYPES - {_Type.PROTOBUF}:
        encoding = JSON if schema.kind is _Type.JSON else AVRO
        shape = shape_of(schema)
        return ValuePart(encoding, shape, "" if is_alone and shape.kind == "record" else column)
    kind, number = PLAIN_SHAPES.get(schema.kind, ("bytes", ""))
    return ValuePart(PLAIN, ValueShape(kind), column, number)
