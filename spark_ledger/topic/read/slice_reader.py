"""Reading a task's entries: they are fetched ahead, checked, and cut to the task's rows.

Always true: the rows of each partition come in order of offsets, each row once. If an entry's
header differs from the plan (partitions, first rows, rows), the entry is an error and gives no
rows. A slice is read up to its planned end, or the read raises: a negative is never an end. An
entry is fetched and decoded once for all partitions that the task reads from it. Small slices are
fetched together, from several ledgers at once, WINDOW_BYTES at a time; a longer slice is a stream,
within the limits of the ledger's reader. If a ledger is gone, or rows are lost, the caller replaces
the rest of the task (`Replan`), from the next offset of each partition.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bookie_server.api.entry import Buffer, Entry, EntryHeader, payload_crc
from spark_ledger import errors
from spark_ledger.async_tasks import cancel
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.ledger.reader import AsyncLedgerReader
from spark_ledger.topic.entry.arrow_arrays import of_list, of_numpy
from spark_ledger.topic.entry.key_filter import KeyFilters
from spark_ledger.topic.entry.message_batch import (
    VALUE,
    Header,
    decode_body_and_times,
    decode_header,
)
from spark_ledger.topic.entry.routing import Hashes
from spark_ledger.topic.log.segments import INLINE, NO_ENTRY
from spark_ledger.topic.read.acked import AckedRows, unacked_live, unacked_pieces, unacked_slice
from spark_ledger.topic.read.bad_entries import BadEntries, BadRows, OnBadEntry
from spark_ledger.topic.read.live import (
    EntryStarts,
    clip_to_ledger,
    estimate_last_entry,
    first_piece,
    live_rows_lost,
    piece_of,
    starts_of,
)
from spark_ledger.topic.read.pieces import (
    CountedSlice,
    EntryPieces,
    LiveRows,
    PlannedEntry,
    ReadSlice,
    Slice,
    concat_ranges,
    slices_of,
)
from spark_ledger.topic.read.plan import LedgerEnd, ReadTask, from_offsets, lost_of, rows_lost
from spark_ledger.topic.read.row_blocks import RUN, Block

if TYPE_CHECKING:
    from spark_ledger.topic.entry.pulsar_parts import BadBatch, Chunks, PulsarPart

_log = logging.getLogger(__name__)
_FILTER_ERRORS = (
    errors.DataUnavailable,
    errors.DigestMismatch,
    errors.NoSuchEntry,
    errors.UnsupportedFormat,
)

WINDOW_BYTES = 4 << 20
WINDOW_ENTRIES_MAX = 1024
WINDOW_ENTRIES_MIN = 4  # while the reader has not seen how large entries are


@dataclass(frozen=True, slots=True, eq=False)
class FetchedEntry:
    """An entry's checked bytes, and the pieces of the entry to read. Any thread may decode the
    entry by `blocks`. `chunks` has the joined chunks of messages whose last chunk is in the entry
    (task_reader.py)."""

    entry: Entry
    pieces: EntryPieces
    chunks: "Chunks | None" = None

    @property
    def bytes(self) -> int:
        earlier_chunks = {} if self.chunks is None else self.chunks.earlier_payloads
        earlier_bytes = sum(len(chunk) for chunks in earlier_chunks.values() for chunk in chunks)
        return len(self.entry.payload) + earlier_bytes

    def blocks(
        self, columns: Collection[str] | None = None, bad: BadEntries | None = None
    ) -> Iterator[Block]:
        """The rows in order: in one block; or, if the entry has batches, in several blocks of
        limited size (pulsar_parts.py). `columns` are the columns to decode, by their names in the
        entry (None: all). Bytes that cannot be decoded, or that differ from the plan, go to `bad`,
        which may raise errors.BadEntry. Raises errors.UnsupportedFormat for bytes of a later
        version."""
        bad_bytes = _BadBytesHandler(self, bad or BadEntries(), columns)
        try:
            header = decode_header(self.entry.payload)
            rows = self._rows(header)
            if not header.has_batches:
                block = self._of_columns(header, rows, columns)
            else:
                batches = _batches_in(self.entry.payload, header)
        except errors.UnsupportedFormat as error:
            yield from bad_bytes.entry(error)
            return
        if not header.has_batches:
            yield block
            return

        from spark_ledger.topic.entry.pulsar_parts import NO_CHUNKS, BadBatch, parts_of

        ends = self.pieces["skip"] + self.pieces["take"]
        row_range = (int(self.pieces["skip"].min()), int(ends.max()))
        for part in parts_of(batches, row_range, columns, self.chunks or NO_CHUNKS):
            if isinstance(part, BadBatch):
                yield from bad_bytes.batch(part, header.written_ms)
            else:
                yield self._of_part(header, part)

    def block(self, columns: Collection[str] | None = None) -> Block:
        """The only block of an entry that has no batches."""
        (block,) = self.blocks(columns)
        return block

    def _of_columns(
        self, header: Header, rows: "slice | npt.NDArray[np.int64]", columns: Collection[str] | None
    ) -> Block:
        all_entries, times = decode_body_and_times(self.entry.payload, header, columns)
        batch = _cut(all_entries, rows)
        runs = np.empty(len(self.pieces), dtype=RUN)
        for name, column in (("partition", "partition"), ("offset", "offset"), ("rows", "take")):
            runs[name] = self.pieces[column]
        runs["entry_row"] = self.pieces["skip"]
        place = self.entry.header
        runs["ledger"], runs["entry"] = place.ledger_id, place.entry_id
        runs["written_ms"] = header.written_ms
        row_times = None if times is None else times[rows]
        return Block(runs, batch, header.typed, header.schema_version, row_times)

    def _of_part(self, header: Header, part: "PulsarPart") -> Block:
        """The rows of a part of the entry's batches. The row of a chunked message is at the
        message's last chunk."""
        firsts = np.searchsorted(part.rows_at, self.pieces["skip"])
        counts = np.searchsorted(part.rows_at, self.pieces["skip"] + self.pieces["take"]) - firsts
        rows, piece = concat_ranges(firsts, counts), np.repeat(np.arange(len(counts)), counts)
        at = part.rows_at[rows]
        is_start = (np.diff(piece, prepend=-1) != 0) | (np.diff(at, prepend=-1) != 1)
        starts = np.flatnonzero(is_start)
        pieces, place = self.pieces[piece[starts]], self.entry.header
        runs = np.empty(len(starts), dtype=RUN)
        runs["partition"], runs["entry_row"] = pieces["partition"], at[starts]
        runs["offset"] = pieces["offset"] + at[starts] - pieces["skip"]
        runs["rows"] = np.diff(starts, append=len(rows))
        runs["ledger"], runs["entry"] = place.ledger_id, place.entry_id
        runs["written_ms"] = header.written_ms
        # a whole part is not copied, as a row may be large
        is_whole_part = len(rows) == part.columns.num_rows and bool(np.all(np.diff(rows) == 1))
        batch = part.columns if is_whole_part else _cut(part.columns, rows)
        return Block(runs, batch, times_ms=part.times_ms[rows])

    def check(self, header: Header) -> None:
        """Raises errors.BadEntry if the entry has other rows than the log records."""
        self._rows(header)

    def _rows(self, header: Header) -> "slice | npt.NDArray[np.int64]":
        """The numbers of the pieces' rows in the entry, in the order of the pieces. Raises as
        `check`."""
        index, pieces = header.index, self.pieces
        share_at = np.searchsorted(index["partition"], pieces["partition"].astype(np.uint32))
        share_at = np.minimum(share_at, len(index) - 1)
        counts = index["rows"].astype(np.int64)
        first_rows = pieces["first_row"]
        if header.at_offset:
            first_rows = pieces["offset"] - pieces["skip"]
        is_fitting = (index["partition"][share_at] == pieces["partition"]) & (
            index["first_row"][share_at] == first_rows
        )
        is_fitting &= pieces["skip"] + pieces["take"] <= counts[share_at]
        if not bool(is_fitting.all()):
            wrong = int(np.flatnonzero(~is_fitting)[0])
            raise self._disagrees(header, wrong, int(share_at[wrong]))
        starts = (np.cumsum(counts) - counts)[share_at] + pieces["skip"]
        ends = starts + pieces["take"]
        if bool((starts[1:] == ends[:-1]).all()):
            return slice(int(starts[0]), int(ends[-1]))
        return concat_ranges(starts, ends - starts)

    def _disagrees(self, header: Header, wrong: int, at: int) -> errors.BadEntry:
        partition, first_row, skip, take, offset = self.pieces[wrong].tolist()
        share = header.shares[at]
        place = self.entry.header
        return errors.BadEntry(
            f"entry {place.ledger_id}:{place.entry_id} holds {share.rows} rows from row"
            f" {share.first_row} of partition {share.partition}, but the topic's log records"
            f" {take} rows from row {first_row} + {skip} of partition {partition}, from offset"
            f" {offset} on"
        )


