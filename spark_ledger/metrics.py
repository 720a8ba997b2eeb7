"""What a process counts from its start on.

Always true: a counter never falls. Its owner adds to it; its publisher only reads.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Counter:
    """`name` as it is published; `meaning` in words, with the unit."""

    name: str
    meaning: str
    value: int = 0

    def add(self, count: int = 1) -> None:
        assert count >= 0, f"{self.name} never falls"
        self.value += count
