"""Runs a notebook as a program: cell after cell, with progress, and writes one HTML file with text,
code, outputs and pictures.

Always true: Java, the parameters and the folder are checked before the first cell runs. A folder
belongs to one run at a time. The page is written whether the notebook ends or fails.
"""

import base64
import fcntl
import html
import importlib.metadata
import linecache
import os
import re
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

import spark_ledger
from spark_ledger.errors import BadConfig
from spark_ledger.local.embedded_zookeeper import find_java
from spark_ledger.local.processes import lock_path
from spark_ledger_demo.notebook.outputs import FOLDER, SHOWN, WIDGETS, Output
from spark_ledger_demo.notebook.source import Cell, Notebook

OUTPUT_CHARACTERS_MAX = 20_000
STYLE = """
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 sans-serif; }
pre { padding: .6rem; overflow-x: auto; font-size: 13px; line-height: 1.35; }
pre.code { background: #f5f5f5; } pre.text { border-left: 3px solid #ccc; }
pre.error { border-left: 3px solid #c00; color: #c00; }
table { border-collapse: collapse; font-size: 13px; }
th, td { border: 1px solid #ccc; padding: 2px 8px; }
img { max-width: 100%; }
"""
_markdown = MarkdownIt("commonmark").enable("table")
_formatter = HtmlFormatter(nowrap=True, style="default")


def page(notebook: Notebook, results: list[tuple[Cell, list[Output]]]) -> str:
    """The HTML page. `results`: the cells that ran, each with its outputs."""
    body = "\n".join(_cell(cell) + "".join(map(_output, outputs)) for cell, outputs in results)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(notebook.title)}</title>"
        f"<style>{STYLE}{_formatter.get_style_defs('pre')}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _cell(cell: Cell) -> str:
    if cell.kind == "md":
        return str(_markdown.render(cell.text))
    if cell.kind == "pip":
        return f'<pre class="code">{html.escape(cell.text)}</pre>\n'
    return f'<pre class="code">{highlight(cell.text, PythonLexer(), _formatter)}</pre>\n'


def _output(output: Output) -> str:
    if output.kind == "picture":
        return f'<img alt="" src="data:image/png;base64,{base64.b64encode(output.png).decode()}">\n'
    if output.kind == "html":
        return output.text + "\n"
    text = output.text
    if len(text) > OUTPUT_CHARACTERS_MAX:
        text = text[:OUTPUT_CHARACTERS_MAX] + "\n... (the rest is left out)"
    return f'<pre class="{output.kind}">{html.escape(text)}</pre>\n'


INSTALL = "pip install 'spark-ledger[demo]'"
REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*")


class CellFailed(Exception):
    """A cell failed; the text has the cell and the error, in one line."""


class _Tee:
    """Standard output, which is also kept for the page."""

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal

    def write(self, text: str) -> int:
        SHOWN.text(text)
        return self.terminal.write(text)

    def flush(self) -> None:
        self.terminal.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)


def run(notebook: Notebook, given: Mapping[str, str]) -> Path:
    """Runs the notebook with these parameters; returns the path of its page.

    Raises errors.BadConfig before the first cell runs, CellFailed when a cell fails.
    """
    defaults = notebook.parameters()
    _check_parameters(notebook, given, defaults)
    find_java()
    WIDGETS.begin(given)
    SHOWN.begin()
    folder = _folder(notebook, given, defaults)
    remedy = "Wait for its end, or give another folder with --param folder=FOLDER."
    in_use_error = BadConfig(f"a notebook runs in folder {folder} already", remedy)
    lock = lock_path(folder, in_use_error, os.O_RDONLY)
    path = folder / f"{notebook.name}.html"
    results: list[tuple[Cell, list[Output]]] = []
    module = ModuleType("__main__")
    module.__file__ = str(notebook.path)
    before, sys.modules["__main__"] = sys.modules["__main__"], module
    try:
        _run_cells(notebook, module, results)
    finally:
        sys.modules["__main__"] = before
        folder.mkdir(parents=True, exist_ok=True)  # a cell may have removed it
        path.write_text(page(notebook, results), encoding="utf-8")
        fcntl.flock(lock, fcntl.LOCK_UN)  # a child process may also have the descriptor
        os.close(lock)
    return path


