"""Merging small segments without being asked: part of what a cluster does for its topics.

Always true: a pass copies about `pass_bytes` at most, one topic after the other, `bytes_per_s` on
average; what is left waits for the next pass, which begins behind the topic that this one ended
with. A topic whose policy `merging` is false is left alone; so is one whose head is where it was,
until time alone makes other merges worth it. What is merged, and how often, merge_plan.py decides;
compactor.py does it. A merge that something came between, or that fails, is tried at a later pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from spark_ledger import errors
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.upkeep.compactor import Compacted, Compaction, Pace
from spark_ledger.topic.upkeep.merge_plan import QUIET_MS, MergeLimits, Upkept, merged_up_to

PASS_BYTES = 128 << 20
BYTES_PER_S = 8 << 20
INTENT_MS = 3600 * 1000  # then what failed under it is the janitor's


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
        limits: MergeLimits | None = None,
        *,
        pass_bytes: int = PASS_BYTES,
        bytes_per_s: float | None = BYTES_PER_S,
        quiet_ms: int = QUIET_MS,
    ) -> None:
        self._client = client
        self._limits = limits or MergeLimits()
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
