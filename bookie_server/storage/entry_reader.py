"""The reading half of the storage: write cache, read cache, index, entry log; and read-ahead.

Always true:
- the newest copy of an entry is served: of the active half of the write cache, the flushing one,
  the read cache, then the logs by the index; a flush under way can never hide it;
- an entry from a disk is checked whole (header, digest, location) before a caller sees it. A bad
  entry goes to `quarantine` and is returned as Undeliverable, never as absent; the other entries
  of the same read are served;
- an entry counts as undeliverable only when no copy of it here now can be read: if its log went
  while it was read, it may have been compacted, and is looked up once more; an entry in several
  directories is read from each of them;
- an entry of which a client gets the location is unread and unchecked: the client checks the bytes
  that it reads there, and requests the entry if they are wrong;
- read-ahead runs beside requests and with a share of the disk's threads; a request waits for it
  only where it is reading just the entries of the request. A bad entry that it meets is left to
  the read that requests it: damage that no comparison reads, beyond a ledger's end say, must not
  make comparisons fail.

Reads under way are bounded: for requests by the callers (Bookie counts responses), ahead of them
by AHEAD_RUNS runs for each of the ledgers that ReadAhead allows; entries that have arrived are in
the read cache and count there.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple

from bookie_server.api.entry import Buffer, EntryHeader, unpack_header
from bookie_server.api.messages import EntryIds, EntryLocation, as_entry_ids
from bookie_server.config import StorageConfig
from bookie_server.disk.interface import DiskFailed, NoSuchFile
from bookie_server.lanes import in_recovery
from bookie_server.logs.entry_log import (
    RECORD_HEADER_BYTES,
    BadEntryLog,
    held_bytes,
    runs,
)
from bookie_server.logs.index import EntryIndex, Location
from bookie_server.storage.directories import DirectoryStore
from bookie_server.storage.read_cache import Ahead, ReadAhead, ReadCache
from bookie_server.storage.write_cache import WriteCache
from spark_ledger.async_tasks import BackgroundTasks

RUN_BYTES_MAX = 1 << 20  # one read of the disk: several are under way for one request
AHEAD_RUNS = 2  # at a time for a ledger
BAD_LEDGERS_MAX = 10_000  # for each a number is remembered
_EVERYTHING = 1 << 62
_ID_MAX = 2**63 - 1
_log = logging.getLogger(__name__)


class Undeliverable(NamedTuple):
    """An entry that the index has and the disk cannot give: it exists, or existed."""

    why: str
    entry_bytes: int


Delivered = Buffer | Undeliverable
Found = Delivered | EntryLocation


class Range(NamedTuple):
    """The outcome of a read: entries by id, ascending. A requested entry up to and including
    `known_through` that is missing is not stored; entries beyond it were not looked up."""

    entries: dict[int, Found]
    known_through: int


class _Copy(NamedTuple):
    """A copy of an entry: its directory and location."""

    store: DirectoryStore
    location: Location


Stores = Callable[[int], Sequence[DirectoryStore]]
"""The living directories that may hold a ledger's entries. If two hold the same entry the later one
is read first, and the other one if that copy is bad: a whole copy is right in any directory."""
Quarantine = Callable[[int, int, str], None]
"""(ledger, entry, why): the copy here is bad."""


class EntryReader:
    """Reads entries for LedgerStorage, which reports changes to it."""

    def __init__(
        self, cache: WriteCache, stores: Stores, quarantine: Quarantine, config: StorageConfig
    ) -> None:
        self._cache = cache
        self._stores = stores
        self._quarantine = quarantine
        self._read_cache = ReadCache(config.read_cache_bytes)
        self._ahead = ReadAhead()
        self._bad_entries = FailedReadLog()
        self._run_bytes_max = min(RUN_BYTES_MAX, config.read_cache_bytes // 16 or RUN_BYTES_MAX)
        self._ahead_bytes = min(config.read_ahead_bytes, config.read_cache_bytes // 4)
        self._place_bytes_min = config.place_bytes_min
        self._bringing = BackgroundTasks()
        self._moves = 0

    # -- changes ------------------------------------------------------------------------------

    def drop_cached_entry(self, ledger_id: int, entry_id: int) -> None:
        """Called with every `put` to the write cache, before any await that follows it."""
        self._read_cache.drop(ledger_id, entry_id)

    def deleted(self, ledger_id: int) -> None:
        """The ledger's entries are not in the index any more, or are to be compared as they are on
        disk."""
        self._read_cache.drop_ledger(ledger_id)

    def forget_cached(self) -> None:
        """Forget cached entries: those of the lost directory are copies no more, and a comparison
        must not count them."""
        self._read_cache.clear()

    def note_move(self) -> None:
        """Called before entries that another directory has are removed from a directory's index: a
        read under way may have looked at the other one too early, and look at this one too late."""
        self._moves += 1

    async def close(self) -> None:
        """End the read-ahead under way."""
        await self._bringing.close()
        self._read_cache.clear()

    # -- requests -----------------------------------------------------------------------------

    async def read(
        self, ledger_id: int, entry_ids: EntryIds, max_bytes: int, *, locate: bool = False
    ) -> Range:
        """Those of the entries that are stored, each checked; with `locate`, for large ones that
        are in no memory, their locations. At least one id is given.

        Stops after the entry that brings the bytes to `max_bytes`. Raises DiskFailed when an
        index cannot be read.
        """
        ahead = self._ahead.under_way(ledger_id)
        if ahead is not None and not in_recovery():
            await ahead.arrives(entry_ids[0])
        while True:
            moves = self._moves
            response = await self._read(ledger_id, entry_ids, max_bytes, locate)
            if moves == self._moves:
                break
        located = any(isinstance(entry, EntryLocation) for entry in response.entries.values())
        if isinstance(entry_ids, range) and not located:
            self._go_ahead(ledger_id, entry_ids[0], response.known_through)
        return response

    async def _read(
        self, ledger_id: int, entry_ids: EntryIds, max_bytes: int, locate: bool
    ) -> Range:
        entries: dict[int, Found] = dict(self._cache.among(ledger_id, entry_ids))
        left, through = max_bytes, entry_ids[-1]
        missing = entry_ids if len(entries) < len(entry_ids) else ()
        if not entries:
            entries.update(self._read_cache.leading(ledger_id, entry_ids, max_bytes))
            missing = as_entry_ids(entry_ids[len(entries) :])
            left -= sum(map(_size, entries.values()))
        if missing and left > 0:
            copies, through = await self._look_up(ledger_id, missing, left)
            copies = [copy for copy in copies if copy.location.entry_id not in entries]
            if locate:
                located = self._located(copies)
                entries.update(located)
                copies = [copy for copy in copies if copy.location.entry_id not in located]
            entries.update(await self._fetch(ledger_id, copies))
        return _cut(entries, through, max_bytes)

    async def locations(self, ledger_id: int, entry_ids: EntryIds) -> list[EntryLocation]:
        """The entries' locations, up to the first entry that has none for clients or is in memory.
        Raises DiskFailed when an index cannot be read."""
        copies, _ = await self._look_up(ledger_id, entry_ids, _EVERYTHING)
        located = self._located(copies)
        locations = []
        for entry_id in entry_ids:
            if entry_id not in located or self._in_memory(ledger_id, entry_id):
                break
            locations.append(located[entry_id])
        return locations

    async def headers(
        self, ledger_id: int, entry_ids: Sequence[int]
    ) -> dict[int, EntryHeader | Undeliverable]:
        """Headers of those of the entries that are stored. May miss an entry that a flush moved
        meanwhile. Raises DiskFailed when an index cannot be read."""
        entries: dict[int, Delivered] = {}
        for entry_id in dict.fromkeys(entry_ids):
            if (entry := self._cache.get(ledger_id, entry_id)) is not None:
                entries[entry_id] = entry
        if missing := sorted(dict.fromkeys(e for e in entry_ids if e not in entries)):
            copies, _ = await self._look_up(ledger_id, as_entry_ids(missing), _EVERYTHING)
            entries.update(await self._fetch(ledger_id, copies))
        return {
            entry_id: entry if isinstance(entry, Undeliverable) else unpack_header(entry)
            for entry_id, entry in entries.items()
        }

    def stored_in_cache(self, ledger_id: int, first_entry: int, last_entry: int) -> dict[int, None]:
        """Which of the entries are in the write cache, or have a location there."""
        stored = dict.fromkeys(self._cache.range(ledger_id, first_entry, last_entry))
        stored.update(
            dict.fromkeys(self._cache.ids_with_location(ledger_id, first_entry, last_entry))
        )
        return stored

    async def stored(
        self, ledger_id: int, first_entry: int, last_entry: int, since: str = ""
    ) -> dict[int, None]:
        """Which of the entries are in cache or index. With `since`, in the index of that directory
        or of one that took the ledger's entries after it. Raises DiskFailed."""
        stored = self.stored_in_cache(ledger_id, first_entry, last_entry)
        stores = self._stores(ledger_id)
        first = next((n for n, store in enumerate(stores) if store.id == since), 0)
        for store in stores[first:]:
            locations = await store.index.range(ledger_id, first_entry, last_entry, _EVERYTHING)
            stored.update((location.entry_id, None) for location in locations)
        return stored

    async def last_entry(self, ledger_id: int) -> int | None:
        """The highest entry id stored of the ledger. Raises DiskFailed."""
        stored = [await store.index.last(ledger_id) for store in self._stores(ledger_id)]
        stored.append(self._cache.last(ledger_id))
        return max((entry_id for entry_id in stored if entry_id is not None), default=None)

    # -- ahead of readers ---------------------------------------------------------------------

    def _go_ahead(self, ledger_id: int, first_entry: int, through: int) -> None:
        """A read has its response: bring the entries that its reader will probably request next."""
        if not self._ahead_bytes or in_recovery():
            return
        ahead = self._ahead.was_read(ledger_id, first_entry, through)
        if ahead is not None:
            self._bringing.start(self._bring(ledger_id, ahead))

    async def _bring(self, ledger_id: int, ahead: Ahead) -> None:
        first = through = ahead.passed
        try:
            beyond = range(first, _ID_MAX)
            copies, _ = await self._look_up(ledger_id, beyond, self._ahead_bytes)
            every = list(self._runs(copies))
            for at in range(0, len(every), AHEAD_RUNS):
                several = every[at : at + AHEAD_RUNS]
                await self._bring_runs(ledger_id, ahead, several)
                through = several[-1][1][-1].entry_id
        except DiskFailed as error:
            _log.warning("ledger %d is not read ahead: %s", ledger_id, error)
        finally:
            self._ahead.brought(ledger_id, first, through)

    async def _bring_runs(
        self, ledger_id: int, ahead: Ahead, several: Sequence[tuple[DirectoryStore, list[Location]]]
    ) -> None:
        """Read the runs that no reader has requested meanwhile, that are not in memory and that the
        read cache will take: others would be read in vain."""
        useful = [
            (store, run)
            for store, run in several
            if run[0].entry_id >= ahead.passed
            and self._read_cache.takes(held_bytes(run), len(run))
            and not any(self._in_memory(ledger_id, location.entry_id) for location in run)
        ]
        if useful:
            ahead.begin(range(useful[0][1][0].entry_id, useful[-1][1][-1].entry_id + 1))
            await _all([self._read_run(store, run, uses=0) for store, run in useful])
            ahead.end()

    def _in_memory(self, ledger_id: int, entry_id: int) -> bool:
        if self._cache.get(ledger_id, entry_id) is not None:
            return True
        return self._read_cache.has(ledger_id, entry_id)

    # -- locations ----------------------------------------------------------------------------

    async def _look_up(
        self, ledger_id: int, entry_ids: EntryIds, max_bytes: int
    ) -> tuple[list[_Copy], int]:
        """The copies of those of the entries that are stored, ascending, and the entry through
        which every index was looked at: an index stops when it has given `max_bytes`."""
        copies: dict[int, _Copy] = {}
        through = entry_ids[-1]
        stores = self._stores(ledger_id)
        for store in stores:
            locations = await _of_index(store.index, ledger_id, entry_ids, max_bytes)
            copies.update((location.entry_id, _Copy(store, location)) for location in locations)
            if sum([location.entry_bytes for location in locations]) >= max_bytes:
                through = min(through, locations[-1].entry_id)
        ids = copies if len(stores) == 1 else sorted(copies)
        return [copies[entry_id] for entry_id in ids if entry_id <= through], through

    async def _every_copy(self, ledger_id: int, entry_id: int) -> list[_Copy]:
        """All copies of the entry, in the order in which they are read."""
        stores = list(reversed(self._stores(ledger_id)))
        pairs = [(store, await store.index.get(ledger_id, entry_id)) for store in stores]
        return [_Copy(store, location) for store, location in pairs if location is not None]

    def _located(self, copies: Sequence[_Copy]) -> dict[int, EntryLocation]:
        """Locations of those of the entries that a client on this host is to read itself."""
        least = self._place_bytes_min
        return {
            at.entry_id: EntryLocation(
                store.path,
                store.logs.path(at.log_id),
                at.position + RECORD_HEADER_BYTES,
                at.entry_bytes,
            )
            for store, at in copies
            if store.path and at.entry_bytes >= least > 0
        }

    # -- copies -------------------------------------------------------------------------------

    async def _fetch(self, ledger_id: int, copies: Sequence[_Copy]) -> dict[int, Delivered]:
        """The entries of the copies: from the read cache; by waiting for them, if they are just
        being read ahead; the others by many reads of the disk at once."""
        fetched, absent = self._among(ledger_id, copies)
        ahead = None if in_recovery() else self._ahead.under_way(ledger_id)  # it is bulk reading
        coming = range(0)
        if ahead is not None and copies:
            ahead.passed = max(ahead.passed, copies[-1].location.entry_id + 1)
            coming = ahead.run
        now = [copy for copy in absent if copy.location.entry_id not in coming]
        for entries in await _all([self._read_run(store, run) for store, run in self._runs(now)]):
            fetched.update(entries)
        if ahead is not None and len(now) < len(absent):
            late = [copy for copy in absent if copy.location.entry_id in coming]
            await ahead.arrives(late[0].location.entry_id)
            arrived, lost = self._among(ledger_id, late)
            fetched.update(arrived)
            for entries in await _all(
                [self._read_run(store, run) for store, run in self._runs(lost)]
            ):
                fetched.update(entries)
        return fetched

    def _runs(self, copies: Sequence[_Copy]) -> Iterator[tuple[DirectoryStore, list[Location]]]:
        """Neighbours on one disk, in the order of the copies; as many as the read cache keeps."""
        for store, group in itertools.groupby(copies, key=lambda copy: copy.store):
            for run in runs([copy.location for copy in group], self._run_bytes_max):
                yield store, run

    def _among(
        self, ledger_id: int, copies: Sequence[_Copy]
    ) -> tuple[dict[int, Delivered], list[_Copy]]:
        """The entries that are in the read cache, and the copies of the others."""
        ids = [copy.location.entry_id for copy in copies]
        cached: dict[int, Delivered] = dict(self._read_cache.among(ledger_id, ids))
        return cached, [copy for copy in copies if copy.location.entry_id not in cached]

    async def _read_run(
        self, store: DirectoryStore, run: Sequence[Location], *, uses: int = 1
    ) -> dict[int, Delivered]:
        """One read of the disk. The read cache keeps the good entries."""
        ledger_id = run[0].ledger_id
        ticket = self._read_cache.begin(ledger_id)
        entries: dict[int, Delivered] = {}
        good: dict[int, Buffer] = {}
        try:
            for location, entry in zip(run, await store.logs.read_run(run), strict=True):
                if isinstance(entry, BadEntryLog | DiskFailed):
                    if not uses:
                        continue  # it was not requested: a later read meets it
                    bad = await self._look_again(_Copy(store, location), entry)
                    if bad is not None:
                        entries[location.entry_id] = bad
                else:
                    entries[location.entry_id] = good[location.entry_id] = entry
            self._read_cache.put(ticket, good, held_bytes(run), uses=uses)
        finally:
            self._read_cache.end(ticket)
        return entries

    async def _look_again(self, copy: _Copy, error: Exception) -> Delivered | None:
        """Look the entry up once more: compaction or recovery may have moved it since, and another
        directory may hold it too. None: it was deleted."""
        ledger_id, entry_id = copy.location.ledger_id, copy.location.entry_id
        tried: list[tuple[_Copy, Exception]] = [(copy, error)]
        while True:
            if (cached := self._cache.get(ledger_id, entry_id)) is not None:
                return cached
            copies = await self._every_copy(ledger_id, entry_id)
            if not copies:
                return self._cache.get(ledger_id, entry_id)
            tried_copies = [copy for copy, _ in tried]
            untried = [copy for copy in copies if copy not in tried_copies]
            if not untried:
                break
            (entry,) = await untried[0].store.logs.read_run([untried[0].location])
            if not isinstance(entry, BadEntryLog | DiskFailed):
                return entry
            tried.append((untried[0], entry))
        errors = [error for tried_copy, error in tried if tried_copy in copies]
        return self._undeliverable(copy.location, errors)

    def _undeliverable(self, location: Location, errors: Sequence[Exception]) -> Undeliverable:
        """`errors`: one for each copy of the entry. An error of the disk alone does not prove that
        the copy is bad."""
        bad = [error for error in errors if isinstance(error, BadEntryLog | NoSuchFile)]
        why = str((bad or errors)[0])
        self._bad_entries.found(location.ledger_id, location.entry_id, why)
        if bad:
            self._quarantine(location.ledger_id, location.entry_id, why)
        return Undeliverable(why, location.entry_bytes)


