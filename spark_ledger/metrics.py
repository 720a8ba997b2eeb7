"""Counters of events, from the start of the process on.

Always true: a counter never falls. Its owner adds to it; its publisher only reads.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Counter:
    """`name`: the published name; `meaning`: what is counted, for people."""

    name: str
    meaning: str
    value: int = 0

    def add(self, count: int = 1) -> None:
        assert count >= 0, f"{self.name} never falls"
        self.value += count
