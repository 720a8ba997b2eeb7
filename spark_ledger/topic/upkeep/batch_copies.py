"""Producers' batches in a merge: they go to other entries as they are, and are not decoded.

Always true: a batch keeps its bytes and its messages, and each is in one entry with others of its
partition, in their order; the last chunk of a message is in an entry by itself, as it came. A batch
of which only a part is to be merged (a trim went through it) is no batch any more: its rows become
columns. Rows of a segment born live keep the times at which they were stored, STORED_TIMES_MAX of
them a merge: of each stretch the last, so that a read since a moment misses none.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from spark_ledger.topic.entry.batch_encoder import EncodedEntry, EncodedShare
from spark_ledger.topic.entry.message_batch import Header, decode_header
from spark_ledger.topic.entry.pulsar_batch import (
    framed,
    is_earlier_chunk,
    is_last_chunk,
    unframed,
)
from spark_ledger.topic.log.segments import CommitTimes
from spark_ledger.topic.read.pieces import WANTED, Wanted
from spark_ledger.topic.read.row_blocks import Block
from spark_ledger.topic.read.slice_reader import FetchedEntry
from spark_ledger.topic.upkeep.merge_plan import Merge

ENTRY_BYTES = 1 << 20
STORED_TIMES_MAX = 256
EVENT_MS = (-(2**62), 2**62)
"""Batches are not decoded: event times may be any."""


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

    def __init__(self) -> None:
        self._gathered: dict[int, _Gathered] = {}

    def add(self, part: Copied) -> Iterator[EncodedEntry]:
        for messages, data in part.batches:
            held = self._gathered.get(part.partition)
            last = is_last_chunk(data)
            if held is not None and (last or held.bytes + len(data) > ENTRY_BYTES):
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
