import random

import pytest

from bookie_server.disk.interface import DiskFailed, DiskHung
from bookie_server.journal import scan as segment_reader
from bookie_server.journal.format import BLOCK_BYTES as BLOCK
from bookie_server.journal.scan import (
    BAD_BLOCKS_MAX,
    COPIED_BYTES_MAX,
    PIECE_BYTES,
    SegmentReader,
)
from tests.simulation.loop import run

BYTES = random.Random(1).randbytes(64 * 1024)


class File:
    """Bytes in memory; reads that touch `bad` fail, and all if `error` is set. Notes what was
    read."""

    error: DiskFailed | None = None

    def __init__(self, content: bytes = BYTES, bad: int | None = None) -> None:
        self.content, self.bad = content, bad
        self.path = "segment"
        self.reads: list[tuple[int, int]] = []

    @property
    def end(self) -> int:
        return len(self.content)

    async def read(self, position: int, length: int) -> bytes:
        self.reads.append((position, length))
        if self.error is not None:
            raise self.error
        if self.bad is not None and position <= self.bad < position + length:
            raise DiskFailed("EIO")
        return self.content[position : position + length]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in (("PIECE_BYTES", 4096), ("AHEAD_BYTES", 512), ("COPIED_BYTES_MAX", 100)):
        monkeypatch.setattr(segment_reader, name, value)


async def through(file: File, lengths: list[int]) -> list[tuple[int, bytes]]:
    """Read as a replay does: a header, and what it announces, one after the other."""
    reader, at, found = SegmentReader(file), 0, []
    for length in lengths:
        await reader.read(at, 64)
        found.append((at, bytes(await reader.read(at, length, at + length))))
        at += length
    await reader.close()
    return found


@pytest.mark.parametrize("seed", range(20))
def test_what_is_read_is_what_the_file_holds_whatever_the_lengths(seed):
    async def scenario():
        rng = random.Random(seed)
        lengths = [rng.choice((64, 300, 1000, 4096, 5000, 9000)) for _ in range(40)]
        for at, data in await through(File(), lengths):
            assert data == BYTES[at : at + len(data)]
            assert len(data) == min(lengths.pop(0), max(0, len(BYTES) - at))

    run(scenario())


def test_a_segment_is_read_in_few_pieces():
    async def scenario():
        file = File()
        await through(file, [256] * (len(BYTES) // 256))
        assert len(file.reads) <= 2 + len(BYTES) // (segment_reader.PIECE_BYTES - 512 - 256)

    run(scenario())


def test_the_next_piece_is_asked_for_before_this_one_ends():
    async def scenario():
        file = File()
        reader = SegmentReader(file)
        await reader.read(0, 64)
        await reader.read(0, 4000, 4000)
        await reader.close()
        assert file.reads == [(0, 4096), (4000, 4096)]

    run(scenario())


def spoiled(*blocks: int) -> bytes:
    """BYTES as they are read where these blocks cannot be."""
    out = bytearray(BYTES)
    for block in blocks:
        out[block * BLOCK : (block + 1) * BLOCK] = b"\xff" * BLOCK
    return bytes(out)


def test_a_block_that_cannot_be_read_is_damaged_bytes_and_costs_no_others():
    async def scenario():
        file, expected = File(bad=3 * BLOCK + 77), spoiled(3)
        reader = SegmentReader(file)
        for at, length in ((2 * BLOCK, 100), (2 * BLOCK + 90, 3000), (3 * BLOCK - 5, 9000)):
            assert await reader.read(at, length, at + length) == expected[at : at + length]
        await reader.close()
        assert await SegmentReader(file).read_around(100, len(BYTES)) == expected[100:]

    run(scenario())


def test_a_bad_block_at_the_end_of_the_file_is_no_longer_than_it():
    async def scenario():
        file = File(BYTES[: 2 * BLOCK + 10], bad=2 * BLOCK + 5)
        expected = BYTES[: 2 * BLOCK] + b"\xff" * 10
        assert await SegmentReader(file).read_around(0, 9 * BLOCK) == expected
        assert await SegmentReader(file).read_around(2 * BLOCK + 10, BLOCK) == b""

    run(scenario())


def test_one_bad_block_in_a_piece_costs_few_reads():
    async def scenario():
        file = File(bad=5 * BLOCK)
        assert await SegmentReader(file).read_around(0, len(BYTES)) == spoiled(5)
        assert len(file.reads) == 2 * (len(BYTES) // BLOCK).bit_length() - 1

    run(scenario())


def test_a_read_that_hangs_is_not_tried_again_by_halves():
    async def scenario():
        file = File()
        file.error = DiskHung("it did not return")
        reader = SegmentReader(file)
        with pytest.raises(DiskHung):
            await reader.read(0, len(BYTES))
        assert len(file.reads) == 1

    run(scenario())


def test_what_is_read_ahead_of_need_and_hangs_does_not_keep_the_reader_from_closing():
    async def scenario():
        file = File()
        reader = SegmentReader(file)
        await reader.read(0, 4000, 4000)
        file.error = DiskHung("it did not return")
        await reader.close()

    run(scenario())


def test_after_many_bad_blocks_the_rest_of_the_segment_is_not_tried():
    async def scenario():
        file = File(bytes(BLOCK) * 10_000)
        file.error = DiskFailed("EIO")
        reader = SegmentReader(file)
        for at in range(0, file.end, 1000 * BLOCK):
            data = await reader.read_around(at, 1000 * BLOCK + 5)
            assert data == b"\xff" * min(1000 * BLOCK + 5, file.end - at)
        assert len(file.reads) < 3 * BAD_BLOCKS_MAX
        assert reader.bad_blocks_end == file.end

    run(scenario())


def test_a_small_batch_keeps_no_piece_in_memory():
    async def scenario():
        reader = SegmentReader(File())
        small, large = await reader.read(0, 100), await reader.read(100, 101)
        assert (small.nbytes, len(small.obj)) == (100, 100)
        assert len(large.obj) == segment_reader.PIECE_BYTES
        await reader.close()

    run(scenario())


def test_what_is_copied_is_little_beside_a_piece():
    assert COPIED_BYTES_MAX * 16 < PIECE_BYTES
