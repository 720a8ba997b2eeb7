"""The repeated upkeep of topics: trims rows that retention does not keep, checkpoints long logs,
deletes garbage, removes old intents, merges small segments. One elected process in a cluster does
it. The election only saves work: every step is guarded, so two processes may do it at once.

Always true: a failure for one topic is reported and does not hinder the others; the janitor works
after retention, so that it sees the ledgers that retention dropped; intents are removed after the
janitor's pass, as it needs them to find ledgers; merging comes last, as it may take a while.

Merging: a pass copies about `pass_bytes` at most, one topic after the other, `bytes_per_s` on
average; the rest waits for the next pass, which begins after the topic with which this one ended. A
topic whose policy `merging` is false is left alone, and so is a topic without new commits, until
time alone makes other merges worth it. merge_plan.py decides which segments are merged, and how
often; compactor.py merges them. A merge that failed, or that another commit made impossible, is
tried again in a later pass.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.chain import EXTEND_S, Extender, loop_clock
from spark_ledger.metadata.store import StoreError
from spark_ledger.metadata.store_calls import call_each, reachable, read, store_now_ms
from spark_ledger.topic.checkpointer import CHECKPOINT_EVERY
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log import checkpoint, records
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.policies import PASS_BYTES
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.upkeep.admin import Trimmed, retain
from spark_ledger.topic.upkeep.compactor import Compacted, Compaction, MergePace
from spark_ledger.topic.upkeep.intent_expiry import NOTHING_EXPIRED, Expired, IntentExpiry
from spark_ledger.topic.upkeep.janitor import CleanReport, Janitor
from spark_ledger.topic.upkeep.merge_plan import (
    ALL_MERGEABLE,
    QUIET_MS,
    MergeLimits,
    Upkept,
    merged_up_to,
)

_log = logging.getLogger(__name__)

BYTES_PER_S = 8 << 20
INTENT_MS = 3600 * 1000  # then the intent ends, and the janitor deletes ledgers of failed merges
LONG_LOG = 2 * CHECKPOINT_EVERY  # committers make checkpoints too, and at shorter logs
TOPICS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class TopicHead:
    """A topic, and the number of its next commit."""

    topic: TopicInfo
    next: int


@dataclass(frozen=True, slots=True)
class _Looked:
    """All merges that were worth it were done when the next commit was `next`. Time alone changes
    that only at `changes_ms`. Below `since` (by partition) no merge will ever be worth it."""

    next: int
    changes_ms: int | None
    since: Mapping[int, int] = field(default_factory=dict)


NEVER_LOOKED = _Looked(-1, None)


@dataclass(slots=True)
class MergingReport:
    """By topic the merges, and the failures."""

    merged: dict[str, Compacted] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


class Merging:
    """Merges the segments of topics, for one process. Close it."""

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
        self._looked: dict[str, _Looked] = {}
        self._ended_with = ""
        self._intent: Intent | None = None
        self._intent_ms = 0

    async def once(self, heads: Sequence[TopicHead], now_ms: int) -> MergingReport:
        """A pass over these topics, at `now_ms` by the store's clock."""
        report = MergingReport()
        there = {head.topic.id for head in heads}
        self._looked = {id_: looked for id_, looked in self._looked.items() if id_ in there}
        await self._renew(now_ms)
        pace = MergePace(self._bytes_per_s)
        left = self._pass_bytes
        for head in self._in_turn(heads):
            if not head.topic.policies.merging or self._rests(head, now_ms):
                continue
            if left <= 0:
                break
            name = head.topic.name.short
            try:
                done = await self._merge(head.topic, now_ms, left, pace)
            except (errors.TxnConflict, errors.TopicDeleted, errors.TopicNotFound):
                continue  # a later pass reads the topic again
            except errors.LedgerFenced as error:  # condemned: the next pass opens another
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
            if done.commits:
                report.merged[name] = done
                left -= done.bytes
                self._ended_with = head.topic.name.full
        return report

    async def close(self) -> None:
        if self._intent is not None:
            await self._client.intents.try_finish(self._intent)
            self._intent = None

    async def _merge(self, topic: TopicInfo, now_ms: int, left: int, pace: MergePace) -> Compacted:
        """Merges all segments of the topic that are worth it, about `left` bytes at most. Raises as
        Compaction's methods, errors.TopicDeleted."""
        client = self._client
        limits = replace(self._limits, upkept=Upkept(now_ms, self._quiet_ms))
        since = self._looked.get(topic.id, NEVER_LOOKED).since
        compaction = Compaction(
            client, topic, limits, left, since=since, open_intent=self._open_intent
        )
        while tasks := await compaction.plan():
            await compaction.carry_out(tasks, pace)
            if compaction.done.bytes >= left:
                self._looked[topic.id] = replace(NEVER_LOOKED, since=since)
                return compaction.done
        state = await client.log(topic.id).fold()
        if state.deleted:
            raise errors.TopicDeleted(f"topic '{topic.name}' was deleted")
        self._looked[topic.id] = _Looked(
            state.next,
            limits.changes_ms(state.commit_ms) if state.next else None,
            {p.number: merged_up_to(p, since.get(p.number, 0), limits) for p in state.partitions},
        )
        return compaction.done

    def _rests(self, head: TopicHead, now_ms: int) -> bool:
        """Whether there is nothing to merge, by the topic's head alone. The folded state of a topic
        at rest need not stay in memory."""
        looked = self._looked.get(head.topic.id, NEVER_LOOKED)
        passing = looked.changes_ms is not None and now_ms >= looked.changes_ms
        rests = looked.next == head.next and not passing
        policies = head.topic.policies
        if rests and not policies.trims:
            self._client.forget_log(head.topic.id)
        return rests

    async def _open_intent(self) -> Intent:
        """One intent for all merges of this process in INTENT_MS: each intent makes nodes that
        stay for days."""
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
        """By name, beginning after the topic with which the last pass ended."""
        by_name = sorted(heads, key=lambda head: head.topic.name.full)
        behind = [head for head in by_name if head.topic.name.full > self._ended_with]
        return [*behind, *by_name[: len(by_name) - len(behind)]]


