"""Which directories have space, and whether the node takes new entries.

Always true:
- a directory is full from the look that finds more than `disk_usage_high` of it used or less than
  `disk_free_bytes_min` free, until one finds less than `disk_usage_low` used and twice the bytes
  free; reserves that were given back count as used then, so making them again fills nothing;
- a directory that refused to reserve a file's bytes is full too, until it has twice those bytes;
- whether the node is read-only is computed anew from what is known of its directories whenever
  it is asked: nothing is remembered but which directories are full (BK#4640, #4225, #3141);
- every directory is watched, the journals' too, each `disk_check_s` and at each new file (but the
  checkpoint's); one that cannot be looked at, or that is not the same any more, is failed and
  never looked at again;
- a full directory has given its reserve back, one that is not full holds it;
- a file that could not be made for lack of space is tried once more, after the directory was told
  full and has given back its reserve; so does, before it is written, what is appended to a file
  that reserved nothing and does not fit: a failed append is final, so it must not be met first.
"""

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from bookie_server.api.entry import Buffer
from bookie_server.config import MIB, StorageConfig
from bookie_server.disk import identity
from bookie_server.disk.interface import Disk, DiskFailed, DiskFull, File, NoSuchFile

RESERVE = "reserve"  # the file's name
FULL_CHECK_S = 1.0  # pause between two looks while a directory is full: back soon, stop in time
SPARE_BYTES = 8 * MIB  # what index and checkpoint take beside the entries of a flush
UNASKED_BYTES = 16 << 20
"""What a file takes without asking again, where there is space for many such files."""
_MANY = 8
_log = logging.getLogger(__name__)


class Role(enum.Enum):
    """What a directory is for; the text is for messages."""

    JOURNAL = "journal"
    LEDGER = "ledger"


class Space(NamedTuple):
    """Of a directory's file system: what is free to us, and that together with what is used."""

    free_bytes: int
    total_bytes: int


class Limits(NamedTuple):
    """Full above `usage_high` or with less than `free_bytes_min`; not full any more below
    `usage_low` and with twice the bytes."""

    usage_high: float
    usage_low: float
    free_bytes_min: int


class DirectoryState(NamedTuple):
    """What is known of one directory. `failure` is empty while it lives. Directories of the same
    `file_system` share its space; empty: it shares with none."""

    name: str
    role: Role
    space: Space
    full: bool = False
    failure: str = ""
    file_system: str = ""

    @property
    def live(self) -> bool:
        return not self.failure


# -- decisions --------------------------------------------------------------------------------


def is_full(space: Space, was_full: bool, missing_bytes: int, limits: Limits) -> bool:
    """Whether the directory is full now. `missing_bytes`: reserves that are still to be made.

    Between the two thresholds it stays what it was.
    """
    free = space.free_bytes - missing_bytes
    used_share = 1 - free / space.total_bytes if space.total_bytes else 1.0
    if used_share > limits.usage_high or free < limits.free_bytes_min:
        return True
    has_space = used_share < limits.usage_low and free >= 2 * limits.free_bytes_min
    return was_full and not has_space


def readonly_reason(directories: Sequence[DirectoryState], limbo: str = "") -> str:
    """Why the node takes no new entries; empty when it does.

    `limbo` says that acknowledged entries of any ledger may have been lost here.
    """
    if limbo:
        return limbo
    live = [each for each in directories if each.live]
    ledgers = [each for each in live if each.role is Role.LEDGER]
    full = [each for each in live if each.role is Role.JOURNAL and each.full]
    if all(each.full for each in ledgers):
        full += ledgers
    return f"disk full: {', '.join(each.name for each in full)}" if full else ""


def exhausted(
    directories: Sequence[DirectoryState], unflushed_bytes: int, config: StorageConfig
) -> bool:
    """Whether recovery's adds are refused too: what was taken, `unflushed_bytes`, must still find
    its place in a ledger directory. The journal sees to its own space, it reserves it."""
    spare_bytes = min(config.disk_reserve_bytes, SPARE_BYTES)
    ledgers = [each for each in directories if each.live and each.role is Role.LEDGER]
    return bool(ledgers) and all(
        each.full and each.space.free_bytes < unflushed_bytes + spare_bytes for each in ledgers
    )


