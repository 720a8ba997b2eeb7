"""How fast the simulation is, what its seeds are, and where the time goes.

    python benchmarks/simulation.py                 200 seeds, one process
    python benchmarks/simulation.py --seeds 1000 --start 50000

Seeds a second are by processor time, so they are those of one core whatever else runs; but cores
that share their caches and units with others are slower. Where the time goes is sampled: each
sample counts for the innermost function of this repository, with what it calls elsewhere.
"""

import argparse
import itertools
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import FrameType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.simulation import replay  # noqa: E402
from tests.simulation.scenario import Outcome, SeedFailed, run_seed  # noqa: E402
from tests.simulation.warm import collect, freeze, quiet  # noqa: E402

SAMPLE_S = 0.001
PARTS = {
    "tests/simulation/loop.py": "event loop",
    "tests/simulation/network.py": "network, store and disks",
    "tests/simulation/store.py": "network, store and disks",
    "tests/simulation/store_tree.py": "network, store and disks",
    "tests/simulation/disk.py": "network, store and disks",
    "tests/simulation/index.py": "network, store and disks",
    "tests/simulation/invariants/": "observers and invariants",
    "tests/simulation/observers.py": "observers and invariants",
    "tests/simulation/watching.py": "observers and invariants",
    "tests/simulation/sometimes.py": "observers and invariants",
    "tests/simulation/ghost.py": "observers and invariants",
    "tests/simulation/trace.py": "observers and invariants",
    "tests/simulation/warm.py": "garbage collection",
    "tests/simulation/": "actors, faults and audit",
    "bookie_server/api/": "messages: encode and decode",
    "bookie_server/": "bookies",
    "spark_ledger/ledger/": "ledger clients",
    "spark_ledger/bookies/": "ledger clients",
    "spark_ledger/metadata/": "ledger clients",
    "spark_ledger/topic/": "topics",
}
"""By the beginning of a file's path; the first that fits."""


class Timed(NamedTuple):
    """One clean seed and what it cost."""

    outcome: Outcome
    took_s: float
    """Processor seconds."""


class Samples:
    """Where the processor was, part by part."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Sample what runs inside."""
        before = signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)

    def _sample(self, number: int, frame: FrameType | None) -> None:
        root = f"{ROOT}/"
        while frame is not None and not frame.f_code.co_filename.startswith(root):
            frame = frame.f_back
        part = "elsewhere" if frame is None else _part(frame.f_code.co_filename[len(root) :])
        self.counts[part] = self.counts.get(part, 0) + 1


def _part(path: str) -> str:
    return next((part for start, part in PARTS.items() if path.startswith(start)), "elsewhere")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--start", type=int, default=0)
    options = parser.parse_args()
    with quiet():
        seeds = range(options.start, options.start + options.seeds)
        seed = next(seed for seed in itertools.count() if replay.drawn_plan(seed).topics)
        run_seed(seed, replay.drawn_plan(seed))  # imports (pandas, for topics) and caches
        freeze()
        clean, failed = timed(seeds)
        samples = Samples()
        with samples.taken():
            timed(seeds[: max(1, len(seeds) // 2)])
    print(f"{options.seeds} seeds from {options.start}, failed: {failed or 'none'}")
    report("without topics", [each for each in clean if not each.outcome.plan.topics])
    report("with topics", [each for each in clean if each.outcome.plan.topics])
    total = max(1, sum(samples.counts.values()))
    for part, count in sorted(samples.counts.items(), key=lambda each: -each[1]):
        print(f"  {count / total:6.1%}  {part}")
    return 1 if failed else 0


def timed(seeds: range) -> tuple[list[Timed], list[int]]:
    """The clean seeds with the processor seconds of each, and those that failed."""
    clean, failed = [], []
    for done, seed in enumerate(seeds, 1):
        begun = time.process_time()
        try:
            outcome = run_seed(seed, replay.drawn_plan(seed))
            collect(done)
            clean.append(Timed(outcome, time.process_time() - begun))
        except SeedFailed:
            failed.append(seed)
    return clean, failed


def report(what: str, clean: list[Timed]) -> None:
    """Print what these seeds cost, and what was in them."""
    if not clean:
        return
    outcomes, took_s = [each.outcome for each in clean], sum(each.took_s for each in clean)
    steps = sum(outcome.steps for outcome in outcomes)
    simulated_s = sum(outcome.simulated_s for outcome in outcomes)
    judged = sum(sum(outcome.checks.values()) for outcome in outcomes)
    print(
        f"{what}: {len(clean)} seeds, {len(clean) / took_s:.2f} seeds/s on one core,"
        f" {simulated_s / took_s:.0f} simulated seconds a second, {steps / took_s:.0f} steps/s"
    )
    print(
        f"  a seed (median): {median(o.entries for o in outcomes):g} entries appended,"
        f" {median(o.faults for o in outcomes):g} faults,"
        f" {median(o.simulated_s for o in outcomes):.0f} simulated seconds;"
        f" (mean) {steps / len(clean):.0f} steps, {judged / len(clean):.0f} judgements"
    )


if __name__ == "__main__":
    sys.exit(main())
