"""A notebook's file in Databricks' source form, as cells.

    # Databricks notebook source          the first line
    # COMMAND ----------                  between cells
    # MAGIC %md                           a cell of text: each line begins with # MAGIC
    # MAGIC %pip install ...              a cell of packages

Always true: every other cell is Python, and the file as a whole is Python too.
"""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spark_ledger.errors import BadConfig

FIRST_LINE = "# Databricks notebook source"
BREAK = "# COMMAND ----------"
MAGIC = re.compile(r"# MAGIC ?")
TITLE = "# DBTITLE"
MAKERS = ("text", "dropdown")


@dataclass(frozen=True)
class Cell:
    kind: str
    """`md`, `pip` or `python`."""
    text: str
    """The text without comment marks, and without `%md`."""
    line: int
    """The line of the file at which the cell begins; the first line is 1."""
    heading: str
    """The heading in this cell's text, else the last one before it."""


@dataclass(frozen=True)
class Notebook:
    path: Path
    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def title(self) -> str:
        return self.cells[0].heading or self.name

    def parameters(self) -> dict[str, str]:
        """The widgets that its cells make, with their defaults, in order."""
        calls = [
            node
            for cell in self.cells
            if cell.kind == "python"
            for node in ast.walk(ast.parse(cell.text))
            if isinstance(node, ast.Call)
        ]
        return dict(filter(None, map(_widget, calls)))


def read_notebook(path: str | Path) -> Notebook:
    """Raises errors.BadConfig if the file does not exist or is not a notebook."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise BadConfig(
            f"notebook {path} cannot be read: {reason}", "Give the path of a notebook."
        ) from None
    lines = text.split("\n")
    if lines[0].rstrip() != FIRST_LINE:
        raise BadConfig(
            f"{path} is not a notebook", f"Its first line has to be {FIRST_LINE!r}; see notebooks/."
        )
    cells = list(_cells(lines))
    for cell in cells:
        _check(path, cell)
    return Notebook(path, tuple(cells))


def _cells(lines: list[str]) -> Iterator[Cell]:
    starts = [1, *(number + 1 for number, line in enumerate(lines) if line.rstrip() == BREAK)]
    heading = ""
    for start, end in zip(starts, [*(start - 1 for start in starts[1:]), len(lines)], strict=True):
        body = lines[start:end]
        while body and (not body[0].strip() or body[0].startswith(TITLE)):
            body, start = body[1:], start + 1
        text = "\n".join(body).rstrip()
        if not text:
            continue
        kind = "python"
        if all(line.startswith("# MAGIC") for line in text.split("\n")):
            text = "\n".join(MAGIC.sub("", line, count=1) for line in text.split("\n"))
            kind = text.removeprefix("%").split(maxsplit=1)[0] if text.startswith("%") else "md"
            text = text.removeprefix("%md").lstrip() if kind == "md" else text
        headings = re.findall(r"^#+ +(.+)$", text, re.M) if kind == "md" else []
        heading = headings[-1] if headings else heading
        yield Cell(kind, text, start + 1, heading)


def _check(path: Path, cell: Cell) -> None:
    if cell.kind not in ("md", "pip", "python"):
        raise BadConfig(
            f"{path}:{cell.line} is a cell of %{cell.kind}, which only Databricks runs",
            "Cells are Python, %md or %pip.",
        )
    if cell.kind != "python":
        return
    try:
        ast.parse(cell.text)
    except SyntaxError as error:
        line = cell.line + (error.lineno or 1) - 1
        raise BadConfig(f"{path}:{line} is not Python: {error.msg}", "Correct the cell.") from None


def _widget(call: ast.Call) -> tuple[str, str] | None:
    named = {word.arg: word.value for word in call.keywords}
    given = [*call.args[:2], *(named[name] for name in ("name", "defaultValue") if name in named)]
    function, arguments = call.func, [ast.unparse(word) for word in given[:2]]
    if not isinstance(function, ast.Attribute) or function.attr not in MAKERS or not arguments:
        return None
    if ast.unparse(function.value) != "dbutils.widgets":
        return None
    name, default = (*map(_literal, arguments), "")[:2]
    return name, default


def _literal(text: str) -> str:
    try:
        return str(ast.literal_eval(text))
    except ValueError:
        return ""


def export(notebook: Notebook, out: Path) -> None:
    """Write the notebook as Jupyter's file. A cell of packages becomes a comment: the packages are
    installed where Jupyter runs."""
    document = {
        "cells": [_jupyter_cell(number, cell) for number, cell in enumerate(notebook.cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _jupyter_cell(number: int, cell: Cell) -> dict[str, object]:
    text = cell.text
    if cell.kind == "pip":
        text = "\n".join(f"# {line}" for line in text.split("\n"))
    shared = {
        "id": f"cell-{number}",
        "metadata": {},
        "source": text.splitlines(keepends=True),
    }
    if cell.kind == "md":
        return {"cell_type": "markdown", **shared}
    return {"cell_type": "code", "execution_count": None, "outputs": [], **shared}
