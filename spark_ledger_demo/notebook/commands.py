"""Notebooks without a notebook server.

    python -m spark_ledger.notebook run FILE --param rows=2000
    python -m spark_ledger.notebook export FILE --out FILE.ipynb

Always true: an error is one line on standard error and exit status 1.
"""

from pathlib import Path
from typing import Annotated

import typer

from spark_ledger.cli.common import App, fail
from spark_ledger.errors import BadConfig
from spark_ledger_demo.notebook.outputs import SHOWN
from spark_ledger_demo.notebook.run import CellFailed, run
from spark_ledger_demo.notebook.source import export, read_notebook

app = App(
    help="Runs notebooks, and writes them as Jupyter's files.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
File = Annotated[str, typer.Argument(metavar="FILE", help="A notebook in Databricks' source form.")]


@app.command("run")
def run_one(
    file: File,
    param: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A parameter (a widget) of the notebook."),
    ] = None,
) -> None:
    """Run a notebook; write its page and its pictures to its folder (notebook-output/NAME)."""
    try:
        path = run(read_notebook(file), dict(map(_parameter, param or [])))
    except CellFailed as error:
        fail(str(error))
    for picture in SHOWN.pictures:
        print(picture)
    print(path)


@app.command("export")
def export_one(
    file: File,
    out: Annotated[Path | None, typer.Option(help="The file to write; else beside FILE.")] = None,
) -> None:
    """Write a notebook as an .ipynb file for Jupyter."""
    notebook = read_notebook(file)
    out = out or notebook.path.with_suffix(".ipynb")
    try:
        export(notebook, out)
    except OSError as error:
        raise BadConfig(f"{out} cannot be written: {error.strerror}", "Give --out.") from None
    print(out)


def _parameter(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise BadConfig(f"--param {text} has no value", "Give it as NAME=VALUE.")
    return name, value
