"""The names that a notebook takes, its file as cells, its run, its page and its export."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spark_ledger.errors import BadConfig
from spark_ledger_demo.notebook.source import export, read_notebook
from tests.kit import commands

ROOT = Path(__file__).resolve().parents[4]
TIMEOUT_S = 120
HERE = {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
BREAK = "\n# COMMAND ----------\n\n"
TITLE = "# MAGIC %md\n# MAGIC # A try\n# MAGIC\n# MAGIC Text, *and more*.\n"
NAMES = "from spark_ledger.notebook import dbutils, display, displayHTML\n"
WIDGETS = """\
dbutils.widgets.text("folder", "out", "Where")
dbutils.widgets.dropdown("kind", "small", ["small", "large"])
print(dbutils.widgets.get("folder"), dbutils.widgets.get("kind"))
"""
FIGURE = """\
import matplotlib.pyplot as plt

figure, axes = plt.subplots()
for height in (1, 2):
    axes.bar([0], [height])
    display(figure)
displayHTML("<b>bold</b> &amp; plain")
"""


@pytest.fixture
def notebook(tmp_path):
    """`notebook(*cells)`: the path of a notebook of these cells."""

    def make(*cells: str, name: str = "try.py") -> Path:
        path = tmp_path / name
        path.write_text("# Databricks notebook source\n" + BREAK.join(cells))
        return path

    return make


def run(folder: Path, *arguments: str | Path, **environment: str):
    """`python -m spark_ledger.notebook`, or plain Python where a file comes first."""
    words = [*map(str, arguments)]
    if not words[0].endswith(".py"):
        how = {"folder": folder, "environment": {**HERE, **environment}}
        return commands.server(commands.NOTEBOOK).run(words, TIMEOUT_S, **how)
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **HERE, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def one_line(done) -> str:
    """What it said on standard error: one line, and it failed."""
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr, done.stderr
    return done.stderr


# -- the file ---------------------------------------------------------------------------------


@pytest.mark.parametrize("magic", ["%sql SELECT 1", "%sh ls", "%run ./other"])
def test_a_cell_that_only_databricks_can_run_is_refused_with_its_line(notebook, magic):
    path = notebook(TITLE, f"# MAGIC {magic}\n")
    with pytest.raises(BadConfig, match=rf"try.py:9 is a cell of {magic.split()[0]}, "):
        read_notebook(path)


def test_a_cells_title_is_no_part_of_it_and_a_parameter_may_be_named_in_full(notebook):
    text = 'dbutils.widgets.text(name="rows", defaultValue="5")\n'
    found = read_notebook(notebook(f"# DBTITLE 1,Title\n{TITLE}", text))
    assert [cell.kind for cell in found.cells] == ["md", "python"]
    assert found.parameters() == {"rows": "5"}


def test_an_empty_folder_is_refused(notebook, tmp_path):
    path = notebook(TITLE, NAMES + WIDGETS)
    assert "parameter folder is empty" in one_line(run(tmp_path, "run", path, "--param", "folder="))


def test_a_file_is_cells_of_text_of_packages_and_of_python(notebook):
    found = read_notebook(notebook(TITLE, "# MAGIC %pip install a b\n", "x = 1\ny = 2\n"))
    assert [(cell.kind, cell.line) for cell in found.cells] == [
        ("md", 2),
        ("pip", 9),
        ("python", 13),
    ]
    assert found.cells[0].text == "# A try\n\nText, *and more*."
    assert found.cells[1].text == "%pip install a b"
    assert found.cells[2].text == "x = 1\ny = 2" and found.cells[2].heading == "A try"


def test_a_notebook_knows_its_parameters_before_it_runs(notebook):
    assert read_notebook(notebook(TITLE, NAMES + WIDGETS)).parameters() == {
        "folder": "out",
        "kind": "small",
    }


def test_a_cell_that_is_no_python_is_named_by_its_line(notebook):
    path = notebook(TITLE, "x = 1\nx = = 2\n")
    with pytest.raises(BadConfig, match=r"try\.py:10 is not Python"):
        read_notebook(path)


# -- a run ------------------------------------------------------------------------------------


def test_a_run_shows_progress_and_leaves_a_page_with_its_outputs_and_pictures(notebook, tmp_path):
    again = "axes.bar([1], [3])\ndisplay(figure)\n"
    path = notebook(TITLE, "# MAGIC %pip install rich\n", NAMES + WIDGETS, FIGURE, again)
    done = run(tmp_path, "run", path, "--param", "kind=large")
    assert done.returncode == 0, done.stderr
    assert "[1/4] A try\n  %pip is left out: all packages are installed\n" in done.stdout
    assert "\nout large\n" in done.stdout and "\nbold & plain\n" in done.stdout
    assert done.stdout.endswith("out/picture-1.png\nout/try.html\n")
    page = (tmp_path / "out" / "try.html").read_text()
    assert "<h1>A try</h1>" in page and "<em>and more</em>" in page and "<b>bold</b> &amp;" in page
    assert ">out large\n</pre>" in page
    assert page.count("data:image/png") == 2, "a cell that displays a figure again redraws it"
    assert sorted(os.listdir(tmp_path / "out")) == ["picture-1.png", "try.html"]


def test_plain_python_runs_the_same_file(notebook, tmp_path):
    done = run(tmp_path, notebook(TITLE, NAMES + WIDGETS, FIGURE), FOLDER="elsewhere", KIND="large")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "elsewhere large",
        "picture: elsewhere/picture-1.png",
        "bold & plain",
    ]
    assert (tmp_path / "elsewhere" / "picture-1.png").read_bytes().startswith(b"\x89PNG")


def test_a_parameter_goes_before_the_environment_and_that_before_the_default(notebook, tmp_path):
    path = notebook(TITLE, NAMES + WIDGETS)
    assert "\nout small\n" in run(tmp_path, "run", path).stdout
    assert "\nout large\n" in run(tmp_path, "run", path, KIND="large").stdout
    given = run(tmp_path, "run", path, "--param", "kind=small", KIND="large")
    assert "\nout small\n" in given.stdout


def test_a_cell_that_fails_is_named_and_the_page_shows_how_far_it_came(notebook, tmp_path):
    path = notebook(
        TITLE, "print('before')\n", "number = 1\nassert number == 2\n", "print('after')"
    )
    said = one_line(run(tmp_path, "run", path))
    assert "cell 2 of 3 (A try) failed: AssertionError: assert number == 2 (" in said
    assert said.endswith("try.py:14)\n")
    page = (tmp_path / "notebook-output" / "try" / "try.html").read_text()
    assert "before" in page and 'class="error"' in page and "after" not in page


# -- bad input --------------------------------------------------------------------------------


def test_a_file_that_is_not_there_or_is_no_notebook_is_refused(tmp_path):
    assert "none.py cannot be read: No such file" in one_line(run(tmp_path, "run", "none.py"))
    (tmp_path / "plain.txt").write_text("print(1)\n")
    assert "plain.txt is not a notebook" in one_line(run(tmp_path, "run", "plain.txt"))
    assert "plain.txt is not a notebook" in one_line(run(tmp_path, "export", "plain.txt"))


def test_parameters_that_the_notebook_does_not_take_are_refused_before_it_runs(notebook, tmp_path):
    path = notebook(TITLE, "print('it ran')\n", NAMES + WIDGETS)
    for given, said in {
        "kinds=large": "has no parameter 'kinds'. Its parameters are: folder, kind.",
        "kind": "--param kind has no value",
    }.items():
        done = run(tmp_path, "run", path, "--param", given)
        assert said in one_line(done) and "it ran" not in done.stdout
    assert "kind is 'huge'" in one_line(run(tmp_path, "run", path, "--param", "kind=huge"))


def test_a_parameter_whose_default_is_a_number_takes_only_numbers(notebook, tmp_path):
    path = notebook(TITLE, NAMES + "dbutils.widgets.text('rows', '100')\nprint('it ran')\n")
    for done in (
        run(tmp_path, "run", path, "--param", "rows=many"),
        run(tmp_path, "run", path, ROWS="many"),
    ):
        assert "rows is 'many', not a whole number. Give a number, as rows=100." in one_line(done)
        assert "it ran" not in done.stdout
    assert "it ran" in run(tmp_path, "run", path, "--param", "rows=7", ROWS="many").stdout


def test_a_folder_that_cannot_be_written_is_refused_before_it_runs(notebook, tmp_path):
    (tmp_path / "file").touch()
    path = notebook(TITLE, NAMES + WIDGETS)
    done = run(tmp_path, "run", path, "--param", "folder=file/below")
    assert "folder file/below cannot be written: Not a directory" in one_line(done)


def test_a_second_run_in_the_same_folder_is_refused(notebook, tmp_path):
    first = notebook(TITLE, NAMES + WIDGETS, "print('it runs', flush=True)\ninput()\n")
    command = [sys.executable, "-m", "spark_ledger.notebook", "run", first]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **HERE}, **pipes) as running:
        assert "it runs\n" in iter(running.stdout.readline, "")
        second = run(tmp_path, "run", notebook(TITLE, NAMES + WIDGETS, name="second.py"))
        assert "a notebook runs in folder out already" in one_line(second)
        running.communicate("\n")
    assert running.returncode == 0


def test_without_java_nothing_runs(notebook, tmp_path):
    done = run(tmp_path, "run", notebook(TITLE, "print('it ran')\n"), JAVA_HOME=str(tmp_path))
    assert "Java 17 or later is needed" in one_line(done) and "it ran" not in done.stdout


def test_what_is_not_installed_is_named_with_what_installs_it(notebook, tmp_path):
    path = notebook(TITLE, "# MAGIC %pip install --quiet rich no-such-package==1 'typer>=0'\n")
    said = one_line(run(tmp_path, "run", path))
    assert "no-such-package is not installed" in said and "spark-ledger[demo]" in said
    path = notebook(TITLE, "import matplotlib_that_is_not_there\n")
    said = one_line(run(tmp_path, "run", path))
    assert "No module named 'matplotlib_that_is_not_there'. Run: pip install" in said


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1/ledger", "[LEDGER_CONFIG.INVALID]"),
        pytest.param("zk://127.0.0.1:1/ledger", "[LEDGER_UNAVAILABLE]", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_service_url_is_one_line(notebook, tmp_path, url, said):
    open_it = "import spark_ledger\n\nspark_ledger.Admin({!r}).topics()\n"
    done = run(tmp_path, "run", notebook(TITLE, open_it.format(url)))
    assert f"cell 1 of 1 (A try) failed: {said}" in one_line(done)


# -- where a runtime gives the names ------------------------------------------------------------


def test_where_a_runtime_gives_the_names_they_stay_the_runtimes_own():
    given = {"dbutils": object(), "display": object(), "displayHTML": object()}
    names = dict(given)
    exec(NAMES, names)
    assert {name: names[name] for name in given} == given


# -- Jupyter ----------------------------------------------------------------------------------


def test_an_exported_notebook_runs_in_a_real_kernel(notebook, tmp_path, monkeypatch):
    import nbclient
    import nbformat

    export(
        read_notebook(notebook(TITLE, "# MAGIC %pip install rich\n", NAMES + WIDGETS, FIGURE)),
        tmp_path / "try.ipynb",
    )
    read = nbformat.read(tmp_path / "try.ipynb", 4)
    nbformat.validate(read)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    monkeypatch.setenv("KIND", "large")
    nbclient.NotebookClient(read, timeout=120, resources={"metadata": {"path": tmp_path}}).execute()

    text, packages, words, figure = read.cells
    assert text.cell_type == "markdown" and packages.source == "# %pip install rich"
    assert words.outputs[0].text == "out large\n"
    picture, bold = figure.outputs  # displayed again, the picture was redrawn
    assert "image/png" in picture.data and bold.data["text/html"] == "<b>bold</b> &amp; plain"
    assert not (tmp_path / "out").exists(), "in Jupyter a picture is in the cell"


def test_an_export_is_the_same_for_the_same_notebook(notebook, tmp_path):
    path = notebook(TITLE, "x = 1\n")
    done = run(tmp_path, "export", path)
    assert done.returncode == 0 and done.stdout == f"{tmp_path}/try.ipynb\n"
    first = (tmp_path / "try.ipynb").read_text()
    assert [cell["cell_type"] for cell in json.loads(first)["cells"]] == ["markdown", "code"]
    run(tmp_path, "export", path)
    assert (tmp_path / "try.ipynb").read_text() == first