def degraded_reason(directories: Sequence[DirectoryState]) -> str:
    """Which directories were lost, each with why; empty when all live."""
    return "; ".join(
        f"{each.role.value} directory {each.name} failed: {each.failure}"
        for each in directories
        if not each.live
    )


def total_space(directories: Sequence[DirectoryState]) -> Space:
    """Of the ledger directories that live, each file system once: what a client that places
    ledgers wants to know."""
    ledgers = [each for each in directories if each.live and each.role is Role.LEDGER]
    spaces = {each.file_system or each.name: each.space for each in ledgers}.values()
    return Space(sum(s.free_bytes for s in spaces), sum(s.total_bytes for s in spaces))


def unasked_bytes(free_bytes: int, needed_bytes: int) -> int:
    """How much may be written before the space is asked for again: to ask costs as much as a
    small write."""
    plenty = free_bytes >= needed_bytes + _MANY * UNASKED_BYTES
    return needed_bytes + UNASKED_BYTES if plenty else needed_bytes


# -- the watch --------------------------------------------------------------------------------


class Watched(NamedTuple):
    """A directory as the monitor sees it; `name` is its path, for messages."""

    id: str
    name: str
    role: Role
    disk: Disk
    file_system: str = ""


class DiskMonitor:
    """Watches the directories of one node: `look` once at start, then `run` as a task.

    `lost`: ledger directories that are not there at all, by name: why. `small`: how the paths of
    files begin that are of a few bytes and often made anew: these are no reason to look.
    `listeners` are called after a look that changed more than the free bytes.
    """

    def __init__(
        self,
        directories: Sequence[Watched],
        config: StorageConfig,
        lost: Mapping[str, str] | None = None,
        small: tuple[str, ...] = (),
    ) -> None:
        self._config = config
        self._small = small
        self._lost = [
            DirectoryState(name, Role.LEDGER, Space(0, 0), failure=why)
            for name, why in (lost or {}).items()
        ]
        self._watches = {each.id: _Watch(each, config) for each in directories}
        self._poked = asyncio.Event()
        self._said: object = None
        self._failure: Callable[[str], str] = lambda _: ""
        self._drop: Callable[[str, DiskFailed], None] = lambda *_: None
        self._find_absent: Callable[[], Mapping[str, Mapping[str, str]]] = dict
        self._absent: list[DirectoryState] = []
        self.listeners: list[Callable[[], None]] = []

    def attach(
        self,
        failure: Callable[[str], str],
        drop: Callable[[str, DiskFailed], None],
        absent: Callable[[], Mapping[str, Mapping[str, str]]] = dict,
    ) -> None:
        """The owner of the directories: `failure` of an id is why it was dropped ("": it lives),
        `drop` drops one, `absent` names by role those that were known and were not given, by id:
        why that matters."""
        self._failure, self._drop, self._find_absent = failure, drop, absent
        self._look_for_absent()
        for directory_id, watch in self._watches.items():
            if watch.failed is not None:
                drop(directory_id, watch.failed)

    def disk(self, directory_id: str) -> Disk:
        """The directory's disk, of whose new files this hears."""
        disk = self._watches[directory_id].directory.disk
        watched = _WatchedDisk(disk, self._made, lambda needed: self.refused(directory_id, needed))
        return cast(Disk, watched)

    def _made(self, path: str) -> None:
        if not path.startswith(self._small):
            self.poke()

    def poke(self) -> None:
        """Look soon: a file was made, or a directory dropped."""
        self._poked.set()

    async def refused(self, directory_id: str, needed_bytes: int) -> None:
        """A file of so many bytes could not be reserved: the directory is full, its reserve is
        given back when this returns. Raises DiskFailed."""
        await self._watches[directory_id].refused(needed_bytes)
        self._tell()

    async def make_room(self, directory_id: str, needed_bytes: int) -> bool:
        """Whether so many bytes fit now, if need be by giving back the reserve; a directory in
        which they do not fit is full. Raises DiskFailed."""
        disk = self._watches[directory_id].directory.disk
        if await disk.free_bytes() >= needed_bytes:
            return True
        await self.refused(directory_id, needed_bytes)
        return await disk.free_bytes() >= needed_bytes

    @property
    def states(self) -> list[DirectoryState]:
        """All directories, in the order they were given; those that are not there last."""
        given = [
            DirectoryState(
                each.name, each.role, watch.space, watch.full, self._why_failed(i), each.file_system
            )
            for i, watch in self._watches.items()
            for each in [watch.directory]
        ]
        return given + self._lost + self._absent

    def _why_failed(self, directory_id: str) -> str:
        """Empty while it lives."""
        return self._failure(directory_id) or str(self._watches[directory_id].failed or "")

    @property
    def any_full(self) -> bool:
        """Whether a directory is full, living or not. (Each add asks: nearly always none is.)"""
        return any([watch.full for watch in self._watches.values()])

    def has_space(self, directory_id: str) -> bool:
        """Whether new ledgers may go there."""
        return not self._watches[directory_id].full and not self._why_failed(directory_id)

    def free_bytes(self, directory_id: str) -> int:
        """As of the last look."""
        return self._watches[directory_id].space.free_bytes

    async def run(self) -> None:
        """Look for ever."""
        while True:
            full = any(each.full and not self._why_failed(i) for i, each in self._watches.items())
            pause_s = self._config.disk_check_s
            try:
                async with asyncio.timeout(min(FULL_CHECK_S, pause_s) if full else pause_s):
                    await self._poked.wait()
            except TimeoutError:
                pass
            self._poked.clear()
            await self.look()

    async def look(self) -> None:
        """Look at every directory that lives, give reserves back and make them again."""
        for directory_id, watch in self._watches.items():
            if self._why_failed(directory_id):
                continue
            try:
                await watch.look(self._missing_bytes)
            except DiskFailed as error:
                watch.failed = error
                _log.error("directory %s failed: %s", watch.directory.name, error)
                self._drop(directory_id, error)
        self._look_for_absent()
        self._tell()

    def _look_for_absent(self) -> None:
        self._absent = [
            DirectoryState(directory_id, Role(role), Space(0, 0), failure=why)
            for role, found in self._find_absent().items()
            for directory_id, why in found.items()
        ]

    def _missing_bytes(self) -> int:
        """Reserves to be made again, of all directories: they may share one file system."""
        live = [watch for name, watch in self._watches.items() if not self._why_failed(name)]
        return sum(watch.reserve.missing_bytes for watch in live)

    def _tell(self) -> None:
        """Call the listeners when something but the free bytes changed."""
        says: list[object] = [(w.full, self._why_failed(i)) for i, w in self._watches.items()]
        says += [each.name for each in self._absent]
        if says == self._said:
            return
        self._said = says
        for listener in self.listeners:
            listener()


