"""The schemas that Pulsar's clients declare for values; to the topic these values are bytes. Pure.

    {"version":1, "client":{"type":"JSON", "name":"flight", "data":"<text>",
                            "properties":{"key":"value"}}}

is the record of a version that a client declared; records.py has the other records. `data` is
text, or {"base64":"..."} if the bytes are not UTF-8. Primitive types have no data. The data of JSON
and AVRO is an Avro schema in JSON. The data of KEY_VALUE is that of two schemas, each after its
length. The data of PROTOBUF_NATIVE is in descriptors.py.

Always true: two schemas of one type with equal data are one schema. For JSON and AVRO the parsed
JSON is compared, so other spaces make no new version; for PROTOBUF_NATIVE the files in any order.
Sources: PIP-43, PIP-87; SchemaInfo of Pulsar's clients.
"""

import base64
import json
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import avro.errors
import avro.schema
import pyarrow as pa

from spark_ledger import errors
from spark_ledger.topic.schema import descriptors

DATA_BYTES_MAX = 128 << 10
"""The largest schema of a client; a version's record has room for it."""
PROPERTIES_BYTES_MAX = 64 << 10
NAME_CHARACTERS_MAX = 1024
NESTING_MAX = 64  # lists and objects of a schema's JSON within each other
LISTS_MAX = MappingProxyType({"fields": 1000, "symbols": 1000})
BRANCHES_MAX = 100  # of a union
VERSION_NUMBER = struct.Struct(">q")
"""A version of a topic's schema as messages and clients have it."""
_LENGTH = struct.Struct(">i")


class ClientSchemaType(IntEnum):
    """The types by their numbers in Pulsar's protocol."""

    NONE = 0
    STRING = 1
    JSON = 2
    PROTOBUF = 3
    AVRO = 4
    BOOLEAN = 5
    INT8 = 6
    INT16 = 7
    INT32 = 8
    INT64 = 9
    FLOAT = 10
    DOUBLE = 11
    DATE = 12
    TIME = 13
    TIMESTAMP = 14
    KEY_VALUE = 15
    INSTANT = 16
    LOCAL_DATE = 17
    LOCAL_TIME = 18
    LOCAL_DATE_TIME = 19
    PROTOBUF_NATIVE = 20
    AUTO_CONSUME = 21


_Type = ClientSchemaType
UNDECLARED = frozenset((_Type.NONE, _Type.AUTO_CONSUME))
"""The types of a client that declares no schema: it takes bytes, or the topic's schema."""
AVRO_TYPES = frozenset((_Type.JSON, _Type.AVRO, _Type.PROTOBUF))
"""The types whose data is an Avro schema in JSON."""
WITH_DATA = AVRO_TYPES | {_Type.KEY_VALUE, _Type.PROTOBUF_NATIVE}


@dataclass(frozen=True, slots=True)
class ClientSchema:
    """A schema as a client declared it."""

    kind: ClientSchemaType
    data: bytes = b""
    properties: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    name: str = ""

    @property
    def size(self) -> int:
        """About how many bytes the schema takes in memory."""
        texts = (*self.properties, *self.properties.values(), self.name)
        return len(self.data) + sum(map(len, texts))

    @property
    def identity(self) -> tuple[Any, ...]:
        """Schemas with equal identities are one version of a topic's schema."""
        if self.kind is _Type.KEY_VALUE:
            key, value = key_and_value(self)
            return (self.kind, key.identity, value.identity)
        if self.kind in AVRO_TYPES:
            return (self.kind, json.dumps(json.loads(self.data), sort_keys=True))
        if self.kind is _Type.PROTOBUF_NATIVE:
            with suppress(*errors.MALFORMED):  # a program of an earlier version did not check it
                return (self.kind, *descriptors.descriptors_of(self.data))
        return (self.kind, self.data)


@dataclass(frozen=True, slots=True)
class ClientVersion:
    """A version of a topic's schema as clients see it: declared by a client, or made of the
    `columns` of Spark's rows (column_schemas.py). In a record `number` is the topic's number, from
    1; clients count from 0 (SchemaHead.number_for_clients)."""

    number: int
    schema: ClientSchema
    columns: pa.Schema | None = None

    @property
    def of_columns(self) -> bool:
        return self.columns is not None


def check(schema: ClientSchema) -> None:
    """Raises errors.SchemaUnreadable if a client must not declare the schema: it is too large, or
    its data is not what its type needs."""
    if len(schema.data) > DATA_BYTES_MAX:
        raise errors.SchemaUnreadable(
            f"a schema of {len(schema.data)} bytes is too large, at most {DATA_BYTES_MAX} fit"
        )
    properties = schema.properties.items()
    size = sum(len(text.encode()) for names in properties for text in names)
    if size > PROPERTIES_BYTES_MAX or len(schema.name) > NAME_CHARACTERS_MAX:
        raise errors.SchemaUnreadable(
            f"a schema with properties of {size} bytes and a name of {len(schema.name)} characters"
            f" is too large, at most {PROPERTIES_BYTES_MAX} and {NAME_CHARACTERS_MAX} fit"
        )
    if schema.kind in AVRO_TYPES:
        parsed(schema)
    elif schema.kind is _Type.PROTOBUF_NATIVE:
        try:
            descriptors.check(schema.data)
        except errors.MALFORMED as error:
            raise errors.SchemaUnreadable(
                f"a schema of type PROTOBUF_NATIVE has no complete descriptors: {error!r}"[:500]
            ) from error
    elif schema.kind is _Type.KEY_VALUE:
        for part in key_and_value(schema):
            check(part)