class _BadBytesHandler:
    """Reports bytes of an entry that cannot be decoded to `bad`, and gives the rows that replace
    these bytes."""

    def __init__(
        self, fetched: FetchedEntry, bad: BadEntries, columns: Collection[str] | None
    ) -> None:
        self._fetched = fetched
        self._bad = bad
        self._columns = columns

    def entry(self, error: errors.UnsupportedFormat) -> Iterator[Block]:
        """The rows that replace the whole entry."""
        payload = memoryview(self._fetched.entry.payload)
        for piece in self._fetched.pieces.tolist():
            skip, take = piece[2:4]
            yield from self._rows(piece, (0, skip + take), payload, error, 0)

    def batch(self, batch: "BadBatch", written_ms: int) -> Iterator[Block]:
        rows = (batch.row, batch.row + batch.rows)
        error = batch.why
        if not isinstance(error, errors.BadEntry):  # encrypted: only a client with the key reads it
            error = errors.BadEntry(error.what, error.remedy)
        for piece in self._fetched.pieces.tolist():
            yield from self._rows(piece, rows, batch.data, error, written_ms)

    def _rows(
        self,
        piece: tuple[int, ...],
        rows: tuple[int, int],
        data: memoryview,
        error: errors.UnsupportedFormat,
        written_ms: int,
    ) -> Iterator[Block]:
        """The rows that replace those of `rows` [start, end) of the entry that the piece has."""
        partition, _, skip, take, offset = piece
        lo, hi = max(rows[0], skip), min(rows[1], skip + take)
        if lo >= hi:
            return
        place, base = self._fetched.entry.header, offset - skip
        self._bad.count_or_raise(
            BadRows(partition, base + lo, base + hi, place.ledger_id, place.entry_id), error
        )
        if self._bad.policy is OnBadEntry.RAW and lo == rows[0]:
            place_and_time = (place.ledger_id, place.entry_id, lo, written_ms)
            runs = np.array([(partition, base + lo, 1, *place_and_time)], dtype=RUN)
            yield Block(runs, _raw(data, self._columns))


