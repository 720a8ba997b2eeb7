"""Faults of disks that lie: what was written well is not what is there afterwards.

Always true: as faults.py says of each class; a fault that costs nothing that was acknowledged needs
no budget, and the bookie must notice it before it relies on what is there.
"""

import random
from typing import TYPE_CHECKING

from bookie_server.entry_log import COMPACTED, LOG_HEADER_BYTES
from tests.simulation.disk import SimDisk
from tests.simulation.faults import _choice, event

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


def _flip(disk: SimDisk, path: str, rng: random.Random) -> None:
    """A few bits of its records or of its map."""
    size = len(disk.content(path))
    for _ in range(rng.randint(1, FLIPS_MAX)):
        disk.flip_bit(path, rng.randrange(LOG_HEADER_BYTES * 8, size * 8))
