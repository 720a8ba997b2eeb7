"""Planning a read: ranges of offsets become tasks. Pure.

Always true: the tasks of a plan hold every row of the ranges once, holes left out; the rows of a
partition are in order within a task, and from task to task of the plan. A task carries segments in
columns; what its reader fetches is made of them in the task itself (pieces.py), so a plan over
a million segments stays small.

A large partition has tasks of its own, cut by bytes. Small partitions are packed together, and so
are small tasks of several topics (`together`: such a task reads one topic after the other). If
partitions share entries, and such tasks would read many bytes several times (READ_AGAIN), the plan
is cut between entries instead: a task has whole entries, and so rows of many partitions.

Committed rows that no ledger holds any more are reported with exact offsets: rows reported lost are
beyond the end of their ledger and within the spans of a task; a task without its lost rows reads
exactly the others, at the offsets that they have (hazard 26).
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
from spark_ledger.topic.log.state import UNREAD, Tables, TopicState
from spark_ledger.topic.read.pieces import (
    EMPTY_ROW_BYTES,
    Floats,
    LiveRows,
    Pieces,
    Span,
    Spans,
    cut_out,
    fetch_order,
    on_their_own,
    pieces_of,
    rows_of,
    spans_by,
)

TASK_BYTES = 64 * 1024 * 1024
PACKED_BYTES = 8 << 20  # one task reads several partitions that have less,
PACKED_TASKS = 16  # unless that would leave fewer tasks than this
LIVE_ROW_BYTES = 1 << 10  # assumed for a row of a live segment: a task does not know its bytes
READ_AGAIN = 1.1  # tasks may read so many times the bytes because partitions share entries
Ranges = Mapping[int, tuple[int, int]]
"""By partition the offsets [start, end) to read."""


@dataclass(frozen=True, slots=True)
class ReadTask:
    """What one Spark task reads: the rows of the spans. The table has their segments, and maybe
    others. Picklable. `live` are rows of a partition's open end; they come after the spans. Unless
    it is `chunked`, no entry has a chunk of a message that still has a row."""

    topic: str
    topic_id: str
    spans: Spans
    table: SegmentTable
    live: LiveRows | None = None
    chunked: bool = True

    @property
    def rows(self) -> int:
        live = 0 if self.live is None else self.live.end - self.live.start
        return live + rows_of(self.spans)

    @property
    def bytes(self) -> int:
        """An estimate of the bytes to read."""
        live = 0 if self.live is None else (self.live.end - self.live.start) * LIVE_ROW_BYTES
        return live + int(sum(_clipped(span, self.table).weights.sum() for span in self.spans))


@dataclass(frozen=True, slots=True)
class Cutting:
    """How ranges become tasks: at least `tasks_min`, in proportion to bytes, each of at most about
    `task_bytes` and at most `task_rows`."""

    tasks_min: int = 1
    task_bytes: int = TASK_BYTES
    task_rows: int | None = None


EVENLY = Cutting()


def chunks_to_read(state: TopicState, ranges: Ranges) -> list[TableChunk]:
    """The chunks that `plan_read` needs for these ranges."""
    _check(state, ranges)
    by_partition = (state.partitions[p].chunks_between(*ends) for p, ends in ranges.items())
    return list(dict.fromkeys(chunk for chunks in by_partition for chunk in chunks))


def plan_read(
    state: TopicState,
    ranges: Ranges,
    *,
    topic: str = "",
    cutting: Cutting = EVENLY,
    read: Tables = UNREAD,
) -> list[ReadTask]:
    """Tasks for the rows [start, end) of each partition in `ranges`.

    A cut is at an entry boundary if one is near, else inside an entry. Ranges without a row give
    no task. `read` has the chunks of `chunks_to_read`.
    Raises errors.NoSuchEntry (LEDGER_OFFSETS.OUT_OF_RANGE) for a range beyond the state.
    """
    _check(state, ranges)
    spans, table = segments_in(state, ((p, *ends) for p, ends in sorted(ranges.items())), read)
    chunked = any(state.partitions[p].rowless for p in ranges)
    return [
        ReadTask(topic, state.topic_id, *on_their_own(task_spans, table), chunked=chunked)
        for task_spans in _cut(spans, table, cutting)
    ]


def together(tasks: Sequence[ReadTask], cutting: Cutting = EVENLY) -> list[tuple[ReadTask, ...]]:
    """The tasks of several topics, with small neighbours packed into one task of Spark, as
    partitions of a topic are: in the same order, and within the same limits."""
    least = max(PACKED_TASKS, cutting.tasks_min)
    if len(tasks) <= least:
        return [(task,) for task in tasks]
    sizes = [max(1, task.bytes) for task in tasks]
    goal = min(cutting.task_bytes, sum(sizes) / max(least, sum(sizes) // PACKED_BYTES))
    task_rows = cutting.task_rows
    groups: list[tuple[ReadTask, ...]] = []
    held: list[ReadTask] = []
    size, rows = 0, 0
    for at, (task, more) in enumerate(zip(tasks, sizes, strict=True)):
        count = task.rows
        few = len(groups) + 1 + len(tasks) - at <= least  # each of the rest is needed for a group
        many = task_rows is not None and rows + count > task_rows
        if held and (few or many or size + more > goal):
            groups.append(tuple(held))
            held, size, rows = [], 0, 0
        held.append(task)
        size, rows = size + more, rows + count
    if held:
        groups.append(tuple(held))
    return groups


def segments_in(
    state: TopicState, ranges: Iterable[tuple[int, int, int]], read: Tables = UNREAD
) -> tuple[Spans, SegmentTable]:
    """The spans in which these offsets [start, end) of partitions have rows, and the segments that
    hold them. The ranges come in order."""
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


def _cut(spans: Spans, table: SegmentTable, cutting: Cutting) -> list[Spans]:
    """The spans of each task, in order."""
    parts = [
        _Part(tuple(group), table)
        for _, group in itertools.groupby(spans, key=lambda span: span.partition)
    ]
    total = sum(part.weight for part in parts)
    if not parts:
        return []
    count = min(len(parts), max(PACKED_TASKS, total // PACKED_BYTES))
    goal = total / max(cutting.tasks_min, count, -(-total // cutting.task_bytes))
    alone = [task for part in parts for task in part.cut(cutting, total)]
    tasks = list(_packed(alone, goal, cutting.task_rows))
    if len(parts) > 1 and bool(table.shared.any()):
        pieces = pieces_of(table, spans)
        if _bytes_read(pieces, tasks) > READ_AGAIN * total:
            tasks = _by_entries(pieces, goal)
            if cutting.task_rows is not None:
                rows_max = cutting.task_rows
                tasks = [part for task in tasks for part in _by_rows(task, rows_max)]
    return _as_many(tasks, cutting.tasks_min)


def _packed(
    tasks: Iterable[tuple[Spans, float]], goal: float, rows_max: int | None
) -> Iterator[Spans]:
    """Neighbouring tasks put together as long as they have at most `goal` bytes."""
    held: list[Span] = []
    size, rows = 0.0, 0
    for spans, more in tasks:
        count = rows_of(spans)
        if held and (size + more > goal or (rows_max is not None and rows + count > rows_max)):
            yield tuple(held)
            held, size, rows = [], 0.0, 0
        held += spans
        size += more
        rows += count
    if held:
        yield tuple(held)


def _bytes_read(pieces: Pieces, tasks: Sequence[Spans]) -> float:
    """An estimate of the bytes that the tasks read: a task that needs a row of an entry reads all
    of the entry that the plan needs."""
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


def _by_entries(pieces: Pieces, goal: float) -> list[Spans]:
    """Tasks of whole entries in the order of their fetch, each of about `goal` bytes."""
    places = fetch_order(pieces)
    sizes = np.bincount(places, weights=pieces.weight)
    task_of = ((np.cumsum(sizes) - sizes / 2) / goal).astype(np.int64)
    return list(spans_by(pieces, task_of[places]))


def _by_rows(spans: Spans, rows_max: int) -> Iterator[Spans]:
    """The spans in parts of `rows_max` rows; the last part has the rest."""
    held: list[Span] = []
    left = rows_max
    for span in spans:
        lo = span.lo
        while span.hi - lo > left:
            yield (*held, span._replace(lo=lo, hi=lo + left)) if left else tuple(held)
            held, lo, left = [], lo + left, rows_max
        held.append(span._replace(lo=lo))
        left -= span.hi - lo
    if held:
        yield tuple(held)


def _as_many(tasks: list[Spans], tasks_min: int) -> list[Spans]:
    """The tasks, those with most rows cut in the middle until there are `tasks_min`, or one for
    each row: bytes alone do not show where to cut empty rows, or many rows beside a large one."""
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
    """The first `rows` rows, and the others."""
    first = next(_by_rows(spans, rows))
    cut = spans[len(first) - 1]._replace(lo=first[-1].hi)
    rest = (cut,) if cut.lo < cut.hi else ()
    return first, (*rest, *spans[len(first) :])


class _Part:
    """One partition's share of a plan."""

    def __init__(self, spans: Spans, table: SegmentTable) -> None:
        self._spans = spans
        self._firsts = np.cumsum([0, *(span.end - span.first for span in spans)])
        self._table = table
        clipped = [_clipped(span, table) for span in spans]
        self._los = np.concatenate([part.los for part in clipped])
        self._rows = np.concatenate([part.rows for part in clipped])
        self._weights = np.zeros(len(self._rows) + 1)
        np.cumsum(np.concatenate([part.weights for part in clipped]), out=self._weights[1:])

    @property
    def weight(self) -> float:
        """An estimate of the bytes to read."""
        return float(self._weights[-1])

    def cut(self, cutting: Cutting, total: float) -> Iterator[tuple[Spans, float]]:
        """Tasks in proportion to bytes, and an estimate of the bytes of each."""
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
                parts = _by_rows(spans, cutting.task_rows)
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
        """The offset that has this weight before it, or an entry boundary near to it."""
        at = int(np.searchsorted(self._weights, weight, side="right")) - 1
        at = min(at, len(self._rows) - 1)
        inside = (weight - self._weights[at]) / (self._weights[at + 1] - self._weights[at])
        cut = int(self._los[at]) + int(inside * self._rows[at])
        return self._near_entry(at, cut, slack)

    def _near_entry(self, at: int, cut: int, slack: int) -> int:
        """The entry boundary of segment `at` that is nearest to `cut`, at most `slack` rows away;
        else `cut`."""
        index = int(np.searchsorted(self._firsts, at, side="right")) - 1
        span = self._spans[index]
        first, counts = self._table.entry_rows_of(span.first + at - int(self._firsts[index]))
        bounds = np.concatenate([[first], first + np.cumsum(counts)])
        nearest = int(bounds[np.abs(bounds - cut).argmin()])
        within = span.lo < nearest < span.hi and abs(nearest - cut) <= slack
        return nearest if within else cut


