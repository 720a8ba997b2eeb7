"""Subscriptions that a producer makes, and those that one of several consumers deletes."""

import asyncio

import pytest

from spark_ledger.broker.wire.commands import Refusal, ServerError, SubscriptionType
from tests.kit.subscribing import subscribed
from tests.unit.spark_ledger.broker.owned_topics import ClientLink, listed, owned
from tests.unit.spark_ledger.broker.two_brokers import named
from tests.unit.spark_ledger.topic.stage import play

SHARED = SubscriptionType.SHARED


def test_a_subscription_that_a_producer_makes_begins_at_the_first_message_and_is_kept():
    async def act(stage):
        broker, topic, partition = await owned(stage)
        await topic.subscriptions.make("dead")
        assert await listed(stage) == ["dead"]
        positions = await stage.client.subscriptions.positions(stage.topic.id, "dead")
        assert positions[0] == 0
        consumer = await subscribed(topic, partition, "dead", SHARED, link=ClientLink())
        await topic.subscriptions.make("dead")
        assert topic.subscriptions.named("dead").consumers == [consumer]
        topic.subscriptions.leave("dead", consumer)
        await broker.close()
        assert await listed(stage) == ["dead"]

    play(act)


def test_of_several_consumers_one_deletes_the_subscription_only_by_force():
    async def act(stage):
        broker, topic, partition = await owned(stage)
        ended = []

        async def another():
            return await subscribed(topic, partition, "s", SHARED, link=ClientLink())

        first, second, third = [await another() for _ in range(3)]
        for consumer in (second, third):
            consumer.on_end = lambda one: (ended.append(one), topic.subscriptions.leave("s", one))
        with pytest.raises(Refusal) as refused:
            await topic.subscriptions.unsubscribe("s", first)
        assert refused.value.code is ServerError.METADATA
        await topic.subscriptions.unsubscribe("s", first, force=True)
        assert ended == [second, third]
        assert await listed(stage) == []
        await asyncio.sleep(5)
        assert await listed(stage) == []
        assert first.dispatcher.consumers == []
        await broker.close()

    play(act)


def test_a_client_does_not_delete_a_subscription_that_another_uses_in_another_partition():
    async def act(stage):
        broker, topic, first = await owned(stage)
        await broker.lookup(named(1), authoritative=True)
        _, second = await broker.partition(named(1))
        link = ClientLink()
        mine = await subscribed(topic, first, "s", SHARED, link=link)
        also_mine = await subscribed(topic, second, "s", SHARED, link=link)
        consumer_of_another = await subscribed(topic, second, "s", SHARED, link=ClientLink())
        with pytest.raises(Refusal) as refused:
            await topic.subscriptions.unsubscribe("s", mine)
        assert refused.value.code is ServerError.METADATA
        topic.subscriptions.leave("s", consumer_of_another)
        for consumer in (mine, also_mine):
            await topic.subscriptions.unsubscribe("s", consumer)
        assert await listed(stage) == []
        await broker.close()

    play(act, partitions=2)


def test_consumers_of_one_subscription_have_one_type_and_the_next_ones_may_have_another():
    async def act(stage):
        broker, topic, partition = await owned(stage)
        kinds = (SubscriptionType.FAILOVER, SHARED, SubscriptionType.EXCLUSIVE)
        for kind in kinds:
            consumer = await subscribed(topic, partition, "s", kind, link=ClientLink())
            for other in set(kinds) - {kind}:
                with pytest.raises(Refusal) as refused:
                    await subscribed(topic, partition, "s", other, link=ClientLink())
                assert refused.value.code is ServerError.CONSUMER_BUSY
            topic.subscriptions.leave("s", consumer)
        await broker.close()

    play(act)
