"""Ledgers that are acknowledged before the sync: what that may cost, and what it may not."""

import asyncio
import random

import pytest

from bookie_server.api.status import Meaning, Status, meaning
from bookie_server.disk.interface import DiskFailed
from bookie_server.journal.format import BLOCK_BYTES, Position, Record, RecordKind
from bookie_server.journal.scan import Ending
from bookie_server.journal.writer import JournalFailed, segment_path
from bookie_server.lanes import Lane
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord
from tests.kit.nodes import on_a_node
from tests.simulation.disk import SimDisk, SimFile
from tests.simulation.loop import run
from tests.unit.bookie_server.journal_rig import note, opened, replayed
from tests.unit.bookie_server.node import CONFIG, ID, KIB, OK, entry, with_two_ledgers

PAGE_CACHE = Lane.PAGE_CACHE


def an_entry(number, length=100):
    data = entry(1, number, bytes(length))
    return Record(RecordKind.ENTRY, 1, number, data, int.from_bytes(data[52:56], "little"))


async def settled(disk):
    journal = await opened(disk)
    await asyncio.sleep(1)  # the next segment is made
    return journal


def test_an_entry_is_acknowledged_when_written_and_synced_soon_after():
    async def main():
        disk = SimDisk()
        journal = await settled(disk)
        syncs, synced = disk.syncs, journal.synced
        await journal.append([an_entry(0)], PAGE_CACHE)
        await journal.append([an_entry(1)], PAGE_CACHE)
        assert (disk.syncs, journal.synced) == (syncs, synced)
        await asyncio.sleep(CONFIG.page_cache_sync_s + 0.1)
        assert disk.syncs == syncs + 1
        assert journal.synced == Position(1, 3 * BLOCK_BYTES)
        journal.abandon()
        disk.crash("none")
        assert (await replayed(disk))[0] == [0, 1]

    run(main())


def test_a_stream_of_such_entries_is_synced_once_in_its_time():
    async def main():
        disk = SimDisk()
        journal = await settled(disk)
        syncs = disk.syncs
        for number in range(40):
            await journal.append([an_entry(number)], PAGE_CACHE)
            assert journal.synced.offset >= (number - 10) * BLOCK_BYTES
            await asyncio.sleep(CONFIG.page_cache_sync_s / 10)
        assert 2 <= disk.syncs - syncs <= 5

    run(main())


def test_such_entries_are_synced_in_time_though_there_is_always_a_next_batch(monkeypatch):
    written = SimFile.append

    async def slow(file, buffers, *, sync=False):
        await asyncio.sleep(0.02)
        return await written(file, buffers, sync=sync)

    async def main():
        disk = SimDisk()
        journal = await settled(disk)
        monkeypatch.setattr(SimFile, "append", slow)
        syncs = disk.syncs
        writing = [journal.append([an_entry(0)], PAGE_CACHE)]
        for number in range(1, 200):  # the next is always there before the last is written
            await asyncio.sleep(0.01)
            writing.append(journal.append([an_entry(number)], PAGE_CACHE))
        await asyncio.gather(*writing)
        seconds = 200 * 0.01
        assert disk.syncs - syncs >= int(seconds / CONFIG.page_cache_sync_s) - 1
        assert journal.synced > Position(1, BLOCK_BYTES)

    run(main())


@pytest.mark.parametrize("what", ["fence", "ledger", "lac", "synced entry", "barrier", "recovery"])
def test_everything_else_is_synced_with_all_that_was_written_before_it(what):
    async def main():
        disk = SimDisk()
        journal = await settled(disk)
        await journal.append([an_entry(0)], PAGE_CACHE)
        kinds = {"fence": RecordKind.FENCE, "lac": RecordKind.LAC}
        if what in kinds:
            await journal.append([Record(kinds[what], 2, 5, b"", 0)])
        elif what == "recovery":
            await journal.append([an_entry(1)], Lane.RECOVERY)
        else:
            records = {"ledger": [note(1)], "barrier": []}
            await journal.append(records.get(what, [an_entry(1)]))
        journal.abandon()
        disk.crash("none")
        found, replay = await replayed(disk)
        assert found[0] == 0
        assert len(found) == (1 if what == "barrier" else 2)
        assert not replay.torn_writes

    run(main())


