"""Reading a planned slice: entries fetched ahead, checked, cut to the rows asked for.

Always true: rows come in order of offsets, each once; an entry whose header does not say what the
plan says (partition, first row, rows) is an error, never rows. A slice is read up to its planned
end or raises: a negative is never an end. The entries of a partition may lie apart in a ledger
that several partitions share: a request asks for several.
"""

from collections.abc import AsyncGenerator, Collection, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from bookie_server.api.entry import Entry, EntryHeader, payload_crc
from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.ledger.reader import EntryStream, LedgerReader
from spark_ledger.topic.key_filter import KeyFilters
from spark_ledger.topic.live import first_piece, lost_of_live, piece_of
from spark_ledger.topic.message_batch import Longs, decode_batch
from spark_ledger.topic.read_plan import LiveRows, ReadTask
from spark_ledger.topic.read_slice import EntryPiece, ReadSlice, lost_rows
from spark_ledger.topic.routing import Hashes
from spark_ledger.topic.segments import INLINE, NO_ENTRY


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of a partition; the first has offset `offset`; they were written at
    `times_ms` each, None: all at `written_ms`, which no time is beyond (the row's timestamp, as
    Kafka's CreateTime). `record_batch` has what there is of
    the columns asked for (message_batch.py: `column_of` gives nulls for one that there is not); a
    `typed` one has the topic's own columns, of that version of its schema. The rows are in entry
    `entry_id` of the ledger (INLINE: of the commit), where the first is the partition's row
    `entry_row`."""

    partition: int
    offset: int
    written_ms: int
    record_batch: pa.RecordBatch
    typed: bool = False
    schema_version: int = 0
    ledger_id: int = INLINE
    entry_id: int = 0
    entry_row: int = 0
    times_ms: Longs | None = None

    def each_ms(self) -> Longs:
        """When each row was written."""
        if self.times_ms is not None:
            return self.times_ms
        return np.full(self.record_batch.num_rows, self.written_ms, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class FetchedPiece:
    """An entry's checked bytes and what of it was asked for; `rows` decodes it, in any thread."""

    partition: int
    piece: EntryPiece
    entry: Entry

    def rows(self, columns: Collection[str] | None = None) -> Rows:
        """`columns` are those to be decoded, by their names in the entry (None: all). Raises
        errors.UnsupportedFormat when the entry is not what the plan says."""
        batch = decode_batch(self.entry.payload, partition=self.partition, columns=columns)
        piece = self.piece
        planned = (self.partition, piece.first_row)
        if (batch.partition, batch.first_row) != planned or batch.rows < piece.skip + piece.take:
            raise errors.UnsupportedFormat(
                f"entry {self.entry.header.ledger_id}:{piece.entry_id} holds {batch.rows} rows"
                f" from row {batch.first_row} of partition {batch.partition}, the topic's log"
                f" says otherwise: {piece}, partition {self.partition}"
            )
        kept = batch.record_batch.slice(piece.skip, piece.take)
        times = batch.times_ms
        return Rows(
            self.partition,
            piece.offset,
            batch.written_ms,
            kept,
            batch.typed,
            batch.schema_version,
            self.entry.header.ledger_id,
            piece.entry_id,
            piece.skip,
            None if times is None else times[piece.skip : piece.skip + piece.take],
        )


async def read_task(ledgers: LedgerStore, task: ReadTask) -> AsyncGenerator[Rows, None]:
    """The rows of a task, in order. Raises errors.NoSuchLedger (fold again: it was replaced or
    trimmed), errors.RowsLost, errors.DataUnavailable, errors.DigestMismatch,
    errors.UnsupportedFormat."""
    async with aclosing(fetch_task(ledgers, task)) as pieces:
        async for fetched in pieces:
            yield fetched.rows()


async def read_slices(
    ledgers: LedgerStore, slices: Iterable[ReadSlice]
) -> AsyncGenerator[Rows, None]:
    """The rows of the slices, in order. Raises as read_task."""
    async with aclosing(fetch_slices(ledgers, slices)) as pieces:
        async for fetched in pieces:
            yield fetched.rows()


async def fetch_task(
    ledgers: LedgerStore, task: ReadTask, keys: Hashes | None = None
) -> AsyncGenerator[FetchedPiece, None]:
    """The entries of a task, in order, not decoded yet; with `keys` (their hashes) without those
    that are known to have none of these keys. Raises as read_task."""
    async with aclosing(fetch_slices(ledgers, task.slices_in_order(), keys)) as pieces:
        async for fetched in pieces:
            yield fetched
    if task.live is not None:
        async with aclosing(_fetch_live(ledgers, task.partition, task.live)) as pieces:
            async for fetched in pieces:
                yield fetched


async def fetch_slices(
    ledgers: LedgerStore, slices: Iterable[ReadSlice], keys: Hashes | None = None
) -> AsyncGenerator[FetchedPiece, None]:
    """The entries of the slices, in order, not decoded yet. Raises as read_task."""
    filters = _Filters(keys)
    for planned in slices:
        async with aclosing(_fetch_slice(ledgers, planned, filters)) as pieces:
            async for fetched in pieces:
                yield fetched


async def _fetch_slice(
    ledgers: LedgerStore, planned: ReadSlice, filters: "_Filters"
) -> AsyncGenerator[FetchedPiece, None]:
    """The slice's entries in order, not decoded yet. Raises as read_task."""
    if planned.ledger_id == INLINE:
        for piece in planned.pieces:
            yield FetchedPiece(planned.partition, piece, _inline_entry(planned, piece.entry_id))
        return
    reader = await _open(ledgers, planned)
    planned = await filters.applied(reader, planned)
    if not planned.pieces:
        return
    pieces = iter(planned.pieces)
    async with aclosing(_read_entries(reader, planned)) as entries:
        async for entry_id, entry in entries:
            piece = next(pieces)
            assert piece.entry_id == entry_id, "entries come in the order of the plan"
            yield FetchedPiece(planned.partition, piece, entry)
    assert next(pieces, None) is None, "a slice is read to its end"


async def _fetch_live(
    ledgers: LedgerStore, partition: int, wanted: LiveRows
) -> AsyncGenerator[FetchedPiece, None]:
    """The entries of a live segment that have the rows wanted, in order."""
    live = wanted.live
    reader = await ledgers.open(live.ledger_id, recover=False, min_version=live.metadata_version)
    lost = await lost_of_live(reader, wanted)
    if lost is not None:
        raise lost
    first, before = await first_piece(reader, wanted)
    read = reader.read(first, wanted.last_entry, known_confirmed=wanted.last_entry)
    async with aclosing(read) as entries:
        async for _, entry in entries:
            if before >= wanted.end - live.base:
                return
            piece = piece_of(wanted, entry.header, before)
            before = entry.header.cumulative_rows
            if piece.take > 0:
                yield FetchedPiece(partition, piece, entry)


class _Filters:
    """What is known of the keys in entries; the filters read last are kept."""

    def __init__(self, keys: Hashes | None) -> None:
        self._keys = keys
        self._place = (INLINE, NO_ENTRY)
        self._read: KeyFilters | None = None

    async def applied(self, reader: LedgerReader, planned: ReadSlice) -> ReadSlice:
        """The slice without the entries that have none of the keys, as far as that is known."""
        if self._keys is None or planned.filter_entry == NO_ENTRY:
            return planned
        filters = await self._of(reader, planned.filter_entry)
        if filters is None:
            return planned
        entry_ids = [piece.entry_id for piece in planned.pieces]
        may = filters.might_contain(planned.partition, entry_ids, self._keys).tolist()
        kept = tuple(piece for piece, wanted in zip(planned.pieces, may, strict=True) if wanted)
        size = planned.bytes * len(kept) // len(planned.pieces)
        return replace(planned, pieces=kept, bytes=size)

    async def _of(self, reader: LedgerReader, entry_id: int) -> KeyFilters | None:
        """None where they cannot be read now: then every entry is."""
        place = (reader.ledger_id, entry_id)
        if place != self._place:
            try:
                read = reader.read(entry_id, entry_id, known_confirmed=entry_id)
                async with aclosing(read) as found:
                    self._read = KeyFilters((await anext(found))[1].payload)
            except (errors.DataUnavailable, errors.DigestMismatch, errors.NoSuchEntry):
                self._read = None
            self._place = place
        return self._read


def _inline_entry(planned: ReadSlice, entry_id: int) -> Entry:
    """An entry of the commit itself, as if a ledger had held it."""
    payload = planned.inline[entry_id]
    crc = payload_crc([payload])
    header = EntryHeader(INLINE, entry_id, NO_ENTRY, 0, 0, len(payload), crc)
    return Entry(header, memoryview(payload))


async def _open(ledgers: LedgerStore, planned: ReadSlice) -> LedgerReader:
    """A reader with metadata at least as new as the plan's (hazard 27)."""
    version = planned.metadata_version
    reader = await ledgers.open(planned.ledger_id, recover=False, min_version=version)
    lost = lost_rows(reader.record, planned)
    if lost is not None:
        raise lost.error()
    return reader


def _read_entries(reader: LedgerReader, planned: ReadSlice) -> EntryStream:
    """The slice's entries in order."""
    return reader.read_entries(
        [piece.entry_id for piece in planned.pieces],
        entry_bytes=planned.bytes // len(planned.pieces),
        known_confirmed=planned.known_confirmed,
    )
