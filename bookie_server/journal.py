"""The journal: group commit, segments, replay.

Always true:
- records become durable in the order they were appended; a future is done only after the sync
  that covers its records, in a segment whose name is durable;
- batches gather by themselves: while one write + sync runs, what is appended meanwhile is the
  next batch; there is no timer;
- the first failed write or sync ends the journal: all that waits fails with JournalFailed, and
  nothing is accepted after it;
- after a restart a new segment is begun; an old one is only read.

The next segment is made (space reserved, header and name synced) ahead of need.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from bookie_server.api.entry import NO_ENTRY
from bookie_server.disk import Disk, DiskFailed, File
from bookie_server.journal_format import (
    BATCH_HEADER_BYTES,
    BATCH_MAGIC,
    BLOCK_BYTES,
    RECORD_HEADER_BYTES,
    BadJournal,
    BatchHeader,
    Kind,
    Position,
    Record,
    Suspect,
    batch_bytes,
    decode_batch_header,
    decode_file_header,
    decode_records,
    encode_batch,
    encode_file_header,
    records_bytes,
)
from bookie_server.storage_config import StorageConfig

FOLDER = "journal"
SUFFIX, DAMAGED_SUFFIX = ".journal", ".damaged"
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


class _Group(NamedTuple):
    """Records that are written in one batch, and who waits for them (None: see a later group)."""

    records: Sequence[Record]
    bytes: int
    done: asyncio.Future[None] | None


class Journal:
    """The writing side. Made by `open`; one task of its own writes."""

    def __init__(self, disk: Disk, config: StorageConfig, file: File, position: Position) -> None:
        self._disk = disk
        self._config = config
        self._file = file
        self._file_id = position.file_id
        self._batch_no = 0
        self._synced = position  # what the next batch's header will say
        self._queue: deque[_Group] = deque()
        self._wake = asyncio.Event()
        self._closing = False
        self._failure: JournalFailed | None = None
        self._next = asyncio.ensure_future(_make_segment(disk, self._file_id + 1, config))
        self.pending_bytes = 0
        self.task = asyncio.ensure_future(self._run())
        """Ends with the exception that ended the journal."""

    @classmethod
    async def open(
        cls, disk: Disk, config: StorageConfig, file_id: int, synced: Position
    ) -> "Journal":
        """Begin segment `file_id`; everything before `synced` was durable. Raises DiskFailed."""
        file = await _make_segment(disk, file_id, config)
        journal = cls(disk, config, file, Position(file_id, BLOCK_BYTES))
        journal._synced = synced
        return journal

    @property
    def synced(self) -> Position:
        """Everything before it is durable."""
        return max(self._synced, Position(self._file_id, BLOCK_BYTES))

    def append(self, records: Sequence[Record]) -> asyncio.Future[None]:
        """Queue the records, in order. The future is done when they and all before are durable.

        With no records it is a barrier. Fails with JournalFailed. Shield it: cancelling it
        cancels nothing but the waiting.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(_retrieve)
        if self._failure is not None or self._closing:
            done.set_exception(self._failure or JournalFailed("the journal is closed"))
            return done
        groups = _split(records, self._config.journal_batch_bytes_max)
        for group in groups[:-1]:
            self._enqueue(_Group(group, records_bytes(group), None))
        self._enqueue(_Group(groups[-1], records_bytes(groups[-1]), done))
        self._wake.set()
        return done

    async def forget_before(self, mark: Position) -> None:
        """Remove the segments that a durable checkpoint `mark` no longer needs."""
        for file_id in await segment_ids(self._disk):
            if file_id < min(mark.file_id, self._file_id):
                await self._disk.remove(segment_path(file_id))

    async def set_aside(self, file_id: int) -> None:
        """Keep a damaged segment for whoever examines it; it is never read here again."""
        path = segment_path(file_id)
        if path.removeprefix(f"{FOLDER}/") in await self._disk.list(FOLDER):
            await self._disk.rename(path, path.removesuffix(SUFFIX) + DAMAGED_SUFFIX)
            await self._disk.sync_dir(FOLDER)

    async def close(self) -> None:
        """Write what is queued and the seal; nothing is taken any more. Raises JournalFailed."""
        sealed = self.append([Record(Kind.SEAL, NO_ENTRY, NO_ENTRY, b"", 0)])
        self._closing = True
        try:
            await asyncio.shield(sealed)
            await self.task
        finally:
            with contextlib.suppress(DiskFailed):
                await (await self._next).close()
            await self._file.close()

    def abandon(self) -> None:
        """End at once, as a crash would."""
        self.task.cancel()
        self._next.cancel()

    # -- the writing task --

    def _enqueue(self, group: _Group) -> None:
        self._queue.append(group)
        self.pending_bytes += group.bytes

    async def _run(self) -> None:
        try:
            while not (self._closing and not self._queue):
                if self._queue:
                    await self._write(self._gather())
                else:
                    self._wake.clear()
                    await self._wake.wait()
        except Exception as error:
            self._fail(error)
            raise

    def _gather(self) -> list[_Group]:
        """The next batch: queued groups up to the batch limit, at least one."""
        groups = [self._queue.popleft()]
        total = groups[0].bytes
        while self._queue and total + self._queue[0].bytes <= self._config.journal_batch_bytes_max:
            groups.append(self._queue.popleft())
            total += groups[-1].bytes
        return groups

    async def _write(self, groups: list[_Group]) -> None:
        records = [record for group in groups for record in group.records]
        try:
            if records:
                await self._write_batch(records)
        except Exception:
            self._queue.extendleft(reversed(groups))  # _fail tells all who wait, these first
            raise
        for group in groups:
            self.pending_bytes -= group.bytes
            if group.done is not None and not group.done.done():
                group.done.set_result(None)

    async def _write_batch(self, records: list[Record]) -> None:
        if self._file.end + batch_bytes(records) > self._config.journal_bytes_max:
            await self._roll()
        batch = encode_batch(self._file_id, self._file.end, self._batch_no, self._synced, records)
        await self._file.append(batch, sync=True)
        self._batch_no += 1
        self._synced = Position(self._file_id, self._file.end)

    async def _roll(self) -> None:
        """Go on in the next segment; the last one is wholly synced, for no batch is under way."""
        following = await self._next
        await self._file.close()
        self._file, self._file_id, self._batch_no = following, self._file_id + 1, 0
        self._next = asyncio.ensure_future(
            _make_segment(self._disk, self._file_id + 1, self._config)
        )

    def _fail(self, error: Exception) -> None:
        self._failure = JournalFailed(f"the journal failed: {error}")
        while self._queue:
            done = self._queue.popleft().done
            if done is not None and not done.done():
                done.set_exception(self._failure)


