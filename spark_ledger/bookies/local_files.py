"""Files of bookies on this host, read in threads.

Always true:
- a disk that hangs holds THREADS threads up, no event loop and no exit of the process;
- no file stays open between two reads, so none keeps the space of a log that was removed;
- whatever is wrong is an OSError, a path that is none or a process without threads, too; opening
  waits for nobody, whatever lies there.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from bookie_server.api.messages import IDENTITY_FILE

THREADS = 8
_IDENTITY_BYTES_MAX = 1024
T = TypeVar("T")


class _Call(NamedTuple):
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]
    work: Callable[[], Any]


_Calls = SimpleQueue[_Call | None]


class HostFiles:
    """network.LocalFiles; there is no thread before the first read."""

    def __init__(self) -> None:
        self._calls: _Calls = SimpleQueue()
        self._threads = 0
        self._closed = False

    async def identity(self, directory: str) -> bytes:
        """See LocalFiles.identity."""
        path = os.path.join(directory, IDENTITY_FILE)
        return await self._run(lambda: bytes(_read(path, 0, _IDENTITY_BYTES_MAX)))

    async def read(
        self, path: str, position: int, length: int, taken: Callable[[memoryview], T]
    ) -> T:
        """See LocalFiles.read."""
        return await self._run(lambda: taken(_read(path, position, length)))

    def close(self) -> None:
        """See LocalFiles.close. What waits for a thread is read all the same."""
        self._closed = True
        for _ in range(self._threads):
            self._calls.put(None)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise OSError("the client was closed")
        if self._threads < THREADS:
            self._add_thread()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._calls.put(_Call(loop, done, work))
        return await done

    def _add_thread(self) -> None:
        name = f"local-reads_{self._threads}"
        thread = threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._threads:
                raise OSError(f"no thread can be made: {error}") from error
        else:
            self._threads += 1


def _work(calls: _Calls) -> None:
    """A thread's life. One whose caller has given up before it was begun is not begun."""
    while (call := calls.get()) is not None:
        if not call.done.cancelled():
            tell: tuple[Any, ...]
            try:
                tell = (_tell, call.done, call.work())
            except BaseException as error:
                tell = (_tell_error, call.done, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                call.loop.call_soon_threadsafe(*tell)
            del tell
        del call  # nothing is kept while this waits


def _tell(done: asyncio.Future[T], result: T) -> None:
    if not done.done():
        done.set_result(result)


def _tell_error(done: asyncio.Future[Any], error: BaseException) -> None:
    if not done.done():
        done.set_exception(error)


def _read(path: str, position: int, length: int) -> memoryview:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a zero byte in it
        raise OSError(f"no path: {error}") from error
    try:
        if hasattr(os, "posix_fadvise"):  # or the kernel reads in small pieces
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        return memoryview(os.pread(file, length, position))
    finally:
        os.close(file)
