"""Runs the marked blocks of pages, one after the other, as a reader does who types them in.

    python -m tests.spark.pages README.md docs/spark.md

Always true: a block is run as it stands. It is marked by `<!-- run: name -->` on the line before
it, which a reader does not see. Blocks of Python share their names, and where one has a line
`print(...)  # text`, just that text must be printed; blocks of sh end at the first that fails. An
error names the page and its line.
"""

import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = re.compile(
    r"(?:<!-- run: (?P<name>[\w-]+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)```", re.DOTALL
)
SAYS = re.compile(r"^ *print\(.*\)  # (.+)$", re.M)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    """Of the first line of its text, from 1."""
    name: str | None
    """None: it is not marked."""
    language: str
    text: str

    @property
    def says(self) -> list[str]:
        return SAYS.findall(self.text)

    def run(self, names: dict[str, Any]) -> str:
        """What it printed."""
        if self.language == "sh":
            command = ["bash", "-e", "-o", "pipefail", "-c", self.text]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, f"{self.page}:{self.line}: {done.stdout}{done.stderr}"
            return done.stdout
        program = compile("\n" * (self.line - 1) + self.text, str(self.page), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(program, names)
        return printed.getvalue()


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("text")) + 1
        yield Block(page, line, found["name"], found["language"], found["text"])


def unsaid(says: list[str], printed: str) -> list[str]:
    """What should have been printed, line by line in this order among others, and was not."""
    lines = iter(printed.splitlines())
    return [text for text in says if text not in lines]


def main() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for page in map(Path, sys.argv[1:]):
        for block in blocks(page):
            if block.name is None:
                continue
            printed = block.run(names)
            print(f"== {page.name}:{block.line} {block.name}\n{printed}", flush=True)
            left = unsaid(block.says, printed)
            assert not left, f"{page}:{block.line} did not print {left}"


if __name__ == "__main__":
    main()
