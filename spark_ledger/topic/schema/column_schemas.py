"""The schema under which Pulsar's clients read rows of columns: a JSON schema, made of the columns
of one version of a topic's schema. Pure.

A row becomes a JSON object (topic/entry/json_values.py, `encode_for_clients`); its schema is a
record of Avro's in JSON, as clients declare schemas of type JSON. docs/pulsar.md has the table.

Always true: equal columns give equal bytes. Types without a form in JSON that every client reads
(decimals, dates, times) are text. A column that may be null is a union with null, and its default
is null. Elements of lists and values of maps are never such a union, because no client has a type
for it. A record is named by its place, within the namespace of the places around it, so that names
differ. A column whose name Avro does not take is in the objects, and not in the schema.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from spark_ledger.topic.schema.client_schemas import ClientSchema, ClientSchemaType

_ROW = "row"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TYPES = {
    pa.bool_(): "boolean",
    pa.int8(): "int",
    pa.int16(): "int",
    pa.int32(): "int",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.binary(): "bytes",
    pa.duration("us"): "long",
}


def client_schema(columns: pa.Schema) -> ClientSchema:
    """The schema of rows with these canonical columns."""
    plain = {"type": "record", "name": _ROW, "fields": _fields(columns, _ROW)}
    return ClientSchema(ClientSchemaType.JSON, json.dumps(plain, separators=(",", ":")).encode())


def _fields(fields: Iterable[pa.Field], place: str) -> list[dict[str, Any]]:
    plain_fields = []
    for field in fields:
        if not _NAME.fullmatch(field.name):
            continue
        plain: dict[str, Any] = {"name": field.name, "type": _type(field.type, place, field.name)}
        if field.nullable:
            plain |= {"type": ["null", plain["type"]], "default": None}
        plain_fields.append(plain)
    return plain_fields


def _type(kind: pa.DataType, place: str, name: str) -> Any:
    """The type of a value `name` in the record at `place`."""
    inner = f"{place}.{name}"
    if pa.types.is_struct(kind):
        fields = _fields(kind, inner)
        return {"type": "record", "name": name, "namespace": place, "fields": fields}
    if pa.types.is_list(kind):
        return {"type": "array", "items": _type(kind.value_type, inner, "element")}
    if pa.types.is_map(kind) and pa.types.is_nested(kind.key_type):
        pairs = pa.struct([kind.key_field, kind.item_field])
        return {"type": "array", "items": _type(pairs, inner, "element")}
    if pa.types.is_map(kind):
        return {"type": "map", "values": _type(kind.item_type, inner, "value")}
    return kind_of(kind)


def kind_of(kind: pa.DataType) -> str:
    """Avro's kind of the values in JSON of a column that is not nested."""
    return _TYPES.get(kind, "string")
