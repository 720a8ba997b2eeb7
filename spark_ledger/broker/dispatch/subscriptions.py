"""Subscriptions of a topic at its broker: open, use, seek, release, delete.

Always true: a durable subscription has a cursor of the topic layer, of kind CONSUMER. After an
acknowledgement the cursor writes the new position in the background, within a second; when the last
consumer has left, the cursor writes the position and is released. The durable position is never
beyond the first offset that is not acknowledged, and only a seek moves it back. All consumers of a
subscription have one type. One call at a time opens or releases a subscription.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol
from weakref import WeakValueDictionary

from pyroaring import BitMap64

from spark_ledger import errors
from spark_ledger.async_tasks import BackgroundTasks
from spark_ledger.broker.dispatch.acks import Acks
from spark_ledger.broker.dispatch.active_dispatcher import ActiveDispatcher
from spark_ledger.broker.dispatch.dispatcher import Consumer, Dispatcher
from spark_ledger.broker.dispatch.policies import KeyShared, Policy, policy_of
from spark_ledger.broker.dispatch.shared_dispatcher import SharedDispatcher, SharingRules
from spark_ledger.broker.dispatch.slot_owners import SlotRange, check_ranges
from spark_ledger.broker.limits import check_may_be_made, check_room
from spark_ledger.broker.log.partition import Partition
from spark_ledger.broker.log.topic_commits import TopicCommits
from spark_ledger.broker.wire.commands import Refusal, ServerError, SubscriptionType
from spark_ledger.topic.acks.sets import AckBudget
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.subscription.consumer_cursor import ConsumerCursor
from spark_ledger.topic.subscription.consumer_cursors import ConsumerCursors
from spark_ledger.topic.subscription.records import check_properties

RELEASE_S = 5.0
CLOSE_WAIT_S = 1.0
"""How long the close of a subscription's last consumer waits for the release, at most."""
UNSUBSCRIBE_S = 25.0  # a client waits for half a minute
RETURN_WAIT_S = 10.0
"""How long a subscription waits, before its release, for consumers that a seek sent away."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SubscribeRequest:
    """What a client asks for with SUBSCRIBE: the type of the subscription, the rules of a
    Key_Shared subscription, the slots of keys that the consumer has to get (empty: the client gives
    no ranges), and the properties of the subscription if it is new."""

    kind: SubscriptionType
    keys: KeyShared | None = None
    ranges: Sequence[SlotRange] = ()
    properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def policy(self) -> Policy:
        return policy_of(self.kind, self.keys)

    @property
    def needs_ranges(self) -> bool:
        """Whether the consumer gets only the slots of its ranges."""
        return bool(self.ranges) or (self.keys is not None and self.keys.sticky)

    def check(self) -> None:
        """Raises Refusal if the ranges are malformed, or missing; errors.OptionInvalid if the
        properties are too large."""
        if self.needs_ranges:
            check_ranges(self.ranges)
        check_properties(self.properties)


class Subscription:
    """A subscription while consumers at this broker use it. `cursor` None: the subscription is not
    durable (it is a reader's)."""

    def __init__(
        self,
        name: str,
        kind: SubscriptionType,
        cursor: ConsumerCursor | None,
        sharing: SharingRules | None = None,
        keys: KeyShared | None = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.policy = policy_of(kind, keys)
        self.cursor = cursor
        self._sharing = sharing or SharingRules()
        self._budget = AckBudget(self._sharing.ack_bytes_max, self._sharing.ack_budget)
        self._dispatchers: dict[int, Dispatcher] = {}

    @property
    def durable(self) -> bool:
        return self.cursor is not None

    @property
    def used(self) -> bool:
        return any(dispatcher.consumers for dispatcher in self._dispatchers.values())

    @property
    def awaits_consumers(self) -> bool:
        """Whether a seek has sent consumers away that are not back yet."""
        return any(dispatcher.awaits_consumers for dispatcher in self._dispatchers.values())

    @property
    def consumers(self) -> list[Consumer]:
        dispatchers = self._dispatchers.values()
        return [consumer for dispatcher in dispatchers for consumer in dispatcher.consumers]

    def marks(self) -> dict[int, int]:
        return {number: dispatcher.acks.mark for number, dispatcher in self._dispatchers.items()}

    def dispatcher_of(self, partition: int) -> Dispatcher | None:
        return self._dispatchers.get(partition)

    def count_in(self, partition: int) -> int:
        """How many consumers the subscription has in the partition."""
        dispatcher = self._dispatchers.get(partition)
        return 0 if dispatcher is None else len(dispatcher.consumers)

    def has_dispatcher(self, partition: int) -> bool:
        return partition in self._dispatchers

    def leave_partition(self, partition: int) -> list[Consumer]:
        """Forget the position in a partition that another broker has from now on; returns the
        partition's consumers."""
        dispatcher = self._dispatchers.pop(partition, None)
        if dispatcher is None:
            return []
        dispatcher.drop()
        return list(dispatcher.consumers)

    def drop(self) -> None:
        """Give memory back: the subscription is not used here any more."""
        for dispatcher in self._dispatchers.values():
            dispatcher.drop()

    def dispatcher(
        self, partition: Partition, mark: int, rows: BitMap64 | None = None
    ) -> Dispatcher:
        """The partition's dispatcher. A new dispatcher begins at `mark`, with `rows` acknowledged
        beyond the mark; a reader gets a new dispatcher if the present one has no consumers."""
        dispatcher = self._dispatchers.get(partition.number)
        is_unused = dispatcher is not None and not (
            dispatcher.awaits_consumers or dispatcher.consumers
        )
        if dispatcher is None or (is_unused and not self.durable):
            if dispatcher is not None:
                dispatcher.drop()
            choice, budget = self.policy.choice(), self._budget
            if choice is None:
                dispatcher = ActiveDispatcher(
                    partition, self.policy, mark, self.cursor, rows, budget
                )
            else:
                rules, held = self._sharing, self._sharing.held(partition.number, budget)
                dispatcher = SharedDispatcher(
                    *(partition, self.policy, mark, self.cursor, choice, rules.limits),
                    *(held, rows, budget),
                )
                if self.cursor is not None:
                    self.cursor.keep_delays(partition.number, held.index)
            self._dispatchers[partition.number] = dispatcher
        if isinstance(dispatcher, SharedDispatcher):
            dispatcher.sharing.unacked.limits = self._sharing.limits
            dispatcher.held.is_on = self._sharing.delays
        self._sharing.rates.apply(dispatcher)
        return dispatcher

    def rivals(self, kind: SubscriptionType, partition: int) -> list[Consumer]:
        """The consumers because of which a further consumer of this type cannot join, or would not
        be active."""
        if kind is not self.kind:
            return self.consumers
        dispatcher = self._dispatchers.get(partition)
        active = None if dispatcher is None else dispatcher.active
        return [] if active is None else [active]

    def join(self, dispatcher: Dispatcher, consumer: Consumer, request: SubscribeRequest) -> None:
        consumer.ranges = request.ranges
        dispatcher.join(consumer)
        if self.cursor is not None:
            self.cursor.count_use()

    def check(self, request: SubscribeRequest, partition: int) -> None:
        """Raises Refusal if no further consumer with this request may join."""
        if self.used and request.kind is not self.kind:
            raise Refusal(
                ServerError.CONSUMER_BUSY,
                f"subscription '{self.name}' is used as {self.kind.name}, not {request.kind.name}",
            )
        if self.used and request.policy != self.policy:
            raise Refusal(
                ServerError.CONSUMER_BUSY,
                f"subscription '{self.name}' is used with other rules for keys: {self.policy}, not"
                f" {request.policy}",
            )
        dispatcher = self._dispatchers.get(partition)
        if request.needs_ranges:
            others = () if dispatcher is None else dispatcher.consumers
            check_ranges(request.ranges, (slots for other in others for slots in other.ranges))
        if dispatcher is not None and not dispatcher.admits():
            raise Refusal(
                ServerError.CONSUMER_BUSY,
                f"subscription '{self.name}' has an exclusive consumer already",
            )


class ServedTopic(Protocol):
    """A topic of which this broker has partitions (owned_topic.py), as its subscriptions use it."""

    is_ended: bool

    def readable_partition(self, number: int) -> Partition:
        """Raises Refusal if this broker does not have the partition."""

    async def offsets(self, *, earliest: bool) -> Mapping[int, int]:
        """The first offset of each partition, or the end. Raises errors.Unavailable."""

    async def history(self) -> int:
        """TopicLog.history_number, after a comparison with the store. Raises
        errors.Unavailable."""

    async def look_for_lost(self) -> None:
        """Read the record of owners, and give up the partitions that other brokers own now. Raises
        errors.Unavailable."""


class _Positions:
    """The positions of a topic's durable subscriptions in this broker's partitions."""

    def __init__(self, commits: TopicCommits, cursors: ConsumerCursors) -> None:
        self._commits = commits
        self._cursors = cursors

    async def dispatcher_of(
        self, subscription: Subscription, number: int, partition: Callable[[], Partition]
    ) -> Dispatcher:
        """The dispatcher of a durable subscription in the partition that `partition` returns; a new
        dispatcher begins at the durable position. If rows were lost with all copies, later rows get
        their offsets: then acknowledgements beyond the partition's end count no longer. Raises as
        `partition`, `wait_written` and ConsumerCursor.adopt."""
        cursor = subscription.cursor
        assert cursor is not None
        if subscription.has_dispatcher(number):
            return subscription.dispatcher(partition(), 0)
        epoch = self._commits.epochs[number]
        state = await cursor.adopt(number, epoch)
        end = acked_end = state.end
        if self._commits.may_lose_offsets and acked_end > partition().end:
            # after `adopt`: the position may be in a commit that the broker has not read
            committed_end = (await self._commits.state()).partitions[number].end_offset
            end = min(acked_end, max(partition().end, committed_end))
            state = await cursor.adopt(number, epoch)
        log = partition()
        state.rows.remove_range(end, acked_end)
        mark = max(min(state.position, end), log.start)
        dispatcher = subscription.dispatcher(log, mark, state.rows)
        if end < acked_end:
            _log.warning(
                "subscription '%s' goes back from offset %d to the end of %s, %d: rows were lost",
                *(subscription.name, acked_end, log.title, end),
            )
            cursor.seek(number, mark)
            await self.wait_written(cursor, number)
        return dispatcher

    async def wait_written(self, cursor: ConsumerCursor, number: int) -> None:
        """Returns once a seek is durable, also for later owners of the partition. Raises Deposed,
        errors of the topic layer."""
        try:
            async with asyncio.timeout(RELEASE_S):
                await cursor.acks_durable(number)
        except errors.LedgerFenced:
            await self._commits.check_owner(number)  # raises Deposed, with the reason
            raise
        except TimeoutError:
            raise errors.Unavailable(
                f"the seek of subscription '{cursor.name}' was not written in {RELEASE_S:.0f} s"
            ) from None
        await self._cursors.written(cursor, RELEASE_S)
        await self._commits.check_owner(number)


class TopicSubscriptions:
    """The subscriptions of one topic that this broker's consumers use, by name."""

    def __init__(
        self,
        topic: ServedTopic,
        commits: TopicCommits,
        cursors: ConsumerCursors,
        background: BackgroundTasks,
    ) -> None:
        self._topic = topic
        self._commits = commits
        self._cursors = cursors
        self._positions = _Positions(commits, cursors)
        self._background = background
        self.sharing = SharingRules()
        self.policies = TopicPolicies()  # as the last client met them
        self._by_name: dict[str, Subscription] = {}
        self._locks: WeakValueDictionary[object, asyncio.Lock] = WeakValueDictionary()
        """The locks of each subscription, only while a call holds or awaits them: there are many
        names, as each reader has a new name."""

    def used_here(self) -> list[Subscription]:
        """The subscriptions that this broker has open."""
        return list(self._by_name.values())

    def named(self, name: str) -> Subscription:
        """Raises Refusal."""
        subscription = self._by_name.get(name)
        if subscription is None:
            text = f"subscription '{name}' is not used here"
            raise Refusal(ServerError.SUBSCRIPTION_NOT_FOUND, text)
        return subscription

    def rivals(self, name: str, kind: SubscriptionType, partition: int) -> list[Consumer]:
        """As Subscription.rivals."""
        subscription = self._by_name.get(name)
        return [] if subscription is None else subscription.rivals(kind, partition)

    async def subscribe(
        self,
        partition: Partition,
        name: str,
        request: SubscribeRequest,
        *,
        durable: bool,
        start: Callable[[], Awaitable[int]],
        make: Callable[[Dispatcher], Consumer],
        earliest: bool,
    ) -> Consumer:
        """Let a further consumer join, and return it. A reader begins at `start`; a new durable
        subscription begins at the first offset of each partition if `earliest`, else at the end.
        Raises Refusal, errors of the topic layer."""
        async with self._lock(name, partition.number):
            pass  # a client forgets what it gets before the response to its seek
        async with self._lock(name):
            subscription = self._by_name.get(name)
            is_unused = subscription is None or not subscription.used
            is_same_kind = subscription is not None and subscription.durable is durable
            if not is_unused and not is_same_kind:
                raise Refusal(
                    ServerError.NOT_ALLOWED,
                    f"subscription '{name}' is used by a {'reader' if durable else 'consumer'}:"
                    f" a {'consumer' if durable else 'reader'} cannot join it",
                )
            has_policy = subscription is not None and subscription.policy == request.policy
            if subscription is None or (is_unused and not (is_same_kind and has_policy)):
                await self._release_locked(name)
                if durable:
                    await self._take_acks_over(partition.number)
                subscription = await self._opened(name, request, durable, earliest)
                self._by_name[name] = subscription
            try:
                check_room(self.policies, partition.number, subscription, self.used_here())
                dispatcher = await self._dispatcher(subscription, request, partition, start)
                consumer = make(dispatcher)
                subscription.join(dispatcher, consumer, request)
            finally:
                if not subscription.used:  # release it, so that a query may use the name
                    self._background.start(self._release_unused(name))
            return consumer

    async def _take_acks_over(self, number: int) -> None:
        """Take over the partition's acknowledgements, before a subscription's record is read: in
        this order the record is read once."""
        acks = self._cursors.acks_of(self._commits.topic.id)
        self._topic.readable_partition(number)  # raises Refusal if the partition is not here
        if acks is not None:
            await acks.of(number, self._commits.epochs[number])

    async def _dispatcher(
        self,
        subscription: Subscription,
        request: SubscribeRequest,
        partition: Partition,
        start: Callable[[], Awaitable[int]],
    ) -> Dispatcher:
        """The dispatcher that a further consumer of the subscription joins."""
        number = partition.number
        subscription.check(request, number)
        self._topic.readable_partition(number)  # raises Refusal if the partition is not here
        if subscription.cursor is not None:
            # called again after each wait: another broker may have the partition by then
            readable = partial(self._topic.readable_partition, number)
            return await self._positions.dispatcher_of(subscription, number, readable)
        mark = await start()
        return subscription.dispatcher(self._topic.readable_partition(number), mark)

    async def _opened(
        self, name: str, request: SubscribeRequest, durable: bool, earliest: bool | None
    ) -> Subscription:
        """Open the subscription, and make it if it does not exist. `earliest` None: no consumer
        asks for it; raises errors.SubscriptionNotFound instead of making it."""
        if not durable:
            return Subscription(name, request.kind, None, self.sharing, request.keys)

        async def start() -> Mapping[int, int]:
            if earliest is None:
                text = f"there is no subscription '{name}'"
                raise errors.SubscriptionNotFound(text, subscription=name)
            await check_may_be_made(self._commits, self.policies, name)
            return await self._topic.offsets(earliest=earliest)

        cursor = await self._cursors.open(
            *(self._commits.topic, name, start, self._topic.history, request.properties),
            is_use=earliest is not None,
        )
        subscription = Subscription(name, request.kind, cursor, self.sharing, request.keys)

        def end() -> None:
            if self._by_name.get(name) is subscription:  # otherwise it was opened anew
                del self._by_name[name]
                subscription.drop()
            for consumer in subscription.consumers:
                consumer.end()

        cursor.on_failure = end
        return subscription

    def leave(self, name: str, consumer: Consumer) -> None:
        """Remove a consumer; a subscription without consumers is written and released."""
        subscription = self._by_name.get(name)
        consumer.dispatcher.leave(consumer)
        if subscription is not None and not subscription.used:
            self._background.start(self._release_unused(name))

    async def wait_released(self, name: str) -> None:
        """If the subscription has no consumers here, wait until it is written and released,
        CLOSE_WAIT_S at most; the release may go on after this call. A subscription that awaits
        consumers after a seek is kept."""
        subscription = self._by_name.get(name)
        if subscription is not None and not subscription.used and not subscription.awaits_consumers:
            release = self._background.start(self._release_unused(name))
            await asyncio.wait([release], timeout=CLOSE_WAIT_S)

    async def _release_unused(self, name: str) -> None:
        subscription = self._by_name.get(name)
        if subscription is not None and subscription.awaits_consumers and not self._topic.is_ended:
            await asyncio.sleep(RETURN_WAIT_S)
        async with self._lock(name):
            subscription = self._by_name.get(name)
            if subscription is not None and not subscription.used:
                await self._release_locked(name)

    def _lock(self, name: str, seeks_in: int | None = None) -> asyncio.Lock:
        """The lock of calls that open, release or delete the subscription; or of seeks in that
        partition."""
        return self._locks.setdefault((name, seeks_in), asyncio.Lock())

    async def _release_locked(self, name: str) -> None:
        subscription = self._by_name.pop(name, None)
        if subscription is not None:
            subscription.drop()
            if subscription.cursor is not None:
                await self._cursors.release(subscription.cursor, RELEASE_S)

    async def seek(self, name: str, dispatcher: Dispatcher, offset: int) -> None:
        """Move the subscription to the offset in the dispatcher's partition; its consumers of this
        partition are sent away. The position of a durable subscription is stored when this call
        returns, also for later owners of the partition. Raises Refusal, Deposed, errors of the
        topic layer."""
        subscription = self.named(name)
        dispatcher.seek(offset)
        if subscription.cursor is not None:
            async with self._lock(name, number := dispatcher.partition.number):
                await self._positions.wait_written(subscription.cursor, number)

    def marks(self) -> dict[str, dict[int, int]]:
        """Of each durable subscription, by name: the first offset in each partition that consumers
        here have not acknowledged."""
        durable = {name: s for name, s in self._by_name.items() if s.durable}
        return {name: subscription.marks() for name, subscription in durable.items()}

    async def move_up(
        self, name: str, number: int, to: Callable[[Acks], int], *, durable: bool = False
    ) -> None:
        """Acknowledge all messages below the offset that `to` returns in that partition, whether or
        not consumers use the subscription. Acknowledgements beyond this offset stay. With `durable`
        all this is durable on return. A subscription that was deleted stays deleted. Raises
        Refusal, errors of the topic layer."""
        readable = partial(self._topic.readable_partition, number)
        await self._move_up(name, number, to, readable, durable=durable)

    async def adopt(self, name: str, partition: Partition) -> None:
        """Take the subscription over in a partition that clients do not use yet, so that it has
        acknowledged no lost rows. Raises as `move_up`."""
        await self._move_up(name, partition.number, lambda _: 0, lambda: partition)

    async def _move_up(
        self,
        name: str,
        number: int,
        to: Callable[[Acks], int],
        partition: Callable[[], Partition],
        *,
        durable: bool = False,
    ) -> None:
        async with self._lock(name):
            partition()  # raises Refusal if it is not here
            subscription = self._by_name.get(name)
            if subscription is None:
                with suppress(errors.SubscriptionNotFound, errors.SubscriptionBusy):
                    request = SubscribeRequest(SubscriptionType.EXCLUSIVE)
                    subscription = await self._opened(name, request, True, None)
            if subscription is None or subscription.cursor is None:
                return
            self._by_name[name] = subscription
            try:
                dispatcher = await self._positions.dispatcher_of(subscription, number, partition)
                dispatcher.move_up(to(dispatcher.acks))
                if durable:
                    await subscription.cursor.acks_durable(number)
            finally:
                if not subscription.used:
                    self._background.start(self._release_unused(name))

    async def make(self, name: str) -> None:
        """Make a durable subscription at the first offsets, unless a durable subscription of this
        name exists (it may be in use). Raises Refusal, errors of the topic layer."""
        async with self._lock(name):
            subscription = self._by_name.get(name)
            if subscription is not None and subscription.durable:
                return
            if subscription is not None and subscription.used:
                text = f"subscription '{name}' is used by a reader: choose another name"
                raise Refusal(ServerError.NOT_ALLOWED, text)
            await self._release_locked(name)
            with suppress(errors.SubscriptionBusy):  # a query uses it
                request = SubscribeRequest(SubscriptionType.EXCLUSIVE)
                self._by_name[name] = await self._opened(name, request, True, True)
                await self._release_locked(name)

    async def unsubscribe(self, name: str, consumer: Consumer, *, force: bool = False) -> None:
        """Delete the subscription, which no other consumer may use; it is deleted when this call
        returns. `force`: other consumers are sent away. Raises Refusal, and as
        ConsumerCursors.delete; after an error the consumer stays."""
        async with self._lock(name):
            subscription = self.named(name)
            others = [
                other
                for other in subscription.consumers
                if other is not consumer
                and (other.dispatcher is consumer.dispatcher or other.link is not consumer.link)
            ]
            if others and not force:
                raise Refusal(ServerError.METADATA, f"subscription '{name}' has other consumers")
            for other in others:
                other.end()
            # the client's consumers of other partitions stay: it unsubscribes each of them
            if any(other is not consumer for other in subscription.consumers):
                with suppress(errors.Unavailable):
                    await self._topic.look_for_lost()  # sends consumers of lost partitions away
            is_last = all(other is consumer for other in subscription.consumers)
            if is_last and subscription.cursor is not None:
                await self._cursors.delete(subscription.cursor, UNSUBSCRIBE_S)
            consumer.dispatcher.leave(consumer)
            if not subscription.used:
                subscription.drop()
                self._by_name.pop(name, None)

    def send_away(self, partition: int) -> None:
        """End the consumers of the partition; the subscriptions' positions in it stay here."""
        for subscription in self.used_here():
            dispatcher = subscription.dispatcher_of(partition)
            for consumer in [] if dispatcher is None else list(dispatcher.consumers):
                consumer.end()

    def send_consumers_away(self, partition: int) -> None:
        """End the consumers of a partition that another broker has, and forget the subscriptions'
        positions in it."""
        for subscription in list(self._by_name.values()):
            for consumer in subscription.leave_partition(partition):
                consumer.end()
        if (index := self.sharing.indexes.pop(partition, None)) is not None:
            index.drop()

    async def release_all(self) -> None:
        """Write the positions of the subscriptions without consumers."""
        for name in list(self._by_name):
            await self._release_unused(name)