async def _of_index(
    index: EntryIndex, ledger_id: int, entry_ids: EntryIds, max_bytes: int
) -> list[Location]:
    if isinstance(entry_ids, range):
        return await index.range(ledger_id, entry_ids[0], entry_ids[-1], max_bytes)
    return await index.among(ledger_id, entry_ids, max_bytes)


async def _all(
    reads: Sequence[Coroutine[Any, Any, dict[int, Delivered]]],
) -> list[dict[int, Delivered]]:
    if len(reads) == 1:
        return [await reads[0]]
    return list(await asyncio.gather(*reads))


def _size(entry: Found) -> int:
    return entry.entry_bytes if isinstance(entry, Undeliverable | EntryLocation) else len(entry)


def _cut(entries: dict[int, Found], through: int, max_bytes: int) -> Range:
    """The entries by id, up to the one that brings the bytes to `max_bytes`, and at most to
    `through`: some index was not looked at beyond it."""
    kept: dict[int, Found] = {}
    for entry_id in sorted(entries):
        if entry_id > through:
            break
        entry = kept[entry_id] = entries[entry_id]
        max_bytes -= _size(entry)
        if max_bytes <= 0:
            return Range(kept, entry_id)
    return Range(kept, through)


class FailedReadLog:
    """Logs reads of entries that cannot be delivered: a line at a ledger's 1st, 10th, 100th, ...
    such read, with their number."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def found(self, ledger_id: int, entry_id: int, why: str) -> None:
        """Count a read that met the entry and could not deliver it; each repeated read counts."""
        if len(self._counts) >= BAD_LEDGERS_MAX:
            self._counts.clear()
        count = self._counts[ledger_id] = self._counts.get(ledger_id, 0) + 1
        if str(count).rstrip("0") == "1":
            text = "ledger %d: entry %d cannot be delivered: %s (%d such reads of the ledger)"
            _log.error(text, ledger_id, entry_id, why, count)
