"""Whether the subscriptions of a topic leave more unread than its policies allow, and which
subscription an eviction moves. Pure.

Always true: a backlog is judged for each partition by itself, as in Pulsar; its bytes and its age
are those of the slowest subscription. The age is the time since the owner stored the first unread
message (for a row of Spark: since its commit); the time that a producer gave has no effect. A topic
without a subscription has no backlog. An eviction never moves a query's subscription.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.subscription.lag import PartitionLag
from spark_ledger.topic.subscription.records import SubscriptionKind

EVICTION = "eviction"
"""The value of `on_backlog` with which a topic takes new rows, and the slowest subscription is
moved."""
KEPT_OF_QUOTA = 0.9
"""The part of the quota that an eviction leaves unread."""


@dataclass(frozen=True, slots=True)
class LargeBacklog:
    """What one subscription leaves unread in a partition that is over its quota. `what`: the
    exceeded policy with its value, for an error's text."""

    subscription: str
    partition: int
    lag: PartitionLag
    what: str

    def text(self, topic: str) -> str:
        return (
            f"partition {self.partition} of topic {topic} is over its quota {self.what} by"
            f" subscription '{self.subscription}'"
        )


@dataclass(frozen=True, slots=True)
class LagOfSubscription:
    """How far a subscription is behind the end, by partition."""

    kind: SubscriptionKind
    lags: Mapping[int, PartitionLag]


def partition_title(number: int) -> str:
    return f"partition {number}"


def subscription_title(name: str) -> str:
    return f"subscription '{name}'"


def has_quota(policies: TopicPolicies) -> bool:
    return policies.backlog_bytes_max is not None or policies.backlog_ms_max is not None


def exceeded(lag: PartitionLag, policies: TopicPolicies) -> str:
    """The policy that the lag exceeds, with its value; "" if the lag exceeds neither policy."""
    bytes_max, ms_max = policies.backlog_bytes_max, policies.backlog_ms_max
    if bytes_max is not None and lag.bytes > bytes_max:
        return f"backlog_bytes_max={bytes_max}: {lag.bytes} bytes are not consumed"
    if ms_max is not None and lag.rows and lag.millis > ms_max:
        return f"backlog_ms_max={ms_max}: its first unread message is {lag.millis} ms old"
    return ""


def over_quota(
    lags: Mapping[str, LagOfSubscription], policies: TopicPolicies
) -> dict[int, LargeBacklog]:
    """The partitions that are over their quota, each with the slowest subscription."""
    slowest: dict[int, LargeBacklog] = {}
    for name, subscription in sorted(lags.items()):
        for partition, lag in subscription.lags.items():
            what = exceeded(lag, policies)
            before = slowest.get(partition)
            if what and (before is None or lag.position < before.lag.position):
                slowest[partition] = LargeBacklog(name, partition, lag, what)
    return slowest


def to_evict(lags: Mapping[str, LagOfSubscription], policies: TopicPolicies) -> list[LargeBacklog]:
    """All backlogs of consumers' subscriptions that are over the quota. An eviction moves each such
    subscription forward until KEPT_OF_QUOTA is left unread."""
    return [
        LargeBacklog(name, partition, lag, what)
        for name, subscription in sorted(lags.items())
        if subscription.kind is SubscriptionKind.CONSUMER
        for partition, lag in sorted(subscription.lags.items())
        if (what := exceeded(lag, policies))
    ]
