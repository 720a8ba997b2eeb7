"""What tests ask about processes, from /proc (tests run on Linux)."""

import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

PATIENCE_S = 90.0
POLL_S = 0.02


def as_from_a_terminal() -> None:
    """For `preexec_fn`: a runner in the background hands on that Ctrl-C is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def eventually(holds: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
    """Whether it holds within the time; asked again and again, at most half of the time: what is
    asked by a command would take a processor from whom it waits for."""
    asked = time.monotonic()
    deadline = asked + patience_s
    while not holds():
        now = time.monotonic()
        if now > deadline:
            return False
        time.sleep(max(POLL_S, now - asked))
        asked = time.monotonic()
    return True


def descendants(pid: int) -> list[int]:
    """The pids of a process's children, of their children and so on."""
    parents = {child: parent for child, parent, _ in _all()}
    family = [pid]
    for ancestor in family:
        family += [child for child, parent in sorted(parents.items()) if parent == ancestor]
    return family[1:]


def alive(pids: Iterable[int]) -> list[int]:
    """Those of the pids that run; a zombie does not."""
    running = {pid for pid, _, state in _all() if state != "Z"}
    return [pid for pid in pids if pid in running]


def _all() -> list[tuple[int, int, str]]:
    """(pid, parent's pid, state) of every process."""
    processes = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text(errors="replace")
        except OSError:
            continue  # it has just ended
        state, parent = text.rpartition(")")[2].split()[:2]
        processes.append((int(stat.parent.name), int(parent), state))
    return processes
