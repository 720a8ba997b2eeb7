"""Raw columns of a writer's schema as the columns of a reader's schema, by Avro's rules. Pure.

    writer                                      reader
    int -> long, float, double; long -> float, double; float -> double; string <-> bytes
    a field, by the reader's name or aliases    its place; others are dropped
    no field                                    the field's default
    an enum's symbol that the reader lacks      the enum's default
    a branch of a union                         a branch of the same type, else one that fits

Always true: whether two shapes fit is decided without a value (Unresolvable). A value that does not
fit marks its row in Rows, and no other row. Records and enums may have other names. A null is null
in the column, also where the reader's schema has no null. A value of JSON for a column of Spark's
rows is cast to the column's type. Times of one sort are converted to the
reader's unit. Decimals of another scale, and branches or fields that no rule covers, do not fit.
"""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_ledger.topic.entry.arrow_arrays import as_numpy, of_list, of_numpy, offsets_of
from spark_ledger.topic.schema.shapes import DECIMAL_DIGITS_MAX, NO_DEFAULT, Field, ValueShape
from spark_ledger.topic.values.avro_columns import Flags, bits_of, is_text
from spark_ledger.topic.values.json_columns import from_base64
from spark_ledger.topic.values.plain import BadValue, default_of
from spark_ledger.topic.values.types import column_type, joined_type, raw_type

PROMOTIONS = frozenset(
    (
        *(("int", "long"), ("int", "float"), ("int", "double"), ("long", "float")),
        *(("long", "double"), ("float", "double"), ("string", "bytes"), ("bytes", "string")),
    )
)
_TICKS = {  # the sort of a time, and the ticks of the column in one tick of the value
    "time-millis": ("time", 1_000_000),
    "time-micros": ("time", 1_000),
    "timestamp-millis": ("timestamp", 1_000),
    "timestamp-micros": ("timestamp", 1),
    "local-timestamp-millis": ("local-timestamp", 1_000),
    "local-timestamp-micros": ("local-timestamp", 1),
}
_DAY_NS = 86_400_000_000_000
_DECIMAL_BYTES = 16
REASONS_MAX = 100
"""Of an array, so many values that do not fit are named: the first ones."""
VALUE_CHARS_MAX = 100


class Unresolvable(Exception):
    """No value of the writer's schema fits the reader's."""


class Rows:
    """The rows of which an array has values: `bad` marks those whose values do not fit, and `why`
    has the reasons of the first of them. `owners` is the row of each value; None: the array has one
    value for each row. `checks_symbols`: the values of an enum are symbols of the writer's schema.
    `field` is the path of the field that has the array, with ": " after each name."""

    def __init__(
        self, bad: Flags, owners: npt.NDArray[Any] | None = None, *, checks_symbols: bool = True
    ) -> None:
        self.bad = bad
        self.why: dict[int, str] = {}
        self.field = ""
        self.checks_symbols = checks_symbols
        self._owners = owners

    def mark(self, values: Flags, column: pa.Array, kind: object) -> None:
        """Mark the rows of these values of the column, which are not of the kind."""
        places = np.flatnonzero(values)
        owners = places if self._owners is None else self._owners[places]
        self.bad[owners] = True
        first = places[:REASONS_MAX].tolist(), owners[:REASONS_MAX].tolist()
        for place, row in zip(*first, strict=True):
            self.why.setdefault(row, f"{self.field}{_shown(column[place])} is no {kind}")

    def of_field(self, name: str) -> "Rows":
        return self._with(self._owners, f"{self.field}{name}: ")

    def subset(self, places: npt.NDArray[Any], count: int) -> "Rows":
        """The rows of the values at these places, of `count` values."""
        owners = np.arange(count) if self._owners is None else self._owners
        return self._with(owners[places], self.field)

    def _with(self, owners: npt.NDArray[Any] | None, field: str) -> "Rows":
        rows = Rows(self.bad, owners, checks_symbols=self.checks_symbols)
        rows.why, rows.field = self.why, field
        return rows

    def of_items(self, column: pa.Array) -> "Rows":
        """The rows of the items of a column of lists."""
        lengths = np.diff(offsets_of(column))
        return self.subset(np.repeat(np.arange(len(column)), lengths), len(column))


def _shown(value: pa.Scalar) -> str:
    try:
        return repr(value.as_py())[:VALUE_CHARS_MAX]
    except ValueError:  # of text that is not UTF-8
        return "the value"


