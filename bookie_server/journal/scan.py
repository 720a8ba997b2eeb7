"""Reading a journal at a start: its records, and its torn or damaged bytes (`Replay`); a segment
from its start to its end in large pieces, the next one ahead of need, and any file around its bad
blocks (`SegmentReader`).

Always true: two pieces are in memory, and a read gives a view into one, or a copy if it is small:
zeros follow a batch up to the next multiple of 4096, and a caller that keeps an entry of a small
batch must not keep the zeros as well. A piece begins where a batch does, so that few batches span
two. A block that the disk cannot read is handed out as bytes that no bookie writes (`UNREADABLE`):
decoding finds them damaged, and `unreadable_end` shows that they are no torn write; one bad sector
costs its block and not the segment. After BAD_BLOCKS_MAX of them the rest of the segment is not
tried any more, and a read that hangs is not repeated at all: a start ends in time.
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
    Suspect,
    decode_batch_header,
    decode_file_header,
    decode_records,
)
from bookie_server.journal.writer import segment_ids, segment_path

PIECE_BYTES = 8 << 20
AHEAD_BYTES = PIECE_BYTES // 8  # the next piece is read when so much is left, which is read twice
UNREADABLE = b"\xff"
BAD_BLOCKS_MAX = 64
COPIED_BYTES_MAX = 64 << 10  # beyond it the zeros are less than a sixteenth of the batch
_SCAN_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class _Piece(NamedTuple):
    """A piece of a segment. `ends`: the file ends where the piece does."""

    start: int
    data: memoryview
    ends: bool

    def holds(self, at: int, length: int) -> bool:
        return self.start <= at and (self.ends or at + length <= self.start + len(self.data))


class SegmentReader:
    """Reads one segment; to be closed before its file is."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.unreadable_end = 0
        """Where the last unreadable block ends; 0: all blocks could be read."""
        self._bad_blocks: dict[int, None] = {}
        self._piece = _Piece(0, memoryview(b""), False)
        self._next: asyncio.Task[_Piece] | None = None

    async def read(self, at: int, length: int, following: int | None = None) -> memoryview:
        """As read_around; `following`: where the next read will begin, None if that is unknown.

        Raises DiskHung.
        """
        if not self._piece.holds(at, length):
            await self._move_to(at, length)
        start, data, ends = self._piece
        view = data[at - start : at - start + length]
        if following is not None and self._next is None and not ends:
            self._read_ahead(following, length, start + len(data) - following)
        return memoryview(bytes(view)) if length <= COPIED_BYTES_MAX else view

    def _read_ahead(self, start: int, length: int, left: int) -> None:
        if left < max(length, AHEAD_BYTES):
            self._next = asyncio.ensure_future(self._read(start, max(length, PIECE_BYTES)))

    async def close(self) -> None:
        """When this returns, no read of the file is under way, except in a thread that hangs."""
        with contextlib.suppress(DiskHung):
            await self._take_next()

    async def read_around(self, start: int, length: int) -> bytes:
        """As File.read, with UNREADABLE for the blocks that cannot be read. These are found by
        halves: few bad blocks take few reads. Raises DiskHung."""
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


class Ending(Enum):
    """How the node's last run ended, as far as its journal shows."""

    CLEAN = "clean"
    """The journal is sealed, with nothing after the seal; or there never was a run."""
    UNCLEAN = "unclean"
    """Not sealed: entries that a page-cache ledger acknowledged last may be gone."""
    TORN = "torn"
    """Not sealed, and bytes beyond the synced ones cannot be read: a torn write, or damage of a
    write that was acknowledged."""


