"""Making checkpoints: a topic's state becomes the root with which later folds begin.

Always true: a checkpoint is published by compare-and-set, and only if it covers more commits than
the present checkpoint (hazard 6). The multi also checks the intent under which the checkpoint was
made, and the record of each ledger that the checkpoint newly names: all copies of the entries of
these ledgers were written and read back (hazard 8). After the publication the commits below the
*previous* checkpoint are deleted by number, oldest first. The log is not listed for this, so newer
commits are never deleted. Each step is one multi that also sets the checkpoint's record at the
version that was read: if another process changed the record meanwhile, the step fails. So `trimmed`
is exactly the end of the deleted commits (hazards 1, 6, 7). After a lost response the record is
read again. A checkpoint that fails changes nothing.
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
from spark_ledger.metadata.store_calls import TRIES_MAX, read, unavailable_while
from spark_ledger.process import LruCache
from spark_ledger.topic.log import checkpoint
from spark_ledger.topic.log.blobs import Blobs, BlobWriter, ChunkStore
from spark_ledger.topic.log.checkpoint import (
    ROOT_INLINE_BYTES_MAX,
    CheckpointRecord,
    IntervalLists,
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
UNFOLDED_MAX = 100  # a margin for commits that this process has not folded yet
DROPPED_CHECKED_MAX = 64  # dropped ledgers that a checkpoint looks up, oldest first
PARTITIONS_AT_ONCE = 16  # compacted in one turn of the event loop
PAUSE_S = 0.1
"""The time between a commit and the checkpoint after it. In this time, clients that wait for the
commit (such as a producer whose partition was handed over) use the processor and the bookies."""
PURPOSE = "checkpoint"
LAST_TRIES_MAX = 10_000
"""For how many topics a process remembers its last try of a checkpoint."""

_log = logging.getLogger(__name__)


class Checkpointer:
    """Makes the checkpoints of one process, on one event loop, for each topic one at a time.

    A checkpoint is due `commits_apart` commits after the previous checkpoint."""

    def __init__(
        self,
        ledgers: LedgerStore,
        intents: Intents,
        blobs: Blobs,
        chunks: ChunkStore,
        log_of: Callable[[str], TopicLog],
        *,
        commits_apart: int = CHECKPOINT_EVERY,
        log_nodes_max: int = LOG_NODES_MAX,
    ) -> None:
        self._store = ledgers.metadata
        self._intents = intents
        self._blobs = blobs
        self._chunks = chunks
        self._log_of = log_of
        self._commits_apart = commits_apart
        self._log_nodes_max = log_nodes_max
        self._last_tries = LruCache[str, int](LAST_TRIES_MAX)
        self._background = BackgroundTasks()

    def after_commit(self, topic_id: str, number: int, intent_id: str | None) -> None:
        """If a checkpoint is due after commit `number`, makes the checkpoint in the background,
        PAUSE_S from now. The commit was made under the intent (None: the intent has ended). A
        failure is logged; the next try is `commits_apart` commits later."""
        log = self._log_of(topic_id)
        commits_since = number + 1 - max(log.checkpoint_end, self._last_tries.get(topic_id) or 0)
        if commits_since < self._commits_apart or topic_id in self._background:
            return
        self._last_tries.put(topic_id, number + 1)
        self._background.start(self._make_quietly(topic_id, intent_id), name=topic_id)

    async def before_commit(self, topic_id: str, intent_id: str) -> None:
        """Makes a checkpoint if the log has too many commits (hazard 15). Raises as `make`; after
        an error the caller must not commit."""
        log = self._log_of(topic_id)
        try:
            state = log.last_state or await log.fold()
        except (errors.LedgerError, StoreError):
            return  # the commit meets the same error, and raises it
        if state.next - log.trimmed >= self._log_nodes_max - UNFOLDED_MAX and not state.deleted:
            await self.make(topic_id, intent_id)

    async def make(
        self, topic_id: str, intent_id: str | None = None, *, commits_min: int = 1
    ) -> CheckpointRecord | None:
        """Makes a checkpoint of the topic as it is now, and trims its log. If fewer than
        `commits_min` commits came since the last checkpoint, it only trims. Returns the record that
        is in force afterwards, which may be that of a faster process; None if there is no
        checkpoint.

        The checkpoint is made under the intent if the intent is open, else under a new intent.
        Raises errors.Unavailable, errors.NotEnoughBookies, errors.LedgerFenced (the intent ended
        meanwhile), and the errors of TopicLog.fold.
        """
        with unavailable_while(f"making a checkpoint of topic {topic_id}"):
            log = self._log_of(topic_id)
            state, newest = await log.fold_from_checkpoint()
            before = None if newest is None else newest.record
            commits_since = state.next - (0 if before is None else before.next)
            if state.deleted or commits_since < commits_min:
                return before if state.deleted else await self._trim(topic_id)
            policies = (await read_policies(self._store, topic_id)).policies
            intent = await self._open_intent(topic_id, intent_id)
            try:
                await self._publish(policies, state, newest, intent)
            finally:
                if intent.id != intent_id:
                    await self._intents.finish(intent.id)
            return await self._trim(topic_id)

    async def close(self) -> None:
        """Cancel the checkpoints that are being made."""
        await self._background.close()

    async def idle(self) -> None:
        """Wait until no checkpoint is being made in the background."""
        await self._background.idle()

    # -- one checkpoint -----------------------------------------------------------------------

    async def _make_quietly(self, topic_id: str, intent_id: str | None) -> None:
        await asyncio.sleep(PAUSE_S)
        try:
            await self.make(topic_id, intent_id, commits_min=self._commits_apart)
        except (errors.LedgerError, StoreError) as error:
            _log.warning("no checkpoint of topic %s was made: %s", topic_id, error)

    async def _trim(self, topic_id: str) -> CheckpointRecord | None:
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
            compacted = await self._compact(state, newest, writer)
            root = Root(compacted, tuple(_named(newest)))
            stored_root = await self._store_root(root, writer)
            before = None if newest is None else newest.record
            record = checkpoint.next_record(before, state.next, stored_root, intent.id)
            version = None if newest is None else newest.version
            if await self._set(topic_id, record, version, intent, writer):
                self._log_of(topic_id).start_next_fold_at(compacted)

    async def _compact(
        self, state: TopicState, newest: NewestCheckpoint | None, writer: BlobWriter
    ) -> TopicState:
        """The state for the new root: in the writer's ledgers a long tail becomes chunks, and
        inline rows become entries. Sparse chunks lost most of their rows: their segments go
        back into the tail."""
        if newest is not None:
            state = await with_losses(state, newest.root.state, self._chunks)
        sparse_tables = await self._chunks.load(checkpoint.sparse_chunks(state))
        by_partition: IntervalLists = []
        for partition in state.partitions:
            by_partition.append(checkpoint.merge_intervals(partition, sparse_tables))
            if partition.number % PARTITIONS_AT_ONCE == 0:
                await asyncio.sleep(0)
        payloads, rows = checkpoint.inline_payloads(by_partition)
        if payloads:
            moved_to = await writer.store(payloads, rows, every_copy=True)
            by_partition = checkpoint.with_inline_moved(by_partition, moved_to)
        tail_bytes = len(checkpoint.tail_table(by_partition).encode())
        if tail_bytes > checkpoint.TAIL_BYTES_MAX:
            for chunk in checkpoint.cut_into_chunks(by_partition, tail_bytes):
                stored_chunk = await self._store_chunk(chunk, writer)
                by_partition = checkpoint.with_chunk(by_partition, chunk, stored_chunk)
        return checkpoint.checkpoint_state(
            state,
            by_partition,
            trimmed=0 if newest is None else newest.record.next,  # `_trim` deletes what is below
            unnamed_ledgers=_unnamed(newest),
            deleted_ledgers=await self._deleted_ledgers(state),
        )

    async def _store_chunk(self, intervals: IntervalLists, writer: BlobWriter) -> TableChunk:
        table = checkpoint.tail_table(intervals)
        pointer = await writer.write(table.encode(), every_copy=True)
        chunk = TableChunk(pointer, len(table), checkpoint.rows_of(intervals))
        self._chunks.keep(chunk, table)
        return chunk

    async def _store_root(self, root: Root, writer: BlobWriter) -> StoredRoot:
        encoded = checkpoint.encode_root(root)
        if len(encoded) <= ROOT_INLINE_BYTES_MAX:
            return encoded
        return await writer.write(encoded, every_copy=True)

    async def _deleted_ledgers(self, state: TopicState) -> list[int]:
        """The deleted ledgers among the DROPPED_CHECKED_MAX ledgers dropped longest ago."""
        oldest = sorted(state.dropped, key=lambda ledger: (state.dropped[ledger], ledger))
        deleted = []
        for ledger in oldest[:DROPPED_CHECKED_MAX]:
            if await read(self._store, paths.ledger(ledger)) is None:
                deleted.append(ledger)
        return deleted

    async def _set(
        self,
        topic_id: str,
        record: CheckpointRecord,
        version: int | None,
        intent: Intent,
        writer: BlobWriter,
    ) -> bool:
        """Publishes the record. Returns False if another process published a record meanwhile."""
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
                version_now = None if node is None else node.version
                if version_now != version:
                    return node is not None and node.value == value
                if isinstance(error, MultiFailed) and error.index == 0:
                    raise (await self._intents.get(intent.id)).ended_error() from error
        raise errors.Unavailable(f"checkpoint of topic {topic_id}: {TRIES_MAX} responses were lost")


def _named(newest: NewestCheckpoint | None) -> list[int]:
    """The ledgers that the newest checkpoint names."""
    if newest is None:
        return []
    root = newest.record.root
    chunks = checkpoint.chunk_ledgers(newest.root.state)
    return sorted({*chunks, *([] if isinstance(root, bytes) else [root.ledger_id])})


def _unnamed(newest: NewestCheckpoint | None) -> list[int]:
    """The ledgers that the previous checkpoint named and the newest does not name; no later
    checkpoint will name these ledgers."""
    if newest is None:
        return []
    named = _named(newest)
    return [ledger for ledger in newest.root.earlier_ledgers if ledger not in named]


DELETED_AT_ONCE = 256
_LOG_VERSION = 0  # of a commit's node, which is written once


async def trim_log(store: MetadataStore, topic_id: str) -> CheckpointRecord | None:
    """Deletes the commits below the previous checkpoint; returns the checkpoint's record after this
    (None: there is no checkpoint).

    If another process trims the log or publishes a checkpoint at the same time, this call stops
    without harm. Raises store.StoreUnavailable.
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
                record = await _trim_batch(store, topic_id, record, version)
                version += 1
            return record
        except OutcomeUnknown:
            continue
        except MultiFailed:
            return record
    return record


