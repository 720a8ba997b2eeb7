"""Notebooks as a user runs them: twice at once, killed and run again, in Jupyter, and as Databricks
runs them. (Each of them, on few rows: tests/spark/test_notebooks.py.)"""

import copy
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spark_ledger_demo.notebook.source import read_notebook
from tests.crash.leftovers import assert_nothing_left
from tests.kit import jvm

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
RUN = ("-m", "spark_ledger.notebook", "run")
ROWS, TIMEOUT_S = "2000", 480
ON_A_CLUSTER = sorted(path.stem for path in NOTEBOOKS.glob("0[0-7]*.py"))
"""The last one needs four bookies."""


def start(folder: Path, *command: str | Path) -> subprocess.Popen[str]:
    """Every process that it starts is marked with the folder."""
    environment = dict(os.environ, DEMO_MARK=str(folder), SPARK_SUBMIT_OPTS=jvm.options("delta"))
    for name in ("LEDGER_SERVICE_URL", "SERVICE_URL", "FOLDER"):
        environment.pop(name, None)
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg", "ROWS": ROWS},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(folder: Path, *command: str | Path) -> str:
    """What it said."""
    process = start(folder, *command)
    try:
        said, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"{said[-2000:]}\n{errors[-3000:]}"
    return said


@pytest.mark.slow
def test_a_notebook_that_was_killed_runs_again_and_a_second_one_is_refused(tmp_path):
    first = start(tmp_path, *RUN, NOTEBOOKS / "01_bronze.py")
    assert first.stdout is not None
    for line in first.stdout:
        if line.startswith("zk://"):
            break
    second = start(tmp_path, *RUN, NOTEBOOKS / "01_bronze.py")
    _, errors = second.communicate(timeout=TIMEOUT_S)
    assert (
        second.returncode == 1
        and "a notebook runs in folder notebook-output/01_bronze already" in errors
    )
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert_nothing_left(tmp_path)

    assert "picture-1.png\n" in run(tmp_path, *RUN, NOTEBOOKS / "01_bronze.py")
    assert_nothing_left(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {"notebook-output", "spark-warehouse"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_A_CLUSTER)
def test_a_notebook_uses_what_databricks_gives_it(cluster, tmp_path, name):
    path = NOTEBOOKS / f"{name}.py"
    said = run(tmp_path, "-m", "tests.crash.as_databricks", path, "out", cluster.service_url, ROWS)
    assert cluster.service_url in said


@pytest.mark.slow
def test_a_notebook_runs_in_jupyter_and_again_after_it_was_left_half_way(tmp_path, monkeypatch):
    import nbclient
    import nbformat

    from spark_ledger_demo.notebook.source import export

    export(read_notebook(NOTEBOOKS / "00_setup_and_producer.py"), tmp_path / "00.ipynb")
    notebook = nbformat.read(tmp_path / "00.ipynb", 4)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    monkeypatch.setenv("ROWS", ROWS)
    where = {"metadata": {"path": tmp_path}}
    whole = notebook.cells
    for before in ([], whole[: len(whole) // 2]):  # all in one kernel
        notebook.cells = [*map(copy.deepcopy, before), *whole]
        nbclient.NotebookClient(notebook, timeout=TIMEOUT_S, resources=where).execute()
        kinds = [
            kind
            for cell in whole
            for each in cell.get("outputs", ())
            for kind in each.get("data", ())
        ]
        assert "image/png" in kinds and "text/html" in kinds
