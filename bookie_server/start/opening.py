"""From the settings to the directories that a bookie starts on, or whose indexes are made anew; and
where they may lie.

Always true: settings that no bookie can start with are refused before anything is written, with the
two names that disagree and what to do; a directory is locked before anything in it is read; it gets
its id with its identity and keeps it; an index that cannot be opened costs its own directory only,
while others are left.
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
        """Of all directories."""
        return [each.disk for each in self._all]

    async def test(self) -> None:
        """Warn of disks that are slow or do not sync."""
        await self_test.run([(each.kind, Path(each.name)) for each in self._all])

    async def identity(self) -> Identity | None:
        """None: they are to be formatted. Raises BadIdentity, DiskFailed."""
        return await identities.read(self._all)

    async def format(self, identity: Identity) -> None:
        """Give the identity to the directories that have none."""
        for each in self._all:
            await identities.write(each.disk, identity, str(uuid.uuid4()))

    async def make_space(self, config: BookieConfig) -> None:
        """Give the reserve of a full directory back before an index is opened: that takes space."""
        roles = {"journal": Role.JOURNAL, "ledger": Role.LEDGER}
        watched = [Watched(each.name, each.name, roles[each.kind], each.disk) for each in self._all]
        await DiskMonitor(watched, config).look()

    async def open(self) -> Directories:
        """Raises DiskFailed when no index can be opened, DiskFull when there is no space to open
        one: it is not lost, and must not be taken for that."""
        journals = [
            JournalDirectory(await identities.directory_id(j.disk, "journal"), j.disk, j.name)
            for j in self.journals
        ]
        ledgers: list[LedgerDirectory] = []
        failed: dict[str, str] = {}
        names: dict[str, str] = {}
        for number, each in enumerate(self.ledgers):
            directory_id = await identities.directory_id(each.disk, "ledger")
            try:
                name = f"index-{number}"
                index = await RocksIndex.open(Path(each.name) / INDEX, name, self._hang_s)
                device = str(os.stat(each.name).st_dev)
                path = _told(Path(each.name))
                ledgers.append(
                    LedgerDirectory(directory_id, each.disk, index, each.name, device, path)
                )
            except DiskFull:
                for opened in ledgers:
                    await opened.index.close()
                raise
            except DiskFailed as error:
                failed[directory_id] = str(error)
                names[directory_id] = each.name
                log.error("ledger directory %s is left out: %s", each.name, error)
        if not ledgers:
            raise DiskFailed("; ".join(failed.values()))
        return Directories(journals, ledgers, failed, names)

    async def _current(self) -> list[str]:
        """The ledger directories that were there to the last: their checkpoint is the furthest.
        What another one says of ledgers may be of long ago, before a fence."""
        first = await identities.directory_id(self.journals[0].disk, "journal")
        marks = {each.name: await _marks(each, first) for each in self.ledgers}
        latest = reduce(checkpoint.furthest, marks.values())
        return [name for name, found in marks.items() if found == latest]

    async def broken_indexes(self) -> list[str]:
        """Names of the ledger directories whose index cannot be opened, or says nothing."""
        return [each.name for each in self.ledgers if await _states(each) is None]

    async def rebuild_indexes(self, config: BookieConfig) -> None:
        """Make those indexes anew that cannot be opened, or all when all can. Raises DiskFailed."""
        opened = {each.name: await _states(each) for each in self.ledgers}
        broken = [each for each in self.ledgers if opened[each.name] is None] or self.ledgers
        current = await self._current()
        readable = [s for name, s in opened.items() if s is not None and name in current]
        states = [state for some in readable for state in some] if readable else None
        for each in broken:
            directory_id = await identities.directory_id(each.disk, "ledger")
            log.info("%s: making its index anew from its entry logs", each.name)
            make = partial(_index_in, Path(each.name))
            found = await rebuild(each.disk, directory_id, make, config, states)
            log.warning("%s: %s", each.name, found.sentence())


def _opened(kind: str, number: int, path: Path, hang_s: float) -> Directory:
    try:
        return Directory(kind, str(path), OsDisk(path, f"{kind}-{number}", hang_s))
    except OSError as error:
        text = f"{kind}_directory {path} cannot be used: {error.strerror}"
        raise BadLayout(text) from error


def _told(path: Path) -> str:
    """LedgerDirectory.path: where it really is, if that is text (links may lead anywhere)."""
    found = str(path.resolve())
    try:
        found.encode()
    except UnicodeEncodeError:
        return ""
    return found


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


async def _marks(directory: Directory, first_journal: str) -> Marks:
    try:
        return await checkpoint.read(directory.disk, first_journal) or {}
    except BadCheckpoint as error:
        log.warning("%s: %s", directory.name, error)
        return {}


async def _states(directory: Directory) -> list[LedgerState] | None:
    """What the index says of ledgers; None when it cannot be opened or read, or says nothing: then
    it was lost and an empty one is in its place, or a rebuild of it was interrupted. Raises
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


# -- where directories may lie -------------------------------------------------------------


class BadLayout(Exception):
    """Settings of directories that no bookie can start with; the text says what to do."""


def check(directories: Sequence[tuple[str, Path]]) -> None:
    """`directories` are given with the settings that name them. Makes those that are missing.

    Raises BadLayout when two are the same or one lies in the other (links are followed), or when
    one cannot be made, read and written.
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
                f"{setting} {path} and {other_setting} {other} lie in each other. "
                "Give directories side by side.",
            )
    for setting, path in directories:
        _require_usable(setting, path)


def check_reserve(directories: Sequence[tuple[str, Path]], reserve_bytes: int) -> None:
    """Raises BadLayout when the reserves of the directories on one file system, which are there,
    are more than it has at all: they would be full for ever, without a visible cause."""
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
    """Raises WrongDisks when one holds what belongs in a directory of the other kind: swapped, it
    would serve without all that it acknowledged."""
    for directories, kind, foreign in (
        (journals, "ledger", _OF_LEDGERS),
        (ledgers, "journal", _OF_A_JOURNAL),
    ):
        for setting, path in directories:
            found = [name for name in foreign if (path / name).exists()]
            if found:
                raise WrongDisks(
                    f"{setting} {path} is a {kind} directory (it holds {found[0]}/): "
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
