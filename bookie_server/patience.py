"""Disks and indexes of which a call may hang: one that does not return in time has failed.

Always true:
- a call under way for longer than `limit_s` raises DiskHung; the thread that hangs in it is left
  behind, and its file is dead (os_disk.OsFile);
- once a call that alters something has hung, all that follows on that disk or index fails at once:
  nobody waits behind the thread that hangs, and nothing overtakes what it may still do;
- a read that hangs fails alone: it says nothing of what is written;
- the time goes by in parts, as the loop sees them: a process that was stopped for a while, or a
  loop that was busy, makes no disk hang; a call has up to a part more than the limit;
- what takes the longer, the more there is (all states, all ledger ids) has no limit.
"""

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

from bookie_server.api.entry import Buffer
from bookie_server.disk import Disk, DiskFailed, File
from bookie_server.entry_index import EntryIndex, IndexDamaged, LedgerState, Location

PARTS = 5  # of the time limit
P = ParamSpec("P")
T = TypeVar("T")


class DiskHung(DiskFailed):
    """A call of the operating system did not return in time; nobody knows what it did."""


class Patience:
    """Of one disk or index, on one event loop; `limit_s` is the longest time a call may take."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._hung: DiskHung | None = None
        self._clock = _Clock(limit_s / PARTS)

    @property
    def is_over(self) -> bool:
        """Whether a call that alters something has hung."""
        return self._hung is not None

    def alter(
        self, call: Callable[P, Awaitable[T]], *arguments: P.args, **more: P.kwargs
    ) -> Coroutine[Any, Any, T]:
        """Make the call, which changes something. Raises what it raises, and DiskHung."""
        return self._make(True, call, *arguments, **more)

    def read(
        self, call: Callable[P, Awaitable[T]], *arguments: P.args, **more: P.kwargs
    ) -> Coroutine[Any, Any, T]:
        """Make the call, which changes nothing. Raises what it raises, and DiskHung."""
        return self._make(False, call, *arguments, **more)

    async def _make(
        self, alters: bool, call: Callable[P, Awaitable[T]], *arguments: P.args, **more: P.kwargs
    ) -> T:
        if self._hung is not None:
            raise DiskHung(f"not used any more: {self._hung}")
        work = call(*arguments, **more).__await__()
        try:
            waits_for = next(work)
        except StopIteration as done:  # at once: most calls that find everything in memory
            result: T = done.value
            return result
        limit = asyncio.timeout(None)
        self._clock.watch(limit)
        try:
            async with limit:
                return await _rest(work, waits_for)
        except TimeoutError as error:
            if not limit.expired():
                raise
            hung = DiskHung(f"a call did not return for {self._limit_s:g} s")
            if alters:
                self._hung = hung
            raise hung from error
        finally:
            self._clock.forget(limit)


@types.coroutine
def _rest(work: Generator[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    """What is left of a call that was begun and waits for something."""
    while True:
        try:
            yield waits_for
        except BaseException as error:
            go_on = partial(work.throw, error)
        else:
            go_on = partial(next, work)
        try:
            waits_for = go_on()
        except StopIteration as done:
            result: T = done.value
            return result


class _Clock:
    """Lets the calls expire that are under way for PARTS parts and what was left of the part in
    which they began. It ticks for all of them together, and not while there are none."""

    def __init__(self, part_s: float) -> None:
        self._part_s = part_s
        self._left: dict[asyncio.Timeout, int] = {}
        self._ticking = False

    def watch(self, limit: asyncio.Timeout) -> None:
        self._left[limit] = PARTS + 1
        if not self._ticking:
            self._left[limit] = PARTS
            self._ticking = True
            asyncio.get_running_loop().call_later(self._part_s, self._tick)

    def forget(self, limit: asyncio.Timeout) -> None:
        del self._left[limit]

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        for limit in self._left:
            self._left[limit] -= 1
            if not self._left[limit]:
                limit.reschedule(loop.time())
        self._ticking = bool(self._left)
        if self._ticking:
            loop.call_later(self._part_s, self._tick)


class PatientDisk(Disk):
    """`disk`, none of whose calls takes longer than `limit_s`."""

    def __init__(self, disk: Disk, limit_s: float) -> None:
        self._disk = disk
        self._patience = Patience(limit_s)

    async def create(self, path: str, reserve_bytes: int = 0, *, direct: bool = False) -> File:
        create = self._patience.alter(self._disk.create, path, reserve_bytes, direct=direct)
        return _PatientFile(await create, self._patience)

    async def open(self, path: str) -> File:
        return _PatientFile(await self._patience.read(self._disk.open, path), self._patience)

    async def list(self, folder: str = "") -> list[str]:
        return await self._patience.read(self._disk.list, folder)

    async def rename(self, old: str, new: str) -> None:
        await self._patience.alter(self._disk.rename, old, new)

    async def remove(self, path: str) -> None:
        await self._patience.alter(self._disk.remove, path)

    async def make_folder(self, path: str) -> None:
        await self._patience.alter(self._disk.make_folder, path)

    async def sync_dir(self, folder: str = "") -> None:
        await self._patience.alter(self._disk.sync_dir, folder)

    async def free_bytes(self) -> int:
        return await self._patience.read(self._disk.free_bytes)

    async def total_bytes(self) -> int:
        return await self._patience.read(self._disk.total_bytes)


class _PatientFile(File):
    """`file`, with the patience of its disk."""

    def __init__(self, file: File, patience: Patience) -> None:
        self._file = file
        self._patience = patience

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def end(self) -> int:
        return self._file.end

    async def append(self, buffers: Sequence[Buffer], *, sync: bool = False) -> int:
        return await self._patience.alter(self._file.append, buffers, sync=sync)

    async def sync(self) -> None:
        await self._patience.alter(self._file.sync)

    async def read(self, position: int, length: int) -> bytes:
        return await self._patience.read(self._file.read, position, length)

    async def close(self) -> None:
        if not self._patience.is_over:  # a thread may hang in it
            await self._patience.alter(self._file.close)


class PatientIndex(EntryIndex):
    """`index`, none of whose calls takes longer than `limit_s`."""

    def __init__(self, index: EntryIndex, limit_s: float) -> None:
        self._index = index
        self._patience = Patience(limit_s)

    @property
    def on_damage(self) -> Callable[[IndexDamaged], None]:
        return self._index.on_damage

    @on_damage.setter
    def on_damage(self, hear: Callable[[IndexDamaged], None]) -> None:
        self._index.on_damage = hear

    async def put(self, locations: Sequence[Location]) -> None:
        await self._patience.alter(self._index.put, locations)

    async def move(self, moves: Sequence[tuple[Location, Location]]) -> None:
        await self._patience.alter(self._index.move, moves)

    async def get(self, ledger_id: int, entry_id: int) -> Location | None:
        return await self._patience.read(self._index.get, ledger_id, entry_id)

    async def range(
        self, ledger_id: int, first_entry: int, last_entry: int, max_bytes: int
    ) -> list[Location]:
        look_up = self._index.range
        return await self._patience.read(look_up, ledger_id, first_entry, last_entry, max_bytes)

    async def among(
        self, ledger_id: int, entry_ids: Sequence[int], max_bytes: int
    ) -> list[Location]:
        return await self._patience.read(self._index.among, ledger_id, entry_ids, max_bytes)

    async def last(self, ledger_id: int) -> int | None:
        return await self._patience.read(self._index.last, ledger_id)

    async def ledger_ids(self) -> list[int]:
        return await self._index.ledger_ids()

    async def delete(self, ledger_id: int, entry_ids: Sequence[int]) -> None:
        await self._patience.alter(self._index.delete, ledger_id, entry_ids)

    async def delete_ledger(self, ledger_id: int) -> None:
        await self._patience.alter(self._index.delete_ledger, ledger_id)

    async def put_ledgers(self, states: Sequence[LedgerState]) -> None:
        await self._patience.alter(self._index.put_ledgers, states)

    async def delete_states(self, ledger_ids: Sequence[int]) -> None:
        await self._patience.alter(self._index.delete_states, ledger_ids)

    async def ledgers(self) -> list[LedgerState]:
        return await self._index.ledgers()

    async def mark_logs(self, marks: Mapping[int, int | None]) -> None:
        await self._patience.alter(self._index.mark_logs, marks)

    async def marked_logs(self) -> dict[int, int]:
        return await self._patience.read(self._index.marked_logs)

    async def sync(self) -> None:
        await self._patience.alter(self._index.sync)

    async def close(self) -> None:
        await self._patience.alter(self._index.close)
