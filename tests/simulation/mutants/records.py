"""Bugs of the record in the metadata store: unknown outcomes, guards, deletion."""

from contextlib import suppress
from typing import Any

from spark_ledger.errors import LedgerError, NoSuchLedger, Unavailable
from spark_ledger.ledger import records, transitions
from spark_ledger.ledger.transitions import Write, with_replacements
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.store import BadVersion, NoNode, OutcomeUnknown
from tests.simulation.mutants.mutant import Mutant

UNKNOWN = {
    "quorum": (3, 2, 2),
    "bookies": 5,
    "faults": ("unknown outcomes", "slow receiver", "clog"),
    "between_s": 0.4,
    "writers": 2,
}
TAKEN_OVER = {
    "quorum": (3, 3, 2),
    "bookies": 5,
    "faults": ("slow network", "kill", "pause", "lagging store", "suspension"),
    "between_s": 0.6,
    "writers": 2,
    "recoverers": 2,
}


def own_record_is_anothers(create: Any) -> Any:
    async def taken(self: Any, record: Any) -> Any:
        found = await create(self, record)
        if found.record is not record:
            raise LedgerError(f"ledger id {record.ledger_id} is taken", "Take another id.")
        return found

    return taken


def lost_answer_is_failure(move: Any) -> Any:
    async def failed(self: Any, known: Any, decide: Any, **options: Any) -> Any:
        path = paths.ledger(known.record.ledger_id)
        found = decide(known.record)
        if isinstance(found, Write):
            value = ledger_record.encode(found.record)
            try:
                version = await self.metadata.set(path, value, known.version)
                return records.VersionedRecord(found.record, version)
            except BadVersion:
                known = await self.read(known.record.ledger_id, fresh=True)
            except OutcomeUnknown as failure:
                raise Unavailable(f"the record cannot be written: {failure!r}") from failure
            except NoNode:
                raise NoSuchLedger(f"ledger {known.record.ledger_id} was deleted") from None
        return await move(self, known, decide, **options)

    return failed


def repeats_blindly(move: Any) -> Any:
    """What was decided once is written over whatever is there by then."""

    async def again(self: Any, known: Any, decide: Any, **options: Any) -> Any:
        decided = decide(known.record)
        return await move(self, known, lambda record: decided, **options)

    return again


def deletes_what_is_open(delete: Any) -> Any:
    async def whatever(self: Any, ledger_id: int, only_if: Any = ()) -> bool:
        with suppress(NoNode, OutcomeUnknown):
            await self.metadata.delete(paths.ledger(ledger_id))
        return True

    return whatever


def closes_whatever_the_state(close: Any) -> Any:
    return lambda record, end: Write(transitions._closed_record(record, record.fragments, end))


def changes_whatever_the_state(change: Any) -> Any:
    def unguarded(record: Any, failed: Any, replacements: Any, first_entry: int) -> Any:
        if first_entry < record.last_fragment.first_entry:
            return change(record, failed, replacements, first_entry)
        return Write(with_replacements(record, replacements, first_entry))

    return unguarded


R = records.LedgerRecords
MUTANTS = (
    Mutant(
        "own record taken for another's", "BK#1967", R, "create", own_record_is_anothers, UNKNOWN
    ),
    Mutant("lost answer taken for failure", "BK#2179", R, "move", lost_answer_is_failure, UNKNOWN),
    Mutant("decision repeated blindly", "BK#2179", R, "move", repeats_blindly, UNKNOWN),
    Mutant(
        "open ledger deleted",
        "BK#4462",
        R,
        "delete",
        deletes_what_is_open,
        {"recoverers": 3, "writers": 2},
    ),
    Mutant(
        "close over a recovery",
        "herddb#100",
        transitions,
        "close",
        closes_whatever_the_state,
        TAKEN_OVER,
    ),
    Mutant(
        "ensemble changed after take-over",
        "1.5",
        transitions,
        "change_ensemble",
        changes_whatever_the_state,
        TAKEN_OVER,
    ),
)