def resolve(column: pa.Array, writer: ValueShape, reader: ValueShape, rows: Rows) -> pa.Array:
    """The column, of type column_type(reader). Raises Unresolvable."""
    if writer.kind == "union" and len(writer.branches) > 1:
        return _from_union(column, writer, reader, rows)
    if writer.kind == "union":
        writer = writer.branches[0] if writer.branches else ValueShape("null")
    if writer.kind == "null":
        return pa.nulls(len(column), column_type(reader))
    if reader.kind == "union":
        return _to_union(column, writer, reader, rows)
    if writer.kind == "record" and reader.kind == "record":
        return _record(column, writer, reader, rows)
    if writer.kind == reader.kind and writer.kind in ("array", "map"):
        return _list(column, writer, reader, rows)
    if writer.kind == "enum" and reader.kind == "enum":
        return _enum(column, writer, reader, rows)
    if writer.kind == reader.kind == "fixed" and writer.size != reader.size:
        raise Unresolvable(f"fixed of {writer.size} bytes is not fixed of {reader.size} bytes")
    if writer.kind != reader.kind and (writer.kind, reader.kind) not in PROMOTIONS:
        raise Unresolvable(f"{writer.kind} is not {reader.kind}")
    return _simple(column, writer, reader, rows)


def resolve_fields(
    columns: dict[str, pa.Array], count: int, writer: ValueShape, reader: ValueShape, rows: Rows
) -> list[pa.Array]:
    """The fields of the reader's record; `columns` are the fields of the writer's, by name, `count`
    rows each. Raises Unresolvable."""
    return [
        _field(columns, count, source_of(field, writer), field, rows) for field in reader.fields
    ]


def source_of(field: Field, writer: ValueShape) -> Field | None:
    """The field of the writer's record for the reader's `field`."""
    by_name = {source.name: source for source in writer.fields}
    names = (name for name in (field.name, *field.aliases) if name in by_name)
    return by_name.get(next(names, ""))


def _field(
    columns: dict[str, pa.Array], count: int, source: Field | None, field: Field, rows: Rows
) -> pa.Array:
    try:
        if source is not None:
            named = rows.of_field(field.name)
            return resolve(columns[source.name], source.shape, field.shape, named)
        return _default(field, count)
    except Unresolvable as error:
        raise Unresolvable(f"{field.name}: {error}") from None


# -- nested ---------------------------------------------------------------------------------------


def _record(column: pa.Array, writer: ValueShape, reader: ValueShape, rows: Rows) -> pa.Array:
    children = dict(zip([f.name for f in writer.fields], column.flatten(), strict=True))
    fields = resolve_fields(children, len(column), writer, reader, rows)
    return _struct(fields, column_type(reader), as_numpy(column.is_valid()))


def _struct(fields: Sequence[pa.Array], kind: pa.DataType, valid: Flags) -> pa.Array:
    bits = None if bool(valid.all()) else bits_of(valid)
    return pa.Array.from_buffers(kind, len(valid), [bits], children=list(fields))


def _list(column: pa.Array, writer: ValueShape, reader: ValueShape, rows: Rows) -> pa.Array:
    offsets = offsets_of(column)
    is_map, kind = writer.kind == "map", column_type(reader)
    items = column.items if is_map else column.values
    first, last = int(offsets[0]), int(offsets[-1])
    items, of_items = items.slice(first, last - first), rows.of_items(column)
    resolved = resolve(items, writer.inner[0], reader.inner[0], of_items)
    places = offsets.astype(np.int64) - first
    if pa.types.is_map(kind):
        if is_map:
            keys = column.keys.slice(first, last - first)
            pairs = [_cast(keys, kind.key_type, of_items), resolved]
        else:
            pairs = resolved.flatten()
        has_key = as_numpy(pairs[0].is_valid())
        if not bool(has_key.all()):  # Arrow ends the process at a map whose key is null
            of_items.mark(~has_key, pairs[0], f"key of {kind}")
            pairs = [part.filter(of_numpy(has_key)) for part in pairs]
            places = np.concatenate([[0], np.cumsum(has_key)])[places]
        every = np.ones(len(pairs[0]), dtype=np.bool_)
        resolved = _struct(pairs, pa.struct([kind.key_field, kind.item_field]), every)
    valid = as_numpy(column.is_valid())
    bits = None if bool(valid.all()) else bits_of(valid)
    buffers = [bits, pa.py_buffer(places.astype(np.int32))]
    return pa.Array.from_buffers(kind, len(column), buffers, children=[resolved])


