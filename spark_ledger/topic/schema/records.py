"""A topic's schema in the metadata store: all its versions, as JSON.

    /topic-ids/<id>/schema            {"current":2, "compatibility":"backward"}, and
                                       "in_force":false while the topic takes bytes,
                                       "proposed":[1] versions that no commit has used yet,
                                       "deleted":2, "erased":2 the last version that a DELETE of
                                       clients' schemas took away, and took away with force
    /topic-ids/<id>/schema/<n>        {"version":2, "fingerprint":"<sha-256>", "fields":[
                                         {"name":"id", "type":"int64", "nullable":false},
                                         {"name":"tags", "type":{"list":<field, no name>}, ...},
                                         {"name":"at", "type":{"struct":[<field>, ...]}, ...},
                                         {"name":"m", "type":{"map":[<key>, <value>]}, ...}]}
                                       or, of a version that Pulsar's client declared,
                                       {"version":1, "client":{...}}  (client_schemas.py)

Always true: versions count from 1 without gaps; a version never changes once it is written. Names
are unique without regard to case, at every level. Types are those of `TYPES`, decimals, and nested
types of these; each type has one spelling (`canonical`), so that equal schemas have equal
fingerprints. The fingerprint is SHA-256 over the fields as compact JSON with sorted keys; columns
are sorted by name in lower case, so schemas that differ only in the order or case of names are one
schema.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import pyarrow as pa

from spark_ledger import errors
from spark_ledger.topic.entry.arrow_arrays import BYTES, LISTS, TEXT, is_any
from spark_ledger.topic.log.records import dump, load
from spark_ledger.topic.schema import client_schemas
from spark_ledger.topic.schema.client_schemas import ClientVersion

VERSION_MAX = 1000  # of one topic; an entry's header has 16 bits for the number
UNREGISTERED = 0  # the version of entries whose columns follow no schema of the topic
SCHEMA_BYTES_MAX = 256 << 10  # of a version's record
DEPTH_MAX = 32
RESERVED_NAMES = frozenset(
    (
        *("__key", "__topic", "__partition", "__offset", "__publishtime", "__eventtime"),
        *("__messageid", "__messageproperties", "__ledgerid", "__entryid", "__batchindex"),
        *("__schemaversion", "__producername", "__sequenceid"),
    )
)
"""The names, in lower case, of the columns that a typed read adds (spark/rows/columns.py)."""

TYPES: Mapping[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date32[day]": pa.date32(),
    "time64[ns]": pa.time64("ns"),
    "timestamp[us, tz=UTC]": pa.timestamp("us", tz="UTC"),
    "timestamp[us]": pa.timestamp("us"),
    "duration[us]": pa.duration("us"),
}
"""The types of columns by Arrow's own names, except decimal128(p, s) and nested types."""

_TYPE_NAMES = {kind: name for name, kind in TYPES.items()}
_TEXT = "string"
_DECIMAL = re.compile(r"decimal128\((\d+), (\d+)\)")


class Compatibility(Enum):
    """How a new version must fit every earlier version; the names are Pulsar's."""

    NONE = "none"
    BACKWARD = "backward"  # a reader with the new version can read rows of the older versions
    FORWARD = "forward"  # a reader with an older version can read rows of the new version
    FULL = "full"


@dataclass(frozen=True, slots=True)
class SchemaHead:
    """/topic-ids/<id>/schema. `current` is the newest version, 0 before the first version.
    `proposed` are the numbers of versions that writes proposed and no commit has used yet: a
    proposed version has no rows, and is neither compared nor read. While the schema is `in_force`,
    the topic takes no bytes. With `has_text` (a record of earlier software) version 0 is the schema
    STRING, which Pulsar's clients declared. Versions up to `deleted` do not count for clients any
    more, and those up to `erased` are not given to them either; -1: no version was deleted."""

    current: int = 0
    compatibility: Compatibility = Compatibility.BACKWARD
    has_text: bool = False
    in_force: bool = True
    proposed: frozenset[int] = frozenset()
    deleted: int = -1
    erased: int = -1

    @property
    def last(self) -> int:
        """The highest number that a version has, also a proposed version."""
        return max(self.current, *self.proposed, 0)

    def has(self, number: int) -> bool:
        """Whether the number is a version of the schema, not only a proposed version."""
        return 0 < number <= self.current and number not in self.proposed

    def number_for_clients(self, number: int) -> int:
        """The number that Pulsar's clients have for a version. It never changes."""
        return number if self.has_text else number - 1

    def with_version(self, number: int) -> "SchemaHead":
        """The head after the proposed version `number` became a version of the schema."""
        proposed = self.proposed - {number}
        return replace(self, current=max(self.current, number), proposed=proposed)

    @property
    def takes_bytes(self) -> bool:
        """Whether the topic takes rows that are bytes and follow no schema."""
        return not (self.current and self.in_force)


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """/topic-ids/<id>/schema/<number>. `schema` is canonical."""

    number: int
    schema: pa.Schema
    fingerprint: str


