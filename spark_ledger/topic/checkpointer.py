"""Making checkpoints: a topic's state becomes the root with which later folds begin.

Always true: a checkpoint is published by compare-and-set, and only if it goes further than the
present one (hazard 6), in a multi that checks the intent under which it was made and the record of
each ledger that it newly names; every copy of these ledgers was made and read back (hazard 8). Only
then are commits deleted, and only those below the *previous* checkpoint, oldest first, by number
and never by listing, so the newest commit is never deleted. Each step is one multi with the
checkpoint's record, set at the version that was read: a record that another process changed
meanwhile stops the step, and `trimmed` is exactly the end of the deleted commits (hazards 1, 6, 7).
A lost response is resolved by reading the record again. A checkpoint that fails changes nothing:
the log stays as it is.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from spark_ledger import errors
from spark_ledger.async_tasks import BackgroundTasks
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import (
    Check,
    Create,
    Delete,
    MetadataStore,
    MultiFailed,
    NoNode,
    Operation,
    OutcomeUnknown,
    Set,
    StoreError,
)
from spark_ledger.metadata.store_calls import TRIES_MAX, reachable, read
from spark_ledger.process import LruCache
from spark_ledger.topic.log import checkpoint
from spark_ledger.topic.log.blobs import Blobs, BlobWriter, ChunkStore
from spark_ledger.topic.log.checkpoint import (
    ROOT_INLINE_BYTES_MAX,
    ByPartition,
    CheckpointRecord,
    Root,
    StoredRoot,
)
from spark_ledger.topic.log.intents import Intent, Intents
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.segment_table import Interval, TableChunk
from spark_ledger.topic.log.state import PartitionState, TopicState
from spark_ledger.topic.log.topic_log import NewestCheckpoint, TopicLog
from spark_ledger.topic.log.topics import read_policies

CHECKPOINT_EVERY = 64
LOG_NODES_MAX = 2000
UNFOLDED_MAX = 100  # the log may have so many more commits than this process has folded
DROPPED_LOOKED_AT = 64  # each checkpoint looks at so many of the ledgers dropped longest ago
PARTITIONS_AT_ONCE = 16  # made small between two turns of the event loop
PAUSE_S = 0.1
"""Between a commit and the checkpoint that is due after it: clients that wait for the commit (such
as a producer whose partition was handed over for it) use the processor and the bookies first."""
PURPOSE = "checkpoint"
TRIED_MAX = 10_000
"""A process remembers its last try for so many topics."""

_log = logging.getLogger(__name__)


class Checkpointer:
    """Makes the checkpoints of one process, on one event loop; at most one of a topic at a time."""

    def __init__(
        self,
        ledgers: LedgerStore,
        intents: Intents,
        blobs: Blobs,
        chunks: ChunkStore,
        log_of: Callable[[str], TopicLog],
        *,
        every: int = CHECKPOINT_EVERY,
        log_nodes_max: int = LOG_NODES_MAX,
    ) -> None:
        self._store = ledgers.metadata
        self._intents = intents
        self._blobs = blobs
        self._chunks = chunks
        self._log_of = log_of
        self._every = every
        self._log_nodes_max = log_nodes_max
        self._tried = LruCache[str, int](TRIED_MAX)
        self._making = BackgroundTasks()

    def after_commit(self, topic_id: str, number: int, intent_id: str | None) -> None:
        """If a checkpoint is due after commit `number`, make it in the background, PAUSE_S from
        now. The commit was made under the intent (None: it has ended). A failure is logged; the
        next try comes after as many commits again."""
        log = self._log_of(topic_id)
        since = number + 1 - max(log.root_next, self._tried.get(topic_id) or 0)
        if since < self._every or topic_id in self._making:
            return
        self._tried.put(topic_id, number + 1)
        self._making.start(self._make_quietly(topic_id, intent_id), name=topic_id)

    async def before_commit(self, topic_id: str, intent_id: str) -> None:
        """Make a checkpoint first if the log is full of commits (hazard 15). Raises as `make`: then
        the caller must not commit."""
        log = self._log_of(topic_id)
        try:
            folded = log.last_state or await log.fold()
        except (errors.LedgerError, StoreError):
            return  # the commit meets the same error, and raises it
        if folded.next - log.trimmed >= self._log_nodes_max - UNFOLDED_MAX and not folded.deleted:
            await self.make(topic_id, intent_id)

    async def make(
        self, topic_id: str, intent_id: str | None = None, *, least: int = 1
    ) -> CheckpointRecord | None:
        """Checkpoint the topic as it is now and trim its log. Returns the record in force
        afterwards: the new one, that of a faster process, or the old one if fewer than `least`
        commits came since; None without any checkpoint.

        The checkpoint is made under the intent if it is open, else under a new one. Raises
        errors.Unavailable, errors.NotEnoughBookies, errors.LedgerFenced (the intent ended
        meanwhile), and as a fold.
        """
        with reachable(f"making a checkpoint of topic {topic_id}"):
            log = self._log_of(topic_id)
            state, newest = await log.fold_from_checkpoint()
            before = None if newest is None else newest.record
            since = state.next - (0 if before is None else before.next)
            if state.deleted or since < least:
                return before if state.deleted else await self._trimmed(topic_id)
            policies = (await read_policies(self._store, topic_id)).policies
            intent = await self._open_intent(topic_id, intent_id)
            try:
                await self._publish(policies, state, newest, intent)
            finally:
                if intent.id != intent_id:
                    await self._intents.finish(intent.id)
            return await self._trimmed(topic_id)

    async def close(self) -> None:
        """Give up the checkpoints that are being made."""
        await self._making.close()

    async def idle(self) -> None:
        """Wait until no checkpoint is being made in the background."""
        await self._making.idle()

    # -- one checkpoint -----------------------------------------------------------------------

    async def _make_quietly(self, topic_id: str, intent_id: str | None) -> None:
        await asyncio.sleep(PAUSE_S)
        try:
            await self.make(topic_id, intent_id, least=self._every)
        except (errors.LedgerError, StoreError) as error:
            _log.warning("no checkpoint of topic %s was made: %s", topic_id, error)

    async def _trimmed(self, topic_id: str) -> CheckpointRecord | None:
        record = await trim_log(self._store, topic_id)
        if record is not None:
            self._log_of(topic_id).note_trimmed(record.trimmed)
        return record

    async def _open_intent(self, topic_id: str, intent_id: str | None) -> Intent:
        if intent_id is not None:
            intent = await self._intents.get(intent_id)
            if intent.is_open:
                return intent
        return await self._intents.open_system_intent(PURPOSE, topic_id)

    async def _publish(
        self,
        policies: TopicPolicies,
        state: TopicState,
        newest: NewestCheckpoint | None,
        intent: Intent,
    ) -> None:
        topic_id = state.topic_id
        async with self._blobs.writer(intent, topic_id, policies) as writer:
            small = await self._made_small(state, newest, writer)
            root = Root(small, tuple(_named(newest)))
            stored = await self._stored(root, writer)
            before = None if newest is None else newest.record
            record = checkpoint.next_record(before, state.next, stored, intent.id)
            version = None if newest is None else newest.version
            if await self._set(topic_id, record, version, intent, writer):
                self._log_of(topic_id).offer(small)

    async def _made_small(
        self, state: TopicState, newest: NewestCheckpoint | None, writer: BlobWriter
    ) -> TopicState:
        """The state for the new root; new chunks and rows that were inline are in the held
        ledgers."""
        if newest is not None:
            state = await with_losses(state, newest.root.state, self._chunks)
        read_again = await self._chunks.load(checkpoint.sparse_chunks(state))
        parts: ByPartition = []
        for partition in state.partitions:
            parts.append(checkpoint.merge_intervals(partition, read_again))
            if partition.number % PARTITIONS_AT_ONCE == 0:
                await asyncio.sleep(0)
        payloads, rows = checkpoint.inline_payloads(parts)
        if payloads:
            moved_to = await writer.store(payloads, rows, every_copy=True)
            parts = checkpoint.with_inline_moved(parts, moved_to)
        tail_bytes = len(checkpoint.tail_table(parts).encode())
        if tail_bytes > checkpoint.TAIL_BYTES_MAX:
            for part in checkpoint.cut_into_chunks(parts, tail_bytes):
                parts = checkpoint.with_chunk(parts, part, await self._chunk(part, writer))
        return checkpoint.checkpoint_state(
            state,
            parts,
            trimmed=0 if newest is None else newest.record.next,
            unnamed_ledgers=_unnamed(newest),
            deleted_ledgers=await self._gone(state),
        )

    async def _chunk(self, part: ByPartition, writer: BlobWriter) -> TableChunk:
        table = checkpoint.tail_table(part)
        pointer = await writer.write(table.encode(), every_copy=True)
        chunk = TableChunk(pointer, len(table), checkpoint.rows_of(part))
        self._chunks.keep(chunk, table)
        return chunk

    async def _stored(self, root: Root, writer: BlobWriter) -> StoredRoot:
        encoded = checkpoint.encode_root(root)
        if len(encoded) <= ROOT_INLINE_BYTES_MAX:
            return encoded
        return await writer.write(encoded, every_copy=True)

    async def _gone(self, state: TopicState) -> list[int]:
        """Those of the ledgers dropped longest ago that were deleted since."""
        oldest = sorted(state.dropped, key=lambda ledger: (state.dropped[ledger], ledger))
        deleted_ledgers = []
        for ledger in oldest[:DROPPED_LOOKED_AT]:
            if await read(self._store, paths.ledger(ledger)) is None:
                deleted_ledgers.append(ledger)
        return deleted_ledgers

    async def _set(
        self,
        topic_id: str,
        record: CheckpointRecord,
        version: int | None,
        intent: Intent,
        writer: BlobWriter,
    ) -> bool:
        """Whether the record is in force; False if another process set one meanwhile."""
        path, value = paths.topic_checkpoint(topic_id), checkpoint.encode_record(record)
        write = Create(path, value) if version is None else Set(path, value, version)
        for _ in range(TRIES_MAX):
            operations: list[Operation] = [
                Check(paths.intent(intent.id), intent.version),
                *await writer.checks(),
                write,
            ]
            try:
                await self._store.multi(operations)
                return True
            except (MultiFailed, OutcomeUnknown) as error:
                await self._store.sync(path)
                node = await read(self._store, path)
                now = None if node is None else node.version
                if now != version:
                    return node is not None and node.value == value
                if isinstance(error, MultiFailed) and error.index == 0:
                    raise (await self._intents.get(intent.id)).ended_error() from error
        raise errors.Unavailable(f"the checkpoint of {topic_id} lost {TRIES_MAX} answers")


def _named(newest: NewestCheckpoint | None) -> list[int]:
    """The ledgers that the newest checkpoint names."""
    if newest is None:
        return []
    root = newest.record.root
    chunks = checkpoint.chunk_ledgers(newest.root.state)
    return sorted({*chunks, *([] if isinstance(root, bytes) else [root.ledger_id])})


def _unnamed(newest: NewestCheckpoint | None) -> list[int]:
    """The ledgers that the checkpoint before the newest named and the newest does not: no
    checkpoint from the next one on names them."""
    if newest is None:
        return []
    still = _named(newest)
    return [ledger for ledger in newest.root.earlier_ledgers if ledger not in still]


DELETED_AT_ONCE = 256
_LOG_VERSION = 0  # commits are written once


async def trim_log(store: MetadataStore, topic_id: str) -> CheckpointRecord | None:
    """Delete the commits that may go; the checkpoint's record afterwards (None: no checkpoint).

    Another process that trims or publishes at the same time makes this one stop, and nothing is
    lost. Raises store.StoreUnavailable.
    """
    path = paths.topic_checkpoint(topic_id)
    record: CheckpointRecord | None = None
    for _ in range(TRIES_MAX):
        await store.sync(path)
        node = await read(store, path)
        if node is None:
            return None
        record, version = checkpoint.decode_record(node.value), node.version
        try:
            while record.trimmed < record.previous:
                record = await _trim_some(store, topic_id, record, version)
                version += 1
            return record
        except OutcomeUnknown:
            continue
        except MultiFailed:
            return record
    return record


async def _trim_some(
    store: MetadataStore, topic_id: str, record: CheckpointRecord, version: int
) -> CheckpointRecord:
    end = min(record.previous, record.trimmed + DELETED_AT_ONCE)
    trimmed = replace(record, trimmed=end)
    mark = Set(paths.topic_checkpoint(topic_id), checkpoint.encode_record(trimmed), version)
    doomed = [paths.topic_log(topic_id, number) for number in range(record.trimmed, end)]
    operations: list[Operation] = [mark, *(Delete(path, _LOG_VERSION) for path in doomed)]
    try:
        await store.multi(operations)
    except MultiFailed as failed:
        if failed.index == 0 or not isinstance(failed.cause, NoNode):
            raise
        present = [
            path for path in doomed if await read(store, path) is not None
        ]  # removed by hand
        await store.multi([mark, *(Delete(path, _LOG_VERSION) for path in present)])
    return trimmed


# -- which ledgers lost rows since a checkpoint, if only its chunks name them ----------------------
#
# A commit that takes rows away names the ledgers that hold them, as it sees them. But a checkpoint
# moves rows that were in commits to ledgers of its own, and an action planned on commits alone does
# not know of these ledgers. If the checkpoint has them in its tail, the fold notes it (state.py);
# if they are in a chunk, the chunk must be read: that is done here. Always true: a ledger that the
# newest checkpoint refers to, and to which nothing refers after a later commit, is among those
# found here or dropped by the state: so the delete delay holds for it (hazard 34).

CHUNKS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Loss:
    """Rows [lo, hi) of a partition that were in a chunk and are in it no longer."""

    partition: int
    lo: int
    hi: int


def losses(before: TopicState, after: TopicState) -> dict[TableChunk, list[Loss]]:
    """By chunk of `before`, the rows that the later state `after` does not have there."""
    by_chunk: dict[TableChunk, list[Loss]] = {}
    for was, now in zip(before.partitions, after.partitions, strict=False):
        if was.intervals is not now.intervals:
            for chunk, loss in _of_partition(was, now):
                by_chunk.setdefault(chunk, []).append(loss)
    return by_chunk


async def with_losses(state: TopicState, before: TopicState, chunks: ChunkStore) -> TopicState:
    """The state, in which the ledgers that lost rows of `before`'s chunks are dropped. The delete
    delay begins with the last commit: the commit that took the rows is not known. Raises as
    ChunkStore.load."""
    lost = losses(before, state)
    ledgers: dict[int, None] = {}
    lossy_chunks = list(lost)
    for at in range(0, len(lossy_chunks), CHUNKS_AT_ONCE):
        read = await chunks.load(lossy_chunks[at : at + CHUNKS_AT_ONCE])
        for chunk, table in read.items():
            for loss in lost[chunk]:
                lost_segments = table.between(loss.partition, loss.lo, loss.hi)
                ledgers |= dict.fromkeys(lost_segments.ledger_ids())
    if not ledgers:
        return state
    dropped: Mapping[int, int] = {**state.dropped, **dict.fromkeys(ledgers, state.commit_ms)}
    return replace(state, dropped=dropped)


def _of_partition(was: PartitionState, now: PartitionState) -> Iterator[tuple[TableChunk, Loss]]:
    for interval in was.intervals:
        if isinstance(interval.source, TableChunk):
            same_chunk = (
                at
                for at in now.intervals.between(interval.lo, interval.hi)
                if at.source == interval.source
            )
            for lo, hi in _without(interval, same_chunk):
                yield interval.source, Loss(was.number, lo, hi)


def _without(interval: Interval, others: Iterable[Interval]) -> Iterator[tuple[int, int]]:
    """The offsets of the interval that are in none of `others`, which come in order."""
    at = interval.lo
    for other in others:
        if at < other.lo:
            yield at, other.lo
        at = max(at, other.hi)
    if at < interval.hi:
        yield at, interval.hi
