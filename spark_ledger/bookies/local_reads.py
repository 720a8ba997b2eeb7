"""Entries of bookies on this host, read from the files at the locations that the bookies give.

Always true:
- an entry from a file is checked as an entry from the network (header, digest, ledger and entry
  id). If that fails (the file is gone, ends too early, may not be read, has other bytes), the
  client requests the entry from the bookie; if the entry is damaged, the bookie notices then;
- a directory counts as the bookie's only if its identity file has the bookie's id: on another host
  or in another container the same path may be another bookie's;
- after a failure the client does not read the bookie's files for RETRY_S. A disk that hangs delays
  a caller by LOCAL_READ_S and blocks THREADS threads, but neither an event loop nor the exit of the
  process. It is no failure if an entry is not at a location that the bookie gave earlier: the
  bookie may have moved the entry, and the client asks for its present location;
- no file stays open between two reads, because an open file would keep the space of a log that was
  removed. Opening a path never blocks, whatever is there (a pipe, say).

The idea is HDFS's short-circuit reads (HDFS-347).
"""

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from queue import SimpleQueue
from typing import Any, TypeVar

from bookie_server.api import messages as m
from bookie_server.api.entry import DamagedEntry, Entry, unpack_entry
from bookie_server.api.messages import EntryIds, ids_in, spans_of
from bookie_server.api.status import Status, StopReason

LOCAL_READ_S = 1.0
RETRY_S = 10.0
_IDENTITY_BYTES_MAX = 1024
_log = logging.getLogger(__name__)

Locations = dict[int, m.EntryLocation]
"""By entry id, ascending: the locations of entries of one ledger at one bookie."""
Ask = Callable[[m.ReadRequest], Awaitable[m.ReadResponse]]


class LocalReads:
    """The local reads of one client; `now` gives seconds."""

    def __init__(self, now: Callable[[], float], files: "HostFiles") -> None:
        self._now = now
        self._files = files
        self._identified_directories: dict[tuple[str, str], None] = {}
        self._retry_at: dict[str, float] = {}

    def may_read(self, bookie_id: str) -> bool:
        """Whether to try to read the bookie's files: not after a failure."""
        return self._now() >= self._retry_at.get(bookie_id, 0.0)

    async def read(
        self, request: m.ReadRequest, locations: Locations, ahead: EntryIds, ask: Ask
    ) -> m.ReadResponse:
        """The response to the request. `locations` is a map that the reader keeps; the read removes
        the locations that it uses. If the map lacks an entry of the request, the bookie is asked,
        and afterwards the map has the locations of the entries `ahead`."""
        for usable in (locations, {}):  # the second try asks the bookie for present locations
            if not self.may_read(request.bookie_id):
                break
            response = _response_from_map(request, usable)
            has_new_locations = response is None
            if response is None:
                response = await ask(request._replace(locations=True, ahead=spans_of(ahead)))
                locations.clear()
                locations.update(zip(ahead, response.ahead, strict=False))
            if (filled := await self._fill(request, response, has_new_locations)) is not None:
                return filled
            locations.clear()
        return await ask(request)

    async def _fill(
        self, request: m.ReadRequest, response: m.ReadResponse, has_new_locations: bool
    ) -> m.ReadResponse | None:
        """The response with the entries in the place of their locations; None if they cannot be
        read here. `has_new_locations`: the bookie has just given the locations."""
        ids = ids_in(request.spans, len(response.results))  # an id for each result
        results = dict(zip(ids, response.results, strict=False))
        located = {i: result.location for i, result in results.items() if result.location}
        if not located:
            return response
        try:
            async with asyncio.timeout(LOCAL_READ_S):
                entries = await self._read(request, located)
        except (OSError, DamagedEntry) as error:
            if has_new_locations or isinstance(error, TimeoutError):
                _log.info("files of bookie %s are not read here: %r", request.bookie_id, error)
                self._retry_at[request.bookie_id] = self._now() + RETRY_S
            return None
        for entry in entries:
            results[entry.header.entry_id] = m.EntryResult(Status.OK, checked=entry)
        return response._replace(results=list(results.values()))

    async def _read(self, request: m.ReadRequest, located: Locations) -> list[Entry]:
        """Read the entries at these locations, in one call of a thread. Raises OSError,
        DamagedEntry (also if a file ends too early)."""
        for directory in dict.fromkeys(location.directory for location in located.values()):
            await self._identify(request.bookie_id, directory)
        check = partial(_unpack_checked, request.ledger_id, list(located))
        return await self._files.read(list(located.values()), check)

    async def _identify(self, bookie_id: str, directory: str) -> None:
        """Raises OSError unless the directory is the bookie's."""
        if (bookie_id, directory) not in self._identified_directories:
            file = m.EntryLocation(directory, m.IDENTITY_FILE, 0, _IDENTITY_BYTES_MAX)
            identity = await self._files.read([file], lambda views: bytes(views[0]))
            if bookie_id.encode() not in identity.split():
                raise OSError(f"{directory} belongs to another bookie")
            self._identified_directories[bookie_id, directory] = None


