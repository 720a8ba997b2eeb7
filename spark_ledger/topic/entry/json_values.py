"""Columns as JSON text and back: each row is an object, whose fields are the columns.

Writing: the text is compact. Fields are in the order of the columns; like Spark's to_json, it has
no null fields. Times are ISO 8601 with microseconds, TIMESTAMP in UTC with a Z. Numbers are
written so that a reader gets equal numbers. Text is UTF-8, escaped only where JSON demands an
escape. NaN and infinity are refused, since JSON does not have them.

Reading: fields are found by their exact names, other fields are ignored. A field that is missing or
null gives null; a row whose value is null or empty has null in every column. A row that is not an
object, or has a field of another type than its column, is an error that names the row.

Always true: row n of the result is row n of the values. Each row begins with { and ends with },
so no object can go on in the next row (a { never follows a } inside of an object). A row with two
objects would make one row too many in the result; the number of rows is checked.
"""

from base64 import b64encode
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow_json

from spark_ledger import errors
from spark_ledger.topic.entry.arrow_arrays import of_list, of_numpy, offsets_of
from spark_ledger.topic.entry.payload_columns import conform

_SHORT_ESCAPES = {"\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_CAST_TYPES = (
    pa.types.is_boolean,
    pa.types.is_signed_integer,
    pa.types.is_decimal128,
)
_TIME_TYPES = (pa.types.is_date32, pa.types.is_timestamp)
_BRACES = (ord("{"), ord("}"))
_TEXT_TYPE = pa.string()

Bytes = npt.NDArray[np.uint8]


@lru_cache(maxsize=1024)
def _text_scalar(value: str | None) -> pa.Scalar:
    """A constant for Arrow's functions. For a Python str pyarrow would load pandas, 0.2 s."""
    return of_list([value], _TEXT_TYPE)[0]


_ZERO = of_list([0], pa.int32())[0]


def check_schema(schema: pa.Schema) -> None:
    """Raises errors.SchemaTypeMismatch for the first column that has no form in JSON here."""
    for field in schema:
        _json_type(field.type, field.name)


def encode_for_clients(batch: pa.RecordBatch) -> pa.Array:
    """Each row as JSON text, for Pulsar's clients (topic/schema/column_schemas.py). Encodes bytes
    in base64, a map as an object (a list of keys and values, if the keys are nested), times of day,
    NaN and infinity as text, an interval in microseconds; `encode_json` refuses all these. Decimals
    are text here, so that no client reads them as binary fractions."""
    text = _object(batch.columns, batch.schema.names, batch.num_rows, "", strict=False)
    return text.view(pa.binary())


def encode_json(batch: pa.RecordBatch) -> pa.Array:
    """Each row as the text of a JSON object, binary. Raises errors.SchemaTypeMismatch."""
    for field in batch.schema:
        _json_type(field.type, field.name)
    text = _object(batch.columns, batch.schema.names, batch.num_rows, "", strict=True)
    return text.view(pa.binary())


