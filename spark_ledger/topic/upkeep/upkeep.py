"""The repeated upkeep of topics: trims rows that retention does not keep, deletes subscriptions
that expire, checkpoints long logs, deletes garbage, removes old intents, merges small segments. One
elected process in a cluster does the upkeep. The election only saves work: every step is guarded,
so two processes may do the upkeep at once.

Always true: a failure for one topic is reported, and hinders neither the other topics nor the other
work for this topic. The janitor works after retention, so that it sees the ledgers that retention
dropped. Intents are removed after the janitor's pass, because the janitor finds ledgers by intents.
Merging comes last, because it may take long.

Merging: a pass copies about `pass_bytes` at most, one topic after the other, `bytes_per_s` on
average. The next pass begins after the last topic of this pass. A topic whose policy `merging` is
false is not merged. A topic without new commits is not merged either, until other merges become
worth it because time has passed. merge_plan.py decides which segments are merged, and how often;
compactor.py merges the segments. A merge that failed, or that another commit made impossible, is
tried again in a later pass.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.chain import EXTEND_S, Extender, loop_clock
from spark_ledger.metadata.store import StoreError
from spark_ledger.metadata.store_calls import call_each, read, store_now_ms, unavailable_while
from spark_ledger.topic.checkpointer import CHECKPOINT_EVERY
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log import checkpoint, records
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.policies import PASS_BYTES
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.upkeep.admin import TrimResult, retain
from spark_ledger.topic.upkeep.compactor import Compaction, CompactionResult, MergePace
from spark_ledger.topic.upkeep.intent_expiry import NOTHING_EXPIRED, ExpiryResult, IntentExpiry
from spark_ledger.topic.upkeep.janitor import CleanReport, Janitor
from spark_ledger.topic.upkeep.merge_plan import (
    ALL_MERGEABLE,
    QUIET_MS,
    MergeLimits,
    UpkeepLimits,
    merged_up_to,
)
from spark_ledger.topic.upkeep.subscription_expiry import expire_subscriptions

_log = logging.getLogger(__name__)

BYTES_PER_S = 8 << 20
INTENT_MS = 3600 * 1000
"""Then the intent of merging ends, so that the janitor deletes the ledgers of failed merges."""
LONG_LOG = 2 * CHECKPOINT_EVERY  # committers make checkpoints at shorter logs
TOPICS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class TopicHead:
    """A topic, and the number of its next commit."""

    topic: TopicInfo
    next: int


@dataclass(frozen=True, slots=True)
class _MergeState:
    """What the last pass found for a topic: before commit `next` no merge was worth it. Without a
    commit this changes only at `next_look_ms`. Below the offsets `since` (by partition) no merge
    will ever be worth it."""

    next: int
    next_look_ms: int | None
    since: Mapping[int, int] = field(default_factory=dict)


NEVER_MERGED = _MergeState(-1, None)


@dataclass(slots=True)
class MergingReport:
    """The results of merges, and the failures, by topic."""

    merged: dict[str, CompactionResult] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


class Merging:
    """Merges the segments of topics, for one process. The caller has to close it."""

    def __init__(
        self,
        client: TopicClient,
        limits: MergeLimits = ALL_MERGEABLE,
        *,
        pass_bytes: int = PASS_BYTES,
        bytes_per_s: float | None = BYTES_PER_S,
        quiet_ms: int = QUIET_MS,
    ) -> None:
        self._client = client
        self._limits = limits
        self._pass_bytes = pass_bytes
        self._bytes_per_s = bytes_per_s
        self._quiet_ms = quiet_ms
        self._merge_states: dict[str, _MergeState] = {}
        self._last_topic = ""
        self._intent: Intent | None = None
        self._intent_ms = 0

    async def once(self, heads: Sequence[TopicHead], now_ms: int) -> MergingReport:
        """One pass over these topics, at `now_ms` by the store's clock."""
        report = MergingReport()
        topic_ids = {head.topic.id for head in heads}
        self._merge_states = {
            id_: merge_state for id_, merge_state in self._merge_states.items() if id_ in topic_ids
        }
        await self._renew(now_ms)
        pace = MergePace(self._bytes_per_s)
        bytes_left = self._pass_bytes
        for head in self._in_turn(heads):
            if not head.topic.policies.merging or self._has_nothing_to_merge(head, now_ms):
                continue
            if bytes_left <= 0:
                break
            name = head.topic.name.short
            try:
                result = await self._merge(head.topic, now_ms, bytes_left, pace)
            except (errors.TxnConflict, errors.TopicDeleted, errors.TopicNotFound):
                continue  # a later pass reads the topic again
            except errors.LedgerFenced as error:  # condemned: the next pass opens a new intent
                self._intent = None
                report.problems[name] = str(error)
                break
            except (errors.LedgerError, StoreError) as error:
                report.problems[name] = str(error)
                continue
            except Exception as error:
                _log.exception("merging in topic %s ended: a defect", name)
                report.problems[name] = repr(error)
                continue
            if result.commits:
                report.merged[name] = result
                bytes_left -= result.bytes
                self._last_topic = head.topic.name.full
        return report

    async def close(self) -> None:
        if self._intent is not None:
            await self._client.intents.try_finish(self._intent)
            self._intent = None

    async def _merge(
        self, topic: TopicInfo, now_ms: int, bytes_left: int, pace: MergePace
    ) -> CompactionResult:
        """Merges all segments of the topic that are worth it, about `bytes_left` bytes at most.
        Raises as Compaction's methods, errors.TopicDeleted."""
        client = self._client
        limits = replace(self._limits, upkeep_limits=UpkeepLimits(now_ms, self._quiet_ms))
        since = self._merge_states.get(topic.id, NEVER_MERGED).since
        compaction = Compaction(
            client, topic, limits, bytes_left, start_offsets=since, open_intent=self._open_intent
        )
        while tasks := await compaction.plan():
            await compaction.carry_out(tasks, pace)
            if compaction.total.bytes >= bytes_left:
                self._merge_states[topic.id] = replace(NEVER_MERGED, since=since)
                return compaction.total
        state = await client.log(topic.id).fold()
        if state.deleted:
            raise errors.TopicDeleted(f"topic '{topic.name}' was deleted")
        self._merge_states[topic.id] = _MergeState(
            state.next,
            limits.next_look_ms(state.commit_ms) if state.next else None,
            {p.number: merged_up_to(p, since.get(p.number, 0), limits) for p in state.partitions},
        )
        return compaction.total

    def _has_nothing_to_merge(self, head: TopicHead, now_ms: int) -> bool:
        """Whether the topic's head alone shows that no merge is worth it. Then the topic's folded
        state is dropped from memory."""
        merge_state = self._merge_states.get(head.topic.id, NEVER_MERGED)
        is_due = merge_state.next_look_ms is not None and now_ms >= merge_state.next_look_ms
        is_unchanged = merge_state.next == head.next and not is_due
        policies = head.topic.policies
        if is_unchanged and not policies.trims:
            self._client.forget_log(head.topic.id)
        return is_unchanged

    async def _open_intent(self) -> Intent:
        """The intent for all merges of this process in INTENT_MS. An intent for each merge would
        make many nodes, which stay for days."""
        if self._intent is None:
            self._intent = await self._client.intents.open_system_intent("merge", "topics")
        return self._intent

    async def _renew(self, now_ms: int) -> None:
        if now_ms - self._intent_ms >= INTENT_MS:
            await self.close()
            self._intent_ms = now_ms
        if self._intent is not None:
            await self._client.intents.heartbeat(self._intent)

    def _in_turn(self, heads: Sequence[TopicHead]) -> list[TopicHead]:
        """The heads sorted by topic name, beginning after the last topic of the last pass."""
        by_name = sorted(heads, key=lambda head: head.topic.name.full)
        later_topics = [head for head in by_name if head.topic.name.full > self._last_topic]
        return [*later_topics, *by_name[: len(by_name) - len(later_topics)]]


