"""The journal: the queue of records that wait, the group commit, and the segments.

Always true:
- an append's future is done only after the sync of its last record, in a segment whose name is
  durable;
- in the page-cache lane a future is done already after the write: the sync follows within
  page_cache_sync_s, and before an append of another lane is acknowledged or the next segment is
  begun; `synced` never exceeds the position that was synced;
- the appends that arrive during a write and sync are the next batch; there is no timer (except for
  the sync that follows a page-cache write);
- the first failed write or sync, and a next segment that cannot be made, end the journal: all
  waiting appends fail with JournalFailed, and later appends are refused; if there is only no space
  for the next segment, the journal tries again until there is space;
- a segment gets its name only when its header and its whole length are durable: a segment that is
  shorter or has no header is damaged. Until then the file has another name (MAKING_SUFFIX) and does
  not count as a segment;
- after a restart a new segment is begun; old segments are only read (scan.py).

Always true of the order of records (a *group*: records of one ledger that one batch writes):
- the records of one ledger are written in the order of their appends, whatever their lanes;
- groups of the recovery lane, and the waiting groups of their ledgers, are urgent: they are written
  before the waiting groups of all other ledgers, the *bulk*;
- every batch takes the oldest bulk group; if the batch has no room for that group, the next batch
  takes bulk groups only. So recovery never blocks the other lanes for long.

The next segment is made (space reserved, header and name synced) ahead of need.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from bookie_server.api.entry import NO_ENTRY
from bookie_server.config import StorageConfig
from bookie_server.disk.interface import Disk, DiskFailed, DiskFull, File
from bookie_server.journal.format import (
    BATCH_HEADER_BYTES,
    BLOCK_BYTES,
    RECORD_HEADER_BYTES,
    Position,
    Record,
    RecordKind,
    encode_batch,
    encode_file_header,
    padded,
    records_bytes,
)
from bookie_server.lanes import Lane, Work

FOLDER = "journal"
SUFFIX, DAMAGED_SUFFIX, MAKING_SUFFIX = ".journal", ".damaged", ".making"
UNLIMITED_BYTES = 1 << 62
FENCE_SHARE = 8  # while no next segment can be made, 1/8 of the least size is kept for fences
SPACE_PAUSE_S = 1.0  # between two tries to make a segment for which there was no space
_log = logging.getLogger(__name__)


class JournalFailed(Exception):
    """The journal is dead: no further append becomes durable. The outcome of waiting appends is
    unknown."""


def segment_path(file_id: int) -> str:
    return f"{FOLDER}/{file_id:010d}{SUFFIX}"


async def segment_ids(disk: Disk) -> list[int]:
    """The segments on disk, ascending."""
    names = await disk.list(FOLDER)
    return [int(name.removesuffix(SUFFIX)) for name in names if name.endswith(SUFFIX)]


class Ack:
    """The future of an append, and how many groups of the append are not written yet."""

    __slots__ = ("done", "unwritten")

    def __init__(self, done: asyncio.Future[None], unwritten: int) -> None:
        self.done = done
        self.unwritten = unwritten

    def count_written(self) -> None:
        self.unwritten -= 1
        if not self.unwritten and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class _Part(NamedTuple):
    """Records of one ledger, of which a Group is made."""

    ledger_id: int
    records: Sequence[Record]
    bytes: int


class Group(NamedTuple):
    """Records of one ledger that are written in one batch. An empty group waits for the earlier
    records of its ledger; with `ledger_id` None, for the batch that is being written."""

    ledger_id: int | None
    records: Sequence[Record]
    bytes: int
    needs_sync: bool
    ack: Ack


class JournalQueue:
    """The records that wait to be written; `take` chooses those of the next batch. A group has at
    most `group_bytes_max`, or one larger record; a batch has at most `batch_bytes_max`."""

    def __init__(self, group_bytes_max: int, batch_bytes_max: int) -> None:
        self._group_bytes_max = group_bytes_max
        self._batch_bytes_max = batch_bytes_max
        self._urgent: deque[Group] = deque()
        self._bulk: deque[Group] = deque()
        self._urgent_counts: dict[int, int] = {}  # by ledger: how many urgent groups it has
        self._is_bulk_passed_over = False  # the last batch had no room for the first bulk group

    def __len__(self) -> int:
        return len(self._urgent) + len(self._bulk)

    def put(
        self,
        records: Sequence[Record],
        lane: Lane,
        after: Sequence[int],
        done: asyncio.Future[None],
    ) -> int:
        """Queue the records; returns their bytes. `done` is set when the records, and all earlier
        records of their ledgers and of the ledgers `after`, are written. With neither records nor
        `after`, `done` is set when all earlier records are written."""
        needs_sync = lane is not Lane.PAGE_CACHE
        assert needs_sync or all(record.kind is RecordKind.ENTRY for record in records)
        is_barrier = not records and not after
        parts = self._parts(records, self._waiting_ledgers() if is_barrier else after)
        ack = Ack(done, len(parts) + is_barrier)
        if is_barrier:  # for the batch that is being written
            self._bulk.append(Group(None, (), 0, needs_sync, ack))
        total = 0
        for ledger_id, part, size in parts:
            total += size
            self._enqueue(Group(ledger_id, part, size, needs_sync, ack), lane)
        return total

    def take(self) -> list[Group]:
        """Remove and return the groups of the next batch, at least one if any waits."""
        urgent_max = self._group_bytes_max // 2 if self._bulk else self._group_bytes_max
        taken = (
            [] if self._is_bulk_passed_over else _take(self._urgent, urgent_max, UNLIMITED_BYTES)
        )
        for group in taken:
            self._uncount_urgent(group)
        used = sum([group.bytes for group in taken])
        room_for_first = self._batch_bytes_max - used if taken else UNLIMITED_BYTES
        bulk = _take(self._bulk, self._group_bytes_max - used, room_for_first)
        self._is_bulk_passed_over = bool(self._bulk) and not bulk
        return taken + bulk

    def has(self, ledger_id: int) -> bool:
        """Whether a group of the ledger waits."""
        return any(group.ledger_id == ledger_id for group in (*self._urgent, *self._bulk))

    def put_back(self, groups: Sequence[Group]) -> None:
        """Put the groups of a failed batch back to the head of the queue, for `fail`."""
        self._bulk.extendleft(reversed(groups))

    def fail(self, error: Exception) -> None:
        """Fail all waiting appends."""
        for queue in (self._bulk, self._urgent):
            while queue:
                queue.popleft().ack.fail(error)
        self._urgent_counts.clear()

    def _parts(self, records: Sequence[Record], after: Sequence[int]) -> list[_Part]:
        parts: list[_Part] = []
        by_ledger = _by_ledger(records)
        for ledger_id, ledger_records in by_ledger.items():
            size = records_bytes(ledger_records)
            if size <= self._group_bytes_max:
                parts.append(_Part(ledger_id, ledger_records, size))
                continue
            split = _split(ledger_records, self._group_bytes_max)
            parts += [_Part(ledger_id, part, records_bytes(part)) for part in split]
        parts += [_Part(ledger_id, (), 0) for ledger_id in after if ledger_id not in by_ledger]
        return parts

    def _waiting_ledgers(self) -> list[int]:
        groups = [*self._urgent, *self._bulk]
        return list(dict.fromkeys([g.ledger_id for g in groups if g.ledger_id is not None]))

    def _enqueue(self, group: Group, lane: Lane) -> None:
        assert group.ledger_id is not None
        if lane is Lane.RECOVERY:
            self._move_ahead(group.ledger_id)
        elif group.ledger_id not in self._urgent_counts:
            self._bulk.append(group)
            return
        self._make_urgent(group)

    def _move_ahead(self, ledger_id: int) -> None:
        """Make the ledger's waiting groups urgent, before its recovery group is queued."""
        if not any(group.ledger_id == ledger_id for group in self._bulk):
            return
        waiting, self._bulk = self._bulk, deque()
        for group in waiting:
            if group.ledger_id == ledger_id:
                self._make_urgent(group)
            else:
                self._bulk.append(group)

    def _make_urgent(self, group: Group) -> None:
        assert group.ledger_id is not None
        self._urgent.append(group)
        self._urgent_counts[group.ledger_id] = self._urgent_counts.get(group.ledger_id, 0) + 1

    def _uncount_urgent(self, group: Group) -> None:
        assert group.ledger_id is not None
        count = self._urgent_counts.pop(group.ledger_id) - 1
        if count:
            self._urgent_counts[group.ledger_id] = count