def test_a_batch_is_written_without_sync_only_if_it_holds_nothing_else():
    async def main():
        disk = SimDisk()
        journal = await settled(disk)
        first = journal.append([an_entry(0)], PAGE_CACHE)
        second = journal.append([note(1)])
        await first  # in one batch with the second
        assert second.done()
        assert journal.synced == Position(1, 2 * BLOCK_BYTES)

    run(main())


@pytest.mark.parametrize("seed", range(60))
def test_what_was_only_written_is_torn_by_a_power_loss_and_never_damage(seed):
    async def main():
        rng = random.Random(seed)
        disk = SimDisk(rng)
        journal = await settled(disk)
        promised = []
        for number in range(rng.randrange(1, 60)):
            lane = PAGE_CACHE if rng.random() < 0.9 else Lane.BULK
            await journal.append([an_entry(number, rng.choice([100, 9000, 30_000]))], lane)
            if lane is Lane.BULK:
                promised = list(range(number + 1))
        at_least = journal.synced
        journal.abandon()
        disk.crash("random")
        numbers, replay = await replayed(disk)
        assert not replay.damage
        assert numbers[: len(promised)] == promised
        assert all(torn.position >= at_least for torn in replay.torn_writes)
        assert replay.ending is (Ending.TORN if replay.torn_writes else Ending.UNCLEAN)

    run(main())


def test_rot_below_a_late_sync_is_damage_when_a_later_batch_vouches_for_it():
    async def main():
        disk = SimDisk()
        journal = await settled(disk)
        await journal.append([an_entry(0)], PAGE_CACHE)
        await asyncio.sleep(CONFIG.page_cache_sync_s + 0.1)
        await journal.append([an_entry(1)], PAGE_CACHE)
        journal.abandon()
        disk.flip_bit(segment_path(1), 8 * (BLOCK_BYTES + 128 + 70))
        numbers, replay = await replayed(disk)
        assert numbers == [1]
        assert [suspect.ledger_id for suspect in replay.damage] == [1]

    run(main())


def test_a_failed_late_sync_is_final():
    async def main():
        disk = SimDisk()
        journal = await settled(disk)
        await journal.append([an_entry(0)], PAGE_CACHE)
        disk.faults.sync_fails = 1
        with pytest.raises(DiskFailed):
            await asyncio.wait_for(journal.task, 2 * CONFIG.page_cache_sync_s)
        with pytest.raises(JournalFailed):
            await journal.append([an_entry(1)], PAGE_CACHE)

    run(main())


def test_close_syncs_and_ends_the_task_that_would():
    async def main():
        disk = SimDisk()
        journal = await settled(disk)
        await journal.append([an_entry(0)], PAGE_CACHE)
        await journal.close()
        assert journal.task.done()
        disk.crash("none")
        numbers, replay = await replayed(disk)
        assert numbers == [0, -1]
        assert replay.ending is Ending.CLEAN

    run(main())


def test_bk3830_nothing_is_acknowledged_before_its_sync_over_a_roll():
    """BookKeeper's force-write thread syncs the last request's file only, and tells those of the
    file before it."""

    async def main():
        disk = SimDisk()
        journal = await settled(disk)
        number = 0
        while journal.synced.file_id < 4:
            lane = PAGE_CACHE if number % 3 else Lane.BULK
            await journal.append([an_entry(number, 30 * KIB)], lane)
            if lane is Lane.BULK:
                durable = disk.durable(segment_path(journal.synced.file_id))
                assert len(durable) >= journal.synced.offset
                assert an_entry(number, 30 * KIB).body in durable
            number += 1
        journal.abandon()
        disk.crash("none")
        numbers, replay = await replayed(disk)
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= number - 2
        assert not replay.damage

    run(main())


