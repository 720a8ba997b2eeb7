import asyncio
import random

import pytest

from bookie_server.disk.interface import DiskFailed
from bookie_server.journal.format import BLOCK_BYTES, Position, RecordKind
from bookie_server.journal.scan import Ending
from bookie_server.journal.writer import FOLDER, JournalFailed, segment_path
from tests.simulation.disk import SimDisk
from tests.simulation.loop import run
from tests.unit.bookie_server.journal_rig import note, opened, replayed
from tests.unit.bookie_server.node import CONFIG, KIB

START = Position(1, BLOCK_BYTES)


def test_what_was_acknowledged_is_replayed_in_order_and_what_was_not_may_be_cut():
    async def main():
        disk = SimDisk()
        journal = await opened(disk)
        for number in range(5):
            await journal.append([note(number)])
        lost = journal.append([note(5)])
        await asyncio.sleep(0)
        journal.abandon()
        disk.crash("none")
        numbers, replay = await replayed(disk)
        assert numbers == [0, 1, 2, 3, 4]
        assert not replay.damage
        assert not lost.done()

    run(main())


def test_what_is_appended_while_a_sync_runs_is_one_batch():
    async def main():
        disk = SimDisk()
        journal = await opened(disk)
        await asyncio.sleep(1)  # the next segment is made
        syncs = disk.syncs
        futures = [journal.append([note(number)]) for number in range(3)]
        await asyncio.sleep(0.0001)  # their sync is under way: it takes longer
        futures += [journal.append([note(number)]) for number in range(3, 50)]
        await asyncio.gather(*futures)
        assert disk.syncs - syncs == 2
        assert (await replayed(disk))[0] == list(range(50))

    run(main())


def test_a_group_larger_than_a_batch_is_durable_when_its_future_is_done():
    async def main():
        disk = SimDisk()
        journal = await opened(disk)
        await journal.append([note(number, 60 * KIB) for number in range(12)])
        journal.abandon()
        disk.crash("none")
        numbers, replay = await replayed(disk)
        assert numbers == list(range(12))
        assert replay.file_ids[:2] == [1, 2], "it went over a roll"

    run(main())


def test_a_segment_is_named_durably_before_anything_in_it_is_acknowledged():
    async def main():
        disk = SimDisk()
        journal = await opened(disk)
        for number in range(100):
            await journal.append([note(number, 20 * KIB)])
            path = segment_path(journal.synced.file_id)
            assert len(disk.durable(path)) >= journal.synced.offset
        assert journal.synced.file_id > 2

    run(main())


def test_an_empty_append_waits_for_all_before_it():
    async def main():
        disk = SimDisk()
        journal = await opened(disk)
        first = journal.append([note(0)])
        await journal.append([])
        assert first.done()

    run(main())


def test_after_a_failed_sync_nothing_is_acknowledged_any_more():
    async def main():
        disk = SimDisk()
        journal = await opened(disk)
        await journal.append([note(0)])
        await asyncio.sleep(1)
        disk.faults.sync_fails = 1
        futures = [journal.append([note(number)]) for number in range(1, 4)]
        for future in [*futures, journal.append([note(4)])]:
            with pytest.raises(JournalFailed):
                await future
        with pytest.raises(DiskFailed):
            await journal.task
        with pytest.raises(JournalFailed):
            await journal.append([note(5)])

    run(main())


def test_a_next_segment_that_a_failing_disk_does_not_make_ends_the_journal_at_once():
    async def main():
        disk = SimDisk()
        journal = await opened(disk)
        disk.faults.append_fails = 1  # the header of the next segment
        with pytest.raises(DiskFailed):
            await asyncio.wait_for(journal.task, 1)
        with pytest.raises(JournalFailed):
            await journal.append([note(0)])

    run(main())


def test_a_next_segment_that_lacks_space_only_is_tried_again_until_there_is_some():
    async def main():
        disk = SimDisk()
        disk.faults.bytes_max = CONFIG.journal_bytes_max + 100 * KIB
        journal = await opened(disk)
        await journal.append([note(0, 20 * KIB)])
        await asyncio.sleep(1)
        assert journal.room_bytes < CONFIG.journal_bytes_max - 20 * KIB, "told before the roll"
        waiting = [journal.append([note(number, 20 * KIB)]) for number in range(1, 100)]
        await asyncio.sleep(10)
        assert waiting[0].done()
        assert not waiting[-1].done()
        disk.empty_out()
        await asyncio.gather(*waiting)
        await asyncio.sleep(0.1)
        assert journal.room_bytes > CONFIG.journal_bytes_max
        assert (await replayed(disk))[0] == list(range(100))

    run(main())


