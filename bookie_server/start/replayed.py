"""What journals and direct logs say is put into the engine, batch by batch, while it flushes.

Always true: states change in the order of the records, and a ledger's entries follow the record
that tells of the ledger; the entries of a batch are put together, for nothing reads them yet; of
what direct logs hold only that counts which is not known otherwise, as new or newer; both halves
of the write cache and the batch at hand are all that is in memory: without room the replay waits
for the flush.

Always true of direct logs:
- a direct log is its own journal (logs/direct_log.py), read after all journals: what an entry
  counts for is in its ledger's state;
- bytes that cannot be read are damage if a write that began after them shows that they were synced,
  or the log's footer does, or the disk itself cannot read them; else they are a torn write, or rot
  in the last one, which looks the same: the rules of replay.py for journals hold for both;
- a mark whose log is not there, or ends before it, is damage that cannot be attributed to a ledger;
- marks are forgotten only when all this is flushed: a start that was interrupted is repeated.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from bookie_server.api.entry import Buffer
from bookie_server.disk.interface import DiskFailed, DiskHung, File, NoSuchFile
from bookie_server.journal.format import Record, RecordKind
from bookie_server.journal.scan import SegmentReader
from bookie_server.logs.entry_log import BLOCK_BYTES, record_end
from bookie_server.logs.index import (
    EVERY_LEDGER,
    LedgerState,
    LimboReason,
    Location,
    decode_ledger_state,
    doubted,
    merged,
    worse,
)
from bookie_server.logs.scan import Damage, Scanned, read_map, scan
from bookie_server.storage.directories import DirectoryStore
from bookie_server.storage.storage import LedgerStorage
from bookie_server.storage.write_cache import DirectLocation

_ENTRY = RecordKind.ENTRY
_Locations = AsyncGenerator[dict[int, list[Location]]]
_log = logging.getLogger(__name__)


class Replayed:
    """Applies records. One for all journals; `end` or `cancel` it."""

    def __init__(self, storage: LedgerStorage) -> None:
        self._storage = storage
        self._flush: asyncio.Task[None] | None = None
        self.ledgers: dict[int, None] = {}
        """Those of which there was a record."""

    async def apply(self, records: list[Record]) -> None:
        """Known from now on. Raises DiskFailed when a flush did."""
        entries: dict[int, dict[int, Buffer]] = {}
        for record in records:
            kind, ledger_id, entry_id, body, _ = record
            if kind is not _ENTRY:
                self.ledgers[ledger_id] = None
                self._apply_state(record)
            elif (of_ledger := entries.get(ledger_id)) is not None:
                of_ledger[entry_id] = body
            else:
                entries[ledger_id] = {entry_id: body}
                self.ledgers[ledger_id] = None
                self._known(ledger_id)
        for ledger_id, of_ledger in entries.items():
            await self._put(ledger_id, of_ledger)

    async def add_locations(
        self, directory: str, ledger_id: int, locations: Sequence[Location]
    ) -> None:
        """Entries of the ledger lie in the directory's direct log; no index may know them. After
        the journals. Raises DiskFailed when a flush did."""
        state = self._state_with(directory, ledger_id)
        if state is None or state.deleted or directory not in state.directories:
            return
        entry_ids = [location.entry_id for location in locations]
        known = await self._stored(ledger_id, min(entry_ids), max(entry_ids), directory)
        new = [DirectLocation(directory, each) for each in locations if each.entry_id not in known]
        if new:
            await self._when_there_is_room(lambda: self._storage.replay_locations(ledger_id, new))

    def _state_with(self, directory: str, ledger_id: int) -> LedgerState | None:
        """With the directory, if the record that named it may be among what journals have lost."""
        state, every = self._storage.state(ledger_id), self._storage.state(EVERY_LEDGER)
        doubt = every.limbo if every is not None else LimboReason.NONE
        if state is None:
            if not doubt:
                return None  # it was deleted and forgotten
            state = LedgerState(ledger_id, limbo=doubt, met=False)
            state = doubted(state) if doubt == LimboReason.LOST else state
        known = directory in (*state.directories, *dict(state.given_up))
        if known or state.deleted or not (doubt or state.limbo):
            return state
        return self._storage.restore_state(
            replace(state, directories=(directory, *state.directories))
        )

    async def end(self) -> None:
        """No flush is under way when this returns. Raises DiskFailed when one failed."""
        if (flush := self._flush) is not None:
            self._flush = None
            await flush

    def cancel(self) -> None:
        """Whatever happened, do not go on."""
        if self._flush is not None:
            self._flush.cancel()

    def _known(self, ledger_id: int) -> LedgerState:
        """Without a state its ledger record is among what is damaged."""
        state = self._storage.state(ledger_id)
        if state is None:
            state = LedgerState(ledger_id, limbo=LimboReason.LOST, met=False)
            self._storage.restore_state(state)
        return state

    def _apply_state(self, record: Record) -> None:
        storage, ledger_id = self._storage, record.ledger_id
        if record.kind is RecordKind.LEDGER:
            known = storage.state(ledger_id)
            logged = decode_ledger_state(bytes(record.body))
            storage.restore_state(logged if known is None else merged(logged, known))
        elif record.kind is RecordKind.FENCE:
            storage.restore_state(replace(self._known(ledger_id), fenced=True))
        elif record.kind is RecordKind.LAC:
            state = self._known(ledger_id)
            lac = max(state.explicit_lac, record.entry_id)
            storage.restore_state(replace(state, explicit_lac=lac))

    async def _put(self, ledger_id: int, entries: dict[int, Buffer]) -> None:
        await self._when_there_is_room(lambda: self._storage.put_all(ledger_id, entries))

    async def _stored(
        self, ledger_id: int, first: int, last: int, directory: str
    ) -> dict[int, None]:
        """What is as new as locations in the directory, or newer. An index that cannot say was told
        of, if it is damaged; a location is as good then as any that it might have, but none that
        came from a journal. Raises DiskHung."""
        try:
            return await self._storage.reader.stored(ledger_id, first, last, directory)
        except DiskHung:
            raise
        except DiskFailed as error:
            _log.error("what is stored of ledger %d cannot be said: %s", ledger_id, error)
            return self._storage.reader.stored_in_cache(ledger_id, first, last)

    async def _when_there_is_room(self, put: Callable[[], bool]) -> None:
        while not put():
            self._go_on()
            await self.end()
        if self._flush is not None and self._flush.done():
            await self.end()
        if self._flush is None and self._storage.is_flushing:
            self._go_on()

    def _go_on(self) -> None:
        """A flush was begun: let it run beside what comes next."""
        if self._flush is None:
            self._flush = asyncio.ensure_future(self._storage.carry_out())


class LateReplayed(Replayed):
    """Applies the records of journals that were away, after those of all others."""

    async def apply(self, records: list[Record]) -> None:
        """See Replayed.apply."""
        await super().apply([each for each in records if each.ledger_id != EVERY_LEDGER])

    def _known(self, ledger_id: int) -> LedgerState:
        state = self._storage.state(ledger_id)
        if state is None:
            state = doubted(LedgerState(ledger_id, met=False))
            self._storage.restore_state(state)
        return state

    def _apply_state(self, record: Record) -> None:
        if record.kind is not RecordKind.LEDGER:
            super()._apply_state(record)
            return
        known = self._storage.state(record.ledger_id)
        logged = decode_ledger_state(bytes(record.body))
        if known is None:
            self._storage.restore_state(doubted(logged))
        else:
            both = merged(known, replace(logged, revision=0))
            self._storage.restore_state(replace(both, limbo=known.limbo))

    async def _put(self, ledger_id: int, entries: dict[int, Buffer]) -> None:
        if self._known(ledger_id).deleted:
            return
        here = await self._storage.reader.stored(ledger_id, min(entries), max(entries))
        absent = {i: entry for i, entry in entries.items() if i not in here}
        if absent:
            await super()._put(ledger_id, absent)


class Hole(NamedTuple):
    """Bytes of a direct log in which no record could be read. `ledger_ids`: whose they are, if the
    headers of all records that may lie there could be read; else None."""

    start: int
    end: int
    ledger_ids: Sequence[int] | None


class Coverage:
    """Which bytes of a direct log, from `start` on, are records; told chunk by chunk.

    Always true: records of one write touch each other, and a write begins at the first block after
    the one before; so what lies between is a hole, zeros too, but for those up to that block.
    """

    def __init__(self, start: int) -> None:
        self._next = start
        self._synced = start  # all before it was
        self._holes: list[tuple[int, int]] = []
        self._damage: dict[int, Damage] = {}  # by where it begins, ascending

    def take(self, chunk: Scanned) -> None:
        """What comes next in the log."""
        for damage in chunk.damage:
            self._damage[damage.start] = damage
            self._synced = max(self._synced, damage.write_start)
        for record in chunk.records:
            at = record.location.position
            begins = at == _block(self._next) and record.write_start == at
            if at != self._next and (self._next in self._damage or not begins):
                self._note_hole(at)
            self._next = record_end(record.location)
            self._synced = max(self._synced, record.write_start)

    def judge(self, end: int, synced: int) -> tuple[list[Hole], list[Hole]]:
        """The holes in what was synced, and those in what may not have been; the log's records end
        at `end`, and all before `synced` was synced whatever they say."""
        self._note_hole(end)
        synced = max(synced, self._synced)
        cut = [bad for bad in self._damage.values() if bad.start < synced < bad.end]
        synced = max([synced, *(bad.end for bad in cut if bad.location is not None)])
        damaged = [(start, min(end, synced)) for start, end in self._holes if start < synced]
        torn = [(max(start, synced), end) for start, end in self._holes if end > synced]
        return list(map(self._hole, damaged)), list(map(self._hole, torn))

    def _note_hole(self, end: int) -> None:
        start = self._next if self._next in self._damage else _block(self._next)
        if start < end:
            self._holes.append((start, end))

    def _hole(self, hole: tuple[int, int]) -> Hole:
        """One whose bad records touch each other from its start to its end is theirs."""
        found: list[int] = []
        start, end = hole
        while start < end:
            damage = self._damage.get(start) or self._damage.get(_block(start))
            if damage is None or damage.location is None or damage.end > _block(end):
                break
            found.append(damage.location.ledger_id)
            start = damage.end
        return Hole(*hole, found if found and _block(start) >= end else None)


def _block(position: int) -> int:
    """Where the first block begins that does not begin before it."""
    return -(-position // BLOCK_BYTES) * BLOCK_BYTES


async def replay_direct_logs(storage: LedgerStorage, replayed: Replayed) -> None:
    """After the journals were replayed and judged. A directory whose logs cannot be read is dropped
    while there are others: what it holds is taken when it is back. Raises DiskFailed."""
    for store in storage.stores:
        reading = _read_logs(store, storage)
        while storage.directories.lives(store.id):  # a flush may drop it
            try:
                locations = await anext(reading, None)
            except DiskFailed as error:
                if storage.stores == [store]:
                    raise
                storage.drop(store.id, error)
                break
            if locations is None:
                break
            for ledger_id, of_ledger in locations.items():
                await replayed.add_locations(store.id, ledger_id, of_ledger)
        await reading.aclose()


async def _read_logs(store: DirectoryStore, storage: LedgerStorage) -> _Locations:
    """What lies in the marked logs, some of it at a time, by ledger. Raises DiskFailed."""
    for log_id, start in (await store.index.marked_logs()).items():
        try:
            file = await store.logs.open_log(log_id)
        except NoSuchFile:
            doubt_all(storage, LimboReason.LOST, f"direct log {log_id} is missing")
            continue
        try:
            async for locations in _read_log(store, log_id, file, start, storage):
                yield locations
        finally:
            await file.close()


async def _read_log(
    store: DirectoryStore, log_id: int, file: File, start: int, storage: LedgerStorage
) -> _Locations:
    reader = SegmentReader(file)
    coverage, count = Coverage(start), 0
    ended = await _records_end(store, log_id)
    end = ended or file.end
    async for chunk in scan(_Around(reader), log_id, end, start):
        coverage.take(chunk)
        locations: dict[int, list[Location]] = {}
        for record in chunk.records:
            locations.setdefault(record.location.ledger_id, []).append(record.location)
        count += len(chunk.records)
        yield locations
    _log.info("direct log %d: %d entries replayed", log_id, count)
    if end < start:
        doubt_all(
            storage, LimboReason.LOST, f"direct log {log_id} ends at {end}, before its mark {start}"
        )
    damaged, torn = coverage.judge(end, ended or reader.unreadable_end)
    for hole in damaged:
        what = f"direct log {log_id} is damaged from {hole.start} to {hole.end}"
        _judge(hole, LimboReason.LOST, what, storage)
    for hole in torn:
        _judge(
            hole,
            LimboReason.TORN,
            f"direct log {log_id}: a torn write at {hole.start} is cut",
            storage,
        )


async def _records_end(store: DirectoryStore, log_id: int) -> int:
    """A block's end up to which all is records and what fills them up, as the footer says; 0: the
    log has none that could be read."""
    try:
        found = await read_map(store.logs, store.disk, log_id)
    except DiskHung:
        raise
    except DiskFailed:  # a bad block of it, which the reader tells from a torn write
        return 0
    if found is None or not found.has_footer:
        return 0
    return found.records_end // BLOCK_BYTES * BLOCK_BYTES


class _Around:
    """What the disk cannot read counts as bytes that were never written."""

    def __init__(self, reader: SegmentReader) -> None:
        self._reader = reader

    async def read(self, position: int, length: int) -> bytes:
        return await self._reader.read_around(position, length)


def _judge(hole: Hole, limbo: LimboReason, what: str, storage: LedgerStorage) -> None:
    """Whose are torn is known puts that ledger in limbo, open or closed; all are nevertheless."""
    for ledger_id in hole.ledger_ids or ():
        state = storage.state(ledger_id)
        if state is not None and not state.deleted:
            doubt(storage, ledger_id, limbo)
    if hole.ledger_ids is None or limbo == LimboReason.TORN:
        doubt_all(storage, limbo, what)
    else:
        _log.error("%s: ledgers %s are in limbo", what, hole.ledger_ids)


def doubt(
    storage: LedgerStorage, ledger_id: int, limbo: LimboReason, *, fence: bool = False
) -> None:
    """The ledger, or EVERY_LEDGER, is in limbo for that reason too, and fenced if it is to be.
    Durable with the next flush."""
    state = storage.state(ledger_id) or LedgerState(ledger_id, met=False)
    limbo, fenced = worse(state.limbo, limbo), state.fenced or fence
    storage.set_state(replace(state, limbo=limbo, fenced=fenced))


def doubt_all(storage: LedgerStorage, limbo: LimboReason, why: str) -> None:
    """`doubt` of EVERY_LEDGER, as the log tells."""
    _log.error("%s: every ledger is in limbo", why)
    doubt(storage, EVERY_LEDGER, limbo)
