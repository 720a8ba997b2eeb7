"""Moving a subscription, as an operator and Pulsar's admin API do: past a number of messages, to
the end or the beginning of the messages, or to a time.

Always true: consumers that are connected are disconnected, and come back at the new position. Rows
that they acknowledged beyond the new position stay acknowledged after `skip` and `expire`; `reset`
and `clear` forget these acknowledgements, in the partitions that they move. A subscription that a
query of Spark uses is neither moved nor deleted, because the query would go on without the
subscription. Only `reset` moves a position back.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from spark_ledger import errors
from spark_ledger.metadata.store import OutcomeUnknown
from spark_ledger.metadata.store_calls import Tries, unavailable_while
from spark_ledger.topic.acks.entries import AckState
from spark_ledger.topic.acks.sets import after_missing
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.read.live import ends_of
from spark_ledger.topic.subscription import seek_target
from spark_ledger.topic.subscription.nodes import SubscriptionNodes
from spark_ledger.topic.subscription.records import SubscriptionKind
from spark_ledger.topic.subscription.seek_target import End, SeekTarget

Offsets = dict[int, int]


class SubscriptionMoves:
    """Moves the subscriptions of one topic. Methods return the new positions of the partitions that
    were to be moved. They raise errors.SubscriptionNotFound, errors.SubscriptionBusy,
    errors.TopicDeleted, errors.Unavailable."""

    def __init__(self, client: TopicClient, topic_id: str) -> None:
        self._client = client
        self._topic_id = topic_id

    async def reset(self, name: str, target: SeekTarget, partition: int | None = None) -> Offsets:
        """To the target, forward or back; in one partition only, if it is given. Raises also
        errors.OffsetsOutOfRange, errors.OffsetsNotAssigned."""
        await self.check_no_query(name)
        if partition is not None:
            target = await self._offsets(target, partition)
        return await self._client.subscriptions.seek(self._topic_id, name, target, force=True)

    async def clear(self, name: str) -> Offsets:
        """To the end: no message that the topic has now is left."""
        return await self.reset(name, End.LATEST)

    async def skip(self, name: str, count: int, partition: int | None = None) -> Offsets:
        """Moves past `count` offsets of the partition that are not acknowledged, or to the
        partition's end. Raises errors.BadConfig without a partition if the topic has several."""
        now_ms = 0
        lags = await self._client.subscriptions.lag(self._topic_id, name, now_ms)
        if partition is None and len(lags) == 1:
            (partition,) = lags
        if partition is None or partition not in lags:
            raise errors.BadConfig(
                f"messages of one partition are skipped, of 0 to {len(lags) - 1}, not of"
                f" {'all' if partition is None else partition}",
                "Name the partition.",
            )
        if count < 0:
            raise errors.BadConfig(
                f"{count} messages cannot be skipped", "Give a number from 0 on."
            )
        end = lags[partition].end

        def target_offset(number: int, acked: AckState) -> int:
            if number != partition:
                return 0
            return after_missing(acked.rows, acked.position, count, end)

        await self.check_no_query(name)
        return await self._client.subscriptions.move_up(self._topic_id, name, target_offset)

    async def expire(self, name: str, target: SeekTarget, partition: int | None = None) -> Offsets:
        """Moves past the messages before the target, in all partitions or one; it moves no position
        back. Raises also errors.OffsetsOutOfRange, errors.OffsetsNotAssigned."""
        targets = await self._offsets(target, partition)
        positions = await self._client.subscriptions.positions(self._topic_id, name)
        await self.check_no_query(name)
        if all(offset <= positions.get(number, 0) for number, offset in targets.items()):
            return {}
        return await self._client.subscriptions.move_up(
            self._topic_id, name, lambda number, _: targets.get(number, 0)
        )

    async def _offsets(self, target: SeekTarget, partition: int | None) -> Offsets:
        """The target's offset in each partition, or in this one only."""
        state = await self._client.log(self._topic_id).fold(fresh=True)
        read = await self._client.chunks.load(seek_target.chunks_needed(state, target))
        live_ends = await ends_of(self._client.ledgers, state)
        targets = await seek_target.exactly(self._client.ledgers, state, target, read, live_ends)
        if partition is None:
            return targets
        if partition not in targets:
            raise errors.TopicNotFound(f"the topic has no partition {partition}")
        return {partition: targets[partition]}

    async def properties(self, name: str) -> dict[str, str]:
        nodes = SubscriptionNodes(self._client.store, self._topic_id)
        with unavailable_while(f"reading subscription '{name}'"):
            return dict((await nodes.get(name)).record.properties)

    async def set_properties(self, name: str, properties: Mapping[str, str]) -> None:
        """Replaces the properties; connected consumers stay. Raises errors.Unavailable."""
        nodes = SubscriptionNodes(self._client.store, self._topic_id)
        await self.check_no_query(name)
        with unavailable_while(f"changing subscription '{name}'"):
            tries = Tries(self._client.rng)
            while True:
                subscription = await nodes.get(name)
                record = replace(subscription.record, properties=dict(properties))
                if record == subscription.record:
                    return
                with suppress(OutcomeUnknown):  # the record is read again
                    if await nodes.write(subscription, record, unless_held=True) is not None:
                        return
                await tries.retry_or_raise(f"subscription '{name}' changes again and again")

    async def delete(self, name: str) -> None:
        """Deletes the subscription; connected consumers are disconnected."""
        await self.check_no_query(name)
        await self._client.subscriptions.delete(self._topic_id, name, force=True)

    async def check_no_query(self, name: str) -> None:
        """Checks that the subscription exists and no query uses it, so that it may be moved."""
        listed = await self._client.subscriptions.list(self._topic_id, unreadable={})
        subscription = next((item for item in listed if item.name == name), None)
        if subscription is None:
            raise errors.SubscriptionNotFound(
                f"there is no subscription '{name}'", subscription=name
            )
        if subscription.live and subscription.kind is SubscriptionKind.QUERY:
            raise errors.SubscriptionBusy(
                f"query {subscription.query_id} of Spark uses subscription '{name}'",
                subscription=name,
            )
