"""The rendered result of a run: one HTML file, text and code and outputs, pictures inside."""

import base64
import html

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from spark_ledger.notebook.outputs import Output
from spark_ledger.notebook.source import Cell, Notebook

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
    """`results`: the cells that ran, and what each showed."""
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
