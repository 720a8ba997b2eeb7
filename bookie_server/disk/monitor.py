"""Which directories have space, and whether the node takes new entries.

Always true:
- a directory becomes full when a look finds more than `disk_usage_high` of it used, or less than
  `disk_free_bytes_min` free. It stays full until a look finds less than `disk_usage_low` used, and
  twice `disk_free_bytes_min` free; this look counts freed reserves as used, so that the reserves
  can be made again without filling the directory;
- a directory that could not reserve a file's bytes is full too, until it has twice those bytes;
- whether the node is read-only is computed from the states of its directories each time; only
  whether a directory is full is remembered (BK#4640, #4225, #3141);
- the monitor looks at every directory, also a journal's, each `disk_check_s` and at each new file
  (except the checkpoint's). A directory that cannot be read, or was replaced by another one, counts
  as failed; the monitor never looks at it again;
- a full directory has freed its reserve, a directory that is not full has it;
- if a file cannot be made for lack of space, the directory is set full and frees its reserve, and
  the file is tried once more. Before an append to a file without reserved bytes, the same happens
  if the bytes do not fit: a failed append is final, so lack of space must be found before it.
"""

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from bookie_server.api.entry import Buffer
from bookie_server.config import StorageConfig
from bookie_server.disk import identity
from bookie_server.disk.interface import Disk, DiskFailed, DiskFull, File, NoSuchFile
from spark_ledger.async_tasks import woken
from spark_ledger.units import MIB

RESERVE = "reserve"  # the file's name
FULL_CHECK_S = 1.0  # pause between two looks while a directory is full: new space is found soon
SPARE_BYTES = 8 * MIB  # for index and checkpoint, beside the entries of a flush
UNCHECKED_BYTES = 16 << 20
"""The bytes that may be written to a file before the free space is read again, if the free space is
several times as large."""
_PLENTY = 8  # how many times
_log = logging.getLogger(__name__)


class Role(enum.Enum):
    """What a directory is for; the text is for messages."""

    JOURNAL = "journal"
    LEDGER = "ledger"


class Space(NamedTuple):
    """The bytes of a directory's file system: the bytes that are free to us, and the sum of free
    and used bytes."""

    free_bytes: int
    total_bytes: int


class DiskLimits(NamedTuple):
    """A directory becomes full above `usage_high` or with less than `free_bytes_min`; it stops
    being full below `usage_low` with at least twice `free_bytes_min`."""

    usage_high: float
    usage_low: float
    free_bytes_min: int


class DirectoryState(NamedTuple):
    """The state of one directory. `failure` is empty while the directory lives. Directories of the
    same `file_system` share its space; empty: the directory shares its space with no other."""

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


def is_full(space: Space, was_full: bool, missing_bytes: int, limits: DiskLimits) -> bool:
    """Whether the directory is full now; between the two limits the result is `was_full`.
    `missing_bytes`: the bytes of the reserves that are still to be made."""
    free = space.free_bytes - missing_bytes
    used_share = 1 - free / space.total_bytes if space.total_bytes else 1.0
    if used_share > limits.usage_high or free < limits.free_bytes_min:
        return True
    has_space = used_share < limits.usage_low and free >= 2 * limits.free_bytes_min
    return was_full and not has_space


def readonly_reason(directories: Sequence[DirectoryState], reason: str = "") -> str:
    """Why the node takes no new entries; empty if it takes them. `reason`: a reason that does not
    depend on space; empty if there is no such reason."""
    if reason:
        return reason
    live = [directory for directory in directories if directory.live]
    ledgers = [directory for directory in live if directory.role is Role.LEDGER]
    full = [directory for directory in live if directory.role is Role.JOURNAL and directory.full]
    if all(directory.full for directory in ledgers):
        full += ledgers
    return f"disk full: {', '.join(directory.name for directory in full)}" if full else ""


def is_exhausted(
    directories: Sequence[DirectoryState], unflushed_bytes: int, config: StorageConfig
) -> bool:
    """Whether to refuse recovery's adds, too: no ledger directory has space for the
    `unflushed_bytes` of adds already taken. (The journal reserves its own space.)"""
    needed_bytes = unflushed_bytes + min(config.disk_reserve_bytes, SPARE_BYTES)
    ledgers = [d for d in directories if d.live and d.role is Role.LEDGER]
    return bool(ledgers) and all(d.full and d.space.free_bytes < needed_bytes for d in ledgers)


