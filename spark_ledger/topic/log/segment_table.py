"""Placed segments in columns: the form in which up to a million segments of a topic are kept, sent
and stored.

Always true: a table does not change. A row of a table is a segment; rows are ordered by partition,
then by base, and the offsets of a partition's segments do not overlap. A row takes some 100 bytes
in memory and 20 when it is stored; a part of a table shares the table's memory. docs/topics.md
("A chunk") has the columns.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_ledger import errors
from spark_ledger.topic.entry.arrow_arrays import as_numpy, of_list, of_numpy
from spark_ledger.topic.entry.arrow_stream import read_batch
from spark_ledger.topic.log.segments import (
    INLINE,
    NO_TOKEN,
    CommitTokens,
    PlacedSegment,
    Segment,
)

Longs = npt.NDArray[np.int64]

_COLUMNS: tuple[tuple[str, pa.DataType], ...] = (
    ("partition", pa.int32()),
    ("base", pa.int64()),
    ("rows", pa.int64()),
    ("bytes", pa.int64()),
    ("commit", pa.int64()),
    ("commit_ms", pa.int64()),
    ("ledger", pa.int64()),
    ("version", pa.int32()),
    ("entries", pa.list_(pa.int64())),  # first, last, first, last, ...
    ("entry_rows", pa.list_(pa.int32())),
    ("min_ms", pa.int64()),
    ("max_ms", pa.int64()),
    ("event_min_ms", pa.int64()),
    ("event_max_ms", pa.int64()),
    ("shared", pa.bool_()),
    ("filter_entry", pa.int64()),
    ("inline", pa.list_(pa.binary())),
    ("times", pa.list_(pa.int64())),  # rows, ms, rows, ms, ... of a merged segment
    ("rows_before", pa.int64()),
    ("tokens", pa.list_(pa.int64())),  # the token of all rows; or rows, token, rows, token, ...
)
_OPTIONAL_NAMES = ("rows_before", "tokens")
"""Columns that are stored only if a segment has a value in them."""
JOINED_SEGMENTS_MAX = 4096  # in a stretch that is joined from several stretches
OBJECTS_AT_ONCE = 1024
ONE_THREAD_ROWS_MAX = 2048
"""One thread encodes this many rows before Arrow's other threads would begin."""
ONE_THREAD_BYTES_MAX = 64 * 1024
"""One thread decodes this many bytes before Arrow's other threads would begin."""
DECODED_BYTES_MAX = 1 << 30  # some ten million segments
SCHEMA = pa.schema([pa.field(name, kind, nullable=False) for name, kind in _COLUMNS])
_REQUIRED_NAMES = tuple(name for name in SCHEMA.names if name not in _OPTIONAL_NAMES)


def _numbers(name: str) -> "cached_property[Longs]":
    """A column of numbers, as an attribute of the table."""
    return cached_property(lambda table: as_numpy(table.batch.column(name)))