def _response_from_map(request: m.ReadRequest, locations: Locations) -> m.ReadResponse | None:
    """The response that the bookie would give, from the locations of the map: up to `max_bytes`, at
    least one entry; None if the map lacks a location."""
    ids = ids_in(request.spans, len(locations) + 1)
    used, left = 0, request.max_bytes
    while used < len(ids) and (left > 0 or not used):
        if ids[used] not in locations:
            return None
        left -= locations[ids[used]].entry_bytes
        used += 1
    results = [m.EntryResult(Status.OK, location=locations.pop(i)) for i in ids[:used]]
    whole = ids[used - 1] == request.spans[-1][1]
    stop = StopReason.END_OF_RANGE if whole else StopReason.BYTE_LIMIT
    return m.ReadResponse(Status.OK, results, stop=stop)


def _unpack_checked(ledger_id: int, ids: Sequence[int], views: Sequence[memoryview]) -> list[Entry]:
    """Raises DamagedEntry."""
    entries = [unpack_entry(data) for data in views]
    for entry_id, entry in zip(ids, entries, strict=True):
        if (entry.header.ledger_id, entry.header.entry_id) != (ledger_id, entry_id):
            raise DamagedEntry(f"another entry is at the location of {ledger_id}:{entry_id}")
    return entries


THREADS = 8
GAP_BYTES_MAX = 8192  # a read spans such gaps: headers of records, filler of a block
RUN_BYTES_MAX = 4 << 20
T = TypeVar("T")
_Calls = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class HostFiles:
    """Reads files of this host, in threads that the first reads start; each failure is an OSError.
    Simulated clients have a subclass."""

    def __init__(self) -> None:
        self._calls: _Calls = SimpleQueue()
        self._threads = 0
        self._closed = False

    async def read(
        self, locations: Sequence[m.EntryLocation], check: Callable[[list[memoryview]], T]
    ) -> T:
        """The result of `check` for the bytes at the locations (fewer bytes if a file ends before),
        computed in the thread that reads them. Raises OSError, and the exceptions of `check`."""
        if self._closed:
            raise OSError("the client was closed")
        if self._threads < THREADS:
            self._add_thread()
        done: Future[T] = Future()
        self._calls.put((done, lambda: check(_read(locations))))
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Refuse further reads; the threads end after the reads that wait already."""
        self._closed = True
        for _ in range(self._threads):
            self._calls.put(None)

    def _add_thread(self) -> None:
        name = f"local-reads_{self._threads}"
        try:
            threading.Thread(target=_run_calls, args=(self._calls,), name=name, daemon=True).start()
            self._threads += 1
        except RuntimeError as error:
            if not self._threads:
                raise OSError(f"no thread can be started: {error}") from error


def _run_calls(calls: _Calls) -> None:
    """Run calls until there is None in the queue; skip calls whose callers have given up."""
    while (call := calls.get()) is not None:
        done, work = call
        if done.set_running_or_notify_cancel():
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
        del call, done, work  # or the thread keeps a result while it waits


def _read(locations: Sequence[m.EntryLocation]) -> list[memoryview]:
    """The bytes at each location; neighbours in one file by one read."""
    views = []
    for path, in_file in groupby(locations, lambda at: os.path.join(at.directory, at.file)):
        with _open_file(path) as file:
            for run in _runs(in_file):
                start = run[0].position
                data = memoryview(os.pread(file, run[-1].end - start, start))
                views += [data[at.position - start : at.end - start] for at in run]
    return views


def _runs(locations: Iterable[m.EntryLocation]) -> list[list[m.EntryLocation]]:
    runs: list[list[m.EntryLocation]] = []
    for at in locations:
        if (
            not runs
            or not 0 <= at.position - runs[-1][-1].end <= GAP_BYTES_MAX
            or at.end - runs[-1][0].position > RUN_BYTES_MAX
        ):
            runs.append([])
        runs[-1].append(at)
    return runs


@contextmanager
def _open_file(path: str) -> Iterator[int]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # the path has a zero byte
        raise OSError(f"invalid path: {error}") from error
    try:
        if hasattr(os, "posix_fadvise"):  # or the kernel reads in small pieces
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        yield file
    finally:
        os.close(file)
