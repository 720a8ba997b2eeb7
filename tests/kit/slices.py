"""The rows of a planned read, where nothing came between: a gap is an error, never another plan."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.read.plan import ReadTask
from spark_ledger.topic.read.slice_reader import fetch_task
from spark_ledger.topic.task_reader import with_chunks
from tests.kit.rows import Rows, parts_of


async def as_planned(_: ReadTask, error: errors.NoSuchLedger | errors.RowsLost) -> ReadTask:
    """For a caller that has no other task to go on with: raises the error."""
    raise error


async def read_task(
    ledgers: LedgerStore, task: ReadTask, topics: TopicClient | None = None
) -> AsyncGenerator[Rows, None]:
    """The rows of a task, those of each partition in order; with `topics` messages in chunks are
    put together. Raises as fetch_task."""
    read = fetch_task(ledgers, task, None, as_planned)
    if topics is not None:
        read = with_chunks(topics, task, read)
    async with aclosing(read) as runs:
        async for run in runs:
            for fetched in run:
                for block in fetched.blocks():
                    for rows in parts_of(block):
                        yield rows
