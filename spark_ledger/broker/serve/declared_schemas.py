"""The schemas that Pulsar's clients declare: what a producer and a consumer may declare, and which
version messages have (topic/schema/client_schemas.py)."""

from types import MappingProxyType
from typing import Any

from spark_ledger.broker import schemas
from spark_ledger.broker.broker import Broker
from spark_ledger.broker.log.partition import Partition
from spark_ledger.broker.produce.producer import NO_SCHEMA, DeclaredSchema
from spark_ledger.broker.wire.commands import Refusal, ServerError, checked
from spark_ledger.broker.wire.link import all_properties
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.schema.client_rules import consumer_misfit
from spark_ledger.topic.schema.client_schemas import (
    UNDECLARED,
    VERSION_NUMBER,
    ClientSchema,
    ClientSchemaType,
)


async def declared_schema(part: Any) -> ClientSchema | None:
    """The schema that a client declares; None if it declares none. Raises Refusal,
    errors.SchemaUnreadable."""
    if not part.HasField("schema"):
        return None
    kind = checked(ClientSchemaType, part.schema.type, "type of schemas")
    if kind in UNDECLARED:
        return None
    properties = MappingProxyType(all_properties(part.schema.properties))
    schema = ClientSchema(kind, part.schema.schema_data, properties, part.schema.name)
    await schemas.check(schema)
    return schema


async def declared_by_producer(broker: Broker, topic: TopicInfo, part: Any) -> DeclaredSchema:
    """What a client's messages are by the schema that the client declares. That schema becomes a
    version of the topic's schema, and the messages have this version. A client that declares no
    schema sends bytes, and gets an empty version. `topic` has the policies of now. Raises Refusal,
    errors.SchemaIncompatible, errors.SchemaUnreadable."""
    schema, policies = await declared_schema(part), topic.policies
    registry = broker.schemas_of(topic)
    if schema is not None:
        may_add = policies.schema_auto_update
        version = await schemas.declare(registry, topic, schema, may_add=may_add)
        return DeclaredSchema(
            VERSION_NUMBER.pack(version.number),
            are_objects=schema.kind is ClientSchemaType.JSON,
            beside_columns=registry.has_columns(topic),
        )
    registered = await registry.of(topic)
    if not registered.head.takes_bytes:
        raise Refusal(
            ServerError.INCOMPATIBLE_SCHEMA,
            f"the rows of topic {topic.name} are columns: declare a JSON schema that fits them, as"
            " AUTO_PRODUCE does",
        )
    if policies.schema_validation_enforced and registered.client_versions:
        raise Refusal(
            ServerError.INCOMPATIBLE_SCHEMA,
            f"topic {topic.name} has a schema, and its policy schema_validation_enforced takes no"
            " producer without: declare a schema",
        )
    return NO_SCHEMA


async def check_consumer_schema(
    broker: Broker, topic: TopicInfo, partition: Partition, schema: ClientSchema
) -> None:
    """Check that a consumer's schema reads what the topic's schema describes. If the topic has
    neither a schema nor rows, the consumer's schema becomes the first version of the topic's
    schema. `topic` has the policies of now. Raises Refusal."""
    registry = broker.schemas_of(topic)
    registered = await registry.of(topic)
    versions = registered.client_versions
    misfit = await schemas.misfit(topic, schema, versions, consumer_misfit)
    if misfit is not None:
        raise Refusal(
            ServerError.INCOMPATIBLE_SCHEMA, f"the schema does not fit topic {topic.name}: {misfit}"
        )
    if not versions and registered.head.takes_bytes and not partition.end:
        may_add = topic.policies.schema_auto_update
        await schemas.declare(registry, topic, schema, may_add=may_add)


async def schema_of_version(
    broker: Broker, topic: TopicInfo, version: bytes
) -> tuple[bytes, ClientSchema]:
    """The requested version of the topic's schema, or the latest if `version` is empty, and its
    schema. Raises Refusal."""
    registry = broker.schemas_of(topic)
    if not version:
        versions = (await registry.of(topic)).client_versions
        if versions:
            return VERSION_NUMBER.pack(versions[-1].number), versions[-1].schema
        raise Refusal(ServerError.TOPIC_NOT_FOUND, f"topic {topic.name} has no schema for Pulsar")
    is_number = len(version) == VERSION_NUMBER.size
    number = VERSION_NUMBER.unpack(version)[0] if is_number else -1
    declared = await registry.client_version(topic, number)
    if declared is None:
        message = f"topic {topic.name} has no version {version[:8].hex()} of its schema for Pulsar"
        raise Refusal(ServerError.TOPIC_NOT_FOUND, message)
    return version, declared.schema
