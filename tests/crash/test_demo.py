"""The main job on part of its flights, as a user runs it, and what is left when it is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.leftovers import assert_nothing_left, marked
from tests.kit import jvm
from tests.kit.processes import as_from_a_terminal

DEMO = [sys.executable, "-m", "spark_ledger.cli.main", "demo"]
TIMEOUT_S = 480


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
