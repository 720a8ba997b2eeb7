"""Decides which rows a topic need not keep any longer. Pure.

Always true: whole segments are trimmed, oldest first, but no segment with a row at or after a
partition's hold (the first row that a subscription has not read yet). A trim point is never below
the partition's start. Times are commit times, by the store's clock (hazard 35); a row's own
timestamp has no effect.

Most intervals are judged as a whole, by their bytes and commit times. Only the interval with the
trim point needs its segments: at most one chunk of each partition is read (`chunks_needed`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spark_ledger.topic.log.policies import ACKNOWLEDGED, TopicPolicies
from spark_ledger.topic.log.segment_table import Interval, SegmentTable, TableChunk
from spark_ledger.topic.log.state import NO_TABLES, PartitionState, Tables, TopicState

Points = Mapping[int, int]
"""By partition an offset: a trim point (rows below it go), or a hold (rows from it on stay)."""
NO_HOLDS: Points = {}


@dataclass(frozen=True, slots=True)
class _Limits:
    """Two kinds of rows go: rows committed before `before_ms`, and rows that `bytes_max` or more
    bytes follow. With `acknowledged`, all rows below the lowest hold go."""

    before_ms: int | None
    bytes_max: int | None
    acknowledged: bool

    @classmethod
    def of(cls, policies: TopicPolicies, now_ms: int) -> "_Limits":
        age, size = policies.retention_ms, policies.retention_bytes
        by_acknowledgement = policies.retention == ACKNOWLEDGED and age is None and size is None
        return cls(None if age is None else now_ms - age, size, by_acknowledgement)

    def may_go(self, last_ms: int, bytes_from: int) -> bool:
        """Whether rows that were committed up to `last_ms` may go if `bytes_from` bytes follow."""
        is_old = self.before_ms is not None and last_ms < self.before_ms
        is_over_size = self.bytes_max is not None and bytes_from >= self.bytes_max
        return self.acknowledged or is_old or is_over_size

    def lowest_hold(self, partition: PartitionState, holds: Points) -> int:
        """The lowest offset that a subscription holds. Without a subscription: the partition's end,
        or with `acknowledged` its start, since no row is acknowledged."""
        without_hold = partition.start_offset if self.acknowledged else partition.end_offset
        return min(holds.get(partition.number, without_hold), partition.end_offset)


def chunks_needed(
    state: TopicState, policies: TopicPolicies, now_ms: int, holds: Points = NO_HOLDS
) -> list[TableChunk]:
    """The chunks whose tables `trim_points` needs. The source of an interval is a chunk, a table of
    segments in memory, or None for a hole."""
    limits = _Limits.of(policies, now_ms)
    intervals = (_whole_intervals(partition, limits, holds).next for partition in state.partitions)
    sources = (interval.source for interval in intervals if interval is not None)
    return list(dict.fromkeys(source for source in sources if isinstance(source, TableChunk)))


def trim_points(
    state: TopicState,
    policies: TopicPolicies,
    now_ms: int,
    holds: Points = NO_HOLDS,
    tables: Tables = NO_TABLES,
) -> dict[int, int]:
    """By partition the offset below which rows go. A partition that keeps all rows is left out.

    `now_ms` is by the store's clock; `holds` are the lowest offsets that a subscription still
    needs.
    """
    if not policies.trims:
        return {}
    limits = _Limits.of(policies, now_ms)
    points = {
        partition.number: _point(partition, limits, holds, tables) for partition in state.partitions
    }
    return {p: to for p, to in points.items() if to > state.partitions[p].start_offset}


class _WholeIntervals(NamedTuple):
    """The intervals that go as a whole end at `end`. A part of the interval `next` may go, too
    (None: no part); `bytes_after` is the number of bytes after `next`."""

    end: int
    next: Interval | None
    bytes_after: int


class _SegmentEnd(NamedTuple):
    """The end of a segment, the time of its commit, and the bytes after the segment."""

    end: int
    last_ms: int
    bytes_after: int


def _whole_intervals(partition: PartitionState, limits: _Limits, holds: Points) -> _WholeIntervals:
    """The intervals that go as a whole, from the oldest on. A hole goes with the interval before,
    since a hole has no rows to keep."""
    hold = limits.lowest_hold(partition, holds)
    bytes_after = sum(interval.bytes for interval in partition.intervals)
    end = partition.start_offset
    for interval in partition.intervals:
        bytes_after -= interval.bytes
        is_hole = interval.source is None
        may_all_go = is_hole or limits.may_go(interval.last_ms, bytes_after)
        if not may_all_go or interval.hi > hold:
            may_part_go = interval.lo < hold and limits.may_go(
                interval.first_ms, bytes_after + interval.bytes
            )
            is_next = may_part_go and not is_hole
            return _WholeIntervals(end, interval if is_next else None, bytes_after)
        end = interval.hi
    return _WholeIntervals(end, None, bytes_after)


def _point(partition: PartitionState, limits: _Limits, holds: Points, tables: Tables) -> int:
    point, interval, bytes_after_interval = _whole_intervals(partition, limits, holds)
    if interval is None:
        return point
    for end, last_ms, bytes_after in _segments(partition, interval, bytes_after_interval, tables):
        if end > limits.lowest_hold(partition, holds) or not limits.may_go(last_ms, bytes_after):
            break
        point = end
    return point


def _segments(
    partition: PartitionState, interval: Interval, bytes_after: int, tables: Tables
) -> Iterator[_SegmentEnd]:
    """The ends of the interval's segments."""
    part = _table(interval, tables).between(partition.number, interval.lo, interval.hi)
    ends = np.minimum(part.ends, interval.hi)
    rows = ends - np.maximum(part.bases, interval.lo)
    sums = np.cumsum(part.sizes * rows // part.rows)
    bytes_from = bytes_after + int(sums[-1])
    for i in range(len(part)):
        yield _SegmentEnd(int(ends[i]), int(part.commits_ms[i]), bytes_from - int(sums[i]))


def _table(interval: Interval, tables: Tables) -> SegmentTable:
    source = interval.source
    table = tables[source] if isinstance(source, TableChunk) else source
    assert table is not None, "a hole has no segments"
    return table
