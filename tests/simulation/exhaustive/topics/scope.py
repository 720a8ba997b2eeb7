"""What is explored: processes, what they may write, where they begin, how many faults may come."""

from dataclasses import dataclass

from tests.simulation.exhaustive.topics.processes import Program
from tests.simulation.exhaustive.topics.worlds import World

Prefixes = tuple[str, ...]


@dataclass(frozen=True)
class Actor:
    """A process. `writes` are the beginnings of all paths that it may write, beside its own."""

    name: str
    program: Program
    writes: Prefixes = ()


@dataclass(frozen=True)
class Scope:
    """`faults`: of how many writes on one way something else may become than an answer. `own`: the
    beginnings of paths of which each is met by the process alone that made it. `topics` are ids."""

    name: str
    told: str
    actors: tuple[Actor, ...]
    world: World
    topics: tuple[str, ...]
    faults: int = 0
    own: Prefixes = ()
    rules: tuple[str, ...] = ()
    """What the judge asks beside what it always does (judge.py)."""
    tasks: tuple[int, ...] = ()
    """Ledgers whose entries need not be in a topic: of tasks, before their commit."""


def faults_told(faults: int) -> str:
    return f"; {faults} write(s) with another outcome" if faults else ""
