"""What topics need done for them, again and again: rows that retention does not keep let go, long
logs checkpointed, garbage deleted, what ended long ago forgotten, small segments merged. One role
in a cluster does it; the election saves work, no more: every step is guarded, so two may do it at
once.

Always true: what fails for one topic is said and does not hinder the others; the janitor goes after
them, so that it sees what retention dropped; intents go after it, as it finds ledgers by them;
merging comes last, for it may take a while.

Of merging: a pass copies about `pass_bytes` at most, one topic after the other, `bytes_per_s` on
average; what is left waits for the next pass, which begins behind the topic that this one ended
with. A topic whose policy `merging` is false is left alone; so is one whose head is where it was,
until time alone makes other merges worth it. What is merged, and how often, merge_plan.py decides;
compactor.py does it. A merge that something came between, or that fails, is tried at a later pass.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.chain import EXTEND_S, Extender, loop_clock
from spark_ledger.metadata.store import StoreError
from spark_ledger.metadata.store_calls import each, reachable, read, store_now_ms
from spark_ledger.topic.checkpointer import CHECKPOINT_EVERY
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log import checkpoint, records
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.upkeep.admin import Trimmed, retain
from spark_ledger.topic.upkeep.compactor import Compacted, Compaction, Pace
from spark_ledger.topic.upkeep.intent_expiry import NOTHING_EXPIRED, Expired, IntentExpiry
from spark_ledger.topic.upkeep.janitor import CleanReport, Janitor
from spark_ledger.topic.upkeep.merge_plan import ALL, QUIET_MS, MergeLimits, Upkept, merged_up_to

_log = logging.getLogger(__name__)

PASS_BYTES = 128 << 20
BYTES_PER_S = 8 << 20
INTENT_MS = 3600 * 1000  # then what failed under it is the janitor's
LONG_LOG = 2 * CHECKPOINT_EVERY  # committers make checkpoints too, and come first
TOPICS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class TopicHead:
    """A topic, and the number of its next commit."""

    topic: TopicInfo
    next: int


@dataclass(frozen=True, slots=True)
class _Looked:
    """All that was worth merging was merged once the next commit was `next`; it is so until
    `changes_ms`. Below `since` (by partition) nothing will ever be."""

    next: int
    changes_ms: int | None
    since: Mapping[int, int] = field(default_factory=dict)


NEVER_LOOKED = _Looked(-1, None)


@dataclass(slots=True)
class MergingReport:
    """By topic what was merged, and what failed."""

    merged: dict[str, Compacted] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


class Merging:
    """Of one process. Close it."""

    def __init__(
        self,
        client: TopicClient,
        limits: MergeLimits = ALL,
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
        there = {one.topic.id for one in heads}
        self._looked = {id_: one for id_, one in self._looked.items() if id_ in there}
        await self._renew(now_ms)
        pace = Pace(self._bytes_per_s)
        left = self._pass_bytes
        for one in self._in_turn(heads):
            if not one.topic.policies.merging or self._rests(one, now_ms):
                continue
            if left <= 0:
                break
            name = one.topic.name.short
            try:
                done = await self._merge(one.topic, now_ms, left, pace)
            except (errors.TxnConflict, errors.TopicDeleted, errors.TopicNotFound):
                continue  # a later pass sees what became of it
            except errors.LedgerFenced as error:  # taken for gone: the next pass has another
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
                self._ended_with = one.topic.name.full
        return report

    async def close(self) -> None:
        if self._intent is not None:
            await self._client.intents.try_finish(self._intent)
            self._intent = None

    async def _merge(self, topic: TopicInfo, now_ms: int, left: int, pace: Pace) -> Compacted:
        """All that is worth merging in the topic, `left` bytes of it at most, about. Raises as
        Compaction's methods, errors.TopicDeleted."""
        client = self._client
        limits = replace(self._limits, upkept=Upkept(now_ms, self._quiet_ms))
        since = self._looked.get(topic.id, NEVER_LOOKED).since
        compaction = Compaction(client, topic, limits, left, since=since, intent=self._open_intent)
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

    def _rests(self, one: TopicHead, now_ms: int) -> bool:
        """Whether nothing is to be merged, by its head alone. What was folded of a topic at rest
        need not stay in memory."""
        looked = self._looked.get(one.topic.id, NEVER_LOOKED)
        passing = looked.changes_ms is not None and now_ms >= looked.changes_ms
        rests = looked.next == one.next and not passing
        policies = one.topic.policies
        if rests and policies.retention_ms is None and policies.retention_bytes is None:
            self._client.forget_log(one.topic.id)
        return rests

    async def _open_intent(self) -> Intent:
        """One for all that this process merges in a while: each makes nodes that stay."""
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
        """By name, those behind the topic that the last pass ended with first."""
        by_name = sorted(heads, key=lambda one: one.topic.name.full)
        behind = [one for one in by_name if one.topic.name.full > self._ended_with]
        return [*behind, *by_name[: len(by_name) - len(behind)]]


