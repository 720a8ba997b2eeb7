"""Placement policies that tests name by dotted name: one that works and some that do not."""

from spark_ledger.ledger.placement import choose

calls = []
no_function = 7


def by_name(request, rng):
    """The first candidates by id."""
    calls.append(request)
    return dict(zip(request.slots, sorted(b.id for b in request.candidates), strict=False))


class Policies:
    @staticmethod
    def ours(request, rng):
        return choose(request, rng)


def raises(request, rng):
    raise RuntimeError("the inventory is away")


def strangers(request, rng):
    return {slot: f"x{slot}" for slot in request.slots}


def twice(request, rng):
    return dict.fromkeys(request.slots, request.candidates[0].id)


def too_few(request, rng):
    return {request.slots[0]: request.candidates[0].id}


def a_list(request, rng):
    return [bookie.id for bookie in request.candidates]


def other_slots(request, rng):
    return {99: request.candidates[0].id}


def objects(request, rng):
    return dict(zip(request.slots, request.candidates, strict=False))


async def a_coroutine(request, rng):
    return {}


class Asynchronous:
    async def __call__(self, request, rng):
        return {}


hidden_coroutine = Asynchronous()


def nonsense(request, rng):
    return {slot: [] for slot in request.slots}
