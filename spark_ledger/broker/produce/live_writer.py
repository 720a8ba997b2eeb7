"""The open end of one partition at its owner: batches go to the live ledger, in order.

step.py decides the next step and has the states of a segment; backlog.py has the runs that wait or
are under way; opening.py has the open ledger and the commit between two segments. LiveWriter
carries the steps out.

Always true:
- no batch is sent before this owner's own `open` was read back in the folded log (hazard 28);
- a batch counts as stored when Qa bookies have synced it and all batches before it; from then on
  its offset never changes;
- if a ledger failed or was fenced, its CLOSED record alone decides about the batches sent to it:
  batches in the record are stored, the others go to the next ledger, once and in order (hazard 31);
- the owner hands the live segment to a committer (a Spark commit) that asks for it: the owner
  stops, and the commit seals the segment and reopens its ledger. If no commit comes before the hold
  ends, this owner seals and reopens, so that a late commit is refused. If the committer fenced the
  ledger instead, the partition is reopened after the commit, or after HOLD_S (hazard 29);
- a new segment gets the waiting batches before it is handed over, so producers make progress
  between two commits;
- from the second segment of a ledger on, each entry has its own offset, for readers of an old log;
- one commit seals a segment and opens the next; a partition without batches for IDLE_S has no
  ledger open;
- at most INFLIGHT_ENTRIES_MAX entries are under way, and batches that wait meanwhile share the next
  entry; a chunk has an entry by itself;
- waiting batches of a producer that has gone are not sent to a ledger; the outcome of its batches
  under way is still decided;
- the earlier chunks of a message are stored before its last chunk, in whichever ledgers, and the
  last chunk is sent with the offsets of the earlier chunks;
- with deduplication no batch is stored twice: seals have each producer's last sequence id.
Connections bound the bytes that wait (connection.py), step.py bounds the entries under way.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from spark_ledger import errors
from spark_ledger.broker.log.holds import SegmentHold
from spark_ledger.broker.log.partition import OpenEnd
from spark_ledger.broker.log.topic_commits import (
    PAUSE_S,
    PAUSE_S_MAX,
    TAKES_NO_ROWS,
    NextLedger,
    RollLimits,
    TopicCommits,
)
from spark_ledger.broker.produce.backlog import Backlog
from spark_ledger.broker.produce.opening import Openings, OpenLedger
from spark_ledger.broker.produce.step import (
    WriterSituation,
    WriterState,
    WriterStep,
    has_room,
    moved,
    next_step,
    state_after_leaving,
    stored_count,
)
from spark_ledger.broker.produce.waiting import PendingEntry, WaitingRun, sends_bytes
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic.commit.draft import RowKind
from spark_ledger.topic.commit.hand_over import HOLD_S
from spark_ledger.topic.commit.seal import Extent, closed_extent, seal_action
from spark_ledger.topic.log.segments import LiveSegment
from spark_ledger.topic.log.state import TopicState

ENTRY_BYTES_MAX = 1 << 20
"""Batches share an entry up to this size; a single batch may be larger."""
IDLE_S = 60.0
GIVEN_UP = "the broker gives this partition up"

_log = logging.getLogger(__name__)


def kind_of_rows(writer: "LiveWriter") -> RowKind:
    """The kind of the rows that come next: objects, if no producer sends other values."""
    has_bytes = writer.takes_bytes() or writer.backlog.run_counts.has_any(sends_bytes)
    return RowKind.BYTES if has_bytes else RowKind.OBJECTS


class LiveWriter:
    """The writer of partition `number`. `on_stored` gets each stored run, with its first offset."""

    def __init__(
        self,
        commits: TopicCommits,
        number: int,
        limits: RollLimits,
        on_stored: Callable[[int, WaitingRun], None],
        idle_s: float = IDLE_S,
    ) -> None:
        self.backlog = Backlog(on_stored, ENTRY_BYTES_MAX, commits.topic.policies.deduplication)
        self.takes_bytes: Callable[[], bool] = lambda: False  # whether a producer sends bytes
        self.open_end = OpenEnd()  # shared with the readers of the partition
        self._commits, self._number = commits, number
        self._limits, self._idle_s = limits, idle_s
        self._state = WriterState.NOTHING
        self._ledger: OpenLedger | None = None  # in state OPEN
        self._openings = Openings(commits, number, partial(kind_of_rows, self))
        self._wake, self._is_waiting = asyncio.Event(), False  # `_wait` waits for `_wake`
        self._task: asyncio.Task[None] | None = None
        self._used_s = 0.0  # the last time at which a batch waited or was under way
        self._closing = False

    async def is_fenced(self) -> bool:
        """Whether another process has fenced the open ledger, by the bookies that answer."""
        return self._ledger is not None and await self._ledger.writer.is_fenced()

    def append(self, run: WaitingRun) -> None:
        """Store the run after all runs that were appended before it."""
        if self._closing:
            self.backlog.add_late(run)
            if self._task is None:
                self.backlog.fail_late(errors.LedgerClosed(GIVEN_UP))
            return
        was_empty = not self.backlog.waiting
        self.backlog.add(run)
        if self.backlog.waiting and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())
        elif self.backlog.waiting and was_empty:
            self._wake.set()

    async def start(self) -> None:
        """Seal the segment that another owner left open, if the partition has one: then all rows of
        the partition are in commits. Raises errors.LedgerError, StoreError."""
        if (await self._commits.state()).partitions[self._number].live is not None:
            await self._open(seal_only=True)
        if self.backlog.deduplicates:
            state = await self._commits.state()
            self.backlog.begin(state.partitions[self._number].producers)

    def hand_over(self, ledger_id: int, opened: int, until_s: float) -> SegmentHold | None:
        """For a committer: stop the live segment of that ledger, if commit `opened` or a later
        commit opened the segment. The segment is held until `until_s` of the loop's clock, or until
        the last caller leaves the hold. None: the segment is not handed over."""
        live, asked = self.open_end.live, self._openings.asked
        before = asked.current
        hold = self._openings.ask(live, ledger_id, opened, until_s, new=not self._closing)
        if asked.current is not before:
            self._wake.set()
            if self._is_waiting and next_step(self._situation()) is WriterStep.STOP:
                self._stop()
        if hold is not None:
            hold.join()
        return hold

    async def until_decided(self, matches: Callable[[object], bool]) -> bool:
        """Wait until every run of the producers that match is stored or has failed for good, and
        no ledger is UNDECIDED. False if the work fails meanwhile, or the partition is given up:
        such runs may still be stored."""

        def is_undecided() -> bool:
            return self._state is WriterState.UNDECIDED and not self._closing

        if is_undecided() and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())
        return await self.backlog.until_decided(matches, is_undecided) and not self._closing

    async def close(self) -> None:
        """Store the appended batches, seal, and take no more. Batches that cannot be stored fail.
        If another owner has fenced the ledger, the CLOSED record decides which batches fail."""
        self._closing = True
        self._wake.set()
        if self._openings.asked.current is not None:
            self._openings.asked.current.end()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail(errors.LedgerClosed(GIVEN_UP))  # duplicates that came after the work had ended

    async def _work(self) -> None:
        try:
            await self._until_idle()
        except errors.LedgerError as error:
            self._fail(error)
        except asyncio.CancelledError:  # the caller of `close` gave up
            self._fail(errors.LedgerClosed(GIVEN_UP))
            raise
        except Exception as error:  # a defect: all waiting batches fail
            _log.exception("partition %d of topic %s ends", self._number, self._commits.topic.name)
            self._fail(errors.LedgerError(f"a partition's writer has failed: {error!r}"))
        finally:
            self._task = None
            if self._closing:  # every batch that came before has its outcome
                self.backlog.fail_late(errors.LedgerClosed(GIVEN_UP))

    async def _until_idle(self) -> None:
        """Take steps until there is nothing to do. Raises TAKES_NO_ROWS."""
        while (step := next_step(now := self._situation())) is not WriterStep.REST:
            if step is WriterStep.APPEND:
                self._send(now)
                await self._wait()
                if self._ledger is not None:  # None: the segment was handed over meanwhile
                    self._store_acknowledged()
            elif step is WriterStep.DECIDE:
                await self._decide()
            elif step is WriterStep.STOP:
                self._stop()
            elif step is WriterStep.LEAVE:
                await self._leave()
            elif await self._patiently_open():
                self._send(self._situation())  # before a committer may ask for the segment
                self._openings.asked.begin(self.open_end.live)
        self._openings.asked.begin(None)

    def _situation(self) -> WriterSituation:
        ledger, backlog, limits = self._ledger, self.backlog, self._limits
        if ledger is None:
            return WriterSituation(self._state, bool(backlog.waiting), self._closing)
        now_s = asyncio.get_running_loop().time()
        size = (ledger.counts.bytes, ledger.counts.entries)
        fragments_max = self._commits.client.ledgers.config.fragments_max
        return WriterSituation(
            self._state,
            bool(backlog.waiting),
            self._closing,
            under_way=len(backlog.under_way),
            asked=self._openings.asked.current is not None,
            broken=ledger.writer.failure is not None or backlog.is_broken,
            is_long=backlog.deduplicates and limits.is_long(self.open_end.live, *size),
            full=limits.reached(*size, now_s - ledger.opened_s)
            or len(ledger.writer.record.fragments) >= fragments_max,
            idle=now_s - self._used_s >= self._idle_s,
        )

    def _send(self, now: WriterSituation) -> None:
        """Send entries of the waiting runs, as long as there is room."""
        ledger, live = self._current()
        while has_room(now):
            runs = self.backlog.take_runs()
            try:
                entry = ledger.append(live, runs, self._commits.now_ms())
            except Exception:  # a defect: these runs fail with all waiting runs
                self.backlog.waiting.extendleft(reversed(runs.runs))
                raise
            entry.acked.add_done_callback(lambda _: self._wake.set())
            self.backlog.under_way.append(entry)
            now = self._situation()

    async def _wait(self) -> None:
        """Wait until an entry has its outcome, a run or a committer comes, or time is up."""
        ledger, _ = self._current()
        now_s, under_way = asyncio.get_running_loop().time(), bool(self.backlog.under_way)
        if under_way or self.backlog.waiting:
            self._used_s = now_s
        left_s = min(ledger.opened_s + self._limits.age_s, self._used_s + self._idle_s) - now_s
        self._is_waiting = True
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(None if under_way else max(0.001, left_s)):
                    await self._wake.wait()
        finally:
            self._is_waiting = False
        self._wake.clear()

    def _store_acknowledged(self) -> None:
        """Store the entries that are acknowledged, in order."""
        while (entry := self.backlog.next_stored()) is not None:
            self._store_entry(entry)
        if not self.backlog.is_broken:
            self.backlog.wake_waiters()

    def _store_entry(self, entry: PendingEntry) -> None:
        self._current()[0].counts.rowless_stored = entry.rowless
        self.backlog.store(entry, self.open_end.confirm(entry.rows))

    def _current(self) -> tuple[OpenLedger, LiveSegment]:
        """The open ledger and its live segment."""
        ledger, live = self._ledger, self.open_end.live
        assert ledger is not None and live is not None
        return ledger, live

    def _stop(self) -> None:
        """Hand over the segment; all its entries are stored. The next commit, by this owner or by a
        committer, seals the segment and opens another in the same ledger."""
        ledger, live = self._current()
        assert self.open_end.end == live.origin + ledger.counts.rows, "nothing is under way"
        stopped = ledger.as_next(live)
        self._end_segment(WriterState.STOPPED, ledger.writer.version, stopped.extent, stopped)

    async def _leave(self) -> None:
        """Close the ledger; all its entries are stored. The next commit seals its segment, and
        opens another ledger unless the partition was idle."""
        (ledger, live), after = self._current(), state_after_leaving(self._situation())
        try:
            closed = await ledger.close()
        except (errors.LedgerError, StoreError) as error:
            _log.warning("ledger %d is recovered: %s", live.ledger_id, error)
            await self._decide(after)
        else:
            extent = closed_extent(closed, ledger.counts.entries, ledger.counts.rows)
            self._end_segment(after, closed.version, extent)

    async def _decide(self, after: WriterState = WriterState.FAILED) -> None:
        """Recover a ledger that failed or was fenced. Entries up to the end in its CLOSED record
        are stored; the others have to be sent again (hazard 31). Raises Deposed."""
        (ledger, live), end = self._current(), self.open_end
        was_fenced = isinstance(ledger.writer.failure, errors.LedgerFenced)
        ledger.writer.abandon()
        closed = await self._commits.recovered(live.ledger_id, self._number, lambda: self._closing)
        rows = end.end - live.origin
        for _ in range(stored_count(end.last_entry + 1, live.ledger_id, closed.record, rows)):
            self._store_entry(self.backlog.under_way.popleft())
        self.backlog.take_back(end.last_entry + 1)
        if was_fenced:
            until_s = asyncio.get_running_loop().time() + HOLD_S
            self._openings.asked.hold = SegmentHold(live.ledger_id, live.opened, until_s)
        extent = closed_extent(closed, end.last_entry + 1, end.end - live.origin)
        self._end_segment(after, closed.version, extent)

    def _end_segment(
        self, after: WriterState, version: int, extent: Extent, stopped: NextLedger | None = None
    ) -> None:
        """End the open segment. `stopped`: the ledger, if it takes the next segment too."""
        ledger, live = self._current()
        counts = ledger.counts
        last_ids, rowless = self.backlog.take_ids(), counts.rowless_stored
        seal = seal_action(live, version, extent, counts.written_ms, last_ids, rowless)
        self._close(after, "its segment ended")
        self._openings.end(seal, stopped, goes_on=not self._closing)

    def _close(self, after: WriterState, cause: str) -> None:
        """Note that no segment is open any more."""
        self._state = moved(self._state, after, cause)
        self._ledger = None
        self.open_end.close()

    async def _patiently_open(self) -> bool:
        """Commit an opening, or only the seal of the last segment, as `next_step` decides. Tries
        again after a transient failure. Returns whether a segment is open."""
        pause_s = PAUSE_S
        while (step := next_step(self._situation())) is not WriterStep.REST:
            try:
                await self._open(seal_only=step is WriterStep.SEAL)
                return self._ledger is not None
            except TAKES_NO_ROWS:
                raise
            except (errors.LedgerFenced, errors.CommitOutcomeUnknown) as error:
                _log.warning("%s", error)  # the intent or the new segment has ended
                await self._openings.drop_next()
            except errors.TxnConflict as error:
                _log.info("another commit was faster: %s", error)
            except (errors.LedgerError, StoreError) as error:
                topic = self._commits.topic.name
                _log.warning("partition %d of %s stays closed: %s", self._number, topic, error)
                if self._closing:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
        return False

    async def _open(self, *, seal_only: bool) -> None:
        opened = await self._openings.commit(seal_only=seal_only)
        if opened is not None:
            self._begin_segment(*opened)
            return
        if self._state is not WriterState.NOTHING:
            self._close(WriterState.NOTHING, "the live segment is sealed")
        self.backlog.wake_waiters()
        await self._openings.drop_next()

    def _begin_segment(self, live: LiveSegment, state: TopicState, following: NextLedger) -> None:
        """Begin the segment that was opened and read back. All earlier segments are sealed, even
        those of other owners, and a segment that this owner left undecided."""
        self.backlog.begin(state.partitions[self._number].producers)
        self._state = moved(self._state, WriterState.OPEN, "its opening was read back")
        now_s = asyncio.get_running_loop().time()
        self._ledger = OpenLedger.of(following, now_s)
        self.open_end.open(live)
        if self.backlog.waiting:  # else the time until the partition is idle goes on
            self._used_s = now_s
        self.backlog.wake_waiters()

    def _fail(self, error: errors.LedgerError) -> None:
        """Fail all runs, waiting or under way; the bookies may still store runs under way."""
        if self._ledger is not None:
            self._ledger.writer.abandon()
            after = WriterState.UNDECIDED if self.backlog.under_way else WriterState.NOTHING
            self._close(after, str(error))
        self._openings.abandon()
        self.backlog.fail(error)