class _Clipped(NamedTuple):
    """First offset, rows and weight of each segment of a span, within the span."""

    los: Longs
    rows: Longs
    weights: Floats


def _clipped(span: Span, table: SegmentTable) -> _Clipped:
    segments = slice(span.first, span.end)
    bases, held, sizes = table.bases[segments], table.rows[segments], table.sizes[segments]
    los, rows = bases, held
    if int(bases[0]) < span.lo or int(bases[-1] + held[-1]) > span.hi:
        los = np.maximum(bases, span.lo)
        rows = np.minimum(bases + held, span.hi) - los
        sizes = sizes * rows // held
    return _Clipped(los, rows, np.maximum(sizes, rows * EMPTY_ROW_BYTES))


def _check(state: TopicState, ranges: Ranges) -> None:
    topic_id, count = state.topic_id, len(state.partitions)
    for partition, (start, end) in ranges.items():
        if not 0 <= partition < count:
            raise errors.NoSuchEntry(
                f"topic {topic_id} has {count} partitions, not a partition {partition}",
                "Name partitions that exist.",
            )
        held = state.partitions[partition]
        if not held.start_offset <= start <= end <= held.end_offset:
            raise errors.NoSuchEntry(
                f"offsets {start} to {end} of partition {partition} of topic {topic_id} are"
                f" not within {held.start_offset} to {held.end_offset}",
                "Stay within the offsets that the topic has.",
                partition=partition,
            )


