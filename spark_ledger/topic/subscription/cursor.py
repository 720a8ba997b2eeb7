"""The cursor of a subscription at its owner: it takes the owner's positions and makes them durable
in the background.

    advance(position) ... at most once a second ... -> the record, or an entry of the cursor ledger

Always true:
- `advance` never waits; a write has the last positions, and skips earlier positions;
- `confirmed` is durable: the next owner reads these positions or later positions (T12);
- only the owner of the current epoch writes. Each write of the record is a compare-and-set that
  also checks the intent. A ledger's entry counts only while the record names the ledger. A new
  owner raises the epoch, then fences the ledger. A cursor that reads another epoch sets `failure`
  and writes nothing more;
- a step back is written to the record with a new version of the subscriptions' node, so that a trim
  that was planned before it fails; then the positions are raised to the first rows kept (hazard
  37);
- a new ledger has the position before the record names the ledger; then the old ledger is deleted.
  A ledger that was made and never named is deleted too, by the cursor or by the janitor;
- writes are a second apart at least. A subscription that moves seldom keeps no ledger (its position
  is in the record), so a thousand queries that trigger every two minutes keep no ledger open. Small
  positions go into the record now and then, so that a reader of only the record is not far behind.
After a failure of the store or the bookies the cursor reads the nodes, and tries again.
"""

import asyncio
import logging
import random
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from spark_ledger import errors
from spark_ledger.async_tasks import BackgroundTasks, cancel
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import Check, Operation, Set, StoreError
from spark_ledger.topic.acks.ledger import discard_ledger
from spark_ledger.topic.log import records
from spark_ledger.topic.log.intents import CURSOR, HEARTBEAT_S, Intent, Intents
from spark_ledger.topic.log.records import IntentState
from spark_ledger.topic.log.topic_log import TopicLog
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.subscription import cursor_ledger
from spark_ledger.topic.subscription.cursor_ledger import CursorLedger
from spark_ledger.topic.subscription.nodes import SubscriptionNodes, SubscriptionView
from spark_ledger.topic.subscription.records import (
    Claim,
    Positions,
    SubscriptionLife,
    SubscriptionRecord,
    clipped,
    fits,
    goes_back,
    inline,
    later,
    storable,
)

WRITE_EVERY_S = 1.0
OFTEN_S = 30.0
"""A write that comes sooner after the last write goes to a ledger."""
IDLE_S = 120.0
"""A ledger without a write for this time is left. OFTEN_S must be less; otherwise a subscription
that moves regularly would open and leave a ledger with every write."""
FLOOR_EVERY_S = 300.0


class Step(Enum):
    NOTHING = "nothing"
    INLINE = "inline"  # write the positions into the record, which then names no ledger
    FLOOR = "floor"  # write the positions into the record, which still names the ledger
    APPEND = "append"  # append the positions to the open ledger
    NEW_LEDGER = "new ledger"  # append to a new ledger, and write its id into the record
    LEAVE = "leave"  # close the ledger, whose last entry has the positions


@dataclass(frozen=True, slots=True)
class Situation:
    """What `next_step` decides by; times are by the loop's clock. `dirty`: a position is not
    durable. `behind`: the record's floor is not the position. `small`: the positions fit into the
    record. `refused`: a ledger could not be made or written lately. `open`: the cursor has an open
    ledger; `full`: this ledger is full."""

    now_s: float
    written_s: float
    floor_s: float
    dirty: bool
    behind: bool
    small: bool
    refused: bool = False
    open: bool = False
    full: bool = False


def next_step(now: Situation) -> Step:
    """The step to take now; the caller asks again at `next_look_s`."""
    seldom = now.refused or (not now.open and now.now_s >= now.written_s + OFTEN_S)
    if now.open and now.small and now.behind and now.now_s >= now.floor_s + FLOOR_EVERY_S:
        return Step.INLINE if now.full else Step.FLOOR
    if now.dirty and now.open and not now.full:
        return Step.APPEND
    if now.dirty:
        return Step.INLINE if now.small and seldom else Step.NEW_LEDGER
    if now.open and now.now_s >= now.written_s + IDLE_S:
        return Step.INLINE if now.small else Step.LEAVE
    return Step.NOTHING


