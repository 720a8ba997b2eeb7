"""The subscriptions of a topic, listed."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata.store_calls import call_each, unavailable_while
from spark_ledger.topic.acks.nodes import AckNodes
from spark_ledger.topic.subscription.nodes import (
    SubscriptionNodes,
    SubscriptionView,
    brokers_serving,
)
from spark_ledger.topic.subscription.present import PresentPositions, present_positions
from spark_ledger.topic.subscription.records import Positions, SubscriptionKind

READS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class SubscriptionInfo:
    """A subscription in a listing. `positions` are its positions: exact once the subscription is
    released; while it is used they may be some seconds behind. `acked_beyond`: by partition the
    number of rows beyond the position that consumers acknowledged. `floor_ms`: when the metadata
    store got its positions, by its clock; positions in a cursor ledger or an ack ledger are newer.
    """

    name: str
    kind: SubscriptionKind
    live: bool
    query_id: str
    run_id: str
    epoch: int
    created_ms: int
    ledger_id: int | None
    positions: Positions
    acked_beyond: Mapping[int, int] = field(default_factory=dict)
    floor_ms: int = 0
    properties: Mapping[str, str] = field(default_factory=dict)


async def listed(
    ledgers: LedgerStore,
    topic_id: str,
    *,
    exact: bool,
    unreadable: dict[str, errors.LedgerError] | None,
) -> list[SubscriptionInfo]:
    """As Subscriptions.list."""
    nodes = SubscriptionNodes(ledgers.metadata, topic_id)

    async def with_positions(name: str) -> tuple[SubscriptionView, PresentPositions] | None:
        try:
            subscription = await nodes.read(name, fresh=False)
            if subscription is None:
                return None
            if not exact:
                return subscription, PresentPositions(subscription.floor)
            return subscription, await present_positions(ledgers, nodes, subscription, states)
        except errors.LedgerError as error:
            if unreadable is None:
                raise
            unreadable[name] = error
            return None

    with unavailable_while("listing subscriptions"):
        await ledgers.metadata.sync(nodes.folder)
        states = await AckNodes(ledgers, topic_id).all_states() if exact else {}
        listed = await call_each(with_positions, await nodes.names(), READS_AT_ONCE)
        brokers = await brokers_serving(ledgers.metadata, topic_id)
        return [_info(*pair, brokers) for pair in listed if pair is not None]


def _info(
    subscription: SubscriptionView, present: PresentPositions, brokers: Container[str]
) -> SubscriptionInfo:
    record = subscription.record
    return SubscriptionInfo(
        subscription.name,
        record.kind,
        record.live or subscription.used_by(brokers),
        record.query_id,
        record.run_id,
        record.epoch,
        subscription.created_ms,
        record.ledger_id,
        *(present.positions, present.acked_beyond, subscription.written_ms),
        record.properties,
    )
