"""A run in one line: a seed, how its plan differs from what the seed draws, the mutant in it."""

import json
import random
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from tests.simulation.chaos import Plan, draw_plan
from tests.simulation.invariants import Violation
from tests.simulation.loop import SimLoop
from tests.simulation.plan import WITHIN_BUDGET, of_ledgers, within_budget
from tests.simulation.scenario import SeedFailed, run_seed

if TYPE_CHECKING:
    from tests.simulation.mutants import Mutant


def drawn_plan(seed: int) -> Plan:
    """The plan of the seed as it is."""
    return draw_plan(SimLoop(seed).random_for("plan"))


def changed_plan(seed: int, changes: Mapping[str, Any]) -> Plan:
    """The seed's plan with some fields replaced; lists, as JSON has them, for tuples and sets. It
    is within the budget of losses if these say so, or if it has what no run over budget has. What
    heals has no way that stays cut, as none is drawn so, unless the changes have both.

    Raises ValueError for a name that no plan has, and for changes that contradict each other.
    """
    plan = drawn_plan(seed)
    known = {each.name: getattr(plan, each.name) for each in fields(plan)}
    unknown = [name for name in changes if name not in known]
    if unknown:
        raise ValueError(f"a plan has no {unknown[0]!r}; it has {', '.join(known)}")
    if changes.get("ledgers"):
        plan = of_ledgers(plan, random.Random(f"ledgers {seed}"))
    elif changes.get("healing"):
        plan = replace(plan, lasting=False)
    made = replace(plan, **{name: _like(known[name], value) for name, value in changes.items()})
    asked = next((name for name in WITHIN_BUDGET if changes.get(name)), None)
    if asked and changes.get("over_budget"):
        raise ValueError(f"a run with {asked} is within the budget of losses, not over_budget")
    return within_budget(made)


def parsed(text: str) -> dict[str, Any]:
    """The changes that a command line gives as JSON. Raises ValueError."""
    changes = json.loads(text)
    if not isinstance(changes, dict):
        raise ValueError(f"a plan's changes are a JSON object, not {text}")
    return changes


def _like(known: Any, value: Any) -> Any:
    if not isinstance(known, tuple | frozenset):
        return value
    return type(known)(tuple(one) if isinstance(one, list) else one for one in value)


def changes_of(seed: int, plan: Plan) -> dict[str, Any]:
    """What makes `plan` of the seed's own, ready for JSON."""
    changes: dict[str, Any] = {"ledgers": True} if plan.ledgers else {}
    drawn = changed_plan(seed, changes)
    for each in fields(plan):
        value = getattr(plan, each.name)
        if value != getattr(drawn, each.name):
            changes[each.name] = sorted(value) if isinstance(value, frozenset) else value
    return changes


def command(seed: int, plan: Plan, mutant: str = "") -> str:
    """The command line that runs it again."""
    words = ["python", "-m", "tests.simulation", "--seeds", "1", "--start", str(seed)]
    for situation, number in plan.reseeds:
        words += ["--reseed", f"{situation}:{number}"]
    changes = changes_of(seed, replace(plan, reseeds=()))
    if changes:
        words += ["--plan", json.dumps(changes)]
    if mutant:
        words += ["--mutant", mutant]
    return shlex.join(words)


def mutants_like(which: str) -> list["Mutant"]:
    """The mutants of this name; or else of this report (BK# may be left out); or else those whose
    name or report contains it, in whatever case. Raises ValueError, listing all, if none does."""
    from tests.simulation.mutants import MUTANTS  # which imports all that can be mutated

    found = [mutant for mutant in MUTANTS if mutant.name == which]
    found = found or [m for m in MUTANTS if m.report in (which, f"BK#{which}")]
    part = which.lower()
    found = found or [m for m in MUTANTS if part in m.name.lower() or part in m.report.lower()]
    if not found:
        raise ValueError(f"there is no mutant {which!r}; there are:\n{_listed(MUTANTS)}")
    return found


def mutant_like(which: str) -> "Mutant":
    """The one mutant that `which` means. Raises ValueError, listing them, if there are several."""
    found = mutants_like(which)
    if len(found) > 1:
        raise ValueError(f"{which!r} may be any of these mutants:\n{_listed(found)}")
    return found[0]


def _listed(mutants: Sequence["Mutant"]) -> str:
    return "\n".join(f"  {mutant.report:12} {mutant.name}" for mutant in mutants)


@contextmanager
def mutated(name: str) -> Iterator[Mapping[str, Any]]:
    """Put the mutant of that name into production code for the while, and give what it changes in
    plans; "" is none. Raises ValueError unless one mutant is meant (mutant_like)."""
    if not name:
        yield {}
        return
    mutant = mutant_like(name)
    with mutant.applied():
        yield mutant.plan_changes


def broken_by(seed: int, plan: Plan) -> tuple[str, SeedFailed] | None:
    """The number of the invariant that the run breaks, or the name of the exception it ends with;
    None when it is clean."""
    try:
        run_seed(seed, plan)
    except SeedFailed as failure:
        cause = failure.cause
        return (cause.name if isinstance(cause, Violation) else type(cause).__name__), failure
    return None
