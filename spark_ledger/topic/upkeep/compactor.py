"""Merging small segments: a merge reads their rows, writes the rows to another ledger, and replaces
the small segments by the new segment.

Always true: a row keeps its offset, its columns, its timestamp and its commit time, also if rows of
many commits become one entry; batches of producers are copied unchanged (merge_encoding.py). Merges
of different partitions that would be small entries are written together, and share entries as a
task's rows do. A merge is a commit of `replace` actions. Since the plan, the partition may only
have got appends, and trims below the merge; otherwise the commit is refused, and the merge is
planned again. Ledgers of refused merges are under an intent that ends with the merging, and the
janitor deletes these ledgers. Merging may end at any moment; the next merging goes on with the
remaining segments. The janitor may delete a ledger under an open intent once the topic has dropped
the ledger (garbage.py). So no two commits may name the same ledger: each round writes its rows to
ledgers of its own, which never hold bodies of commits or checkpoints (log/blobs.py). As a second
guard the commit checks that the ledgers of its rows have records.

`Compaction` plans and commits. This process carries out the tasks, or a Spark job does so on many
machines (spark/jobs.py).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import ANY_VERSION, Check
from spark_ledger.metadata.store_calls import Tries, unavailable_while
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.commit import draft as commit_draft
from spark_ledger.topic.entry.batch_encoder import SHARE_BYTES, EncodedEntry
from spark_ledger.topic.entry.message_batch import decode_header
from spark_ledger.topic.log.actions import Replace
from spark_ledger.topic.log.intents import HEARTBEAT_S, Intent
from spark_ledger.topic.log.segment_table import SegmentTable, TableChunk
from spark_ledger.topic.log.segments import CommitTimes, Segment
from spark_ledger.topic.log.state import Tables, TopicState
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.read.plan import Cutting, ReadTask, plan_read
from spark_ledger.topic.read.slice_reader import FetchedEntry
from spark_ledger.topic.task_reader import fetch_with_replans
from spark_ledger.topic.upkeep.merge_encoding import (
    MergeEncoder,
    RunQueue,
    StoredRows,
    blocks_and_batches,
    with_stored_times,
)
from spark_ledger.topic.upkeep.merge_plan import (
    ALL_MERGEABLE,
    Merge,
    MergeLimits,
    plan_merges,
    ranges_to_search,
)
from spark_ledger.topic.write import EntrySender

_log = logging.getLogger(__name__)

ROUND_BYTES_MAX = 256 << 20  # of the rows that one commit merges
ROUND_MERGES_MAX = 500
ROUND_TIMES_MAX = 50_000  # runs of rows with equal commit times in one commit
GROUP_BYTES = 32 << 20  # of the merges that one task holds in memory and writes together
CONFLICTS_MAX = 10
CHUNKS_MOVED_MAX = 5
ONE_TASK = Cutting(task_bytes=1 << 62)


@dataclass(frozen=True, slots=True)
class MergeTask:
    """Merges of different partitions, sorted by partition, and the reads of their rows.
    Picklable."""

    merges: tuple[Merge, ...]
    reads: tuple[ReadTask, ...]

    @property
    def bytes(self) -> int:
        return sum(merge.bytes for merge in self.merges)


@dataclass(frozen=True, slots=True)
class MergeResult:
    """The result of writing a merge: its rows are in `segments`, which are not committed yet, with
    these `commit_times`. A merge is `skipped` if one of its entries is damaged, has a format that
    no version writes, or is larger than an entry may be now; then its old segments stay.
    Picklable."""

    merge: Merge
    segments: tuple[Segment, ...] = ()
    commit_times: CommitTimes = ()
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """The result of merging a topic: `segments` small segments became `merged` segments, in
    `commits` commits; about `bytes` bytes were copied."""

    segments: int = 0
    merged: int = 0
    bytes: int = 0
    commits: int = 0

    def plus(self, results: Sequence[MergeResult]) -> "CompactionResult":
        return CompactionResult(
            self.segments + sum(result.merge.segments for result in results),
            self.merged + sum(len(result.segments) for result in results),
            self.bytes + sum(result.merge.bytes for result in results),
            self.commits + 1,
        )


async def compact(
    client: TopicClient,
    name: str,
    *,
    limits: MergeLimits = ALL_MERGEABLE,
    bytes_per_s: float | None = None,
) -> CompactionResult:
    """Merges the small segments that the topic has now; on average it copies `bytes_per_s` at most.

    Raises errors.BadConfig, errors.TopicNotFound, errors.TxnConflict (others rearrange the topic
    again and again), errors.CommitContended, errors.NotEnoughBookies, errors.DataUnavailable,
    errors.Unavailable.
    """
    pace = MergePace(bytes_per_s)
    info = await client.topics.open(name)
    async with aclosing(Compaction(client, info, limits)) as compaction:
        while tasks := await compaction.plan():
            await compaction.carry_out(tasks, pace)
        return compaction.total


class Compaction:
    """Merges a topic round by round: `plan`, then carry the tasks out under `intent`, then
    `commit`, until `plan` returns no task. The caller has to close it. `start_offsets` are the
    offsets, by partition, where merging begins. Without `open_intent` each round has an intent of
    its own: processes that carry out tasks keep ledgers open under an intent, and no ledger may get
    rows of two rounds."""

    def __init__(
        self,
        client: TopicClient,
        topic: TopicInfo,
        limits: MergeLimits = ALL_MERGEABLE,
        round_bytes: int = ROUND_BYTES_MAX,
        *,
        start_offsets: Mapping[int, int] | None = None,
        open_intent: Callable[[], Awaitable[Intent]] | None = None,
    ) -> None:
        self.total = CompactionResult()
        self._client = client
        self._topic = topic
        self._limits = limits
        self._round_bytes = round_bytes
        self._open_intent = open_intent
        self._intent: Intent | None = None
        self._next_offsets: Mapping[int, int] = start_offsets or {}
        self._reached: Mapping[int, int] = {}
        """By partition the offset up to which the last plan goes. The plan was made on the commits
        below `_snapshot`, and has `_merge_count` merges."""
        self._snapshot = self._merge_count = 0
        self._conflicts = 0

    @property
    def intent(self) -> Intent:
        """The intent under which the tasks are carried out."""
        assert self._intent is not None, "the first plan with tasks opens the intent"
        return self._intent

    async def plan(self) -> tuple[MergeTask, ...]:
        """The next tasks, with about `round_bytes` of merges; empty if no merge is left. Raises as
        TopicLog.fold."""
        tries = Tries(tries_max=CHUNKS_MOVED_MAX)
        while True:
            state = await self._state()
            try:
                tasks = await self._plan(state)
                break
            except errors.NoSuchLedger as error:  # a newer checkpoint replaced a chunk
                await tries.retry_or_raise(error)
        self._snapshot = state.next
        if tasks and self._intent is None:
            if self._open_intent is not None:
                self._intent = await self._open_intent()
            else:
                name = self._topic.name.full
                self._intent = await self._client.intents.open_system_intent("compact", name)
        return tasks

    async def carry_out(self, tasks: Sequence[MergeTask], pace: "MergePace") -> None:
        """Carries out the tasks of the last plan, one after the other, and commits their merges.
        Raises as `merge` and `commit`."""
        merged: list[MergeResult] = []
        for task in tasks:
            merged += await merge(self._client, self._topic, self.intent, task)
            await pace.keep(self._client, self.intent, task.bytes)
        self._client.cache.retire(self.intent.id)
        await self.commit(merged)

    async def commit(self, merged: Sequence[MergeResult]) -> None:
        """Replaces the old segments by the new segments, in one commit. `merged` has the results of
        one attempt of each planned task. A merge without a result, or whose partition has changed,
        is left out and planned again. Raises as TopicClient.commit_actions, errors.TxnConflict
        (others rearrange the topic again and again)."""
        written = [result for result in merged if not result.skipped]
        self._merge_count -= len(merged) - len(written)
        merged = written
        for _ in range(CONFLICTS_MAX):
            if not merged:
                break
            try:
                replacements = [self._replace(result) for result in merged]
                record_paths = dict.fromkeys(
                    path for result in merged for path in _record_paths(result)
                )
                checks = [Check(path, ANY_VERSION) for path in record_paths]
                await self._client.commit_actions(
                    self._topic.id, replacements, self.intent, checks=checks
                )
                self.total = self.total.plus(merged)
                break
            except errors.TxnConflict as conflict:
                missing_path = conflict.facts.get("path")
                state = await self._state()
                merged = [
                    result
                    for result in merged
                    if missing_path not in _record_paths(result)
                    and self._is_still_possible(state, result)
                ]
        else:
            merged = ()
        await self.aclose()
        if len(merged) == self._merge_count:
            self._next_offsets = self._reached
            return
        self._conflicts += 1
        if self._conflicts >= CONFLICTS_MAX:
            raise errors.TxnConflict(f"topic '{self._topic.name}' is rearranged again and again")

    async def aclose(self) -> None:
        intent, self._intent = self._intent, None
        if intent is not None and self._open_intent is None:
            self._client.cache.retire(intent.id)
            await self._client.intents.try_finish(intent)

    async def _state(self) -> TopicState:
        with unavailable_while(f"reading topic '{self._topic.name}'"):
            return await self._client.log(self._topic.id).fold(fresh=True)

    async def _plan(self, state: TopicState) -> tuple[MergeTask, ...]:
        """Raises errors.NoSuchLedger if a chunk is gone."""
        merges: list[Merge] = []
        tables: dict[TableChunk, SegmentTable] = {}
        self._reached = reached = dict(self._next_offsets)
        is_full = False
        for partition in () if state.deleted else state.partitions:
            start = reached.get(partition.number, 0)
            for lo, hi in ranges_to_search(partition, start, self._limits):
                if is_full:
                    break
                loaded = await self._client.chunks.load(partition.chunks_between(lo, hi))
                for planned in plan_merges(partition, lo, hi, self._limits, loaded):
                    is_full = is_full or _is_full(merges, self._round_bytes)
                    if not is_full:
                        merges.append(planned)
                        tables |= loaded
                        reached[partition.number] = planned.end
        self._merge_count = len(merges)
        return tuple(_task(state, group, tables) for group in group_merges(merges))

    def _replace(self, result: MergeResult) -> Replace:
        planned, segments = result.merge, result.segments
        times, tokens = RunQueue(result.commit_times), RunQueue(planned.commit_tokens)
        return Replace(
            partition=planned.partition,
            start=planned.start,
            end=planned.end,
            segments=segments,
            snapshot=self._snapshot,
            committed=tuple(tuple(times.take(segment.rows)) for segment in segments),
            tokens=tuple(tuple(tokens.take(segment.rows)) for segment in segments),
        )

    def _is_still_possible(self, state: TopicState, result: MergeResult) -> bool:
        try:
            commit_draft.check_guards(state, self.intent.app_id, (self._replace(result),))
        except errors.TxnConflict:
            return False
        return True


def _record_paths(result: MergeResult) -> list[str]:
    """The paths of the records of the ledgers with the merge's rows."""
    return [paths.ledger(segment.ledger_id) for segment in result.segments]


