"""Which schemas fit: which version a write may use, when a version may be added, and which columns
a reader gets.

Columns are found by name, without regard to case. A reader's schema can read rows of a written
schema if this holds for each column of the reader:
- If the written schema has the column: its type is the same or narrower, and if it may be null, the
  reader's column may be null.
- If the written schema lacks the column: the reader's column may be null.
Columns that the reader lacks are ignored. Types widen int8 -> int16 -> int32 -> int64 and float ->
double, also inside nested types.

Always true: a new version is checked against *every* earlier version, because entries of all
versions stay in the topic; so the union of all versions exists, unless compatibility is `none`. A
write uses a version that has exactly its columns; the rows are checked against the version's NOT
NULL columns. A version that is only proposed has no rows, and does not hinder other versions:
`committed_head` decides about it in the commit of its first rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import pyarrow as pa

from spark_ledger import errors
from spark_ledger.topic.schema.records import (
    Compatibility,
    SchemaHead,
    SchemaVersion,
    fingerprint,
    version_of,
)

_WIDENING_TYPES = (
    (pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    (pa.float32(), pa.float64()),
)


class SchemaMode(Enum):
    """What a write may do to its topic's schema. The first typed write registers version 1."""

    VALIDATE = "validate"
    EVOLVE = "evolve"  # also add a version for new columns, if the version is compatible


@dataclass(frozen=True, slots=True)
class Misfit:
    """The first column in which two schemas do not fit, and the reason."""

    column: str
    why: str

    def __str__(self) -> str:
        return f"column {self.column!r} {self.why}"


def decide(
    topic: str,
    written: pa.Schema,
    head: SchemaHead,
    versions: Sequence[SchemaVersion],
    mode: SchemaMode,
    proposed: Sequence[SchemaVersion] = (),
) -> SchemaVersion:
    """The version under which rows of the canonical schema `written` are written. A version above
    `head.last` must be proposed first. Raises errors.SchemaIncompatible."""
    assert all(head.has(version.number) for version in versions), "`versions` has none proposed"
    version = matching(written, versions)
    if version is not None:
        return version

    def propose(schema: pa.Schema) -> SchemaVersion:
        return _find_equal(schema, proposed) or version_of(head.last + 1, schema)

    spelled_schema = respell(written, [version.schema for version in versions])
    registered = nullable(spelled_schema)  # NOT NULL of this write must not refuse later rows
    if not versions:
        return propose(registered)
    incompatibility = first_misfit(registered, versions, head.compatibility)
    if mode is SchemaMode.EVOLVE and incompatibility is None:
        return propose(registered)
    current = versions[-1]
    misfit = difference(written, current.schema)
    if mode is SchemaMode.EVOLVE:
        raise errors.SchemaIncompatible(
            f"topic {topic!r} takes only changes that are compatible"
            f" '{head.compatibility.value}': {incompatibility}",
            "Cast the columns to the topic's types, or write to another topic.",
        )
    remedy = "Cast or select columns until they are the topic's columns"
    if incompatibility is None:
        remedy += f", or register the columns as version {head.last + 1} by schemaMode=evolve"
    raise errors.SchemaIncompatible(
        f"{misfit}, compared with version {current.number} of the schema of topic {topic!r}",
        f"{remedy}.",
    )


def decide_registration(
    topic: str,
    registered: pa.Schema,
    head: SchemaHead,
    versions: Sequence[SchemaVersion],
    proposed: Sequence[SchemaVersion] = (),
) -> SchemaVersion:
    """As `decide`, for a schema that a user registers: its NOT NULLs are part of the version."""
    version = _find_equal(registered, versions)
    if version is not None:
        return version
    registered = respell(registered, [version.schema for version in versions])
    misfit = first_misfit(registered, versions, head.compatibility)
    if misfit is not None:
        raise errors.SchemaIncompatible(
            f"topic {topic!r} takes only changes that are compatible"
            f" '{head.compatibility.value}': {misfit}",
            "Correct the column, or set the topic's compatibility to none.",
        )
    return _find_equal(registered, proposed) or version_of(head.last + 1, registered)


