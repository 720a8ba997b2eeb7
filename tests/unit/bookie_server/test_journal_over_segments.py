"""Replay over more than one segment: a full segment is no damaged one."""

import asyncio

from bookie_server.config import StorageConfig
from bookie_server.journal.format import BLOCK_BYTES, Position, Record, RecordKind
from bookie_server.journal.scan import Replay
from bookie_server.journal.writer import FOLDER, Journal, segment_path
from tests.simulation.disk import SimDisk
from tests.simulation.loop import run

KIB = 1024
CONFIG = StorageConfig(
    journal_bytes_max=88 * KIB, journal_batch_bytes_max=8 * KIB, entry_bytes_max=8 * KIB
)


async def _journal_of_two_segments(disk: SimDisk) -> None:
    """One segment full, one with three batches, then the power goes."""
    await disk.make_folder(FOLDER)
    journal = await Journal.open(disk, CONFIG, 1, Position(0, 0))
    for entry in range(88 // 4 - 1 + 3):
        await journal.append([Record(RecordKind.LAC, 7, entry, b"", 0)])
    journal.abandon()
    await asyncio.gather(journal.task, return_exceptions=True)
    disk.crash("none")


async def _replay(disk: SimDisk) -> tuple[list[int], Replay]:
    replay = Replay(disk, Position(1, BLOCK_BYTES))
    entries = [record.entry_id async for records in replay.records() for record in records]
    return entries, replay


def test_a_segment_that_was_filled_before_the_next_one_is_not_damaged():
    async def main() -> None:
        disk = SimDisk()
        await _journal_of_two_segments(disk)
        entries, replay = await _replay(disk)
        assert entries == list(range(24))
        assert not replay.damage

    run(main())


def test_a_segment_that_lost_its_synced_tail_is_damaged():
    async def main() -> None:
        disk = SimDisk()
        await _journal_of_two_segments(disk)
        disk.truncate(segment_path(1), 84 * KIB)
        entries, replay = await _replay(disk)
        assert entries == [*range(20), 21, 22, 23]
        assert [suspect.position for suspect in replay.damage] == [Position(1, 84 * KIB)]

    run(main())
