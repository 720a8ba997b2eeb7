"""An operator makes the index of a ledger directory anew, by production's rebuild.

Always true: the node is down meanwhile, and does not start before it is done; what other
directories know of ledgers is used as `--rebuild-index` uses it, of those that were there to the
last; a power cut in the middle of it costs nothing but that it is given again.
"""

import asyncio
import random
from functools import partial, reduce
from typing import TYPE_CHECKING

from bookie_server.disk.interface import DiskFailed
from bookie_server.journal import checkpoint
from bookie_server.logs.index import LedgerState
from bookie_server.logs.rebuild import rebuild
from tests.simulation.index import SimIndex

if TYPE_CHECKING:
    from tests.simulation.world import BookieNode

TRIES_MAX = 3
INDEX = "index"


async def rebuild_index(node: "BookieNode", number: int, rng: random.Random, cuts: int) -> None:
    """The index of directory `number` is lost, and made anew; so many power cuts come between."""
    assert not node.running
    disk, name = node.ledger_disks[number], node.ledger_names[number]
    disk.lose(INDEX)
    node.direct_log_watch.forgets_logs()
    others = [at for at in range(len(node.ledger_disks)) if at != number]
    states = await _known(node, others)
    for left in range(cuts, -1, -1):
        making = rebuild(disk, name, partial(SimIndex.open, disk), node.world.storage, states)
        work = asyncio.create_task(making, name=f"{node.address} makes an index anew")
        if left:
            await asyncio.wait({work}, timeout=rng.uniform(0, 0.05))
            if not work.done():
                disk.crash("random")
                node.world.ghost.meet("power cut while an index was made anew")
        (outcome,) = await asyncio.gather(work, return_exceptions=True)
        if outcome is not None and not isinstance(outcome, BaseException):
            node.world.trace.note(node.address, outcome.sentence())
            node.world.ghost.meet("index made anew")
            return
        if not isinstance(outcome, DiskFailed):
            raise outcome


async def _known(node: "BookieNode", others: list[int]) -> list[LedgerState] | None:
    """What those of the directories say of ledgers that were there to the last; None: there is no
    such directory."""
    marks = {at: await _marks(node, at) for at in range(len(node.ledger_disks))}
    latest = reduce(checkpoint.furthest, marks.values())
    current = [at for at in others if marks[at] == latest]
    states: list[LedgerState] = []
    for at in current:
        index = await SimIndex.open(node.ledger_disks[at])
        states += await index.ledgers()
        await index.close()
    return states if current else None


async def _marks(node: "BookieNode", number: int) -> checkpoint.Marks:
    try:
        return await checkpoint.read(node.ledger_disks[number]) or {}
    except checkpoint.BadCheckpoint:
        return {}
