"""What a mutant is: one production function, what takes its place, and the runs that catch it."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.simulation.chaos import draw_plan
from tests.simulation.invariants import Violation
from tests.simulation.loop import SimLoop
from tests.simulation.scenario import SeedFailed, run_seed

SEEDS_FILE = Path(__file__).with_name("seeds.json")
DEFECTS = ("no defect", "only known errors")
"""Violations that are no invariants: an exception that nobody expected."""
SEEDS_MAX = 200  # tried when a mutant's own seed does not catch it any more


@dataclass(frozen=True)
class Mutant:
    """`owner.attribute` is replaced by `make(the original)`. `report` is where the bug is told."""

    name: str
    report: str
    owner: Any
    attribute: str
    make: Callable[[Any], Any]
    changes: Mapping[str, Any] | None = field(default_factory=dict)
    """What the plan of its runs has, whatever the seed draws; None: just what it draws."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        original = self.owner.__dict__[self.attribute]
        plain = original.__func__ if isinstance(original, staticmethod) else original
        setattr(self.owner, self.attribute, self.make(plain))
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, original)

    @property
    def plan_changes(self) -> Mapping[str, Any]:
        """What its runs' plans have, whatever the seed draws: no topics if it says nothing."""
        return {} if self.changes is None else {"topics": False, **self.changes}

    def caught(self, seed: int) -> str | None:
        """The invariant that fails under the mutant in this seed; None if none does, also when
        the mutant merely raises."""
        with self.applied():
            try:
                return run_changed(seed, self.changes)
            except SeedFailed:
                return None

    def clean(self, seed: int) -> bool:
        """Whether the same run keeps every invariant without the mutant."""
        try:
            return run_changed(seed, self.changes) is None
        except SeedFailed:
            return False

    def catching_seed(self) -> int | None:
        """Its stored seed, or when the code has moved on since, the first other one that catches
        it."""
        own = stored_seeds().get(self.name, {}).get("seed", 0)
        tried = (seed for seed in (own, *range(SEEDS_MAX)) if self.caught(seed))
        return next(tried, None)


def stored_seeds() -> dict[str, dict[str, Any]]:
    """By mutant: a seed that caught it, and what else was found then."""
    found: dict[str, dict[str, Any]] = json.loads(SEEDS_FILE.read_text())
    return found


def run_changed(seed: int, changes: Mapping[str, Any] | None) -> str | None:
    """Run a seed with a plan changed (without topics, if nothing is said of them); the number of
    the invariant that failed, if one did."""
    plan = draw_plan(SimLoop(seed).random_for("plan"))
    if changes is not None:
        plan = replace(plan, **{"topics": False, **changes})
    try:
        run_seed(seed, plan)
    except SeedFailed as failure:
        if isinstance(failure.cause, Violation) and failure.cause.name not in DEFECTS:
            return failure.cause.name
        raise
    return None
