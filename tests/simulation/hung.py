"""After healing, in some runs: one bookie hangs, and everything is tried once (36).

Always true: nothing else is wrong meanwhile, so what the quorums can do without one bookie must
succeed, and what they cannot must fail, each within the time-outs it meets one after the other.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from spark_ledger.errors import LedgerError
from tests.simulation import invariants
from tests.simulation.plan import Plan
from tests.simulation.world import Client, World

SHARE = 0.3
"""Of the runs."""
ENTRIES = 5
FORGOTTEN_S = 40
"""Whole seconds after which a lost disk's registration is gone."""
SYNCED_S = 10
"""Whole seconds after which a sync that began while its disk was slow has ended."""
SLACK_S = 3.0
"""For metadata writes, bookies that are asked again, and the last copies."""


async def one_bookie_hangs(world: World, plan: Plan) -> None:
    """Write, close, recover and read while one bookie neither answers nor refuses."""
    rng = world.loop.random_for("hung")
    if rng.random() >= SHARE or plan.racks == "hard" or not await well(world):
        return
    drill = HungBookie(world, plan)
    before = await drill.writes("all well", await world.client("writer"), 1.0)
    if before is None:
        return
    node = rng.choice([node for node in world.nodes if node.bookie_id in _members(before)])
    world.trace.note("chaos", f"{node.address} hangs")
    world.ghost.meet("drill with a hung bookie")
    node.process.pause()
    try:
        await drill.try_all(before)
    finally:
        node.process.resume()


async def well(world: World) -> bool:
    """Whether every bookie serves everybody, none lost anything that could be missed, no sync is
    slow any more, and none is chosen that is no more: disks that were lost stay registered until
    their sessions end."""
    ghost, nodes = world.ghost, world.nodes
    if (
        ghost.over_budget
        or ghost.cut_off
        or any(ghost.bookie(node.bookie_id).rotten for node in nodes)
    ):
        return False
    await asyncio.sleep(SYNCED_S)
    for _ in range(FORGOTTEN_S):
        doubts = [
            n for n in nodes if n.bookie is not None and n.bookie.ledgers.every_ledger_state().limbo
        ]
        available = world.observers.situations.available
        running = sorted(node.bookie_id for node in nodes if node.running)
        if sorted(available) == running and not doubts:
            return all(node.running for node in nodes)
        await asyncio.sleep(1)
    return False


def _members(writer: Any) -> tuple[str, ...]:
    ensemble: tuple[str, ...] = writer.record.last_fragment.ensemble
    return ensemble


class HungBookie:
    """What one bookie less must allow, by the quorums of the plan."""

    def __init__(self, world: World, plan: Plan) -> None:
        self._world = world
        self._plan = plan
        ensemble_size, write_quorum, ack_quorum = plan.quorum
        usable = len(world.nodes) - bool(world.ghost.banned)
        self.writable = usable > ensemble_size or write_quorum > ack_quorum
        """One failed slot is replaced, or not needed."""
        self.recoverable = ack_quorum > 1 and self.writable
        """One silent bookie leaves every write set covered, and the tail can be written back."""

    async def try_all(self, before: Any) -> None:
        """`before` is the writer of a ledger that was written when all was well, and is open."""
        config = self._world.config
        client = await self._world.client("patient")
        written = await self.writes("one hung", client, config.replica_timeout_s + SLACK_S)
        if written is not None:
            await self._judged("close", client, written.close(), True, 2 * SLACK_S)
            await self._reads(client, written.ledger_id)
        opening = client.ledgers.open(before.ledger_id, recover=True)
        bound_s = config.replica_timeout_s + 2 * SLACK_S
        worst_s = config.recovery_timeout_s + SLACK_S
        if await self._judged("recovery", client, opening, self.recoverable, bound_s, worst_s):
            await self._reads(client, before.ledger_id)

    async def writes(self, what: str, client: Client, bound_s: float) -> Any:
        """A new ledger and some entries, acked; its writer, or None if that cannot be."""
        create = client.ledgers.create(*self._plan.quorum)
        writer = await self._judged(f"create, {what},", client, create, True, SLACK_S)
        add_s = self._world.config.add_timeout_s + SLACK_S
        adds = _append(writer)
        done = await self._judged(f"adds, {what},", client, adds, self.writable, bound_s, add_s)
        return writer if done else None

    async def _reads(self, client: Client, ledger_id: int) -> None:
        bound_s = self._world.config.read_timeout_s + SLACK_S
        await self._judged("read", client, _read(client, ledger_id), True, bound_s)

    async def _judged(
        self,
        what: str,
        client: Client,
        work: Coroutine[Any, Any, Any],
        must_succeed: bool,
        bound_s: float,
        worst_s: float = 0.0,
    ) -> Any:
        """Run `work`: it ends within `bound_s` or, if it may fail, within `worst_s`; what it
        returned, None when it failed and may."""
        limit_s = bound_s if must_succeed else max(bound_s, worst_s)
        begun, result, failure = self._world.loop.now, None, None
        try:
            async with asyncio.timeout(limit_s + SLACK_S):
                result = await client.run(work, what)
        except (LedgerError, TimeoutError) as error:
            failure = error if must_succeed or isinstance(error, TimeoutError) else None
        took_s = self._world.loop.now - begun
        invariants.a_hung_bookie_blocks_nothing(self._world.ghost, what, took_s, limit_s, failure)
        return result


async def _append(writer: Any) -> bool:
    await asyncio.gather(*(writer.append(b"entry %d" % n) for n in range(ENTRIES)))
    return True


async def _read(client: Client, ledger_id: int) -> int:
    reader = await client.ledgers.open(ledger_id, recover=False)
    return len([entry_id async for entry_id, _ in reader.read(0, reader.last_add_confirmed)])
