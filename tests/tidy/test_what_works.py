"""Each line of the table `What works` in docs/pulsar.md names a test that is there."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.tidy.sources import ROOT

ROW = re.compile(r"\| (?P<what>.+) \| `(?P<file>[\w/.]+)::(?P<name>.+)` \|")
HEADING = re.compile(r"\| \*\*.+\*\* \| \|")
LINES_MIN = 60


def rows() -> list[str]:
    section = (ROOT / "docs" / "pulsar.md").read_text().split("\n## What works\n")[1]
    table = section.split("\n#")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [line for line in lines if not HEADING.fullmatch(line)]


def names_in(file: str, text: str) -> Iterator[str]:
    """Of the tests in the file, or of the checks in Java."""
    if file.endswith(".java"):
        yield from re.findall(r'^ +check\("(.+?)", topic', text, re.M)
    else:
        yield from (one.name for one in ast.parse(text).body if isinstance(one, ast.FunctionDef))


@pytest.mark.parametrize("row", rows())
def test_each_line_of_what_works_names_a_test_that_is_there(row):
    match = ROW.fullmatch(row)
    assert match is not None, "a line has a feature and `file::name`"
    path = ROOT / "tests" / match["file"]
    assert path.is_file()
    assert match["name"] in names_in(match["file"], path.read_text())


def test_the_table_is_found_and_has_no_test_twice():
    assert len(rows()) >= LINES_MIN
    assert len({row.rpartition(" | ")[2] for row in rows()}) == len(rows())
