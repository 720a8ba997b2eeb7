"""Subscriptions at the take-over of partitions whose rows may be lost with all copies.

Always true: a topic with page-cache durability that lost acknowledged rows gives their offsets to
later rows. Before clients use a partition, what its subscriptions have acknowledged beyond its end
counts no longer, and this is durable, also in the shares by which retention goes. So no later row
counts as acknowledged. A subscription that cannot be read is logged, and stops no other.
"""

import logging
from collections.abc import Sequence

from spark_ledger import errors
from spark_ledger.broker.dispatch.subscriptions import TopicSubscriptions
from spark_ledger.broker.log.partition import Partition
from spark_ledger.broker.log.topic_commits import TopicCommits
from spark_ledger.broker.owner.owned_partition import OwnedPartition
from spark_ledger.broker.wire.commands import Refusal
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic.acks.topic_acks import TopicAcks
from spark_ledger.topic.subscription.listing import SubscriptionInfo
from spark_ledger.topic.subscription.records import SubscriptionKind

_log = logging.getLogger(__name__)


class LostRows:
    """Of one topic at its owner."""

    def __init__(
        self, commits: TopicCommits, subscriptions: TopicSubscriptions, acks: TopicAcks
    ) -> None:
        self._commits = commits
        self._subscriptions = subscriptions
        self._acks = acks

    async def forget_acks_of_lost_rows(
        self, opened: Sequence[OwnedPartition | BaseException]
    ) -> list[OwnedPartition | BaseException]:
        """Returns the partitions that clients may use, and for each other partition its error.
        Raises errors.Unavailable."""
        if not (opened and self._commits.may_lose_offsets):
            return list(opened)
        infos, outcomes = await self._of_consumers(), list(opened)
        for at, owned in enumerate(opened):
            if isinstance(owned, OwnedPartition):
                try:
                    await self._forget_beyond(owned.log, infos)
                except (errors.LedgerError, StoreError, Refusal) as error:
                    outcomes[at] = error
        return outcomes

    async def _of_consumers(self) -> list[SubscriptionInfo]:
        unreadable: dict[str, errors.LedgerError] = {}
        infos = await self._commits.client.subscriptions.list(
            self._commits.topic.id, unreadable=unreadable
        )
        for name, error in unreadable.items():
            _log.error("subscription '%s' may pass over rows after lost rows: %s", name, error)
        return [info for info in infos if info.kind is SubscriptionKind.CONSUMER]

    async def _forget_beyond(self, log: Partition, infos: Sequence[SubscriptionInfo]) -> None:
        number, end = log.number, log.end
        acks = await self._acks.of(number, self._commits.epochs[number])
        acks.delays.forget_from(end)
        beyond = {key: state for key, state in acks.states().items() if state.end > end}
        names, of_consumers = {key.name for key in beyond}, {info.name for info in infos}
        for info in infos:
            if info.name in names or info.positions.get(number, 0) > end:
                await self._subscriptions.adopt(info.name, log)
        # of a query's subscription: consumers that come after the query do not count these rows
        kept = {key: state for key, state in beyond.items() if key.name not in of_consumers}
        if any(state.rows for state in kept.values()):
            present = (await self._commits.state()).partitions[number].end_offset
            for state in kept.values():
                state.rows.remove_range(max(end, present), state.end)
            await acks.rewritten(kept)
