"""Planning a read: ranges of offsets become tasks, and tasks slices of ledgers. Pure.

Always true: the slices of a plan hold every row of the ranges once, in order within a partition;
a task reads one partition. A slice carries all that its reader trusts: the ledger's metadata
version and the end of the committed ranges, which is proof that they are confirmed (hazard 18).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from spark_ledger.topic.state import TopicState

TASK_BYTES = 64 * 1024 * 1024


class EntryPiece(NamedTuple):
    """Rows [skip, skip + take) of an entry; the first of them has offset `offset`. `first_row` is
    what the entry's header must say."""

    entry_id: int
    first_row: int
    skip: int
    take: int
    offset: int


@dataclass(frozen=True, slots=True)
class ReadSlice:
    """Entries of one ledger that hold consecutive offsets of one partition."""

    topic_id: str
    partition: int
    ledger_id: int
    metadata_version: int
    known_confirmed: int
    pieces: tuple[EntryPiece, ...]
    bytes: int

    @property
    def rows(self) -> int:
        return sum(piece.take for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class ReadTask:
    """What one Spark task reads: offsets [start, end) of one partition. Picklable."""

    topic: str
    topic_id: str
    partition: int
    start: int
    end: int
    slices: tuple[ReadSlice, ...]


def plan_read(
    state: TopicState,
    ranges: Mapping[int, tuple[int, int]],
    *,
    topic: str = "",
    min_partitions: int = 1,
    task_bytes: int = TASK_BYTES,
) -> list[ReadTask]:
    """Tasks for the rows [start, end) of each partition in `ranges`, by partition and offset.

    Cut at least into `min_partitions` tasks (in proportion to rows) and by `task_bytes`, at entry
    boundaries where one is near, else inside an entry. Empty ranges give no task.
    Raises errors.NoSuchEntry (LEDGER_OFFSETS.OUT_OF_RANGE) for a range beyond the state.
    """
    raise NotImplementedError
