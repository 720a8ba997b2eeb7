"""The ledger of a partition's live segment, and the commit between two segments, which seals the
last segment and opens the next.

Always true: no segment is open here before its opening was read back in the folded log (hazard 28).
If the log has a live segment that is not this owner's next segment, the commit that opens the next
segment seals that one. A ledger that stopped takes the next segment if the ledger was made under
the topic's present intent; else the ledger is closed.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from spark_ledger import errors
from spark_ledger.broker.log.holds import AskedSegments, SegmentHold
from spark_ledger.broker.log.topic_commits import NextLedger, TopicCommits
from spark_ledger.broker.produce.step import LedgerCounts
from spark_ledger.broker.produce.waiting import Chunk, EntryRuns, PendingEntry, encode_entry
from spark_ledger.ledger.client import VersionedRecord
from spark_ledger.ledger.writer import AsyncLedgerWriter
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic.commit.draft import RowKind
from spark_ledger.topic.commit.hand_over import HandOver
from spark_ledger.topic.commit.seal import Extent, seal_live_segment
from spark_ledger.topic.entry.message_batch import Share
from spark_ledger.topic.log.actions import ANY_OPENING, Action, SealLive
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.segments import LiveSegment
from spark_ledger.topic.log.state import TopicState, is_seal_of


@dataclass(slots=True)
class OpenLedger:
    """The ledger of the live segment. `reopened`: whether the ledger had earlier segments;
    `opened_s`: when its first segment was opened, by the loop's clock."""

    writer: AsyncLedgerWriter
    intent: Intent
    counts: LedgerCounts
    opened_s: float
    reopened: bool

    @staticmethod
    def of(following: NextLedger, now_s: float) -> "OpenLedger":
        """The open ledger made from `following`, whose opening was read back."""
        extent, reopened = following.extent, following.after != ANY_OPENING
        opened_s = following.opened_s if reopened else now_s
        counts = LedgerCounts(extent.entries, extent.rows, extent.bytes)
        return OpenLedger(following.writer, following.intent, counts, opened_s, reopened)

    def append(self, live: LiveSegment, entry_runs: EntryRuns, now_ms: int) -> PendingEntry:
        """Send an entry of these runs."""
        runs, size, rows = entry_runs
        counts, writer = self.counts, self.writer
        offset = live.origin + counts.rows
        share = Share(live.partition, rows, offset if self.reopened else counts.rows)
        chunk, rowless = runs[0].chunk, counts.rowless
        if chunk is not None:
            runs[0].sent(offset)
            rowless = rowless.with_next(offset) if chunk is Chunk.EARLIER else rowless
        parts = encode_entry(runs, size, share, now_ms, rowless, at_offset=self.reopened)
        acked = writer.append(parts, rows)
        if acked.done() and isinstance(failure := acked.exception(), errors.LedgerError):
            writer.abandon(failure)  # else the next entry would get the id of the failed entry
        counts.add(rows, size, rowless, now_ms)
        return PendingEntry(runs, rows, rowless, acked)

    async def close(self) -> VersionedRecord:
        """Close the ledger; returns its CLOSED record. Raises errors.LedgerError, StoreError."""
        return VersionedRecord(await self.writer.close(), self.writer.version)

    def as_next(self, live: LiveSegment) -> NextLedger:
        """This ledger, as the one that takes the next segment; all its entries are acknowledged."""
        extent = Extent(self.counts.entries, self.counts.rows, self.writer.confirmed_bytes)
        return NextLedger(self.writer, self.intent, extent, live.opened, self.opened_s)


class Opened(NamedTuple):
    """A live segment of this owner, a state of the topic with this segment, and its ledger."""

    live: LiveSegment
    state: TopicState
    following: NextLedger