def _raw(data: memoryview, columns: Collection[str] | None) -> pa.RecordBatch:
    """One row with these bytes as its value."""
    if columns is not None and VALUE not in columns:
        empty = pa.StructArray.from_buffers(pa.struct([]), 1, [None])
        return pa.RecordBatch.from_struct_array(empty)
    values = of_list([bytes(data)], pa.binary())
    return pa.RecordBatch.from_arrays([values], names=[VALUE])


def _batches_in(payload: Buffer, header: Header) -> list[tuple[int, memoryview]]:
    """The batches, each with its number of messages. Raises errors.BadEntry."""
    from spark_ledger.topic.entry.pulsar_batch import split_frames  # only if an entry has batches

    return list(split_frames(memoryview(payload)[header.body_at :], header.rows))


def _cut(batch: pa.RecordBatch, rows: "slice | npt.NDArray[np.int64]") -> pa.RecordBatch:
    if isinstance(rows, slice):
        return batch.slice(rows.start, rows.stop - rows.start)
    if not len(batch.schema):  # without columns Arrow would lose the number of rows
        return batch.slice(0, len(rows))
    return batch.take(of_numpy(rows))


FetchedRuns = AsyncGenerator[list[FetchedEntry], None]
"""Entries in order, in lists of several entries."""


Replan = Callable[[ReadTask, errors.NoSuchLedger | errors.RowsLost], Awaitable[ReadTask]]
"""Takes the rest of a task, and the error that prevents reading it as planned; returns the task to
read instead."""


