"""`python -m tests.simulation points`: every point of every deed, or of those asked for. Exits with
1 if one failed.

    python -m tests.simulation points --deed commit                      # all points of one deed
    python -m tests.simulation points --deed commit --call 7 --fate paused   # one point again
    python -m tests.simulation points --step 50                          # every fiftieth point
    python -m tests.simulation points --mutant "w0 not noted"            # with a known bug in
"""

import argparse
import sys
import time
from collections.abc import Iterator

from tests.simulation import replay
from tests.simulation.asked import MUTANT_HELP, at_least
from tests.simulation.points import deeds, owners
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

DEEDS: tuple[Deed, ...] = (*deeds.DEEDS, *owners.DEEDS)


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
    freeze()
    begun, done, failed = time.process_time(), 0, 0
    try:
        with quiet(), replay.mutated(options.mutant):
            for point in _points(options):
                done += 1
                failed += not _holds(point)
                collect(done)
                if failed and not options.keep_going:
                    break
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{done} points: {failed} failed, {time.process_time() - begun:.0f} s of processor time")
    return 1 if failed else 0


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
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure")
    parser.add_argument("--mutant", default="", help=MUTANT_HELP)
    return parser


def _points(options: argparse.Namespace) -> Iterator[Point]:
    number = 0
    for deed in [deed_named(options.deed)] if options.deed else DEEDS:
        calls = calls_of(deed)
        print(f"{deed.name}: {len(calls)} calls", flush=True)
        for point in points_of(deed, calls):
            asked = options.call in (None, point.call) and options.fate in ("", point.fate.value)
            number += asked
            if asked and number % options.step == 0:
                yield point


def _holds(point: Point) -> bool:
    try:
        run_point(point)
    except PointFailed as failure:
        where = f"--deed {point.deed.name!r} --call {point.call} --fate {point.fate.value!r}"
        print(f"{failure}\nagain: python -m tests.simulation points {where}", flush=True)
        return False
    return True
