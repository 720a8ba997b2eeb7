"""A task's writing: rows to partitions, to entries, to a ledger, to a result that can be committed.

Always true: a result names exactly the entries that were acknowledged, in order, to this task
(hazard 18); an entry that was not acknowledged when its ledger failed is sent again to the next
ledger, an acknowledged one never (hazard 21); nothing of a batch is sent before every row of it
is known to fit. Rows of a partition keep the order in which they were written.
"""

from dataclasses import dataclass

import pyarrow as pa

from spark_ledger.topic.segments import Segment


@dataclass(frozen=True, slots=True)
class MissingCopies:
    """Committed entries of a ledger that one bookie had not confirmed when the task ended."""

    ledger_id: int
    first_entry: int
    last_entry: int
    bookie_id: str


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What a task's message to the driver carries. Picklable; no rows no segments."""

    topic_id: str
    intent_id: str
    task_index: int
    attempt: int
    segments: tuple[Segment, ...] = ()
    missing: tuple[MissingCopies, ...] = ()

    @property
    def rows(self) -> int:
        return sum(segment.rows for segment in self.segments)

    @property
    def bytes(self) -> int:
        return sum(segment.bytes for segment in self.segments)


class TaskWriter:
    """One task's writer to one topic. Use by one caller at a time.

    Made by TopicClient.task_writer; a Spark task uses blocking.BlockingTaskWriter.
    """

    async def write(self, keys: pa.Array | None, values: pa.Array) -> None:
        """Take rows: columns of (large_)binary or (large_)string or their views, equally long;
        `keys` None means all null. Returns when the rows are gathered or handed to the ledger
        writer, waiting while its in-flight bytes are used up; the arrays may be kept by it.

        Raises errors.MessageTooBig and errors.ColumnTypeMismatch (before anything of the call is
        sent), errors.Fenced, errors.NotEnoughBookies, errors.Unavailable.
        """
        raise NotImplementedError

    async def finish(self) -> TaskResult:
        """Send what is gathered, wait for every ack, then up to 0.5 s for all copies."""
        raise NotImplementedError

    async def abort(self) -> None:
        """Give the ledger back. What was written stays in no result; the janitor deletes it."""
        raise NotImplementedError
