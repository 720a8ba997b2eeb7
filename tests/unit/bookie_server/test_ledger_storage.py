"""When a flush begins: at a full half of the cache, at the interval, at both at once."""

import asyncio
import random

import pytest

from bookie_server.storage.directories import Directories, JournalDirectory, LedgerDirectory
from bookie_server.storage.storage import LedgerStorage
from tests.simulation.disk import SimDisk
from tests.simulation.index import SimIndex
from tests.simulation.loop import current, run
from tests.unit.bookie_server.node import CONFIG, KIB, entry


@pytest.mark.parametrize("puts", ["before", "after"])
def test_a_half_that_fills_up_when_the_interval_ends_is_flushed_once(puts):
    """`puts` come in the step of the loop in which the timer fires, before or after it."""

    async def main():
        disk = SimDisk(random.Random(0))
        directory = LedgerDirectory("d", disk, await SimIndex.open(disk))
        journal = JournalDirectory("j", SimDisk(random.Random(1)))
        storage, _ = await LedgerStorage.open(Directories([journal], [directory]), CONFIG)

        def fill():
            for e in range(4):
                storage.put(1, e, entry(1, e, bytes(60 * KIB)))

        at = current().time() + CONFIG.flush_interval_s
        if puts == "before":
            current().call_at(at, fill)
        running = asyncio.ensure_future(storage.run())
        await asyncio.sleep(0)
        if puts == "after":
            current().call_at(at, fill)
        await asyncio.sleep(2 * CONFIG.flush_interval_s + 1)
        assert not running.done()
        assert storage.flushes == 2
        assert sorted(await storage.reader.headers(1, range(4))) == [0, 1, 2, 3]
        assert not storage.has_unflushed
        running.cancel()

    run(main())
