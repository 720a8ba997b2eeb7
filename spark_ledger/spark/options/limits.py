"""How much one micro-batch takes: rows, bytes, and when to wait for more. Pure.

Always true: the admitted rows are within the limits on rows and bytes together, or they are one
row; there is at least a row while there is a backlog. Each partition gets a share by its backlog,
and no partition waits for ever behind a larger one: each gets a row before any gets its share, the
partition whose rows wait longest first. Holes count as nothing.
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
from spark_ledger.topic.log.state import UNREAD, PartitionState, Tables

ENDLESS = 2**62
ROUNDS_MAX = 16
NEVER_MS = 2**62

Slot = tuple[str, int]
"""A topic, by its short name, and a partition."""
CurveOf = Callable[[str, int, int, int], "Curve"]
"""(topic, partition, lo, hi): the curve of these offsets."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a micro-batch. None: no limit. `rows_min` holds rows back for at most
    `delay_ms_max`."""

    rows_max: int | None = None
    bytes_max: int | None = None
    rows_min: int | None = None
    delay_ms_max: int = default_of("maxTriggerDelay")

    @property
    def bounded(self) -> bool:
        return self.rows_max is not None or self.bytes_max is not None


def read_limit(limits: Limits) -> ReadLimit:
    """The limit that a source gives Spark. Spark hands this one back, and the source applies all;
    only if Spark itself passes ReadAllAvailable (Trigger.Once), no limit counts: see `obeyed`."""
    if limits.rows_max is not None:
        return ReadMaxRows(limits.rows_max)
    if limits.bytes_max is not None:
        return ReadMaxBytes(limits.bytes_max)
    return ReadAllAvailable() if limits.rows_min is None else ReadMinRows(limits.rows_min)


def obeyed(limits: Limits, limit: ReadLimit) -> Limits:
    """The limits that count when Spark passes `limit`."""
    return Limits() if isinstance(limit, ReadAllAvailable) else limits


def holds_back(limits: Limits, backlog_rows: int, since_ms: int | None) -> bool:
    """Whether to wait for more rows: there are fewer than `rows_min`, and the last micro-batch was
    given out less than the delay ago, `since_ms` (None: this run gave out none). Do not call this
    under availableNow."""
    if limits.rows_min is None or since_ms is None or since_ms >= limits.delay_ms_max:
        return False
    return backlog_rows < limits.rows_min


class Curve:
    """Rows and bytes of offsets [lo, hi) of a partition, as they add up from `lo`: straight lines
    between `edges`, the edges of the segments. The first row was committed at `since_ms`."""

    def __init__(self, edges: Longs, rows: Longs, sizes: Longs, since_ms: int) -> None:
        """`rows` and `sizes` are sums up to each edge; they never fall, and are 0 at the first."""
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
        return _along(offset, self._edges, self._rows)

    def bytes_to(self, offset: int) -> int:
        """The bytes up to the offset: rounded up inside a segment, exact at its edges."""
        return _along(offset, self._edges, self._bytes)

    def after_rows(self, offset: int, rows: int) -> int:
        """The furthest offset with at most so many rows behind `offset`."""
        return _furthest(self._edges, self._rows, self.rows_to(offset) + rows)

    def after_bytes(self, offset: int, size: int) -> int:
        """The furthest offset with at most so many bytes behind `offset`."""
        return _furthest(self._edges, self._bytes, self.bytes_to(offset) + size)


def curve_of(
    held: PartitionState, lo: int, hi: int, read: Tables = UNREAD, *, live_bytes: int = 0
) -> Curve:
    """The curve of the partition's rows in [lo, hi). Rows of segments in chunks that are not in
    `read` count as equally large. Offsets beyond the last commit are rows of the live segment and
    take `live_bytes`."""
    edges, rows, sizes, since = [_longs(lo)], [_longs(0)], [_longs(0)], NEVER_MS
    gone = min(hi, held.start_offset)
    if lo < gone:  # these rows are gone, and use nothing of the limits
        edges.append(_longs(gone))
        rows.append(_longs(0))
        sizes.append(_longs(0))
    for interval in held.intervals.between(lo, min(hi, held.end_offset)):
        table = (
            read.get(interval.source)
            if isinstance(interval.source, TableChunk)
            else interval.source
        )
        parts = (
            _of_table(held.number, interval, table, lo, hi)
            if table
            else _of_interval(interval, lo, hi)
        )
        for whole, part in zip((edges, rows, sizes), parts, strict=True):
            whole.append(part)
        since = min(since, interval.first_ms) if interval.source is not None else since
    if hi > held.end_offset:
        start = max(lo, held.end_offset)
        edges.append(_longs(hi))
        rows.append(_longs(hi - start))
        sizes.append(_longs(live_bytes))
    row_sums, byte_sums = (np.cumsum(np.concatenate(parts)) for parts in (rows, sizes))
    return Curve(np.concatenate(edges), row_sums, byte_sums, since)


def admit(start: Positions, end: Positions, limits: Limits, curve_of: CurveOf) -> Positions:
    """The end of a micro-batch that begins at `start`, if there are rows up to `end`: within the
    limits on rows and bytes. `holds_back` applies the limit on fewest rows.
    """
    if not limits.bounded:
        return end
    slots = _slots(start)
    curves = {
        (topic, p): curve_of(topic, p, start[topic][p], end[topic][p])
        for topic, p in slots
        if start[topic][p] < end[topic][p]
    }
    at = _Admitted(curves, limits)
    at.give_each_a_row()
    at.share_the_rest()
    reached = {slot: at.positions.get(slot, end[slot[0]][slot[1]]) for slot in slots}
    return {topic: {p: reached[topic, p] for p in parts} for topic, parts in start.items()}


class _Admitted:
    """The positions that partitions have reached on the way to the limits."""

    def __init__(self, curves: Mapping[Slot, Curve], limits: Limits) -> None:
        self._curves = curves
        self._rows_left = ENDLESS if limits.rows_max is None else limits.rows_max
        self._bytes_left = ENDLESS if limits.bytes_max is None else limits.bytes_max
        self.positions = {slot: curve.lo for slot, curve in curves.items()}

    def give_each_a_row(self) -> None:
        """Give a row to each partition, the one whose rows wait longest first, while they fit; to
        the very first always. Rows of a live segment, whose time the log does not have, wait as
        long as the longest. Of partitions that wait equally long each comes first by and by: the
        order is drawn from the positions, which are others for each batch."""
        times_ms = [curve.since_ms for curve in self._curves.values() if curve.since_ms != NEVER_MS]
        oldest_ms = min(times_ms, default=NEVER_MS)
        drawn = zlib.crc32(repr(self.positions).encode())

        def by_wait(slot: Slot) -> tuple[int, int, Slot]:
            since_ms = self._curves[slot].since_ms
            waits = oldest_ms if since_ms == NEVER_MS else since_ms
            return waits, zlib.crc32(f"{drawn} {slot}".encode()), slot

        longest = sorted(self._curves, key=by_wait)
        given = False
        for slot in longest:
            curve = self._curves[slot]
            to = min(curve.hi, curve.after_rows(curve.lo, 0) + 1)
            fits = self._rows_left >= 1 and curve.bytes_to(to) <= self._bytes_left
            if fits or not given:
                self._move(slot, to)
                given = True

    def share_the_rest(self) -> None:
        """Share rows and bytes by the partitions' remaining backlogs, and again while it is worth
        it: one partition may use what another cannot."""
        open_ = list(self._curves)
        for _ in range(ROUNDS_MAX):
            open_ = [slot for slot in open_ if self.positions[slot] < self._curves[slot].hi]
            before = self._rows_left
            for slot, to in self._shares(open_).items():
                self._move(slot, to)
            if before - self._rows_left <= len(open_):
                break

    def _shares(self, open_: list[Slot]) -> dict[Slot, int]:
        if min(self._rows_left, self._bytes_left) <= 0:
            return {}
        rows, sizes = {}, {}
        for slot in open_:
            curve, at = self._curves[slot], self.positions[slot]
            rows[slot] = curve.rows - curve.rows_to(at)
            sizes[slot] = curve.bytes - curve.bytes_to(at)
        by_rows, by_bytes = _shared(self._rows_left, rows), _shared(self._bytes_left, sizes)
        moves = {}
        for slot in open_:
            curve, at = self._curves[slot], self.positions[slot]
            most = curve.after_rows(at, by_rows[slot])
            moves[slot] = min(most, curve.after_bytes(at, by_bytes[slot]))
        return moves

    def _move(self, slot: Slot, to: int) -> None:
        curve, at = self._curves[slot], self.positions[slot]
        self._rows_left -= curve.rows_to(to) - curve.rows_to(at)
        self._bytes_left -= curve.bytes_to(to) - curve.bytes_to(at)
        self.positions[slot] = to


def _shared(whole: int, parts: Mapping[Slot, int]) -> dict[Slot, int]:
    """`whole` divided in proportion to the parts, no share larger than its part; the rest of the
    rounding goes to the largest remainders, then to the first slots."""
    total = sum(parts.values())
    if total <= whole:
        return dict(parts)
    shares = {slot: whole * part // total for slot, part in parts.items()}
    left = whole - sum(shares.values())
    for slot in sorted(parts, key=lambda slot: (-(whole * parts[slot] % total), slot))[:left]:
        shares[slot] += 1
    return shares


def _slots(positions: Positions) -> list[Slot]:
    return sorted((topic, p) for topic, parts in positions.items() for p in parts)


def _along(offset: int, edges: Longs, sums: Longs) -> int:
    """The sum up to `offset`, on the line between the edges around it, rounded up."""
    i = int(np.searchsorted(edges, offset, side="left"))
    hi, at = int(edges[i]), int(sums[i])
    if offset == hi or i == 0:
        return at
    lo, before = int(edges[i - 1]), int(sums[i - 1])
    return before - (-(at - before) * (offset - lo) // (hi - lo))


def _furthest(edges: Longs, sums: Longs, limit: int) -> int:
    """The furthest offset up to which there is at most `limit`."""
    i = int(np.searchsorted(sums, limit, side="right"))
    if i == len(edges):
        return int(edges[-1])
    lo, before = int(edges[i - 1]), int(sums[i - 1])
    return lo + (limit - before) * (int(edges[i]) - lo) // (int(sums[i]) - before)


class _Segments(NamedTuple):
    """The ends of segments in a range of offsets, with the rows and bytes that each has there."""

    ends: Longs
    rows: Longs
    bytes: Longs


def _of_table(
    partition: int, interval: Interval, table: SegmentTable, lo: int, hi: int
) -> _Segments:
    lo, hi = max(lo, interval.lo), min(hi, interval.hi)
    segments = slice(*table.places(partition, lo, hi))
    bases, held = table.bases[segments], table.rows[segments]
    ends = np.minimum(bases + held, hi)
    rows = ends - np.maximum(bases, lo)
    return _Segments(ends, rows, -(-table.sizes[segments] * rows // held))


def _of_interval(interval: Interval, lo: int, hi: int) -> _Segments:
    cut = interval.cut(lo, hi)
    rows = 0 if interval.source is None else cut.hi - cut.lo
    return _Segments(_longs(cut.hi), _longs(rows), _longs(cut.bytes))


def _longs(*numbers: int) -> Longs:
    return np.array(numbers, dtype=np.int64)