async def _make_segment(disk: Disk, file_id: int, config: StorageConfig) -> File:
    file = await disk.create(segment_path(file_id), config.journal_bytes_max, direct=True)
    await file.append([encode_file_header(file_id)], sync=True)
    await disk.sync_dir(FOLDER)
    return file


def _split(records: Sequence[Record], bytes_max: int) -> list[Sequence[Record]]:
    """Cut into groups of at most `bytes_max` each; a larger record is a group of its own."""
    if records_bytes(records) <= bytes_max:
        return [records]
    groups: list[Sequence[Record]] = []
    group: list[Record] = []
    room = bytes_max
    for record in records:
        room -= RECORD_HEADER_BYTES + len(record.body)
        if group and room < 0:
            groups.append(group)
            group, room = [], bytes_max - RECORD_HEADER_BYTES - len(record.body)
        group.append(record)
    return [*groups, group]


def _retrieve(done: asyncio.Future[None]) -> None:
    """A failed append is heard of through `task`; not every record has somebody who waits."""
    if not done.cancelled():
        done.exception()


# -- reading, at start ------------------------------------------------------------------------


class Replay:
    """Reads the segments at and after a mark.

    Iterate `records()` to the end; then `damage` are the unreadable bytes below a position known
    to be synced (acknowledged data may be lost), `torn` those beyond it (a write that never was
    acknowledged), and `end` is where the journal ends.
    """

    def __init__(self, disk: Disk, mark: Position | None) -> None:
        self._disk = disk
        self._known_synced = mark or Position(0, 0)
        self._synced_in: dict[int, int] = {}  # by segment: the highest offset said to be synced
        self._mark = mark
        self._suspects: list[Suspect] = []
        self._missing: list[Suspect] = []
        self.end = self._known_synced
        self.file_ids: list[int] = []

    @property
    def damage(self) -> list[Suspect]:
        below = [s for s in self._suspects if s.position < self._known_synced]
        return self._missing + [s for s in below if s.why != _END or self._ends_early(s.position)]

    @property
    def torn(self) -> list[Suspect]:
        return [s for s in self._suspects if s.position >= self._known_synced and s.why != _END]

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
        try:
            _note_bad_file_header(await file.read(0, BLOCK_BYTES), file_id)
            start = self._mark.offset if self._mark and self._mark.file_id == file_id else 0
            at = max(start, BLOCK_BYTES)
            while (batch := await self._next_batch(file, file_id, at)) is not None:
                data = await file.read(batch.offset, BATCH_HEADER_BYTES + batch.records_bytes)
                records, suspects = decode_records(data, batch)
                self._suspects += suspects
                self._note_synced(batch.synced)
                at = batch.end
                yield records
            self.end = Position(file_id, at)
            self._suspects.append(Suspect(self.end, None, None, _END))
        finally:
            await file.close()

    def _note_synced(self, synced: Position) -> None:
        self._known_synced = max(self._known_synced, synced)
        known = self._synced_in.get(synced.file_id, 0)
        self._synced_in[synced.file_id] = max(known, synced.offset)

    async def _next_batch(self, file: File, file_id: int, at: int) -> BatchHeader | None:
        """The batch at `at`, or the next one that can be found after bytes that are none."""
        try:
            return decode_batch_header(await file.read(at, BATCH_HEADER_BYTES), file_id, at)
        except BadJournal as error:
            found = await self._search_batch(file, file_id, at + BLOCK_BYTES)
            if found is not None:
                self._suspects.append(Suspect(Position(file_id, at), None, None, str(error)))
            return found

    async def _search_batch(self, file: File, file_id: int, at: int) -> BatchHeader | None:
        while data := await file.read(at, _SCAN_BYTES):
            candidates = data.count(BATCH_MAGIC) and range(0, len(data), BLOCK_BYTES)
            for offset in candidates or ():
                with contextlib.suppress(BadJournal):
                    head = data[offset : offset + BATCH_HEADER_BYTES]
                    return decode_batch_header(head, file_id, at + offset)
            at += len(data)
        return None


def _note_bad_file_header(data: bytes, file_id: int) -> None:
    """Nothing is lost with it: each batch says by itself where it belongs."""
    try:
        decode_file_header(data, file_id)
    except BadJournal as error:
        _log.warning("journal segment %d: %s", file_id, error)


_END = "the segment's readable part ends here"
