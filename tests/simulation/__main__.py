"""`python -m tests.simulation --seeds N --start S`: run seeds, print their speed or a failure."""

import argparse
import sys
import time

from tests.simulation.scenario import SeedFailed, run_seed
from tests.simulation.warm import collect, freeze, quiet


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure")
    parser.add_argument("--lines", type=int, default=400, help="lines of a failing seed's trace")
    parser.add_argument("--digests", action="store_true", help="print each seed's trace hash")
    parser.add_argument("--met", action="store_true", help="print the situations met, and checks")
    options = parser.parse_args(arguments)
    with quiet():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    freeze()
    begun, failed, simulated_s = time.perf_counter(), 0, 0.0
    met: dict[str, int] = {}
    for done, seed in enumerate(range(options.start, options.start + options.seeds), 1):
        try:
            outcome = run_seed(seed)
        except SeedFailed as failure:
            failed += 1
            _show(failure, options.lines)
            if not options.keep_going:
                return 1
            continue
        finally:
            collect(done)
        simulated_s += outcome.simulated_s
        if options.digests:
            print(f"{seed} {outcome.digest}", flush=True)
        for name, times in [*outcome.met.items(), *_checks(outcome.checks)]:
            met[name] = met.get(name, 0) + times
    took = time.perf_counter() - begun
    if options.met:
        print("\n".join(f"{met[name]:8} {name}" for name in sorted(met)))
    print(
        f"{options.seeds} seeds from {options.start}: {failed} failed,"
        f" {options.seeds / took:.1f} seeds/s, {simulated_s / took:.0f} simulated seconds a second"
    )
    return 1 if failed else 0


def _checks(checks: dict[str, int]) -> list[tuple[str, int]]:
    return [(f"invariant {name}", times) for name, times in checks.items()]


def _show(failure: SeedFailed, lines: int) -> None:
    print("\n".join(failure.trace.split("\n")[-lines:]))
    print(failure)
    print(f"again: python -m tests.simulation --seeds 1 --start {failure.seed}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
