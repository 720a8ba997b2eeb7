"""A task's writing: rows to partitions, to entries, to a ledger, to a result that can be committed.

Always true: a result names exactly the entries that were acknowledged, in order, to this task;
nothing of a call is sent before every row of it is known to fit; rows of a partition keep the
order in which they were written.
"""

from dataclasses import dataclass

import pyarrow as pa

from spark_ledger.topic.batch_encoder import BatchEncoder
from spark_ledger.topic.entry_sender import EntrySender, MissingCopies
from spark_ledger.topic.segments import Segment


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What a task's message to the driver carries. Picklable; no rows, no segments."""

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


@dataclass(frozen=True, slots=True)
class TaskIdentity:
    """Whose result it is."""

    topic_id: str
    intent_id: str
    task_index: int
    attempt: int

    def result(
        self, segments: tuple[Segment, ...], missing: tuple[MissingCopies, ...]
    ) -> TaskResult:
        return TaskResult(
            self.topic_id, self.intent_id, self.task_index, self.attempt, segments, missing
        )


class TaskWriter:
    """One task's writer to one topic, for one caller at a time on the event loop.

    Made by TopicClient.task_writer; a Spark task uses blocking.BlockingTaskWriter.
    """

    def __init__(self, identity: TaskIdentity, encoder: BatchEncoder, sender: EntrySender) -> None:
        self._identity = identity
        self._encoder = encoder
        self._sender = sender

    async def write(self, keys: pa.Array | None, values: pa.Array) -> None:
        """Take rows: columns of (large_)binary or (large_)string or their views, equally long;
        `keys` None means all null. Returns when the rows are gathered or handed to the ledger
        writer, waiting while its in-flight bytes are used up; the arrays may be kept by it.

        Raises errors.MessageTooBig and errors.ColumnTypeMismatch (before anything of the call is
        sent), errors.LedgerFenced, errors.NotEnoughBookies, errors.Unavailable.
        """
        for entry in self._encoder.add(keys, values):
            await self._sender.send(entry)

    async def finish(self) -> TaskResult:
        """Send what is gathered, wait for every ack, then up to 0.5 s for all copies."""
        for entry in self._encoder.flush():
            await self._sender.send(entry)
        return self._identity.result(*await self._sender.finish())

    async def abort(self) -> None:
        """Give the ledger back. What was written is in no result; the janitor deletes it."""
        await self._sender.abort()
