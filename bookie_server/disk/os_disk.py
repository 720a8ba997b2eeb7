"""The disk behind the storage engine: one folder of the operating system, its calls in threads.

Always true: `append(sync=True)` is one hop to a thread, a gathering write (pwritev) and one
fdatasync; after a failed write or sync the file refuses all later writes and syncs. If fdatasync or
posix_fallocate is missing (macOS), F_FULLFSYNC and written zeros replace them. A direct file is
written with O_DIRECT from an aligned buffer (a copy into the buffer costs a quarter of a copy to
the page cache); if the file system refuses O_DIRECT, it is an ordinary file. A writer (a flush, a
direct log, a compaction) or a query for free space does not wait for another writer's sync, nor for
a read. A thread's name has the disk's name and the kind of work ("journal-write_0"). A call that
does not return in time fails (IoDeadline); if it was a write or sync, its file has failed too.

Always true of the threads (`DiskThreads`, which cost a third less than run_in_executor): at most
`count` threads are made, when they are needed; calls begin in the order in which they arrive; if
the caller gives up before its call begins, the call is not made; the outcome goes to the caller's
loop, and is dropped if that loop is closed. The threads run until `shut_down`, which waits for
them; if it is not called, they do not delay the exit of the process.
"""

import asyncio
import contextlib
import errno
import functools
import math
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from bookie_server.api.entry import Buffer
from bookie_server.disk.interface import (
    Disk,
    DiskFailed,
    DiskFull,
    File,
    IoDeadline,
    NoSuchFile,
)
from bookie_server.lanes import in_recovery_lane
from spark_ledger.net import RareWarning, lacks_descriptors

_BUFFERS_PER_CALL = 1024  # IOV_MAX of Linux and macOS
_ZEROS = bytes(1 << 20)
_STAGING_BYTES = 2 << 20
_JOINED_BYTES_MAX = 8 << 10  # buffers that are smaller on average are joined, then staged
FREED_BYTES, _FREED_PARTS_MAX = 4 << 20, 32
_FREED_IN_PARTS_S, _FREED_SHARE = 2.0, 0.25  # the longest time for all parts: s, part of `limit_s`
_WRITERS = 4
_READERS = 8  # reads at once; with 8, disks read most bytes: docs/performance-trials.md
_DESCRIPTOR_RETRY_S = 0.2  # the pause after a call for which there was no descriptor
_RECOVERY_READERS = 2  # for recovery only, so that it does not wait behind bulk reads
T = TypeVar("T")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_rare_warning = RareWarning()
_Appender = Callable[[int, Sequence[Buffer], int, bool], None]


class _Call(NamedTuple):
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]
    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    discard: Callable[[Any], None] | None


class DiskThreads:
    """A pool of threads. `name` begins the threads' names; several pools of one disk may share a
    `deadline`."""

    def __init__(self, count: int, name: str, deadline: IoDeadline | None = None) -> None:
        self._count = count
        self._name = name
        self._deadline = deadline or IoDeadline()
        self._threads: list[threading.Thread] = []
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._free = threading.Semaphore(0)  # threads that wait for a call
        self._is_shut_down = False

    def run(
        self,
        call: Callable[..., T],
        *arguments: Any,
        alters: bool = False,
        has_deadline: bool = True,
        discard: Callable[[T], None] | None = None,
    ) -> asyncio.Future[T]:
        """The call's result, or its exception, or DiskHung. If the caller gave up before the call
        returns, the result goes to `discard`. `alters`: the call changes the disk or index. Without
        `has_deadline` the call may take any time.

        Raises DiskHung, without making the call, after a call that `alters` has hung; RuntimeError
        after `shut_down`, and when no thread exists and no thread can be made.
        """
        if self._is_shut_down:
            raise RuntimeError(f"the threads {self._name} have ended")
        if has_deadline:
            self._deadline.check()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        if not self._free.acquire(blocking=False) and len(self._threads) < self._count:
            self._add_thread()
        self._calls.put(_Call(loop, done, call, arguments, discard))
        if has_deadline:
            self._deadline.watch(done, alters=alters)
        return done

    def _add_thread(self) -> None:
        """If the system allows no more threads, the calls wait for the present threads."""
        name = f"{self._name}_{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def shut_down(self) -> None:
        """End the threads, after all calls that are under way or wait."""
        self._is_shut_down = True
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            loop, done, call, arguments, discard = item
            if not done.done():
                try:
                    outcome: tuple[Any, ...] = (self._succeed, done, call(*arguments), discard)
                except BaseException as error:
                    outcome = (self._fail, done, error)
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(*outcome)
                del outcome
            del item, loop, done, call, arguments, discard  # keep no object while this waits
            self._free.release()

    def _succeed(
        self, done: asyncio.Future[T], result: T, discard: Callable[[T], None] | None
    ) -> None:
        self._deadline.stop_watching(done)
        if not done.done():
            done.set_result(result)
        elif discard is not None:
            discard(result)

    def _fail(self, done: asyncio.Future[Any], error: BaseException) -> None:
        self._deadline.stop_watching(done)
        if not done.done():
            done.set_exception(error)


