"""Limits that policies give: producers, consumers and subscriptions beyond them are refused."""

import asyncio
from dataclasses import dataclass

import pytest

from spark_ledger import errors
from spark_ledger.broker import limits
from spark_ledger.broker.dispatch.shared_dispatcher import SharingRules
from spark_ledger.broker.dispatch.sharing import UnackedLimits
from spark_ledger.broker.dispatch.subscriptions import Subscription
from spark_ledger.broker.limits import SendLimits, SubscribeCounts
from spark_ledger.broker.log.topic_commits import RollLimits
from spark_ledger.broker.produce.admission import Admission
from spark_ledger.broker.serve.commands import refusal_of
from spark_ledger.broker.settings import BrokerSettings
from spark_ledger.broker.wire.commands import AccessMode, Refusal, ServerError, SubscriptionType
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata
from spark_ledger.topic.log.policies import TopicPolicies
from tests.kit.subscribing import subscribed
from tests.unit.spark_ledger.broker.connections import Partition, connected, sent
from tests.unit.spark_ledger.broker.consumers import EXCLUSIVE, Batches, consumer_of, settle, until
from tests.unit.spark_ledger.broker.consumers import play as play_consumers
from tests.unit.spark_ledger.broker.owned_topics import ClientLink, listed, owned
from tests.unit.spark_ledger.topic.stage import play

SHARED = SubscriptionType.SHARED


@dataclass(eq=False)
class Candidate:
    name: str
    mode: AccessMode = AccessMode.SHARED
    epoch: int = 0
    topic_epoch: int = 0
    connection: object = None


def test_a_producer_beyond_the_limit_is_refused_and_one_that_comes_back_is_not():
    admission = Admission("t", 1)
    assert admission.admit(Candidate("a"), 2).may_send
    assert admission.admit(Candidate("b"), 2).may_send
    with pytest.raises(Refusal, match="reached max producers limit: 2") as refused:
        admission.admit(Candidate("c"), 2)
    assert refused.value.code is ServerError.PRODUCER_BUSY
    assert [one.name for one in admission.present] == ["a", "b"]
    again = Candidate("b", epoch=1)
    assert len(admission.replace(again)) == 1
    assert admission.admit(again, 2).may_send
    fencing = Candidate("f", AccessMode.EXCLUSIVE_WITH_FENCING)
    assert admission.admit(fencing, 1).may_send
    assert admission.admit(Candidate("w", AccessMode.WAIT_FOR_EXCLUSIVE), 1).may_send is False


@pytest.mark.parametrize(
    ("policies", "refused_by", "words"),
    [
        (TopicPolicies(consumers_max=2), ["s", "other"], "Topic reached max consumers limit: 2"),
        (TopicPolicies(subscription_consumers_max=2), ["s"], "Subscription reached max consumers"),
    ],
)
def test_a_consumer_beyond_the_limit_is_refused_and_the_others_stay(policies, refused_by, words):
    async def act(stage):
        broker, topic, partition = await owned(stage)

        async def join(name):
            return await subscribed(
                topic, partition, name, SHARED, link=ClientLink(), policies=policies
            )

        consumers = [await join("s"), await join("s")]
        for name in ("s", "other"):
            if name in refused_by:
                with pytest.raises(Refusal, match=words) as refused:
                    await join(name)
                assert refused.value.code is ServerError.CONSUMER_BUSY
            else:
                topic.subscriptions.leave(name, await join(name))
        assert topic.subscriptions.named("s").consumers == consumers
        topic.subscriptions.leave("s", consumers.pop())
        consumers.append(await join("s"))
        for consumer in consumers:
            topic.subscriptions.leave("s", consumer)
        await broker.close()

    play(act)


