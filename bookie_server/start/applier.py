"""Puts the records of journals and direct logs into the storage engine, batch by batch, while the
engine flushes earlier batches.

Always true: states change in the order of the records, and a ledger's entries come after the record
of its state; the entries of a batch are put into the cache together, as no request reads them yet;
an entry of a direct log counts only if no journal or index has a copy that is as new or newer. Only
the two halves of the write cache and one batch are in memory: if there is no room, the replay waits
for the flush.

Always true of direct logs:
- a direct log is its own journal (logs/direct_log.py), read after all journals: the state of an
  entry's ledger decides whether the entry counts;
- unreadable bytes are damage if a later write or the log's footer shows that they were synced, or
  if the disk itself cannot read them. Other unreadable bytes are a torn write, or damage of the
  last write: the two look alike. In both cases limbo follows: replay.py has the rules;
- the index marks the position in a log from which on the index may lack entries. If a marked log is
  missing, or ends before its mark, that is damage of an unknown ledger;
- marks are removed only when all locations are flushed, so a start that was interrupted begins
  anew.
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
    fenced_and_lost,
    merge_by_revision,
    worse_reason,
)
from bookie_server.logs.scan import Damage, Scanned, read_map, scan
from bookie_server.storage.directories import DirectoryStore
from bookie_server.storage.storage import LedgerStorage
from bookie_server.storage.write_cache import DirectLocation

_ENTRY = RecordKind.ENTRY
_Locations = AsyncGenerator[dict[int, list[Location]]]
_log = logging.getLogger(__name__)


class RecordApplier:
    """Applies the records of all journals. The caller calls `end` or `cancel` at last."""

    def __init__(self, storage: LedgerStorage) -> None:
        self._storage = storage
        self._flush: asyncio.Task[None] | None = None
        self.ledgers: dict[int, None] = {}
        """The ledgers of which a record was applied."""

    async def apply(self, records: list[Record]) -> None:
        """Apply the records. Raises DiskFailed when a flush failed."""
        entries: dict[int, dict[int, Buffer]] = {}
        for record in records:
            kind, ledger_id, entry_id, body, _ = record
            if kind is not _ENTRY:
                self.ledgers[ledger_id] = None
                self._apply_state(record)
            elif (ledger_entries := entries.get(ledger_id)) is not None:
                ledger_entries[entry_id] = body
            else:
                entries[ledger_id] = {entry_id: body}
                self.ledgers[ledger_id] = None
                self._state_of(ledger_id)
        for ledger_id, ledger_entries in entries.items():
            await self._put_entries(ledger_id, ledger_entries)

    async def add_locations(
        self, directory: str, ledger_id: int, locations: Sequence[Location]
    ) -> None:
        """Add the ledger's locations in the directory's direct log, which the indexes may lack. The
        caller has replayed all journals. Raises DiskFailed when a flush failed."""
        state = self._state_with(directory, ledger_id)
        if state is None or state.deleted or directory not in state.directories:
            return
        entry_ids = [location.entry_id for location in locations]
        stored = await self._stored(ledger_id, min(entry_ids), max(entry_ids), directory)
        new = [DirectLocation(directory, at) for at in locations if at.entry_id not in stored]
        if new:
            await self._when_there_is_room(lambda: self._storage.replay_locations(ledger_id, new))

    def _state_with(self, directory: str, ledger_id: int) -> LedgerState | None:
        """The ledger's state; None if the ledger was deleted. If journals may have lost the record
        that added the directory to the state, the directory is added again. `given_up`: lost
        directories, whose entries of the ledger do not count."""
        state, every_state = self._storage.state(ledger_id), self._storage.state(EVERY_LEDGER)
        every_limbo = every_state.limbo if every_state is not None else LimboReason.NONE
        if state is None:
            if not every_limbo:
                return None  # the ledger was deleted, and its state removed
            state = LedgerState(ledger_id, limbo=every_limbo, met=False)  # no record was read yet
            state = fenced_and_lost(state) if every_limbo == LimboReason.LOST else state
        is_named = directory in (*state.directories, *dict(state.given_up))
        if is_named or state.deleted or not (every_limbo or state.limbo):
            return state
        return self._storage.restore_state(
            replace(state, directories=(directory, *state.directories))
        )

    async def end(self) -> None:
        """Wait for the flush under way, if any. Raises DiskFailed when it failed."""
        if (flush := self._flush) is not None:
            self._flush = None
            await flush

    def cancel(self) -> None:
        """Cancel the flush under way, if any."""
        if self._flush is not None:
            self._flush.cancel()

    def _state_of(self, ledger_id: int) -> LedgerState:
        """The ledger's state. If there is no state, the ledger's record in the journal was damaged:
        then the ledger gets a state in limbo."""
        state = self._storage.state(ledger_id)
        if state is None:
            state = LedgerState(ledger_id, limbo=LimboReason.LOST, met=False)
            self._storage.restore_state(state)
        return state

    def _apply_state(self, record: Record) -> None:
        storage, ledger_id = self._storage, record.ledger_id
        if record.kind is RecordKind.LEDGER:
            earlier = storage.state(ledger_id)
            logged = decode_ledger_state(bytes(record.body))
            storage.restore_state(logged if earlier is None else merge_by_revision(logged, earlier))
        elif record.kind is RecordKind.FENCE:
            storage.restore_state(replace(self._state_of(ledger_id), fenced=True))
        elif record.kind is RecordKind.LAC:
            state = self._state_of(ledger_id)
            lac = max(state.explicit_lac, record.entry_id)
            storage.restore_state(replace(state, explicit_lac=lac))

    async def _put_entries(self, ledger_id: int, entries: dict[int, Buffer]) -> None:
        await self._when_there_is_room(lambda: self._storage.put_all(ledger_id, entries))

    async def _stored(
        self, ledger_id: int, first: int, last: int, directory: str
    ) -> dict[int, None]:
        """The stored entries whose copy is as new as locations in the directory, or newer. If an
        index cannot be read (the damage is logged already), only entries from journals count: for
        the others, the direct log has the locations that the index had. Raises DiskHung."""
        try:
            return await self._storage.reader.stored(ledger_id, first, last, directory)
        except DiskHung:
            raise
        except DiskFailed as error:
            _log.error("the stored entries of ledger %d cannot be listed: %s", ledger_id, error)
            return self._storage.reader.stored_in_cache(ledger_id, first, last)

    async def _when_there_is_room(self, put: Callable[[], bool]) -> None:
        while not put():
            self._start_flush()
            await self.end()
        if self._flush is not None and self._flush.done():
            await self.end()
        if self._flush is None and self._storage.is_flushing:
            self._start_flush()

    def _start_flush(self) -> None:
        """Run the flush that the storage has begun, while the next batches are applied."""
        if self._flush is None:
            self._flush = asyncio.ensure_future(self._storage.carry_out())


class LateRecordApplier(RecordApplier):
    """Applies the records of journals that an earlier start missed, after the records of all other
    journals."""

    async def apply(self, records: list[Record]) -> None:
        """See RecordApplier.apply. The present state of EVERY_LEDGER counts, not the journal's."""
        await super().apply([record for record in records if record.ledger_id != EVERY_LEDGER])

    def _state_of(self, ledger_id: int) -> LedgerState:
        state = self._storage.state(ledger_id)
        if state is None:
            state = fenced_and_lost(LedgerState(ledger_id, met=False))
            self._storage.restore_state(state)
        return state

    def _apply_state(self, record: Record) -> None:
        if record.kind is not RecordKind.LEDGER:
            super()._apply_state(record)
            return
        present = self._storage.state(record.ledger_id)
        logged = decode_ledger_state(bytes(record.body))
        if present is None:
            self._storage.restore_state(fenced_and_lost(logged))
        else:
            logged = replace(logged, revision=0)  # so `present` counts as the later copy
            merged = merge_by_revision(present, logged)
            self._storage.restore_state(replace(merged, limbo=present.limbo))

    async def _put_entries(self, ledger_id: int, entries: dict[int, Buffer]) -> None:
        if self._state_of(ledger_id).deleted:
            return
        stored = await self._storage.reader.stored(ledger_id, min(entries), max(entries))
        absent = {i: entry for i, entry in entries.items() if i not in stored}
        if absent:
            await super()._put_entries(ledger_id, absent)