def degraded_reason(directories: Sequence[DirectoryState]) -> str:
    """The failed and missing directories, each with the reason; empty when all live."""
    return "; ".join(
        f"{directory.role.value} directory {directory.name} failed: {directory.failure}"
        for directory in directories
        if not directory.live
    )


def total_space(directories: Sequence[DirectoryState]) -> Space:
    """The space of the living ledger directories, each file system once; clients place ledgers by
    this space."""
    ledgers = [d for d in directories if d.live and d.role is Role.LEDGER]
    spaces = {d.file_system or d.name: d.space for d in ledgers}.values()
    return Space(sum(s.free_bytes for s in spaces), sum(s.total_bytes for s in spaces))


def unchecked_bytes(free_bytes: int, needed_bytes: int) -> int:
    """How many bytes may be written before the free space is read again. To read the free space
    costs as much as a small write."""
    has_plenty = free_bytes >= needed_bytes + _PLENTY * UNCHECKED_BYTES
    return needed_bytes + UNCHECKED_BYTES if has_plenty else needed_bytes


# -- the watch --------------------------------------------------------------------------------


class WatchedDirectory(NamedTuple):
    """A directory that the monitor watches; `name` is its path, for messages."""

    id: str
    name: str
    role: Role
    disk: Disk
    file_system: str = ""


class DiskMonitor:
    """Watches the directories of one node: `look` once at start, then `run` as a task.

    `missing`: by name, why ledger directories are missing. `small`: prefixes of the paths of small
    files that are often made anew: they need no look. `listeners` are called after a look that
    changed more than the free bytes.
    """

    def __init__(
        self,
        directories: Sequence[WatchedDirectory],
        config: StorageConfig,
        missing: Mapping[str, str] | None = None,
        small: tuple[str, ...] = (),
    ) -> None:
        self._config = config
        self._small = small
        self._missing = [
            DirectoryState(name, Role.LEDGER, Space(0, 0), failure=why)
            for name, why in (missing or {}).items()
        ]
        self._watches = {directory.id: _Watch(directory, config) for directory in directories}
        self._wake = asyncio.Event()
        self._last_report: object = None
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
        """Connect the owner of the directories. `failure` gives, by id, the reason why a directory
        was dropped, or "" while it lives; `drop` drops a directory; `absent` gives, by role and id,
        a text for each directory that the node had before and that no setting names now."""
        self._failure, self._drop, self._find_absent = failure, drop, absent
        self._look_for_absent()
        for directory_id, watch in self._watches.items():
            if watch.failed is not None:
                drop(directory_id, watch.failed)

    def disk(self, directory_id: str) -> Disk:
        """The directory's disk; after a new file is made on it, this monitor looks soon."""
        disk = self._watches[directory_id].directory.disk
        watched = _WatchedDisk(
            disk, self._on_new_file, lambda needed: self.set_full(directory_id, needed)
        )
        return cast(Disk, watched)

    def _on_new_file(self, path: str) -> None:
        if not path.startswith(self._small):
            self.poke()

    def poke(self) -> None:
        """Look soon: a file was made, or a directory dropped."""
        self._wake.set()

    async def set_full(self, directory_id: str, needed_bytes: int) -> None:
        """Set the directory full, as it has no space for `needed_bytes`, and free its reserve.
        Raises DiskFailed."""
        await self._watches[directory_id].set_full(needed_bytes)
        self._report()

    async def make_room(self, directory_id: str, needed_bytes: int) -> bool:
        """Whether `needed_bytes` fit. If they do not fit at first, sets the directory full and
        frees its reserve. Raises DiskFailed."""
        disk = self._watches[directory_id].directory.disk
        if await disk.free_bytes() >= needed_bytes:
            return True
        await self.set_full(directory_id, needed_bytes)
        return await disk.free_bytes() >= needed_bytes

    @property
    def states(self) -> list[DirectoryState]:
        """All directories, the watched directories first, in the constructor's order."""
        watched = [
            DirectoryState(
                d.name, d.role, watch.space, watch.full, self._why_failed(i), d.file_system
            )
            for i, watch in self._watches.items()
            for d in [watch.directory]
        ]
        return watched + self._missing + self._absent

    def _why_failed(self, directory_id: str) -> str:
        """Why the directory failed; empty while it lives."""
        return self._failure(directory_id) or str(self._watches[directory_id].failed or "")

    @property
    def any_full(self) -> bool:
        """Whether any directory, living or failed, is full. (Called for each add: must be fast.)"""
        return any([watch.full for watch in self._watches.values()])

    def has_space(self, directory_id: str) -> bool:
        """Whether new ledgers may be placed in the directory."""
        return not self._watches[directory_id].full and not self._why_failed(directory_id)

    def free_bytes(self, directory_id: str) -> int:
        """The free bytes at the last look."""
        return self._watches[directory_id].space.free_bytes

    async def run(self) -> None:
        """Look for ever."""
        while True:
            has_full = any(
                watch.full and not self._why_failed(i) for i, watch in self._watches.items()
            )
            pause_s = self._config.disk_check_s
            await woken(self._wake, min(FULL_CHECK_S, pause_s) if has_full else pause_s)
            self._wake.clear()
            await self.look()

    async def look(self) -> None:
        """Look at every directory that lives; free reserves and make them again."""
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
        self._report()

    def _look_for_absent(self) -> None:
        self._absent = [
            DirectoryState(directory_id, Role(role), Space(0, 0), failure=why)
            for role, absent in self._find_absent().items()
            for directory_id, why in absent.items()
        ]

    def _missing_bytes(self) -> int:
        """The bytes of all directories' reserves to be made again, as the directories may share a
        file system."""
        live = [watch for name, watch in self._watches.items() if not self._why_failed(name)]
        return sum(watch.reserve.missing_bytes for watch in live)

    def _report(self) -> None:
        """Call the listeners when more than the free bytes changed."""
        report: list[object] = [(w.full, self._why_failed(i)) for i, w in self._watches.items()]
        report += [directory.name for directory in self._absent]
        if report == self._last_report:
            return
        self._last_report = report
        for listener in self.listeners:
            listener()


