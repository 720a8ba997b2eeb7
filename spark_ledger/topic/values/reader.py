"""The columns of a topic's values, by the versions of its schema that Pulsar's clients declared.

Always true: a value is decoded by the version that its message names, and is resolved to the
reader's version, the query's. A value that cannot be decoded is a bad row, with the reason; a value
whose message names no version is a row without version; neither changes another row. A null value
is a row of nulls. Whole columns are decoded, the rows of each version together.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_ledger import errors
from spark_ledger.topic.entry.arrow_arrays import (
    as_numpy,
    distinct_values,
    of_numpy,
    offsets_of,
)
from spark_ledger.topic.entry.message_batch import CLIENT_VERSION, KEY, VALUE, column_of
from spark_ledger.topic.entry.payload_columns import check_convertible
from spark_ledger.topic.entry.pulsar_columns import copy_spans
from spark_ledger.topic.read.row_blocks import Block
from spark_ledger.topic.schema.client_schemas import ClientVersion
from spark_ledger.topic.schema.rules import nullable, union
from spark_ledger.topic.schema.shapes import Field, ValueShape
from spark_ledger.topic.values.avro_columns import AvroColumns, Flags, is_text, spread
from spark_ledger.topic.values.json_columns import read_together
from spark_ledger.topic.values.plain import BadValue, read_avro, read_json
from spark_ledger.topic.values.resolution import Rows, Unresolvable, resolve_fields, source_of
from spark_ledger.topic.values.types import beside_columns, joined, raw_type, shape_of_columns
from spark_ledger.topic.values.versions import (
    AVRO,
    JSON,
    PLAIN,
    ValuePart,
    Version,
    columns_of,
    version_of,
)

_NO_VERSION = -2
_LENGTH_BYTES = 4

Columns = dict[str, pa.Array]
Fields = Sequence[Field]


@dataclass(slots=True)
class Reasons:
    """Why rows are bad, by the row's number."""

    by_row: dict[int, str] = field(default_factory=dict)

    def add(self, rows: npt.NDArray[Any], why: str) -> None:
        for row in rows.tolist():
            self.by_row.setdefault(row, why)


class ClientRows(NamedTuple):
    """Rows as columns, which are null in bad rows and in rows without version."""

    columns: pa.RecordBatch
    bad: Mapping[int, str]
    without_version: Flags