async def _trim_batch(
    store: MetadataStore, topic_id: str, record: CheckpointRecord, version: int
) -> CheckpointRecord:
    end = min(record.previous, record.trimmed + DELETED_AT_ONCE)
    trimmed = replace(record, trimmed=end)
    mark = Set(paths.topic_checkpoint(topic_id), checkpoint.encode_record(trimmed), version)
    commit_paths = [paths.topic_log(topic_id, number) for number in range(record.trimmed, end)]
    operations: list[Operation] = [mark, *(Delete(path, _LOG_VERSION) for path in commit_paths)]
    try:
        await store.multi(operations)
    except MultiFailed as failed:
        if failed.index == 0 or not isinstance(failed.cause, NoNode):
            raise
        # a person removed commits by hand
        existing_paths = [path for path in commit_paths if await read(store, path) is not None]
        await store.multi([mark, *(Delete(path, _LOG_VERSION) for path in existing_paths)])
    return trimmed


# -- ledgers that lost rows, and that only a checkpoint's chunks name ------------------------------
#
# A commit that takes rows away names the ledgers with these rows. But a checkpoint moves inline
# rows of commits to ledgers of its own, and a committer that folded only commits cannot name these
# ledgers. If such a ledger is in the checkpoint's tail, the fold notes it (state.py). If it is in a
# chunk, the chunk must be read: this part reads it.
# Always true: if the newest checkpoint refers to a ledger, and after a later commit nothing refers
# to the ledger, then this part or the fold adds it to `dropped`, so the delete delay holds for the
# ledger (hazard 34).

