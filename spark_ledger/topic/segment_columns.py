"""The segments of a topic as a listing shows them. Pure; whole columns.

Always true: offsets that were trimmed or taken out are in no row: a segment of which only a part
counts is listed with that part's offsets and rows, and with all its bytes and entries.
"""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_ledger.topic.arrow_arrays import of_list, of_numpy
from spark_ledger.topic.intervals import Chunk
from spark_ledger.topic.segment_table import SegmentTable
from spark_ledger.topic.segments import INLINE
from spark_ledger.topic.state import Tables, TopicState

_TIME = pa.timestamp("us", "UTC")
SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("firstOffset", pa.int64()),
        ("lastOffset", pa.int64()),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("entries", pa.int32()),
        ("ledgerId", pa.int64()),
        ("shared", pa.bool_()),
        ("commit", pa.int64()),
        ("committedAt", _TIME),
        ("minTimestamp", _TIME),
        ("maxTimestamp", _TIME),
    ]
)
OffsetRange = tuple[int, int, int]
"""A partition, and the offsets [lo, hi) of it."""
EMPTY = pa.RecordBatch.from_pylist([], schema=SCHEMA)


def ranges_by_chunk(state: TopicState) -> dict[Chunk | None, list[OffsetRange]]:
    """The offsets whose segments are in each chunk, and (None) in none."""
    found: dict[Chunk | None, list[OffsetRange]] = {}
    for held in state.partitions:
        for one in held.intervals.between(held.start_offset, held.end_offset):
            if one.source is not None:
                chunk = one.source if isinstance(one.source, Chunk) else None
                lo = max(one.lo, held.start_offset)
                found.setdefault(chunk, []).append((held.number, lo, one.hi))
    return found


def chunks_needed(state: TopicState, ranges: Iterable[OffsetRange]) -> list[Chunk]:
    """The chunks that `of_ranges` must have read."""
    found = (state.partitions[p].chunks_between(*_kept(state, p, lo, hi)) for p, lo, hi in ranges)
    return list(dict.fromkeys(chunk for chunks in found for chunk in chunks))


def of_ranges(
    state: TopicState, topic: str, ranges: Iterable[OffsetRange], read: Tables
) -> pa.RecordBatch:
    """The segments with a row in the ranges, in their order."""
    found = []
    for partition, lo, hi in ranges:
        first, end = _kept(state, partition, lo, hi)
        for part in state.partitions[partition].stretches(first, end, read):
            found.append(_part(part.table, partition, part.lo, part.hi))
    return _joined(found, topic)


def _kept(state: TopicState, partition: int, lo: int, hi: int) -> tuple[int, int]:
    return max(lo, state.partitions[partition].start_offset), hi


def _part(table: SegmentTable, partition: int, lo: int, hi: int) -> pa.RecordBatch:
    """The segments with a row in [lo, hi), without their topic."""
    part = table.between(partition, lo, hi)
    first, last = np.maximum(part.bases, lo), np.minimum(part.ends, hi) - 1
    column = part.batch.column
    ledgers = of_numpy(part.ledgers)
    arrays = [
        column("partition"),
        of_numpy(first),
        of_numpy(last),
        of_numpy(last - first + 1),
        column("bytes"),
        pc.list_value_length(column("entry_rows")),
        pc.if_else(pc.equal(ledgers, INLINE), None, ledgers),
        column("shared"),
        column("commit"),
        *(_time(column(name)) for name in ("commit_ms", "min_ms", "max_ms")),
    ]
    return pa.RecordBatch.from_arrays(arrays, names=SCHEMA.names[1:])


def _time(ms: pa.Array) -> pa.Array:
    return pc.multiply(ms, 1000).cast(_TIME)


def _joined(parts: Iterable[pa.RecordBatch], topic: str) -> pa.RecordBatch:
    some = [one for one in parts if one.num_rows]
    if not some:
        return EMPTY
    whole = pa.Table.from_batches(some).combine_chunks()
    names = of_list([topic], pa.string()).take(of_numpy(np.zeros(len(whole), dtype=np.int64)))
    table = whole.add_column(0, "topic", names).cast(SCHEMA)
    (batch,) = table.combine_chunks().to_batches()
    return batch