@dataclass(frozen=True, slots=True)
class ClientReader:
    """Reads values of all `versions` (by the clients' number; a text says why values of a version
    have no columns) as the columns of `record`. Picklable. `number` is the reader's version;
    versions up to `erased` were deleted with force."""

    versions: Mapping[int, Version | str]
    number: int
    record: ValueShape
    columns: pa.Schema
    first_for_clients: int
    erased: int = -1

    @property
    def has_columns(self) -> bool:
        version = self.versions[self.number]
        return isinstance(version, Version) and version.has_columns

    @property
    def entry_columns(self) -> frozenset[str]:
        """The columns of an entry that are decoded for the values."""
        versions = (version for version in self.versions.values() if isinstance(version, Version))
        needs_key = any(version.needs_key for version in versions)
        return frozenset((VALUE, CLIENT_VERSION, *((KEY,) if needs_key else ())))

    def read(self, rows: Block) -> ClientRows:
        batch, count = rows.record_batch, rows.num_rows
        values, keys = column_of(batch, VALUE), column_of(batch, KEY)
        numbers = np.full(count, _NO_VERSION, dtype=np.int64)
        index = batch.schema.get_field_index(CLIENT_VERSION)
        if index >= 0:
            named = batch.column(index)
            numbers = np.where(as_numpy(named.is_valid()), as_numpy(named), _NO_VERSION)
        has_value = as_numpy(values.is_valid())
        without_version = (numbers == _NO_VERSION) & has_value
        reasons = Reasons()
        parts = [[pa.nulls(1, kind) for kind in self.columns.types]]
        choice, total = np.zeros(count, dtype=np.int64), 1
        for number in distinct_values(numbers[numbers != _NO_VERSION]).tolist():
            places = np.flatnonzero(numbers == number)
            is_whole = len(places) == count
            of_version = of_numpy(places)
            chosen = (values, keys)
            if not is_whole:
                chosen = (values.take(of_version), keys.take(of_version))
            group_reasons = Reasons()
            columns = self._of_version(number, *chosen, group_reasons)
            reasons.by_row |= {int(places[row]): why for row, why in group_reasons.by_row.items()}
            if columns is None:
                continue
            if is_whole and not group_reasons.by_row:
                whole = pa.RecordBatch.from_arrays(columns, schema=self.columns)
                return ClientRows(whole, reasons.by_row, without_version)
            parts.append(columns)
            choice[places] = total + np.arange(len(places))
            choice[places[list(group_reasons.by_row)]] = 0
            total += len(places)
        order, columns_of_parts = of_numpy(choice), zip(*parts, strict=True)
        joined = [pa.concat_arrays(column).take(order) for column in columns_of_parts]
        whole = pa.RecordBatch.from_arrays(joined, schema=self.columns)
        return ClientRows(whole, reasons.by_row, without_version)

    def _of_version(
        self, number: int, values: pa.Array, keys: pa.Array, reasons: Reasons
    ) -> list[pa.Array] | None:
        """The columns of values of one version; None if none of them can be read."""
        missing = f"the topic has no version {number} of its schema"
        if number <= self.erased:
            missing += ": it was deleted with force"
        version = self.versions.get(number, missing)
        if isinstance(version, str):
            reasons.add(np.arange(len(values)), version)
            return None
        bad = np.zeros(len(values), dtype=np.bool_)
        checks_symbols = all(part.encoding != JSON for part in version.parts)
        rows = Rows(bad, checks_symbols=checks_symbols)
        sources = (source_of(column, version.record) for column in self.record.fields)
        needed = {source.name for source in sources if source is not None}
        try:
            raw = _raw_columns(version, values, keys, needed, reasons)
            columns = resolve_fields(raw, len(values), version.record, self.record, rows)
        except Unresolvable as error:
            why = f"version {number} of its schema does not fit version {self.number}: {error}"
            reasons.add(np.arange(len(values)), why)
            return None
        why = f"a value of version {number} of its schema does not fit version {self.number}"
        for row in np.flatnonzero(bad).tolist():
            named = f": {rows.why[row]}" if row in rows.why else ""
            reasons.by_row.setdefault(row, f"{why}{named}")
        return columns


def client_reader(
    versions: Sequence[ClientVersion],
    first_for_clients: int,
    declared: pa.Schema | None,
    number: int | None = None,
    *,
    deleted: int = -1,
    erased: int = -1,
) -> ClientReader:
    """The reader for a query. If versions are made of columns of Spark's rows, the reader has all
    these columns, and the fields of its version beside them. Versions up to `deleted` (those up to
    `erased` with force) were not compared with later versions: the reader has their fields too.
    `declared` are the columns that the query reads, canonical; None: all columns of the newest
    version. The reader's version is `number`; None, or without that version: the newest of the
    versions that have most of the declared columns, among those that clients declared. Raises
    errors.SchemaTypeMismatch if values of that version have no columns, errors.SchemaIncompatible,
    and the errors of columns_of."""
    by_number = {v.number: _version_or_reason(v, v.number <= deleted) for v in versions}
    of_clients = [v.number for v in versions if v.columns is None]
    earlier = [by_number[n] for n in reversed(of_clients) if n <= deleted]
    records = [version.record for version in earlier if isinstance(version, Version)]
    of_earlier = reduce(joined, records) if records else None
    of_columns = [version.columns for version in versions if version.columns is not None]
    columns_of_rows = shape_of_columns(nullable(union(of_columns))) if of_columns else None

    def record_of(version: Version) -> ValueShape:
        record = version.record if of_earlier is None else joined(version.record, of_earlier)
        return record if columns_of_rows is None else beside_columns(columns_of_rows, record)

    if number is None or number not in by_number:
        readable = [n for n in of_clients if n > deleted or isinstance(by_number[n], Version)]
        candidates = readable or [n for n in by_number if n not in of_clients] or of_clients
        number = candidates[-1]
        best = 0
        for candidate in reversed(candidates):
            version = by_number[candidate]
            fitting = 0
            if declared is not None and isinstance(version, Version):
                fitting = _fitting_columns(record_of(version), declared)
            if fitting > best:
                number, best = candidate, fitting
            if declared is None or best == len(declared):
                break
    version = by_number[number]
    if isinstance(version, str):
        raise errors.SchemaTypeMismatch(
            f"values of version {number} of its schema have no columns: {version}",
            "Read the topic with valueFormat=binary.",
        )
    record = _restricted(record_of(version), declared)
    is_unread = declared is not None and not record.fields
    columns = pa.schema([]) if is_unread else columns_of(record)
    return ClientReader(by_number, number, record, columns, first_for_clients, erased)


