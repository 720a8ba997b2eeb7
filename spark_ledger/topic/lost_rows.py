"""Committed rows that no ledger holds any more, as exact offsets. Pure.

Always true: what is told lost lies beyond the end of its ledger and within what a task reads; a
task without its lost rows reads exactly the others, at the offsets they have (hazard 26).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spark_ledger.errors import RowsLost
from spark_ledger.topic.read_plan import ReadTask
from spark_ledger.topic.segment_table import Stretch

ENDLESS = 2**62
NAMED_MAX = 8

LastEntries = Mapping[int, int | None]
"""Ledger id -> its last entry: None while it is open, below 0 when it is empty or not there. A
ledger that is left out counts as open."""


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


def lost_of(task: ReadTask, last_entries: LastEntries) -> list[Lost]:
    """What the task would read beyond the ends of ledgers."""
    return [
        Lost(task.topic, task.partition, *rows, ledger_id)
        for stretch in task.stretches
        for rows, ledger_id in _lost_of(stretch, last_entries)
    ]


def without(task: ReadTask, gone: Iterable[tuple[int, int]]) -> ReadTask:
    """The task without the committed offsets [start, end) of each pair."""
    stretches = list(task.stretches)
    for start, end in gone:
        stretches = [part for one in stretches for part in one.without(start, end)]
    return replace(task, stretches=tuple(stretches))


def since(task: ReadTask, offset: int) -> ReadTask:
    """The task without what is before the offset."""
    if offset <= task.start:
        return task
    rest, live = without(task, [(task.start, offset)]), task.live
    if live is not None:
        live = replace(live, start=max(live.start, offset)) if live.end > offset else None
    return replace(rest, start=offset, live=live)


def rows_lost(lost: Sequence[Lost]) -> RowsLost:
    """The error that says so, with how many rows."""
    named = "; ".join(map(str, lost[:NAMED_MAX])) + ("; ..." if len(lost) > NAMED_MAX else "")
    rows = sum(one.end - one.start for one in lost)
    return RowsLost(f"{rows} committed rows are gone: {named}", rows=rows)


def _lost_of(stretch: Stretch, last_entries: LastEntries) -> Iterator[tuple[tuple[int, int], int]]:
    """The offsets [start, end) of the stretch beyond the end of their ledger."""
    table = stretch.table
    ends = (last_entries.get(ledger) for ledger in table.ledgers.tolist())
    reach = np.array([ENDLESS if end is None else end for end in ends], dtype=np.int64)
    for i in np.flatnonzero(table.last_entries > reach).tolist():
        placed = table[i]
        counts = zip(placed.segment.entry_ids(), placed.segment.entry_rows, strict=True)
        there = sum(rows for entry, rows in counts if entry <= reach[i])
        start, end = max(placed.base + there, stretch.lo), min(placed.end, stretch.hi)
        if start < end:
            yield (start, end), placed.segment.ledger_id