ENDLESS = 2**62
NAMED_MAX = 8


class LedgerEnd(NamedTuple):
    """The end of a CLOSED ledger: its last entry, below 0 if the ledger is empty or gone, and its
    rows."""

    last_entry: int
    rows: int


NOTHING = LedgerEnd(-1, 0)
LedgerEnds = Mapping[int, LedgerEnd | None]
"""By ledger id; None while it is open. A ledger that is left out counts as open."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Committed offsets [start, end) of a partition that a ledger does not hold any more."""

    topic: str
    partition: int
    start: int
    end: int
    ledger_id: int

    def __str__(self) -> str:
        return (
            f"{self.topic} partition {self.partition} offsets {self.start} to {self.end - 1} "
            f"(ledger {self.ledger_id})"
        )


def lost_of(task: ReadTask, ends: LedgerEnds) -> list[Lost]:
    """The rows of the task beyond the ends of their ledgers."""
    table = task.table
    ledgers, indices = distinct_with_indices(table.ledgers)
    ledger_ends = [ends.get(ledger) or LedgerEnd(ENDLESS, ENDLESS) for ledger in ledgers.tolist()]
    reach, rows = np.array(ledger_ends, dtype=np.int64).reshape(-1, 2)[indices].T
    short = table.last_entries > reach
    if not bool(short.any()):
        return []
    listed = _lost(task, pieces_of(table, task.spans, among=short & ~table.counted), reach)
    counted = [
        Lost(task.topic, span.partition, start, min(span.hi, end), int(table.ledgers[i]))
        for span in task.spans
        for i in span.first + np.flatnonzero((short & table.counted)[span.first : span.end])
        for stored_rows in [max(0, int(rows[i] - table.rows_before[i]))]
        for start, end in [(max(span.lo, int(table.bases[i]) + stored_rows), int(table.ends[i]))]
        if start < min(span.hi, end)
    ]
    return sorted([*listed, *counted], key=lambda lost: (lost.partition, lost.start))


