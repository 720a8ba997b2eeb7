"""Where the consumers at one broker are, of all its subscriptions, made durable together.

    advance(partition, offset) ... a second ... -> the broker's share of the subscription
                                                   (with those of others in one multi)

Always true:
- a broker writes its own share alone, so brokers do not wait for each other; of two that wrote of a
  partition the owner of the higher epoch counts, so that an owner of before changes nothing;
- a broker has one cursor of a subscription: opened again, as where it lost the partitions and has
  them back, the one of before fails, and with it what it was told and had not written; so does one
  that was released, however long its last write waited;
- a write checks that the subscription is as it was seen: after a seek, a deletion, or when another
  broker took this one for dead and has put its share into its own, `failure` is set, nothing more
  is written, and `on_failure` is called;
- a position is not written to an older metadata store, where other rows may have its offset: the
  topic's history is compared after each new connection, no write is made while the store is held,
  and all cursors fail once a person accepted another store;
- what cannot be read of one subscription ends its cursor alone;
- `advance` waits for nothing; what was told last is written, MULTI_BYTES_MAX of values in a multi;
- a step back is written with a new version of the subscriptions' node and of the subscription's
  record: a trim planned before it fails, and no mark hides it (hazard 37);
- a query's subscription is the consumers' once the query is over, and a query has it back once the
  consumers are gone: it stays where it is;
- the shares of brokers that are not alive go into that of the next broker that opens the
  subscription, in one multi, so there are no more of them than brokers.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from spark_ledger import errors
from spark_ledger.metadata.cluster import ClusterGuard
from spark_ledger.metadata.store import (
    Check,
    Create,
    Delete,
    MetadataStore,
    MultiFailed,
    Operation,
    OutcomeUnknown,
    SessionState,
    Set,
    StoreError,
)
from spark_ledger.metadata.store_calls import TRIES_MAX, pause_s, reachable
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.subscription import records
from spark_ledger.topic.subscription.nodes import Seen, SubscriptionNodes, brokers_alive
from spark_ledger.topic.subscription.records import (
    Share,
    SubscriptionKind,
    newest,
    too_many,
    with_shares,
)
from spark_ledger.topic.subscription.subscriptions import Subscriptions

WRITE_EVERY_S = 1.0
LOOK_EVERY_S = 60.0
"""What is not written is read so often: it may have been deleted, or sought, and the watch on its
record have been lost."""
WRITTEN_S = 5.0
MULTI_BYTES_MAX = 256 << 10
MULTI_WRITES_MAX = 250

_log = logging.getLogger(__name__)
T = TypeVar("T")
History = Callable[[], Awaitable[int]]
"""The number of a topic's history (TopicLog.histories) in the store as it is connected to now."""


async def _one_history() -> int:
    return 0


