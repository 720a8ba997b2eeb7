"""At the take-over of a partition, its owner forgets acknowledgements of lost rows.

Always true: if a topic with page-cache durability lost acknowledged rows, later rows get their
offsets. So, before clients use a partition, the owner removes what the subscriptions have
acknowledged beyond the partition's end. The removal is durable, also in the shares that retention
reads. So no later row counts as acknowledged. A query that has read lost rows loses its
subscription, which the owner takes back to the end, too: the query ends once other rows have the
offsets, and consumers may use the subscription after it. If a subscription cannot be read, the
owner logs that, and goes on with the others.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

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

_FAILURES = (errors.LedgerError, StoreError, Refusal)
_log = logging.getLogger(__name__)


class LostRows:
    """The lost rows of one topic at its owner."""

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
        infos, outcomes = await self._all_subscriptions(), list(opened)
        queries = [info for info in infos if info.kind is SubscriptionKind.QUERY]
        ends: dict[int, int] = {}
        for at, owned in enumerate(opened):
            if isinstance(owned, OwnedPartition):
                try:
                    ends[owned.number] = await self._forget_beyond(owned.log, infos)
                except _FAILURES as error:
                    outcomes[at] = error
        for query in queries if ends else ():
            try:
                await self._put_back(query, ends)
            except _FAILURES as error:
                outcomes = [error if isinstance(o, OwnedPartition) else o for o in outcomes]
                break
        return outcomes

    async def _all_subscriptions(self) -> list[SubscriptionInfo]:
        unreadable: dict[str, errors.LedgerError] = {}
        infos = await self._commits.client.subscriptions.list(
            self._commits.topic.id, unreadable=unreadable
        )
        for name, error in unreadable.items():
            _log.error("subscription '%s' may pass over rows after lost rows: %s", name, error)
        return infos

    async def _forget_beyond(self, log: Partition, infos: Sequence[SubscriptionInfo]) -> int:
        """Forget what is acknowledged beyond the partition's end; returns the end, for queries."""
        number, end = log.number, log.end
        acks = await self._acks.of(number, self._commits.epochs[number])
        acks.delays.forget_from(end)
        beyond = {key: state for key, state in acks.states().items() if state.end > end}
        names_beyond = {key.name for key in beyond}
        queries = [info for info in infos if info.kind is SubscriptionKind.QUERY]
        names = {info.name for info in infos if info.kind is SubscriptionKind.CONSUMER}
        for info in infos:
            is_beyond = info.name in names_beyond or info.positions.get(number, 0) > end
            if info.name in names and is_beyond:
                await self._subscriptions.adopt(info.name, log)
        # queries' subscriptions: consumers that use them later must get the later rows
        of_queries = {key: state for key, state in beyond.items() if key.name not in names}
        if of_queries or queries:
            end = max(end, (await self._commits.state()).partitions[number].end_offset)
        if any(state.rows for state in of_queries.values()):
            for state in of_queries.values():
                state.rows.remove_range(end, state.end)
            await acks.rewritten(of_queries)
        return end

    async def _put_back(self, query: SubscriptionInfo, ends: Mapping[int, int]) -> None:
        """Take the query's subscription back to the ends of these partitions, by number, where it
        is beyond them. One write moves it in all of them: positions of many partitions are a ledger
        of their own."""
        subscriptions, topic_id = self._commits.client.subscriptions, self._commits.topic.id
        with suppress(errors.SubscriptionNotFound):
            at = query.positions
            if query.ledger_id is not None:
                at = await subscriptions.positions(topic_id, query.name)
            beyond = [number for number, end in ends.items() if at.get(number, 0) > end]
            if not beyond:
                return
            # or it read rows that were committed since
            partitions = (await self._commits.state()).partitions
            back = {number: max(ends[number], partitions[number].end_offset) for number in beyond}
            back = {number: end for number, end in back.items() if at[number] > end}
            if back:
                _log.warning(
                    "subscription '%s' of a query goes back to the ends of %d partitions, for"
                    " example in partition %d from offset %d to %d: rows were lost",
                    *(query.name, len(back), number := min(back), at[number], back[number]),
                )
                await subscriptions.seek(topic_id, query.name, back, force=True, keeps_acks=True)
