"""The notebook as a user runs it: on this machine, again in the same folder, and as Databricks."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import jvm
from tests.crash.test_demo import assert_nothing_left

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "01_flights.py"
CELL = "\n\n# COMMAND ----------\n\n"
TIMEOUT_S = 480
SAID = "20500 flights went to a topic, to Delta and back, each of them once"


def run(folder: Path, *command: str) -> str:
    """What it said; every process that it starts is marked with the folder."""
    environment = dict(os.environ, DEMO_MARK=str(folder), SPARK_SUBMIT_OPTS=jvm.options("delta"))
    environment.pop("LEDGER_SERVICE_URL", None)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_the_notebook_checks_itself_from_nothing_and_on_what_it_left(tmp_path):
    for _ in range(2):
        assert SAID in run(tmp_path, str(NOTEBOOK))
        assert_nothing_left(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"notebook-output"}


@pytest.mark.chaos
def test_the_notebook_uses_what_databricks_gives_it(cluster, tmp_path):
    said = run(
        tmp_path, "-m", "tests.crash.as_databricks", str(NOTEBOOK), "out", cluster.service_url
    )
    assert SAID in said
    assert f"the cluster is {cluster.service_url}\n" in said


def cells() -> list[str]:
    first, text = NOTEBOOK.read_text().split("\n", 1)
    assert first == "# Databricks notebook source"
    return text.rstrip("\n").split(CELL)


@pytest.mark.parametrize("number", range(len(cells())))
def test_a_cell_is_magic_or_python_that_can_stand_alone(number):
    lines = cells()[number].strip("\n").splitlines()
    if lines[0].startswith("# MAGIC %"):
        assert all(line.startswith("# MAGIC") for line in lines)
    else:
        assert not any(line.startswith("# MAGIC") for line in lines)
        assert ast.parse("\n".join(lines)).body
