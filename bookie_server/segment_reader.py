"""Reading a journal segment from its start to its end: large pieces, the next one ahead of need.

Always true: two pieces are in memory, and what is handed out is a view into one, or a copy where it
is small: a batch is followed by zeros up to the next multiple of 4096, which whoever keeps an entry
of it must not keep as well. A piece begins where a batch does, so that few batches span two. What
the disk cannot read is, block by block, bytes that nobody wrote (`UNREADABLE`), which whoever
decodes them finds damaged: one bad sector costs its block and not the segment.
"""

import asyncio
import logging
from typing import NamedTuple

from bookie_server.disk import DiskFailed, File
from bookie_server.journal_format import BLOCK_BYTES

PIECE_BYTES = 8 << 20
AHEAD_BYTES = PIECE_BYTES // 8  # the next piece is asked for when so much is left; read twice
UNREADABLE = b"\xff"
COPIED_BYTES_MAX = 64 << 10  # beyond it the zeros are less than a sixteenth of what is kept


_log = logging.getLogger(__name__)


async def read_around(file: File, start: int, length: int) -> bytes:
    """As File.read, with UNREADABLE for the blocks that cannot be read. They are searched for by
    halves: few reads where few are bad."""
    try:
        return await file.read(start, length)
    except DiskFailed as error:
        first, end = start // BLOCK_BYTES, min(start + length, file.end)
        count = -(-end // BLOCK_BYTES) - first
        if count <= 1:
            _log.error("%s: the block at %d cannot be read: %s", file.path, start, error)
            return UNREADABLE * max(0, end - start)
    middle = (first + count // 2) * BLOCK_BYTES
    left = await read_around(file, start, middle - start)
    return left + await read_around(file, middle, end - middle)


class _Piece(NamedTuple):
    """`ends`: the file does, where it does."""

    start: int
    data: memoryview
    ends: bool

    def holds(self, at: int, length: int) -> bool:
        return self.start <= at and (self.ends or at + length <= self.start + len(self.data))


class SegmentReader:
    """One segment; to be closed before its file is."""

    def __init__(self, file: File) -> None:
        self.file = file
        self._piece = _Piece(0, memoryview(b""), False)
        self._next: asyncio.Task[_Piece] | None = None

    async def read(self, at: int, length: int, following: int | None = None) -> memoryview:
        """As read_around; `following`: where what is asked for after it begins, if it is known."""
        if not self._piece.holds(at, length):
            await self._move_to(at, length)
        start, data, ends = self._piece
        found = data[at - start : at - start + length]
        if following is not None and self._next is None and not ends:
            self._read_ahead(following, length, start + len(data) - following)
        return memoryview(bytes(found)) if length <= COPIED_BYTES_MAX else found

    def _read_ahead(self, start: int, length: int, left: int) -> None:
        if left < max(length, AHEAD_BYTES):
            self._next = asyncio.ensure_future(self._read(start, max(length, PIECE_BYTES)))

    async def close(self) -> None:
        """Nothing reads the file when this returns."""
        await self._take_next()

    async def _move_to(self, at: int, length: int) -> None:
        piece = await self._take_next()
        if piece is None or not piece.holds(at, length):
            piece = await self._read(at, max(length, PIECE_BYTES))
        self._piece = piece

    async def _take_next(self) -> _Piece | None:
        coming, self._next = self._next, None
        return None if coming is None else await coming

    async def _read(self, start: int, length: int) -> _Piece:
        data = await read_around(self.file, start, length)
        return _Piece(start, memoryview(data), len(data) < length)
