"""Where a subscription is now: read without disturbing its owner, or for a process that moves it.

Always true: a position that is read here is at or after the one in the nodes, and may lack a write
under way; one that a process got as it moves the subscription lacks nothing for which a receipt was
given, if that process's multi succeeds.
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
from spark_ledger.topic.subscription.records import Positions, SubscriptionKind, later


@dataclass(frozen=True, slots=True)
class PresentPositions:
    """`acked_beyond`: how many rows beyond each position are acknowledged, where any is."""

    positions: dict[int, int]
    acked_beyond: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MovedPositions:
    """The positions of a subscription that is moved. `move`: its consumers' acknowledgements; None
    for a query's subscription."""

    subscription: SubscriptionView
    positions: dict[int, int]
    move: AckMove | None = None

    @property
    def operations(self) -> list[Operation]:
        """What the multi that moves it has to check."""
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
    """`states`: what the topic's ack ledgers have; None: they are read. Raises errors.LedgerError,
    StoreError."""
    for _ in range(TRIES_MAX):
        if subscription.record.ledger_id is None:
            break
        try:
            last = await cursor_ledger.last_entry(
                ledgers, subscription.record.ledger_id, fence=False
            )
            floor = later(subscription.record.floor, {} if last is None else last.positions)
            record = replace(subscription.record, floor=floor)
            return PresentPositions(replace(subscription, record=record).floor)
        except errors.NoSuchLedger:  # its owner went on in another ledger, or it is lost
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
    """For a process that moves, deletes or takes a subscription: from now on no owner of a
    partition gives a receipt for it that the multi with these operations would not know of, but the
    caller for the partitions that it owns. Raises errors.LedgerError, StoreError."""
    if subscription.record.kind is not SubscriptionKind.CONSUMER:
        present: Positions = (await present_positions(ledgers, nodes, subscription)).positions
        return MovedPositions(subscription, dict(present))
    move = await AckNodes(ledgers, nodes.topic_id).move(owned)
    counted = counted_acks(subscription, move.states)
    positions = {partition: state.position for partition, state in counted.items()}
    return MovedPositions(subscription, {**subscription.floor, **positions}, move)
