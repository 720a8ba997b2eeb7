"""Committed rows that no ledger holds any more, as exact offsets. Pure.

Always true: what is told lost lies beyond the end of its ledger and within what a task reads; a
task without its lost rows reads exactly the others, at the offsets they have (hazard 26).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spark_ledger.errors import RowsLost
from spark_ledger.topic.arrow_arrays import distinct_and_which
from spark_ledger.topic.pieces import cut_out, pieces_of
from spark_ledger.topic.read_plan import ReadTask

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
    table = task.table
    ledgers, which = distinct_and_which(table.ledgers)
    ends = (last_entries.get(ledger) for ledger in ledgers.tolist())
    reach = np.array([ENDLESS if end is None else end for end in ends], dtype=np.int64)[which]
    short = table.last_entries > reach
    if not bool(short.any()):
        return []
    pieces = pieces_of(table, task.spans, among=short)
    pieces = pieces.taken(pieces.entry > reach[pieces.segment])
    found: list[Lost] = []
    columns = (pieces.partition, pieces.offset, pieces.offset + pieces.take, pieces.ledger)
    for partition, start, end, ledger in zip(*(one.tolist() for one in columns), strict=True):
        last = found[-1] if found else None
        if last and (last.partition, last.end, last.ledger_id) == (partition, start, ledger):
            found[-1] = replace(last, end=end)
        else:
            found.append(Lost(task.topic, partition, start, end, ledger))
    return found


def without(task: ReadTask, gone: Iterable[Lost]) -> ReadTask:
    """The task without these rows."""
    by_partition: dict[int, list[tuple[int, int]]] = {}
    for one in gone:
        by_partition.setdefault(one.partition, []).append((one.start, one.end))
    return replace(task, spans=cut_out(task.spans, by_partition))


def since(task: ReadTask, offsets: Mapping[int, int]) -> ReadTask:
    """The task without what is before these offsets of partitions."""
    spans = (one._replace(lo=max(one.lo, offsets.get(one.partition, 0))) for one in task.spans)
    live = task.live
    if live is not None:
        start = max(live.start, offsets.get(live.live.partition, 0))
        live = replace(live, start=start) if start < live.end else None
    return replace(task, spans=tuple(one for one in spans if one.lo < one.hi), live=live)


def rows_lost(lost: Sequence[Lost], ended: tuple[int, int] | None = None) -> RowsLost:
    """The error that says so, with how many rows; `ended`: the ledger that ends before them, and
    its last entry."""
    named = "; ".join(map(str, lost[:NAMED_MAX])) + ("; ..." if len(lost) > NAMED_MAX else "")
    rows = sum(one.end - one.start for one in lost)
    return RowsLost(f"{rows} committed rows are gone: {named}", rows=rows, ended=ended)
