"""An entry reader over logs on a simulated disk."""

import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

from bookie_server.logs.entry_log import EntryLogs
from bookie_server.storage.entry_reader import EntryReader
from bookie_server.storage.write_cache import WriteCache
from tests.kit.settings import with_settings
from tests.simulation.disk import SimDisk
from tests.simulation.index import SimIndex
from tests.simulation.loop import run
from tests.unit.bookie_server.node import CONFIG, KIB, entry

SMALL = with_settings(CONFIG, read_cache_bytes=256 * KIB, read_ahead_bytes=64 * KIB)


class Reading:
    """An EntryReader over one simulated directory; counts what its disk reads."""

    def __init__(self, config=SMALL):
        self.config = config
        self.cache = WriteCache(config.write_cache_bytes, 0)
        self.quarantined: list[tuple[int, int]] = []
        self.stores: list[SimpleNamespace] = []
        self.disk = SimDisk(random.Random(0))
        self.reads: list[tuple[int, int]] = []
        """(ledger, entry id) of what was read from the logs."""

    async def open(self) -> "Reading":
        self.stores = [await self.store(self.disk)]
        self.reader = EntryReader(
            self.cache,
            lambda _: self.stores,
            lambda ledger_id, entry_id, why: self.quarantined.append((ledger_id, entry_id)),
            self.config,
        )
        return self

    async def store(self, disk: SimDisk) -> SimpleNamespace:
        return SimpleNamespace(index=await SimIndex.open(disk), logs=await self.logs(disk))

    async def logs(self, disk: SimDisk) -> EntryLogs:
        logs = await EntryLogs.open(disk, self.config)
        read_run = logs.read_run

        async def counted(places):
            self.reads += [(place.ledger_id, place.entry_id) for place in places]
            return await read_run(places)

        logs.read_run = counted
        return logs

    async def reopen_logs(self) -> None:
        await self.stores[0].logs.close()
        self.stores[0].logs = await self.logs(self.disk)

    async def store_entries(self, *entries: tuple[int, int], payload: bytes = b"x", at: int = 0):
        """In the logs and the index of a directory, as by a flush of their own."""
        items = [(ledger, number, entry(ledger, number, payload)) for ledger, number in entries]
        places = await self.stores[at].logs.write(iter(items))
        await self.stores[at].index.put(places)
        return places

    async def read(self, first: int, last: int, ledger_id: int = 1, max_bytes: int = 1 << 20):
        return (await self.reader.read(ledger_id, range(first, last + 1), max_bytes)).entries

    def rot(self, path: str, position: int) -> None:
        self.disk.flip_bit(path, 8 * position)


def reading(test: Callable[[Reading], Awaitable[None]], config=SMALL) -> None:
    async def main() -> None:
        with_disk = await Reading(config).open()
        await test(with_disk)
        await with_disk.reader.close()

    run(main())