def decode_json(values: pa.Array, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of `schema` (canonical), from each row's JSON text in `values` (binary).

    Raises errors.SchemaIncompatible; its fact `row` is the first row that does not fit.
    """
    if not len(schema) or not len(values):
        columns = [pa.nulls(len(values), field.type) for field in schema]
        return _batch(columns, schema, len(values))
    json_schema = pa.schema([(f.name, _json_type(f.type, f.name)) for f in schema])
    text = _objects(values.view(pa.string()))
    try:
        batch = read_lines(text, json_schema)
    except pa.ArrowInvalid as error:
        raise _first_row_error(text, json_schema) from error
    return conform(_from_json_types(batch, schema), schema)


# -- reading -------------------------------------------------------------------------------------


def _json_type(kind: pa.DataType, path: str, dates: pa.DataType = _TEXT_TYPE) -> pa.DataType:
    """The type that Arrow's JSON reader gives values of type `kind`. The reader does not support
    dates: these get the type `dates`."""
    if pa.types.is_date32(kind):
        return dates
    if pa.types.is_struct(kind):
        return pa.struct([(f.name, _json_type(f.type, f"{path}.{f.name}", dates)) for f in kind])
    if pa.types.is_list(kind):
        return pa.list_(_json_type(kind.value_type, f"{path}.element", dates))
    tests = (
        *_CAST_TYPES,
        *_TIME_TYPES,
        pa.types.is_string,
        pa.types.is_float32,
        pa.types.is_float64,
    )
    if any(test(kind) for test in tests):
        return kind
    raise errors.SchemaTypeMismatch(
        f"column {path!r} of type {kind} has no form in JSON here",
        "Cast it to text (base64 for bytes), or use valueFormat=arrow.",
    )


def _objects(text: pa.StringArray) -> pa.StringArray:
    """The rows without surrounding whitespace; null and empty rows become {}. Raises
    SchemaIncompatible for a row that is not an object."""
    if not all_braced(text):
        text = pc.fill_null(pc.ascii_trim_whitespace(text), _text_scalar("{}"))
        text = pc.if_else(pc.equal(pc.binary_length(text), _ZERO), _text_scalar("{}"), text)
        first, last = _outer_bytes(text)
        bad_rows = np.flatnonzero((first != _BRACES[0]) | (last != _BRACES[1]))
        if len(bad_rows):
            raise _row_error(int(bad_rows[0]), "the text is not a JSON object")
    return text


def all_braced(text: pa.StringArray) -> bool:
    """Whether each row begins with { and ends with }."""
    if text.null_count or not np.diff(offsets_of(text)).all():
        return False
    first, last = _outer_bytes(text)
    return bool((first == _BRACES[0]).all() and (last == _BRACES[1]).all())


def _outer_bytes(text: pa.StringArray) -> tuple[Bytes, Bytes]:
    """The first and the last byte of each row; no row may be empty."""
    data, offsets = np.frombuffer(text.buffers()[2], dtype=np.uint8), offsets_of(text)
    return data[offsets[:-1]], data[offsets[1:] - 1]


def read_lines(text: pa.StringArray, json_schema: pa.Schema) -> pa.RecordBatch:
    """The rows of `text`, which are all braced, as columns of these types. Raises ArrowInvalid."""
    lines = pc.binary_join_element_wise(text, _text_scalar(""), _text_scalar("\n"))
    lines.validate(full=True)  # the JSON reader does not check that text is UTF-8
    offsets = offsets_of(lines)
    source = lines.buffers()[2].slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    table = arrow_json.read_json(
        pa.BufferReader(source),
        read_options=arrow_json.ReadOptions(use_threads=False, block_size=source.size + 1),
        parse_options=arrow_json.ParseOptions(
            explicit_schema=json_schema, unexpected_field_behavior="ignore"
        ),
    )
    if table.num_rows != len(text):
        raise pa.ArrowInvalid(f"{table.num_rows} objects in {len(text)} rows")
    return _batch(
        [table.column(n).combine_chunks() for n in json_schema.names], json_schema, len(text)
    )


def _batch(columns: Sequence[pa.Array], schema: pa.Schema, rows: int) -> pa.RecordBatch:
    if columns:
        return pa.RecordBatch.from_arrays(columns, schema=schema)
    return pa.RecordBatch.from_struct_array(
        pa.StructArray.from_buffers(pa.struct([]), rows, [None])
    )


def _from_json_types(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns with the types of `schema`; dates were read as text."""
    columns = []
    for column, field in zip(batch.columns, schema, strict=True):
        kind = _json_type(field.type, field.name, dates=pa.date32())
        try:
            columns.append(column if column.type == kind else column.cast(kind))
        except pa.ArrowInvalid as error:
            path = _path_of_bad_date(column, field.type, field.name)
            raise errors.SchemaIncompatible(
                f"column {path!r} is a date, {error}",
                "Write dates as 2024-05-01, or read text.",
            ) from error
    return pa.RecordBatch.from_arrays(columns, names=schema.names)


def _path_of_bad_date(column: pa.Array, kind: pa.DataType, path: str) -> str:
    """The path, within the column, of a text that should be a date and is not."""
    inner: list[tuple[pa.Array, pa.DataType, str]] = []
    if pa.types.is_struct(kind):
        fields = zip(column.flatten(), kind, strict=True)
        inner = [(child, field.type, f"{path}.{field.name}") for child, field in fields]
    elif pa.types.is_list(kind):
        inner = [(column.flatten(), kind.value_type, f"{path}.element")]
    for child, child_kind, child_path in inner:
        try:
            child.cast(_json_type(child_kind, child_path, dates=pa.date32()))
        except pa.ArrowInvalid:
            return _path_of_bad_date(child, child_kind, child_path)
    return path


def _first_row_error(text: pa.StringArray, json_schema: pa.Schema) -> errors.SchemaIncompatible:
    """The error for the first row that cannot be read, found by binary search."""
    row = 0
    while len(text) > 1:
        half = len(text) // 2
        if _fits(text.slice(0, half), json_schema):
            row, text = row + half, text.slice(half)
        else:
            text = text.slice(0, half)
    try:
        read_lines(text, json_schema)
    except pa.ArrowInvalid as error:
        return _row_error(row, str(error).replace(" in row 0", ""))
    raise AssertionError("if rows cannot be read together, one of them cannot be read alone")


def _fits(text: pa.StringArray, json_schema: pa.Schema) -> bool:
    try:
        read_lines(text, json_schema)
    except pa.ArrowInvalid:
        return False
    return True


def _row_error(row: int, why: str) -> errors.SchemaIncompatible:
    return errors.SchemaIncompatible(
        f"the value of row {row} does not fit the declared columns: {why}",
        "Declare the column as it is written, or read the value as text.",
        row=row,
    )


# -- writing -------------------------------------------------------------------------------------


def _object(
    columns: Sequence[pa.Array], names: Sequence[str], rows: int, path: str, *, strict: bool
) -> pa.Array:
    parts = []
    for name, column in zip(names, columns, strict=True):
        token = _token(column, f"{path}{name}", strict)
        label = _quote(of_list([name], pa.string()))[0].as_py()
        field = pc.binary_join_element_wise(_text_scalar(f",{label}:"), token, _text_scalar(""))
        # null_handling="skip" would lose a row in which every field is null
        parts.append(pc.fill_null(field, _text_scalar("")))
    if not parts:
        return pa.repeat(_text_scalar("{}"), rows)
    fields = pc.binary_join_element_wise(*parts, _text_scalar(""))
    with_brace = pc.binary_replace_slice(fields, start=0, stop=1, replacement="{")
    return pc.binary_join_element_wise(with_brace, _text_scalar("}"), _text_scalar(""))


def _token(column: pa.Array, path: str, strict: bool) -> pa.Array:
    """Each row as the text of a JSON value; a null stays null."""
    kind = column.type
    if pa.types.is_binary(kind):
        return _quote(_base64(column))
    if pa.types.is_map(kind):
        if pa.types.is_nested(kind.key_type):
            return _token(_pairs(column), path, strict)
        return _map(column, path, strict)
    if pa.types.is_string(kind):
        return _quote(column)
    if pa.types.is_struct(kind):
        inner = [column.field(i) for i in range(kind.num_fields)]
        names = [field.name for field in kind]
        text = _object(inner, names, len(column), f"{path}.", strict=strict)
        return pc.if_else(column.is_valid(), text, _text_scalar(None))
    if pa.types.is_list(kind):
        return _list(column, path, strict)
    if any(test(kind) for test in _TIME_TYPES):
        return _time(column)
    if pa.types.is_floating(kind) and pc.all(pc.is_finite(column)).as_py() is False:
        if not strict:
            return _numbers(column)
        raise errors.SchemaTypeMismatch(
            f"column {path!r} has a NaN or infinity, which JSON does not have",
            "Replace it (nanvl, coalesce), or use valueFormat=arrow.",
        )
    text = column.cast(pa.string())
    is_text = pa.types.is_time64(kind) or (pa.types.is_decimal(kind) and not strict)
    return _quote(text) if is_text else text


def _time(column: pa.Array) -> pa.Array:
    """The times in ISO 8601. The cast gets times without a zone, because Arrow would look the zone
    up for each row."""
    end = '"'
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        column, end = column.view(pa.int64()).view(pa.timestamp("us")), 'Z"'
    iso = pc.replace_substring(column.cast(pa.string()), " ", "T", max_replacements=1)
    return pc.binary_join_element_wise(_text_scalar('"'), iso, _text_scalar(end), _text_scalar(""))


def _base64(column: pa.Array) -> pa.StringArray:
    values = column.to_pylist()
    return of_list([None if v is None else b64encode(v).decode() for v in values], pa.string())


def _pairs(column: pa.MapArray) -> pa.ListArray:
    pairs = pa.StructArray.from_arrays([column.keys, column.items], names=["key", "value"])
    null_mask = column.is_null() if column.null_count else None
    offsets = of_numpy(offsets_of(column).copy())  # Arrow takes no mask for a slice
    return pa.ListArray.from_arrays(offsets, pairs, mask=null_mask)


def _numbers(column: pa.Array) -> pa.Array:
    """The numbers as text; NaN and infinity, which JSON does not have, as JSON strings."""
    names = pc.case_when(
        pc.make_struct(pc.is_nan(column), pc.greater(column, of_list([0.0], column.type)[0])),
        _text_scalar('"NaN"'),
        _text_scalar('"Infinity"'),
        _text_scalar('"-Infinity"'),
    )
    return pc.if_else(pc.is_finite(column), column.cast(pa.string()), names)


def _map(column: pa.MapArray, path: str, strict: bool) -> pa.Array:
    start, end = (int(offset) for offset in offsets_of(column)[[0, -1]])
    keys = _token(column.keys.slice(start, end - start), f"{path}.key", strict)
    quote = _text_scalar('"')
    is_quoted = pc.starts_with(keys, pattern='"')
    quoted = pc.binary_join_element_wise(quote, keys, quote, _text_scalar(""))
    items = _token(column.items.slice(start, end - start), f"{path}.value", strict)
    values = pc.fill_null(items, _text_scalar("null"))
    fields = pc.binary_join_element_wise(
        pc.if_else(is_quoted, keys, quoted), values, _text_scalar(":")
    )
    return _joined(column, fields, "{}")


def _list(column: pa.ListArray, path: str, strict: bool) -> pa.Array:
    offsets = offsets_of(column)
    items = column.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    tokens = pc.fill_null(_token(items, f"{path}.element", strict), _text_scalar("null"))
    return _joined(column, tokens, "[]")


def _joined(column: pa.Array, tokens: pa.Array, brackets: str) -> pa.Array:
    """The tokens of each row of a column of lists or maps, within brackets."""
    offsets = offsets_of(column)
    null_mask = column.is_null() if column.null_count else None
    lists = pa.ListArray.from_arrays(of_numpy(offsets - offsets[0]), tokens, mask=null_mask)
    return pc.binary_join_element_wise(
        _text_scalar(brackets[0]),
        pc.binary_join(lists, _text_scalar(",")),
        _text_scalar(brackets[1]),
        _text_scalar(""),
    )


def _quote(text: pa.StringArray) -> pa.Array:
    codes = _control_characters(text)
    if codes is not None:
        text = pc.replace_substring(text, "\\", "\\\\")
        text = pc.replace_substring(text, '"', '\\"')
        for code in codes:
            form = _SHORT_ESCAPES.get(chr(code), f"\\u{code:04x}")
            text = pc.replace_substring(text, chr(code), form)
    return pc.binary_join_element_wise(_text_scalar('"'), text, _text_scalar('"'), _text_scalar(""))


def _control_characters(text: pa.StringArray) -> list[int] | None:
    """The control characters in the text, rising; None if no character needs an escape."""
    if not len(text) or text.buffers()[2] is None:
        return None
    offsets = offsets_of(text)
    data = np.frombuffer(text.buffers()[2], dtype=np.uint8)[offsets[0] : offsets[-1]]
    is_control = data < 0x20
    if not (is_control | (data == ord('"')) | (data == ord("\\"))).any():
        return None
    return sorted(np.unique(data[is_control]).tolist())
