"""Files of this host, read in threads.

Always true:
- a disk that hangs holds up THREADS threads, but no event loop and no exit of the process;
- no file stays open between two reads, so none keeps the space of a log that was removed;
- whatever goes wrong is an OSError, also an invalid path and a process that can start no thread;
  opening never blocks, whatever is there (a pipe, say).
"""

import asyncio
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import groupby
from queue import SimpleQueue
from typing import Any, TypeVar

from bookie_server.api.messages import EntryLocation

THREADS = 8
GAP_BYTES_MAX = 8192  # headers of records, and what fills a block up
RUN_BYTES_MAX = 4 << 20
T = TypeVar("T")
_Calls = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class HostFiles:
    """No thread exists before the first read. Simulated clients have a subclass."""

    def __init__(self) -> None:
        self._calls: _Calls = SimpleQueue()
        self._threads = 0
        self._closed = False

    async def read(
        self, locations: Sequence[EntryLocation], check: Callable[[list[memoryview]], T]
    ) -> T:
        """What `check` returns for the bytes at each location (fewer where a file ends before),
        computed in the thread that reads them. Raises OSError, and what `check` raises."""
        if self._closed:
            raise OSError("the client was closed")
        if self._threads < THREADS:
            self._add_thread()
        done: Future[T] = Future()
        self._calls.put((done, lambda: check(_read(locations))))
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Refuse further reads; the threads end after those that wait already."""
        self._closed = True
        for _ in range(self._threads):
            self._calls.put(None)

    def _add_thread(self) -> None:
        name = f"local-reads_{self._threads}"
        try:
            threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True).start()
            self._threads += 1
        except RuntimeError as error:
            if not self._threads:
                raise OSError(f"no thread can be started: {error}") from error


def _work(calls: _Calls) -> None:
    """A thread's life. It skips calls whose callers have given up."""
    while (call := calls.get()) is not None:
        done, work = call
        if done.set_running_or_notify_cancel():
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
        del call, done, work  # or the thread keeps a result while it waits


def _read(locations: Sequence[EntryLocation]) -> list[memoryview]:
    """The bytes at each; neighbours in one file by one read."""
    found = []
    for path, those in groupby(locations, lambda at: os.path.join(at.directory, at.file)):
        with _opened(path) as file:
            for run in _runs(those):
                start = run[0].position
                data = memoryview(os.pread(file, run[-1].end - start, start))
                found += [data[at.position - start : at.end - start] for at in run]
    return found


def _runs(locations: Iterable[EntryLocation]) -> list[list[EntryLocation]]:
    runs: list[list[EntryLocation]] = []
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
def _opened(path: str) -> Iterator[int]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a zero byte in it
        raise OSError(f"invalid path: {error}") from error
    try:
        if hasattr(os, "posix_fadvise"):  # or the kernel reads in small pieces
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        yield file
    finally:
        os.close(file)
