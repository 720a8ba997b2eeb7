import pytest

from bookie_server.disk.interface import DiskFailed
from bookie_server.journal import checkpoint
from bookie_server.journal.checkpoint import JournalMark
from bookie_server.journal.format import Position
from tests.simulation.disk import SimDisk
from tests.simulation.loop import run

MARKS = {"b": JournalMark(Position(9, 8192)), "a": JournalMark(Position(2, 4096), retired=True)}


def test_the_bytes_of_a_checkpoint():
    data = checkpoint.encode(MARKS)
    assert data.hex() == (
        "534c4350"  # SLCP
        "0200000002000000"  # version 2, two marks
        "020000000000000000100000000000000100010061"  # a: file 2, 4096, retired
        "090000000000000000200000000000000000010062"  # b: file 9, 8192
        "88b838bf"
    )
    assert checkpoint.decode(data) == MARKS
    assert checkpoint.decode(checkpoint.encode({})) == {}


def test_no_flipped_bit_and_no_missing_byte_goes_unnoticed():
    data = checkpoint.encode(MARKS)
    for bit in range(8 * len(data)):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(checkpoint.BadCheckpoint):
            checkpoint.decode(bytes(bad))
    for length in range(len(data)):
        with pytest.raises(checkpoint.BadCheckpoint):
            checkpoint.decode(data[:length])


def test_bk_4844_marks_of_several_journals_are_compared_one_by_one():
    """[2, 1] is neither before nor after [1, 2]: of each journal the further one is right."""
    one = {"a": JournalMark(Position(2, 0)), "b": JournalMark(Position(1, 0))}
    other = {
        "a": JournalMark(Position(1, 0)),
        "b": JournalMark(Position(2, 0)),
        "c": JournalMark(Position(1, 0)),
    }
    both = {"a": one["a"], "b": other["b"], "c": other["c"]}
    assert checkpoint.furthest(one, other) == both == checkpoint.furthest(other, one)
    retired = {"a": one["a"]._replace(retired=True)}
    assert checkpoint.furthest(retired, one)["a"] == retired["a"]
    assert checkpoint.furthest(retired, {"a": JournalMark(Position(3, 0))})["a"] == JournalMark(
        Position(3, 0)
    )


def test_a_journal_that_was_missed_is_retired_and_said_to_be_missed():
    marks = {"a": JournalMark(Position(2, 4096), retired=True, missed=True)}
    assert checkpoint.encode(marks)[28:30] == b"\x03\0"
    assert checkpoint.decode(checkpoint.encode(marks)) == marks


@pytest.mark.parametrize("keep", ["none", "random", "all"])
def test_after_a_crash_there_is_the_last_checkpoint_written_or_the_one_under_way(keep):
    async def main():
        disk = SimDisk()
        assert await checkpoint.read(disk) is None
        for number in range(1, 6):
            await checkpoint.write(disk, {"j": JournalMark(Position(number, 0))})
        disk.faults.sync_fails = 1
        with pytest.raises(DiskFailed):
            await checkpoint.write(disk, {"j": JournalMark(Position(6, 0))})
        disk.crash(keep)
        assert await checkpoint.read(disk) == {"j": JournalMark(Position(5, 0))}
        await checkpoint.write(disk, {"j": JournalMark(Position(7, 0))})
        assert await checkpoint.read(disk) == {"j": JournalMark(Position(7, 0))}

    run(main())
