"""The schema of each topic: read, registered, kept.

Always true: a version is registered by one multi that also moves `current`, so versions have no
gaps and of two writers one decides anew on what the other registered; a lost response is resolved
by deciding anew too, for the same schema registered twice is one version. Versions never change, so
what was read once is kept (CACHE_BYTES_MAX), and a write whose schema is known costs no call. What
puts a schema into force gives the topic's head a new version in its multi, so a commit that saw no
schema loses to it.
"""

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pyarrow as pa

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.cluster import multi_unless_held
from spark_ledger.metadata.store import (
    BadVersion,
    Create,
    MetadataStore,
    MultiFailed,
    NodeExists,
    NoNode,
    Operation,
    OutcomeUnknown,
    Set,
    Versioned,
)
from spark_ledger.metadata.store_calls import TRIES_MAX, each, look_up, pause_s, reachable, read
from spark_ledger.topic.log.records import TopicLife, decode_head
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.schema import records as schema_records
from spark_ledger.topic.schema import rules as schema_rules
from spark_ledger.topic.schema.records import (
    ClientSchema,
    Compatibility,
    SchemaHead,
    SchemaVersion,
)
from spark_ledger.topic.schema.rules import SchemaMode

CACHE_BYTES_MAX = 16 << 20  # of versions' records, of all topics of a process
READS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class TopicSchema:
    """What is registered: versions 1 .. head.current, oldest first. `node_version` is the version
    of the node of `head`, None while there is none."""

    head: SchemaHead
    versions: tuple[SchemaVersion, ...]
    node_version: int | None

    @property
    def union(self) -> pa.Schema | None:
        """What a reader of every version sees; None before the first. Raises
        errors.SchemaIncompatible (only with compatibility none)."""
        schemas = [version.schema for version in self.versions]
        return schema_rules.union(schemas) if schemas else None


