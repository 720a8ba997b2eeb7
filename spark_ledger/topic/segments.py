"""A segment: entries of one ledger that hold consecutive rows of one partition.

Always true: entry ids rise strictly; `entry_rows` has one positive count for each entry, in
order; `rows` is their sum. Every entry was acknowledged, in order, to the handle that wrote it
(hazard 18), so a committed segment is confirmed whatever a bookie's last add confirmed says.
Entries count their rows from the segment's first row, so a commit may place it at any offset.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any


@dataclass(frozen=True, slots=True)
class Segment:
    """`entries` are ranges (first, last), both included. `metadata_version` is a version of the
    ledger's record at or after the last ack: no older record may be used to read it (hazard 27).
    `min_ms` and `max_ms` are the writers' clocks."""

    partition: int
    ledger_id: int
    metadata_version: int
    entries: tuple[tuple[int, int], ...]
    entry_rows: tuple[int, ...]
    rows: int
    bytes: int
    min_ms: int
    max_ms: int

    def __post_init__(self) -> None:
        ids = [entry for ends in self.entries for entry in ends]
        rising = all(a <= b for a, b in self.entries) and all(
            a[1] < b[0] for a, b in zip(self.entries, self.entries[1:], strict=False)
        )
        if self.partition < 0 or not ids or ids[0] < 0 or not rising:
            raise ValueError(f"entry ranges must rise from 0 on: {self.entries}")
        if sum(last - first + 1 for first, last in self.entries) != len(self.entry_rows):
            raise ValueError(f"{len(self.entry_rows)} row counts for entries {self.entries}")
        if min(self.entry_rows) < 1 or sum(self.entry_rows) != self.rows:
            raise ValueError(f"{self.rows} rows in entries of {self.entry_rows} rows")

    @property
    def last_entry(self) -> int:
        return self.entries[-1][1]

    def entry_ids(self) -> Iterator[int]:
        for first, last in self.entries:
            yield from range(first, last + 1)

    def first_rows(self) -> list[int]:
        """For each entry the segment's row it begins with."""
        return list(accumulate(self.entry_rows, initial=0))[:-1]


@dataclass(frozen=True, slots=True)
class PlacedSegment:
    """A segment in its topic: its first row has offset `base` in the partition; `commit` is the
    number that brought it in, `commit_ms` that commit's time by the store's clock."""

    segment: Segment
    base: int
    commit: int
    commit_ms: int

    @property
    def end(self) -> int:
        return self.base + self.segment.rows


def index_of_row(bases: Sequence[int], row: int) -> int:
    """Which of the ascending `bases` the row belongs to: the last one at or below it."""
    return bisect_right(bases, row) - 1


def merge_ranges(entry_ids: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Rising entry ids as ranges with both ends included."""
    ranges: list[tuple[int, int]] = []
    for entry in entry_ids:
        if ranges and ranges[-1][1] + 1 == entry:
            ranges[-1] = (ranges[-1][0], entry)
        else:
            ranges.append((entry, entry))
    return tuple(ranges)


def to_json(segment: Segment) -> dict[str, Any]:
    return {
        "partition": segment.partition,
        "ledger": segment.ledger_id,
        "version": segment.metadata_version,
        "entries": [list(ends) for ends in segment.entries],
        "entry_rows": list(segment.entry_rows),
        "bytes": segment.bytes,
        "written_ms": [segment.min_ms, segment.max_ms],
    }


def from_json(plain: Mapping[str, Any]) -> Segment:
    """Raises KeyError, TypeError or ValueError when `plain` is no segment."""
    counts = tuple(int(rows) for rows in plain["entry_rows"])
    min_ms, max_ms = plain["written_ms"]
    return Segment(
        partition=plain["partition"],
        ledger_id=plain["ledger"],
        metadata_version=plain["version"],
        entries=tuple((int(first), int(last)) for first, last in plain["entries"]),
        entry_rows=counts,
        rows=sum(counts),
        bytes=plain["bytes"],
        min_ms=min_ms,
        max_ms=max_ms,
    )
