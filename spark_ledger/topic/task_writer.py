"""A task's writing: rows to partitions, to entries, to a ledger, to a result that can be committed.

Always true: a result names exactly the entries that were acknowledged, in order, to this task;
nothing of a call is sent before every row of it is known to fit; rows of a partition keep the
order in which they were written. A task whose entries all come to `inline_bytes_max` sends none:
they are in its result, and no ledger is made for them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from spark_ledger import errors
from spark_ledger.topic.batch_encoder import GATHER_BYTES_MAX, BatchEncoder, EncodedEntry
from spark_ledger.topic.entry_sender import (
    HELD_BYTES_MAX,
    UNACKED_BYTES_MAX,
    EntrySender,
    MissingCopies,
    event_bounds,
)
from spark_ledger.topic.policies import TopicPolicies
from spark_ledger.topic.routing import Routing
from spark_ledger.topic.segments import INLINE, Segment

INLINE_TASK_BYTES_MAX = 8 << 10
INFLIGHT_BYTES_MAX = 64 << 20
INFLIGHT_BYTES_MIN = 256 << 10
HANDED_OVER_BYTES_MAX = 8 << 20


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """How a task writes. `inflight_bytes_max` bounds its rows in memory: gathered (a fifth, and
    most of a fifth more while they are sorted), encoded and handed over (an eighth), sent and not
    answered by every bookie (three eighths, of which a quarter of the whole not acknowledged). One
    row or entry more may be there at each place.
    `schema_version` is that of the topic's own columns, `policies` are instead of the topic's."""

    compression: str = "none"
    routing: Routing = Routing.HASH
    key_filters: bool = True
    inflight_bytes_max: int = INFLIGHT_BYTES_MAX
    inline_bytes_max: int = INLINE_TASK_BYTES_MAX
    schema_version: int = 0
    policies: TopicPolicies | None = None

    def __post_init__(self) -> None:
        if self.inflight_bytes_max < INFLIGHT_BYTES_MIN:
            raise errors.BadConfig(
                f"a task needs {INFLIGHT_BYTES_MIN} bytes in flight or more, not"
                f" {self.inflight_bytes_max}"
            )

    @property
    def gather_bytes_max(self) -> int:
        return min(GATHER_BYTES_MAX, self.inflight_bytes_max // 5)

    @property
    def unacked_bytes_max(self) -> int:
        return min(UNACKED_BYTES_MAX, self.inflight_bytes_max // 4)

    @property
    def held_bytes_max(self) -> int:
        return min(HELD_BYTES_MAX, self.inflight_bytes_max * 3 // 8)

    @property
    def handed_over_bytes_max(self) -> int:
        return min(HANDED_OVER_BYTES_MAX, self.inflight_bytes_max // 8)


DEFAULT_SETTINGS = TaskSettings()


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What a task's message to the driver carries. Picklable; a task without rows has no
    segments."""

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

    def __init__(
        self,
        identity: TaskIdentity,
        encoder: BatchEncoder,
        sender: EntrySender,
        settings: TaskSettings = DEFAULT_SETTINGS,
    ) -> None:
        self._identity = identity
        self._encoder = encoder
        self._sender = sender
        self._settings = settings

    async def write(
        self,
        keys: pa.Array | None,
        values: pa.Array | pa.RecordBatch,
        *,
        event_times: pa.Array | None = None,
        headers: pa.Array | None = None,
        partitions: pa.Array | None = None,
    ) -> None:
        """Take rows: equally long columns, None where all are null. `keys` and `values` are
        (large_)binary or (large_)string or their views, or `values` is a record batch of the
        topic's own columns; `event_times` are timestamps, `headers` lists of structs of key and
        value, or maps; `partitions` are integers, asked for by Routing.COLUMN only. Returns when
        the rows are gathered or handed to the ledger writer, waiting while its in-flight bytes
        are used up; the arrays may be kept by it and
        sent as they are, so their memory is not to be changed afterwards.

        Raises errors.MessageTooBig, errors.ColumnTypeMismatch and errors.PartitionInvalid (before
        anything of the call is sent), errors.LedgerFenced, errors.NotEnoughBookies,
        errors.Unavailable.
        """
        for entry in self._encoder.add(
            keys, values, event_times=event_times, headers=headers, partitions=partitions
        ):
            await self._sender.send(entry)

    async def finish(self) -> TaskResult:
        """Send what is gathered, wait for every ack, then up to 0.5 s for all copies. A task with
        little to send sends nothing: then the result has it inline."""
        small = self._encoder.flush_small(self._settings.inline_bytes_max)
        if small is not None:
            return self._identity.result(inline_segments(small), ())
        for entry in self._encoder.flush():
            await self._sender.send(entry)
        return self._identity.result(*await self._sender.finish())

    async def abort(self) -> None:
        """Give the ledger back. What was written is in no result; the janitor deletes it."""
        await self._sender.abort()


def inline_segments(entries: Iterable[EncodedEntry]) -> tuple[Segment, ...]:
    """A segment for each entry, all of one partition each, with its payload."""
    return tuple(map(_inline_segment, entries))


def _inline_segment(entry: EncodedEntry) -> Segment:
    (share,) = entry.shares
    event_min_ms, event_max_ms = event_bounds(share.event_ms or ())
    return Segment(
        partition=share.partition,
        ledger_id=INLINE,
        metadata_version=0,
        entries=((0, 0),),
        entry_rows=(share.rows,),
        rows=share.rows,
        bytes=entry.payload_bytes,
        min_ms=entry.written_ms,
        max_ms=entry.written_ms,
        event_min_ms=event_min_ms,
        event_max_ms=event_max_ms,
        inline=(b"".join(entry.payload([0])),),
    )
