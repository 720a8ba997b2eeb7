"""Opens the directories that the settings name, for a start or to rebuild their indexes; and checks
the paths of the directories.

Always true: settings with which no bookie can start are refused before anything is written, with
the two settings that disagree and the remedy; a directory is locked before anything in it is read;
a directory gets its id together with its identity and keeps the id; if an index cannot be opened,
only the directory of that index is left out, as long as another index can be opened.
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
from bookie_server.disk.monitor import DiskMonitor, Role, WatchedDirectory
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
_JOURNAL_FOLDERS = (journal.FOLDER,)
_LEDGER_FOLDERS = (entry_log.FOLDER, checkpoint.FOLDER, INDEX)
log = logging.getLogger("bookie_server")


class BookieDirectories:
    """The directories of one bookie, locked. Raises BadLayout, WrongDisks, BadIdentity."""

    def __init__(self, config: BookieConfig) -> None:
        names = {kind: config.directories(kind) for kind in ("journal", "ledger")}
        paths = {kind: [(f"{kind}_directory", Path(p)) for p in names[kind]] for kind in names}
        all_paths = [*paths["journal"], *paths["ledger"]]
        check_paths(all_paths)
        check_reserve(all_paths, config.disk_reserve_bytes)
        check_kinds(paths["journal"], paths["ledger"])
        self._hang_s = hang_s = config.disk_hang_s
        numbered = {k: enumerate(path for _, path in paths[k]) for k in paths}
        self.journals = [_open_directory("journal", n, p, hang_s) for n, p in numbered["journal"]]
        self.ledgers = [_open_directory("ledger", n, p, hang_s) for n, p in numbered["ledger"]]
        _lock([path for _, path in all_paths])

    @property
    def _all(self) -> list[Directory]:
        return [*self.journals, *self.ledgers]

    @property
    def disks(self) -> list[Disk]:
        """The disks of all directories."""
        return [directory.disk for directory in self._all]

    async def test(self) -> None:
        """Log a warning for each disk that is slow or does not sync."""
        await self_test.run([(directory.kind, Path(directory.name)) for directory in self._all])

    async def identity(self) -> Identity | None:
        """The directories' identity; None: they are to be formatted. Raises BadIdentity,
        DiskFailed."""
        return await identities.read(self._all)

    async def format(self, identity: Identity) -> None:
        """Give the identity to each directory that has no identity."""
        for directory in self._all:
            await identities.write(directory.disk, identity, str(uuid.uuid4()))

    async def make_space(self, config: BookieConfig) -> None:
        """Free the disks' reserves in full directories: to open an index takes space."""
        roles = {"journal": Role.JOURNAL, "ledger": Role.LEDGER}
        watched = [WatchedDirectory(d.name, d.name, roles[d.kind], d.disk) for d in self._all]
        await DiskMonitor(watched, config).look()

    async def open(self) -> Directories:
        """Open the indexes. Raises DiskFailed when no index can be opened; raises DiskFull when
        there is no space to open an index: the index is not lost."""
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
                for directory in ledgers:
                    await directory.index.close()
                raise
            except DiskFailed as error:
                failed[directory_id] = str(error)
                names[directory_id] = folder
                log.error("ledger directory %s is left out: %s", folder, error)
        if not ledgers:
            raise DiskFailed("; ".join(failed.values()))
        return Directories(journals, ledgers, failed, names)

    async def _up_to_date_names(self) -> list[str]:
        """The names of the ledger directories with the furthest checkpoint: the last run had these
        directories until its end. States in another directory may lack a later fence."""
        marks = {directory.name: await _read_marks(directory) for directory in self.ledgers}
        latest = reduce(checkpoint.furthest, marks.values())
        return [name for name, its_marks in marks.items() if its_marks == latest]

    async def broken_indexes(self) -> list[str]:
        """Names of the ledger directories whose index cannot be opened, or is empty."""
        return [d.name for d in self.ledgers if await _index_states(d) is None]

    async def rebuild_indexes(self, config: BookieConfig) -> None:
        """Rebuild the indexes that cannot be opened; if all can be opened, rebuild all. Raises
        DiskFailed."""
        by_name = {directory.name: await _index_states(directory) for directory in self.ledgers}
        broken = [d for d in self.ledgers if by_name[d.name] is None] or self.ledgers
        up_to_date_names = await self._up_to_date_names()
        readable = [s for name, s in by_name.items() if s is not None and name in up_to_date_names]
        states = [state for copy in readable for state in copy] if readable else None
        for directory in broken:
            directory_id = await identities.directory_id(directory.disk, "ledger")
            log.info("%s: making its index anew from its entry logs", directory.name)
            make = partial(_open_index, Path(directory.name))
            rebuilt = await rebuild(directory.disk, directory_id, make, config, states)
            log.warning("%s: %s", directory.name, rebuilt.sentence())


