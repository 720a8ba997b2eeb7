"""What a run that was killed may not leave behind."""

import time
from pathlib import Path

from tests.crash.procfs import command_line, processes

GONE_S = 120


def marked(output: Path) -> dict[int, bytes]:
    """Processes that come from that demo, by pid."""
    mark = f"DEMO_MARK={output}\0".encode()
    found = {}
    for pid, _parent in processes():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if mark in environment + b"\0":
            found[pid] = command_line(pid)
    return found


def assert_nothing_left(output: Path) -> None:
    until = time.monotonic() + GONE_S
    while marked(output) and time.monotonic() < until:
        time.sleep(0.2)
    assert not marked(output)