def committed_head(
    topic: str,
    head: SchemaHead,
    number: int,
    numbered_versions: Mapping[int, SchemaVersion],
    *,
    evolves: bool,
) -> SchemaHead:
    """The head after rows under version `number` of `numbered_versions` are committed. Raises
    errors.SchemaIncompatible if the version does not fit versions that others committed meanwhile,
    errors.SchemaNotRegistered."""
    if head.has(number):
        return head
    if number not in head.proposed:
        raise errors.SchemaNotRegistered(
            f"version {number} of the schema of topic {topic!r}, under which the rows were written,"
            " does not exist any more",
            "Run the job again.",
        )
    schema = numbered_versions[number].schema
    versions = [
        numbered_versions[n]
        for n in range(1, head.current + 1)
        if head.has(n) and n in numbered_versions
    ]
    misfit: Misfit | str | None = first_misfit(schema, versions, head.compatibility)
    if versions and not evolves:
        misfit = difference(schema, versions[-1].schema) or "a column that may be null is NOT NULL"
    if misfit is not None:
        raise errors.SchemaIncompatible(
            f"{misfit}, compared with version {head.current} of the schema of topic {topic!r},"
            " which was registered while the rows were written",
            "Run the job again, with the columns as they are in the topic.",
        )
    return head.with_version(number)


def matching(written: pa.Schema, versions: Sequence[SchemaVersion]) -> SchemaVersion | None:
    """The newest version equal to `written`; if no version is equal, the newest version that
    differs only in NOT NULL; or None."""
    version = _find_equal(written, versions)
    if version is not None:
        return version
    nullable_fingerprint = fingerprint(nullable(written))
    equal_but_not_null = (
        version
        for version in reversed(versions)
        if fingerprint(nullable(version.schema)) == nullable_fingerprint
    )
    return next(equal_but_not_null, None)


def _find_equal(schema: pa.Schema, versions: Sequence[SchemaVersion]) -> SchemaVersion | None:
    digest = fingerprint(schema)
    return next((version for version in reversed(versions) if version.fingerprint == digest), None)


def first_misfit(
    later: pa.Schema, versions: Sequence[SchemaVersion], compatibility: Compatibility
) -> Misfit | None:
    """Why `later` cannot be a version after `versions`; None if it can."""
    is_backward = compatibility in (Compatibility.BACKWARD, Compatibility.FULL)
    is_forward = compatibility in (Compatibility.FORWARD, Compatibility.FULL)
    for version in reversed(versions):
        number = version.number
        if is_backward and (misfit := can_read(later, version.schema)):
            return Misfit(misfit.column, f"{misfit.why}: it cannot read rows of version {number}")
        if is_forward and (misfit := can_read(version.schema, later)):
            return Misfit(misfit.column, f"{misfit.why}: readers of version {number} would fail")
    return None


def can_read(reader: pa.Schema, written: pa.Schema) -> Misfit | None:
    """Why `reader` cannot read rows of `written`; None if it can."""
    return _fields_misfit(list(reader), list(written), "")


def difference(written: pa.Schema, registered: pa.Schema) -> Misfit | None:
    """The first difference of `written` from `registered`, apart from NOT NULL; or None."""
    columns = _by_name(list(written))
    for field in registered:
        other = columns.pop(field.name.lower(), None)
        if other is None:
            return Misfit(field.name, "is missing")
        if not _is_same_type(other.type, field.type):
            return Misfit(field.name, f"is of type {other.type}, not {field.type}")
    for field in columns.values():
        return Misfit(field.name, "is new")
    return None


