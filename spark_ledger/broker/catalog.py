"""Which topics exist for clients, and which topics a client makes by using their names."""

from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from spark_ledger import errors
from spark_ledger.broker.names import PartitionName
from spark_ledger.broker.settings import BrokerSettings
from spark_ledger.broker.wire.commands import Refusal, ServerError
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log.names import DEFAULT_NAMESPACE, DEFAULT_TENANT, TopicName
from spark_ledger.topic.log.policies import NamespacePolicies
from spark_ledger.topic.log.topics import ListedTopic, TopicInfo
from spark_ledger.topic.upkeep.namespaces import Namespaces


class NamedPartition(NamedTuple):
    """A partition of a topic, and how many partitions the topic has."""

    info: TopicInfo
    number: int
    partitions: int


def names_of(topic: ListedTopic) -> list[str]:
    """The topic's name as clients have it in lists; the names of its partitions if it is
    partitioned."""
    return names_of_partitions(topic.name, topic.partitions if topic.is_partitioned else 0)


def names_of_partitions(topic: TopicName, partitions: int) -> list[str]:
    """As `names_of`; 0: the topic is not partitioned."""
    if not partitions:
        return [topic.full]
    return [f"{topic.full}-partition-{number}" for number in range(partitions)]


@dataclass(frozen=True, slots=True)
class Catalog:
    """The topics of a cluster as one broker's clients see them."""

    client: TopicClient
    settings: BrokerSettings

    async def find(self, name: TopicName, *, create: bool) -> TopicInfo:
        """The topic. If the topic does not exist, it is made if `create` is set and the settings
        allow that. Raises Refusal, errors.Unavailable."""
        info = await self.client.topics.find(name.full)
        if info is not None:
            return info
        partitions = await self.partitions_when_made(name, create=create)
        with suppress(errors.TopicExists):
            policies = {"partitioned": partitions > 0}
            return await self.client.topics.create(
                name.full, max(1, partitions), policies, makes_namespace=False
            )
        return await self.client.topics.open(name.full)

    async def partitions_when_made(self, name: TopicName, *, create: bool) -> int:
        """How many partitions a new topic of this name gets; 0: the topic is not partitioned.
        Raises Refusal if clients may not make the topic, errors.Unavailable."""
        namespace = f"{name.tenant}/{name.namespace}"
        policies = await self.client.topics.namespace(namespace)
        if policies is None and namespace != f"{DEFAULT_TENANT}/{DEFAULT_NAMESPACE}":
            raise Refusal(
                ServerError.TOPIC_NOT_FOUND,
                f"there is no namespace '{namespace}': `spark-ledger namespace set` makes it",
            )
        policies = policies or NamespacePolicies()
        may_create, partitions = policies.auto_create, policies.auto_create_partitions
        if not (create and (self.settings.auto_create if may_create is None else may_create)):
            raise Refusal(ServerError.TOPIC_NOT_FOUND, f"there is no topic '{name}'")
        return self.settings.auto_create_partitions if partitions is None else partitions

    async def partitions_of(
        self, name: PartitionName, *, create: bool, served: TopicInfo | None = None
    ) -> int:
        """The number of partitions as clients count them: 0 for a topic that is not partitioned,
        and for the name of a partition. For a topic that does not exist the number is
        `partitions_when_made`. With `create` this method makes such a topic if it is to be
        partitioned: its clients next open the partitions by their names. `served` is the topic of
        this name that the broker has open: then one round trip to the store is enough. Raises
        Refusal, errors.Unavailable."""
        if name.partition is not None:
            return 0
        info = None if served is None else await self.client.topics.again(served)
        info = info or await self.client.topics.find(name.topic.full)
        if info is None:
            if not await self.partitions_when_made(name.topic, create=create):
                return 0
            info = await self.find(name.topic, create=create)
        if not info.policies.partitioned:
            return 0
        count = len((await self.client.log(info.id).fold()).partitions)
        if count > info.partitions_noted:  # an earlier version does not note growth in the record
            with suppress(errors.LedgerError):  # under a hold, for instance; a later lookup does it
                await self.client.topics.note_growth(info, count)
        return count

    async def names_in(self, namespace: str) -> list[str]:
        """The names of the topics of `tenant/namespace`. A partitioned topic appears by the names
        of its partitions: a client that consumes by a pattern gives up the partitions that are not
        listed. A topic that cannot be read is left out. Raises errors.NamespaceNotFound."""
        await Namespaces(self.client.store, self.client.rng).check(namespace)
        topics = await self.client.topics.in_namespace(namespace)
        return [name for topic in topics for name in names_of(topic)]

    async def find_partition(self, name: PartitionName, *, create: bool) -> NamedPartition:
        """The partition; if the name has no number, the topic's only partition. Raises Refusal,
        errors.Unavailable."""
        number = name.partition
        info = await self.find(name.topic, create=create and number is None)
        log = self.client.log(info.id)
        count = len((await log.fold()).partitions)
        if number is not None and number >= count:
            count = len((await log.fold(fresh=True)).partitions)
        if number is None and count == 1:
            number = 0
        if number is None or not 0 <= number < count:
            raise Refusal(
                ServerError.TOPIC_NOT_FOUND,
                f"topic {info.name} has {count} partitions, not partition {number}",
            )
        return NamedPartition(info, number, count)
