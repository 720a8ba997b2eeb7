"""Making checkpoints: what a topic is becomes the root that later folds begin with.

Always true: a checkpoint is published by compare-and-set and only if it goes further than the one
there (hazard 6), in a multi that checks the intent it was made under and the record of each ledger
it newly names; every copy of these was made and read back (hazard 8). Only then are commits
deleted, and only those below the *previous* checkpoint, oldest first, by number and never by
listing, so the newest never goes; each step is one multi with the checkpoint's record, set at the
version that was read: a record that moved on meanwhile stops the step, and `trimmed` says exactly
what is gone (hazards 1, 6, 7). A lost response is resolved by reading the record again. A
checkpoint that fails changes nothing: the log stays as it is.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from spark_ledger import errors
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
from spark_ledger.topic.log import checkpoint
from spark_ledger.topic.log.blobs import Blobs, ChunkStore, HeldLedgers
from spark_ledger.topic.log.checkpoint import (
    ROOT_INLINE_BYTES_MAX,
    ByPartition,
    CheckpointRecord,
    Root,
    StoredRoot,
)
from spark_ledger.topic.log.intents import Intent, Intents
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.segment_table import Chunk, Interval
from spark_ledger.topic.log.state import PartitionState, TopicState
from spark_ledger.topic.log.topic_log import Checkpointed, TopicLog
from spark_ledger.topic.log.topics import policies_now

CHECKPOINT_EVERY = 64
LOG_NODES_MAX = 2000
UNFOLDED_MAX = 100  # so many more commits there may be than this process has folded
DROPPED_LOOKED_AT = 64  # of the ledgers dropped longest ago, by each checkpoint
PARTITIONS_AT_ONCE = 16  # made small between two turns of the event loop
PAUSE_S = 0.1
"""Between a commit and the checkpoint that it is time for: who waits for the commit, as a producer
whose partition was handed over for it, has the processor and the bookies first."""
PURPOSE = "checkpoint"
TRIED_MAX = 10_000
"""Topics of which a process remembers when it last tried."""

_log = logging.getLogger(__name__)


class Checkpointer:
    """Of one process, on one event loop; at most one checkpoint of a topic at a time."""

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
        self._tried: dict[str, int] = {}
        self._making: dict[str, asyncio.Task[None]] = {}

    def after_commit(self, topic_id: str, number: int, intent_id: str | None) -> None:
        """Make a checkpoint in the background, PAUSE_S from now, if it is time: commit `number` was
        made, under the intent; None if that has ended. A failure is logged; the next try is after
        as many commits again."""
        log = self._log_of(topic_id)
        since = number + 1 - max(log.root_next, self._tried.get(topic_id, 0))
        if since < self._every or topic_id in self._making:
            return
        self._tried.pop(topic_id, None)
        self._tried[topic_id] = number + 1
        if len(self._tried) > TRIED_MAX:
            del self._tried[next(iter(self._tried))]
        task = asyncio.get_running_loop().create_task(
            self._make_quietly(topic_id, intent_id), name=f"checkpoint of {topic_id}"
        )
        self._making[topic_id] = task
        task.add_done_callback(lambda done: self._making.pop(topic_id, None))

    async def before_commit(self, topic_id: str, intent_id: str) -> None:
        """Make a checkpoint first where the log has so many commits that none may be added
        (hazard 15). Raises as `make`; the commit is not made then."""
        log = self._log_of(topic_id)
        try:
            known = log.known or await log.fold()
        except (errors.LedgerError, StoreError):
            return  # the commit will meet it too, and say what it means for it
        if known.next - log.trimmed >= self._log_nodes_max - UNFOLDED_MAX and not known.deleted:
            await self.make(topic_id, intent_id)

    async def make(
        self, topic_id: str, intent_id: str | None = None, *, least: int = 1
    ) -> CheckpointRecord | None:
        """Checkpoint the topic as it is now and trim its log. The record that counts when it
        returns: this one's, another's who was faster, or the old one where fewer than `least`
        commits came since; None where there is none.

        Under the intent, if it is open, else under one made for this. Raises errors.Unavailable,
        errors.NotEnoughBookies, errors.LedgerFenced (the intent ended meanwhile), and what folding
        raises.
        """
        with reachable(f"making a checkpoint of topic {topic_id}"):
            log = self._log_of(topic_id)
            state, newest = await log.fold_from_checkpoint()
            before = None if newest is None else newest.record
            since = state.next - (0 if before is None else before.next)
            if state.deleted or since < least:
                return before if state.deleted else await self._trimmed(topic_id)
            policies = (await policies_now(self._store, topic_id)).policies
            intent = await self._open_intent(topic_id, intent_id)
            try:
                await self._publish(policies, state, newest, intent)
            finally:
                if intent.id != intent_id:
                    await self._intents.finish(intent.id)
            return await self._trimmed(topic_id)

    async def close(self) -> None:
        """Give up what is being made."""
        making = list(self._making.values())
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)

    async def idle(self) -> None:
        """Wait until nothing is being made in the background."""
        await asyncio.gather(*self._making.values(), return_exceptions=True)

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
            if intent.open:
                return intent
        return await self._intents.open_system_intent(PURPOSE, topic_id)

    async def _publish(
        self,
        policies: TopicPolicies,
        state: TopicState,
        newest: Checkpointed | None,
        intent: Intent,
    ) -> None:
        topic_id = state.topic_id
        async with self._blobs.held(intent, topic_id, policies) as held:
            small = await self._made_small(state, newest, held)
            root = Root(small, tuple(_named(newest)))
            stored = await self._stored(root, held)
            before = None if newest is None else newest.record
            record = checkpoint.following(before, state.next, stored, intent.id)
            version = None if newest is None else newest.version
            if await self._set(topic_id, record, version, intent, held):
                self._log_of(topic_id).offer(small)

    async def _made_small(
        self, state: TopicState, newest: Checkpointed | None, held: HeldLedgers
    ) -> TopicState:
        """The state as the new root has it, what it names newly stored in the held ledgers."""
        if newest is not None:
            state = await with_losses(state, newest.root.state, self._chunks)
        read_again = await self._chunks.load(checkpoint.sparse_chunks(state))
        parts: ByPartition = []
        for partition in state.partitions:
            parts.append(checkpoint.merged(partition, read_again))
            if partition.number % PARTITIONS_AT_ONCE == 0:
                await asyncio.sleep(0)
        payloads, rows = checkpoint.inline_payloads(parts)
        if payloads:
            moved_to = await held.store(payloads, rows, every_copy=True)
            parts = checkpoint.with_inline_moved(parts, moved_to)
        tail_bytes = len(checkpoint.tail_table(parts).encode())
        if tail_bytes > checkpoint.TAIL_BYTES_MAX:
            for part in checkpoint.chunked(parts, tail_bytes):
                parts = checkpoint.with_chunk(parts, part, await self._chunk(part, held))
        return checkpoint.settled(
            state,
            parts,
            trimmed=0 if newest is None else newest.record.next,
            unnamed=_unnamed(newest),
            gone=await self._gone(state),
        )

    async def _chunk(self, part: ByPartition, held: HeldLedgers) -> Chunk:
        table = checkpoint.tail_table(part)
        pointer = await held.write(table.encode(), every_copy=True)
        chunk = Chunk(pointer, len(table), checkpoint.rows_of(part))
        self._chunks.keep(chunk, table)
        return chunk

    async def _stored(self, root: Root, held: HeldLedgers) -> StoredRoot:
        encoded = checkpoint.encode_root(root)
        if len(encoded) <= ROOT_INLINE_BYTES_MAX:
            return encoded
        return await held.write(encoded, every_copy=True)

    async def _gone(self, state: TopicState) -> list[int]:
        """Ledgers that were dropped and then deleted, of those dropped longest ago."""
        oldest = sorted(state.dropped, key=lambda ledger: (state.dropped[ledger], ledger))
        gone = []
        for ledger in oldest[:DROPPED_LOOKED_AT]:
            if await read(self._store, paths.ledger(ledger)) is None:
                gone.append(ledger)
        return gone

    async def _set(
        self,
        topic_id: str,
        record: CheckpointRecord,
        version: int | None,
        intent: Intent,
        held: HeldLedgers,
    ) -> bool:
        """Whether the record counts; False if another one went as far meanwhile."""
        path, value = paths.topic_checkpoint(topic_id), checkpoint.encode_record(record)
        write = Create(path, value) if version is None else Set(path, value, version)
        for _ in range(TRIES_MAX):
            operations: list[Operation] = [
                Check(paths.intent(intent.id), intent.version),
                *await held.checks(),
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
                    raise (await self._intents.get(intent.id)).ended() from error
        raise errors.Unavailable(f"the checkpoint of {topic_id} lost {TRIES_MAX} answers")


def _named(newest: Checkpointed | None) -> list[int]:
    """The ledgers that the newest checkpoint names."""
    if newest is None:
        return []
    root = newest.record.root
    chunks = checkpoint.chunk_ledgers(newest.root.state)
    return sorted({*chunks, *([] if isinstance(root, bytes) else [root.ledger_id])})


def _unnamed(newest: Checkpointed | None) -> list[int]:
    """The ledgers that the checkpoint before the newest named and the newest does not: the next
    names them for nobody."""
    if newest is None:
        return []
    still = _named(newest)
    return [ledger for ledger in newest.root.before if ledger not in still]


DELETED_AT_ONCE = 256
_LOG_VERSION = 0  # commits are written once


async def trim_log(store: MetadataStore, topic_id: str) -> CheckpointRecord | None:
    """Delete what may go; the checkpoint's record as it is then (None: there is none).

    Another process that trims or publishes at the same time makes this one stop, with nothing
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
        there = [path for path in doomed if await read(store, path) is not None]  # removed by hand
        await store.multi([mark, *(Delete(path, _LOG_VERSION) for path in there)])
    return trimmed


