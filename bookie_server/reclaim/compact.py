"""Compaction of one entry log: its living entries are copied, the index is moved to the copy, the
log is removed. The names of the files show which steps are done, and each step can be repeated:

    7.compacting                      being written; removed at the next start
    7.from-3.compacted                whole and durable; the index points to it or to 3.log
    (index moved, synced; 3.log removed, durably)
    7.log

Always true:
- the source is removed only after the copy of its living entries was read back without a fault, and
  the index, which then points to no record of the source, was synced;
- an entry is copied only if the index points to its record, and its location moves only if the
  index still points to that record;
- a damaged record is never copied: its ledger is quarantined, and the source kept as `.damaged`;
- after a failure the source is unchanged and there is no copy; the next log is not affected.
"""

import contextlib
import logging
from collections.abc import Callable
from typing import NamedTuple

from bookie_server.disk.interface import DiskFailed
from bookie_server.lanes import Pace
from bookie_server.logs.entry_log import BadEntryLog, EntryLogs, GrowingLog
from bookie_server.logs.scan import (
    CHUNK_BYTES,
    LogMap,
    Scanned,
    indexed_records,
    locations_in,
    locations_of,
    read_map,
    runs_of_a_ledger,
    scan,
)
from bookie_server.storage.directories import DirectoryStore

Quarantine = Callable[[int, int, str], object]
"""(ledger id, entry id, why): the entry cannot be delivered, and must never count as absent."""
_log = logging.getLogger(__name__)


class _CopyOutcome(NamedTuple):
    """The result of copying a log. `copy` is None if no entry lives. `is_doubtful`: the source may
    have records that were not read."""

    copy: GrowingLog | None
    is_doubtful: bool