class ConsumerCursor:
    """A subscription at one broker. Made by ConsumerCursors.open."""

    def __init__(
        self,
        cursors: "ConsumerCursors",
        nodes: SubscriptionNodes,
        seen: Seen,
        share: Share,
        version: int,
    ) -> None:
        self.name = seen.name
        self.failure: errors.LedgerError | None = None
        self.on_failure: Callable[[], None] = _nothing
        self.used = True
        self.doubt = False  # a write failed: what is there is to be read again
        self.told = 0  # how often it was told something
        self.durable = 0  # how much of that is durable
        self.looked_s = float("-inf")
        self._watching = False  # the record, under one watch
        self._cursors = cursors
        self._nodes = nodes
        self._seen = seen
        self._written = share
        self._version = version
        self.history: History = _one_history
        self.opened_in = 0
        self._compared = -1  # the connection to the store on which the history was asked for last
        self._at = dict(share.at)
        self._highest = dict(share.at)  # that may have been read by others

    @property
    def topic_id(self) -> str:
        return self._nodes.topic_id

    @property
    def path(self) -> str:
        return self._nodes.path(self.name)

    def check(self) -> None:
        """Raises errors.LedgerFenced, errors.SubscriptionNotFound as `failure` says."""
        if self.failure is not None:
            raise self.failure

    async def adopt(self, partition: int, epoch: int) -> int:
        """Where the subscription is in a partition that this broker has in that epoch. Raises as
        `check`, errors.Unavailable."""
        with reachable(f"reading subscription '{self.name}'"):
            seen = await self._nodes.read(self.name)
        self._judge(seen)
        self.check()
        assert seen is not None, "else it has failed"
        shares = [share for share, _ in seen.shares.values()]
        own = Share(seen.record.epoch, True, self._at)
        positions = with_shares(seen.record.floor, seen.record.epoch, [*shares, own])
        self._at[partition] = (epoch, positions.get(partition, 0))
        self._cursors.changed()
        return self._at[partition][1]

    def advance(self, partition: int, offset: int) -> None:
        """The subscription is there in a partition that was adopted; written soon. It may go
        back."""
        self._at[partition] = (self._at[partition][0], offset)
        self.told += 1
        self._cursors.changed()

    def leave(self) -> None:
        """Nobody uses it at this broker; written soon, and released then."""
        self.used = False
        self.told += 1
        self._cursors.changed()

    def use_again(self, on_failure: Callable[[], None]) -> None:
        """What `leave` was for did not come about."""
        self.on_failure = on_failure
        if self.failure is not None:
            on_failure()
            return
        self.used = True
        self.told += 1
        self._cursors.changed()

    def end(self, why: str) -> None:
        """It writes nothing more, but for what is under way."""
        told = f"subscription '{self.name}' {why}"
        self.fail(errors.LedgerFenced(told, subscription=self.name))

    @property
    def dirty(self) -> bool:
        return self.failure is None and self.share() != self._written

    @property
    def goes_back(self) -> bool:
        return any(at[1] < self._highest.get(p, at)[1] for p, at in self._at.items())

    def share(self) -> Share:
        return Share(self._seen.record.epoch, self.used, dict(self._at))

    async def operations(self, share: Share) -> list[Operation]:
        """What writes it. Raises StoreUnavailable."""
        nodes, seen = self._nodes, self._seen
        write = Set(
            nodes.share(self.name, self._cursors.broker_id),
            records.encode_share(share),
            self._version,
        )
        if not self.goes_back:
            for partition, at in share.at.items():
                self._highest[partition] = max(at, self._highest.get(partition, at))
            return [Check(nodes.path(self.name), seen.version), write]
        positions = with_shares(seen.floor, share.epoch, [share])
        record = records.encode_subscription(seen.record)
        back = nodes.going_back(self.name, await nodes.marks(self.name), positions)
        return [Set(nodes.path(self.name), record, seen.version), write, *back]

    def was_written(self, share: Share, told: int, *, back: bool) -> None:
        """`told`: what it was told until the share was made."""
        self._written, self._version = share, self._version + 1
        self.durable = told
        self.looked_s = asyncio.get_running_loop().time()
        if back:
            self._highest = dict(share.at)
            self.doubt = True  # of which version the record is

    def is_to_be_read(self, late_s: float) -> bool:
        """Whether to read what is there: one that writes finds by that what others changed, but
        one that has written and rests hears of it by the watch alone."""
        rests = self.failure is None and not self.dirty
        return self.doubt or (rests and not (self._watching and self.looked_s >= late_s))

    async def look(self) -> None:
        """Read what is there. Raises StoreError."""
        watch = None if self._watching else self._record_changed
        self._watching = True
        try:
            seen = await self._nodes.read(self.name, watch=watch)
        except BaseException:
            if watch is not None:  # it may not be set
                self._watching = False
            raise
        self._judge(seen)
        if seen is not None and self.failure is None:
            self._written, self._version = seen.shares[self._cursors.broker_id]
            self._seen, self.doubt = seen, False
        self.looked_s = asyncio.get_running_loop().time()

    def _record_changed(self) -> None:
        self._watching = False
        self.doubt = True
        self._cursors.changed()

    def _judge(self, seen: Seen | None) -> None:
        """It fails if it is not the subscription that was opened, with this broker's share."""
        if seen is None:
            gone = f"subscription '{self.name}' was deleted"
            self.fail(errors.SubscriptionNotFound(gone, subscription=self.name))
            return
        mine = seen.shares.get(self._cursors.broker_id)
        known = (self._seen.record.epoch, self._seen.record.owner)
        if (seen.record.epoch, seen.record.owner) != known or mine is None:
            why = "another broker has what this one knew" if mine is None else "it was sought"
            self._open_again(why)

    async def compare(self) -> None:
        """Fail if the topic has another history than when this was opened: the offsets are of rows
        of a metadata store that was given up, and this store has others at them.
        Raises errors.Unavailable, errors.LedgerError as `history`."""
        connections = self._nodes.store.connections
        if connections != self._compared:
            if await self.history() != self.opened_in:
                self._open_again("the metadata store is an older one")
            self._compared = connections

    @property
    def is_compared(self) -> bool:
        """On the connection that a write which begins now is sent on."""
        return _is_on(self._nodes.store, self._compared)

    def _open_again(self, why: str) -> None:
        text = f"subscription '{self.name}' is to be opened again: {why}"
        self.fail(errors.LedgerFenced(text, subscription=self.name))

    def fail(self, error: errors.LedgerError) -> None:
        """It writes nothing more."""
        if self.failure is None:
            self.failure = error
            self.on_failure()


