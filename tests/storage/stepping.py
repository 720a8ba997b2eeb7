"""Disks that count what is done to them, and stop the world before the n-th operation; disks, an
index and a metadata store at which one call takes very long, while the node does all else.

Always true: what changes a disk is counted, over all disks of a node in one order: create, write,
sync, rename, remove, sync of a folder; the simulated index lies on these disks, so its operations
count too. From the n-th on nothing is carried out and nothing fails: whoever asks, waits, and a
crash then finds exactly what the first n - 1 left. A *wait* is a moment at which the node waits for
a disk, the index or the store: before what changes something, and again after it; after what only
reads, so that the answer is old when it is heard.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bookie_server.api.entry import Buffer
from spark_ledger.metadata.store import StoreUnavailable
from tests.simulation.disk import SimDisk, SimFile
from tests.simulation.index import SimIndex
from tests.storage.records import Records

ENDLESS = 1 << 62


class Steps:
    """The operations of one node's disks. Counting begins with `begin`."""

    def __init__(self) -> None:
        self.log: list[str] = []
        """What was done since `begin`, in words."""
        self.waits: list[str] = []
        """The waits since `hold`, in words."""
        self._limit: int | None = None
        self._stopped: asyncio.Future[None] | None = None
        self._held: asyncio.Future[None] | None = None
        self._go: asyncio.Future[None] | None = None
        self._hold_at, self._fails = ENDLESS, False

    def begin(self, limit: int = ENDLESS) -> "asyncio.Future[None]":
        """Carry out `limit` operations from now on; the future is done when one more is asked."""
        self.log = []
        self._limit = limit
        self._stopped = asyncio.get_running_loop().create_future()
        return self._stopped

    def end(self) -> None:
        """Nothing is counted any more, and everything carried out."""
        self._limit = None

    def hold(self, at: int = ENDLESS, *, fails: bool = False) -> "asyncio.Future[None]":
        """From now on, let the wait of that number last until `let_go`, or fail if it is the
        store's; the future is done when it has begun."""
        self.waits, self._hold_at, self._fails = [], at, fails
        loop = asyncio.get_running_loop()
        self._held, self._go = loop.create_future(), loop.create_future()
        return self._held

    def let_go(self) -> None:
        assert self._go is not None
        if not self._go.done():  # else its caller has given it up
            self._go.set_result(None)

    async def wait(self, what: str) -> None:
        """A wait of the node. Raises StoreUnavailable."""
        if self._held is None or self._go is None:
            return
        self.waits.append(what)
        if len(self.waits) == self._hold_at + 1:
            self._held.set_result(None)
            if self._fails:
                raise StoreUnavailable(what)
            await self._go

    async def around(self, what: str, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What changes something."""
        await self.wait(what)
        done = await work(*args, **options)
        await self.wait(f"{what}: done")
        return done

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
        what = f"write {self.name}"
        await self.steps.take(what)
        done: int = await self.steps.around(what, super().append, buffers, sync=sync)
        return done

    async def sync(self) -> None:
        what = f"sync {self.name}"
        await self.steps.take(what)
        await self.steps.around(what, super().sync)

    async def read(self, position: int, length: int) -> bytes:
        found = await super().read(position, length)
        await self.steps.wait(f"read {self.name}")
        return found


class SteppedDisk(SimDisk):
    """A disk whose operations are counted by `steps`."""

    steps = Steps()
    label = ""

    async def create(self, path: str, reserve_bytes: int = 0, *, direct: bool = False) -> SimFile:
        what = f"create {self.label}{path}"
        await self.steps.take(what)
        work = super().create
        return self._stepped(
            await self.steps.around(what, work, path, reserve_bytes, direct=direct)
        )

    async def open(self, path: str) -> SimFile:
        return self._stepped(await super().open(path))

    async def rename(self, old: str, new: str) -> None:
        what = f"rename {self.label}{old} {new}"
        await self.steps.take(what)
        await self.steps.around(what, super().rename, old, new)

    async def remove(self, path: str, *, unread: bool = False) -> None:
        what = f"remove {self.label}{path}"
        await self.steps.take(what)
        await self.steps.around(what, super().remove, path, unread=unread)

    async def sync_dir(self, folder: str = "") -> None:
        what = f"sync folder {self.label}{folder}"
        await self.steps.take(what)
        await self.steps.around(what, super().sync_dir, folder)

    def _stepped(self, file: SimFile) -> SimFile:
        file.__class__ = SteppedFile
        assert isinstance(file, SteppedFile)
        file.steps, file.name = self.steps, self.label + file.path
        return file


CHANGES = ("put", "move", "delete", "delete_ledger", "put_ledgers", "delete_states", "mark_logs")
ASKS = ("get", "range", "among", "last", "ledger_ids", "ledgers", "marked_logs")
STORE = ("get", "children", "create", "set", "delete", "multi", "sync")


def stepped_index(index: SimIndex, steps: Steps) -> SimIndex:
    """Its calls are waits; what it does to its disk is counted there."""
    for name in CHANGES:
        around = partial(steps.around, f"index {name}", getattr(index, name))
        setattr(index, name, around)
    for name in ASKS:
        setattr(index, name, partial(_asked, steps, f"index {name}", getattr(index, name)))
    return index


def stepped_store(records: Records, steps: Steps) -> Records:
    """Its calls are waits, and may fail after they were carried out."""
    for name in STORE:
        setattr(records, name, partial(_asked, steps, f"store {name}", getattr(records, name)))
    return records


async def _asked(
    steps: Steps, what: str, work: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """What only reads, or is another process's to do."""
    answer = await work(*args, **options)
    await steps.wait(f"{what} {args[0]}" if args and isinstance(args[0], str) else what)
    return answer
