"""Planning a read: ranges of offsets become tasks, and tasks slices of ledgers. Pure.

Always true: the slices of a plan hold every row of the ranges once, in order within a partition;
a task reads one partition. A slice carries all that its reader trusts: the ledger's metadata
version and the end of the committed ranges, which is proof that they are confirmed (hazard 18).
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from spark_ledger import errors
from spark_ledger.metadata.ledger_record import LedgerRecord
from spark_ledger.topic.segments import PlacedSegment, index_of_row
from spark_ledger.topic.state import PartitionState, TopicState

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
    """Entries of one ledger, ids rising, that hold consecutive offsets of one partition."""

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

    @property
    def rows(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class LostRows:
    """Committed offsets [start, end) of a partition that a closed ledger does not hold."""

    topic_id: str
    partition: int
    start: int
    end: int
    ledger_id: int
    last_entry: int

    def error(self) -> errors.RowsLost:
        return errors.RowsLost(
            f"{self.end - self.start} rows (offsets {self.start} to {self.end - 1}) of partition"
            f" {self.partition} of topic {self.topic_id} were committed but ledger"
            f" {self.ledger_id} ends at entry {self.last_entry}",
            rows=self.end - self.start,
            start=self.start,
            end=self.end,
            partition=self.partition,
        )


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
    for partition, (start, end) in ranges.items():
        _check_range(state, partition, start, end)
    total = sum(end - start for start, end in ranges.values())
    tasks = []
    for partition, (start, end) in sorted(ranges.items()):
        if start == end:
            continue
        held = state.partitions[partition]
        by_rows = -(-min_partitions * (end - start) // total)
        by_bytes = -(-held.bytes_between(start, end) // task_bytes)
        cuts = _cuts(held, start, end, min(end - start, max(1, by_rows, by_bytes)))
        for lo, hi in itertools.pairwise(cuts):
            slices = tuple(_slices(state.topic_id, held, lo, hi))
            tasks.append(ReadTask(topic, state.topic_id, partition, lo, hi, slices))
    return tasks


def lost_rows(record: LedgerRecord, planned: ReadSlice) -> LostRows | None:
    """The rows of the slice beyond the end of its closed ledger (hazard 26), or None."""
    last = record.last_entry
    if last is None or planned.pieces[-1].entry_id <= last:
        return None
    beyond = [piece for piece in planned.pieces if piece.entry_id > last]
    end = beyond[-1].offset + beyond[-1].take
    return LostRows(
        planned.topic_id, planned.partition, beyond[0].offset, end, planned.ledger_id, last
    )


def _check_range(state: TopicState, partition: int, start: int, end: int) -> None:
    if not 0 <= partition < len(state.partitions):
        raise errors.NoSuchEntry(
            f"topic {state.topic_id} has {len(state.partitions)} partitions, none is {partition}",
            "Name partitions that exist.",
        )
    held = state.partitions[partition]
    if not held.start_offset <= start <= end <= held.end_offset:
        raise errors.NoSuchEntry(
            f"offsets {start} to {end} of partition {partition} of topic {state.topic_id} are"
            f" not within {held.start_offset} to {held.end_offset}",
            "Stay within the offsets that the topic has.",
            partition=partition,
        )


def _cuts(held: PartitionState, start: int, end: int, count: int) -> list[int]:
    """`start`, `count` - 1 cuts evenly between, `end`; strictly rising."""
    rows = end - start
    inner = [start + rows * i // count for i in range(1, count)]
    return [start, *(_near_entry(held, cut, rows // count // 4) for cut in inner), end]


def _near_entry(held: PartitionState, cut: int, slack: int) -> int:
    """The entry boundary next to `cut` if it is within `slack` rows, else `cut`."""
    (placed,) = held.segments_between(cut, cut + 1)
    bounds = [placed.base + row for row in placed.segment.first_rows()] + [placed.end]
    at = bisect_right(bounds, cut)
    nearest = min(bounds[at - 1 : at + 1], key=lambda bound: abs(bound - cut))
    return nearest if abs(nearest - cut) <= slack else cut


def _slices(topic_id: str, held: PartitionState, lo: int, hi: int) -> Iterator[ReadSlice]:
    """The slices of [lo, hi): neighbours in one ledger become one."""
    last: ReadSlice | None = None
    for placed in held.segments_between(lo, hi):
        made = _slice(topic_id, placed, lo, hi)
        if last is None:
            last = made
        elif _follows(last, made):
            last = _joined(last, made)
        else:
            yield last
            last = made
    if last is not None:
        yield last


def _slice(topic_id: str, placed: PlacedSegment, lo: int, hi: int) -> ReadSlice:
    segment = placed.segment
    pieces = tuple(_pieces(placed, max(lo, placed.base), min(hi, placed.end)))
    rows = sum(piece.take for piece in pieces)
    return ReadSlice(
        topic_id=topic_id,
        partition=segment.partition,
        ledger_id=segment.ledger_id,
        metadata_version=segment.metadata_version,
        known_confirmed=segment.last_entry,
        pieces=pieces,
        bytes=segment.bytes * rows // segment.rows,
    )


def _pieces(placed: PlacedSegment, lo: int, hi: int) -> Iterator[EntryPiece]:
    """The parts of the segment's entries that hold offsets [lo, hi), a part of the segment."""
    first_rows = placed.segment.first_rows()
    ids = list(placed.segment.entry_ids())
    at = index_of_row(first_rows, lo - placed.base)
    while at < len(ids) and placed.base + first_rows[at] < hi:
        base = placed.base + first_rows[at]
        skip = max(0, lo - base)
        take = min(hi, base + placed.segment.entry_rows[at]) - base - skip
        yield EntryPiece(ids[at], first_rows[at], skip, take, base + skip)
        at += 1


def _follows(one: ReadSlice, other: ReadSlice) -> bool:
    return one.ledger_id == other.ledger_id and one.pieces[-1].entry_id < other.pieces[0].entry_id


def _joined(one: ReadSlice, other: ReadSlice) -> ReadSlice:
    return replace(
        one,
        metadata_version=max(one.metadata_version, other.metadata_version),
        known_confirmed=max(one.known_confirmed, other.known_confirmed),
        pieces=one.pieces + other.pieces,
        bytes=one.bytes + other.bytes,
    )
