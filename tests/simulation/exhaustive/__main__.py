"""`python -m tests.simulation.exhaustive [A] [A2] [B] [B1] [C]`: explore scopes, tell what was met.

    python -m tests.simulation.exhaustive [commits] [cleaning] [live] [runs]     the topic layer's

Exit status 1 if an invariant was broken; then the shortest story that breaks it is printed. 3 if
none was, but time was over before everything was met (NOT complete). 2 if what is asked cannot be
done.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext

from tests.simulation.asked import MUTANT_HELP, at_least
from tests.simulation.exhaustive.exploring import SCOPES, Limits, Report, explore_all
from tests.simulation.exhaustive.judge import JUDGED
from tests.simulation.exhaustive.stage import Scope, Stage
from tests.simulation.exhaustive.story import Line, alike, told
from tests.simulation.exhaustive.topics import command as topics
from tests.simulation.naming import named
from tests.simulation.replay import mutant_like
from tests.simulation.warm import quiet

BROKEN, INCOMPLETE = 1, 3
Story = tuple[str | None, Scope, list[Line]]
"""Who crashes in it, and where."""


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if any(word in topics.FULL for word in arguments):
        return topics.main(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.exhaustive",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scopes", nargs="*", default=["A", "B"], metavar="scope", help=_listed())
    parser.add_argument("--minutes", type=_minutes, default=30.0, help="for all, learning too")
    parser.add_argument("--jobs", type=at_least(1), default=2, help="processes")
    parser.add_argument("--count", action="store_true", help="count runs and traces (slow)")
    parser.add_argument("--mutant", default="", help=MUTANT_HELP)
    parser.add_argument(
        "--only",
        default="",
        choices=("", *JUDGED),
        metavar="INVARIANT",
        help=f"the one invariant to look for, of {' '.join(JUDGED)}",
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.scopes if name not in SCOPES]
    if unknown:
        parser.error(f"no scope {unknown[0]!r}; there are {', '.join(SCOPES)}")
    try:
        mutant = options.mutant and mutant_like(options.mutant)
    except ValueError as error:
        print(f"error: --mutant: {error}", file=sys.stderr)
        return 2
    every = [scope for name in options.scopes for scope in SCOPES[name]]
    scopes = list(dict.fromkeys(every))
    deadline = time.monotonic() + options.minutes * 60
    limits = Limits(deadline=deadline, only=options.only, count=options.count)
    broken, complete, stories = False, True, list[Story]()
    with quiet(), mutant.applied() if mutant else nullcontext():
        for report in explore_all(scopes, limits, options.jobs):
            print("\n".join([*lines(report, stories), ""]), flush=True)
            broken = broken or bool(report.found.violation)
            complete = complete and report.found.complete
    return BROKEN if broken else 0 if complete else INCOMPLETE


def _minutes(text: str) -> float:
    minutes = float(text)
    if not minutes >= 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return minutes


_minutes.__name__ = "number"


def lines(report: Report, stories: list[Story]) -> list[str]:
    """What is printed of it. `stories`: those told so far; one that differs from one of them by the
    names of bookies alone is not told again, another is added."""
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
    if report.unlearnt:
        return [
            *text[:3],
            "  NOT complete: time was over before the actors were learnt; nothing was explored",
        ]
    judged = ", ".join(f"{name} ({times:,})" for name, times in sorted(report.judged.items()))
    text.append(f"  invariants judged: {judged}")
    if found.violation:
        return [*text, f"  VIOLATION: {named(found.violation)}", *_story(report, stories)]
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


def _story(report: Report, stories: list[Story]) -> list[str]:
    story = told(report.found.story, Stage(report.scope))
    for crashing, scope, other in stories:
        names = alike(other, story, scope.addresses) if scope == report.scope else {}
        if names:
            told_of = f" of {crashing.removesuffix(':1')}" if crashing else ""
            with_ = (f"{now} for {was}".replace(":1", "") for was, now in names.items())
            return [f"  the story is the one{told_of} above, with {', '.join(with_)}"]
    stories.append((report.crashing, report.scope, story))
    return [str(line) for line in story]


def _sorted(ends: Mapping[object, int]) -> list[tuple[object, int]]:
    return sorted(ends.items(), key=lambda end: str(end[0]))


def _outcome(outcome: object) -> str:
    if not isinstance(outcome, tuple):
        return str(outcome)
    return "; ".join(f"{who} {what}" for who, what in outcome)


def _listed() -> str:
    """Each name, and what it explores; B is B1 too."""
    told = []
    for name, (first, *others) in SCOPES.items():
        also = f" (and {', '.join(scope.name for scope in others)})" if others else ""
        told.append(f"{name}{also}{str(first).removeprefix(first.name)}")
    return "; ".join(told)


if __name__ == "__main__":
    sys.exit(main())
