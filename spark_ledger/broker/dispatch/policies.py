"""Which consumers of a partition get its messages, by the type of their subscription. Pure.

Always true: a policy decides by two things alone: the present consumers, in the order in which they
came, and the partition's number. A policy remembers nothing. Exclusive and Failover give all
messages to one consumer, the active consumer; permits of other consumers do not count. Shared and
Key_Shared have no active consumer: sharing.py and key_shared.py decide which consumer gets a
message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from spark_ledger.broker.dispatch.key_shared import KeyChoice
from spark_ledger.broker.dispatch.round_robin import RoundRobin
from spark_ledger.broker.dispatch.sharing import Member, ReceiverChoice
from spark_ledger.broker.dispatch.slot_owners import EvenSlots, SlotOwners, StickyRanges
from spark_ledger.broker.wire.commands import SubscriptionType


class Receiver(Protocol):
    """A consumer, as policies judge it. `permits`: how many more messages its client takes."""

    name: str
    priority: int
    permits: int


C = TypeVar("C", bound=Receiver)


class Policy:
    """The base of all policies: any number of consumers, none of them active, and no choice."""

    announces = False
    """Whether the broker announces to each consumer whether it is active."""

    def admits(self, consumers: Sequence[Receiver]) -> bool:
        """Whether one more consumer may join these."""
        return True

    def active(self, consumers: Sequence[C], partition: int) -> C | None:
        """The consumer that gets all messages; None if there is no consumer, or several consumers
        share them."""
        return None

    def choice(self) -> ReceiverChoice | None:
        """What decides which consumer gets a part; None for a policy with an active consumer."""
        return None


class Exclusive(Policy):
    """One consumer at a time. A reader's subscription has this policy too."""

    def admits(self, consumers: Sequence[Receiver]) -> bool:
        return not consumers

    def active(self, consumers: Sequence[C], partition: int) -> C | None:
        return consumers[0] if consumers else None


class Failover(Policy):
    """The n consumers with the best priority (the lowest number) are sorted by name; the consumer
    at index `partition mod n` is active. So these consumers share the partitions."""

    announces = True

    def active(self, consumers: Sequence[C], partition: int) -> C | None:
        ordered = sorted(consumers, key=lambda consumer: (consumer.priority, consumer.name))
        best = [consumer for consumer in ordered if consumer.priority == ordered[0].priority]
        return best[partition % len(best)] if best else None


class Shared(Policy):
    """All consumers get messages, in turns."""

    def choice(self) -> ReceiverChoice | None:
        return RoundRobin()


@dataclass(frozen=True)
class KeyShared(Policy):
    """Each consumer gets the messages of its keys. `sticky`: each consumer names the ranges of
    slots (of keys) that it gets. `in_order`: the messages of a key are sent in their order."""

    sticky: bool = False
    in_order: bool = True

    def choice(self) -> ReceiverChoice | None:
        owners: SlotOwners[Member] = StickyRanges() if self.sticky else EvenSlots()
        return KeyChoice(owners, in_order=self.in_order)


def may_get(consumer: C, active: C | None) -> bool:
    """Whether the consumer may get one more batch. A batch is sent whole, so the consumer's permits
    can fall below zero."""
    return consumer is active and consumer.permits > 0


_POLICIES: Mapping[SubscriptionType, Policy] = {
    SubscriptionType.EXCLUSIVE: Exclusive(),
    SubscriptionType.FAILOVER: Failover(),
    SubscriptionType.SHARED: Shared(),
}


def policy_of(kind: SubscriptionType, keys: KeyShared | None = None) -> Policy:
    """The policy of a type; `keys` are the rules of a Key_Shared subscription."""
    if kind is SubscriptionType.KEY_SHARED:
        return keys or KeyShared()
    return _POLICIES[kind]