def _lost(task: ReadTask, pieces: Pieces, reach: Longs) -> list[Lost]:
    """The rows of the pieces whose entries are beyond the `reach` of their segments."""
    pieces = pieces.taken(pieces.entry > reach[pieces.segment])
    lost: list[Lost] = []
    columns = (pieces.partition, pieces.offset, pieces.offset + pieces.take, pieces.ledger)
    for partition, start, end, ledger in zip(*(column.tolist() for column in columns), strict=True):
        last = lost[-1] if lost else None
        if last and (last.partition, last.end, last.ledger_id) == (partition, start, ledger):
            lost[-1] = replace(last, end=end)
        else:
            lost.append(Lost(task.topic, partition, start, end, ledger))
    return lost


def without(task: ReadTask, gone: Iterable[Lost]) -> ReadTask:
    """The task without these rows."""
    by_partition: dict[int, list[tuple[int, int]]] = {}
    for lost in gone:
        by_partition.setdefault(lost.partition, []).append((lost.start, lost.end))
    return replace(task, spans=cut_out(task.spans, by_partition))


def since(task: ReadTask, offsets: Mapping[int, int]) -> ReadTask:
    """The task without the rows before these offsets of partitions."""
    spans = (span._replace(lo=max(span.lo, offsets.get(span.partition, 0))) for span in task.spans)
    live = task.live
    if live is not None:
        start = max(live.start, offsets.get(live.live.partition, 0))
        live = replace(live, start=start) if start < live.end else None
    return replace(task, spans=tuple(span for span in spans if span.lo < span.hi), live=live)


def rows_lost(lost: Sequence[Lost], ended: tuple[int, LedgerEnd] | None = None) -> RowsLost:
    """The error for these rows, with their count; `ended`: the ledger that ends before them, and
    its end."""
    named = "; ".join(map(str, lost[:NAMED_MAX])) + ("; ..." if len(lost) > NAMED_MAX else "")
    rows = sum(run.end - run.start for run in lost)
    return RowsLost(f"{rows} committed rows are gone: {named}", rows=rows, ended=ended)