def next_look_s(now: Situation) -> float:
    """The time until which `next_step` does not change if nothing happens; not before the end of
    the pause after a write."""
    soonest_s = now.written_s + WRITE_EVERY_S
    if now.dirty:
        return soonest_s
    if not now.open:
        return float("inf")
    idle_s = now.written_s + IDLE_S
    floor_s = now.floor_s + FLOOR_EVERY_S if now.small and now.behind else idle_s
    return max(soonest_s, min(idle_s, floor_s))


PAUSE_S, PAUSE_S_MAX = 0.1, 30.0
LONG_AGO_S = float("-inf")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CursorContext:
    """The parts with which a cursor works."""

    nodes: SubscriptionNodes
    ledgers: LedgerStore
    intents: Intents
    log: TopicLog
    topic: TopicInfo
    rng: random.Random


class Cursor:
    """Made by Subscriptions.open, on the event loop that it stays on."""

    def __init__(
        self,
        context: CursorContext,
        subscription: SubscriptionView,
        claim: Claim,
        intent: Intent,
        *,
        new: bool,
    ) -> None:
        """`new`: the subscription was just made, and its first rows may have been trimmed since."""
        self.name = subscription.name
        self.failure: errors.LedgerError | None = None
        """Why the cursor writes nothing more: the subscription was taken over or deleted."""
        self.confirmed: Positions = dict(subscription.record.floor)
        self._context = context
        self._subscription = subscription
        self._claim = claim
        self._intent = intent
        self._loop = asyncio.get_running_loop()
        self._positions: dict[int, int] = {}
        self._unconfirmed: Positions = {}  # positions of writes without a response
        self._starts: Mapping[int, int] = {}  # first rows kept, by the last fold
        self._must_clip = new  # the position went back: compare it with the first rows kept
        self._must_reread = False  # a call failed: the record and the intent must be read again
        self._ledger: CursorLedger | None = None
        self._left: dict[int, None] = {}  # this cursor's ledgers that the record must not name
        self._written_s = self._floor_s = self._refused_s = LONG_AGO_S
        self._looked_s = self._loop.time()
        self._changed = asyncio.Event()
        self._durable = asyncio.Event()
        self._recovered: asyncio.Future[dict[int, int]] = self._loop.create_future()
        self._discarding = BackgroundTasks()
        self._task = self._loop.create_task(self._work())

    # -- the owner's calls -------------------------------------------------------------------

    def advance(self, positions: Positions) -> None:
        """Sets the subscription's positions in these partitions; they are written soon, and may go
        back. Never raises and never waits."""
        advanced = {**self._positions, **clipped(positions, self._starts)}
        if advanced != self._positions and self.failure is None:
            self._positions = advanced
            self._durable.clear()
            self._changed.set()

    def check(self) -> None:
        """Raises errors.LedgerFenced if another run or query has taken the subscription over,
        errors.SubscriptionNotFound if it was deleted."""
        if self.failure is not None:
            raise self.failure

    async def recovered(self) -> dict[int, int]:
        """The subscription's positions when it was opened, at or after its confirmed positions.
        Waits as long as the bookies that have the positions do not respond. Raises as `check`."""
        return dict(await asyncio.shield(self._recovered))

    async def durable(self) -> None:
        """Waits until the last positions are durable. Raises as `check`."""
        await self._durable.wait()
        self.check()

    async def release(self, timeout_s: float = 10.0) -> None:
        """Writes the last position and releases the subscription, so that any query may open it at
        once. If the release cannot be written in time, its own query may open it at once, and
        another query after a lease."""
        await self._stop()
        try:
            async with asyncio.timeout(timeout_s):
                while self.failure is None:
                    if not await self._succeeds(self._write_release()):
                        await asyncio.sleep(self._context.rng.uniform(PAUSE_S, 2 * PAUSE_S))
        except TimeoutError:
            _log.warning("subscription '%s' could not be released in %s s", self.name, timeout_s)
        finally:
            await self._end()

    async def abandon(self) -> None:
        """Stops without writing anything, as a crash would."""
        await self._stop()
        await self._end()

    # -- the work --------------------------------------------------------------------------

    async def _work(self) -> None:
        failures = 0
        while self.failure is None:
            if await self._succeeds(self._round()):
                failures = 0
                await self._wait()
            else:
                failures += 1
                pause_s = min(PAUSE_S_MAX, PAUSE_S * 2 ** min(failures, 20))
                await asyncio.sleep(self._context.rng.uniform(0.5, 1.0) * pause_s)

    async def _succeeds(self, doing: Coroutine[Any, Any, None]) -> bool:
        """Whether `doing` succeeded. If not, and `failure` is not set, the caller tries again."""
        try:
            await doing
            return True
        except _Overtaken as overtaken:
            self._fail(overtaken.error)
        except (_LostRace, errors.LedgerError, StoreError) as error:
            self._must_reread = True
            _log.warning("subscription '%s' is written later: %r", self.name, error)
        except Exception as error:  # a defect: it is logged, and nothing more is written
            _log.exception("the cursor of subscription '%s' ends", self.name)
            self._fail(errors.LedgerError(f"subscription '{self.name}' has failed: {error!r}"))
        return False

    async def _round(self) -> None:
        await self._context.intents.heartbeat(self._intent)
        await self._settle()
        while (step := next_step(self._situation())) is not Step.NOTHING:
            if self._loop.time() < self._written_s + WRITE_EVERY_S:
                break
            await self._write(step)
            await self._settle()
        if not self._is_dirty():
            self._durable.set()

    async def _wait(self) -> None:
        """Waits until there may be something to write, or a heartbeat is due."""
        self._changed.clear()
        if not self._is_dirty():
            look_s = min(next_look_s(self._situation()), self._loop.time() + HEARTBEAT_S)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(look_s):
                    await self._changed.wait()
        if self._is_dirty():
            await asyncio.sleep(next_look_s(self._situation()) - self._loop.time())

    async def _settle(self) -> None:
        """Makes sure that the record and the intent are up to date, and that the subscription's
        earlier position was read. Reads record and intent now and then, since others may count a
        silent owner as dead."""
        if self._must_reread or self._loop.time() >= self._looked_s + HEARTBEAT_S:
            await self._look()
        if not self._recovered.done():
            await self._recover()
        if self._must_clip:
            state = await self._context.log.fold(fresh=True)
            self._starts, self._must_clip = state.start_offsets(), False
            self._positions = clipped({**self.confirmed, **self._positions}, self._starts)

    async def _look(self) -> None:
        """Reads the nodes, and goes on under another intent if this cursor's intent was
        condemned."""
        context = self._context
        subscription = await context.nodes.read(self.name)
        if subscription is None:
            gone = f"subscription '{self.name}' of topic '{context.topic.name}' was deleted"
            raise _Overtaken(errors.SubscriptionNotFound(gone, subscription=self.name))
        mine = (self._claim.owner, self._subscription.record.epoch)
        if (subscription.record.owner, subscription.record.epoch) != mine:
            raise _Overtaken(_fenced(self.name, subscription.record))
        self._subscription = subscription
        named = subscription.record.ledger_id
        assert self._ledger is None or self._ledger.id == named, "it is left before it is unnamed"
        intent = await context.intents.get(self._intent.id)
        if not intent.is_open:
            await self._renew_intent()
        self._must_reread, self._looked_s = False, self._loop.time()

    async def _renew_intent(self) -> None:
        context = self._context
        try:
            self._intent = await open_intent(
                context.intents, self._claim, context.topic.id, self.name
            )
        except errors.LedgerFenced as error:
            raise _Overtaken(error) from error
        self._leave_ledger()
        await self._move(self._subscription.record)

    async def _recover(self) -> None:
        """Reads the ledger of the earlier owner, which fences the ledger, and goes on without
        it."""
        record = self._subscription.record
        recovered: Positions = record.floor
        if record.ledger_id is not None:
            try:
                recovered = await cursor_ledger.last_positions(
                    self._context.ledgers, record, fence=True
                )
            except errors.NoSuchLedger as error:
                _log.error("the cursor of subscription '%s' is at its floor: %s", self.name, error)
            if fits(recovered):
                self._left[record.ledger_id] = None
                await self._move(inline(record, recovered))
        self.confirmed = dict(recovered)
        self._positions = {**recovered, **self._positions}
        self._recovered.set_result(dict(recovered))

    # -- writing ---------------------------------------------------------------------------

    async def _write(self, step: Step) -> None:
        positions, highest = dict(self._positions), self._highest()
        if step is not Step.LEAVE:
            self._unconfirmed = later(self._unconfirmed, positions)
        if goes_back(positions, highest):
            await self._go_back(positions)
        elif step is Step.APPEND:
            await self._append(positions)
        elif step is Step.NEW_LEDGER:
            await self._move_to_new_ledger(positions)
        elif step is Step.FLOOR:
            await self._move(replace(self._subscription.record, floor=positions))
        elif step is Step.INLINE:
            self._leave_ledger()
            await self._move(inline(self._subscription.record, positions))
        elif step is Step.LEAVE:
            await self._close_ledger()
            return
        self.confirmed, self._unconfirmed = positions, {}
        self._written_s = self._loop.time()

    async def _append(self, positions: Positions) -> None:
        assert self._ledger is not None
        try:
            await self._ledger.append(self._subscription.record, positions)
        except errors.LedgerError:
            self._leave_ledger()  # the record decides whether the cursor may go on
            self._refused_s = self._loop.time()
            raise

    async def _go_back(self, positions: Positions) -> None:
        nodes = self._context.nodes
        others = nodes.step_back(self.name, await nodes.marks(self.name), positions)
        self._must_clip = True
        if fits(positions):
            self._leave_ledger()
            await self._move(inline(self._subscription.record, positions), *others)
        else:
            await self._move_to_new_ledger(positions, *others)

    async def _move_to_new_ledger(self, positions: Positions, *others: Operation) -> None:
        context = self._context
        self._leave_ledger()
        try:
            topic = context.topic
            made = await cursor_ledger.create(
                context.ledgers, context.intents, self._intent, topic.id, topic.policies
            )
            self._left[made.id] = None
            await made.append(self._subscription.record, positions)
        except errors.LedgerError:
            self._refused_s = self._loop.time()
            raise
        record = replace(self._subscription.record, ledger_id=made.id, floor=storable(positions))
        del self._left[made.id]
        try:
            await self._move(record, *others)
        except BaseException:
            self._left[made.id] = None
            raise
        self._ledger = made

    async def _move(self, record: SubscriptionRecord, *others: Operation) -> None:
        """Writes the record, if record and intent have not changed since they were read. Raises
        _LostRace."""
        path, version = paths.intent(self._intent.id), self._intent.version
        await self._put(replace(record, intent=self._intent.id), Check(path, version), *others)

    async def _put(self, record: SubscriptionRecord, *others: Operation) -> None:
        before = self._subscription.record.ledger_id
        subscription = await self._context.nodes.write(self._subscription, record, *others)
        if subscription is None:
            raise _LostRace(f"its record is not of version {self._subscription.version} any more")
        self._subscription = subscription
        self._floor_s = self._loop.time()
        if before is not None and before != record.ledger_id:
            self._left[before] = None
        self._discard_left()

    async def _write_release(self) -> None:
        """Makes the cursor's last write, which releases the subscription."""
        await self._settle()
        while goes_back(self._positions, self._highest()):
            await self._write(Step.INLINE)
            await self._settle()
        positions = dict(self._positions)
        if fits(positions):
            self._leave_ledger()
            record = inline(self._subscription.record, positions)
        else:
            if self._is_dirty():
                await self._write(Step.APPEND if self._ledger else Step.NEW_LEDGER)
            await self._close_ledger()
            record = self._subscription.record
        released = replace(record, life=SubscriptionLife.RELEASED, intent=self._intent.id)
        done = records.encode_intent(replace(self._intent.record, state=IntentState.DONE))
        await self._put(released, Set(paths.intent(self._intent.id), done, self._intent.version))
        self.confirmed = positions
        self._fail(errors.LedgerFenced(f"subscription '{self.name}' was released"))

    def _leave_ledger(self) -> None:
        """Later appends go to another ledger; this ledger is deleted once the record does not name
        it."""
        if self._ledger is not None:
            self._left[self._ledger.id] = None
            self._ledger.writer.abandon()
            self._ledger = None

    async def _close_ledger(self) -> None:
        """Closes the ledger and keeps it: the record still names it."""
        if self._ledger is not None:
            ledger, self._ledger = self._ledger, None
            await ledger.writer.close()

    def _discard_left(self) -> None:
        """Deletes those of the left ledgers that the record, which was just written, does not
        name."""
        for ledger_id in [
            left for left in self._left if left != self._subscription.record.ledger_id
        ]:
            del self._left[ledger_id]
            self._discarding.start(discard_ledger(self._context.ledgers, ledger_id))

    # -- the state -------------------------------------------------------------------------

    def _is_dirty(self) -> bool:
        return self._recovered.done() and (
            self._positions != self.confirmed or bool(self._unconfirmed)
        )

    def _highest(self) -> dict[int, int]:
        """The highest positions that any process may have read."""
        return later(self.confirmed, self._unconfirmed)

    def _situation(self) -> Situation:
        now_s, ledger = self._loop.time(), self._ledger
        return Situation(
            now_s,
            self._written_s,
            self._floor_s,
            dirty=self._is_dirty(),
            behind=self._subscription.record.floor != self._positions,
            small=fits(self._positions),
            refused=now_s - self._refused_s < OFTEN_S,
            open=ledger is not None,
            full=ledger is not None and ledger.full(now_s),
        )

    # -- the end ---------------------------------------------------------------------------

    def _fail(self, error: errors.LedgerError) -> None:
        self.failure = error
        if self._ledger is not None:
            self._ledger.writer.abandon()
        if not self._recovered.done():
            self._recovered.set_exception(error)
            self._recovered.exception()  # read here, as maybe no caller reads it
        self._durable.set()

    async def _stop(self) -> None:
        """Stops the background work; writes that were under way may have been applied or not."""
        await cancel(self._task)
        self._must_reread = True

    async def _end(self) -> None:
        if self.failure is None:
            self._fail(errors.LedgerFenced(f"subscription '{self.name}' was given up"))
        await self._discarding.idle()


async def open_intent(intents: Intents, claim: Claim, topic_id: str, name: str) -> Intent:
    """The intent of the claim's run on the subscription. The first call of a run ends the older
    run's intent. No topic's name is equal to the intent's target. Raises errors.LedgerFenced if a
    newer run has taken over."""
    target = f"subscription:{topic_id}/{name}"
    return await intents.open_query_intent(claim.query_id, claim.run_id, target, kind=CURSOR)


def _fenced(name: str, record: SubscriptionRecord) -> errors.LedgerFenced:
    taker = f"query {record.query_id}, run {record.run_id}" if record.live else "a seek"
    return errors.LedgerFenced(
        f"subscription '{name}' was taken over by {taker} (epoch {record.epoch})",
        subscription=name,
        query_id=record.query_id,
        run_id=record.run_id,
    )


class _Overtaken(Exception):
    """The subscription has another owner, or was deleted."""

    def __init__(self, error: errors.LedgerError) -> None:
        super().__init__(str(error))
        self.error = error


class _LostRace(Exception):
    """The record or the intent has changed since it was read."""
