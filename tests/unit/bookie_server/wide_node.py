"""A node with several journal and ledger directories."""

import asyncio
import random
from typing import Self

from bookie_server.api.status import Status
from bookie_server.config import StorageConfig
from bookie_server.storage.directories import Directories, JournalDirectory, LedgerDirectory
from tests.simulation.disk import SimDisk
from tests.simulation.index import SimIndex
from tests.unit.bookie_server.node import CONFIG, Node, entry

OK, ABSENT, LIMBO, IO_ERROR = Status.OK, Status.NO_SUCH_ENTRY, Status.LIMBO, Status.IO_ERROR


LEDGERS = range(1, 9)


class Wide(Node):
    """A node whose directories are named; those in `out` are not there at a start."""

    def __init__(self, journals: int = 1, ledgers: int = 2, config: StorageConfig = CONFIG) -> None:
        super().__init__(config)
        rng = random.Random(7)
        self.journals = {f"j{n}": SimDisk(rng) for n in range(journals)}
        self.ledgers = {f"d{n}": SimDisk(rng) for n in range(ledgers)}
        self.out: list[str] = []

    async def start(self) -> Self:
        ledgers = []
        for name, disk in self.ledgers.items():
            if name not in self.out:
                ledgers.append(LedgerDirectory(name, disk, await SimIndex.open(disk)))
        journals = [JournalDirectory(n, d) for n, d in self.journals.items() if n not in self.out]
        return await self.start_on(Directories(journals, ledgers))

    def die(self, keep="none"):
        self.bookie.abandon()
        for disk in (*self.journals.values(), *self.ledgers.values()):
            disk.crash(keep)

    async def stop_and_start(self) -> None:
        await self.bookie.stop()
        await self.start()

    def homes(self) -> dict[int, tuple[str, ...]]:
        states = self.storage.states()
        return {s.ledger_id: s.directories for s in states if s.ledger_id in LEDGERS}

    async def of_each(self, last: int) -> dict[int, set[Status]]:
        return {i: set(await self.statuses(i, 0, last)) for i in LEDGERS}


async def wide_node(journals=1, ledgers=2):
    """Ledgers 1 to 8 of two entries each, on both directories by their free space."""
    node = await Wide(journals, ledgers).start()
    await node.create_ledger(*LEDGERS)
    for ledger in LEDGERS:
        full = node.ledgers["d0" if ledger % 2 else "d1"]
        full.fill_up(1 << 30)
        await node.bookie.disks.look()
        assert await node.add(entry(ledger, 0), entry(ledger, 1)) == [OK, OK]
        full.empty_out()
    return node


async def flushed(node):
    await asyncio.sleep(CONFIG.flush_interval_s * 2 + 1)
