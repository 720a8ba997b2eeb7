"""Writes that went to another place of the disk than they were for.

Always true: what was written lies where something else was, of the same kind of file, and not where
it should; only synced bytes are concerned, and only such whose absence can show. A disk that loses
the very last write of a journal, or of a direct log beyond its mark, and shows zeros there as if
there never had been a write, is found out by nobody (docs/simulation.md says so).
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from bookie_server.journal.format import BATCH_MAGIC, BLOCK_BYTES
from bookie_server.journal.writer import SUFFIX as JOURNAL_SUFFIX
from bookie_server.logs.entry_log import RECORD_MAGIC, log_path
from tests.simulation.disk import SimDisk
from tests.simulation.index import marks_on

LATEST = 2
"""So many of a journal's last writes are spared."""


class _Write(NamedTuple):
    """Blocks of a file that look as if one write had brought them."""

    path: str
    start: int
    data: bytes


def misdirect(disk: SimDisk, journal: bool, rng: random.Random) -> str:
    """Returns what happened; "" when there is nothing yet that could be concerned."""
    there = _journal_writes(disk) if journal else _log_writes(disk)
    lost = there[: max(0, len(there) - LATEST)] if journal else _below_marks(disk, there)
    from_, to, in_cache = rng.random(), rng.random(), rng.random() < 0.5
    if not lost or len(there) < 2:
        return ""
    write = lost[int(from_ * len(lost))]
    others = [other for other in there if other != write]
    others = others[-LATEST:] if rng.random() < 0.5 else others
    place = others[int(to * len(others))]
    disk.overwrite(place.path, place.start, write.data, in_cache=in_cache)
    if (place.path, place.start // BLOCK_BYTES) != (write.path, write.start // BLOCK_BYTES):
        disk.overwrite(write.path, write.start, bytes(len(write.data)), in_cache=in_cache)
    cached = "" if in_cache else ", the page cache is right"
    return (
        f"{len(write.data)} bytes for {write.path} at {write.start} went to {place.path} at"
        f" {place.start}{cached}"
    )


def _journal_writes(disk: SimDisk) -> list[_Write]:
    paths = [path for path in disk.paths() if path.endswith(JOURNAL_SUFFIX)]
    return [write for path in paths for write in _writes(disk, path, BATCH_MAGIC)]


def _log_writes(disk: SimDisk) -> list[_Write]:
    paths = [path for path in disk.paths() if path.startswith("entrylog/")]
    return [write for path in paths for write in _writes(disk, path, RECORD_MAGIC)]


def _writes(disk: SimDisk, path: str, magic: bytes) -> list[_Write]:
    """By the blocks that begin with a batch or record; what a file ends with is none."""
    data = disk.durable(path)
    starts = [at for at in range(0, len(data), BLOCK_BYTES) if data.startswith(magic, at)]
    ends = [*starts[1:], len(data)]
    return [_Write(path, at, data[at:end]) for at, end in zip(starts, ends, strict=False)]


def _below_marks(disk: SimDisk, writes: Sequence[_Write]) -> list[_Write]:
    marks = {log_path(log_id): mark for log_id, mark in marks_on(disk).items()}
    return [one for one in writes if one.start + len(one.data) <= marks.get(one.path, 1 << 62)]
