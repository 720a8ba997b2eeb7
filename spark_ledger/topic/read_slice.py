"""What a task fetches: entries of ledgers, made of the segments that it carries. Pure.

Always true: slices hold the rows of the spans once, those of each partition in order, and an entry
once for all its partitions (pieces.py says when not); a slice carries all that its reader trusts:
the ledger's metadata version and the end of the committed ranges, which is proof that they are
confirmed (hazard 18). What a commit held itself is a slice without a ledger.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spark_ledger.topic.arrow_arrays import distinct_and_which
from spark_ledger.topic.pieces import Pieces, Spans, fetch_order, pieces_of
from spark_ledger.topic.segment_table import Longs, SegmentTable
from spark_ledger.topic.segments import INLINE, NO_ENTRY, Payload

SLICE_ENTRIES_MAX = 4096  # are objects at a time; a task may have a million
WANTED = np.dtype(
    [(name, np.int64) for name in ("partition", "first_row", "skip", "take", "offset")]
)
Wanted = npt.NDArray[np.void]
"""Pieces of one entry, by partition and offset, as in Pieces."""


class EntryPiece(NamedTuple):
    """Rows [skip, skip + take) that an entry has of a partition; the first of them has offset
    `offset`. `first_row` is what the entry's header must say."""

    entry_id: int
    first_row: int
    skip: int
    take: int
    offset: int

    def wanted(self, partition: int) -> Wanted:
        return np.array([(partition, *self[1:])], dtype=WANTED)


class WantedEntry(NamedTuple):
    """An entry, and what is wanted of it."""

    entry_id: int
    pieces: Wanted


@dataclass(frozen=True, slots=True, eq=False)
class ReadSlice:
    """Entries of one ledger, ids rising; those of commits have the `ledger_id` INLINE, and their
    payloads. `bytes` are about those of what is wanted, which may be a small part of what the
    entries take. `filter_entry` as a segment's."""

    ledger_id: int
    metadata_version: int
    known_confirmed: int
    entries: tuple[WantedEntry, ...]
    bytes: int
    filter_entry: int = NO_ENTRY
    payloads: tuple[Payload, ...] = ()

    @property
    def entry_ids(self) -> list[int]:
        return [entry.entry_id for entry in self.entries]

    @property
    def rows(self) -> int:
        return sum(int(entry.pieces["take"].sum()) for entry in self.entries)


def slices_of(table: SegmentTable, spans: Spans, *, by_filter: bool = False) -> Iterator[ReadSlice]:
    """The slices of the spans' rows, in order. Neighbours in one ledger are one, unless that is
    `by_filter` and they have different key filters."""
    pieces = pieces_of(table, spans)
    if not len(pieces):
        return
    places = _places(pieces)
    order = np.argsort(places, kind="stable")
    pieces, places = pieces.taken(order), places[order]
    firsts = np.flatnonzero(np.diff(places, prepend=-1))
    filters = table.filter_entries[pieces.segment]
    keys = [pieces.ledger[firsts], filters[firsts] if by_filter else np.zeros(len(firsts), int)]
    starts = _starts(keys, pieces.entry[firsts])
    bounds = np.append(firsts, len(pieces))
    sizes = np.add.reduceat(pieces.weight, firsts)
    known = _by_ledger(table)
    wanted = _wanted(pieces)
    for start, end in zip(starts, [*starts[1:], len(firsts)], strict=True):
        some = range(start, end)
        ids = pieces.entry[firsts[start:end]].tolist()
        at = bounds[start : end + 1].tolist()
        ledger_id = int(pieces.ledger[at[0]])
        yield ReadSlice(
            *(ledger_id, *known[ledger_id]),
            entries=tuple(
                WantedEntry(entry, wanted[at[i] : at[i + 1]]) for i, entry in enumerate(ids)
            ),
            bytes=int(sizes[start:end].sum()),
            filter_entry=int(filters[at[0]]) if by_filter else NO_ENTRY,
            payloads=_payloads(table, pieces, [at[i - start] for i in some], ledger_id),
        )


def _places(pieces: Pieces) -> Longs:
    """As fetch_order; of one partition every entry is where its rows are."""
    if pieces.partition[0] == pieces.partition[-1]:
        new = (np.diff(pieces.segment, prepend=-1) != 0) | (np.diff(pieces.entry, prepend=-1) != 0)
        return np.cumsum(new) - 1
    return fetch_order(pieces)


def _starts(keys: list[Longs], entries: Longs) -> list[int]:
    """Where slices begin: a key is another, or the entries do not rise. Inline entries count from
    0 in each segment, and need not rise."""
    new = (np.diff(entries) <= 0) & (keys[0][1:] != INLINE)
    for key in keys:
        new |= np.diff(key) != 0
    starts = [0, *(np.flatnonzero(new) + 1).tolist()]
    ends = [*starts[1:], len(entries)]
    return [
        at
        for start, end in zip(starts, ends, strict=True)
        for at in range(start, end, SLICE_ENTRIES_MAX)
    ]


def _by_ledger(table: SegmentTable) -> dict[int, tuple[int, int]]:
    """Of each ledger the newest version that a segment names, and the last entry known to be
    confirmed."""
    ledgers, which = distinct_and_which(table.ledgers)
    versions = np.zeros(len(ledgers), np.int64)
    np.maximum.at(versions, which, table.versions)
    lasts = np.zeros(len(ledgers), np.int64)
    np.maximum.at(lasts, which, table.last_entries)
    each = zip(ledgers.tolist(), versions.tolist(), lasts.tolist(), strict=True)
    return {ledger: (version, last) for ledger, version, last in each}


def _wanted(pieces: Pieces) -> Wanted:
    wanted = np.empty(len(pieces), dtype=WANTED)
    for name in WANTED.names or ():
        wanted[name] = getattr(pieces, name)
    return wanted


def _payloads(
    table: SegmentTable, pieces: Pieces, at: list[int], ledger_id: int
) -> tuple[Payload, ...]:
    """Those of the inline entries whose first pieces are there."""
    if ledger_id != INLINE:
        return ()
    places = zip(pieces.segment[at].tolist(), pieces.entry[at].tolist(), strict=True)
    return tuple(table.inline_payload(segment, entry) for segment, entry in places)
