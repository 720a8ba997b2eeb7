"""Where a bookie's directories may lie, and what may lie in them: each apart from all others, ours
to write, and of one kind.

Always true: what is refused is refused before anything is written, with the two names that
disagree and what to do.
"""

import os
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from bookie_server.disk.identity import WrongDisks
from bookie_server.journal import checkpoint
from bookie_server.journal import writer as journal
from bookie_server.logs import entry_log

INDEX_FOLDER = "index"
_OF_A_JOURNAL = (journal.FOLDER,)
_OF_LEDGERS = (entry_log.FOLDER, checkpoint.FOLDER, INDEX_FOLDER)


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
