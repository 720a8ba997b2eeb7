"""Values of JSON as raw columns. Pure.

Always true: usual fields of all values are parsed at once by Arrow; so are fields that are bytes or
a map of what is parsed at once. Arrow's parser knows no unions of several branches, no maps or
bytes within records and lists, and gives up for all rows if one row does not fit: then plain.py
decodes these fields, or all rows, one by one. Both give the same columns.
"""

from base64 import b64decode
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from spark_ledger.topic.entry.arrow_arrays import as_numpy, distinct_values, of_list
from spark_ledger.topic.entry.json_values import all_braced, read_lines
from spark_ledger.topic.schema.shapes import Field, ValueShape
from spark_ledger.topic.values.avro_columns import bits_of
from spark_ledger.topic.values.json_maps import KEY, VALUE, JsonMarks
from spark_ledger.topic.values.types import raw_type

_USUAL = frozenset(("boolean", "int", "long", "float", "double", "string", "enum"))
_BYTES = frozenset(("bytes", "fixed"))
_NO_FIELD = pa.schema([("\0", pa.null())])


def read_together(values: pa.Array, fields: Sequence[Field]) -> dict[str, pa.Array]:
    """The columns of those of `fields` that are parsed at once; none if some row does not fit.
    `values` have no nulls."""
    fields = [field for field in fields if is_parsed_together(field.shape)]
    text = values.view(pa.string())
    if not fields or not len(values) or not all_braced(text):
        return {}
    try:
        return _read(text, fields)
    except ValueError:  # as Arrow's own
        return {}


def is_parsed_together(shape: ValueShape) -> bool:
    shape = _not_null(shape)
    if shape.kind == "map":
        return is_parsed_together(shape.inner[0])
    return _is_of_bytes(shape) or is_usual(shape)


def is_usual(shape: ValueShape) -> bool:
    """Whether Arrow parses values of the shape."""
    shape = _not_null(shape)
    if shape.kind == "record":
        return bool(shape.fields) and all(is_usual(field.shape) for field in shape.fields)
    if shape.kind == "array":
        return is_usual(shape.inner[0])
    return shape.kind in _USUAL or shape.logical == "decimal"


def _is_of_bytes(shape: ValueShape) -> bool:
    return shape.kind in _BYTES and not shape.logical


def _not_null(shape: ValueShape) -> ValueShape:
    return shape.branches[0] if len(shape.branches) == 1 else shape


def _read(text: pa.StringArray, fields: Sequence[Field]) -> dict[str, pa.Array]:
    """Raises ValueError."""
    shapes = {field.name: _not_null(field.shape) for field in fields}
    maps = {name: shape for name, shape in shapes.items() if shape.kind == "map"}
    types = {name: _json_type(shape) for name, shape in shapes.items() if name not in maps}
    batch = read_lines(text, pa.schema(list(types.items())) if types else _NO_FIELD)
    columns = {name: batch.column(name) for name in types}
    columns |= {
        name: from_base64(column) for name, column in columns.items() if _is_of_bytes(shapes[name])
    }
    marks = JsonMarks(text) if maps else None
    return columns | {name: _map(marks, name, shape) for name, shape in maps.items() if marks}


def _json_type(shape: ValueShape) -> pa.DataType:
    return pa.string() if _is_of_bytes(shape) else raw_type(shape, of_json=True)


def from_base64(column: pa.StringArray) -> pa.Array:
    """Raises ValueError."""
    values = (
        None if text is None else b64decode(text, validate=True) for text in column.to_pylist()
    )
    return of_list(list(values), pa.binary())


def _map(marks: JsonMarks, name: str, shape: ValueShape) -> pa.Array:
    entries, kind = marks.entries(name), raw_type(shape, of_json=True)
    pairs = [of_list([], kind.key_type), pa.array([], kind.item_type)]
    if len(entries.objects):
        fields = (Field(KEY, ValueShape("string")), Field(VALUE, shape.inner[0]))
        columns = _read(entries.objects, fields)
        pairs = [columns[KEY], columns[VALUE]]
        numbers = as_numpy(columns[KEY].dictionary_encode().indices).astype(np.int64)
        of_rows = np.repeat(np.arange(len(entries.counts)), entries.counts) * len(numbers)
        if len(distinct_values(of_rows + numbers)) < len(numbers):
            raise ValueError("a map has a key twice")
    pair = pa.struct([kind.key_field, kind.item_field])
    child = pa.Array.from_buffers(pair, len(pairs[0]), [None], children=pairs)
    offsets = np.concatenate([[0], np.cumsum(entries.counts)]).astype(np.int32)
    buffers = [bits_of(entries.valid), pa.py_buffer(offsets)]
    return pa.Array.from_buffers(kind, len(entries.counts), buffers, children=[child])
