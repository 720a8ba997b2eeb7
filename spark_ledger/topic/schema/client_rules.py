"""Which schema a Pulsar client may declare for a topic with earlier versions, by Pulsar's
strategies. Pure.

For JSON and AVRO schemas, Avro's library decides whether a reader's schema can read values of a
writer's schema. Schemas of another type fit only if they are equal. Schemas of two types never fit,
except with the strategy ALWAYS_COMPATIBLE.
"""

from collections.abc import Sequence
from enum import Enum

from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType
from avro.errors import AvroException

from spark_ledger import errors
from spark_ledger.topic.schema.client_schemas import (
    ClientSchema,
    ClientSchemaType,
    ClientVersion,
    key_and_value,
    parsed,
)

_NO_OTHER = "the topic's strategy ALWAYS_INCOMPATIBLE takes no other schema"
_AVRO_RULES = (ClientSchemaType.JSON, ClientSchemaType.AVRO)


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
    if not versions or strategy is Strategy.ALWAYS_COMPATIBLE:
        return None
    if strategy is Strategy.ALWAYS_INCOMPATIBLE:
        return _NO_OTHER
    for version in reversed(versions) if strategy.is_transitive else versions[-1:]:
        earlier = version.schema
        if strategy.is_backward and (why := _unreadable(new, earlier)):
            return f"the new schema cannot read values of version {version.number}: {why}"
        if strategy.is_forward and (why := _unreadable(earlier, new)):
            return f"version {version.number} cannot read values of the new schema: {why}"
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


def _unreadable(reader: ClientSchema, writer: ClientSchema) -> str | None:
    """Why `reader` cannot read values of `writer`; None if it can."""
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
    if reader.kind not in _AVRO_RULES:
        is_equal = reader.identity == writer.identity
        return None if is_equal else "the data of the two schemas are not equal"
    try:
        checker = ReaderWriterCompatibilityChecker()  # type: ignore[no-untyped-call]
        result = checker.get_compatibility(parsed(reader), parsed(writer))
    except (AvroException, *errors.MALFORMED) as error:  # such as a record of the type `error`
        return f"the two cannot be compared: {error}"[:500]
    if result.compatibility is SchemaCompatibilityType.compatible:
        return None
    kinds = sorted(kind.value.replace("_", " ") for kind in result.incompatibilities)
    return "; ".join((*kinds, *sorted(result.messages), *sorted(result.locations)))[:500]
