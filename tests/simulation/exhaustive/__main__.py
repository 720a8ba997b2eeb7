"""`python -m tests.simulation.exhaustive [A] [A2] [B] [C]`: explore scopes, print what was met.

Exit status 1 if an invariant was broken; then the shortest story that breaks it is printed.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from tests.simulation.exhaustive.exploring import SCOPES, Limits, Report, explore_all
from tests.simulation.exhaustive.story import told
from tests.simulation.mutants import MUTANTS
from tests.simulation.warm import quiet


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.exhaustive", description=__doc__
    )
    parser.add_argument("scopes", nargs="*", default=["A", "B"], metavar="scope", help=_listed())
    parser.add_argument("--minutes", type=float, default=30.0, help="when to stop exploring")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--count", action="store_true", help="count runs and traces (slow)")
    parser.add_argument("--mutant", help="with this bug put in: its number (2614, D1) or name")
    parser.add_argument("--only", default="", help="the one invariant to look for, by its number")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.scopes if name not in SCOPES]
    if unknown:
        parser.error(f"no scope {unknown[0]!r}; there are {', '.join(SCOPES)}")
    scopes = [scope for name in options.scopes for scope in SCOPES[name]]
    deadline = time.monotonic() + options.minutes * 60
    limits = Limits(deadline=deadline, only=options.only, count=options.count)
    broken = False
    with quiet(), mutated(options.mutant):
        for report in explore_all(scopes, limits, options.jobs):
            print("\n".join([*lines(report), ""]), flush=True)
            broken = broken or bool(report.found.violation)
    return 1 if broken else 0


def mutated(which: str | None) -> AbstractContextManager[None]:
    """The mutant of this number or name put into the production code; nothing without one."""
    if which is None:
        return nullcontext()
    for mutant in MUTANTS:
        if which == mutant.name or mutant.report in (which, f"BK#{which}"):
            return mutant.applied()
    raise SystemExit(f"there is no mutant {which!r}")


def lines(report: Report) -> list[str]:
    found = report.found
    crashing = f", it is {report.crashing}" if report.crashing else ""
    learnt = ", ".join(
        f"{name} {number:,} ({report.kinds[name]:,} kinds)"
        for name, number in report.histories.items()
    )
    speed = found.steps / max(found.seconds, 1e-9)
    text = [
        f"{report.scope}{crashing}",
        f"  local histories: {learnt}",
        f"  production code run {report.code_runs:,} times, {report.learning_s:.1f} s",
        f"  {found.states:,} states, {found.steps:,} steps, {report.ghosts:,} ghosts,"
        f" longest run {found.longest} events; {found.seconds:.1f} s, {speed:,.0f} steps/s",
    ]
    if found.audits:
        text.append(f"  if both clients die there: recovered in {found.audits:,} different states")
    if found.runs:
        text.append(f"  they stand for {found.runs:,} runs of {found.traces:,} traces")
    judged = ", ".join(f"{name} ({times:,})" for name, times in sorted(report.judged.items()))
    text.append(f"  invariants judged: {judged}")
    if found.violation:
        return [*text, f"  VIOLATION: {found.violation}", *told(found.story)]
    text += [
        f"  final: {_outcome(outcome)}: {times:,} states" for outcome, times in _sorted(found.ends)
    ]
    if found.complete:
        return [*text, "  complete"]
    return [
        *text,
        f"  NOT complete: everything of up to {found.depth_done} events was followed;"
        f" {found.open:,} states met were not",
    ]


def _sorted(ends: Mapping[object, int]) -> list[tuple[object, int]]:
    return sorted(ends.items(), key=lambda end: str(end[0]))


def _outcome(outcome: object) -> str:
    if not isinstance(outcome, tuple):
        return str(outcome)
    return "; ".join(f"{who} {what}" for who, what in outcome)


def _listed() -> str:
    return "; ".join(str(scope) for scopes in SCOPES.values() for scope in scopes)


if __name__ == "__main__":
    sys.exit(main())
