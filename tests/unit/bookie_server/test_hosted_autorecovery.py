"""The process that a bookie hosts beside itself, with a real process in its place."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from bookie_server.__main__ import keep_running
from tests.kit.processes import alive, eventually

SAYS_ITS_PID = "import os, sys; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); "
LIVES = SAYS_ITS_PID + "sys.stdin.read()"
DIES = SAYS_ITS_PID + "sys.exit(3)"


def pids(file: Path) -> list[int]:
    """Of those that ran."""
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


async def comes_true(condition: Callable[[], bool]) -> None:
    assert await asyncio.to_thread(eventually, condition)


async def ended(hosting: "asyncio.Task[None]") -> None:
    hosting.cancel()
    await asyncio.wait([hosting])


def test_a_process_that_dies_is_started_again_and_that_is_said(tmp_path, caplog):
    async def work():
        command = [sys.executable, "-c", DIES, str(tmp_path / "pids")]
        hosting = asyncio.create_task(keep_running(command, pause_s=0.01))
        await comes_true(lambda: len(pids(tmp_path / "pids")) >= 3)
        await ended(hosting)

    asyncio.run(work())
    assert "ended with exit status 3; it is started again in 0.01 s" in caplog.text
    assert "it is started again in 0.02 s" in caplog.text


def test_none_is_left_when_hosting_ends(tmp_path):
    async def work():
        command = [sys.executable, "-c", LIVES, str(tmp_path / "pids")]
        hosting = asyncio.create_task(keep_running(command))
        await comes_true(lambda: bool(pids(tmp_path / "pids")))
        (pid,) = pids(tmp_path / "pids")
        assert alive([pid]) == [pid] and os.getsid(pid) == pid
        await ended(hosting)
        assert not alive([pid])

    asyncio.run(work())


def test_a_command_that_cannot_be_run_ends_no_bookie(caplog):
    async def work():
        hosting = asyncio.create_task(keep_running(["/no/such/program"], pause_s=0.01))
        await comes_true(lambda: caplog.text.count("cannot be started") >= 2)
        assert not hosting.done()
        await ended(hosting)

    asyncio.run(work())
