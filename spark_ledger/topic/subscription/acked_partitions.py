"""What a subscription's consumers acknowledged in the partitions that this broker owns: it connects
the dispatchers, the partitions' ack ledgers and the broker's share.

Always true: the share never shows more than an ack ledger has, or than a state without gaps. The
only exception is a seek back that is not in the share yet. So an owner of a later epoch that reads
only the share loses no acknowledgement for which a receipt was given; and if the owner dies during
a seek, the rows that the subscription needs are still held.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pyroaring import BitMap64

from spark_ledger import errors
from spark_ledger.topic.acks.delayed import DelaySource
from spark_ledger.topic.acks.entries import AckKey, AckState, released
from spark_ledger.topic.acks.partition_acks import PartitionAcks
from spark_ledger.topic.acks.served import AckedSet, Receipt, Served
from spark_ledger.topic.acks.topic_acks import TopicAcks
from spark_ledger.topic.subscription.nodes import SubscriptionView
from spark_ledger.topic.subscription.records import SubscriptionShare, newest


class Floor(NamedTuple):
    """What the nodes have of a partition: the position, and the epoch of the owner that wrote the
    position (0: it is the position at which the subscription was made or to which it was moved)."""

    epoch: int
    position: int


class _Adopted(NamedTuple):
    partition_acks: PartitionAcks
    state: AckState | None
    floor: Floor


class _Used(NamedTuple):
    partition_acks: PartitionAcks
    acks: AckedSet


def floor_of(
    subscription: SubscriptionView, own: Mapping[int, tuple[int, int]], partition: int
) -> Floor:
    """The floor of the partition. `own`: the positions in the broker's share that are not written
    yet."""
    record = subscription.record
    shares = [share for share, _ in subscription.shares.values()]
    shares.append(SubscriptionShare(record.epoch, True, own))
    newest_share = newest(record.epoch, shares).get(partition)
    if newest_share is None:
        return Floor(0, record.floor.get(partition, 0))
    return Floor(*newest_share)


class AckedPartitions:
    """The acknowledgements of one subscription at one broker, as long as the subscription's record
    has the token and epoch of `key`."""

    def __init__(self, topic_acks: TopicAcks, key: AckKey) -> None:
        self.topic_acks = topic_acks
        self.key = key
        self._adopted: dict[int, _Adopted] = {}
        self._used: dict[int, _Used] = {}

    async def partition_acks(self, partition: int, epoch: int) -> PartitionAcks:
        """The acknowledgements of a partition. Raises as TopicAcks.of, errors.Unavailable,
        StoreError."""
        partition_acks = await self.topic_acks.of(partition, epoch)
        if self.key.epoch and partition_acks.state(self.key) is None:  # it was moved, maybe now
            await partition_acks.check_node()
        return partition_acks

    def adopt(self, partition_acks: PartitionAcks, floor: Floor) -> AckState:
        """The state that counts: that of the ack ledger; or the floor, if an owner of a later epoch
        wrote the floor (an owner with older software, which writes no ack ledger)."""
        partition, state = partition_acks.partition, partition_acks.state(self.key)
        is_state = state is not None and state.owner_epoch >= floor.epoch
        self._adopted[partition] = _Adopted(partition_acks, state if is_state else None, floor)
        if state is None or not is_state:
            return AckState(floor.position, BitMap64(), floor.epoch)
        return state

    def track(self, partition: int, served: Served, acks: AckedSet) -> None:
        """Called when a dispatcher goes on from the adopted state, with these acknowledgements."""
        partition_acks, state, floor = self._adopted.pop(partition)
        is_state = state is not None and (state.position, state.rows) == (acks.durable, acks.rows)
        partition_acks.serve(self.key, served, acks, is_state=is_state)
        self._used[partition] = _Used(partition_acks, acks)
        if acks.durable < floor.position:  # the owner died during a seek back
            self.changed(partition)

    def keep_delays(self, partition: int, source: DelaySource) -> None:
        self._used[partition].partition_acks.delays.keep(source)

    def changed(self, partition: int) -> None:
        self._used[partition].partition_acks.changed(self.key)

    def reset(self, partition: int) -> None:
        self._used[partition].partition_acks.reset(self.key)

    def when_durable(self, partition: int, receipt: Receipt) -> None:
        self._used[partition].partition_acks.when_durable(self.key, receipt)

    async def durable(self, partition: int) -> None:
        """Raises as PartitionAcks.durable, and errors.LedgerFenced after `release`."""
        used = self._used.get(partition)
        if used is None:
            raise released(self.key)
        await used.partition_acks.durable(self.key)

    async def all_durable(self) -> None:
        """When this returns, all acknowledgements are durable, apart from those of partitions that
        this broker no longer owns."""
        for used in list(self._used.values()):
            if used.partition_acks.failure is None:
                try:
                    await used.partition_acks.durable(self.key)
                except errors.LedgerError:
                    if used.partition_acks.failure is None:
                        raise

    def without_gaps(self) -> Iterator[tuple[int, Floor]]:
        """The partitions without gaps whose position is durable, each with its floor."""
        for partition, (partition_acks, acks) in self._used.items():
            is_written = not acks.rows and partition_acks.is_written(self.key)
            if is_written and partition_acks.failure is None:
                yield partition, Floor(partition_acks.epoch, acks.durable)

    def release(self, *, is_written: bool, is_gone: bool = False) -> None:
        """Called when no dispatcher of this broker uses the subscription any more. `is_written`:
        the broker's share has what `without_gaps` returns; `is_gone`: the subscription was
        deleted."""
        for partition_acks, _ in self._used.values():
            partition_acks.release(self.key, is_written=is_written, is_gone=is_gone)
        self._used.clear()
