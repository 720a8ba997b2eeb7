"""Rows to entries: a task's columns, cut by partition and gathered to entries of about 2 MiB.

Always true: rows of a partition keep their order; every row of a call is checked to fit before the
call returns its first entry. Gathered rows, with the memory that their slices keep, stay under
`gather_bytes_max`; rows that wait to be sorted take at most a quarter of `gather_bytes_max` in
addition. A partition that has gathered 64 KiB gets entries of its own; partitions with fewer rows
share entries. Work is done on whole columns; the Python loops run over entries and partitions,
never over rows. No I/O: any single thread may use an encoder.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_ledger import errors
from spark_ledger.config import DEFAULTS
from spark_ledger.topic.entry import message_batch, row_columns
from spark_ledger.topic.entry.arrow_arrays import of_numpy
from spark_ledger.topic.entry.key_filter import key_filter
from spark_ledger.topic.entry.message_batch import (
    EVENT_TIME,
    KEY,
    TYPED_NAMES,
    Body,
    Share,
    TimeRuns,
)
from spark_ledger.topic.entry.routing import Counts, Hashes, Router, key_hashes
from spark_ledger.topic.entry.row_columns import MaybeColumn, Sizes

ENTRY_BYTES = (2 << 20) - (32 << 10)
"""An entry is emitted before it grows beyond this size; only a single row may be larger. Two such
entries fit into a message and into a response of 4 MiB, and the fixed cost of an entry is spread
over many rows."""
SHARE_BYTES = 64 << 10  # a partition that has gathered fewer bytes shares its entry with others
GATHER_BYTES_MAX = 16 << 20
PART_OVERHEAD_BYTES = 1024  # memory of the objects around one slice of rows
ROWS_TO_SORT = 128  # rows are sorted at once if there are this many for each partition
FRAME_BYTES_MIN = 300  # of an entry, beside its rows
KeyFilter = bytes


@dataclass(frozen=True, slots=True)
class EncodedShare:
    """A partition's rows in an entry. `bytes` is the part of the payload that these rows take. All
    event times are within `event_ms`. `key_filter` is the filter of the rows' keys, if any."""

    partition: int
    rows: int
    bytes: int
    event_ms: tuple[int, int] | None = None
    key_filter: KeyFilter | None = None


@dataclass(frozen=True, slots=True)
class EncodedEntry:
    """Rows of one partition, or of several in rising order, ready to be sent. `body` is the payload
    without its header, as the header names rows by their numbers in the segments that get the
    entry. `times` are the times at which the rows were written, and `written_ms` is the last; with
    empty `times` all rows were written at `written_ms`. `has_batches`: whether the body has batches
    of Pulsar's producers; `chunks` of these are chunks of messages."""

    shares: tuple[EncodedShare, ...]
    written_ms: int
    body: Body
    typed: bool = False
    schema_version: int = 0
    times: TimeRuns = ()
    has_batches: bool = False
    chunks: int = 0

    @property
    def rows(self) -> int:
        return sum(share.rows for share in self.shares)

    @property
    def payload_bytes(self) -> int:
        return sum(share.bytes for share in self.shares)

    @property
    def first_written_ms(self) -> int:
        return min((ms for _, ms in self.times), default=self.written_ms)

    def payload(self, first_rows: Sequence[int]) -> list[bytes | memoryview]:
        """The payload's buffers for an entry whose shares begin at these rows of their segments."""
        shares = [
            Share(share.partition, share.rows, first_row)
            for share, first_row in zip(self.shares, first_rows, strict=True)
        ]
        header = message_batch.encode_header(
            shares,
            self.written_ms,
            typed=self.typed,
            schema_version=self.schema_version,
            times=self.times,
            has_batches=self.has_batches,
            chunks=self.chunks,
        )
        return [header, *self.body]


@dataclass(slots=True)
class _GatheredRows:
    """Rows of one partition that are not an entry yet, with their keys' hashes for a key filter."""

    parts: list[pa.RecordBatch] = field(default_factory=list)
    hashes: list[Hashes] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0

    def add(self, part: pa.RecordBatch, hashes: Hashes | None, size: int) -> None:
        self.parts.append(part)
        if hashes is not None:
            self.hashes.append(hashes)
        self.rows += part.num_rows
        self.bytes += size

    def compact(self) -> None:
        """Copy the rows, so that the larger batches whose slices they are can be freed."""
        copied_rows = row_columns.union(self.parts)
        if len(self.parts) == 1:
            copied_rows = copied_rows.take(of_numpy(np.arange(self.rows)))
        self.parts = [copied_rows]
        if self.hashes:
            self.hashes = [np.concatenate(self.hashes)]


