"""The reading part of the storage: write cache, read cache, index, entry log; and read-ahead.

Always true:
- the newest copy of an entry is served. The places are searched in this order: active half and
  flushing half of the write cache, read cache, then index and log. So a flush under way never hides
  an entry;
- header, digest and location of an entry from a disk are checked before a caller gets the entry. A
  bad entry goes to `quarantine` and is returned as Undeliverable, never as absent; the other
  entries of the same read are served;
- an entry is undeliverable only when no copy on this node can be read. If its log was removed
  during the read (by a compaction, perhaps), the entry is looked up once more; an entry in several
  directories is read from each of them;
- if a client gets an entry's location, this class neither reads nor checks the entry: the client
  checks the bytes at the location, and requests the entry if they are wrong;
- read-ahead runs at the same time as requests, with a share of the disk's threads. A request waits
  for read-ahead only while read-ahead is reading the request's own entries. A bad entry is reported
  by a read that requests the entry, and not by read-ahead: damage that no comparison reads (for
  example beyond a ledger's end) must not make comparisons fail.

Reads under way are bounded: reads for requests by the callers (Bookie counts responses), read-ahead
by AHEAD_RUNS runs (neighbours on disk, read together) for each ledger that ReadAhead allows.
Entries that were read are in the read cache and count in its budget.
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
from bookie_server.lanes import in_recovery_lane
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

RUN_BYTES_MAX = 1 << 20  # the most bytes of a disk read; a request may need several reads
AHEAD_RUNS = 2  # runs that are read ahead at a time for a ledger
BAD_LEDGERS_MAX = 10_000  # ledgers whose failed reads are counted
_EVERYTHING = 1 << 62
_ID_MAX = 2**63 - 1
_log = logging.getLogger(__name__)


class Undeliverable(NamedTuple):
    """An entry that is in the index and cannot be read from the disk: it exists, or existed."""

    why: str
    entry_bytes: int


ReadEntry = Buffer | Undeliverable
LocatedEntry = ReadEntry | EntryLocation


class Range(NamedTuple):
    """The outcome of a read: entries by id, ascending. If a requested entry up to and including
    `known_through` is missing here, it is not stored; later entries were not looked up."""

    entries: dict[int, LocatedEntry]
    known_through: int


class _Copy(NamedTuple):
    """A copy of an entry: its directory and location."""

    store: DirectoryStore
    location: Location


StoresOf = Callable[[int], Sequence[DirectoryStore]]
"""The living directories that may hold a ledger's entries. If several directories hold the same
entry, the last copy is read first, and an earlier copy if the last one is bad: all undamaged copies
are equal."""
Quarantine = Callable[[int, int, str], None]
"""(ledger, entry, why): the stored copy of the entry is bad."""


class EntryReader:
    """Reads entries for LedgerStorage, which reports each change of entries to this reader."""

    def __init__(
        self, cache: WriteCache, stores_of: StoresOf, quarantine: Quarantine, config: StorageConfig
    ) -> None:
        self._cache = cache
        self._stores_of = stores_of
        self._quarantine = quarantine
        self._read_cache = ReadCache(config.read_cache_bytes)
        self._ahead = ReadAhead()
        self._bad_entries = FailedReadLog()
        self._run_bytes_max = min(RUN_BYTES_MAX, config.read_cache_bytes // 16 or RUN_BYTES_MAX)
        self._ahead_bytes = min(config.read_ahead_bytes, config.read_cache_bytes // 4)
        self._place_bytes_min = config.place_bytes_min
        self._read_ahead_tasks = BackgroundTasks()
        self._move_count = 0

    # -- changes ------------------------------------------------------------------------------

    def drop_cached_entry(self, ledger_id: int, entry_id: int) -> None:
        """Forget an entry that was put into the write cache, in the same step of the event loop."""
        self._read_cache.drop(ledger_id, entry_id)

    def drop_ledger(self, ledger_id: int) -> None:
        """Forget the ledger's cached entries: they were removed from the index, or a comparison has
        to read them from the disk."""
        self._read_cache.drop_ledger(ledger_id)

    def forget_cached(self) -> None:
        """Forget all cached entries: a directory is lost, and a comparison must not count its
        entries as copies."""
        self._read_cache.clear()

    def note_move(self) -> None:
        """Make reads under way repeat their look-up. The caller calls this before it removes from a
        directory's index entries that a second directory has now: a read may have looked into the
        second directory too early, and would look into the first directory too late."""
        self._move_count += 1

    async def close(self) -> None:
        """End the read-ahead under way."""
        await self._read_ahead_tasks.close()
        self._read_cache.clear()

    # -- requests -----------------------------------------------------------------------------

    async def read(
        self, ledger_id: int, entry_ids: EntryIds, max_bytes: int, *, locate: bool = False
    ) -> Range:
        """The stored entries among these, each checked; with `locate`, the location instead of each
        large entry that is not in memory. The caller gives at least one id.

        Stops after the entry with which the bytes reach `max_bytes`. Raises DiskFailed when an
        index cannot be read.
        """
        ahead = self._ahead.under_way(ledger_id)
        if ahead is not None and not in_recovery_lane():
            await ahead.arrives(entry_ids[0])
        while True:
            move_count = self._move_count
            response = await self._read(ledger_id, entry_ids, max_bytes, locate)
            if move_count == self._move_count:
                break
        has_location = any(isinstance(entry, EntryLocation) for entry in response.entries.values())
        if isinstance(entry_ids, range) and not has_location:
            self._begin_read_ahead(ledger_id, entry_ids[0], response.known_through)
        return response

    async def _read(
        self, ledger_id: int, entry_ids: EntryIds, max_bytes: int, locate: bool
    ) -> Range:
        entries: dict[int, LocatedEntry] = dict(self._cache.among(ledger_id, entry_ids))
        bytes_left, through = max_bytes, entry_ids[-1]
        missing = entry_ids if len(entries) < len(entry_ids) else ()
        if not entries:
            entries.update(self._read_cache.leading(ledger_id, entry_ids, max_bytes))
            missing = as_entry_ids(entry_ids[len(entries) :])
            bytes_left -= sum(map(_size, entries.values()))
        if missing and bytes_left > 0:
            copies, through = await self._look_up(ledger_id, missing, bytes_left)
            copies = [copy for copy in copies if copy.location.entry_id not in entries]
            if locate:
                locations = self._client_locations(copies)
                entries.update(locations)
                copies = [copy for copy in copies if copy.location.entry_id not in locations]
            entries.update(await self._fetch(ledger_id, copies))
        return _cut(entries, through, max_bytes)

    async def locations(self, ledger_id: int, entry_ids: EntryIds) -> list[EntryLocation]:
        """The entries' locations, up to the first entry that is in memory or has no location for
        clients. Raises DiskFailed when an index cannot be read."""
        copies, _ = await self._look_up(ledger_id, entry_ids, _EVERYTHING)
        by_entry = self._client_locations(copies)
        locations = []
        for entry_id in entry_ids:
            if entry_id not in by_entry or self._in_memory(ledger_id, entry_id):
                break
            locations.append(by_entry[entry_id])
        return locations

    async def headers(
        self, ledger_id: int, entry_ids: Sequence[int]
    ) -> dict[int, EntryHeader | Undeliverable]:
        """The headers of the stored entries among these. May miss an entry that a flush writes
        meanwhile. Raises DiskFailed when an index cannot be read."""
        entries: dict[int, ReadEntry] = {}
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
        """The entries of which the write cache has the bytes or a location."""
        stored = dict.fromkeys(self._cache.range(ledger_id, first_entry, last_entry))
        stored.update(
            dict.fromkeys(self._cache.ids_with_location(ledger_id, first_entry, last_entry))
        )
        return stored

    async def stored(
        self, ledger_id: int, first_entry: int, last_entry: int, since: str = ""
    ) -> dict[int, None]:
        """The entries that are in write cache or index. With `since`, only the indexes of that
        directory and of later homes of the ledger count. Raises DiskFailed."""
        stored = self.stored_in_cache(ledger_id, first_entry, last_entry)
        stores = self._stores_of(ledger_id)
        first = next((n for n, store in enumerate(stores) if store.id == since), 0)
        for store in stores[first:]:
            locations = await store.index.range(ledger_id, first_entry, last_entry, _EVERYTHING)
            stored.update((location.entry_id, None) for location in locations)
        return stored

    async def last_entry(self, ledger_id: int) -> int | None:
        """The highest stored entry id of the ledger. Raises DiskFailed."""
        stored = [self._cache.last(ledger_id)]  # first: a flush moves entries into the index
        stored += [await store.index.last(ledger_id) for store in self._stores_of(ledger_id)]
        return max((entry_id for entry_id in stored if entry_id is not None), default=None)

    # -- ahead of readers ---------------------------------------------------------------------

    def _begin_read_ahead(self, ledger_id: int, first_entry: int, through: int) -> None:
        """After a read, begin to read the entries that its reader will probably request next."""
        if not self._ahead_bytes or in_recovery_lane():
            return
        ahead = self._ahead.note_read(ledger_id, first_entry, through)
        if ahead is not None:
            self._read_ahead_tasks.start(self._read_ahead_entries(ledger_id, ahead))

    async def _read_ahead_entries(self, ledger_id: int, ahead: Ahead) -> None:
        first = through = ahead.passed
        try:
            beyond = range(first, _ID_MAX)
            copies, _ = await self._look_up(ledger_id, beyond, self._ahead_bytes)
            all_runs = list(self._runs(copies))
            for start in range(0, len(all_runs), AHEAD_RUNS):
                batch = all_runs[start : start + AHEAD_RUNS]
                await self._read_ahead_runs(ledger_id, ahead, batch)
                through = batch[-1][1][-1].entry_id
        except DiskFailed as error:
            _log.warning("ledger %d is not read ahead: %s", ledger_id, error)
        finally:
            self._ahead.note_end(ledger_id, first, through)

    async def _read_ahead_runs(
        self, ledger_id: int, ahead: Ahead, batch: Sequence[tuple[DirectoryStore, list[Location]]]
    ) -> None:
        """Read the runs that no reader has requested meanwhile, that are not in memory, and that
        the read cache will keep."""
        useful_runs = [
            (store, run)
            for store, run in batch
            if run[0].entry_id >= ahead.passed
            and self._read_cache.takes(held_bytes(run), len(run))
            and not any(self._in_memory(ledger_id, location.entry_id) for location in run)
        ]
        if useful_runs:
            ahead.begin(range(useful_runs[0][1][0].entry_id, useful_runs[-1][1][-1].entry_id + 1))
            await _gather_reads([self._read_run(store, run, uses=0) for store, run in useful_runs])
            ahead.end()

    def _in_memory(self, ledger_id: int, entry_id: int) -> bool:
        if self._cache.get(ledger_id, entry_id) is not None:
            return True
        return self._read_cache.has(ledger_id, entry_id)

    # -- locations ----------------------------------------------------------------------------

    async def _look_up(
        self, ledger_id: int, entry_ids: EntryIds, max_bytes: int
    ) -> tuple[list[_Copy], int]:
        """The copies of the stored entries among these, ascending; and the last entry id that was
        looked up in every index, as each index stops at `max_bytes`."""
        copies: dict[int, _Copy] = {}
        through = entry_ids[-1]
        stores = self._stores_of(ledger_id)
        for store in stores:
            locations = await _index_locations(store.index, ledger_id, entry_ids, max_bytes)
            copies.update((location.entry_id, _Copy(store, location)) for location in locations)
            if sum([location.entry_bytes for location in locations]) >= max_bytes:
                through = min(through, locations[-1].entry_id)
        ids = copies if len(stores) == 1 else sorted(copies)
        return [copies[entry_id] for entry_id in ids if entry_id <= through], through

    async def _all_copies(self, ledger_id: int, entry_id: int) -> list[_Copy]:
        """All copies of the entry, in the order in which they are read."""
        stores = list(reversed(self._stores_of(ledger_id)))
        pairs = [(store, await store.index.get(ledger_id, entry_id)) for store in stores]
        return [_Copy(store, location) for store, location in pairs if location is not None]

    def _client_locations(self, copies: Sequence[_Copy]) -> dict[int, EntryLocation]:
        """The locations of the entries that clients on this host read from the file themselves."""
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

    async def _fetch(self, ledger_id: int, copies: Sequence[_Copy]) -> dict[int, ReadEntry]:
        """The entries of the copies. For entries that are being read ahead this waits; the other
        entries come from the read cache, or by several reads of the disk at once."""
        fetched, uncached = self._split_cached(ledger_id, copies)
        # a recovery does not wait for read-ahead, which is bulk reading
        ahead = None if in_recovery_lane() else self._ahead.under_way(ledger_id)
        ahead_ids = range(0)
        if ahead is not None and copies:
            ahead.passed = max(ahead.passed, copies[-1].location.entry_id + 1)
            ahead_ids = ahead.run
        to_read = [copy for copy in uncached if copy.location.entry_id not in ahead_ids]
        fetched.update(await self._read_copies(to_read))
        if ahead is not None and len(to_read) < len(uncached):
            to_await = [copy for copy in uncached if copy.location.entry_id in ahead_ids]
            await ahead.arrives(to_await[0].location.entry_id)
            cached, evicted = self._split_cached(ledger_id, to_await)
            fetched.update(cached)
            fetched.update(await self._read_copies(evicted))
        return fetched

    async def _read_copies(self, copies: Sequence[_Copy]) -> dict[int, ReadEntry]:
        reads = [self._read_run(store, run) for store, run in self._runs(copies)]
        entries: dict[int, ReadEntry] = {}
        for run_entries in await _gather_reads(reads):
            entries.update(run_entries)
        return entries

    def _runs(self, copies: Sequence[_Copy]) -> Iterator[tuple[DirectoryStore, list[Location]]]:
        """The copies as runs of neighbours on one disk, in the order of the copies. A run is so
        small that the read cache can keep it."""
        for store, group in itertools.groupby(copies, key=lambda copy: copy.store):
            for run in runs([copy.location for copy in group], self._run_bytes_max):
                yield store, run

    def _split_cached(
        self, ledger_id: int, copies: Sequence[_Copy]
    ) -> tuple[dict[int, ReadEntry], list[_Copy]]:
        """The entries that are in the read cache, and the copies of the other entries."""
        ids = [copy.location.entry_id for copy in copies]
        cached: dict[int, ReadEntry] = dict(self._read_cache.among(ledger_id, ids))
        return cached, [copy for copy in copies if copy.location.entry_id not in cached]

    async def _read_run(
        self, store: DirectoryStore, run: Sequence[Location], *, uses: int = 1
    ) -> dict[int, ReadEntry]:
        """One read of the disk. The read cache keeps the good entries. `uses`: 0 for read-ahead."""
        ledger_id = run[0].ledger_id
        ticket = self._read_cache.begin(ledger_id)
        entries: dict[int, ReadEntry] = {}
        good_entries: dict[int, Buffer] = {}
        try:
            for location, entry in zip(run, await store.logs.read_run(run), strict=True):
                if isinstance(entry, BadEntryLog | DiskFailed):
                    if not uses:
                        continue  # the read that requests the entry reports the error
                    bad_entry = await self._retry(_Copy(store, location), entry)
                    if bad_entry is not None:
                        entries[location.entry_id] = bad_entry
                else:
                    entries[location.entry_id] = good_entries[location.entry_id] = entry
            self._read_cache.put(ticket, good_entries, held_bytes(run), uses=uses)
        finally:
            self._read_cache.end(ticket)
        return entries

    async def _retry(self, copy: _Copy, error: Exception) -> ReadEntry | None:
        """The entry after a second look-up: compaction or recovery may have moved the entry since
        the first look-up, or another directory may hold it too. None: the entry was deleted."""
        ledger_id, entry_id = copy.location.ledger_id, copy.location.entry_id
        tried: list[tuple[_Copy, Exception]] = [(copy, error)]
        while True:
            if (cached := self._cache.get(ledger_id, entry_id)) is not None:
                return cached
            copies = await self._all_copies(ledger_id, entry_id)
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
        """The result for an entry that cannot be delivered; puts its ledger in quarantine if a copy
        is surely bad. `errors`: the error of each copy; a disk error does not prove that a copy is
        bad."""
        proofs = [error for error in errors if isinstance(error, BadEntryLog | NoSuchFile)]
        why = str((proofs or errors)[0])
        self._bad_entries.count(location.ledger_id, location.entry_id, why)
        if proofs:
            self._quarantine(location.ledger_id, location.entry_id, why)
        return Undeliverable(why, location.entry_bytes)


async def _index_locations(
    index: EntryIndex, ledger_id: int, entry_ids: EntryIds, max_bytes: int
) -> list[Location]:
    if isinstance(entry_ids, range):
        return await index.range(ledger_id, entry_ids[0], entry_ids[-1], max_bytes)
    return await index.among(ledger_id, entry_ids, max_bytes)


async def _gather_reads(
    reads: Sequence[Coroutine[Any, Any, dict[int, ReadEntry]]],
) -> list[dict[int, ReadEntry]]:
    if len(reads) == 1:
        return [await reads[0]]
    return list(await asyncio.gather(*reads))


def _size(entry: LocatedEntry) -> int:
    return entry.entry_bytes if isinstance(entry, Undeliverable | EntryLocation) else len(entry)


def _cut(entries: dict[int, LocatedEntry], through: int, max_bytes: int) -> Range:
    """The entries up to `through`, the last entry that was looked up in every index, and at most up
    to the entry with which the bytes reach `max_bytes`."""
    kept: dict[int, LocatedEntry] = {}
    for entry_id in sorted(entries):
        if entry_id > through:
            break
        entry = kept[entry_id] = entries[entry_id]
        max_bytes -= _size(entry)
        if max_bytes <= 0:
            return Range(kept, entry_id)
    return Range(kept, through)


class FailedReadLog:
    """Logs reads of entries that cannot be delivered: one line at a ledger's 1st, 10th, 100th, ...
    failed read, with the number of failed reads."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def count(self, ledger_id: int, entry_id: int, why: str) -> None:
        """Count a read that could not deliver the entry; repeated reads count too."""
        if len(self._counts) >= BAD_LEDGERS_MAX:
            self._counts.clear()
        count = self._counts[ledger_id] = self._counts.get(ledger_id, 0) + 1
        if str(count).rstrip("0") == "1":
            text = "ledger %d: entry %d cannot be delivered: %s (%d such reads of the ledger)"
            _log.error(text, ledger_id, entry_id, why, count)
