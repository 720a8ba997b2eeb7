"""A non-persistent topic at its broker: partitions without a log, and their subscriptions.

Always true: a subscription is there as long as it has consumers. A message has its receipt when it
was sent on or dropped; nothing is stored. Ids of messages begin with 0, and count on as long as the
broker has the partition.
"""

import asyncio
from collections.abc import Mapping
from weakref import WeakValueDictionary

from pyroaring import BitMap64

from spark_ledger.async_tasks import BackgroundTasks
from spark_ledger.broker.dispatch.dispatcher import Dispatcher
from spark_ledger.broker.dispatch.shared_dispatcher import SharingRules
from spark_ledger.broker.dispatch.sharing import UnackedLimits
from spark_ledger.broker.dispatch.subscriptions import (
    SubscribeRequest,
    Subscription,
    TopicSubscriptions,
)
from spark_ledger.broker.limits import check_count
from spark_ledger.broker.log.partition import Partition
from spark_ledger.broker.log.tail import Stored, TailBudget
from spark_ledger.broker.nonpersistent.dispatchers import (
    PassingActive,
    PassingDispatcher,
    PassingShared,
)
from spark_ledger.broker.owner.owned_partition import OwnedPartition, owned_elsewhere
from spark_ledger.broker.produce.backlog import Backlog
from spark_ledger.broker.produce.live_writer import LiveWriter
from spark_ledger.broker.produce.waiting import Chunk, WaitingRun
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.entry.pulsar_batch import chunk_in
from spark_ledger.topic.log import state
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.topics import TopicInfo

NO_LIMITS = UnackedLimits(0, 0)


class PassingLog(Partition):
    """A partition without rows: what consumers may read begins and ends at its end."""

    def __init__(self, client: TopicClient, topic: TopicInfo, number: int) -> None:
        empty = state.empty(topic.id, number + 1)
        super().__init__(client, topic, number, lambda: empty, TailBudget(0))
        self.ledger = 0
        self._bytes = 0

    @property
    def start(self) -> int:
        return self.end

    def pass_on(self, messages: int, size: int) -> int:
        """The offset of a batch that comes now."""
        self._bytes += size
        self.open_end.end += messages
        return self.open_end.end - messages

    def came(self) -> tuple[int, int]:
        return self.end, self._bytes

    async def last(self, before: int | None = None) -> Stored | None:
        return None

    async def since(self, ms: int) -> int:
        return self.end


class PassingWriter(LiveWriter):
    """Gives messages to the dispatchers in place of a ledger, before `append` returns."""

    def __init__(self, log: PassingLog, subscriptions: "PassingSubscriptions") -> None:
        self.backlog = Backlog(lambda *_: None, bytes_max=0, deduplicates=False)
        self._log = log
        self._subscriptions = subscriptions

    def append(self, run: WaitingRun) -> None:
        first = self._log.end
        dispatchers = self._subscriptions.dispatchers(self._log.number)
        for data, messages in zip(run.batches, run.counts, strict=True):
            sent = bytes(chunk_in(data)) if run.chunk is Chunk.EARLIER else data
            offset = self._log.pass_on(messages, len(sent))
            batch = Stored(offset, messages, sent, run.batched)
            for dispatcher in dispatchers:
                dispatcher.push(batch)
        run.stored(first)

    async def until_decided(self, matches: object) -> bool:
        return True

    async def is_fenced(self) -> bool:
        return False

    async def close(self) -> None:
        """Nothing to do: nothing waits."""


class PassingSubscription(Subscription):
    """Its position is the end of each partition."""

    def dispatcher(
        self, partition: Partition, mark: int, rows: BitMap64 | None = None
    ) -> Dispatcher:
        dispatcher = self._dispatchers.get(partition.number)
        if dispatcher is None:
            choice, end = self.policy.choice(), partition.end
            if choice is None:
                dispatcher = PassingActive(partition, self.policy, end, None)
            else:
                held = self._sharing.held(partition.number, self._budget)
                dispatcher = PassingShared(
                    partition, self.policy, end, None, choice, NO_LIMITS, held
                )
            self._dispatchers[partition.number] = dispatcher
        self._sharing.rates.apply(dispatcher)
        return dispatcher


class PassingSubscriptions(TopicSubscriptions):
    """Subscriptions without cursors: each `subscribe` is one with `durable` false."""

    def __init__(self, topic: "PassingTopic") -> None:
        self._topic = topic
        self._background = BackgroundTasks()
        self.sharing = SharingRules()
        self.policies = TopicPolicies()
        self._by_name: dict[str, Subscription] = {}
        self._locks: WeakValueDictionary[object, asyncio.Lock] = WeakValueDictionary()

    async def _opened(
        self, name: str, request: SubscribeRequest, durable: bool, earliest: bool | None
    ) -> Subscription:
        check_count(self.policies, sum(one.used for one in self.used_here()))
        return PassingSubscription(name, request.kind, None, self.sharing, request.keys)

    def send_away_from(self, name: str, number: int | None) -> None:
        """End the subscription's consumers, in this partition or in all (None)."""
        for consumer in self._by_name[name].consumers if name in self._by_name else ():
            if number in (None, consumer.dispatcher.partition.number):
                consumer.end()

    def dispatchers(self, number: int) -> list[PassingDispatcher]:
        """Those of the partition."""
        dispatchers = (one.dispatcher_of(number) for one in self._by_name.values())
        return [one for one in dispatchers if isinstance(one, PassingDispatcher)]


class PassingTopic:
    """The topic and those of its partitions that clients use at this broker (ServedTopic)."""

    def __init__(self, client: TopicClient, info: TopicInfo) -> None:
        self.info = info
        self.subscriptions = PassingSubscriptions(self)
        self.is_ended = False
        self.partitions: dict[int, OwnedPartition] = {}
        self._client = client
        self._beside = BackgroundTasks()

    @property
    def is_used(self) -> bool:
        """Whether it has a producer or a subscription."""
        producers = any(owned.producers for owned in self.partitions.values())
        return producers or bool(self.subscriptions.used_here())

    def partition(self, number: int) -> OwnedPartition:
        """The partition, which begins now if no client has used it here before."""
        owned = self.partitions.get(number)
        if owned is None:
            log = PassingLog(self._client, self.info, number)
            writer = PassingWriter(log, self.subscriptions)
            owned = OwnedPartition(self.info, log, writer, 0, self._beside.start)
            self.partitions[number] = owned
        return owned

    def leave(self, number: int) -> None:
        """Send the clients of a partition away: it falls on another broker, or was deleted."""
        owned = self.partitions.pop(number)
        owned.is_left = True
        owned.send_producers_away()
        self.subscriptions.send_consumers_away(number)

    def leave_each(self, number: int | None = None) -> None:
        """Leave this partition, or all (None): it begins anew with the next client."""
        for own in [own for own in self.partitions if number in (None, own)]:
            self.leave(own)

    def leave_all(self) -> None:
        self.is_ended = True
        self.leave_each()

    # -- for the topic's subscriptions ---------------------------------------------------------

    def readable_partition(self, number: int) -> Partition:
        """Raises Refusal if this broker has left the partition."""
        owned = self.partitions.get(number)
        if owned is None:
            raise owned_elsewhere(self.info, number)
        return owned.log

    async def offsets(self, *, earliest: bool) -> Mapping[int, int]:
        return {number: owned.log.end for number, owned in self.partitions.items()}

    async def history(self) -> int:
        return 0

    async def look_for_lost(self) -> None:
        """Nothing to do: NonPersistentTopics.look finds the partitions of other brokers."""
