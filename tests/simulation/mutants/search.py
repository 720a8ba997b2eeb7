"""How many seeds a mutant survives: several independent searches, shared among processes."""

import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tests.simulation.mutants import MUTANTS
from tests.simulation.mutants.mutant import Mutant, MutantBroken
from tests.simulation.warm import collect, freeze, quiet


@dataclass(frozen=True)
class Search:
    """One search: `seeds` of them were tried, the last of which caught the mutant, or none did."""

    mutant: str
    seeds: int
    seed: int | None = None
    invariant: str = ""
    clean: bool = True
    """The same seed keeps every invariant without the mutant."""
    run_s: float = 0.0
    """What the mutant's run and the clean one take together."""
    broken: str = ""
    """What the mutant raised by itself; then nothing more was tried."""


@dataclass(frozen=True)
class Found:
    """All searches for one mutant."""

    mutant: Mutant
    searches: tuple[Search, ...]

    @property
    def caught(self) -> bool:
        return all(search.seed is not None and search.clean for search in self.searches)

    @property
    def seeds(self) -> int:
        """The median number of seeds needed; a search that failed counts with all it tried."""
        return int(statistics.median(search.seeds for search in self.searches))

    @property
    def cheapest(self) -> Search | None:
        """The search whose seed costs least to replay."""
        ended = [search for search in self.searches if search.seed is not None and search.clean]
        return min(ended, key=lambda search: search.run_s, default=None)


def search(mutant: Mutant, start: int, seeds_max: int) -> Search:
    """Try seeds from `start` on until one catches the mutant."""
    with quiet():
        for tried, seed in enumerate(range(start, start + seeds_max), 1):
            collect(tried)
            try:
                invariant = mutant.caught(seed)
            except MutantBroken as broken:
                return Search(mutant.name, tried, broken=str(broken))
            if invariant is not None:
                begun = time.perf_counter()
                mutant.caught(seed)
                clean = mutant.clean(seed)
                took = time.perf_counter() - begun
                return Search(mutant.name, tried, seed, invariant, clean, took)
    return Search(mutant.name, seeds_max)


def search_all(
    mutants: Sequence[Mutant], seeds_max: int, starts: int, jobs: int, plain: bool
) -> Iterator[Found]:
    """Each mutant's searches, in the order of `mutants`; the n-th begins at n * seeds_max. With
    `plain` in runs as their seeds draw them, whatever the mutant says of its plans."""
    tasks = [(m.name, n * seeds_max, seeds_max, plain) for m in mutants for n in range(starts)]
    with multiprocessing.get_context("spawn").Pool(jobs, freeze) as pool:
        done = pool.imap(_search_named, tasks)
        for mutant in mutants:
            yield Found(mutant, tuple(next(done) for _ in range(starts)))


def _search_named(task: tuple[str, int, int, bool]) -> Search:
    name, start, seeds_max, plain = task
    mutant = next(m for m in MUTANTS if m.name == name)
    return search(replace(mutant, changes=None) if plain else mutant, start, seeds_max)
