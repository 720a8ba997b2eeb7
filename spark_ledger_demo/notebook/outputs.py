"""`dbutils.widgets`, `display` and `displayHTML` outside of Databricks.

Always true: a parameter's value comes from `--param name=value`, else from the environment variable
with its name in capitals, else it is the default. A figure that a cell displays again is redrawn in
its place: in Jupyter this is the cell's output; elsewhere it is a PNG file in the folder of the
widget `folder`, whose path is printed.
"""

import html
import io
import os
import re
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_ledger.errors import BadConfig


class Widgets:
    def __init__(self) -> None:
        self._given: dict[str, str] = {}
        self._values: dict[str, str] = {}

    def text(self, name: str, defaultValue: str, label: str = "") -> None:
        """A parameter of any text. Only Databricks shows the label."""
        default = os.environ.get(name.upper(), str(defaultValue))
        self._values[name] = self._given.get(name, default)

    def dropdown(
        self, name: str, defaultValue: str, choices: Sequence[str], label: str = ""
    ) -> None:
        """A parameter that is one of `choices`. Raises errors.BadConfig for another value."""
        self.text(name, defaultValue, label)
        if self._values[name] not in choices:
            raise BadConfig(
                f"parameter {name} is {self._values[name]!r}", f"Give one of {', '.join(choices)}."
            )

    def get(self, name: str) -> str:
        """The parameter's value. Raises errors.BadConfig if no cell made it."""
        if name not in self._values:
            names = ", ".join(sorted(self._values)) or "none"
            raise BadConfig(
                f"the notebook has no widget {name!r}",
                f"Make it with dbutils.widgets.text; the widgets are: {names}.",
            )
        return self._values[name]

    def begin(self, given: Mapping[str, str]) -> None:
        """Start a notebook with these parameters."""
        self._given, self._values = dict(given), {}

    def value(self, name: str, default: str) -> str:
        return self._values.get(name, default)


WIDGETS = Widgets()


ROWS_MAX = 20
TEXT_WIDTH_MAX = 40
DPI = 80
FOLDER = "notebook-output"


@dataclass
class Output:
    """A part of a cell's output: text, or HTML, or a PNG picture."""

    kind: str
    text: str = ""
    png: bytes = b""


@dataclass
class Picture:
    """The place of a figure: a file and the page, or Jupyter's handle of a cell's output."""

    path: Path | None = None
    output: Output | None = None
    handle: Any = None
    cell: int = 0


class Shown:
    """The outputs of cells outside of Jupyter; the runner takes them cell by cell for its page."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.pictures: list[Path] = []

    def text(self, text: str) -> None:
        if self.outputs and self.outputs[-1].kind == "text":
            self.outputs[-1].text += text
        else:
            self.outputs.append(Output("text", text))

    def begin(self) -> None:
        """Start a notebook."""
        self.outputs, self.pictures = [], []

    def take(self) -> list[Output]:
        outputs, self.outputs = self.outputs, []
        return outputs


SHOWN = Shown()
_places: "weakref.WeakKeyDictionary[Any, Picture]" = weakref.WeakKeyDictionary()


def display(value: Any) -> None:
    """Show a DataFrame (its first 20 rows), a matplotlib figure, or any other value.

    Raises TypeError for a streaming DataFrame: start a query, and display what it writes.
    """
    if hasattr(value, "savefig"):
        _show_figure(value)
    elif hasattr(value, "isStreaming"):
        _show_rows(value)
    elif _in_jupyter():
        _jupyter().display(value)
    elif hasattr(value, "_repr_html_"):
        _show_html(value._repr_html_(), str(value))
    else:
        print(value)


def display_html(source: str) -> None:
    """Show HTML; where only text can be shown, the words of the HTML."""
    if _in_jupyter():
        _jupyter().display(_jupyter().HTML(source))
    else:
        words = html.unescape(re.sub(r"<(style|script).*?</\1>|<[^>]+>", " ", source, flags=re.S))
        _show_html(source, " ".join(words.split()))


def _in_jupyter() -> bool:
    """Whether this is a Jupyter kernel, which shows pictures; IPython in a terminal does not."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _jupyter() -> Any:
    import IPython.display

    return IPython.display


def _show_html(source: str, text: str) -> None:
    print_without_page(text)
    SHOWN.outputs.append(Output("html", source))


def print_without_page(text: str) -> None:
    """Print on the terminal only: the page of a run has the output in another form."""
    stream = getattr(sys.stdout, "terminal", sys.stdout)
    print(text, file=stream, flush=True)


def _show_figure(figure: Any) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, bbox_inches="tight")
    png, place = buffer.getvalue(), _places.setdefault(figure, Picture())
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close(figure)  # else pyplot keeps the figure, and Jupyter shows it again
    if _in_jupyter():
        image = _jupyter().Image(png)
        cell = sys.modules["IPython"].get_ipython().execution_count
        if place.handle is not None and place.cell == cell:
            place.handle.update(image)
        else:
            place.handle, place.cell = _jupyter().display(image, display_id=True), cell
        return
    if place.path is None:
        place.path = _new_path()
        print_without_page(f"picture: {place.path}")
    place.path.write_bytes(png)
    if place.output is None or all(place.output is not output for output in SHOWN.outputs):
        place.output = Output("picture")  # the figure's first output in this cell
        SHOWN.outputs.append(place.output)
    place.output.png = png


def _new_path() -> Path:
    main = Path(getattr(sys.modules["__main__"], "__file__", None) or "notebook")
    folder = Path(WIDGETS.value("folder", f"{FOLDER}/{main.stem}"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"picture-{len(SHOWN.pictures) + 1}.png"
    SHOWN.pictures.append(path)
    return path


def _show_rows(rows: Any) -> None:
    if rows.isStreaming:
        raise TypeError("display shows no stream: start a query, and display what it writes")
    first_rows = rows.limit(ROWS_MAX + 1).collect()
    is_cut = len(first_rows) > ROWS_MAX
    cells = [[_cell(value) for value in row] for row in first_rows[:ROWS_MAX]]
    table = _html_table(rows.columns, cells, is_cut)
    if _in_jupyter():
        _jupyter().display(_jupyter().HTML(table))
    else:
        _show_html(table, _text_table(rows.columns, cells, is_cut))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode(errors="replace")
    return "null" if value is None else str(value)


def _html_table(names: list[str], rows: list[list[str]], is_cut: bool) -> str:
    def line(kind: str, cells: list[str]) -> str:
        return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    note = f"<p>the first {ROWS_MAX} rows</p>" if is_cut else ""
    return f"<table><thead>{line('th', names)}</thead><tbody>{body}</tbody></table>{note}"


def _text_table(names: list[str], rows: list[list[str]], is_cut: bool) -> str:
    lines = [[_shortened(cell) for cell in row] for row in [names, *rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([*texts, f"the first {ROWS_MAX} rows"] if is_cut else texts)


def _shortened(cell: str) -> str:
    cell = " ".join(cell.split())
    return cell if len(cell) <= TEXT_WIDTH_MAX else cell[: TEXT_WIDTH_MAX - 1] + "…"
