"""Planning a read: ranges of offsets become tasks. Pure.

Always true: the tasks of a plan hold every row of the ranges once, in order within a partition,
holes left out; a task reads one partition. It carries segments in columns; what its reader fetches
is made of them in the task itself (read_slice.py), so a plan over a million segments stays small.
"""

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spark_ledger import errors
from spark_ledger.topic.intervals import Chunk
from spark_ledger.topic.read_slice import ReadSlice, slices_of
from spark_ledger.topic.segment_table import Longs, Stretch
from spark_ledger.topic.segments import LiveSegment
from spark_ledger.topic.state import UNREAD, PartitionState, Tables, TopicState

TASK_BYTES = 64 * 1024 * 1024
EMPTY_ROW_BYTES = 1e-3  # so that rows without bytes are shared out too
Ranges = Mapping[int, tuple[int, int]]
"""By partition the offsets [start, end) to read."""


@dataclass(frozen=True, slots=True)
class LiveRows:
    """Rows of a live segment: offsets [start, end) of the partition, all of them in entries up to
    `last_entry`, which is confirmed."""

    live: LiveSegment
    start: int
    end: int
    last_entry: int


@dataclass(frozen=True, slots=True)
class ReadTask:
    """What one Spark task reads: what is kept of offsets [start, end) of one partition. Picklable.
    `live` are rows of the partition's open end, after those of the stretches."""

    topic: str
    topic_id: str
    partition: int
    start: int
    end: int
    stretches: tuple[Stretch, ...]
    live: LiveRows | None = None

    @property
    def rows(self) -> int:
        live = 0 if self.live is None else self.live.end - self.live.start
        return live + sum(stretch.rows for stretch in self.stretches)

    @property
    def slices(self) -> tuple[ReadSlice, ...]:
        """What is fetched, in order; made anew at each call."""
        return tuple(self.slices_in_order())

    def slices_in_order(self) -> Iterator[ReadSlice]:
        """As `slices`, one at a time."""
        return slices_of(self.topic_id, self.partition, self.stretches)


@dataclass(frozen=True, slots=True)
class Cutting:
    """How ranges become tasks: at least `tasks_min` in proportion to bytes, none of more than
    about `task_bytes` or of more than `task_rows`."""

    tasks_min: int = 1
    task_bytes: int = TASK_BYTES
    task_rows: int | None = None


def chunks_to_read(state: TopicState, ranges: Ranges) -> list[Chunk]:
    """The chunks that `plan_read` needs for these ranges."""
    _check(state, ranges)
    found = (state.partitions[p].chunks_between(*ends) for p, ends in ranges.items())
    return list(dict.fromkeys(chunk for some in found for chunk in some))


def plan_read(
    state: TopicState,
    ranges: Ranges,
    *,
    topic: str = "",
    cutting: Cutting | None = None,
    read: Tables = UNREAD,
) -> list[ReadTask]:
    """Tasks for the rows [start, end) of each partition in `ranges`, by partition and offset.

    Cut at entry boundaries where one is near, else inside an entry. Ranges without a row give no
    task. `read` has the chunks of `chunks_to_read`.
    Raises errors.NoSuchEntry (LEDGER_OFFSETS.OUT_OF_RANGE) for a range beyond the state.
    """
    _check(state, ranges)
    cutting = cutting or Cutting()
    parts = {p: _Part(state.partitions[p], *ends, read) for p, ends in sorted(ranges.items())}
    total = sum(part.weight for part in parts.values())
    tasks = []
    for p, part in parts.items():
        for lo, hi in itertools.pairwise(part.cuts(cutting, total)):
            kept = tuple(part.clipped(lo, hi))
            if kept:
                tasks.append(ReadTask(topic, state.topic_id, p, lo, hi, kept))
    return _as_many(tasks, parts, cutting.tasks_min)


