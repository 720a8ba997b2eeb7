"""Ways between clients and bookies that stay cut for ever, one way, when all else heals.

Always true: outside of the bookies concerned there is a core that every ensemble fits into, and no
more of them than disks may be lost, so nothing waits for them: the liveness bound holds. What is
cut is one direction: requests that never arrive, or answers, whose requests are carried out.
"""

import random

from spark_ledger.errors import LedgerError
from tests.simulation import invariants
from tests.simulation.chaos import Chaos
from tests.simulation.network import ANY
from tests.simulation.plan import Plan
from tests.simulation.world import BookieNode, World

ENTRIES = 4
SLACK_S = 3.0
"""For metadata writes, and bookies that are asked again."""


def cut_for_ever(chaos: Chaos) -> None:
    """Everything has healed: some ways are cut now, and stay so."""
    world, plan = chaos.world, chaos.plan
    rng = world.loop.random_for("lasting cuts")
    may = [node for node in world.nodes if node.running and chaos.may_lose(node)]
    for node in rng.sample(may, len(may)):
        usable = len(world.nodes) - bool(world.ghost.banned) - len(world.ghost.cut_off)
        beyond_core = usable > plan.quorum[0]
        if beyond_core and chaos.may_lose(node) and (not world.ghost.cut_off or rng.random() < 0.5):
            chaos.lose(node)
            _cut(world, node, rng)


def _cut(world: World, node: BookieNode, rng: random.Random) -> None:
    living = [client.name for client in world.clients if client.process.alive]
    some = [name for name in living if rng.random() < 0.5]
    names = some if some and rng.random() < 0.4 else [ANY]
    for name in names:
        inward = rng.random() < 0.5
        sender, receiver = (name, node.address) if inward else (node.address, name)
        world.network.cut(sender, receiver)
        world.trace.note("chaos", f"{sender} to {receiver} stays cut")
    world.ghost.cut_off[node.bookie_id] = None
    world.ghost.meet("way stays cut for ever")


async def a_core_goes_on(world: World, plan: Plan) -> None:
    """Who meets such ways writes, closes and reads all the same, within the time-outs that it meets
    one after the other (34)."""
    cut_off = len(world.ghost.cut_off)
    if not cut_off:
        return
    client = await world.client("patient")
    config, begun, problem = world.config, world.loop.now, ""
    bound_s = cut_off * (config.replica_timeout_s + config.read_timeout_s) + 4 * SLACK_S
    try:
        await client.run(_use(client, plan), "goes on")
    except LedgerError as error:
        problem = f"{type(error).__name__}: {error}"
    took_s = world.loop.now - begun
    invariants.a_core_is_enough(world.ghost, took_s, bound_s, problem)
    world.ghost.meet("drill beside ways that stay cut")


async def _use(client, plan: Plan) -> None:
    writer = await client.ledgers.create(*plan.quorum)
    for number in range(ENTRIES):
        await writer.append(b"%d" % number)
    await writer.close()
    reader = await client.ledgers.open(writer.ledger_id, recover=True)
    read = [entry async for _, entry in reader.read(0, ENTRIES - 1)]
    assert len(read) == ENTRIES