CHUNKS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Loss:
    """Rows [lo, hi) of a partition that were in a chunk, and in a later state are not in it."""

    partition: int
    lo: int
    hi: int


def losses(before: TopicState, after: TopicState) -> dict[TableChunk, list[Loss]]:
    """For each chunk of `before`, the rows for which the later state `after` does not name it."""
    by_chunk: dict[TableChunk, list[Loss]] = {}
    for earlier, later in zip(before.partitions, after.partitions, strict=False):
        if earlier.intervals is not later.intervals:
            for chunk, loss in _losses_of_partition(earlier, later):
                by_chunk.setdefault(chunk, []).append(loss)
    return by_chunk


async def with_losses(state: TopicState, before: TopicState, chunks: ChunkStore) -> TopicState:
    """The state; `dropped` also has the ledgers that lost rows of the chunks of `before`. Their
    delete delay begins with the last commit, because the commit that took the rows away is not
    known. Raises as ChunkStore.load."""
    lost = losses(before, state)
    ledgers: dict[int, None] = {}
    lossy_chunks = list(lost)
    for at in range(0, len(lossy_chunks), CHUNKS_AT_ONCE):
        read = await chunks.load(lossy_chunks[at : at + CHUNKS_AT_ONCE])
        for chunk, table in read.items():
            for loss in lost[chunk]:
                deleted = table.between(loss.partition, loss.lo, loss.hi)
                ledgers |= dict.fromkeys(deleted.ledger_ids())
    if not ledgers:
        return state
    dropped: Mapping[int, int] = {**state.dropped, **dict.fromkeys(ledgers, state.commit_ms)}
    return replace(state, dropped=dropped)


def _losses_of_partition(
    earlier: PartitionState, later: PartitionState
) -> Iterator[tuple[TableChunk, Loss]]:
    for interval in earlier.intervals:
        if isinstance(interval.source, TableChunk):
            same_chunk = (
                at
                for at in later.intervals.between(interval.lo, interval.hi)
                if at.source == interval.source
            )
            for lo, hi in _uncovered(interval, same_chunk):
                yield interval.source, Loss(earlier.number, lo, hi)


def _uncovered(interval: Interval, others: Iterable[Interval]) -> Iterator[tuple[int, int]]:
    """The offsets of the interval that no interval of `others` has; `others` are in order."""
    at = interval.lo
    for other in others:
        if at < other.lo:
            yield at, other.lo
        at = max(at, other.hi)
    if at < interval.hi:
        yield at, interval.hi
