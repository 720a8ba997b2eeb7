"""Pieces: what each entry has of the rows that a read wants, in columns; and slices, the entries of
a ledger that a task fetches for them. Pure.

Always true: pieces are by partition, then by offset, and hold every row of the spans that the table
has, once. An order of entries that is made of them (`fetch_order`) has the rows of each partition
rising; an entry that several partitions share is in it once, unless partitions want the same
entries in different orders. Slices hold the rows of the spans once, in that order; a slice carries
all that its reader trusts: the ledger's metadata version and the end of the committed ranges, which
is proof that they are confirmed (hazard 18). What a commit held itself is a slice without a ledger.

Only the entries of a `counted` segment record how many rows they have. A plan takes it for
COUNTED_PARTS entries of as many rows each; a fetch takes it for a slice of rows (`CountedSlice`),
and the reader looks for the entries (live.py).
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spark_ledger.topic.entry.arrow_arrays import as_numpy, distinct_values, distinct_with_indices
from spark_ledger.topic.log.segment_table import Longs, SegmentTable
from spark_ledger.topic.log.segments import INLINE, NO_ENTRY, LiveSegment, Payload

EMPTY_ROW_BYTES = 1e-3  # so that rows without bytes are shared out too
COUNTED_PARTS = 64
NO_COMMIT = NO_EPOCH = -1  # a reader needs neither
Floats = npt.NDArray[np.float64]


class Span(NamedTuple):
    """Offsets [lo, hi) of a partition without a hole. The consecutive segments [first, end) of a
    table hold them; some of these segments may hold none of these rows."""

    partition: int
    lo: int
    hi: int
    first: int
    end: int


Spans = tuple[Span, ...]
"""By partition, then by offset; they do not overlap."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Rows [skip, skip + take) of those that an entry has of a partition; the first of them has
    offset `offset`. `first_row` is the number of the partition's first row in the entry, as its
    header has it. `span` and `segment` index the span and the segment of the piece; `weight` is
    about its bytes: even empty rows have some."""

    span: Longs
    segment: Longs
    partition: Longs
    ledger: Longs
    entry: Longs
    first_row: Longs
    skip: Longs
    take: Longs
    offset: Longs
    weight: Floats

    def __len__(self) -> int:
        return len(self.segment)

    def taken(self, positions: npt.NDArray[Any]) -> "Pieces":
        """The pieces at these positions, in their order, or where a mask is true."""
        return Pieces(*(getattr(self, name)[positions] for name in self.__slots__))

    def entries(self) -> Longs:
        """For each piece the number of its entry: entries are numbered as ledgers and entries
        rise. An inline segment has entries of its own."""
        own = np.where(self.ledger == INLINE, -2 - self.segment, self.ledger)
        order = np.lexsort((self.entry, own))
        new = np.diff(own[order], prepend=0) != 0
        new |= np.diff(self.entry[order], prepend=0) != 0
        new[:1] = False
        numbers = np.empty(len(self), dtype=np.int64)
        numbers[order] = np.cumsum(new)
        return numbers


def rows_of(spans: Iterable[Span]) -> int:
    return sum(span.hi - span.lo for span in spans)


def cut_out(spans: Spans, gone: Mapping[int, Sequence[tuple[int, int]]]) -> Spans:
    """The spans without these offsets [lo, hi) of partitions."""
    kept: list[Span] = []
    for span in spans:
        left = [span]
        for lo, hi in gone.get(span.partition, ()):
            before = [part._replace(hi=min(part.hi, lo)) for part in left]
            after = [part._replace(lo=max(part.lo, hi)) for part in left]
            left = [part for part in sorted(before + after) if part.lo < part.hi]
        kept += left
    return tuple(kept)


def on_their_own(spans: Spans, table: SegmentTable) -> tuple[Spans, SegmentTable]:
    """The spans with a table that has only their segments."""
    span_array = np.array(_narrowed(spans, table), dtype=np.int64)
    counts = span_array[:, 4] - span_array[:, 3]
    rows = distinct_values(_ranges(span_array[:, 3], counts))
    if int(rows[-1] - rows[0]) + 1 == len(rows):
        part = table.part(int(rows[0]), int(rows[-1]) + 1)
    else:
        part = table.take(rows)
    span_array[:, 3] = np.searchsorted(rows, span_array[:, 3])
    span_array[:, 4] = span_array[:, 3] + counts
    return tuple(map(Span._make, span_array.tolist())), part


def _narrowed(spans: Spans, table: SegmentTable) -> list[Span]:
    """Each span with only those segments that hold its rows."""
    span_array, narrowed = np.array(spans, dtype=np.int64), list(spans)
    second = np.minimum(span_array[:, 3] + 1, span_array[:, 4] - 1)
    wide = (table.bases[span_array[:, 4] - 1] >= span_array[:, 2]) | (
        (table.bases[second] <= span_array[:, 1]) & (second > span_array[:, 3])
    )
    for i in np.flatnonzero(wide).tolist():
        span = spans[i]
        bases = table.bases[span.first : span.end]
        first = int(bases.searchsorted(span.lo, side="right")) - 1
        end = int(bases.searchsorted(span.hi, side="left"))
        narrowed[i] = span._replace(first=span.first + max(0, first), end=span.first + end)
    return narrowed


def pieces_of(
    table: SegmentTable, spans: Spans, among: npt.NDArray[np.bool_] | None = None
) -> Pieces:
    """The pieces of the spans' rows; with `among` only those in these segments of the table."""
    span_array = np.array(spans, dtype=np.int64).reshape(-1, len(Span._fields))
    segment = _ranges(span_array[:, 3], span_array[:, 4] - span_array[:, 3])
    span = np.repeat(np.arange(len(spans)), span_array[:, 4] - span_array[:, 3])
    if among is not None:
        segment, span = segment[among[segment]], span[among[segment]]
    counts_at, counts, ids = _entries(table)
    many = counts_at[segment + 1] - counts_at[segment]
    at = _ranges(counts_at[segment], many)  # of each (span, segment, entry) its place in `counts`
    span, segment = np.repeat(span, many), np.repeat(segment, many)
    rows = counts[at].astype(np.int64)
    before = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    first_row = before[at] - before[counts_at[segment]]
    base = table.bases[segment] + first_row
    lo = np.maximum(base, span_array[span, 1])
    hi = np.minimum(base + rows, span_array[span, 2])
    size = table.sizes[segment] * (hi - lo) / table.rows[segment]
    pieces = Pieces(
        span=span,
        segment=segment,
        partition=span_array[span, 0],
        ledger=table.ledgers[segment],
        entry=ids[at],
        first_row=first_row,
        skip=lo - base,
        take=hi - lo,
        offset=lo,
        weight=np.maximum(size, (hi - lo) * EMPTY_ROW_BYTES),
    )
    kept = hi > lo
    return pieces if bool(kept.all()) else pieces.taken(kept)