@dataclass(frozen=True, slots=True)
class UpkeepReport:
    """By topic the rows that were trimmed (or would be, in a dry run), the merges and the problems;
    the topics whose logs were checkpointed; the janitor's report, and the intents that were
    removed."""

    clean: CleanReport
    expired: Expired = NOTHING_EXPIRED
    trimmed: Mapping[str, Trimmed] = field(default_factory=dict)
    checkpointed: tuple[str, ...] = ()
    merged: Mapping[str, Compacted] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def eventful(self) -> bool:
        """Whether there is something to report."""
        did = (self.trimmed, self.checkpointed, self.merged, self.problems, self.expired.intents)
        return any(did) or self.clean.eventful

    def summary(self) -> str:
        """The report in one line."""
        did = "would be " if self.clean.dry_run else ""
        rows = sum(trimmed.rows for trimmed in self.trimmed.values())
        parts = [
            f"{rows} row(s) of {len(self.trimmed)} topic(s) {did}let go",
            f"{len(self.clean.condemned)} abandoned writer(s) {did}ended",
            f"{len(self.clean.closed)} ledger(s) {did}closed",
            f"{len(self.clean.deleted)} {did}deleted",
            f"{len(self.clean.kept)} kept",
            f"{len(self.clean.waiting)} waiting",
            f"{self.expired.intents} writer(s) of long ago forgotten",
        ]
        if self.merged:
            segments = sum(compacted.segments for compacted in self.merged.values())
            made = sum(compacted.merged for compacted in self.merged.values())
            size = sum(compacted.bytes for compacted in self.merged.values())
            parts.append(f"{segments} segment(s) merged into {made}, {size} byte(s) copied")
        return ", ".join(parts)

    def warnings(self) -> list[str]:
        """The warnings for an operator, a line each."""
        unclosed = (f"ledger {ledger}: {why}" for ledger, why in self.clean.unclosed.items())
        topics = (f"topic {name}: {why}" for name, why in self.problems.items())
        lines = (self.clean.alarm, self.clean.refused, *unclosed, *topics)
        return [line for line in lines if line]


