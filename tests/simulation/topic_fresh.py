"""After healing, before anybody closes a ledger: a fresh process reads all that is committed (T8).

Always true: nobody appends any more, and what was committed last still lies in ledgers that are
open; as many bookies stand still or are lost as the ack quorum bears.
"""

import asyncio

from spark_ledger.errors import LedgerError
from tests.simulation import invariants
from tests.simulation.chaos import Chaos
from tests.simulation.topic_work import TopicWork

BOUND_S = 120.0
"""Simulated: each range may meet a bookie that says nothing, and wait for its time-out."""


async def a_fresh_reader_reads_all(work: TopicWork, chaos: Chaos) -> None:
    """Every row of every topic, at once; in some runs with a bookie that hangs."""
    world = work.world
    rng = world.loop.random_for("fresh reader")
    nodes = [node for node in world.nodes if node.running and chaos.may_lose(node)]
    hung = rng.choice(nodes) if nodes and rng.random() < 0.5 else None
    client = await world.client("fresh")
    if hung is not None:
        world.ghost.meet("fresh reader beside a hung bookie")
        hung.process.pause()
    problem = ""
    try:
        async with asyncio.timeout(BOUND_S):
            await client.run(work.read_all(work.client(client), fresh=True), "reads")
    except TimeoutError:
        problem = f"it waits for more than {BOUND_S:.0f} s"
    except LedgerError as error:
        problem = f"{type(error).__name__}: {error}"
    finally:
        if hung is not None:
            hung.process.resume()
    invariants.what_is_committed_is_readable_at_once(world.ghost, problem)
