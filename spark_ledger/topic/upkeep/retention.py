"""Decides which rows a topic need not keep any longer. Pure.

Always true: whole segments are trimmed, oldest first, but no segment with a row at or after a
partition's hold (the first row that a subscription has not read yet). A trim point is never below
the partition's start. Times are commit times, by the store's clock (hazard 35); a row's own
timestamp has no effect.

An interval has the number of bytes and the first and last commit time of its segments. So at most
one chunk of each partition is read: the chunk with the trim point (`chunks_needed`).
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
    """Rows go if they were committed before `before_ms`, or if `bytes_max` bytes or more follow
    these rows. With `acknowledged`, all rows go that every subscription of the partition has
    passed."""

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

    def top(self, partition: PartitionState, holds: Points) -> int:
        """The offset from which on rows stay under all limits: the lowest offset that a
        subscription holds. Without a subscription no row counts as acknowledged."""
        without_hold = partition.start_offset if self.acknowledged else partition.end_offset
        return min(holds.get(partition.number, without_hold), partition.end_offset)


def chunks_needed(
    state: TopicState, policies: TopicPolicies, now_ms: int, holds: Points = NO_HOLDS
) -> list[TableChunk]:
    """The chunks whose tables `trim_points` needs."""
    limits = _Limits.of(policies, now_ms)
    edges = (
        _first_kept_interval(partition, limits, holds).interval for partition in state.partitions
    )
    sources = (interval.source for interval in edges if interval is not None)
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


class _KeptEdge(NamedTuple):
    """`point` is the end of the intervals that go as a whole. `interval` is the next interval, if
    a part of it may go (else None); `bytes_after` are the bytes after this interval."""

    point: int
    interval: Interval | None
    bytes_after: int


class _SegmentEnd(NamedTuple):
    """The end of a segment, the time of its commit, and the bytes after the segment."""

    end: int
    last_ms: int
    bytes_after: int


def _first_kept_interval(partition: PartitionState, limits: _Limits, holds: Points) -> _KeptEdge:
    """The edge between the intervals that go and those that stay. A hole goes with the interval
    before, since it has no rows to keep."""
    top = limits.top(partition, holds)
    bytes_left = sum(interval.bytes for interval in partition.intervals)
    point = partition.start_offset
    for interval in partition.intervals:
        bytes_left -= interval.bytes
        is_hole = interval.source is None
        may_all_go = is_hole or limits.may_go(interval.last_ms, bytes_left)
        if not may_all_go or interval.hi > top:
            is_partly_due = interval.lo < top and limits.may_go(
                interval.first_ms, bytes_left + interval.bytes
            )
            return _KeptEdge(point, interval if is_partly_due and not is_hole else None, bytes_left)
        point = interval.hi
    return _KeptEdge(point, None, bytes_left)


def _point(partition: PartitionState, limits: _Limits, holds: Points, tables: Tables) -> int:
    point, edge, bytes_left = _first_kept_interval(partition, limits, holds)
    if edge is None:
        return point
    for end, last_ms, bytes_after in _segments(partition, edge, bytes_left, tables):
        if end > limits.top(partition, holds) or not limits.may_go(last_ms, bytes_after):
            break
        point = end
    return point


def _segments(
    partition: PartitionState, edge: Interval, bytes_left: int, tables: Tables
) -> Iterator[_SegmentEnd]:
    """The ends of the interval's segments."""
    part = _table(edge, tables).between(partition.number, edge.lo, edge.hi)
    ends = np.minimum(part.ends, edge.hi)
    kept_rows = ends - np.maximum(part.bases, edge.lo)
    after = np.cumsum(part.sizes * kept_rows // part.rows)
    total = int(after[-1])
    for i in range(len(part)):
        yield _SegmentEnd(int(ends[i]), int(part.commits_ms[i]), bytes_left + total - int(after[i]))


def _table(interval: Interval, tables: Tables) -> SegmentTable:
    source = interval.source
    table = tables[source] if isinstance(source, TableChunk) else source
    assert table is not None, "a hole has no segments"
    return table
