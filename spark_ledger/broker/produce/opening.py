"""The ledger of a partition's live segment, and the commit between two segments: the seal of the
last one with the opening of the next.

Always true: no segment is open here before its opening was read back in the folded log (hazard 28);
what is live in the log and is not this owner's next segment is sealed in the commit that opens the
next one; a ledger that stopped takes the next segment if the topic's intent is still that under
which it was made, else it is closed.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from spark_ledger import errors
from spark_ledger.broker.owner.holds import AskedSegments, SegmentHold
from spark_ledger.broker.owner.topic_commits import Next, TopicCommits
from spark_ledger.broker.produce.step import LedgerCounts
from spark_ledger.broker.produce.waiting import Chunk, EntryRuns, PendingEntry, parts_of_entry
from spark_ledger.ledger.client import VersionedRecord
from spark_ledger.ledger.writer import AsyncLedgerWriter
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic.commit.hand_over import HandOver
from spark_ledger.topic.commit.seal import Extent, seal_live_segment
from spark_ledger.topic.entry.message_batch import Share
from spark_ledger.topic.log.actions import ANY_OPENING, Action, SealLive
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.segments import LiveSegment
from spark_ledger.topic.log.state import TopicState, is_seal_of


@dataclass(slots=True)
class OpenLedger:
    """The ledger of the live segment. `reopened`: it had segments before this one; `opened_s`: when
    its first one was opened."""

    writer: AsyncLedgerWriter
    intent: Intent
    counts: LedgerCounts
    opened_s: float
    reopened: bool

    @staticmethod
    def of(following: Next, now_s: float) -> "OpenLedger":
        """The ledger `following`, after its opening was read back."""
        has, reopened = following.extent, following.after != ANY_OPENING
        opened_s = following.opened_s if reopened else now_s
        counts = LedgerCounts(has.entries, has.rows, has.bytes)
        return OpenLedger(following.writer, following.intent, counts, opened_s, reopened)

    def append(self, live: LiveSegment, taken: EntryRuns, now_ms: int) -> PendingEntry:
        """Send an entry of these runs."""
        runs, size, rows = taken
        counts, writer = self.counts, self.writer
        offset = live.origin + counts.rows
        share = Share(live.partition, rows, offset if self.reopened else counts.rows)
        chunk, rowless = runs[0].chunk, counts.rowless
        if chunk is not None:
            runs[0].sent(offset)
            rowless = rowless.with_next(offset) if chunk is Chunk.EARLIER else rowless
        parts = parts_of_entry(runs, size, share, now_ms, rowless, at_offset=self.reopened)
        acked = writer.append(parts, rows)
        if acked.done() and isinstance(failure := acked.exception(), errors.LedgerError):
            writer.abandon(failure)  # else the entries after it had its id
        counts.add(rows, size, rowless, now_ms)
        return PendingEntry(runs, rows, rowless, acked)

    async def close(self) -> VersionedRecord:
        """Raises as AsyncLedgerWriter.close."""
        return VersionedRecord(await self.writer.close(), self.writer.version)

    def stopped(self, live: LiveSegment) -> Next:
        """The ledger as it takes the next segment; all entries are acknowledged."""
        has = Extent(self.counts.entries, self.counts.rows, self.writer.confirmed_bytes)
        return Next(self.writer, self.intent, has, live.opened, self.opened_s)


class Opened(NamedTuple):
    """A segment of this owner that is live in that state of the topic, and its ledger."""

    live: LiveSegment
    state: TopicState
    following: Next


class Openings:
    """Of partition `number`; `asked` are the committers that commit past its live segment."""

    def __init__(self, commits: TopicCommits, number: int) -> None:
        self.asked = AskedSegments()
        self._commits = commits
        self._number = number
        self._ended: SealLive | None = None  # of the last segment, until it is in a commit
        self._next: Next | None = None

    def ask(
        self, live: LiveSegment | None, ledger_id: int, opened: int, until_s: float, *, new: bool
    ) -> SegmentHold | None:
        """The hold of a committer that commits past the segment that commit `opened`, or a later
        one, began in that ledger; None without such a hold, where no
        `new` one begins."""
        asked, following = self.asked.current, self._next
        if asked is None and live is not None:
            if live.ledger_id == ledger_id and new:
                asked = self.asked.current = SegmentHold(ledger_id, live.opened, until_s)
        elif following is not None and (asked is None or asked.opened < opened):
            new = new and following.writer.ledger_id == ledger_id
            asked = self.asked.ask_next(ledger_id, opened, until_s, new=new)
        return asked if asked is not None and asked.ledger_id == ledger_id else None

    def end(self, ended: SealLive, stopped: Next | None, *, goes_on: bool) -> None:
        """The live segment is over, and this seal goes into the next commit. Answers the committers
        that asked for it; if it `goes_on`, with the opening of the next segment in the ledger that
        stopped."""
        self._ended, self._next = ended, stopped
        opened = None
        if stopped is not None and goes_on and self._number in self._commits.epochs:
            opened = self._commits.opening(self._number, stopped)
        self.asked.hand(HandOver(self._commits.topic.id, ended, opened))

    async def commit(self, *, seal_only: bool) -> Opened | None:
        """One commit: the seal of what is live, and with it the opening of what comes next, which
        is read back; None: there is only the seal. Raises as `seal.seal_live_segment` and a
        commit."""
        try:
            state = await self._held()
        finally:
            self.asked.forget()
        live = state.partitions[self._number].live
        if live is not None and self._is_next(live):
            return self._opened(live, state)
        owned = await self._commits.check_owner(self._number)
        actions: list[Action] = []
        if live is not None:
            ended = self._ended
            if ended is None or not is_seal_of(ended, live):
                ended = await seal_live_segment(self._commits.client.ledgers, live)
            actions.append(ended)
        if seal_only:
            if actions:
                await self._commits.commit(actions)
            self._ended = None
            return None
        following = await self._next_ledger()
        opening = self._commits.opening(self._number, following)
        await self._commits.commit([*actions, opening], following.intent, owned)
        state = await self._commits.state()
        live = state.partitions[self._number].live
        if live is None or not self._is_next(live):
            raise errors.TxnConflict(f"ledger {opening.ledger_id} is not live any more")
        return self._opened(live, state)

    async def _held(self) -> TopicState:
        """The topic, not older than this call; during a hold, once the held segment is over: mostly
        by a commit that this process hears of without asking."""
        hold = self.asked.hold
        state = None if hold is None else await self._commits.past(self._number, hold)
        return state or await self._commits.state()

    def _is_next(self, live: LiveSegment) -> bool:
        return self._next is not None and self._next.is_open_in(live)

    def _opened(self, live: LiveSegment, state: TopicState) -> Opened:
        following, self._next, self._ended = self._next, None, None
        assert following is not None and live.first_entry == following.extent.entries
        return Opened(live, state, following)

    async def _next_ledger(self) -> Next:
        """One of the topic's intent: that which stopped, or of a try before, else a new one."""
        intent = await self._commits.intent()
        following = self._next
        if following is not None and following.is_usable(intent):
            return following
        await self.drop_next()
        self._next = Next(*await self._commits.new_ledger())
        return self._next

    async def drop_next(self) -> None:
        """Close the ledger that was to be opened next."""
        if self._next is not None:
            writer, self._next = self._next.writer, None
            with suppress(errors.LedgerError, StoreError):
                await writer.close()

    def abandon(self) -> None:
        """Nothing is handed over, and a ledger that stopped takes no segment."""
        self.asked.refuse()
        if self._next is not None and self._next.after != ANY_OPENING:
            self._next.writer.abandon()
            self._next = None
