"""Plans which small segments of a partition are worth merging into one. Pure.

Always true: a merge covers consecutive offsets without a hole. These offsets belong to at least
SEGMENTS_MIN whole segments, all small, of about `bytes_max` bytes together at most, and all
committed within one slot of `slot_ms` by the store's clock, since retention trims the rows of a
merge together. Slots do not move, so merged segments are not merged again only because time has
passed. If the partition's start cuts the first segment, only its remaining rows count.

Merging by upkeep (`UpkeepLimits`) copies each byte a limited number of times. While a slot still
takes commits, upkeep merges only segments that together are GROWTH times as large as the largest
segment among them. After the slot has closed, upkeep merges once more; then LAST_GROWTH times is
enough. From 4 KiB to 8 MiB, a row is merged four times and once more at the end. New segments are
not merged for QUIET_MS.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spark_ledger import errors
from spark_ledger.topic.log.segment_table import Interval, Longs, Stretch, TableChunk
from spark_ledger.topic.log.segments import CommitTimes, CommitTokens
from spark_ledger.topic.log.state import NO_TABLES, PartitionState, Tables

MERGED_BYTES = 64 << 20
SLOT_MS = 3600 * 1000
SMALL_PART = 8  # a segment with an eighth of a merged segment's bytes is large enough
SEGMENTS_MIN = 2
QUIET_MS = 60_000
GROWTH, LAST_GROWTH = 8, 2
COUNTED_BYTES_MIN = 4096

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class UpkeepLimits:
    """Limits merging to merges that are worth the copying, at `now_ms` by the store's clock, as
    the head of this file describes. Segments that were committed less than `quiet_ms` ago are not
    merged. A smaller segment counts as `counted_bytes_min` bytes."""

    now_ms: int
    quiet_ms: int = QUIET_MS
    counted_bytes_min: int = COUNTED_BYTES_MIN

    @property
    def quiet_since_ms(self) -> int:
        """Segments that were committed before this time may be merged."""
        return self.now_ms - self.quiet_ms


@dataclass(frozen=True, slots=True)
class MergeLimits:
    """The limits of merging; without `upkeep_limits` all small segments are merged. Raises
    errors.BadConfig for a size below 1 byte."""

    bytes_max: int = MERGED_BYTES
    slot_ms: int = SLOT_MS
    upkeep_limits: UpkeepLimits | None = None

    def __post_init__(self) -> None:
        if self.bytes_max < 1:
            raise errors.BadConfig(
                f"a merged segment has {self.bytes_max} bytes at most",
                "Give merged_bytes of 1 or more, or leave it out for 64 MiB.",
            )

    @property
    def small_bytes(self) -> int:
        return self.bytes_max // SMALL_PART

    def slot(self, ms: int) -> int:
        return ms // self.slot_ms

    def is_closed(self, slot: int) -> bool:
        """Whether the slot gets no further commit, and all its segments may be merged."""
        return (
            self.upkeep_limits is not None and self.slot(self.upkeep_limits.quiet_since_ms) > slot
        )

    def growth(self, slot: int) -> int:
        """How many times as large as its largest segment a merge in the slot must be."""
        if self.upkeep_limits is None:
            return 1
        return LAST_GROWTH if self.is_closed(slot) else GROWTH

    def next_look_ms(self, commit_ms: int) -> int | None:
        """The next time at which other merges of a topic become worth it without a new commit, if
        its last commit was at `commit_ms`: when this commit may be merged, or when its slot closes.
        """
        if self.upkeep_limits is None:
            return None
        begin, quiet_ms = self.slot(commit_ms) * self.slot_ms, self.upkeep_limits.quiet_ms
        moments = (begin + quiet_ms, commit_ms + quiet_ms, begin + self.slot_ms + quiet_ms)
        return min((ms + 1 for ms in moments if ms >= self.upkeep_limits.now_ms), default=None)


ALL_MERGEABLE = MergeLimits()
"""Without limits of upkeep: all small segments are merged."""


@dataclass(frozen=True, slots=True)
class Merge:
    """Offsets [start, end) of a partition to merge. Their rows are in `segments` segments now, of
    about `bytes` bytes, in `ledgers`. `commit_times` and `commit_tokens` are those of the commits
    that made the rows. `shared`: whether the entries also have rows of other partitions."""

    partition: int
    start: int
    end: int
    segments: int
    bytes: int
    ledgers: tuple[int, ...]
    commit_times: CommitTimes
    shared: bool = False
    commit_tokens: CommitTokens = ()


def ranges_to_search(
    partition: PartitionState, lo: int, limits: MergeLimits = ALL_MERGEABLE
) -> list[tuple[int, int]]:
    """The ranges of offsets from `lo` on that may have merges, as far as the intervals show.
    Merging by upkeep skips a chunk whose segments are not small on average, although some of its
    segments may be small."""
    ranges: list[tuple[int, int]] = []
    for interval in partition.intervals.between(lo, partition.end_offset):
        if limits.upkeep_limits is None or not _has_large_segments(interval, limits.small_bytes):
            is_adjacent = bool(ranges) and ranges[-1][1] == interval.lo
            start = ranges.pop()[0] if is_adjacent else max(lo, interval.lo)
            ranges.append((start, interval.hi))
    return ranges


def _has_large_segments(interval: Interval, small_bytes: int) -> bool:
    """Whether the segments of the interval's chunk are not small on average; assumes that the rest
    of the chunk is like the interval."""
    chunk = interval.source
    if not isinstance(chunk, TableChunk):
        return False
    rows = max(1, interval.hi - interval.lo)
    return interval.bytes * chunk.rows // rows >= small_bytes * chunk.segments


def merged_up_to(partition: PartitionState, lo: int, limits: MergeLimits) -> int:
    """The offset below which all slots are closed. Once all merges from `lo` on are done, no merge
    below this offset will ever be worth it."""
    for interval in partition.intervals.between(lo, partition.end_offset):
        if not limits.is_closed(limits.slot(interval.last_ms)):
            return max(lo, interval.lo)
    return max(lo, partition.end_offset)


def plan_merges(
    partition: PartitionState,
    lo: int,
    hi: int,
    limits: MergeLimits = ALL_MERGEABLE,
    read: Tables = NO_TABLES,
) -> list[Merge]:
    """The merges of the rows that the partition keeps at offsets [lo, hi), in order."""
    lo, hi = max(lo, partition.start_offset), min(hi, partition.end_offset)
    stretches = _whole_segment_stretches(partition, lo, hi, read)
    by_stretch = (_merges_of_stretch(partition.number, stretch, limits) for stretch in stretches)
    return [merge for merges in by_stretch for merge in merges]


def _whole_segment_stretches(
    partition: PartitionState, lo: int, hi: int, read: Tables
) -> Iterator[Stretch]:
    """The stretches of [lo, hi), without segments that [lo, hi) cuts. (A segment may be cut by the
    partition's start.)"""
    for stretch in partition.stretches(lo, hi, read):
        bases, ends = stretch.table.bases, stretch.table.ends
        first = int(bases[0]) if bases[0] >= partition.start_offset else partition.start_offset
        start = stretch.lo if stretch.lo == first else int(ends[0])
        end = stretch.hi if stretch.hi == int(ends[-1]) else int(bases[-1])
        if start < end:
            yield Stretch(start, end, stretch.table.between(partition.number, start, end))


def _merges_of_stretch(partition: int, stretch: Stretch, limits: MergeLimits) -> Iterator[Merge]:
    table = stretch.table
    starts, ends = np.maximum(table.bases, stretch.lo), np.minimum(table.ends, stretch.hi)
    sizes = table.sizes * (ends - starts) // table.rows
    before = np.concatenate([[0], np.cumsum(sizes)])
    slots = table.commits_ms // limits.slot_ms
    mergeable = sizes < limits.small_bytes
    if limits.upkeep_limits is not None:
        mergeable &= table.commits_ms < limits.upkeep_limits.quiet_since_ms
    for first, last in _mergeable_runs(mergeable, slots):
        for piece in _cut_by_bytes(first, last, before, limits.bytes_max):
            for i, j in _worth_merging(piece, sizes, int(slots[first]), limits):
                start, end, part = int(starts[i]), int(ends[j - 1]), table.part(i, j)
                rows, times_ms = part.commit_times(start, end)
                token_rows, tokens = part.commit_tokens(start, end)
                yield Merge(
                    *(partition, start, end, j - i),
                    int(before[j] - before[i]),
                    tuple(part.ledger_ids()),
                    tuple(zip(rows.tolist(), times_ms.tolist(), strict=True)),
                    bool(part.shared.any()),
                    tuple(zip(token_rows.tolist(), tokens.tolist(), strict=True)),
                )


def _mergeable_runs(small: Mask, slots: Longs) -> Iterator[tuple[int, int]]:
    """The runs [first, last) of small segments of one slot."""
    edges = np.flatnonzero((np.diff(slots) != 0) | (np.diff(small.astype(np.int8)) != 0)) + 1
    bounds = [0, *edges.tolist(), len(small)]
    for first, last in itertools.pairwise(bounds):
        if last > first and small[first]:
            yield first, last


def _cut_by_bytes(
    first: int, last: int, before: Longs, bytes_max: int
) -> Iterator[tuple[int, int]]:
    """Cuts a run of segments, each smaller than `bytes_max`, into pieces of at most `bytes_max`."""
    while first < last:
        end = int(np.searchsorted(before, before[first] + bytes_max, side="right")) - 1
        end = min(max(end, first + 1), last)
        yield first, end
        first = end


def _worth_merging(
    piece: tuple[int, int], sizes: Longs, slot: int, limits: MergeLimits
) -> list[tuple[int, int]]:
    """The parts of a piece that are worth merging, in order. The whole piece is worth it if the
    piece is large enough compared with its largest segment. Otherwise the same rule decides about
    the parts on both sides of the largest segment. Each cut removes a fixed share of the bytes, so
    there are few cuts."""
    growth = limits.growth(slot)
    bytes_min = 1 if limits.upkeep_limits is None else limits.upkeep_limits.counted_bytes_min
    counted_bytes = np.maximum(sizes[piece[0] : piece[1]], bytes_min)
    parts, remaining = [], [(0, len(counted_bytes))]
    while remaining:
        first, last = remaining.pop()
        if last - first < SEGMENTS_MIN:
            continue
        part = counted_bytes[first:last]
        largest = int(part.argmax())
        if int(part.sum()) >= growth * int(part[largest]):
            parts.append((piece[0] + first, piece[0] + last))
        else:
            remaining += [(first, first + largest), (first + largest + 1, last)]
    return sorted(parts)
