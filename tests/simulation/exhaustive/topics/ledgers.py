"""Ledgers as the topic layer sees them, each act one step: what many bookies do together is
explored by the ledgers' own scopes (docs/exhaustive.md).

Always true: a ledger's record is in the metadata store and moves as production code moves it
(records.py, transitions.py); an entry is acknowledged at once and for ever, or refused because the
ledger is fenced; recovery fences, and closes at the last entry there is.
"""

from collections.abc import Sequence
from typing import Any

from spark_ledger import errors
from spark_ledger.config import ClientConfig
from spark_ledger.ledger import transitions
from spark_ledger.ledger.records import LedgerIds, LedgerRecords, VersionedRecord
from spark_ledger.ledger.transitions import LastEntry
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord
from spark_ledger.metadata.store import Operation
from spark_ledger.topic.log.segments import Segment
from tests.kit.segments_seen import entry_ids
from tests.simulation.exhaustive.topics.processes import Process

BOOKIES = ("b1", "b2", "b3")
ENTRY_BYTES = 100
QUORUMS = (3, 3, 2)


class ModelLedgers:
    """spark_ledger.ledger.client.LedgerStore of one process, as far as the topic layer asks."""

    def __init__(self, process: Process) -> None:
        self.metadata = process
        self.config = ClientConfig()
        self._records = LedgerRecords(process)
        self._ids = LedgerIds(process)

    @property
    def invalidations(self) -> int:
        return self._records.guard.invalidations

    async def make(self, ledger_id: int, *, intent: str, topic: str, creator: str) -> int:
        """A ledger without entries; its record's version."""
        record = LedgerRecord(
            *(ledger_id, *QUORUMS, (Fragment(0, BOOKIES),)),
            creator=creator,
            intent=intent,
            topic=topic,
        )
        return (await self._records.create(record)).version

    async def add(self, ledger_id: int, row: str) -> int:
        """The entry's id. Raises LedgerFenced; OutcomeUnknown when the answer was lost."""
        entry: int | None = await self.metadata.ask("add", ledger_id, row)
        if entry is None:
            raise errors.LedgerFenced(f"ledger {ledger_id} is fenced")
        return entry

    async def recover(self, ledger_id: int) -> VersionedRecord:
        known = await self._records.read(ledger_id, fresh=True)
        known = await self._records.move(known, transitions.mark_in_recovery)
        if known.record.closed:
            return known
        entries: int = await self.metadata.ask("fence", ledger_id)
        end = LastEntry(entries - 1, entries * ENTRY_BYTES, entries)
        began = known.record.last_fragment
        return await self._records.move(
            known, lambda record: transitions.close_recovered(record, began, (began,), end)
        )

    async def record(self, ledger_id: int, *, fresh: bool = False) -> VersionedRecord:
        return await self._records.read(ledger_id, fresh=fresh)

    async def delete(self, ledger_id: int, only_if: Sequence[Operation] = ()) -> bool:
        return await self._records.delete(ledger_id, only_if)

    async def allocate_ids(self, count: int) -> range:
        return await self._ids.allocate(count)

    async def create(self, *_: Any, **options: Any) -> Any:
        raise AssertionError("nothing here is so large that it is written to a ledger")

    async def open(self, *_: Any, **options: Any) -> Any:
        raise AssertionError("nobody reads a ledger here")


def segment(
    ledger_id: int, entries: Sequence[int], *, version: int = 0, partition: int = 0
) -> Segment:
    """Consecutive entries of a row each."""
    rows = len(entries)
    return Segment(
        *(partition, ledger_id, version, ((entries[0], entries[-1]),), (1,) * rows, rows),
        *(rows * ENTRY_BYTES, 1, 1),
    )


def rows_of(one: Segment) -> list[tuple[int, int]]:
    """(ledger, entry) of each row."""
    return [(one.ledger_id, entry) for entry in entry_ids(one)]