def _check_parameters(
    notebook: Notebook, given: Mapping[str, str], defaults: Mapping[str, str]
) -> None:
    for name in given:
        if name not in defaults:
            names = ", ".join(defaults) or "none"
            raise BadConfig(
                f"{notebook.path} has no parameter {name!r}", f"Its parameters are: {names}."
            )
    for name, default in defaults.items():
        value = given.get(name, os.environ.get(name.upper(), default))
        if name == "folder" and not value:
            raise BadConfig("parameter folder is empty", f"Give a folder, as folder={default}.")
        if default.isdecimal() and not value.isdecimal():
            raise BadConfig(
                f"parameter {name} is {value!r}, not a whole number",
                f"Give a number, as {name}={default}.",
            )


def _folder(notebook: Notebook, given: Mapping[str, str], defaults: Mapping[str, str]) -> Path:
    default = defaults.get("folder") or f"{FOLDER}/{notebook.name}"
    folder = Path(given.get("folder") or os.environ.get("FOLDER") or default)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".written").touch()
        (folder / ".written").unlink()
    except OSError as error:
        raise BadConfig(
            f"folder {folder} cannot be written: {error.strerror}",
            "Give another folder with --param folder=FOLDER.",
        ) from None
    return folder


def _run_cells(
    notebook: Notebook, module: ModuleType, results: list[tuple[Cell, list[Output]]]
) -> None:
    number, count = 0, sum(cell.kind != "md" for cell in notebook.cells)
    for cell in notebook.cells:
        number += cell.kind != "md"
        results.append((cell, []))
        if cell.kind == "md":
            continue
        print(f"[{number}/{count}] {cell.heading}", flush=True)
        if cell.kind == "pip":
            _check_packages(cell)
            print("  %pip is left out: all packages are installed", flush=True)
            continue
        started = time.monotonic()
        try:
            with redirect_stdout(_Tee(sys.stdout)):
                linecache.checkcache(str(notebook.path))
                text = "\n" * (cell.line - 1) + cell.text  # lines are numbered as in the file
                exec(compile(text, str(notebook.path), "exec"), vars(module))
        except Exception as error:
            summary = _summary(notebook, error)
            SHOWN.outputs.append(Output("error", "".join(traceback.format_exception(error))))
            raise CellFailed(
                f"cell {number} of {count} ({cell.heading}) failed: {summary}"
            ) from error
        finally:
            results[-1] = (cell, SHOWN.take())
        print(f"  {time.monotonic() - started:.1f} s", flush=True)


def _check_packages(cell: Cell) -> None:
    """Raises errors.BadConfig if a package that the cell would install is not installed."""
    for word in cell.text.replace('"', " ").replace("'", " ").split():
        name = REQUIREMENT.match(word)
        if name is None or word in ("install", "pip") or word.startswith((".", "-", "/")):
            continue
        try:
            importlib.metadata.version(name.group())
        except importlib.metadata.PackageNotFoundError:
            raise BadConfig(
                f"package {name.group()} is not installed here", f"Run: {INSTALL}"
            ) from None


def _summary(notebook: Notebook, error: Exception) -> str:
    """The error in one line: its first line, and its place in the notebook."""
    frames = traceback.extract_tb(error.__traceback__)
    cell_frames = [frame for frame in frames if frame.filename == str(notebook.path)]
    place = f" ({notebook.path}:{cell_frames[-1].lineno})" if cell_frames else ""
    cause = spark_ledger.cause_of(error)
    text = " ".join((cause or str(error)).strip().split("\n", 1)[0].split())
    if not text and cell_frames:
        text = str(cell_frames[-1].line)  # an assert without a message
    if isinstance(error, ModuleNotFoundError):
        text += f". Run: {INSTALL}"
    if not cause:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text + place
