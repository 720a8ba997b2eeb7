"""Rows that were committed and are gone, found when a read is planned, before any task runs.

A ledger that was closed below a committed range, or that is not there any more, has lost those
rows. Always true: the loss is told with its exact offsets or, if the user accepted it, exactly
these rows are left out; no offset is renumbered (hazard 26).
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spark_ledger.errors import NoSuchLedger, RowsLost
from spark_ledger.ledger.client import LedgerStore, VersionedRecord
from spark_ledger.topic.read_plan import ReadTask
from spark_ledger.topic.segment_table import Stretch

RECORDS_AT_ONCE = 256
CLOSED_KEPT = 100_000
ENDLESS = 2**62

LastEntries = Mapping[int, int | None]
"""Ledger id -> its last entry: None while it is open, -1 when it is empty or not there."""


class LedgerEnds:
    """Where ledgers end. A closed ledger stays as it is, so it is asked for once."""

    def __init__(self, ledgers: LedgerStore) -> None:
        self._ledgers = ledgers
        self._closed: dict[int, int] = {}

    async def of(self, tasks: Iterable[ReadTask]) -> LastEntries:
        """The ends of the ledgers that the tasks read."""
        tables = (stretch.table for task in tasks for stretch in task.stretches)
        wanted = sorted({ledger_id for table in tables for ledger_id in table.ledger_ids()})
        found: dict[int, int | None] = {}
        for first in range(0, len(wanted), RECORDS_AT_ONCE):
            some = wanted[first : first + RECORDS_AT_ONCE]
            ends = await asyncio.gather(*(self._last_entry(ledger_id) for ledger_id in some))
            found.update(zip(some, ends, strict=True))
        return found

    async def _last_entry(self, ledger_id: int) -> int | None:
        if ledger_id in self._closed:
            return self._closed[ledger_id]
        try:
            last = (await self._record(ledger_id)).record.last_entry
        except NoSuchLedger:
            return -1
        if last is not None and len(self._closed) < CLOSED_KEPT:
            self._closed[ledger_id] = last
        return last

    async def _record(self, ledger_id: int) -> VersionedRecord:
        """That there is none is believed after a sync only: the replica that a new session reads
        from may be behind the topic's log in memory."""
        try:
            return await self._ledgers.record(ledger_id)
        except NoSuchLedger:
            return await self._ledgers.record(ledger_id, fresh=True)


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


def readable(
    tasks: Sequence[ReadTask], last_entries: LastEntries, fail_on_data_loss: bool
) -> list[ReadTask]:
    """The tasks without the rows that are gone. Raises RowsLost if there are any and
    `fail_on_data_loss` is set."""
    lost = {i: found for i, task in enumerate(tasks) if (found := _lost(task, last_entries))}
    if fail_on_data_loss and lost:
        raise _rows_lost([one for found in lost.values() for one in found])
    kept = (_without(task, lost.get(i, [])) for i, task in enumerate(tasks))
    return [task for task in kept if task.rows]


def _lost(task: ReadTask, last_entries: LastEntries) -> list[Lost]:
    return [
        Lost(task.topic, task.partition, *rows, ledger_id)
        for stretch in task.stretches
        for rows, ledger_id in _lost_of(stretch, last_entries)
    ]


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


def _without(task: ReadTask, lost: Iterable[Lost]) -> ReadTask:
    stretches = list(task.stretches)
    for gone in lost:
        stretches = [part for one in stretches for part in one.without(gone.start, gone.end)]
    return replace(task, stretches=tuple(stretches))


def _rows_lost(lost: Sequence[Lost]) -> RowsLost:
    named = "; ".join(map(str, lost[:8])) + ("; ..." if len(lost) > 8 else "")
    rows = sum(one.end - one.start for one in lost)
    return RowsLost(f"{rows} committed rows are gone: {named}", rows=rows)
