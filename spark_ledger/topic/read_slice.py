"""What a task fetches: entries of ledgers, made of the segments that it carries. Pure.

Always true: slices hold the rows asked for once, in order; a slice carries all that its reader
trusts: the ledger's metadata version and the end of the committed ranges, which is proof that they
are confirmed (hazard 18). What a commit held itself is a slice without a ledger.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from spark_ledger import errors
from spark_ledger.metadata.ledger_record import LedgerRecord
from spark_ledger.topic.segment_table import Stretch
from spark_ledger.topic.segments import (
    INLINE,
    NO_ENTRY,
    Payload,
    PlacedSegment,
    index_of_row,
)


class EntryPiece(NamedTuple):
    """Rows [skip, skip + take) that an entry has of the partition; the first of them has offset
    `offset`. `first_row` is what the entry's header must say."""

    entry_id: int
    first_row: int
    skip: int
    take: int
    offset: int


@dataclass(frozen=True, slots=True)
class ReadSlice:
    """Entries of one ledger, ids rising, that hold consecutive offsets of one partition; those
    of a commit have the `ledger_id` INLINE and their payloads, by entry id. `filter_entry` as a
    segment's."""

    topic_id: str
    partition: int
    ledger_id: int
    metadata_version: int
    known_confirmed: int
    pieces: tuple[EntryPiece, ...]
    bytes: int
    filter_entry: int = NO_ENTRY
    inline: tuple[Payload, ...] = ()

    @property
    def rows(self) -> int:
        return sum(piece.take for piece in self.pieces)


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


def slices_of(topic_id: str, partition: int, stretches: Iterable[Stretch]) -> Iterator[ReadSlice]:
    """The slices of the stretches' rows, in order: neighbours in one ledger become one."""
    last: ReadSlice | None = None
    for stretch in stretches:
        for placed in stretch.table:
            made = _slice(topic_id, placed, stretch.lo, stretch.hi)
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
        filter_entry=segment.filter_entry,
        inline=segment.inline,
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
    """Whether both can be fetched as one: no filter of their own, ids that go on rising."""
    return (
        one.ledger_id == other.ledger_id != INLINE
        and one.filter_entry == other.filter_entry == NO_ENTRY
        and one.pieces[-1].entry_id < other.pieces[0].entry_id
    )


def _joined(one: ReadSlice, other: ReadSlice) -> ReadSlice:
    return replace(
        one,
        metadata_version=max(one.metadata_version, other.metadata_version),
        known_confirmed=max(one.known_confirmed, other.known_confirmed),
        pieces=one.pieces + other.pieces,
        bytes=one.bytes + other.bytes,
    )