def canonical(schema: pa.Schema) -> pa.Schema:
    """The schema without metadata, with the single spelling of each type; columns keep their order,
    and whether they may be null. Raises errors.SchemaTypeMismatch for a type that no column of a
    topic may have, errors.SchemaReservedColumn, errors.SchemaUnknownColumn for a repeated name,
    errors.SchemaMissingColumn for a schema without a column."""
    if not len(schema):
        raise errors.SchemaMissingColumn(
            "the rows have no column beside metadata", "Select a column, or use binary values."
        )
    for name in schema.names:
        if name.lower() in RESERVED_NAMES:
            raise errors.SchemaReservedColumn(
                f"a column of a topic cannot be named {name!r}: a read adds a column with this name"
            )
    return pa.schema(_fields(list(schema), ""))


def fingerprint(schema: pa.Schema) -> str:
    """The fingerprint of a canonical schema."""
    plain = _sorted([_field_to_json(field) for field in schema])
    return hashlib.sha256(_compact(plain).encode()).hexdigest()


def version_of(number: int, schema: pa.Schema) -> SchemaVersion:
    """Raises errors.SchemaIncompatible if there are too many versions or columns."""
    version = SchemaVersion(checked_number(number), schema, fingerprint(schema))
    size = len(encode_version(version))
    if size > SCHEMA_BYTES_MAX:
        raise errors.SchemaIncompatible(
            f"a schema of {len(schema)} columns takes {size} bytes, at most {SCHEMA_BYTES_MAX} fit",
            "Select fewer columns, or join several columns into a struct.",
        )
    return version


def checked_number(number: int) -> int:
    """The number of a new version. Raises errors.SchemaIncompatible if there are too many."""
    if number > VERSION_MAX:
        raise errors.SchemaIncompatible(
            f"the topic has {VERSION_MAX} versions of its schema, and cannot have more",
            "Write to another topic.",
        )
    return number


def encode_head(head: SchemaHead) -> bytes:
    plain: dict[str, Any] = {"current": head.current, "compatibility": head.compatibility.value}
    if head.has_text:
        plain["clients"] = _TEXT
    if head.proposed:
        plain["proposed"] = sorted(head.proposed)
    for name, number in (("deleted", head.deleted), ("erased", head.erased)):
        if number >= 0:
            plain[name] = number
    return dump(plain if head.in_force else {**plain, "in_force": False})


def decode_head(value: bytes) -> SchemaHead:
    """Raises errors.UnsupportedFormat."""

    def build(plain: dict[str, Any]) -> SchemaHead:
        if plain.get("clients") not in (None, _TEXT):
            raise ValueError(f"clients declare {plain['clients']!r}")
        return SchemaHead(
            int(plain["current"]),
            Compatibility(plain["compatibility"]),
            has_text="clients" in plain,
            in_force=bool(plain.get("in_force", True)),
            proposed=frozenset(map(int, plain.get("proposed", ()))),
            deleted=int(plain.get("deleted", -1)),
            erased=int(plain.get("erased", -1)),
        )

    return load(value, "topic's schema", build)


def encode_version(version: SchemaVersion | ClientVersion) -> bytes:
    if isinstance(version, ClientVersion):
        client = client_schemas.to_json(version.schema)
        return dump({"version": version.number, "client": client})
    fields = [_field_to_json(field) for field in version.schema]
    plain = {"version": version.number, "fingerprint": version.fingerprint, "fields": fields}
    return dump(plain)


def decode_version(value: bytes) -> SchemaVersion | ClientVersion:
    """Raises errors.UnsupportedFormat, also if the fingerprint is not that of the fields."""

    def build(plain: dict[str, Any]) -> SchemaVersion | ClientVersion:
        if "client" in plain:
            return ClientVersion(int(plain["version"]), client_schemas.from_json(plain["client"]))
        schema = pa.schema([_field_from_json(field) for field in plain["fields"]])
        return SchemaVersion(int(plain["version"]), schema, str(plain["fingerprint"]))

    version = load(value, "version of a schema", build)
    if isinstance(version, ClientVersion):
        return version
    actual = fingerprint(version.schema)
    if actual != version.fingerprint:
        raise errors.UnsupportedFormat(
            f"version {version.number} of a schema has fingerprint {version.fingerprint},"
            f" but its fields have {actual}"
        )
    return version


# -- one spelling --------------------------------------------------------------------------------