def group_merges(merges: Sequence[Merge]) -> list[list[Merge]]:
    """The merges in groups, each for one task. Merges that are small or read shared entries come
    into common groups: such a group has merges of different partitions, of GROUP_BYTES at most. Any
    other merge is a group by itself."""
    groups = [[planned] for planned in merges if not _shares_entries(planned)]
    by_rank: dict[int, list[Merge]] = {}  # rank 0: the first small merge of each partition
    ranks: Counter[int] = Counter()  # the next rank by partition
    for planned in merges:
        if _shares_entries(planned):
            by_rank.setdefault(ranks[planned.partition], []).append(planned)
            ranks[planned.partition] += 1
    for same_rank in by_rank.values():
        group_bytes = GROUP_BYTES  # so that the first merge begins a group
        for planned in same_rank:
            if group_bytes + planned.bytes > GROUP_BYTES:
                groups.append([])
                group_bytes = 0
            groups[-1].append(planned)
            group_bytes += planned.bytes
    return groups


def _shares_entries(planned: Merge) -> bool:
    return planned.shared or planned.bytes < SHARE_BYTES


def _task(state: TopicState, merges: Sequence[Merge], tables: Tables) -> MergeTask:
    by_partition = sorted(merges, key=lambda planned: planned.partition)
    ranges = {planned.partition: (planned.start, planned.end) for planned in by_partition}
    reads = plan_read(state, ranges, cutting=ONE_TASK, read=tables)
    return MergeTask(tuple(by_partition), tuple(reads))


