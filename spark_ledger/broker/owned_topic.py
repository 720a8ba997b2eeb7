"""A topic in its owner's hands: its partitions, producers and subscriptions.

Always true: nobody is served before what another owner left open was sealed; when another broker
has the topic, or it was deleted, every producer and consumer is sent away, to look it up again. Two
exclusive producers, or two producers of one name, are never there together.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

from spark_ledger import errors
from spark_ledger.broker.consumers.subscription import Consumer, PlaceInPartition, Subscription
from spark_ledger.broker.names import ledger_number
from spark_ledger.broker.owner.live_writer import LiveWriter, RollLimits, Waiting
from spark_ledger.broker.owner.ownership import Deposed
from spark_ledger.broker.owner.partition import Partition
from spark_ledger.broker.owner.tail import Tail, TailBudget
from spark_ledger.broker.owner.topic_commits import TopicCommits
from spark_ledger.broker.wire.commands import AccessMode, Refusal, ServerError, SubscriptionType
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic.log.state import TopicState
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.read.follower import TopicFollower
from spark_ledger.topic.subscription.records import SubscriptionKind
from spark_ledger.topic.subscription.seek_target import End

LOOK_S = 5.0
RELEASE_S = 5.0
EPOCH_BITS = 32  # of an epoch of exclusive producers, below the owner's
DECIDE_S = 10.0
COME_BACK_S = 10.0
"""For so long a seek waits for the consumers that it sent away."""

_log = logging.getLogger(__name__)


class ProducerHere(Protocol):
    """A producer, as its topic knows it."""

    name: str
    mode: AccessMode
    epoch: int
    topic_epoch: int
    """Of an exclusive one: which of those that followed each other it is; 0 of one that is new."""

    def send_away(self) -> None:
        """It is to look its topic up again."""

    def ready(self) -> None:
        """It waited to be the only one, and is."""


class OwnedTopic:
    """Made by `open_topic`; `on_end` is called once, when this broker has it no more."""

    def __init__(
        self,
        commits: TopicCommits,
        follower: TopicFollower,
        budget: TailBudget,
        limits: RollLimits,
        on_end: Callable[["OwnedTopic"], None],
    ) -> None:
        self.info: TopicInfo = commits.topic
        self.ledger = ledger_number(commits.topic.id)
        self._commits = commits
        self._client = commits.client
        self._follower = follower
        self._budget = budget
        self._limits = limits
        self._on_end = on_end
        self._partitions: list[Partition] = []
        self._producers: dict[int, list[ProducerHere]] = {}
        self._producers_waiting: dict[int, list[ProducerHere]] = {}
        self._exclusive_epochs: dict[int, int] = {}
        self._subscriptions: dict[str, Subscription] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._beside: dict[asyncio.Task[None], None] = {}
        self._following: asyncio.Task[None] | None = None
        self._ended = False

    @property
    def state(self) -> TopicState:
        return self._follower.state()

    async def start(self) -> None:
        """Seal what is open, then follow the topic's log. Raises Deposed, errors.TopicDeleted,
        errors.DataUnavailable, errors.Unavailable."""
        self._grow(await self._commits.state())
        await asyncio.gather(*(one.writer.start() for one in self._partitions))
        await self._follower.beyond((await self._commits.state()).next - 1)
        self._following = asyncio.get_running_loop().create_task(self._follow())

    def partition(self, number: int | None) -> Partition:
        """The partition of that number; None: the only one. Raises Refusal."""
        self._grow(self.state)
        if number is None and len(self._partitions) == 1:
            number = 0
        if number is None or not 0 <= number < len(self._partitions):
            raise Refusal(
                ServerError.TOPIC_NOT_FOUND,
                f"topic {self.info.name} has {len(self._partitions)} partitions, not"
                f" partition {number}",
            )
        return self._partitions[number]

    def _grow(self, state: TopicState) -> None:
        for number in range(len(self._partitions), len(state.partitions)):
            one = Partition(
                self._client, self.info, number, self._follower.state, Tail(self._budget)
            )
            one.writer = LiveWriter(self._commits, number, self._limits, self._stored)
            self._partitions.append(one)

    def _stored(self, partition: int, offset: int, batch: Waiting) -> None:
        batched = bool(getattr(batch, "batched", False))
        self._partitions[partition].stored(offset, batch, batched=batched)

    async def _follow(self) -> None:
        """Tell those who wait of every commit; notice when another has the topic."""
        seen = self.state.next
        look_s = asyncio.get_running_loop().time() + LOOK_S
        while not self._ended:
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(look_s):
                        state = await self._follower.beyond(seen)
                        seen = state.next
                if self.state.deleted:
                    raise errors.TopicDeleted(f"topic {self.info.name} was deleted")
                for one in self._partitions:
                    one.wake()
                if asyncio.get_running_loop().time() >= look_s:
                    look_s = asyncio.get_running_loop().time() + LOOK_S
                    await self._commits.heartbeat()
                    await self._commits.check_owner()
            except (Deposed, errors.TopicDeleted, errors.TopicNotFound) as error:
                self.give_up(error)
            except (errors.LedgerError, StoreError) as error:
                _log.warning("topic %s is not followed now: %s", self.info.name, error)
                await asyncio.sleep(1.0)

    def give_up(self, error: errors.LedgerError) -> None:
        """Another has the topic, or nobody: send everyone away, once it is decided what of the
        batches under way is stored (a producer sends the others again)."""
        if self._ended:
            return
        self._ended = True
        _log.warning("topic %s is given up: %s", self.info.name, error)
        self._on_end(self)
        self._aside(self._leave_to_others())

    async def _leave_to_others(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(DECIDE_S):
                await asyncio.gather(*(one.writer.close() for one in self._partitions))
        self._send_away()
        await self._commits.close()

    def _send_away(self) -> None:
        for some in (self._producers_waiting, self._producers):
            for producers in list(some.values()):
                for producer in list(producers):
                    producer.send_away()
        for subscription in list(self._subscriptions.values()):
            for consumer in subscription.consumers:
                consumer.end()

    async def close(self) -> None:
        """Store what waits, seal, write where subscriptions are, and let the topic go."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        self._ended = True
        await asyncio.gather(*(one.writer.close() for one in self._partitions))
        self._send_away()
        for name in list(self._subscriptions):
            await self._release(name)
        await self._commits.close()

    def writer(self, partition: int) -> LiveWriter | None:
        """The open end of the partition, None if there is no such partition here."""
        there = 0 <= partition < len(self._partitions)
        return self._partitions[partition].writer if there else None

    def append(self, partition: int, batch: Waiting) -> None:
        """Store a producer's batch after all that came to the partition before it."""
        self._partitions[partition].writer.append(batch)

    def last_sequence_id(self, partition: int, producer_name: str) -> int:
        """As LiveWriter.last_sequence_id."""
        return self._partitions[partition].writer.last_sequence_id(producer_name)

    # -- producers -----------------------------------------------------------------------------

    def add_producer(self, partition: int, producer: ProducerHere) -> bool:
        """Whether it may send; else it waits until it is the only one, and is told. Raises
        Refusal."""
        there = self._producers.setdefault(partition, [])
        waiting = self._producers_waiting.setdefault(partition, [])
        if self.state.terminated:
            raise Refusal(ServerError.TOPIC_TERMINATED, f"topic {self.info.name} is terminated")
        for some in (there, waiting):
            self._replace(some, producer)
        exclusive = any(one.mode is not AccessMode.SHARED for one in there)
        if 0 < producer.topic_epoch < self._exclusive_epochs.get(partition, 0):
            raise Refusal(
                ServerError.PRODUCER_FENCED,
                f"another producer has taken topic {self.info.name} from '{producer.name}'",
            )
        if producer.mode is AccessMode.EXCLUSIVE_WITH_FENCING:
            fenced, there[:] = list(there), [producer]
            self._is_exclusive(partition, producer)
            for one in fenced:
                one.send_away()
            return True
        if producer.mode is AccessMode.WAIT_FOR_EXCLUSIVE and there:
            waiting.append(producer)
            return False
        if producer.mode is AccessMode.SHARED and exclusive:
            raise Refusal(
                ServerError.PRODUCER_BUSY, f"topic {self.info.name} has an exclusive producer"
            )
        if producer.mode is AccessMode.EXCLUSIVE and there:
            raise Refusal(
                ServerError.PRODUCER_FENCED,
                f"topic {self.info.name} has {'an exclusive' if exclusive else 'another'} producer",
            )
        there.append(producer)
        self._is_exclusive(partition, producer)
        return True

    def _is_exclusive(self, partition: int, producer: ProducerHere) -> None:
        """It is the only one from now on: those before it are fenced, also where they come back."""
        if producer.mode is AccessMode.SHARED:
            return
        last = self._exclusive_epochs.get(partition, self._commits.epoch << EPOCH_BITS)
        if not producer.topic_epoch:
            producer.topic_epoch = last + 1
        self._exclusive_epochs[partition] = max(last, producer.topic_epoch)

    def _replace(self, there: list[ProducerHere], producer: ProducerHere) -> None:
        """Let the same producer's connection before go. Raises Refusal for another of its name."""
        for one in [one for one in there if one.name == producer.name]:
            if producer.epoch <= one.epoch:
                raise Refusal(
                    ServerError.PRODUCER_BUSY,
                    f"producer '{one.name}' is connected to topic {self.info.name} already",
                )
            there.remove(one)

    def remove_producer(self, partition: int, producer: ProducerHere) -> None:
        there = self._producers.get(partition, [])
        waiting = self._producers_waiting.get(partition, [])
        for some in (there, waiting):
            if producer in some:
                some.remove(producer)
        if waiting and not there:
            there.append(waiting.pop(0))
            self._is_exclusive(partition, there[0])
            there[0].ready()

    # -- subscriptions -------------------------------------------------------------------------

    async def subscribe(
        self,
        partition: Partition,
        name: str,
        kind: SubscriptionType,
        *,
        durable: bool,
        start: Callable[[], Awaitable[int]],
        make: Callable[[PlaceInPartition], Consumer],
        earliest: bool,
    ) -> Consumer:
        """A consumer more. `start`: where one that is not durable begins; a new durable one begins
        at the `earliest` offset of each partition, or at the end. Raises Refusal, errors of the
        topic layer."""
        async with self._turns.setdefault(name, asyncio.Lock()):
            subscription = self._subscriptions.get(name)
            unused = subscription is None or not subscription.used
            if subscription is None or (unused and subscription.kind is not kind):
                await self._release_now(name)
                subscription = await self._opened(name, kind, durable, earliest)
                self._subscriptions[name] = subscription
            subscription.check(kind, partition.number)
            mark = await start()
            if subscription.cursor is not None:
                recovered = await subscription.cursor.recovered()
                mark = recovered.get(partition.number, partition.start)
            place = subscription.place(partition, self.ledger, mark)
            subscription.sought = False
            consumer = make(place)
            subscription.join(consumer)
            return consumer

    async def _opened(
        self, name: str, kind: SubscriptionType, durable: bool, earliest: bool
    ) -> Subscription:
        if not durable:
            return Subscription(name, kind, None)
        subscriptions = self._client.subscriptions
        known = {one.name for one in await subscriptions.list(self.info.id)}
        cursor = await subscriptions.open(
            self.info,
            name,
            f"consumers-of-{self.info.id}",
            f"{self._client.rng.getrandbits(128):032x}",
            start=End.EARLIEST if earliest else End.LATEST,
            kind=SubscriptionKind.CONSUMER,
        )
        await cursor.recovered()
        found = Subscription(name, kind, cursor)
        if name not in known and not earliest:
            for partition in self._partitions:  # rows of live segments are before the end, too
                place = found.place(partition, self.ledger, partition.end)
                found.moved(place)
        return found

    def leave(self, name: str, consumer: Consumer) -> None:
        """A consumer is gone; the last one's subscription is written and released."""
        subscription = self._subscriptions.get(name)
        if subscription is None:
            return
        subscription.leave(consumer)
        if not subscription.used:
            self._aside(self._release(name))

    def _aside(self, doing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(doing)
        self._beside[task] = None
        task.add_done_callback(lambda done: self._beside.pop(done, None))

    async def _release(self, name: str) -> None:
        subscription = self._subscriptions.get(name)
        if subscription is not None and subscription.sought and not self._ended:
            await asyncio.sleep(COME_BACK_S)
        async with self._turns.setdefault(name, asyncio.Lock()):
            subscription = self._subscriptions.get(name)
            if subscription is not None and not subscription.used:
                await self._release_now(name)

    async def _release_now(self, name: str) -> None:
        subscription = self._subscriptions.pop(name, None)
        if subscription is not None and subscription.cursor is not None:
            await subscription.cursor.release(RELEASE_S)

    def subscription(self, name: str) -> Subscription:
        """Raises Refusal."""
        found = self._subscriptions.get(name)
        if found is None:
            raise Refusal(
                ServerError.SUBSCRIPTION_NOT_FOUND, f"subscription '{name}' is not used here"
            )
        return found

    async def unsubscribe(self, name: str, consumer: Consumer) -> None:
        """Delete the subscription, which no other consumer uses. Raises Refusal."""
        async with self._turns.setdefault(name, asyncio.Lock()):
            subscription = self.subscription(name)
            others = [
                one
                for one in subscription.consumers
                if one is not consumer
                and (one.place is consumer.place or one.link is not consumer.link)
            ]
            if others:
                raise Refusal(ServerError.METADATA, f"subscription '{name}' has other consumers")
            subscription.leave(consumer)
            if subscription.used:  # this client's of other partitions: each comes by itself
                return
            await self._release_now(name)
            with suppress(errors.SubscriptionNotFound):
                await self._client.subscriptions.delete(self.info.id, name, force=True)
