"""Limits that policies give: producers, consumers and subscriptions beyond them are refused."""

from dataclasses import dataclass

import pytest

from spark_ledger import errors
from spark_ledger.broker.dispatch.sharing import UnackedLimits
from spark_ledger.broker.produce.admission import Admission
from spark_ledger.broker.serve.commands import refusal_of
from spark_ledger.broker.settings import BrokerSettings
from spark_ledger.broker.wire.commands import AccessMode, Refusal, ServerError, SubscriptionType
from spark_ledger.topic.log.policies import TopicPolicies
from tests.kit.subscribing import subscribed
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
