"""The interface of a disk for the storage engine; os_disk.py implements it by the operating system.

Always true:
- bytes are durable only after `sync` of their file returned, and a file's name only after
  `sync_dir` of its folder returned;
- a failed append or sync is final for that file (DiskFailed): it is never repeated, and no add that
  waited for it is acknowledged;
- positions and lengths are bytes; a read past the end gives fewer bytes, and is no error.

Always true of the deadline after which a call has failed (`IoDeadline`):
- a call that takes longer than `limit_s` raises DiskHung; the thread that hangs in the call is
  abandoned, and its late result is dropped;
- once a call that alters the disk or index has hung, all later calls on it fail at once: no call
  waits behind the thread that hangs, or overtakes the late effects of its call;
- a read that hangs fails alone, as it proves nothing about writes;
- the loop counts the time in parts: if the process was stopped for a while, or the loop is busy,
  the disk does not count as hung. So a call may take up to one part longer than the limit;
- a call whose time grows with the data (all states, all ledger ids) has no limit.
"""

import asyncio
import contextlib
import math
from collections.abc import Sequence
from typing import Any, Protocol

from bookie_server.api.entry import Buffer

PARTS = 5  # of the time limit


class DiskFailed(Exception):
    """The operating system refused a write, a sync or a read (EIO, ENOSPC ...)."""


class DiskFull(DiskFailed):
    """There is no space (ENOSPC, EDQUOT). After a failed `create` the file does not exist."""


class NoSuchFile(DiskFailed):
    """There is no file of that name."""


class DiskHung(DiskFailed):
    """A call of the operating system did not return in time; its effect is unknown."""


class File(Protocol):
    """An open file. One task at a time may append to it; any number of tasks may read it."""

    path: str
    end: int
    """The position of the next append: the bytes appended so far, without reserved space."""

    async def append(self, buffers: Sequence[Buffer], *, sync: bool = False) -> int:
        """Write the buffers one after the other at `end`; with `sync`, durably.

        Returns the position of the first byte. Raises DiskFailed; the file is then dead.
        """

    async def sync(self) -> None:
        """Make all appended bytes durable (fdatasync or stronger). Raises DiskFailed."""

    async def read(self, position: int, length: int) -> bytes:
        """Up to `length` bytes from `position`; fewer at the file's end. Raises DiskFailed."""

    async def close(self) -> None: ...


class Disk(Protocol):
    """One folder's disk. Paths are relative to that folder, with "/" between their parts."""

    async def create(self, path: str, reserve_bytes: int = 0, *, direct: bool = False) -> File:
        """Make a new empty file; blocks of `reserve_bytes` are allocated for it (fallocate).

        `direct` promises that every append is a multiple of 4096 bytes: the appends then bypass
        the page cache, if the system can do that. A direct file is opened again to read it. Raises
        DiskFull; DiskFailed, also when the file exists. `sync_dir` makes the name durable.
        """

    async def open(self, path: str) -> File:
        """Open an existing file to read; `end` is its size. Raises NoSuchFile, DiskFailed."""

    async def list(self, folder: str = "") -> list[str]:
        """Names in the folder, sorted; empty when there is no such folder."""

    async def rename(self, old: str, new: str) -> None:
        """Replace `new` by `old` in one step; durable after `sync_dir`."""

    async def remove(self, path: str, *, unread: bool = False) -> None:
        """Remove a file; durable after `sync_dir`. `unread` promises that the file is not open; its
        space is then freed in parts, so that other writes are not delayed for long. Raises
        NoSuchFile, DiskFailed."""

    async def make_folder(self, path: str) -> None:
        """Make the folder and its parents if absent."""

    async def sync_dir(self, folder: str = "") -> None:
        """Make the names in the folder durable. Raises DiskFailed."""

    async def free_bytes(self) -> int:
        """How many bytes can be written here. Raises DiskFailed."""

    async def total_bytes(self) -> int:
        """The sum of the file system's used bytes and of the bytes that are free to us. Bytes that
        the file system reserves for other users do not count. Raises DiskFailed."""


async def read_file(disk: Disk, path: str, bytes_max: int = 1 << 62) -> bytes:
    """The bytes of the file, `bytes_max` at most. Raises NoSuchFile, DiskFailed."""
    file = await disk.open(path)
    try:
        return await file.read(0, min(file.end, bytes_max))
    finally:
        await file.close()


async def replace_file(disk: Disk, path: str, data: bytes, temporary: str) -> None:
    """Make or replace the file. The new file is first written as `temporary`, in the same folder:
    after a crash there is the old file or the new file. Durable when this returns. Raises
    DiskFailed."""
    with contextlib.suppress(NoSuchFile):
        await disk.remove(temporary)
    file = await disk.create(temporary)
    try:
        await file.append([data], sync=True)
    finally:
        await file.close()
    await disk.rename(temporary, path)
    await disk.sync_dir(path.rpartition("/")[0])


class IoDeadline:
    """The deadline of the calls to one disk or index, on one event loop; `limit_s` is the longest
    time that a call may take."""

    def __init__(self, limit_s: float = math.inf) -> None:
        self._limit_s = limit_s
        self._hung: DiskHung | None = None
        self._ticks = 0
        self._is_ticking = False  # a timer runs: one for all calls, while any call is under way
        self._under_way: dict[asyncio.Future[Any], tuple[int, bool]] = {}

    @property
    def has_hung(self) -> bool:
        """Whether a call that alters the disk or index has hung."""
        return self._hung is not None

    def check(self) -> None:
        """Raises DiskHung if a call that alters the disk or index has hung. The caller checks this
        before each call."""
        if self._hung is not None:
            raise DiskHung(f"the disk is not used any more: {self._hung}")

    def watch(self, done: asyncio.Future[Any], *, alters: bool) -> None:
        """Watch a call that begins. If `done` is not done after the rest of the present part and
        PARTS more parts, it fails with DiskHung."""
        if self._limit_s == math.inf:
            return
        self._under_way[done] = (self._ticks + PARTS + self._is_ticking, alters)
        if not self._is_ticking:
            self._tick_later()

    def stop_watching(self, done: asyncio.Future[Any]) -> None:
        """Stop watching a call: it returned, or no caller waits for it."""
        self._under_way.pop(done, None)

    def _tick_later(self) -> None:
        self._is_ticking = True
        asyncio.get_running_loop().call_later(self._limit_s / PARTS, self._tick)

    def _tick(self) -> None:
        self._ticks += 1
        for done, (last_tick, alters) in list(self._under_way.items()):
            if self._ticks >= last_tick:
                del self._under_way[done]
                if not done.done():
                    hung = DiskHung(f"a call did not return for {self._limit_s:g} s")
                    done.set_exception(hung)
                    if alters:
                        self._hung = hung
        self._is_ticking = False
        if self._under_way:
            self._tick_later()