class Upkeep:
    """The upkeep by one process. Close it. A pass copies about `merge_bytes` at most to merge
    segments; 0: it merges no segments."""

    def __init__(self, client: TopicClient, *, merge_bytes: int = PASS_BYTES) -> None:
        self._client = client
        self._merging = Merging(client, pass_bytes=merge_bytes)
        self._intent: Intent | None = None
        self._janitor = Janitor(client.store, client.ledgers, client.rng)
        self._expiry = IntentExpiry(client.store)
        self._chain = Extender(client.store, EXTEND_S, loop_clock)

    async def once(self, *, dry_run: bool = False, force: bool = False) -> UpkeepReport:
        """One pass; it also appends to the chain of links (metadata/chain.py). `force` as in
        Janitor.clean. Raises errors.Unavailable, errors.MetadataHeld: then nothing was done."""
        with reachable("maintaining topics"):
            await self._client.committer.check_cluster_epoch()
            if not dry_run:
                await self._chain.once()
            now_ms = await store_now_ms(self._client.store)
        unreadable: dict[str, errors.LedgerError] = {}
        topics = await self._client.topics.list(unreadable)
        if self._intent is not None:
            await self._client.intents.heartbeat(self._intent)
        trimmed: dict[str, Trimmed] = {}
        made: list[str] = []
        problems = {name: str(error) for name, error in unreadable.items()}
        heads: list[TopicHead] = []

        async def maintain(info: TopicInfo) -> None:
            name = info.name.short
            try:
                gone = await self._retain(info, now_ms, dry_run)
                if gone.starts:
                    trimmed[name] = gone
                if not dry_run:
                    head = await self._client.store.get(paths.topic_head(info.id))
                    heads.append(TopicHead(info, records.decode_head(head.value).next))
                    if await self._checkpointed(heads[-1]):
                        made.append(name)
            except (errors.LedgerError, StoreError) as error:
                problems[name] = str(error)
            except Exception as error:
                _log.exception("the upkeep of topic %s ended: a defect", name)
                problems[name] = repr(error)

        await call_each(maintain, topics, TOPICS_AT_ONCE)
        clean = await self._janitor.clean(dry_run=dry_run, force=force)
        if dry_run:
            return UpkeepReport(clean, NOTHING_EXPIRED, trimmed, problems=problems)
        with reachable("removing old intents"):
            expired = await self._expiry.once(now_ms)
        with reachable("merging segments"):
            merging = await self._merging.once(heads, now_ms)
        problems |= merging.problems
        return UpkeepReport(clean, expired, trimmed, tuple(sorted(made)), merging.merged, problems)

    async def close(self) -> None:
        await self._merging.close()
        if self._intent is not None:
            await self._client.intents.try_finish(self._intent)
            self._intent = None

    async def _retain(self, info: TopicInfo, now_ms: int, dry_run: bool) -> Trimmed:
        due = await retain(self._client, info, None, now_ms)
        if dry_run or not due.starts:
            return due
        if self._intent is None:  # one for all topics: each intent makes nodes that stay for days
            self._intent = await self._client.intents.open_system_intent("retain", "topics")
        try:
            return await retain(self._client, info, self._intent, now_ms)
        except errors.LedgerFenced:  # the intent was condemned: the next pass opens another
            self._intent = None
            raise

    async def _checkpointed(self, head: TopicHead) -> bool:
        """Makes a checkpoint if the topic's log is long; returns whether it did."""
        if head.next < LONG_LOG:
            return False
        topic_id = head.topic.id
        node = await read(self._client.store, paths.topic_checkpoint(topic_id))
        since = 0 if node is None else checkpoint.decode_record(node.value).next
        if head.next - since < LONG_LOG:
            return False
        await self._client.checkpoints.make(topic_id, least=CHECKPOINT_EVERY)
        return True