class LogHole(NamedTuple):
    """Bytes of a direct log in which no record could be read. `ledger_ids`: the ledgers of the
    records in these bytes; None if a record's header could not be read."""

    start: int
    end: int
    ledger_ids: Sequence[int] | None


class Coverage:
    """Which bytes of a direct log, from `start` on, are records; `take` adds chunk by chunk.

    Always true: records of one write touch each other, and a write begins at the next block after
    the write before it. So bytes between records are a hole, also if they are zeros, except the
    zeros at the end of a write's last block.
    """

    def __init__(self, start: int) -> None:
        self._next = start
        self._synced = start  # all bytes before it were synced
        self._holes: list[tuple[int, int]] = []
        self._damage: dict[int, Damage] = {}  # by its start, ascending

    def take(self, chunk: Scanned) -> None:
        """Take the next chunk of the log."""
        for damage in chunk.damage:
            self._damage[damage.start] = damage
            self._synced = max(self._synced, damage.write_start)
        for record in chunk.records:
            at = record.location.position
            begins_write = at == _rounded_up(self._next) and record.write_start == at
            if at != self._next and (self._next in self._damage or not begins_write):
                self._note_hole(at)
            self._next = record_end(record.location)
            self._synced = max(self._synced, record.write_start)

    def judge(self, end: int, synced: int) -> tuple[list[LogHole], list[LogHole]]:
        """The holes in bytes that were surely synced, and the holes in bytes that may not have been
        synced. The log's records end at `end`. Bytes before `synced` were synced, even if no record
        shows that."""
        self._note_hole(end)
        synced = max(synced, self._synced)
        # a record across `synced` counts as synced to its end, if its header could be read
        across = [damage for damage in self._damage.values() if damage.start < synced < damage.end]
        synced = max([synced, *(damage.end for damage in across if damage.location is not None)])
        damaged = [(start, min(end, synced)) for start, end in self._holes if start < synced]
        torn = [(max(start, synced), end) for start, end in self._holes if end > synced]
        return list(map(self._with_ledger_ids, damaged)), list(map(self._with_ledger_ids, torn))

    def _note_hole(self, end: int) -> None:
        start = self._next if self._next in self._damage else _rounded_up(self._next)
        if start < end:
            self._holes.append((start, end))

    def _with_ledger_ids(self, hole: tuple[int, int]) -> LogHole:
        """The hole; with ledger ids if damaged records fill it whose headers could be read."""
        ledger_ids: list[int] = []
        start, end = hole
        while start < end:
            damage = self._damage.get(start) or self._damage.get(_rounded_up(start))
            if damage is None or damage.location is None or damage.end > _rounded_up(end):
                break
            ledger_ids.append(damage.location.ledger_id)
            start = damage.end
        return LogHole(*hole, ledger_ids if ledger_ids and _rounded_up(start) >= end else None)


