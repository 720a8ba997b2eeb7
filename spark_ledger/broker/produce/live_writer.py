"""The open end of one partition in its owner's hands: batches go to the live ledger, in order.

step.py decides what comes next and has the states of a segment; backlog.py has what waits and what
is under way; opening.py has the ledger at hand and the commit between two segments. LiveWriter does
what is decided.

Always true:
- no batch is sent before this owner's own `open` was read back in the folded log (hazard 28);
- a batch is stored once Qa bookies have synced it and all before it; it then has the offset it will
  always have;
- batches sent to a ledger that failed or was fenced are decided by its CLOSED record alone: those
  in it are stored, the others go to the next ledger, once and in order (hazard 31);
- the owner hands the live segment to a committer that asks for it: the owner stops, and the commit
  seals the segment and reopens its ledger; if no commit comes before the hold ends, this owner does
  both, so that a late commit is refused. A partition whose ledger was fenced instead is reopened
  after the commit of the fencing process, or after HOLD_S (hazard 29);
- each segment takes what waits before it is handed over, so producers go on between two commits;
- an entry of a segment that is not its ledger's first has its offset, for readers of an old log;
- seal + open is one commit; a partition without batches for IDLE_S has no ledger open;
- batches share an entry while INFLIGHT_ENTRIES_MAX are under way; a chunk has one by itself;
- waiting batches of a producer that has gone are not sent to a ledger; those under way are decided;
- the chunks of a message are stored before its last one, whichever ledgers they go to, and the last
  one is sent with the offsets of the others;
- with deduplication no batch is stored twice: seals have each producer's last sequence id.
Connections bound the bytes that wait (connection.py), step.py the entries under way.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from spark_ledger import errors
from spark_ledger.broker.owner.holds import SegmentHold
from spark_ledger.broker.owner.partition import OpenEnd
from spark_ledger.broker.owner.topic_commits import (
    PAUSE_S,
    PAUSE_S_MAX,
    TAKES_NO_ROWS,
    Next,
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
    stored_from,
)
from spark_ledger.broker.produce.waiting import PendingEntry, Waiting
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic.commit.hand_over import HOLD_S
from spark_ledger.topic.commit.seal import Extent, ended_at, seal_of
from spark_ledger.topic.log.segments import LiveSegment
from spark_ledger.topic.log.state import TopicState

ENTRY_BYTES_MAX = 1 << 20
"""An entry takes more batches up to so many bytes; one batch may be larger."""
IDLE_S = 60.0
GIVEN_UP = "the broker gives this partition up"

_log = logging.getLogger(__name__)


class LiveWriter:
    """The writer of partition `number`. `stored` is called as Backlog calls it."""

    def __init__(
        self,
        commits: TopicCommits,
        number: int,
        limits: RollLimits,
        stored: Callable[[int, Waiting], None],
        idle_s: float = IDLE_S,
    ) -> None:
        self.backlog = Backlog(stored, ENTRY_BYTES_MAX, commits.topic.policies.deduplication)
        self.open_end = OpenEnd()
        """Shared with the readers of the partition."""
        self._commits, self._number = commits, number
        self._limits, self._idle_s = limits, idle_s
        self._state = WriterState.NOTHING
        self._ledger: OpenLedger | None = None  # in state OPEN
        self._openings = Openings(commits, number)
        self._wake, self._waits = asyncio.Event(), False  # in _wait, for something to happen
        self._task: asyncio.Task[None] | None = None
        self._used_s = 0.0  # when something waited or was under way last
        self._closing = False

    async def is_fenced(self) -> bool:
        """Whether another process has fenced the ledger at hand, as far as its bookies answer."""
        return self._ledger is not None and await self._ledger.writer.is_fenced()

    def append(self, run: Waiting) -> None:
        """Store the run after all that were appended before it."""
        if self._closing:
            self.backlog.add_late(run)
            if self._task is None:
                self.backlog.fail_late(errors.LedgerClosed(GIVEN_UP))
            return
        idle = not self.backlog.waiting
        self.backlog.add(run)
        if self.backlog.waiting and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())
        elif self.backlog.waiting and idle:
            self._wake.set()

    async def start(self) -> None:
        """Seal what another owner left open, if it did: then all its rows are in commits. Raises
        as `seal.sealed` and a commit."""
        if (await self._commits.state()).partitions[self._number].live is not None:
            await self._open(seal_only=True)
        if self.backlog.deduplicates:
            state = await self._commits.state()
            self.backlog.begin(state.partitions[self._number].producers)

    def hand_over(self, ledger_id: int, opened: int, until_s: float) -> SegmentHold | None:
        """Stop the live segment that commit `opened`, or a later one, began in that ledger, for a
        committer, and hold until `until_s` of the loop's clock, or until the last committer leaves.
        None if the segment is not to be handed over. The caller leaves the hold."""
        before, asked = self._openings.asked.now, self._openings.asked
        given = (self.open_end.live, ledger_id, opened, until_s)
        hold = self._openings.ask(*given, new=not self._closing)
        if asked.now is not before:
            self._wake.set()
            if self._waits and next_step(self._situation()) is WriterStep.STOP:
                self._stop()
        if hold is not None:
            hold.join()
        return hold

    async def settled(self, of: Callable[[object], bool]) -> bool:
        """Whether nothing more of such producers is stored, once nothing waits or is under way, and
        the ledger is sealed to which something was under way when the work failed. False where it
        fails now, or the partition is given up."""

        def is_open() -> bool:
            return self._state is WriterState.UNDECIDED and not self._closing

        if is_open() and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())
        return await self.backlog.settled(of, is_open) and not self._closing

    async def close(self) -> None:
        """Store what was appended, seal, and take no more. What cannot be stored fails: where
        another owner has fenced the ledger, after its CLOSED record has decided what is."""
        self._closing = True
        self._wake.set()
        if self._openings.asked.now is not None:
            self._openings.asked.now.end()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        self._end(errors.LedgerClosed(GIVEN_UP))  # what came again after the work had ended

    async def _work(self) -> None:
        try:
            await self._until_idle()
        except errors.LedgerError as error:
            self._end(error)
        except asyncio.CancelledError:  # `close` waits no longer
            self._end(errors.LedgerClosed(GIVEN_UP))
            raise
        except Exception as error:  # a defect: what waits fails with it
            _log.exception("partition %d of topic %s ends", self._number, self._commits.topic.name)
            self._end(errors.LedgerError(f"a partition's writer has failed: {error!r}"))
        finally:
            self._task = None
            if self._closing:  # after the last batch that is taken has its receipt
                self.backlog.fail_late(errors.LedgerClosed(GIVEN_UP))

    async def _until_idle(self) -> None:
        """Raises TAKES_NO_ROWS."""
        while (step := next_step(now := self._situation())) is not WriterStep.REST:
            if step is WriterStep.APPEND:
                self._send(now)
                await self._wait()
                if self._ledger is not None:  # else it was handed over meanwhile
                    self._settle()
            elif step is WriterStep.DECIDE:
                await self._decide()
            elif step is WriterStep.STOP:
                self._stop()
            elif step is WriterStep.LEAVE:
                await self._leave()
            elif await self._patiently_open():
                self._send(
                    self._situation()
                )  # before a committer that asked meanwhile gets the segment
                self._openings.asked.begin(self.open_end.live)
        self._openings.asked.begin(None)

    def _situation(self) -> WriterSituation:
        ledger, backlog, limits = self._ledger, self.backlog, self._limits
        if ledger is None:
            return WriterSituation(self._state, bool(backlog.waiting), self._closing)
        now_s, has = asyncio.get_running_loop().time(), (ledger.counts.bytes, ledger.counts.entries)
        fragments_max = self._commits.client.ledgers.config.fragments_max
        return WriterSituation(
            self._state,
            bool(backlog.waiting),
            self._closing,
            under_way=len(backlog.under_way),
            asked=self._openings.asked.now is not None,
            broken=ledger.writer.failure is not None or backlog.is_broken,
            is_long=backlog.deduplicates and limits.is_long(self.open_end.live, *has),
            full=limits.reached(*has, now_s - ledger.opened_s)
            or len(ledger.writer.record.fragments) >= fragments_max,
            idle=now_s - self._used_s >= self._idle_s,
        )

    def _send(self, now: WriterSituation) -> None:
        """Entries of what waits, as long as there is room and the ledger is not to be left."""
        ledger, live = self._at_hand()
        while has_room(now):
            taken = self.backlog.next_entry()
            try:
                entry = ledger.append(live, taken, self._commits.now_ms())
            except Exception:  # a defect: these fail with all that waits
                self.backlog.waiting.extendleft(reversed(taken.runs))
                raise
            entry.acked.add_done_callback(lambda _: self._wake.set())
            self.backlog.under_way.append(entry)
            now = self._situation()

    async def _wait(self) -> None:
        """Until something was stored or refused or came, or the ledger is to be left."""
        ledger, _ = self._at_hand()
        now_s, under_way = asyncio.get_running_loop().time(), bool(self.backlog.under_way)
        if under_way or self.backlog.waiting:
            self._used_s = now_s
        left_s = min(ledger.opened_s + self._limits.age_s, self._used_s + self._idle_s) - now_s
        self._waits = True
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(None if under_way else max(0.001, left_s)):
                    await self._wake.wait()
        finally:
            self._waits = False
        self._wake.clear()

    def _settle(self) -> None:
        """What was acknowledged, in order, is stored."""
        while (entry := self.backlog.next_stored()) is not None:
            self._is_stored(entry)
        if not self.backlog.is_broken:
            self.backlog.tell()

    def _is_stored(self, entry: PendingEntry) -> None:
        self._at_hand()[0].counts.rowless_stored = entry.rowless
        self.backlog.store(entry, self.open_end.confirm(entry.rows))

    def _at_hand(self) -> tuple[OpenLedger, LiveSegment]:
        ledger, live = self._ledger, self.open_end.live
        assert ledger is not None and live is not None
        return ledger, live

    def _stop(self) -> None:
        """Hand the segment over, whose entries are all stored. The next commit, of this owner or of
        a committer, has its seal and the opening of another segment in the same ledger."""
        ledger, live = self._at_hand()
        assert self.open_end.end == live.origin + ledger.counts.rows, "nothing is under way"
        stopped = ledger.stopped(live)
        self._ends(WriterState.STOPPED, ledger.writer.version, stopped.has, stopped)

    async def _leave(self) -> None:
        """Close the ledger, of which all is stored; its seal is committed next, and where batches
        came lately the next ledger's opening with it."""
        (ledger, live), left = self._at_hand(), state_after_leaving(self._situation())
        try:
            closed = await ledger.close()
        except (errors.LedgerError, StoreError) as error:
            _log.warning("ledger %d is recovered: %s", live.ledger_id, error)
            await self._decide(left)
        else:
            has = ended_at(closed, ledger.counts.entries, ledger.counts.rows)
            self._ends(left, closed.version, has)

    async def _decide(self, after: WriterState = WriterState.FAILED) -> None:
        """The ledger failed, or was fenced: what its CLOSED record has is stored, and the rest is
        to be sent again (hazard 31). Raises Deposed."""
        (ledger, live), end = self._at_hand(), self.open_end
        fenced = isinstance(ledger.writer.failure, errors.LedgerFenced)
        ledger.writer.abandon()
        closed = await self._commits.recovered(live.ledger_id, self._number, lambda: self._closing)
        rows = end.end - live.origin
        for _ in range(stored_from(end.last_entry + 1, live.ledger_id, closed.record, rows)):
            self._is_stored(self.backlog.under_way.popleft())
        self.backlog.take_back(end.last_entry + 1)
        if fenced:
            until_s = asyncio.get_running_loop().time() + HOLD_S
            self._openings.asked.hold = SegmentHold(live.ledger_id, live.opened, until_s)
        has = ended_at(closed, end.last_entry + 1, end.end - live.origin)
        self._ends(after, closed.version, has)

    def _ends(
        self, after: WriterState, version: int, has: Extent, stopped: Next | None = None
    ) -> None:
        """The segment at hand is over. `stopped`: its ledger, if that takes the next one."""
        ledger, live = self._at_hand()
        counts = ledger.counts
        about = (counts.written_ms, self.backlog.take_ids(), counts.rowless_stored)
        seal = seal_of(live, version, has, *about)
        self._close(after, "its segment ended")
        self._openings.end(seal, stopped, goes_on=not self._closing)

    def _close(self, after: WriterState, cause: str) -> None:
        """No segment is open any more."""
        self._state = moved(self._state, after, cause)
        self._ledger = None
        self.open_end.close()

    async def _patiently_open(self) -> bool:
        """Open a ledger if something waits, seal one that is not decided; retry what passes.
        Returns whether a segment is open."""
        pause_s = PAUSE_S
        while (step := next_step(self._situation())) is not WriterStep.REST:
            try:
                await self._open(seal_only=step is WriterStep.SEAL)
                return self._ledger is not None
            except TAKES_NO_ROWS:
                raise
            except (errors.LedgerFenced, errors.CommitOutcomeUnknown) as error:
                _log.warning("%s", error)  # the intent ended, or others ended what was opened
                await self._openings.drop_next()
            except errors.TxnConflict as error:
                _log.info("another was faster: %s", error)
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
            self._goes_on(*opened)
            return
        if self._state is not WriterState.NOTHING:
            self._close(WriterState.NOTHING, "what was live is sealed")
        self.backlog.tell()
        await self._openings.drop_next()

    def _goes_on(self, live: LiveSegment, state: TopicState, following: Next) -> None:
        """The opening of the next ledger was read back. All before it is sealed: ledgers of others
        too, that this owner did not know of, or whose end it left undecided."""
        self.backlog.begin(state.partitions[self._number].producers)
        self._state = moved(self._state, WriterState.OPEN, "its opening was read back")
        now_s = asyncio.get_running_loop().time()
        self._ledger = OpenLedger.of(following, now_s)
        self.open_end.open(live)
        if self.backlog.waiting:  # else a ledger that rolls before IDLE_S would roll for ever
            self._used_s = now_s
        self.backlog.tell()

    def _end(self, error: errors.LedgerError) -> None:
        """Whatever waits has failed; what was sent may be stored all the same."""
        if self._ledger is not None:
            self._ledger.writer.abandon()
            after = WriterState.UNDECIDED if self.backlog.under_way else WriterState.NOTHING
            self._close(after, str(error))
        self._openings.abandon()
        self.backlog.fail(error)