# -- which ledgers lost rows since a checkpoint, where only its chunks say which -------------------
#
# Whoever takes rows away names the ledgers that hold them, as it sees them; but a checkpoint moves
# rows that were in commits to ledgers of its own, and what was planned on commits alone does not
# know of these. Where the checkpoint has them in its tail the fold notes it (state.py); where they
# are in a chunk somebody has to read it. Always true: a ledger that the newest checkpoint refers
# to, and to which nothing refers after a later commit, is among those found here or dropped by the
# state: so the delete delay holds for it (hazard 34).

CHUNKS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Loss:
    """Rows [lo, hi) of a partition were in a chunk and are not any more."""

    partition: int
    lo: int
    hi: int


def losses(before: TopicState, after: TopicState) -> dict[Chunk, list[Loss]]:
    """By chunk of `before` the rows that `after`, which follows on it, does not have there."""
    found: dict[Chunk, list[Loss]] = {}
    for was, now in zip(before.partitions, after.partitions, strict=False):
        if was.intervals is not now.intervals:
            for chunk, loss in _of_partition(was, now):
                found.setdefault(chunk, []).append(loss)
    return found


async def with_losses(state: TopicState, before: TopicState, chunks: ChunkStore) -> TopicState:
    """The state with the ledgers dropped that lost rows of `before`'s chunks: when is known only to
    within its last commit, and the delay begins there. Raises as ChunkStore.load."""
    lost = losses(before, state)
    ledgers: dict[int, None] = {}
    some = list(lost)
    for at in range(0, len(some), CHUNKS_AT_ONCE):
        read = await chunks.load(some[at : at + CHUNKS_AT_ONCE])
        for chunk, table in read.items():
            for one in lost[chunk]:
                gone = table.between(one.partition, one.lo, one.hi)
                ledgers |= dict.fromkeys(gone.ledger_ids())
    if not ledgers:
        return state
    dropped: Mapping[int, int] = {**state.dropped, **dict.fromkeys(ledgers, state.commit_ms)}
    return replace(state, dropped=dropped)


def _of_partition(was: PartitionState, now: PartitionState) -> Iterator[tuple[Chunk, Loss]]:
    for one in was.intervals:
        if isinstance(one.source, Chunk):
            there = (at for at in now.intervals.between(one.lo, one.hi) if at.source == one.source)
            for lo, hi in _without(one, there):
                yield one.source, Loss(was.number, lo, hi)


def _without(one: Interval, there: Iterable[Interval]) -> Iterator[tuple[int, int]]:
    """The offsets of the interval that none of `there`, in order, has."""
    at = one.lo
    for other in there:
        if at < other.lo:
            yield at, other.lo
        at = max(at, other.hi)
    if at < one.hi:
        yield at, one.hi
