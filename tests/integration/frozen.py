"""Processes that stand still for a while."""

import signal
from pathlib import Path
from typing import TypeVar

from spark_ledger.local.embedded_zookeeper import EmbeddedZooKeeper
from tests.kit.processes import descendants, eventually

T = TypeVar("T")


def frozen(server: EmbeddedZooKeeper):
    """The processes of the server take no step inside the with-block."""
    return _Frozen(server)


def _all_stopped(pid: int) -> bool:
    tasks = [
        task
        for each in (pid, *descendants(pid))
        for task in Path(f"/proc/{each}/task").glob("*/stat")
    ]
    try:
        return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)
    except (FileNotFoundError, ProcessLookupError):
        return False  # one has just ended


class _Frozen:
    def __init__(self, server: EmbeddedZooKeeper) -> None:
        self._server = server

    def __enter__(self) -> None:
        self._server.signal(signal.SIGSTOP)
        assert eventually(lambda: _all_stopped(self._server.pid)), "a thread may still go on"

    def __exit__(self, *_: object) -> None:
        self._server.signal(signal.SIGCONT)
