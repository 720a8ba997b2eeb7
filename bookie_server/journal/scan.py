"""Reading a journal at a start. `Replay` gives its records, and its torn or damaged bytes.
`SegmentReader` reads a segment in large pieces, each ahead of need; it also reads files that have
bad blocks.

Always true: at most two pieces are in memory. A read gives a view into a piece, which keeps the
whole piece in memory as long as the view is kept. So a small read gives a copy instead: around
small batches a piece has mostly zeros. A piece begins where a batch begins, so few batches span two
pieces. For a block that the disk cannot read the reader gives `UNREADABLE` bytes, which no bookie
writes: decoding finds them damaged, `bad_blocks_end` shows that they are no torn write, and a bad
sector costs only its block. So that a start ends in time, the reader does not try the rest of the
segment after BAD_BLOCKS_MAX bad blocks, and never repeats a read that hangs.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from enum import Enum
from typing import NamedTuple

from bookie_server.api.entry import Buffer
from bookie_server.disk.interface import Disk, DiskFailed, DiskHung, File
from bookie_server.journal.format import (
    BATCH_HEADER_BYTES,
    BATCH_MAGIC,
    BLOCK_BYTES,
    BadJournal,
    BatchHeader,
    Position,
    Record,
    RecordKind,
    UnreadableBytes,
    decode_batch_header,
    decode_file_header,
    decode_records,
)
from bookie_server.journal.writer import segment_ids, segment_path

PIECE_BYTES = 8 << 20
AHEAD_BYTES = PIECE_BYTES // 8  # when so few bytes of a piece are left, the next piece is read
UNREADABLE = b"\xff"
BAD_BLOCKS_MAX = 64
COPIED_BYTES_MAX = 64 << 10
"""A larger read gives a view. A batch is followed by less than a block (4 KiB) of zeros: that is
less than a sixteenth of such a batch."""
_SCAN_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class _Piece(NamedTuple):
    """A piece of a segment. `is_last`: the file ends where the piece ends."""

    start: int
    data: memoryview
    is_last: bool

    def holds(self, at: int, length: int) -> bool:
        return self.start <= at and (self.is_last or at + length <= self.start + len(self.data))


class SegmentReader:
    """Reads one segment; the caller closes the reader before the file."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.bad_blocks_end = 0
        """Where the last unreadable block ends; 0: all blocks could be read."""
        self._bad_blocks: dict[int, None] = {}
        self._piece = _Piece(0, memoryview(b""), False)
        self._next_piece: asyncio.Task[_Piece] | None = None

    async def read(self, at: int, length: int, next_at: int | None = None) -> memoryview:
        """The same bytes as `read_around`, from a piece. `next_at`: where the next read will begin;
        None: unknown. Raises DiskHung."""
        if not self._piece.holds(at, length):
            await self._load_piece(at, length)
        start, data, is_last = self._piece
        view = data[at - start : at - start + length]
        if next_at is not None and self._next_piece is None and not is_last:
            self._read_ahead(next_at, length, start + len(data) - next_at)
        return memoryview(bytes(view)) if length <= COPIED_BYTES_MAX else view

    def _read_ahead(self, start: int, length: int, bytes_left: int) -> None:
        if bytes_left < max(length, AHEAD_BYTES):
            self._next_piece = asyncio.ensure_future(self._read(start, max(length, PIECE_BYTES)))

    async def close(self) -> None:
        """When this returns, no read of the file is under way, except in a thread that hangs."""
        with contextlib.suppress(DiskHung):
            await self._take_next()

    async def read_around(self, start: int, length: int) -> bytes:
        """As File.read, with UNREADABLE bytes for the blocks that cannot be read. A failed read is
        repeated in two halves until the bad blocks are found. Raises DiskHung."""
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
        self.bad_blocks_end = max(self.bad_blocks_end, end)
        return UNREADABLE * max(0, end - start)

    async def _load_piece(self, at: int, length: int) -> None:
        piece = await self._take_next()
        if piece is None or not piece.holds(at, length):
            piece = await self._read(at, max(length, PIECE_BYTES))
        self._piece = piece

    async def _take_next(self) -> _Piece | None:
        task, self._next_piece = self._next_piece, None
        return None if task is None else await task

    async def _read(self, start: int, length: int) -> _Piece:
        data = await self.read_around(start, length)
        return _Piece(start, memoryview(data), len(data) < length)


class Ending(Enum):
    """How the node's last run ended, as far as its journal shows."""

    CLEAN = "clean"
    """The journal ends with a seal; or there never was a run."""
    UNCLEAN = "unclean"
    """Not sealed: the last acknowledged entries of page-cache ledgers may be missing."""
    TORN = "torn"
    """Not sealed, and bytes beyond the synced position cannot be read: either their write was torn,
    or it was acknowledged and is damaged."""


