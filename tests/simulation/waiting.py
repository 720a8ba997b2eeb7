"""After healing, in some runs: a reader waits for entries as they are written (34).

Always true: nothing is wrong meanwhile, so a reader that waits hears of what is confirmed as soon
as its writer announces it, and of the end as soon as the ledger is closed.
"""

import asyncio
from typing import Any

from spark_ledger.bookies.local_reads import LOCAL_READ_S
from tests.simulation import invariants
from tests.simulation.hung import well
from tests.simulation.plan import Plan
from tests.simulation.world import World

SHARE = 0.3
"""Of the runs."""
BURSTS = 4
SLACK_S = 0.5
"""For an announcement's quiet time, and the messages."""


async def a_reader_waits(world: World, plan: Plan) -> None:
    """One client appends a few entries now and then; another waits for them by long polls."""
    rng = world.loop.random_for("waiting")
    if rng.random() >= SHARE or not await well(world):
        return
    world.ghost.meet("drill with a waiting reader")
    author, tailer = await world.client("author"), await world.client("tailer")
    writer = await author.run(author.ledgers.create(*plan.quorum, announce_lac=True))
    reader = await tailer.run(tailer.ledgers.open(writer.ledger_id, recover=False))
    last = -1
    for _ in range(BURSTS):
        wait_s = world.config.long_poll_s + SLACK_S
        waiting = tailer.run(reader.read_when_confirmed(last, wait_s), "waits")
        await asyncio.sleep(rng.uniform(0.0, 0.3))
        burst = rng.randint(1, plan.quorum[0])
        await author.run(_append(writer, burst), "appends")
        last += len(await _in_time(world, waiting, f"entry {last + 1} of {writer.ledger_id}"))
    waiting = tailer.run(_end(reader, last), "waits")
    await author.run(writer.close(), "closes")
    await _in_time(world, waiting, f"the end of ledger {writer.ledger_id}")


async def _append(writer: Any, count: int) -> None:
    await asyncio.gather(*(writer.append(b"waited for") for _ in range(count)))


async def _end(reader: Any, last: int) -> list[Any]:
    """What comes after entry `last`, to the end of the ledger."""
    return [found async for found in reader.tail(last + 1)]


async def _in_time(world: World, waiting: "asyncio.Task[list[Any]]", what: str) -> list[Any]:
    """What the reader is given; it has to be told `what` soon."""
    begun = world.loop.now
    found = await waiting
    took_s = world.loop.now - begun
    slack_s = SLACK_S + (
        LOCAL_READ_S if world.storage.place_bytes_min else 0.0
    )  # a look may be late
    invariants.a_waiting_reader_is_told(world.ghost, what, took_s, slack_s)
    return found
