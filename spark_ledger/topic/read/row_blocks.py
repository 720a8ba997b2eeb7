"""Rows out of entries, of one partition or of several together.

Always true: a block's rows are runs, each of consecutive rows that an entry has of a partition, in
the order in which they were fetched; the facts of a run are in columns, so that work on a block
costs per run and not per row. Blocks of a few rows are put together up to JOINED_BYTES: a block of
a few rows costs as much as one of many.
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
"""Of each run its partition, the offset of its first row, and the number of its rows; their ledger
(INLINE: the commit) and entry, in which the first row is the partition's row `entry_row`; the time
at which they were written, or a time that is not before any of theirs."""
JOINED_BYTES = 1 << 20
SMALL_BYTES = 128 << 10  # larger blocks are worth more than their copy


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows of one or several partitions. `times_ms` is the time at which each row was written
    (None: the time of its run): the row's timestamp, as Kafka's CreateTime; for a message of a
    Pulsar producer its publish time, while `written_ms` is the broker's clock. `record_batch` has
    those of the requested columns that exist (message_batch.py: `column_of` gives nulls for the
    others); in a `typed` block it has the topic's own columns, of this version of its schema."""

    runs: Runs
    record_batch: pa.RecordBatch
    typed: bool = False
    schema_version: int = 0
    times_ms: Longs | None = None

    @property
    def num_rows(self) -> int:
        return int(self.record_batch.num_rows)

    def each(self, name: str) -> Longs:
        """For each row the value of this name in its run."""
        if len(self.runs) == 1:
            return np.full(self.num_rows, self.runs[name][0])
        return np.repeat(self.runs[name], self.runs["rows"])

    def each_counted(self, name: str) -> Longs:
        """As `each`, counted up from row to row of a run."""
        count = self.num_rows
        if len(self.runs) == 1:
            first = int(self.runs[name][0])
            return np.arange(first, first + count)
        before = np.cumsum(self.runs["rows"]) - self.runs["rows"]
        return np.repeat(self.runs[name] - before, self.runs["rows"]) + np.arange(count)

    def each_ms(self) -> Longs:
        """The time at which each row was written."""
        return self.each("written_ms") if self.times_ms is None else self.times_ms

    def place_of(self, row: int) -> tuple[int, int]:
        """The partition and the offset of a row."""
        ends = np.cumsum(self.runs["rows"])
        run = self.runs[int(np.searchsorted(ends, row, side="right"))]
        return int(run["partition"]), int(self.each_counted("offset")[row])


class BlockJoiner:
    """Puts small blocks together: the same rows in the same order, in fewer blocks."""

    def __init__(self) -> None:
        self._held: list[Block] = []
        self._bytes = 0

    def add(self, block: Block) -> list[Block]:
        """Add the block; return the blocks that are complete now."""
        if not len(block.runs):  # an entry without a row: its chunks are not the last of a message
            return []
        whole: list[Block] = []
        more = block.record_batch.nbytes if block.num_rows else 0
        large = more > SMALL_BYTES
        if large or self._bytes + more > JOINED_BYTES or not _alike(self._held, block):
            whole = self.end()
        if large:
            return [*whole, block]
        self._held.append(block)
        self._bytes += more
        return whole

    def end(self) -> list[Block]:
        """The blocks held back until now, as one."""
        held, self._held, self._bytes = self._held, [], 0
        return [_joined(held)] if held else []


def _alike(held: list[Block], block: Block) -> bool:
    if not held:
        return True
    first = held[0]
    same = (first.typed, first.schema_version) == (block.typed, block.schema_version)
    return same and bool(first.record_batch.schema.equals(block.record_batch.schema))


def _joined(blocks: list[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    times = None
    if any(block.times_ms is not None for block in blocks):
        times = np.concatenate([block.each_ms() for block in blocks])
    return replace(
        blocks[0],
        runs=np.concatenate([block.runs for block in blocks]),
        record_batch=_together([block.record_batch for block in blocks]),
        times_ms=times,
    )


def _together(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if not len(batches[0].schema):  # without columns Arrow would lose the number of rows
        rows = sum(batch.num_rows for batch in batches)
        empty = pa.StructArray.from_buffers(pa.struct([]), rows, [None])
        return pa.RecordBatch.from_struct_array(empty)
    return pa.concat_batches(batches)
