"""What Linux says about a process: processor time, bytes written, the most memory it held."""

import ctypes
import os
import signal
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

TICKS = os.sysconf("SC_CLK_TCK")
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def cpu_s(pid: int) -> float:
    """User and system seconds it has used, of all its threads."""
    return _stat(pid).own_s


class Below:
    """The processes below one.

    Who ends leaves its processor time to who waited for it, or stays below us (`adopt_orphans`).
    Only for the workers of PySpark's daemon nobody waits (it ignores SIGCHLD): of one that has
    ended counts what it had used when `cpu_s` was last asked.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._forsaken: dict[tuple[int, int], float] = {}  # (pid, start) of those nobody waits for
        self._ended_s = 0.0

    def cpu_s(self, without: Collection[int] = ()) -> float:
        """User and system seconds of all but `without`, those that have ended too."""
        seconds, forsaken, there = 0.0, {}, set()
        for child in below(self._pid):
            with suppress(OSError):  # it has ended meanwhile
                now = _stat(child)
                there.add((child, now.started))
                seconds += now.waited_s + (0 if child in without else now.own_s)
                if _ignores_children(now.parent):
                    forsaken[child, now.started] = now.own_s
        self._ended_s += sum(own for key, own in self._forsaken.items() if key not in there)
        self._forsaken = forsaken
        return seconds + self._ended_s


def adopt_orphans() -> None:
    """Processes below this one whose parent ends stay below this one from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def below(pid: int) -> Iterator[int]:
    """The processes that it started, those that these started, and so on."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = " ".join((thread / "children").read_text() for thread in threads)
    except OSError:  # it has ended meanwhile
        return
    for child in map(int, children.split()):
        yield child
        yield from below(child)


def written_bytes(pid: int) -> int:
    """Bytes it caused to be sent to the disk."""
    return _field(Path(f"/proc/{pid}/io"), "write_bytes")


def most_memory_mib(pid: int) -> float:
    """VmHWM: the most memory it ever held."""
    return _field(Path(f"/proc/{pid}/status"), "VmHWM") / 1024


def memory_mib(pid: int) -> float:
    """VmRSS: the memory it holds now."""
    return _field(Path(f"/proc/{pid}/status"), "VmRSS") / 1024


def command(pid: int) -> str:
    """Its command line."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()


class _Stat(NamedTuple):
    parent: int
    own_s: float
    waited_s: float
    """Of the children it has waited for."""
    started: int
    """Ticks since the machine's start."""


def _stat(pid: int) -> _Stat:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own, waited = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
    return _Stat(int(fields[1]), own / TICKS, waited / TICKS, int(fields[19]))


def _ignores_children(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(ignored.split()[1], 16) >> (signal.SIGCHLD - 1) & 1)


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise LookupError(f"no {name} in {path}")