def fetch_order(pieces: Pieces) -> Longs:
    """For each piece the place of its entry in an order in which the rows of each partition rise:
    of the entries that may come next, the first one of the lowest ledger comes.

    Entries that no such order can hold come last, partition by partition.
    """
    entries = pieces.entries()
    follows = np.diff(pieces.partition) == 0
    pairs = np.stack([entries[:-1][follows], entries[1:][follows]])
    pairs = pairs[:, pairs[0] != pairs[1]]
    if bool((pairs[0] < pairs[1]).all()):
        return entries
    count = int(entries.max()) + 1
    placed = _sorted_by(pairs, count)
    places = placed[entries]
    left = places < 0
    if bool(left.any()):
        parts, numbers = pieces.partition[left], entries[left]
        new = (np.diff(parts, prepend=-1) != 0) | (np.diff(numbers, prepend=-1) != 0)
        places[left] = int(places.max()) + np.cumsum(new)
    return places


def _sorted_by(pairs: Longs, count: int) -> Longs:
    """The places of `count` entries so that the first of each pair comes before the second; -1 for
    entries that wait for each other."""
    unique = distinct_values(pairs[0] * count + pairs[1])
    firsts, seconds = unique // count, unique % count
    waits = np.bincount(seconds, minlength=count).tolist()
    begins = np.searchsorted(firsts, np.arange(count + 1)).tolist()
    after = seconds.tolist()
    ready = [entry for entry, waiting in enumerate(waits) if not waiting]
    places = np.full(count, -1, dtype=np.int64)
    place = 0
    while ready:
        entry = heapq.heappop(ready)
        places[entry] = place
        place += 1
        for later in after[begins[entry] : begins[entry + 1]]:
            waits[later] -= 1
            if not waits[later]:
                heapq.heappush(ready, later)
    return places


def spans_by(pieces: Pieces, number: Longs) -> Iterator[Spans]:
    """The spans of the pieces with each number, numbers rising."""
    order = np.argsort(number, kind="stable")
    pieces, numbers = pieces.taken(order), number[order]
    hi = pieces.offset + pieces.take
    new = (np.diff(pieces.span, prepend=-1) != 0) | (np.diff(numbers, prepend=-1) != 0)
    new[1:] |= pieces.offset[1:] != hi[:-1]
    starts = np.flatnonzero(new)
    ends = np.append(starts[1:], len(order)) - 1
    columns = (
        *(numbers[starts], pieces.partition[starts], pieces.offset[starts], hi[ends]),
        *(pieces.segment[starts], pieces.segment[ends] + 1),
    )
    by_number: dict[int, list[Span]] = {}
    for n, *span in zip(*(column.tolist() for column in columns), strict=True):
        by_number.setdefault(n, []).append(Span(*span))
    return map(tuple, by_number.values())


