"""The present positions of a subscription: read without disturbing its owner, or for a process that
moves the subscription.

Always true: a position that is read here is at or after the position in the nodes, and may lack a
write under way. If a process moves the subscription and its multi succeeds, the positions that it
got lack no acknowledgement for which a receipt was given.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from pyroaring import BitMap64

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata.store import Operation
from spark_ledger.metadata.store_calls import TRIES_MAX
from spark_ledger.topic.acks.entries import AckKey, AckState
from spark_ledger.topic.acks.nodes import NO_SUCCESSIONS, AckMove, AckNodes, States, Succession
from spark_ledger.topic.acks.sets import run_end
from spark_ledger.topic.subscription import cursor_ledger
from spark_ledger.topic.subscription.nodes import (
    SubscriptionNodes,
    SubscriptionView,
    acks_key_of,
    counted_acks,
)
from spark_ledger.topic.subscription.records import (
    Positions,
    SubscriptionRecord,
    has_acks,
    in_every_partition,
)


@dataclass(frozen=True, slots=True)
class PresentPositions:
    """`acked`: by partition the acknowledged rows beyond the position; without partitions that have
    none."""

    positions: dict[int, int]
    acked: Mapping[int, BitMap64] = field(default_factory=dict)

    @property
    def acked_beyond(self) -> dict[int, int]:
        return {partition: len(rows) for partition, rows in self.acked.items()}


@dataclass(frozen=True, slots=True)
class MovedPositions:
    """The positions of a subscription that is moved. `move` has its consumers' acknowledgements
    (None: nothing is acknowledged beyond the positions)."""

    subscription: SubscriptionView
    present: PresentPositions
    move: AckMove | None = None

    async def operations(
        self, successions: Mapping[int, Succession] = NO_SUCCESSIONS
    ) -> list[Operation]:
        """The operations for the multi that moves the subscription. Raises errors.Unavailable,
        StoreUnavailable."""
        return [] if self.move is None else await self.move.operations(successions)

    @property
    def states(self) -> dict[int, AckState]:
        """By partition what is acknowledged."""
        return {
            number: AckState(position, self.present.acked.get(number, BitMap64()), 0)
            for number, position in self.present.positions.items()
        }

    def moved_up(self, starts: Positions, to: Callable[[int, AckState], int]) -> dict[int, int]:
        """The positions if the subscription moves up to the offsets that `to` returns, in every
        partition (`starts`: as in_every_partition)."""
        at = in_every_partition(self.subscription.record, self.present.positions, starts)
        states = {number: AckState(offset, BitMap64(), 0) for number, offset in at.items()}
        present = self.states
        moved = {
            number: run_end(state.rows, max(state.position, to(number, state)))
            for number, state in (states | present).items()
        }
        # a wide topic's record has no room for partitions that stay where they start
        return {
            number: offset
            for number, offset in moved.items()
            if number in present or offset > at[number]
        }

    async def kept(
        self, record: SubscriptionRecord, forgotten: Collection[int] = ()
    ) -> tuple[SubscriptionRecord, list[Operation]]:
        """The subscription's next record, and the operations with which ack ledgers have under that
        record's key what is acknowledged beyond its positions, but nothing of the `forgotten`
        partitions. Raises as `operations`."""
        if self.present.acked.keys() <= set(forgotten):
            return replace(record, acked_by=None), await self.operations()
        key = AckKey(self.subscription.name, record.owner, record.epoch)
        operations = await self.keeping(key, record.floor, forgotten)
        return replace(record, acked_by=key[1:]), operations

    async def keeping(
        self, after: AckKey, positions: Positions, forgotten: Collection[int] = ()
    ) -> list[Operation]:
        """As `operations`; what is acknowledged beyond the new positions stays acknowledged, under
        the new key, except in the `forgotten` partitions."""
        before = acks_key_of(self.subscription)
        successions = {
            number: Succession(before, after, positions.get(number, 0))
            for number, state in self.states.items()
            if number not in forgotten and state.end > positions.get(number, 0)
        }
        return await self.operations(successions)


async def present_positions(
    ledgers: LedgerStore,
    nodes: SubscriptionNodes,
    subscription: SubscriptionView,
    states: Mapping[int, States] | None = None,
) -> PresentPositions:
    """The subscription's present positions. `states` is the content of the topic's ack ledgers
    (None: they are read). Raises errors.LedgerError, StoreError."""
    for _ in range(TRIES_MAX):
        record = subscription.record
        if record.ledger_id is None:
            break
        try:
            floor = await cursor_ledger.last_positions(ledgers, record, fence=False)
            subscription = replace(subscription, record=replace(record, floor=floor))
            break
        except errors.NoSuchLedger:  # the owner went on in another ledger, or the ledger is lost
            reread = await nodes.get(subscription.name)
            if reread.record.ledger_id == record.ledger_id:
                break
            subscription = reread
    if not has_acks(subscription.record):
        return PresentPositions(subscription.floor)
    if states is None:
        states = await AckNodes(ledgers, nodes.topic_id).all_states()
    counted = counted_acks(subscription, states)
    positions = {partition: state.position for partition, state in counted.items()}
    acked = {partition: state.rows for partition, state in counted.items() if state.rows}
    return PresentPositions({**subscription.floor, **positions}, acked)


async def moved_from_owners(
    ledgers: LedgerStore,
    nodes: SubscriptionNodes,
    subscription: SubscriptionView,
    owned: Collection[int] = (),
) -> MovedPositions:
    """For a process that moves, deletes or takes over a subscription. After this call an owner of a
    partition that gives a receipt makes the multi with these operations fail; only for the
    partitions in `owned` the caller itself must give no receipt. Raises errors.LedgerError,
    StoreError."""
    move = None
    if has_acks(subscription.record):
        move = await AckNodes(ledgers, nodes.topic_id).move(owned)
    states = {} if move is None else move.states
    present = await present_positions(ledgers, nodes, subscription, states)
    return MovedPositions(subscription, present, move)