class OsDisk(Disk):
    """The folder `root` on a local file system. `name` ("journal", "ledger") begins its threads'
    names; a call that takes longer than `limit_s` has hung."""

    def __init__(self, root: Path, name: str = "disk", limit_s: float = math.inf) -> None:
        self._root = root
        self._deadline = IoDeadline(limit_s)
        self._freed_in_parts_s = min(_FREED_IN_PARTS_S, _FREED_SHARE * limit_s)
        self._writers = DiskThreads(_WRITERS, f"{name}-write", self._deadline)
        self._readers = DiskThreads(_READERS, f"{name}-read", self._deadline)
        self._recovery = DiskThreads(_RECOVERY_READERS, f"{name}-recovery", self._deadline)
        root.mkdir(parents=True, exist_ok=True)

    def shut_down(self) -> None:
        """End the threads; calls under way end first."""
        self._writers.shut_down()
        self._readers.shut_down()
        self._recovery.shut_down()

    async def create(self, path: str, reserve_bytes: int = 0, *, direct: bool = False) -> File:
        fd, is_direct = await _run_with_descriptor(
            functools.partial(self._writers.run, alters=True, discard=_close_discarded),
            *(_create, self._root / path, reserve_bytes, direct),
        )
        return OsFile(self, path, fd, 0, _DirectWriter().append if is_direct else _append)

    async def open(self, path: str) -> File:
        fd, size = await self._read(_open, self._root / path, discard=_close_discarded)
        return OsFile(self, path, fd, size)

    async def list(self, folder: str = "") -> list[str]:
        return await _run_with_descriptor(self._writers.run, _list, self._root / folder)

    async def rename(self, old: str, new: str) -> None:
        await self._alter(os.replace, self._root / old, self._root / new)

    async def remove(self, path: str, *, unread: bool = False) -> None:
        if unread:
            await self._alter(_remove_in_parts, self._root / path, self._freed_in_parts_s)
        else:
            await self._alter(os.unlink, self._root / path)

    async def make_folder(self, path: str) -> None:
        await self._alter(_make_folder, self._root / path)

    async def sync_dir(self, folder: str = "") -> None:
        await self._alter(_sync_dir, self._root / folder)

    async def free_bytes(self) -> int:
        return (await self._space())[0]

    async def total_bytes(self) -> int:
        return (await self._space())[1]

    async def _space(self) -> tuple[int, int]:
        space = await _run_with_descriptor(self._writers.run, os.statvfs, self._root)
        used = space.f_blocks - space.f_bfree
        return space.f_bavail * space.f_frsize, (used + space.f_bavail) * space.f_frsize

    async def _alter(self, call: Callable[..., T], *arguments: Any) -> T:
        return await _run_with_descriptor(
            functools.partial(self._writers.run, alters=True), call, *arguments
        )

    async def _read(
        self, call: Callable[..., T], *arguments: Any, discard: Callable[[T], None] | None = None
    ) -> T:
        threads = self._recovery if in_recovery_lane() else self._readers
        return await _run_with_descriptor(
            functools.partial(threads.run, discard=discard), call, *arguments
        )