@dataclass(frozen=True, slots=True)
class UpkeepReport:
    """The trimmed rows (in a dry run: the rows that would be trimmed), the merges and the problems,
    by topic; the topics whose logs were checkpointed; the janitor's report; the numbers of removed
    intents and blocks."""

    clean: CleanReport
    expired: ExpiryResult = NOTHING_EXPIRED
    trimmed: Mapping[str, TrimResult] = field(default_factory=dict)
    checkpointed: tuple[str, ...] = ()
    merged: Mapping[str, CompactionResult] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_eventful(self) -> bool:
        """Whether the pass did something, or met a problem."""
        reports = (
            self.trimmed,
            self.checkpointed,
            self.merged,
            self.problems,
            self.expired.intents,
        )
        return any(reports) or self.clean.is_eventful

    def summary(self) -> str:
        """The report in one line."""
        verb = "would be " if self.clean.dry_run else ""
        rows = sum(trimmed.rows for trimmed in self.trimmed.values())
        parts = [
            f"{rows} row(s) of {len(self.trimmed)} topic(s) {verb}trimmed",
            f"{len(self.clean.condemned)} abandoned writer(s) {verb}ended",
            f"{len(self.clean.closed)} ledger(s) {verb}closed",
            f"{len(self.clean.deleted)} {verb}deleted",
            f"{len(self.clean.kept)} kept",
            f"{len(self.clean.waiting)} waiting",
            f"{self.expired.intents} writer(s) of long ago forgotten",
        ]
        if self.merged:
            segments = sum(compacted.segments for compacted in self.merged.values())
            merged_segments = sum(compacted.merged for compacted in self.merged.values())
            size = sum(compacted.bytes for compacted in self.merged.values())
            parts.append(
                f"{segments} segment(s) merged into {merged_segments}, {size} byte(s) copied"
            )
        return ", ".join(parts)

    def warnings(self) -> list[str]:
        """The warnings for an operator, one line for each."""
        unclosed = (f"ledger {ledger}: {why}" for ledger, why in self.clean.unclosed.items())
        topics = (f"topic {name}: {why}" for name, why in self.problems.items())
        lines = (self.clean.alarm, self.clean.refused, *unclosed, *topics)
        return [line for line in lines if line]


