"""A disk whose new files the monitor hears of, and which gives up its reserve in time.

Always true: a file that could not be made for lack of space is tried once more, after the directory
was told full and has given back its reserve; so does, before it is written, what is appended to a
file that reserved nothing and does not fit: a failed append is final, so it must not be met first.
Everything else is the disk's own doing.
"""

from collections.abc import Awaitable, Callable, Sequence

from bookie_server.api.entry import Buffer
from bookie_server.disk import Disk, DiskFull, File

UNASKED_BYTES = 16 << 20
"""What a file takes without asking again, where there is space for many such files."""
_MANY = 8


class WatchedDisk(Disk):
    """`disk`, with `made` called after each new file, with its path, and `refused` awaited before
    the second try, with the bytes that were to be reserved."""

    def __init__(
        self, disk: Disk, made: Callable[[str], None], refused: Callable[[int], Awaitable[None]]
    ) -> None:
        self._disk = disk
        self._made = made
        self._refused = refused

    async def create(self, path: str, reserve_bytes: int = 0, *, direct: bool = False) -> File:
        try:
            file = await self._disk.create(path, reserve_bytes, direct=direct)
        except DiskFull:
            await self._refused(reserve_bytes)
            file = await self._disk.create(path, reserve_bytes, direct=direct)
        self._made(path)
        return file if reserve_bytes else _GrowingFile(file, self._make_room)

    async def _make_room(self, needed_bytes: int) -> int:
        free_bytes = await self._disk.free_bytes()
        if free_bytes < needed_bytes:
            await self._refused(needed_bytes)
            if await self._disk.free_bytes() < needed_bytes:  # do not eat what is left (BK#4114)
                raise DiskFull(f"there is no space for {needed_bytes} bytes")
        return unasked_bytes(free_bytes, needed_bytes)

    async def open(self, path: str) -> File:
        return await self._disk.open(path)

    async def list(self, folder: str = "") -> list[str]:
        return await self._disk.list(folder)

    async def rename(self, old: str, new: str) -> None:
        await self._disk.rename(old, new)

    async def remove(self, path: str) -> None:
        await self._disk.remove(path)

    async def make_folder(self, path: str) -> None:
        await self._disk.make_folder(path)

    async def sync_dir(self, folder: str = "") -> None:
        await self._disk.sync_dir(folder)

    async def free_bytes(self) -> int:
        return await self._disk.free_bytes()

    async def total_bytes(self) -> int:
        return await self._disk.total_bytes()


def unasked_bytes(free_bytes: int, needed_bytes: int) -> int:
    """How much may be written before somebody asks for the space again: to ask costs as much as a
    small write."""
    plenty = free_bytes >= needed_bytes + _MANY * UNASKED_BYTES
    return needed_bytes + UNASKED_BYTES if plenty else needed_bytes


class _GrowingFile(File):
    """`file`, with `make_room` awaited before appends with the bytes that they take; it returns how
    many may be appended before it is awaited again."""

    def __init__(self, file: File, make_room: Callable[[int], Awaitable[int]]) -> None:
        self._file = file
        self._make_room = make_room
        self._unasked_bytes = 0

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def end(self) -> int:
        return self._file.end

    async def append(self, buffers: Sequence[Buffer], *, sync: bool = False) -> int:
        size = sum(map(len, buffers))
        if size > self._unasked_bytes:
            self._unasked_bytes = await self._make_room(size)
        self._unasked_bytes -= size
        return await self._file.append(buffers, sync=sync)

    async def sync(self) -> None:
        await self._file.sync()

    async def read(self, position: int, length: int) -> bytes:
        return await self._file.read(position, length)

    async def close(self) -> None:
        await self._file.close()
