"""What Linux says about a process: processor time, bytes written, the most memory it held."""

import ctypes
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def cpu_s(pid: int) -> float:
    """User and system seconds it has used, of all its threads."""
    return _own_and_waited_s(pid)[0]


def below_cpu_s(pid: int, without: Collection[int] = ()) -> float:
    """The same of all processes below it but `without`, those that have ended too: who ends leaves
    its time to who waited for it, or stays below us (`adopt_orphans`). Only that of the workers of
    PySpark's daemon is lost with them: it ignores SIGCHLD, and nobody waits."""
    seconds = 0.0
    for child in below(pid):
        with suppress(OSError):  # it has ended meanwhile
            own, waited = _own_and_waited_s(child)
            seconds += waited + (0 if child in without else own)
    return seconds


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


def command(pid: int) -> str:
    """Its command line."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()


def _own_and_waited_s(pid: int) -> tuple[float, float]:
    """Its own seconds, and those of the children it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own, waited = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
    return own / TICKS, waited / TICKS


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise LookupError(f"no {name} in {path}")