class Upkeep:
    """The upkeep by one process. A pass copies about `merge_bytes` bytes at most to merge segments;
    with 0 it merges no segments. The caller has to close it."""

    def __init__(self, client: TopicClient, *, merge_bytes: int = PASS_BYTES) -> None:
        self._client = client
        self._merging = Merging(client, pass_bytes=merge_bytes)
        self._intent: Intent | None = None
        self._janitor = Janitor(client.store, client.ledgers, client.rng)
        self._expiry = IntentExpiry(client.store)
        self._chain = Extender(client.store, EXTEND_S, loop_clock)

    async def once(self, *, dry_run: bool = False, force: bool = False) -> UpkeepReport:
        """One pass, which also appends to the chain of links (metadata/chain.py). `force` as in
        Janitor.clean. If it raises errors.Unavailable or errors.MetadataHeld, nothing was done."""
        with unavailable_while("maintaining topics"):
            await self._client.committer.check_cluster_epoch()
            if not dry_run:
                await self._chain.once()
            now_ms = await store_now_ms(self._client.store)
        unreadable: dict[str, errors.LedgerError] = {}
        topics = await self._client.topics.list(unreadable)
        if self._intent is not None:
            await self._client.intents.heartbeat(self._intent)
        trimmed: dict[str, TrimResult] = {}
        checkpointed: list[str] = []
        problems = {name: str(error) for name, error in unreadable.items()}
        heads: list[TopicHead] = []

        async def trim(info: TopicInfo) -> None:
            trim_result = await self._retain(info, now_ms, dry_run)
            if trim_result.starts:
                trimmed[info.name.short] = trim_result

        async def expire(info: TopicInfo) -> None:
            await expire_subscriptions(self._client, info, now_ms)
            await self._client.ack_copies(info.id).expire(now_ms)

        async def shorten(info: TopicInfo) -> None:
            node = await self._client.store.get(paths.topic_head(info.id))
            head = TopicHead(info, records.decode_head(node.value).next)
            heads.append(head)
            if await self._checkpoint_if_long(head):
                checkpointed.append(info.name.short)

        async def maintain(info: TopicInfo) -> None:
            name = info.name.short
            for work in (trim,) if dry_run else (trim, expire, shorten):
                try:
                    await work(info)
                except (errors.LedgerError, StoreError) as error:
                    problems.setdefault(name, str(error))
                except Exception as error:
                    _log.exception("the upkeep of topic %s: a defect", name)
                    problems.setdefault(name, repr(error))

        await call_each(maintain, topics, TOPICS_AT_ONCE)
        clean = await self._janitor.clean(dry_run=dry_run, force=force)
        if dry_run:
            return UpkeepReport(clean, NOTHING_EXPIRED, trimmed, problems=problems)
        with unavailable_while("removing old intents"):
            expired = await self._expiry.once(now_ms)
        with unavailable_while("merging segments"):
            merging = await self._merging.once(heads, now_ms)
        problems |= merging.problems
        return UpkeepReport(
            clean, expired, trimmed, tuple(sorted(checkpointed)), merging.merged, problems
        )

    async def close(self) -> None:
        await self._merging.close()
        if self._intent is not None:
            await self._client.intents.try_finish(self._intent)
            self._intent = None

    async def _retain(self, info: TopicInfo, now_ms: int, dry_run: bool) -> TrimResult:
        planned = await retain(self._client, info, None, now_ms)
        if dry_run or not planned.starts:
            return planned
        if self._intent is None:  # one intent for all topics: its nodes stay for days
            self._intent = await self._client.intents.open_system_intent("retain", "topics")
        try:
            return await retain(self._client, info, self._intent, now_ms)
        except errors.LedgerFenced:  # the intent was condemned: the next pass opens a new intent
            self._intent = None
            raise

    async def _checkpoint_if_long(self, head: TopicHead) -> bool:
        """Makes a checkpoint if the topic's log is long; returns whether it made a checkpoint."""
        if head.next < LONG_LOG:
            return False
        topic_id = head.topic.id
        node = await read(self._client.store, paths.topic_checkpoint(topic_id))
        since = 0 if node is None else checkpoint.decode_record(node.value).next
        if head.next - since < LONG_LOG:
            return False
        await self._client.checkpoints.make(topic_id, commits_min=CHECKPOINT_EVERY)
        return True
