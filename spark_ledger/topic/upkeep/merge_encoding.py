"""Makes entries of the rows that a merge copies. Spark's rows go through the encoder of tasks, each
with its time. Batches of producers are copied unchanged, without decoding them.

Always true: the rows of a partition stay in their order. A batch keeps its bytes and its messages,
and shares an entry with neighbouring batches of its partition, in order; the last chunk of a
message stays in an entry by itself. If a trim cut a batch, the remaining rows become columns. Rows
of a segment born live keep the times at which they were stored, but a merge keeps at most
STORED_TIMES_MAX times. If there are more, neighbouring rows get the time of the last of them. So a
read that begins at a time misses no row.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from spark_ledger.topic.entry.arrow_arrays import of_numpy
from spark_ledger.topic.entry.batch_encoder import BatchEncoder, EncodedEntry, EncodedShare
from spark_ledger.topic.entry.message_batch import (
    EVENT_TIME,
    HEADERS,
    KEY,
    TYPED_NAMES,
    VALUE,
    Header,
    column_of,
    decode_header,
)
from spark_ledger.topic.entry.pulsar_batch import (
    frame_batches,
    is_earlier_chunk,
    is_last_chunk,
    split_frames,
)
from spark_ledger.topic.entry.routing import Router, Routing
from spark_ledger.topic.log.segment_table import Longs
from spark_ledger.topic.log.segments import CommitTimes
from spark_ledger.topic.read.pieces import PIECE_DTYPE, EntryPieces
from spark_ledger.topic.read.row_blocks import Block
from spark_ledger.topic.read.slice_reader import FetchedEntry
from spark_ledger.topic.upkeep.merge_plan import Merge

COMPRESSION = "zstd"
ENTRY_BYTES = 1 << 20
STORED_TIMES_MAX = 256
EVENT_MS = (-(2**62), 2**62)
"""The bounds of the event times of an entry with batches: all times, since batches are not decoded.
"""
GATHER_BYTES_MAX = 4 << 20
TIMES_MAX = 4096  # the most times that rows of a partition have while they wait for an entry
BYTES_PER_TIME = 256  # an entry may have one time for each 256 bytes of the largest entry
BYTES_PER_TIME_SHARED = 128  # the same for an entry that several partitions share
_EXTRA_COLUMNS = frozenset(TYPED_NAMES.values())


@dataclass(frozen=True, slots=True)
class BatchCopy:
    """Consecutive batches of a partition to copy, each with its number of messages."""

    partition: int
    batches: tuple[tuple[int, bytes], ...]
    written_ms: int


class StoredRows(NamedTuple):
    """The `rows` rows from `offset` on, and the time at which they were stored."""

    offset: int
    rows: int
    stored_ms: int

    @property
    def end(self) -> int:
        return self.offset + self.rows


def blocks_and_batches(fetched: FetchedEntry) -> Iterator[Block | BatchCopy]:
    """The planned rows of an entry, in order: whole batches to copy, and blocks of other rows."""
    header = decode_header(fetched.entry.payload)
    if not header.has_batches:
        yield fetched.block()
        return
    for i in range(len(fetched.pieces)):
        yield from _copy_batches(fetched, header, fetched.pieces[i : i + 1])


def _copy_batches(
    fetched: FetchedEntry, header: Header, piece: EntryPieces
) -> Iterator[Block | BatchCopy]:
    partition, _first_row, skip, take, _offset = piece[0].tolist()
    body = memoryview(fetched.entry.payload)[header.body_at :]
    gathered: list[tuple[int, bytes]] = []
    at = 0
    for messages, data in split_frames(body, header.rows):
        lo, hi = max(at, skip), min(at + messages, skip + take)
        if hi - lo == messages:
            gathered.append((messages, bytes(data)))
        elif lo < hi:
            if gathered:
                yield BatchCopy(partition, tuple(gathered), header.written_ms)
            gathered = []
            yield FetchedEntry(fetched.entry, _narrow_piece(piece, lo, hi)).block()
        at += messages
    if gathered:
        yield BatchCopy(partition, tuple(gathered), header.written_ms)


def _narrow_piece(piece: EntryPieces, lo: int, hi: int) -> EntryPieces:
    """The piece with only rows [lo, hi) of the entry."""
    partition, first_row, skip, _, offset = piece[0].tolist()
    return np.array([(partition, first_row, lo, hi - lo, offset + lo - skip)], dtype=PIECE_DTYPE)


@dataclass(slots=True)
class _GatheredBatches:
    batches: list[tuple[int, bytes]]
    bytes: int
    written_ms: int
    chunks: int = 0


class BatchCopies:
    """Puts copied batches into entries of ENTRY_BYTES; a larger batch is an entry by itself."""

    def __init__(self, entry_bytes_max: int) -> None:
        # an entry's header and the lengths of its batches are in the other half
        self._entry_bytes = min(ENTRY_BYTES, entry_bytes_max // 2)
        self._gathered: dict[int, _GatheredBatches] = {}

    def add(self, part: BatchCopy) -> Iterator[EncodedEntry]:
        for messages, data in part.batches:
            gathered = self._gathered.get(part.partition)
            is_last = is_last_chunk(data)
            if gathered is not None and (is_last or gathered.bytes + len(data) > self._entry_bytes):
                yield self._entry(part.partition)
                gathered = None
            if gathered is None:
                gathered = self._gathered.setdefault(part.partition, _GatheredBatches([], 0, 0))
            gathered.batches.append((messages, data))
            gathered.bytes += len(data)
            gathered.written_ms = max(gathered.written_ms, part.written_ms)
            gathered.chunks += is_last or is_earlier_chunk(data)  # any chunk of a message
            if is_last:
                yield self._entry(part.partition)

    def flush(self) -> Iterator[EncodedEntry]:
        for partition in sorted(self._gathered):
            yield self._entry(partition)

    def _entry(self, partition: int) -> EncodedEntry:
        gathered = self._gathered.pop(partition)
        rows = sum(messages for messages, _ in gathered.batches)
        body = tuple(memoryview(part) for part in frame_batches(gathered.batches))
        size = sum(map(len, body))
        share = EncodedShare(partition, rows, size, EVENT_MS)
        return EncodedEntry(
            (share,), gathered.written_ms, body, has_batches=True, chunks=gathered.chunks
        )


def with_stored_times(merge: Merge, stored: Iterable[StoredRows]) -> CommitTimes:
    """The commit times of the merge's rows: for each row the earlier of the plan's time and the
    time in `stored`. Times never fall."""
    times = np.repeat(
        np.array([ms for _, ms in merge.commit_times], dtype=np.int64),
        [rows for rows, _ in merge.commit_times],
    )
    for offset, rows, ms in _join_runs(list(stored)):
        lo, hi = max(offset - merge.start, 0), offset + rows - merge.start
        times[lo:hi] = np.minimum(times[lo:hi], ms)
    times = np.maximum.accumulate(times)
    firsts = np.flatnonzero(np.diff(times, prepend=times[:1] - 1))
    counts = np.diff(firsts, append=len(times))
    return tuple(zip(counts.tolist(), times[firsts].tolist(), strict=True))


def _join_runs(stored: list[StoredRows]) -> Iterator[StoredRows]:
    """Joins neighbouring runs into at most STORED_TIMES_MAX runs (or a few more, if other rows are
    between the runs). A joined run has the last time of its rows."""
    size = -(-len(stored) // STORED_TIMES_MAX)
    gathered: list[StoredRows] = []
    for run in stored:
        is_apart = bool(gathered) and gathered[-1].end != run.offset
        if is_apart or len(gathered) >= size:
            yield _join(gathered)
            gathered = []
        gathered.append(run)
    if gathered:
        yield _join(gathered)


def _join(gathered: list[StoredRows]) -> StoredRows:
    start = gathered[0].offset
    return StoredRows(start, gathered[-1].end - start, max(run.stored_ms for run in gathered))


class MergeEncoder:
    """Puts blocks of rows, and batches, into entries. A block or batch that cannot share an entry
    with the one before begins a new entry."""

    def __init__(self, merges: Sequence[Merge], entry_bytes_max: int) -> None:
        self._merges = merges
        self._entry_bytes_max = entry_bytes_max
        self._encoding: _Encoding | None = None
        self._copies = BatchCopies(entry_bytes_max)

    def add(self, part: Block | BatchCopy) -> Iterator[EncodedEntry]:
        if isinstance(part, BatchCopy):
            yield from self._finish_encoding()
            yield from self._copies.add(part)
            return
        yield from self._copies.flush()
        if self._encoding is None or not self._encoding.accepts(part):
            yield from self._finish_encoding()
            self._encoding = _Encoding(part, self._merges, self._entry_bytes_max)
        yield from self._encoding.add(part)

    def flush(self) -> Iterator[EncodedEntry]:
        yield from self._finish_encoding()
        yield from self._copies.flush()

    def _finish_encoding(self) -> Iterator[EncodedEntry]:
        encoding, self._encoding = self._encoding, None
        if encoding is not None:
            yield from encoding.flush()


class _Encoding:
    """Puts rows of one schema into entries, by the encoder of tasks. The encoder keeps the order of
    a partition's rows, so each entry takes the next times of its partitions."""

    def __init__(self, first: Block, merges: Sequence[Merge], entry_bytes_max: int) -> None:
        self._first = first
        self._has_several_partitions = len(merges) > 1
        self._times: dict[int, RunQueue] = {}
        self._waiting = 0  # the number of times of rows that are in no entry yet
        self._times_max = min(TIMES_MAX, entry_bytes_max // BYTES_PER_TIME)
        self._waiting_max = entry_bytes_max // BYTES_PER_TIME_SHARED
        last_partition = merges[-1].partition
        gather_bytes = GATHER_BYTES_MAX
        if self._has_several_partitions:
            gather_bytes += sum(merge.bytes for merge in merges)
        self._encoder = BatchEncoder(
            Router(
                Routing.COLUMN if self._has_several_partitions else Routing.SPARK,
                partitions=last_partition + 1,
                task_index=last_partition,  # with SPARK, the partition of all rows
            ),
            now_ms=lambda: int(first.runs["written_ms"][0]),
            compression=COMPRESSION,
            entry_bytes_max=entry_bytes_max,
            gather_bytes_max=gather_bytes,
            key_filters=True,
            schema_version=first.schema_version,
        )

    def accepts(self, rows: Block) -> bool:
        """Whether the rows may be in an entry with the first rows."""
        first = self._first
        has_same_schema = (first.typed, first.schema_version) == (rows.typed, rows.schema_version)
        runs_max = max(map(len, self._times.values()), default=0)
        if runs_max >= self._times_max or self._waiting >= self._waiting_max:
            return False
        return has_same_schema and (
            not first.typed or first.record_batch.schema == rows.record_batch.schema
        )

    def add(self, rows: Block) -> Iterator[EncodedEntry]:
        batch = rows.record_batch
        extra_columns = {
            name: _extra_column(batch, name, rows.typed) for name in (KEY, EVENT_TIME, HEADERS)
        }
        if rows.typed:
            values = batch.select(
                [name for name in batch.schema.names if name not in _EXTRA_COLUMNS]
            )
        else:
            values = column_of(batch, VALUE)
        partitions = (
            of_numpy(rows.row_values("partition")) if self._has_several_partitions else None
        )
        self._note_times(rows)
        return map(
            self._with_times,
            self._encoder.add(
                extra_columns[KEY],
                values,
                event_times=extra_columns[EVENT_TIME],
                headers=extra_columns[HEADERS],
                partitions=partitions,
            ),
        )

    def flush(self) -> Iterator[EncodedEntry]:
        return map(self._with_times, self._encoder.flush())

    def _note_times(self, rows: Block) -> None:
        times, start = rows.row_times_ms(), 0
        for partition, count in rows.runs[["partition", "rows"]].tolist():
            partition_times = self._times.setdefault(partition, RunQueue())
            before = len(partition_times)
            partition_times.add(times[start : start + count])
            self._waiting += len(partition_times) - before
            start += count

    def _with_times(self, entry: EncodedEntry) -> EncodedEntry:
        times = []
        for share in entry.shares:
            share_times = self._times[share.partition]
            before = len(share_times)
            times += share_times.take(share.rows)
            self._waiting += len(share_times) - before
        return replace(entry, written_ms=max(ms for _, ms in times), times=times)


class RunQueue:
    """A queue of runs of rows, each with one time or token."""

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._runs = deque(runs)

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, times: Longs) -> None:
        """Adds rows at the end; `times` has the time at which each row was written."""
        firsts = np.flatnonzero(np.diff(times, prepend=times[:1] - 1))
        counts = np.diff(firsts, append=len(times))
        for count, ms in zip(counts.tolist(), times[firsts].tolist(), strict=True):
            if self._runs and self._runs[-1][1] == ms:
                count += self._runs.pop()[0]
            self._runs.append((count, ms))

    def take(self, rows: int) -> list[tuple[int, int]]:
        """Takes the runs of the next `rows` rows."""
        runs = []
        while rows:
            count, ms = self._runs.popleft()
            if count > rows:
                self._runs.appendleft((count - rows, ms))
            runs.append((min(count, rows), ms))
            rows -= runs[-1][0]
        return runs


def _extra_column(batch: pa.RecordBatch, name: str, typed: bool) -> pa.Array | None:
    at = batch.schema.get_field_index(TYPED_NAMES[name] if typed else name)
    return None if at < 0 else batch.column(at)
