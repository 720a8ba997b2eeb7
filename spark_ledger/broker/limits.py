"""The limits that a topic's policies give to producers, consumers and subscriptions of clients.

Always true: a limit counts for the client that comes next. Those that are there stay. A changed
rate is one for all producers of a partition, or all consumers, from the next client on.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from spark_ledger import errors
from spark_ledger.broker.wire.commands import Refusal, ServerError
from spark_ledger.rates import Allowance, Rate
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.topics import TopicInfo

SUBSCRIBERS_MAX = 10_000
"""Of so many consumers of a topic a broker counts how often they subscribe."""


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
    if policies.subscriptions_max is not None:
        listed = await of.client.subscriptions.list(of.topic.id, unreadable={})
        check_count(policies, len(listed))


def check_count(policies: TopicPolicies, subscriptions: int) -> None:
    """Raises Refusal if the topic has no room for one more subscription."""
    most = policies.subscriptions_max
    if most is not None and subscriptions >= most:
        raise Refusal(
            ServerError.NOT_ALLOWED,
            f"Exceed the maximum number of subscriptions of the topic: {most}",
        )


class SubscribeCounts:
    """How often each consumer of a topic has subscribed in its present period."""

    def __init__(self) -> None:
        self._periods: dict[object, tuple[float, int]] = {}  # since when, and how often

    def admit(self, consumer: object, policies: TopicPolicies, now_s: float) -> None:
        """Count that the consumer subscribes. Raises Refusal if it does so too often."""
        rate = Rate.parse(policies.subscribe_rate)
        if rate is None or rate.requests is None:
            return
        since_s, count = self._periods.pop(consumer, (now_s, 0))
        if now_s >= since_s + rate.s:
            since_s, count = now_s, 0
        is_admitted = count < rate.requests
        self._periods[consumer] = since_s, count + is_admitted
        if len(self._periods) > SUBSCRIBERS_MAX:
            del self._periods[next(iter(self._periods))]
        if not is_admitted:
            raise Refusal(
                ServerError.NOT_ALLOWED,
                f"Subscribe limited by subscribe rate limit per consumer: {rate}",
            )


class SendLimits:
    """What producers of one partition may send: at which rate, how late it may be due after its
    publish time, and in batches of how many bytes."""

    def __init__(self) -> None:
        self.rate = Allowance()
        self.delay_ms_max: int | None = None
        self.batch_bytes_max: int | None = None

    def fault_of(self, metadata: Any) -> str | None:
        """Why a message with this metadata is refused; None: it is not."""
        longest_ms, delay_ms = self.delay_ms_max, metadata.deliver_at_time - metadata.publish_time
        if longest_ms is None or delay_ms <= longest_ms:
            return None
        return f"Exceeds max allowed delivery delay of {self.delay_ms_max} milliseconds"

    def change(self, policies: TopicPolicies, now_s: float) -> None:
        self.rate.change(Rate.parse(policies.publish_rate), now_s)
        self.delay_ms_max = policies.delay_ms_max
        self.batch_bytes_max = policies.message_bytes_max


class ReadPartition(Protocol):
    @property
    def number(self) -> int: ...

    def came(self) -> tuple[int, int]:
        """How many messages and bytes came so far."""


class Throttled(Protocol):
    """A dispatcher. Its last allowance is its own; another is that of all dispatchers of the
    partition."""

    allowances: Sequence[Allowance]

    @property
    def partition(self) -> ReadPartition: ...


def throttle_s(allowances: Sequence[Allowance]) -> float:
    """For how long they let no more messages pass."""
    now_s = asyncio.get_running_loop().time() if allowances else 0.0
    return max((allowance.wait_s(now_s) for allowance in allowances), default=0.0)


class DispatchRates:
    """The rates at which consumers of a topic get messages."""

    def __init__(self) -> None:
        self.policies = TopicPolicies()
        self._partitions: dict[int, tuple[ReadPartition, Allowance]] = {}

    def apply(self, dispatcher: Throttled) -> None:
        rates = [Rate.parse(self.policies.dispatch_rate)]
        rates.append(Rate.parse(self.policies.subscription_dispatch_rate))
        if not any(rates) and not dispatcher.allowances:
            return
        partition, now_s = dispatcher.partition, asyncio.get_running_loop().time()
        if not dispatcher.allowances:
            shared = self._partitions.get(partition.number)
            if shared is None or shared[0] is not partition:
                shared = partition, Allowance(partition.came)
                self._partitions[partition.number] = shared
            dispatcher.allowances = (shared[1], Allowance(partition.came))
        for allowance, rate in zip(dispatcher.allowances, rates, strict=True):
            allowance.change(rate, now_s)
        if not any(rates):
            dispatcher.allowances = ()