class Compactor:
    """The compactions of one directory, one at a time."""

    def __init__(self, store: DirectoryStore, quarantine: Quarantine, pace: Pace) -> None:
        self._store = store
        self._quarantine = quarantine
        self._pace = pace
        self.failures = 0

    async def redo(self) -> None:
        """Finish the compactions that an earlier run or a failure left between copy and source."""
        for copy_id, source in self._store.logs.unfinished_copies().items():
            try:
                await self._finish(copy_id, source, is_doubtful=True)
            except DiskFailed as error:
                self._note_failure(source, error)

    async def compact(self, source: LogMap) -> int | None:
        """Compact a log; returns the bytes freed on disk. Returns None if the compaction failed:
        then the source is unchanged."""
        outcome: _CopyOutcome | None = None
        try:
            outcome = await self._copy(source)
            if outcome.copy is None:
                await self._sync_index()
                await self._remove_source(source.log_id, is_doubtful=outcome.is_doubtful)
                return source.file_bytes
            await self._store.logs.publish_copy(outcome.copy, source.log_id)
            copy_bytes = outcome.copy.file.end
            await self._finish(outcome.copy.log_id, source.log_id, is_doubtful=outcome.is_doubtful)
        except DiskFailed as error:
            self._note_failure(source.log_id, error)
            if outcome is not None and outcome.copy is not None:
                await self._discard(outcome.copy)
            return None
        return source.file_bytes - copy_bytes

    async def _copy(self, source: LogMap) -> _CopyOutcome:
        """Write the living entries to a copy. Raises DiskFailed; then there is no copy."""
        buffer = _CopyBuffer(self._store.logs)
        record_count, has_damage = 0, False
        file = await self._store.logs.open_log(source.log_id)
        try:
            async for chunk in scan(file, source.log_id, source.records_end):
                record_count += len(chunk.records)
                has_damage = has_damage or bool(chunk.damage)
                await buffer.add(await self._living(chunk))
                await self._pace.spend(chunk.size)
            await buffer.flush()
        except DiskFailed:
            if buffer.copy is not None:
                await self._discard(buffer.copy)
            raise
        finally:
            await file.close()
        is_doubtful = has_damage or (source.has_footer and record_count != source.entries)
        return _CopyOutcome(buffer.copy, is_doubtful)

    async def _living(self, chunk: Scanned) -> list[tuple[int, int, bytes]]:
        """The living entries of the chunk, as copies: a view would keep the chunk in memory."""
        living = await indexed_records(self._store.index, chunk.records)
        return [(r.location.ledger_id, r.location.entry_id, bytes(r.entry)) for r in living]

    async def _finish(self, copy_id: int, source: int, *, is_doubtful: bool) -> None:
        """Make a published copy an ordinary log. Raises DiskFailed; then `redo` repeats this."""
        store = self._store
        indexed_count, is_whole = await self._move_index(copy_id, source)
        await self._sync_index()
        if not indexed_count:
            await store.logs.abandon_copy(copy_id)
        if is_whole:
            await self._remove_source(source, is_doubtful=is_doubtful)
        else:
            _log.error("the copy of log %d is damaged: both are kept", source)
            self.failures += 1
        if indexed_count:
            await store.logs.finish_copy(copy_id)

    async def _sync_index(self) -> None:
        async with self._store.index_lock:
            await self._store.index.sync()

    async def _move_index(self, copy_id: int, source: int) -> tuple[int, bool]:
        """Read the copy back, and move the index from the source to the copy. Returns to how many
        of the copy's records the index then points, and whether the copy is undamaged."""
        store = self._store
        log_map = await read_map(store.logs, store.disk, copy_id)
        indexed_count = record_count = 0
        is_whole = log_map is not None and log_map.has_footer
        file = await store.logs.open_log(copy_id)
        try:
            async for chunk in scan(file, copy_id, log_map.records_end if log_map else file.end):
                is_whole = is_whole and not chunk.damage
                record_count += len(chunk.records)
                indexed_count += await self._move_chunk(chunk, source)
                await self._pace.spend(chunk.size)
        finally:
            await file.close()
        is_whole = is_whole and log_map is not None and log_map.entries == record_count
        return indexed_count, is_whole

    async def _move_chunk(self, chunk: Scanned, source: int) -> int:
        """Move the index to the chunk's records of the copy. Returns to how many of them the index
        then points."""
        index, indexed_count = self._store.index, 0
        for run in runs_of_a_ledger(chunk.records):
            pairs = list(zip(await locations_of(index, run), run, strict=True))
            moves = [(old, new.location) for old, new in pairs if old and old.log_id == source]
            indexed_count += sum(old == new.location for old, new in pairs) + len(moves)
            if moves:
                async with self._store.index_lock:
                    await index.move(moves)
        return indexed_count

    async def _remove_source(self, source: int, *, is_doubtful: bool) -> None:
        """Remove the source. If the source is doubtful and the index still points to some of its
        records, set the source aside and quarantine their entries."""
        logs = self._store.logs
        locations = await locations_in(self._store.index, source) if is_doubtful else []
        for location in locations:
            why = f"its record in log {source} is damaged"
            self._quarantine(location.ledger_id, location.entry_id, why)
        if locations:
            _log.error("log %d has lost %d entries and is set aside", source, len(locations))
            await logs.set_aside(source)
        else:
            await logs.remove(source)

    async def _discard(self, copy: GrowingLog) -> None:
        if copy.log_id not in self._store.logs.unfinished_copies():
            with contextlib.suppress(DiskFailed):
                await self._store.logs.discard_copy(copy)

    def _note_failure(self, source: int, error: DiskFailed | BadEntryLog) -> None:
        self.failures += 1
        _log.warning("compaction of log %d was given up: %s", source, error)


class _CopyBuffer:
    """Gathers living entries, and appends them to the copy, which it makes when needed."""

    def __init__(self, logs: EntryLogs) -> None:
        self._logs = logs
        self._waiting: list[tuple[int, int, bytes]] = []
        self._waiting_bytes = 0
        self.copy: GrowingLog | None = None

    async def add(self, entries: list[tuple[int, int, bytes]]) -> None:
        self._waiting += entries
        self._waiting_bytes += sum(len(entry) for _, _, entry in entries)
        if self._waiting_bytes >= CHUNK_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Append the gathered entries to the copy; not durable."""
        if self._waiting:
            self.copy = self.copy or await self._logs.begin_copy()
            await self.copy.append(self._waiting)
            self._waiting, self._waiting_bytes = [], 0
