"""The client of the topic layer, for one process and cluster: it makes the parts of the layer and
connects them. Drivers, tasks, the CLI and plain Python use it. It decides nothing; each part is in
its own file. Most processes of a cluster only read rows as tasks, so parts that only other
processes need are loaded and made at their first use."""

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from spark_ledger.async_tasks import SharedTasks
from spark_ledger.errors import BacklogQuotaExceeded, LedgerError, NoSuchLedger
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata.store import Check
from spark_ledger.metadata.store_calls import call_each, store_now_ms
from spark_ledger.process import LruCache
from spark_ledger.topic.commit.draft import (
    NEXT_VERSION,
    SNAPSHOT_OF_INTENT,
    CommitKind,
    CommitOutcome,
    CommitRequest,
    RowKind,
    TxnKey,
    check_one_attempt,
    ordered_segments,
)
from spark_ledger.topic.commit.replay import QueryBatch
from spark_ledger.topic.entry.batch_encoder import BatchEncoder
from spark_ledger.topic.entry.routing import Router
from spark_ledger.topic.log.actions import Action, Append, Overwrite, RowsOfTopics
from spark_ledger.topic.log.blobs import Blobs, ChunkStore
from spark_ledger.topic.log.intents import Intent, Intents
from spark_ledger.topic.log.ledger_cache import LedgerCache
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.state import Tables, TopicState
from spark_ledger.topic.log.topic_log import TopicLog
from spark_ledger.topic.log.topics import TopicInfo, Topics, read_policies
from spark_ledger.topic.read.follower import TopicFollower
from spark_ledger.topic.read.live import ends_of
from spark_ledger.topic.read.plan import Ranges, chunks_to_read
from spark_ledger.topic.subscription.backlog_quota import (
    EVICTION,
    LagOfSubscription,
    has_quota,
    over_quota,
    partition_title,
    subscription_title,
)
from spark_ledger.topic.subscription.lag import topic_lag
from spark_ledger.topic.subscription.records import Positions
from spark_ledger.topic.write import (
    DEFAULT_SETTINGS,
    EntrySender,
    TaskResult,
    TaskSettings,
)

if TYPE_CHECKING:
    from spark_ledger.topic.acks.copies import AckCopies
    from spark_ledger.topic.checkpointer import Checkpointer
    from spark_ledger.topic.commit.commit import Committer
    from spark_ledger.topic.commit.hand_over import AskOwner, LivePartitionCommitter
    from spark_ledger.topic.schema.registry import SchemaRegistry
    from spark_ledger.topic.subscription.subscriptions import Subscriptions


LOGS_KEPT_MAX = 1000
POLICIES_S = 60.0
"""For how long commits use the quotas that an earlier commit read."""


NO_ROW_KINDS: Mapping[str, RowKind] = MappingProxyType({})
"""The rows of no topic are checked against its schema."""


class PoliciesRead(NamedTuple):
    """A topic's policies, and when they were read, by the loop's clock."""

    policies: TopicPolicies
    read_s: float


