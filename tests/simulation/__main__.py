"""`python -m tests.simulation --seeds N --start S --jobs J`: run seeds; print what they add up to,
or the first that failed with its story, and exit with 1; 2 if what is asked cannot be run.

    python -m tests.simulation mutants ...     whether known bugs are caught
    python -m tests.simulation shrink ...      a failing seed made small, and its story
    python -m tests.simulation points ...      a fate at each call that verbs of topics make
"""

import argparse
import os
import sys
import time

from tests.simulation import asked, parallel, replay
from tests.simulation.asked import MUTANT_HELP, at_least
from tests.simulation.parallel import Chunk, Failure, Tally, WorkerDied

TAME = 10_000
"""So many seeds must meet every situation of sometimes.py."""
PROGRESS_S = 30.0


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["mutants"]:
        from tests.simulation.mutants.command import main as mutants

        return mutants(arguments[1:])
    if arguments[:1] == ["shrink"]:
        from tests.simulation.shrink import main as shrink

        return shrink(arguments[1:])
    if arguments[:1] == ["points"]:
        from tests.simulation.points.command import main as points

        return points(arguments[1:])
    options = _parser().parse_args(arguments)
    try:
        mutant = options.mutant and replay.mutant_like(options.mutant)
    except ValueError as error:
        return _refused("--mutant", error)
    seeds = range(options.start, options.start + options.seeds)
    try:
        options.plan = asked.with_reseeds(options.plan, options.reseed)
        asked.plan_changes(options.plan, seeds, mutant.plan_changes if mutant else {})
    except ValueError as error:
        return _refused("--plan", error)
    options.mutant = mutant.name if mutant else ""
    return _run(options)


def _refused(option: str, error: ValueError) -> int:
    print(f"error: {option}: {error}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=at_least(1), default=200, help="how many seeds to run")
    parser.add_argument("--start", type=at_least(0), default=0, help="the first seed")
    parser.add_argument(
        "--jobs", type=at_least(0), default=1, help="processes; 0 is one for each core"
    )
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure")
    parser.add_argument("--plan", default="{}", help="JSON: what the seeds' plans have instead")
    parser.add_argument(
        "--forks",
        type=at_least(0),
        default=0,
        help="how often a run is forked at each rare situation that it meets",
    )
    parser.add_argument(
        "--reseed",
        action="append",
        default=[],
        metavar="SITUATION:NUMBER",
        help="go on otherwise where that situation is first met, as a continuation did",
    )
    parser.add_argument("--mutant", default="", help=MUTANT_HELP)
    parser.add_argument("--digests", action="store_true", help="print each seed's trace hash")
    parser.add_argument("--met", action="store_true", help="print the situations met, and checks")
    return parser


def _run(options: argparse.Namespace) -> int:
    jobs = min(options.jobs or os.cpu_count() or 1, options.seeds)
    whole = (options.start, options.seeds, options.keep_going, options.plan, options.mutant)
    work = parallel.chunks(Chunk(*whole, forks=options.forks), jobs)
    begun, total = time.perf_counter(), Tally()
    told_at = begun
    try:
        for tally in parallel.run_all(work, jobs):
            for seed, digest in tally.digests if options.digests else ():
                print(f"{seed} {digest}", flush=True)
            for failure in tally.failures:
                _show(failure)
            total.add(tally)
            if time.perf_counter() > told_at + PROGRESS_S:
                told_at = time.perf_counter()
                rate = total.seeds / (told_at - begun)
                print(f"{total.seeds} of {options.seeds}, {rate:.1f}/s", file=sys.stderr)
    except WorkerDied as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    took_s = time.perf_counter() - begun
    if options.met:
        _show_met(total)
    print("\n".join(total.told(took_s, jobs)))
    tame = _too_tame(total)
    for situation in tame:
        print(f"too tame: never met {situation}")
    return 1 if total.failures or tame else 0


def _too_tame(total: Tally) -> list[str]:
    """The situations that so many seeds should have met, and did not."""
    if total.seeds < TAME:
        return []
    from tests.simulation.chaos import FAULTS
    from tests.simulation.sometimes import missed

    return missed(total.met, FAULTS)


def _show(failure: Failure) -> None:
    print(failure.story)
    print(f"\n{failure.told}")
    print(f"again: {failure.again}")
    small = failure.again.replace(" --seeds 1 --start ", " shrink --seed ", 1)
    print(f"made small: {small}", flush=True)


def _show_met(total: Tally) -> None:
    counts = dict(total.met)
    counts.update({f"invariant {name}": times for name, times in total.checks.items()})
    print("\n".join(f"{counts[name]:8} {name}" for name in sorted(counts)))


if __name__ == "__main__":
    sys.exit(main())
