"""A ledger directory with entry logs and an index and nothing else, for tests of reclaim."""

import asyncio
import random

from bookie_server.logs.entry_log import EntryLogs
from bookie_server.logs.scan import LogMap, read_map
from tests.kit.settings import with_settings
from tests.simulation.disk import Keep, SimDisk
from tests.simulation.index import SimIndex
from tests.unit.bookie_server.node import CONFIG, KIB, entry

SMALL_LOGS = with_settings(CONFIG, entry_log_bytes_max=64 * KIB)
PAYLOAD_BYTES = 1000
RECORD_BYTES = 48 + 64 + PAYLOAD_BYTES
ONE_LOG = 59  # so many entries fill a log


def text(ledger_id: int, entry_id: int) -> bytes:
    return entry(ledger_id, entry_id, bytes([(7 * ledger_id + entry_id) % 251]) * PAYLOAD_BYTES)


class LogStore:
    """One directory. What reclaim quarantined is in `quarantined`."""

    def __init__(self, seed: int = 0, disk: SimDisk | None = None) -> None:
        self.disk = disk or SimDisk(random.Random(seed))
        self.logs: EntryLogs
        self.index: SimIndex
        self.index_lock = asyncio.Lock()
        self.quarantined: dict[tuple[int, int], str] = {}

    async def start(self) -> "LogStore":
        self.logs = await EntryLogs.open(self.disk, SMALL_LOGS)
        self.index = await SimIndex.open(self.disk)
        return self

    async def crash(self, keep: Keep = "none") -> None:
        self.disk.crash(keep)
        self.index_lock = asyncio.Lock()
        await self.start()

    async def flush(self, *keys: tuple[int, int]) -> None:
        """As a flush does it."""
        async with self.index_lock:
            places = await self.logs.write((i, e, text(i, e)) for i, e in sorted(keys))
            await self.index.put(places)
            await self.index.sync()

    async def fill(self, *ledger_ids: int, count: int = ONE_LOG, first: int = 0) -> None:
        """Entries of these ledgers; what lies in full logs of it is sealed."""
        await self.flush(*((i, e) for i in ledger_ids for e in range(first, first + count)))
        await self.flush()

    async def delete(self, *ledger_ids: int) -> None:
        for ledger_id in ledger_ids:
            await self.index.delete_ledger(ledger_id)
        await self.index.sync()

    async def map(self, log_id: int) -> LogMap:
        found = await read_map(self.logs, self.disk, log_id)
        assert found is not None
        return found

    async def stored(self, ledger_id: int) -> list[int]:
        """The entries that the index knows; each is read and is what it was."""
        places = await self.index.range(ledger_id, 0, 1 << 40, 1 << 60)
        for place, found in zip(places, await self.logs.read(places), strict=True):
            assert bytes(found) == text(ledger_id, place.entry_id), (place, found)
        return [place.entry_id for place in places]

    def quarantine(self, ledger_id: int, entry_id: int, why: str) -> None:
        self.quarantined[ledger_id, entry_id] = why

    def files(self) -> list[str]:
        return [path for path in self.disk.paths() if path.startswith("entrylog/")]

    def names(self) -> list[str]:
        """The files of entry logs, without folder and leading zeros."""
        return [path.removeprefix("entrylog/").lstrip("0") for path in self.files()]
