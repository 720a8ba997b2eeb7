"""Filters of a batch read that decide what is read: on offset, timestamp and partition.

Always true: what is left out has no row that passes; Spark still judges every row that is read, so
a filter that is not understood costs time only. The columns are never null. Filters reach a Python
source only where `spark.sql.python.filterPushdown.enabled` is set.
"""

import datetime
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from spark_ledger.spark.offsets import Positions
from spark_ledger.topic.read_plan import ReadTask
from spark_ledger.topic.segment_table import Stretch

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_US = datetime.timedelta(microseconds=1)
LOWEST, HIGHEST = -(2**62), 2**62


@dataclass(frozen=True, slots=True)
class Range:
    """Whole numbers from `lo` to `hi`, both included."""

    lo: int = LOWEST
    hi: int = HIGHEST

    def within(self, lo: int, hi: int) -> "Range":
        return Range(max(self.lo, lo), min(self.hi, hi))


@dataclass(frozen=True, slots=True)
class Bounds:
    """What rows that pass have: `timestamp` in microseconds since 1970."""

    partition: Range = Range()
    offset: Range = Range()
    timestamp: Range = Range()
    partitions: frozenset[int] | None = None

    def clipped(self, start: Positions, end: Positions) -> tuple[Positions, Positions]:
        """The offsets from `start` to `end` that may pass; none of a partition that may not."""
        lows: Positions = {}
        highs: Positions = {}
        for topic, starts in start.items():
            read = {p: at for p, at in starts.items() if self._reads(p)}
            spans = {p: self._span(at, end[topic][p]) for p, at in read.items()}
            lows[topic] = {p: lo for p, (lo, _) in spans.items()}
            highs[topic] = {p: hi for p, (_, hi) in spans.items()}
        return lows, highs

    def pruned(self, tasks: Iterable[ReadTask]) -> list[ReadTask]:
        """The tasks without segments all of whose rows were written at other times. Rows of a
        live segment stay."""
        kept = (
            replace(task, stretches=tuple(part for one in task.stretches for part in self._of(one)))
            for task in tasks
        )
        return [task for task in kept if task.rows]

    def _reads(self, partition: int) -> bool:
        listed = self.partitions is None or partition in self.partitions
        return listed and self.partition.lo <= partition <= self.partition.hi

    def _span(self, start: int, end: int) -> tuple[int, int]:
        lo = min(max(start, self.offset.lo), end)
        return lo, max(lo, min(end, self.offset.hi + 1))

    def _of(self, stretch: Stretch) -> list[Stretch]:
        """The runs of neighbouring segments that may have such rows."""
        table = stretch.table
        first, last = (table.batch.column(name).to_numpy() for name in ("min_ms", "max_ms"))
        may = (first * 1000 <= self.timestamp.hi) & (last * 1000 >= self.timestamp.lo)
        if may.all():
            return [stretch]
        edges = np.flatnonzero(np.diff(np.concatenate([[False], may, [False]]).astype(np.int8)))
        runs = [table.part(lo, hi) for lo, hi in edges.reshape(-1, 2).tolist()]
        return [
            Stretch(max(stretch.lo, int(run.bases[0])), min(stretch.hi, int(run.ends[-1])), run)
            for run in runs
        ]


def bounds_of(filters: Iterable[Filter]) -> Bounds:
    """What all of the filters ask for, as far as it is understood."""
    bounds = Bounds()
    for one in filters:
        bounds = _narrowed(bounds, one)
    return bounds


def _narrowed(bounds: Bounds, one: Filter) -> Bounds:
    column = _column_of(one)
    if column is None:
        return bounds
    if isinstance(one, In):
        values = [_number(value) for value in one.value if value is not None]
        if None in values:
            return bounds
        numbers = sorted(value for value in values if value is not None)
        if column == "partition":
            listed = frozenset(numbers)
            known = bounds.partitions
            return replace(bounds, partitions=listed if known is None else listed & known)
        lo, hi = (numbers[0], numbers[-1]) if numbers else (HIGHEST, LOWEST)
    else:
        number = _number(getattr(one, "value", None))
        span = None if number is None else _span_of(one, number)
        if span is None:
            return bounds
        lo, hi = span
    return replace(bounds, **{column: getattr(bounds, column).within(lo, hi)})


def _column_of(one: Filter) -> str | None:
    path: tuple[str, ...] = getattr(one, "attribute", ())
    name = path[0].lower() if len(path) == 1 else ""
    return name if name in ("partition", "offset", "timestamp") else None


def _span_of(one: Filter, number: int) -> tuple[int, int] | None:
    if isinstance(one, EqualTo | EqualNullSafe):
        return number, number
    if isinstance(one, GreaterThan):
        return number + 1, HIGHEST
    if isinstance(one, GreaterThanOrEqual):
        return number, HIGHEST
    if isinstance(one, LessThan):
        return LOWEST, number - 1
    if isinstance(one, LessThanOrEqual):
        return LOWEST, number
    return None


def _number(value: object) -> int | None:
    """A whole number, or a moment in microseconds; None for anything else."""
    if isinstance(value, datetime.datetime):
        return (value - _EPOCH) // _US if value.tzinfo is not None else None
    return value if type(value) is int else None