def _as_many(tasks: list[ReadTask], parts: Mapping[int, "_Part"], tasks_min: int) -> list[ReadTask]:
    """Those with most rows cut in the middle until there are enough, or one for each row: bytes
    alone do not tell where to cut rows that have none, or many beside one large row."""
    if len(tasks) >= tasks_min:
        return tasks
    heap = [(-task.rows, task.partition, task.start, task) for task in tasks]
    heapq.heapify(heap)
    while heap and len(heap) < tasks_min and heap[0][0] < -1:
        task = heapq.heappop(heap)[-1]
        cut = parts[task.partition].after_rows(task, task.rows // 2)
        for lo, hi in ((task.start, cut), (cut, task.end)):
            kept = tuple(parts[task.partition].clipped(lo, hi))
            half = replace(task, start=lo, end=hi, stretches=kept)
            heapq.heappush(heap, (-half.rows, task.partition, lo, half))
    return sorted((one[-1] for one in heap), key=lambda task: (task.partition, task.start))


class _Part:
    """One partition's share of a plan."""

    def __init__(self, held: PartitionState, start: int, end: int, read: Tables) -> None:
        self._held = held
        self._start = start
        self._end = end
        self._stretches = held.stretches(start, end, read)
        self._firsts = np.cumsum([0, *(len(one.table) for one in self._stretches)])
        empty: Sequence[Longs] = [np.zeros(0, np.int64)]
        clipped = [_clipped(one) for one in self._stretches]
        self._los = np.concatenate([los for los, _, _ in clipped] or empty)
        self._rows = np.concatenate([rows for _, rows, _ in clipped] or empty)
        self._weights = np.zeros(len(self._rows) + 1)
        np.cumsum(
            np.concatenate([sizes for _, _, sizes in clipped] or empty), out=self._weights[1:]
        )

    @property
    def weight(self) -> float:
        """About the bytes to be read."""
        return float(self._weights[-1])

    def cuts(self, cutting: Cutting, total: float) -> list[int]:
        """The start, the cuts in proportion to bytes, the end; strictly rising."""
        if not len(self._rows):
            return []
        rows = int(self._rows.sum())
        share = -(-cutting.tasks_min * self.weight // total)
        size = -(-self.weight // cutting.task_bytes)
        count = min(rows, max(1, int(share), int(size)))
        inner = (self._cut_at(self.weight * i / count, rows // count // 4) for i in range(1, count))
        cuts = sorted({self._start, *inner, self._end})
        if cutting.task_rows is None:
            return cuts
        pairs = itertools.pairwise(cuts)
        fine = (self._by_rows(lo, hi, cutting.task_rows) for lo, hi in pairs)
        return [*itertools.chain.from_iterable(fine), self._end]

    def after_rows(self, task: ReadTask, rows: int) -> int:
        """The offset before which the task has so many rows that are kept, and after which more."""
        return list(itertools.islice(self._by_rows(task.start, task.end, rows), 2))[1]

    def clipped(self, lo: int, hi: int) -> Iterator[Stretch]:
        """What there is of [lo, hi)."""
        at = bisect_right(self._stretches, lo, key=lambda one: one.hi)
        for one in self._stretches[at:]:
            if one.lo >= hi:
                return
            first, end = max(lo, one.lo), min(hi, one.hi)
            yield Stretch(first, end, one.table.between(self._held.number, first, end))

    def _cut_at(self, weight: float, slack: int) -> int:
        """The offset before which there is so much, or the entry's boundary near to it."""
        at = int(np.searchsorted(self._weights, weight, side="right")) - 1
        at = min(at, len(self._rows) - 1)
        inside = (weight - self._weights[at]) / (self._weights[at + 1] - self._weights[at])
        cut = int(self._los[at]) + int(inside * self._rows[at])
        return self._near_entry(at, cut, slack)

    def _near_entry(self, at: int, cut: int, slack: int) -> int:
        """The entry boundary of segment `at` next to `cut` within `slack` rows, else `cut`."""
        which = int(np.searchsorted(self._firsts, at, side="right")) - 1
        one = self._stretches[which]
        first, counts = one.table.entry_rows_of(at - int(self._firsts[which]))
        bounds = np.concatenate([[first], first + np.cumsum(counts)])
        nearest = int(bounds[np.abs(bounds - cut).argmin()])
        within = one.lo < nearest < one.hi and abs(nearest - cut) <= slack
        return nearest if within else cut

    def _by_rows(self, lo: int, hi: int, rows_max: int) -> Iterator[int]:
        """`lo`, and a cut wherever `rows_max` rows that are kept lie before it."""
        yield lo
        left = rows_max
        for one in self.clipped(lo, hi):
            at = one.lo
            while one.hi - at > left:
                at += left
                yield at
                left = rows_max
            left -= one.hi - at
            if not left and one.hi < hi:
                yield one.hi
                left = rows_max


def _clipped(one: Stretch) -> tuple[Longs, Longs, Longs]:
    """First offset, rows and weight of each segment of the stretch, as far as it counts."""
    table = one.table
    los, rows, sizes = table.bases, table.rows, table.sizes
    cut = int(los[0]) < one.lo or int(table.ends[-1]) > one.hi
    if cut:
        los = np.maximum(los, one.lo)
        rows = np.minimum(table.ends, one.hi) - los
        sizes = sizes * rows // table.rows
    return los, rows, np.maximum(sizes, rows * EMPTY_ROW_BYTES)


def _check(state: TopicState, ranges: Ranges) -> None:
    for partition, (start, end) in ranges.items():
        _check_range(state, partition, start, end)


def _check_range(state: TopicState, partition: int, start: int, end: int) -> None:
    if not 0 <= partition < len(state.partitions):
        raise errors.NoSuchEntry(
            f"topic {state.topic_id} has {len(state.partitions)} partitions, none is {partition}",
            "Name partitions that exist.",
        )
    held = state.partitions[partition]
    if not held.start_offset <= start <= end <= held.end_offset:
        raise errors.NoSuchEntry(
            f"offsets {start} to {end} of partition {partition} of topic {state.topic_id} are"
            f" not within {held.start_offset} to {held.end_offset}",
            "Stay within the offsets that the topic has.",
            partition=partition,
        )
