"""The scrub of one node: every sealed entry log is read once in scrub_interval_s, so that damage is
found while other copies exist.

Always true:
- the scrub reads at most scrub_bytes_per_s a second, and opens files for itself, so it evicts no
  entry from the read cache and delays no reader;
- an entry that the index points to and that cannot be read from the log is quarantined. The scrub
  logs one line for each log with such entries, and goes on with the next log;
- the scrub skips a log that is removed meanwhile. After a restart it begins with the oldest log;
- once after a start it looks for missing logs: it reads the whole index, at LOCATIONS_PER_S, and
  quarantines a ledger only if the index, read again, still has a location in the missing log.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from bookie_server.config import StorageConfig
from bookie_server.disk.interface import DiskFailed, NoSuchFile
from bookie_server.lanes import Pace
from bookie_server.logs.entry_log import BadEntryLog, runs
from bookie_server.logs.index import IndexDamaged, Location
from bookie_server.logs.scan import CHUNK_BYTES, locations_in, read_map, scan
from bookie_server.reclaim.compact import Quarantine
from bookie_server.storage.directories import DirectoryStore

LOCATIONS_PER_S = 200_000  # of the index, in the look for missing logs
_IDLE_S = 3600.0
_PAGE_BYTES = 4 << 20
_ID_MAX = 2**63 - 1
_log = logging.getLogger(__name__)


class Scrub:
    """The scrub of one node; `stores` gives the directories that live."""

    def __init__(
        self,
        stores: Callable[[], Sequence[DirectoryStore]],
        quarantine: Quarantine,
        config: StorageConfig,
    ) -> None:
        self._stores = stores
        self._quarantine = quarantine
        self._config = config
        self._pace = Pace(config.scrub_bytes_per_s)
        self.passes = 0
        self.read_bytes = 0
        self.bad_entries = 0

    async def run(self) -> None:
        """Look for missing logs, then make one pass in each interval, until cancelled."""
        await self.find_missing()
        while True:
            start_s = asyncio.get_running_loop().time()
            await self.once(self._config.scrub_interval_s)
            pass_s = asyncio.get_running_loop().time() - start_s
            left_s = self._config.scrub_interval_s - pass_s
            await asyncio.sleep(max(1.0, min(left_s, _IDLE_S)))

    async def find_missing(self) -> None:
        """Look for missing logs in each directory; skip a directory whose index cannot be read."""
        for store in list(self._stores()):
            try:
                await _find_missing_logs(store, self._quarantine)
            except IndexDamaged:
                continue  # the index's damage is logged elsewhere
            except DiskFailed as error:
                _log.warning("the look for missing entry logs was given up: %s", error)

    async def once(self, interval_s: float) -> None:
        """Make one pass: read every sealed log, in `interval_s`, or longer if the limit on bytes a
        second demands it."""
        for store in list(self._stores()):
            log_ids = store.logs.sealed_ids()
            sizes = {log_id: await _size(store, log_id) for log_id in log_ids}
            limit = self._config.scrub_bytes_per_s
            total_bytes = sum(sizes.values()) or CHUNK_BYTES
            rate = min(float(limit), total_bytes / max(interval_s, 1e-9))
            for log_id in log_ids:
                start_s = asyncio.get_running_loop().time()
                await self._scrub(store, log_id)
                log_s = asyncio.get_running_loop().time() - start_s
                await asyncio.sleep(max(0.0, sizes[log_id] / rate - log_s))
        self.passes += 1

    async def _scrub(self, store: DirectoryStore, log_id: int) -> None:
        """Scrub one log; a failure is logged and not raised."""
        try:
            is_whole = await self._is_whole(store, log_id)
        except DiskFailed as error:
            _log.warning("the scrub of log %d met %s", log_id, error)
            is_whole = False
        try:
            if not is_whole and log_id in store.logs.sealed_ids():
                await self._find_bad_entries(store, log_id)
        except DiskFailed as error:
            _log.error("the scrub cannot find the lost entries of log %d: %s", log_id, error)

    async def _is_whole(self, store: DirectoryStore, log_id: int) -> bool:
        if log_id not in store.logs.sealed_ids():
            return True
        log_map = await read_map(store.logs, store.disk, log_id)
        is_whole, record_count = True, 0
        file = await store.logs.open_log(log_id)
        try:
            async for chunk in scan(file, log_id, log_map.records_end if log_map else file.end):
                is_whole = is_whole and not chunk.damage
                record_count += len(chunk.records)
                self.read_bytes += chunk.size
                await self._pace.spend(chunk.size)
                if log_id not in store.logs.sealed_ids():
                    return True
        finally:
            await file.close()
        expected_count = log_map.entries if log_map and log_map.has_footer else record_count
        return is_whole and record_count == expected_count

    async def _find_bad_entries(self, store: DirectoryStore, log_id: int) -> None:
        """Read each entry of a damaged log that the index points to, and quarantine each entry that
        cannot be read."""
        locations = sorted(
            await locations_in(store.index, log_id), key=lambda location: location.position
        )
        bad_counts: dict[int, int] = {}  # by ledger
        first_text = ""
        try:
            for run in runs(locations, CHUNK_BYTES):
                for location, entry in zip(run, await store.logs.read(run), strict=True):
                    why = str(entry) if isinstance(entry, BadEntryLog | DiskFailed) else ""
                    if why and await self._quarantine_if_current(store, location, why):
                        bad_counts[location.ledger_id] = bad_counts.get(location.ledger_id, 0) + 1
                        text = f"{location.ledger_id}:{location.entry_id}: {why}"
                        first_text = first_text or text
                await self._pace.spend(sum(location.entry_bytes for location in run))
        finally:
            if bad_counts:
                text = "scrub: log %d: %d entries of %d ledgers are damaged, the first is %s"
                _log.error(text, log_id, sum(bad_counts.values()), len(bad_counts), first_text)

    async def _quarantine_if_current(
        self, store: DirectoryStore, location: Location, why: str
    ) -> bool:
        """Quarantine the ledger, if the index still points to the bad record. Returns whether it
        does."""
        if await store.index.get(location.ledger_id, location.entry_id) != location:
            return False
        self.bad_entries += 1
        self._quarantine(location.ledger_id, location.entry_id, why)
        return True


async def _size(store: DirectoryStore, log_id: int) -> int:
    try:
        file = await store.logs.open_log(log_id)
    except DiskFailed:
        return 0
    await file.close()
    return file.end


async def _find_missing_logs(store: DirectoryStore, quarantine: Quarantine) -> None:
    """Raises DiskFailed."""
    counts: dict[int, int] = {}  # by missing log: how many ledgers have an entry in it
    for ledger_id in await store.index.ledger_ids():
        missing_log_ids: dict[int, None] = {}
        first = 0
        while page := await store.index.range(ledger_id, first, _ID_MAX, _PAGE_BYTES):
            first = page[-1].entry_id + 1
            for location in {location.log_id: location for location in page}.values():
                if location.log_id not in missing_log_ids and await _is_missing(store, location):
                    why = f"log {location.log_id} is not there"
                    missing_log_ids[location.log_id] = None
                    quarantine(ledger_id, location.entry_id, why)
            await asyncio.sleep(len(page) / LOCATIONS_PER_S)
        for log_id in missing_log_ids:
            counts[log_id] = counts.get(log_id, 0) + 1
    for log_id, count in counts.items():
        _log.error("entry log %d is not there: %d ledgers have entries in it", log_id, count)


async def _is_missing(store: DirectoryStore, location: Location) -> bool:
    """Whether the log is missing on disk. The log counts as missing only if the index, read again
    afterwards, still has the location: it may just have been compacted."""
    if location.log_id in store.logs.sealed_ids():
        return False
    (entry,) = await store.logs.read_run([location])
    if not isinstance(entry, NoSuchFile):
        return False
    return await store.index.get(location.ledger_id, location.entry_id) == location