def test_clients_make_no_subscription_that_policies_do_not_allow():
    async def act(stage):
        broker, topic, partition = await owned(stage)
        await topic.subscriptions.make("one")
        full, none = (
            TopicPolicies(subscriptions_max=1),
            TopicPolicies(auto_create_subscriptions=False),
        )
        for policies, code in (
            (full, ServerError.NOT_ALLOWED),
            (none, ServerError.SUBSCRIPTION_NOT_FOUND),
        ):
            for make in (
                subscribed(topic, partition, "two", link=ClientLink(), policies=policies),
                topic.subscriptions.make("two"),
            ):
                with pytest.raises((Refusal, errors.SubscriptionNotFound)) as refused:
                    await make
                assert refusal_of(refused.value).code is code
            link = ClientLink()
            consumer = await subscribed(topic, partition, "one", link=link, policies=policies)
            topic.subscriptions.leave("one", consumer)
            reader = await subscribed(
                topic, partition, "reader", link=link, durable=False, policies=policies
            )
            topic.subscriptions.leave("reader", reader)
        assert await listed(stage) == ["one"]
        await broker.close()

    play(act)


def test_limits_of_unacknowledged_messages_are_those_of_the_topic_or_of_the_broker():
    broker = BrokerSettings(consumer_unacked_max=10, subscription_unacked_max=20)
    assert UnackedLimits.of(broker, TopicPolicies()) == (10, 20)
    assert UnackedLimits.of(broker, TopicPolicies(consumer_unacked_max=0)) == (0, 20)
    assert UnackedLimits.of(broker, TopicPolicies(subscription_unacked_max=5)) == (10, 5)


def test_a_changed_limit_of_unacknowledged_messages_counts_once_a_consumer_joins():
    async def act(stage):
        broker, topic, partition = await owned(stage)
        first = await subscribed(topic, partition, "s", SHARED, link=ClientLink())
        assert first.dispatcher.sharing.unacked.limits == (50_000, 200_000)
        limited = TopicPolicies(consumer_unacked_max=3, subscription_unacked_max=0)
        second = await subscribed(
            topic, partition, "s", SHARED, link=ClientLink(), policies=limited
        )
        assert second.dispatcher is first.dispatcher
        assert first.dispatcher.sharing.unacked.limits == (3, 0)
        for consumer in (first, second):
            topic.subscriptions.leave("s", consumer)
        await broker.close()

    play(act)


# -- rates -----------------------------------------------------------------------------------------


class Counted(Batches):
    def came(self):
        return self.end, 0


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED])
@pytest.mark.parametrize("policy", ["dispatch_rate", "subscription_dispatch_rate"])
@pytest.mark.parametrize("sizes", [(1,) * 12, (2,) * 6], ids=["lone", "batches"])
def test_consumers_get_no_more_than_the_rate_and_all_of_it_in_time(kind, policy, sizes):
    async def act(made):
        rules, partition = SharingRules(), Counted(*sizes)
        rules.rates.policies = TopicPolicies(**{policy: "4 messages, 1 s"})
        subscriptions = [Subscription(name, kind, None, rules) for name in "ab"]
        made += [consumer_of(one, partition) for one in subscriptions]
        for one in made:
            one.dispatcher.flow(one, 100)
        await settle()

        def count():
            per_batch = sizes[0]
            return [per_batch * len(one.link.messages) for one in made]

        first = count()
        if policy == "dispatch_rate":  # both subscriptions have one allowance
            assert 4 <= sum(first) <= 8
        else:
            assert first == [4, 4]
        began_s = asyncio.get_running_loop().time()
        await until(lambda: count() == [12, 12])
        took_s = asyncio.get_running_loop().time() - began_s
        rest = sum(first) if policy == "dispatch_rate" else first[0]
        assert took_s > ((24 if policy == "dispatch_rate" else 12) - rest - 2) / 4 - 0.3

    play_consumers(act)


