"""Ledger records in the metadata store: read, made, moved, deleted, listed; and ledger ids, taken
from one counter in blocks.

Always true:
- every write is a compare-and-set on the version from which the move was computed. If its response
  is lost, the record is read again after a sync, and the move computed again (transitions.py);
- a record by which something is decided is read after a sync;
- a record that the store would not take is refused before it is sent, because the store's refusal
  looks like a lost response;
- a listing is whole or an error;
- an id is handed out once; ids rise from FIRST_ID. The ids of a block whose response was lost are
  never used;
- a record is made by a multi that fails while the store is held, and never with an id of an earlier
  epoch (metadata/cluster.py);
- errors of the store leave this file as errors of spark_ledger.errors.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from spark_ledger.errors import (
    LedgerError,
    LedgerNotClosed,
    NoSuchLedger,
    RecordTooBig,
    TopicDeleted,
    Unavailable,
    UnsupportedFormat,
)
from spark_ledger.ledger.deletions import ConditionFailed, Deletions
from spark_ledger.ledger.transitions import Move, MoveRefusal, NoWriteNeeded
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.cluster import IDS_PER_EPOCH, ClusterGuard
from spark_ledger.metadata.deleted_ledgers import BadDeletedSet
from spark_ledger.metadata.hold import FIRST_ID, decode_counter, encode_counter
from spark_ledger.metadata.ledger_record import LedgerRecord, RecordState
from spark_ledger.metadata.shared_multis import SharedMultis
from spark_ledger.metadata.store import (
    ANY_VERSION,
    VALUE_BYTES_MAX,
    BadVersion,
    Check,
    Create,
    MetadataStore,
    MultiFailed,
    NodeExists,
    NoNode,
    Operation,
    OutcomeUnknown,
    Set,
    StoreError,
    Versioned,
    Watcher,
)

NEW_RECORD_BYTES_MAX = 512 * 1024  # leaves room for more fragments below VALUE_BYTES_MAX


@dataclass(frozen=True, slots=True)
class VersionedRecord:
    """A record and the version under which the store has it."""

    record: LedgerRecord
    version: int


class MoveRefused(Exception):
    """The record in the store, `versioned`, does not allow the move."""

    def __init__(self, why: str, versioned: VersionedRecord) -> None:
        super().__init__(why)
        self.why = why
        self.versioned = versioned


class OutcomeUnresolved(Unavailable):
    """A write may or may not have been applied, and the store cannot be asked now."""


class IdSpent(OutcomeUnresolved):
    """A ledger of this id may have been made and deleted, or the id is of an earlier epoch: no
    ledger is made. Take another id."""


class LedgerRecords:
    """The records of all ledgers of a cluster."""

    def __init__(self, metadata: MetadataStore) -> None:
        self.metadata = metadata
        self._multis = SharedMultis(metadata)
        self._deletions = Deletions(metadata)
        self.guard = ClusterGuard(metadata)

    async def read(
        self, ledger_id: int, *, fresh: bool = False, watch: Watcher | None = None
    ) -> VersionedRecord:
        """The record; with `fresh` not older than this call. `watch` is called when it changes.

        Raises NoSuchLedger, Unavailable, UnsupportedFormat (damaged, or of a later version).
        """
        path = paths.ledger(ledger_id)
        try:
            if fresh:
                await self.metadata.sync(path)
            versioned = _decoded(ledger_id, await self.metadata.get(path, watch))
        except NoNode:
            raise NoSuchLedger(f"there is no ledger {ledger_id}", ledger_id=ledger_id) from None
        except StoreError as failure:
            raise _unavailable(
                f"the record of ledger {ledger_id} cannot be read", failure
            ) from failure
        if isinstance(versioned, UnsupportedFormat):
            raise versioned
        return versioned

    async def read_many(
        self, ledger_ids: Sequence[int]
    ) -> list[VersionedRecord | UnsupportedFormat | None]:
        """The records of these ledgers, much sooner than by `read` of each: None for a ledger
        without record, an error for a record that cannot be decoded. Raises Unavailable."""
        try:
            nodes = await self.metadata.get_many([paths.ledger(number) for number in ledger_ids])
        except StoreError as failure:
            raise _unavailable("records of ledgers cannot be read", failure) from failure
        pairs = zip(ledger_ids, nodes, strict=True)
        return [None if node is None else _decoded(number, node) for number, node in pairs]

    async def create(self, record: LedgerRecord) -> VersionedRecord:
        """Make the record. A record for a topic is made only while the topic's node exists: so a
        process that first removes that node sees all of the topic's ledgers. After a lost response
        the record's creator token shows whether this call made it.

        Raises LedgerError if another ledger has the id, TopicDeleted, RecordTooBig,
        OutcomeUnresolved, Unavailable, MetadataHeld (nothing was written). Raises IdSpent if the id
        is of an earlier epoch, or if the response was lost and there is no record: other processes
        may have closed and deleted the ledger by then.
        """
        value = _encoded(record, NEW_RECORD_BYTES_MAX)
        outcome_unknown = False
        try:
            await self._make(record, value)
            return VersionedRecord(record, 0)
        except NodeExists:
            pass
        except OutcomeUnknown:
            outcome_unknown = True
        except StoreError as failure:
            what = f"ledger {record.ledger_id} cannot be created"
            raise _unavailable(what, failure) from failure
        return await self._read_created(record, outcome_unknown)

    async def _read_created(self, record: LedgerRecord, outcome_unknown: bool) -> VersionedRecord:
        """The record, after a creation without a clear response. Raises as `create` if this client
        did not make it."""
        try:
            present = await self._reread(record.ledger_id, outcome_unknown)
        except NoSuchLedger as absent:
            raise IdSpent(
                f"ledger {record.ledger_id} may have been made, and has no record now"
            ) from absent
        if record.creator and present.record.creator == record.creator:
            return present
        raise LedgerError(f"ledger id {record.ledger_id} is taken", "Take another id.")

    async def create_several(self, records: Sequence[LedgerRecord]) -> list[VersionedRecord]:
        """As `create`, for records of one topic that fit into one multi. If the multi fails, each
        record is made by itself. Raises IdSpent if the multi's response was lost and a record is
        missing."""
        values = [_encoded(record, NEW_RECORD_BYTES_MAX) for record in records]
        creates = [
            Create(paths.ledger(record.ledger_id), value)
            for record, value in zip(records, values, strict=True)
        ]
        try:
            guard = await self._creation_checks([record.ledger_id for record in records])
            topics = dict.fromkeys(record.topic for record in records)
            checks = [Check(paths.topic(topic), ANY_VERSION) for topic in topics]
            await self.metadata.multi((*guard, *checks, *creates))
        except MultiFailed:
            return [await self.create(record) for record in records]
        except OutcomeUnknown:  # each id may be spent, so none is tried again
            return [await self._read_created(record, outcome_unknown=True) for record in records]
        except StoreError as failure:
            raise _unavailable(f"{len(records)} ledgers cannot be created", failure) from failure
        return [VersionedRecord(record, 0) for record in records]

    async def move(
        self,
        versioned: VersionedRecord,
        decide: Callable[[LedgerRecord], Move],
    ) -> VersionedRecord:
        """Make the move that `decide` computes from `versioned`; if the store has a newer record,
        from that. Moves that come at once share a multi.

        Returns the record that the store has afterwards. Raises MoveRefused, NoSuchLedger,
        RecordTooBig; OutcomeUnresolved when the write may have been applied, Unavailable when it
        certainly was not.
        """
        ledger_id, outcome_unknown = versioned.record.ledger_id, False
        while True:
            move = decide(versioned.record)
            if isinstance(move, NoWriteNeeded):
                return versioned
            if isinstance(move, MoveRefusal):
                raise MoveRefused(move.why, versioned)
            value = _encoded(move.record, VALUE_BYTES_MAX)
            try:
                write = Set(paths.ledger(ledger_id), value, versioned.version)
                version = await self._set(write)
                return VersionedRecord(move.record, version)
            except BadVersion:
                versioned = _newer(versioned, await self._reread(ledger_id, outcome_unknown))
            except OutcomeUnknown:
                outcome_unknown = True
                versioned = _newer(versioned, await self._reread(ledger_id, outcome_unknown))
            except NoNode:
                raise NoSuchLedger(f"ledger {ledger_id} was deleted", ledger_id=ledger_id) from None
            except StoreError as failure:
                what = f"the record of ledger {ledger_id} cannot be written"
                raise _unavailable(what, failure, outcome_unknown) from failure

    async def _set(self, write: Set) -> int:
        """Returns the new version. Raises as MetadataStore.set."""
        try:
            await self._multis.multi([write])
        except MultiFailed as failed:
            raise failed.cause from None
        return write.version + 1

    async def delete(self, ledger_id: int, only_if: Sequence[Operation] = ()) -> bool:
        """Remove the record of a CLOSED ledger and name the ledger as deleted, in one multi that
        checks `only_if`. True also if the record is gone already; False if `only_if` does not hold.

        Raises LedgerNotClosed, UnsupportedFormat (the set of deleted ledgers is damaged);
        OutcomeUnresolved when the record may be gone; Unavailable, MetadataHeld when it certainly
        is not.
        """
        outcome_unknown = False
        while True:
            try:
                present = await self._reread(ledger_id, outcome_unknown)
                if not present.record.closed:
                    state = present.record.state.value
                    raise LedgerNotClosed(
                        f"ledger {ledger_id} is {state}, not CLOSED", ledger_id=ledger_id
                    )
                await self._deletions.remove(ledger_id, present.version, only_if)
                return True
            except (NoSuchLedger, NoNode):
                return True
            except ConditionFailed:
                return False
            except BadVersion:
                continue
            except OutcomeUnknown:
                outcome_unknown = True
            except BadDeletedSet as damage:
                raise UnsupportedFormat(f"ledger {ledger_id} cannot be deleted: {damage}") from None
            except StoreError as failure:
                what = f"ledger {ledger_id} cannot be deleted"
                raise _unavailable(what, failure, outcome_unknown) from failure

    async def list(self) -> AsyncIterator[int]:
        """The ids of all ledgers, ascending; a ledger that is made or deleted during the listing
        may be in it. Keeps one folder of names for each level of the tree in memory.

        Raises Unavailable, also when the tree is damaged: the list is never short.
        """
        try:
            async for ledger_id in ledger_record.ledger_ids(self.metadata):
                yield ledger_id
        except ledger_record.BrokenListing as broken:
            raise Unavailable(str(broken)) from None
        except StoreError as failure:
            raise _unavailable("the ledgers cannot be listed", failure) from failure

    async def _make(self, record: LedgerRecord, value: bytes) -> None:
        """Raises NodeExists, OutcomeUnknown, TopicDeleted, IdSpent, MetadataHeld, StoreError."""
        path = paths.ledger(record.ledger_id)
        topic = [Check(paths.topic(record.topic), ANY_VERSION)] if record.topic else []
        while True:
            guard = await self._creation_checks([record.ledger_id])
            if not (guard or topic):
                return await self.metadata.create(path, value, parents=True)
            operations: Sequence[Operation] = [*guard, *topic, Create(path, value)]
            try:
                return await self.metadata.multi(operations)
            except MultiFailed as failure:
                if failure.index < len(guard):
                    await self.guard.refresh()
                    continue
                if not isinstance(failure.cause, NoNode):
                    raise failure.cause from None
                if failure.index < len(operations) - 1:
                    raise TopicDeleted(
                        f"there is no topic {record.topic} to make a ledger for"
                    ) from None
            with suppress(NodeExists, OutcomeUnknown):  # the folder of the record was missing
                await self.metadata.create(path.rpartition("/")[0], parents=True)

    async def _creation_checks(self, ledger_ids: Sequence[int]) -> Sequence[Check]:
        """The checks for a multi that makes records with these ids. Raises IdSpent, MetadataHeld,
        StoreError."""
        checks = await self.guard.checks()
        for ledger_id in ledger_ids:
            if ledger_id // IDS_PER_EPOCH < self.guard.epoch:
                raise IdSpent(
                    f"ledger id {ledger_id} was given out before the metadata store was accepted:"
                    f" the store's epoch is {self.guard.epoch} now"
                )
        return checks

    async def _reread(self, ledger_id: int, outcome_unknown: bool) -> VersionedRecord:
        """The record after a sync. If a write with an unknown outcome was sent, it raises
        OutcomeUnresolved in the place of Unavailable."""
        try:
            return await self.read(ledger_id, fresh=True)
        except Unavailable as failure:
            if not outcome_unknown:
                raise
            raise OutcomeUnresolved(failure.what) from failure


def _newer(before: VersionedRecord, now: VersionedRecord) -> VersionedRecord:
    """The record from which the next try of a move starts: the client had `before`, the store has
    `now`. If `now` has a lower version, the store went back in time: if the ledger is OPEN there,
    the next try starts from the record of `before`, because `now` has nothing newer. Raises
    NoSuchLedger if another ledger has the id now."""
    ours, ledger_id = before.record.creator, before.record.ledger_id
    if ours and now.record.creator and now.record.creator != ours:
        raise NoSuchLedger(
            f"ledger {ledger_id} has no record any more: the metadata store went back in time, and"
            " another ledger has the id now",
            ledger_id=ledger_id,
        )
    if now.version < before.version and now.record.state is RecordState.OPEN:
        return VersionedRecord(before.record, now.version)
    return now


def _decoded(ledger_id: int, node: Versioned) -> VersionedRecord | UnsupportedFormat:
    """The record; if it is damaged or of a later version, returns the error."""
    try:
        return VersionedRecord(ledger_record.decode(node.value), node.version)
    except ledger_record.BadLedgerRecord as damage:
        return UnsupportedFormat(f"the record of ledger {ledger_id}: {damage}")


def _encoded(record: LedgerRecord, limit: int) -> bytes:
    """Raises RecordTooBig."""
    value = ledger_record.encode(record)
    if len(value) > limit:
        raise RecordTooBig(
            f"the record of ledger {record.ledger_id} would have {len(value)} bytes with its"
            f" custom metadata and {len(record.fragments)} fragments, {limit} are allowed",
            ledger_id=record.ledger_id,
            size=len(value),
            limit=limit,
        )
    return value


def _unavailable(what: str, failure: StoreError, outcome_unknown: bool = False) -> Unavailable:
    kind = (
        OutcomeUnresolved if outcome_unknown or isinstance(failure, OutcomeUnknown) else Unavailable
    )
    return kind(f"{what}: {type(failure).__name__} {failure}".rstrip())


BLOCK_IDS = 16


class LedgerIds:
    """Ledger ids for one client; it keeps the rest of its last block."""

    def __init__(self, metadata: MetadataStore) -> None:
        self._metadata = metadata
        self._block, self._invalidations = range(0), 0
        self._allocating = asyncio.Lock()

    async def next(self, invalidations: int = 0) -> int:
        """The next id. The rest of a block is dropped if `invalidations`, the count of the caller's
        ClusterGuard, has changed since the last call. Raises Unavailable, MetadataHeld."""
        async with self._allocating:
            if not self._block or invalidations != self._invalidations:
                self._block, self._invalidations = await self.allocate(BLOCK_IDS), invalidations
            first, self._block = self._block[0], self._block[1:]
            return first

    async def allocate(self, count: int) -> range:
        """`count` consecutive ids that no other caller has or will get. Raises Unavailable,
        MetadataHeld."""
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        try:
            while True:
                with suppress(BadVersion, OutcomeUnknown, NodeExists):
                    return await self._take(count)
                await self._metadata.sync(paths.LEDGER_IDS)
        except StoreError as failure:
            raise Unavailable(f"ledger ids cannot be allocated: {failure!r}") from failure

    async def _take(self, count: int) -> range:
        try:
            node = await self._metadata.get(paths.LEDGER_IDS)
        except NoNode:
            await self._metadata.create(
                paths.LEDGER_IDS, encode_counter(FIRST_ID + count), parents=True
            )
            return range(FIRST_ID, FIRST_ID + count)
        first = decode_counter(node.value)
        await self._metadata.set(paths.LEDGER_IDS, encode_counter(first + count), node.version)
        return range(first, first + count)
