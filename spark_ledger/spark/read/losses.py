"""Rows that were committed and are gone, found when a read is planned, before any task runs.

A ledger that was closed below a committed range, or that is not there any more, has lost those
rows. Always true: the loss is told with its exact offsets or, if the user accepted it, exactly
these rows are left out; no offset is renumbered (hazard 26). A plan looks at LEDGERS_MAX ledgers at
most that it does not know to be closed; the tasks look at what they open in any case
(topic/task_reader.py).
"""

import asyncio
from collections.abc import Iterable, Sequence

from spark_ledger.errors import NoSuchLedger
from spark_ledger.ledger.client import LedgerStore, VersionedRecord
from spark_ledger.topic.read import plan
from spark_ledger.topic.read.plan import LedgerEnd, ReadTask, lost_of, rows_lost, without

RECORDS_AT_ONCE = 256
LEDGERS_MAX = 2_000
CLOSED_KEPT = 100_000
GONE = LedgerEnd(-2, 0)
"""There is no such ledger."""


class LedgerEnds:
    """Where ledgers end. A closed ledger stays as it is, so it is asked for once."""

    def __init__(self, ledgers: LedgerStore) -> None:
        self._ledgers = ledgers
        self._closed: dict[int, LedgerEnd] = {}

    async def of(self, tasks: Iterable[ReadTask]) -> plan.LedgerEnds:
        """The ends of the ledgers that the tasks read, as many as are looked at."""
        every = sorted({ledger_id for task in tasks for ledger_id in task.table.ledger_ids()})
        found: dict[int, LedgerEnd | None] = {}
        found.update((one, self._closed[one]) for one in every if one in self._closed)
        wanted = [one for one in every if one not in found][:LEDGERS_MAX]
        for first in range(0, len(wanted), RECORDS_AT_ONCE):
            some = wanted[first : first + RECORDS_AT_ONCE]
            ends = await asyncio.gather(*(self._end(ledger_id) for ledger_id in some))
            found.update(zip(some, ends, strict=True))
        return found

    def forget(self) -> None:
        """What is closed may have been deleted since."""
        self._closed.clear()

    async def _end(self, ledger_id: int) -> LedgerEnd | None:
        try:
            record = (await self._record(ledger_id)).record
        except NoSuchLedger:
            return GONE
        if record.last_entry is None:
            return None
        end = LedgerEnd(record.last_entry, record.rows or 0)
        if len(self._closed) < CLOSED_KEPT:
            self._closed[ledger_id] = end
        return end

    async def _record(self, ledger_id: int) -> VersionedRecord:
        """That there is none is believed after a sync only: the replica that a new session reads
        from may be behind the topic's log in memory."""
        try:
            return await self._ledgers.record(ledger_id)
        except NoSuchLedger:
            return await self._ledgers.record(ledger_id, fresh=True)


def readable(
    tasks: Sequence[ReadTask], ends: plan.LedgerEnds, fail_on_data_loss: bool
) -> list[ReadTask]:
    """The tasks without the rows that are gone. Raises RowsLost if there are any and
    `fail_on_data_loss` is set."""
    lost = {i: found for i, task in enumerate(tasks) if (found := lost_of(task, ends))}
    if fail_on_data_loss and lost:
        raise rows_lost([one for found in lost.values() for one in found])
    kept = (without(task, lost[i]) if i in lost else task for i, task in enumerate(tasks))
    return [task for task in kept if task.rows]
