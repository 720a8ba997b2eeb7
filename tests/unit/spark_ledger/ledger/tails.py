"""An open ledger that is read as it grows."""

import asyncio

from tests.simulation.loop import current


def payload(n):
    return b"%d" % n


async def written(ledgers, count, sizes=(3, 3, 2), announce=True):
    writer = await ledgers.create(*sizes, announce_lac=announce)
    await append(writer, 0, count)
    return writer


async def append(writer, first, last):
    await asyncio.gather(*(writer.append(payload(n)) for n in range(first, last)))


def waiting(cluster):
    return sum(bookie.waiting for bookie in cluster.bookies.values())


async def ended_within(task, seconds):
    """Its result; it must not take longer."""
    began = current().time()
    result = await asyncio.wait_for(task, 60)
    assert current().time() - began <= seconds
    return result
