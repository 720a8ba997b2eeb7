"""A subscription of a topic at its broker: a dispatcher for each partition, and its cursor.

Always true: a durable subscription is a cursor of the topic layer, of kind CONSUMER:
acknowledging moves it in the background, a second apart at most, and the last consumer that leaves
writes where it is. The durable position is never beyond the first offset that is not acknowledged,
and only a seek moves it back. All consumers of a subscription have one type.
"""

from spark_ledger.broker.dispatch.dispatcher import Consumer, Dispatcher
from spark_ledger.broker.dispatch.policies import POLICIES
from spark_ledger.broker.owner.partition import Partition
from spark_ledger.broker.wire.commands import Refusal, ServerError, SubscriptionType
from spark_ledger.topic.subscription.consumer_cursors import ConsumerCursor


class Subscription:
    """By name, while consumers of this broker have it. `cursor` None: it is not durable."""

    def __init__(self, name: str, kind: SubscriptionType, cursor: ConsumerCursor | None) -> None:
        self.name = name
        self.kind = kind
        self.cursor = cursor
        self._dispatchers: dict[int, Dispatcher] = {}

    @property
    def durable(self) -> bool:
        return self.cursor is not None

    @property
    def used(self) -> bool:
        return any(dispatcher.consumers for dispatcher in self._dispatchers.values())

    @property
    def sought(self) -> bool:
        """Whether a seek has sent consumers away that are not back."""
        return any(dispatcher.sought for dispatcher in self._dispatchers.values())

    @property
    def consumers(self) -> list[Consumer]:
        dispatchers = self._dispatchers.values()
        return [consumer for dispatcher in dispatchers for consumer in dispatcher.consumers]

    def has_dispatcher(self, partition: int) -> bool:
        return partition in self._dispatchers

    def leave_partition(self, partition: int) -> list[Consumer]:
        """Forget the position in that partition, which another broker has from now on; returns the
        partition's consumers."""
        dispatcher = self._dispatchers.pop(partition, None)
        return [] if dispatcher is None else list(dispatcher.consumers)

    def dispatcher(self, partition: Partition, mark: int) -> Dispatcher:
        """The partition's; new, or of a reader that comes, it is at `mark`."""
        dispatcher = self._dispatchers.get(partition.number)
        left = dispatcher is not None and not dispatcher.sought and not dispatcher.consumers
        if dispatcher is None or (left and not self.durable):
            dispatcher = Dispatcher(partition, POLICIES[self.kind], mark)
            self._dispatchers[partition.number] = dispatcher
        return dispatcher

    def before(self, kind: SubscriptionType, partition: int) -> list[Consumer]:
        """The consumers because of which one more cannot come, or is not the active one."""
        if kind is not self.kind:
            return self.consumers
        dispatcher = self._dispatchers.get(partition)
        active = None if dispatcher is None else dispatcher.active
        return [] if active is None else [active]

    def check(self, kind: SubscriptionType, partition: int) -> None:
        """Whether one more consumer may come. Raises Refusal."""
        if self.used and kind is not self.kind:
            raise Refusal(
                ServerError.CONSUMER_BUSY,
                f"subscription '{self.name}' is used as {self.kind.name}, not {kind.name}",
            )
        dispatcher = self._dispatchers.get(partition)
        if dispatcher is not None and not dispatcher.admits():
            raise Refusal(
                ServerError.CONSUMER_BUSY,
                f"subscription '{self.name}' has an exclusive consumer already",
            )

    def moved(self, dispatcher: Dispatcher) -> None:
        """Make the dispatcher's position durable. Raises as ConsumerCursor.check."""
        if self.cursor is not None:
            self.cursor.check()
            self.cursor.advance(dispatcher.partition.number, dispatcher.acks.durable)

    def seek(self, dispatcher: Dispatcher, offset: int) -> None:
        """Put it to the offset in the dispatcher's partition; its consumers there are sent away."""
        dispatcher.seek(offset)
        self.moved(dispatcher)
        for consumer in list(dispatcher.consumers):
            consumer.end()
