"""The direct log of one directory: large entries are written to it before they are acknowledged. It
is their journal: the next start replays the records after the log's mark in the index
(start/applier.py).

Always true:
- a put gets its locations only after its records are synced. The log's name and its mark in the
  directory's index are synced before the records: if there is a mark and no log, the log was lost;
- a write begins only after the write before it is synced, and each record has the position where
  its write began (entry_log.write_start): bytes before that position were synced, so unreadable
  bytes there are damage and no torn write;
- entries that are put during a write and its sync are written together by the next write; there is
  no timer; entries of one ledger are written in the order of their puts;
- a failed write ends the log: each waiting put fails, and its caller writes the entries to a
  journal. If there was only no space for the write, later entries go to a new log;
- a write never takes the space that a flush needs;
- a flush moves the mark past the entries that were put before the flush began, as it has written to
  the index all of their locations that count. A log is sealed when it has ended and its mark is
  durably removed.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bookie_server.api.entry import Buffer
from bookie_server.config import StorageConfig
from bookie_server.disk.interface import Disk, DiskFailed, DiskFull
from bookie_server.disk.monitor import unchecked_bytes
from bookie_server.lanes import Work
from bookie_server.logs.entry_log import RECORD_HEADER_BYTES, EntryLogs, GrowingLog, record_end
from bookie_server.logs.index import EntryIndex, Location

FutureLocations = asyncio.Future[list[Location]]


class _Put(NamedTuple):
    """Entries of one ledger whose locations a caller awaits; `number` counts the puts."""

    number: int
    ledger_id: int
    entries: Sequence[tuple[int, int, Buffer]]
    bytes: int
    locations: FutureLocations


class _WrittenPut(NamedTuple):
    """A put whose entries are durable; its records end at position `end` of the log."""

    number: int
    log_id: int
    end: int


class DirectLog:
    """The direct log of one directory; `logs` are all logs of the directory, `index` is its index.
    Puts leave `spare_bytes` of the disk's space for flushes."""

    def __init__(
        self,
        disk: Disk,
        logs: EntryLogs,
        index: EntryIndex,
        config: StorageConfig,
        spare_bytes: int = 0,
    ) -> None:
        self._disk = disk
        self._logs = logs
        self._index = index
        self._config = config
        self._spare_bytes = spare_bytes
        self._waiting: deque[_Put] = deque()
        self._writing: list[_Put] = []
        self._log: GrowingLog | None = None
        self._unmarked: deque[_WrittenPut] = deque()  # puts beyond the durable mark
        self._marked_puts = 0  # how many puts are before the durable mark
        self._ended_logs: dict[int, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._failure: DiskFailed | None = None
        self._unchecked_bytes = 0
        self._write_rate = Work()
        self.pending_bytes = 0
        """Bytes of puts that have no locations yet."""
        self.puts = 0
        """How often `put` was called."""
        self.on_failure: Callable[[DiskFailed], None] = lambda _: None
        """Called when a write has failed (not for lack of space), before the waiting puts fail."""

    def put(self, ledger_id: int, entries: Sequence[tuple[int, int, Buffer]]) -> FutureLocations:
        """The locations of (ledger, entry id, entry), all of `ledger_id`, once they are durable.

        Fails with DiskFailed: then any part of the entries may be in the log.
        """
        locations: FutureLocations = asyncio.get_running_loop().create_future()
        if self._failure is not None:
            locations.set_exception(self._failure)
            return locations
        size = sum([len(entry) for _, _, entry in entries]) + len(entries) * RECORD_HEADER_BYTES
        self.puts += 1
        self._waiting.append(_Put(self.puts, ledger_id, entries, size, locations))
        self.pending_bytes += size
        if self._task is None:
            self._task = asyncio.ensure_future(self._write_all())
        return locations

    def marks(self, puts: int) -> dict[int, int | None]:
        """The marks (for EntryIndex.mark_logs) that hold once the index has the entries of the
        first `puts`. None of these puts may wait."""
        marks: dict[int, int | None] = {}
        later_logs: dict[int, None] = {}
        for number, log_id, end in self._unmarked:
            if number <= puts:
                marks[log_id] = end
            else:
                later_logs[log_id] = None
        marks.update((log_id, None) for log_id in self._ended_logs if log_id not in later_logs)
        return marks

    def note_marked(self, puts: int, marks: Mapping[int, int | None]) -> None:
        """Note that the index durably has these marks, the result of `marks(puts)`."""
        self._marked_puts = max(self._marked_puts, puts)
        while self._unmarked and self._unmarked[0].number <= puts:
            self._unmarked.popleft()
        for log_id in [log_id for log_id, mark in marks.items() if mark is None]:
            del self._ended_logs[log_id]
            self._logs.seal(log_id)

    @property
    def has_ended_logs(self) -> bool:
        """Whether a log has ended and is not sealed: the next flush seals it."""
        return bool(self._ended_logs)

    @property
    def growing_log(self) -> GrowingLog | None:
        """The log to which large entries go."""
        return self._log

    async def end_growing_log(self) -> None:
        """End the growing log, unless a write to it is under way; a flush seals it. Raises
        DiskFailed; then the log has no footer."""
        if self._task is not None or (log := self._log) is None:
            return
        self._log = None  # entries that are put meanwhile go to a new log
        try:
            await log.end(self._disk)
        finally:
            self._ended_logs[log.log_id] = None

    @property
    def wait_s(self) -> float:
        """Seconds until half of the pending bytes should be written."""
        now_s = asyncio.get_running_loop().time()
        return self._write_rate.left_s(now_s, self.pending_bytes // 2)

    def fail(self, error: DiskFailed) -> None:
        """Fail each waiting put, and later puts: the directory is lost."""
        self._failure = self._failure or error
        self._fail_all(error)

    async def close(self) -> None:
        """End the log with its footer, and remove its mark if the index has all its puts. No put
        may be waiting. Raises DiskFailed."""
        if self._task is not None:
            await self._task
        if self._log is not None:
            await self._end_with_footer(self._log)
        if marks := self.marks(self._marked_puts):
            await self._index.mark_logs(marks)
            await self._index.sync()

    def abandon(self) -> None:
        """End at once, as a crash would."""
        if self._task is not None:
            self._task.cancel()

    # -- the writing task --

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                self._writing = self._next_puts()
                try:
                    await self._write(self._writing)
                except DiskFailed as error:
                    await self._give_up(error)
                self._writing = []
        except Exception as error:  # a defect: waiting puts fail, and the directory is not used
            await self._give_up(DiskFailed(f"the direct log could not be written: {error!r}"))
            raise
        finally:
            self._task = None

    def _next_puts(self) -> list[_Put]:
        puts = [self._waiting.popleft()]
        room = self._config.journal_batch_bytes_max - puts[0].bytes
        while self._waiting and self._waiting[0].bytes <= room:
            puts.append(self._waiting.popleft())
            room -= puts[-1].bytes
        return puts

    async def _leaves_room(self, puts: Sequence[_Put]) -> bool:
        """Whether these puts leave the spare bytes to flushes."""
        if not self._spare_bytes:
            return True
        size = sum([put.bytes for put in puts])
        if size > self._unchecked_bytes:
            free_bytes = await self._disk.free_bytes() - self._spare_bytes
            self._unchecked_bytes = unchecked_bytes(free_bytes, size) if free_bytes >= size else 0
        fits = size <= self._unchecked_bytes
        self._unchecked_bytes -= size if fits else 0
        return fits

    async def _write(self, puts: Sequence[_Put]) -> None:
        if not await self._leaves_room(puts):
            for put in puts:
                self._finish_put(put, DiskFull("the remaining space is for flushes"))
            return
        loop = asyncio.get_running_loop()
        self._write_rate.begin(sum([put.bytes for put in puts]), loop.time())
        try:
            log = self._log or await self._begin_log()
            locations = await log.append([e for put in puts for e in put.entries], sync=True)
        finally:
            self._write_rate.end(loop.time())
        for put in puts:
            end = record_end(locations[len(put.entries) - 1])
            self._unmarked.append(_WrittenPut(put.number, log.log_id, end))
            self._finish_put(put, locations[: len(put.entries)])
            locations = locations[len(put.entries) :]
        if log.file.end >= self._config.entry_log_bytes_max:
            await self._end_with_footer(log)

    async def _begin_log(self) -> GrowingLog:
        log = self._log = await self._logs.begin()
        await log.sync(self._disk)
        await self._index.mark_logs({log.log_id: log.file.end})
        await self._index.sync()
        return log

    def _finish_put(self, put: _Put, outcome: list[Location] | DiskFailed) -> None:
        if put.locations.done():  # `fail` has ended the put
            return
        self.pending_bytes -= put.bytes
        if isinstance(outcome, DiskFailed):
            put.locations.set_exception(outcome)
        else:
            put.locations.set_result(outcome)

    def _fail_all(self, error: DiskFailed) -> None:
        puts = [*self._writing, *self._waiting]
        self._waiting.clear()
        for put in puts:
            self._finish_put(put, error)

    async def _end_with_footer(self, log: GrowingLog) -> None:
        await log.append_footer()
        await log.sync(self._disk)
        await self._end(log)

    async def _give_up(self, error: DiskFailed) -> None:
        """End the log without a footer (its records can still be scanned), and fail each put."""
        if self._log is not None:
            with contextlib.suppress(DiskFailed):
                await self._end(self._log)
        if not isinstance(error, DiskFull):
            self.on_failure(error)
        self._fail_all(error)

    async def _end(self, log: GrowingLog) -> None:
        self._log = None
        self._ended_logs[log.log_id] = None
        await log.file.close()