def _rounded_up(position: int) -> int:
    """The start of the first block at or after the position."""
    return -(-position // BLOCK_BYTES) * BLOCK_BYTES


async def replay_direct_logs(storage: LedgerStorage, applier: RecordApplier) -> None:
    """Replay the direct logs of all directories. The caller has replayed and judged the journals. A
    directory whose logs cannot be read is dropped, unless no other directory is left. The entries
    of a dropped directory count again when a later start can read them. Raises DiskFailed."""
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
            for ledger_id, ledger_locations in locations.items():
                await applier.add_locations(store.id, ledger_id, ledger_locations)
        await reading.aclose()


async def _read_logs(store: DirectoryStore, storage: LedgerStorage) -> _Locations:
    """The locations in the marked logs, chunk by chunk, by ledger. Raises DiskFailed."""
    for log_id, start in (await store.index.marked_logs()).items():
        try:
            file = await store.logs.open_log(log_id)
        except NoSuchFile:
            put_all_in_limbo(storage, LimboReason.LOST, f"direct log {log_id} is missing")
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
    footer_end = await _footer_end(store, log_id)
    end = footer_end or file.end
    async for chunk in scan(_BadBlockReader(reader), log_id, end, start):
        coverage.take(chunk)
        locations: dict[int, list[Location]] = {}
        for record in chunk.records:
            locations.setdefault(record.location.ledger_id, []).append(record.location)
        count += len(chunk.records)
        yield locations
    _log.info("direct log %d: %d entries replayed", log_id, count)
    if end < start:
        put_all_in_limbo(
            storage, LimboReason.LOST, f"direct log {log_id} ends at {end}, before its mark {start}"
        )
    damaged, torn = coverage.judge(end, footer_end or reader.bad_blocks_end)
    for hole in damaged:
        what = f"direct log {log_id} is damaged from {hole.start} to {hole.end}"
        _judge(hole, LimboReason.LOST, what, storage)
    for hole in torn:
        what = f"direct log {log_id}: a torn write at {hole.start} is cut"
        _judge(hole, LimboReason.TORN, what, storage)


async def _footer_end(store: DirectoryStore, log_id: int) -> int:
    """The end of the log's last full block of records, by its footer; 0: no footer could be
    read."""
    try:
        log_map = await read_map(store.logs, store.disk, log_id)
    except DiskHung:
        raise
    except DiskFailed:  # a bad block: the scan finds the block too, and judges it as damage
        return 0
    if log_map is None or not log_map.has_footer:
        return 0
    return log_map.records_end // BLOCK_BYTES * BLOCK_BYTES


class _BadBlockReader:
    """A reader that gives 0xff bytes, which are no record, for blocks that the disk cannot read."""

    def __init__(self, reader: SegmentReader) -> None:
        self._reader = reader

    async def read(self, position: int, length: int) -> bytes:
        return await self._reader.read_around(position, length)


def _judge(hole: LogHole, limbo: LimboReason, what: str, storage: LedgerStorage) -> None:
    """Put the hole's ledgers in limbo, whether they are open or closed. If the hole is a torn
    write, or its ledgers are unknown, every ledger is put in limbo, too."""
    for ledger_id in hole.ledger_ids or ():
        state = storage.state(ledger_id)
        if state is not None and not state.deleted:
            put_in_limbo(storage, ledger_id, limbo)
    if hole.ledger_ids is None or limbo == LimboReason.TORN:
        put_all_in_limbo(storage, limbo, what)
    else:
        _log.error("%s: ledgers %s are in limbo", what, hole.ledger_ids)


def put_in_limbo(
    storage: LedgerStorage, ledger_id: int, limbo: LimboReason, *, fence: bool = False
) -> None:
    """Put the ledger, or EVERY_LEDGER, in limbo for this reason, unless it is in limbo for a worse
    reason. With `fence`, also fence the ledger. Durable with the next flush."""
    state = storage.state(ledger_id) or LedgerState(ledger_id, met=False)
    limbo, fenced = worse_reason(state.limbo, limbo), state.fenced or fence
    storage.set_state(replace(state, limbo=limbo, fenced=fenced))


def put_all_in_limbo(storage: LedgerStorage, limbo: LimboReason, why: str) -> None:
    """`put_in_limbo` of EVERY_LEDGER, with a log line."""
    _log.error("%s: every ledger is in limbo", why)
    put_in_limbo(storage, EVERY_LEDGER, limbo)
