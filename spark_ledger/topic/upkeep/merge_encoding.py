"""Encodes rows to be merged as entries: Spark's rows by the encoder of tasks, with the time of each
row; batches of producers unchanged, without decoding them.

Always true: the rows of a partition stay in their order. A batch keeps its bytes and its messages,
and is in an entry with other batches of its partition, in their order; the last chunk of a message
is in an entry by itself, as before. If only a part of a batch is to be merged (a trim cut it), its
rows become columns. Rows of a segment born live keep the times at which they were stored, at most
STORED_TIMES_MAX times a merge: each stretch of rows gets its last time, so that a read from a time
on misses no row.
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
from spark_ledger.topic.read.pieces import WANTED, Wanted
from spark_ledger.topic.read.row_blocks import Block
from spark_ledger.topic.read.slice_reader import FetchedEntry
from spark_ledger.topic.upkeep.merge_plan import Merge

COMPRESSION = "zstd"
ENTRY_BYTES = 1 << 20
STORED_TIMES_MAX = 256
EVENT_MS = (-(2**62), 2**62)
"""Batches are not decoded: their entries allow all event times."""
GATHER_BYTES_MAX = 4 << 20
TIMES_MAX = 4096  # times at most of a partition's rows that wait for an entry
TIME_PART = 256  # an entry has one time at most for so many of its bytes,
TIME_PART_SHARED = 128  # a shared entry for so many
_BESIDE = frozenset(TYPED_NAMES.values())


@dataclass(frozen=True, slots=True)
class Copied:
    """Batches of a partition that follow one another, with the messages of each."""

    partition: int
    batches: tuple[tuple[int, bytes], ...]
    written_ms: int


class StoredRows(NamedTuple):
    """Rows from an offset on, and the time at which they were stored."""

    offset: int
    rows: int
    stored_ms: int

    @property
    def end(self) -> int:
        return self.offset + self.rows


def parts_of(fetched: FetchedEntry) -> Iterator[Block | Copied]:
    """The requested rows of an entry, in order: batches that are whole, and other rows."""
    header = decode_header(fetched.entry.payload)
    if not header.batches:
        yield fetched.block()
        return
    for i in range(len(fetched.pieces)):
        yield from _of_batches(fetched, header, fetched.pieces[i : i + 1])


def _of_batches(fetched: FetchedEntry, header: Header, piece: Wanted) -> Iterator[Block | Copied]:
    partition, _, skip, take, _ = piece[0].tolist()
    body = memoryview(fetched.entry.payload)[header.body_at :]
    held: list[tuple[int, bytes]] = []
    at = 0
    for messages, data in split_frames(body, header.rows):
        lo, hi = max(at, skip), min(at + messages, skip + take)
        if hi - lo == messages:
            held.append((messages, bytes(data)))
        elif lo < hi:
            if held:
                yield Copied(partition, tuple(held), header.written_ms)
            held = []
            yield FetchedEntry(fetched.entry, _narrowed(piece, lo, hi)).block()
        at += messages
    if held:
        yield Copied(partition, tuple(held), header.written_ms)


def _narrowed(piece: Wanted, lo: int, hi: int) -> Wanted:
    """The piece with only rows [lo, hi) of the entry."""
    partition, first_row, skip, _, offset = piece[0].tolist()
    return np.array([(partition, first_row, lo, hi - lo, offset + lo - skip)], dtype=WANTED)


@dataclass(slots=True)
class _Gathered:
    batches: list[tuple[int, bytes]]
    bytes: int
    written_ms: int
    chunks: int = 0


class BatchCopies:
    """Puts batches into entries of ENTRY_BYTES, or of one larger batch."""

    def __init__(self, entry_bytes_max: int) -> None:
        # an entry's header and the lengths of its batches are in the other half
        self._entry_bytes = min(ENTRY_BYTES, entry_bytes_max // 2)
        self._gathered: dict[int, _Gathered] = {}

    def add(self, part: Copied) -> Iterator[EncodedEntry]:
        for messages, data in part.batches:
            held = self._gathered.get(part.partition)
            last = is_last_chunk(data)
            if held is not None and (last or held.bytes + len(data) > self._entry_bytes):
                yield self._entry(part.partition)
                held = None
            if held is None:
                held = self._gathered.setdefault(part.partition, _Gathered([], 0, 0))
            held.batches.append((messages, data))
            held.bytes += len(data)
            held.written_ms = max(held.written_ms, part.written_ms)
            held.chunks += last or is_earlier_chunk(data)
            if last:
                yield self._entry(part.partition)

    def flush(self) -> Iterator[EncodedEntry]:
        for partition in sorted(self._gathered):
            yield self._entry(partition)

    def _entry(self, partition: int) -> EncodedEntry:
        held = self._gathered.pop(partition)
        rows = sum(messages for messages, _ in held.batches)
        body = tuple(memoryview(part) for part in frame_batches(held.batches))
        size = sum(map(len, body))
        share = EncodedShare(partition, rows, size, EVENT_MS)
        return EncodedEntry((share,), held.written_ms, body, batches=True, chunks=held.chunks)


def with_stored_times(merge: Merge, stored: Iterable[StoredRows]) -> CommitTimes:
    """The commit times of the merge's rows from its plan, replaced by the times in `stored` for
    rows that were stored earlier. Times never fall."""
    times = np.repeat(
        np.array([ms for _, ms in merge.commit_times], dtype=np.int64),
        [rows for rows, _ in merge.commit_times],
    )
    for offset, rows, ms in _few(list(stored)):
        lo, hi = max(offset - merge.start, 0), offset + rows - merge.start
        times[lo:hi] = np.minimum(times[lo:hi], ms)
    times = np.maximum.accumulate(times)
    firsts = np.flatnonzero(np.diff(times, prepend=times[:1] - 1))
    counts = np.diff(firsts, append=len(times))
    return tuple(zip(counts.tolist(), times[firsts].tolist(), strict=True))


def _few(stored: list[StoredRows]) -> Iterator[StoredRows]:
    """Joins neighbours, each group with the last of its times. There are STORED_TIMES_MAX groups at
    most, or a few more if other rows are between them."""
    size = -(-len(stored) // STORED_TIMES_MAX)
    held: list[StoredRows] = []
    for run in stored:
        apart = bool(held) and held[-1].end != run.offset
        if apart or len(held) >= size:
            yield _joined(held)
            held = []
        held.append(run)
    if held:
        yield _joined(held)


def _joined(held: list[StoredRows]) -> StoredRows:
    start = held[0].offset
    return StoredRows(start, held[-1].end - start, max(run.stored_ms for run in held))


class MergeEncoder:
    """Puts rows and batches into entries; a part that does not fit into an entry with the parts
    before it begins a new one."""

    def __init__(self, merges: Sequence[Merge], entry_bytes_max: int) -> None:
        self._merges = merges
        self._entry_bytes_max = entry_bytes_max
        self._encoding: _Encoding | None = None
        self._copies = BatchCopies(entry_bytes_max)

    def add(self, part: Block | Copied) -> Iterator[EncodedEntry]:
        if isinstance(part, Copied):
            yield from self._encoded()
            yield from self._copies.add(part)
            return
        yield from self._copies.flush()
        if self._encoding is None or not self._encoding.takes(part):
            yield from self._encoded()
            self._encoding = _Encoding(part, self._merges, self._entry_bytes_max)
        yield from self._encoding.add(part)

    def flush(self) -> Iterator[EncodedEntry]:
        yield from self._encoded()
        yield from self._copies.flush()

    def _encoded(self) -> Iterator[EncodedEntry]:
        encoding, self._encoding = self._encoding, None
        if encoding is not None:
            yield from encoding.flush()


class _Encoding:
    """Puts rows of one kind into entries, by the encoder of tasks: it keeps the order of a
    partition's rows, so entries get the rows' times in that order."""

    def __init__(self, first: Block, merges: Sequence[Merge], entry_bytes_max: int) -> None:
        self._first = first
        self._several = len(merges) > 1
        self._times: dict[int, RunQueue] = {}
        self._waiting = 0  # times of rows that are in no entry yet
        self._times_max = min(TIMES_MAX, entry_bytes_max // TIME_PART)
        self._waiting_max = entry_bytes_max // TIME_PART_SHARED
        last = merges[-1].partition
        gathered = GATHER_BYTES_MAX
        if self._several:
            gathered += sum(merge.bytes for merge in merges)
        self._encoder = BatchEncoder(
            Router(Routing.COLUMN if self._several else Routing.SPARK, last + 1, last),
            lambda: int(first.runs["written_ms"][0]),
            compression=COMPRESSION,
            entry_bytes_max=entry_bytes_max,
            gather_bytes_max=gathered,
            key_filters=True,
            schema_version=first.schema_version,
        )

    def takes(self, rows: Block) -> bool:
        """Whether the rows may be in an entry with the first rows."""
        first = self._first
        same = (first.typed, first.schema_version) == (rows.typed, rows.schema_version)
        most = max(map(len, self._times.values()), default=0)
        if most >= self._times_max or self._waiting >= self._waiting_max:
            return False
        return same and (not first.typed or first.record_batch.schema == rows.record_batch.schema)

    def add(self, rows: Block) -> Iterator[EncodedEntry]:
        batch = rows.record_batch
        beside = {name: _beside(batch, name, rows.typed) for name in (KEY, EVENT_TIME, HEADERS)}
        if rows.typed:
            values = batch.select([name for name in batch.schema.names if name not in _BESIDE])
        else:
            values = column_of(batch, VALUE)
        partitions = of_numpy(rows.each("partition")) if self._several else None
        self._note_times(rows)
        return map(
            self._timed,
            self._encoder.add(
                beside[KEY],
                values,
                event_times=beside[EVENT_TIME],
                headers=beside[HEADERS],
                partitions=partitions,
            ),
        )

    def flush(self) -> Iterator[EncodedEntry]:
        return map(self._timed, self._encoder.flush())

    def _note_times(self, rows: Block) -> None:
        times, start = rows.each_ms(), 0
        for partition, count in rows.runs[["partition", "rows"]].tolist():
            of_partition = self._times.setdefault(partition, RunQueue())
            before = len(of_partition)
            of_partition.add(times[start : start + count])
            self._waiting += len(of_partition) - before
            start += count

    def _timed(self, entry: EncodedEntry) -> EncodedEntry:
        times = []
        for share in entry.shares:
            of_share = self._times[share.partition]
            before = len(of_share)
            times += of_share.take(share.rows)
            self._waiting += len(of_share) - before
        return replace(entry, written_ms=max(ms for _, ms in times), times=times)


class RunQueue:
    """Runs of rows, each with one time or token, to be taken from the front."""

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._runs = deque(runs)

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, times: Longs) -> None:
        """Adds rows at the end; `times` has the time at which each of them was written."""
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


def _beside(batch: pa.RecordBatch, name: str, typed: bool) -> pa.Array | None:
    at = batch.schema.get_field_index(TYPED_NAMES[name] if typed else name)
    return None if at < 0 else batch.column(at)
