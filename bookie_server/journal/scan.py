"""Reading a journal segment from its start to its end: large pieces, the next one ahead of need;
and any file around its bad blocks.

Always true: two pieces are in memory, and what is handed out is a view into one, or a copy where it
is small: a batch is followed by zeros up to the next multiple of 4096, which whoever keeps an entry
of it must not keep as well. A piece begins where a batch does, so that few batches span two. What
the disk cannot read is, block by block, bytes that nobody wrote (`UNREADABLE`), which whoever
decodes them finds damaged, and `unreadable_end` tells from a torn write: one bad sector costs its
block and not the segment. After BAD_BLOCKS_MAX of them the rest of the segment is not tried any
more, and a read that hangs is not repeated at all: a start ends in time.
"""

import asyncio
import contextlib
import logging
from typing import NamedTuple

from bookie_server.disk.interface import DiskFailed, DiskHung, File
from bookie_server.journal.format import BLOCK_BYTES

PIECE_BYTES = 8 << 20
AHEAD_BYTES = PIECE_BYTES // 8  # the next piece is asked for when so much is left; read twice
UNREADABLE = b"\xff"
BAD_BLOCKS_MAX = 64
COPIED_BYTES_MAX = 64 << 10  # beyond it the zeros are less than a sixteenth of what is kept

_log = logging.getLogger(__name__)


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
        self.unreadable_end = 0
        """Where the last of what could not be read ends; 0: all could."""
        self._bad_blocks: dict[int, None] = {}
        self._piece = _Piece(0, memoryview(b""), False)
        self._next: asyncio.Task[_Piece] | None = None

    async def read(self, at: int, length: int, following: int | None = None) -> memoryview:
        """As read_around; `following`: where what is asked for after it begins, if it is known.

        Raises DiskHung.
        """
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
        """Nothing reads the file when this returns, but a thread that hangs."""
        with contextlib.suppress(DiskHung):
            await self._take_next()

    async def read_around(self, start: int, length: int) -> bytes:
        """As File.read, with UNREADABLE for the blocks that cannot be read. They are searched for
        by halves: few reads where few are bad. Raises DiskHung."""
        end = min(start + length, self.file.end)
        if len(self._bad_blocks) >= BAD_BLOCKS_MAX:
            return self._unreadable(start, end)
        try:
            return await self.file.read(start, length)
        except DiskHung:
            raise
        except DiskFailed as error:
            first = start // BLOCK_BYTES
            count = -(-end // BLOCK_BYTES) - first
            if count <= 1:
                self._note_bad(first, error)
                return self._unreadable(start, end)
        middle = (first + count // 2) * BLOCK_BYTES
        left = await self.read_around(start, middle - start)
        return left + await self.read_around(middle, end - middle)

    def _note_bad(self, block: int, error: DiskFailed) -> None:
        path, at = self.file.path, block * BLOCK_BYTES
        _log.error("%s: the block at %d cannot be read: %s", path, at, error)
        self._bad_blocks[block] = None
        if len(self._bad_blocks) == BAD_BLOCKS_MAX:
            _log.error("%s: too many of its blocks cannot be read: the rest is not tried", path)

    def _unreadable(self, start: int, end: int) -> bytes:
        self.unreadable_end = max(self.unreadable_end, end)
        return UNREADABLE * max(0, end - start)

    async def _move_to(self, at: int, length: int) -> None:
        piece = await self._take_next()
        if piece is None or not piece.holds(at, length):
            piece = await self._read(at, max(length, PIECE_BYTES))
        self._piece = piece

    async def _take_next(self) -> _Piece | None:
        coming, self._next = self._next, None
        return None if coming is None else await coming

    async def _read(self, start: int, length: int) -> _Piece:
        data = await self.read_around(start, length)
        return _Piece(start, memoryview(data), len(data) < length)