async def fetch_task(
    ledgers: LedgerStore, task: ReadTask, keys: Hashes | None, replan: Replan
) -> FetchedRuns:
    """The entries of a task, in order, in lists, not decoded yet. With `keys` (hashes of keys),
    entries that certainly have none of these keys are left out. `replan` decides what to read if a
    ledger is gone or rows are lost. Raises errors.DataUnavailable, errors.DigestMismatch,
    errors.UnsupportedFormat, and as `replan`."""
    next_offsets: dict[int, int] = {}  # by partition
    while True:
        fetching = _Fetching(ledgers, task, keys)
        try:
            for step in fetching.steps():
                source = await fetching.begin(step)
                async with aclosing(source.runs) as runs:
                    async for run in runs:
                        fetched = source.pair(run)
                        if unacked_entries := _unacked_entries(fetched, task.acked):
                            yield unacked_entries
                        next_offsets.update(end for entry in fetched for end in _ends(entry.pieces))
                assert next(source.remaining, None) is None, "a slice is read to its end"
            return
        except (errors.NoSuchLedger, errors.RowsLost) as error:
            task = await replan(from_offsets(task, next_offsets), error)


def _unacked_entries(fetched: list[FetchedEntry], acked: AckedRows) -> list[FetchedEntry]:
    """The entries without acknowledged rows, and without the entries that have no other row."""
    if not acked:
        return fetched
    cut = [(entry, unacked_pieces(entry.pieces, acked)) for entry in fetched]
    return [replace(entry, pieces=pieces) for entry, pieces in cut if len(pieces)]


def _ends(pieces: EntryPieces) -> Iterator[tuple[int, int]]:
    """The partition of each piece, and the offset after the piece."""
    ends = pieces["offset"] + pieces["take"]
    return zip(pieces["partition"].tolist(), ends.tolist(), strict=True)


Step = list[Slice] | LiveRows
"""What is fetched in one step: several slices together, a single slice as a stream, or rows of a
live segment, which no commit has yet."""


class _Source(NamedTuple):
    """The entries of a step in lists, as they arrive; the function that pairs the entries of a list
    with their pieces; and the planned entries that did not arrive yet."""

    runs: AsyncGenerator[list[Any], None]
    pair: Callable[[list[Any]], list[FetchedEntry]]
    remaining: Iterator[PlannedEntry]