def parsed(schema: ClientSchema) -> avro.schema.Schema:
    """The data as a schema of Avro's library. Raises errors.SchemaUnreadable."""
    try:
        text = schema.data.decode()
        plain = json.loads(text)
        if plain == []:
            raise ValueError("a union without branches describes no value")
        _check_sizes(plain)
        return avro.schema.parse(text, validate_names=False)
    except (avro.errors.AvroException, *errors.MALFORMED) as error:
        raise errors.SchemaUnreadable(
            f"a schema of type {schema.kind.name} is no Avro schema in JSON: {error}"[:500]
        ) from error


def _check_sizes(plain: Any) -> None:
    """Bounds the time of a comparison of two schemas, which grows with the square of a list's
    length. Raises ValueError for a schema beyond the limits."""
    level, depth = [{"schema": plain}], 0
    while level:
        depth += 1
        if depth > NESTING_MAX:
            raise ValueError(f"it is nested deeper than {NESTING_MAX} levels")
        inner: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                for key, value in part.items():
                    if isinstance(value, list) and len(value) > LISTS_MAX.get(key, BRANCHES_MAX):
                        raise ValueError(f"{key!r} is a list of {len(value)}, which is too long")
                    inner.append(value)
            elif isinstance(part, list):
                inner.extend(part)
        level = inner


def key_and_value(schema: ClientSchema) -> tuple[ClientSchema, ClientSchema]:
    """The two schemas of a KEY_VALUE schema. Raises errors.SchemaUnreadable."""
    rest = memoryview(schema.data)
    parts = []
    for part in ("key", "value"):
        type_name = schema.properties.get(f"{part}.schema.type", "BYTES")
        kind = _Type.NONE if type_name == "BYTES" else _Type.__members__.get(type_name)
        if kind is None or kind is _Type.KEY_VALUE:
            raise _no_pair(f"no {part} may be of the type {type_name[:100]!r}")
        if len(rest) < _LENGTH.size:
            raise _no_pair(f"it ends before the length of the {part}")
        length = max(0, _LENGTH.unpack_from(rest)[0])
        rest = rest[_LENGTH.size :]
        if length > len(rest):
            raise _no_pair(f"a {part} of {length} bytes does not fit into the {len(rest)} left")
        parts.append(ClientSchema(kind, bytes(rest[:length])))
        rest = rest[length:]
    if rest:
        raise _no_pair(f"{len(rest)} bytes follow the value")
    return parts[0], parts[1]


def pair_from_text(text: str) -> bytes:
    """The data of a KEY_VALUE schema from Pulsar's text for both schemas,
    `{"key": ..., "value": ...}`: a schema is an object in JSON, "" if it has no data. Raises
    errors.SchemaUnreadable."""
    try:
        plain = json.loads(text)
        parts = [
            b"" if part == "" else json.dumps(part, ensure_ascii=False).encode()
            for part in (plain["key"], plain["value"])
        ]
    except errors.MALFORMED as error:
        raise _no_pair(
            f'it is not {{"key": ..., "value": ...}} in JSON: {error!r}'[:300]
        ) from error
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def pair_to_text(schema: ClientSchema) -> str:
    """As `pair_from_text` takes it. Raises errors.SchemaUnreadable, or one of errors.MALFORMED."""
    parts = key_and_value(schema)
    shown = [json.loads(part.data) if part.kind in WITH_DATA else "" for part in parts]
    return json.dumps(dict(zip(("key", "value"), shown, strict=True)), ensure_ascii=False)


def _no_pair(why: str) -> errors.SchemaUnreadable:
    return errors.SchemaUnreadable(
        f"a schema of type KEY_VALUE lacks the data of a key and a value: {why}"
    )


def to_json(schema: ClientSchema) -> dict[str, Any]:
    plain: dict[str, Any] = {"type": schema.kind.name}
    if schema.data:
        try:
            plain["data"] = schema.data.decode()
        except UnicodeDecodeError:
            plain["data"] = {"base64": base64.b64encode(schema.data).decode()}
    if schema.properties:
        plain["properties"] = dict(schema.properties)
    if schema.name:
        plain["name"] = schema.name
    return plain


def from_json(plain: Mapping[str, Any]) -> ClientSchema:
    """Raises one of errors.MALFORMED."""
    data = plain.get("data", "")
    properties = plain.get("properties", {})
    texts = [*properties, *properties.values(), plain.get("name", "")]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("properties and names of a schema are texts")
    return ClientSchema(
        ClientSchemaType[plain["type"]],
        data.encode() if isinstance(data, str) else base64.b64decode(data["base64"], validate=True),
        MappingProxyType(dict(properties)),
        plain.get("name", ""),
    )
