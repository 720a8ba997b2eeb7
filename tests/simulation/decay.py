"""Bit rot: flips bits of what one bookie has durably on its disks, while it runs or is down.

Always true: only bytes are damaged that were durable. In the last batch of a journal too, where it
looks like the torn write of a power loss; but the last put of the index is spared, for damage there
the twin of RocksDB cannot tell from a write that was never finished (docs/simulation.md says so).
"""

import random
from typing import NamedTuple

from bookie_server.journal.writer import SUFFIX as JOURNAL_SUFFIX
from bookie_server.logs.entry_log import log_path
from tests.simulation.disk import SimDisk
from tests.simulation.index import BATCH_MAGIC as PUT_MAGIC
from tests.simulation.index import marks_on

FLIPS_MAX = 6
SPREAD_BYTES = 600


class _Place(NamedTuple):
    """Bytes of a file that may be damaged, from `start` up to `end`."""

    kind: str
    disk: SimDisk
    path: str
    start: int
    end: int


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
    _, disk, path, start, end = fitting[int(which * len(fitting))]
    begin = start + int(where * (end - start))
    size = min(size, end - begin)
    for share in at:
        disk.flip_bit(path, begin * 8 + int(share * size * 8))
    return f"{path}: {flips} bits at {begin} and the {size} bytes after it"


def _places(journal: SimDisk, ledger: SimDisk) -> list[_Place]:
    """All files that have such bytes; what direct logs hold beyond their marks once more."""
    found = [
        _Place("journal", journal, path, 0, len(journal.durable(path)))
        for path in journal.paths()
        if path.endswith(JOURNAL_SUFFIX)
    ]
    for path in ledger.paths():
        kind, data = path.split("/")[0], ledger.durable(path)
        end = max(0, data.rfind(PUT_MAGIC)) if kind == "index" else len(data)
        found.append(_Place(kind, ledger, path, 0, end))
    for log_id, mark in marks_on(ledger).items():
        end = len(ledger.durable(log_path(log_id)))
        found.append(_Place("placed", ledger, log_path(log_id), mark, end))
    return [place for place in found if place.start < place.end]
