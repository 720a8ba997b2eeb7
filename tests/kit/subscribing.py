"""A consumer of an owned topic, for tests of the position and the users of a subscription."""

from spark_ledger.broker.dispatch.dispatcher import Consumer
from spark_ledger.broker.dispatch.sharing import UnackedLimits
from spark_ledger.broker.dispatch.subscriptions import SubscribeRequest
from spark_ledger.broker.settings import DEFAULTS
from spark_ledger.broker.wire.commands import SubscriptionType
from spark_ledger.topic.log.policies import TopicPolicies

NO_LIMITS = TopicPolicies()


async def start_of_topic():
    return 0


async def subscribed(
    topic,
    partition,
    name="s",
    kind=SubscriptionType.EXCLUSIVE,
    *,
    link=None,
    end=lambda: None,
    durable=True,
    policies=NO_LIMITS,
):
    """One that joins the subscription from the earliest offset on; it takes no messages."""
    topic.subscriptions.policies = policies
    topic.subscriptions.sharing.limits = UnackedLimits.of(DEFAULTS, policies)
    return await topic.subscriptions.subscribe(
        partition.log,
        name,
        SubscribeRequest(kind),
        durable=durable,
        start=start_of_topic,
        make=lambda dispatcher: Consumer(link, 1, "c", 0, dispatcher, lambda _: end()),
        earliest=True,
    )
