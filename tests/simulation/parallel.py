"""Many seeds over many processes, and what they add up to.

Always true: the sum does not depend on how many processes there were, nor does the failure that is
told: it is the lowest failing seed. A process that dies is an error that names the seeds it had.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from statistics import median

from tests.simulation import replay
from tests.simulation.forking import run_forked
from tests.simulation.plan import Plan
from tests.simulation.scenario import Outcome
from tests.simulation.story import tell
from tests.simulation.warm import collect, freeze, quiet

CHUNK = 25
"""Seeds that one process is given at a time."""


class WorkerDied(Exception):
    """A process ended without an answer: killed, out of memory, or crashed in foreign code."""


@dataclass(frozen=True)
class Failure:
    """A seed that failed, in words."""

    seed: int
    told: str
    story: str
    again: str
    """The command line that runs it again."""


@dataclass
class Tally:
    """What some seeds add up to."""

    seeds: int = 0
    continued: int = 0
    """How many continuations of them were run, each from a rare situation on."""
    failures: list[Failure] = field(default_factory=list)
    digests: list[tuple[int, str]] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    """By seed: how many entries were appended."""
    faults: list[int] = field(default_factory=list)
    """By seed: how many faults were injected."""
    steps: int = 0
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    """Processor seconds of the runs."""
    met: dict[str, int] = field(default_factory=dict)
    checks: dict[str, int] = field(default_factory=dict)

    def take(self, outcome: Outcome) -> None:
        """Add a clean run."""
        self.digests.append((outcome.seed, outcome.digest))
        self.entries.append(outcome.entries)
        self.faults.append(outcome.faults)
        self.steps += outcome.steps
        self.simulated_s += outcome.simulated_s
        _add(self.met, outcome.met)
        _add(self.checks, outcome.checks)

    def add(self, other: "Tally") -> None:
        """Add what another process ran."""
        self.seeds += other.seeds
        self.continued += other.continued
        self.steps += other.steps
        self.simulated_s += other.simulated_s
        self.cpu_s += other.cpu_s
        for mine, theirs in (
            (self.failures, other.failures),
            (self.digests, other.digests),
            (self.entries, other.entries),
            (self.faults, other.faults),
        ):
            mine.extend(theirs)  # type: ignore[attr-defined]
        _add(self.met, other.met)
        _add(self.checks, other.checks)

    @property
    def judged(self) -> int:
        """How often an invariant was judged."""
        return sum(self.checks.values())

    def told(self, took_s: float, jobs: int) -> list[str]:
        """The sum in lines; `took_s` is by the wall."""
        processes = "process" if jobs == 1 else "processes"
        simulated_h, a_core = self.simulated_s / 3600, self.seeds / max(self.cpu_s, 1e-9)
        head = (
            f"{self.seeds} seeds: {len(self.failures)} failed,"
            f" {self.seeds / took_s:.1f} seeds/s over {jobs} {processes}, {a_core:.1f} a core"
        )
        if self.continued:
            head += f", {self.continued} continuations"
        clean = len(self.entries)
        if not clean:
            return [head]  # of a run that failed nothing is counted
        return [
            head + (f"; of the {clean} that did not:" if self.failures else ""),
            f"  {simulated_h:.2f} simulated hours"
            f" ({self.simulated_s / max(self.cpu_s, 1e-9):.0f} simulated seconds a second a core),"
            f" {self.steps} steps",
            f"  {sum(self.entries)} entries appended (median {_median(self.entries)} a seed),"
            f" {sum(self.faults)} faults (median {_median(self.faults)}),"
            f" {self.judged} judgements of {len(self.checks)} invariants",
        ]


def _median(numbers: list[int]) -> str:
    return f"{median(numbers):g}" if numbers else "none"


def _add(mine: dict[str, int], theirs: dict[str, int]) -> None:
    for name, times in theirs.items():
        mine[name] = mine.get(name, 0) + times


@dataclass(frozen=True)
class Chunk:
    """Consecutive seeds for one process."""

    first: int
    seeds: int
    keep_going: bool = False
    """Go on after a failure."""
    plan: str = "{}"
    """JSON: what the seeds' plans have instead of what they draw."""
    mutant: str = ""
    """A known bug to put in."""
    forks: int = 0
    """How often a run is continued from each rare situation that it meets (forking.py)."""