class SegmentTable:
    """Made by `of`, `join`, `decode`, or as a part of another table."""

    partitions = _numbers("partition")
    bases = _numbers("base")
    """The first offset of each segment."""
    rows = _numbers("rows")
    sizes = _numbers("bytes")
    """About how many payload bytes each segment takes."""
    commits_ms = _numbers("commit_ms")
    min_ms = _numbers("min_ms")
    """When the first row of each segment was written, by its writer's clock."""
    ledgers = _numbers("ledger")
    """INLINE if a segment is in the commit itself."""
    versions = _numbers("version")
    """The oldest version of the ledger's record by which the segment may be read."""
    filter_entries = _numbers("filter_entry")
    """The entry with the filter of a segment's keys, NO_ENTRY if there is no filter."""
    rows_before = _numbers("rows_before")
    """The rows before each counted segment in its ledger."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch

    @classmethod
    def of(cls, placed: Iterable[PlacedSegment]) -> "SegmentTable":
        """A table of the segments, in the table's order."""
        rows = sorted(placed, key=lambda row: (row.segment.partition, row.base))
        columns = list(zip(*map(_row_values, rows), strict=True)) or [()] * len(_COLUMNS)
        arrays = [
            of_list(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)
        ]
        return cls(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))

    @classmethod
    def join(cls, tables: Sequence["SegmentTable"]) -> "SegmentTable":
        """All rows of the tables, in the table's order."""
        if len(tables) == 1:
            return tables[0]
        table = cls.concatenate(tables)
        partition_steps, base_steps = np.diff(table.partitions), np.diff(table.bases)
        if bool(((partition_steps > 0) | ((partition_steps == 0) & (base_steps >= 0))).all()):
            return table
        return table.take(np.lexsort((table.bases, table.partitions)))

    @classmethod
    def concatenate(cls, tables: Sequence["SegmentTable"]) -> "SegmentTable":
        """All rows of the tables. The caller must give the tables in the table's order."""
        if len(tables) == 1:
            return tables[0]
        joined = pa.Table.from_batches([table.batch for table in tables], SCHEMA).combine_chunks()
        batches = joined.to_batches()
        return cls(batches[0] if batches else cls.of(()).batch)

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def __iter__(self) -> Iterator[PlacedSegment]:
        for at in range(0, len(self), OBJECTS_AT_ONCE):
            yield from map(_placed_segment, self.batch.slice(at, OBJECTS_AT_ONCE).to_pylist())

    def __getitem__(self, i: int) -> PlacedSegment:
        """The segment in row `i`."""
        return _placed_segment(self.batch.slice(range(len(self))[i], 1).to_pylist()[0])

    @property
    def nbytes(self) -> int:
        """About how many bytes of memory the columns take."""
        return int(self.batch.nbytes)

    @property
    def ends(self) -> Longs:
        """One past the last offset of each segment."""
        return self.bases + self.rows

    def commit_times(self, lo: int, hi: int) -> tuple[Longs, Longs]:
        """The commit times of the offsets [lo, hi), which must be without a hole in the table, as
        runs of rows with equal times: the number of rows of each run, and the time of each run."""
        column = self.batch.column("times")
        offsets = as_numpy(column.offsets)
        flat = as_numpy(column.values)[offsets[0] : offsets[-1]]
        run_counts = np.diff(offsets) // 2
        counts = np.maximum(run_counts, 1)
        rows, times = np.repeat(self.rows, counts), np.repeat(self.commits_ms, counts)
        is_merged = np.repeat(run_counts > 0, counts)
        rows[is_merged], times[is_merged] = flat[::2], flat[1::2]
        return _clip_runs(int(self.bases[0]), rows, times, lo, hi)

    def token_of(self, partition: int, offset: int) -> int:
        """The token of the commit that made the row at the offset. The table must have this row."""
        i, _ = self.row_range(partition, offset, offset + 1)
        column = self.batch.column("tokens")
        flat = column[i].as_py()
        if len(flat) < 2:
            return int(flat[0]) if flat else NO_TOKEN
        _, tokens = self.part(i, i + 1).commit_tokens(offset, offset + 1)
        return int(tokens[0])

    def commit_tokens(self, lo: int, hi: int) -> tuple[Longs, Longs]:
        """The tokens of the offsets [lo, hi), which must be without a hole in the table, as runs of
        rows with equal tokens: the number of rows of each run, and the token of each run."""
        column = self.batch.column("tokens")
        offsets = as_numpy(column.offsets)
        flat = as_numpy(column.values)[offsets[0] : offsets[-1]]
        lengths = np.diff(offsets)
        run_counts = lengths // 2
        counts = np.maximum(run_counts, 1)
        only_tokens = np.full(len(self), NO_TOKEN, dtype=np.int64)
        only_tokens[lengths == 1] = flat[(offsets[:-1] - offsets[0])[lengths == 1]]
        rows, tokens = np.repeat(self.rows, counts), np.repeat(only_tokens, counts)
        has_runs, run_values = (
            np.repeat(run_counts > 0, counts),
            flat[np.repeat(run_counts > 0, lengths)],
        )
        rows[has_runs], tokens[has_runs] = run_values[::2], run_values[1::2]
        return _clip_runs(int(self.bases[0]), rows, tokens, lo, hi)

    @cached_property
    def shared(self) -> npt.NDArray[np.bool_]:
        """For each segment whether its entries hold rows of other partitions too."""
        shared: npt.NDArray[np.bool_] = as_numpy(self.batch.column("shared"))
        return shared

    @cached_property
    def counted(self) -> npt.NDArray[np.bool_]:
        """For each segment whether only the headers of its entries have the numbers of rows."""
        counted: npt.NDArray[np.bool_] = np.diff(self._entry_rows[0]) == 0
        return counted

    def inline_payload(self, i: int, entry: int) -> bytes:
        """The payload of entry `entry` of the inline segment in row `i`."""
        payload: bytes = self.batch.column("inline")[i][entry].as_py()
        return payload

    @cached_property
    def last_entries(self) -> Longs:
        """The last entry of each segment."""
        entries = self.batch.column("entries")
        lasts: Longs = as_numpy(entries.values)[as_numpy(entries.offsets)[1:] - 1]
        return lasts

    @cached_property
    def first_entries(self) -> Longs:
        """The first entry of each segment."""
        entries = self.batch.column("entries")
        firsts: Longs = as_numpy(entries.values)[as_numpy(entries.offsets)[:-1]]
        return firsts

    @cached_property
    def entry_counts(self) -> Longs:
        """How many entries each segment has."""
        listed = np.diff(self._entry_rows[0]).astype(np.int64)
        return np.where(self.counted, self.last_entries + 1 - self.first_entries, listed)

    def entry_rows_of(self, i: int) -> tuple[int, Longs]:
        """The first offset of segment `i`, and the number of rows of each entry of the segment; for
        a counted segment the number of all rows instead."""
        if self.counted[i]:
            return int(self.bases[i]), self.rows[i : i + 1]
        offsets, values = self._entry_rows
        counts: Longs = values[offsets[i] : offsets[i + 1]]
        return int(self.bases[i]), counts

    def ledger_ids(self) -> list[int]:
        """The ledgers that hold the segments, ascending."""
        return sorted(set(self.ledgers.tolist()) - {INLINE})

    def between(self, partition: int, lo: int, hi: int) -> "SegmentTable":
        """The segments of the partition with a row in [lo, hi)."""
        return self.part(*self.row_range(partition, lo, hi))

    def row_range(self, partition: int, lo: int, hi: int) -> tuple[int, int]:
        """The rows [first, end) of this table that have the segments of `between`."""
        kind = self.partitions.dtype  # for another type numpy would convert the whole column
        first, last = np.searchsorted(
            self.partitions, np.array([partition, partition + 1], dtype=kind)
        )
        bases = self.bases[first:last]
        if hi <= lo or not len(bases):
            return 0, 0
        start = max(0, int(np.searchsorted(bases, lo, side="right")) - 1)
        if bases[start] + self.rows[first + start] <= lo:
            start += 1
        end = int(np.searchsorted(bases, hi, side="left"))
        return int(first) + start, int(first) + max(start, end)

    def part(self, start: int, end: int) -> "SegmentTable":
        """A table of the rows [start, end) of this table, which shares its memory."""
        if start == 0 and end == len(self):
            return self
        return SegmentTable(self.batch.slice(start, end - start))

    def take(self, rows: Longs) -> "SegmentTable":
        """A table of these rows, by index, in the given order."""
        return SegmentTable(self.batch.take(of_numpy(rows)))

    def encode(self) -> bytes:
        """An Arrow IPC stream of one batch, its buffers compressed by zstd."""
        sink = pa.BufferOutputStream()
        is_large = len(self) > ONE_THREAD_ROWS_MAX
        options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=is_large)
        is_stored = {
            "rows_before": bool(self.rows_before.any()),
            "tokens": len(self.batch.column("tokens").flatten()) > 0,
        }
        schema = pa.schema([field for field in SCHEMA if is_stored.get(field.name, True)])
        with pa.ipc.new_stream(sink, schema, options=options) as stream:
            stream.write_batch(self.batch.select(schema.names))
        return bytes(sink.getvalue())

    @classmethod
    def decode(cls, value: Any) -> "SegmentTable":
        """The table that `encode` stored. Raises errors.UnsupportedFormat for a malformed value."""
        try:
            threads = len(value) > ONE_THREAD_BYTES_MAX
            _, batch = read_batch(value, bytes_max=DECODED_BYTES_MAX, use_threads=threads)
            if batch is None:
                raise errors.BadEntry("a table of segments without a column")
            columns = [batch.column(name) for name in _REQUIRED_NAMES]
            columns += [_optional_column(batch, name) for name in _OPTIONAL_NAMES]
            return cls(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
        except (*errors.MALFORMED, pa.ArrowException) as error:
            raise errors.UnsupportedFormat(f"a damaged table of segments: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return SegmentTable.decode, (self.encode(),)

    @cached_property
    def _entry_rows(self) -> tuple[Any, Any]:
        """The index at which each segment's counts begin, and the counts."""
        column = self.batch.column("entry_rows")
        return as_numpy(column.offsets), as_numpy(column.values)


def _optional_column(batch: pa.RecordBatch, name: str) -> pa.Array:
    """The column, or a column without values if the table was stored without it."""
    if name in batch.schema.names:
        return batch.column(name)
    if name == "tokens":
        return of_list([[]] * batch.num_rows, SCHEMA.field(name).type)
    return of_numpy(np.zeros(batch.num_rows, dtype=np.int64))


def _clip_runs(first: int, rows: Longs, values: Longs, lo: int, hi: int) -> tuple[Longs, Longs]:
    """The part of these runs of rows that is in [lo, hi); the first run begins at the offset
    `first`. Returns the number of rows and the value of each run; neighbouring runs have different
    values."""
    ends = first + np.cumsum(rows)
    rows = np.minimum(ends, hi) - np.maximum(ends - rows, lo)
    rows, values = rows[rows > 0], values[rows > 0]
    firsts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    return np.add.reduceat(rows, firsts), values[firsts]


def _placed_segment(row: dict[str, Any]) -> PlacedSegment:
    inline = tuple(row["inline"])
    segment = Segment(
        partition=row["partition"],
        ledger_id=row["ledger"],
        metadata_version=row["version"],
        entries=_pairs(row["entries"]),
        entry_rows=tuple(row["entry_rows"]),
        rows=row["rows"],
        bytes=row["bytes"],
        min_ms=row["min_ms"],
        max_ms=row["max_ms"],
        shared=row["shared"],
        filter_entry=row["filter_entry"],
        event_min_ms=row["event_min_ms"],
        event_max_ms=row["event_max_ms"],
        inline=inline,
        rows_before=row["rows_before"],
    )
    times = _pairs(row["times"])
    flat = row["tokens"]
    tokens = ((segment.rows, flat[0]),) if len(flat) == 1 else _pairs(flat)
    return PlacedSegment(segment, row["base"], row["commit"], row["commit_ms"], times, tokens)


def _pairs(flat: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def _row_values(placed: PlacedSegment) -> tuple[Any, ...]:
    """The values in the order of _COLUMNS."""
    segment = placed.segment
    return (
        segment.partition,
        placed.base,
        segment.rows,
        segment.bytes,
        placed.commit,
        placed.commit_ms,
        segment.ledger_id,
        segment.metadata_version,
        [entry for ends in segment.entries for entry in ends],
        segment.entry_rows,
        segment.min_ms,
        segment.max_ms,
        segment.event_min_ms,
        segment.event_max_ms,
        segment.shared,
        segment.filter_entry,
        segment.inline,
        [number for run in placed.times for number in run],
        segment.rows_before,
        _flat_tokens(placed.tokens),
    )


def _flat_tokens(tokens: CommitTokens) -> list[int]:
    if len(tokens) == 1:
        return [tokens[0][1]]
    return [number for run in tokens for number in run]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Offsets [lo, hi) of one partition without a hole, and the segments that hold these offsets.
    The first segment may begin before `lo`, and the last segment may end after `hi`."""

    lo: int
    hi: int
    table: SegmentTable

    def bytes(self) -> int:
        """About how many payload bytes the rows take."""
        table = self.table
        kept = np.minimum(table.ends, self.hi) - np.maximum(table.bases, self.lo)
        return int((table.sizes * kept // table.rows).sum())


def join_stretches(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The same rows in fewer stretches: neighbours are joined. Two neighbours stay apart if a
    segment at their border reaches beyond its stretch, or if the joined stretch would have more
    than JOINED_SEGMENTS_MAX segments."""
    groups: list[list[Stretch]] = []
    size = 0
    for stretch in stretches:
        size += len(stretch.table)
        if groups and size <= JOINED_SEGMENTS_MAX and _joins(groups[-1][-1], stretch):
            groups[-1].append(stretch)
        else:
            groups.append([stretch])
            size = len(stretch.table)
    return [
        Stretch(group[0].lo, group[-1].hi, SegmentTable.join([part.table for part in group]))
        for group in groups
    ]


def _joins(left: Stretch, right: Stretch) -> bool:
    return (
        left.hi == right.lo
        and int(left.table.ends[-1]) == left.hi
        and int(right.table.bases[0]) == right.lo
    )


NO_SEGMENTS = SegmentTable.of(())


# -- intervals of a partition ----------------------------------------------------------------------
#
# A partition's offsets are in intervals. The rows of an interval are in a table of segments, or in
# a chunk of a checkpoint, whose table is not in memory; or the interval is a hole. Always true:
# intervals are not empty, rise, and leave no offset out between the first row kept and the last.
# An `Intervals` object does not change. Several of these objects may share one list, of which each
# object has the first `_count` items: an append adds an item to the list, so its cost does not
# depend on the list's length.


@dataclass(frozen=True, slots=True)
class BlobPointer:
    """Bytes kept in a ledger: entries [first, last], with `bytes` as their length and `crc` as
    their CRC32C (see blobs.py). `metadata_version` as in Segment."""

    ledger_id: int
    metadata_version: int
    first: int
    last: int
    bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class TableChunk:
    """A stored SegmentTable: `segments` is the number of segments, `rows` the number of their rows
    that the topic had when the chunk was stored."""

    pointer: BlobPointer
    segments: int
    rows: int = 0


Source = SegmentTable | TableChunk | None
"""Where the rows of an interval are; None: the interval is a hole."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Offsets [lo, hi): a hole, or rows in segments of `source` (the first and the last segment may
    reach beyond the interval). `bytes` are about the payload bytes of these rows. The commits that
    added the rows are from `first_ms` to `last_ms`, by the store's clock."""

    lo: int
    hi: int
    source: Source
    bytes: int
    first_ms: int
    last_ms: int

    def cut(self, lo: int, hi: int) -> "Interval":
        """The part of the interval within [lo, hi)."""
        lo, hi = max(lo, self.lo), min(hi, self.hi)
        size = self.bytes * (hi - lo) // (self.hi - self.lo)
        return replace(self, lo=lo, hi=hi, bytes=size)


class Intervals:
    """The intervals of one partition."""

    __slots__ = ("_all", "_count", "_los")

    def __init__(
        self,
        all_: list[Interval] | None = None,
        los: list[int] | None = None,
        count: int | None = None,
    ) -> None:
        self._all: list[Interval] = [] if all_ is None else all_
        self._los = [interval.lo for interval in self._all] if los is None else los
        self._count = len(self._all) if count is None else count

    def __iter__(self) -> Iterator[Interval]:
        for i in range(self._count):
            yield self._all[i]

    def __len__(self) -> int:
        return self._count

    def last(self) -> list[Interval]:
        """The last interval; an empty list if there are no intervals."""
        return [self._all[self._count - 1]] if self._count else []

    def between(self, lo: int, hi: int) -> list[Interval]:
        """The intervals with an offset in [lo, hi), not cut; takes O(log n + their number)."""
        if hi <= lo or not self._count:
            return []
        first = max(0, bisect_right(self._los, lo, 0, self._count) - 1)
        last = bisect_right(self._los, hi - 1, 0, self._count)
        return [interval for interval in self._all[first:last] if interval.hi > lo]

    def with_appended(self, interval: Interval) -> "Intervals":
        """The intervals with `interval` at the end."""
        assert not self._count or self._all[self._count - 1].hi == interval.lo, (
            "no offset is left out"
        )
        intervals, los = self._all, self._los
        if len(intervals) != self._count:  # another object added to the shared list: copy our part
            intervals, los = intervals[: self._count], los[: self._count]
        intervals.append(interval)
        los.append(interval.lo)
        return Intervals(intervals, los, self._count + 1)

    def from_offset(self, offset: int) -> "Intervals":
        """The intervals without the offsets below `offset`."""
        return Intervals(
            [interval.cut(offset, interval.hi) for interval in self if interval.hi > offset]
        )

    def with_replaced(self, interval: Interval) -> "Intervals":
        """The intervals after `interval` has replaced the parts that had its offsets."""
        lo, hi = interval.lo, interval.hi
        before = [old.cut(old.lo, lo) for old in self if old.lo < lo]
        after = [old.cut(hi, old.hi) for old in self if old.hi > hi]
        return Intervals([*before, interval, *after])
