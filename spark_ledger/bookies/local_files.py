"""Files of bookies on this host, read in threads.

Always true:
- a disk that hangs holds THREADS threads up, no event loop;
- no file stays open between two reads, so none keeps the space of a log that was removed.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from bookie_server.api.messages import IDENTITY_FILE

THREADS = 8
_IDENTITY_BYTES_MAX = 1024
T = TypeVar("T")


class HostFiles:
    """network.LocalFiles; there is no thread before the first read."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False

    async def identity(self, directory: str) -> bytes:
        """See LocalFiles.identity."""
        return await self._run(lambda: _head(os.path.join(directory, IDENTITY_FILE)))

    async def read(
        self, path: str, position: int, length: int, taken: Callable[[memoryview], T]
    ) -> T:
        """See LocalFiles.read."""
        return await self._run(lambda: taken(_read(path, position, length)))

    def close(self) -> None:
        """See LocalFiles.close. What waits for a thread is read all the same: a future that is
        cancelled here would look to who waits as if he had been."""
        self._closed = True
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise OSError("the client was closed")
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "local-reads")
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _head(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(_IDENTITY_BYTES_MAX)


def _read(path: str, position: int, length: int) -> memoryview:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # or the kernel reads in small pieces
        return memoryview(os.pread(file, length, position))
    finally:
        os.close(file)
