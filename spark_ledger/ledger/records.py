"""Ledger records in the metadata store: read, made, moved, deleted, listed; and ledger ids, in
blocks taken off one counter.

Always true: every write is a compare-and-set on the version that was judged; a write whose response
was lost is never repeated blindly: sync, read again, judge again (transitions.py); what decides is
read after a sync. A record the store would not take is refused before it is sent, for there its
refusal looks like a lost response. A listing is whole or an error. An id is handed out once; ids
rise from FIRST_ID; a block whose response was lost is left unused (a gap), never handed out a
second time. A record is made by a multi that fails while the store is held, and of no id of an
earlier epoch. Errors of the store leave here as errors of spark_ledger.errors.
"""

import asyncio
from collections import deque
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
from spark_ledger.ledger.transitions import Done, Move, Refused
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.cluster import IDS_PER_EPOCH, ClusterGuard
from spark_ledger.metadata.deleted_ledgers import BadDeletedSet
from spark_ledger.metadata.hold import FIRST_ID, decode_counter, encode_counter
from spark_ledger.metadata.ledger_record import LedgerRecord, LedgerState
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

TOGETHER_MAX, TOGETHER_BYTES_MAX = 100, 256 * 1024  # writes of one multi
NEW_RECORD_BYTES_MAX = 512 * 1024  # a record grows with every fragment; see VALUE_BYTES_MAX


@dataclass(frozen=True, slots=True)
class VersionedRecord:
    """A record and the version under which the store has it."""

    record: LedgerRecord
    version: int


_Waiting = tuple[Set, "asyncio.Future[int]"]
"""A write, and who waits for the version that it gives."""


class MoveRefused(Exception):
    """The record in the store does not allow the move. `found` is what is there."""

    def __init__(self, why: str, found: VersionedRecord) -> None:
        super().__init__(why)
        self.why = why
        self.found = found


class OutcomeUnresolved(Unavailable):
    """A write may or may not have been applied, and the store cannot be asked now."""


class IdSpent(OutcomeUnresolved):
    """A ledger of this id may have been made and deleted, or the id is of an earlier epoch: it is
    not made. Take another id."""