class _Fetching:
    """The fetching of one task."""

    def __init__(self, ledgers: LedgerStore, task: ReadTask, keys: Hashes | None) -> None:
        self._ledgers = ledgers
        self._task = task
        self._keys = keys
        self._filters = _KeyFilterCache()
        self._fetched = 0
        self._fetched_bytes = 0
        self._planned_bytes = 0

    def steps(self) -> Iterator[Step]:
        """The steps in order; the caller fetches each step before it takes the next step."""
        yield from self._windows()
        live = self._task.live
        if live is not None and (live := unacked_live(live, self._task.acked)) is not None:
            yield live

    async def begin(self, step: Step) -> _Source:
        """Starts to fetch the step. This call and the source's `runs` raise as fetch_task."""
        if isinstance(step, LiveRows):
            return self._counted_source(await self._open_live(step), step)
        if self._keys is not None:
            step = [await self._filter(planned, self._keys) for planned in step]
        step = [planned for planned in step if planned.count]
        self._planned_bytes += sum(planned.bytes for planned in step if planned.ledger_id != INLINE)
        if len(step) == 1 and step[0].ledger_id != INLINE:
            return await self._slice_source(step[0])
        return _Source(_single(await self._fetch_window(step)), list, iter(()))

    async def _slice_source(self, planned: Slice) -> _Source:
        if isinstance(planned, CountedSlice):
            version, last = planned.rows.live.metadata_version, planned.rows.last_entry
            return self._counted_source(await self._open(planned, version, last), planned.rows)
        reader = await self._open(planned, planned.metadata_version, planned.known_confirmed)
        runs = reader.read_entries(
            [entry.entry_id for entry in planned.entries],
            entry_bytes=planned.bytes // len(planned.entries),
            known_confirmed=planned.known_confirmed,
        )
        remaining = iter(planned.entries)
        return _Source(runs, partial(self._pair, remaining), remaining)

    def _counted_source(self, reader: AsyncLedgerReader, rows: LiveRows) -> _Source:
        runs = _fetch_live(reader, clip_to_ledger(reader.record, rows), starts_of(self._ledgers))
        return _Source(runs, self._count_fetched, iter(()))

    def _windows(self) -> Iterator[list[Slice]]:
        """The slices in order, in groups that may be fetched together."""
        window: list[Slice] = []
        by_filter = self._keys is not None
        acked = self._task.acked
        for whole in slices_of(self._task.table, self._task.spans, by_filter=by_filter):
            planned = unacked_slice(whole, acked) if acked else whole
            if planned is None:
                continue
            if window and not self._fit([*window, planned]):
                yield window
                window = []
            window.append(planned)
        if window:
            yield window

    def _fit(self, window: list[Slice]) -> bool:
        """Whether all slices may be in memory at the same time. An entry may have mostly rows of
        other partitions, so the sizes are estimated from the entries that were fetched so far."""
        fetched = [planned for planned in window if planned.ledger_id != INLINE]
        size = sum(planned.bytes for planned in fetched)
        if self._planned_bytes:
            size = size * self._fetched_bytes // self._planned_bytes
        count = sum(planned.count for planned in fetched)
        count_max = min(max(WINDOW_ENTRIES_MIN, self._fetched), WINDOW_ENTRIES_MAX)
        return size <= WINDOW_BYTES and count <= count_max

    async def _fetch_window(self, window: list[Slice]) -> list[FetchedEntry]:
        """The entries of the slices, fetched from all their ledgers at once."""
        by_ledger: dict[int, list[ReadSlice]] = {}
        counted = [planned for planned in window if isinstance(planned, CountedSlice)]
        for planned in window:
            if isinstance(planned, ReadSlice) and planned.ledger_id != INLINE:
                by_ledger.setdefault(planned.ledger_id, []).append(planned)
        loop = asyncio.get_running_loop()
        reads = [
            loop.create_task(self._fetch_slice(_merge(slices))) for slices in by_ledger.values()
        ]
        others = [loop.create_task(self._fetch_slice(planned)) for planned in counted]
        try:
            fetched_by_ledger = dict(zip(by_ledger, await asyncio.gather(*reads), strict=True))
            counted_results = iter(await asyncio.gather(*others))
        finally:
            await cancel(*reads, *others)
        entries = {
            i: {
                fetched_entry.entry.header.entry_id: fetched_entry.entry
                for fetched_entry in fetched_by_ledger[i]
            }
            for i in fetched_by_ledger
        }
        fetched: list[FetchedEntry] = []
        for planned in window:
            if isinstance(planned, CountedSlice):
                fetched += next(counted_results)
                continue
            for i, (entry_id, pieces) in enumerate(planned.entries):
                if planned.ledger_id == INLINE:
                    entry = _inline_entry(planned.payloads[i], entry_id)
                else:
                    entry = entries[planned.ledger_id][entry_id]
                fetched.append(FetchedEntry(entry, pieces))
        return fetched

    async def _fetch_slice(self, planned: Slice) -> list[FetchedEntry]:
        source = await self._slice_source(planned)
        async with aclosing(source.runs) as runs:
            fetched = [entry async for run in runs for entry in source.pair(run)]
        assert next(source.remaining, None) is None, "a slice is read to its end"
        return fetched

    def _pair(self, remaining: Iterator[PlannedEntry], run: list[Entry]) -> list[FetchedEntry]:
        """Pair each entry of a slice's run with its pieces."""
        fetched = []
        for entry in run:
            entry_id, pieces = next(remaining)
            assert entry_id == entry.header.entry_id, "entries come in the order of the plan"
            fetched.append(FetchedEntry(entry, pieces))
        return self._count_fetched(fetched)

    def _count_fetched(self, fetched: list[FetchedEntry]) -> list[FetchedEntry]:
        self._fetched_bytes += sum(len(entry.entry.payload) for entry in fetched)
        self._fetched += len(fetched)
        return fetched

    async def _filter(self, planned: Slice, keys: Hashes) -> Slice:
        """The slice without the pieces that, by the filters, have none of the keys."""
        if isinstance(planned, CountedSlice) or planned.filter_entry == NO_ENTRY:
            return planned
        reader = await self._open(planned, planned.metadata_version, planned.known_confirmed)
        filters = await self._filters.of(reader, planned.filter_entry)
        return planned if filters is None else _with_keys(planned, filters, keys)

    async def _open(self, planned: Slice, version: int, known_confirmed: int) -> AsyncLedgerReader:
        """A reader with a ledger record at least as new as the plan's (hazard 27). Raises RowsLost
        if the task has rows beyond the ledger's end (hazard 26)."""
        ledger_id = planned.ledger_id
        reader = await self._ledgers.open(ledger_id, recover=False, min_version=version)
        last = reader.record.last_entry
        if last is not None and last < known_confirmed:
            end = LedgerEnd(last, reader.record.rows or 0)
            lost = lost_of(self._task, {ledger_id: end})
            if lost:
                raise rows_lost(lost, ended=(ledger_id, end))
        return reader

    async def _open_live(self, live_rows: LiveRows) -> AsyncLedgerReader:
        """As `_open`, for rows of a live segment."""
        ledger_id, version = live_rows.live.ledger_id, live_rows.live.metadata_version
        reader = await self._ledgers.open(ledger_id, recover=False, min_version=version)
        lost = live_rows_lost(reader.record, live_rows, self._task.acked)
        if lost is not None:
            raise lost
        return reader


