"""Ledger records in the metadata store: read, made, moved, deleted.

Always true: every write is a compare-and-set on the version that was judged; a write whose answer
was lost is never repeated blindly: sync, read again, judge again (transitions.py). Errors of the
store leave here as errors of spark_ledger.errors.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass

from spark_ledger.errors import LedgerError, NoSuchLedger, Unavailable
from spark_ledger.ledger.transitions import Done, Move, Refused
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.ledger_record import LedgerRecord
from spark_ledger.metadata.store import (
    BadVersion,
    MetadataStore,
    NodeExists,
    NoNode,
    OutcomeUnknown,
    StoreError,
)

DIGITS = 19


@dataclass(frozen=True, slots=True)
class VersionedRecord:
    """A record and the version under which the store has it."""

    record: LedgerRecord
    version: int


class MoveRefused(Exception):
    """The record in the store does not allow the move. `found` is what is there."""

    def __init__(self, why: str, found: VersionedRecord) -> None:
        super().__init__(why)
        self.why = why
        self.found = found


class OutcomeUnresolved(Unavailable):
    """A write may or may not have been applied, and the store cannot be asked now."""


class LedgerRecords:
    """The records of all ledgers of a cluster."""

    def __init__(self, metadata: MetadataStore) -> None:
        self.metadata = metadata

    async def read(self, ledger_id: int, *, fresh: bool = False) -> VersionedRecord:
        """The record; with `fresh` not older than this call. Raises NoSuchLedger, Unavailable."""
        path = paths.ledger(ledger_id)
        try:
            if fresh:
                await self.metadata.sync(path)
            node = await self.metadata.get(path)
            return VersionedRecord(ledger_record.decode(node.value), node.version)
        except NoNode:
            raise NoSuchLedger(f"there is no ledger {ledger_id}", ledger_id=ledger_id) from None
        except StoreError as failure:
            raise _unavailable(
                f"the record of ledger {ledger_id} cannot be read", failure
            ) from failure

    async def create(self, record: LedgerRecord) -> VersionedRecord:
        """Make the record. A lost answer is told by the record's creator token.

        Raises LedgerError if another ledger has the id, OutcomeUnresolved, Unavailable.
        """
        path, value = paths.ledger(record.ledger_id), ledger_record.encode(record)
        unknown = False
        while True:
            try:
                await self.metadata.create(path, value, parents=True)
                return VersionedRecord(record, 0)
            except NodeExists:
                found = await self.read(record.ledger_id, fresh=True)
                if record.creator and found.record.creator == record.creator:
                    return found
                raise LedgerError(
                    f"ledger id {record.ledger_id} is taken", "Take another id."
                ) from None
            except OutcomeUnknown:
                unknown = True
                with suppress(NoSuchLedger):
                    await self._resolvable(record.ledger_id)
            except StoreError as failure:
                what = f"ledger {record.ledger_id} cannot be created"
                raise _unavailable(what, failure, unknown) from failure

    async def move(
        self, known: VersionedRecord, decide: Callable[[LedgerRecord], Move]
    ) -> VersionedRecord:
        """Make the move that `decide` computes, from `known` or whatever is there by then.

        Returns what the store has afterwards. Raises MoveRefused, NoSuchLedger; OutcomeUnresolved
        when the write may have been applied, Unavailable when it certainly was not.
        """
        ledger_id, unknown = known.record.ledger_id, False
        while True:
            move = decide(known.record)
            if isinstance(move, Done):
                return known
            if isinstance(move, Refused):
                raise MoveRefused(move.why, known)
            value = ledger_record.encode(move.record)
            try:
                version = await self.metadata.set(paths.ledger(ledger_id), value, known.version)
                return VersionedRecord(move.record, version)
            except BadVersion:
                known = await self.read(ledger_id, fresh=True)
            except OutcomeUnknown:
                unknown = True
                known = await self._resolvable(ledger_id)
            except NoNode:
                raise NoSuchLedger(f"ledger {ledger_id} was deleted", ledger_id=ledger_id) from None
            except StoreError as failure:
                what = f"the record of ledger {ledger_id} cannot be written"
                raise _unavailable(what, failure, unknown) from failure

    async def delete(self, ledger_id: int) -> None:
        """Remove the record of a CLOSED ledger; one that is gone already is success.

        Raises LedgerError if it is not closed, Unavailable.
        """
        while True:
            try:
                known = await self.read(ledger_id, fresh=True)
                if not known.record.closed:
                    raise LedgerError(
                        f"ledger {ledger_id} is {known.record.state.value}, not CLOSED",
                        "Close or recover it first.",
                    )
                await self.metadata.delete(paths.ledger(ledger_id), known.version)
                return
            except (NoSuchLedger, NoNode):
                return
            except (BadVersion, OutcomeUnknown):
                continue
            except StoreError as failure:
                raise _unavailable(f"ledger {ledger_id} cannot be deleted", failure) from failure

    async def list(self) -> AsyncIterator[int]:
        """Ids of all ledgers, ascending, one level of the tree in memory at a time.

        Raises Unavailable, also when the tree changed in a way that makes the listing doubtful.
        """
        async for ledger_id in self._below(paths.LEDGERS, ""):
            yield ledger_id

    async def _below(self, path: str, digits: str) -> AsyncIterator[int]:
        try:
            names = await self.metadata.children(path)
        except NoNode:
            if path == paths.LEDGERS:
                return  # no ledger was ever made
            raise Unavailable(f"the listing of ledgers is broken at {path}") from None
        except StoreError as failure:
            raise _unavailable("the ledgers cannot be listed", failure) from failure
        for name in names:
            found = digits + name
            if len(found) == DIGITS:
                yield int(found)
            else:
                async for ledger_id in self._below(f"{path}/{name}", found):
                    yield ledger_id

    async def _resolvable(self, ledger_id: int) -> VersionedRecord:
        """What is there after a write with a lost answer. Raises OutcomeUnresolved."""
        try:
            return await self.read(ledger_id, fresh=True)
        except NoSuchLedger:
            raise
        except Unavailable as failure:
            raise OutcomeUnresolved(failure.what) from failure


def _unavailable(what: str, failure: StoreError, unknown: bool = False) -> Unavailable:
    kind = OutcomeUnresolved if unknown or isinstance(failure, OutcomeUnknown) else Unavailable
    return kind(f"{what}: {type(failure).__name__} {failure}".rstrip())