class LedgerRecords:
    """The records of all ledgers of a cluster."""

    def __init__(self, metadata: MetadataStore) -> None:
        self.metadata = metadata
        self._waiting: deque[_Waiting] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._deletions = Deletions(metadata)
        self.guard = ClusterGuard(metadata)

    async def read(
        self, ledger_id: int, *, fresh: bool = False, watch: Watcher | None = None
    ) -> VersionedRecord:
        """The record; with `fresh` not older than this call. `watch` is called when it changed.

        Raises NoSuchLedger, Unavailable, UnsupportedFormat (damaged, or of a later version).
        """
        path = paths.ledger(ledger_id)
        try:
            if fresh:
                await self.metadata.sync(path)
            found = _understood(ledger_id, await self.metadata.get(path, watch))
        except NoNode:
            raise NoSuchLedger(f"there is no ledger {ledger_id}", ledger_id=ledger_id) from None
        except StoreError as failure:
            raise _unavailable(
                f"the record of ledger {ledger_id} cannot be read", failure
            ) from failure
        if isinstance(found, UnsupportedFormat):
            raise found
        return found

    async def read_many(
        self, ledger_ids: Sequence[int]
    ) -> list[VersionedRecord | UnsupportedFormat | None]:
        """Those records, in a fraction of the time of as many `read`; None where there is none, and
        why one cannot be understood. Raises Unavailable."""
        try:
            nodes = await self.metadata.get_many([paths.ledger(each) for each in ledger_ids])
        except StoreError as failure:
            raise _unavailable("records of ledgers cannot be read", failure) from failure
        pairs = zip(ledger_ids, nodes, strict=True)
        return [None if node is None else _understood(each, node) for each, node in pairs]

    async def create(self, record: LedgerRecord) -> VersionedRecord:
        """Make the record; one that is made for a topic only while there is a node of the topic, so
        that a process that removes the topic's node and then lists its ledgers has all there will
        be. A lost response is told by the record's creator token.

        Raises LedgerError if another ledger has the id, TopicDeleted, RecordTooBig,
        OutcomeUnresolved, Unavailable, MetadataHeld (nothing was written); IdSpent if the response
        was lost and there is no record: it may have been made, closed and deleted by others
        meanwhile, and bookies may have met and forgotten it; also if the id is of an earlier epoch.
        """
        value = _encoded(record, NEW_RECORD_BYTES_MAX)
        unknown = False
        try:
            await self._make(record, value)
            return VersionedRecord(record, 0)
        except NodeExists:
            pass
        except OutcomeUnknown:
            unknown = True
        except StoreError as failure:
            what = f"ledger {record.ledger_id} cannot be created"
            raise _unavailable(what, failure) from failure
        return await self._made(record, unknown)

    async def _made(self, record: LedgerRecord, unknown: bool) -> VersionedRecord:
        """The record, if it is there and ours."""
        try:
            found = await self._reread(record.ledger_id, unknown)
        except NoSuchLedger as absent:
            raise IdSpent(
                f"ledger {record.ledger_id} was made or not, and is not there"
            ) from absent
        if record.creator and found.record.creator == record.creator:
            return found
        raise LedgerError(f"ledger id {record.ledger_id} is taken", "Take another id.")

    async def create_several(self, records: Sequence[LedgerRecord]) -> list[VersionedRecord]:
        """As `create`, of records for one topic that fit into one multi together; where that is
        refused, each by itself; IdSpent if its response was lost and one of them is not there."""
        values = [_encoded(record, NEW_RECORD_BYTES_MAX) for record in records]
        creates = [
            Create(paths.ledger(record.ledger_id), value)
            for record, value in zip(records, values, strict=True)
        ]
        try:
            guard = await self._not_held([record.ledger_id for record in records])
            topics = dict.fromkeys(record.topic for record in records)
            checks = [Check(paths.topic(topic), ANY_VERSION) for topic in topics]
            await self.metadata.multi((*guard, *checks, *creates))
        except MultiFailed:
            return [await self.create(record) for record in records]
        except OutcomeUnknown:  # made or not: an id that may be spent is not used
            return [await self._made(record, unknown=True) for record in records]
        except StoreError as failure:
            raise _unavailable(f"{len(records)} ledgers cannot be created", failure) from failure
        return [VersionedRecord(record, 0) for record in records]

    async def move(
        self,
        known: VersionedRecord,
        decide: Callable[[LedgerRecord], Move],
        *,
        together: bool = False,
    ) -> VersionedRecord:
        """Make the move that `decide` computes, from `known` or whatever is there by then;
        `together` with others that come while such a write is under way: of many at once.

        Returns what the store has afterwards. Raises MoveRefused, NoSuchLedger, RecordTooBig;
        OutcomeUnresolved when the write may have been applied, Unavailable when it certainly was
        not.
        """
        ledger_id, unknown = known.record.ledger_id, False
        while True:
            move = decide(known.record)
            if isinstance(move, Done):
                return known
            if isinstance(move, Refused):
                raise MoveRefused(move.why, known)
            value = _encoded(move.record, VALUE_BYTES_MAX)
            try:
                one = Set(paths.ledger(ledger_id), value, known.version)
                version = await (self._set_together(one) if together else self._set(one))
                return VersionedRecord(move.record, version)
            except BadVersion:
                known = _newer(known, await self._reread(ledger_id, unknown))
            except OutcomeUnknown:
                unknown = True
                known = _newer(known, await self._reread(ledger_id, unknown))
            except NoNode:
                raise NoSuchLedger(f"ledger {ledger_id} was deleted", ledger_id=ledger_id) from None
            except StoreError as failure:
                what = f"the record of ledger {ledger_id} cannot be written"
                raise _unavailable(what, failure, unknown) from failure

    async def _set(self, one: Set) -> int:
        """The version it has then. Raises as MetadataStore.set."""
        return await self.metadata.set(one.path, one.value, one.version)

    async def _set_together(self, one: Set) -> int:
        """As `_set`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()
        self._waiting.append((one, future))
        if self._writing is None:
            self._writing = loop.create_task(self._write_waiting())
        return await future

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                some, size = [self._waiting.popleft()], 0
                while self._waiting and len(some) < TOGETHER_MAX:
                    size += len(self._waiting[0][0].value)
                    if size > TOGETHER_BYTES_MAX:
                        break
                    some.append(self._waiting.popleft())
                await self._write_all(some)
        finally:
            self._writing = None

    async def _write_all(self, some: Sequence["_Waiting"]) -> None:
        outcomes: Sequence[int | BaseException]
        try:
            if len(some) == 1:
                outcomes = [await self._set(some[0][0])]
            else:
                await self.metadata.multi([one for one, _ in some])
                outcomes = [one.version + 1 for one, _ in some]
        except MultiFailed:  # which changed nothing
            each = (self._set(one) for one, _ in some)
            outcomes = await asyncio.gather(*each, return_exceptions=True)
        except Exception as error:
            outcomes = [error] * len(some)
        for (_, future), outcome in zip(some, outcomes, strict=True):
            if future.done():
                continue
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    async def delete(self, ledger_id: int, only_if: Sequence[Operation] = ()) -> bool:
        """Remove the record of a CLOSED ledger and name the ledger as deleted, in one multi in
        which `only_if` holds; one that is gone already is success. False: `only_if` does not hold.

        Raises LedgerNotClosed, UnsupportedFormat (the set of deleted ledgers is damaged);
        OutcomeUnresolved when it may be gone, Unavailable, MetadataHeld when it certainly is not.
        """
        unknown = False
        while True:
            try:
                known = await self._reread(ledger_id, unknown)
                if not known.record.closed:
                    state = known.record.state.value
                    raise LedgerNotClosed(
                        f"ledger {ledger_id} is {state}, not CLOSED", ledger_id=ledger_id
                    )
                await self._deletions.remove(ledger_id, known.version, only_if)
                return True
            except (NoSuchLedger, NoNode):
                return True
            except ConditionFailed:
                return False
            except BadVersion:
                continue
            except OutcomeUnknown:
                unknown = True
            except BadDeletedSet as damage:
                raise UnsupportedFormat(f"ledger {ledger_id} cannot be deleted: {damage}") from None
            except StoreError as failure:
                what = f"ledger {ledger_id} cannot be deleted"
                raise _unavailable(what, failure, unknown) from failure

    async def list(self) -> AsyncIterator[int]:
        """Ids of all ledgers that there were when it began and still are, ascending; others may
        be among them. One folder of names for each level of the tree is in memory at a time.

        Raises Unavailable, also when the tree is not as it should be: never a short list.
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
            guard = await self._not_held([record.ledger_id])
            if not (guard or topic):
                return await self.metadata.create(path, value, parents=True)
            operations: Sequence[Operation] = [*guard, *topic, Create(path, value)]
            try:
                return await self.metadata.multi(operations)
            except MultiFailed as failure:
                if failure.index < len(guard):
                    await self.guard.look()
                    continue
                if not isinstance(failure.cause, NoNode):
                    raise failure.cause from None
                if failure.index < len(operations) - 1:
                    raise TopicDeleted(
                        f"there is no topic {record.topic} to make a ledger for"
                    ) from None
            with suppress(NodeExists, OutcomeUnknown):
                await self.metadata.create(path.rpartition("/")[0], parents=True)

    async def _not_held(self, ledger_ids: Sequence[int]) -> Sequence[Check]:
        """For the multi that makes records of these ids. Raises IdSpent, MetadataHeld,
        StoreError."""
        checks = await self.guard.checks()
        for ledger_id in ledger_ids:
            if ledger_id // IDS_PER_EPOCH < self.guard.epoch:
                raise IdSpent(
                    f"ledger id {ledger_id} was given out before the metadata store was accepted:"
                    f" its epoch is {self.guard.epoch} now"
                )
        return checks

    async def _reread(self, ledger_id: int, unknown: bool) -> VersionedRecord:
        """The record after a sync. Raises OutcomeUnresolved for Unavailable when a write with an
        `unknown` outcome was sent."""
        try:
            return await self.read(ledger_id, fresh=True)
        except Unavailable as failure:
            if not unknown:
                raise
            raise OutcomeUnresolved(failure.what) from failure


