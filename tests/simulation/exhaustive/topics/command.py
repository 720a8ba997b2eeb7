"""`python -m tests.simulation.exhaustive commits cleaning live runs`: the topic layer's scopes.

Exit status as of the ledgers' scopes: 1 if an invariant was broken, 3 if time was over first.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from tests.simulation.exhaustive.topics import cleaning, live, runs, scopes
from tests.simulation.exhaustive.topics.mutants import RULES, rule_like
from tests.simulation.exhaustive.topics.scope import Scope
from tests.simulation.exhaustive.topics.search import Found, Search
from tests.simulation.exhaustive.topics.worlds import APPLIED, Operation
from tests.simulation.warm import quiet

BROKEN, INCOMPLETE = 1, 3
A, B, BOTH = (0,), (1,), (0, 1)
Made = Callable[[], Scope]
OTHER_TOPICS = ((A, BOTH), (B, BOTH))
"""By run, by version: to which topics the rows go."""

FULL: dict[str, tuple[Made, ...]] = {
    "commits": (
        lambda: scopes.commits((2, 2), (2,), read=True, faults=0),
        lambda: scopes.commits((2, 2), (2,), read=False, faults=1),
        lambda: scopes.commits((2,), (1, 1), read=False, faults=1, begun=True),
    ),
    "cleaning": (
        lambda: cleaning.cleaning((False, True, False), (False, True, False), faults=1),
        lambda: cleaning.cleaning((False, True, True, False), (False,) * 3, faults=0),
    ),
    "live": (lambda: live.live(3, 1, faults=1),),
    "runs": (
        lambda: runs.runs(OTHER_TOPICS, read=False, faults=1),
        lambda: runs.runs(OTHER_TOPICS, read=True, faults=0),
    ),
}
"""By name what is explored completely."""

SMALL: dict[str, Made] = {
    "commits": lambda: scopes.commits((2, 1), (1,), read=False, faults=0),
    "cleaning": lambda: cleaning.cleaning((False, True), (False, True), faults=0),
    "live": lambda: live.live(1, 1, faults=0),
    "runs": lambda: runs.runs(OTHER_TOPICS, read=False, faults=0),
}
"""Smaller ones, of seconds."""

MUTANTS: dict[str, Made] = {
    "1": lambda: scopes.commits((2, 1), (2,), read=False, faults=0),
    "2": lambda: scopes.commits((1, 1), (2,), read=False, faults=1),
    "4": lambda: cleaning.cleaning((False,), (True, True), faults=0),
    "6": lambda: scopes.commits((2,), (1, 1), read=False, faults=0, begun=True),
    "7": lambda: scopes.commits((2,), (2,), read=True, faults=0, begun=True),
    "10": lambda: runs.runs(OTHER_TOPICS, read=False, faults=0),
    "11": lambda: runs.runs((((0,), (0,)), ((0,),)), read=False, faults=0),
    "14": lambda: runs.runs((((0, 1),),), read=True, faults=0),
    "28": lambda: live.live(1, 1, faults=1),
    "29": lambda: live.live(1, 1, faults=0),
}
"""By hazard the least scope that finds what its rule keeps out."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.exhaustive")
    parser.add_argument("scopes", nargs="+", choices=tuple(FULL), metavar="scope")
    parser.add_argument("--minutes", type=float, default=30.0, help="for all together")
    parser.add_argument("--small", action="store_true", help="only what `make test` explores")
    rules = "; ".join(f"{rule.name} (hazard {rule.hazard})" for rule in RULES)
    parser.add_argument("--mutant", default="", help=f"a rule to take out: {rules}")
    options = parser.parse_args(arguments)
    try:
        rule = rule_like(options.mutant) if options.mutant else None
    except ValueError as error:
        print(f"error: --mutant: {error}", file=sys.stderr)
        return 2
    deadline = time.monotonic() + options.minutes * 60
    broken, complete = False, True
    with quiet(), rule.applied() if rule else nullcontext():
        for name in options.scopes:
            for made in (SMALL[name],) if options.small else FULL[name]:
                scope = made()
                found = Search(scope).explore(seconds=deadline - time.monotonic())
                print("\n".join([*lines(scope, found), ""]), flush=True)
                broken = broken or bool(found.violation)
                complete = complete and found.complete
    return BROKEN if broken else 0 if complete else INCOMPLETE


def lines(scope: Scope, found: Found) -> list[str]:
    """What is printed of an exploration."""
    learnt = ", ".join(f"{name} {number:,}" for name, number in found.histories.items())
    told = ", ".join(f"{what} ({times:,})" for what, times in sorted(found.told.items()))
    judged = ", ".join(f"{name} ({times:,})" for name, times in sorted(found.judged.items()))
    text = [
        f"{scope.name}: {scope.told}",
        f"  local histories: {learnt}; production code begun {found.code_runs:,} times",
        f"  {found.states:,} states, {found.steps:,} steps, {found.worlds:,} different stores,"
        f" longest run {found.longest} steps, {found.ends:,} final states; {found.seconds:.1f} s",
        f"  invariants judged: {judged}",
        f"  told, in so many stores: {told}",
    ]
    if found.violation:
        story = (f"    {at + 1:3} {_told(*step)}" for at, step in enumerate(found.story))
        return [*text, f"  VIOLATION: {found.violation}", *story]
    return [*text, "  complete" if found.complete else "  NOT complete: time was over before"]


def _told(who: str, operation: Operation, fate: str) -> str:
    kind, *rest = operation
    if kind == "multi":
        what = ", ".join(f"{type(one).__name__.lower()} {one.path}" for one in rest[0])
    else:
        what = " ".join(str(one) for one in rest[:1])
    return f"{who}: {kind} {what}" + ("" if fate == APPLIED else f" [{fate}]")