class _Watch:
    """One directory: its last known state, and its reserve."""

    def __init__(self, directory: Watched, config: StorageConfig) -> None:
        self.directory = directory
        self.space = Space(0, 0)
        self.full = False
        self.failed: DiskFailed | None = None
        self._config = config
        self.reserve = Reserve(directory.disk, config.disk_reserve_bytes)
        self._needed_bytes = 0  # what the directory refused to reserve
        self._looked = False
        self._has_identity = False
        self._one_at_a_time = asyncio.Lock()

    async def look(self, missing_bytes: Callable[[], int]) -> None:
        """`missing_bytes`: reserves of all directories. Raises DiskFailed."""
        async with self._one_at_a_time:
            await self._check_identity()
            if not self._looked:
                await self.reserve.find()
                self._looked = True
            self.space = await self._measure()
            missing = missing_bytes() if self.full else self.reserve.missing_bytes
            await self._become(is_full(self.space, self.full, missing, self._limits))

    async def refused(self, needed_bytes: int) -> None:
        """See DiskMonitor.refused."""
        async with self._one_at_a_time:
            self._needed_bytes = max(self._needed_bytes, needed_bytes)
            await self._become(True)

    async def _become(self, full: bool) -> None:
        was_held = self.reserve.held
        if not full:
            full = not await self.reserve.make()
        if full:
            await self.reserve.release()
        if was_held != self.reserve.held:
            self.space = await self._measure()
        if full != self.full:
            self.full = full
            self._say()
        if not full:
            self._needed_bytes = 0

    @property
    def _limits(self) -> Limits:
        config = self._config
        free_bytes_min = max(config.disk_free_bytes_min, self._needed_bytes)
        return Limits(config.disk_usage_high, config.disk_usage_low, free_bytes_min)

    async def _measure(self) -> Space:
        disk = self.directory.disk
        return Space(await disk.free_bytes(), await disk.total_bytes())

    async def _check_identity(self) -> None:
        """A file system that was unmounted, or a folder put in this one's place, is not ours."""
        there = identity.FILE in await self.directory.disk.list()
        if self._has_identity and not there:
            path = f"{self.directory.name}/{identity.FILE}"
            raise DiskFailed(f"{path} is gone: was the disk unmounted, or the folder replaced?")
        self._has_identity = there

    def _say(self) -> None:
        name, free = self.directory.name, self.space.free_bytes
        if self.full:
            _log.warning("directory %s is full: %d bytes free", name, free)
        else:
            _log.warning("directory %s has space again: %d bytes free", name, free)


