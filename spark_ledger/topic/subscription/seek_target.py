"""The target of a seek: the first row kept, the end, an offset, or a time.

Always true: a time is a commit time, by the store's clock. It means the first row that was
committed at or after this time, or the end if there is no such row; rows of a segment born live
have the time at which the owner stored them, by the same clock (hazard 35). Offsets below the first
row kept mean the first row kept (hazard 38). The end includes the rows of live segments that
`live_ends` has. The given state decides all this, except which row of a segment born live is meant:
the segment's entries decide this (`exactly`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.topic.log.segment_table import Interval, SegmentTable, TableChunk
from spark_ledger.topic.log.state import NO_TABLES, PartitionState, Tables, TopicState
from spark_ledger.topic.read.live import EMPTY_END, LiveEnd, first_stored_since
from spark_ledger.topic.read.pieces import LiveRows, Span, live_rows


class End(Enum):
    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class CommittedSince:
    """The first row that was committed at or after `ms` since the epoch."""

    ms: int


SeekTarget = End | CommittedSince | Mapping[int, int]
NO_LIVE_ENDS: Mapping[int, LiveEnd] = {}
MS_MIN = 10**11


def in_seconds(number: int) -> bool:
    """Whether a number that was given as a time in milliseconds must be in seconds: in milliseconds
    it would be before March 1973. 0 is the beginning in both units."""
    return 0 < number < MS_MIN


def needs_live_ends(state: TopicState, target: SeekTarget) -> bool:
    """Whether `exactly` needs the ends of live segments; committed offsets do not need these
    ends."""
    if target is End.EARLIEST or all(partition.live is None for partition in state.partitions):
        return False
    if isinstance(target, Mapping):
        ends = state.end_offsets()
        return any(offset > ends.get(p, offset) for p, offset in target.items())
    return True


def chunks_needed(state: TopicState, target: SeekTarget) -> list[TableChunk]:
    """The chunks whose tables `resolve` needs."""
    if not isinstance(target, CommittedSince):
        return []
    intervals = (_first_since(partition, target.ms) for partition in state.partitions)
    sources = (interval.source for interval in intervals if interval is not None)
    return list(dict.fromkeys(source for source in sources if isinstance(source, TableChunk)))


def resolve(
    state: TopicState,
    target: SeekTarget,
    read: Tables = NO_TABLES,
    live_ends: Mapping[int, LiveEnd] = NO_LIVE_ENDS,
) -> dict[int, int]:
    """The position in each partition (for offsets: only in the partitions of the offsets). A time
    within a segment born live means the segment's first row.

    Raises errors.OffsetsOutOfRange, errors.OffsetsNotAssigned.
    """
    if target is End.EARLIEST:
        return state.start_offsets()
    if target is End.LATEST:
        return {p.number: _end(p, live_ends) for p in state.partitions}
    if isinstance(target, CommittedSince):
        return {p.number: offset_since(p, target.ms, read) for p in state.partitions}
    assert isinstance(target, Mapping)
    return {p: _within(state, p, offset, live_ends) for p, offset in sorted(target.items())}


async def exactly(
    ledgers: LedgerStore,
    state: TopicState,
    target: SeekTarget,
    read: Tables = NO_TABLES,
    live_ends: Mapping[int, LiveEnd] = NO_LIVE_ENDS,
) -> dict[int, int]:
    """As `resolve`, but a time within a live segment, or a segment born live, means the row that
    was stored at this time. Raises errors.NoSuchLedger if the segment was merged and its ledger is
    gone, errors.DataUnavailable."""
    positions = resolve(state, target, read, live_ends)
    if isinstance(target, CommittedSince):
        for partition in state.partitions:
            rows = rows_around(partition, target.ms, read)
            if (
                positions[partition.number] == partition.end_offset
            ):  # all committed rows are earlier
                rows = _live_rows(partition, live_ends)
            if rows is not None:
                positions[partition.number] = await first_stored_since(ledgers, rows, target.ms)
    return positions


def offset_since(partition: PartitionState, ms: int, read: Tables = NO_TABLES) -> int:
    """The first offset of the partition that was committed at or after `ms`, or the partition's
    end. If a segment born live has rows from before and after `ms`, the segment's first offset."""
    first = _segment_since(partition, ms, read)
    if first is None:
        return partition.end_offset
    interval, part = first
    if not len(part):
        return interval.hi
    base = int(part.bases[0])
    if part.counted[0]:
        return max(interval.lo, base)
    rows, times = part.commit_times(base, int(part.ends[0]))
    return max(interval.lo, base + int(rows[times < ms].sum()))


def rows_around(partition: PartitionState, ms: int, read: Tables = NO_TABLES) -> LiveRows | None:
    """The rows of the segment that has the first row since `ms`, if the segment was born live and
    only its entries show which row is the first; otherwise None."""
    first = _segment_since(partition, ms, read)
    if first is None or not len(first[1]):
        return None
    interval, part = first
    if not part.counted[0] or int(part.min_ms[0]) >= ms:
        return None
    return live_rows(part, 0, Span(partition.number, interval.lo, interval.hi, 0, 1))


def _segment_since(
    partition: PartitionState, ms: int, read: Tables
) -> tuple[Interval, SegmentTable] | None:
    """The first interval that may have a row since `ms`, and its first segment with such a row; an
    empty table if the interval was cut before such a segment."""
    interval = _first_since(partition, ms)
    if interval is None:
        return None
    source = interval.source
    table = read[source] if isinstance(source, TableChunk) else source
    assert table is not None, "a hole has no row"
    part = table.between(partition.number, interval.lo, interval.hi)
    late = np.flatnonzero(part.commits_ms >= ms)[:1].tolist()
    return interval, part.part(late[0], late[0] + 1) if late else part.part(0, 0)


def _first_since(partition: PartitionState, ms: int) -> Interval | None:
    for interval in partition.intervals.between(partition.start_offset, partition.end_offset):
        if interval.source is not None and interval.last_ms >= ms:
            return interval
    return None


def _end(partition: PartitionState, live_ends: Mapping[int, LiveEnd]) -> int:
    return partition.end_offset + live_ends.get(partition.number, EMPTY_END).rows


def _live_rows(partition: PartitionState, live_ends: Mapping[int, LiveEnd]) -> LiveRows | None:
    end = live_ends.get(partition.number, EMPTY_END)
    if partition.live is None or not end.rows:
        return None
    base = partition.live.base
    return LiveRows(partition.live, base, base + end.rows, end.last_entry, end.rows)


def _within(state: TopicState, number: int, offset: int, live_ends: Mapping[int, LiveEnd]) -> int:
    if not 0 <= number < len(state.partitions):
        raise errors.OffsetsNotAssigned(
            f"partition {number} of {len(state.partitions)} was named", partition=number
        )
    partition = state.partitions[number]
    end = _end(partition, live_ends)
    if not 0 <= offset <= end:
        raise errors.OffsetsOutOfRange(
            f"offset {offset} of partition {number}, which ends at {end}",
            partition=number,
            offset=offset,
        )
    return max(offset, partition.start_offset)
