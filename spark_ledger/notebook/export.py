"""A notebook as the .ipynb that Jupyter runs: plain JSON, the same for the same notebook."""

import json
from pathlib import Path

from spark_ledger.notebook.source import Cell, Notebook


def export(notebook: Notebook, out: Path) -> None:
    """Write the file. Packages stay as a comment: Jupyter runs where they are installed."""
    document = {
        "cells": [_cell(number, cell) for number, cell in enumerate(notebook.cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _cell(number: int, cell: Cell) -> dict[str, object]:
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
