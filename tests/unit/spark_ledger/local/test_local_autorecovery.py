"""The process that heals an embedded cluster is started again when it ends by itself."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_ledger.local.processes import LocalAutorecovery
from tests.kit.processes import alive, eventually

RESTARTS = "autorecovery-restarts"


class Sleeps(LocalAutorecovery):
    """It does nothing, until it is told to end."""

    def _command(self) -> list[str]:
        return [sys.executable, "-c", "import signal; signal.pause()"]


@pytest.fixture(autouse=True)
def _those_of_other_tests_have_ended() -> None:
    """The thread of a process that was killed sees that a moment later."""
    assert eventually(lambda: not restarting())


@pytest.fixture
def started(tmp_path: Path) -> Iterator[LocalAutorecovery]:
    process = Sleeps(tmp_path / "log", "zk://nowhere:1/ledger", pause_s=0.05)
    process.start()
    yield process
    process.kill()


def restarting() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == RESTARTS]


def test_one_that_somebody_kills_is_started_again_and_again(started: LocalAutorecovery):
    for _ in range(3):
        before = started.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        assert eventually(lambda before=before: started.pid not in (None, before))
        assert not alive([before])


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_after_kill_and_stop_only_start_starts_it(started: LocalAutorecovery, end: str):
    before = started.pid
    getattr(started, end)()
    assert eventually(lambda: not restarting()), "nobody waits to start it again"
    assert started.pid is None
    started.start()
    assert started.pid not in (None, before)
    assert len(restarting()) == 1


def test_to_start_what_runs_changes_nothing(started: LocalAutorecovery):
    before = started.pid
    started.start()
    assert started.pid == before
    assert len(restarting()) == 1