def _ranges(starts: Longs, counts: Longs) -> Longs:
    """For each i the numbers starts[i], starts[i] + 1, ...: counts[i] numbers."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - counts - starts, counts)


def _lists(table: SegmentTable, name: str) -> tuple[Longs, npt.NDArray[Any]]:
    """The positions at which the list of each row begins and the last list ends, and the values."""
    column = table.batch.column(name)
    offsets = as_numpy(column.offsets).astype(np.int64)
    values = as_numpy(column.values)[offsets[0] : offsets[-1]]
    return offsets - offsets[0], values


class _Entries(NamedTuple):
    """The positions at which the entries of each segment begin and the last ones end; the rows of
    each entry, and its id."""

    at: Longs
    rows: Longs
    ids: Longs


def _entries(table: SegmentTable) -> _Entries:
    counts_at, listed = _lists(table, "entry_rows")
    counted = table.counted
    if not bool(counted.any()):
        return _Entries(counts_at, listed, _entry_ids(table))
    entries, rows = table.entry_counts[counted], table.rows[counted]
    many = np.diff(counts_at)
    many[counted] = np.minimum(entries, COUNTED_PARTS)
    counts_at = np.concatenate([[0], np.cumsum(many)])
    assumed = np.repeat(counted, many)
    counts, ids = np.empty(len(assumed), np.int64), np.empty(len(assumed), np.int64)
    counts[~assumed] = listed
    ids[~assumed] = _entry_ids(table.take(np.flatnonzero(~counted)))
    parts = many[counted]
    nth, parts_each = _ranges(np.zeros_like(parts), parts), np.repeat(parts, parts)
    rows, entries = np.repeat(rows, parts), np.repeat(entries, parts)
    firsts = np.repeat(table.first_entries[counted], parts)
    counts[assumed] = (nth + 1) * rows // parts_each - nth * rows // parts_each
    ids[assumed] = firsts + nth * entries // parts_each
    return _Entries(counts_at, counts, ids)


def _entry_ids(table: SegmentTable) -> Longs:
    """The ids of all entries of all segments, in order."""
    _, ends = _lists(table, "entries")
    firsts, lasts = ends[::2], ends[1::2]
    return _ranges(firsts, lasts - firsts + 1)


@dataclass(frozen=True, slots=True)
class LiveRows:
    """Rows of a segment born live, still open or `counted`: offsets [start, end) of the partition,
    all of them in entries up to `last_entry`, which is confirmed. The segment's entries up to it
    have `rows` in all, 0: it is not known how many."""

    live: LiveSegment
    start: int
    end: int
    last_entry: int
    rows: int = 0


@dataclass(frozen=True, slots=True)
class CountedSlice:
    """Rows of a segment that is `counted`, in `count` entries of `bytes`, about."""

    rows: LiveRows
    bytes: int
    count: int

    @property
    def ledger_id(self) -> int:
        return self.rows.live.ledger_id


SLICE_ENTRIES_MAX = 4096  # are objects at a time; a task may have a million
WANTED = np.dtype(
    [(name, np.int64) for name in ("partition", "first_row", "skip", "take", "offset")]
)
Wanted = npt.NDArray[np.void]
"""Pieces of one entry, by partition and offset, as in Pieces."""


class WantedEntry(NamedTuple):
    """An entry, and the pieces of it that a task reads."""

    entry_id: int
    pieces: Wanted


@dataclass(frozen=True, slots=True, eq=False)
class ReadSlice:
    """Entries of one ledger, ids rising; entries of commits have the `ledger_id` INLINE, and come
    with their payloads. `bytes` is about the size of the pieces, which may be a small part of the
    entries. `filter_entry` is the segments'."""

    ledger_id: int
    metadata_version: int
    known_confirmed: int
    entries: tuple[WantedEntry, ...]
    bytes: int
    filter_entry: int = NO_ENTRY
    payloads: tuple[Payload, ...] = ()

    @property
    def count(self) -> int:
        return len(self.entries)


Slice = ReadSlice | CountedSlice


def slices_of(table: SegmentTable, spans: Spans, *, by_filter: bool = False) -> Iterator[Slice]:
    """The slices of the spans' rows, in order. Neighbours in one ledger are one slice; with
    `by_filter` only if they also have the same key filters."""
    for part in _parted(table, spans):
        if isinstance(part, CountedSlice):
            yield part
        else:
            yield from _listed(table, part, by_filter)


