"""Disks that count what is done to them, and stop the world before the n-th operation.

Always true: what changes a disk is counted, over all disks of a node in one order: create, write,
sync, rename, remove, sync of a folder; the simulated index lies on these disks, so its operations
count too. From the n-th on nothing is carried out and nothing fails: whoever asks, waits, and a
crash then finds exactly what the first n - 1 left.
"""

import asyncio
from collections.abc import Sequence

from bookie_server.api.entry import Buffer
from tests.simulation.disk import SimDisk, SimFile

ENDLESS = 1 << 62


class Steps:
    """The operations of one node's disks. Counting begins with `begin`."""

    def __init__(self) -> None:
        self.log: list[str] = []
        """What was done since `begin`, in words."""
        self._limit: int | None = None
        self._stopped: asyncio.Future[None] | None = None

    def begin(self, limit: int = ENDLESS) -> "asyncio.Future[None]":
        """Carry out `limit` operations from now on; the future is done when one more is asked."""
        self.log = []
        self._limit = limit
        self._stopped = asyncio.get_running_loop().create_future()
        return self._stopped

    def end(self) -> None:
        """Nothing is counted any more, and everything carried out."""
        self._limit = None

    async def take(self, what: str) -> None:
        """Returns when the operation may be carried out; beyond the limit it never does."""
        if self._limit is None:
            return
        if len(self.log) < self._limit:
            self.log.append(what)
            return
        assert self._stopped is not None
        if not self._stopped.done():
            self._stopped.set_result(None)
        await asyncio.get_running_loop().create_future()


class SteppedFile(SimFile):
    """A file whose writes and syncs are counted."""

    steps: Steps
    name: str

    async def append(self, buffers: Sequence[Buffer], *, sync: bool = False) -> int:
        await self.steps.take(f"write {self.name}")
        return await super().append(buffers, sync=sync)

    async def sync(self) -> None:
        await self.steps.take(f"sync {self.name}")
        await super().sync()


class SteppedDisk(SimDisk):
    """A disk whose operations are counted by `steps`."""

    steps = Steps()
    label = ""

    async def create(self, path: str, reserve_bytes: int = 0, *, direct: bool = False) -> SimFile:
        await self.steps.take(f"create {self.label}{path}")
        return self._stepped(await super().create(path, reserve_bytes, direct=direct))

    async def open(self, path: str) -> SimFile:
        return self._stepped(await super().open(path))

    async def rename(self, old: str, new: str) -> None:
        await self.steps.take(f"rename {self.label}{old} {new}")
        await super().rename(old, new)

    async def remove(self, path: str) -> None:
        await self.steps.take(f"remove {self.label}{path}")
        await super().remove(path)

    async def sync_dir(self, folder: str = "") -> None:
        await self.steps.take(f"sync folder {self.label}{folder}")
        await super().sync_dir(folder)

    def _stepped(self, file: SimFile) -> SimFile:
        file.__class__ = SteppedFile
        assert isinstance(file, SteppedFile)
        file.steps, file.name = self.steps, self.label + file.path
        return file