class _PartitionRows(NamedTuple):
    """The rows [start, end), which are of one partition."""

    partition: int
    start: int
    end: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _RoutedRows:
    """Rows, the size of each row, the hashes of the keys (None: they are not needed), and the
    partition of each row, or the single partition of all rows."""

    batch: pa.RecordBatch
    sizes: Sizes
    hashes: Hashes | None
    partitions: int | Counts

    @classmethod
    def join(cls, routed: list["_RoutedRows"]) -> "_RoutedRows":
        """The rows of all `routed`, one after the other; `partitions` then has a number per row."""
        if len(routed) == 1:
            return routed[0]
        hashes = None
        if any(rows.hashes is not None for rows in routed):
            zeros = (np.zeros(len(rows.sizes), np.uint32) for rows in routed)
            pairs = zip(routed, zeros, strict=True)
            hashes = np.concatenate(
                [zero if rows.hashes is None else rows.hashes for rows, zero in pairs]
            )
        return cls(
            row_columns.union([rows.batch for rows in routed]),
            np.concatenate([rows.sizes for rows in routed]),
            hashes,
            np.concatenate([np.asarray(rows.partitions) for rows in routed]),
        )

    def windows(self, bytes_max: int) -> Iterator["_RoutedRows"]:
        """The same rows in parts of about `bytes_max` bytes, so that no copy is larger."""
        ends = np.cumsum(self.sizes)
        start = 0
        while start < len(ends):
            limit = (int(ends[start - 1]) if start else 0) + bytes_max
            end = max(start + 1, int(np.searchsorted(ends, limit, side="right")))
            yield self if end - start == len(ends) else self.part(start, end)
            start = end

    def by_partition(self) -> tuple["_RoutedRows", list[_PartitionRows]]:
        """The rows sorted by partition, in their old order within a partition; and the range of
        rows of each partition."""
        if isinstance(self.partitions, int):
            all_rows = _PartitionRows(self.partitions, 0, len(self.sizes), int(self.sizes.sum()))
            return self, [all_rows]
        counts = np.bincount(self.partitions)
        present_partitions = np.flatnonzero(counts)
        rows = self
        if len(present_partitions) > 1:
            partitions: npt.NDArray[Any] = self.partitions
            if len(counts) <= 1 << 16:  # numpy sorts 16-bit numbers by radix: seven times as fast
                partitions = partitions.astype(np.uint16)
            order = np.argsort(partitions, kind="stable")
            hashes = None if self.hashes is None else self.hashes[order]
            batch = self.batch.take(of_numpy(order))
            rows = _RoutedRows(batch, self.sizes[order], hashes, partitions=0)
        ends = np.cumsum(counts[present_partitions])
        starts = ends - counts[present_partitions]
        sizes = np.add.reduceat(rows.sizes, starts)
        places = (present_partitions.tolist(), starts.tolist(), ends.tolist(), sizes.tolist())
        return rows, list(map(_PartitionRows, *places))

    def part(self, start: int, end: int) -> "_RoutedRows":
        partitions = (
            self.partitions if isinstance(self.partitions, int) else self.partitions[start:end]
        )
        hashes = None if self.hashes is None else self.hashes[start:end]
        return _RoutedRows(
            self.batch.slice(start, end - start), self.sizes[start:end], hashes, partitions
        )


