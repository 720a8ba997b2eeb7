"""From the settings to the directories on which a bookie starts, or whose indexes are made anew;
and which places directories may have.

Always true: settings with which no bookie can start are refused before anything is written, with
the two names that disagree and the remedy; a directory is locked before anything in it is read; it
gets its id with its identity and keeps it; if an index cannot be opened, only its own directory is
left out, while others live.
"""

import fcntl
import logging
import os
import uuid
from collections.abc import Sequence
from functools import partial, reduce
from itertools import combinations
from pathlib import Path

from bookie_server.config import BookieConfig
from bookie_server.disk import identity as identities
from bookie_server.disk.identity import BadIdentity, Directory, Identity, WrongDisks
from bookie_server.disk.interface import Disk, DiskFailed, DiskFull
from bookie_server.disk.monitor import DiskMonitor, Role, Watched
from bookie_server.disk.os_disk import OsDisk
from bookie_server.journal import checkpoint
from bookie_server.journal import writer as journal
from bookie_server.journal.checkpoint import BadCheckpoint, Marks
from bookie_server.logs import entry_log
from bookie_server.logs.index import EVERY_LEDGER, LedgerState
from bookie_server.logs.rebuild import rebuild, refuse_half_rebuilt
from bookie_server.logs.rocks_index import RocksIndex
from bookie_server.start import self_test
from bookie_server.storage.directories import Directories, JournalDirectory, LedgerDirectory

INDEX = "index"
_OF_A_JOURNAL = (journal.FOLDER,)
_OF_LEDGERS = (entry_log.FOLDER, checkpoint.FOLDER, INDEX)
log = logging.getLogger("bookie_server")


class OnDisk:
    """The directories of one bookie, locked. Raises BadLayout, WrongDisks, BadIdentity."""

    def __init__(self, config: BookieConfig) -> None:
        named = {kind: config.directories(kind) for kind in ("journal", "ledger")}
        paths = {k: [(f"{k}_directory", Path(p)) for p in named[k]] for k in named}
        every = [*paths["journal"], *paths["ledger"]]
        check(every)
        check_reserve(every, config.disk_reserve_bytes)
        check_kinds(paths["journal"], paths["ledger"])
        self._hang_s = hang_s = config.disk_hang_s
        numbered = {k: enumerate(path for _, path in paths[k]) for k in paths}
        self.journals = [_opened("journal", n, p, hang_s) for n, p in numbered["journal"]]
        self.ledgers = [_opened("ledger", n, p, hang_s) for n, p in numbered["ledger"]]
        _lock([path for _, path in every])

    @property
    def _all(self) -> list[Directory]:
        return [*self.journals, *self.ledgers]

    @property
    def disks(self) -> list[Disk]:
        """The disks of all directories."""
        return [directory.disk for directory in self._all]

    async def test(self) -> None:
        """Warn of disks that are slow or do not sync."""
        await self_test.run([(directory.kind, Path(directory.name)) for directory in self._all])

    async def identity(self) -> Identity | None:
        """The directories' identity; None: they are to be formatted. Raises BadIdentity,
        DiskFailed."""
        return await identities.read(self._all)

    async def format(self, identity: Identity) -> None:
        """Give the identity to the directories without one."""
        for directory in self._all:
            await identities.write(directory.disk, identity, str(uuid.uuid4()))

    async def make_space(self, config: BookieConfig) -> None:
        """Free the reserve of a full directory before an index is opened, which takes space."""
        roles = {"journal": Role.JOURNAL, "ledger": Role.LEDGER}
        watched = [Watched(d.name, d.name, roles[d.kind], d.disk) for d in self._all]
        await DiskMonitor(watched, config).look()

    async def open(self) -> Directories:
        """Open the indexes. Raises DiskFailed when no index can be opened, DiskFull when one lacks
        the space for it: that index must not count as lost."""
        journals = [
            JournalDirectory(await identities.directory_id(j.disk, "journal"), j.disk, j.name)
            for j in self.journals
        ]
        ledgers: list[LedgerDirectory] = []
        failed: dict[str, str] = {}
        names: dict[str, str] = {}
        for number, (_, folder, disk) in enumerate(self.ledgers):
            directory_id = await identities.directory_id(disk, "ledger")
            try:
                name = f"index-{number}"
                index = await RocksIndex.open(Path(folder) / INDEX, name, self._hang_s)
                device = str(os.stat(folder).st_dev)
                path = _real_path(Path(folder))
                ledgers.append(LedgerDirectory(directory_id, disk, index, folder, device, path))
            except DiskFull:
                for opened in ledgers:
                    await opened.index.close()
                raise
            except DiskFailed as error:
                failed[directory_id] = str(error)
                names[directory_id] = folder
                log.error("ledger directory %s is left out: %s", folder, error)
        if not ledgers:
            raise DiskFailed("; ".join(failed.values()))
        return Directories(journals, ledgers, failed, names)

    async def _current(self) -> list[str]:
        """The ledger directories that were there to the last: their checkpoint is the furthest.
        States in another directory may be old, from before a fence."""
        marks = {directory.name: await _marks(directory) for directory in self.ledgers}
        latest = reduce(checkpoint.furthest, marks.values())
        return [name for name, own_marks in marks.items() if own_marks == latest]

    async def broken_indexes(self) -> list[str]:
        """Names of the ledger directories whose index cannot be opened, or is empty."""
        return [d.name for d in self.ledgers if await _states(d) is None]

    async def rebuild_indexes(self, config: BookieConfig) -> None:
        """Make the indexes that cannot be opened anew, or all if all can. Raises DiskFailed."""
        opened = {directory.name: await _states(directory) for directory in self.ledgers}
        broken = [d for d in self.ledgers if opened[d.name] is None] or self.ledgers
        current = await self._current()
        readable = [s for name, s in opened.items() if s is not None and name in current]
        states = [state for copy in readable for state in copy] if readable else None
        for directory in broken:
            directory_id = await identities.directory_id(directory.disk, "ledger")
            log.info("%s: making its index anew from its entry logs", directory.name)
            make = partial(_index_in, Path(directory.name))
            rebuilt = await rebuild(directory.disk, directory_id, make, config, states)
            log.warning("%s: %s", directory.name, rebuilt.sentence())


