"""The sealed entry logs of one directory as reclaim knows them: their maps, and which are dead.

Always true: a ledger is called dead only while the index points to nothing of it and the node
takes nothing more for it, and it is asked again before a log goes because of that; a log whose map
cannot be read is left alone and tried again by the next pass.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from bookie_server.disk.interface import DiskFailed
from bookie_server.lanes import Pace
from bookie_server.logs.scan import LogMap, read_map, scan_for_map, write_map_file
from bookie_server.storage.directories import DirectoryStore

Lives = Callable[[int], bool]
"""Whether the node knows the ledger, and not as deleted: then nothing of it is dead."""
_DEAD_KEPT_MIN = 10_000
_log = logging.getLogger(__name__)


class StoreLogs:
    """Maps and dead ledgers of one directory."""

    def __init__(self, store: DirectoryStore, lives: Lives, pace: Pace) -> None:
        self.store = store
        self.maps: dict[int, LogMap] = {}
        self.dead: dict[int, None] = {}
        self._shares: dict[int, float] = {}  # of logs whose share has not changed since
        self.failures = 0
        self.removed = 0
        self.index_failed = False
        """What the index says may be gone after a crash: no log goes because of it."""
        self._lives = lives
        self._pace = pace
        self._dead_kept = 0
        self._looking = asyncio.Lock()

    async def look(self) -> None:
        """Get to know the logs that were sealed since the last look, and forget those that went.

        Raises DiskFailed when the index cannot be read."""
        async with self._looking:
            sealed = self.store.logs.sealed()
            self.maps = {log_id: self.maps[log_id] for log_id in sealed if log_id in self.maps}
            for log_id in sealed:
                if log_id not in self.maps and (found := await self._map(log_id)) is not None:
                    await self._find_dead(found)
                    self.maps[log_id] = found
            self._forget_dead()

    async def shares(self) -> Mapping[int, float]:
        """The live share of each log; the loop is free between two that are computed."""
        self._shares = {i: share for i, share in self._shares.items() if i in self.maps}
        for log_id, log_map in list(self.maps.items()):
            if log_id not in self._shares:
                self._shares[log_id] = _live_share(log_map, self.dead)
                await asyncio.sleep(0)
        return dict(self._shares)

    def found_dead(self, ledger_id: int) -> None:
        """The index points to nothing of the ledger, and nothing more is taken for it."""
        if ledger_id not in self.dead:
            self.dead[ledger_id] = None
            self._shares = {}

    async def remove_dead_logs(self) -> int:
        """Remove the logs in which nothing lives; returns the bytes freed."""
        freed = 0
        if self.index_failed:
            return 0
        for log_id, share in (await self.shares()).items():
            found = self.maps.get(log_id)
            if share or found is None:
                continue
            try:
                if await self._is_dead(found):
                    freed += await self._remove(found)
            except DiskFailed as error:
                self._gave_up(log_id, error)
        return freed

    async def _map(self, log_id: int) -> LogMap | None:
        try:
            found = await read_map(self.store.logs, self.store.disk, log_id)
            return found if found is not None else await self._scan(log_id)
        except DiskFailed as error:
            self._gave_up(log_id, error)
            return None

    async def _scan(self, log_id: int) -> LogMap:
        store = self.store
        async with store.index_lock:
            await store.index.sync()  # what it says now it says after a crash too
        scanned = await scan_for_map(store.logs, store.index, log_id, self._pace)
        if scanned.map.whole:
            try:
                await write_map_file(store.disk, scanned.map)
            except DiskFailed as error:  # no space, say: this run knows it all the same
                _log.warning("the map of log %d is not kept: %s", log_id, error)
        else:
            _log.error("log %d is damaged: %s ...", log_id, scanned.damage[0])
        return scanned.map

    async def _find_dead(self, found: LogMap) -> None:
        for ledger_id in found.ledger_ids:
            if ledger_id in self.dead or self._lives(ledger_id):
                continue
            if await self.store.index.last(ledger_id) is None:
                self.found_dead(ledger_id)

    def _forget_dead(self) -> None:
        """Those that are in no log any more, once they are many."""
        if len(self.dead) > 2 * self._dead_kept + _DEAD_KEPT_MIN:
            present = {i: None for found in self.maps.values() for i in found.ledger_ids}
            self.dead = {ledger_id: None for ledger_id in self.dead if ledger_id in present}
            self._dead_kept = len(self.dead)

    async def _is_dead(self, found: LogMap) -> bool:
        """Asked of the index itself, ledger by ledger."""
        for ledger_id in found.ledger_ids:
            if self._lives(ledger_id) or await self.store.index.last(ledger_id) is not None:
                self.dead.pop(ledger_id, None)
                self._shares = {}
                return False
        return True

    async def _remove(self, found: LogMap) -> int:
        logs = self.store.logs
        if found.log_id not in logs.sealed():
            return 0
        del self.maps[found.log_id]
        if not found.whole:
            await logs.set_aside(found.log_id)
            return 0
        await logs.remove(found.log_id)
        self.removed += 1
        return found.file_bytes

    def _gave_up(self, log_id: int, error: DiskFailed) -> None:
        self.failures += 1
        _log.warning("reclaim leaves log %d alone for now: %s", log_id, error)


def _live_share(found: LogMap, dead: Mapping[int, None]) -> float:
    """The part of a log's records that belongs to living ledgers; 0 for a log without any."""
    total = found.record_bytes
    return found.live_bytes(dead) / total if total else 0.0
