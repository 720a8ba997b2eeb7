"""Bit rot: flips bits of what one bookie has durably on its disks, while it runs or is down.

Always true: only bytes are damaged of which the bookie can know that they were durable. The last
batch of the journal and the last put of the index are spared, for damage there looks like the torn
write of a power loss, and no format can tell the two apart before something follows it
(docs/simulation.md says so).
"""

import random

from bookie_server.journal import SUFFIX as JOURNAL_SUFFIX
from bookie_server.journal_format import BATCH_MAGIC, BLOCK_BYTES
from tests.simulation.disk import SimDisk
from tests.simulation.index import BATCH_MAGIC as PUT_MAGIC

FLIPS_MAX = 6
SPREAD_BYTES = 600


def rot(disks: tuple[SimDisk, SimDisk], rng: random.Random) -> str:
    """Flip a few bits close together in one file of (journal disk, ledger disk).

    Returns what was damaged; "" when there is nothing yet that could be.
    """
    places = _places(*disks)
    kinds = sorted({kind for kind, *_ in places})
    kind = rng.choice(kinds) if kinds else ""
    where, size, flips = rng.random(), rng.randint(1, SPREAD_BYTES), rng.randint(1, FLIPS_MAX)
    which, at = rng.random(), [rng.random() for _ in range(flips)]
    fitting = [place for place in places if place[0] == kind]
    if not fitting:
        return ""
    _, disk, path, end = fitting[int(which * len(fitting))]
    begin = int(where * end)
    size = min(size, end - begin)
    for share in at:
        disk.flip_bit(path, begin * 8 + int(share * size * 8))
    return f"{path}: {flips} bits at {begin} and the {size} bytes after it"


def _places(journal: SimDisk, ledger: SimDisk) -> list[tuple[str, SimDisk, str, int]]:
    """(kind, disk, path, up to where bytes may be damaged) of every file that has such bytes."""
    found = [("journal", journal, path, end) for path, end in _journal_ends(journal)]
    for path in ledger.paths():
        kind, data = path.split("/")[0], ledger.durable(path)
        end = max(0, data.rfind(PUT_MAGIC)) if kind == "index" else len(data)
        found.append((kind, ledger, path, end))
    return [place for place in found if place[3] > 0]


def _journal_ends(disk: SimDisk) -> list[tuple[str, int]]:
    """Every segment up to its last batch; a later segment with a batch vouches for all of it."""
    found: list[tuple[str, int]] = []
    last = True
    for path in reversed([path for path in disk.paths() if path.endswith(JOURNAL_SUFFIX)]):
        data = disk.durable(path)
        end = _last_batch(data)
        if end and last:
            found.append((path, end))
            last = False
        elif not last:
            found.append((path, len(data)))
    return found


def _last_batch(data: bytes) -> int:
    """Where the last batch begins; 0 when there is none."""
    at = len(data)
    while (at := data.rfind(BATCH_MAGIC, 0, at)) >= 0:
        if at % BLOCK_BYTES == 0:
            return at
    return 0