class Openings:
    """The openings of the segments of partition `number`. `asked` has the holds of committers that
    commit past the live segment; `kind_of_rows` returns the kind of the rows that come next."""

    def __init__(
        self, commits: TopicCommits, number: int, kind_of_rows: Callable[[], RowKind]
    ) -> None:
        self.asked = AskedSegments()
        self._kind_of_rows = kind_of_rows
        self._commits = commits
        self._number = number
        self._ended: SealLive | None = None  # the last segment's seal, until a commit has it
        self._next: NextLedger | None = None

    def ask(
        self, live: LiveSegment | None, ledger_id: int, opened: int, until_s: float, *, new: bool
    ) -> SegmentHold | None:
        """The hold for a committer that commits past the segment which commit `opened`, or a later
        commit, began in that ledger. If the segment has no hold, a hold begins if `new` is set;
        else the result is None."""
        hold, following = self.asked.current, self._next
        if hold is None and live is not None:
            if live.ledger_id == ledger_id and new:
                hold = self.asked.current = SegmentHold(ledger_id, live.opened, until_s)
        elif following is not None and (hold is None or hold.opened < opened):
            new = new and following.writer.ledger_id == ledger_id
            hold = self.asked.ask_next(ledger_id, opened, until_s, new=new)
        return hold if hold is not None and hold.ledger_id == ledger_id else None

    def end(self, seal: SealLive, stopped: NextLedger | None, *, goes_on: bool) -> None:
        """End the live segment: `seal` goes into the next commit. Committers that asked for the
        segment get the seal and, if the writer `goes_on`, the opening of the next segment in the
        `stopped` ledger."""
        self._ended, self._next = seal, stopped
        opening = None
        if stopped is not None and goes_on and self._number in self._commits.epochs:
            opening = self._commits.opening(self._number, stopped)
        self.asked.hand(HandOver(self._commits.topic.id, seal, opening))

    async def commit(self, *, seal_only: bool) -> Opened | None:
        """In one commit, seal the live segment and open the next segment; returns the next segment
        after it was read back. `seal_only`: only seal, and return None. Raises errors.LedgerError,
        StoreError."""
        try:
            state = await self._state_after_hold()
        finally:
            self.asked.forget()
        live = state.partitions[self._number].live
        if live is not None and self._is_next(live):
            return self._opened(live, state)
        owned = await self._commits.check_owner(self._number)
        actions: list[Action] = []
        if live is not None:
            seal = self._ended
            if seal is None or not is_seal_of(seal, live):
                seal = await seal_live_segment(self._commits.client.ledgers, live)
            actions.append(seal)
        if seal_only:
            if actions:
                await self._commits.commit(actions)
            self._ended = None
            return None
        following = await self._next_ledger()
        opening = self._commits.opening(self._number, following)
        kind = self._kind_of_rows()
        await self._commits.commit([*actions, opening], following.intent, owned, kind)
        state = await self._commits.state()
        live = state.partitions[self._number].live
        if live is None or not self._is_next(live):
            raise errors.TxnConflict(f"ledger {opening.ledger_id} is not live any more")
        return self._opened(live, state)

    async def _state_after_hold(self) -> TopicState:
        """The topic's state, not older than this call. If a committer holds the segment, this waits
        until the commit has come or the hold has ended."""
        hold = self.asked.hold
        state = None if hold is None else await self._commits.past(self._number, hold)
        return state or await self._commits.state()

    def _is_next(self, live: LiveSegment) -> bool:
        return self._next is not None and self._next.is_open_in(live)

    def _opened(self, live: LiveSegment, state: TopicState) -> Opened:
        following, self._next, self._ended = self._next, None, None
        assert following is not None and live.first_entry == following.extent.entries
        return Opened(live, state, following)

    async def _next_ledger(self) -> NextLedger:
        """A ledger of the topic's intent: the ledger that stopped, or the ledger of an earlier try,
        else a new ledger."""
        intent = await self._commits.intent()
        following = self._next
        if following is not None and following.is_usable(intent):
            return following
        await self.drop_next()
        self._next = NextLedger(*await self._commits.new_ledger())
        return self._next

    async def drop_next(self) -> None:
        """Close the ledger that was to be opened next."""
        if self._next is not None:
            writer, self._next = self._next.writer, None
            with suppress(errors.LedgerError, StoreError):
                await writer.close()

    def abandon(self) -> None:
        """Hand no segment over; abandon a stopped ledger that was to take the next segment."""
        self.asked.refuse()
        if self._next is not None and self._next.after != ANY_OPENING:
            self._next.writer.abandon()
            self._next = None
