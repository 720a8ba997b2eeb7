"""The journal: group commit, segments, replay.

Always true:
- the records of a ledger become durable in the order they were appended; a future is done only
  after the sync that covers its records, in a segment whose name is durable;
- only in the page-cache lane a future is done after the write: the sync follows within
  page_cache_sync_s, and before anything of another lane is acknowledged or a segment is left;
  `synced` never runs ahead of the syncs;
- batches gather by themselves: while one write + sync runs, what is appended meanwhile is the
  next batch; there is no timer (but for the sync that follows);
- the first failed write or sync, and a next segment that cannot be made, end the journal: all
  that waits fails with JournalFailed, and nothing is accepted after it; for a next segment that
  only lacks space there is another try until there is some;
- a segment has its name only when its header is durable, and all of its length: one that is shorter
  or has none is damaged. What a crash left half made has another name, and no number;
- after a restart a new segment is begun; an old one is only read.

The next segment is made (space reserved, header and name synced) ahead of need. Which records go
into a batch is the decision of queue.py.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from enum import Enum
from typing import NamedTuple

from bookie_server.api.entry import NO_ENTRY, Buffer
from bookie_server.budget import Work
from bookie_server.disk.interface import Disk, DiskFailed, DiskFull, File
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
    encode_batch,
    encode_file_header,
    padded,
)
from bookie_server.journal.queue import Group, JournalQueue
from bookie_server.journal.scan import SegmentReader
from bookie_server.lanes import Lane
from bookie_server.storage_config import StorageConfig

FOLDER = "journal"
SUFFIX, DAMAGED_SUFFIX, MAKING_SUFFIX = ".journal", ".damaged", ".making"
ANY_BYTES = 1 << 62
FENCES_PART = 8  # of the least segment, kept for fences when there is no space for another
SPACE_PAUSE_S = 1.0  # between two tries to make a segment for which there was no space
_SCAN_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class JournalFailed(Exception):
    """The journal is dead: nothing more will be durable. The outcome of what waited is unknown."""


def segment_path(file_id: int) -> str:
    return f"{FOLDER}/{file_id:010d}{SUFFIX}"


async def segment_ids(disk: Disk) -> list[int]:
    """The segments on disk, ascending."""
    names = await disk.list(FOLDER)
    return [int(name.removesuffix(SUFFIX)) for name in names if name.endswith(SUFFIX)]


class _Segment(NamedTuple):
    """A segment to write to: its blocks up to `bytes_max` are reserved."""

    file_id: int
    file: File
    bytes_max: int


class Journal:
    """The writing side. Made by `open`; one task of its own writes."""

    def __init__(
        self, disk: Disk, config: StorageConfig, segment: _Segment, synced: Position
    ) -> None:
        self._disk = disk
        self._config = config
        self._segment = segment
        self._batch_no = 0
        self._synced = synced  # what the next batch's header will say
        self._sync_at: float | None = None  # when what was only written is to be synced
        least = _least_bytes(config)
        self._queue = JournalQueue(config.journal_batch_bytes_max, least - 2 * BLOCK_BYTES)
        self._wake = asyncio.Event()
        self._closing = False
        self._hurry = False
        self._failure: JournalFailed | None = None
        self._lost: DiskFailed | None = None
        self._next = self._make_next()
        self._writing = Work()
        self.pending_bytes = 0
        """Bytes appended and not yet acknowledged."""
        self.task = asyncio.ensure_future(self._run())
        """Ends with the exception that ended the journal."""

    @classmethod
    async def open(
        cls, disk: Disk, config: StorageConfig, file_id: int, synced: Position
    ) -> "Journal":
        """Begin segment `file_id`; everything before `synced` was durable. Raises DiskFailed."""
        return cls(disk, config, await _make_segment(disk, file_id, config), synced)

    @property
    def synced(self) -> Position:
        """Everything before it is durable."""
        return max(self._synced, Position(self._segment.file_id, BLOCK_BYTES))

    @property
    def room_bytes(self) -> int:
        """How much adds may have pending without waiting for disk space: anything while the next
        segment is there, else what the last one has left, but for a part that is kept for fences
        (and padding)."""
        if self._has_next:
            return ANY_BYTES
        kept_bytes = _least_bytes(self._config) // FENCES_PART
        return self._segment.bytes_max - self._segment.file.end - kept_bytes

    @property
    def wait_s(self) -> float:
        """Seconds in which half of what is pending should be written: there is room again then."""
        now_s = asyncio.get_running_loop().time()
        return self._writing.left_s(now_s, self.pending_bytes // 2)

    def append(
        self, records: Sequence[Record], lane: Lane = Lane.BULK, after: Sequence[int] = ()
    ) -> asyncio.Future[None]:
        """Queue the records. The future is done when they are durable, and so is what was appended
        before of their ledgers and of the ledgers `after`; in the page-cache lane, which takes
        entries only, when it is written.

        With neither records nor `after` it is a barrier: done when all that was appended before
        is. Fails with JournalFailed. Shield it: cancelling it cancels nothing but the waiting.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(retrieve)
        if self._failure is not None or self._closing:
            done.set_exception(self._failure or JournalFailed("the journal is closed"))
            return done
        self.pending_bytes += self._queue.put(records, lane, after, done)
        self._wake.set()
        return done

    async def forget_before(self, mark: Position) -> None:
        """Remove the segments that a durable checkpoint `mark` no longer needs, durably: what an
        older copy of the checkpoint says is told from the truth by what is gone."""
        needed = min(mark.file_id, self._segment.file_id)
        unneeded = [i for i in await segment_ids(self._disk) if i < needed]
        for file_id in unneeded:
            await self._disk.remove(segment_path(file_id))
        if unneeded:
            await self._disk.sync_dir(FOLDER)

    async def set_aside(self, file_id: int) -> None:
        """Keep a damaged segment for an examination; it is never read here again."""
        path = segment_path(file_id)
        if path.removeprefix(f"{FOLDER}/") in await self._disk.list(FOLDER):
            await self._disk.rename(path, path.removesuffix(SUFFIX) + DAMAGED_SUFFIX)
            await self._disk.sync_dir(FOLDER)

    def fail(self, error: DiskFailed) -> None:
        """The directory was found to be lost: end as after a failed write."""
        self._lost = error
        self._wake.set()

    def hurry(self) -> None:
        """The node stops: nobody waits for disk space any more; a segment that is full then, with
        no space for the next, ends the journal."""
        self._hurry = True

    async def close(self) -> None:
        """Write and sync what is queued and the seal; nothing is taken any more.

        Raises JournalFailed.
        """
        self.hurry()
        sealed = self.append([Record(RecordKind.SEAL, NO_ENTRY, NO_ENTRY, b"", 0)])
        self._closing = True
        try:
            await asyncio.shield(sealed)
            await self.task
        finally:
            with contextlib.suppress(DiskFailed):
                await (await self._next).file.close()
            await self._segment.file.close()

    def abandon(self) -> None:
        """End at once, as a crash would."""
        self.task.cancel()
        self._next.cancel()

    # -- the writing task --

    async def _run(self) -> None:
        try:
            while self._queue or not self._closing:
                self._check_next()
                if self._queue:
                    await self._write(self._queue.take())
                elif not await self._something_came():
                    await self._sync()
        except Exception as error:
            self._failure = JournalFailed(f"the journal failed: {error}")
            self._queue.fail(self._failure)
            raise

    async def _something_came(self) -> bool:
        """False: nothing did before the moment at which what was written is to be synced."""
        self._wake.clear()
        if self._sync_at is None:
            return await self._wake.wait()
        try:
            async with asyncio.timeout_at(self._sync_at):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    async def _write(self, groups: list[Group]) -> None:
        records = [record for group in groups for record in group.records]
        size = sum([group.bytes for group in groups])
        needs_sync = any([group.needs_sync for group in groups]) or self._sync_is_due
        try:
            if records:
                await self._write_batch(records, padded(BATCH_HEADER_BYTES + size), needs_sync)
            elif needs_sync:
                await self._sync()
        except Exception:
            self._queue.put_back(groups)  # all waiting appends end, these first
            raise
        self.pending_bytes -= size
        for group in groups:
            group.ack.written()

    async def _write_batch(self, records: list[Record], size: int, sync: bool) -> None:
        if self._segment.file.end + size > self._segment.bytes_max:
            await self._roll()
        file_id, file = self._segment.file_id, self._segment.file
        batch = encode_batch(file_id, file.end, self._batch_no, self._synced, records)
        self._writing.begun(size, asyncio.get_running_loop().time())
        await file.append(batch, sync=sync)
        self._batch_no += 1
        ended_s = asyncio.get_running_loop().time()
        self._writing.ended(ended_s)
        if sync:
            self._all_is_synced()
        elif self._sync_at is None:
            self._sync_at = ended_s + self._config.page_cache_sync_s

    async def _roll(self) -> None:
        """Go on in the next segment; the last one is wholly synced before."""
        await self._sync()
        following = await self._next
        await self._segment.file.close()
        self._segment, self._batch_no = following, 0
        self._next = self._make_next()

    # -- the sync that follows what was only written --

    @property
    def _sync_is_due(self) -> bool:
        return self._sync_at is not None and asyncio.get_running_loop().time() >= self._sync_at

    async def _sync(self) -> None:
        if self._sync_at is not None:
            await self._segment.file.sync()
            self._all_is_synced()

    def _all_is_synced(self) -> None:
        self._synced = Position(self._segment.file_id, self._segment.file.end)
        self._sync_at = None

    # -- the next segment --

    @property
    def _has_next(self) -> bool:
        return self._next.done() and not self._next.cancelled() and not self._next.exception()

    def _make_next(self) -> asyncio.Task[_Segment]:
        making = asyncio.ensure_future(self._make_when_there_is_space(self._segment.file_id + 1))
        making.add_done_callback(lambda _: self._wake.set())
        return making

    async def _make_when_there_is_space(self, file_id: int) -> _Segment:
        said = False
        while True:
            try:
                return await _make_segment(self._disk, file_id, self._config)
            except DiskFull as error:
                if not said:
                    _log.warning("journal segment %d cannot be made yet: %s", file_id, error)
                said = True
                if self._hurry:
                    raise
            await asyncio.sleep(SPACE_PAUSE_S)

    def _check_next(self) -> None:
        """A disk that makes no segment is dead, and it shows before the roll. Raises DiskFailed."""
        if self._lost is not None:
            raise self._lost
        if self._next.done() and not self._next.cancelled():
            error = self._next.exception()
            if error is not None and not isinstance(error, DiskFull):
                raise error


