"""A disk that forgets what was not synced: page cache and durable image, file by file.

Always true:
- reads see the page cache; `crash` falls back to the durable image plus a random subset of the
  writes since the last sync, each of them whole, gone, or torn at 512 or 4,096 bytes;
- a name made, renamed or removed is durable only after `sync_dir` of its folder; at a crash each
  such change is kept or reverted by chance; a file that was removed `unread` comes back cut;
- a failed write or sync is final for its file, and what it covered is not durable;
- after a crash, files opened before it raise DiskFailed: they belong to a dead process;
- what takes time, or hangs, is a call in one of a disk's threads to its caller: production's own
  IoDeadline gives up on it, a new one from each crash on.

    disk = SimDisk(random.Random(7))
    bookie = await Bookie.start(..., disk, ...)
    disk.crash()                       # power loss; or crash(keep="all") for a mere kill -9
    bookie = await Bookie.start(..., disk, ...)

Faults: `disk.faults.sync_fails` (the next syncs raise), `.bytes_max` (ENOSPC), `.sync_s` and
`.read_s` (slow), `.hangs`. For tests to damage and see: `flip_bit`, `truncate`, `wipe`, `content`,
`paths`.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from bookie_server.api.entry import Buffer
from bookie_server.config import StorageConfig
from bookie_server.disk.interface import DiskFailed, DiskFull, IoDeadline, NoSuchFile
from bookie_server.lanes import in_recovery_lane
from tests.simulation.loop import current_process

Keep = Literal["random", "none", "all", "torn"]
CAPACITY_BYTES = 1 << 40
BLOCK_BYTES = 4096
HANG_S = StorageConfig().disk_hang_s


@dataclass
class DiskFaults:
    """What goes wrong; times in simulated seconds, (shortest, longest)."""

    sync_s: tuple[float, float] = (0.0005, 0.003)
    read_s: tuple[float, float] = (0.0, 0.0)
    readers: int = 0
    """Reads at once of each lane, as a disk has threads; 0: any number."""
    sync_fails: int = 0
    """How many of the next syncs raise EIO."""
    append_fails: int = 0
    hangs: bool = False
    """Whether what is asked of it never returns, for as long as this says so."""
    renamed: "Callable[[SimDisk, str], None] | None" = None
    """Told of each file that was given another name."""
    bytes_max: int = CAPACITY_BYTES
    """Capacity: an append or reservation beyond it raises ENOSPC."""


class _Inode:
    """A file's bytes, whatever its names are."""

    def __init__(self, reserved: int) -> None:
        self.cache = bytearray()
        self.durable = bytearray()
        self.reserved = reserved
        self.reserved_durably = False
        self.unsynced: list[tuple[int, bytes]] = []
        self.dead = False
        self.rotten = False
        self.given_back = False
        self.unreadable: dict[int, None] = {}

    def write(self, position: int, data: bytes) -> None:
        _put(self.cache, position, data)
        self.unsynced.append((position, data))

    def read(self, path: str, position: int, length: int) -> bytes:
        """Raises DiskFailed."""
        end = position + length
        if self.unreadable:
            blocks = range(position // BLOCK_BYTES, -(-end // BLOCK_BYTES))
            if any(bad in blocks for bad in self.unreadable):
                raise DiskFailed(f"EIO on a read of {path}")
        with memoryview(self.cache) as image:
            data = bytes(image[position:end])
        reserved = min(end, self.size()) - position - len(data)
        return data + bytes(reserved) if reserved > 0 else data

    def size(self) -> int:
        """What stat would say: reserved blocks count, as after posix_fallocate."""
        return max(len(self.cache), self.reserved)

    def sync(self, writes: int) -> None:
        """Make the first `writes` unsynced writes durable."""
        for position, data in self.unsynced[:writes]:
            _put(self.durable, position, data)
        del self.unsynced[:writes]
        self.reserved_durably = True

    def crash(self, rng: random.Random, keep: Keep) -> None:
        """Fall back to what a power loss leaves."""
        for position, data in self.unsynced:
            for offset, part in _survivors(rng, position, data, keep):
                _put(self.durable, offset, part)
        self.unsynced.clear()
        if not self.reserved_durably and keep != "all" and (keep == "none" or rng.random() < 0.5):
            self.reserved = 0
        if self.given_back:
            self.reserved //= 2
            del self.durable[len(self.durable) // 2 :]
        self.cache = bytearray(self.durable)


def _put(image: bytearray, position: int, data: bytes) -> None:
    if len(image) < position:
        image.extend(bytes(position - len(image)))
    image[position : position + len(data)] = data


def _survivors(
    rng: random.Random, position: int, data: bytes, keep: Keep
) -> list[tuple[int, bytes]]:
    """The parts of one unsynced write that reached the disk."""
    if keep == "all":
        return [(position, data)]
    if keep == "none":
        return []
    fate = rng.random() if keep != "torn" else rng.uniform(0.7, 1.0)
    if fate < 0.35:
        return [(position, data)]
    if fate < 0.7:
        return []
    sector = 512 if fate < 0.85 else 4096
    parts, start = [], position
    while start < position + len(data):
        end = min(position + len(data), (start // sector + 1) * sector)
        if rng.random() < 0.5:
            parts.append((start, data[start - position : end - position]))
        start = end
    return parts


class SimFile:
    """An open file of a SimDisk; see bookie_server.disk.interface.File."""

    def __init__(self, disk: "SimDisk", path: str, inode: _Inode, end: int) -> None:
        self.path = path
        self._disk = disk
        self._inode = inode
        self._end = end
        self._boot = disk.boots
        self._appending = False

    @property
    def end(self) -> int:
        return self._end

    async def append(self, buffers: Sequence[Buffer], *, sync: bool = False) -> int:
        self._begin()
        assert not self._appending, f"two tasks append to {self.path} at once"
        data = b"".join(buffers)
        position = self._end
        self._disk.take_append(self._inode, len(data))
        self._inode.write(position, data)
        self._end += len(data)
        if sync:
            self._appending = True
            try:
                await self.sync()
            except BaseException:
                self._inode.dead = True  # a cancelled caller does not know what is durable either
                raise
            finally:
                self._appending = False
        return position

    async def sync(self) -> None:
        self._begin()
        covered = len(self._inode.unsynced)
        await self._disk.pause(self._disk.faults.sync_s, alters=True)
        self._check()
        faults = self._disk.faults
        if faults.sync_fails > 0:
            faults.sync_fails -= 1
            self._inode.dead = True
            raise DiskFailed(f"EIO on sync of {self.path}")
        self._inode.sync(min(covered, len(self._inode.unsynced)))
        self._disk.syncs += 1

    async def read(self, position: int, length: int) -> bytes:
        self._begin(reading=True)
        await self._disk.pause_reading()
        self._check(reading=True)
        return self._inode.read(self.path, position, length)

    async def close(self) -> None:
        """Nothing is synced by closing."""

    def _begin(self, reading: bool = False) -> None:
        self._disk.deadline.check()
        self._check(reading)

    def _check(self, reading: bool = False) -> None:
        if self._boot != self._disk.boots:
            raise DiskFailed(f"{self.path}: opened by a process that is dead")
        if self._inode.dead and not reading:
            raise DiskFailed(f"{self.path}: an earlier write or sync failed")


@dataclass(frozen=True, eq=False)
class _NameChange:
    """`path` names `inode` (None: nothing); `gone` is the old name of a rename."""

    path: str
    inode: _Inode | None
    gone: str = ""

    def folders(self) -> tuple[str, str]:
        return _folder(self.path), _folder(self.gone or self.path)

    def apply(self, names: dict[str, _Inode]) -> None:
        if self.inode is None:
            names.pop(self.path, None)
            return
        if self.gone:
            names.pop(self.gone, None)
        names[self.path] = self.inode


@dataclass(frozen=True, eq=False)
class _FolderRename:
    """All names below `gone` are below `path` from now on, in one step."""

    path: str
    gone: str

    def folders(self) -> tuple[str, str]:
        return _folder(self.path), _folder(self.gone)

    def apply(self, names: dict[str, _Inode]) -> None:
        for name in [name for name in names if name.startswith(f"{self.gone}/")]:
            names[self.path + name.removeprefix(self.gone)] = names.pop(name)


def _end(done: "asyncio.Future[None]") -> None:
    if not done.done():
        done.set_result(None)


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


class SimDisk:
    """One folder's disk; see bookie_server.disk.interface.Disk. All chance comes from `rng`."""

    def __init__(self, rng: random.Random | None = None, faults: DiskFaults | None = None) -> None:
        self.faults = faults or DiskFaults()
        self.deadline = IoDeadline(HANG_S)
        self.boots = 0
        self.syncs = 0
        """File syncs that succeeded; lets a test ask whether a reply came after one."""
        self._rng = rng or random.Random(0)
        self._names: dict[str, _Inode] = {}
        self._durable_names: dict[str, _Inode] = {}
        self._changes: list[_NameChange | _FolderRename] = []
        self._folders: dict[str, None] = {"": None}
        self._reading: dict[bool, asyncio.Semaphore] = {}
        self._lists: dict[str, list[str]] = {}  # what `list` found since a name changed

    # -- Disk --------------------------------------------------------------------------------

    async def create(self, path: str, reserve_bytes: int = 0, *, direct: bool = False) -> SimFile:
        self.deadline.check()
        if path in self._names:
            raise DiskFailed(f"{path}: exists already")
        self._require_folder(path)
        if self._used() + reserve_bytes > self.faults.bytes_max:
            raise DiskFull(f"ENOSPC: {reserve_bytes} bytes for {path}")
        inode = _Inode(reserve_bytes)
        self._change(_NameChange(path, inode))
        return SimFile(self, path, inode, 0)

    async def open(self, path: str) -> SimFile:
        self.deadline.check()
        inode = self.inode_of(path)
        return SimFile(self, path, inode, inode.size())

    async def list(self, folder: str = "") -> list[str]:
        self.deadline.check()
        if (known := self._lists.get(folder)) is not None:
            return known.copy()
        prefix = f"{folder}/" if folder else ""
        names = [*self._names, *(name for name in self._folders if name)]
        inside = (name[len(prefix) :] for name in names if name.startswith(prefix))
        found = sorted({rest.split("/")[0] for rest in inside if rest})
        self._lists[folder] = found
        return found.copy()

    async def rename(self, old: str, new: str) -> None:
        self.deadline.check()
        self._require_folder(new)
        if any(name.startswith(f"{old}/") for name in self._names):
            if any(name.startswith(f"{new}/") for name in self._names):
                raise DiskFailed(f"{new}: not an empty folder")
            await self.make_folder(new)
            self._lists.clear()  # both have other names in them now
            return self._change(_FolderRename(new, gone=old))
        self._change(_NameChange(new, self.inode_of(old), gone=old))
        if self.faults.renamed is not None:
            self.faults.renamed(self, new)
        return None

    async def remove(self, path: str, *, unread: bool = False) -> None:
        self.deadline.check()
        self.inode_of(path).given_back = unread
        self._change(_NameChange(path, None))

    async def make_folder(self, path: str) -> None:
        self.deadline.check()
        if path in self._folders:
            return
        self._lists.clear()
        parts = path.split("/")
        for count in range(1, len(parts) + 1):
            self._folders["/".join(parts[:count])] = None

    async def sync_dir(self, folder: str = "") -> None:
        self.deadline.check()
        covered = [change for change in self._changes if folder in change.folders()]
        await self.pause(self.faults.sync_s, alters=True)
        for change in covered:
            if change in self._changes:
                self._changes.remove(change)
                change.apply(self._durable_names)

    async def free_bytes(self) -> int:
        self.deadline.check()
        await self.pause((0.0, 0.0))
        return max(0, self.faults.bytes_max - self._used())

    async def total_bytes(self) -> int:
        self.deadline.check()
        return self.faults.bytes_max

    # -- faults, and what tests look at ------------------------------------------------------

    def crash(self, keep: Keep = "random") -> None:
        """The process that had this disk is gone, and with it what `keep` does not spare:
        "random" is a power loss, "none" the worst one, "torn" one in which no unsynced write is
        whole or gone but by chance, "all" a kill -9 with the power on."""
        self._end_of_process()
        self._reading.clear()
        for change in self._changes:
            if keep == "all" or (keep == "random" and self._rng.random() < 0.5):
                change.apply(self._durable_names)
        self._changes.clear()
        self._lists.clear()
        self._names = dict(self._durable_names)
        crashed: dict[int, None] = {}
        for _, inode in sorted(self._names.items()):
            if id(inode) not in crashed:  # one inode may have two names; order is by name
                crashed[id(inode)] = None
                inode.crash(self._rng, keep)
                inode.dead = False

    def _end_of_process(self) -> None:
        self.boots += 1
        self.deadline = IoDeadline(HANG_S)

    def wipe(self) -> None:
        """A blank disk."""
        self._end_of_process()
        self._lists.clear()
        self._names.clear()
        self._durable_names.clear()
        self._changes.clear()
        self._folders = {"": None}

    def lose(self, folder: str) -> None:
        """Damage: what was in the folder is gone, durably."""
        for names in (self._names, self._durable_names):
            for path in [path for path in names if _folder(path) == folder]:
                del names[path]
        self._changes = [c for c in self._changes if folder not in c.folders()]
        self._lists.clear()

    def paths(self) -> Sequence[str]:
        return sorted(self._names)

    async def look(self, path: str, position: int, length: int) -> bytes:
        """What another process of the host reads there. Raises DiskFailed."""
        inode = self.inode_of(path)
        if self.faults.hangs:
            await asyncio.get_running_loop().create_future()
        if self.faults.read_s[1] > 0:
            await asyncio.sleep(self._rng.uniform(*self.faults.read_s))
        return inode.read(path, position, length)

    def content(self, path: str) -> bytes:
        """What a read of the whole file returns."""
        return bytes(self.inode_of(path).cache)

    def durable(self, path: str) -> bytes:
        """What survives the worst crash; b"" when the name does not."""
        inode = self._durable_names.get(path)
        return b"" if inode is None else bytes(inode.durable)

    def fill_up(self, left_bytes: int) -> None:
        """ENOSPC beyond that many bytes more than are in use now."""
        self.faults.bytes_max = self._total() + left_bytes

    def empty_out(self) -> None:
        """There is space again."""
        self.faults.bytes_max = CAPACITY_BYTES

    def speed_up(self) -> None:
        self.faults.sync_s, self.faults.read_s = DiskFaults.sync_s, DiskFaults.read_s

    def calm(self) -> None:
        """No failure, no slowness, and space, from now on."""
        self.faults.sync_fails = self.faults.append_fails = 0
        self.faults.hangs = False
        self.faults.renamed = None
        self.empty_out()
        self.speed_up()

    def rot(self, path: str) -> bool:
        """Whether a bit of the file was flipped."""
        inode = self._names.get(path)
        return inode is not None and inode.rotten

    def flip_bit(self, path: str, bit: int) -> None:
        """Rot: one bit of the file, on the platter and in the cache."""
        inode = self.inode_of(path)
        inode.rotten = True
        for image in (inode.cache, inode.durable):
            if bit // 8 < len(image):
                image[bit // 8] ^= 1 << (bit % 8)

    def overwrite(self, path: str, position: int, data: bytes, *, in_cache: bool) -> None:
        """Damage: these bytes are there on the platter; with `in_cache` they are read at once,
        else after the next crash."""
        inode = self.inode_of(path)
        inode.rotten = True
        for image in (inode.durable, inode.cache) if in_cache else (inode.durable,):
            image[position : position + len(data)] = data[: max(0, len(image) - position)]

    def make_unreadable(self, path: str, position: int) -> None:
        """Damage: from now on reads of the block with that byte raise EIO."""
        self.inode_of(path).unreadable[position // BLOCK_BYTES] = None

    def truncate(self, path: str, length: int) -> None:
        """Damage: the file ends after `length` bytes."""
        inode = self.inode_of(path)
        del inode.cache[length:], inode.durable[length:]
        inode.reserved = min(inode.reserved, length)

    # -- for SimFile ---------------------------------------------------------------------------

    def take_append(self, inode: _Inode, length: int) -> None:
        """Raise DiskFailed when an append of `length` bytes does not succeed."""
        grows = max(0, len(inode.cache) + length - inode.size())
        full = grows > 0 and self._used() + grows > self.faults.bytes_max
        if self.faults.append_fails > 0 or full:
            self.faults.append_fails = max(0, self.faults.append_fails - 1)
            inode.dead = True
            raise DiskFull("ENOSPC on append") if full else DiskFailed("EIO on append")

    async def pause_reading(self) -> None:
        if not self.faults.readers:
            await self.pause(self.faults.read_s)
            return
        threads = self._reading.setdefault(
            in_recovery_lane(), asyncio.Semaphore(self.faults.readers)
        )
        async with threads:
            await self.pause(self.faults.read_s)

    async def pause(self, between_s: tuple[float, float], *, alters: bool = False) -> None:
        """The time that a call takes, which `alters` something or does not. Raises DiskHung."""
        if not self.faults.hangs and between_s[1] <= 0:
            return
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        timer = None
        if not self.faults.hangs:
            timer = loop.call_later(self._rng.uniform(*between_s), _end, done)
        self.deadline.watch(done, alters=alters)
        try:
            await done
        finally:
            self.deadline.stop_watching(done)
            if timer is not None:
                timer.cancel()

    def _used(self) -> int:
        return 0 if self.faults.bytes_max >= CAPACITY_BYTES else self._total()

    def _total(self) -> int:
        return sum(inode.size() for inode in self._names.values())

    def inode_of(self, path: str) -> _Inode:
        inode = self._names.get(path)
        if inode is None:
            raise NoSuchFile(f"{path}: no such file")
        return inode

    def _require_folder(self, path: str) -> None:
        if _folder(path) not in self._folders:
            raise DiskFailed(f"{path}: its folder does not exist")

    def _change(self, change: _NameChange | _FolderRename) -> None:
        process = current_process()
        if process is not None and not process.alive:
            raise DiskFailed(f"{change.path}: changed by a process that is dead")
        change.apply(self._names)
        for folder in change.folders():  # those above it had the folder before
            self._lists.pop(folder, None)
        self._changes.append(change)
