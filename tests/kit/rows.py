"""Rows of one partition, which tests ask for one by one; the product works in blocks of runs."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.entry.message_batch import Longs
from spark_ledger.topic.log.segments import INLINE
from spark_ledger.topic.read.plan import ReadTask
from spark_ledger.topic.read.row_blocks import Block
from spark_ledger.topic.task_reader import read_blocks


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of a partition; the first has offset `offset`; they were written at
    `times_ms` each, None: all at `written_ms` (the row's timestamp, as Kafka's CreateTime; of a
    Pulsar producer's message its publish time, and `written_ms` is the broker's clock).
    `record_batch` has what there is of the columns asked for (message_batch.py: `column_of` gives
    nulls for one that there is not); a `typed` one has the topic's own columns, of that version of
    its schema. The rows are in entry `entry_id` of the ledger (INLINE: of the commit), where the
    first is the partition's row `entry_row`."""

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


def parts_of(block: Block) -> Iterator[Rows]:
    """The rows of a block run by run."""
    start = 0
    for partition, offset, rows, ledger, entry, entry_row, written_ms in block.runs.tolist():
        end = start + rows
        yield Rows(
            *(partition, offset, written_ms, block.record_batch.slice(start, rows)),
            *(block.typed, block.schema_version, ledger, entry, entry_row),
            None if block.times_ms is None else block.times_ms[start:end],
        )
        start = end


async def read_rows(client: TopicClient, task: ReadTask) -> AsyncGenerator[Rows, None]:
    """The rows of a task, those of each partition in order."""
    async with aclosing(read_blocks(client, task)) as blocks:
        async for block in blocks:
            for rows in parts_of(block):
                yield rows