async def _single(run: list[FetchedEntry]) -> FetchedRuns:
    yield run


def _merge(slices: list[ReadSlice]) -> ReadSlice:
    """One slice with the entries of several slices of one ledger, each entry once."""
    if len(slices) == 1:
        return slices[0]
    all_entries = {entry.entry_id: entry for planned in slices for entry in planned.entries}
    entries = tuple(all_entries[entry_id] for entry_id in sorted(all_entries))
    return replace(slices[0], entries=entries, bytes=sum(planned.bytes for planned in slices))


def _with_keys(planned: ReadSlice, filters: KeyFilters, keys: Hashes) -> ReadSlice:
    entries = []
    for entry in planned.entries:
        may_have_keys = [
            bool(filters.might_contain(partition, [entry.entry_id], keys)[0])
            for partition in entry.pieces["partition"].tolist()
        ]
        if any(may_have_keys):
            entries.append(PlannedEntry(entry.entry_id, entry.pieces[np.array(may_have_keys)]))
    size = planned.bytes * len(entries) // len(planned.entries)
    return replace(planned, entries=tuple(entries), bytes=size)


async def _fetch_live(
    reader: AsyncLedgerReader, live_rows: LiveRows, starts: EntryStarts
) -> FetchedRuns:
    """The entries that have the rows, in order, found by the counts in their headers."""
    end, rows_before = live_rows.end - live_rows.live.base, live_rows.live.rows_before
    at, before = await first_piece(reader, live_rows, starts)
    while before < end and at <= live_rows.last_entry:
        ids = range(at, estimate_last_entry(live_rows, at, before) + 1)
        async with aclosing(reader.read_entries(ids, known_confirmed=live_rows.last_entry)) as runs:
            async for run in runs:
                fetched = []
                for entry in run:
                    piece = piece_of(live_rows, entry.header, before)
                    before = entry.header.cumulative_rows - rows_before
                    if len(piece):
                        fetched.append(FetchedEntry(entry, piece))
                row, entry_id = rows_before + before, run[-1].header.entry_id + 1
                starts.put((reader.ledger_id, row), entry_id)
                yield fetched
                if before >= end:
                    return
        at = ids.stop
    if before < end:
        raise errors.UnsupportedFormat(
            f"ledger {reader.ledger_id} has {before} rows from entry {live_rows.live.first_entry}"
            f" to {live_rows.last_entry}, but the topic's log records {end}"
        )


class _KeyFilterCache:
    """Reads key filters, and keeps the filters read last."""

    def __init__(self) -> None:
        self._place = (INLINE, NO_ENTRY)
        self._read: KeyFilters | None = None

    async def of(self, reader: AsyncLedgerReader, entry_id: int) -> KeyFilters | None:
        """The filters in the entry; None if they cannot be read, so that the task reads every
        entry."""
        place = (reader.ledger_id, entry_id)
        if place != self._place:
            try:
                read = reader.read(entry_id, entry_id, known_confirmed=entry_id)
                async with aclosing(read) as entries:
                    self._read = KeyFilters((await anext(entries))[1].payload)
            except _FILTER_ERRORS as error:
                _log.warning("key filters in entry %d:%d are not used: %s", *place, error)
                self._read = None
            self._place = place
        return self._read


def _inline_entry(payload: bytes, entry_id: int) -> Entry:
    """An inline entry of a commit, in the form of a ledger's entry."""
    crc = payload_crc([payload])
    header = EntryHeader(INLINE, entry_id, NO_ENTRY, 0, 0, len(payload), crc)
    return Entry(header, memoryview(payload))