def _parted(table: SegmentTable, spans: Spans) -> Iterator[Spans | CountedSlice]:
    """The spans cut at counted segments, and the slices of these segments."""
    held: list[Span] = []
    counted = table.counted
    for span in spans if bool(counted.any()) else ():
        first = span.first
        for i in (span.first + np.flatnonzero(counted[span.first : span.end])).tolist():
            held += _within(table, span._replace(first=first, end=i))
            first = i + 1
            for own in _within(table, span._replace(first=i, end=first)):
                if held:
                    yield tuple(held)
                held = []
                yield _counted(table, own)
        held += _within(table, span._replace(first=first))
    if held or not bool(counted.any()):
        yield tuple(held) or spans


def _within(table: SegmentTable, span: Span) -> list[Span]:
    """The part of the span that its segments hold."""
    if span.first == span.end:
        return []
    lo = max(span.lo, int(table.bases[span.first]))
    hi = min(span.hi, int(table.ends[span.end - 1]))
    return [span._replace(lo=lo, hi=hi)] if lo < hi else []


def _counted(table: SegmentTable, span: Span) -> CountedSlice:
    own = live_rows(table, span.first, span)
    part = (own.end - own.start) / own.rows
    size = int(int(table.sizes[span.first]) * part)
    return CountedSlice(own, size, math.ceil(int(table.entry_counts[span.first]) * part))


def live_rows(table: SegmentTable, i: int, span: Span) -> LiveRows:
    """The rows of the span that the counted segment `i` has."""
    base, rows, last = (int(column[i]) for column in (table.bases, table.rows, table.last_entries))
    ledger, version = int(table.ledgers[i]), int(table.versions[i])
    live = LiveSegment(
        *(span.partition, ledger, version, base, NO_COMMIT, "", NO_EPOCH),
        first_entry=int(table.first_entries[i]),
        rows_before=int(table.rows_before[i]),
    )
    return LiveRows(live, max(span.lo, base), min(span.hi, base + rows), last, rows)


def _listed(table: SegmentTable, spans: Spans, by_filter: bool) -> Iterator[ReadSlice]:
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
    version_and_last = _by_ledger(table)
    in_entries = _as_array(pieces)
    for start, end in zip(starts, [*starts[1:], len(firsts)], strict=True):
        numbers = range(start, end)
        ids = pieces.entry[firsts[start:end]].tolist()
        at = bounds[start : end + 1].tolist()
        ledger_id = int(pieces.ledger[at[0]])
        yield ReadSlice(
            *(ledger_id, *version_and_last[ledger_id]),
            entries=tuple(
                WantedEntry(entry, in_entries[at[i] : at[i + 1]]) for i, entry in enumerate(ids)
            ),
            bytes=int(sizes[start:end].sum()),
            filter_entry=int(filters[at[0]]) if by_filter else NO_ENTRY,
            payloads=_payloads(table, pieces, [at[i - start] for i in numbers], ledger_id),
        )


def _places(pieces: Pieces) -> Longs:
    """As fetch_order; the entries of a single partition are in the order of its rows."""
    if pieces.partition[0] == pieces.partition[-1]:
        new = (np.diff(pieces.segment, prepend=-1) != 0) | (np.diff(pieces.entry, prepend=-1) != 0)
        return np.cumsum(new) - 1
    return fetch_order(pieces)


def _starts(keys: list[Longs], entries: Longs) -> list[int]:
    """The indices at which slices begin: where a key changes, or where entry ids do not rise. The
    ids of inline entries count from 0 in each segment, and need not rise."""
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
    """For each ledger the newest version that a segment names, and the last entry that a segment
    proves to be confirmed."""
    ledgers, indices = distinct_with_indices(table.ledgers)
    versions = np.zeros(len(ledgers), np.int64)
    np.maximum.at(versions, indices, table.versions)
    lasts = np.zeros(len(ledgers), np.int64)
    np.maximum.at(lasts, indices, table.last_entries)
    columns = zip(ledgers.tolist(), versions.tolist(), lasts.tolist(), strict=True)
    return {ledger: (version, last) for ledger, version, last in columns}


def _as_array(pieces: Pieces) -> Wanted:
    array = np.empty(len(pieces), dtype=WANTED)
    for name in WANTED.names or ():
        array[name] = getattr(pieces, name)
    return array


def _payloads(
    table: SegmentTable, pieces: Pieces, at: list[int], ledger_id: int
) -> tuple[Payload, ...]:
    """The payloads of the inline entries whose first pieces are at these positions."""
    if ledger_id != INLINE:
        return ()
    places = zip(pieces.segment[at].tolist(), pieces.entry[at].tolist(), strict=True)
    return tuple(table.inline_payload(segment, entry) for segment, entry in places)