def test_a_journal_that_is_closed_does_not_wait_for_space():
    async def main():
        disk = SimDisk()
        disk.faults.bytes_max = CONFIG.journal_bytes_max + 100 * KIB
        journal = await opened(disk)
        waiting = [journal.append([note(number, 20 * KIB)]) for number in range(100)]
        await asyncio.sleep(10)
        with pytest.raises(JournalFailed):
            await asyncio.wait_for(journal.close(), 5)
        with pytest.raises(JournalFailed):
            await waiting[-1]

    run(main())


def test_a_journal_without_space_for_a_next_segment_is_sealed_in_the_one_it_has():
    async def main():
        disk = SimDisk()
        disk.faults.bytes_max = CONFIG.journal_bytes_max + 100 * KIB
        journal = await opened(disk)
        await journal.append([note(0)])
        await asyncio.wait_for(journal.close(), 5)
        assert (await replayed(disk))[1].ending is Ending.CLEAN

    run(main())


def test_what_a_reserve_leaves_is_enough_for_a_smaller_segment():
    async def main():
        disk = SimDisk()
        disk.faults.bytes_max = CONFIG.journal_bytes_max + 300 * KIB
        journal = await opened(disk)
        await asyncio.gather(*[journal.append([note(n, 20 * KIB)]) for n in range(30)])
        assert journal.synced.file_id == 2
        assert (await replayed(disk))[0] == list(range(30))

    run(main())


def test_replay_starts_at_the_mark_and_older_segments_are_not_needed():
    async def main():
        disk = SimDisk()
        journal = await opened(disk)
        for number in range(60):
            if number == 40:
                mark = journal.synced
            await journal.append([note(number, 20 * KIB)])
        await journal.forget_before(mark)
        await journal.close()
        numbers, replay = await replayed(disk, mark)
        assert numbers == [*range(40, 60), -1]
        assert not replay.damage
        assert not replay.torn_writes

    run(main())


@pytest.mark.parametrize("seed", range(20))
def test_a_torn_write_is_cut_and_is_no_damage(seed):
    async def main():
        disk = SimDisk(random.Random(seed))
        journal = await opened(disk)
        for number in range(10):
            await journal.append([note(number, 6000)])
        journal.append([note(number, 6000) for number in range(10, 20)])
        await asyncio.sleep(0)
        journal.abandon()
        disk.crash("random")
        numbers, replay = await replayed(disk)
        assert numbers[:10] == list(range(10))
        assert not replay.damage

    run(main())


def _segment_with_ten(close=True):
    """A disk whose first segment has ten batches, one block each, from block 1 on."""

    async def main():
        disk = SimDisk()
        journal = await opened(disk)
        for number in range(10):
            await journal.append([note(number)])
        if close:
            await journal.close()
        else:
            journal.abandon()
        return disk

    return main()


def test_a_bad_body_below_a_synced_position_is_damage_of_its_ledger():
    async def main():
        disk = await _segment_with_ten()
        disk.flip_bit(segment_path(1), 8 * (4 * BLOCK_BYTES + 128))
        numbers, replay = await replayed(disk, START)
        assert numbers == [0, 1, 2, 4, 5, 6, 7, 8, 9, -1]
        assert [(s.ledger_id, s.kind) for s in replay.damage] == [(7, RecordKind.LEDGER)]
        assert not replay.torn_writes

    run(main())


@pytest.mark.parametrize("at", [4 * BLOCK_BYTES + 5, 4 * BLOCK_BYTES + 64 + 20])
def test_a_bad_header_below_a_synced_position_is_damage_of_nobody_knows_whom(at):
    async def main():
        disk = await _segment_with_ten()
        disk.flip_bit(segment_path(1), 8 * at)
        numbers, replay = await replayed(disk, START)
        assert numbers == [0, 1, 2, 4, 5, 6, 7, 8, 9, -1]
        assert [s.ledger_id for s in replay.damage] == [None]

    run(main())


