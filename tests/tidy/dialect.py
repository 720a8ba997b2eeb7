"""How far the project's words are from plain technical English: two counts, by folder.

- Ruled-out words, together, for each 1,000 lines of comments, docstrings, messages and docs. A
  program is not told anything and says nothing; a relative clause has a noun to hang on.
- Bindings of names that are no nouns of the domain (`one`, `found`), where the scope is longer than
  three lines.

`python -m tests.tidy.dialect` prints the counts, `python -m tests.tidy.dialect FOLDER` each place.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

from tests.tidy.sources import PACKAGES, ROOT, Source, sources, tracked_files

SCOPE_LINES_MAX = 3
NAMES = frozenset({"one", "found", "known", "wanted", "some", "each", "said", "told", "which"})
RULED_OUT = re.compile(
    r"\b(?:told|tells|says|said|lies|nobody|somebody|anybody|whoever|none any more|(?:is|are) none"
    r"|as it was found)\b"
)
# "who" hangs on a noun for a person; of a program it is "that".
WHO = re.compile(r"(?:(\w+),? )?\bwho\b", re.IGNORECASE)
PERSONS = frozenset(
    ["person", "people", "user", "users", "operator", "operators", "reader", "engineer", "anyone"]
)
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Place(NamedTuple):
    """A word of the dialect, or a binding, and where it is."""

    path: str
    line: int
    text: str


class Words(NamedTuple):
    """Of a folder: ruled-out words, the lines of prose that they are in, and bindings."""

    ruled_out: list[Place]
    prose_lines: int
    bindings: list[Place]

    @property
    def per_thousand(self) -> float:
        return 1000 * len(self.ruled_out) / max(self.prose_lines, 1)


def prose_of(source: Source) -> Iterator[tuple[int, str]]:
    """The lines of comments and of texts that are for people: docstrings, messages (a text with a
    space in it). Each with its number."""
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for number, line in enumerate(node.value.split("\n")):
                if line.strip():
                    yield node.lineno + number, line
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def ruled_out_in(line: str) -> Iterator[str]:
    for match in RULED_OUT.finditer(line):
        yield match.group(0)
    for match in WHO.finditer(line):
        if (match.group(1) or "").lower() not in PERSONS:
            yield match.group(0)


def bindings_of(source: Source) -> Iterator[Place]:
    """Each binding of a name of NAMES whose scope (a loop, a comprehension, a function) is longer
    than SCOPE_LINES_MAX."""
    for name, line, scope in _bound(source.tree, source.tree):
        first, last = getattr(scope, "lineno", 1), getattr(scope, "end_lineno", 1 << 20)
        if name in NAMES and last - first >= SCOPE_LINES_MAX:
            yield Place(source.path, line, name)


def _bound(node: ast.AST, scope: ast.AST) -> Iterator[tuple[str, int, ast.AST]]:
    """Every name that is bound below the node, its line, and where it holds."""
    if isinstance(node, FUNCTIONS):
        scope = node
    elif isinstance(node, ast.arg):
        yield node.arg, node.lineno, scope
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id, node.lineno, scope
    elif isinstance(node, ast.ExceptHandler) and node.name:
        yield node.name, node.lineno, node
    inner = node if isinstance(node, COMPREHENSIONS) else scope
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                is_target = isinstance(node, ast.For | ast.AsyncFor) and field == "target"
                yield from _bound(child, node if is_target else inner)


def words(*folders: str) -> Words:
    """Of the hand-written Python files below the folders, and the pages if one of them is docs."""
    ruled_out: list[Place] = []
    bindings: list[Place] = []
    lines = 0
    python = [folder for folder in folders if folder != "docs"]
    for source in sources(*python) if python else ():
        for number, line in prose_of(source):
            lines += 1
            ruled_out += (Place(source.path, number, word) for word in ruled_out_in(line))
        bindings += bindings_of(source)
    for path in pages() if "docs" in folders else ():
        for number, line in enumerate((ROOT / path).read_text().split("\n"), 1):
            lines += bool(line.strip())
            ruled_out += (Place(path, number, word) for word in ruled_out_in(line))
    return Words(ruled_out, lines, bindings)


def pages() -> list[str]:
    """README, docs/ and every other page of the repository."""
    return [path for path in tracked_files() if path.endswith(".md")]


def main(*folders: str) -> None:
    if folders:
        counted = words(*folders)
        for place in sorted(counted.ruled_out + counted.bindings):
            print(f"{place.path}:{place.line}: {place.text}")
        return
    rooms = sorted({room_of(source.path) for source in sources()})
    counts = {room: words(room) for room in [*rooms, "docs"]}
    counts["all"] = words(*PACKAGES, "docs")
    for room, counted in counts.items():
        print(
            f"{room:32} {len(counted.ruled_out):5} words in {counted.prose_lines:6} lines"
            f" ({counted.per_thousand:5.1f}), {len(counted.bindings):4} bindings"
        )


def room_of(path: str) -> str:
    return "/".join(path.split("/")[:2]) if path.count("/") > 1 else path.split("/")[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
