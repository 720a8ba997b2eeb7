"""A task's writing: rows to partitions, to entries, to a ledger, to a result that can be committed.

Always true: a result names exactly the entries that were acknowledged, in order, to this task;
nothing of a call is sent before every row of it is known to fit; rows of a partition keep the
order in which they were written. A task whose entries all come to `inline_bytes_max` sends none:
they are in its result, and no ledger is made for them. Rows are encoded in the task's thread; only
sending runs on the background loop, so both go on at once.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace

import pyarrow as pa

from spark_ledger import errors
from spark_ledger.process import background_loop
from spark_ledger.topic.entry.batch_encoder import GATHER_BYTES_MAX, BatchEncoder, EncodedEntry
from spark_ledger.topic.entry.routing import Routing
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.segments import INLINE, Segment
from spark_ledger.topic.write.entry_sender import (
    HELD_BYTES_MAX,
    UNACKED_BYTES_MAX,
    EntrySender,
    event_bounds,
)

INLINE_TASK_BYTES_MAX = 8 << 10
INFLIGHT_BYTES_MAX = 64 << 20
INFLIGHT_BYTES_MIN = 256 << 10
HANDED_OVER_BYTES_MAX = 8 << 20


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """How a task writes. `inflight_bytes_max` bounds its rows in memory: gathered (a fifth, and
    most of a fifth more while they are sorted), encoded and handed over (an eighth), sent and not
    acknowledged by every bookie (three eighths, of which a quarter of the whole not acknowledged).
    One row or entry more may be there at each place. `schema_version` is that of the topic's own
    columns, `policies` are instead of the topic's."""

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


class TaskWriter:
    """One task's writer to one topic, for one thread that is not the loop's. Made by
    blocking.BlockingTopics.task_writer. An error of the sending may come out of a later call.
    `nothing` is the result of a task without rows."""

    def __init__(
        self,
        nothing: TaskResult,
        encoder: BatchEncoder,
        sender: EntrySender,
        settings: TaskSettings = DEFAULT_SETTINGS,
    ) -> None:
        self._nothing = nothing
        self._encoder = encoder
        self._sender = sender
        self._settings = settings
        self._handed: deque[tuple[Future[None], int]] = deque()
        self._handed_bytes = 0

    def write(
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
            self._hand_over(entry)

    @property
    def held_bytes(self) -> int:
        """Of the rows in memory, about: gathered, handed over, not stored by every bookie."""
        return self._encoder.waiting_bytes + self._handed_bytes + self._sender.held_bytes

    def drain(self) -> None:
        """Send what is gathered and wait for every ack; more may be written."""
        self._hand_over_all()
        background_loop().run(self._sender.drain())

    def settle(self) -> None:
        """`drain`, then wait until every copy is there or its bookie's time is over: nothing is
        held any more."""
        self.drain()
        background_loop().run(self._sender.settled())

    def finishing(self) -> Callable[[], TaskResult]:
        """Send what is gathered; the function returned waits for every ack, then up to 0.5 s for
        all copies: several writers may end at once. A task with little to send sends nothing: then
        the result has it inline."""
        small = self._encoder.flush_small(self._settings.inline_bytes_max)
        if small is not None:
            return lambda: replace(self._nothing, segments=inline_segments(small))
        self._hand_over_all()
        finished = background_loop().submit(self._sender.finish())
        return lambda: replace(self._nothing, segments=finished.result())

    def abort(self) -> None:
        """Give the ledger back. What was written is in no result; the janitor deletes it."""
        for future, _ in self._handed:
            future.cancel()
        background_loop().run(self._sender.abort())

    def _hand_over_all(self) -> None:
        """What is gathered; returns when it is with the ledger writer."""
        for entry in self._encoder.flush():
            self._hand_over(entry)
        self._wait_until(0)

    def _hand_over(self, entry: EncodedEntry) -> None:
        sending = background_loop().submit(self._sender.send(entry))
        self._handed.append((sending, entry.payload_bytes))
        self._handed_bytes += entry.payload_bytes
        self._wait_until(self._settings.handed_over_bytes_max)

    def _wait_until(self, bytes_left: int) -> None:
        """Take the results of what was sent; wait until at most so many bytes are not."""
        while self._handed and (self._handed_bytes > bytes_left or self._handed[0][0].done()):
            future, size = self._handed.popleft()
            self._handed_bytes -= size
            future.result()


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
