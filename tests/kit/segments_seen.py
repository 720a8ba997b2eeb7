"""What tests ask of segments, partitions and rows, one by one; the product works in columns."""

from collections.abc import Collection, Iterator

import numpy as np

from spark_ledger.topic.log.segments import PlacedSegment, Segment
from spark_ledger.topic.log.state import NO_TABLES, PartitionState, Tables
from spark_ledger.topic.read.pieces import ReadSlice
from spark_ledger.topic.read.plan import ReadTask
from spark_ledger.topic.read.row_blocks import RUN, Block
from spark_ledger.topic.read.slice_reader import FetchedEntry
from tests.kit.rows import Rows, parts_of


def entry_ids(segment: Segment) -> Iterator[int]:
    for first, last in segment.entries:
        yield from range(first, last + 1)


def end_of(placed: PlacedSegment) -> int:
    """One past its last offset."""
    return placed.base + placed.segment.rows


def segments_of(
    held: PartitionState, lo: int | None = None, hi: int | None = None, read: Tables = NO_TABLES
) -> list[PlacedSegment]:
    """The partition's segments with a row in [lo, hi), of all that is kept if not given."""
    lo = held.start_offset if lo is None else lo
    hi = held.end_offset if hi is None else hi
    return [placed for part in held.stretches(lo, hi, read) for placed in part.table]


def block_of(rows: Rows) -> Block:
    """A block of these rows alone."""
    place = (rows.partition, rows.offset, rows.record_batch.num_rows)
    where = (rows.ledger_id, rows.entry_id, rows.entry_row, rows.written_ms)
    runs = np.array([(*place, *where)], dtype=RUN)
    return Block(runs, rows.record_batch, rows.typed, rows.schema_version, rows.times_ms)


def partitions_of(task: ReadTask) -> list[int]:
    """Those that a task reads committed rows of, ascending."""
    return sorted({one.partition for one in task.spans})


def rows_of_slice(planned: ReadSlice) -> int:
    return sum(int(entry.pieces["take"].sum()) for entry in planned.entries)


def rows_of(fetched: FetchedEntry, columns: Collection[str] | None = None) -> Rows:
    """The rows of an entry of which one partition was asked for."""
    (rows,) = parts_of(fetched.block(columns))
    return rows