@dataclass(frozen=True, slots=True)
class UpkeepReport:
    """By topic what was let go (or would be, in a dry run) and what was merged, the topics whose
    log was checkpointed, and what went wrong with which; what the janitor did, and what of intents
    was removed."""

    clean: CleanReport
    expired: Expired = NOTHING_EXPIRED
    trimmed: Mapping[str, Trimmed] = field(default_factory=dict)
    checkpointed: tuple[str, ...] = ()
    merged: Mapping[str, Compacted] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def eventful(self) -> bool:
        """Whether there is something to say of it."""
        did = (self.trimmed, self.checkpointed, self.merged, self.problems, self.expired.intents)
        return any(did) or self.clean.eventful

    def summary(self) -> str:
        """One line."""
        did = "would be " if self.clean.dry_run else ""
        rows = sum(one.rows for one in self.trimmed.values())
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
            segments = sum(one.segments for one in self.merged.values())
            made = sum(one.merged for one in self.merged.values())
            size = sum(one.bytes for one in self.merged.values())
            parts.append(f"{segments} segment(s) merged into {made}, {size} byte(s) copied")
        return ", ".join(parts)

    def warnings(self) -> list[str]:
        """What an operator should look at, a line each."""
        unclosed = (f"ledger {ledger}: {why}" for ledger, why in self.clean.unclosed.items())
        topics = (f"topic {name}: {why}" for name, why in self.problems.items())
        return [one for one in (self.clean.alarm, self.clean.refused, *unclosed, *topics) if one]


class Upkeep:
    """Of one process. Close it. A pass copies `merge_bytes` at most, about, to merge segments; 0:
    it merges none."""

    def __init__(self, client: TopicClient, *, merge_bytes: int = PASS_BYTES) -> None:
        self._client = client
        self._merging = Merging(client, pass_bytes=merge_bytes)
        self._intent: Intent | None = None
        self._janitor = Janitor(client.store, client.ledgers, client.rng)
        self._expiry = IntentExpiry(client.store)
        self._chain = Extender(client.store, EXTEND_S, loop_clock)

    async def once(self, *, dry_run: bool = False, force: bool = False) -> UpkeepReport:
        """One pass; it appends to the chain of links, too (metadata/chain.py). `force` as
        Janitor.clean. Raises errors.Unavailable, errors.MetadataHeld: then nothing was done."""
        with reachable("maintaining topics"):
            await self._client.committer.look_at_cluster()
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

        async def one(info: TopicInfo) -> None:
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

        await each(one, topics, TOPICS_AT_ONCE)
        clean = await self._janitor.clean(dry_run=dry_run, force=force)
        if dry_run:
            return UpkeepReport(clean, NOTHING_EXPIRED, trimmed, problems=problems)
        with reachable("removing what ended long ago"):
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
        wanted = await retain(self._client, info, None, now_ms)
        if dry_run or not wanted.starts:
            return wanted
        if self._intent is None:  # one for all: each makes nodes that stay
            self._intent = await self._client.intents.open_system_intent("retain", "topics")
        try:
            return await retain(self._client, info, self._intent, now_ms)
        except errors.LedgerFenced:  # taken for gone: the next pass goes on under another
            self._intent = None
            raise

    async def _checkpointed(self, head: TopicHead) -> bool:
        """Whether the topic's log was so long that it has a new checkpoint now."""
        if head.next < LONG_LOG:
            return False
        topic_id = head.topic.id
        node = await read(self._client.store, paths.topic_checkpoint(topic_id))
        since = 0 if node is None else checkpoint.decode_record(node.value).next
        if head.next - since < LONG_LOG:
            return False
        await self._client.checkpoints.make(topic_id, least=CHECKPOINT_EVERY)
        return True
