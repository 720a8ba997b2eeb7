"""Expiry of messages and the backlog quota, which a topic's owner applies.

Always true: a broker judges only its own partitions, by the policies that the topic has now. An
expired message counts as acknowledged, and so does a message that an eviction passes over; the
positions of queries' subscriptions are never moved. While a partition is over a quota that holds or
refuses producers, it takes no producer: the producers that it had are sent away, and are refused
when they come back. A quota is judged every `look_s`, and whenever a producer comes. The records of
the topic and its namespace are watched, so that a broker notices new policies within SPREAD_S; if a
watch is lost, within POLICIES_S. If a partition or subscription cannot be read, the broker
logs that and judges the others. In that partition or subscription no message expires, and the last
judgement of the quota stays.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from spark_ledger import errors
from spark_ledger.async_tasks import SharedReads, woken
from spark_ledger.broker.dispatch.acks import Acks
from spark_ledger.broker.log.topic_commits import TopicCommits
from spark_ledger.broker.owner.owned_partition import OwnedPartition
from spark_ledger.broker.settings import DEFAULTS
from spark_ledger.broker.wire.commands import Refusal, ServerError
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.state import PartitionState
from spark_ledger.topic.log.topics import TopicInfo, read_policies
from spark_ledger.topic.subscription.backlog_quota import (
    EVICTION,
    KEPT_OF_QUOTA,
    LargeBacklog,
    has_quota,
    over_quota,
    partition_title,
    subscription_title,
    to_evict,
)
from spark_ledger.topic.subscription.records import Positions, SubscriptionKind

POLICIES_S = 300.0
"""How often the policies of a topic without a quota and without expiry are read again."""
SPREAD_S = 10.0
"""A broker reads changed policies at a random moment within this time, as the change may be one of
the namespace of thousands of topics."""
FRESH_S = 1.0
"""A producer that comes within this time after a judgement is admitted or refused by it."""
LOG_EVERY_S = 60.0
"""How often one partition or subscription that cannot be judged is logged, at most."""
_FAILURES = (errors.LedgerError, StoreError, Refusal)

_log = logging.getLogger(__name__)


class MovableSubscriptions(Protocol):
    """The subscriptions of one topic, whose positions expiry and eviction move."""

    def marks(self) -> Mapping[str, Positions]:
        """As TopicSubscriptions.marks."""

    async def move_up(self, name: str, number: int, to: Callable[[Acks], int]) -> None:
        """As TopicSubscriptions.move_up."""


class TopicWithBacklogs(Protocol):
    @property
    def info(self) -> TopicInfo: ...

    @property
    def subscriptions(self) -> MovableSubscriptions: ...

    @property
    def partitions(self) -> Mapping[int, OwnedPartition]: ...


class Backlogs:
    """The backlogs of one topic at its owner."""

    def __init__(self, topic: TopicWithBacklogs, commits: TopicCommits) -> None:
        self._topic = topic
        self._commits = commits
        self.look_s = DEFAULTS.backlog_look_s
        self._policies = topic.info.policies
        self._policies_changed = asyncio.Event()
        self._policies_changed.set()  # no watch is set yet
        self._refusals: dict[int, Refusal] = {}
        self._looked_s = float("-inf")
        self._logged_s: dict[str, float] = {}
        """By title of a partition or subscription that cannot be judged: when that was logged
        last."""
        self._looking = asyncio.Lock()
        self._looks = SharedReads[None, None](lambda _: self.look())

    async def go_on(self) -> None:
        """Until this task is cancelled, judge the backlogs when the policies change, and every
        `look_s` if the policies have a quota or expiry."""
        within_s = POLICIES_S
        while True:
            if await woken(self._policies_changed, within_s):
                await asyncio.sleep(self._commits.client.rng.uniform(0, SPREAD_S))
            self._policies_changed.clear()
            within_s = self.look_s
            try:
                await self.look()
                is_limited = has_quota(self._policies) or self._policies.message_ttl_ms is not None
                within_s = self.look_s if is_limited else POLICIES_S
            except _FAILURES as error:
                _log.warning("backlogs of topic %s are judged later: %s", self._name, error)
            except Exception:
                _log.exception("backlogs of topic %s are not judged: a defect", self._name)

    async def check(self, partition: int) -> None:
        """Raises Refusal if the partition takes no producer now; and as `look`."""
        if not has_quota(self._policies):
            return
        if asyncio.get_running_loop().time() >= self._looked_s + FRESH_S:
            await self._looks(None)
        refusal = self._refusals.get(partition)
        if refusal is not None:
            raise refusal

    async def look(self) -> None:
        """Judge the backlogs now. Raises errors.LedgerError, StoreError, Refusal."""
        async with self._looking:
            client = self._commits.client
            checked = await read_policies(
                client.store, self._topic.info.id, watch=self._policies_changed.set
            )
            self._policies = checked.policies
            if self._policies.message_ttl_ms is not None:
                await self._expire(self._policies.message_ttl_ms)
            await self._judge()
            self._looked_s = asyncio.get_running_loop().time()

    @property
    def _name(self) -> str:
        return self._topic.info.name.short

    async def _expire(self, ttl_ms: int) -> None:
        before_ms = self._commits.now_ms() - ttl_ms
        unreadable: dict[str, errors.LedgerError] = {}
        infos = await self._commits.client.subscriptions.list(
            self._topic.info.id, unreadable=unreadable
        )
        for name, error in unreadable.items():
            self._log_late(subscription_title(name), error)
        for number, owned in list(self._topic.partitions.items()):
            with self._alone(partition_title(number)):
                end = await owned.log.since(before_ms)
                for info in infos:
                    is_behind = info.positions.get(number, 0) < end
                    if info.kind is SubscriptionKind.CONSUMER and is_behind:
                        await self._move_up(info.name, number, end)

    async def _judge(self) -> None:
        refusals: dict[int, Refusal] = {}
        if has_quota(self._policies):
            unreadable: dict[str, errors.LedgerError] = {}
            own = list(self._topic.partitions)
            lags = await self._commits.client.lags(
                *(self._topic.info.id, self._commits.now_ms(), self._topic.subscriptions.marks()),
                partitions=own,
                unreadable=unreadable,
            )
            for title, error in unreadable.items():
                self._log_late(title, error)
            if self._policies.on_backlog == EVICTION:
                for backlog in to_evict(lags, self._policies):
                    with self._alone(partition_title(backlog.partition)):
                        await self._evict(backlog)
            else:
                refusals = {
                    number: refusal
                    for number, refusal in self._refusals.items()
                    if number in own and partition_title(number) in unreadable
                }
                for number, backlog in over_quota(lags, self._policies).items():
                    refusals[number] = self._refusal(backlog)
        self._refusals = refusals
        for number, refusal in refusals.items():
            owned = self._topic.partitions.get(number)
            if owned is not None and owned.send_producers_away():
                _log.warning("producers are sent away: %s", refusal.message)

    @contextmanager
    def _alone(self, title: str) -> Iterator[None]:
        """Log a failure inside of the block; the code after the block goes on."""
        try:
            yield
        except _FAILURES as error:
            self._log_late(title, error)
        except Exception:
            _log.exception("%s of topic %s is not judged: a defect", title, self._name)

    def _log_late(self, title: str, error: Exception) -> None:
        """Log that a partition or subscription is judged later, at most once in LOG_EVERY_S."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._logged_s.get(title, float("-inf")) + LOG_EVERY_S:
            self._logged_s[title] = now_s
            _log.warning(
                "the backlog of %s of topic %s is judged later: %s", title, self._name, error
            )

    def _refusal(self, backlog: LargeBacklog) -> Refusal:
        holds = self._policies.on_backlog == "hold"
        code = ServerError.QUOTA_HOLD if holds else ServerError.QUOTA_EXCEEDED
        return Refusal(code, backlog.text(self._name))

    async def _evict(self, backlog: LargeBacklog) -> None:
        owned = self._topic.partitions.get(backlog.partition)
        if owned is None:
            return
        offset = end_of_eviction(owned.log.held, backlog, self._policies)
        if self._policies.backlog_ms_max is not None:
            kept_ms = int(KEPT_OF_QUOTA * self._policies.backlog_ms_max)
            offset = max(offset, await owned.log.since(self._commits.now_ms() - kept_ms))
        offset = min(offset, owned.log.end)
        if offset > backlog.lag.position:
            _log.warning(
                "subscription '%s' of topic %s passes over offsets %d to %d of partition %d: %s",
                *(backlog.subscription, self._name, backlog.lag.position, offset),
                *(backlog.partition, backlog.what),
            )
            await self._move_up(backlog.subscription, backlog.partition, offset)

    async def _move_up(self, name: str, number: int, offset: int) -> None:
        await self._topic.subscriptions.move_up(name, number, lambda _: offset)


def end_of_eviction(
    partition: PartitionState, backlog: LargeBacklog, policies: TopicPolicies
) -> int:
    """The first offset that an eviction leaves unread: the rows from this offset on have at most
    KEPT_OF_QUOTA of the quota of bytes. A row that is in no commit yet counts with the average size
    of such rows of the backlog."""
    lag, bytes_max = backlog.lag, policies.backlog_bytes_max
    if bytes_max is None or lag.bytes <= bytes_max:
        return lag.position
    bytes_left, committed_end = KEPT_OF_QUOTA * bytes_max, partition.end_offset
    live_bytes = lag.bytes - partition.bytes_between(lag.position, committed_end)
    lo, hi = lag.position, max(lag.position, committed_end)
    while lo < hi:
        middle = (lo + hi) // 2
        if partition.bytes_between(middle, committed_end) + live_bytes > bytes_left:
            lo = middle + 1
        else:
            hi = middle
    if lo < committed_end or live_bytes <= bytes_left:
        return lo
    live_rows = lag.end - max(lag.position, committed_end)
    return lag.end - int(live_rows * bytes_left / live_bytes)
