"""The whole list again and again, in another order and at other moments each time.

    python -m tests.spark.exactly_once --rounds 20 --seed 7
    python -m tests.spark.exactly_once --rounds 1 --seed 7 --first 13 --only zookeeper

Each round has a cluster of its own. What is done, in which order and after how long follows from
the seed and the round; what the machine does meanwhile does not.
"""

import argparse
import random
import secrets
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from spark_ledger.local import LocalCluster
from tests.spark.exactly_once import cases, kills, speculation
from tests.spark.exactly_once.query import Query
from tests.spark.exactly_once.world import SEVERAL, World

BOOKIES = 3
LONG_EVERY = 5  # rounds


class Round:
    def __init__(self, world: World, folder: Path) -> None:
        self._world = world
        self._folder = folder

    def run(self, only: str, long_too: bool) -> None:
        """What has `only` in its name. Raises AssertionError if a row is lost, doubled or out of
        place, or a ledger is left."""
        listed = [*cases.CASES, kills.kill_at_any_moment, *(cases.LONG_CASES if long_too else ())]
        steps: dict[str, Callable[[], None]] = {
            "kill_at_each_point": self._kills,
            "speculation": self._speculation,
            **{case.__name__: partial(self._case, case) for case in listed},
        }
        names = [name for name in steps if only in name]
        self._world.rng.shuffle(names)
        for name in names:
            steps[name]()

    def _case(self, case: cases.Case) -> None:
        began = time.monotonic()
        case(self._world)
        self._check(case.__name__, began, self._world.query)

    def _kills(self) -> None:
        began = time.monotonic()
        for name, killed in kills.kill_at_each_point(self._world).items():
            killed.check()
            self._check(f"killed {name}", began, killed.query)

    def _speculation(self) -> None:
        began = time.monotonic()
        with speculation.standalone(self._folder / "standalone") as master:
            query = speculation.speculated(self._world, master)
        self._check("speculation", began, query)

    def _check(self, what: str, began: float, query: Query) -> None:
        self._world.check(query)
        rows = sum(len(step.places()) for step in query.fed())
        print(f"  {time.monotonic() - began:6.1f} s  {rows:6,} rows  {what}", flush=True)


def run(rounds: int, seed: int, first: int = 0, only: str = "") -> None:
    for number in range(first, first + rounds):
        print(f"exactly once: seed {seed}, round {number}", flush=True)
        with (
            LocalCluster(bookies=BOOKIES, autorecovery=False) as cluster,
            tempfile.TemporaryDirectory(prefix="exactly-once-") as folder,
        ):
            rng = random.Random(f"{seed}/{number}")
            several = rng.choice((0, SEVERAL))
            world = World(cluster, Path(folder), f"round-{number}", rng, several)
            try:
                Round(world, Path(folder)).run(only, long_too=number % LONG_EVERY == 0)
            finally:
                world.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    parser.add_argument("--first", type=int, default=0, help="the round to begin with")
    parser.add_argument("--only", default="", help="cases with this in their name")
    options = parser.parse_args()
    run(options.rounds, options.seed, options.first, options.only)


if __name__ == "__main__":
    main()
