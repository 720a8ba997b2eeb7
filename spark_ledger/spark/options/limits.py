"""How many rows and bytes one micro-batch takes, and when it waits for more rows. Pure.

Always true: the rows that a micro-batch takes (*admits*) of all partitions together are within the
limits on rows and bytes, or they are a single row; while there is a backlog, at least one row is
admitted. Each partition gets a share in proportion to its backlog. No partition waits for ever
behind a larger one: before the shares, each partition gets one row, the partition whose rows wait
longest first. Holes, and rows that the read leaves out as acknowledged, do not count.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spark_ledger.spark.options.offsets import Positions
from spark_ledger.spark.options.table import default_of
from spark_ledger.spark.spark_version import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
)
from spark_ledger.topic.log.segment_table import Interval, Longs, SegmentTable, TableChunk
from spark_ledger.topic.log.state import NO_TABLES, PartitionState, Tables
from spark_ledger.topic.read.acked import AckedRows

ENDLESS = 2**62
ROUNDS_MAX = 16
NEVER_MS = 2**62

TopicPartition = tuple[str, int]
"""A topic, by its short name, and a partition."""
CurveOf = Callable[[str, int, int, int], "Curve"]
"""Returns the curve of offsets [lo, hi), for topic, partition, lo and hi."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a micro-batch; None: no limit. A micro-batch waits for `rows_min` rows, but no
    longer than `delay_ms_max`."""

    rows_max: int | None = None
    bytes_max: int | None = None
    rows_min: int | None = None
    delay_ms_max: int = default_of("maxTriggerDelay")

    @property
    def has_maximum(self) -> bool:
        return self.rows_max is not None or self.bytes_max is not None


def read_limit(limits: Limits) -> ReadLimit:
    """The one limit that a source gives Spark. If Spark passes this limit back, the source applies
    all limits. If Spark passes ReadAllAvailable instead (Trigger.Once), the source applies no limit
    (`effective_limits`)."""
    if limits.rows_max is not None:
        return ReadMaxRows(limits.rows_max)
    if limits.bytes_max is not None:
        return ReadMaxBytes(limits.bytes_max)
    return ReadAllAvailable() if limits.rows_min is None else ReadMinRows(limits.rows_min)


def effective_limits(limits: Limits, limit: ReadLimit) -> Limits:
    """The limits that count when Spark passes `limit`."""
    return Limits() if isinstance(limit, ReadAllAvailable) else limits


def holds_back(limits: Limits, backlog_rows: int, waited_ms: int | None) -> bool:
    """Whether to wait for more rows: the backlog has fewer rows than `rows_min`, and the delay is
    not over. Spark got the last micro-batch `waited_ms` ago (None: this run has had no
    micro-batch). Do not call this under availableNow."""
    if limits.rows_min is None or waited_ms is None or waited_ms >= limits.delay_ms_max:
        return False
    return backlog_rows < limits.rows_min


class Curve:
    """How the rows and the bytes of one partition add up from offset `lo` to each later offset up
    to `hi`: straight lines between `edges`, the edges of the segments. The first row was committed
    at `since_ms`."""

    def __init__(self, edges: Longs, rows: Longs, sizes: Longs, since_ms: int) -> None:
        """`rows` and `sizes` are the sums up to each edge: 0 at the first edge, never falling."""
        self._edges = edges
        self._rows = rows
        self._bytes = sizes
        self.since_ms = since_ms

    @property
    def lo(self) -> int:
        return int(self._edges[0])

    @property
    def hi(self) -> int:
        return int(self._edges[-1])

    @property
    def rows(self) -> int:
        return int(self._rows[-1])

    @property
    def bytes(self) -> int:
        return int(self._bytes[-1])

    def rows_to(self, offset: int) -> int:
        return _sum_at(offset, self._edges, self._rows)

    def bytes_to(self, offset: int) -> int:
        """The bytes up to the offset: rounded up inside a segment, exact at its edges."""
        return _sum_at(offset, self._edges, self._bytes)

    def end_by_rows(self, offset: int, rows: int) -> int:
        """The last offset before which there are at most `rows` rows from `offset` on."""
        return _last_offset_within(self._edges, self._rows, self.rows_to(offset) + rows)

    def end_by_bytes(self, offset: int, size: int) -> int:
        """The last offset before which there are at most `size` bytes from `offset` on."""
        return _last_offset_within(self._edges, self._bytes, self.bytes_to(offset) + size)


class GivenCurve(Curve):
    """The curve of the rows that a read gives Spark: those that are not acknowledged. Exact within
    a segment too: an acknowledged row counts nothing, and the other rows share the segment's
    bytes."""

    def __init__(self, curve: Curve, partition: int, acked: AckedRows) -> None:
        edges = curve._edges
        counts = np.diff(acked.counts_below(partition, edges), prepend=0)
        all_rows, sizes = np.diff(curve._rows, prepend=0), np.diff(curve._bytes, prepend=0)
        rows = np.where(all_rows > 0, all_rows - counts, 0)
        sizes = -(-sizes * rows // np.maximum(all_rows, 1))
        super().__init__(edges, np.cumsum(rows), np.cumsum(sizes), curve.since_ms)
        ((_, offsets),) = acked.within([(partition, curve.lo, curve.hi)]).offsets.items()
        self._acked = offsets

    def rows_to(self, offset: int) -> int:
        i = int(np.searchsorted(self._edges, offset))
        if not i or self._rows[i] == self._rows[i - 1]:
            return int(self._rows[i])
        lo = int(self._edges[i - 1])
        acked = self._acked.range_cardinality(lo, offset)
        return int(self._rows[i - 1]) + offset - lo - acked

    def bytes_to(self, offset: int) -> int:
        i = int(np.searchsorted(self._edges, offset))
        if not i or self._rows[i] == self._rows[i - 1]:
            return int(self._bytes[i])
        rows = self.rows_to(offset) - int(self._rows[i - 1])
        return int(self._bytes[i - 1]) - (-self._bytes_in(i) * rows // self._rows_in(i))

    def end_by_rows(self, offset: int, rows: int) -> int:
        limit = self.rows_to(offset) + rows
        i = int(np.searchsorted(self._rows, limit, side="right"))
        return self._end_in(i, limit - int(self._rows[i - 1]) if i < len(self._rows) else 0)

    def end_by_bytes(self, offset: int, size: int) -> int:
        limit = self.bytes_to(offset) + size
        i = int(np.searchsorted(self._bytes, limit, side="right"))
        if i == len(self._bytes):
            return self.hi
        rows = (limit - int(self._bytes[i - 1])) * self._rows_in(i) // self._bytes_in(i)
        return self._end_in(i, rows)

    def _end_in(self, i: int, rows: int) -> int:
        """The last offset before which segment `i` has this number of rows; the segment has more
        rows."""
        if i == len(self._edges):
            return self.hi
        from spark_ledger.topic.acks.sets import after_missing

        lo, hi = int(self._edges[i - 1]), int(self._edges[i])
        return after_missing(self._acked, lo, rows + 1, hi) - 1

    def _rows_in(self, i: int) -> int:
        return int(self._rows[i] - self._rows[i - 1])

    def _bytes_in(self, i: int) -> int:
        return int(self._bytes[i] - self._bytes[i - 1])


def curve_of(
    partition: PartitionState, lo: int, hi: int, tables: Tables = NO_TABLES, *, live_bytes: int = 0
) -> Curve:
    """The curve of the partition's rows in [lo, hi). If `tables` lacks the chunk of an interval,
    the interval's bytes are spread evenly over its rows. Offsets beyond the last commit are rows of
    the live segment; these rows have `live_bytes` bytes together."""
    edges, rows, sizes, since_ms = [_longs(lo)], [_longs(0)], [_longs(0)], NEVER_MS
    start = min(hi, partition.start_offset)
    if lo < start:  # trimmed rows use nothing of the limits
        edges.append(_longs(start))
        rows.append(_longs(0))
        sizes.append(_longs(0))
    for interval in partition.intervals.between(lo, min(hi, partition.end_offset)):
        table = (
            tables.get(interval.source)
            if isinstance(interval.source, TableChunk)
            else interval.source
        )
        segments = (
            _segments_of_table(partition.number, interval, table, lo, hi)
            if table
            else _segment_of_interval(interval, lo, hi)
        )
        for arrays, array in zip((edges, rows, sizes), segments, strict=True):
            arrays.append(array)
        is_hole = interval.source is None
        since_ms = since_ms if is_hole else min(since_ms, interval.first_ms)
    if hi > partition.end_offset:
        live_start = max(lo, partition.end_offset)
        edges.append(_longs(hi))
        rows.append(_longs(hi - live_start))
        sizes.append(_longs(live_bytes))
    row_sums, byte_sums = (np.cumsum(np.concatenate(arrays)) for arrays in (rows, sizes))
    return Curve(np.concatenate(edges), row_sums, byte_sums, since_ms)


def admit(start: Positions, end: Positions, limits: Limits, make_curve: CurveOf) -> Positions:
    """The end of the micro-batch from `start` on: `end`, or where the rows reach a limit on rows or
    bytes. (`holds_back` applies `rows_min`.)"""
    if not limits.has_maximum:
        return end
    curves = {
        (topic, p): make_curve(topic, p, start[topic][p], end[topic][p])
        for topic in sorted(start)
        for p in sorted(start[topic])
        if start[topic][p] < end[topic][p]
    }
    admission = _Admission(curves, limits)
    admission.give_each_a_row()
    admission.share_the_rest()
    return {
        topic: {p: admission.positions.get((topic, p), end[topic][p]) for p in by_partition}
        for topic, by_partition in start.items()
    }


class _Admission:
    """The positions that partitions have reached on the way to the limits."""

    def __init__(self, curves: Mapping[TopicPartition, Curve], limits: Limits) -> None:
        self._curves = curves
        self._rows_left = ENDLESS if limits.rows_max is None else limits.rows_max
        self._bytes_left = ENDLESS if limits.bytes_max is None else limits.bytes_max
        self.positions = {partition: curve.lo for partition, curve in curves.items()}

    def give_each_a_row(self) -> None:
        """Give a row to each partition while a row fits, the partition whose rows wait longest
        first. The first partition gets its row even if the row does not fit. The log does not have
        the times of a live segment's rows: these rows count as waiting since the oldest time of the
        other partitions. Partitions that wait equally long are ordered by a hash of the positions,
        which differ in each batch, so each of these partitions comes first at some time."""
        times_ms = [curve.since_ms for curve in self._curves.values() if curve.since_ms != NEVER_MS]
        oldest_ms = min(times_ms, default=NEVER_MS)
        seed = zlib.crc32(repr(self.positions).encode())

        def by_wait(partition: TopicPartition) -> tuple[int, int, TopicPartition]:
            since_ms = self._curves[partition].since_ms
            waits_since_ms = oldest_ms if since_ms == NEVER_MS else since_ms
            return waits_since_ms, zlib.crc32(f"{seed} {partition}".encode()), partition

        is_first = True
        for partition in sorted(self._curves, key=by_wait):
            curve = self._curves[partition]
            to = curve.end_by_rows(curve.lo, rows=1)  # behind holes before and after the row
            fits = self._rows_left >= 1 and curve.bytes_to(to) <= self._bytes_left
            if fits or is_first:
                self._move(partition, to)
                is_first = False

    def share_the_rest(self) -> None:
        """Share the remaining rows and bytes in proportion to the partitions' backlogs. Partitions
        use in a further round what others could not use of their shares. The rounds end when a
        round gives a partition no more than a row on average."""
        partitions = list(self._curves)
        for _ in range(ROUNDS_MAX):
            partitions = [p for p in partitions if self.positions[p] < self._curves[p].hi]
            rows_before = self._rows_left
            for partition, to in self._shares(partitions).items():
                self._move(partition, to)
            if rows_before - self._rows_left <= len(partitions):
                break

    def _shares(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        """The position to which each partition may move by its share."""
        if min(self._rows_left, self._bytes_left) <= 0:
            return {}
        rows, sizes = {}, {}
        for partition in partitions:
            curve, position = self._curves[partition], self.positions[partition]
            rows[partition] = curve.rows - curve.rows_to(position)
            sizes[partition] = curve.bytes - curve.bytes_to(position)
        row_shares = _in_proportion(self._rows_left, rows)
        byte_shares = _in_proportion(self._bytes_left, sizes)
        positions = {}
        for partition in partitions:
            curve, position = self._curves[partition], self.positions[partition]
            by_rows = curve.end_by_rows(position, row_shares[partition])
            by_bytes = curve.end_by_bytes(position, byte_shares[partition])
            positions[partition] = min(by_rows, by_bytes)
        return positions

    def _move(self, partition: TopicPartition, to: int) -> None:
        curve, position = self._curves[partition], self.positions[partition]
        self._rows_left -= curve.rows_to(to) - curve.rows_to(position)
        self._bytes_left -= curve.bytes_to(to) - curve.bytes_to(position)
        self.positions[partition] = to


def _in_proportion(total: int, backlogs: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """`total` divided in proportion to the backlogs, no share larger than its backlog. The rest
    that rounding leaves goes to the largest remainders, among equal remainders to the first."""
    backlog = sum(backlogs.values())
    if backlog <= total:
        return dict(backlogs)
    shares = {key: total * part // backlog for key, part in backlogs.items()}
    rest = total - sum(shares.values())
    for key in sorted(backlogs, key=lambda key: (-(total * backlogs[key] % backlog), key))[:rest]:
        shares[key] += 1
    return shares


def _sum_at(offset: int, edges: Longs, sums: Longs) -> int:
    """The sum up to `offset`, on the line between the edges around it, rounded up."""
    i = int(np.searchsorted(edges, offset, side="left"))
    hi, sum_hi = int(edges[i]), int(sums[i])
    if offset == hi or i == 0:
        return sum_hi
    lo, sum_lo = int(edges[i - 1]), int(sums[i - 1])
    return sum_lo - (-(sum_hi - sum_lo) * (offset - lo) // (hi - lo))


def _last_offset_within(edges: Longs, sums: Longs, limit: int) -> int:
    """The last offset whose sum is at most `limit`."""
    i = int(np.searchsorted(sums, limit, side="right"))
    if i == len(edges):
        return int(edges[-1])
    lo, sum_lo = int(edges[i - 1]), int(sums[i - 1])
    return lo + (limit - sum_lo) * (int(edges[i]) - lo) // (int(sums[i]) - sum_lo)


class _Segments(NamedTuple):
    """The ends of segments in a range of offsets, with their rows and bytes in the range."""

    ends: Longs
    rows: Longs
    bytes: Longs


def _segments_of_table(
    partition: int, interval: Interval, table: SegmentTable, lo: int, hi: int
) -> _Segments:
    lo, hi = max(lo, interval.lo), min(hi, interval.hi)
    segments = slice(*table.row_range(partition, lo, hi))
    bases, all_rows = table.bases[segments], table.rows[segments]
    ends = np.minimum(bases + all_rows, hi)
    rows = ends - np.maximum(bases, lo)
    return _Segments(ends, rows, -(-table.sizes[segments] * rows // all_rows))


def _segment_of_interval(interval: Interval, lo: int, hi: int) -> _Segments:
    cut = interval.cut(lo, hi)
    rows = 0 if interval.source is None else cut.hi - cut.lo
    return _Segments(_longs(cut.hi), _longs(rows), _longs(cut.bytes))


def _longs(*numbers: int) -> Longs:
    return np.array(numbers, dtype=np.int64)
