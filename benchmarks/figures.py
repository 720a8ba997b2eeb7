"""A figure beside its goal, and the table of them that every benchmark ends with."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """`measured` is compared with `goal`: directly, or as so many times what `peer` measured.
    Without a goal it is told and not judged."""

    what: str
    measured: float
    unit: str = ""
    goal: float | None = None
    at_least: bool = False
    peer: float | None = None
    peer_name: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.peer is None else self.measured / self.peer

    @property
    def met(self) -> bool | None:
        """None: there is no goal."""
        if self.goal is None:
            return None
        judged = self.measured if self.ratio is None else self.ratio
        return judged >= self.goal if self.at_least else judged < self.goal

    def row(self) -> tuple[str, ...]:
        sign = ">=" if self.at_least else "<"
        times = "" if self.peer is None else f"x {self.peer_name}"
        goal = "" if self.goal is None else f"{sign} {self.goal:g}{times}"
        peer = "" if self.peer is None else f"{number(self.peer)} {self.unit}"
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}x"
        verdict = {True: "[green]met[/]", False: "[red]not met[/]", None: ""}[self.met]
        return self.what, goal, f"{number(self.measured)} {self.unit}", peer, ratio, verdict

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "met": self.met}


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def show(figures: Iterable[Figure], title: str) -> None:
    table = Table("figure", "goal", "measured", "the other", "ratio", "", title=title)
    for figure in figures:
        table.add_row(*figure.row())
    Console(width=130).print(table)