class Replay:
    """Reads the segments at and after a mark.

    Iterate `records()` to the end; then `damage` are the unreadable bytes below a position that was
    surely synced (acknowledged data may be lost), `torn` those beyond it (a write that was not
    synced: acknowledged in the page-cache lane only), `ending` is how the last run ended, and `end`
    is where the journal ends. No crash cuts a segment short or makes a block unreadable: in such a
    segment all unreadable bytes are damage.
    """

    def __init__(self, disk: Disk, mark: Position | None) -> None:
        self._disk = disk
        self._known_synced = mark or Position(0, 0)
        self._synced_in: dict[int, int] = {}  # by segment: the highest synced offset in batches
        self._mark = mark
        self._suspects: list[Suspect] = []
        self._missing: list[Suspect] = []
        self._no_crash: dict[int, None] = {}  # segments with harm that no crash does
        self._sealed = False
        self.end = self._known_synced
        self.file_ids: list[int] = []

    @property
    def damage(self) -> list[Suspect]:
        return [s for s in self._suspects if self._is_damage(s)] + self._missing

    @property
    def torn(self) -> list[Suspect]:
        return [s for s in self._suspects if s.why != _END and not self._is_damage(s)]

    @property
    def ending(self) -> Ending:
        if self.torn:
            return Ending.TORN
        never_ran = self._mark is None and not self.file_ids
        return Ending.CLEAN if self._sealed or never_ran else Ending.UNCLEAN

    def _is_damage(self, suspect: Suspect) -> bool:
        below = suspect.position < self._known_synced
        if suspect.why == _END:
            return below and self._ends_early(suspect.position)
        return below or suspect.position.file_id in self._no_crash

    def _ends_early(self, end: Position) -> bool:
        """Whether more of the segment was synced than can be read; the first batch of the next
        segment has the end of a full one."""
        return end.offset < self._synced_in.get(end.file_id, 0)

    async def records(self) -> AsyncIterator[list[Record]]:
        """The whole records, batch by batch, in the order of writing. Raises DiskFailed.

        A segment's name is durable before the next one is made, so a gap in them is damage.
        """
        self.file_ids = await segment_ids(self._disk)
        if self._mark is None and not self.file_ids:
            return  # a node's first start
        first = self._mark.file_id if self._mark is not None else self.file_ids[0]
        for file_id in range(first, max([first, *self.file_ids]) + 1):
            if file_id not in self.file_ids:
                where = Position(file_id, 0)
                self._missing.append(Suspect(where, None, None, "the segment is missing"))
                continue
            async for records in self._records_of(file_id):
                yield records

    async def _records_of(self, file_id: int) -> AsyncIterator[list[Record]]:
        file = await self._disk.open(segment_path(file_id))
        reader = SegmentReader(file)
        try:
            missing = _missing_of(await reader.read_around(0, BLOCK_BYTES), file_id, file.end)
            start = self._mark.offset if self._mark and self._mark.file_id == file_id else 0
            start = at = max(start, BLOCK_BYTES)
            while (batch := await self._next_batch(reader, file_id, at)) is not None:
                length = BATCH_HEADER_BYTES + batch.records_bytes
                data = await reader.read(batch.offset, length, batch.end)
                records, suspects = decode_records(data, batch)
                self._suspects += suspects
                self._note_synced(batch.synced)
                self._sealed = bool(records) and records[-1].kind is RecordKind.SEAL
                at = batch.end
                yield records
            self.end = Position(file_id, at)
            if missing:
                self._missing.append(Suspect(self.end, None, None, missing))
            else:
                self._suspects.append(Suspect(self.end, None, None, _END))
            if missing or reader.unreadable_end > start:
                self._no_crash[file_id] = None
        finally:
            await reader.close()
            await file.close()

    def _note_synced(self, synced: Position) -> None:
        self._known_synced = max(self._known_synced, synced)
        earlier = self._synced_in.get(synced.file_id, 0)
        self._synced_in[synced.file_id] = max(earlier, synced.offset)

    async def _next_batch(self, reader: SegmentReader, file_id: int, at: int) -> BatchHeader | None:
        """The batch at `at`, or the next one after bytes that are no batch."""
        try:
            return decode_batch_header(await reader.read(at, BATCH_HEADER_BYTES), file_id, at)
        except BadJournal as error:
            if not await self._is_written(reader, at):
                return None  # so nearly every segment ends: there is nothing to search
            self._suspects.append(Suspect(Position(file_id, at), None, None, str(error)))
            return await self._search_batch(reader, file_id, at + BLOCK_BYTES)

    async def _is_written(self, reader: SegmentReader, at: int) -> bool:
        """Whether any byte from `at` on is not a zero of reserved space."""
        while data := await reader.read_around(at, _SCAN_BYTES):
            if data != bytes(len(data)):
                return True
            at += len(data)
        return False

    async def _search_batch(
        self, reader: SegmentReader, file_id: int, at: int
    ) -> BatchHeader | None:
        while data := await reader.read_around(at, _SCAN_BYTES):
            candidates = BATCH_MAGIC in data and range(0, len(data), BLOCK_BYTES)
            for offset in candidates or ():
                with contextlib.suppress(BadJournal):
                    head = data[offset : offset + BATCH_HEADER_BYTES]
                    return decode_batch_header(head, file_id, at + offset)
            at += len(data)
        return None


def _missing_of(head: Buffer, file_id: int, end: int) -> str:
    """What the segment that begins with `head` and ends at `end` has lost; empty: nothing that
    shows. A damaged header is no loss: each batch has its own file and position."""
    if len(head) < BLOCK_BYTES or not any(head):
        return "the segment has lost its header"
    try:
        length = decode_file_header(head, file_id)
    except BadJournal as error:
        _log.warning("journal segment %d: %s", file_id, error)
        return ""
    return f"the segment is cut: it had {length} bytes, not {end}" if end < length else ""


_END = "the segment's readable part ends here"