def _fitting_columns(record: ValueShape, declared: pa.Schema) -> int:
    """How many of the declared columns a version's values have."""
    fitting = 0
    for column in declared:
        try:
            check_convertible(columns_of(_restricted(record, [column])), pa.schema([column]))
            fitting += 1
        except errors.LedgerError:
            continue
    return fitting


def _restricted(record: ValueShape, columns: Iterable[pa.Field] | None) -> ValueShape:
    names = None if columns is None else {column.name.lower() for column in columns}
    fields = (field for field in record.fields if names is None or field.name.lower() in names)
    return ValueShape("record", fields=tuple(fields))


def _version_or_reason(version: ClientVersion, is_deleted: bool) -> Version | str:
    """A deleted version whose fields cannot be columns hinders no read of other versions."""
    if version.columns is not None:
        return Version((ValuePart(JSON, shape_of_columns(nullable(version.columns))),))
    try:
        values = version_of(version.schema)
        if is_deleted:
            columns_of(values.record)
    except errors.LedgerError as error:
        return error.what
    return values


# -- raw columns ----------------------------------------------------------------------------------


def _raw_columns(
    version: Version, values: pa.Array, keys: pa.Array, needed: set[str], reasons: Reasons
) -> Columns:
    """The columns among `needed`, with a row for each value."""
    sources: tuple[pa.Array, ...] = (values,)
    if version.needs_key:
        sources = (keys, values)
    elif version.is_inline:
        sources = _split_pairs(values, reasons)
    columns: Columns = {}
    for part, source in zip(version.parts, sources, strict=True):
        fields = [field for field in part.fields if field.name in needed]
        if not fields:
            continue
        valid = as_numpy(source.is_valid())
        group_reasons = Reasons()
        dense = source if bool(valid.all()) else source.take(of_numpy(np.flatnonzero(valid)))
        raw = _DECODERS[part.encoding](part, dense, fields, group_reasons)
        rows = np.flatnonzero(valid)
        reasons.by_row |= {int(rows[row]): why for row, why in group_reasons.by_row.items()}
        columns |= {name: spread(column, valid) for name, column in raw.items()}
    return columns


def _of_json(part: ValuePart, values: pa.Array, fields: Fields, reasons: Reasons) -> Columns:
    columns = Columns()
    if not part.column:
        columns = read_together(values, fields)
    elif part.shape.kind == "record":
        inner = read_together(values, part.shape.fields)
        if len(inner) == len(part.shape.fields):
            kind = raw_type(part.shape, of_json=True)
            children = [inner[f.name] for f in part.shape.fields]
            struct = pa.Array.from_buffers(kind, len(values), [None], children=children)
            columns = {part.column: struct}
    rest = tuple(field for field in fields if field.name not in columns)
    record = ValueShape("record", fields=rest)

    def read(data: bytes) -> Any:
        if part.column:
            return {part.column: read_json(data, part.shape)}
        return read_json(data, record)

    return columns | (_one_by_one(values, rest, read, reasons, of_json=True) if rest else {})