def _from_union(column: pa.Array, writer: ValueShape, reader: ValueShape, rows: Rows) -> pa.Array:
    """Each value by its branch; a branch that does not fit marks the rows that have it."""
    resolved = [pa.nulls(1, column_type(reader))]
    choice = np.zeros(len(column), dtype=np.int64)
    for i, branch in enumerate(writer.branches):
        member = column.field(i)
        valid = as_numpy(member.is_valid()) & as_numpy(column.is_valid())
        if not bool(valid.any()):
            continue
        places = np.flatnonzero(valid)
        chosen = member.take(of_numpy(places))
        try:
            values = resolve(chosen, branch, reader, rows.subset(places, len(column)))
        except Unresolvable:
            rows.mark(valid, member, column_type(reader))
            continue
        choice[places] = sum(map(len, resolved)) + np.arange(len(places))
        resolved.append(values)
    return pa.concat_arrays(resolved).take(of_numpy(choice))


def _to_union(column: pa.Array, writer: ValueShape, reader: ValueShape, rows: Rows) -> pa.Array:
    branches = reader.branches
    index = _branch_for(writer, branches)
    if len(branches) == 1:
        return resolve(column, writer, branches[0], rows)
    joined = joined_type(reader)
    member = resolve(column, writer, branches[index], rows)
    if joined is not None:
        return member.cast(joined)
    kind = column_type(reader)
    members = [
        member if i == index else pa.nulls(len(column), field.type) for i, field in enumerate(kind)
    ]
    return _struct(members, kind, as_numpy(member.is_valid()))


def _branch_for(writer: ValueShape, branches: Sequence[ValueShape]) -> int:
    """The branch of a reader's union for values of the writer's shape: of the same kind (and name,
    if a branch has it), else the first to which values can be promoted."""
    same_kind = [i for i, branch in enumerate(branches) if branch.kind == writer.kind]
    named = [i for i in same_kind if branches[i].name == writer.name]
    promoted = [i for i, b in enumerate(branches) if (writer.kind, b.kind) in PROMOTIONS]
    for candidates in (named, same_kind, promoted):
        if candidates:
            return candidates[0]
    raise Unresolvable(f"{writer.kind} is no branch of the union")


# -- values ---------------------------------------------------------------------------------------


def _enum(column: pa.Array, writer: ValueShape, reader: ValueShape, rows: Rows) -> pa.Array:
    if not rows.checks_symbols or set(writer.symbols) <= set(reader.symbols):
        return column
    is_symbol = pc.is_in(column, value_set=of_list(reader.symbols, pa.string()))
    unknown = as_numpy(column.is_valid()) & ~as_numpy(is_symbol)
    if reader.default is None:
        rows.mark(unknown, column, f"symbol of {list(reader.symbols)}")
        return column
    default = of_list([reader.default], pa.string())[0]
    return pc.if_else(of_numpy(unknown), default, column)


def _simple(column: pa.Array, writer: ValueShape, reader: ValueShape, rows: Rows) -> pa.Array:
    kind = column_type(reader)
    if reader.column is not None:
        return _cast(_simple(column, writer, ValueShape(reader.kind), rows), reader.column, rows)
    if reader.logical == "decimal":
        return _decimals(column, writer, reader, rows)
    if writer.logical == "decimal" and not pa.types.is_binary(column.type):  # of JSON: its digits
        raise Unresolvable("a decimal of JSON is not bytes")
    if reader.logical in _TICKS:
        return _times(column, writer, reader, rows)
    if reader.logical == "date":
        return column.view(kind)
    if writer.kind in ("bytes", "string") and writer.kind != reader.kind:
        text = column.view(kind)
        if reader.kind == "string" and not is_text(text):
            is_bad = np.array([not is_text(text.slice(i, 1)) for i in range(len(text))])
            rows.mark(is_bad, column, kind)
        return text
    return column if column.type == kind else column.cast(kind, safe=False)


def _cast(column: pa.Array, kind: pa.DataType, rows: Rows) -> pa.Array:
    """The values of JSON as a column of Spark's rows."""
    try:
        return _cast_all(column, kind)
    except ValueError:
        bad = np.array([not _fits(column.slice(i, 1), kind) for i in range(len(column))])
        rows.mark(bad, column, kind)
        return _cast_all(pc.if_else(of_numpy(bad), pa.scalar(None, column.type), column), kind)


