"""At start: what direct logs hold beyond their marks goes to the index, and damage is judged.

Always true:
- a direct log is its own journal (logs/direct_log.py), read after all journals: what an entry
  counts for is in its ledger's state, and what is known of it otherwise is as new or newer
  (replayed.py);
- bytes that cannot be read are damage if a write that began after them shows that they were synced,
  or the log's footer does, or the disk itself cannot read them; else they are a torn write, or rot
  in the last one, which looks the same: the rules of replay.py for journals hold for both;
- a mark whose log is not there, or ends before it, is damage that cannot be attributed to a ledger;
- marks are forgotten only when all this is flushed: a start that was interrupted is repeated.
"""

import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import NamedTuple

from bookie_server.disk.interface import DiskFailed, DiskHung, File, NoSuchFile
from bookie_server.journal.scan import SegmentReader
from bookie_server.logs.entry_log import BLOCK_BYTES, record_end
from bookie_server.logs.index import EVERY_LEDGER, LedgerState, LimboReason, Location, worse
from bookie_server.logs.scan import Damage, Scanned, read_map, scan
from bookie_server.start.replayed import Replayed
from bookie_server.storage.directories import DirectoryStore
from bookie_server.storage.storage import LedgerStorage

_Locations = AsyncGenerator[dict[int, list[Location]]]
_log = logging.getLogger(__name__)


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
        while storage.lives(store):  # a flush may drop it
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
            _doubt_all(storage, LimboReason.LOST, f"direct log {log_id} is missing")
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
        _doubt_all(
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
            storage.set_state(replace(state, limbo=worse(state.limbo, limbo)))
    if hole.ledger_ids is None or limbo == LimboReason.TORN:
        _doubt_all(storage, limbo, what)
    else:
        _log.error("%s: ledgers %s are in limbo", what, hole.ledger_ids)


def _doubt_all(storage: LedgerStorage, limbo: LimboReason, why: str) -> None:
    _log.error("%s: every ledger is in limbo", why)
    state = storage.state(EVERY_LEDGER) or LedgerState(EVERY_LEDGER)
    storage.set_state(replace(state, limbo=worse(state.limbo, limbo)))
