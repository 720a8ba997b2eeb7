"""Racks of bookies, and a placement policy of one's own.

Always true: with racks "hard" there is an ensemble whose write sets lie on different racks, as long
as every address has a bookie; the policy of one's own takes no bookie at one address, ever, which
is one more than an ensemble needs.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from spark_ledger.ledger import placement
from spark_ledger.ledger.placement import Placement, PlacementRequest
from tests.simulation.plan import Plan

DRAWS = 20


def draw(plan: Plan, rng: random.Random) -> list[str]:
    """The rack of each address; "" where nobody says which. Who is lost keeps his rack as long as
    a record names him, so where bookies are lost no two addresses have one, if it is "hard"."""
    if not plan.racks:
        return [""] * plan.bookies
    if plan.racks == "soft":
        return [rng.choice(("", "r1", "r2", "r3")) for _ in range(plan.bookies)]
    free = [address for address in range(plan.bookies) if address != banned(plan)]
    for _ in range(0 if plan.healing else DRAWS):
        drawn = [f"r{rng.randint(1, plan.bookies)}" for _ in range(plan.bookies)]
        if possible(plan, [drawn[address] for address in free]):
            return drawn
    return [f"r{number + 1}" for number in range(plan.bookies)]


def possible(plan: Plan, racks: Sequence[str]) -> bool:
    """Whether some ensemble of bookies on these racks has none twice in a write set."""
    size, write_quorum, _ = plan.quorum
    return any(apart(chosen, write_quorum) for chosen in permutations(racks, size))


def apart(racks: Sequence[str], write_quorum: int) -> bool:
    """Whether the write sets of an ensemble on these racks each lie on different ones."""
    size = len(racks)
    return all(
        racks[slot] != racks[(slot + more) % size]
        for slot in range(size)
        for more in range(1, min(write_quorum, size))
    )


def banned(plan: Plan) -> int | None:
    """The number, from 0, of the address that the run's own policy takes nobody at."""
    spare = plan.bookies > plan.quorum[0]
    return plan.bookies - 1 if plan.own_policy and spare else None


def policy(plan: Plan) -> Placement:
    """Production's, or one's own, checked as one that is named in the setting."""
    number = banned(plan)
    if number is None:
        return placement.choose
    address = f"b{number + 1}:1"

    def without(request: PlacementRequest, rng: random.Random) -> Mapping[int, str]:
        others = tuple(each for each in request.candidates if each.address != address)
        return placement.choose(replace(request, candidates=others), rng)

    return placement.checked("without", without)