def _opened(kind: str, number: int, path: Path, hang_s: float) -> Directory:
    try:
        return Directory(kind, str(path), OsDisk(path, f"{kind}-{number}", hang_s))
    except OSError as error:
        text = f"{kind}_directory {path} cannot be used: {error.strerror}"
        raise BadLayout(text) from error


def _real_path(path: Path) -> str:
    """LedgerDirectory.path: the path without links; empty if that path is no valid text."""
    real = str(path.resolve())
    try:
        real.encode()
    except UnicodeEncodeError:
        return ""
    return real


def _lock(directories: Sequence[Path]) -> None:
    """One process per disk; the lock goes with the process. Raises BadIdentity."""
    for directory in dict.fromkeys(directories):
        fd = os.open(directory / identities.LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadIdentity(f"another bookie is running on {directory}") from None


async def _index_in(directory: Path, folder: str) -> RocksIndex:
    return await RocksIndex.open(directory / folder)


async def _marks(directory: Directory) -> Marks:
    try:
        return await checkpoint.read(directory.disk) or {}
    except BadCheckpoint as error:
        log.warning("%s: %s", directory.name, error)
        return {}


async def _states(directory: Directory) -> list[LedgerState] | None:
    """The states in the index; None if it cannot be opened or read, or is empty: then the index was
    lost and an empty one is in its place, or a rebuild of it was interrupted. Raises DiskFull."""
    try:
        await refuse_half_rebuilt(directory.disk)
        index = await RocksIndex.open(Path(directory.name) / INDEX)
        try:
            states = await index.ledgers()
        finally:
            await index.close()
        return states if any(state.ledger_id == EVERY_LEDGER for state in states) else None
    except DiskFull:
        raise
    except DiskFailed as error:
        log.warning("%s", error)
        return None


# -- which places directories may have -----------------------------------------------------


class BadLayout(Exception):
    """Settings of directories with which no bookie can start; the text has the remedy."""


def check(directories: Sequence[tuple[str, Path]]) -> None:
    """`directories` are given with the settings that name them. Makes the missing ones.

    Raises BadLayout when two are the same or one is in the other (links are followed), or when one
    cannot be made, read and written.
    """
    for (setting, path), (other_setting, other) in combinations(directories, 2):
        here, there = path.resolve(), other.resolve()
        if here == there:
            raise BadLayout(
                f"{setting} {path} and {other_setting} {other} are the same directory. "
                "Give each a directory of its own.",
            )
        if here.is_relative_to(there) or there.is_relative_to(here):
            raise BadLayout(
                f"{setting} {path} and {other_setting} {other}: one is in the other. "
                "Give directories side by side.",
            )
    for setting, path in directories:
        _require_usable(setting, path)


def check_reserve(directories: Sequence[tuple[str, Path]], reserve_bytes: int) -> None:
    """Raises BadLayout when the reserves of the directories (which exist) on one file system are
    more than its size: they would be full for ever, without a visible cause."""
    on: dict[int, list[Path]] = {}
    for _, path in directories:
        on.setdefault(path.stat().st_dev, []).append(path)
    for paths in on.values():
        system = os.statvfs(paths[0])
        total = system.f_blocks * system.f_frsize
        if reserve_bytes * len(paths) > total:
            raise BadLayout(
                f"disk_reserve_bytes {reserve_bytes} for each of {', '.join(map(str, paths))} is"
                f" more than their disk has ({total} bytes). Set it lower"
            )


def check_kinds(journals: Sequence[tuple[str, Path]], ledgers: Sequence[tuple[str, Path]]) -> None:
    """Raises WrongDisks when a directory holds a folder of the other kind: with swapped directories
    the bookie would serve without the entries that it acknowledged."""
    for directories, kind, foreign in (
        (journals, "ledger", _OF_LEDGERS),
        (ledgers, "journal", _OF_A_JOURNAL),
    ):
        for setting, path in directories:
            present = [name for name in foreign if (path / name).exists()]
            if present:
                raise WrongDisks(
                    f"{setting} {path} is a {kind} directory (it holds {present[0]}/): "
                    "were journal and ledger directories swapped? Put them in their places"
                )


def _require_usable(setting: str, path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadLayout(
            f"{setting} {path} cannot be used: {error.strerror}. "
            "Name a directory that the bookie's user may make or write.",
        ) from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise BadLayout(
            f"{setting} {path} cannot be used: no permission to read and write it. "
            "Give it to the user that the bookie runs as.",
        )
