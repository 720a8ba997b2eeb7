"""Journal segments with what no crash does, cut short or unreadable: never a torn write, and
nothing of them is denied."""

import asyncio
import random

import pytest

from bookie_server.api.status import Status
from bookie_server.disk.interface import DiskFailed
from bookie_server.journal.format import (
    BLOCK_BYTES,
    Position,
    Record,
    RecordKind,
)
from bookie_server.journal.scan import Replay
from bookie_server.journal.writer import FOLDER, MAKING_SUFFIX, Journal, segment_ids, segment_path
from bookie_server.logs.index import EVERY_LEDGER
from tests.kit.nodes import on_a_node
from tests.simulation.disk import SimDisk
from tests.simulation.loop import run
from tests.unit.bookie_server.limbo_node import OPEN, RECOVERING, with_ledgers_in_all_states
from tests.unit.bookie_server.node import CONFIG, KIB, entry
from tests.unit.bookie_server.wide_node import Wide

OK, ABSENT, LIMBO = Status.OK, Status.NO_SUCH_ENTRY, Status.LIMBO
NOTHING, START = Position(0, 0), Position(1, BLOCK_BYTES)


def lac(number: int) -> Record:
    return Record(RecordKind.LAC, 7, number, b"", 0)


async def opened(disk: SimDisk, file_id: int = 1) -> Journal:
    await disk.make_folder(FOLDER)
    return await Journal.open(disk, CONFIG, file_id, NOTHING)


async def ten_batches(disk: SimDisk) -> None:
    """From block 1 on, one block each, in the segment that is used when the power goes; the next
    one is made."""
    journal = await opened(disk)
    for number in range(10):
        await journal.append([lac(number)])
    await asyncio.sleep(1)
    journal.abandon()
    disk.crash("none")


async def replayed(disk: SimDisk, mark: Position | None = START) -> tuple[list[int], Replay]:
    replay = Replay(disk, mark)
    numbers = [record.entry_id async for records in replay.records() for record in records]
    return numbers, replay


@pytest.mark.parametrize("left_blocks", [0, 1, 6, 11, 100, 127])
def test_a_segment_that_is_shorter_than_it_was_made_is_damage_of_nobody_knows_whom(left_blocks):
    async def main():
        disk = SimDisk()
        await ten_batches(disk)
        disk.truncate(segment_path(1), left_blocks * BLOCK_BYTES)
        numbers, replay = await replayed(disk)
        assert numbers == list(range(min(10, max(0, left_blocks - 1))))
        assert [(s.position.file_id, s.ledger_id) for s in replay.damage] == [(1, None)]
        assert not replay.torn_writes

    run(main())


@pytest.mark.parametrize("left_bytes", [0, 10, 100])
def test_a_segment_without_a_header_is_damage_also_when_it_is_the_last(left_bytes):
    async def main():
        disk = SimDisk()
        await ten_batches(disk)
        disk.truncate(segment_path(2), left_bytes)
        numbers, replay = await replayed(disk)
        assert numbers == list(range(10))
        assert [s.position.file_id for s in replay.damage] == [2]

    run(main())


def test_a_segment_of_which_only_zeros_are_left_is_damage():
    async def main():
        disk = SimDisk()
        await ten_batches(disk)
        inode = disk.inode_of(segment_path(1))
        inode.cache[:] = bytes(len(inode.cache))
        _, replay = await replayed(disk)
        assert [s.why for s in replay.damage] == ["the segment has lost its header"]

    run(main())


def test_a_smaller_segment_made_for_lack_of_space_is_whole():
    async def main():
        disk = SimDisk()
        disk.faults.bytes_max = CONFIG.journal_bytes_max + 300 * KIB
        journal = await opened(disk)
        await asyncio.sleep(1)
        journal.abandon()
        disk.crash("none")
        size = (await disk.open(segment_path(2))).end
        assert size < CONFIG.journal_bytes_max
        assert not (await replayed(disk))[1].damage
        disk.truncate(segment_path(2), size - 1)
        assert [s.position.file_id for s in (await replayed(disk))[1].damage] == [2]

    run(main())


