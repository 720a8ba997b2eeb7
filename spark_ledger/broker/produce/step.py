"""The next step of the owner of a partition's open end. Pure: no clock, no I/O.

    nothing open -> open -> stopped, rolling, idle, failed or undecided -> open | nothing open

Always true: a state changes only along MOVES. A segment ends when no entry is under way, or by the
CLOSED record of its ledger. The work does not end while a batch waits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from spark_ledger import errors
from spark_ledger.metadata.ledger_record import LedgerRecord
from spark_ledger.topic.entry.message_batch import NO_ROWLESS, Rowless

INFLIGHT_ENTRIES_MAX = 8


class WriterState(Enum):
    """The state of the last segment that this owner opened. In all states except NOTHING and OPEN,
    this owner has not yet seen a commit with the segment's seal."""

    NOTHING = "no segment is open"
    OPEN = "the segment is open, by the log that was read back"
    STOPPED = "the segment has stopped, and its ledger takes the next segment"
    ROLLING = "the segment's ledger is closed, and the next ledger is opened at once"
    IDLE = "the segment's ledger is closed, and the next ledger is opened when a batch waits"
    FAILED = "the segment's ledger was recovered: the CLOSED record has decided what is stored"
    UNDECIDED = "the work failed with entries under way, and the segment's ledger is not closed"


_AFTER_A_SEGMENT = (WriterState.OPEN, WriterState.NOTHING)
MOVES: Mapping[WriterState, tuple[WriterState, ...]] = {
    WriterState.NOTHING: (WriterState.OPEN,),
    WriterState.OPEN: tuple(state for state in WriterState if state is not WriterState.OPEN),
    WriterState.STOPPED: _AFTER_A_SEGMENT,
    WriterState.ROLLING: _AFTER_A_SEGMENT,
    WriterState.IDLE: _AFTER_A_SEGMENT,
    WriterState.FAILED: _AFTER_A_SEGMENT,
    WriterState.UNDECIDED: _AFTER_A_SEGMENT,
}


def moved(before: WriterState, after: WriterState, cause: str) -> WriterState:
    """Returns `after`, and asserts that MOVES lets it follow `before`."""
    assert after in MOVES[before], f"from '{before.value}' to '{after.value}': {cause}"
    return after


class WriterStep(Enum):
    APPEND = "send waiting batches while there is room; then wait until an event comes"
    STOP = "end the segment: a commit, also of a committer, opens the next one in the same ledger"
    LEAVE = "close the ledger, whose entries are all stored"
    DECIDE = "recover the ledger: its CLOSED record decides which entries are stored"
    OPEN = "commit the seal of the last segment with the opening of the next segment"
    SEAL = "commit the seal alone"
    REST = "end the work, until a batch comes"


class WriterSituation(NamedTuple):
    """`waits`: a batch waits to be sent; `closing`: the writer takes no more batches. The other
    fields are about an open segment. `under_way`: the number of entries under way; `asked`: a
    committer asked for the segment; `broken`: its ledger or an entry failed; `is_long`: the next
    owner would have to read too many of its entries; `full`: its ledger has reached a limit;
    `idle`: for a long time no batch waited or was under way."""

    state: WriterState
    waits: bool
    closing: bool
    under_way: int = 0
    asked: bool = False
    broken: bool = False
    is_long: bool = False
    full: bool = False
    idle: bool = False


def next_step(now: WriterSituation) -> WriterStep:
    """The step to take now; the caller asks again after each step."""
    if now.state is not WriterState.OPEN:
        goes_on = now.state in (WriterState.STOPPED, WriterState.ROLLING) and not now.closing
        if now.waits or goes_on:
            return WriterStep.OPEN
        return WriterStep.REST if now.state is WriterState.NOTHING else WriterStep.SEAL
    if now.broken:
        return WriterStep.DECIDE
    if now.under_way:
        return WriterStep.APPEND
    if now.asked or now.is_long:
        return WriterStep.STOP
    if now.full or (not now.waits and (now.idle or now.closing)):
        return WriterStep.LEAVE
    return WriterStep.APPEND


def has_room(now: WriterSituation) -> bool:
    """Whether the open segment takes another entry."""
    ends = now.asked or now.is_long or now.full
    return now.waits and now.under_way < INFLIGHT_ENTRIES_MAX and not ends


def state_after_leaving(now: WriterSituation) -> WriterState:
    """The state after the ledger of the open segment was closed."""
    return WriterState.IDLE if now.idle or now.closing else WriterState.ROLLING


@dataclass(slots=True)
class LedgerCounts:
    """The entries, rows and bytes that were sent to a ledger. The other fields are about the
    ledger's last segment. `rowless` has the offsets without a row in all entries that were sent;
    `rowless_stored` has those in stored entries; `written_ms` has the times of the first and the
    last entry."""

    entries: int = 0
    rows: int = 0
    bytes: int = 0
    rowless: Rowless = NO_ROWLESS
    rowless_stored: Rowless = NO_ROWLESS
    written_ms: tuple[int, ...] = ()

    def add(self, rows: int, size: int, rowless: Rowless, now_ms: int) -> None:
        """Count an entry that is sent. `rowless`: the segment's offsets without a row, this entry
        included."""
        self.entries += 1
        self.rows += rows
        self.bytes += size
        self.rowless = rowless
        self.written_ms = (*self.written_ms[:1], now_ms)


def stored_count(first: int, ledger_id: int, closed: LedgerRecord, rows_before: int) -> int:
    """The number of entries of the CLOSED ledger from entry `first` on. The entries before `first`
    are acknowledged, and have `rows_before` rows. Raises errors.RowsLost if an acknowledged entry
    is missing."""
    last = closed.last_entry
    assert last is not None
    if last + 1 < first:
        raise errors.RowsLost(
            f"ledger {ledger_id} was closed at entry {last}; entry {first - 1} was acknowledged",
            rows=rows_before - (closed.rows or 0),
        )
    return last + 1 - first