class Replay:
    """Reads the segments at and after a journal's mark.

    Iterate `records()` to the end, then read the results:
    - `damage`: unreadable bytes before a position that was synced: acknowledged data may be lost;
    - `torn_writes`: unreadable bytes after that position, so of a write whose sync the journal does
      not show. Of an unsynced write only entries of page-cache ledgers may be acknowledged;
    - `ending`: how the last run ended; `end`: where the journal ends.

    A crash never shortens a segment or makes a block unreadable. If that is seen, all unreadable
    bytes of the segment are damage.
    """

    def __init__(self, disk: Disk, mark: Position | None) -> None:
        self._disk = disk
        self._synced = mark or Position(0, 0)
        self._synced_offsets: dict[int, int] = {}
        """Segment id -> the highest synced offset that a batch header names."""
        self._mark = mark
        self._unreadable_bytes: list[UnreadableBytes] = []
        self._losses: list[UnreadableBytes] = []
        """Of missing segments, and of segments that were cut."""
        self._damaged_segments: dict[int, None] = {}
        """Segments that are damaged in a way that no crash can cause."""
        self._is_sealed = False
        self.end = self._synced
        self.file_ids: list[int] = []

    @property
    def damage(self) -> list[UnreadableBytes]:
        return [u for u in self._unreadable_bytes if self._is_damage(u)] + self._losses

    @property
    def torn_writes(self) -> list[UnreadableBytes]:
        return [u for u in self._unreadable_bytes if not (u.is_end or self._is_damage(u))]

    @property
    def ending(self) -> Ending:
        if self.torn_writes:
            return Ending.TORN
        has_no_run = self._mark is None and not self.file_ids
        return Ending.CLEAN if self._is_sealed or has_no_run else Ending.UNCLEAN

    def _is_damage(self, unreadable: UnreadableBytes) -> bool:
        is_below = unreadable.position < self._synced
        end = unreadable.position
        if unreadable.is_end:
            # An end is damage only if a later batch header shows that the segment was synced beyond
            # it; for a full segment, the first batch of the next segment shows that.
            return is_below and end.offset < self._synced_offsets.get(end.file_id, 0)
        return is_below or end.file_id in self._damaged_segments

    async def records(self) -> AsyncIterator[list[Record]]:
        """The whole records, batch by batch, in the order of writing. Raises DiskFailed.

        A segment's name is durable before the next segment is made, so a missing id is damage.
        """
        self.file_ids = await segment_ids(self._disk)
        if self._mark is None and not self.file_ids:
            return  # a node's first start
        first = self._mark.file_id if self._mark is not None else self.file_ids[0]
        for file_id in range(first, max([first, *self.file_ids]) + 1):
            if file_id not in self.file_ids:
                where = Position(file_id, 0)
                self._losses.append(UnreadableBytes(where, None, None, "the segment is missing"))
                continue
            async for records in self._records_of(file_id):
                yield records

    async def _records_of(self, file_id: int) -> AsyncIterator[list[Record]]:
        file = await self._disk.open(segment_path(file_id))
        reader = SegmentReader(file)
        try:
            loss = _loss_of(await reader.read_around(0, BLOCK_BYTES), file_id, file.end)
            start = self._mark.offset if self._mark and self._mark.file_id == file_id else 0
            start = at = max(start, BLOCK_BYTES)
            while (batch := await self._next_batch(reader, file_id, at)) is not None:
                length = BATCH_HEADER_BYTES + batch.records_bytes
                data = await reader.read(batch.offset, length, batch.end)
                records, unreadable = decode_records(data, batch)
                self._unreadable_bytes += unreadable
                self._note_synced(batch.synced)
                self._is_sealed = bool(records) and records[-1].kind is RecordKind.SEAL
                at = batch.end
                yield records
            self.end = Position(file_id, at)
            if loss:
                self._losses.append(UnreadableBytes(self.end, None, None, loss))
            else:
                why = "the segment's readable part ends here"
                self._unreadable_bytes.append(UnreadableBytes(self.end, None, None, why, True))
            if loss or reader.bad_blocks_end > start:
                self._damaged_segments[file_id] = None
        finally:
            await reader.close()
            await file.close()

    def _note_synced(self, synced: Position) -> None:
        self._synced = max(self._synced, synced)
        earlier = self._synced_offsets.get(synced.file_id, 0)
        self._synced_offsets[synced.file_id] = max(earlier, synced.offset)

    async def _next_batch(self, reader: SegmentReader, file_id: int, at: int) -> BatchHeader | None:
        """The batch at `at`, or the next one after bytes that are no batch."""
        try:
            return decode_batch_header(await reader.read(at, BATCH_HEADER_BYTES), file_id, at)
        except BadJournal as error:
            if not await self._has_written_bytes(reader, at):
                return None  # only zeros follow: nearly every segment ends so
            self._unreadable_bytes.append(
                UnreadableBytes(Position(file_id, at), None, None, str(error))
            )
            return await self._find_batch(reader, file_id, at + BLOCK_BYTES)

    async def _has_written_bytes(self, reader: SegmentReader, at: int) -> bool:
        """Whether any byte from `at` on is not a zero of reserved space."""
        while data := await reader.read_around(at, _SCAN_BYTES):
            if data != bytes(len(data)):
                return True
            at += len(data)
        return False

    async def _find_batch(self, reader: SegmentReader, file_id: int, at: int) -> BatchHeader | None:
        while data := await reader.read_around(at, _SCAN_BYTES):
            candidates = BATCH_MAGIC in data and range(0, len(data), BLOCK_BYTES)
            for offset in candidates or ():
                with contextlib.suppress(BadJournal):
                    head = data[offset : offset + BATCH_HEADER_BYTES]
                    return decode_batch_header(head, file_id, at + offset)
            at += len(data)
        return None


def _loss_of(head: Buffer, file_id: int, end: int) -> str:
    """What is lost of a segment with the first block `head` and the length `end`; empty if nothing
    is lost. A header that does not decode is no loss, as each batch header has the file id and
    position. A header of zeros, or a file shorter than a block, is a loss."""
    if len(head) < BLOCK_BYTES or not any(head):
        return "the segment has lost its header"
    try:
        length = decode_file_header(head, file_id)
    except BadJournal as error:
        _log.warning("journal segment %d: %s", file_id, error)
        return ""
    return f"the segment is cut: it had {length} bytes, not {end}" if end < length else ""
