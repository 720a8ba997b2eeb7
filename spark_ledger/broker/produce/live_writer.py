"""The open end of one partition in its owner's hands: batches go to the live ledger, in order.

    nothing open -> opening -> open -> stopped, rolling, idle or failed -> (opening | nothing open)

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
Connections bound the bytes that wait (connection.py); entries under way are bounded here.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from spark_ledger import errors
from spark_ledger.broker.owner.partition import OpenEnd
from spark_ledger.broker.owner.topic_commits import (
    PAUSE_S,
    PAUSE_S_MAX,
    TAKES_NO_ROWS,
    Next,
    RollLimits,
    SegmentHold,
    TopicCommits,
    stored_from,
)
from spark_ledger.broker.produce.waiting import (
    Changes,
    Chunk,
    Joining,
    PendingEntry,
    SequenceIds,
    Undecided,
    Waiting,
    parts_of_entry,
    taken,
    without,
)
from spark_ledger.ledger.client import VersionedRecord
from spark_ledger.ledger.writer import AsyncLedgerWriter
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic.commit.hand_over import HOLD_S, Handed
from spark_ledger.topic.commit.seal import Extent, ended_at, seal_of, sealed
from spark_ledger.topic.entry.message_batch import NONE, Share
from spark_ledger.topic.log.actions import ANY_OPENING, Action, SealLive
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.segments import LiveSegment
from spark_ledger.topic.log.state import TopicState, is_of

INFLIGHT_ENTRIES_MAX = 8
ENTRY_BYTES_MAX = 1 << 20
"""An entry takes more batches up to so many bytes; one batch may be larger."""
IDLE_S = 60.0
GIVEN_UP = "the broker gives this partition up"

_log = logging.getLogger(__name__)


class LiveWriter:
    """Of partition `number`. `stored` is called with the first offset of each run and the run, in
    order, before the run's own `stored`."""

    def __init__(
        self,
        commits: TopicCommits,
        number: int,
        limits: RollLimits,
        stored: Callable[[int, Waiting], None],
        idle_s: float = IDLE_S,
    ) -> None:
        self._commits, self._number, self._limits = commits, number, limits
        self._stored, self._idle_s = stored, idle_s
        self._fragments_max = commits.client.ledgers.config.fragments_max
        self._deduplicates = commits.topic.policies.deduplication
        self._ids, self._joining = SequenceIds(), Joining(ENTRY_BYTES_MAX)
        self._queue: deque[Waiting] = deque()
        self._late: deque[Waiting] = deque()  # what came while it was given up
        self._inflight: deque[PendingEntry] = deque()
        self._gone: dict[object, None] = {}  # producers that are, of which something is under way
        self._decided = Changes()  # something is stored, or fails
        self._runs = Undecided()  # of the three queues above
        self._wake, self._waits = asyncio.Event(), False  # in _wait, for something to happen
        self._task: asyncio.Task[None] | None = None
        self._writer: AsyncLedgerWriter | None = None
        self._intent: Intent | None = None  # that the ledger at hand was made under
        self._next: Next | None = None
        self.open_end = OpenEnd()
        """Shared with the readers of the partition."""
        self._reopened = False  # the ledger at hand had segments before the live one
        self._ended: SealLive | None = None
        self._asked: SegmentHold | None = None  # the segment at hand is to be handed over, or was
        self._asked_next: SegmentHold | None = None  # and the one that is read back next
        self._hold: SegmentHold | None = None
        self._rolls = False  # the next ledger is opened although nothing waits
        self._entries = 0  # of the ledger at hand, acknowledged and under way
        self._sent = 0  # rows of these
        self._rowless = self._rowless_confirmed = NONE  # of both, offsets without a row
        self._bytes, self._written_ms = 0, list[int]()
        self._opened_s = self._used_s = 0.0
        self._closing, self._ends = False, 0  # how often what may be stored has failed here
        self._unsealed = False  # an entry was under way then, and its ledger is not sealed yet

    async def is_fenced(self) -> bool:
        """Whether another process has fenced the ledger at hand, as far as its bookies answer."""
        return self._writer is not None and await self._writer.is_fenced()

    def append(self, run: Waiting) -> None:
        """Store the run after all that were appended before it."""
        if self._closing:
            self._late.append(run)
            self._runs.add((run,))
            if self._task is None:
                self._fail_late()
            return
        idle = not self._queue
        new = self._ids.new_of(run) if self._deduplicates else (run,)
        self._queue.extend(new)
        self._runs.add(new)
        if not self._queue:
            return
        if self._task is None:
            self._begin()
        elif idle:
            self._wake.set()

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work())

    async def start(self) -> None:
        """Seal what another owner left open, if it did: then all its rows are in commits. Raises
        as `seal.sealed` and a commit."""
        if (await self._commits.state()).partitions[self._number].live is not None:
            await self._open_or_seal(seal_only=True)
        if self._deduplicates:
            self._ids.begin((await self._commits.state()).partitions[self._number].producers)

    def hand_over(self, ledger_id: int, opened: int, until_s: float) -> SegmentHold | None:
        """Stop the live segment that commit `opened`, or a later one, began in that ledger, for a
        committer, and hold until `until_s` of the loop's clock, or until the last committer leaves.
        None if the segment is not to be handed over. The caller leaves the hold."""
        asked, live, following = self._asked, self.open_end.live, self._next
        if asked is None and live is not None:
            if live.ledger_id != ledger_id or self._closing:
                return None
            asked = self._asked = SegmentHold(ledger_id, live.opened, until_s)
            self._wake.set()
            if self._waits and not self._inflight and not self._broken():
                self._stop()
        elif following is not None and (asked is None or asked.opened < opened):
            new = self._asked_next is None and following.writer.ledger_id == ledger_id
            if new and not self._closing:
                self._asked_next = SegmentHold(ledger_id, opened, until_s)
            asked = self._asked_next
        if asked is None or asked.ledger_id != ledger_id:
            return None
        asked.join()
        return asked

    def drop(self, gone: Iterable[object]) -> None:
        """These producers have gone: what they sent fails, unless it is under way and is stored."""
        self._gone.update(dict.fromkeys(gone))
        if not self._gone:
            return
        ids = self._ids if self._deduplicates else None
        self._queue, out = without(self._queue, self._gone, ids, self._inflight)
        self._recount()
        sent = [run.producer for entry in self._inflight for run in entry.runs]
        self._gone = {one: None for one in sent if one in self._gone}
        for run in out:
            run.failed(errors.LedgerClosed("its producer has gone"))
        self._decided.tell()

    def _recount(self) -> None:
        self._runs.count(*(entry.runs for entry in self._inflight), self._queue, self._late)

    async def settled(self, of: Callable[[object], bool]) -> bool:
        """Whether nothing more of such producers is stored, once nothing waits or is under way, and
        the ledger is sealed to which something was under way when the work failed. False where it
        fails now, or the partition is given up."""
        ends = self._ends
        if self._unsealed and self._task is None and not self._closing:
            self._begin()

        def is_decided() -> bool:
            is_open = self._unsealed and not self._closing
            return self._ends != ends or not (is_open or self._runs.has_any(of))

        await self._decided.until(is_decided)
        return not self._closing and ends == self._ends

    def last_sequence_id(self, producer_name: str) -> int:
        """The last that is stored, or on its way, of a topic with deduplication; -1 of none."""
        return self._ids.last(producer_name)

    async def close(self) -> None:
        """Store what was appended, seal, and take no more. What cannot be stored fails: where
        another owner has fenced the ledger, after its CLOSED record has decided what is."""
        self._closing = True
        self._wake.set()
        if self._asked is not None:
            self._asked.end()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        self._end(errors.LedgerClosed(GIVEN_UP))  # what came again after the work had ended

    # -- the work ----------------------------------------------------------------------------

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
            if self._closing:
                self._fail_late()

    def _fail_late(self) -> None:
        """What came after the last batch that is taken fails after that has its receipt: its
        producer is sent away, and sends again what has none."""
        while self._late:
            self._late.popleft().failed(errors.LedgerClosed(GIVEN_UP))
        self._recount()
        self._decided.tell()

    async def _until_idle(self) -> None:
        """Raises TAKES_NO_ROWS."""
        while True:
            if self._writer is None:
                await self._patiently_open()
                if self._writer is None and not self._queue:
                    self._take_asked()
                    return
                if self._writer is None:  # something came while the last ledger was sealed
                    continue
            self._send()
            self._take_asked()
            await self._wait()
            if self._writer is None:  # handed over meanwhile
                continue
            self._settle()
            if self._broken():
                await self._decide()
            elif not self._inflight and (self._asked is not None or self._is_long()):
                self._stop()
            elif not self._inflight and self._over():
                await self._leave()

    def _take_asked(self) -> None:
        """A committer that asked before the segment was read back comes after what waited then."""
        live, asked, self._asked_next = self.open_end.live, self._asked_next, None
        if asked is not None and live is not None and asked.ledger_id == live.ledger_id:
            asked.opened, self._asked = live.opened, asked
        elif asked is not None:
            asked.hand(None)

    def _send(self) -> None:
        """Entries of what waits, as long as there is room and the ledger is not to be left."""
        while self._queue and len(self._inflight) < INFLIGHT_ENTRIES_MAX and not self._full():
            runs, size, rows = taken(self._queue, self._joining.bytes_max)
            try:
                self._send_entry(runs, size, rows)
            except Exception:  # a defect: these fail with all that waits
                self._queue.extendleft(reversed(runs))
                raise

    def _send_entry(self, runs: list[Waiting], size: int, rows: int) -> None:
        writer, live = self._writer, self.open_end.live
        assert writer is not None and live is not None
        now_ms, offset = self._commits.now_ms(), live.origin + self._sent
        share = Share(self._number, rows, offset if self._reopened else self._sent)
        chunk, rowless = runs[0].chunk, self._rowless
        if chunk is not None:
            runs[0].sent(offset)
            rowless = rowless.with_one(offset) if chunk is Chunk.EARLIER else rowless
        parts = parts_of_entry(runs, size, share, now_ms, rowless, at_offset=self._reopened)
        acked = writer.append(parts, rows)
        if acked.done() and isinstance(failure := acked.exception(), errors.LedgerError):
            writer.abandon(failure)  # else the entries after it had its id
        acked.add_done_callback(lambda _: self._wake.set())
        self._inflight.append(PendingEntry(runs, rows, rowless, acked))
        self._entries += 1
        self._sent += rows
        self._rowless = rowless
        self._bytes += size
        self._written_ms = [(self._written_ms or [now_ms])[0], now_ms]

    async def _wait(self) -> None:
        """Until something was stored or refused or came, or the ledger is to be left."""
        loop = asyncio.get_running_loop()
        if self._inflight or self._queue:
            self._used_s = loop.time()
        if self._over() and not self._inflight:
            return
        left_s = min(self._opened_s + self._limits.age_s, self._used_s + self._idle_s) - loop.time()
        self._waits = True
        try:
            async with asyncio.timeout(max(0.001, left_s) if not self._inflight else None):
                await self._wake.wait()
        except TimeoutError:
            pass
        finally:
            self._waits = False
        self._wake.clear()

    def _settle(self) -> None:
        """What was acknowledged, in order, is stored."""
        inflight = self._inflight
        while inflight and inflight[0].acked.done():
            if inflight[0].acked.cancelled() or inflight[0].acked.exception() is not None:
                return
            self._is_stored(inflight.popleft())
        self._decided.tell()

    def _is_stored(self, entry: PendingEntry) -> None:
        offset = self.open_end.end
        self._runs.remove(entry.runs)
        self.open_end.confirm(entry.rows)
        self._rowless_confirmed = entry.rowless
        for run in entry.runs:
            self._stored(offset, run)
            run.stored(offset)
            offset += run.messages
            if self._deduplicates:
                self._ids.note(run)

    def _broken(self) -> bool:
        failed = self._writer is not None and self._writer.failure is not None
        return failed or (bool(self._inflight) and self._inflight[0].acked.done())

    def _full(self) -> bool:
        assert self._writer is not None
        age_s = asyncio.get_running_loop().time() - self._opened_s
        reached = self._limits.reached(self._bytes, self._entries, age_s)
        many = len(self._writer.record.fragments) >= self._fragments_max
        return self._asked is not None or reached or many or self._is_long()

    def _is_long(self) -> bool:
        return self._deduplicates and self._limits.is_long(
            self.open_end.live, self._bytes, self._entries
        )

    def _over(self) -> bool:
        """Whether the ledger is to be left once nothing is under way."""
        return self._full() or (not self._queue and (self._is_idle() or self._closing))

    def _is_idle(self) -> bool:
        return asyncio.get_running_loop().time() - self._used_s >= self._idle_s

    # -- the end of a segment ------------------------------------------------------------------

    def _stop(self) -> None:
        """Hand the segment over, whose entries are all stored. The next commit, of this owner or of
        a committer, has its seal and the opening of another segment in the same ledger."""
        writer, live, intent = self._writer, self.open_end.live, self._intent
        assert writer is not None and live is not None and intent is not None
        assert self.open_end.end == live.origin + self._sent, "nothing is under way"
        has = Extent(self._entries, self._sent, writer.confirmed_bytes)
        self._next = Next(writer, intent, has, live.opened)
        self._rolls = not self._closing
        self._forget(writer.version, has)
        self._hand()

    async def _leave(self) -> None:
        """Close the ledger, of which all is stored; its seal is committed next, and where batches
        came lately the next ledger's opening with it."""
        writer = self._writer
        assert writer is not None
        self._rolls = not (self._is_idle() or self._closing)
        try:
            record = await writer.close()
        except (errors.LedgerError, StoreError) as error:
            _log.warning("ledger %d is recovered: %s", writer.ledger_id, error)
            await self._decide()
            return
        closed = ended_at(VersionedRecord(record, writer.version), self._entries, self._sent)
        self._forget(writer.version, closed)
        self._hand()

    async def _decide(self) -> None:
        """The ledger failed, or was fenced: what its CLOSED record has is stored, and the rest is
        to be sent again (hazard 31). Raises Deposed."""
        writer, live = self._writer, self.open_end.live
        assert writer is not None and live is not None
        fenced = isinstance(writer.failure, errors.LedgerFenced)
        writer.abandon()
        ledger_id = writer.ledger_id
        recovered = await self._commits.recovered(ledger_id, self._number, lambda: self._closing)
        first = self._entries - len(self._inflight)
        confirmed = self.open_end.end - live.origin
        there = stored_from(first, ledger_id, recovered.record, confirmed)
        for _ in range(there):
            self._is_stored(self._inflight.popleft())
        refused = self._joining.refused(self._inflight, first + there)
        for entry in reversed(self._inflight):
            self._queue.extendleft(reversed(entry.runs))
            self._sent -= entry.rows
        self._entries = first + there
        self._inflight.clear()
        self.drop(refused)  # and those of what was under way
        self._forget(recovered.version, ended_at(recovered, self._entries, self._sent))
        if fenced:
            until_s = asyncio.get_running_loop().time() + HOLD_S
            self._hold = SegmentHold(live.ledger_id, live.opened, until_s)
        self._hand()

    def _forget(self, version: int, has: Extent) -> None:
        """The segment at hand is over; its seal goes into the next commit."""
        live = self.open_end.live
        assert live is not None
        ids_and_rowless = (self._ids.of_segment, self._rowless_confirmed)
        self._ended = seal_of(live, version, has, self._written_ms, *ids_and_rowless)
        self._writer = None
        self.open_end.close()
        self._start_over()

    def _start_over(self) -> None:
        """Nothing is counted of the segment that comes next."""
        self._ids.of_segment = {}
        self._written_ms = []
        self._entries = self._sent = self._bytes = 0
        self._rowless = self._rowless_confirmed = NONE

    def _hand(self) -> None:
        """Answer the committers with the seal of the segment and the opening of the next one in the
        same ledger; without an opening if the ledger is CLOSED."""
        asked, ended = self._asked, self._ended
        if asked is None or ended is None:
            return
        opened = None
        if self._next is not None and self._rolls and self._number in self._commits.epochs:
            opened = self._commits.opening(self._number, self._next)
        self._hold = asked
        asked.hand(Handed(self._commits.topic.id, ended, opened))

    # -- opening -----------------------------------------------------------------------------

    async def _patiently_open(self) -> None:
        """Open a ledger if something waits, seal one that is not decided; retry what passes."""
        pause_s = PAUSE_S
        while self._queue or self._ended is not None or self._unsealed:
            try:
                rolls = self._rolls and not self._closing
                await self._open_or_seal(seal_only=not (self._queue or rolls))
                return
            except TAKES_NO_ROWS:
                raise
            except (errors.LedgerFenced, errors.CommitOutcomeUnknown) as error:
                _log.warning("%s", error)  # the intent ended, or others ended what was opened
                await self._drop_next()
            except errors.TxnConflict as error:
                _log.info("another was faster: %s", error)
            except (errors.LedgerError, StoreError) as error:
                topic = self._commits.topic.name
                _log.warning("partition %d of %s stays closed: %s", self._number, topic, error)
                if self._closing:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    async def _open_or_seal(self, *, seal_only: bool) -> None:
        """One commit: the seal of what is live, and with it the opening of what comes next. Then
        what is live is read back."""
        try:
            state = await self._held()
        finally:
            self._asked = self._hold = None
        live = state.partitions[self._number].live
        if live is not None and self._is_next(live):
            self._goes_on(live, state)
            return
        owned = await self._commits.check_owner(self._number)
        actions: list[Action] = []
        if live is not None:
            ended = self._ended
            if ended is None or not is_of(ended, live):
                ended = await sealed(self._commits.client.ledgers, live)
            actions.append(ended)
        if seal_only:
            if actions:
                await self._commits.commit(actions)
            self._ended = None
            self._is_sealed()
            await self._drop_next()
            return
        following = await self._next_ledger()
        opened = self._commits.opening(self._number, following)
        await self._commits.commit([*actions, opened], following.intent, owned)
        state = await self._commits.state()
        live = state.partitions[self._number].live
        if live is None or not self._is_next(live):
            raise errors.TxnConflict(f"ledger {opened.ledger_id} is not live any more")
        self._goes_on(live, state)

    async def _held(self) -> TopicState:
        """The topic, not older than this call; during a hold, once the held segment is over: mostly
        by a commit that this process hears of without asking."""
        hold = self._hold
        state = None if hold is None else await self._commits.past(self._number, hold)
        return state or await self._commits.state()

    def _is_sealed(self) -> None:
        """The ledger to which an entry was under way when the work failed."""
        self._unsealed = False
        self._decided.tell()

    def _is_next(self, live: LiveSegment) -> bool:
        return self._next is not None and self._next.is_open_in(live)

    def _goes_on(self, live: LiveSegment, state: TopicState) -> None:
        """The opening of the next ledger was read back. All before it is sealed: ledgers of others
        too, that this owner did not know of, or whose end it left undecided."""
        if self._deduplicates:
            self._ids.begin(state.partitions[self._number].producers)
            self._queue = self._ids.new_in(self._queue)
            self._recount()
        self._is_sealed()
        following = self._next
        assert following is not None and live.first_entry == following.has.entries
        self._writer, self._intent = following.writer, following.intent
        self._ended = self._next = None
        self._reopened = following.after != ANY_OPENING
        has = following.has
        self.open_end.open(live)
        self._entries, self._sent, self._bytes = has.entries, has.rows, has.bytes
        now_s = asyncio.get_running_loop().time()
        if not self._reopened:
            self._opened_s = now_s
        if self._queue:  # else a ledger that rolls before IDLE_S is over would roll for ever
            self._used_s = now_s
        self._rolls = False

    async def _next_ledger(self) -> Next:
        """One of the topic's intent: that which stopped, or of a try before, else a new one."""
        intent = await self._commits.intent()
        following = self._next
        if following is not None and following.is_usable(intent):
            return following
        await self._drop_next()
        self._next = Next(*await self._commits.new_ledger())
        return self._next

    async def _drop_next(self) -> None:
        if self._next is not None:
            writer, self._next = self._next.writer, None
            with suppress(errors.LedgerError, StoreError):
                await writer.close()

    def _end(self, error: errors.LedgerError) -> None:
        """Whatever waits has failed; what was sent may be stored all the same."""
        if self._writer is not None:
            self._writer.abandon()
        self._writer = None
        self.open_end.close()
        for asked in (self._asked, self._asked_next):
            if asked is not None:
                asked.hand(None)
        self._asked = self._asked_next = self._hold = None
        if self._next is not None and self._next.after != ANY_OPENING:
            self._next.writer.abandon()
            self._next = None
        self._unsealed = self._unsealed or bool(self._inflight)
        waiting = [run for entry in self._inflight for run in entry.runs]
        waiting += [*self._queue, *self._ids.take_again()]
        for entry in self._inflight:
            entry.drop()
        self._inflight.clear()
        self._queue.clear()
        self._recount()
        self._ends += 1
        self._start_over()
        self._ids.doubt()
        for run in waiting:
            run.failed(error)
        self._decided.tell()
