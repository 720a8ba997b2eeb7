"""Which schema a Pulsar client may declare for a topic with earlier versions, by Pulsar's
strategies. Pure.

Of schemas whose data is Avro's, its library decides whether values of a writer's schema can be read
by a reader's; the reason names the first field that does not fit. As in Pulsar, names of records do
not count. Schemas of PROTOBUF_NATIVE fit if their root messages have one name, schemas of other
types if they are equal. Two types never fit, but for the strategy ALWAYS_COMPATIBLE.
"""

from collections.abc import Sequence
from enum import Enum

from avro.compatibility import (
    ReaderWriterCompatibilityChecker,
    SchemaCompatibilityType,
    lookup_writer_field,
)
from avro.errors import AvroException
from avro.schema import (
    ArraySchema,
    MapSchema,
    NamedSchema,
    RecordSchema,
    Schema,
    UnionSchema,
)

from spark_ledger import errors
from spark_ledger.topic.schema.client_schemas import (
    AVRO_TYPES,
    ClientSchema,
    ClientSchemaType,
    ClientVersion,
    key_and_value,
    parsed,
)
from spark_ledger.topic.schema.descriptors import descriptors_of

_NO_OTHER = "the topic's strategy ALWAYS_INCOMPATIBLE takes no other schema"


class Strategy(Enum):
    """Which earlier versions a new schema must fit, and how. Without TRANSITIVE in its name a
    strategy compares the new schema with the latest version only."""

    ALWAYS_INCOMPATIBLE = "always_incompatible"
    ALWAYS_COMPATIBLE = "always_compatible"
    BACKWARD = "backward"  # readers with the new schema can read values of the earlier one
    FORWARD = "forward"  # readers with the earlier schema can read values of the new one
    FULL = "full"  # both
    BACKWARD_TRANSITIVE = "backward_transitive"
    FORWARD_TRANSITIVE = "forward_transitive"
    FULL_TRANSITIVE = "full_transitive"

    @property
    def is_transitive(self) -> bool:
        return self.value.endswith("_transitive")

    @property
    def is_backward(self) -> bool:
        return self.value.startswith(("backward", "full"))

    @property
    def is_forward(self) -> bool:
        return self.value.startswith(("forward", "full"))


def producer_misfit(
    new: ClientSchema, versions: Sequence[ClientVersion], strategy: Strategy
) -> str | None:
    """Why `new` cannot be the version after `versions` (oldest first); None if it can be."""
    return _misfit(new, versions, strategy, "the new schema", "field")


def columns_misfit(
    columns: ClientSchema, declared: Sequence[ClientVersion], strategy: Strategy
) -> str | None:
    """As producer_misfit, for the schema of new `columns` of Spark after versions that clients
    declared."""
    return _misfit(columns, declared, strategy, "the new columns", "column")


def _misfit(
    new: ClientSchema,
    versions: Sequence[ClientVersion],
    strategy: Strategy,
    title: str,
    noun: str,
) -> str | None:
    if not versions or strategy is Strategy.ALWAYS_COMPATIBLE:
        return None
    if strategy is Strategy.ALWAYS_INCOMPATIBLE:
        return _NO_OTHER
    for version in reversed(versions) if strategy.is_transitive else versions[-1:]:
        earlier = version.schema
        if strategy.is_backward and (why := _unreadable(new, earlier, noun)):
            return f"{title} cannot read values of version {version.number}: {why}"
        if strategy.is_forward and (why := _unreadable(earlier, new, noun)):
            return f"version {version.number} cannot read values of {title}: {why}"
    return None


def consumer_misfit(
    declared: ClientSchema, versions: Sequence[ClientVersion], strategy: Strategy
) -> str | None:
    """Why a consumer that declares this schema cannot read the topic's values; None if it can. As
    with Pulsar, the consumer must be able to read values of the latest version. With
    BACKWARD_TRANSITIVE or FULL_TRANSITIVE it must be able to read values of all versions."""
    if strategy is Strategy.ALWAYS_COMPATIBLE:
        return None
    if strategy is Strategy.ALWAYS_INCOMPATIBLE:
        is_latest = bool(versions) and declared.identity == versions[-1].schema.identity
        return None if is_latest else _NO_OTHER
    looks_back = strategy in (Strategy.BACKWARD_TRANSITIVE, Strategy.FULL_TRANSITIVE)
    backward = Strategy.BACKWARD_TRANSITIVE if looks_back else Strategy.BACKWARD
    return producer_misfit(declared, versions, backward)


