"""The acknowledgements of a topic's partitions that one broker owns. The broker takes over those of
a partition when the partition's first consumer comes.

Always true: a partition has one PartitionAcks here, made in the broker's present epoch of the
partition. A PartitionAcks of an earlier epoch writes nothing more, and so does one that the broker
left while it took the acknowledgements over.
"""

import asyncio
from collections.abc import Callable

from spark_ledger import errors
from spark_ledger.async_tasks import SharedTasks
from spark_ledger.topic.acks.asking import OwnedAcks
from spark_ledger.topic.acks.context import AckContext
from spark_ledger.topic.acks.partition_acks import PartitionAcks


class TopicAcks:
    """The acknowledgements of the partitions of a topic that this broker owns. `on_end` is called
    once the broker no longer has the topic."""

    def __init__(self, context: AckContext, on_end: Callable[["TopicAcks"], None]) -> None:
        self._context = context
        self._on_end = on_end
        self._open = SharedTasks[int, PartitionAcks](keep=True)

    async def of(self, partition: int, epoch: int) -> PartitionAcks:
        """The acknowledgements of the partition, taken over in this epoch of the owner. Raises as
        PartitionAcks.opened."""
        while True:
            acks = await self._open.result(
                partition, lambda: PartitionAcks.opened(self._context, partition, epoch)
            )
            if self._open.kept(partition) is not acks:  # left while it was taken over
                acks.drop(errors.LedgerFenced(f"partition {partition} was given up"))
                if acks.epoch >= epoch:
                    acks.check()
                continue
            if acks.epoch == epoch and acks.failure is None:
                return acks
            if acks.epoch > epoch:
                raise errors.LedgerFenced(f"partition {partition} has an owner of a later epoch")
            self.leave(partition)

    def leave(self, partition: int) -> None:
        """Called when this broker no longer has the partition."""
        acks = self._open.kept(partition)
        self._open.pop(partition)
        if acks is not None:
            acks.drop(errors.LedgerFenced(f"partition {partition} was given up"))

    def look(self) -> int:
        """The number of a read that begins now (AckContext.looks)."""
        return next(self._context.looks)

    @property
    def partitions(self) -> list[int]:
        """The partitions whose acknowledgements this broker has taken over."""
        return [partition for partition in self._open if self._open.kept(partition) is not None]

    def of_subscription(self, name: str) -> list[OwnedAcks]:
        """What the subscription's consumers acknowledged, durable or not, in the partitions whose
        acknowledgements this broker has taken over."""
        owned = []
        for partition in self.partitions:
            acks = self._open.kept(partition)
            if acks is not None and acks.failure is None:
                states = {key: state for key, state in acks.states().items() if key.name == name}
                owned.append(OwnedAcks(partition, acks.epoch, states))
        return owned

    def end(self) -> None:
        """Called when the broker no longer has the topic."""
        for partition in list(self._open):
            self.leave(partition)
        self._on_end(self)

    async def close(self, timeout_s: float) -> None:
        """Closes the acknowledgements of all partitions (PartitionAcks.close)."""
        all_acks = [acks for acks in map(self._open.kept, list(self._open)) if acks is not None]
        await asyncio.gather(*(acks.close(timeout_s) for acks in all_acks))
