"""A direct log over a simulated disk."""

import asyncio
import random

from bookie_server.disk.interface import DiskFailed
from bookie_server.logs.direct_log import DirectLog
from bookie_server.logs.entry_log import EntryLogs
from bookie_server.logs.index import IndexChanges, Location, encode_log_mark, log_key
from bookie_server.storage.directories import DirectoryStore, LedgerDirectory
from tests.kit.settings import with_settings
from tests.simulation.disk import SimDisk
from tests.simulation.index import SimIndex
from tests.unit.bookie_server.node import CONFIG, KIB, entry

LARGE = 10 * KIB
SETTINGS = with_settings(
    CONFIG,
    journal_batch_bytes_max=64 * KIB,
    entry_log_bytes_max=100 * KIB,
)


def text(ledger_id: int, entry_id: int) -> bytes:
    return entry(ledger_id, entry_id, bytes([(7 * ledger_id + entry_id) % 251]) * LARGE)


def some(ledger_id: int, *entry_ids: int) -> list[tuple[int, int, bytes]]:
    return [(ledger_id, each, text(ledger_id, each)) for each in entry_ids]


FIRST = 4096  # where the first record of a log begins


class Rig:
    """A directory's disk, its logs and its direct log."""

    def __init__(self) -> None:
        self.disk = SimDisk(random.Random(3))
        self.disk.faults.sync_s = (1.0, 1.0)
        self.logs: EntryLogs
        self.index: SimIndex
        self.direct_log: DirectLog
        self.store: DirectoryStore
        self.failures: list[DiskFailed] = []

    async def start(self) -> "Rig":
        self.logs = await EntryLogs.open(self.disk, SETTINGS)
        self.index = await SimIndex.open(self.disk)
        self.direct_log = DirectLog(self.disk, self.logs, self.index, SETTINGS)
        self.direct_log.on_failure = self.failures.append
        directory = LedgerDirectory("d0", self.disk, self.index)
        self.store = DirectoryStore(directory, self.logs, self.direct_log)
        return self

    async def crash(self) -> None:
        self.direct_log.abandon()
        self.disk.crash("none")
        await self.start()

    async def flush(self, places: list[Location], puts: int | None = None) -> None:
        """As a flush that began after so many puts, by default after all."""
        count = self.direct_log.puts if puts is None else puts
        await self.store.write(iter(()), IndexChanges([], []), places, count)

    async def marks(self) -> dict[int, int]:
        """As a start would find them."""
        return await self.index.marked_logs()

    def is_marked(self, log_id: int, position: int) -> bool:
        """Whether the mark would survive the worst crash."""
        record = log_key(log_id) + encode_log_mark(position)
        durable = [self.disk.durable(path) for path in self.disk.paths() if "index/" in path]
        return any(record in each for each in durable)

    def put(self, ledger_id: int, *entry_ids: int) -> "asyncio.Future[list[Location]]":
        return self.direct_log.put(ledger_id, some(ledger_id, *entry_ids))

    async def found(self, places: list[Location]) -> list[tuple[int, int]]:
        """Which entries lie there, each as it was put."""
        found = await self.logs.read(places)
        for place, each in zip(places, found, strict=True):
            assert bytes(each) == text(place.ledger_id, place.entry_id)
        return [place[:2] for place in places]

    @property
    def log_files(self) -> list[str]:
        return [path for path in self.disk.paths() if path.endswith(".log")]
