"""How a broker compares schemas that Pulsar's clients declare without stopping its loop: a large
schema takes up to a second, so it is compared in a thread."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.schema import client_schemas, registry
from spark_ledger.topic.schema.client_rules import Strategy
from spark_ledger.topic.schema.client_schemas import ClientSchema, ClientVersion

AT_ONCE_BYTES_MAX = 2 << 10
"""More bytes of schemas are compared in a thread: 100 fields (3 KiB) take some 8 ms."""
R = TypeVar("R")


async def check(schema: ClientSchema) -> None:
    """As client_schemas.check: raises errors.SchemaUnreadable."""
    await _compare(schema.size, partial(client_schemas.check, schema))


async def declare(
    schemas: registry.SchemaRegistry,
    topic: TopicInfo,
    schema: ClientSchema,
    *,
    may_add: bool = True,
) -> ClientVersion:
    """The version of the topic's schema for a checked schema. Without `may_add` it is an existing
    version. Raises errors.SchemaIncompatible, errors.TopicDeleted."""
    strategy = Strategy(topic.policies.schema_compatibility)
    return await schemas.register_client(topic, schema, strategy, may_add=may_add, compare=_compare)


async def misfit(
    topic: TopicInfo,
    schema: ClientSchema,
    versions: Sequence[ClientVersion],
    rule: Callable[[ClientSchema, Sequence[ClientVersion], Strategy], str | None],
) -> str | None:
    """Why the rule refuses the schema, by the topic's strategy; None if it does not."""
    strategy = Strategy(topic.policies.schema_compatibility)
    size = schema.size + registry.size_of(versions)
    return await _compare(size, partial(rule, schema, versions, strategy))


async def find(schema: ClientSchema, versions: Sequence[ClientVersion]) -> ClientVersion | None:
    """The version with this schema; None if no version has it."""
    size = schema.size + registry.size_of(versions)
    return await _compare(size, partial(registry.find_client_version, versions, schema))


async def _compare(size: int, comparison: Callable[[], R]) -> R:
    return comparison() if size <= AT_ONCE_BYTES_MAX else await asyncio.to_thread(comparison)
