"""The notebook as a user runs it: on this machine, again in the same folder, and as Databricks."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.test_demo import assert_nothing_left
from tests.kit import jvm

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


DELTA_SINK = """
import sys
from pathlib import Path
from spark_ledger import cause_of
from spark_ledger.demo import session

folder, url = sys.argv[1:]
spark = session.start("into Delta", Path(folder) / "spark", cores=2, delta=True)
ours = {"serviceUrl": url, "valueFormat": "arrow"}
rows = spark.sql("SELECT 5000000000 AS number")
rows.write.format("ledger").options(**ours).mode("append").save("too-large-for-an-int")
read = spark.readStream.format("ledger").options(**ours, startingOffsets="earliest")
read = read.schema("number INT").load("too-large-for-an-int")
into = read.writeStream.format("delta").option("checkpointLocation", f"{folder}/checkpoint")
try:
    into.trigger(availableNow=True).start(f"{folder}/table").awaitTermination()
except Exception as error:
    print("LEDGER" in str(error), cause_of(error))
"""


def test_what_delta_says_that_a_task_failed_of_is_found_by_its_cause(cluster, tmp_path):
    said = run(tmp_path, "-c", DELTA_SINK, str(tmp_path), cluster.service_url)
    (told,) = [line for line in said.splitlines() if "LEDGER" in line]
    assert told.startswith("False [LEDGER_SCHEMA") and "5000000000" in told


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