class OsFile(File):
    """A file of an OsDisk; see interface.File."""

    def __init__(
        self, disk: OsDisk, path: str, fd: int, end: int, append: _Appender | None = None
    ) -> None:
        self._disk = disk
        self._append = append or _append
        self.path = path
        self.end = end
        self._fd = fd
        self._is_dead = False

    async def append(self, buffers: Sequence[Buffer], *, sync: bool = False) -> int:
        position = self.end
        self.end += sum(map(len, buffers))
        await self._alter(self._append, self._fd, buffers, position, sync)
        return position

    async def sync(self) -> None:
        await self._alter(_sync, self._fd)

    async def read(self, position: int, length: int) -> bytes:
        return await self._disk._read(_pread, self._fd, length, position)

    async def close(self) -> None:
        fd, self._fd, self._is_dead = self._fd, -1, True
        if fd >= 0 and not self._disk._deadline.has_hung:  # a thread may hang with this descriptor
            await self._disk._alter(os.close, fd)

    async def _alter(self, call: Callable[..., T], *arguments: Any) -> T:
        if self._is_dead:
            raise DiskFailed(f"{self.path}: closed, or an earlier write or sync failed")
        try:
            return await self._disk._alter(call, *arguments)
        except BaseException:
            self._is_dead = True  # after a cancellation, too: a part of the bytes may be written
            raise


async def _run_with_descriptor(
    run: Callable[..., asyncio.Future[T]], call: Callable[..., T], *arguments: Any
) -> T:
    """The call's result. A call that fails because the process has no free descriptor has changed
    nothing, and is no failure of the disk: it is repeated until there is a descriptor. Raises
    DiskFailed."""
    while True:
        try:
            return await run(call, *arguments)
        except FileNotFoundError as error:
            raise NoSuchFile(str(error)) from error
        except OSError as error:
            if not lacks_descriptors(error):
                kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else DiskFailed
                raise kind(str(error)) from error
            text = "a file waits for a descriptor (raise the limit, ulimit -n): %s"
            _rare_warning.warn(asyncio.get_running_loop().time(), text, error)
        await asyncio.sleep(_DESCRIPTOR_RETRY_S)


def _close_discarded(opened: tuple[int, Any]) -> None:
    """Close a file that was opened after its caller gave up."""
    os.close(opened[0])


# -- calls that run in the threads ------------------------------------------------------------


def _create(path: Path, reserve_bytes: int, direct: bool) -> tuple[int, bool]:
    """The descriptor of the new file, and whether it bypasses the page cache."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        if reserve_bytes:
            _reserve(fd, reserve_bytes)
        if direct and hasattr(os, "O_DIRECT"):
            return _reopened_direct(path, fd)
    except BaseException:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(path)  # its blocks may be all the space that was free
        raise
    return fd, False


def _reopened_direct(path: Path, fd: int) -> tuple[int, bool]:
    try:
        direct_fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:  # tmpfs and some network file systems have no O_DIRECT
        if lacks_descriptors(error):
            raise
        return fd, False
    os.close(fd)
    return direct_fd, True


def _reserve(fd: int, length: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, length)
        return
    for position in range(0, length, len(_ZEROS)):
        _pwrite_all(fd, [_ZEROS[: length - position]], position)


def _open(path: Path) -> tuple[int, int]:
    """Open to read; the descriptor and the size. The kernel's read-ahead is off: it would split the
    callers' large reads and read bytes that are not needed."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):  # a folder can be opened, but not read
        os.close(fd)
        raise OSError(errno.EISDIR, "not a file", str(path))
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd, status.st_size


