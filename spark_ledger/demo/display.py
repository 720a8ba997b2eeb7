"""What the demo shows: moving bars, lines with the second they were said at, a table of checks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from spark_ledger.demo.compare import Check


class Display:
    def __init__(self, console: Console) -> None:
        self.console = console
        self._started = time.monotonic()
        self._bars: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description:>28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        self.console.print(
            f"[dim]{self.elapsed_s:6.1f} s[/]  {text}", highlight=False, soft_wrap=True
        )

    @contextmanager
    def bars(self, *names: str, total: int) -> Iterator[None]:
        self._bars = {name: self._progress.add_task(name, total=total) for name in names}
        with self._progress:
            yield

    def move(self, name: str, rows: int) -> None:
        self._progress.update(self._bars[name], completed=rows)

    def checks(self, checks: list[Check]) -> None:
        table = Table("check, against the csv itself", "found", "", box=None, pad_edge=False)
        for check in checks:
            verdict = "[green]passed[/]" if check.passed else "[red]FAILED[/]"
            table.add_row(check.what, check.detail, verdict)
        self.console.print(table, highlight=False)
