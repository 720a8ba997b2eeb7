"""Rows that were committed and are gone, found when a read is planned, before any task runs.

A ledger that was closed below a committed range, or that is not there any more, has lost those
rows. Always true: the loss is told with its exact offsets or, if the user accepted it, exactly
these rows are left out; no offset is renumbered (hazard 26).
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from spark_ledger.errors import NoSuchLedger, RowsLost
from spark_ledger.ledger.client import LedgerStore, VersionedRecord
from spark_ledger.topic.read_plan import EntryPiece, ReadSlice, ReadTask

RECORDS_AT_ONCE = 256
CLOSED_KEPT = 100_000

LastEntries = Mapping[int, int | None]
"""Ledger id -> its last entry: None while it is open, -1 when it is empty or not there."""


class LedgerEnds:
    """Where ledgers end. A closed ledger stays as it is, so it is asked for once."""

    def __init__(self, ledgers: LedgerStore) -> None:
        self._ledgers = ledgers
        self._closed: dict[int, int] = {}

    async def of(self, tasks: Iterable[ReadTask]) -> LastEntries:
        """The ends of the ledgers that the tasks read."""
        wanted = sorted({part.ledger_id for task in tasks for part in task.slices})
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


def readable(
    tasks: Sequence[ReadTask], last_entries: LastEntries, fail_on_data_loss: bool
) -> list[ReadTask]:
    """The tasks without the rows that are gone. Raises RowsLost if there are any and
    `fail_on_data_loss` is set."""
    lost = [piece for task in tasks for piece in _lost(task, last_entries)]
    if not lost:
        return list(tasks)
    if fail_on_data_loss:
        raise _rows_lost(tasks, last_entries)
    cut = (_without_lost(task, last_entries) for task in tasks)
    return [task for task in cut if task.slices]


def _is_lost(ledger_id: int, piece: EntryPiece, last_entries: LastEntries) -> bool:
    last = last_entries[ledger_id]
    return last is not None and piece.entry_id > last


def _lost(task: ReadTask, last_entries: LastEntries) -> Iterator[EntryPiece]:
    for part in task.slices:
        yield from (piece for piece in part.pieces if _is_lost(part.ledger_id, piece, last_entries))


def _without_lost(task: ReadTask, last_entries: LastEntries) -> ReadTask:
    slices = []
    for part in task.slices:
        pieces = [p for p in part.pieces if not _is_lost(part.ledger_id, p, last_entries)]
        if len(pieces) == len(part.pieces):
            slices.append(part)
        elif pieces:
            slices.append(_cut(part, pieces))
    return replace(task, slices=tuple(slices))


def _cut(part: ReadSlice, pieces: Sequence[EntryPiece]) -> ReadSlice:
    return replace(part, pieces=tuple(pieces), known_confirmed=pieces[-1].entry_id)


def _rows_lost(tasks: Sequence[ReadTask], last_entries: LastEntries) -> RowsLost:
    where, rows = [], 0
    for task in tasks:
        for part in task.slices:
            gone = [p for p in part.pieces if _is_lost(part.ledger_id, p, last_entries)]
            if gone:
                rows += sum(piece.take for piece in gone)
                first, end = gone[0].offset, gone[-1].offset + gone[-1].take
                where.append(
                    f"{task.topic} partition {task.partition} offsets {first} to {end - 1} "
                    f"(ledger {part.ledger_id})"
                )
    named = "; ".join(where[:8]) + ("; ..." if len(where) > 8 else "")
    return RowsLost(f"{rows} committed rows are gone: {named}", rows=rows)
