import pytest

from bookie_server import checkpoint
from bookie_server.disk import DiskFailed
from bookie_server.journal_format import Position
from tests.simulation.disk import SimDisk
from tests.simulation.loop import run

MARK = Position(9, 8192)


def test_the_bytes_of_a_checkpoint():
    data = checkpoint.encode(MARK)
    assert data.hex() == "534c43500100000009000000000000000020000000000000d62beff9"
    assert checkpoint.decode(data) == MARK


def test_no_flipped_bit_and_no_missing_byte_goes_unnoticed():
    data = checkpoint.encode(MARK)
    for bit in range(8 * len(data)):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(checkpoint.BadCheckpoint):
            checkpoint.decode(bytes(bad))
    for length in range(len(data)):
        with pytest.raises(checkpoint.BadCheckpoint):
            checkpoint.decode(data[:length])


@pytest.mark.parametrize("keep", ["none", "random", "all"])
def test_after_a_crash_there_is_the_last_checkpoint_written_or_the_one_under_way(keep):
    async def main():
        disk = SimDisk()
        assert await checkpoint.read(disk) is None
        for number in range(1, 6):
            await checkpoint.write(disk, Position(number, 0))
        disk.faults.sync_fails = 1
        with pytest.raises(DiskFailed):
            await checkpoint.write(disk, Position(6, 0))
        disk.crash(keep)
        assert await checkpoint.read(disk) == Position(5, 0)
        await checkpoint.write(disk, Position(7, 0))
        assert await checkpoint.read(disk) == Position(7, 0)

    run(main())