async def merge(
    client: TopicClient, topic: TopicInfo, intent: Intent, task: MergeTask
) -> list[MergeResult]:
    """Reads the rows from their present segments, and writes them to new segments under the intent.
    Returns an empty list if some rows were trimmed, and `skipped` merges if an entry is bad or too
    large. Raises the errors of reads and writes."""
    sender = client.sender(topic, intent)
    entries = MergeEncoder(task.merges, client.ledgers.config.entry_bytes_max)
    stored_rows: dict[int, list[StoredRows]] = {}
    try:
        for read in task.reads:
            table = read.table  # its `counted` segments were born live
            born_live = frozenset(table.ledgers[table.counted].tolist())
            async for run in fetch_with_replans(client, read):
                for fetched in run:
                    if fetched.entry.header.ledger_id in born_live:
                        _note_stored_times(fetched, stored_rows)
                    for part in blocks_and_batches(fetched):
                        await _send(sender, entries.add(part))
        await _send(sender, entries.flush())
        segments = await sender.finish()
    except errors.RowsTrimmed:
        await sender.abort()
        return []
    except (errors.BadEntry, errors.MessageTooBig) as error:
        await sender.abort()
        _log.warning("segments of topic %s stay as they are: %s", topic.name, error)
        return [MergeResult(planned, skipped=True) for planned in task.merges]
    except BaseException:
        await sender.abort()
        raise
    by_partition: dict[int, list[Segment]] = {}
    for segment in segments:
        by_partition.setdefault(segment.partition, []).append(segment)
    merged = [
        MergeResult(
            planned,
            tuple(by_partition.get(planned.partition, ())),
            with_stored_times(planned, stored_rows.get(planned.partition, ())),
        )
        for planned in task.merges
    ]
    for result in merged:
        written = sum(segment.rows for segment in result.segments)
        assert written == result.merge.end - result.merge.start, "a merge holds the same rows"
    return merged


