"""`python -m tests.simulation points`: every point of every deed, or of those asked for. Exits with
1 if one failed.

    python -m tests.simulation points --deed commit                      # all points of one deed
    python -m tests.simulation points --deed commit --call 7 --fate paused   # one point again
    python -m tests.simulation points --step 50                          # every fiftieth point
    python -m tests.simulation points --mutant "w0 not noted"            # with a known bug in
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.simulation import replay
from tests.simulation.asked import MUTANT_HELP, at_least
from tests.simulation.points import (
    background,
    brokers,
    deeds,
    healing,
    healing_beside,
    ledgers,
    owners,
    take_overs,
)
from tests.simulation.points.enumerate import (
    Deed,
    Point,
    PointFailed,
    calls_of,
    points_of,
    run_point,
)
from tests.simulation.points.fates import Fate
from tests.simulation.warm import collect, freeze, quiet

DEEDS: tuple[Deed, ...] = (
    *deeds.DEEDS,
    *owners.DEEDS,
    *background.DEEDS,
    *healing.DEEDS,
    *healing_beside.DEEDS,
    *ledgers.DEEDS,
    *brokers.DEEDS,
    *take_overs.DEEDS,
)


def deed_named(name: str) -> Deed:
    """Raises ValueError."""
    found = [deed for deed in DEEDS if deed.name == name]
    if not found:
        raise ValueError(
            f"there is no deed {name!r}; there are: {', '.join(d.name for d in DEEDS)}"
        )
    return found[0]


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    begun = time.perf_counter()
    done = failed = 0
    cpu_s = 0.0
    try:
        with replay.mutated(options.mutant):
            pass
        named = [deed_named(options.deed)] if options.deed else DEEDS
        for one in _of_all([(options, deed.name) for deed in named], options.jobs):
            print("\n".join(one.told), flush=True)
            done, failed, cpu_s = done + one.points, failed + one.failed, cpu_s + one.cpu_s
            if failed and not options.keep_going:
                break
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    took_s = time.perf_counter() - begun
    print(f"{done} points: {failed} failed, {cpu_s:.0f} s of processor time in {took_s:.0f} s")
    return 1 if failed else 0


class Told(NamedTuple):
    """What became of the points of one deed."""

    told: list[str]
    points: int
    failed: int
    cpu_s: float


def _of_all(work: list[tuple[argparse.Namespace, str]], jobs: int) -> Iterator[Told]:
    """In the order of deeds."""
    if jobs == 1:
        yield from map(_of_deed, work)
        return
    with multiprocessing.Pool(jobs or os.cpu_count() or 1) as pool:
        yield from pool.imap(_of_deed, work)


def _of_deed(work: tuple[argparse.Namespace, str]) -> Told:
    options, name = work
    freeze()
    begun, done, failures = time.process_time(), 0, []
    with quiet(), replay.mutated(options.mutant):
        deed = deed_named(name)
        calls = calls_of(deed)
        for point in _points(options, deed, calls):
            done += 1
            failures += _failure(point)
            collect(done)
            if failures and not options.keep_going:
                break
    spent = time.process_time() - begun
    told = f"{name}: {len(calls)} calls, {done} points, {len(failures)} failed, {spent:.0f} s"
    return Told([*failures, told], done, len(failures), spent)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation points",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--deed", default="", help="only this one")
    parser.add_argument("--call", type=at_least(0), help="only this call of the deed")
    parser.add_argument(
        "--fate", default="", help="only this fate", choices=[f.value for f in Fate]
    )
    parser.add_argument("--step", type=at_least(1), default=1, help="every so many points")
    parser.add_argument("--jobs", type=at_least(0), default=1, help="deeds at once; 0: one a core")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure")
    parser.add_argument("--mutant", default="", help=MUTANT_HELP)
    return parser


def _points(options: argparse.Namespace, deed: Deed, calls: Sequence[str]) -> Iterator[Point]:
    number = 0
    for point in points_of(deed, calls):
        asked = options.call in (None, point.call) and options.fate in ("", point.fate.value)
        number += asked
        if asked and number % options.step == 0:
            yield point


def _failure(point: Point) -> list[str]:
    """Nothing, or what it is and how it is done again."""
    try:
        run_point(point)
    except PointFailed as failure:
        where = f"--deed {point.deed.name!r} --call {point.call} --fate {point.fate.value!r}"
        return [f"{failure}\nagain: python -m tests.simulation points {where}"]
    return []