async def _make_segment(disk: Disk, file_id: int, config: StorageConfig) -> _Segment:
    """A segment of the usual size or, when there is no space for that, of the least.

    Raises DiskFull when nothing of it was made, else DiskFailed.
    """
    path, bytes_max = segment_path(file_id), config.journal_bytes_max
    await _remove_half_made(disk)
    if file_id in await segment_ids(disk):
        raise DiskFailed(f"{path}: exists already")
    try:
        file = await disk.create(path + MAKING_SUFFIX, bytes_max, direct=True)
    except DiskFull:
        bytes_max = _least_bytes(config)
        file = await disk.create(path + MAKING_SUFFIX, bytes_max, direct=True)
    try:
        await file.append([encode_file_header(file_id, bytes_max)], sync=True)
        await disk.rename(path + MAKING_SUFFIX, path)
        await disk.sync_dir(FOLDER)
    except DiskFull as error:  # its blocks were reserved: this is no lack of space
        raise DiskFailed(f"{path}: {error}") from error
    return _Segment(file_id, file, bytes_max)


async def _remove_half_made(disk: Disk) -> None:
    """What a crash left of a segment that was being made."""
    for name in await disk.list(FOLDER):
        if name.endswith(MAKING_SUFFIX):
            await disk.remove(f"{FOLDER}/{name}")


