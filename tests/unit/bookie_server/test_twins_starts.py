"""Starts of a bookie: told from those of a process on a copy of its directories."""

import asyncio
import random

import pytest

from bookie_server.disk import starts
from bookie_server.disk.identity import WrongDisks
from bookie_server.disk.line_file import BadLine
from bookie_server.disk.starts import STARTS_KEPT, Starts
from bookie_server.serve import twin
from bookie_server.serve.twin import END_DELAY_S, TwinWatch
from spark_ledger.metadata import paths
from tests.simulation.disk import SimDisk
from tests.simulation.loop import current, run
from tests.simulation.store import SimStore

ID = "99999999-8888-4777-8666-555555555555"


class Process:
    """A process of the bookie on some directories."""

    def __init__(self, store, disks, name):
        self.session = store.session(name)
        self.disks = disks
        self.name = name
        self.drawn = 0
        self.doubted_s = None
        self.running = None

    def draw(self):
        self.drawn += 1
        return f"{self.name}{self.drawn}"

    async def start(self):
        own = await starts.read(self.disks, ID)
        self.watch = TwinWatch(self.session, ID, self.disks, own, self.draw)
        return await self.watch.begin()

    def run(self):
        self.running = asyncio.ensure_future(self.watch.run(self.doubt))

    async def doubt(self):
        self.doubted_s = current().time()


def scenario(act):
    async def main():
        store = SimStore(random.Random(3))
        await store.session("founder").create(paths.BOOKIES_KNOWN, parents=True)
        disks = [SimDisk(store.rng), SimDisk(store.rng)]
        await act(store, disks)

    run(main(), seed=1)


async def copied(disks, rng):
    """The same files on other disks."""
    others = [SimDisk(rng) for _ in disks]
    await starts.FILE.write(others, await starts.read(disks, ID))
    return others


def test_starts_one_after_the_other_are_the_bookies_own():
    async def act(store, disks):
        for number in range(STARTS_KEPT + 5):
            process = Process(store, disks, f"p{number}-")
            assert not await process.start()
            process.run()
            if number > STARTS_KEPT + 2:
                await asyncio.sleep(100)
            assert not process.running.done()
            process.running.cancel()
            for disk in disks:
                disk.crash("none")
        assert len((await starts.read(disks, ID)).tokens) == STARTS_KEPT

    scenario(act)


def test_an_original_that_was_paused_and_the_process_on_the_copy_both_end():
    """Neither denies anything from the moment it knows."""

    async def act(store, disks):
        original = Process(store, disks, "original")
        await original.start()
        beside = Process(store, await copied(disks, store.rng), "copy")
        assert not await beside.start(), "it cannot know: the token on the copy is the newest"
        beside.run()
        await asyncio.sleep(10)
        assert beside.doubted_s is None
        original.run()  # it goes on
        met_s = current().time()
        await asyncio.sleep(2 * END_DELAY_S)
        for process in (original, beside):
            with pytest.raises(WrongDisks, match="another process serves as this bookie"):
                process.running.result()
            assert process.doubted_s - met_s < 1
        assert twin.decode(store.peek(paths.bookie_start(ID)).value).twin
        for process in (original, beside):
            again = Process(store, process.disks, f"{process.name}-again-")
            await again.start()
            assert not twin.decode(store.peek(paths.bookie_start(ID)).value).twin

    scenario(act)


def test_an_original_that_starts_after_the_process_on_the_copy_ended_doubts_everything():
    """What that one acknowledged is not here."""

    async def act(store, disks):
        await Process(store, disks, "original").start()
        await Process(store, await copied(disks, store.rng), "copy").start()
        assert await Process(store, disks, "original-again-").start()
        alone = Process(store, disks, "once-more-")
        assert not await alone.start(), "its own start was the last one"
        alone.run()
        await asyncio.sleep(100)
        assert not alone.running.done()
        alone.running.cancel()

    scenario(act)


def test_directories_of_an_older_backup_doubt_everything():
    async def act(store, disks):
        await Process(store, disks, "a").start()
        backup = await copied(disks, store.rng)
        await Process(store, disks, "b").start()
        assert await Process(store, backup, "c").start()

    scenario(act)


def test_an_older_copy_of_the_store_names_a_start_of_before():
    async def act(store, disks):
        await Process(store, disks, "a").start()
        older = store.peek(paths.bookie_start(ID))
        process = Process(store, disks, "b")
        await process.start()
        await process.session.set(paths.bookie_start(ID), older.value, 1)
        process.run()
        await asyncio.sleep(100)
        assert not process.running.done()
        process.running.cancel()
        assert not await Process(store, disks, "c").start()

    scenario(act)


def test_one_directory_that_was_away_changes_nothing():
    async def act(store, disks):
        await Process(store, disks, "a").start()
        await Process(store, disks[:1], "b").start()
        assert not await Process(store, disks, "c").start()

    scenario(act)


def test_the_first_start_of_a_version_that_keeps_tokens_doubts_nothing():
    async def act(store, disks):
        assert not await Process(store, disks, "a").start()

    scenario(act)


def test_the_bytes_of_the_file_and_damage():
    data = starts.FILE.encode(Starts(ID, {7: "ab", 9: "cd"}))
    assert data == f"spark-ledger-starts 1 {ID} 7:ab 9:cd ".encode() + data[-9:]
    assert starts.FILE.decode(data) == Starts(ID, {7: "ab", 9: "cd"})
    for at in range(len(data)):
        harmed = bytearray(data)
        harmed[at] ^= 1
        with pytest.raises(BadLine):
            starts.FILE.decode(bytes(harmed))