class BatchEncoder:
    """`router` chooses the partitions of rows; `entry_bytes_max` is the largest payload;
    `schema_version` is the version of the topic's schema that rows of the topic's own columns
    have."""

    def __init__(
        self,
        router: Router,
        now_ms: Callable[[], int],
        *,
        compression: str = "none",
        entry_bytes_max: int = DEFAULTS.entry_bytes_max,
        gather_bytes_max: int = GATHER_BYTES_MAX,
        key_filters: bool = False,
        schema_version: int = 0,
    ) -> None:
        if compression not in message_batch.COMPRESSIONS:
            raise errors.BadConfig(
                f"compression is one of {message_batch.COMPRESSIONS}, got '{compression}'"
            )
        if not 0 <= schema_version <= message_batch.SCHEMA_VERSION_MAX:
            raise errors.BadConfig(f"schema version {schema_version} is not one of 0 to 65535")
        self._router = router
        self._now_ms = now_ms
        self._compression = compression
        self._entry_bytes_max = entry_bytes_max
        half = entry_bytes_max // 2  # in a union of columns, nulls may take the other half
        self._entry_bytes_goal = min(ENTRY_BYTES, half, max(SHARE_BYTES, gather_bytes_max // 4))
        self._gather_bytes_max = gather_bytes_max
        self._key_filters = key_filters
        self._schema_version = schema_version
        self._typed = False
        self._kind: tuple[bool, list[pa.Field]] | None = None
        self._gathered: dict[int, _GatheredRows] = {}
        self._has_emitted = False
        self._memory_bytes = 0  # what the gathered slices keep in memory, at most
        self._sort_bytes = max(1, gather_bytes_max // 4)
        self._unsorted: list[_RoutedRows] = []
        self._unsorted_bytes = 0
        self.gathered_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        """The bytes of rows that are in no entry yet."""
        return self.gathered_bytes + self._unsorted_bytes

    def add(
        self,
        keys: MaybeColumn,
        values: pa.Array | pa.RecordBatch,
        *,
        event_times: MaybeColumn = None,
        headers: MaybeColumn = None,
        partitions: MaybeColumn = None,
    ) -> Iterator[EncodedEntry]:
        """Gathers the rows; yields the entries that became full. An entry is encoded when the
        caller takes it from the iterator. `values` is a column, or a batch of the topic's columns.

        The caller must exhaust the iterator. Raises errors.ColumnTypeMismatch,
        errors.MessageTooBig, errors.PartitionInvalid, ValueError for columns of unequal length or
        rows of another kind than earlier rows; after an error no row of the call is gathered.
        """
        typed = isinstance(values, pa.RecordBatch)
        parts = list(row_columns.stored_batches(keys, values, event_times, headers))
        rows = sum(batch.num_rows for batch in parts)
        if partitions is not None and len(partitions) != rows:
            raise ValueError(f"{len(partitions)} partitions for {rows} rows")
        self._check_kind(parts[0].schema, typed)
        routed, start = [], 0
        for batch in parts:
            column = None if partitions is None else partitions.slice(start, batch.num_rows)
            routed.append(self._route(batch, typed, column))
            start += batch.num_rows
        return self._gather_or_wait(routed)

    def flush(self) -> Iterator[EncodedEntry]:
        """The gathered rows as the last, smaller entries: first entries of one partition, then
        shared entries."""
        yield from self._sort()
        small_partitions = []
        for partition in sorted(self._gathered):
            if self._gathered[partition].bytes >= SHARE_BYTES:
                yield self._emit([partition])
            else:
                small_partitions.append(partition)
        while small_partitions:
            count = self._count_that_fit(small_partitions)
            yield self._emit(small_partitions[:count])
            small_partitions = small_partitions[count:]

    def flush_small(self, bytes_max: int) -> list[EncodedEntry] | None:
        """All rows of the task, as one entry for each partition, if no entry was yielded yet and
        the entries take at most `bytes_max`. Otherwise None, and the gathered rows stay."""
        if self._has_emitted or self.waiting_bytes > bytes_max:
            return None
        emitted = list(self._sort())
        assert not emitted, "so few bytes fill no entry"
        if self.gathered_bytes + FRAME_BYTES_MIN * len(self._gathered) > bytes_max:
            return None
        entries = [self._encode([partition], filters=False) for partition in sorted(self._gathered)]
        if sum(entry.payload_bytes for entry in entries) > bytes_max:
            return None
        self._gathered.clear()
        self.gathered_bytes = self._memory_bytes = 0
        return entries

    def _route(self, batch: pa.RecordBatch, typed: bool, column: MaybeColumn) -> _RoutedRows:
        sizes = row_columns.row_bytes(batch)
        self._check_fit(sizes, batch.schema)
        index = batch.schema.get_field_index(TYPED_NAMES[KEY] if typed else KEY)
        keys = None if index < 0 else batch.column(index)
        hashes = None
        if keys is not None and (self._key_filters or self._router.hashes_keys):
            hashes = key_hashes(keys)
        partitions = self._router.route(batch.num_rows, keys, hashes, column)
        return _RoutedRows(batch, sizes, hashes if self._key_filters else None, partitions)

    def _gather_or_wait(self, routed: list[_RoutedRows]) -> Iterator[EncodedEntry]:
        """Gathers rows of one partition at once. Rows of several partitions wait until there are
        many, so that the work for a partition is done for many rows together."""
        for rows in routed:
            if isinstance(rows.partitions, int):  # rows of one partition are sorted already
                yield from self._sort()
                if len(rows.sizes):
                    yield from self._gather(rows)
                continue
            for window in rows.windows(self._sort_bytes):
                size = int(window.sizes.sum()) + PART_OVERHEAD_BYTES
                is_large = len(window.sizes) >= ROWS_TO_SORT * self._router.partitions
                if is_large or self._unsorted_bytes + size > self._sort_bytes:
                    yield from self._sort()
                if is_large:
                    yield from self._gather(window)
                else:
                    self._unsorted.append(window)
                    self._unsorted_bytes += size

    def _sort(self) -> Iterator[EncodedEntry]:
        """Gather the rows that wait to be sorted."""
        waiting, self._unsorted, self._unsorted_bytes = self._unsorted, [], 0
        if waiting:
            yield from self._gather(_RoutedRows.join(waiting))

    def _gather(self, routed: _RoutedRows) -> Iterator[EncodedEntry]:
        rows, places = routed.by_partition()
        for partition, start, end, size in places:
            gathered = self._gathered.get(partition)
            if gathered is None:
                gathered = self._gathered[partition] = _GatheredRows()
            if gathered.bytes + size <= self._entry_bytes_goal:
                self._add_slice(gathered, rows, start, end, size)
            else:
                yield from self._fill(partition, rows.part(start, end))
            self._memory_bytes += size
        yield from self._limit_memory()

    def _add_slice(
        self, gathered: _GatheredRows, rows: _RoutedRows, start: int, end: int, size: int
    ) -> None:
        hashes = None if rows.hashes is None else rows.hashes[start:end]
        gathered.add(rows.batch.slice(start, end - start), hashes, size)
        self.gathered_bytes += size
        self._memory_bytes += PART_OVERHEAD_BYTES

    def _fill(self, partition: int, rows: _RoutedRows) -> Iterator[EncodedEntry]:
        """Gather the rows; emit an entry whenever the next row does not fit."""
        ends = np.cumsum(rows.sizes)
        start, taken_bytes = 0, 0
        while start < len(ends):
            gathered = self._gathered.setdefault(partition, _GatheredRows())
            limit = taken_bytes + self._entry_bytes_goal - gathered.bytes
            end = int(np.searchsorted(ends, limit, side="right"))
            if end <= start and not gathered.rows:
                end = start + 1  # a single row that is larger than ENTRY_BYTES
            if end > start:
                size = int(ends[end - 1]) - taken_bytes
                self._add_slice(gathered, rows, start, end, size)
                start, taken_bytes = end, taken_bytes + size
            if start < len(ends):
                yield self._emit([partition])

    def _limit_memory(self) -> Iterator[EncodedEntry]:
        """If the rows take more memory than `gather_bytes_max`, emits entries until the rows take
        half of this limit, and copies the remaining rows."""
        if self._memory_bytes <= self._gather_bytes_max:
            return
        while self.gathered_bytes > self._gather_bytes_max // 2:
            yield self._emit(self._fullest_partitions())
        for gathered in self._gathered.values():
            gathered.compact()
        self._memory_bytes = self.gathered_bytes + PART_OVERHEAD_BYTES * len(self._gathered)
        while self._memory_bytes > self._gather_bytes_max:
            yield self._emit(self._fullest_partitions())

    def _fullest_partitions(self) -> list[int]:
        """The partition with the most gathered bytes. If these are too few for an entry of its own,
        as many partitions as fill one entry, in order."""
        first = max(sorted(self._gathered), key=lambda p: self._gathered[p].bytes)
        if self._gathered[first].bytes >= SHARE_BYTES:
            return [first]
        count = self._entry_bytes_goal // max(1, self._gathered[first].bytes) * 4
        fullest = heapq.nlargest(
            min(count, len(self._gathered)),
            sorted(self._gathered),
            key=lambda p: self._gathered[p].bytes,
        )
        return sorted(fullest[: self._count_that_fit(fullest)])

    def _count_that_fit(self, partitions: list[int]) -> int:
        """How many of the partitions, from the first on, fit into one entry; at least 1."""
        share_bytes = message_batch.SHARE_BYTES  # in the header
        sizes = np.cumsum([self._gathered[p].bytes + share_bytes for p in partitions])
        return max(1, int(np.searchsorted(sizes, self._entry_bytes_goal, side="right")))

    def _emit(self, partitions: list[int]) -> EncodedEntry:
        entry = self._encode(partitions, filters=self._key_filters)
        for partition in partitions:
            gathered = self._gathered.pop(partition)
            self.gathered_bytes -= gathered.bytes
            self._memory_bytes -= PART_OVERHEAD_BYTES * len(gathered.parts)
        if not self._gathered:
            self._memory_bytes = 0
        self._has_emitted = True
        return entry

    def _encode(self, partitions: list[int], *, filters: bool) -> EncodedEntry:
        """One entry with the gathered rows of the partitions."""
        sources = [self._gathered[partition] for partition in partitions]
        rows = row_columns.union([part for gathered in sources for part in gathered.parts])
        header_bytes = message_batch.HEADER_BYTES
        if len(sources) > 1:
            header_bytes += message_batch.SHARE_BYTES * len(sources)
        body = message_batch.encode_body(rows, self._compression)
        bytes_max = self._entry_bytes_max - message_batch.HEADER_BYTES * 2
        if header_bytes + sum(map(len, body)) > bytes_max:
            body = message_batch.encode_body(rows)  # compression made the body larger
        shares = self._shares(partitions, rows, header_bytes + sum(map(len, body)), filters)
        version = self._schema_version if self._typed else 0
        return EncodedEntry(shares, self._now_ms(), body, self._typed, version)

    def _shares(
        self, partitions: list[int], rows: pa.RecordBatch, payload_bytes: int, filters: bool
    ) -> tuple[EncodedShare, ...]:
        """The share of each partition; the bytes of the shares add up to `payload_bytes`."""
        sources = [self._gathered[partition] for partition in partitions]
        index = rows.schema.get_field_index(TYPED_NAMES[EVENT_TIME] if self._typed else EVENT_TIME)
        times = None if index < 0 else rows.column(index)
        sizes = _divide(payload_bytes, [gathered.bytes for gathered in sources])
        shares, start = [], 0
        for partition, gathered, size in zip(partitions, sources, sizes, strict=True):
            event_ms = None
            if times is not None:
                event_ms = row_columns.event_bounds_ms(times.slice(start, gathered.rows))
            start += gathered.rows
            filter_of_keys = None
            if filters and len(partitions) == 1:
                hashes = gathered.hashes or [np.zeros(0, dtype=np.uint32)]
                filter_of_keys = key_filter(np.concatenate(hashes))
            shares.append(EncodedShare(partition, gathered.rows, size, event_ms, filter_of_keys))
        return tuple(shares)

    def _check_kind(self, schema: pa.Schema, typed: bool) -> None:
        """Raises ValueError if the topic's own columns differ from those of earlier rows."""
        common_names = TYPED_NAMES.values() if typed else TYPED_NAMES
        kind = typed, [field for field in schema if field.name not in common_names]
        if self._kind not in (None, kind):
            raise ValueError(f"a task that wrote rows of {self._kind} cannot write rows of {kind}")
        self._kind, self._typed = kind, typed

    def _check_fit(self, sizes: Sizes, schema: pa.Schema) -> None:
        room = self._entry_bytes_max - row_columns.overhead_bytes_max(schema)
        if len(sizes) and int(sizes.max()) > room:
            largest = int(sizes.max())
            raise errors.MessageTooBig(
                f"a row of {largest} bytes is larger than the {room} bytes that fit into one entry",
                row_bytes=largest,
            )


def _divide(whole: int, shares: list[int]) -> list[int]:
    """Divides `whole` into parts about in proportion to `shares`."""
    if len(shares) == 1:
        return [whole]
    ends = np.cumsum(shares)
    bounds = np.concatenate([[0], ends * whole // max(1, int(ends[-1]))])
    bounds[-1] = whole
    parts: list[int] = np.diff(bounds).tolist()
    return parts