def _least_bytes(config: StorageConfig) -> int:
    """The least segment takes any batch; StorageConfig sees that the usual one is no smaller."""
    largest = config.journal_batch_bytes_max + config.entry_bytes_max
    return min(config.journal_bytes_max, largest + 16 * BLOCK_BYTES)


def retrieve(done: asyncio.Future[None]) -> None:
    """A failed append is heard of through `task`; not every record has a waiter."""
    if not done.cancelled():
        done.exception()


# -- reading, at start ------------------------------------------------------------------------


class Ending(Enum):
    """How the node's last run ended, as far as its journal shows."""

    CLEAN = "clean"
    """Sealed, with nothing after it; or there never was a run."""
    UNCLEAN = "unclean"
    """Not sealed: what a ledger of page-cache durability acknowledged last may be gone."""
    TORN = "torn"
    """Not sealed, and there are bytes beyond the synced ones that cannot be read: a write that was
    torn, or rot in one that was acknowledged."""


class Replay:
    """Reads the segments at and after a mark.

    Iterate `records()` to the end; then `damage` are the unreadable bytes below a position known
    to be synced (acknowledged data may be lost), `torn` those beyond it (a write that was not
    synced: acknowledged in the page-cache lane only), `ending` says how the last run ended, and
    `end` is where the journal ends. No crash cuts a segment short or makes a block unreadable: what
    cannot be read in such a segment is damage wherever it lies.
    """

    def __init__(self, disk: Disk, mark: Position | None) -> None:
        self._disk = disk
        self._known_synced = mark or Position(0, 0)
        self._synced_in: dict[int, int] = {}  # by segment: the highest offset said to be synced
        self._mark = mark
        self._suspects: list[Suspect] = []
        self._missing: list[Suspect] = []
        self._no_crash: dict[int, None] = {}  # segments with what no crash does
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
        """Whether more of the segment was synced than can be read; a full one ends where the
        first batch of the next says."""
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
        known = self._synced_in.get(synced.file_id, 0)
        self._synced_in[synced.file_id] = max(known, synced.offset)

    async def _next_batch(self, reader: SegmentReader, file_id: int, at: int) -> BatchHeader | None:
        """The batch at `at`, or the next one that can be found after bytes that are none."""
        try:
            return decode_batch_header(await reader.read(at, BATCH_HEADER_BYTES), file_id, at)
        except BadJournal as error:
            if not await self._is_written(reader, at):
                return None  # the rest of nearly every segment: there is nothing to search
            self._suspects.append(Suspect(Position(file_id, at), None, None, str(error)))
            return await self._search_batch(reader, file_id, at + BLOCK_BYTES)

    async def _is_written(self, reader: SegmentReader, at: int) -> bool:
        """Whether there is anything from `at` on but the zeros of reserved space."""
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
    """What the segment has lost, which begins with `head` and ends at `end`; empty: nothing that
    shows. A header that is there and bad is no loss: each batch says by itself where it belongs."""
    if len(head) < BLOCK_BYTES or not any(head):
        return "the segment has lost its header"
    try:
        length = decode_file_header(head, file_id)
    except BadJournal as error:
        _log.warning("journal segment %d: %s", file_id, error)
        return ""
    return f"the segment is cut: it had {length} bytes, not {end}" if end < length else ""


_END = "the segment's readable part ends here"
