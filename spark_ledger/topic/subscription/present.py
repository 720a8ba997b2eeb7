"""The present positions of a subscription: read without disturbing its owner, or for a process that
moves the subscription.

Always true: a position that is read here is at or after the position in the nodes, and may lack a
write under way. If a process moves the subscription and its multi succeeds, the positions that it
got lack no acknowledgement for which a receipt was given.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from pyroaring import BitMap64

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata.store import Operation
from spark_ledger.metadata.store_calls import TRIES_MAX
from spark_ledger.topic.acks.entries import AckKey, AckState
from spark_ledger.topic.acks.nodes import AckMove, AckNodes, States, Succession
from spark_ledger.topic.subscription import cursor_ledger
from spark_ledger.topic.subscription.nodes import (
    SubscriptionNodes,
    SubscriptionView,
    counted_acks,
    key_of,
)
from spark_ledger.topic.subscription.records import Positions, SubscriptionKind


@dataclass(frozen=True, slots=True)
class PresentPositions:
    """`acked_beyond`: by partition the number of acknowledged rows beyond the position; without
    partitions that have none."""

    positions: dict[int, int]
    acked_beyond: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MovedPositions:
    """The positions of a subscription that is moved. `move` has its consumers' acknowledgements
    (None: it is a query's subscription)."""

    subscription: SubscriptionView
    positions: dict[int, int]
    move: AckMove | None = None

    @property
    def operations(self) -> list[Operation]:
        """The checks for the multi that moves the subscription."""
        return [] if self.move is None else self.move.operations()

    @property
    def states(self) -> dict[int, AckState]:
        """By partition what is acknowledged."""
        counted = {} if self.move is None else counted_acks(self.subscription, self.move.states)
        return {
            number: counted.get(number) or AckState(position, BitMap64(), 0)
            for number, position in self.positions.items()
        }

    def keeping(self, after: AckKey, positions: Positions) -> list[Operation]:
        """As `operations`; what is acknowledged beyond the new positions stays acknowledged, under
        the new key. Raises errors.Unavailable."""
        before = key_of(self.subscription)
        successions = {
            number: Succession(before, after, positions[number])
            for number, state in self.states.items()
            if state.rows and state.rows.max() >= positions[number]
        }
        return [] if self.move is None else self.move.operations(successions)


async def present_positions(
    ledgers: LedgerStore,
    nodes: SubscriptionNodes,
    subscription: SubscriptionView,
    states: Mapping[int, States] | None = None,
) -> PresentPositions:
    """The subscription's present positions. `states` is the content of the topic's ack ledgers
    (None: they are read). Raises errors.LedgerError, StoreError."""
    for _ in range(TRIES_MAX):
        if subscription.record.ledger_id is None:
            break
        try:
            floor = await cursor_ledger.last_positions(ledgers, subscription.record, fence=False)
            record = replace(subscription.record, floor=floor)
            return PresentPositions(replace(subscription, record=record).floor)
        except errors.NoSuchLedger:  # the owner went on in another ledger, or the ledger is lost
            reread = await nodes.get(subscription.name)
            if reread.record.ledger_id == subscription.record.ledger_id:
                break
            subscription = reread
    if subscription.record.kind is not SubscriptionKind.CONSUMER:
        return PresentPositions(subscription.floor)
    if states is None:
        states = await AckNodes(ledgers, nodes.topic_id).all_states()
    counted = counted_acks(subscription, states)
    positions = {partition: state.position for partition, state in counted.items()}
    beyond = {partition: len(state.rows) for partition, state in counted.items() if state.rows}
    return PresentPositions({**subscription.floor, **positions}, beyond)


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
    if subscription.record.kind is not SubscriptionKind.CONSUMER:
        present: Positions = (await present_positions(ledgers, nodes, subscription)).positions
        return MovedPositions(subscription, dict(present))
    move = await AckNodes(ledgers, nodes.topic_id).move(owned)
    counted = counted_acks(subscription, move.states)
    positions = {partition: state.position for partition, state in counted.items()}
    return MovedPositions(subscription, {**subscription.floor, **positions}, move)