def _open_directory(kind: str, number: int, path: Path, hang_s: float) -> Directory:
    try:
        return Directory(kind, str(path), OsDisk(path, f"{kind}-{number}", hang_s))
    except OSError as error:
        text = f"{kind}_directory {path} cannot be used: {error.strerror}"
        raise BadLayout(text) from error


def _real_path(path: Path) -> str:
    """LedgerDirectory.path: the path without symbolic links; empty if it is not valid text."""
    real = str(path.resolve())
    try:
        real.encode()
    except UnicodeEncodeError:
        return ""
    return real


def _lock(directories: Sequence[Path]) -> None:
    """Lock the directories; the locks end with the process. Raises BadIdentity if another process
    has a lock."""
    for directory in dict.fromkeys(directories):
        fd = os.open(directory / identities.LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadIdentity(f"another bookie is running on {directory}") from None


async def _open_index(directory: Path, folder: str) -> RocksIndex:
    return await RocksIndex.open(directory / folder)


async def _read_marks(directory: Directory) -> Marks:
    try:
        return await checkpoint.read(directory.disk) or {}
    except BadCheckpoint as error:
        log.warning("%s: %s", directory.name, error)
        return {}


async def _index_states(directory: Directory) -> list[LedgerState] | None:
    """The states in the index; None if the index cannot be opened or read, or has no states (the
    index was lost and an empty index is in its place, or its rebuild was interrupted). Raises
    DiskFull."""
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


# -- the paths of directories ---------------------------------------------------------------


class BadLayout(Exception):
    """Settings of directories with which no bookie can start; the text has the remedy."""


def check_paths(directories: Sequence[tuple[str, Path]]) -> None:
    """Check the directories, each with the setting that names it, and make the missing ones.

    Raises BadLayout when two directories are the same or one is inside the other (links are
    followed), or when a directory cannot be made, read and written.
    """
    for (setting, path), (other_setting, other) in combinations(directories, 2):
        real_path, other_real_path = path.resolve(), other.resolve()
        if real_path == other_real_path:
            raise BadLayout(
                f"{setting} {path} and {other_setting} {other} are the same directory. "
                "Give each a directory of its own.",
            )
        if real_path.is_relative_to(other_real_path) or other_real_path.is_relative_to(real_path):
            raise BadLayout(
                f"{setting} {path} and {other_setting} {other}: one is in the other. "
                "Give directories side by side.",
            )
    for setting, path in directories:
        _require_usable(setting, path)


def check_reserve(directories: Sequence[tuple[str, Path]], reserve_bytes: int) -> None:
    """Raises BadLayout when the reserves of the directories on one file system are larger than the
    file system: the directories would be full for ever. The directories must exist."""
    by_file_system: dict[int, list[Path]] = {}
    for _, path in directories:
        by_file_system.setdefault(path.stat().st_dev, []).append(path)
    for paths in by_file_system.values():
        system = os.statvfs(paths[0])
        total = system.f_blocks * system.f_frsize
        if reserve_bytes * len(paths) > total:
            raise BadLayout(
                f"disk_reserve_bytes {reserve_bytes} for each of {', '.join(map(str, paths))} is"
                f" more than their disk has ({total} bytes). Set it lower"
            )


def check_kinds(journals: Sequence[tuple[str, Path]], ledgers: Sequence[tuple[str, Path]]) -> None:
    """Raises WrongDisks when a directory has a folder of the other kind: with swapped directories
    the bookie would serve without the entries that it acknowledged."""
    for directories, kind, foreign in (
        (journals, "ledger", _LEDGER_FOLDERS),
        (ledgers, "journal", _JOURNAL_FOLDERS),
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
