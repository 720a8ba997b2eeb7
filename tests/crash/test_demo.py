"""The main job on part of its flights, as a user runs it, and what is left when it is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.crash.procfs import command_line, processes
from tests.kit import jvm
from tests.kit.processes import as_from_a_terminal

DEMO = [sys.executable, "-m", "spark_ledger.cli.main", "demo"]
TIMEOUT_S = 480
GONE_S = 120


def start(output: Path, *arguments: str) -> subprocess.Popen[str]:
    """A mark in the environment is inherited by every process that the demo starts."""
    environment = dict(os.environ, DEMO_MARK=str(output), SPARK_SUBMIT_OPTS=jvm.options("delta"))
    return subprocess.Popen(
        [*DEMO, "--output", str(output), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=as_from_a_terminal,
    )


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


@pytest.mark.slow
def test_the_demo_passes_all_its_checks_and_leaves_results_and_no_process(tmp_path):
    demo = start(tmp_path, "--rows", "40000")
    said, _ = demo.communicate(timeout=TIMEOUT_S)
    print(said)
    assert demo.returncode == 0, said
    assert said.count("passed") >= 10
    assert (tmp_path / "delays.png").stat().st_size > 10_000
    assert (tmp_path / "delays.csv").stat().st_size > 10_000
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    "how", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_demo_that_is_interrupted_leaves_no_process(tmp_path, how):
    demo = start(tmp_path, "--rows", "40000")
    assert demo.stdout
    for line in demo.stdout:
        if "run " in line and "query" in line:  # the replay is on its way: everything runs
            break
    assert len(marked(tmp_path)) > 6
    demo.send_signal(how)
    demo.communicate(timeout=TIMEOUT_S)
    assert demo.returncode != 0
    assert_nothing_left(tmp_path)