# -- the disks of what is watched -----------------------------------------------------------


class Reserve:
    """A file of `size_bytes` in one directory whose blocks are really allocated; 0: there is none,
    and nothing is missing. While it is held, so many bytes can be had at once by giving it back, as
    a whole: for fences, recovery's adds and compaction, when other entries are refused."""

    def __init__(self, disk: Disk, size_bytes: int) -> None:
        self._disk = disk
        self._size_bytes = size_bytes
        self.held = not size_bytes

    @property
    def missing_bytes(self) -> int:
        """What making it again would take from the free bytes."""
        return 0 if self.held else self._size_bytes

    async def find(self) -> None:
        """Take up what an earlier run left; another size is given back. Raises DiskFailed."""
        try:
            file = await self._disk.open(RESERVE)
        except NoSuchFile:
            return
        found_bytes = file.end
        await file.close()
        self.held = found_bytes == self._size_bytes
        if not self.held:
            await self._remove()

    async def make(self) -> bool:
        """Whether it is held afterwards; False: there is no space. Raises DiskFailed."""
        if self.held:
            return True
        try:
            file = await self._disk.create(RESERVE, self._size_bytes)
        except DiskFull:
            return False
        try:
            await file.sync()
        finally:
            await file.close()
        await self._disk.sync_dir()
        self.held = True
        return True

    async def release(self) -> None:
        """Its bytes are free when this returns. Raises DiskFailed."""
        if self.held and self._size_bytes:
            await self._remove()
            self.held = False

    async def _remove(self) -> None:
        await self._disk.remove(RESERVE)
        await self._disk.sync_dir()


class _WatchedDisk:
    """`disk`, with `made` called after each new file, with its path, and `refused` awaited before
    the second try, with the bytes that were to be reserved."""

    def __init__(
        self, disk: Disk, made: Callable[[str], None], refused: Callable[[int], Awaitable[None]]
    ) -> None:
        self._disk = disk
        self._made = made
        self._refused = refused

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    async def create(self, path: str, reserve_bytes: int = 0, *, direct: bool = False) -> File:
        try:
            file = await self._disk.create(path, reserve_bytes, direct=direct)
        except DiskFull:
            await self._refused(reserve_bytes)
            file = await self._disk.create(path, reserve_bytes, direct=direct)
        self._made(path)
        return file if reserve_bytes else cast(File, _GrowingFile(file, self._make_room))

    async def _make_room(self, needed_bytes: int) -> int:
        free_bytes = await self._disk.free_bytes()
        if free_bytes < needed_bytes:
            await self._refused(needed_bytes)
            if await self._disk.free_bytes() < needed_bytes:  # do not eat what is left (BK#4114)
                raise DiskFull(f"there is no space for {needed_bytes} bytes")
        return unasked_bytes(free_bytes, needed_bytes)


class _GrowingFile:
    """`file`, with `make_room` awaited before appends with the bytes that they take; it returns how
    many may be appended before it is awaited again."""

    def __init__(self, file: File, make_room: Callable[[int], Awaitable[int]]) -> None:
        self._file = file
        self._make_room = make_room
        self._unasked_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    async def append(self, buffers: Sequence[Buffer], *, sync: bool = False) -> int:
        size = sum(map(len, buffers))
        if size > self._unasked_bytes:
            self._unasked_bytes = await self._make_room(size)
        self._unasked_bytes -= size
        return await self._file.append(buffers, sync=sync)
