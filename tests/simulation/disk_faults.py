"""Faults of disks that lie: what was written well is not what is there afterwards.

Always true: as faults.py says of each class; a fault that costs nothing that was acknowledged needs
no budget, and the bookie must notice it before it relies on what is there.
"""

import asyncio
import random
from typing import TYPE_CHECKING

from bookie_server.logs.entry_log import COMPACTED, LOG_HEADER_BYTES
from tests.simulation.disk import SimDisk
from tests.simulation.faults import _back_s, _choice, _one_of, event
from tests.simulation.misdirected import misdirect
from tests.simulation.rebuilding import rebuild_index

if TYPE_CHECKING:
    from tests.simulation.chaos import Chaos

FLIPS_MAX = 3


@event("rotten copy")
def rotten_copy(chaos: "Chaos", rng: random.Random) -> str:
    """The next copies that one bookie's compaction writes are damaged before they are read back:
    what was copied must be kept, and nothing of it is lost."""
    tight = [node for node in chaos.running() if chaos.plan.tight]
    node, seed = _choice(rng, tight), rng.random()
    if node is None:
        return ""

    def damage(disk: SimDisk, path: str) -> None:
        if path.endswith(COMPACTED):
            disk.faults.renamed = None
            _flip(disk, path, random.Random(f"{seed} {path}"))
            chaos.world.ghost.meet("copy rotted before compaction read it back")

    for disk in node.ledger_disks:
        disk.faults.renamed = damage
    return f"{node.address}, the next copy of each directory"


@event("misdirected write")
def misdirected_write(chaos: "Chaos", rng: random.Random) -> str:
    """A write of one bookie went to another place of its disk, if the budget allows: what should be
    there is not, and what was at the other place is gone."""
    node, journal = rng.choice(chaos.world.nodes), rng.random() < 0.5
    if not chaos.may_lose(node) or "forgery" in chaos.plan.faults:
        return ""
    disk = _one_of(rng, node.journal_disks if journal else node.ledger_disks)
    damage = misdirect(disk, journal, rng)
    if not damage:
        return ""
    chaos.lose(node)
    mine = chaos.world.ghost.bookie(node.bookie_id)
    mine.rotten = mine.decayed = True
    return f"{node.bookie_id}: {damage}"


@event("index lost")
def index_lost(chaos: "Chaos", rng: random.Random) -> str:
    """The index of one ledger directory is lost in a power cut, if the budget allows, and made anew
    from the entry logs before the bookie is started again: of entries nothing is lost, but where no
    other directory knows what became of ledgers, all are in limbo."""
    node, back_s = _choice(rng, chaos.running()), _back_s(rng)
    which, cuts, seed = rng.random(), rng.choice((0, 0, 1, 2)), rng.random()
    if node is None or not chaos.may_lose(node) or "forgery" in chaos.plan.faults:
        return ""
    if node.bookie is None or node.degraded or node.repairing is not None:
        return ""
    chaos.lose(node)
    chaos.world.ghost.bookie(node.bookie_id).unsure = True
    number = int(which * len(node.ledger_disks))
    chaos.kill(node, "random", back_s=back_s)
    work = rebuild_index(node, number, random.Random(seed), cuts)
    node.repairing = asyncio.get_running_loop().create_task(work)
    return f"number {number} of {node.bookie_id} at {node.address}, back in {back_s} s"


def _flip(disk: SimDisk, path: str, rng: random.Random) -> None:
    """A few bits of its records or of its map."""
    size = len(disk.content(path))
    for _ in range(rng.randint(1, FLIPS_MAX)):
        disk.flip_bit(path, rng.randrange(LOG_HEADER_BYTES * 8, size * 8))
