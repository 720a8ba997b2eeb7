"""Processes of this machine, as Linux shows them in /proc."""

from collections.abc import Iterator
from pathlib import Path


def python_workers(root: int) -> list[int]:
    """Children of Spark's Python daemons among the descendants of a process, by pid."""
    parents = dict(processes())
    daemons = {pid for pid in parents if b".daemon\0pyspark." in command_line(pid)}
    forks = (pid for pid, parent in parents.items() if parent in daemons and pid in daemons)
    return sorted(pid for pid in forks if root in _ancestors(pid, parents))


def descendants(root: int) -> list[int]:
    parents = dict(processes())
    return sorted(pid for pid in parents if root in _ancestors(pid, parents))


def processes() -> Iterator[tuple[int, int]]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        yield int(path.parent.name), int(fields[1])


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _ancestors(pid: int, parents: dict[int, int]) -> list[int]:
    found = []
    while pid in parents:
        pid = parents[pid]
        found.append(pid)
    return found
