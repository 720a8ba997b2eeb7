"""Whether bugs of upkeep, take-over and healing are reached: at points of verbs, at points of a
bookie's disks, or by seeds; and after how much processor time.

Always true: a bug is looked for at the deeds named with it, and where these do not show it by seeds
from 0 on, for LIMIT_S of processor time each; what was found is stored by the name of the point or
the seed (reach.json).

    python -m tests.simulation.mutants.reach          # all that are not stored
    python -m tests.simulation.mutants.reach cursor   # of those, whose name has the word
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.simulation.invariants import Violation
from tests.simulation.mutants import brokers, healing, reach_bookies, reach_merging, reach_topics
from tests.simulation.mutants.mutant import DEFECTS, Mutant, MutantBroken
from tests.simulation.points.command import DEEDS as VERBS
from tests.simulation.points.enumerate import (
    Deed,
    Point,
    PointFailed,
    calls_of,
    points_of,
    run_point,
)
from tests.simulation.points.fates import Fate
from tests.simulation.warm import collect, quiet
from tests.storage.deeds import DEEDS as OF_DISKS
from tests.storage.pauses import PAUSED, enumerate_pauses
from tests.storage.points import PERSISTENCES, enumerate_points
from tests.storage.points import PointFailed as DiskPointFailed

FILE = Path(__file__).with_name("reach.json")
REACHED = (
    *reach_topics.REACHED,
    *reach_merging.REACHED,
    *reach_bookies.REACHED,
    *healing.REACHED,
    *brokers.REACHED,
)
EQUIVALENT = {
    "w0 of before": "a run that noted an older w0 is refused more, never less: the next run notes"
    " the newest",
    "block under any intent": "the block is under the intent's node, so a janitor finds its ledgers"
    " as long as the node is there, and nothing under an ended intent is committed",
    "older run goes on": "the older run finds the pointer moved at its next batch; of the one under"
    " way the transaction record takes either its commit or the newer run's",
    "bodies unchecked": "a process that may delete the body's ledger first ends the intent, which"
    " the multi checks, or waits for a later version of the same run",
    "growth to less": "applied, it changes nothing",
    "log trimmed before it is recorded": "only commits below the previous checkpoint go, which no"
    " process folds, and a trim that finds some of them gone goes on",
    "take-over in the same epoch": "each claim has a random token of its own, compared"
    " together with the epoch, and the record is written at its version",
    "record confirmed by a lost answer": "the write below resolves a lost answer itself, and what"
    " it cannot resolve is no error that the bug swallows",
}
"""Bugs that break no promise, with why: by reading the code, not by search. They do not count."""
LIMIT_S = 60.0
SEEDS_MAX = 2000
NEAR = 30
"""So many calls before and after the stored one are looked at: a verb that gains or loses a call
moves all that come after it."""


@dataclass(frozen=True)
class Found:
    """What broke, and where: a deed with a call and a fate, a deed of a bookie, or a seed."""

    broken: str
    tried: int
    """So many points or seeds."""
    cpu_s: float
    deed: str = ""
    call: int = -1
    fate: str = ""
    seed: int = -1

    def again(self, mutant: Mutant) -> str | None:
        """What breaks there now, if anything does."""
        if self.seed >= 0:
            return mutant.caught(self.seed)
        verb = next((deed for deed in VERBS if deed.name == self.deed), None)
        if verb is None:
            return _at_disks(mutant, self.deed)
        return _at(mutant, Point(verb, self.call, Fate(self.fate)))

    def near(self, mutant: Mutant) -> str | None:
        """What breaks there now or, at a call, at the nearest call of the deed where it does."""
        calls = [self.call]
        if self.call >= 0:
            distances = [distance for away in range(1, NEAR + 1) for distance in (-away, away)]
            calls += [call for away in distances if (call := self.call + away) >= 0]
        broken = (replace(self, call=call).again(mutant) for call in calls)
        return next((what for what in broken if what), None)


def stored() -> dict[str, Found]:
    """By mutant."""
    found = json.loads(FILE.read_text())
    return {name: Found(**one) for name, one in found.items()}


def store(found: dict[str, Found]) -> None:
    lines = [f"  {json.dumps(name)}: {json.dumps(asdict(one))}" for name, one in found.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def search(mutant: Mutant, deeds: tuple[str, ...]) -> Found | None:
    """At the points of its deeds, then by seeds. Raises MutantBroken."""
    return first(mutant, points(mutant, deeds)) or first(mutant, _seeds())


def first(mutant: Mutant, places: Iterator[Found], limit_s: float = LIMIT_S) -> Found | None:
    """The first of the places where it is caught. Raises MutantBroken."""
    begun = time.process_time()
    for tried, where in enumerate(places, 1):
        collect(tried)
        broken = where.again(mutant)
        spent = time.process_time() - begun
        if broken and (where.seed < 0 or mutant.clean(where.seed)):
            return replace(where, broken=broken, tried=tried, cpu_s=round(spent, 1))
        if spent > limit_s:
            break
    return None


def points(mutant: Mutant, deeds: tuple[str, ...]) -> Iterator[Found]:
    """Points of the deeds, of all in turn."""
    for name in [each.name for each in OF_DISKS if each.name in deeds]:
        yield Found("", 0, 0, name)
    points = [
        (place / len(found), point)
        for deed in VERBS
        if deed.name in deeds
        for found in [points_of(deed, _calls(mutant, deed))]
        for place, point in enumerate(_spread(found))
    ]
    for _, point in sorted(points, key=lambda one: one[0]):
        yield Found("", 0, 0, point.deed.name, point.call, point.fate.value)


def _calls(mutant: Mutant, deed: Deed) -> list[str]:
    """As they are with the bug, if nothing breaks while nothing happens."""
    try:
        with mutant.applied():
            return calls_of(deed)
    except Exception:
        return calls_of(deed)


def _seeds() -> Iterator[Found]:
    """Runs with the plan that leads there, which the mutant names."""
    for seed in range(SEEDS_MAX):
        yield Found("", 0, 0, seed=seed)


def _spread(points: list[Point]) -> list[Point]:
    """All of them: of fates that few calls meet first, and every seventh of a fate first."""
    by_fate = [[point for point in points if point.fate is fate] for fate in Fate]
    found: list[Point] = []
    for some in sorted(by_fate, key=len):
        found += [point for first in range(7) for point in some[first::7]]
    return found


def _at(mutant: Mutant, point: Point) -> str | None:
    with mutant.applied():
        try:
            run_point(point)
        except PointFailed as failure:
            cause = failure.cause
            if isinstance(cause, Violation) and cause.name not in DEFECTS:
                return cause.name
    return None


def _at_disks(mutant: Mutant, name: str) -> str | None:
    """A promise of the bookie that was broken, or another test's sentence; an assertion of
    production's own says nothing."""
    deed = next(deed for deed in OF_DISKS if deed.name == name)
    with mutant.applied():
        try:
            enumerate_points(deed, PERSISTENCES[::2])
            if deed in PAUSED:
                enumerate_pauses(deed)
        except AssertionError as failure:
            cause = failure.__cause__ if isinstance(failure, DiskPointFailed) else failure
            return f"{cause}"[:60] if isinstance(cause, AssertionError) and f"{cause}" else None
    return None


def refresh(part: str = "") -> None:
    """Look for those whose name contains `part`, and store what was found."""
    known: dict[str, Found] = {}
    with suppress(FileNotFoundError):
        known = stored()
    for mutant, deeds in REACHED:
        if part not in mutant.name or mutant.name in known or mutant.name in EQUIVALENT:
            continue
        try:
            found = search(mutant, deeds)
        except MutantBroken as broken:
            print(f"{mutant.name:42} BROKEN {broken}", flush=True)
            continue
        known.pop(mutant.name, None)
        if found is None:
            print(f"{mutant.name:42} survives", flush=True)
        else:
            known[mutant.name] = found
            print(f"{mutant.name:42} {found}", flush=True)
        store({one.name: known[one.name] for one, _ in REACHED if one.name in known})


if __name__ == "__main__":
    with quiet():
        refresh(*sys.argv[1:2])
