"""Decides which rows a topic need not keep any longer. Pure.

Always true: whole segments go, oldest first, and no segment with a row at or after a partition's
hold (the first row that a subscription has not read yet); a trim point is never below the
partition's start. Times are commit times, by the store's clock (hazard 35); a row's own time
deletes nothing.

For segments that a checkpoint keeps in chunks the intervals have the number of bytes and the first
and last commit time, so at most one chunk a partition is read: the one with the trim point in it.
`chunks_needed` returns it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spark_ledger.topic.log.policies import ACKNOWLEDGED, TopicPolicies
from spark_ledger.topic.log.segment_table import Interval, SegmentTable, TableChunk
from spark_ledger.topic.log.state import UNREAD, PartitionState, Tables, TopicState

Points = Mapping[int, int]
"""By partition the offset below which rows go, or from which on rows are held."""
NO_HOLDS: Points = {}


@dataclass(frozen=True, slots=True)
class _Limits:
    """Rows go if they were committed before `before_ms`, or while more than `bytes_max` follow. If
    `acknowledged`, all rows go that every subscription of the partition has passed."""

    before_ms: int | None
    bytes_max: int | None
    acknowledged: bool

    @classmethod
    def of(cls, policies: TopicPolicies, now_ms: int) -> "_Limits":
        age, size = policies.retention_ms, policies.retention_bytes
        by_acks = policies.retention == ACKNOWLEDGED and age is None and size is None
        return cls(None if age is None else now_ms - age, size, by_acks)

    def let_go(self, last_ms: int, bytes_from: int) -> bool:
        """Whether rows committed up to `last_ms` may go if `bytes_from` bytes are left without
        them."""
        old = self.before_ms is not None and last_ms < self.before_ms
        over = self.bytes_max is not None and bytes_from >= self.bytes_max
        return self.acknowledged or old or over

    def top(self, held: PartitionState, holds: Points) -> int:
        """The offset from which on rows stay, whatever the limits: the lowest that a subscription
        holds. Without a subscription no row counts as acknowledged."""
        without = held.start_offset if self.acknowledged else held.end_offset
        return min(holds.get(held.number, without), held.end_offset)


def chunks_needed(
    state: TopicState, policies: TopicPolicies, now_ms: int, holds: Points = NO_HOLDS
) -> list[TableChunk]:
    """The chunks that `trim_points` needs."""
    limits = _Limits.of(policies, now_ms)
    edges = (_edge(held, limits, holds).interval for held in state.partitions)
    sources = (interval.source for interval in edges if interval is not None)
    return list(dict.fromkeys(source for source in sources if isinstance(source, TableChunk)))


def trim_points(
    state: TopicState,
    policies: TopicPolicies,
    now_ms: int,
    holds: Points = NO_HOLDS,
    read: Tables = UNREAD,
) -> dict[int, int]:
    """By partition the offset up to which rows go; without partitions that keep all rows.

    `now_ms` is by the store's clock; `holds` are the lowest offsets that a subscription still
    needs.
    """
    if not policies.trims:
        return {}
    limits = _Limits.of(policies, now_ms)
    points = {held.number: _point(held, limits, holds, read) for held in state.partitions}
    return {p: to for p, to in points.items() if to > state.partitions[p].start_offset}


class _Edge(NamedTuple):
    """The end of the intervals that go as a whole; the next interval, if a part of it may go; the
    bytes after that."""

    point: int
    interval: Interval | None
    bytes_after: int


class _SegmentEnd(NamedTuple):
    """The end of a segment, its commit's time, the bytes after it."""

    end: int
    last_ms: int
    bytes_after: int


def _edge(held: PartitionState, limits: _Limits, holds: Points) -> _Edge:
    """A hole has no rows to keep: it goes with the interval before it."""
    top = limits.top(held, holds)
    left = sum(interval.bytes for interval in held.intervals)
    point = held.start_offset
    for interval in held.intervals:
        left -= interval.bytes
        is_hole = interval.source is None
        goes = is_hole or limits.let_go(interval.last_ms, left)
        if not goes or interval.hi > top:
            partly = interval.lo < top and limits.let_go(interval.first_ms, left + interval.bytes)
            return _Edge(point, interval if partly and not is_hole else None, left)
        point = interval.hi
    return _Edge(point, None, left)


def _point(held: PartitionState, limits: _Limits, holds: Points, read: Tables) -> int:
    point, edge, left = _edge(held, limits, holds)
    if edge is None:
        return point
    for end, last_ms, bytes_left in _segments(held, edge, left, read):
        if end > limits.top(held, holds) or not limits.let_go(last_ms, bytes_left):
            break
        point = end
    return point


def _segments(
    held: PartitionState, edge: Interval, left: int, read: Tables
) -> Iterator[_SegmentEnd]:
    """The ends of the interval's segments."""
    part = _table(edge, read).between(held.number, edge.lo, edge.hi)
    ends = np.minimum(part.ends, edge.hi)
    kept = ends - np.maximum(part.bases, edge.lo)
    after = np.cumsum(part.sizes * kept // part.rows)
    total = int(after[-1])
    for i in range(len(part)):
        yield _SegmentEnd(int(ends[i]), int(part.commits_ms[i]), left + total - int(after[i]))


def _table(interval: Interval, read: Tables) -> SegmentTable:
    source = interval.source
    table = read[source] if isinstance(source, TableChunk) else source
    assert table is not None, "a hole has no segments"
    return table
