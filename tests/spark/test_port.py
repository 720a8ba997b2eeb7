"""A port from Kafka is two lines, and its result is what the events say."""

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from benchmarks import port
from tests.kit import jvm

ROOT = Path(__file__).resolve().parents[2]
KAFKA, LEDGER = (ROOT / "examples" / f"delays_on_{name}.py" for name in ("kafka", "ledger"))
TIMEOUT_S = 480


def test_a_job_and_its_port_differ_in_the_format_and_where_it_is_and_nothing_else():
    lines = difflib.ndiff(KAFKA.read_text().splitlines(), LEDGER.read_text().splitlines())
    changed = [line.replace(" ", "") for line in lines if line[0] in "+-"]
    assert sorted(changed) == [
        '+.option("serviceUrl",os.environ["LEDGER_SERVICE_URL"])',
        '+spark.readStream.format("ledger")',
        '-.option("kafka.bootstrap.servers",os.environ["KAFKA_SERVERS"])',
        '-spark.readStream.format("kafka")',
    ]


def test_the_diff_that_from_kafka_shows_is_that_of_the_files():
    page = (ROOT / "docs" / "from-kafka.md").read_text()
    shown = page.partition("```diff\n")[2].partition("```")[0].splitlines()
    for script, other in ((KAFKA, "+"), (LEDGER, "-")):
        text = "\n".join(line[1:] for line in shown if not line.startswith(other))
        assert text in script.read_text()


@pytest.mark.slow
def test_the_port_makes_the_table_that_the_events_make_without_spark(tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "SPARK_SUBMIT_OPTS": jvm.options("delta"),
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/port.py"), "--with", "none", "--rows", "20000"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    assert "delays_on_ledger.py: 20,000 events" in done.stdout


def test_a_row_that_differs_or_is_not_there_is_found():
    wanted = pa.table({"hour": [1, 2], "mean_delay": [0.5, None]})
    assert port.differing(wanted, wanted) == []
    other = pa.table({"hour": [1, 2], "mean_delay": [0.5, 7.0]})
    assert port.differing(other, wanted) == ["column mean_delay differs"]
    assert port.differing(wanted.slice(1), wanted) == ["1 rows instead of 2"]
