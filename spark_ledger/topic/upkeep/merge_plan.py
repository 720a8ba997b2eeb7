"""Which small segments of a partition are worth merging into one. Pure.

Always true: a merge covers consecutive offsets without a hole, of at least SEGMENTS_MIN whole
segments, all of them small, of about `bytes_max` bytes at most, and committed within one slot of
`slot_ms` by the store's clock: what is merged goes under retention together. Slots do not move, so
what was merged is not merged again for being a little later. The first segment may be cut by the
partition's start: then what is kept of it counts.

Merging by upkeep (`Upkept`) copies each byte a bounded number of times: while a slot
still takes commits, only segments that become one of GROWTH times the largest of them, and once
more when it takes none (LAST_GROWTH). From 4 KiB to 8 MiB that is four times and the last; what
was merged so is merged no more. Segments that came just now are left alone.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spark_ledger import errors
from spark_ledger.topic.log.segment_table import Chunk, Interval, Longs, Stretch
from spark_ledger.topic.log.segments import CommitTimes, CommitTokens
from spark_ledger.topic.log.state import UNREAD, PartitionState, Tables

MERGED_BYTES = 64 << 20
SLOT_MS = 3600 * 1000
SMALL_PART = 8  # what has an eighth of a merged segment's bytes is large enough
SEGMENTS_MIN = 2
QUIET_MS = 60_000
GROWTH, LAST_GROWTH = 8, 2
COUNTED_BYTES_MIN = 4096

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Upkept:
    """What merges are worth what they copy, at `now_ms` by the store's clock: those that grow as
    the head of this file says. What was committed less than `quiet_ms` ago is left alone. A smaller
    segment counts as one of `counted_bytes_min`."""

    now_ms: int
    quiet_ms: int = QUIET_MS
    counted_bytes_min: int = COUNTED_BYTES_MIN

    @property
    def settled_ms(self) -> int:
        """What was committed before is not left alone."""
        return self.now_ms - self.quiet_ms


@dataclass(frozen=True, slots=True)
class MergeLimits:
    """What a merge may be made of; without `upkept` whatever can be merged is. Raises
    errors.BadConfig for a size that nothing has."""

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
        """Whether no commit can come to the slot any more, nor be left alone there."""
        return self.upkept is not None and self.slot(self.upkept.settled_ms) > slot

    def growth(self, slot: int) -> int:
        """How many times as large as its largest segment a merge of the slot is, at least."""
        if self.upkept is None:
            return 1
        return LAST_GROWTH if self.closed(slot) else GROWTH

    def changes_ms(self, commit_ms: int) -> int | None:
        """When other merges of a topic become worth it though nothing comes after its last commit,
        made at `commit_ms`: once that is left alone no more, and once its slot is closed."""
        if self.upkept is None:
            return None
        begin, quiet_ms = self.slot(commit_ms) * self.slot_ms, self.upkept.quiet_ms
        moments = (begin + quiet_ms, commit_ms + quiet_ms, begin + self.slot_ms + quiet_ms)
        return min((ms + 1 for ms in moments if ms >= self.upkept.now_ms), default=None)


ALL = MergeLimits()
"""Whatever can be merged is."""


@dataclass(frozen=True, slots=True)
class Merge:
    """Offsets [start, end) of a partition, now in so many segments, of about so many bytes, in
    these ledgers; `committed` is when its rows were, `tokens` by which commits. `shared`: in
    entries that other partitions have rows in, too."""

    partition: int
    start: int
    end: int
    segments: int
    bytes: int
    ledgers: tuple[int, ...]
    committed: CommitTimes
    shared: bool = False
    tokens: CommitTokens = ()


def worth_looking(
    held: PartitionState, lo: int, limits: MergeLimits = ALL
) -> list[tuple[int, int]]:
    """Where from `lo` on there may be merges, as ranges of offsets; by the intervals alone. Of
    chunks whose segments are not small on average, merging by upkeep does not look for
    those that are."""
    found: list[tuple[int, int]] = []
    for one in held.intervals.between(lo, held.end_offset):
        if limits.upkept is None or not _large(one, limits.small_bytes):
            joins = bool(found) and found[-1][1] == one.lo
            start = found.pop()[0] if joins else max(lo, one.lo)
            found.append((start, one.hi))
    return found


def _large(one: Interval, small_bytes: int) -> bool:
    """Whether the segments of the interval's chunk are not small, if the interval is as the rest of
    it is."""
    if not isinstance(one.source, Chunk):
        return False
    rows = max(1, one.hi - one.lo)
    return one.bytes * one.source.rows // rows >= small_bytes * one.source.segments


def merged_up_to(held: PartitionState, lo: int, limits: MergeLimits) -> int:
    """The offset below which nothing will be worth merging, once all that was from `lo` on is
    merged: only closed slots are there."""
    for one in held.intervals.between(lo, held.end_offset):
        if not limits.closed(limits.slot(one.last_ms)):
            return max(lo, one.lo)
    return max(lo, held.end_offset)


def plan_merges(
    held: PartitionState,
    lo: int,
    hi: int,
    limits: MergeLimits = ALL,
    read: Tables = UNREAD,
) -> list[Merge]:
    """The merges of what the partition keeps of offsets [lo, hi), in order."""
    lo, hi = max(lo, held.start_offset), min(hi, held.end_offset)
    found = (_of_stretch(held.number, one, limits) for one in _cut(held, lo, hi, read))
    return [merge for some in found for merge in some]


def _cut(held: PartitionState, lo: int, hi: int, read: Tables) -> Iterator[Stretch]:
    """The stretches of [lo, hi) that begin and end where a segment, or the partition, does."""
    for one in held.stretches(lo, hi, read):
        bases, ends = one.table.bases, one.table.ends
        first = int(bases[0]) if bases[0] >= held.start_offset else held.start_offset
        start = one.lo if one.lo == first else int(ends[0])
        end = one.hi if one.hi == int(ends[-1]) else int(bases[-1])
        if start < end:
            yield Stretch(start, end, one.table.between(held.number, start, end))


def _of_stretch(partition: int, one: Stretch, limits: MergeLimits) -> Iterator[Merge]:
    table = one.table
    starts, ends = np.maximum(table.bases, one.lo), np.minimum(table.ends, one.hi)
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
    """A run cut into pieces of at most `bytes_max`; every segment of it is smaller than that."""
    while first < last:
        end = int(np.searchsorted(before, before[first] + bytes_max, side="right")) - 1
        end = min(max(end, first + 1), last)
        yield first, end
        first = end


def _growing(
    piece: tuple[int, int], sizes: Longs, slot: int, limits: MergeLimits
) -> list[tuple[int, int]]:
    """The parts of a piece that are worth merging, in order: the piece, or where it does not grow
    enough by its largest segment, those of what lies on both sides of that. Each cut takes away a
    fixed share of the bytes, so there are few."""
    growth = limits.growth(slot)
    least = 1 if limits.upkept is None else limits.upkept.counted_bytes_min
    counted = np.maximum(sizes[piece[0] : piece[1]], least)
    found, left = [], [(0, len(counted))]
    while left:
        first, last = left.pop()
        if last - first < SEGMENTS_MIN:
            continue
        part = counted[first:last]
        largest = int(part.argmax())
        if int(part.sum()) >= growth * int(part[largest]):
            found.append((piece[0] + first, piece[0] + last))
        else:
            left += [(first, first + largest), (first + largest + 1, last)]
    return sorted(found)
