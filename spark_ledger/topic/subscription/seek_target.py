"""Where to put a subscription: the first row kept, the end, an offset, or a time.

Always true: a time is a commit's, by the store's clock, and means the first row that was committed
at or after it, the end if none was; rows of a segment born live have the time at which its owner
stored them, by that clock (hazard 35). Offsets below the first row kept mean that row (hazard 38).
The end is that of a live segment, as far as `lives` says. All is decided from the state at hand,
but which row of a segment born live it is: its entries say that (`exactly`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.topic.log.segment_table import Chunk, Interval, SegmentTable
from spark_ledger.topic.log.state import UNREAD, PartitionState, Tables, TopicState
from spark_ledger.topic.read.live import EMPTY, LiveEnd, since_in
from spark_ledger.topic.read.pieces import LiveRows, Span, live_rows


class End(Enum):
    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class CommittedSince:
    """The first row that was committed at or after `ms` since the epoch."""

    ms: int


SeekTarget = End | CommittedSince | Mapping[int, int]
NO_LIVES: Mapping[int, LiveEnd] = {}
MS_MIN = 10**11


def in_seconds(number: int) -> bool:
    """Whether a number given as a moment in milliseconds must be one in seconds: as milliseconds it
    is before March 1973. 0 is the beginning in either."""
    return 0 < number < MS_MIN


def needs_lives(state: TopicState, target: SeekTarget) -> bool:
    """Whether `exactly` must know how far live segments go: offsets before them need nobody."""
    if target is End.EARLIEST or all(held.live is None for held in state.partitions):
        return False
    if isinstance(target, Mapping):
        ends = state.end_offsets()
        return any(offset > ends.get(p, offset) for p, offset in target.items())
    return True


def chunks_needed(state: TopicState, target: SeekTarget) -> list[Chunk]:
    """The chunks that `resolve` must have read."""
    if not isinstance(target, CommittedSince):
        return []
    found = (_first_since(held, target.ms) for held in state.partitions)
    some = (one.source for one in found if one is not None)
    return list(dict.fromkeys(source for source in some if isinstance(source, Chunk)))


def resolve(
    state: TopicState,
    target: SeekTarget,
    read: Tables = UNREAD,
    lives: Mapping[int, LiveEnd] = NO_LIVES,
) -> dict[int, int]:
    """The position in each partition; with offsets, in those that they name. A time within a
    segment born live means its first row.

    Raises errors.OffsetsOutOfRange, errors.OffsetsNotAssigned.
    """
    if target is End.EARLIEST:
        return state.start_offsets()
    if target is End.LATEST:
        return {p.number: _end(p, lives) for p in state.partitions}
    if isinstance(target, CommittedSince):
        return {p.number: offset_since(p, target.ms, read) for p in state.partitions}
    assert isinstance(target, Mapping)
    return {p: _within(state, p, offset, lives) for p, offset in sorted(target.items())}


async def exactly(
    ledgers: LedgerStore,
    state: TopicState,
    target: SeekTarget,
    read: Tables = UNREAD,
    lives: Mapping[int, LiveEnd] = NO_LIVES,
) -> dict[int, int]:
    """As `resolve`, and a time within a segment born live, or live, means the row stored then.
    Raises errors.NoSuchLedger where such a segment was merged and is gone,
    errors.DataUnavailable."""
    found = resolve(state, target, read, lives)
    if isinstance(target, CommittedSince):
        for held in state.partitions:
            rows = rows_around(held, target.ms, read)
            if found[held.number] == held.end_offset:  # nothing that is committed is so late
                rows = _live_rows(held, lives)
            if rows is not None:
                found[held.number] = await since_in(ledgers, rows, target.ms)
    return found


def offset_since(held: PartitionState, ms: int, read: Tables = UNREAD) -> int:
    """The first offset of the partition that was committed at or after `ms`, its end if none; of a
    segment born live that was stored before and after `ms` its first."""
    found = _segment_since(held, ms, read)
    if found is None:
        return held.end_offset
    one, part = found
    if not len(part):
        return one.hi
    base = int(part.bases[0])
    if part.counted[0]:
        return max(one.lo, base)
    rows, times = part.commit_times(base, int(part.ends[0]))
    return max(one.lo, base + int(rows[times < ms].sum()))


def rows_around(held: PartitionState, ms: int, read: Tables = UNREAD) -> LiveRows | None:
    """The rows among which the first since `ms` is, if that is known to their entries alone."""
    found = _segment_since(held, ms, read)
    if found is None or not len(found[1]):
        return None
    one, part = found
    if not part.counted[0] or int(part.min_ms[0]) >= ms:
        return None
    return live_rows(part, 0, Span(held.number, one.lo, one.hi, 0, 1))


def _segment_since(
    held: PartitionState, ms: int, read: Tables
) -> tuple[Interval, SegmentTable] | None:
    """The first segment with a row since `ms`, in its interval; no segment where the interval was
    cut before it."""
    one = _first_since(held, ms)
    if one is None:
        return None
    table = read[one.source] if isinstance(one.source, Chunk) else one.source
    assert table is not None, "a hole has no row"
    part = table.between(held.number, one.lo, one.hi)
    late = np.flatnonzero(part.commits_ms >= ms)[:1].tolist()
    return one, part.part(late[0], late[0] + 1) if late else part.part(0, 0)


def _first_since(held: PartitionState, ms: int) -> Interval | None:
    for one in held.intervals.between(held.start_offset, held.end_offset):
        if one.source is not None and one.last_ms >= ms:
            return one
    return None


def _end(held: PartitionState, lives: Mapping[int, LiveEnd]) -> int:
    return held.end_offset + lives.get(held.number, EMPTY).rows


def _live_rows(held: PartitionState, lives: Mapping[int, LiveEnd]) -> LiveRows | None:
    known = lives.get(held.number, EMPTY)
    if held.live is None or not known.rows:
        return None
    base = held.live.base
    return LiveRows(held.live, base, base + known.rows, known.last_entry, known.rows)


def _within(state: TopicState, partition: int, offset: int, lives: Mapping[int, LiveEnd]) -> int:
    if not 0 <= partition < len(state.partitions):
        raise errors.OffsetsNotAssigned(
            f"partition {partition} of {len(state.partitions)} was named", partition=partition
        )
    held = state.partitions[partition]
    end = _end(held, lives)
    if not 0 <= offset <= end:
        raise errors.OffsetsOutOfRange(
            f"offset {offset} of partition {partition}, which ends at {end}",
            partition=partition,
            offset=offset,
        )
    return max(offset, held.start_offset)
