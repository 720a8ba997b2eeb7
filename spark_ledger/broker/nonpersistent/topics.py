"""Which non-persistent topics there are, and which broker has which partition of them.

    /non-persistent/<tenant>/<namespace>/<topic>   {"partitions": n}, 0: it is not partitioned
    .../<topic>/schema, .../<topic>/schema/<n>     as those of other topics (registry.py)

Always true: the store is written when a topic is made, grows, gets a schema or is deleted, never
for a message. The policies are those of the namespace. A partition is at the broker on which it
falls among the brokers that are alive; no record names it. While brokers see different brokers
alive, a client may be refused, and looks the partition up again; messages between two clients at
different brokers are lost. `look` ends this: it sends the clients away of partitions that fall on
other brokers.
"""

import json
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from spark_ledger import errors
from spark_ledger.async_tasks import SharedReads
from spark_ledger.broker.catalog import Catalog, names_of_partitions
from spark_ledger.broker.log.ownership import Ownership
from spark_ledger.broker.names import NonPersistentName, PartitionName
from spark_ledger.broker.nonpersistent.topic import PassingTopic
from spark_ledger.broker.owner.owned_partition import OwnedPartition, owned_elsewhere
from spark_ledger.broker.wire.commands import Refusal, ServerError
from spark_ledger.metadata import paths
from spark_ledger.metadata.cluster import multi_unless_held, not_held_checks
from spark_ledger.metadata.store import (
    ANY_VERSION,
    Delete,
    MultiFailed,
    NodeExists,
    OutcomeUnknown,
    Versioned,
)
from spark_ledger.metadata.store_calls import Tries, names_in, read, unavailable_while
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log.names import TopicName, parse_namespace
from spark_ledger.topic.log.policies import PARTITIONS_MAX
from spark_ledger.topic.log.records import readable
from spark_ledger.topic.log.topics import TopicInfo, check_topics_max, policies_in
from spark_ledger.topic.schema.registry import SchemaRegistry
from spark_ledger.topic.upkeep.namespaces import Namespaces


@dataclass(frozen=True, slots=True)
class NonPersistentRecords:
    """The records of a cluster's non-persistent topics. Methods raise errors.Unavailable."""

    client: TopicClient

    async def find(self, topic: TopicName) -> TopicInfo | None:
        """The topic with its namespace's policies of now. None: there is no such topic."""
        folder = paths.namespace(topic.tenant, topic.namespace)
        with unavailable_while(f"opening topic '{topic}'"):
            node, namespace = await self.client.store.get_many([topic.path, folder])
        if node is None:
            return None
        partitions = _decoded(node.value)
        inherited, is_partitioned = policies_in(namespace), partitions > 0
        policies = replace(inherited, partitioned=is_partitioned, deduplication=False)
        # a topic that is deleted and made anew is another topic
        id_ = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{topic.full}?{node.created_ms}"))
        return TopicInfo(id_, topic, max(1, partitions), policies)

    async def put(self, topic: TopicName, partitions: int) -> TopicInfo:
        """Make the topic, unless it exists; a partitioned one may grow. Raises errors.BadConfig
        beyond the namespace's topics_max."""
        store, existing = self.client.store, await self.find(topic)
        current = 0 if existing is None else existing.partitions
        more = max(1, partitions) - current
        if existing is None or (existing.policies.partitioned and more > 0):
            await self._check_room(topic, more)
            with unavailable_while(f"making topic '{topic}'"):
                await not_held_checks(store)
                with suppress(NodeExists, OutcomeUnknown):
                    await store.create(topic.path, _encoded(partitions), parents=True)
                node = await store.get(topic.path)
                if 0 < _decoded(node.value) < partitions:
                    await store.set(topic.path, _encoded(partitions), node.version)
            existing = await self.find(topic)
        if existing is None:
            raise errors.TopicDeleted(f"topic '{topic}' was deleted while it was made")
        return existing

    async def _check_room(self, topic: TopicName, more: int) -> None:
        name = f"{topic.tenant}/{topic.namespace}"
        namespace = await self.client.topics.namespace(name)
        if namespace is not None and namespace.topics_max is not None:
            counts = (await self.in_namespace(name)).values()
            check_topics_max(topic, namespace, sum(max(1, count) for count in counts), more)

    async def delete(self, topic: TopicName) -> None:
        """Delete the topic and its schema."""
        store, schema = self.client.store, paths.schema_in(topic.path)
        tries = Tries(self.client.rng)
        with unavailable_while(f"deleting topic '{topic}'"):
            while await read(store, topic.path) is not None:
                versions = [f"{schema}/{name}" for name in await names_in(store, schema)]
                nodes = [*versions, schema, topic.path]
                if not versions and await read(store, schema) is None:
                    nodes = [topic.path]
                with suppress(MultiFailed, OutcomeUnknown):  # a client declared a schema meanwhile
                    await multi_unless_held(store, [Delete(node, ANY_VERSION) for node in nodes])
                    return
                await tries.retry_or_raise(f"others changed topic '{topic}' again and again")
                await store.sync(topic.path)

    async def in_namespace(self, namespace: str) -> dict[NonPersistentName, int]:
        """The topics by name, with their numbers of partitions. A topic that cannot be read is left
        out."""
        tenant, name = parse_namespace(namespace)
        store, folder = self.client.store, paths.non_persistent_topics(tenant, name)
        with unavailable_while(f"listing the topics of namespace '{namespace}'"):
            await store.sync(folder)
            topics = [NonPersistentName(tenant, name, t) for t in await names_in(store, folder)]
            nodes = await store.get_many([topic.path for topic in topics])
        numbers = [
            readable(f"topic {topic}", node, _decoded)
            for topic, node in zip(topics, nodes, strict=True)
        ]
        return {topic: n for topic, n in zip(topics, numbers, strict=True) if n is not None}


