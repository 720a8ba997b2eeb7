"""Planning a read: ranges of offsets become tasks. Pure.

Always true: the tasks of a plan hold every row of the ranges once, without the holes; the rows of a
partition are in order within a task, and from task to task of the plan. A task has a table of
segments, and its reader computes the slices from the table (pieces.py), so a plan over a million
segments stays small.

A large partition has tasks of its own, cut by bytes. Small partitions are packed into one task, and
so are small tasks of several topics (`pack_tasks`; such a task reads one topic after the other). If
partitions share entries, the tasks of several partitions may read the same bytes. If they would
read more than READ_AGAIN_MAX times the stored bytes, the plan is cut between entries: a task then
has whole entries, with rows of many partitions.

Committed rows that no ledger holds any more are reported with exact offsets. Always true: rows that
are reported lost are beyond the end of their ledger and within the spans of a task. A task without
its lost rows reads exactly the other rows, at their offsets (hazard 26).
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from spark_ledger import errors
from spark_ledger.errors import RowsLost
from spark_ledger.topic.entry.arrow_arrays import distinct_values, distinct_with_indices
from spark_ledger.topic.log.segment_table import NO_SEGMENTS, Longs, SegmentTable, TableChunk
from spark_ledger.topic.log.state import NO_TABLES, Tables, TopicState
from spark_ledger.topic.read.acked import NO_ACKED, AckedRows
from spark_ledger.topic.read.pieces import (
    EMPTY_ROW_BYTES,
    Floats,
    LiveRows,
    Pieces,
    Span,
    Spans,
    fetch_order,
    pieces_of,
    remove_offsets,
    rows_of,
    spans_by,
    with_narrow_table,
)

TASK_BYTES = 64 * 1024 * 1024
PACKED_BYTES = 8 << 20  # smaller partitions are packed, several into one task
PACKED_TASKS = 16  # but packing leaves at least this many tasks
LIVE_ROW_BYTES = 1 << 10  # assumed for a row of a live segment, whose bytes a task cannot see
CUT_AGAIN_MAX = 8
READ_AGAIN_MAX = 1.1  # bytes read / bytes stored, if partitions share entries
Ranges = Mapping[int, tuple[int, int]]
"""By partition the offsets [start, end) to read."""


@dataclass(frozen=True, slots=True)
class ReadTask:
    """What one Spark task reads: the rows of the spans, then the rows `live` of a partition's live
    segment, both without the `acked` rows. The table has the segments of the spans, and may have
    more segments. Only a `chunked` task may have entries with chunks of messages. Picklable."""

    topic: str
    topic_id: str
    spans: Spans
    table: SegmentTable
    live: LiveRows | None = None
    chunked: bool = True
    acked: AckedRows = NO_ACKED

    @property
    def rows(self) -> int:
        rows = _unacked_rows(self.spans, self.acked)
        if (live := self.live) is not None:
            rows += self.acked.unacked_count(live.live.partition, live.start, live.end)
        return rows

    @property
    def bytes(self) -> int:
        """An estimate of the bytes to read."""
        live = 0 if self.live is None else (self.live.end - self.live.start) * LIVE_ROW_BYTES
        return live + int(sum(_clip(span, self.table).weights.sum() for span in self.spans))


@dataclass(frozen=True, slots=True)
class Cutting:
    """How ranges become tasks: at least `tasks_min` tasks, of about equal bytes, each of at most
    about `task_bytes` bytes and at most `task_rows` rows."""

    tasks_min: int = 1
    task_bytes: int = TASK_BYTES
    task_rows: int | None = None


DEFAULT_CUTTING = Cutting()


def _unacked_rows(spans: Spans, acked: AckedRows) -> int:
    """The rows of the spans that are not acknowledged."""
    if not acked:
        return rows_of(spans)
    return sum(acked.unacked_count(span.partition, span.lo, span.hi) for span in spans)


def chunks_to_read(state: TopicState, ranges: Ranges) -> list[TableChunk]:
    """The chunks whose tables `plan_read` needs for these ranges."""
    _check_ranges(state, ranges)
    by_partition = (state.partitions[p].chunks_between(*ends) for p, ends in ranges.items())
    return list(dict.fromkeys(chunk for chunks in by_partition for chunk in chunks))


def plan_read(
    state: TopicState,
    ranges: Ranges,
    *,
    topic: str = "",
    cutting: Cutting = DEFAULT_CUTTING,
    read: Tables = NO_TABLES,
    acked: AckedRows = NO_ACKED,
) -> list[ReadTask]:
    """Tasks for the rows [start, end) of each partition in `ranges`, without the `acked` rows.

    A cut is at an entry boundary if a boundary is near, else inside an entry. Ranges without a row
    give no task. `read` has the tables of `chunks_to_read`.
    Raises errors.NoSuchEntry (LEDGER_OFFSETS.OUT_OF_RANGE) for a range beyond the state.
    """
    _check_ranges(state, ranges)
    spans, table = segments_in(state, ((p, *ends) for p, ends in sorted(ranges.items())), read)
    chunked = any(state.partitions[p].rowless for p in ranges)
    if acked:
        spans = _without_long_runs(spans, table, acked, cutting.tasks_min)
    return [
        ReadTask(
            *(topic, state.topic_id, *with_narrow_table(task_spans, table)),
            chunked=chunked,
            acked=acked.within((span.partition, span.lo, span.hi) for span in task_spans),
        )
        for task_spans in _with_unacked_rows(_cut_spans(spans, table, cutting), acked, cutting)
    ]


def _without_long_runs(
    spans: Spans, table: SegmentTable, acked: AckedRows, tasks_min: int
) -> Spans:
    """The spans without the long runs of acknowledged rows, which would make tasks uneven."""
    cut: list[Span] = []
    for span in spans:
        parts = acked.without_long_runs(span.partition, span.lo, span.hi, tasks_min)
        segments = slice(span.first, span.end)
        firsts = np.searchsorted(table.ends[segments], [lo for lo, _ in parts], side="right")
        ends = np.searchsorted(table.bases[segments], [hi for _, hi in parts])
        for (lo, hi), first, end in zip(parts, firsts.tolist(), ends.tolist(), strict=True):
            cut.append(Span(span.partition, lo, hi, span.first + first, span.first + end))
    return tuple(cut)


def _with_unacked_rows(tasks: list[Spans], acked: AckedRows, cutting: Cutting) -> list[Spans]:
    """The tasks that have rows that are not acknowledged; cut further if these tasks are too
    few."""
    for _ in range(CUT_AGAIN_MAX if acked else 0):
        with_rows = [spans for spans in tasks if _unacked_rows(spans, acked)]
        if len(with_rows) == len(tasks) or len(with_rows) >= cutting.tasks_min:
            return with_rows
        tasks = _cut_to_count(with_rows, cutting.tasks_min)
    return [spans for spans in tasks if _unacked_rows(spans, acked)]


def pack_tasks(
    tasks: Sequence[ReadTask], cutting: Cutting = DEFAULT_CUTTING
) -> list[tuple[ReadTask, ...]]:
    """The tasks of several topics, in order; small neighbours are packed into one task of Spark.
    The limits are the same as for the partitions of one topic."""
    groups_min = max(PACKED_TASKS, cutting.tasks_min)
    if len(tasks) <= groups_min:
        return [(task,) for task in tasks]
    sizes = [max(1, task.bytes) for task in tasks]
    group_bytes = min(cutting.task_bytes, sum(sizes) / max(groups_min, sum(sizes) // PACKED_BYTES))
    task_rows = cutting.task_rows
    groups: list[tuple[ReadTask, ...]] = []
    group: list[ReadTask] = []
    size, rows = 0, 0
    for at, (task, added_bytes) in enumerate(zip(tasks, sizes, strict=True)):
        added_rows = task.rows
        # unless each remaining task becomes a group, there will be fewer than groups_min groups
        must_end = len(groups) + 1 + len(tasks) - at <= groups_min
        too_many_rows = task_rows is not None and rows + added_rows > task_rows
        if group and (must_end or too_many_rows or size + added_bytes > group_bytes):
            groups.append(tuple(group))
            group, size, rows = [], 0, 0
        group.append(task)
        size, rows = size + added_bytes, rows + added_rows
    if group:
        groups.append(tuple(group))
    return groups


def segments_in(
    state: TopicState, ranges: Iterable[tuple[int, int, int]], read: Tables = NO_TABLES
) -> tuple[Spans, SegmentTable]:
    """The spans in which the ranges have rows, and the segments with these rows. `ranges` are
    (partition, start, end), in order."""
    spans: list[Span] = []
    tables: list[SegmentTable] = []
    first = 0
    for p, lo, hi in ranges:
        for stretch in state.partitions[p].stretches(lo, hi, read):
            spans.append(Span(p, stretch.lo, stretch.hi, first, first + len(stretch.table)))
            tables.append(stretch.table)
            first += len(stretch.table)
    return tuple(spans), SegmentTable.concatenate(tables or [NO_SEGMENTS])


# -- cutting -------------------------------------------------------------------------------------


def _cut_spans(spans: Spans, table: SegmentTable, cutting: Cutting) -> list[Spans]:
    """The spans of each task, in order."""
    parts = [
        _PartitionShare(tuple(group), table)
        for _, group in itertools.groupby(spans, key=lambda span: span.partition)
    ]
    total = sum(part.weight for part in parts)
    if not parts:
        return []
    count = min(len(parts), max(PACKED_TASKS, total // PACKED_BYTES))
    goal = total / max(cutting.tasks_min, count, -(-total // cutting.task_bytes))
    partition_tasks = [task for part in parts for task in part.cut(cutting, total)]
    tasks = list(_pack(partition_tasks, goal, cutting.task_rows))
    if len(parts) > 1 and bool(table.shared.any()):
        pieces = pieces_of(table, spans)
        if _bytes_read(pieces, tasks) > READ_AGAIN_MAX * total:
            tasks = _cut_between_entries(pieces, goal)
            if cutting.task_rows is not None:
                rows_max = cutting.task_rows
                tasks = [part for task in tasks for part in _cut_by_rows(task, rows_max)]
    return _cut_to_count(tasks, cutting.tasks_min)


def _pack(
    tasks: Iterable[tuple[Spans, float]], goal: float, rows_max: int | None
) -> Iterator[Spans]:
    """The tasks, with neighbours joined to tasks of at most `goal` bytes and `rows_max` rows."""
    packed: list[Span] = []
    size, rows = 0.0, 0
    for spans, added in tasks:
        count = rows_of(spans)
        if packed and (size + added > goal or (rows_max is not None and rows + count > rows_max)):
            yield tuple(packed)
            packed, size, rows = [], 0.0, 0
        packed += spans
        size += added
        rows += count
    if packed:
        yield tuple(packed)


def _bytes_read(pieces: Pieces, tasks: Sequence[Spans]) -> float:
    """An estimate of the bytes that the tasks read. A task that needs one row of an entry reads all
    pieces that the plan has of this entry."""
    entries = pieces.entries()
    sizes = np.bincount(entries, weights=pieces.weight)
    firsts = np.array([(spans[0].partition, spans[0].lo) for spans in tasks], dtype=np.int64)
    order = np.lexsort(
        (
            np.concatenate([np.zeros(len(firsts), np.int8), np.ones(len(pieces), np.int8)]),
            np.concatenate([firsts[:, 1], pieces.offset]),
            np.concatenate([firsts[:, 0], pieces.partition]),
        )
    )
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.cumsum(order < len(firsts)) - 1
    readers = distinct_values(rank[len(firsts) :] * len(sizes) + entries)
    return float(sizes[readers % len(sizes)].sum())


def _cut_between_entries(pieces: Pieces, goal: float) -> list[Spans]:
    """Tasks of whole entries in fetch order, each of about `goal` bytes."""
    places = fetch_order(pieces)
    sizes = np.bincount(places, weights=pieces.weight)
    task_of = ((np.cumsum(sizes) - sizes / 2) / goal).astype(np.int64)
    return list(spans_by(pieces, task_of[places]))


def _cut_by_rows(spans: Spans, rows_max: int) -> Iterator[Spans]:
    """The spans in parts of `rows_max` rows; the last part may have fewer."""
    part: list[Span] = []
    rows_left = rows_max
    for span in spans:
        lo = span.lo
        while span.hi - lo > rows_left:
            end = lo + rows_left
            yield (*part, span._replace(lo=lo, hi=end)) if rows_left else tuple(part)
            part, lo, rows_left = [], end, rows_max
        part.append(span._replace(lo=lo))
        rows_left -= span.hi - lo
    if part:
        yield tuple(part)


def _cut_to_count(tasks: list[Spans], tasks_min: int) -> list[Spans]:
    """The tasks; the task with most rows is cut in the middle, again and again, until there are
    `tasks_min` tasks or each task has one row. A cut by bytes cannot divide empty rows, or many
    small rows beside a large row."""
    if len(tasks) >= tasks_min:
        return tasks
    heap: list[tuple[int, tuple[int, ...], Spans]]
    heap = [(-rows_of(spans), (i,), spans) for i, spans in enumerate(tasks)]
    heapq.heapify(heap)
    while heap and len(heap) < tasks_min and heap[0][0] < -1:
        rows, place, spans = heapq.heappop(heap)
        for half, part in enumerate(_halves(spans, -rows // 2)):
            heapq.heappush(heap, (-rows_of(part), (*place, half), part))
    return [spans for _, _, spans in sorted(heap, key=lambda item: item[1])]


def _halves(spans: Spans, rows: int) -> tuple[Spans, Spans]:
    """The first `rows` rows, and the other rows."""
    first = next(_cut_by_rows(spans, rows))
    cut = spans[len(first) - 1]._replace(lo=first[-1].hi)
    rest = (cut,) if cut.lo < cut.hi else ()
    return first, (*rest, *spans[len(first) :])


class _PartitionShare:
    """One partition's share of a plan."""

    def __init__(self, spans: Spans, table: SegmentTable) -> None:
        self._spans = spans
        self._firsts = np.cumsum([0, *(span.end - span.first for span in spans)])
        self._table = table
        clipped = [_clip(span, table) for span in spans]
        self._los = np.concatenate([part.los for part in clipped])
        self._rows = np.concatenate([part.rows for part in clipped])
        self._weights = np.zeros(len(self._rows) + 1)
        np.cumsum(np.concatenate([part.weights for part in clipped]), out=self._weights[1:])

    @property
    def weight(self) -> float:
        """An estimate of the bytes to read."""
        return float(self._weights[-1])

    def cut(self, cutting: Cutting, total: float) -> Iterator[tuple[Spans, float]]:
        """Tasks of about equal bytes, each with an estimate of its bytes."""
        rows = rows_of(self._spans)
        share = -(-cutting.tasks_min * self.weight // total)
        size = -(-self.weight // cutting.task_bytes)
        count = min(rows, max(1, int(share), int(size)))
        inner = (self._cut_at(self.weight * i / count, rows // count // 4) for i in range(1, count))
        cuts = [*sorted({self._spans[0].lo, *inner}), self._spans[-1].hi]
        for lo, hi in itertools.pairwise(cuts):
            cut = (span._replace(lo=max(lo, span.lo), hi=min(hi, span.hi)) for span in self._spans)
            spans = tuple(span for span in cut if span.lo < span.hi)
            if cutting.task_rows is None:
                parts: Iterable[Spans] = (spans,) if spans else ()
            else:
                parts = _cut_by_rows(spans, cutting.task_rows)
            for part in parts:
                yield part, self._weight_at(part[-1].hi) - self._weight_at(part[0].lo)

    def _weight_at(self, offset: int) -> float:
        """The weight of the rows before the offset."""
        at = int(np.searchsorted(self._los, offset, side="right")) - 1
        if at < 0:
            return 0.0
        inside = min(1.0, (offset - int(self._los[at])) / int(self._rows[at]))
        return float(self._weights[at] + inside * (self._weights[at + 1] - self._weights[at]))

    def _cut_at(self, weight: float, slack: int) -> int:
        """The offset before which the rows have this weight, or an entry boundary near it."""
        at = int(np.searchsorted(self._weights, weight, side="right")) - 1
        at = min(at, len(self._rows) - 1)
        inside = (weight - self._weights[at]) / (self._weights[at + 1] - self._weights[at])
        cut = int(self._los[at]) + int(inside * self._rows[at])
        return self._near_entry(at, cut, slack)

    def _near_entry(self, at: int, cut: int, slack: int) -> int:
        """The entry boundary of segment `at` nearest to `cut`, if the boundary is at most `slack`
        rows away; else `cut`."""
        index = int(np.searchsorted(self._firsts, at, side="right")) - 1
        span = self._spans[index]
        first, counts = self._table.entry_rows_of(span.first + at - int(self._firsts[index]))
        bounds = np.concatenate([[first], first + np.cumsum(counts)])
        nearest = int(bounds[np.abs(bounds - cut).argmin()])
        is_near = span.lo < nearest < span.hi and abs(nearest - cut) <= slack
        return nearest if is_near else cut


class _ClippedSegments(NamedTuple):
    """The first offset, the rows and the weight of each segment of a span, within the span only."""

    los: Longs
    rows: Longs
    weights: Floats


def _clip(span: Span, table: SegmentTable) -> _ClippedSegments:
    segments = slice(span.first, span.end)
    bases, row_counts, sizes = table.bases[segments], table.rows[segments], table.sizes[segments]
    los, rows = bases, row_counts
    if int(bases[0]) < span.lo or int(bases[-1] + row_counts[-1]) > span.hi:
        los = np.maximum(bases, span.lo)
        rows = np.minimum(bases + row_counts, span.hi) - los
        sizes = sizes * rows // row_counts
    return _ClippedSegments(los, rows, np.maximum(sizes, rows * EMPTY_ROW_BYTES))


def _check_ranges(state: TopicState, ranges: Ranges) -> None:
    topic_id, count = state.topic_id, len(state.partitions)
    for partition, (start, end) in ranges.items():
        if not 0 <= partition < count:
            raise errors.NoSuchEntry(
                f"topic {topic_id} has {count} partitions, but no partition {partition}",
                "Name partitions that exist.",
            )
        state_of_partition = state.partitions[partition]
        if not state_of_partition.start_offset <= start <= end <= state_of_partition.end_offset:
            raise errors.NoSuchEntry(
                f"offsets {start} to {end} of partition {partition} of topic {topic_id} are"
                f" not within {state_of_partition.start_offset} to {state_of_partition.end_offset}",
                "Read only offsets that the topic has.",
                partition=partition,
            )


ENDLESS = 2**62
LISTED_MAX = 8


class LedgerEnd(NamedTuple):
    """The end of a CLOSED ledger: its last entry, which is below 0 if the ledger is empty or gone,
    and its number of rows."""

    last_entry: int
    rows: int


EMPTY_LEDGER_END = LedgerEnd(-1, 0)
LedgerEnds = Mapping[int, LedgerEnd | None]
"""The end of each ledger, by ledger id; None: the ledger is open. A missing ledger counts as open.
"""


@dataclass(frozen=True, slots=True)
class Lost:
    """Committed offsets [start, end) of a partition that a ledger does not hold any more. `acked`
    of them are acknowledged: the read does not need these."""

    topic: str
    partition: int
    start: int
    end: int
    ledger_id: int
    acked: int = 0

    @property
    def rows(self) -> int:
        return self.end - self.start - self.acked

    def __str__(self) -> str:
        return (
            f"{self.topic} partition {self.partition} offsets {self.start} to {self.end - 1} "
            f"(ledger {self.ledger_id})"
        )


def lost_of(task: ReadTask, ends: LedgerEnds) -> list[Lost]:
    """The rows of the task beyond the ends of their ledgers, unless all of them are
    acknowledged."""
    table = task.table
    ledgers, indices = distinct_with_indices(table.ledgers)
    ledger_ends = [ends.get(ledger) or LedgerEnd(ENDLESS, ENDLESS) for ledger in ledgers.tolist()]
    last_entries, rows = np.array(ledger_ends, dtype=np.int64).reshape(-1, 2)[indices].T
    is_short = table.last_entries > last_entries
    if not bool(is_short.any()):
        return []
    lost_pieces = _lost_rows(
        task, pieces_of(table, task.spans, segment_mask=is_short & ~table.counted), last_entries
    )
    lost_counted = [
        Lost(task.topic, span.partition, start, min(span.hi, end), int(table.ledgers[i]))
        for span in task.spans
        for i in span.first + np.flatnonzero((is_short & table.counted)[span.first : span.end])
        for stored_rows in [max(0, int(rows[i] - table.rows_before[i]))]
        for start, end in [(max(span.lo, int(table.bases[i]) + stored_rows), int(table.ends[i]))]
        if start < min(span.hi, end)
    ]
    lost = sorted([*lost_pieces, *lost_counted], key=lambda lost: (lost.partition, lost.start))
    if task.acked:
        acked = (task.acked.count(run.partition, run.start, run.end) for run in lost)
        lost = [replace(run, acked=count) for run, count in zip(lost, acked, strict=True)]
    return [run for run in lost if run.rows]


def _lost_rows(task: ReadTask, pieces: Pieces, reach: Longs) -> list[Lost]:
    """The rows of the pieces whose entries come after the last entry of their ledger; `reach` has
    this entry for each segment."""
    pieces = pieces.select(pieces.entry > reach[pieces.segment])
    lost: list[Lost] = []
    columns = (pieces.partition, pieces.offset, pieces.offset + pieces.take, pieces.ledger)
    for partition, start, end, ledger in zip(*(column.tolist() for column in columns), strict=True):
        last = lost[-1] if lost else None
        if last and (last.partition, last.end, last.ledger_id) == (partition, start, ledger):
            lost[-1] = replace(last, end=end)
        else:
            lost.append(Lost(task.topic, partition, start, end, ledger))
    return lost


def without_rows(task: ReadTask, lost_rows: Iterable[Lost]) -> ReadTask:
    """The task without these rows."""
    by_partition: dict[int, list[tuple[int, int]]] = {}
    for lost in lost_rows:
        by_partition.setdefault(lost.partition, []).append((lost.start, lost.end))
    return replace(task, spans=remove_offsets(task.spans, by_partition))


def from_offsets(task: ReadTask, offsets: Mapping[int, int]) -> ReadTask:
    """The rest of the task: the rows from these offsets on (by partition)."""
    spans = (span._replace(lo=max(span.lo, offsets.get(span.partition, 0))) for span in task.spans)
    live = task.live
    if live is not None:
        start = max(live.start, offsets.get(live.live.partition, 0))
        live = replace(live, start=start) if start < live.end else None
    return replace(task, spans=tuple(span for span in spans if span.lo < span.hi), live=live)


def rows_lost(lost: Sequence[Lost], ended: tuple[int, LedgerEnd] | None = None) -> RowsLost:
    """The error for these rows, with their number. `ended` is the ledger that ends before the rows,
    with its end."""
    listed = "; ".join(map(str, lost[:LISTED_MAX])) + ("; ..." if len(lost) > LISTED_MAX else "")
    rows = sum(run.rows for run in lost)
    return RowsLost(f"{rows} committed rows are gone: {listed}", rows=rows, ended=ended)
