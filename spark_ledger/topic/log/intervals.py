"""Where the rows of a partition are: intervals of offsets, each in a table of segments, in a chunk
of a checkpoint that is not in memory, or a hole.

Always true: intervals are not empty, rise, and leave no offset out between the first row kept and
the last. A list does not change once it was given out, but for growing at its end: lists share
their memory, each knows how much of it is its own, so an append costs what it holds.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from spark_ledger.topic.log.segment_table import SegmentTable


@dataclass(frozen=True, slots=True)
class BlobPointer:
    """Bytes kept in a ledger: entries [first, last], `bytes` of them in all with that CRC32C (see
    blobs.py). `metadata_version` as a segment's."""

    ledger_id: int
    metadata_version: int
    first: int
    last: int
    bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored SegmentTable of so many segments; `rows` were held of them when it was stored."""

    pointer: BlobPointer
    segments: int
    rows: int = 0


Source = SegmentTable | Chunk | None


@dataclass(frozen=True, slots=True)
class Interval:
    """Offsets [lo, hi): a hole, or the segments of `source` that hold them (the outer ones may
    reach beyond). `bytes` are the payload bytes of these rows, about; commits brought them in
    from `first_ms` to `last_ms`, by the store's clock."""

    lo: int
    hi: int
    source: Source
    bytes: int
    first_ms: int
    last_ms: int

    def cut(self, lo: int, hi: int) -> "Interval":
        """The part of it within [lo, hi)."""
        lo, hi = max(lo, self.lo), min(hi, self.hi)
        size = self.bytes * (hi - lo) // (self.hi - self.lo)
        return replace(self, lo=lo, hi=hi, bytes=size)


class Intervals:
    """Of one partition."""

    __slots__ = ("_all", "_count", "_los")

    def __init__(
        self,
        all_: list[Interval] | None = None,
        los: list[int] | None = None,
        count: int | None = None,
    ) -> None:
        self._all: list[Interval] = [] if all_ is None else all_
        self._los = [one.lo for one in self._all] if los is None else los
        self._count = len(self._all) if count is None else count

    def __iter__(self) -> Iterator[Interval]:
        for i in range(self._count):
            yield self._all[i]

    def __len__(self) -> int:
        return self._count

    def last(self) -> list[Interval]:
        """The last interval, where there is one."""
        return [self._all[self._count - 1]] if self._count else []

    def between(self, lo: int, hi: int) -> list[Interval]:
        """The intervals with an offset in [lo, hi), whole; O(log n + those)."""
        if hi <= lo or not self._count:
            return []
        first = max(0, bisect_right(self._los, lo, 0, self._count) - 1)
        last = bisect_right(self._los, hi - 1, 0, self._count)
        return [one for one in self._all[first:last] if one.hi > lo]

    def appended(self, interval: Interval) -> "Intervals":
        """With one more at the end."""
        assert not self._count or self._all[self._count - 1].hi == interval.lo, (
            "no offset is left out"
        )
        every, los = self._all, self._los
        if len(every) != self._count:  # another list grew the shared memory: part from it
            every, los = every[: self._count], los[: self._count]
        every.append(interval)
        los.append(interval.lo)
        return Intervals(every, los, self._count + 1)

    def since(self, offset: int) -> "Intervals":
        """Without the offsets below `offset`."""
        return Intervals([one.cut(offset, one.hi) for one in self if one.hi > offset])

    def with_instead(self, interval: Interval) -> "Intervals":
        """With `interval` in the place of what holds its offsets now."""
        lo, hi = interval.lo, interval.hi
        before = [one.cut(one.lo, lo) for one in self if one.lo < lo]
        after = [one.cut(hi, one.hi) for one in self if one.hi > hi]
        return Intervals([*before, interval, *after])
