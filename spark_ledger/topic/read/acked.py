"""Rows that a read leaves out, because a subscription's consumers acknowledged them. Pure.

Always true: a read leaves out exactly the acknowledged offsets. Long runs of them are cut out of a
plan's spans, so that tasks stay even; tasks pass over the others, entry by entry. An entry of which
every row is acknowledged is not fetched, and an acknowledged row that is gone is no loss. A task
has the acknowledged offsets of its own rows only, as a compressed bitmap: at most a bit for each
offset in the blocks of 65,536 offsets that it reads.

Most reads leave out nothing, so the library of bitmaps is loaded only if there is an offset.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from spark_ledger.topic.log.segment_table import Longs
from spark_ledger.topic.read.pieces import (
    CountedSlice,
    EntryPieces,
    LiveRows,
    PlannedEntry,
    Slice,
)

if TYPE_CHECKING:
    from pyroaring import BitMap64

RUNS_CUT_MAX = 64
"""A run is long if it has at least this part of its span's rows. (Of a span with CUT_WHOLE_ROWS at
most, every run is cut out; for many tasks shorter runs too.)"""
CUT_WHOLE_ROWS = 512
WINDOW_OFFSETS = 1 << 20
"""The offsets that are listed at a time, 8 bytes each."""


class AckedRows:
    """Acknowledged offsets by partition. Never changes."""

    __slots__ = ("_offsets",)

    def __init__(self, offsets: "Mapping[int, BitMap64] | None" = None) -> None:
        self._offsets = {p: rows for p, rows in sorted((offsets or {}).items()) if rows}

    def __bool__(self) -> bool:
        return bool(self._offsets)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AckedRows) and self._offsets == other._offsets

    def __hash__(self) -> int:
        return hash(tuple((p, len(offsets)) for p, offsets in self._offsets.items()))

    def __repr__(self) -> str:
        counts = ", ".join(f"{p}: {len(offsets)}" for p, offsets in self._offsets.items())
        return f"AckedRows({{{counts}}})"

    def __reduce__(self) -> tuple[object, ...]:
        packed = {p: zlib.compress(offsets.serialize(), 1) for p, offsets in self._offsets.items()}
        return unpacked, (packed,)

    @property
    def offsets(self) -> "Mapping[int, BitMap64]":
        return self._offsets

    @property
    def ends(self) -> dict[int, int]:
        """By partition one past the highest acknowledged offset."""
        return {p: int(offsets.max()) + 1 for p, offsets in self._offsets.items()}

    def of(self, partition: int) -> "BitMap64 | None":
        return self._offsets.get(partition)

    def count(self, partition: int, lo: int, hi: int) -> int:
        """How many offsets in [lo, hi) are acknowledged."""
        offsets = self._offsets.get(partition)
        return 0 if offsets is None or lo >= hi else int(offsets.range_cardinality(lo, hi))

    def unacked_count(self, partition: int, lo: int, hi: int) -> int:
        """How many offsets in [lo, hi) are not acknowledged."""
        return max(0, hi - lo) - self.count(partition, lo, hi)

    def within(self, ranges: Iterable[tuple[int, int, int]]) -> "AckedRows":
        """Only the offsets in these (partition, lo, hi)."""
        if not self._offsets:
            return self
        from spark_ledger.topic.acks.sets import within

        kept: dict[int, BitMap64] = {}
        for partition, lo, hi in ranges:
            offsets = self._offsets.get(partition)
            if offsets is not None and lo < hi and (part := within(offsets, lo, hi)):
                kept[partition] = kept[partition] | part if partition in kept else part
        return AckedRows(kept)

    def unacked_runs(self, partition: int, lo: int, hi: int) -> list[tuple[int, int]]:
        """The runs [start, end) of [lo, hi) that are not acknowledged, in order."""
        if not self.count(partition, lo, hi):
            return [(lo, hi)] if lo < hi else []
        from spark_ledger.topic.acks.sets import ranges_of

        return ranges_of(self.unacked(partition, lo, hi))

    def unacked(self, partition: int, lo: int, hi: int) -> "BitMap64":
        """The offsets in [lo, hi) that are not acknowledged. The partition must have acknowledged
        offsets."""
        from spark_ledger.topic.acks.sets import within

        offsets = within(self._offsets[partition], lo, hi)
        offsets.flip_inplace(lo, hi)
        return offsets

    def without_long_runs(
        self, partition: int, lo: int, hi: int, tasks_min: int = 1
    ) -> list[tuple[int, int]]:
        """[lo, hi) without the long runs of acknowledged offsets, in order. If the offsets are few,
        without all acknowledged offsets. `tasks_min` tasks or more will share the result."""
        if hi - lo <= CUT_WHOLE_ROWS or not self.count(partition, lo, hi):
            return self.unacked_runs(partition, lo, hi)
        ranges, at = [], lo
        rows_min = (hi - lo) // max(RUNS_CUT_MAX, 2 * tasks_min)
        for start, end in _long_runs(self._offsets[partition], lo, hi, rows_min):
            if at < start:
                ranges.append((at, start))
            at = end
        return [*ranges, (at, hi)] if at < hi else ranges

    def counts_below(self, partition: int, edges: Longs) -> Longs:
        """For each of the rising edges, how many offsets from the first edge up to it are
        acknowledged."""
        counts = np.zeros(len(edges), np.int64)
        offsets = self._offsets.get(partition)
        if offsets is None or not len(edges):
            return counts
        from spark_ledger.topic.acks.sets import next_in, within

        total, at, last = 0, int(edges[0]), int(edges[-1])
        while (start := next_in(offsets, at, last)) < last:
            end = min(last, start + WINDOW_OFFSETS)
            values = np.frombuffer(within(offsets, start, end).to_array(), np.uint64)
            before, first, after = np.searchsorted(edges, [at, start, end], side="right").tolist()
            counts[before:first] = total
            inner = edges[first:after].astype(np.uint64)
            counts[first:after] = total + np.searchsorted(values, inner)
            total, at = total + len(values), end
        counts[int(np.searchsorted(edges, at, side="right")) :] = total
        return counts


NO_ACKED = AckedRows()


def unpacked(packed: Mapping[int, bytes]) -> AckedRows:
    from pyroaring import BitMap64

    return AckedRows({p: BitMap64.deserialize(zlib.decompress(b)) for p, b in packed.items()})


def _long_runs(offsets: "BitMap64", lo: int, hi: int, rows_min: int) -> Iterator[tuple[int, int]]:
    """The runs of at least `rows_min` offsets in [lo, hi), in order; some shorter runs too. Looks
    at two places for each `rows_min` offsets: a run as long has one of them whole."""
    from spark_ledger.topic.acks.sets import run_end

    step = max(1, rows_min // 2)
    at, before = lo, lo
    while at + step <= hi:
        if not offsets.contains_range(at, at + step):
            at += step
            continue
        start, end = _run_start(offsets, before, at), min(hi, run_end(offsets, at))
        yield start, end
        before = end
        at += -(-(end - at) // step) * step


def _run_start(offsets: "BitMap64", lo: int, at: int) -> int:
    """The lowest offset from `lo` on from which all offsets up to `at` are in the set."""
    low, high = lo, at
    while low < high:
        middle = (low + high) // 2
        if offsets.contains_range(middle, at):
            high = middle
        else:
            low = middle + 1
    return low


# -- in a task's entries ---------------------------------------------------------------------------


def unacked_pieces(pieces: EntryPieces, acked: AckedRows) -> EntryPieces:
    """The pieces of an entry without the acknowledged rows; the same object if no row is
    acknowledged."""
    parts = [_unacked_part(pieces[i : i + 1], acked) for i in range(len(pieces))]
    if all(part is None for part in parts):
        return pieces
    kept = (pieces[i : i + 1] if part is None else part for i, part in enumerate(parts))
    return np.concatenate([*kept])


def _unacked_part(piece: EntryPieces, acked: AckedRows) -> EntryPieces | None:
    """The parts of the piece that are not acknowledged; None: the whole piece. `piece` is an array
    with one element."""
    partition, _, skip, take, offset = piece.tolist()[0]
    if not acked.count(partition, offset, offset + take):
        return None
    from spark_ledger.topic.acks.sets import bounds_of

    starts, ends = bounds_of(acked.unacked(partition, offset, offset + take))
    part = np.repeat(piece, len(starts))
    part["skip"], part["take"], part["offset"] = skip + starts - offset, ends - starts, starts
    return part


def unacked_slice(planned: Slice, acked: AckedRows) -> Slice | None:
    """The slice without the entries of which every row is acknowledged; None without an entry."""
    if isinstance(planned, CountedSlice):
        rows = unacked_live(planned.rows, acked)
        return None if rows is None else replace(planned, rows=rows)
    has_unacked = [_has_unacked_rows(entry, acked) for entry in planned.entries]
    if all(has_unacked):
        return planned
    entries = tuple(e for e, is_kept in zip(planned.entries, has_unacked, strict=True) if is_kept)
    if not entries:
        return None
    payloads = tuple(
        p for p, is_kept in zip(planned.payloads, has_unacked, strict=False) if is_kept
    )
    size = planned.bytes * len(entries) // len(planned.entries)
    return replace(planned, entries=entries, payloads=payloads, bytes=size)


def _has_unacked_rows(entry: PlannedEntry, acked: AckedRows) -> bool:
    return any(
        acked.unacked_count(partition, offset, offset + take)
        for partition, _, _, take, offset in entry.pieces.tolist()
    )


def unacked_live(live: LiveRows, acked: AckedRows) -> LiveRows | None:
    """The rows without the acknowledged rows at their begin and end; None if all are
    acknowledged."""
    runs = acked.unacked_runs(live.live.partition, live.start, live.end)
    return replace(live, start=runs[0][0], end=runs[-1][1]) if runs else None
