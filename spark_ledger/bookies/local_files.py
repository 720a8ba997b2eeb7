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
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

THREADS = 8
T = TypeVar("T")
_Calls = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class HostFiles:
    """No thread exists before the first read. Simulated clients have a subclass."""

    def __init__(self) -> None:
        self._calls: _Calls = SimpleQueue()
        self._threads = 0
        self._closed = False

    async def read(
        self, path: str, position: int, length: int, check: Callable[[memoryview], T]
    ) -> T:
        """What `check` returns for the bytes there (fewer where the file ends before), computed in
        the thread that reads them. Raises OSError, and what `check` raises."""
        if self._closed:
            raise OSError("the client was closed")
        if self._threads < THREADS:
            self._add_thread()
        done: Future[T] = Future()
        self._calls.put((done, lambda: check(_pread(path, position, length))))
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


def _pread(path: str, position: int, length: int) -> memoryview:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a zero byte in it
        raise OSError(f"invalid path: {error}") from error
    try:
        if hasattr(os, "posix_fadvise"):  # or the kernel reads in small pieces
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        return memoryview(os.pread(file, length, position))
    finally:
        os.close(file)