def test_a_rate_that_is_taken_back_counts_no_more_from_the_next_consumer_on():
    async def act(made):
        rules, partition = SharingRules(), Counted(*(1,) * 50)
        rules.rates.policies = TopicPolicies(dispatch_rate="4 messages, 3600 s")
        subscription = Subscription("s", SHARED, None, rules)
        made.append(consumer_of(subscription, partition))
        made[0].dispatcher.flow(made[0], 100)
        await settle()
        assert len(made[0].link.messages) == 4
        rules.rates.policies = TopicPolicies()
        made.append(consumer_of(subscription, partition, "b"))
        made[0].dispatcher.flow(made[0], 1)
        await until(lambda: sum(len(one.link.messages) for one in made) == 50)

    play_consumers(act)


def test_a_consumer_subscribes_no_more_often_than_it_may_and_others_are_counted_apart(monkeypatch):
    counts, policies = SubscribeCounts(), TopicPolicies(subscribe_rate="2 requests, 30 s")
    for now_s in (0, 20):
        counts.admit("a", policies, now_s)
    for now_s in (20, 29):
        with pytest.raises(Refusal, match="2 requests, 30 s") as refused:
            counts.admit("a", policies, now_s)
        assert refused.value.code is ServerError.NOT_ALLOWED
    counts.admit("b", policies, 29)
    counts.admit("a", TopicPolicies(), 29)
    for _ in range(2):
        counts.admit("a", policies, 30)
    monkeypatch.setattr(limits, "SUBSCRIBERS_MAX", 3)
    for number in (0, 1, 2, 3, 0, 0):  # the first is forgotten, so it may come twice again
        counts.admit(number, policies, 31)
    with pytest.raises(Refusal):
        counts.admit(0, policies, 31)


def test_a_connection_rests_while_the_rate_of_a_partition_lets_it_send_no_more():
    async def act():
        async with connected() as (connection, _):
            partition = Partition(deduplication=False)
            partition.produce(connection, 1)
            now_s = asyncio.get_running_loop().time()
            partition.send_limits.change(TopicPolicies(publish_rate="4 messages"), now_s)
            connection.data_received(b"".join(sent(1, number) for number in range(3)))
            assert connection.is_read
            connection.data_received(b"".join(sent(1, number) for number in range(3, 6)))
            assert not connection.is_read
            for run in partition.appended:
                run.stored(0)
            assert not connection.is_read, "a receipt does not end the rest"
            await until(lambda: connection.is_read)
            assert asyncio.get_running_loop().time() - now_s > 0.5
            connection.connection_lost(None)

    asyncio.run(act())


def test_a_connection_that_rests_for_hours_is_read_soon_after_the_rate_is_lifted():
    async def act():
        async with connected() as (connection, _):
            partition, time = Partition(deduplication=False), asyncio.get_running_loop().time
            partition.produce(connection, 1)
            partition.send_limits.change(TopicPolicies(publish_rate="1 bytes"), time())
            connection.data_received(b"".join(sent(1, number) for number in range(3)))
            for run in partition.appended:
                run.stored(0)
            assert not connection.is_read
            partition.send_limits.change(TopicPolicies(), time())
            await until(lambda: connection.is_read)
            connection.connection_lost(None)

    asyncio.run(act())


def test_a_message_that_is_to_wait_for_longer_than_the_policy_is_refused():
    send_limits = SendLimits()
    send_limits.change(TopicPolicies(delay_ms_max=1000), 0)
    for delay_ms, is_refused in ((1000, False), (1001, True)):
        metadata = MessageMetadata(publish_time=5, deliver_at_time=5 + delay_ms)
        assert (send_limits.fault_of(metadata) is not None) is is_refused
    send_limits.change(TopicPolicies(), 0)
    assert send_limits.fault_of(MessageMetadata(deliver_at_time=2**50)) is None


def test_the_next_owner_reads_no_more_entries_than_the_policy_says():
    def entries(policies):
        return RollLimits.of(BrokerSettings(roll_entries_read=500), policies).entries_read

    assert entries(TopicPolicies()) == 500
    assert entries(TopicPolicies(deduplication_entries_max=100)) == 100
    assert entries(TopicPolicies(deduplication_entries_max=1000)) == 500
