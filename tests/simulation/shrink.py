"""A failing seed made small: fault classes switched off, then actors and entries taken away, then
single faults left out, as long as the same invariant fails.

Always true: the result fails in the same way as what it was made of; the search tries no more than
`runs_max` runs and keeps the best it had. It is greedy: nothing that is left can be left out alone,
unless the runs were used up.

    python -m tests.simulation shrink --seed 12 --plan '{"writers": 2}'
    python -m tests.simulation shrink --mutant BK#2614    a seed that is known to catch this bug
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.simulation import asked, replay
from tests.simulation.asked import MUTANT_HELP, at_least
from tests.simulation.chaos import Plan
from tests.simulation.story import tell
from tests.simulation.warm import collect, quiet

if TYPE_CHECKING:
    from tests.simulation.mutants import Mutant

RUNS_MAX = 250
_INJECTED = re.compile(r"^ *[\d.]+ chaos +#(\d+) ([^:]+):", re.MULTILINE)

Broken = Callable[[Plan], "tuple[str, str] | None"]
"""Runs a plan; what it breaks, and its trace; None when it is clean."""


@dataclass(frozen=True)
class Shrunk:
    """The smallest plan found, what it breaks, and the faults that happen in it."""

    plan: Plan
    invariant: str
    runs: int
    faults: tuple[str, ...]


def shrink(plan: Plan, broken: Broken, runs_max: int = RUNS_MAX) -> Shrunk:
    """Make `plan` small. Raises ValueError when it breaks nothing."""
    search = _Search(plan, broken, runs_max)
    search.leave_out_classes()
    search.take_away()
    search.leave_out_events()
    search.take_away()
    search.leave_out_classes()
    return Shrunk(search.plan, search.invariant, search.runs, search.faults())


class _Search:
    def __init__(self, plan: Plan, broken: Broken, runs_max: int) -> None:
        self.plan = plan
        self.runs = 0
        self._broken = broken
        self._runs_max = runs_max
        self._tried = {plan}
        found = broken(plan)
        if found is None:
            raise ValueError("this run breaks nothing")
        self.invariant, self._trace = found

    def events(self) -> list[tuple[int, str]]:
        """Index and class of each fault that happened in the best run so far."""
        return [(int(index), name) for index, name in _INJECTED.findall(self._trace)]

    def faults(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for _, name in self.events()))

    def leave_out_classes(self) -> None:
        """All at once, then all but one, then one by one."""
        on = [name for name in self.plan.faults if name not in self.plan.without]
        if len(on) > 1:
            if self._keep(self._without(on)):
                return
            for name in on:
                if self._keep(self._without([other for other in on if other != name])):
                    break
        for name in [name for name in self.plan.faults if name not in self.plan.without]:
            self._keep(self._without([name]))

    def _without(self, names: Sequence[str]) -> Plan:
        return replace(self.plan, without=self.plan.without | frozenset(names))

    def take_away(self) -> None:
        """Fewer actors, entries and options, until nothing more can go."""
        progress = True
        while progress:
            progress = any([self._keep(smaller) for smaller in _smaller(self.plan)])

    def leave_out_events(self) -> None:
        """Delta debugging over the single faults: halves first, then ever smaller pieces."""
        left = [index for index, _ in self.events()]
        size = len(left)
        while size >= 1 and left:
            at = 0
            while at < len(left):
                piece = left[at : at + size]
                if self._keep(replace(self.plan, skip=self.plan.skip | frozenset(piece))):
                    happened = {index for index, _ in self.events()}
                    left = [index for index in left if index in happened and index not in piece]
                else:
                    at += size
            size //= 2

    def _keep(self, plan: Plan) -> bool:
        """Whether the plan breaks the same invariant; if so it is the best so far."""
        if plan in self._tried or self.runs >= self._runs_max:
            return False
        self._tried.add(plan)
        self.runs += 1
        found = self._broken(plan)
        collect(self.runs)
        if found is None or found[0] != self.invariant:
            return False
        self.plan, self._trace = plan, found[1]
        return True


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Plans with one thing less."""
    for name in ("topics", "password", "announce", "delayed", "old_readers", "over_budget"):
        if getattr(plan, name):
            yield replace(plan, **{name: False})
    for name in plan.also:
        yield replace(plan, also=tuple(one for one in plan.also if one != name))
    for name in ("large", "places"):
        if getattr(plan, name):
            yield replace(plan, **{name: 0})
    for name, least in (("tailers", 0), ("recoverers", 0), ("writers", 1), ("streams", 1)):
        now = getattr(plan, name)
        for fewer in dict.fromkeys((least, now - 1)):
            if least <= fewer < now:
                yield replace(plan, **{name: fewer})
    fewest, most = plan.entries
    for fewer in ((1, 3), (1, max(1, most // 2)), (fewest, max(fewest, most // 2)), (1, most - 1)):
        if fewer[0] <= fewer[1] and fewer < plan.entries:
            yield replace(plan, entries=fewer)
    if plan.bookies > plan.quorum[0]:
        yield replace(plan, bookies=plan.bookies - 1)
    if plan.chaos_s > 1.0:
        yield replace(plan, chaos_s=round(plan.chaos_s / 2, 1))


# -- the command ----------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation shrink",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seed", type=at_least(0), help="a seed that fails; by default the mutant's stored one"
    )
    parser.add_argument(
        "--plan", default="{}", help="JSON: how its plan differs from what it draws"
    )
    parser.add_argument("--mutant", default="", help=MUTANT_HELP)
    parser.add_argument("--runs", type=at_least(1), default=RUNS_MAX, help="runs to try at most")
    options = parser.parse_args(arguments)
    if options.seed is None and not options.mutant:
        parser.error("give a --seed that fails, or a --mutant")
    try:
        mutant = replay.mutant_like(options.mutant) if options.mutant else None
        name, seed = mutant.name if mutant else "", _seed(options.seed, mutant)
        changes = mutant.plan_changes if mutant else {}
        changes = {**changes, **asked.plan_changes(options.plan, [seed], changes)}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        with quiet(), replay.mutated(name):
            plan = replay.changed_plan(seed, changes)
            shrunk = shrink(plan, broken_in(seed), options.runs)
            print(tell(seed, shrunk.plan))
    except ValueError as error:
        print(f"error: seed {seed}: {error}", file=sys.stderr)
        return 1
    print(f"\ninvariant {shrunk.invariant}, after {shrunk.runs} runs; was: {plan}")
    print(f"now: {shrunk.plan}")
    print(f"faults that happen in it: {', '.join(shrunk.faults) or 'none'}")
    print(f"again: {replay.command(seed, shrunk.plan, name)}")
    return 0


def _seed(given: int | None, mutant: "Mutant | None") -> int:
    """The one given, or one that catches the mutant. Raises ValueError."""
    if given is not None or mutant is None:
        return given or 0
    with quiet():
        found = mutant.catching_seed()
    if found is None:
        raise ValueError(f"no seed is known to catch {mutant.name!r}; give a --seed")
    return found


def broken_in(seed: int) -> Broken:
    """Runs plans of the seed."""

    def broken(plan: Plan) -> tuple[str, str] | None:
        found = replay.broken_by(seed, plan)
        return None if found is None else (found[0], found[1].trace)

    return broken
