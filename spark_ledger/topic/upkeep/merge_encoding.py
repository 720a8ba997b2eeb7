"""Rows to be merged on their way to entries: those of Spark through the encoder that tasks have,
with the time of each, producers' batches as they are, not decoded.

Always true: the rows of a partition stay in their order. A batch keeps its bytes and its messages,
and each is in one entry with others of its partition, in their order; the last chunk of a message
is in an entry by itself, as it came. A batch of which only a part is to be merged (a trim went
through it) is no batch any more: its rows become columns. Rows of a segment born live keep the
times at which they were stored, STORED_TIMES_MAX of them a merge: of each stretch the last, so that
a read since a moment misses none.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

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
    framed,
    is_earlier_chunk,
    is_last_chunk,
    unframed,
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
"""Batches are not decoded: event times may be any."""
GATHER_BYTES_MAX = 4 << 20
TIMES_MAX = 4096  # of a partition's rows that wait to be an entry
TIME_PART = 256  # of an entry's bytes there is one time at most,
TIME_PART_SHARED = 128  # or of one that is shared
_BESIDE = frozenset(TYPED_NAMES.values())


@dataclass(frozen=True, slots=True)
class Copied:
    """Batches of a partition that follow one another, with the messages of each."""

    partition: int
    batches: tuple[tuple[int, bytes], ...]
    written_ms: int


Stored = tuple[int, int, int]
"""From an offset on so many rows were stored at that time."""


def parts_of(fetched: FetchedEntry) -> Iterator[Block | Copied]:
    """What was asked for of an entry, in order: batches that are whole, and other rows."""
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
    for messages, data in unframed(body, header.rows):
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
    """Rows [lo, hi) of the entry alone."""
    partition, first_row, skip, _, offset = piece[0].tolist()
    return np.array([(partition, first_row, lo, hi - lo, offset + lo - skip)], dtype=WANTED)


@dataclass(slots=True)
class _Gathered:
    batches: list[tuple[int, bytes]]
    bytes: int
    written_ms: int
    chunks: int = 0


class BatchCopies:
    """Batches on their way to entries of ENTRY_BYTES, or of one larger batch."""

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
        body = tuple(memoryview(part) for part in framed(held.batches))
        size = sum(map(len, body))
        share = EncodedShare(partition, rows, size, EVENT_MS)
        return EncodedEntry((share,), held.written_ms, body, batches=True, chunks=held.chunks)


def times_with(merge: Merge, stored: Iterable[Stored]) -> CommitTimes:
    """When the merge's rows were committed, as it was planned, with the times at which some of them
    were stored: never later than planned, and never falling."""
    each = np.repeat(
        np.array([ms for _, ms in merge.committed], dtype=np.int64),
        [rows for rows, _ in merge.committed],
    )
    for offset, rows, ms in _few(list(stored)):
        lo, hi = max(offset - merge.start, 0), offset + rows - merge.start
        each[lo:hi] = np.minimum(each[lo:hi], ms)
    each = np.maximum.accumulate(each)
    firsts = np.flatnonzero(np.diff(each, prepend=each[:1] - 1))
    counts = np.diff(firsts, append=len(each))
    return tuple(zip(counts.tolist(), each[firsts].tolist(), strict=True))


def _few(stored: list[Stored]) -> Iterator[Stored]:
    """Neighbours of these together, STORED_TIMES_MAX at most, each with the last of its times; but
    for some more where rows of others lie between."""
    size = -(-len(stored) // STORED_TIMES_MAX)
    held: list[Stored] = []
    for one in stored:
        apart = bool(held) and held[-1][0] + held[-1][1] != one[0]
        if apart or len(held) >= size:
            yield _joined(held)
            held = []
        held.append(one)
    if held:
        yield _joined(held)


def _joined(held: list[Stored]) -> Stored:
    start = held[0][0]
    return start, held[-1][0] + held[-1][1] - start, max(ms for _, _, ms in held)


class MergeEncoder:
    """Rows and batches on their way to entries; what cannot be in an entry with those before it
    begins another."""

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
    """Rows of one kind on their way to entries, by the encoder that tasks have: it keeps the order
    of a partition's rows, so entries are given the rows' times in that order."""

    def __init__(self, first: Block, merges: Sequence[Merge], entry_bytes_max: int) -> None:
        self._first = first
        self._several = len(merges) > 1
        self._times: dict[int, Runs] = {}
        self._waiting = 0  # times of rows that are in no entry yet
        self._times_max = min(TIMES_MAX, entry_bytes_max // TIME_PART)
        self._waiting_max = entry_bytes_max // TIME_PART_SHARED
        last = merges[-1].partition
        gathered = GATHER_BYTES_MAX + (sum(one.bytes for one in merges) if self._several else 0)
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
        """Whether the rows may be in an entry with the first."""
        one = self._first
        same = (one.typed, one.schema_version) == (rows.typed, rows.schema_version)
        most = max(map(len, self._times.values()), default=0)
        if most >= self._times_max or self._waiting >= self._waiting_max:
            return False
        return same and (not one.typed or one.record_batch.schema == rows.record_batch.schema)

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
            of_partition = self._times.setdefault(partition, Runs())
            before = len(of_partition)
            of_partition.add(times[start : start + count])
            self._waiting += len(of_partition) - before
            start += count

    def _timed(self, entry: EncodedEntry) -> EncodedEntry:
        times = []
        for share in entry.shares:
            of_share = self._times[share.partition]
            before = len(of_share)
            times += of_share.taken(share.rows)
            self._waiting += len(of_share) - before
        return replace(entry, written_ms=max(ms for _, ms in times), times=times)


class Runs:
    """So many rows of one time each, taken from the front."""

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._runs = deque(runs)

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, times: Longs) -> None:
        """The rows that come next were written at these times, one for each."""
        firsts = np.flatnonzero(np.diff(times, prepend=times[:1] - 1))
        counts = np.diff(firsts, append=len(times))
        for count, ms in zip(counts.tolist(), times[firsts].tolist(), strict=True):
            if self._runs and self._runs[-1][1] == ms:
                count += self._runs.pop()[0]
            self._runs.append((count, ms))

    def taken(self, rows: int) -> list[tuple[int, int]]:
        """The runs of the next so many rows."""
        found = []
        while rows:
            count, ms = self._runs.popleft()
            if count > rows:
                self._runs.appendleft((count - rows, ms))
            found.append((min(count, rows), ms))
            rows -= found[-1][0]
        return found


def _beside(batch: pa.RecordBatch, name: str, typed: bool) -> pa.Array | None:
    at = batch.schema.get_field_index(TYPED_NAMES[name] if typed else name)
    return None if at < 0 else batch.column(at)