def union(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """The columns that a reader of all `schemas` (oldest first) gets: every column of any schema,
    with its widest type. A row that lacks a column has null there. The columns of the newest schema
    come first.

    Raises errors.SchemaIncompatible if the types of a column have no widest type.
    """
    assert schemas, "a union is of one schema at least"
    return pa.schema(_unite([list(schema) for schema in schemas], ""))


def nullable(schema: pa.Schema) -> pa.Schema:
    """The schema with every column, at every level, allowed to be null."""
    return pa.schema([pa.field(field.name, _nullable_type(field.type)) for field in schema])


def respell(schema: pa.Schema, earlier: Sequence[pa.Schema]) -> pa.Schema:
    """The schema, with each column's name spelled as in the first schema of `earlier` that has the
    column, so that all entries of a topic spell the name alike."""
    return pa.schema(_respell(list(schema), [list(fields) for fields in earlier]))


def widens(narrow: pa.DataType, wide: pa.DataType) -> bool:
    """Whether `wide` has every value of the simple type `narrow`."""
    for widths in _WIDENING_TYPES:
        if narrow in widths and wide in widths:
            return widths.index(narrow) <= widths.index(wide)
    return bool(narrow == wide)


def _by_name(fields: Sequence[pa.Field]) -> dict[str, pa.Field]:
    return {field.name.lower(): field for field in fields}


def _fields_misfit(
    reader: Sequence[pa.Field], written: Sequence[pa.Field], within: str
) -> Misfit | None:
    written_fields = _by_name(written)
    for field in reader:
        path, other = within + field.name, written_fields.get(field.name.lower())
        if other is None:
            if not field.nullable:
                return Misfit(path, "is NOT NULL, but the other schema lacks it")
            continue
        if other.nullable and not field.nullable:
            return Misfit(path, "is NOT NULL, but may be null in the other schema")
        misfit = _type_misfit(field.type, other.type, path)
        if misfit is not None:
            return misfit
    return None


def _type_misfit(reader: pa.DataType, written: pa.DataType, path: str) -> Misfit | None:
    if _is_same_kind(reader, written):
        return _fields_misfit(_inner(reader), _inner(written), f"{path}.")
    if widens(written, reader):
        return None
    return Misfit(path, f"of type {written} is not read as {reader}")


def _is_same_type(kind: pa.DataType, other: pa.DataType) -> bool:
    columns = (pa.schema([pa.field("", column)]) for column in (kind, other))
    return len({fingerprint(nullable(schema)) for schema in columns}) == 1


def _unite(versions: Sequence[Sequence[pa.Field]], within: str) -> list[pa.Field]:
    """The union of several lists of fields, oldest first."""
    by_name: dict[str, list[pa.Field]] = {}
    for fields in reversed(versions):
        for field in fields:
            by_name.setdefault(field.name.lower(), []).append(field)
    fields_of_union = []
    for fields in by_name.values():
        path = within + fields[0].name
        kind = fields[0].type
        for field in fields[1:]:
            kind = _wider(kind, field.type, path)
        is_in_all = len(fields) == len(versions)
        may_be_null = not is_in_all or any(field.nullable for field in fields)
        fields_of_union.append(pa.field(fields[0].name, kind, nullable=may_be_null))
    return fields_of_union


def _wider(newer: pa.DataType, older: pa.DataType, path: str) -> pa.DataType:
    if _is_same_kind(newer, older):
        return _nested(newer, _unite([_inner(older), _inner(newer)], f"{path}."))
    for narrow, wide in ((older, newer), (newer, older)):
        if widens(narrow, wide):
            return wide
    raise errors.SchemaIncompatible(
        f"column {path!r} is of type {older} in older rows and {newer} in newer ones",
        "Read with a .schema(...) that leaves the column out.",
    )


def _respell(fields: Sequence[pa.Field], earlier: Sequence[Sequence[pa.Field]]) -> list[pa.Field]:
    by_name: dict[str, list[pa.Field]] = {}
    for other in earlier:
        for field in other:
            by_name.setdefault(field.name.lower(), []).append(field)
    spelled_fields = []
    for field in fields:
        others = by_name.get(field.name.lower(), [])
        name = others[0].name if others else field.name
        kind = _respell_type(field.type, [other.type for other in others])
        spelled_fields.append(pa.field(name, kind, nullable=field.nullable))
    return spelled_fields


def _respell_type(kind: pa.DataType, earlier: Sequence[pa.DataType]) -> pa.DataType:
    if not pa.types.is_nested(kind):
        return kind
    same_kind = [_inner(other) for other in earlier if _is_same_kind(kind, other)]
    return _nested(kind, _respell(_inner(kind), same_kind))


def _nullable_type(kind: pa.DataType) -> pa.DataType:
    if not pa.types.is_nested(kind):
        return kind
    fields = [pa.field(field.name, _nullable_type(field.type)) for field in _inner(kind)]
    if pa.types.is_map(kind):
        fields[0] = fields[0].with_nullable(False)
    return _nested(kind, fields)


def _is_same_kind(kind: pa.DataType, other: pa.DataType) -> bool:
    return bool(pa.types.is_nested(kind) and kind.id == other.id)


def _inner(kind: pa.DataType) -> list[pa.Field]:
    """The fields of a canonical nested type; of a map its key and its value."""
    if pa.types.is_map(kind):
        return [kind.key_field, kind.item_field]
    return [kind.field(i) for i in range(kind.num_fields)]


def _nested(kind: pa.DataType, fields: Sequence[pa.Field]) -> pa.DataType:
    """A nested type like `kind`, with these fields."""
    if pa.types.is_struct(kind):
        return pa.struct(fields)
    return pa.map_(*fields) if pa.types.is_map(kind) else pa.list_(*fields)