def _list(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def _remove_in_parts(path: Path, within_s: float) -> None:
    """Remove the name in one step, then free the space in parts, from the end of the file. A file
    system that discards freed blocks does so when it commits its own log, and blocks every write
    until then: 20 to 100 ms for 64 MiB, for every journal on it. So each part is synced by itself
    (else one commit would free all parts), and after each part this pauses as long as the part
    took. All parts are one call under the deadline, and the disk may be slow: after `within_s` the
    rest is freed at once. A file that cannot be truncated is freed as a whole."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.unlink(path)
        end, until_s = os.fstat(fd).st_size, time.monotonic() + within_s
        part_bytes = max(FREED_BYTES, end // _FREED_PARTS_MAX)
        with contextlib.suppress(OSError):
            while end > 0 and (began_s := time.monotonic()) < until_s:
                end = max(0, end - part_bytes)
                os.ftruncate(fd, end)
                os.fsync(fd)
                now_s = time.monotonic()
                time.sleep(max(0.0, min(now_s - began_s, until_s - now_s)))
    finally:
        os.close(fd)


def _make_folder(folder: Path) -> None:
    """Make the folder and its parents. Each new name is made durable, so that the folder of a
    synced file exists after a crash."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    fd = os.open(folder.parent, _FOLDER_FLAGS)  # before the name is made: a failure leaves no name
    try:
        folder.mkdir(exist_ok=True)
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_dir(folder: Path) -> None:
    fd = os.open(folder, _FOLDER_FLAGS)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _append(fd: int, buffers: Sequence[Buffer], position: int, sync: bool) -> None:
    for start in range(0, len(buffers), _BUFFERS_PER_CALL):
        position = _pwrite_all(fd, buffers[start : start + _BUFFERS_PER_CALL], position)
    if sync:
        _sync(fd)


class _DirectWriter:
    """Writes a file opened with O_DIRECT: memory, lengths and positions are multiples of 4096."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _STAGING_BYTES)  # page-aligned; kept from append to append
        self._staging = memoryview(self._memory)

    def append(self, fd: int, buffers: Sequence[Buffer], position: int, sync: bool) -> None:
        staged = 0
        if sum(map(len, buffers)) < _JOINED_BYTES_MAX * len(buffers):
            buffers = [b"".join(buffers)]  # many small buffers: a copy costs less than their steps
        for buffer in buffers:
            rest = memoryview(buffer)
            while rest:
                size = min(len(rest), _STAGING_BYTES - staged)
                self._staging[staged : staged + size] = rest[:size]
                staged, rest = staged + size, rest[size:]
                if staged == _STAGING_BYTES:
                    position = _pwrite_all(fd, [self._staging], position)
                    staged = 0
        if staged:
            _pwrite_all(fd, [self._staging[:staged]], position)
        if sync:
            _sync(fd)


def _pwrite_all(fd: int, buffers: Sequence[Buffer], position: int) -> int:
    """Write every byte, with several calls if the kernel takes fewer; returns the end position."""
    length = sum(map(len, buffers))
    end = position + length
    written = os.pwritev(fd, buffers, position)
    while position + written < end:
        if written <= 0:
            raise OSError(errno.EIO, "the disk takes no more bytes")
        position += written
        buffers = _without_first(buffers, written)
        written = os.pwritev(fd, buffers, position)
    return end


def _without_first(buffers: Sequence[Buffer], count: int) -> Sequence[Buffer]:
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [memoryview(buffer)[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


def _sync(fd: int) -> None:
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
        return
    import fcntl

    fcntl.fcntl(fd, getattr(fcntl, "F_FULLFSYNC"))  # noqa: B009 (absent on Linux, where types are checked)


def _pread(fd: int, length: int, position: int) -> bytes:
    data = os.pread(fd, length, position)
    while len(data) < length:
        more = os.pread(fd, length - len(data), position + len(data))
        if not more:
            break
        data += more
    return data
