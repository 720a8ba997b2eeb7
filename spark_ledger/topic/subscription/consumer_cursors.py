"""The positions of the consumers at one broker, of all its subscriptions, made durable together.

    advance(partition, offset) ... a second ... -> the broker's share of the subscription
                                                   (one multi writes several shares)

Always true:
- a broker writes only its own share, so brokers do not wait for each other. If two shares have a
  partition, the share of the higher owner's epoch counts, so an earlier owner changes nothing;
- a broker has one cursor for each subscription. If it opens the subscription again (it lost the
  partitions and has them back), the earlier cursor fails, and its unwritten positions are dropped.
  A released cursor fails too, however long its last write waited;
- a write checks that the subscription has not changed since it was read. After a seek or a
  deletion, or after another broker counted this broker as dead and took over its share, `failure`
  is set, nothing more is written, and `on_failure` is called;
- a position is not written to an older metadata store, where other rows may have its offset. The
  topic's history is compared after each new connection; no write is made while the store is held;
  and all cursors fail once a person accepted another store;
- if one subscription cannot be read, only its cursor fails;
- `advance` never waits. A write has the last positions; a multi has MULTI_BYTES_MAX of values;
- a step back is written with a new version of the subscriptions' node and of the subscription's
  record, so a trim that was planned before it fails, and no mark hides it (hazard 37);
- consumers may take over a query's subscription once the query is over, and a query may take it
  back once the consumers are gone; the position stays, and so does what consumers acknowledged
  beyond it: the multi that makes the first share after a query notes the succession in the ack
  nodes;
- while a broker lives that does not read ack ledgers, a share is written a second after the
  positions in it are durable, as if there were no ack ledgers;
- the next broker that opens the subscription moves the shares of brokers that are not alive into
  its own share, in one multi, so there are no more shares than brokers.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from spark_ledger import errors
from spark_ledger.async_tasks import cancel, woken
from spark_ledger.metadata.cluster import ClusterGuard
from spark_ledger.metadata.shared_multis import SharedMultis, is_on
from spark_ledger.metadata.store import (
    Check,
    Create,
    Delete,
    MetadataStore,
    MultiFailed,
    Operation,
    OutcomeUnknown,
    Set,
    StoreError,
    Watcher,
)
from spark_ledger.metadata.store_calls import Tries, pause_s, unavailable_while
from spark_ledger.topic.acks.context import AckContext, AckLimits, InlinePace, MadeForAcks
from spark_ledger.topic.acks.entries import AckKey, AckState
from spark_ledger.topic.acks.sets import ACK_BYTES_MAX, AckBudget
from spark_ledger.topic.acks.topic_acks import TopicAcks
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.subscription import records
from spark_ledger.topic.subscription.consumer_cursor import (
    ConsumerCursor,
    History,
    do_nothing,
    unchanging_history,
)
from spark_ledger.topic.subscription.nodes import (
    SubscriptionNodes,
    SubscriptionView,
    brokers_alive,
    key_of,
    needs,
)
from spark_ledger.topic.subscription.present import moved_from_owners
from spark_ledger.topic.subscription.records import (
    NO_PROPERTIES,
    SubscriptionKind,
    SubscriptionShare,
    newest,
    too_many,
)
from spark_ledger.topic.subscription.subscriptions import Subscriptions

WRITE_EVERY_S = 1.0
LOOK_EVERY_S = 60.0
"""How often a subscription without writes is read: it may have been deleted or sought, and the
watch on its record may have been lost."""
WRITTEN_S = 5.0
MULTI_BYTES_MAX = 256 << 10
MULTI_WRITES_MAX = 250

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class _Opening:
    """A call of `open`."""

    has_record_changed: bool = False

    def record_changed(self) -> None:
        self.has_record_changed = True


@dataclass(frozen=True, slots=True)
class _RecordWatch:
    """The watches on a record are equal, so the store keeps one however often it is set."""

    changed: Callable[[str], None]
    path: str

    def __call__(self) -> None:
        self.changed(self.path)


class ConsumerCursors:
    """The cursors of one broker. The broker's id is the name of its ephemeral node below
    /brokers/alive. `ack_budget` counts the sets of acknowledged messages at the broker."""

    def __init__(
        self,
        store: MetadataStore,
        subscriptions: Subscriptions,
        broker_id: str,
        rng: random.Random,
        ack_budget: AckBudget | None = None,
    ) -> None:
        self.broker_id = broker_id
        self.has_older_brokers = False
        self._subscriptions = subscriptions
        self._rng = rng
        self._guard = ClusterGuard(store)
        self._multis = SharedMultis(store)
        self._store_epoch: int | None = None
        self._ack_limits = AckLimits(InlinePace(), ack_budget or AckBudget(ACK_BYTES_MAX))
        self._acks: dict[str, TopicAcks] = {}  # by topic id
        self._round_failure = ""  # why nothing was written in the last round
        self._open: dict[str, ConsumerCursor] = {}  # by the subscription's node
        self._opening: dict[str, _Opening] = {}  # the last call of `open` under way, by node
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    @property
    def _store(self) -> MetadataStore:
        return self._multis.store

    def changed(self) -> None:
        self._changed.set()

    def set_older_brokers(self, has_older: bool) -> None:
        """`has_older`: another broker lives that does not read ack ledgers."""
        if self.has_older_brokers is not has_older:
            self.has_older_brokers = has_older
            self.changed()

    def acks_of(self, topic_id: str) -> TopicAcks | None:
        """The acknowledgements of a topic with partitions of this broker; None if the broker writes
        no ack ledgers for the topic."""
        return self._acks.get(topic_id)

    def open_topic_acks(
        self,
        topic: TopicInfo,
        make_ledger: Callable[[], Awaitable[MadeForAcks]],
        now_ms: Callable[[], int],
    ) -> TopicAcks:
        """From now on, and until the returned object is closed, subscriptions of the topic are
        opened with ack ledgers."""
        ledgers, nodes = self._subscriptions.ledgers, SubscriptionNodes(self._store, topic.id)

        async def is_needed(partition: int, key: AckKey, state: AckState) -> bool:
            subscription = await nodes.read(key.name)
            return subscription is not None and needs(subscription, partition, key, state)

        async def lowest_position(partition: int) -> int:
            unreadable: dict[str, errors.LedgerError] = {}
            infos = await self._subscriptions.list(topic.id, unreadable=unreadable)
            positions = [info.positions.get(partition, 0) for info in infos]
            return 0 if unreadable else min(positions, default=0)

        context = AckContext(
            *(ledgers, topic, make_ledger, is_needed, lowest_position, now_ms),
            *(self._guard, self._ack_limits.pace, self._rng, self._multis),
            budget=self._ack_limits.budget,
        )

        def forget(acks: TopicAcks) -> None:
            if self._acks.get(topic.id) is acks:  # otherwise the topic was opened again
                del self._acks[topic.id]

        topic_acks = self._acks[topic.id] = TopicAcks(context, forget)
        return topic_acks

    def reread_all(self) -> None:
        """Called when another broker counted this broker as dead: it may have taken over this
        broker's shares."""
        for cursor in self._open.values():
            cursor.must_reread = True
        self.changed()

    def fail_all(self, error: errors.LedgerError) -> None:
        """Fails all cursors that are open now: they write nothing more."""
        for cursor in list(self._open.values()):
            cursor.fail(error)

    async def open(
        self,
        topic: TopicInfo,
        name: str,
        start: Callable[[], Awaitable[Mapping[int, int]]],
        history: History = unchanging_history,
        properties: Mapping[str, str] = NO_PROPERTIES,
        *,
        is_use: bool = True,
    ) -> ConsumerCursor:
        """A cursor of the subscription, which is made at `start()`, with these properties, if it
        does not exist. This broker's earlier cursor of the subscription fails; the new cursor fails
        once `history()` changes. `is_use` False: the broker opens the subscription itself, and the
        time of its last use stays, until ConsumerCursor.count_use. Raises errors.SubscriptionBusy
        (a query uses the subscription), errors.LedgerFenced (the subscription is opened again
        meanwhile), errors.TopicNotFound, errors.TopicDeleted, errors.OptionInvalid,
        errors.Unavailable."""
        nodes = SubscriptionNodes(self._store, topic.id)
        path = nodes.path(name)
        opening = self._opening[path] = _Opening()
        if path in self._open:  # before the share is read: later writes of the old cursor fail
            self._open.pop(path).end("is opened again at this broker")
        try:
            with unavailable_while(f"opening subscription '{name}' of topic '{topic.name}'"):
                opened_in = await history()  # before the nodes, which may be of a later history
                tries = Tries(self._rng)
                while True:
                    cursor = await self._try_open(topic, nodes, name, start, properties, is_use)
                    if self._opening.get(path) is not opening:
                        text = f"subscription '{name}' was opened again at this broker meanwhile"
                        raise errors.LedgerFenced(text, subscription=name)
                    if cursor is not None:
                        cursor.history, cursor.opened_in = history, opened_in
                        if opening.has_record_changed:
                            cursor.record_changed()
                        return self._opened(path, cursor)
                    await tries.retry_or_raise(f"subscription '{name}' changes again and again")
        finally:
            if self._opening.get(path) is opening:
                del self._opening[path]

    def record_watch(self, path: str) -> Watcher:
        """The watch on the record of a subscription, whichever cursor the subscription has."""
        return _RecordWatch(self._record_changed, path)

    def _record_changed(self, path: str) -> None:
        for cursor in (self._opening.get(path), self._open.get(path)):
            if cursor is not None:
                cursor.record_changed()

    def _opened(self, path: str, cursor: ConsumerCursor) -> ConsumerCursor:
        self._open[path] = cursor
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())
        self.changed()
        return cursor

    async def _try_open(
        self,
        topic: TopicInfo,
        nodes: SubscriptionNodes,
        name: str,
        start: Callable[[], Awaitable[Mapping[int, int]]],
        properties: Mapping[str, str],
        is_use: bool,
    ) -> ConsumerCursor | None:
        connection, acks = self._store.connections, self._acks.get(topic.id)
        number = 0 if acks is None else acks.look()
        subscription = await nodes.read(name, watch=self.record_watch(nodes.path(name)))
        if subscription is None:
            subscription = await self._subscriptions.create_for_consumers(
                topic.id, name, await start(), self.broker_id, properties
            )
            if subscription is None or not is_on(self._store, connection):
                return None
            share, version = subscription.shares[self.broker_id]
            return ConsumerCursor(self, nodes, subscription, share, version, number)
        if subscription.record.kind is SubscriptionKind.QUERY or subscription.record.live:
            with suppress(errors.LedgerFenced):  # another broker takes it over at the same time
                await self._take_from_cursor(topic, name)
            return None
        if subscription.record.ledger_id is not None:
            raise too_many(name)
        if not subscription.shares:
            await nodes.ensure_shares(name)
        return await self._with_share(nodes, subscription, connection, number, is_use)

    async def _take_from_cursor(self, topic: TopicInfo, name: str) -> None:
        """Takes over a subscription that a query, or a single broker, owned: puts the position in
        its cursor ledger into the record. Raises errors.SubscriptionBusy, errors.LedgerFenced."""
        cursor = await self._subscriptions.open(
            topic,
            name,
            f"consumers-of-{topic.id}",
            f"{self._rng.getrandbits(128):032x}",
            kind=SubscriptionKind.CONSUMER,
        )
        await cursor.recovered()
        await cursor.release()

    async def _with_share(
        self,
        nodes: SubscriptionNodes,
        subscription: SubscriptionView,
        connection: int,
        number: int,
        is_use: bool,
    ) -> ConsumerCursor | None:
        alive, shares = await brokers_alive(self._store), subscription.shares
        own_share = shares.get(self.broker_id)
        # those of brokers that are not alive are moved into this broker's share
        merged = {b: shares[b] for b in shares if b not in alive or b == self.broker_id}
        at = newest(subscription.record.epoch, (share for share, _ in merged.values()))
        is_use = is_use or bool(subscription.lost_users(alive - {self.broker_id}))
        used_ms = None if is_use else subscription.used_ms
        share = SubscriptionShare(subscription.record.epoch, True, at, used_ms)
        path, value = nodes.share(subscription.name, self.broker_id), records.encode_share(share)
        keeping: list[Operation] = []
        if subscription.acked_before is not None:
            moved = await moved_from_owners(self._subscriptions.ledgers, nodes, subscription)
            keeping = await moved.keeping(key_of(subscription), subscription.floor)
        written = await self._multi(
            [
                Check(nodes.path(subscription.name), subscription.version),
                Create(path, value) if own_share is None else Set(path, value, own_share[1]),
                *(
                    Delete(nodes.share(subscription.name, broker), version)
                    for broker, (_, version) in merged.items()
                    if broker != self.broker_id
                ),
                *keeping,
            ],
            connection,
        )
        version = 0 if own_share is None else own_share[1] + 1
        cursor = ConsumerCursor(self, nodes, subscription, share, version, number)
        return cursor if written else None

    async def _multi(self, operations: Sequence[Operation], connection: int) -> bool:
        """Whether all operations were applied. False: no operation was (`connection` has ended, or
        an operation failed), or the outcome is unknown until the nodes are read again."""
        with suppress(MultiFailed, OutcomeUnknown):
            await self._multis.multi(operations, on=connection)
            return True
        return False

    async def release(self, cursor: ConsumerCursor, timeout_s: float) -> None:
        """Called when no consumer here uses the subscription: writes its position, releases it, and
        fails the cursor. If the store does not respond in time, the position is written later,
        unless the subscription is opened again."""
        cursor.on_failure = do_nothing
        try:
            async with asyncio.timeout(timeout_s):
                await cursor.acked_settled()
        except (TimeoutError, errors.LedgerError) as error:
            _log.warning("acknowledgements of '%s' may come again: %s", cursor.name, error)
        cursor.leave()
        try:
            await self.written(cursor, timeout_s)
        except errors.Unavailable as error:
            _log.warning("subscription '%s' is released later: %s", cursor.name, error)
        except errors.LedgerError:
            pass  # released by `_work` meanwhile, taken over by another broker, sought or deleted
        self._end_released([cursor])

    async def delete(self, cursor: ConsumerCursor, within_s: float) -> None:
        """Called when the last consumer here unsubscribes: deletes the subscription. If consumers
        at other brokers use it, the last of these deletes it instead. The deletion is durable when
        this returns, even if responses of the store were lost: the nodes are read again, for
        `within_s` at most.

        Raises errors.Unavailable (it is unknown whether the subscription was deleted; the cursor
        stays in use), errors.SubscriptionBusy, errors.CommitContended."""
        on_failure, cursor.on_failure = cursor.on_failure, do_nothing
        until_s = asyncio.get_running_loop().time() + within_s
        cursor.leave()
        try:
            while True:
                try:
                    await self._delete(cursor)
                    break
                except errors.Unavailable as error:
                    if asyncio.get_running_loop().time() >= until_s:
                        raise
                    _log.warning("subscription '%s' is deleted later: %s", cursor.name, error)
                await asyncio.sleep(pause_s(self._rng, 5))
        except BaseException:
            cursor.use_again(on_failure)
            raise
        cursor.release_acks(is_gone=True)
        cursor.end("was deleted by its last consumer")
        self._forget_failed([cursor])

    async def _delete(self, cursor: ConsumerCursor) -> None:
        """First writes that the subscription is not used here; so if several brokers leave it, the
        last of them deletes it."""
        with suppress(errors.LedgerFenced, errors.SubscriptionNotFound):  # released
            await self.written(cursor, WRITTEN_S)
        if not await self._subscriptions.used_by_consumers(cursor.topic_id, cursor.name):
            with suppress(errors.SubscriptionNotFound):
                owned = [] if cursor.acked is None else cursor.acked.topic_acks.partitions
                await self._subscriptions.delete(cursor.topic_id, cursor.name, owned=owned)

    async def written(self, cursor: ConsumerCursor, timeout_s: float) -> None:
        """Returns once the changes before this call are durable; more changes may come meanwhile.
        Raises as ConsumerCursor.check, and errors.Unavailable after `timeout_s`."""
        changes = cursor.changes

        def is_behind() -> bool:
            has_changes = cursor.failure is None and cursor.durable < changes
            return has_changes and (cursor.dirty or cursor.must_reread)

        try:
            async with asyncio.timeout(timeout_s):
                while is_behind():
                    await self._round([cursor])
                    if is_behind():
                        await asyncio.sleep(pause_s(self._rng, 5))
        except TimeoutError as error:
            raise errors.Unavailable(
                f"the position of subscription '{cursor.name}' was not written in {timeout_s:.0f} s"
            ) from error
        cursor.check()

    async def close(self) -> None:
        """Stops writing: positions that are not durable are lost. The caller must release the
        cursors before."""
        if self._task is not None:
            await cancel(self._task)

    # -- writing -----------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            await woken(self._changed, LOOK_EVERY_S)
            self._changed.clear()
            cursors = list(self._open.values())
            try:
                await self._round(cursors)
                self._end_released(cursors)
            except Exception:  # a defect: the next round tries again
                _log.exception("the positions of consumers are not written")
                self.changed()
            await asyncio.sleep(WRITE_EVERY_S)

    async def _round(self, cursors: list[ConsumerCursor]) -> None:
        async with self._writing:
            late_s = asyncio.get_running_loop().time() - LOOK_EVERY_S
            try:
                for cursor in cursors:
                    if cursor.is_to_be_read(late_s):
                        await _isolated(cursor, cursor.look())
                self._forget_failed(cursors)
                now_s = asyncio.get_running_loop().time()
                dirty = [cursor for cursor in cursors if cursor.is_due(now_s)]
                for cursor in [cursor for cursor in dirty if cursor.goes_back]:
                    await self._write([cursor])
                await self._write([cursor for cursor in dirty if not cursor.goes_back])
                self._round_failure = ""
            except (StoreError, errors.LedgerError) as error:
                if self._round_failure != (late := str(error)):
                    _log.warning("the positions of consumers are written later: %s", late)
                self._round_failure = late
            now_s = asyncio.get_running_loop().time()
            if any(cursor.is_due(now_s) or cursor.is_to_be_read(late_s) for cursor in cursors):
                self.changed()

    async def _compare(self, cursor: ConsumerCursor) -> None:
        with suppress(StoreError, errors.Unavailable):  # written later
            await _isolated(cursor, cursor.compare())

    def _end_released(self, cursors: list[ConsumerCursor]) -> None:
        """Ends and forgets the cursors that are written and that no consumer uses."""
        for cursor in cursors:
            if not (cursor.used or cursor.dirty or cursor.must_reread):
                cursor.release_acks(is_written=True)
                cursor.end("was released")
        self._forget_failed(cursors)

    def _forget_failed(self, cursors: list[ConsumerCursor]) -> None:
        for cursor in cursors:
            if cursor.failure is not None and self._open.get(cursor.path) is cursor:
                del self._open[cursor.path]

    def _has_new_store(self) -> bool:
        """Whether a person accepted an older store since the last call: all cursors have failed."""
        before, self._store_epoch = self._store_epoch, self._guard.epoch
        if before in (None, self._store_epoch):
            return False
        self.fail_all(errors.LedgerFenced("an older metadata store was accepted"))
        return True

    async def _write(self, cursors: list[ConsumerCursor]) -> None:
        """Writes the cursors together; if a subscription has changed since it was read, writes each
        cursor by itself."""
        await asyncio.gather(*map(self._compare, cursors))
        cursors = [cursor for cursor in cursors if cursor.dirty and cursor.is_compared]
        at = 0
        while at < len(cursors):
            part: list[tuple[ConsumerCursor, SubscriptionShare, int, bool]] = []
            operations: list[Operation] = []
            size = 0
            while at < len(cursors) and size < MULTI_BYTES_MAX and len(part) < MULTI_WRITES_MAX:
                cursor, share = cursors[at], cursors[at].share()
                write = (cursor, share, cursor.changes, cursor.goes_back)
                added = await _isolated(cursor, cursor.operations(share))
                at += 1
                if added is not None:
                    part.append(write)
                    size += sum(len(op.value) for op in added if isinstance(op, Set))
                    operations += added
            for cursor, *_ in part:
                cursor.must_reread = True
            if not part:
                continue
            operations = [*await self._guard.checks(), *operations]
            if self._has_new_store():  # acknowledgements have refreshed the guard
                return
            if not all(cursor.is_compared for cursor, *_ in part):
                return
            if await self._multi(operations, self._store.connections):
                for cursor, share, changes, back in part:
                    cursor.must_reread = False
                    cursor.was_written(share, changes, back=back)
                continue
            await self._guard.refresh()
            if self._has_new_store():
                return
            if len(part) > 1:
                for cursor, *_ in part:
                    await _isolated(cursor, cursor.look())
                    if cursor.dirty:
                        await self._write([cursor])


async def _isolated(cursor: ConsumerCursor, doing: Coroutine[Any, Any, T]) -> T | None:
    """The result of `doing`. None if the subscription cannot be read, which fails only its cursor,
    or after a defect. Raises StoreError, errors.Unavailable."""
    try:
        return await doing
    except (StoreError, errors.Unavailable):
        raise
    except errors.LedgerError as error:
        _log.error("subscription '%s' is not used any more: %s", cursor.name, error)
        cursor.fail(error)
    except Exception:
        _log.exception("the position of subscription '%s' is not written: a defect", cursor.name)
        cursor.must_reread = True
    return None