class SchemaRegistry:
    """One per process. Every method raises errors.Unavailable when the store does not respond,
    errors.UnsupportedFormat for records of a later version."""

    def __init__(self, store: MetadataStore, rng: random.Random) -> None:
        self._store = store
        self._rng = rng
        self._kept: OrderedDict[str, tuple[tuple[SchemaVersion, ...], int]] = OrderedDict()
        self._kept_bytes = 0

    async def of(self, topic: TopicInfo, *, fresh: bool = True) -> TopicSchema:
        """What is registered; with `fresh` everything that was before this call."""
        with reachable(f"reading the schema of topic '{topic.name}'"):
            if fresh:
                await self._store.sync(paths.topic_schema(topic.id))
            return await self._read(topic.id)

    async def for_read(self, topics: Iterable[TopicInfo]) -> pa.Schema:
        """The columns of all versions of all the topics, by name: what a typed read offers.

        Raises errors.SchemaNotRegistered, errors.SchemaIncompatible.
        """
        found: list[pa.Schema] = []
        for topic in topics:
            schema = (await self.of(topic)).union
            if schema is None:
                raise not_registered(topic)
            found.insert(0, schema)  # the first topic's order of columns comes first
        return schema_rules.union(found)

    async def for_write(
        self,
        topic: TopicInfo,
        schema: pa.Schema,
        mode: SchemaMode = SchemaMode.VALIDATE,
        *,
        must_exist: bool = False,
    ) -> SchemaVersion:
        """The version that rows with these columns are written under; registered when it returns.

        Column order and case do not matter; which columns may be null is not compared: rows are
        checked against the version's NOT NULL by who writes them. The first write registers
        version 1, unless there `must_exist` one; it comes into force with the first commit of rows
        under it (topic/commit).

        Raises errors.SchemaIncompatible, errors.SchemaNotRegistered, errors.SchemaTypeMismatch,
        errors.SchemaReservedColumn, errors.TopicDeleted.
        """
        written = schema_records.canonical(schema)
        kept, _ = self._kept.get(topic.id, ((), 0))
        known = schema_rules.matching(written, kept)
        if known is not None:
            return known

        def decide(now: TopicSchema) -> SchemaVersion:
            if must_exist and not now.versions:
                raise not_registered(topic)
            return schema_rules.decide(topic.name.short, written, now.head, now.versions, mode)

        return await self._registered(topic, decide)

    async def register(self, topic: TopicInfo, schema: pa.Schema) -> SchemaVersion:
        """Make `schema`, with its NOT NULLs, a version of the topic's schema; the one that is
        exactly it, if there is. The schema is in force when it returns. Raises as for_write."""
        wanted = schema_records.canonical(schema)

        def decide(now: TopicSchema) -> SchemaVersion:
            name = topic.name.short
            return schema_rules.decide_registration(name, wanted, now.head, now.versions)

        return await self._registered(topic, decide, in_force=True)

    async def withdraw(self, topic: TopicInfo) -> SchemaHead:
        """Put the schema out of force: the topic takes bytes again. Rows that are there keep their
        versions. Raises errors.SchemaNotRegistered, errors.TopicDeleted."""
        head = SchemaHead()

        def change(now: TopicSchema) -> tuple[SchemaHead, list[Operation]] | None:
            nonlocal head
            if not now.head.current:
                raise not_registered(topic)
            head = replace(now.head, in_force=False)
            return None if head == now.head else (head, [])

        with reachable(f"withdrawing the schema of topic '{topic.name}'"):
            await self._change(topic, change)
        return head

    async def set_compatibility(self, topic: TopicInfo, compatibility: Compatibility) -> None:
        """What later versions are checked for; versions that are there are not checked again."""

        def change(now: TopicSchema) -> tuple[SchemaHead, list[Operation]] | None:
            if now.node_version is not None and now.head.compatibility is compatibility:
                return None
            return replace(now.head, compatibility=compatibility), []

        with reachable(f"setting the schema of topic '{topic.name}'"):
            await self._change(topic, change)

    async def register_clients(self, topic: TopicInfo, schema: ClientSchema) -> None:
        """What Pulsar's clients say of the values is version 0 of the topic's schema; rows stay
        bytes. Raises errors.TopicDeleted."""

        def change(now: TopicSchema) -> tuple[SchemaHead, list[Operation]] | None:
            head = replace(now.head, clients=schema)
            return None if head == now.head else (head, [])

        with reachable(f"registering a schema of topic '{topic.name}'"):
            await self._change(topic, change)

    async def _registered(
        self,
        topic: TopicInfo,
        decide: Callable[[TopicSchema], SchemaVersion],
        *,
        in_force: bool = False,
    ) -> SchemaVersion:
        """`in_force`: in any case, else the first version is not."""
        chosen: SchemaVersion | None = None

        def change(now: TopicSchema) -> tuple[SchemaHead, list[Operation]] | None:
            nonlocal chosen
            chosen = decide(now)
            there = now.head.current
            head = replace(now.head, in_force=in_force or bool(there and now.head.in_force))
            if chosen.number <= there:
                return None if head == now.head else (head, [])
            path = paths.topic_schema(topic.id, chosen.number)
            record = schema_records.encode_version(chosen)
            return replace(head, current=chosen.number), [Create(path, record)]

        with reachable(f"registering a schema of topic '{topic.name}'"):
            await self._change(topic, change)
        assert chosen is not None, "a change begins with a decision"
        kept, size = self._kept.get(topic.id, ((), 0))
        if chosen.number == len(kept) + 1:
            size += len(schema_records.encode_version(chosen))
            self._keep(topic.id, (*kept, chosen), size)
        return chosen

    async def _change(
        self,
        topic: TopicInfo,
        change: Callable[[TopicSchema], tuple[SchemaHead, list[Operation]] | None],
    ) -> None:
        """Until `change` says that what is there is as wanted, or its multi was applied."""
        path = paths.topic_schema(topic.id)
        for tries in range(TRIES_MAX):
            await self._store.sync(path)
            now = await self._read(topic.id)
            wanted = change(now)
            if wanted is None:
                return
            topics_head = await self._head(topic)
            value = schema_records.encode_head(wanted[0])
            node: Operation = Create(path, value)
            if now.node_version is not None:
                node = Set(path, value, now.node_version)
            others = wanted[1]
            if now.head.takes_bytes and not wanted[0].takes_bytes:
                path_of_head = paths.topic_head(topic.id)
                others = [*others, Set(path_of_head, topics_head.value, topics_head.version)]
            try:
                await multi_unless_held(self._store, [node, *others])
                return
            except OutcomeUnknown:
                continue
            except MultiFailed as failed:
                if not isinstance(failed.cause, BadVersion | NodeExists | NoNode):
                    raise
            await asyncio.sleep(pause_s(self._rng, tries))
        raise errors.CommitContended(
            f"the schema of topic '{topic.name}' was changed by others {TRIES_MAX} times meanwhile"
        )

    async def _head(self, topic: TopicInfo) -> Versioned:
        """The head of the topic's log. Raises errors.TopicDeleted."""
        node = await read(self._store, paths.topic_head(topic.id))
        if node is None or decode_head(node.value).life is TopicLife.DELETED:
            raise errors.TopicDeleted(f"topic '{topic.name}' (id {topic.id}) was deleted")
        return node

    async def _read(self, topic_id: str) -> TopicSchema:
        node = await read(self._store, paths.topic_schema(topic_id))
        if node is None:
            return TopicSchema(SchemaHead(), (), None)
        head = schema_records.decode_head(node.value)
        kept, size = self._kept.get(topic_id, ((), 0))
        numbers = range(len(kept) + 1, head.current + 1)

        async def one(number: int) -> bytes:
            found = await look_up(self._store, paths.topic_schema(topic_id, number))
            if found is None:
                raise errors.UnsupportedFormat(
                    f"version {number} of the schema of topic id {topic_id} is not there"
                )
            return found.value

        if not numbers:
            return TopicSchema(head, kept[: head.current], node.version)
        values = await each(one, numbers, READS_AT_ONCE)
        versions = (*kept, *map(schema_records.decode_version, values))
        self._keep(topic_id, versions, size + sum(map(len, values)))
        return TopicSchema(head, versions, node.version)

    def _keep(self, topic_id: str, versions: tuple[SchemaVersion, ...], size: int) -> None:
        """The least recently read topics go first; one too large alone is not kept."""
        _, before = self._kept.pop(topic_id, ((), 0))
        self._kept[topic_id] = (versions, size)
        self._kept_bytes += size - before
        while self._kept_bytes > CACHE_BYTES_MAX:
            _, (_, freed) = self._kept.popitem(last=False)
            self._kept_bytes -= freed


def not_registered(topic: TopicInfo) -> errors.SchemaNotRegistered:
    """The error of a topic that is to be read or written by a schema."""
    return errors.SchemaNotRegistered(f"topic '{topic.name}' has no registered schema")
