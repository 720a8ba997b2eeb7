"""Who uses a subscription: a consumer that unsubscribes at the new owner of its partition, of which
the one before has not heard, and one that comes while the subscription is to be released."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.kit.subscribing import subscribed
from tests.unit.spark_ledger.broker.two_brokers import PARTITIONS, Brokers, named
from tests.unit.spark_ledger.topic.stage import play

LINK = SimpleNamespace(send=lambda frame: None)  # of one client, to all brokers


async def consumer(broker, number):
    await broker.lookup(named(number), authoritative=True)
    topic, partition = await broker.partition(named(number))
    return topic, await subscribed(topic, partition, link=LINK)


def hears_nothing(broker):
    """As where every watch is late: what is read every minute is not read yet."""
    owners = broker.ownership.owners

    async def unwatched(topic_id, *, fresh=False, watch=None):
        return await owners(topic_id, fresh=fresh)

    broker.ownership.owners = unwatched


async def given(a, brokers, count):
    """Broker b, and the partitions that it has by the record of owners: those before `count`."""
    b = await brokers.new("b")
    for number in range(count):
        assert await a.ownership.pass_on(brokers.stage.topic.id, number)
    return b, range(count)


async def listed(stage):
    return [info.name for info in await stage.client.subscriptions.list(stage.topic.id)]


@pytest.mark.parametrize("keeps", [True, False])
def test_a_consumer_that_unsubscribes_at_the_new_owner_is_not_kept_by_the_owner_before(keeps):
    async def act(stage):
        brokers = Brokers(stage)
        a = await brokers.new("a")
        hears_nothing(a)
        consumers = {number: await consumer(a, number) for number in range(PARTITIONS)}
        (topic, _) = consumers[0]
        b, moved = await given(a, brokers, PARTITIONS // 2 if keeps else PARTITIONS)
        at_b = [await consumer(b, number) for number in moved]
        for there, made in at_b:
            await there.subscriptions.unsubscribe("s", made)
        if keeps:
            assert await listed(stage) == ["s"]
            for number in range(len(moved), PARTITIONS):
                await topic.subscriptions.unsubscribe("s", consumers[number][1])
        assert await listed(stage) == []
        await asyncio.sleep(30)
        assert await listed(stage) == []
        await a.close()
        await b.close()

    play(act, partitions=PARTITIONS)


def test_a_late_failure_of_a_subscription_leaves_the_one_that_was_opened_after_it():
    async def act(stage):
        a = await Brokers(stage).new("a")
        topic, first = await consumer(a, 0)
        failed = topic.subscriptions.named("s").cursor.on_failure
        await topic.subscriptions.unsubscribe("s", first)
        _, again = await consumer(a, 0)
        failed()
        assert topic.subscriptions.named("s").consumers == [again]
        await a.close()

    play(act)


def test_a_consumer_whose_subscription_has_failed_is_sent_nothing_more():
    async def act(stage):
        a = await Brokers(stage).new("a")
        topic, made = await consumer(a, 0)
        sending = made.sending
        made.on_end = lambda ended: topic.subscriptions.leave("s", ended)
        topic.subscriptions.named("s").cursor.on_failure()
        await asyncio.sleep(1)
        assert sending.cancelled()
        assert made.dispatcher.active is None
        await a.close()

    play(act)


@pytest.mark.parametrize("durable", [True, False])
def test_a_subscription_without_consumers_counts_its_gaps_alone_and_only_if_it_stays(durable):
    async def act(stage):
        a = await Brokers(stage).new("a")
        await a.lookup(named(0), authoritative=True)
        topic, partition = await a.partition(named(0))
        made = await subscribed(topic, partition, link=LINK, durable=durable)
        for offset in range(3, 100_000, 3):
            made.dispatcher.acks.add(offset, offset + 1)
        budget = topic.subscriptions.sharing.ack_budget
        in_use_bytes = budget.bytes
        assert in_use_bytes > 0
        topic.subscriptions.leave("s", made)
        await asyncio.sleep(3)
        assert len(budget.sets) == durable
        assert 0 < budget.bytes <= in_use_bytes if durable else budget.bytes == 0
        await a.close()

    play(act)


def test_a_subscription_that_is_used_again_while_its_release_waits_is_not_released():
    async def act(stage):
        a = await Brokers(stage).new("a")
        topic, first = await consumer(a, 0)
        await a.lookup(named(1), authoritative=True)
        _, partition = await a.partition(named(1))
        topic.subscriptions.leave("s", first)  # its release begins while the next one is let in
        again = await subscribed(topic, partition, link=LINK)
        await asyncio.sleep(3)
        again.dispatcher.acks.add_up_to(7)
        again.dispatcher.save_position()
        await asyncio.sleep(3)
        positions = await stage.client.subscriptions.positions(stage.topic.id, "s")
        assert positions[1] == 7
        await a.close()

    play(act, partitions=PARTITIONS)
