"""The schemas that Pulsar's clients declare: what a producer and a consumer may declare, and which
version messages have (topic/schema/client_schemas.py)."""

import asyncio
import struct
from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from spark_ledger.broker.broker import Broker
from spark_ledger.broker.log.partition import Partition
from spark_ledger.broker.wire.commands import Refusal, ServerError, checked
from spark_ledger.broker.wire.link import all_properties
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.schema import client_rules, client_schemas
from spark_ledger.topic.schema.client_rules import Strategy
from spark_ledger.topic.schema.client_schemas import (
    UNDECLARED,
    ClientSchema,
    ClientSchemaType,
    ClientVersion,
)

AT_ONCE_BYTES_MAX = 2 << 10
"""A schema with more data is judged in a thread: 100 fields (3 KiB) take some 8 ms."""
R = TypeVar("R")
_SCHEMA_VERSION = struct.Struct(">q")
"""A version of a topic's schema as messages and clients have it."""


async def _judge(
    schema: ClientSchema, versions: Sequence[ClientVersion], strategy: Strategy
) -> str | None:
    """As client_rules.producer_misfit."""
    return await _aside(schema, partial(client_rules.producer_misfit, schema, versions, strategy))


async def _aside(schema: ClientSchema, work: Callable[[], R]) -> R:
    """Do the work with a schema. A large schema takes up to a second: in a thread."""
    return work() if len(schema.data) <= AT_ONCE_BYTES_MAX else await asyncio.to_thread(work)


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
    await _aside(schema, partial(client_schemas.check, schema))
    return schema


async def version_to_send(broker: Broker, topic: TopicInfo, part: Any) -> bytes:
    """The schema version of a client's messages: that of the schema that the client declares, which
    becomes a version of the topic's schema. A client that declares none sends bytes, and gets an
    empty version. Raises Refusal, errors.SchemaIncompatible, errors.SchemaUnreadable."""
    schema, policies = await declared_schema(part), topic.policies
    if schema is not None:
        strategy = Strategy(policies.schema_compatibility)
        may_add = policies.schema_auto_update
        version = await broker.client.schemas.register_client(
            topic, schema, strategy, may_add=may_add, judge=_judge
        )
        return _SCHEMA_VERSION.pack(version.number)
    registered = await broker.client.schemas.of(topic)
    if not registered.head.takes_bytes:
        raise Refusal(
            ServerError.INCOMPATIBLE_SCHEMA,
            f"topic {topic.name} has a schema in force: only Spark writes there",
        )
    if policies.schema_validation_enforced and registered.client_versions:
        raise Refusal(
            ServerError.INCOMPATIBLE_SCHEMA,
            f"topic {topic.name} has a schema, and its policy schema_validation_enforced takes no"
            " producer without: declare a schema",
        )
    return b""


async def check_consumer_schema(
    broker: Broker, topic: TopicInfo, partition: Partition, schema: ClientSchema
) -> None:
    """A consumer's schema must read what the topic's schema describes. It becomes the first version
    of a topic that has neither schema nor rows. Raises Refusal."""
    registered = await broker.client.schemas.of(topic)
    strategy = Strategy(topic.policies.schema_compatibility)
    versions = registered.client_versions
    misfit = await _aside(schema, partial(client_rules.consumer_misfit, schema, versions, strategy))
    if misfit is not None:
        raise Refusal(
            ServerError.INCOMPATIBLE_SCHEMA, f"the schema does not fit topic {topic.name}: {misfit}"
        )
    if not versions and registered.head.takes_bytes and not partition.end:
        await broker.client.schemas.register_client(topic, schema, strategy, judge=_judge)


async def schema_of_version(
    broker: Broker, topic: TopicInfo, version: bytes
) -> tuple[bytes, ClientSchema]:
    """The requested version of the topic's schema, or the latest if `version` is empty, and its
    schema. Raises Refusal."""
    schemas = broker.client.schemas
    if not version:
        versions = (await schemas.of(topic)).client_versions
        if versions:
            return _SCHEMA_VERSION.pack(versions[-1].number), versions[-1].schema
        raise Refusal(ServerError.TOPIC_NOT_FOUND, f"topic {topic.name} has no schema for Pulsar")
    is_number = len(version) == _SCHEMA_VERSION.size
    number = _SCHEMA_VERSION.unpack(version)[0] if is_number else -1
    declared = await schemas.client_version(topic, number)
    if declared is None:
        message = f"topic {topic.name} has no version {version[:8].hex()} of its schema for Pulsar"
        raise Refusal(ServerError.TOPIC_NOT_FOUND, message)
    return version, declared.schema