def _unreadable(reader: ClientSchema, writer: ClientSchema, noun: str = "field") -> str | None:
    """Why `reader` cannot read values of `writer`; None if it can. `noun` is the caller's word for
    a field."""
    if reader.kind is not writer.kind:
        return f"one is of type {writer.kind.name}, the other of type {reader.kind.name}"
    if reader.kind is ClientSchemaType.KEY_VALUE:
        names = ("key", "value")
        parts = zip(names, key_and_value(reader), key_and_value(writer), strict=True)
        reasons = (
            f"the {name}: {why}"
            for name, reader_part, writer_part in parts
            if (why := _unreadable(reader_part, writer_part)) is not None
        )
        return next(reasons, None)
    if reader.kind not in AVRO_TYPES and reader.identity == writer.identity:
        return None
    try:
        if reader.kind is ClientSchemaType.PROTOBUF_NATIVE:
            return _root_misfit(descriptors_of(reader.data).root, descriptors_of(writer.data).root)
        if reader.kind not in AVRO_TYPES:
            return "the data of the two schemas are not equal"
        of_reader = parsed(reader)
        _accept_any_name(of_reader)
        return _Comparison(noun).misfit(of_reader, parsed(writer))
    except (AvroException, *errors.MALFORMED) as error:  # such as a record of the type `error`
        return f"the two cannot be compared: {error}"[:500]


def _root_misfit(reader: str, writer: str) -> str | None:
    if reader == writer:
        return None
    return f"the root message is {reader} for the reader, {writer} in the values"[:500]


class _Comparison:
    """Compares a reader's schema with a writer's by Avro's library, which remembers what it
    compared; the field that does not fit is looked up after that."""

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._checker = ReaderWriterCompatibilityChecker()  # type: ignore[no-untyped-call]
        self._seen = set[tuple[int, int]]()

    def misfit(self, reader: Schema, writer: Schema, path: str = "") -> str | None:
        """The first field that does not fit; None if the reader can read all values."""
        result = self._checker.get_compatibility(reader, writer)
        if result.compatibility is SchemaCompatibilityType.compatible:
            return None
        inner_reader, inner_writer = _not_null(reader), _not_null(writer)
        pair = id(inner_reader), id(inner_writer)
        is_new = pair not in self._seen  # a record may be within itself
        self._seen.add(pair)
        inner = self._misfit_within(inner_reader, inner_writer, path) if is_new else None
        if inner is not None:
            return inner
        place = f"{self._noun} {path!r}" if path else "it"
        return f"{place} is {_title(reader)} for the reader, {_title(writer)} in the values"[:500]

    def _misfit_within(self, reader: Schema, writer: Schema, path: str) -> str | None:
        if isinstance(reader, ArraySchema) and isinstance(writer, ArraySchema):
            return self.misfit(reader.items, writer.items, f"{path}[]")
        if isinstance(reader, MapSchema) and isinstance(writer, MapSchema):
            return self.misfit(reader.values, writer.values, f"{path}{{}}")
        if not (isinstance(reader, RecordSchema) and isinstance(writer, RecordSchema)):
            return None
        for field in reader.fields:
            place = f"{path}.{field.name}" if path else str(field.name)
            written = lookup_writer_field(writer, field)
            if written is None and not field.has_default:
                title = f"{self._noun} {place!r}"
                return f"{title} is not in the values, and has no default for the reader"
            if written is not None and (why := self.misfit(field.type, written.type, place)):
                return why
        return None


class _AnyName:
    """As a record's aliases: the record is an alias of every record."""

    def __contains__(self, name: str) -> bool:
        return True


def _accept_any_name(schema: Schema) -> None:
    """Make the names of all records of the schema count for nothing."""
    schemas, seen = [schema], set[int]()
    while schemas:
        schema = schemas.pop()
        if id(schema) in seen:
            continue
        seen.add(id(schema))
        if isinstance(schema, RecordSchema):
            schema.set_prop("aliases", _AnyName())
            schemas += [field.type for field in schema.fields]
        elif isinstance(schema, ArraySchema):
            schemas.append(schema.items)
        elif isinstance(schema, MapSchema):
            schemas.append(schema.values)
        elif isinstance(schema, UnionSchema):
            schemas += schema.schemas


def _not_null(schema: Schema) -> Schema:
    """The only branch of a union beside null; else the schema itself."""
    if isinstance(schema, UnionSchema):
        branches: list[Schema] = [each for each in schema.schemas if each.type != "null"]
        if len(branches) == 1:
            return branches[0]
    return schema


def _title(schema: Schema) -> str:
    if isinstance(schema, UnionSchema):
        return " or ".join(map(_title, schema.schemas))
    return f"{schema.type} {schema.name}" if isinstance(schema, NamedSchema) else str(schema.type)
