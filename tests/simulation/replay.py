"""A run in one line: a seed, how its plan differs from what the seed draws, the mutant in it."""

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from tests.simulation.chaos import Plan, draw_plan
from tests.simulation.invariants import Violation
from tests.simulation.loop import SimLoop
from tests.simulation.scenario import SeedFailed, run_seed


def drawn_plan(seed: int) -> Plan:
    """The plan of the seed as it is."""
    return draw_plan(SimLoop(seed).random_for("plan"))


def changed_plan(seed: int, changes: Mapping[str, Any]) -> Plan:
    """The seed's plan with some fields replaced; lists, as JSON has them, for tuples and sets.

    Raises ValueError for a name that no plan has.
    """
    plan = drawn_plan(seed)
    known = {each.name: getattr(plan, each.name) for each in fields(plan)}
    unknown = [name for name in changes if name not in known]
    if unknown:
        raise ValueError(f"a plan has no {unknown[0]!r}; it has {', '.join(known)}")
    return replace(plan, **{name: _like(known[name], value) for name, value in changes.items()})


def parsed(text: str) -> dict[str, Any]:
    """The changes that a command line gives as JSON. Raises ValueError."""
    changes = json.loads(text)
    if not isinstance(changes, dict):
        raise ValueError(f"a plan's changes are a JSON object, not {text}")
    return changes


def _like(known: Any, value: Any) -> Any:
    return type(known)(value) if isinstance(known, tuple | frozenset) else value


def changes_of(seed: int, plan: Plan) -> dict[str, Any]:
    """What makes `plan` of the seed's own, ready for JSON."""
    drawn, changes = drawn_plan(seed), {}
    for each in fields(plan):
        value = getattr(plan, each.name)
        if value != getattr(drawn, each.name):
            changes[each.name] = sorted(value) if isinstance(value, frozenset) else value
    return changes


def command(seed: int, plan: Plan, mutant: str = "") -> str:
    """The command line that runs it again."""
    words = ["python", "-m", "tests.simulation", "--seeds", "1", "--start", str(seed)]
    changes = changes_of(seed, plan)
    if changes:
        words += ["--plan", json.dumps(changes)]
    if mutant:
        words += ["--mutant", mutant]
    return shlex.join(words)


@contextmanager
def mutated(name: str) -> Iterator[Mapping[str, Any]]:
    """Put the mutant of that name into production code for the while, and give what it changes in
    plans; "" is none. Raises ValueError when there is no such mutant."""
    if not name:
        yield {}
        return
    from tests.simulation.mutants import MUTANTS  # which imports all that can be mutated

    found = [mutant for mutant in MUTANTS if mutant.name == name]
    if not found:
        known = ", ".join(mutant.name for mutant in MUTANTS)
        raise ValueError(f"there is no mutant {name!r}; there are: {known}")
    with found[0].applied():
        yield {"topics": False, **found[0].changes}


def broken_by(seed: int, plan: Plan) -> tuple[str, SeedFailed] | None:
    """The number of the invariant that the run breaks, or the name of the exception it ends with;
    None when it is clean."""
    try:
        run_seed(seed, plan)
    except SeedFailed as failure:
        cause = failure.cause
        return (cause.name if isinstance(cause, Violation) else type(cause).__name__), failure
    return None