def run_chunk(chunk: Chunk) -> Tally:
    """Run the chunk here; it ends at its first failure unless it is to go on."""
    tally, begun = Tally(), time.process_time()
    with quiet(), replay.mutated(chunk.mutant) as changes:
        changes = {**changes, **replay.parsed(chunk.plan)}
        for done, seed in enumerate(range(chunk.first, chunk.first + chunk.seeds), 1):
            tally.seeds += 1
            for plan, told in _run(chunk, tally, seed, replay.changed_plan(seed, changes)):
                again = replay.command(seed, plan, chunk.mutant)
                tally.failures.append(Failure(seed, told, tell(seed, plan), again))
                if not chunk.keep_going:
                    break
            if tally.failures and not chunk.keep_going:
                break
            collect(done)
    tally.cpu_s += time.process_time() - begun
    return tally


def _run(chunk: Chunk, tally: Tally, seed: int, plan: Plan) -> Iterator[tuple[Plan, str]]:
    """Run a seed and what goes on from it; the plans that failed, each in words."""
    done = run_forked(seed, plan, chunk.forks)
    if done.outcome is not None:
        tally.take(done.outcome)
    if done.failure is not None:
        yield plan, str(done.failure)
    for one in done.continued:
        tally.continued += 1
        tally.cpu_s += one.cpu_s
        _add(tally.met, one.met)
        if one.broken:
            yield replace(plan, reseeds=one.reseeds), one.told


def chunks(whole: Chunk, jobs: int) -> list[Chunk]:
    """Every seed once, in order; no more than CHUNK at a time, and a share for every process."""
    size = max(1, min(CHUNK, -(-whole.seeds // jobs)))
    last = whole.first + whole.seeds
    return [
        replace(whole, first=first, seeds=min(size, last - first))
        for first in range(whole.first, last, size)
    ]


def run_all(
    work: Sequence[Chunk], jobs: int, run: Callable[[Chunk], Tally] = run_chunk
) -> Iterator[Tally]:
    """What each chunk came to, in the order of chunks; ends after the first one that failed, unless
    it is to go on. Raises WorkerDied."""
    if jobs == 1:
        freeze()
        answers: Iterator[Tally] = map(run, work)
    else:
        answers = _spread(work, jobs, run)
    for tally in answers:
        yield tally
        if tally.failures and not work[0].keep_going:
            return


def _spread(work: Sequence[Chunk], jobs: int, run: Callable[[Chunk], Tally]) -> Iterator[Tally]:
    spawn = multiprocessing.get_context("spawn")  # nothing of this process' state is inherited
    pool = ProcessPoolExecutor(jobs, mp_context=spawn, initializer=freeze)
    try:
        answers: list[Future[Tally]] = [pool.submit(run, chunk) for chunk in work]
        for place, answer in enumerate(answers):
            try:
                yield answer.result()
            except BrokenProcessPool as error:
                under_way = [c for c, a in zip(work, answers, strict=True) if not _ended(a)]
                raise _died(under_way[: jobs + 1] or [work[place]]) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _ended(answer: "Future[Tally]") -> bool:
    return answer.done() and not answer.cancelled() and answer.exception() is None


def _died(under_way: Sequence[Chunk]) -> WorkerDied:
    spans = ", ".join(f"{chunk.first}-{chunk.first + chunk.seeds - 1}" for chunk in under_way)
    return WorkerDied(f"a process died without an answer; among seeds {spans}")