class ConsumerCursors:
    """Of one broker, whose id is the name of its ephemeral below /brokers/alive."""

    def __init__(
        self,
        store: MetadataStore,
        subscriptions: Subscriptions,
        broker_id: str,
        rng: random.Random,
    ) -> None:
        self.broker_id = broker_id
        self._store = store
        self._subscriptions = subscriptions
        self._rng = rng
        self._guard = ClusterGuard(store)
        self._late = ""  # why nothing was written in the last round
        self._open: dict[str, ConsumerCursor] = {}  # by the subscription's node
        self._opening: dict[str, object] = {}  # the last call of `open` that is under way
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def changed(self) -> None:
        self._changed.set()

    def doubt_all(self) -> None:
        """Another broker took this one for dead: it may have what this one knew."""
        for one in self._open.values():
            one.doubt = True
        self.changed()

    def fail_all(self, error: errors.LedgerError) -> None:
        """Nothing more is written of any subscription that is open now."""
        for cursor in list(self._open.values()):
            cursor.fail(error)

    async def open(
        self,
        topic: TopicInfo,
        name: str,
        start: Callable[[], Awaitable[Mapping[int, int]]],
        history: History = _one_history,
    ) -> ConsumerCursor:
        """The subscription, made at `start()` if it is not there; a cursor that this broker has of
        it fails, and the new one does once `history()` is another. Raises errors.SubscriptionBusy
        (a query uses it), errors.LedgerFenced (it is opened again meanwhile), errors.TopicNotFound,
        errors.TopicDeleted, errors.OptionInvalid, errors.Unavailable."""
        nodes = SubscriptionNodes(self._store, topic.id)
        path = nodes.path(name)
        turn = self._opening[path] = object()
        if path in self._open:  # before its share is read: what it writes later fails
            self._open.pop(path).end("is opened again at this broker")
        try:
            with reachable(f"opening subscription '{name}' of topic '{topic.name}'"):
                opened_in = await history()  # first: what is read is of this one or of a later
                for tries in range(TRIES_MAX):
                    opened = await self._try_open(topic, nodes, name, start)
                    if self._opening.get(path) is not turn:
                        told = f"subscription '{name}' was opened again at this broker meanwhile"
                        raise errors.LedgerFenced(told, subscription=name)
                    if opened is not None:
                        opened.history, opened.opened_in = history, opened_in
                        return self._opened(path, opened)
                    await asyncio.sleep(pause_s(self._rng, tries))
        finally:
            if self._opening.get(path) is turn:
                del self._opening[path]
        raise errors.CommitContended(f"subscription '{name}' changes again and again")

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
    ) -> ConsumerCursor | None:
        connection = self._store.connections
        seen = await nodes.read(name)
        if seen is None:
            await self._subscriptions.create_for_consumers(topic.id, name, await start())
            return None
        if seen.record.kind is SubscriptionKind.QUERY or seen.record.live:
            with suppress(errors.LedgerFenced):  # another broker takes it at the same time
                await self._take_from_cursor(topic, name)
            return None
        if seen.record.ledger_id is not None:
            raise too_many(name)
        await nodes.ensure_shares(name)
        return await self._with_share(nodes, seen, connection)

    async def _take_from_cursor(self, topic: TopicInfo, name: str) -> None:
        """A query had it, or a broker alone: what its cursor's ledger says goes into the record.
        Raises errors.SubscriptionBusy, errors.LedgerFenced."""
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
        self, nodes: SubscriptionNodes, seen: Seen, connection: int
    ) -> ConsumerCursor | None:
        alive = await brokers_alive(self._store)
        mine = seen.shares.get(self.broker_id)
        gone = {b: one for b, one in seen.shares.items() if b not in alive or b == self.broker_id}
        at = newest(seen.record.epoch, (share for share, _ in gone.values()))
        share = Share(seen.record.epoch, True, at)
        path, value = nodes.share(seen.name, self.broker_id), records.encode_share(share)
        if not _is_on(self._store, connection):
            return None
        written = await self._multi(
            [
                Check(nodes.path(seen.name), seen.version),
                Create(path, value) if mine is None else Set(path, value, mine[1]),
                *(
                    Delete(nodes.share(seen.name, broker), version)
                    for broker, (_, version) in gone.items()
                    if broker != self.broker_id
                ),
            ]
        )
        version = 0 if mine is None else mine[1] + 1
        return ConsumerCursor(self, nodes, seen, share, version) if written else None

    async def _multi(self, operations: Sequence[Operation]) -> bool:
        """Whether all is written. False: none of it, or it is not known: whoever looks again sees
        what became of it."""
        with suppress(MultiFailed, OutcomeUnknown):
            await self._store.multi(operations)
            return True
        return False

    async def release(self, cursor: ConsumerCursor, timeout_s: float) -> None:
        """Nobody uses it here: write where it is, and let it go: it fails. What the store does not
        take in time is written once the store does, unless the subscription is opened again."""
        cursor.leave()
        cursor.on_failure = _nothing
        try:
            await self.written(cursor, timeout_s)
        except errors.Unavailable as error:
            _log.warning("subscription '%s' is released later: %s", cursor.name, error)
        except errors.LedgerError:
            pass  # released by `_work` meanwhile, taken by another broker, sought or deleted
        self._end_released([cursor])

    async def delete(self, cursor: ConsumerCursor, within_s: float) -> None:
        """Its last consumer here unsubscribes: delete the subscription, unless consumers at other
        brokers have it: then their last one does. Durable when this returns, whatever answers of
        the store were lost: what is there is read again, for `within_s` at most.

        Raises errors.Unavailable: it may be deleted or not, and is used as before;
        errors.SubscriptionBusy, errors.CommitContended."""
        on_failure, cursor.on_failure = cursor.on_failure, _nothing
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
        cursor.end("was deleted by its last consumer")
        self._forget_failed([cursor])

    async def _delete(self, cursor: ConsumerCursor) -> None:
        """Once others see that it is not used here; so of several that leave one deletes it."""
        with suppress(errors.LedgerFenced, errors.SubscriptionNotFound):  # released
            await self.written(cursor, WRITTEN_S)
        if not await self._subscriptions.used_by_consumers(cursor.topic_id, cursor.name):
            with suppress(errors.SubscriptionNotFound):
                await self._subscriptions.delete(cursor.topic_id, cursor.name)

    async def written(self, cursor: ConsumerCursor, timeout_s: float) -> None:
        """Return once what it was told before this call is durable: it may be told more all the
        time. Raises as ConsumerCursor.check, errors.Unavailable where that takes longer."""
        told = cursor.told

        def left() -> bool:
            behind = cursor.failure is None and cursor.durable < told
            return behind and (cursor.dirty or cursor.doubt)

        try:
            async with asyncio.timeout(timeout_s):
                while left():
                    await self._round([cursor])
                    if left():
                        await asyncio.sleep(pause_s(self._rng, 5))
        except TimeoutError as error:
            raise errors.Unavailable(
                f"where subscription '{cursor.name}' is was not written in {timeout_s:.0f} s"
            ) from error
        cursor.check()

    async def close(self) -> None:
        """Release first what is to be written."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # -- writing -----------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._changed.wait()
            self._changed.clear()
            some = list(self._open.values())
            try:
                await self._round(some)
                self._end_released(some)
            except Exception:  # a defect: the next round is made all the same
                _log.exception("where consumers are is not written")
                self.changed()
            await asyncio.sleep(WRITE_EVERY_S)

    async def _round(self, some: list[ConsumerCursor]) -> None:
        async with self._writing:
            late_s = asyncio.get_running_loop().time() - LOOK_EVERY_S
            try:
                for one in some:
                    if one.is_to_be_read(late_s):
                        await _apart(one, one.look())
                self._forget_failed(some)
                dirty = [one for one in some if one.dirty]
                for one in [one for one in dirty if one.goes_back]:
                    await self._write([one])
                await self._write([one for one in dirty if not one.goes_back])
                self._late = ""
            except (StoreError, errors.LedgerError) as error:
                if self._late != (late := str(error)):
                    _log.warning("where consumers are is written later: %s", late)
                self._late = late
            if any(one.dirty or one.is_to_be_read(late_s) for one in some):
                self.changed()

    async def _compare(self, cursor: ConsumerCursor) -> None:
        with suppress(StoreError, errors.Unavailable):  # written later
            await _apart(cursor, cursor.compare())

    def _end_released(self, some: list[ConsumerCursor]) -> None:
        """What nobody uses and is written fails, and is forgotten."""
        for one in some:
            if not (one.used or one.dirty or one.doubt):
                one.end("was released")
        self._forget_failed(some)

    def _forget_failed(self, some: list[ConsumerCursor]) -> None:
        for one in some:
            if one.failure is not None and self._open.get(one.path) is one:
                del self._open[one.path]

    async def _write(self, some: list[ConsumerCursor]) -> None:
        """Together, or, where one of them is not as it was seen, each by itself."""
        await asyncio.gather(*map(self._compare, some))
        some = [one for one in some if one.dirty and one.is_compared]
        at = 0
        while at < len(some):
            part: list[tuple[ConsumerCursor, Share, int, bool]] = []
            operations: list[Operation] = []
            size = 0
            while at < len(some) and size < MULTI_BYTES_MAX and len(part) < MULTI_WRITES_MAX:
                one, share = some[at], some[at].share()
                known = (one, share, one.told, one.goes_back)
                added = await _apart(one, one.operations(share))
                at += 1
                if added is not None:
                    part.append(known)
                    size += sum(len(op.value) for op in added if isinstance(op, Set))
                    operations += added
            for one, *_ in part:
                one.doubt = True
            if not part:
                continue
            operations = [*await self._guard.checks(), *operations]
            if not all(one.is_compared for one, *_ in part):
                return
            if await self._multi(operations):
                for one, share, told, back in part:
                    one.doubt = False
                    one.was_written(share, told, back=back)
                continue
            if not await self._guard.look():
                self.fail_all(errors.LedgerFenced("an older metadata store was accepted"))
            if len(part) > 1:
                for one, *_ in part:
                    await _apart(one, one.look())
                    if one.dirty:
                        await self._write([one])


async def _apart(cursor: ConsumerCursor, doing: Coroutine[Any, Any, T]) -> T | None:
    """What it returns; None where the subscription cannot be read, which ends its cursor and no
    other, and where there is a defect. Raises StoreError, errors.Unavailable."""
    try:
        return await doing
    except (StoreError, errors.Unavailable):
        raise
    except errors.LedgerError as error:
        _log.error("subscription '%s' is not used any more: %s", cursor.name, error)
        cursor.fail(error)
    except Exception:
        _log.exception("the position of subscription '%s' is not written: a defect", cursor.name)
        cursor.doubt = True
    return None


def _is_on(store: MetadataStore, connection: int) -> bool:
    """Whether a write that begins now is sent on that connection."""
    return store.session_state is SessionState.CONNECTED and store.connections == connection


def _nothing() -> None:
    """Nobody is told."""
