"""A consumer of an owned topic, for tests of the position and the users of a subscription."""

from spark_ledger.broker.dispatch.dispatcher import Consumer
from spark_ledger.broker.dispatch.subscriptions import Wish
from spark_ledger.broker.wire.commands import SubscriptionType


async def subscribed(
    topic, partition, name="s", kind=SubscriptionType.EXCLUSIVE, *, link=None, end=lambda: None
):
    """One that joins the durable subscription from the earliest offset on; it takes no messages."""
    return await topic.subscriptions.subscribe(
        partition.log,
        name,
        Wish(kind),
        durable=True,
        start=None,
        make=lambda dispatcher: Consumer(link, 1, "c", 0, dispatcher, lambda _: end()),
        earliest=True,
    )
