"""Which consumers of a partition get its messages."""

from typing import NamedTuple

import pytest

from spark_ledger.broker.dispatch.policies import KeyShared, may_get, policy_of
from spark_ledger.broker.wire.commands import SubscriptionType

EXCLUSIVE = policy_of(SubscriptionType.EXCLUSIVE)
FAILOVER = policy_of(SubscriptionType.FAILOVER)


class Receiver(NamedTuple):
    name: str
    priority: int = 0
    permits: int = 0


A, B, C = Receiver("a"), Receiver("b"), Receiver("c")


def test_the_only_consumer_of_an_exclusive_subscription_is_active_and_keeps_others_out():
    assert EXCLUSIVE.active([], 0) is None
    assert EXCLUSIVE.active([A], 3) is A
    assert EXCLUSIVE.admits([]) and not EXCLUSIVE.admits([A])


@pytest.mark.parametrize(
    ("consumers", "active"),
    [
        ([], [None, None, None]),
        ([B], [B, B, B]),
        ([B, A], [A, B, A]),  # whichever came first
        ([C, B, A], [A, B, C]),
        ([C, B, Receiver("a", 1)], [B, C, B]),
        ([Receiver("x", 2), Receiver("y", 1)], [("y", 1, 0)] * 3),
    ],
)
def test_partitions_of_a_failover_subscription_are_shared_out_by_priority_then_name(
    consumers, active
):
    assert [FAILOVER.active(consumers, partition) for partition in range(3)] == active
    assert FAILOVER.admits(consumers)


def test_only_the_active_consumer_gets_a_batch_and_only_with_a_permit_left():
    ready, overdrawn = Receiver("a", permits=1), Receiver("a", permits=-2)
    assert may_get(ready, ready)
    assert not may_get(ready, B)
    assert not may_get(ready, None)
    assert not may_get(A, A)
    assert not may_get(overdrawn, overdrawn)


def test_consumers_of_a_failover_subscription_alone_hear_which_of_them_is_active():
    assert FAILOVER.announces and not EXCLUSIVE.announces


def test_key_shared_subscriptions_differ_by_their_rules():
    rules = [KeyShared(), KeyShared(sticky=True), KeyShared(in_order=False)]
    policies = [policy_of(SubscriptionType.KEY_SHARED, keys) for keys in rules]
    assert policies == rules
    assert policy_of(SubscriptionType.KEY_SHARED) == policies[0] != policies[1] != policies[2]
    choices = [policy.choice() for policy in policies + policies]
    assert len(set(map(id, choices))) == 6
