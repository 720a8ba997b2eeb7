"""Which bookies a ledger is put on: random by free space, over different racks where known.

Always true: what is chosen are different bookies out of the candidates; with the same generator
and the same candidates the same ones. Bookies that lately did not answer come last.
"""

import random
from collections.abc import Callable, Collection, Sequence

from spark_ledger.bookies.directory import BookieInfo

Placement = Callable[
    [Sequence[BookieInfo], int, Collection[str], Collection[str], random.Random], list[str]
]


def choose(
    candidates: Sequence[BookieInfo],
    count: int,
    racks_taken: Collection[str],
    doubtful: Collection[str],
    rng: random.Random,
) -> list[str]:
    """At most `count` bookie ids of `candidates`, weighted by free bytes.

    A rack that is taken already (`racks_taken`, "" = not known) is used only when no other is
    left; a `doubtful` bookie only when nobody else is.
    """
    left = list(candidates)
    racks = [rack for rack in racks_taken if rack]
    chosen: list[str] = []
    while left and len(chosen) < count:
        bookie = _draw(_best(left, racks, doubtful), rng)
        left.remove(bookie)
        chosen.append(bookie.id)
        if bookie.rack:
            racks.append(bookie.rack)
    return chosen


def _best(
    left: Sequence[BookieInfo], racks: Collection[str], doubtful: Collection[str]
) -> list[BookieInfo]:
    """Those with the fewest objections: answering before doubtful, then a rack of its own."""
    objections = [(bookie.id in doubtful, bookie.rack in racks) for bookie in left]
    fewest = min(objections)
    return [bookie for bookie, found in zip(left, objections, strict=True) if found == fewest]


def _draw(bookies: Sequence[BookieInfo], rng: random.Random) -> BookieInfo:
    weights = [max(1, bookie.free_bytes) for bookie in bookies]
    return rng.choices(bookies, weights)[0]