class _Watch:
    """One directory: its last known state, and its reserve."""

    def __init__(self, directory: WatchedDirectory, config: StorageConfig) -> None:
        self.directory = directory
        self.space = Space(0, 0)
        self.full = False
        self.failed: DiskFailed | None = None
        self._config = config
        self.reserve = Reserve(directory.disk, config.disk_reserve_bytes)
        self._needed_bytes = 0  # the bytes that the directory could not reserve
        self._has_looked = False
        self._has_identity = False
        self._one_at_a_time = asyncio.Lock()

    async def look(self, missing_bytes: Callable[[], int]) -> None:
        """As DiskMonitor.look. `missing_bytes` gives the bytes of all directories' reserves that
        are to be made again. Raises DiskFailed."""
        async with self._one_at_a_time:
            await self._check_identity()
            if not self._has_looked:
                await self.reserve.find()
                self._has_looked = True
            self.space = await self._measure()
            missing = missing_bytes() if self.full else self.reserve.missing_bytes
            await self._change_fullness(is_full(self.space, self.full, missing, self._limits))

    async def set_full(self, needed_bytes: int) -> None:
        """As DiskMonitor.set_full."""
        async with self._one_at_a_time:
            self._needed_bytes = max(self._needed_bytes, needed_bytes)
            await self._change_fullness(True)

    async def _change_fullness(self, full: bool) -> None:
        was_held = self.reserve.is_held
        if not full:
            full = not await self.reserve.make()
        if full:
            await self.reserve.release()
        if was_held != self.reserve.is_held:
            self.space = await self._measure()
        if full != self.full:
            self.full = full
            self._log_change()
        if not full:
            self._needed_bytes = 0

    @property
    def _limits(self) -> DiskLimits:
        config = self._config
        free_bytes_min = max(config.disk_free_bytes_min, self._needed_bytes)
        return DiskLimits(config.disk_usage_high, config.disk_usage_low, free_bytes_min)

    async def _measure(self) -> Space:
        disk = self.directory.disk
        return Space(await disk.free_bytes(), await disk.total_bytes())

    async def _check_identity(self) -> None:
        """Raises DiskFailed if the identity file was there and is missing now: the file system was
        unmounted, or the folder replaced."""
        has_identity = identity.FILE in await self.directory.disk.list()
        if self._has_identity and not has_identity:
            path = f"{self.directory.name}/{identity.FILE}"
            raise DiskFailed(f"{path} is gone: was the disk unmounted, or the folder replaced?")
        self._has_identity = has_identity

    def _log_change(self) -> None:
        name, free = self.directory.name, self.space.free_bytes
        if self.full:
            _log.warning("directory %s is full: %d bytes free", name, free)
        else:
            _log.warning("directory %s has space again: %d bytes free", name, free)


