"""The disk as the storage engine sees it; os_disk.py is the operating system's.

Always true:
- bytes are durable only after `sync` of their file returned, and a file's name only after
  `sync_dir` of its folder returned;
- a failed append or sync is final for that file (DiskFailed): it is never retried, nothing that
  waited for it is acknowledged;
- positions and lengths are bytes; a read past the end is short, not an error.
"""

from collections.abc import Sequence
from typing import Protocol

from bookie_server.api.entry import Buffer


class DiskFailed(Exception):
    """The operating system refused a write, a sync or a read (EIO, ENOSPC ...)."""


class DiskFull(DiskFailed):
    """There is no space for it (ENOSPC, EDQUOT); of a file that was to be made nothing is left."""


class NoSuchFile(DiskFailed):
    """There is no file of that name."""


class DiskHung(DiskFailed):
    """A call of the operating system did not return in time; what it did is unknown."""


class File(Protocol):
    """An open file; appended to by one task at a time, read by any number."""

    @property
    def path(self) -> str: ...

    @property
    def end(self) -> int:
        """Where the next append goes: bytes appended so far, reserved space not counted."""

    async def append(self, buffers: Sequence[Buffer], *, sync: bool = False) -> int:
        """Write the buffers one after the other at `end`; with `sync`, durably.

        Returns the position of the first byte. Raises DiskFailed; the file is then dead.
        """

    async def sync(self) -> None:
        """Make all that was appended durable (fdatasync or stronger). Raises DiskFailed."""

    async def read(self, position: int, length: int) -> bytes:
        """Up to `length` bytes from `position`; fewer at the file's end. Raises DiskFailed."""

    async def close(self) -> None: ...


class Disk(Protocol):
    """One folder's disk. Paths are relative to that folder, with "/" between their parts."""

    async def create(self, path: str, reserve_bytes: int = 0, *, direct: bool = False) -> File:
        """Make a new empty file; `reserve_bytes` of blocks are really reserved (fallocate).

        `direct` promises that every append is a multiple of 4096 bytes; they then go past the
        page cache where the system can do that. Such a file is read by opening it. Raises
        DiskFull; DiskFailed, also when the file exists. Call `sync_dir` to make its name durable.
        """

    async def open(self, path: str) -> File:
        """Open an existing file to read; `end` is its size. Raises NoSuchFile, DiskFailed."""

    async def list(self, folder: str = "") -> list[str]:
        """Names in the folder, sorted; empty when there is no such folder."""

    async def rename(self, old: str, new: str) -> None:
        """Replace `new` by `old` in one step; durable after `sync_dir`."""

    async def remove(self, path: str, *, unread: bool = False) -> None:
        """Remove a file; durable after `sync_dir`. `unread` promises that nobody has it open; its
        space is then given back in parts, so that others can write in between. Raises NoSuchFile,
        DiskFailed."""

    async def make_folder(self, path: str) -> None:
        """Make the folder and its parents if absent."""

    async def sync_dir(self, folder: str = "") -> None:
        """Make the names in the folder durable. Raises DiskFailed."""

    async def free_bytes(self) -> int:
        """What can be written here still. Raises DiskFailed."""

    async def total_bytes(self) -> int:
        """What is used of the file system, by anybody, and what is free to us; not what it keeps
        for others. Raises DiskFailed."""