def test_bk3830_a_failed_sync_of_the_segment_that_is_left_ends_the_journal():
    """And its waiters are not told that all is well, as BookKeeper's are."""

    async def main():
        disk = SimDisk()
        journal = await settled(disk)
        room = CONFIG.journal_bytes_max - 64 * KIB
        for number in range(room // (36 * KIB)):
            await journal.append([an_entry(number, 30 * KIB)], PAGE_CACHE)
        disk.faults.sync_fails = 1
        waiting = [journal.append([an_entry(n, 60 * KIB)], PAGE_CACHE) for n in range(50, 54)]
        with pytest.raises(DiskFailed):
            await journal.task
        assert isinstance(waiting[-1].exception(), JournalFailed)

    run(main())


# -- a node with such a ledger -------------------------------------------------------------------


def with_a_page_cache_ledger(test):
    """Ledger 9 is acknowledged before the sync; 1 is an ordinary one."""

    async def main(node):
        record = LedgerRecord(9, 1, 1, 1, (Fragment(0, (ID,)),), durability="page-cache")
        session = node.store.session("client")
        await session.create(paths.ledger(9), ledger_record.encode(record), parents=True)
        await asyncio.sleep(1)
        await test(node)

    on_a_node(main, with_two_ledgers())


def test_a_ledger_of_that_kind_is_acknowledged_by_a_node_before_the_sync():
    async def test(node):
        await node.add(entry(9, 0))
        syncs = node.journal_disk.syncs
        for entry_id in (1, 2, 3):
            assert await node.add(entry(9, entry_id)) == [OK]
        assert await node.add(entry(9, 2)) == [OK], "an equal one again"
        assert node.journal_disk.syncs == syncs
        assert await node.add(entry(1, 0)) == [OK]
        assert node.journal_disk.syncs > syncs
        await node.crash("none")
        assert await node.statuses(9, 0, 3) == [OK] * 4

    with_a_page_cache_ledger(test)


def test_the_record_of_what_kind_it_is_is_durable_before_its_first_acknowledgement():
    async def test(node):
        await node.add(entry(9, 0))
        await node.crash("none")
        assert node.storage.state(9).durability == "page-cache"

    with_a_page_cache_ledger(test)


@pytest.mark.parametrize("what", ["fence", "recovery add", "equal recovery add", "explicit lac"])
def test_what_recovery_and_readers_rely_on_is_synced_in_such_a_ledger_too(what):
    async def test(node):
        await node.add(entry(9, 0))
        await node.add(entry(9, 1))
        if what == "fence":
            await node.fence(9)
        elif what == "explicit lac":
            await node.write_lac(9, 0)
        else:
            again = 1 if what == "equal recovery add" else 2
            assert await node.add(entry(9, again), recovery=True) == [OK]
        await node.crash("none")
        assert (await node.statuses(9, 0, 1)) == [OK, OK]
        if what == "fence":
            assert await node.add(entry(9, 2)) == [Status.FENCED]
        elif what == "explicit lac":
            assert (await node.read_lac(9)).last_add_confirmed == 0
        elif what == "recovery add":
            assert await node.statuses(9, 2, 2) == [OK]

    with_a_page_cache_ledger(test)


def test_what_a_power_loss_took_of_such_a_ledger_is_unknown_and_never_absent():
    async def test(node):
        await node.add(entry(9, 0))
        await node.add(entry(1, 0))
        await node.add(entry(9, 1))
        await node.crash("none")
        first, second = await node.statuses(9, 0, 1)
        assert first is OK
        assert meaning(second) is Meaning.UNKNOWN

    with_a_page_cache_ledger(test)