def _note_stored_times(fetched: FetchedEntry, stored_rows: dict[int, list[StoredRows]]) -> None:
    written_ms = decode_header(fetched.entry.payload).written_ms
    for partition, _, _, rows, offset in fetched.pieces.tolist():
        stored_rows.setdefault(partition, []).append(StoredRows(offset, rows, written_ms))


class MergePace:
    """Slows merges to `bytes_per_s` on average (None: no limit)."""

    def __init__(self, bytes_per_s: float | None) -> None:
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise errors.BadConfig(
                f"a merge that copies {bytes_per_s} bytes a second does not end",
                "Give bytes_per_s above 0, or leave bytes_per_s out.",
            )
        self._bytes_per_s = bytes_per_s
        self._began_s = asyncio.get_running_loop().time()
        self._bytes = 0

    async def keep(self, client: TopicClient, intent: Intent, copied: int) -> None:
        """Counts `copied` bytes, and waits until the pace allows them; meanwhile raises the
        intent's heartbeat."""
        self._bytes += copied
        while self._bytes_per_s is not None:
            due_s = self._began_s + self._bytes / self._bytes_per_s
            left_s = due_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                return
            await asyncio.sleep(min(left_s, HEARTBEAT_S))
            await client.intents.heartbeat(intent)


async def _send(sender: EntrySender, entries: Iterable[EncodedEntry]) -> None:
    for entry in entries:
        await sender.send(entry)


def _is_full(merges: Sequence[Merge], round_bytes: int) -> bool:
    size = sum(planned.bytes for planned in merges)
    times = sum(len(planned.commit_times) for planned in merges)
    has_many = len(merges) >= ROUND_MERGES_MAX or times >= ROUND_TIMES_MAX
    return has_many or size >= round_bytes
