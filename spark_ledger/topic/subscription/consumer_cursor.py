"""One subscription at one broker: the broker's share of its positions, in memory and as written.

Always true: `share` is the share to write, and `_written` the share that the node has by this
broker's own writes and reads. Once `failure` is set, nothing more is written. The rules for all
cursors of a broker together are in consumer_cursors.py, which writes the shares.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from pyroaring import BitMap64

from spark_ledger import errors
from spark_ledger.metadata.shared_multis import is_on
from spark_ledger.metadata.store import Check, Operation, Set, Watcher
from spark_ledger.metadata.store_calls import unavailable_while
from spark_ledger.topic.acks.delayed import DelaySource
from spark_ledger.topic.acks.entries import AckState
from spark_ledger.topic.acks.served import AckedSet, Receipt
from spark_ledger.topic.acks.topic_acks import TopicAcks
from spark_ledger.topic.subscription import records
from spark_ledger.topic.subscription.acked_partitions import AckedPartitions, floor_of
from spark_ledger.topic.subscription.nodes import SubscriptionNodes, SubscriptionView, key_of
from spark_ledger.topic.subscription.records import SubscriptionShare, with_shares

SHARE_EVERY_S = 300.0
History = Callable[[], Awaitable[int]]
"""TopicLog.history_number of a topic, in the store of the present connection."""


async def unchanging_history() -> int:
    return 0


class SharesOfBroker(Protocol):
    """ConsumerCursors, as a cursor uses it: all cursors of a broker."""

    broker_id: str
    has_older_brokers: bool

    def changed(self) -> None: ...

    def acks_of(self, topic_id: str) -> TopicAcks | None: ...

    def record_watch(self, path: str) -> Watcher: ...


class ConsumerCursor:
    """A subscription at one broker. Made by ConsumerCursors.open, which has set a watch on the
    record."""

    def __init__(
        self,
        cursors: SharesOfBroker,
        nodes: SubscriptionNodes,
        subscription: SubscriptionView,
        share: SubscriptionShare,
        version: int,
        read_number: int,
    ) -> None:
        self.name = subscription.name
        self.failure: errors.LedgerError | None = None
        self.on_failure: Callable[[], None] = do_nothing
        self.used = True
        self._used_ms = share.used_ms
        self.must_reread = False  # a write failed: the nodes must be read again
        self.changes = 0  # how often the position or `used` changed
        self.durable = 0  # how many of these changes are durable
        self.looked_s = self.written_s = asyncio.get_running_loop().time()
        self._watching = True  # a watch is set on the record
        self._cursors = cursors
        self._nodes = nodes
        self._subscription = subscription
        self._written = share
        self._version = version
        self._read_number = read_number  # of the read of `subscription`: AckContext.looks
        self.history: History = unchanging_history
        self.opened_in = 0
        self._compared = -1  # the connection to the store on which the history was last compared
        self._at = dict(share.at)
        self._highest = dict(share.at)  # the highest positions that others may have read
        topic_acks = cursors.acks_of(nodes.topic_id)
        key = key_of(subscription)
        self.acked = None if topic_acks is None else AckedPartitions(topic_acks, key)
        """None: the cursor uses no ack ledger, and the share has the positions."""

    @property
    def topic_id(self) -> str:
        return self._nodes.topic_id

    @property
    def path(self) -> str:
        return self._nodes.path(self.name)

    def check(self) -> None:
        """Raises `failure`: errors.LedgerFenced or errors.SubscriptionNotFound."""
        if self.failure is not None:
            raise self.failure

    async def adopt(self, partition: int, epoch: int) -> AckState:
        """What the subscription's consumers acknowledged in a partition that this broker owns in
        `epoch`. Raises as `check`, errors.Unavailable, and as TopicAcks.of."""
        if self.acked is None:
            subscription = await self._present()
            position = floor_of(subscription, self._at, partition).position
            self._at[partition] = (epoch, position)
            self._cursors.changed()
            return AckState(position, BitMap64(), epoch)
        while True:
            acks = await self.acked.partition_acks(partition, epoch)
            looked, subscription = acks.looked, self._subscription
            self.check()
            if looked < self._read_number:
                break  # the subscription was read after the acknowledgements were taken over
            subscription = await self._present()
            if acks.failure is None and acks.looked == looked:
                break
        floor = floor_of(subscription, self._at, partition)
        state = self.acked.adopt(acks, floor)
        self._highest[partition] = max(floor, self._highest.get(partition, floor))
        return state

    async def _present(self) -> SubscriptionView:
        with unavailable_while(f"reading subscription '{self.name}'"):
            subscription = await self._nodes.read(self.name)
        self._judge(subscription)
        self.check()
        assert subscription is not None, "else it has failed"
        return subscription

    def track(self, partition: int, acks: AckedSet) -> None:
        """From now on `acks` has the acknowledgements of the adopted partition; after each change
        of `acks` the caller calls `advance`."""
        if self.acked is not None:
            self.acked.track(partition, self, acks)

    def keep_delays(self, partition: int, source: DelaySource) -> None:
        """From now on `source` is the partition's delay index: it gets the messages that the ack
        ledger has, and becomes durable together with the acknowledgements."""
        if self.acked is not None:
            self.acked.keep_delays(partition, source)

    def advance(self, partition: int, offset: int) -> None:
        """Called when the acknowledgements of an adopted partition changed; consumers now begin at
        `offset`. The change is written soon."""
        if self.acked is None:
            self._set(partition, offset)
        else:
            self.acked.changed(partition)

    def seek(self, partition: int, offset: int) -> None:
        """As `advance`, but the position may go back: the share has the position before a later
        `written` returns, and after the ack ledger has it."""
        if self.acked is None:
            self._set(partition, offset)
        else:
            self.acked.reset(partition)

    def when_durable(self, partition: int, receipt: Receipt) -> None:
        """Calls `receipt` once the present acknowledgements of the partition are durable; calls it
        at once if this broker cannot see when they are."""
        if self.acked is None:
            receipt(self.failure)
        else:
            self.acked.when_durable(partition, receipt)

    async def acks_durable(self, partition: int) -> None:
        """Waits until the present acknowledgements of the partition are durable. Raises
        errors.LedgerError."""
        if self.acked is not None:
            await self.acked.durable(partition)

    def was_durable(self, partition: int, epoch: int, position: int) -> None:
        self._at[partition] = (epoch, position)
        is_back = position < self._highest[partition][1]
        if is_back or self._cursors.has_older_brokers:
            self.changes += 1
            self._cursors.changed()

    async def acked_settled(self) -> None:
        """When this returns, all acknowledgements are durable, and the share has the positions of
        partitions without gaps. Raises errors.LedgerError."""
        if self.acked is not None:
            try:
                await self.acked.all_durable()
            finally:
                self._at |= self.acked.without_gaps()

    def release_acks(self, *, is_written: bool = False, is_gone: bool = False) -> None:
        if self.acked is not None:
            self.acked.release(is_written=is_written, is_gone=is_gone)

    async def verify(self) -> None:
        await self.look()

    def _set(self, partition: int, offset: int) -> None:
        self._at[partition] = (self._at[partition][0], offset)
        self.changes += 1
        self._cursors.changed()

    def leave(self) -> None:
        """Called when no consumer at this broker uses the subscription any more. This is written
        soon, and then the subscription is released."""
        self.used = False
        self.changes += 1
        self._cursors.changed()

    def count_use(self) -> None:
        """Called when a consumer joins. The broker may have opened the subscription itself before:
        then this use is written soon."""
        if self._used_ms is not None:
            self._used_ms = None
            self.changes += 1
            self._cursors.changed()

    def use_again(self, on_failure: Callable[[], None]) -> None:
        """Takes `leave` back: the subscription is still used at this broker."""
        self.on_failure = on_failure
        if self.failure is not None:
            on_failure()
            return
        self.used = True
        self.changes += 1
        self._cursors.changed()

    def end(self, why: str) -> None:
        """Ends the cursor: it writes nothing more, except for writes under way."""
        text = f"subscription '{self.name}' {why}"
        self.fail(errors.LedgerFenced(text, subscription=self.name))

    @property
    def dirty(self) -> bool:
        return self.failure is None and self.share() != self._written

    def is_due(self, now_s: float) -> bool:
        """Whether the share must be written now. A share that changed only by acknowledgements,
        which ack ledgers have, may wait."""
        is_urgent = self.acked is None or self.durable < self.changes
        is_urgent = is_urgent or self._cursors.has_older_brokers
        return self.dirty and (is_urgent or now_s >= self.written_s + SHARE_EVERY_S)

    @property
    def goes_back(self) -> bool:
        return any(at[1] < self._highest.get(p, at)[1] for p, at in self._at.items())

    def share(self) -> SubscriptionShare:
        epoch = self._subscription.record.epoch
        return SubscriptionShare(epoch, self.used, dict(self._at), self._used_ms)

    async def operations(self, share: SubscriptionShare) -> list[Operation]:
        """The operations that write the share. Raises StoreUnavailable."""
        nodes, subscription = self._nodes, self._subscription
        write = Set(
            nodes.share(self.name, self._cursors.broker_id),
            records.encode_share(share),
            self._version,
        )
        if not self.goes_back:
            for partition, at in share.at.items():
                self._highest[partition] = max(at, self._highest.get(partition, at))
            return [Check(nodes.path(self.name), subscription.version), write]
        positions = with_shares(subscription.floor, share.epoch, [share])
        record = records.encode_subscription(subscription.record)
        back = nodes.step_back(self.name, await nodes.marks(self.name), positions)
        return [Set(nodes.path(self.name), record, subscription.version), write, *back]

    def was_written(self, share: SubscriptionShare, changes: int, *, back: bool) -> None:
        """Called after the share was written. `changes`: the number of changes when the share was
        made."""
        self._written, self._version = share, self._version + 1
        self.durable = changes
        self.looked_s = self.written_s = asyncio.get_running_loop().time()
        if back:
            self._highest |= share.at
            self.must_reread = True  # the record has a version that was not read

    def is_to_be_read(self, late_s: float) -> bool:
        """Whether to read the nodes. A cursor that writes notices changes of others, because its
        write fails; a cursor without writes notices them only by its watch."""
        rests = self.failure is None and not self.is_due(asyncio.get_running_loop().time())
        return self.must_reread or (rests and not (self._watching and self.looked_s >= late_s))

    async def look(self) -> None:
        """Reads the nodes. Raises StoreError."""
        watch = None if self._watching else self._cursors.record_watch(self.path)
        self._watching = True
        try:
            subscription = await self._nodes.read(self.name, watch=watch)
        except BaseException:
            if watch is not None:  # the watch may not be set
                self._watching = False
            raise
        self._judge(subscription)
        if subscription is not None and self.failure is None:
            self._written, self._version = subscription.shares[self._cursors.broker_id]
            self._subscription, self.must_reread = subscription, False
            if self._written.used is not self.used:  # noted while this broker counted as dead
                self.changes += 1
        self.looked_s = asyncio.get_running_loop().time()

    def record_changed(self) -> None:
        """Called when the watch on the record has fired."""
        self._watching = False
        self.must_reread = True
        self._cursors.changed()

    def _judge(self, subscription: SubscriptionView | None) -> None:
        """Fails the cursor unless this is the subscription that was opened, with this broker's
        share."""
        if subscription is None:
            gone = f"subscription '{self.name}' was deleted"
            self.fail(errors.SubscriptionNotFound(gone, subscription=self.name))
            return
        has_share = self._cursors.broker_id in subscription.shares
        if key_of(subscription) != key_of(self._subscription) or not has_share:
            self._open_again("it was sought" if has_share else "another broker took over its share")

    async def compare(self) -> None:
        """Fails the cursor if the topic has another history than when the cursor was opened. Then
        the metadata store was replaced by an older one, and the cursor's offsets may belong to
        other rows there. Raises errors.Unavailable, errors.LedgerError as `history`."""
        connections = self._nodes.store.connections
        if connections != self._compared:
            if await self.history() != self.opened_in:
                self._open_again("the metadata store is an older one")
            self._compared = connections

    @property
    def is_compared(self) -> bool:
        """Whether the history was compared on the connection of a write that begins now."""
        return is_on(self._nodes.store, self._compared)

    def _open_again(self, why: str) -> None:
        text = f"subscription '{self.name}' is to be opened again: {why}"
        self.fail(errors.LedgerFenced(text, subscription=self.name))

    def fail(self, error: errors.LedgerError) -> None:
        """Fails the cursor: it writes nothing more."""
        if self.failure is None:
            self.failure = error
            self.release_acks()
            self.on_failure()


def do_nothing() -> None:
    """No call is needed at a failure."""