def _newer(known: VersionedRecord, found: VersionedRecord) -> VersionedRecord:
    """What to move on from, where the store has `found` now. A record of a lower version than was
    known is of a store that went back in time: while it is OPEN there, nothing that came since is
    lost by what was known taking its place. Raises NoSuchLedger where the id is another ledger's.
    """
    ours, ledger_id = known.record.creator, known.record.ledger_id
    if ours and found.record.creator and found.record.creator != ours:
        raise NoSuchLedger(
            f"ledger {ledger_id} has no record any more: the metadata store went back in time, and"
            " gave its id to another",
            ledger_id=ledger_id,
        )
    if found.version < known.version and found.record.state is LedgerState.OPEN:
        return VersionedRecord(known.record, found.version)
    return found


def _understood(ledger_id: int, node: Versioned) -> VersionedRecord | UnsupportedFormat:
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


def _unavailable(what: str, failure: StoreError, unknown: bool = False) -> Unavailable:
    kind = OutcomeUnresolved if unknown or isinstance(failure, OutcomeUnknown) else Unavailable
    return kind(f"{what}: {type(failure).__name__} {failure}".rstrip())


BLOCK_IDS = 16


class LedgerIds:
    """Ids for one client; it keeps what is left of its last block."""

    def __init__(self, metadata: MetadataStore) -> None:
        self._metadata = metadata
        self._block, self._breaks = range(0), 0
        self._allocating = asyncio.Lock()

    async def next(self, breaks: int = 0) -> int:
        """One id; callers at the same time share a block, as long as `breaks` is the same
        (ClusterGuard). Raises Unavailable, MetadataHeld."""
        async with self._allocating:
            if not self._block or breaks != self._breaks:
                self._block, self._breaks = await self.allocate(BLOCK_IDS), breaks
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
            raise Unavailable(f"no ledger ids can be had: {failure!r}") from failure

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
