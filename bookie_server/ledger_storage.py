"""Where entries and ledger states go after the journal: write cache, entry logs, index.

Always true:
- a flush goes: take the journal's synced position and swap the cache in one step; entries sorted
  by (ledger, entry) to the entry log; sync; index (synced); ledger states (synced); checkpoint;
  only then are journal segments removed;
- the checkpoint is computed here and nowhere else, moves only after everything before it, fences
  and explicit LACs included, is durable in its final place, and never back;
- the first failure ends all flushing: what was not flushed stays in the journal, and the
  checkpoint stays where it is;
- an entry is looked for in the active half, the flushing half, then in index and log: in that
  order a flush under way can never hide it.

What later issues add has its place here: a read cache between cache and index, removal of deleted
ledgers and compaction beside `_flush`, several disks as several EntryLogs.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

from bookie_server import checkpoint
from bookie_server.api.entry import Buffer, EntryHeader, unpack_header
from bookie_server.disk import Disk, DiskFailed
from bookie_server.entry_index import EVERY_LEDGER, EntryIndex, LedgerState, Location
from bookie_server.entry_log import BadEntryLog, EntryLogs
from bookie_server.journal import Journal
from bookie_server.journal_format import Position
from bookie_server.storage_config import StorageConfig
from bookie_server.write_cache import ENTRY_OVERHEAD_BYTES, CacheHalf, WriteCache

_EVERYTHING = 1 << 62
_log = logging.getLogger(__name__)


class Undeliverable(NamedTuple):
    """An entry that the index knows and the disk cannot give: it exists, or existed."""

    why: str
    entry_bytes: int


Found = Buffer | Undeliverable


class Range(NamedTuple):
    """What a ranged read found: by entry id, ascending; what is not there up to and including
    entry `known_through` is not stored, what lies beyond was not looked at."""

    entries: dict[int, Found]
    known_through: int


class _Flush(NamedTuple):
    """What one flush carries to its final place; `mark` is None while replaying."""

    half: CacheHalf
    states: list[LedgerState]
    mark: Position | None
    done: asyncio.Future[None]


class LedgerStorage:
    """All stores of one ledger disk. Made by `open`; `run` is its background task."""

    def __init__(
        self, disk: Disk, logs: EntryLogs, index: EntryIndex, config: StorageConfig
    ) -> None:
        self._disk = disk
        self._logs = logs
        self._index = index
        self._config = config
        self._cache = WriteCache(config.write_cache_bytes, config.recovery_reserve_bytes)
        self._journal: Journal | None = None
        self._mark = Position(0, 0)
        self._states: dict[int, LedgerState] = {}
        self._dirty: dict[int, None] = {}  # ledgers whose state the index does not have yet
        self._flush_begun: _Flush | None = None
        self.flushes = 0  # completed ones
        self._wake = asyncio.Event()
        self._stopping = False

    @classmethod
    async def open(cls, disk: Disk, index: EntryIndex, config: StorageConfig) -> "LedgerStorage":
        """Raises DiskFailed."""
        storage = cls(disk, await EntryLogs.open(disk, config), index, config)
        storage._states = {state.ledger_id: state for state in await index.ledgers()}
        return storage

    async def attach(self, journal: Journal, damaged: Sequence[int] = ()) -> None:
        """All that the journal's earlier segments hold is flushed: the checkpoint moves past them.

        It is durable when this returns, and the old segments are gone; the `damaged` ones are
        kept under another name. From here on every flush moves the checkpoint.
        """
        assert not self.has_unflushed, "the checkpoint would pass what no store has"
        self._journal = journal
        self._mark = journal.synced
        await checkpoint.write(self._disk, self._mark)
        for file_id in damaged:
            await journal.set_aside(file_id)
        await journal.forget_before(self._mark)

    # -- ledger states --

    @property
    def ledger_count(self) -> int:
        return len(self._states) - (EVERY_LEDGER in self._states)

    def state(self, ledger_id: int) -> LedgerState | None:
        return self._states.get(ledger_id)

    def states(self) -> list[LedgerState]:
        """What is known of every ledger, and of EVERY_LEDGER, by id."""
        return [self._states[ledger_id] for ledger_id in sorted(self._states)]

    def set_state(self, state: LedgerState) -> None:
        """Known from now on; durable with the caller's journal record or the next flush."""
        self._states[state.ledger_id] = state
        self._dirty[state.ledger_id] = None

    # -- entries --

    def has_room(self, entry_bytes: int, *, reserve: bool = False) -> bool:
        """Whether `put` may be called; begins a flush when that makes room."""
        needed = entry_bytes + ENTRY_OVERHEAD_BYTES
        if not self._cache.has_room(needed, reserve=reserve) and self._flush_begun is None:
            self.begin_flush()
        return self._cache.has_room(needed, reserve=reserve)

    def put(self, ledger_id: int, entry_id: int, entry: Buffer) -> None:
        """Readable from now on; durable with the caller's journal record."""
        self._cache.active.put(ledger_id, entry_id, entry)
        if self._cache.half_used and self._flush_begun is None:
            self.begin_flush()

    def compact(self, ledger_id: int, entry_id: int) -> Buffer:
        """See WriteCache.compact."""
        return self._cache.compact(ledger_id, entry_id)

    def cached(self, ledger_id: int, entry_id: int) -> Buffer | None:
        return self._cache.get(ledger_id, entry_id)

    async def last_entry(self, ledger_id: int) -> int | None:
        """The highest entry id stored of the ledger. Raises DiskFailed."""
        cached = self._cache.last(ledger_id)
        stored = await self._index.last(ledger_id)
        return max((e for e in (cached, stored) if e is not None), default=None)

    async def read(
        self, ledger_id: int, first_entry: int, last_entry: int, max_bytes: int
    ) -> Range:
        """The entries between first and last, both included, each checked.

        Stops after the entry that brings the bytes to `max_bytes`. Raises DiskFailed when the
        index cannot be read.
        """
        cached = self._cache.range(ledger_id, first_entry, last_entry)
        found: dict[int, Found] = dict(cached)
        if len(cached) <= last_entry - first_entry:
            places = await self._index.range(ledger_id, first_entry, last_entry, max_bytes)
            found.update(await self._from_logs([p for p in places if p.entry_id not in cached]))
        return _cut(found, last_entry, max_bytes)

    async def headers(
        self, ledger_id: int, entry_ids: Sequence[int]
    ) -> dict[int, EntryHeader | Undeliverable]:
        """Headers of those of the entries that are stored. An answer taken while `flushes` moved
        on may miss an entry that moved. Raises DiskFailed when the index cannot be read."""
        found: dict[int, Found] = {}
        for entry_id in dict.fromkeys(entry_ids):
            if (entry := self.cached(ledger_id, entry_id)) is not None:
                found[entry_id] = entry
        missing = [entry_id for entry_id in dict.fromkeys(entry_ids) if entry_id not in found]
        found.update(await self._from_logs(await self._places(ledger_id, missing)))
        return {
            entry_id: entry if isinstance(entry, Undeliverable) else unpack_header(entry)
            for entry_id, entry in found.items()
        }

    async def _places(self, ledger_id: int, entry_ids: Sequence[int]) -> list[Location]:
        """One look-up for entries that lie close together, as in a repeated frame."""
        if not entry_ids:
            return []
        first, last = min(entry_ids), max(entry_ids)
        if last - first < 4 * len(entry_ids):
            wanted = set(entry_ids)
            places = await self._index.range(ledger_id, first, last, _EVERYTHING)
            return [place for place in places if place.entry_id in wanted]
        found = [await self._index.get(ledger_id, entry_id) for entry_id in entry_ids]
        return [place for place in found if place is not None]

    async def _from_logs(self, places: Sequence[Location]) -> dict[int, Found]:
        entries: dict[int, Found] = {}
        for place, entry in zip(places, await self._logs.read(places), strict=True):
            if isinstance(entry, BadEntryLog | DiskFailed):
                _log.error("entry %d:%d: %s", place.ledger_id, place.entry_id, entry)
                entries[place.entry_id] = Undeliverable(str(entry), place.entry_bytes)
            else:
                entries[place.entry_id] = entry
        return entries

    # -- flush --

    @property
    def has_unflushed(self) -> bool:
        return bool(self._cache.active.bytes or self._dirty)

    def begin_flush(self) -> None:
        """Swap the halves; `run` (or `flush`) carries the full one out. None may be under way."""
        assert self._flush_begun is None, "one flush at a time"
        mark = self._journal.synced if self._journal is not None else None
        states = [self._states[ledger_id] for ledger_id in self._dirty]
        self._dirty = {}
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flush_begun = _Flush(self._cache.swap(), states, mark, done)
        self._wake.set()

    def stop(self) -> None:
        """Let `run` end after the flush that is under way."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Flush when the cache asks for it, and at least every flush_interval_s.

        Raises DiskFailed.
        """
        while not self._stopping:
            try:
                async with asyncio.timeout(self._config.flush_interval_s):
                    await self._wake.wait()
            except TimeoutError:
                if self._flush_begun is None:  # else the cache asked for it in the same moment
                    if not self.has_unflushed:
                        continue
                    self.begin_flush()
            self._wake.clear()
            await self._carry_out()

    async def flush(self) -> None:
        """Everything stored so far is in its final place. Only while `run` does not run."""
        if self._flush_begun is not None:
            await self._carry_out()
        self.begin_flush()
        await self._carry_out()

    async def close(self) -> None:
        await self._logs.close()
        await self._index.close()

    async def _carry_out(self) -> None:
        flush = self._flush_begun
        if flush is None:
            return
        locations = await self._logs.write(flush.half.in_order())
        if locations:
            await self._index.put(locations)
        if flush.states:
            await self._index.put_ledgers(flush.states)
        self._cache.drop_flushed()
        self._flush_begun = None
        self.flushes += 1
        if flush.mark is not None:
            await self._move_checkpoint(flush.mark)

    async def _move_checkpoint(self, mark: Position) -> None:
        assert self._journal is not None
        assert mark >= self._mark, "the checkpoint never moves back"
        if mark == self._mark:
            return
        await checkpoint.write(self._disk, mark)
        self._mark = mark
        await self._journal.forget_before(mark)


def _cut(found: dict[int, Found], last_entry: int, max_bytes: int) -> Range:
    """In order of entry id, up to the entry that brings the bytes to `max_bytes`."""
    kept: dict[int, Found] = {}
    for entry_id in sorted(found):
        entry = kept[entry_id] = found[entry_id]
        max_bytes -= entry.entry_bytes if isinstance(entry, Undeliverable) else len(entry)
        if max_bytes <= 0:
            return Range(kept, entry_id)
    return Range(kept, last_entry)