def _of_avro(part: ValuePart, values: pa.Array, fields: Fields, reasons: Reasons) -> Columns:
    record = ValueShape("record", fields=part.fields)  # bytes of a record are those of its fields
    names = {field.name for field in fields}
    reader, columns = AvroColumns(values), Columns()
    for column in record.fields:
        if column.name in names:
            columns[column.name] = reader.read(column.shape)
        else:
            reader.skip(column.shape)
    places = np.flatnonzero(reader.odd)
    if not len(places):
        return columns
    group_reasons = Reasons()
    odd_values = values.take(of_numpy(places))
    odd = _one_by_one(odd_values, fields, lambda data: read_avro(data, record), group_reasons)
    reasons.by_row |= {int(places[row]): why for row, why in group_reasons.by_row.items()}
    choice = np.arange(len(values))
    choice[places] = len(values) + np.arange(len(places))
    return {
        name: pa.concat_arrays([columns[name], odd[name]]).take(of_numpy(choice))
        for name in columns
    }


def _of_plain(part: ValuePart, values: pa.Array, fields: Fields, reasons: Reasons) -> Columns:
    if part.shape.kind == "bytes":
        return {part.column: values}
    if not part.number:
        text = values.view(pa.string())
        if not is_text(text):
            bad = [not is_text(text.slice(i, 1)) for i in range(len(text))]
            reasons.add(np.flatnonzero(bad), "text that is not UTF-8")
        return {part.column: text}
    offsets, kind = offsets_of(values), np.dtype(part.number)
    are_bad = np.diff(offsets) != kind.itemsize
    reasons.add(np.flatnonzero(are_bad), f"not the {kind.itemsize} bytes of a number")
    data = np.frombuffer(bytes(values.buffers()[2] or b"") + bytes(kind.itemsize), dtype=np.uint8)
    at = np.minimum(offsets[:-1], len(data) - kind.itemsize)
    numbers = data[at[:, None] + np.arange(kind.itemsize)].view(kind).ravel()
    column = of_numpy(numbers.astype(kind.newbyteorder("=")))
    raw = raw_type(part.shape)
    return {part.column: of_numpy(numbers != 0) if raw == pa.bool_() else column.cast(raw)}


_DECODERS = {JSON: _of_json, AVRO: _of_avro, PLAIN: _of_plain}


def _one_by_one(
    values: pa.Array,
    fields: Fields,
    read: Callable[[bytes], Any],
    reasons: Reasons,
    *,
    of_json: bool = False,
) -> Columns:
    objects: list[Any] = []
    for row, data in enumerate(values.to_pylist()):
        try:
            objects.append(read(data))
        except BadValue as bad_value:
            reasons.by_row.setdefault(row, str(bad_value))
            objects.append(None)
    types = {field.name: raw_type(field.shape, of_json=of_json) for field in fields}
    return {
        name: pa.array([None if o is None else o[name] for o in objects], kind)
        for name, kind in types.items()
    }


def _split_pairs(values: pa.Array, reasons: Reasons) -> tuple[pa.Array, pa.Array]:
    """The key and the value of each pair, each behind its length; a length of -1 is a null."""
    valid = as_numpy(values.is_valid())
    offsets = offsets_of(values).astype(np.int64)
    at, ends = offsets[:-1], offsets[1:]
    buffer = values.buffers()[2] or pa.py_buffer(b"")
    data = np.frombuffer(bytes(buffer) + bytes(_LENGTH_BYTES), dtype=np.uint8)
    parts, bad = list[pa.Array](), np.zeros(len(values), dtype=np.bool_)
    for _ in ("key", "value"):
        bad |= ends - at < _LENGTH_BYTES
        lengths = data[at[:, None] + np.arange(_LENGTH_BYTES)].view(">i4").ravel().astype(np.int64)
        at = np.minimum(at + _LENGTH_BYTES, ends)
        bad |= (lengths < -1) | (lengths > ends - at)
        sizes = np.where(bad, 0, np.maximum(lengths, 0))
        parts.append(copy_spans(buffer, (at, at + sizes), valid & ~bad & (lengths >= 0)))
        at = at + sizes
    reasons.add(
        np.flatnonzero((bad | (at != ends)) & valid),
        "not a key and a value, each behind its length",
    )
    return parts[0], parts[1]
