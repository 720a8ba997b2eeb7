"""Which files and functions of ours run, and which of them a section of docs/architecture.md
names."""

import inspect
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from spark_ledger.process import background_loop
from tests.tidy.sources import ROOT

OURS = ("spark_ledger/", "bookie_server/")
PAGE = ROOT / "docs" / "architecture.md"
FILE = re.compile(r"`((?:spark_ledger|bookie_server)/[a-z0-9_/]+\.py)`")


def named(heading: str) -> set[str]:
    """The files that a section of the page names."""
    text = PAGE.read_text()
    start = text.index(f"\n## {heading}\n")
    return set(FILE.findall(text[start : text.index("\n## ", start + 1)]))


class Ran(dict[CodeType, str]):
    """Functions of ours that ran, with the path of each."""

    @property
    def files(self) -> set[str]:
        return {*self.values()}


@contextmanager
def functions_that_run(*, threads: bool = True) -> Iterator[Ran]:
    """Those of ours, in this thread and, where there are `threads`, on the ledger's loop;
    generators that go on count too."""
    ran = Ran()
    root = f"{ROOT}/"

    def called(frame: Any, event: str, _: Any) -> None:
        path = frame.f_code.co_filename.removeprefix(root)
        runs = event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED  # no import
        if runs and path.startswith(OURS) and not path.endswith("__init__.py"):
            ran[frame.f_code] = path

    def on_the_loop(profile: Any) -> None:
        done = threading.Event()
        background_loop().loop.call_soon_threadsafe(lambda: (sys.setprofile(profile), done.set()))
        done.wait()

    if threads:
        on_the_loop(called)
    sys.setprofile(called)
    try:
        yield ran
    finally:
        sys.setprofile(None)
        if threads:
            on_the_loop(None)