def _cast_all(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_time64(kind):  # Arrow casts text to times with a date only
        start, end = of_list(["1970-01-01T", ""], pa.string())
        column = pc.binary_join_element_wise(start, column, end).cast(pa.timestamp("ns"))
    elif pa.types.is_string(column.type):  # keys of maps are text, whatever their type
        if pa.types.is_binary(kind):
            column = from_base64(column)
        elif pa.types.is_duration(kind):
            column = column.cast(pa.int64())
    return column if column.type == kind else column.cast(kind)


def _fits(column: pa.Array, kind: pa.DataType) -> bool:
    try:
        _cast_all(column, kind)
    except ValueError:
        return False
    return True


def _times(column: pa.Array, writer: ValueShape, reader: ValueShape, rows: Rows) -> pa.Array:
    sort, ticks = _TICKS[reader.logical]
    of_writer, writers_ticks = _TICKS.get(writer.logical, ("", 0))
    if of_writer == sort:
        ticks = writers_ticks
    numbers = as_numpy(column).astype(np.int64)
    low, high = -(2**63) // ticks, (2**63 - 1) // ticks
    if sort == "time":
        low, high = 0, _DAY_NS // ticks - 1
    valid = as_numpy(column.is_valid())
    outside = ((numbers < low) | (numbers > high)) & valid
    if bool(outside.any()):
        rows.mark(outside, column, column_type(reader))
    with np.errstate(over="ignore"):
        scaled = pa.py_buffer(np.where(outside | ~valid, 0, numbers) * ticks)
    bits = None if bool(valid.all()) else bits_of(valid)
    return pa.Array.from_buffers(column_type(reader), len(column), [bits, scaled])


def _decimals(column: pa.Array, writer: ValueShape, reader: ValueShape, rows: Rows) -> pa.Array:
    if writer.logical == "decimal" and writer.scale != reader.scale:
        raise Unresolvable(f"a decimal of scale {writer.scale} is not of scale {reader.scale}")
    kind = column_type(reader)
    if pa.types.is_decimal(column.type):
        unscaled = column.cast(pa.decimal128(DECIMAL_DIGITS_MAX, reader.scale))
    elif pa.types.is_binary(column.type):
        unscaled = _of_big_endian(column, reader.scale, rows)
    else:
        raise Unresolvable(f"{writer.kind} is no decimal")
    try:
        return unscaled.cast(kind)
    except pa.ArrowInvalid:
        limit = pa.scalar(Decimal(10) ** (reader.precision - reader.scale), unscaled.type)
        too_long = pc.fill_null(pc.greater_equal(pc.abs(unscaled), limit), False)
        rows.mark(as_numpy(too_long), unscaled, kind)
        return pc.if_else(too_long, pa.scalar(None, unscaled.type), unscaled).cast(kind)


def _of_big_endian(column: pa.Array, scale: int, rows: Rows) -> pa.Array:
    """Decimals of 38 digits, of numbers in two's complement."""
    offsets = offsets_of(column).astype(np.int64)
    sizes = np.diff(offsets)
    valid = as_numpy(column.is_valid())
    bad = valid & ((sizes == 0) | (sizes > _DECIMAL_BYTES))
    for i in np.flatnonzero(valid & (sizes == _DECIMAL_BYTES)).tolist():
        number = int.from_bytes(column[i].as_py(), "big", signed=True)
        bad[i] = abs(number) >= 10**DECIMAL_DIGITS_MAX
    if bool(bad.any()):
        rows.mark(bad, column, pa.decimal128(DECIMAL_DIGITS_MAX, scale))
    has_bytes = valid & ~bad
    data = np.frombuffer(column.buffers()[2] or b"", dtype=np.uint8)
    numbers = np.zeros((len(column), _DECIMAL_BYTES), dtype=np.uint8)
    places = np.flatnonzero(has_bytes)
    numbers[places[data[offsets[places]] >= 0x80]] = 0xFF
    for i in range(int(sizes[places].max(initial=0))):
        longer = places[sizes[places] > i]
        numbers[longer, i] = data[offsets[longer + 1] - 1 - i]
    buffers = [bits_of(has_bytes), pa.py_buffer(numbers)]
    return pa.Array.from_buffers(pa.decimal128(38, scale), len(column), buffers)


# -- defaults -------------------------------------------------------------------------------------


def _default(field: Field, count: int) -> pa.Array:
    if field.default is NO_DEFAULT:
        raise Unresolvable("the writer's schema has no such field, and the reader's no default")
    if field.default is None:
        return pa.nulls(count, column_type(field.shape))
    try:
        plain = default_of(field.shape, field.default)
    except BadValue as bad_value:
        raise Unresolvable(f"the default does not fit: {bad_value}") from None
    raw = pa.array([plain], raw_type(field.shape))
    rows = Rows(np.zeros(1, dtype=np.bool_))
    column = resolve(raw, field.shape, field.shape, rows)
    if rows.bad[0]:
        raise Unresolvable(f"the default {field.default!r} does not fit")
    return column.take(of_numpy(np.zeros(count, dtype=np.int64)))