class PassingSchemas(SchemaRegistry):
    """The versions of a topic's schema are below the topic's record, and are deleted with it."""

    def _node(self, topic: TopicInfo, version: int | None = None) -> str:
        return paths.schema_in(topic.name.path, version)

    async def _head(self, topic: TopicInfo) -> Versioned:
        node = await read(self._store, topic.name.path)
        if node is None:
            raise errors.TopicDeleted(f"topic '{topic.name}' was deleted")
        return node


class NonPersistentTopics:
    """Those of one broker. Methods raise errors.Unavailable."""

    def __init__(self, catalog: Catalog, ownership: Ownership) -> None:
        self.records = NonPersistentRecords(catalog.client)
        self.schemas = PassingSchemas(catalog.client.store, catalog.client.rng)
        self._found = SharedReads(self.records.find)
        self.open: dict[TopicName, PassingTopic] = {}
        """The topics that clients have used here."""
        self._catalog, self._ownership = catalog, ownership

    async def partitions_of(self, name: PartitionName, *, create: bool) -> int:
        """As Catalog.partitions_of."""
        if name.partition is not None:
            return 0
        info = await self._found(name.topic)
        if info is None:
            partitions = await self._catalog.partitions_when_made(name.topic, create=create)
            if not partitions:
                return 0
            info = await self.records.put(name.topic, partitions)
        return info.partitions if info.policies.partitioned else 0

    async def find(self, topic: TopicName) -> TopicInfo | None:
        """As NonPersistentRecords.find; callers that ask at once share a read."""
        return await self._found(topic)

    async def existing(self, topic: TopicName) -> TopicInfo:
        """Raises Refusal if there is no such topic."""
        info = await self._found(topic)
        if info is None:
            raise Refusal(ServerError.TOPIC_NOT_FOUND, f"there is no topic '{topic}'")
        return info

    async def names_in(self, namespace: str) -> list[str]:
        """As Catalog.names_in."""
        await Namespaces(self._catalog.client.store, self._catalog.client.rng).check(namespace)
        topics = await self.records.in_namespace(namespace)
        return [
            name for topic, count in topics.items() for name in names_of_partitions(topic, count)
        ]

    async def owners_of(self, info: TopicInfo) -> list[str]:
        """The ids of the brokers on which the topic's partitions fall."""
        others, topic = await self._ownership.membership.others_alive(), info.name.full
        numbers = range(info.partitions)
        return [self._ownership.falls_on(topic, number, others) for number in numbers]

    async def lookup(self, name: PartitionName) -> tuple[str, bool]:
        """The URL of the broker that has the partition, and whether that is this broker. Raises
        Refusal if clients may not make the topic."""
        info = await self._found(name.topic)
        if info is None and name.partition is None:
            await self._catalog.partitions_when_made(name.topic, create=True)
        number = number_of(name, info)
        broker, url = await self._ownership.broker_for(name.topic.full, number)
        return url, broker == self._ownership.broker_id

    async def partition(
        self, name: PartitionName, *, create: bool
    ) -> tuple[PassingTopic, OwnedPartition]:
        """The partition at this broker. Raises Refusal, for example if it falls on another."""
        topic, info = name.topic, await self._found(name.topic)
        if info is None:
            partitions = await self._catalog.partitions_when_made(
                topic, create=create and name.partition is None
            )
            info = await self.records.put(topic, partitions)
        number = number_of(name, info)
        broker, _ = await self._ownership.broker_for(topic.full, number)
        if broker != self._ownership.broker_id:
            raise owned_elsewhere(info, number)
        served = self.open.get(topic)
        if served is not None and served.info.id != info.id:  # it was deleted and made anew
            served.leave_all()
        if served is None or served.is_ended:
            served = self.open[topic] = PassingTopic(self._catalog.client, info)
        served.info = info
        return served, served.partition(number)

    async def look(self, others: Iterable[str]) -> None:
        """Send the clients away of partitions that fall on other brokers, or that are deleted, and
        forget topics that no client uses. `others`: the other brokers that are alive."""
        topics = list(self.open.values())
        with unavailable_while("looking for deleted topics"):
            nodes = await self._catalog.client.store.get_many(
                [topic.info.name.path for topic in topics]
            )
        for topic, node in zip(topics, nodes, strict=True):
            for number in list(topic.partitions):
                broker = self._ownership.falls_on(topic.info.name.full, number, others)
                if node is None or broker != self._ownership.broker_id:
                    topic.leave(number)
            if not topic.is_used and self.open.get(topic.info.name) is topic:
                topic.leave_all()  # a client that comes at this moment looks the topic up again
                del self.open[topic.info.name]


def number_of(name: PartitionName, info: TopicInfo | None) -> int:
    """The partition that a client names; `info` None: there is no topic of this name. Raises
    Refusal."""
    number = name.partition
    partitions = info.partitions if info is not None and info.policies.partitioned else 0
    if number is None and not partitions:
        return 0
    if number is None or number >= partitions:
        message = f"topic {name.topic} has {partitions} partitions, not partition {number}"
        raise Refusal(ServerError.TOPIC_NOT_FOUND, message)
    return number


def _encoded(partitions: int) -> bytes:
    return json.dumps({"partitions": partitions}).encode()


def _decoded(value: bytes) -> int:
    try:
        partitions = json.loads(value)["partitions"]
    except errors.MALFORMED as why:
        raise errors.UnsupportedFormat(f"a non-persistent topic is unreadable: {why!r}") from why
    if type(partitions) is not int or not 0 <= partitions <= PARTITIONS_MAX:
        raise errors.UnsupportedFormat(f"a non-persistent topic has {partitions!r} partitions")
    return partitions
