"""The reserve of a directory: a file whose blocks are really allocated, given back when it is full.

Always true: while the reserve is held, that many bytes can be had at once by giving it back; it is
given back whole, never in parts, and made again only where there is space for it. What it buys is
for fences, recovery's adds and compaction: other entries are refused by then.
"""

from bookie_server.disk.interface import Disk, DiskFull, NoSuchFile

FILE = "reserve"


class Reserve:
    """The reserve of `size_bytes` in one directory; 0: there is none, and nothing is missing."""

    def __init__(self, disk: Disk, size_bytes: int) -> None:
        self._disk = disk
        self._size_bytes = size_bytes
        self._held = not size_bytes

    @property
    def held(self) -> bool:
        return self._held

    @property
    def missing_bytes(self) -> int:
        """What making it again would take from the free bytes."""
        return 0 if self._held else self._size_bytes

    async def find(self) -> None:
        """Take up what an earlier run left; another size is given back. Raises DiskFailed."""
        try:
            file = await self._disk.open(FILE)
        except NoSuchFile:
            return
        found_bytes = file.end
        await file.close()
        if found_bytes == self._size_bytes:
            self._held = True
        else:
            await self._remove()

    async def make(self) -> bool:
        """Whether it is held afterwards; False: there is no space. Raises DiskFailed."""
        if self._held:
            return True
        try:
            file = await self._disk.create(FILE, self._size_bytes)
        except DiskFull:
            return False
        try:
            await file.sync()
        finally:
            await file.close()
        await self._disk.sync_dir()
        self._held = True
        return True

    async def release(self) -> None:
        """Its bytes are free when this returns. Raises DiskFailed."""
        if self._held and self._size_bytes:
            await self._remove()
            self._held = False

    async def _remove(self) -> None:
        await self._disk.remove(FILE)
        await self._disk.sync_dir()
