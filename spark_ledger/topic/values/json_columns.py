"""Values of JSON as raw columns. Pure.

Always true: usual fields of all values are parsed at once by Arrow. Arrow's parser knows no maps,
no bytes and no unions of several branches, and gives up for all rows if one row does not fit: then
plain.py decodes these fields, or all rows, one by one. Both give the same columns.
"""

from collections.abc import Sequence

import pyarrow as pa

from spark_ledger.topic.entry.json_values import all_braced, read_lines
from spark_ledger.topic.schema.shapes import Field, ValueShape
from spark_ledger.topic.values.types import raw_type

_USUAL = frozenset(("boolean", "int", "long", "float", "double", "string", "enum"))


def read_usual(values: pa.Array, fields: Sequence[Field]) -> dict[str, pa.Array]:
    """The columns of those of `fields` that Arrow parses; none if some row does not fit. `values`
    have no nulls."""
    usual = [field for field in fields if is_usual(field.shape)]
    text = values.view(pa.string())
    if not usual or not len(values) or not all_braced(text):
        return {}
    schema = pa.schema([(field.name, raw_type(field.shape, of_json=True)) for field in usual])
    try:
        batch = read_lines(text, schema)
    except pa.ArrowInvalid:
        return {}
    return dict(zip(batch.schema.names, batch.columns, strict=True))


def is_usual(shape: ValueShape) -> bool:
    """Whether Arrow parses values of the shape."""
    if shape.kind == "union":
        return len(shape.branches) == 1 and is_usual(shape.branches[0])
    if shape.kind == "record":
        return bool(shape.fields) and all(is_usual(field.shape) for field in shape.fields)
    if shape.kind == "array":
        return is_usual(shape.inner[0])
    return shape.kind in _USUAL or shape.logical == "decimal"