class _Segment(NamedTuple):
    """A segment to write to: its blocks up to `bytes_max` are reserved."""

    file_id: int
    file: File
    bytes_max: int


class Journal:
    """The writing side of a journal, made by `open`; its own task writes."""

    def __init__(
        self, disk: Disk, config: StorageConfig, segment: _Segment, synced: Position
    ) -> None:
        self._disk = disk
        self._config = config
        self._segment = segment
        self._batch_no = 0
        self._synced = synced  # for the next batch's header
        self._sync_at: float | None = None  # when to sync written bytes; None: all are synced
        least_bytes = _least_segment_bytes(config)
        self._queue = JournalQueue(config.journal_batch_bytes_max, least_bytes - 2 * BLOCK_BYTES)
        self._batch: Sequence[Group] = ()  # being written
        self._wake = asyncio.Event()
        self._is_closing = False
        self._is_hurrying = False
        self._failure: JournalFailed | None = None
        self._directory_error: DiskFailed | None = None
        self._next_segment = self._make_next_segment()
        self._write_rate = Work()
        self.pending_bytes = 0
        """Bytes appended and not yet acknowledged."""
        self.task = asyncio.ensure_future(self._run())
        """Ends with the exception that ended the journal."""

    @classmethod
    async def open(
        cls, disk: Disk, config: StorageConfig, file_id: int, synced: Position
    ) -> "Journal":
        """Begin segment `file_id`; all bytes before `synced` were durable. Raises DiskFailed."""
        return cls(disk, config, await _make_segment(disk, file_id, config), synced)

    @property
    def synced(self) -> Position:
        """The position before which all bytes are durable."""
        return max(self._synced, Position(self._segment.file_id, BLOCK_BYTES))

    @property
    def room_bytes(self) -> int:
        """How many bytes of adds may be pending without a wait for disk space. While the next
        segment exists there is no limit. Otherwise the limit is the rest of the present segment,
        less a part that is reserved for fences (and padding)."""
        if self._has_next_segment:
            return UNLIMITED_BYTES
        fence_bytes = _least_segment_bytes(self._config) // FENCE_SHARE
        return self._segment.bytes_max - self._segment.file.end - fence_bytes

    @property
    def wait_s(self) -> float:
        """Seconds until half of the pending bytes should be written, so that there is room."""
        now_s = asyncio.get_running_loop().time()
        return self._write_rate.left_s(now_s, self.pending_bytes // 2)

    def append(
        self, records: Sequence[Record], lane: Lane = Lane.BULK, after: Sequence[int] = ()
    ) -> asyncio.Future[None]:
        """Queue the records. The future is done when the records, and all earlier appends of their
        ledgers and of the ledgers `after`, are durable. In the page-cache lane, which takes entries
        only, the future is done when they are written.

        With neither records nor `after` the append is a barrier: its future is done when all
        earlier appends are done. The future fails with JournalFailed. The append goes on even if
        its future is cancelled, so callers shield the future.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(retrieve_error)
        if self._failure is not None or self._is_closing:
            done.set_exception(self._failure or JournalFailed("the journal is closed"))
            return done
        self.pending_bytes += self._queue.put(records, lane, after, done)
        self._wake.set()
        return done

    def is_under_way(self, ledger_id: int) -> bool:
        """Whether a record of the ledger waits, or is being written."""
        is_in_batch = any(group.ledger_id == ledger_id for group in self._batch)
        return is_in_batch or self._queue.has(ledger_id)

    async def forget_before(self, mark: Position) -> None:
        """Remove the segments before `mark`, which is in a durable checkpoint. The removal is
        durable when this returns."""
        first_needed = min(mark.file_id, self._segment.file_id)
        unneeded = [i for i in await segment_ids(self._disk) if i < first_needed]
        for file_id in unneeded:
            await self._disk.remove(segment_path(file_id), unread=True)
        if unneeded:
            await self._disk.sync_dir(FOLDER)

    async def set_aside(self, file_id: int) -> None:
        """Rename a damaged segment, so that an operator can examine it and no start reads it."""
        path = segment_path(file_id)
        if path.removeprefix(f"{FOLDER}/") in await self._disk.list(FOLDER):
            await self._disk.rename(path, path.removesuffix(SUFFIX) + DAMAGED_SUFFIX)
            await self._disk.sync_dir(FOLDER)

    def fail(self, error: DiskFailed) -> None:
        """End the journal as after a failed write: its directory is lost."""
        self._directory_error = error
        self._wake.set()

    def hurry(self) -> None:
        """No longer wait for disk space, as the node stops: if the segment is full and there is no
        space for the next segment, the journal ends."""
        self._is_hurrying = True

    async def close(self) -> None:
        """Write and sync the queued records and the seal; later appends are refused.

        Raises JournalFailed.
        """
        self.hurry()
        seal = self.append([Record(RecordKind.SEAL, NO_ENTRY, NO_ENTRY, b"", 0)])
        self._is_closing = True
        try:
            await asyncio.shield(seal)
            await self.task
        finally:
            with contextlib.suppress(DiskFailed):
                await (await self._next_segment).file.close()
            await self._segment.file.close()

    def abandon(self) -> None:
        """End at once, as a crash would."""
        self.task.cancel()
        self._next_segment.cancel()

    # -- the writing task --

    async def _run(self) -> None:
        try:
            while self._queue or not self._is_closing:
                self._check_next_segment()
                if self._queue:
                    await self._write(self._queue.take())
                elif not await self._wait_for_append():
                    await self._sync()
        except Exception as error:
            self._failure = JournalFailed(f"the journal failed: {error}")
            self._queue.fail(self._failure)
            raise

    async def _wait_for_append(self) -> bool:
        """Wait for an append. Returns False if no append came before the written bytes are to be
        synced."""
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
        self._batch = groups
        try:
            if records:
                await self._write_batch(records, padded(BATCH_HEADER_BYTES + size), needs_sync)
            elif needs_sync:
                await self._sync()
        except Exception:
            self._queue.put_back(groups)  # `_run` fails all waiting appends, these first
            raise
        self.pending_bytes -= size
        self._batch = ()
        for group in groups:
            group.ack.count_written()

    async def _write_batch(self, records: list[Record], size: int, sync: bool) -> None:
        if self._segment.file.end + size > self._segment.bytes_max:
            await self._use_next_segment()
        file_id, file = self._segment.file_id, self._segment.file
        batch = encode_batch(file_id, file.end, self._batch_no, self._synced, records)
        self._write_rate.begin(size, asyncio.get_running_loop().time())
        await file.append(batch, sync=sync)
        self._batch_no += 1
        ended_s = asyncio.get_running_loop().time()
        self._write_rate.end(ended_s)
        if sync:
            self._note_all_synced()
        elif self._sync_at is None:
            self._sync_at = ended_s + self._config.page_cache_sync_s

    async def _use_next_segment(self) -> None:
        """Go on in the next segment, after the present one is synced."""
        await self._sync()
        next_segment = await self._next_segment
        await self._segment.file.close()
        self._segment, self._batch_no = next_segment, 0
        self._next_segment = self._make_next_segment()

    # -- the sync that follows a page-cache write --

    @property
    def _sync_is_due(self) -> bool:
        return self._sync_at is not None and asyncio.get_running_loop().time() >= self._sync_at

    async def _sync(self) -> None:
        if self._sync_at is not None:
            await self._segment.file.sync()
            self._note_all_synced()

    def _note_all_synced(self) -> None:
        self._synced = Position(self._segment.file_id, self._segment.file.end)
        self._sync_at = None

    # -- the next segment --

    @property
    def _has_next_segment(self) -> bool:
        return (
            self._next_segment.done()
            and not self._next_segment.cancelled()
            and not self._next_segment.exception()
        )

    def _make_next_segment(self) -> asyncio.Task[_Segment]:
        task = asyncio.ensure_future(self._make_when_there_is_space(self._segment.file_id + 1))
        task.add_done_callback(lambda _: self._wake.set())
        return task

    async def _make_when_there_is_space(self, file_id: int) -> _Segment:
        is_logged = False
        while True:
            try:
                return await _make_segment(self._disk, file_id, self._config)
            except DiskFull as error:
                if not is_logged:
                    _log.warning("journal segment %d cannot be made yet: %s", file_id, error)
                is_logged = True
                if self._is_hurrying:
                    raise
            await asyncio.sleep(SPACE_PAUSE_S)

    def _check_next_segment(self) -> None:
        """Raises DiskFailed if the next segment cannot be made for another reason than space, or if
        the directory is lost."""
        if self._directory_error is not None:
            raise self._directory_error
        if self._next_segment.done() and not self._next_segment.cancelled():
            error = self._next_segment.exception()
            if error is not None and not isinstance(error, DiskFull):
                raise error


async def _make_segment(disk: Disk, file_id: int, config: StorageConfig) -> _Segment:
    """Make a segment of the usual size or, if there is no space for that, of the least size.

    Raises DiskFull when there is no space for the least size either, else DiskFailed.
    """
    path, bytes_max = segment_path(file_id), config.journal_bytes_max
    await _remove_unfinished(disk)
    if file_id in await segment_ids(disk):
        raise DiskFailed(f"{path}: exists already")
    try:
        file = await disk.create(path + MAKING_SUFFIX, bytes_max, direct=True)
    except DiskFull:
        bytes_max = _least_segment_bytes(config)
        file = await disk.create(path + MAKING_SUFFIX, bytes_max, direct=True)
    try:
        await file.append([encode_file_header(file_id, bytes_max)], sync=True)
        await disk.rename(path + MAKING_SUFFIX, path)
        await disk.sync_dir(FOLDER)
    except DiskFull as error:  # the segment's blocks were reserved: this is no lack of space
        raise DiskFailed(f"{path}: {error}") from error
    return _Segment(file_id, file, bytes_max)


async def _remove_unfinished(disk: Disk) -> None:
    """Remove a segment whose making a crash interrupted."""
    for name in await disk.list(FOLDER):
        if name.endswith(MAKING_SUFFIX):
            await disk.remove(f"{FOLDER}/{name}")


def _least_segment_bytes(config: StorageConfig) -> int:
    """The least size of a segment: any batch fits. StorageConfig refuses a smaller usual size."""
    largest = config.journal_batch_bytes_max + config.entry_bytes_max
    return min(config.journal_bytes_max, largest + 16 * BLOCK_BYTES)


def retrieve_error(done: asyncio.Future[None]) -> None:
    """Keep asyncio from logging the error of an append that is not awaited: `task` reports it."""
    if not done.cancelled():
        done.exception()


def _take(queue: deque[Group], room: int, room_for_first: int) -> list[Group]:
    """Remove and return as many groups from the head of the queue as have room; for the first group
    the room is `room_for_first`."""
    taken: list[Group] = []
    while queue and queue[0].bytes <= (room if taken else room_for_first):
        group = queue.popleft()
        room -= group.bytes
        taken.append(group)
    return taken


def _by_ledger(records: Sequence[Record]) -> dict[int, Sequence[Record]]:
    """The records by ledger. Records that are all of one ledger, as in most appends, are not
    copied."""
    ledger_ids = dict.fromkeys([record.ledger_id for record in records])
    if len(ledger_ids) == 1:
        return dict.fromkeys(ledger_ids, records)
    by_ledger: dict[int, list[Record]] = {ledger_id: [] for ledger_id in ledger_ids}
    for record in records:
        by_ledger[record.ledger_id].append(record)
    return dict(by_ledger)


def _split(records: Sequence[Record], bytes_max: int) -> list[Sequence[Record]]:
    """Cut into groups of at most `bytes_max` each; a larger record is a group of its own."""
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