@pytest.mark.parametrize("keep", ["none", "random", "torn", "all"])
@pytest.mark.parametrize("after_s", [0.0, 0.0005, 0.002, 0.003, 0.004, 0.006])
def test_a_segment_that_a_crash_left_half_made_is_no_damage_and_its_number_is_used(keep, after_s):
    async def main():
        for seed in range(5):
            disk = SimDisk(random.Random(seed))
            for _ in range(4):  # a crash at each start
                await disk.make_folder(FOLDER)
                _, replay = await replayed(disk, None)
                assert not replay.damage
                assert not replay.torn_writes
                made = asyncio.ensure_future(
                    opened(disk, max([0, *replay.file_ids]) + 1),
                )
                await asyncio.sleep(after_s)
                if made.done():
                    made.result().abandon()
                made.cancel()
                disk.crash(keep)
            ids = await segment_ids(disk)
            assert ids == list(range(1, len(ids) + 1))
            journal = await opened(disk, len(ids) + 1)
            await asyncio.sleep(1)
            assert not [path for path in disk.paths() if path.endswith(MAKING_SUFFIX)]
            journal.abandon()

    run(main())


def test_no_segment_is_made_in_the_place_of_another():
    async def main():
        disk = SimDisk()
        await ten_batches(disk)
        with pytest.raises(DiskFailed, match="exists"):
            await opened(disk, 1)

    run(main())


def make_unreadable(disk: SimDisk, path: str, first: int = 0, last: int = 127) -> None:
    for block in range(first, last + 1):
        disk.make_unreadable(path, block * BLOCK_BYTES)


@pytest.mark.parametrize("first", [1, 6, 10, 11, 60])
def test_blocks_that_cannot_be_read_are_damage_and_no_torn_write(first):
    async def main():
        disk = SimDisk()
        await ten_batches(disk)
        make_unreadable(disk, segment_path(1), first)
        numbers, replay = await replayed(disk)
        assert numbers == list(range(min(10, first - 1)))
        assert [(s.position.file_id, s.ledger_id) for s in replay.damage] == [(1, None)]
        assert not replay.torn_writes

    run(main())


def test_blocks_before_the_mark_that_cannot_be_read_are_no_loss():
    async def main():
        disk = SimDisk()
        await ten_batches(disk)
        make_unreadable(disk, segment_path(1), 0, 4)
        numbers, replay = await replayed(disk, Position(1, 5 * BLOCK_BYTES))
        assert numbers == list(range(4, 10))
        assert not replay.damage

    run(main())


@pytest.mark.parametrize("harm", ["unreadable", "cut", "emptied"])
def test_nothing_of_a_harmed_segment_is_denied_and_it_is_kept(harm):
    async def test(node):
        await asyncio.sleep(11)  # flushed: the mark is past it
        for number in range(2, 22):
            assert await node.add(entry(OPEN, number)) == [OK]
        assert await node.fence(RECOVERING) is OK
        node.die("all")
        disk, path = node.journal_disk, segment_path(1)
        if harm == "unreadable":
            make_unreadable(disk, path)
        else:
            disk.truncate(path, 0 if harm == "emptied" else disk.content(path).rindex(b"SLJB"))
        node.store.stall(3.0)
        await node.start()
        assert node.storage.state(EVERY_LEDGER).limbo == "lost"
        assert set(await node.statuses(OPEN, 0, 22)) <= {OK, LIMBO}
        assert await node.add(entry(RECOVERING, 2)) != [OK]
        assert path.replace(".journal", ".damaged") in disk.paths()

    on_a_node(test, with_ledgers_in_all_states())


def test_a_journal_whose_reads_hang_at_a_start_is_left_out_in_time():
    async def main():
        node = await Wide(2, 1).start()
        await node.create_ledger(*range(1, 9))
        for ledger in range(1, 9):
            assert await node.add(entry(ledger, 0)) == [OK]
        node.die("all")
        node.journals["j1"].faults.read_s = (1e9, 1e9)
        await asyncio.wait_for(node.start(), 10 * CONFIG.disk_hang_s)
        assert list(node.storage.failures) == ["j1"]
        assert {(await node.statuses(i, 0, 0))[0] for i in range(1, 9)} == {OK, LIMBO}

    run(main(), time_max_s=1e12)
