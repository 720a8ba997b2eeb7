"""Each notebook runs on few rows, checks itself, and leaves in its topics what it says; of each the
code can be parsed, and what it imports of ours is there.

One process runs all that are asked for, for the start of Spark is most of what a short run costs.
`make test` runs one notebook, twice, and a query into Delta that fails.
"""

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spark_ledger.local import LocalCluster
from spark_ledger_demo.notebook.source import read_notebook
from tests.kit import jvm
from tests.spark.notebooks import DELTA, DELTA_SQL

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.py"))
ROWS = 2_000
TIMEOUT_S = 900
TOPICS = {
    "00_setup_and_producer": {
        "flights": ROWS + 100,
        "flights-json": ROWS,
        "planes": 3_322,
        "airports": 1_458,
        "weather": 26_115,
    },
    "01_bronze": {"flights": ROWS + ROWS // 10},
    "02_silver": {"flights-raw": ROWS + ROWS // 25 + 20, "flights-clean": 1_931, "flights-bad": 69},
    "03_gold": {"flights": ROWS, "flights-weather": 1_961},
    "05_subscriptions_and_lag": {"flights": 0},
    "07_schemas_that_grow": {"flights": ROWS // 3 * 3 + 100},
}
"""By notebook how many rows its topics have when it has ended, of the first 2,000 flights."""
OWN_CLUSTER = tuple(name for name in NOTEBOOKS if name.startswith(("04", "08")))
"""These end bookies: they start a cluster of their own."""
TWICE = "01_bronze"
IN_FULL = [
    pytest.param(name, marks=() if name == TWICE else pytest.mark.slow) for name in NOTEBOOKS
]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """By notebook what came of its run, of those that tests to be run have as a parameter. One runs
    twice, to find what it left."""
    folder = tmp_path_factory.mktemp("notebooks")
    tests = [item for item in request.session.items if "results" in item.fixturenames]
    names = sorted({item.callspec.params["name"] for item in tests})
    given = [name for name in names if name not in OWN_CLUSTER]
    again = [name for name in names if name == TWICE]
    own = [name for name in names if name in OWN_CLUSTER]
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        wanted = [
            *(f"{name}:rows={ROWS},service_url={cluster.service_url}" for name in given + again),
            *(f"{name}:rows={ROWS}" for name in own),
        ]
        done = subprocess.run(
            [sys.executable, "-m", "tests.spark.notebooks", folder, cluster.service_url, *wanted],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
                "SPARK_SUBMIT_OPTS": jvm.options("delta"),
                "MPLBACKEND": "agg",
            },
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0 and len(lines) == len(wanted), done.stderr[-3000:]
    found: dict[str, list[dict]] = {}
    for line in lines:
        found.setdefault(line["name"], []).append({**line, "folder": folder / line["name"]})
    return found


@pytest.mark.parametrize("name", IN_FULL)
def test_a_notebook_checks_itself_and_leaves_what_it_says(results, name):
    for result in results[name]:
        assert not result["error"], f"{result['error']}\n{result['said'][-2000:]}"
        rows = TOPICS.get(name, {})
        assert {topic: result["rows"].get(topic) for topic in rows} == rows
        page = (result["folder"] / f"{name}.html").read_text()
        assert "data:image/png" in page and 'class="error"' not in page


@pytest.mark.parametrize("name", [TWICE])
def test_a_notebook_runs_again_on_what_it_left(results, name):
    assert len(results[name]) == 2


@pytest.mark.parametrize("name", [DELTA])
def test_what_delta_says_that_a_task_failed_of_is_found_by_its_cause(results, name):
    (told,) = results[name]
    assert told["error"] and "LEDGER" not in told["error"]
    assert told["said"].startswith("[LEDGER_SCHEMA") and "5000000000" in told["said"]


@pytest.mark.parametrize("name", [DELTA_SQL])
def test_beside_deltas_catalog_views_and_functions_work_and_tables_do_not(results, name):
    (told,) = results[name]
    outcomes = json.loads(told["said"])
    assert "ledger is not a valid Spark SQL Data Source" in outcomes["with"], (
        "as docs/spark.md has it"
    )
    assert outcomes["insert"] == outcomes["view"] == "[]"
    assert outcomes["read"] == outcomes["function"] == "[(2,)]"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_cell_is_text_or_packages_or_python_that_can_stand_alone(name):
    for cell in read_notebook(ROOT / "notebooks" / f"{name}.py").cells:
        if cell.kind == "python":
            assert not any(line.startswith("# MAGIC") for line in cell.text.splitlines())
            assert ast.parse(cell.text).body
        else:
            assert cell.kind == "pip" or cell.text.startswith("#"), "a text begins with a heading"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_a_notebook_imports_of_ours_is_there(name):
    cells = read_notebook(ROOT / "notebooks" / f"{name}.py").cells
    trees = [ast.parse(cell.text) for cell in cells if cell.kind == "python"]
    found = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in found if (node.module or "").startswith("spark_ledger")]
    assert ours
    for node in ours:
        module = importlib.import_module(node.module or "")
        assert [each.name for each in node.names if not hasattr(module, each.name)] == []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_has_the_parameters_that_all_have(name):
    parameters = read_notebook(ROOT / "notebooks" / f"{name}.py").parameters()
    assert {"service_url", "folder", "rows"} <= set(parameters)
    assert parameters["service_url"] == ""
    assert parameters["folder"] == f"notebook-output/{name}"


def test_the_page_of_notebooks_shows_each_with_a_small_picture():
    page = (ROOT / "notebooks" / "README.md").read_text()
    for name in NOTEBOOKS:
        picture = ROOT / "notebooks" / "pictures" / f"{name}.png"
        assert f"({name}.py)" in page and f"(pictures/{picture.name})" in page
        assert picture.stat().st_size <= 40_000
