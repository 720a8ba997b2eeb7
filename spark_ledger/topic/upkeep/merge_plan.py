"""Plans which small segments of a partition are worth merging into one. Pure.

Always true: a merge covers consecutive offsets without a hole, of at least SEGMENTS_MIN whole
segments, all of them small, of about `bytes_max` bytes at most, and committed within one slot of
`slot_ms` by the store's clock: retention trims the rows of a merge together. Slots do not move, so
merged segments are not merged again only because time has passed. The partition's start may cut the
first segment: then its kept rows count.

Merging by upkeep (`Upkept`) copies each byte a bounded number of times. While a slot still takes
commits, it merges only segments that together are GROWTH times as large as the largest of them, and
once more after the slot has closed (LAST_GROWTH). From 4 KiB to 8 MiB that is four merges and the
last one; after that the segments are not merged any more. New segments are left alone for a while.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spark_ledger import errors
from spark_ledger.topic.log.segment_table import Interval, Longs, Stretch, TableChunk
from spark_ledger.topic.log.segments import CommitTimes, CommitTokens
from spark_ledger.topic.log.state import UNREAD, PartitionState, Tables

MERGED_BYTES = 64 << 20
SLOT_MS = 3600 * 1000
SMALL_PART = 8  # a segment with an eighth of a merged segment's bytes is large enough
SEGMENTS_MIN = 2
QUIET_MS = 60_000
GROWTH, LAST_GROWTH = 8, 2
COUNTED_BYTES_MIN = 4096

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Upkept:
    """Limits merging to merges that are worth copying, at `now_ms` by the store's clock: those that
    grow as described at the head of this file. Segments that were committed less than `quiet_ms`
    ago are left alone. A smaller segment counts as one of `counted_bytes_min`."""

    now_ms: int
    quiet_ms: int = QUIET_MS
    counted_bytes_min: int = COUNTED_BYTES_MIN

    @property
    def settled_ms(self) -> int:
        """Segments that were committed before this time are not left alone."""
        return self.now_ms - self.quiet_ms


@dataclass(frozen=True, slots=True)
class MergeLimits:
    """The limits of a merge; without `upkept` all segments that can be merged are. Raises
    errors.BadConfig for a size below 1 byte."""

    bytes_max: int = MERGED_BYTES
    slot_ms: int = SLOT_MS
    upkept: Upkept | None = None

    def __post_init__(self) -> None:
        if self.bytes_max < 1:
            raise errors.BadConfig(
                f"a merged segment has {self.bytes_max} bytes at most",
                "Give merged_bytes of 1 or more, or leave it out: 64 MiB.",
            )

    @property
    def small_bytes(self) -> int:
        return self.bytes_max // SMALL_PART

    def slot(self, ms: int) -> int:
        return ms // self.slot_ms

    def closed(self, slot: int) -> bool:
        """Whether no commit can come to the slot any more, and none in it is left alone."""
        return self.upkept is not None and self.slot(self.upkept.settled_ms) > slot

    def growth(self, slot: int) -> int:
        """How many times as large as its largest segment a merge of the slot must be."""
        if self.upkept is None:
            return 1
        return LAST_GROWTH if self.closed(slot) else GROWTH

    def changes_ms(self, commit_ms: int) -> int | None:
        """When other merges of a topic become worth it without a commit after the last one, made at
        `commit_ms`: once that commit is not left alone any more, and once its slot is closed."""
        if self.upkept is None:
            return None
        begin, quiet_ms = self.slot(commit_ms) * self.slot_ms, self.upkept.quiet_ms
        moments = (begin + quiet_ms, commit_ms + quiet_ms, begin + self.slot_ms + quiet_ms)
        return min((ms + 1 for ms in moments if ms >= self.upkept.now_ms), default=None)


ALL_MERGEABLE = MergeLimits()
"""Without limits of upkeep: all segments that can be merged are."""


@dataclass(frozen=True, slots=True)
class Merge:
    """Offsets [start, end) of a partition: how many `segments` they have now, of about how many
    `bytes`, in which ledgers; `commit_times` and `commit_tokens` are those of the commits that
    made the rows. `shared`: the entries also have rows of other partitions."""

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
    """Ranges of offsets from `lo` on in which there may be merges, by the intervals alone. Merging
    by upkeep skips a chunk whose segments are not small on average, even if some of them are."""
    ranges: list[tuple[int, int]] = []
    for interval in partition.intervals.between(lo, partition.end_offset):
        if limits.upkept is None or not _large(interval, limits.small_bytes):
            joins = bool(ranges) and ranges[-1][1] == interval.lo
            start = ranges.pop()[0] if joins else max(lo, interval.lo)
            ranges.append((start, interval.hi))
    return ranges


def _large(interval: Interval, small_bytes: int) -> bool:
    """Whether the segments of the interval's chunk are not small on average, if the rest of the
    chunk is like the interval."""
    chunk = interval.source
    if not isinstance(chunk, TableChunk):
        return False
    rows = max(1, interval.hi - interval.lo)
    return interval.bytes * chunk.rows // rows >= small_bytes * chunk.segments


def merged_up_to(partition: PartitionState, lo: int, limits: MergeLimits) -> int:
    """The offset below which no merge will ever be worth it, once all merges from `lo` on are done:
    only closed slots are below it."""
    for interval in partition.intervals.between(lo, partition.end_offset):
        if not limits.closed(limits.slot(interval.last_ms)):
            return max(lo, interval.lo)
    return max(lo, partition.end_offset)


def plan_merges(
    partition: PartitionState,
    lo: int,
    hi: int,
    limits: MergeLimits = ALL_MERGEABLE,
    read: Tables = UNREAD,
) -> list[Merge]:
    """The merges of the rows that the partition keeps at offsets [lo, hi), in order."""
    lo, hi = max(lo, partition.start_offset), min(hi, partition.end_offset)
    stretches = _cut(partition, lo, hi, read)
    by_stretch = (_of_stretch(partition.number, stretch, limits) for stretch in stretches)
    return [merge for merges in by_stretch for merge in merges]


def _cut(partition: PartitionState, lo: int, hi: int, read: Tables) -> Iterator[Stretch]:
    """The stretches of [lo, hi), cut such that each begins and ends with a segment or with the
    partition."""
    for stretch in partition.stretches(lo, hi, read):
        bases, ends = stretch.table.bases, stretch.table.ends
        first = int(bases[0]) if bases[0] >= partition.start_offset else partition.start_offset
        start = stretch.lo if stretch.lo == first else int(ends[0])
        end = stretch.hi if stretch.hi == int(ends[-1]) else int(bases[-1])
        if start < end:
            yield Stretch(start, end, stretch.table.between(partition.number, start, end))


def _of_stretch(partition: int, stretch: Stretch, limits: MergeLimits) -> Iterator[Merge]:
    table = stretch.table
    starts, ends = np.maximum(table.bases, stretch.lo), np.minimum(table.ends, stretch.hi)
    sizes = table.sizes * (ends - starts) // table.rows
    before = np.concatenate([[0], np.cumsum(sizes)])
    slots = table.commits_ms // limits.slot_ms
    mergeable = sizes < limits.small_bytes
    if limits.upkept is not None:
        mergeable &= table.commits_ms < limits.upkept.settled_ms
    for first, last in _alike(mergeable, slots):
        for piece in _packed(first, last, before, limits.bytes_max):
            for i, j in _growing(piece, sizes, int(slots[first]), limits):
                start, end, part = int(starts[i]), int(ends[j - 1]), table.part(i, j)
                rows, committed = part.commit_times(start, end)
                made, tokens = part.commit_tokens(start, end)
                yield Merge(
                    *(partition, start, end, j - i),
                    int(before[j] - before[i]),
                    tuple(part.ledger_ids()),
                    tuple(zip(rows.tolist(), committed.tolist(), strict=True)),
                    bool(part.shared.any()),
                    tuple(zip(made.tolist(), tokens.tolist(), strict=True)),
                )


def _alike(small: Mask, slots: Longs) -> Iterator[tuple[int, int]]:
    """Runs [first, last) of small segments of one slot."""
    edges = np.flatnonzero((np.diff(slots) != 0) | (np.diff(small.astype(np.int8)) != 0)) + 1
    bounds = [0, *edges.tolist(), len(small)]
    for first, last in itertools.pairwise(bounds):
        if last > first and small[first]:
            yield first, last


def _packed(first: int, last: int, before: Longs, bytes_max: int) -> Iterator[tuple[int, int]]:
    """Cuts a run into pieces of at most `bytes_max`; each of its segments is smaller than that."""
    while first < last:
        end = int(np.searchsorted(before, before[first] + bytes_max, side="right")) - 1
        end = min(max(end, first + 1), last)
        yield first, end
        first = end


def _growing(
    piece: tuple[int, int], sizes: Longs, slot: int, limits: MergeLimits
) -> list[tuple[int, int]]:
    """The parts of a piece that are worth merging, in order: the whole piece; or, if it is not
    large enough compared with its largest segment, the parts on both sides of that segment. Each
    cut takes away a fixed share of the bytes, so there are few cuts."""
    growth = limits.growth(slot)
    least = 1 if limits.upkept is None else limits.upkept.counted_bytes_min
    counted = np.maximum(sizes[piece[0] : piece[1]], least)
    parts, left = [], [(0, len(counted))]
    while left:
        first, last = left.pop()
        if last - first < SEGMENTS_MIN:
            continue
        part = counted[first:last]
        largest = int(part.argmax())
        if int(part.sum()) >= growth * int(part[largest]):
            parts.append((piece[0] + first, piece[0] + last))
        else:
            left += [(first, first + largest), (first + largest + 1, last)]
    return sorted(parts)
