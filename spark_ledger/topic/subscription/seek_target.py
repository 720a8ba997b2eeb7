"""Where to put a subscription: the first row kept, the end, an offset, or a time. Pure.

Always true: a time is a commit's, by the store's clock, and means the first row that was committed
at or after it, the end if none was; offsets below the first row kept mean that row (hazard 38).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from spark_ledger import errors
from spark_ledger.topic.log.intervals import Chunk, Interval
from spark_ledger.topic.log.state import UNREAD, PartitionState, Tables, TopicState


class End(Enum):
    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class CommittedSince:
    """The first row that was committed at or after `ms` since the epoch."""

    ms: int


SeekTarget = End | CommittedSince | Mapping[int, int]


def chunks_needed(state: TopicState, target: SeekTarget) -> list[Chunk]:
    """The chunks that `resolve` must have read."""
    if not isinstance(target, CommittedSince):
        return []
    found = (_first_since(held, target.ms) for held in state.partitions)
    some = (one.source for one in found if one is not None)
    return list(dict.fromkeys(source for source in some if isinstance(source, Chunk)))


def resolve(state: TopicState, target: SeekTarget, read: Tables = UNREAD) -> dict[int, int]:
    """The position in each partition; with offsets, in those that they name.

    Raises errors.OffsetsOutOfRange, errors.OffsetsNotAssigned.
    """
    if target is End.EARLIEST:
        return state.start_offsets()
    if target is End.LATEST:
        return state.end_offsets()
    if isinstance(target, CommittedSince):
        return {p.number: offset_since(p, target.ms, read) for p in state.partitions}
    assert isinstance(target, Mapping)
    return {p: _within(state, p, offset) for p, offset in sorted(target.items())}


def offset_since(held: PartitionState, ms: int, read: Tables = UNREAD) -> int:
    """The first offset of the partition that was committed at or after `ms`, its end if none."""
    one = _first_since(held, ms)
    if one is None:
        return held.end_offset
    table = read[one.source] if isinstance(one.source, Chunk) else one.source
    assert table is not None, "a hole has no row"
    part = table.between(held.number, one.lo, one.hi)
    late = np.flatnonzero(part.commits_ms >= ms)
    if not len(late):
        return one.hi
    first = int(late[0])
    base, end = int(part.bases[first]), int(part.ends[first])
    rows, times = part.part(first, first + 1).commit_times(base, end)
    return max(one.lo, base + int(rows[times < ms].sum()))


def _first_since(held: PartitionState, ms: int) -> Interval | None:
    for one in held.intervals.between(held.start_offset, held.end_offset):
        if one.source is not None and one.last_ms >= ms:
            return one
    return None


def _within(state: TopicState, partition: int, offset: int) -> int:
    if not 0 <= partition < len(state.partitions):
        raise errors.OffsetsNotAssigned(
            f"partition {partition} of {len(state.partitions)} was named", partition=partition
        )
    held = state.partitions[partition]
    if not 0 <= offset <= held.end_offset:
        raise errors.OffsetsOutOfRange(
            f"offset {offset} of partition {partition}, which ends at {held.end_offset}",
            partition=partition,
            offset=offset,
        )
    return max(offset, held.start_offset)
