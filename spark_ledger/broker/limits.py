"""The limits that a topic's policies give to consumers and subscriptions of clients.

Always true: a limit counts for the client that comes next. Those that are there stay.
"""

from collections.abc import Iterable
from typing import Protocol

from spark_ledger import errors
from spark_ledger.broker.wire.commands import Refusal, ServerError
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.topics import TopicInfo


class CountedSubscription(Protocol):
    def count_in(self, partition: int) -> int:
        """How many consumers it has in the partition."""


class ClientsTopic(Protocol):
    @property
    def client(self) -> TopicClient: ...

    @property
    def topic(self) -> TopicInfo: ...


def check_room(
    policies: TopicPolicies,
    partition: int,
    own: CountedSubscription,
    subscriptions: Iterable[CountedSubscription],
) -> None:
    """Raises Refusal if no further consumer of the subscription `own` may join in the partition;
    `subscriptions` are all of the topic."""
    for what, most, counted in (
        ("Subscription", policies.subscription_consumers_max, [own]),
        ("Topic", policies.consumers_max, subscriptions),
    ):
        if most is not None and sum(each.count_in(partition) for each in counted) >= most:
            raise Refusal(ServerError.CONSUMER_BUSY, f"{what} reached max consumers limit: {most}")


async def check_may_be_made(of: ClientsTopic, policies: TopicPolicies, name: str) -> None:
    """Raises errors.SubscriptionNotFound, Refusal if clients may not make the topic's subscription
    of this name; errors of the topic layer."""
    if not policies.auto_create_subscriptions:
        raise errors.SubscriptionNotFound(
            f"there is no subscription '{name}', and clients make none: the policy"
            " auto_create_subscriptions",
            subscription=name,
        )
    most, listed = policies.subscriptions_max, of.client.subscriptions.list
    if most is not None and len(await listed(of.topic.id, unreadable={})) >= most:
        raise Refusal(
            ServerError.NOT_ALLOWED,
            f"Exceed the maximum number of subscriptions of the topic: {most}",
        )
