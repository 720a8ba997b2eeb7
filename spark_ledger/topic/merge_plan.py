"""Which small segments of a partition are worth merging into one. Pure.

Always true: a merge covers consecutive offsets without a hole, of at least `segments_min` whole
segments, all of them small, of about `bytes_max` bytes at most, and committed within one slot of
`slot_ms` by the store's clock: what is merged goes under retention together. Slots do not move, so
what was merged is not merged again for being a little later. The first segment may be cut by the
partition's start: then what is kept of it counts.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spark_ledger import errors
from spark_ledger.topic.intervals import Chunk
from spark_ledger.topic.segment_table import Longs, Stretch
from spark_ledger.topic.segments import CommitTimes
from spark_ledger.topic.state import UNREAD, PartitionState, Tables

MERGED_BYTES = 64 << 20
SLOT_MS = 3600 * 1000
SMALL_PART = 8  # what has an eighth of a merged segment's bytes is large enough

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class MergeLimits:
    """What a merge may be made of. Raises errors.BadConfig for a size that nothing has."""

    bytes_max: int = MERGED_BYTES
    slot_ms: int = SLOT_MS
    segments_min: int = 2

    def __post_init__(self) -> None:
        if self.bytes_max < 1:
            raise errors.BadConfig(
                f"a merged segment has {self.bytes_max} bytes at most",
                "Give merged_bytes of 1 or more, or leave it out: 64 MiB.",
            )

    @property
    def small_bytes(self) -> int:
        return self.bytes_max // SMALL_PART


@dataclass(frozen=True, slots=True)
class Merge:
    """Offsets [start, end) of a partition, now in so many segments, of about so many bytes, in
    these ledgers; `committed` is when its rows were."""

    partition: int
    start: int
    end: int
    segments: int
    bytes: int
    ledgers: tuple[int, ...]
    committed: CommitTimes


def chunks_to_plan(held: PartitionState, lo: int, hi: int) -> list[Chunk]:
    """The chunks that `plan_merges` needs for offsets [lo, hi)."""
    return held.chunks_between(lo, hi)


def plan_merges(
    held: PartitionState,
    lo: int,
    hi: int,
    limits: MergeLimits | None = None,
    read: Tables = UNREAD,
) -> list[Merge]:
    """The merges of what the partition keeps of offsets [lo, hi), in order."""
    lo, hi = max(lo, held.start_offset), min(hi, held.end_offset)
    found = (
        _of_stretch(held.number, one, limits or MergeLimits()) for one in _cut(held, lo, hi, read)
    )
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
    times = table.commits_ms
    for first, last in _alike(sizes < limits.small_bytes, times // limits.slot_ms):
        for i, j in _packed(first, last, before, limits.bytes_max):
            if j - i >= limits.segments_min:
                start, end, part = int(starts[i]), int(ends[j - 1]), table.part(i, j)
                rows, committed = part.commit_times(start, end)
                yield Merge(
                    *(partition, start, end, j - i),
                    int(before[j] - before[i]),
                    tuple(part.ledger_ids()),
                    tuple(zip(rows.tolist(), committed.tolist(), strict=True)),
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
