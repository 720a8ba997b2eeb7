"""Which partitions are over their backlog quota, by which subscription."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.subscription.backlog_quota import (
    LagOfSubscription,
    exceeded,
    has_quota,
    over_quota,
    to_evict,
)
from spark_ledger.topic.subscription.lag import PartitionLag
from spark_ledger.topic.subscription.records import SubscriptionKind

NO_QUOTA = TopicPolicies()
QUERY, CONSUMER = SubscriptionKind.QUERY, SubscriptionKind.CONSUMER
LAGS = st.builds(
    lambda position, rows: PartitionLag(position, position + rows, rows, 10 * rows, 7 * rows),
    st.integers(0, 9),
    st.integers(0, 20),
)
SUBSCRIPTIONS = st.dictionaries(
    st.sampled_from("abc"),
    st.builds(
        LagOfSubscription,
        st.sampled_from(SubscriptionKind),
        st.dictionaries(st.integers(0, 2), LAGS),
    ),
)


def test_without_a_quota_no_backlog_is_too_large():
    assert not has_quota(NO_QUOTA)
    assert exceeded(PartitionLag(0, 10**9, 10**9, 10**15, 10**15), NO_QUOTA) == ""


def test_a_backlog_at_its_quota_is_not_over_it_and_the_text_has_the_value():
    quota = replace(NO_QUOTA, backlog_bytes_max=100, backlog_ms_max=50)
    assert exceeded(PartitionLag(0, 10, 10, 100, 50), quota) == ""
    assert exceeded(PartitionLag(0, 10, 10, 101, 50), quota).startswith("backlog_bytes_max=100")
    assert exceeded(PartitionLag(0, 10, 10, 100, 51), quota).startswith("backlog_ms_max=50")


def test_a_subscription_that_read_all_rows_has_no_age():
    quota = replace(NO_QUOTA, backlog_ms_max=50)
    assert exceeded(PartitionLag(10, 10, 0, 0, 900), quota) == ""


@given(SUBSCRIPTIONS, st.integers(1, 150))
def test_of_a_partition_over_its_quota_the_slowest_subscription_is_named(lags, bytes_max):
    quota = replace(NO_QUOTA, backlog_bytes_max=bytes_max)
    over = {
        (lag.position, name, partition)
        for name, subscription in lags.items()
        for partition, lag in subscription.lags.items()
        if lag.bytes > bytes_max
    }
    expected = {
        partition: min(place for place in over if place[2] == partition)[1]
        for _, _, partition in over
    }
    assert {p: backlog.subscription for p, backlog in over_quota(lags, quota).items()} == expected


@given(SUBSCRIPTIONS, st.integers(1, 150))
def test_no_query_is_evicted(lags, ms_max):
    quota = replace(NO_QUOTA, backlog_ms_max=ms_max)
    evicted = {(backlog.subscription, backlog.partition) for backlog in to_evict(lags, quota)}
    assert evicted == {
        (name, partition)
        for name, subscription in lags.items()
        if subscription.kind is CONSUMER
        for partition, lag in subscription.lags.items()
        if lag.millis > ms_max
    }