class TopicClient:
    """Belongs to one event loop. `now_ms` is the clock for the times of rows; `ask` sends requests
    to the owners of live segments (by default over TCP)."""

    def __init__(
        self,
        ledgers: LedgerStore,
        rng: random.Random,
        now_ms: Callable[[], int],
        ask: "AskOwner | None" = None,
    ) -> None:
        self.ledgers = ledgers
        self.store = ledgers.metadata
        self.topics = Topics(self.store, rng)
        self.intents = Intents(self.store, ledgers, rng)
        self.cache = LedgerCache(ledgers, self.intents)
        self.blobs = Blobs(ledgers, self.cache)
        self.chunks = ChunkStore(ledgers)
        self.rng = rng
        self._now_ms = now_ms
        self._ask = ask
        self._logs: dict[str, TopicLog] = {}
        self._policies = LruCache[str, PoliciesRead](LOGS_KEPT_MAX)
        self._followers = SharedTasks[str, TopicFollower](keep=True)  # keeps started followers

    @cached_property
    def schemas(self) -> "SchemaRegistry":
        from spark_ledger.topic.schema.registry import SchemaRegistry

        return SchemaRegistry(self.store, self.rng)

    @cached_property
    def checkpoints(self) -> "Checkpointer":
        from spark_ledger.topic.checkpointer import Checkpointer

        return Checkpointer(self.ledgers, self.intents, self.blobs, self.chunks, self.log)

    @cached_property
    def committer(self) -> "Committer":
        from spark_ledger.topic.commit.commit import Committer

        return Committer(
            self.store,
            self.log,
            self.blobs,
            self.chunks.load,
            lambda topic_id, partitions: self.subscriptions.holds(topic_id, partitions),
            self.rng,
            self.forget_logs,
        )

    @cached_property
    def live_committer(self) -> "LivePartitionCommitter":
        from spark_ledger.topic.commit.hand_over import LivePartitionCommitter, ask_over_tcp

        return LivePartitionCommitter(self.ledgers, self.committer, self._ask or ask_over_tcp)

    @cached_property
    def subscriptions(self) -> "Subscriptions":
        from spark_ledger.topic.subscription.subscriptions import Subscriptions

        return Subscriptions(
            self.ledgers, self.intents, self.log, self.rng, read_chunks=self.chunks.load
        )

    def ack_copies(self, topic_id: str) -> "AckCopies":
        """Copies of acknowledgements, made for queries that leave the acknowledged rows out."""
        from spark_ledger.topic.acks.copies import AckCopies

        return AckCopies(self.intents, self.blobs, topic_id)

    def log(self, topic_id: str) -> TopicLog:
        """The topic's log; calls for one topic return one object, so that a fold reads only new
        commits. The client keeps the logs of followed topics, and the LOGS_KEPT_MAX other logs used
        last; any other log is folded from the start."""
        log = self._logs.pop(topic_id, None) or TopicLog(self.store, topic_id, self.ledgers)
        self._logs[topic_id] = log
        if len(self._logs) > LOGS_KEPT_MAX + len(self._followers):
            unfollowed = next(topic for topic in self._logs if topic not in self._followers)
            del self._logs[unfollowed]
        return log

    def forget_log(self, topic_id: str) -> None:
        """Drop the topic's folded state; the next use folds from the start."""
        self._logs.pop(topic_id, None)

    def forget_logs(self) -> None:
        """Drop all logs, as the metadata store went back in time. Followers keep their logs, and
        read them again from the start."""
        for log in self._logs.values():
            log.forget()
        self._logs.clear()

    async def follow(
        self, topic_id: str, name: str | None = None, reread_s: float | None = None
    ) -> TopicFollower:
        """The topic's follower, after its start. Each topic has one follower, made with the
        arguments of the first call; after a failed start the next call tries again. With `name` the
        follower's errors name the topic. At least every `reread_s` it reads the topic's head."""
        return await self._followers.result(
            topic_id, lambda: self._start_follower(topic_id, name, reread_s)
        )

    async def unfollow(self, topic_id: str) -> None:
        """Close the topic's follower, and drop the topic's folded state. The next `follow` makes a
        new follower."""
        task = self._followers.pop(topic_id)
        self.forget_log(topic_id)
        if task is not None:
            task.cancel()
            (started,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(started, TopicFollower):
                await started.close()

    def encoder(
        self,
        topic: TopicInfo,
        task_index: int,
        partitions: int | None = None,
        settings: TaskSettings = DEFAULT_SETTINGS,
    ) -> BatchEncoder:
        """The encoder of a task's rows into entries. Raises errors.BadConfig."""
        return BatchEncoder(
            Router(settings.routing, partitions or topic.partitions, task_index),
            self._now_ms,
            compression=settings.compression,
            entry_bytes_max=self.ledgers.config.entry_bytes_max,
            gather_bytes_max=settings.gather_bytes_max,
            key_filters=settings.key_filters,
            schema_version=settings.schema_version,
        )

    def sender(
        self, topic: TopicInfo, intent: Intent, settings: TaskSettings = DEFAULT_SETTINGS
    ) -> EntrySender:
        """The sender of a task's entries. Must be called on the loop."""
        policies = settings.policies or topic.policies
        return EntrySender(
            self.cache,
            self.intents,
            intent,
            topic.id,
            policies,
            settings.unacked_bytes_max,
            settings.held_bytes_max,
        )

    async def commit_topics(
        self,
        results: Mapping[str, Sequence[TaskResult]],
        txn: TxnKey,
        intent_id: str,
        *,
        overwrite: Collection[str] = (),
        user_metadata: str = "",
        finish_intent: bool = False,
        batch: QueryBatch | None = None,
        overwrite_held: bool = False,
        row_kinds: Mapping[str, RowKind] = NO_ROW_KINDS,
        timeout_s: float = 60.0,
    ) -> CommitOutcome:
        """Commits the results of tasks, by topic id, in order of task index: to all topics or to
        none.

        In the topics whose ids are in `overwrite`, the rows replace all rows that the topic had
        when the intent was made (with `overwrites`), and later rows of this app. Later rows of
        other apps raise errors.TxnConflict; rows that a subscription holds raise
        errors.SubscriptionBusy, unless `overwrite_held`. With `finish_intent` the intent is done
        afterwards in any case. `batch` has the counts of a streaming query's tasks, by which a
        replay is recognised; without `batch`, a version that was committed before changes nothing.
        `row_kinds` are the kinds of rows by topic id, to be checked against the topics' schemas.
        Raises as Committer.commit; errors.TopicRecreated for results of another topic,
        errors.LedgerFenced for results of another intent, ValueError for results that claim a task
        or an entry twice."""
        check_one_attempt(result for task_results in results.values() for result in task_results)
        drafts: dict[str, tuple[Action, ...]] = {}
        for id_, task_results in results.items():
            rows = ordered_segments(id_, intent_id, task_results)
            is_overwritten = id_ in overwrite
            drafts[id_] = (Overwrite(rows, SNAPSHOT_OF_INTENT) if is_overwritten else Append(rows),)
        request = CommitRequest(
            txn,
            intent_id,
            drafts,
            finish_intent,
            user_metadata=user_metadata,
            batch=batch,
            overwrite_held=overwrite_held,
            row_kinds=row_kinds,
            check_quotas=self._check_quotas,
            creators={
                ledger_id: creator_token
                for task_results in results.values()
                for r in task_results
                for ledger_id, creator_token in r.creators.items()
            },
        )
        return await self._commit(request, timeout_s, ends_live=True)

    async def commit_actions(
        self,
        topic_id: str,
        actions: Sequence[Action],
        intent: Intent,
        *,
        checks: Sequence[Check] = (),
        txn: TxnKey | None = None,
        finish_intent: bool = False,
        row_kinds: Mapping[str, RowKind] = NO_ROW_KINDS,
        timeout_s: float = 60.0,
    ) -> CommitOutcome:
        """Commits any actions to one topic, for maintenance. No other process may commit under the
        intent (Intents.open_system_intent). The committer adds to each action the ledgers that the
        action drops. The multi also has the `checks`: a node with another version raises
        errors.TxnConflict. Raises as Committer.commit."""
        key = txn or TxnKey(intent.app_id, intent.target, NEXT_VERSION, intent.run_id)
        drafts = {topic_id: tuple(actions)}
        request = CommitRequest(
            key, intent.id, drafts, finish_intent, tuple(checks), row_kinds=row_kinds
        )
        return await self._commit(request, timeout_s)

    async def _commit(
        self, request: CommitRequest, timeout_s: float, *, ends_live: bool = False
    ) -> CommitOutcome:
        before = partial(self.checkpoints.before_commit, intent_id=request.intent_id)
        await call_each(before, request.drafts)
        wait_s = max(timeout_s, self.ledgers.config.outage_timeout_s)
        if ends_live:
            outcome = await self.live_committer.commit(request, wait_s)
        else:
            outcome = await self.committer.commit(request, wait_s)
        if request.finish_intent and outcome.kind is not CommitKind.COMMITTED:
            await self.intents.finish(request.intent_id)
        intent_id = None if request.finish_intent else request.intent_id
        for topic_id, commit in outcome.topics.items():
            self.checkpoints.after_commit(topic_id, commit.number, intent_id)
        return outcome

    async def lags(
        self,
        topic_id: str,
        now_ms: int,
        marks: Mapping[str, Positions] | None = None,
        *,
        partitions: Collection[int],
        unreadable: dict[str, LedgerError] | None = None,
    ) -> dict[str, LagOfSubscription]:
        """The lag of each subscription of the topic in these partitions, by name; `now_ms` is by
        the store's clock. A lag counts from durable positions, so it may be larger than it really
        is, never smaller. `marks` are dispatchers' marks by subscription, which the caller has in
        memory; with `marks`, other positions are read from the metadata store alone, and rows
        acknowledged beyond a mark count too. The errors of subscriptions and partitions that cannot
        be read go into `unreadable`, by title, and the others are returned. Raises as
        TopicLog.fold; without `unreadable` also as live.ends_of and Subscriptions.list."""
        failed_names: dict[str, LedgerError] | None = None if unreadable is None else {}
        failed_ends: dict[int, LedgerError] | None = None if unreadable is None else {}
        infos = await self.subscriptions.list(
            topic_id, exact=marks is None, unreadable=failed_names
        )
        lags: dict[str, LagOfSubscription] = {}
        if infos:
            state = await self.log(topic_id).fold(fresh=True)
            ends = await ends_of(self.ledgers, state, partitions, failed_ends)
            for info in infos:
                positions = {**info.positions, **(marks or {}).get(info.name, {})}
                judged = {
                    number: offset
                    for number, offset in positions.items()
                    if number in partitions and number not in (failed_ends or {})
                }
                acked = {} if marks else info.acked_beyond
                lag = topic_lag(state, judged, now_ms, live_ends=ends, acked=acked)
                lags[info.name] = LagOfSubscription(info.kind, lag)
        if unreadable is not None:
            unreadable |= {subscription_title(n): e for n, e in (failed_names or {}).items()}
            unreadable |= {partition_title(n): e for n, e in (failed_ends or {}).items()}
        return lags

    async def _check_quotas(self, rows: RowsOfTopics) -> None:
        """Checks that the topics take rows in these partitions, by policies that were read within
        POLICIES_S. Raises errors.BacklogQuotaExceeded."""
        now_s = asyncio.get_running_loop().time()
        for topic_id, partitions in rows.items():
            policies_read = self._policies.get(topic_id)
            if policies_read is None or policies_read.read_s + POLICIES_S < now_s:
                policies_read = PoliciesRead(
                    (await read_policies(self.store, topic_id)).policies, now_s
                )
                self._policies.put(topic_id, policies_read)
            if has_quota(policies_read.policies) and policies_read.policies.on_backlog != EVICTION:
                now_ms = await store_now_ms(self.store)
                lags = await self.lags(topic_id, now_ms, partitions=partitions)
                over = over_quota(lags, policies_read.policies)
                if refusing := over.keys() & partitions:
                    name = await self.topics.name_of(topic_id)
                    text = over[min(refusing)].text(topic_id if name is None else name.short)
                    raise BacklogQuotaExceeded(text)

    async def tables(self, state: TopicState, ranges: Ranges) -> Tables:
        """The tables of segments that a plan for these ranges needs. Raises as ChunkStore.load."""
        return await self.chunks.load(chunks_to_read(state, ranges))

    async def state_with_tables(
        self, state: TopicState, ranges: Ranges
    ) -> tuple[TopicState, Tables]:
        """The state and its `tables` for the ranges. If a chunk is gone, because a newer checkpoint
        replaced it, folds again and returns the newer state. Raises as TopicLog.fold and
        ChunkStore.load."""
        try:
            return state, await self.tables(state, ranges)
        except NoSuchLedger:
            newer, _ = await self.log(state.topic_id).fold_from_checkpoint()
            return newer, await self.tables(newer, ranges)

    async def close(self) -> None:
        """Closes cached ledgers and followers; the ledger store stays open."""
        for follower in await self._followers.close():
            await follower.close()
        if "subscriptions" in vars(self):
            await self.subscriptions.close()
        if "live_committer" in vars(self):
            await self.live_committer.close()
        if "checkpoints" in vars(self):
            await self.checkpoints.close()
        await self.chunks.close()
        await self.cache.close()

    async def _start_follower(
        self, topic_id: str, name: str | None, reread_s: float | None
    ) -> TopicFollower:
        follower = TopicFollower(self.log(topic_id), name, reread_s)
        follower.on_end = lambda: self._stopped_following(topic_id, follower)
        try:
            await follower.start()
        except BaseException:
            self.forget_log(topic_id)
            raise
        return follower

    def _stopped_following(self, topic_id: str, follower: TopicFollower) -> None:
        """Drops a follower that failed, or whose topic was deleted: the next `follow` makes a new
        follower."""
        if self._followers.kept(topic_id) is follower:
            self._followers.pop(topic_id)
            self.forget_log(topic_id)