def _fields(fields: Sequence[pa.Field], within: str, depth: int = 0) -> list[pa.Field]:
    seen_names: set[str] = set()
    for field in fields:
        if field.name.lower() in seen_names:
            raise errors.SchemaUnknownColumn(
                f"there are two columns {within + field.name!r}", "Select one of these columns."
            )
        seen_names.add(field.name.lower())
    return [
        pa.field(f.name, _canonical_type(f.type, within + f.name, depth), nullable=f.nullable)
        for f in fields
    ]


def _canonical_type(kind: pa.DataType, path: str, depth: int) -> pa.DataType:
    if depth > DEPTH_MAX:
        raise errors.SchemaTypeMismatch(f"column {path!r} is nested deeper than {DEPTH_MAX} levels")
    if kind in _TYPE_NAMES:
        return kind
    if pa.types.is_dictionary(kind):
        return _canonical_type(kind.value_type, path, depth)
    if is_any(kind, TEXT):
        return pa.string()
    if is_any(kind, BYTES):
        return pa.binary()
    if pa.types.is_timestamp(kind) and kind.unit == "us":
        return pa.timestamp("us", tz="UTC")
    if pa.types.is_decimal128(kind) and 0 <= kind.scale <= kind.precision:
        return kind
    return _canonical_nested(kind, path, depth + 1)


def _canonical_nested(kind: pa.DataType, path: str, depth: int) -> pa.DataType:
    if pa.types.is_struct(kind) and kind.num_fields:
        return pa.struct(_fields(list(kind), f"{path}.", depth))
    if pa.types.is_map(kind):
        key = _canonical_type(kind.key_type, f"{path}.key", depth)
        item = _canonical_type(kind.item_type, f"{path}.value", depth)
        value = pa.field("value", item, nullable=kind.item_field.nullable)
        return pa.map_(pa.field("key", key, nullable=False), value)
    if is_any(kind, LISTS):
        element = _canonical_type(kind.value_type, f"{path}.element", depth)
        return pa.list_(pa.field("element", element, nullable=kind.value_field.nullable))
    raise errors.SchemaTypeMismatch(
        f"column {path!r} is of type {kind}, which no column of a topic may have",
        "Cast the column, or leave it out.",
    )


# -- JSON ----------------------------------------------------------------------------------------


def _field_to_json(field: pa.Field) -> dict[str, Any]:
    return {"name": field.name, "type": _type_to_json(field.type), "nullable": field.nullable}


def _type_to_json(kind: pa.DataType) -> Any:
    if kind in _TYPE_NAMES:
        return _TYPE_NAMES[kind]
    if pa.types.is_struct(kind):
        return {"struct": [_field_to_json(field) for field in kind]}
    if pa.types.is_map(kind):
        return {"map": [_without_name(kind.key_field), _without_name(kind.item_field)]}
    if pa.types.is_list(kind):
        return {"list": _without_name(kind.value_field)}
    assert pa.types.is_decimal128(kind), f"{kind} is canonical"
    return str(kind)


def _without_name(field: pa.Field) -> dict[str, Any]:
    return {"type": _type_to_json(field.type), "nullable": field.nullable}


def _field_from_json(plain: Mapping[str, Any], name: str | None = None) -> pa.Field:
    if not isinstance(plain["nullable"], bool):
        raise TypeError(f"nullable is {plain['nullable']!r}")
    return pa.field(
        plain["name"] if name is None else name,
        _type_from_json(plain["type"]),
        nullable=plain["nullable"],
    )


def _type_from_json(plain: Any) -> pa.DataType:
    if isinstance(plain, str):
        decimal = _DECIMAL.fullmatch(plain)
        return pa.decimal128(*map(int, decimal.groups())) if decimal else TYPES[plain]
    ((kind, inner),) = plain.items()
    if kind == "struct":
        return pa.struct([_field_from_json(field) for field in inner])
    if kind == "list":
        return pa.list_(_field_from_json(inner, "element"))
    if kind == "map":
        key, value = inner
        return pa.map_(_field_from_json(key, "key"), _field_from_json(value, "value"))
    raise ValueError(f"a type {kind!r}")


def _sorted(plain: Any) -> Any:
    """The JSON for the fingerprint: at every level the fields have names in lower case, and are
    sorted by name."""
    if isinstance(plain, list) and all(isinstance(f, dict) and "name" in f for f in plain):
        lower_case = [{**_sorted(f), "name": f["name"].lower()} for f in plain]
        return sorted(lower_case, key=lambda field: field["name"])
    if isinstance(plain, list):
        return [_sorted(inner) for inner in plain]
    if isinstance(plain, dict):
        return {name: _sorted(inner) for name, inner in plain.items()}
    return plain


def _compact(plain: Any) -> str:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))