def test_the_last_batch_of_an_unclean_end_is_cut_when_it_is_bad():
    async def main():
        disk = await _segment_with_ten(close=False)
        disk.flip_bit(segment_path(1), 8 * (10 * BLOCK_BYTES + 128))
        numbers, replay = await replayed(disk, START)
        assert numbers == list(range(9))
        assert not replay.damage
        assert [s.position for s in replay.torn_writes] == [Position(1, 10 * BLOCK_BYTES)]

    run(main())


@pytest.mark.parametrize("harm", ["remove", "truncate", "last batch"])
def test_a_segment_lost_or_cut_off_before_another_is_damage(harm):
    async def main():
        disk = SimDisk()
        journal = await opened(disk)
        for number in range(70):
            await journal.append([note(number, 20 * KIB)])
        await journal.close()
        path = segment_path(2)
        if harm == "remove":
            await disk.remove(path)
        elif harm == "truncate":
            disk.truncate(path, 5 * BLOCK_BYTES)
        else:
            at = disk.content(path).rindex(b"SLJB")
            disk.flip_bit(path, 8 * at)
        numbers, replay = await replayed(disk, START)
        assert numbers[-2:] == [69, -1]
        assert len(numbers) < 71
        assert {s.position.file_id for s in replay.damage} == {2}
        assert replay.damage[-1].ledger_id is None

    run(main())


def test_the_segment_of_the_mark_must_be_there():
    async def main():
        disk = SimDisk()
        await disk.make_folder(FOLDER)
        numbers, replay = await replayed(disk, Position(4, BLOCK_BYTES))
        assert numbers == []
        assert [s.why for s in replay.damage] == ["the segment is missing"]

    run(main())


def test_a_bad_segment_header_loses_nothing():
    async def main():
        disk = await _segment_with_ten()
        disk.flip_bit(segment_path(1), 3)
        numbers, replay = await replayed(disk, START)
        assert numbers == [*range(10), -1]
        assert not replay.damage

    run(main())


def test_nobody_reads_a_segment_that_is_forgotten_so_its_space_goes_in_parts(monkeypatch):
    removed = []
    remove = SimDisk.remove

    async def noted(disk, path, *, unread=False):
        removed.append((path, unread))
        await remove(disk, path, unread=unread)

    async def main():
        disk = await _segment_with_ten()
        journal = await opened(disk, 3, Position(1, 12 * BLOCK_BYTES))
        monkeypatch.setattr(SimDisk, "remove", noted)
        await journal.forget_before(journal.synced)
        assert removed == [(segment_path(1), True), (segment_path(2), True)]

    run(main())


def test_a_damaged_segment_set_aside_is_kept_and_not_read_again():
    async def main():
        disk = await _segment_with_ten()
        journal = await opened(disk, 3, Position(1, 12 * BLOCK_BYTES))
        await journal.set_aside(1)
        await journal.forget_before(journal.synced)
        assert [path for path in disk.paths() if "000001" in path] == ["journal/0000000001.damaged"]

    run(main())


@pytest.mark.parametrize(
    ("end", "ending"),
    [
        ("sealed", Ending.CLEAN),
        ("killed", Ending.UNCLEAN),
        ("torn", Ending.TORN),
        ("torn in its header", Ending.TORN),
        ("never run", Ending.CLEAN),
        ("sealed, then killed", Ending.UNCLEAN),
    ],
)
def test_replay_says_how_the_last_run_ended(end, ending):
    async def main():
        if end == "never run":
            disk = SimDisk()
        else:
            disk = await _segment_with_ten(close=end.startswith("sealed"))
        if end == "torn":
            disk.flip_bit(segment_path(1), 8 * (10 * BLOCK_BYTES + 128))
        if end == "torn in its header":
            disk.flip_bit(segment_path(1), 8 * (10 * BLOCK_BYTES))
        if end == "sealed, then killed":
            journal = await opened(disk, 3, Position(1, 12 * BLOCK_BYTES))
            await journal.append([note(10)])
            journal.abandon()
        assert (await replayed(disk))[1].ending is ending

    run(main())
