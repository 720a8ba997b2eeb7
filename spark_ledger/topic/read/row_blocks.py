"""Rows out of entries, of one partition or of several together.

Always true: a block consists of runs, in the order in which they were fetched; a run is consecutive
rows that an entry has of a partition. `runs` has one line for each run, so the work on a block is
per run and not per row. Small blocks are joined up to JOINED_BYTES, because a block of a few rows
costs as much work as a block of many rows.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_ledger.topic.entry.message_batch import Longs

RUN = np.dtype(
    [
        (name, np.int64)
        for name in ("partition", "offset", "rows", "ledger", "entry", "entry_row", "written_ms")
    ]
)
Runs = npt.NDArray[np.void]
"""For each run its partition, the offset of its first row, the number of its rows, and the ledger
(INLINE: the commit) and entry that have the rows. `entry_row` is the number of the first row among
the partition's rows in the entry. `written_ms` is the time at which the rows were written, or a
later time."""
JOINED_BYTES = 1 << 20
SMALL_BYTES = 128 << 10  # a larger block is not joined: the copy would cost more than it saves


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows of one or several partitions. `times_ms` is the timestamp of each row, as Kafka's
    CreateTime (None: the time of its run). A Pulsar message has its publish time in `times_ms`, and
    the time by the broker's clock in `written_ms`. `record_batch` has those of the requested
    columns that the entry has (`column_of` in message_batch.py gives nulls for the others). A
    `typed` block has the topic's own columns, of version `schema_version` of its schema."""

    runs: Runs
    record_batch: pa.RecordBatch
    typed: bool = False
    schema_version: int = 0
    times_ms: Longs | None = None

    @property
    def num_rows(self) -> int:
        return int(self.record_batch.num_rows)

    def row_values(self, name: str) -> Longs:
        """For each row the value of this field of its run."""
        if len(self.runs) == 1:
            return np.full(self.num_rows, self.runs[name][0])
        return np.repeat(self.runs[name], self.runs["rows"])

    def row_numbers(self, name: str) -> Longs:
        """For each row the value of this field of its run, plus the row's number within the run."""
        count = self.num_rows
        if len(self.runs) == 1:
            first = int(self.runs[name][0])
            return np.arange(first, first + count)
        before = np.cumsum(self.runs["rows"]) - self.runs["rows"]
        return np.repeat(self.runs[name] - before, self.runs["rows"]) + np.arange(count)

    def row_times_ms(self) -> Longs:
        """The time at which each row was written."""
        return self.row_values("written_ms") if self.times_ms is None else self.times_ms

    def place_of(self, row: int) -> tuple[int, int]:
        """The partition and the offset of the block's row `row`."""
        ends = np.cumsum(self.runs["rows"])
        run = self.runs[int(np.searchsorted(ends, row, side="right"))]
        return int(run["partition"]), int(self.row_numbers("offset")[row])


class BlockJoiner:
    """Joins small blocks: the same rows in the same order, in fewer blocks."""

    def __init__(self) -> None:
        self._small_blocks: list[Block] = []
        self._bytes = 0

    def add(self, block: Block) -> list[Block]:
        """Add the block; return the blocks that are complete now."""
        if not len(block.runs):  # no row: no chunk of the entry is the last chunk of a message
            return []
        complete: list[Block] = []
        size = block.record_batch.nbytes if block.num_rows else 0
        is_large = size > SMALL_BYTES
        if (
            is_large
            or self._bytes + size > JOINED_BYTES
            or not _is_joinable(self._small_blocks, block)
        ):
            complete = self.end()
        if is_large:
            return [*complete, block]
        self._small_blocks.append(block)
        self._bytes += size
        return complete

    def end(self) -> list[Block]:
        """The small blocks that were not returned yet, as one block."""
        blocks, self._small_blocks, self._bytes = self._small_blocks, [], 0
        return [_join(blocks)] if blocks else []


def _is_joinable(blocks: list[Block], block: Block) -> bool:
    if not blocks:
        return True
    first = blocks[0]
    has_same_schema = (first.typed, first.schema_version) == (block.typed, block.schema_version)
    return has_same_schema and bool(first.record_batch.schema.equals(block.record_batch.schema))


def _join(blocks: list[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    times = None
    if any(block.times_ms is not None for block in blocks):
        times = np.concatenate([block.row_times_ms() for block in blocks])
    return replace(
        blocks[0],
        runs=np.concatenate([block.runs for block in blocks]),
        record_batch=_concat_batches([block.record_batch for block in blocks]),
        times_ms=times,
    )


def _concat_batches(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if not len(batches[0].schema):  # without columns Arrow would lose the number of rows
        rows = sum(batch.num_rows for batch in batches)
        empty = pa.StructArray.from_buffers(pa.struct([]), rows, [None])
        return pa.RecordBatch.from_struct_array(empty)
    return pa.concat_batches(batches)