# -- the disks of watched directories -------------------------------------------------------


class Reserve:
    """A file in one directory, with `size_bytes` of allocated blocks. Its removal frees these bytes
    at once for fences, recovery's adds and compaction, when other entries are refused. With
    `size_bytes` 0 there is no file, and no bytes are missing."""

    def __init__(self, disk: Disk, size_bytes: int) -> None:
        self._disk = disk
        self._size_bytes = size_bytes
        self.is_held = not size_bytes

    @property
    def missing_bytes(self) -> int:
        """The free bytes that a new reserve would take."""
        return 0 if self.is_held else self._size_bytes

    async def find(self) -> None:
        """Take over the reserve of an earlier run, or remove it if it has another size. Raises
        DiskFailed."""
        try:
            file = await self._disk.open(RESERVE)
        except NoSuchFile:
            return
        size_bytes = file.end
        await file.close()
        self.is_held = size_bytes == self._size_bytes
        if not self.is_held:
            await self._remove()

    async def make(self) -> bool:
        """Make the reserve unless it exists. Returns False if there is no space. Raises
        DiskFailed."""
        if self.is_held:
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
        self.is_held = True
        return True

    async def release(self) -> None:
        """Free the reserve's bytes. Raises DiskFailed."""
        if self.is_held and self._size_bytes:
            await self._remove()
            self.is_held = False

    async def _remove(self) -> None:
        await self._disk.remove(RESERVE)
        await self._disk.sync_dir()


class _WatchedDisk:
    """`disk`, which also calls `on_new_file` with the path of each new file. If there is no space
    to make a file, it awaits `set_full` with the bytes to reserve, and tries a second time."""

    def __init__(
        self,
        disk: Disk,
        on_new_file: Callable[[str], None],
        set_full: Callable[[int], Awaitable[None]],
    ) -> None:
        self._disk = disk
        self._on_new_file = on_new_file
        self._set_full = set_full

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    async def create(self, path: str, reserve_bytes: int = 0, *, direct: bool = False) -> File:
        try:
            file = await self._disk.create(path, reserve_bytes, direct=direct)
        except DiskFull:
            await self._set_full(reserve_bytes)
            file = await self._disk.create(path, reserve_bytes, direct=direct)
        self._on_new_file(path)
        return file if reserve_bytes else cast(File, _GrowingFile(file, self._make_room))

    async def _make_room(self, needed_bytes: int) -> int:
        free_bytes = await self._disk.free_bytes()
        if free_bytes < needed_bytes:
            await self._set_full(needed_bytes)
            if await self._disk.free_bytes() < needed_bytes:  # do not use the last bytes (BK#4114)
                raise DiskFull(f"there is no space for {needed_bytes} bytes")
        return unchecked_bytes(free_bytes, needed_bytes)


class _GrowingFile:
    """`file`, which awaits `make_room` with the bytes of an append before the append. The result of
    `make_room` is how many bytes may be appended before its next call."""

    def __init__(self, file: File, make_room: Callable[[int], Awaitable[int]]) -> None:
        self._file = file
        self._make_room = make_room
        self._unchecked_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    async def append(self, buffers: Sequence[Buffer], *, sync: bool = False) -> int:
        size = sum(map(len, buffers))
        if size > self._unchecked_bytes:
            self._unchecked_bytes = await self._make_room(size)
        self._unchecked_bytes -= size
        return await self._file.append(buffers, sync=sync)
