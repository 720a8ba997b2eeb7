"""The subscriptions of a topic: listed, and the rows that they hold against retention."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import partial

from pyroaring import BitMap64

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata.store import Check, MetadataStore
from spark_ledger.metadata.store_calls import call_each, store_now_ms, unavailable_while
from spark_ledger.topic.acks.nodes import AckNodes
from spark_ledger.topic.log.holds import Holds
from spark_ledger.topic.subscription.nodes import (
    SubscriptionNodes,
    SubscriptionView,
    brokers_serving,
)
from spark_ledger.topic.subscription.present import PresentPositions, present_positions
from spark_ledger.topic.subscription.records import (
    Positions,
    SubscriptionKind,
    SubscriptionRecord,
    held_offsets,
    lowest_positions,
)

READS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class SubscriptionInfo:
    """A subscription in a listing. `positions` are its positions: exact once the subscription is
    released; while it is used they may be some seconds behind. `acked`: by partition the rows
    beyond the position that consumers acknowledged. `floor_ms`: when the metadata
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
    acked: Mapping[int, BitMap64] = field(default_factory=dict)
    floor_ms: int = 0
    properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def acked_beyond(self) -> dict[int, int]:
        """How many rows `acked` has."""
        return {partition: len(rows) for partition, rows in self.acked.items()}


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
        *(present.positions, present.acked, subscription.written_ms),
        record.properties,
    )


async def held(
    store: MetadataStore, topic_id: str, partitions: int, now_ms: int | None, grace_ms: int
) -> Holds:
    """The rows that the topic's subscriptions hold. Each subscription holds the rows from the
    lowest position on that it had in the last `grace_ms`. `now_ms` is by the store's clock (None:
    the time is read if there is a subscription). Makes and removes marks of these positions. The
    multi of a trim or an overwrite must have the `check` of the result: it fails if a subscription
    was made or went back since. Raises errors.TopicNotFound, errors.Unavailable."""
    nodes = SubscriptionNodes(store, topic_id)
    offsets: dict[int, int] = {}
    holders: dict[int, str] = {}
    with unavailable_while(f"reading the subscriptions of topic {topic_id}"):
        await store.sync(nodes.folder)
        version = await nodes.ensure_folder()  # before the records: see Holds.check
        names = await nodes.names()
        if names and now_ms is None:
            now_ms = await store_now_ms(store)
        lowest_of = partial(_lowest, nodes, now_ms or 0, grace_ms)
        lowest_by_name = await call_each(lowest_of, names, READS_AT_ONCE)
    for name, with_lowest in zip(names, lowest_by_name, strict=True):
        if with_lowest is None:
            continue
        record, lowest = with_lowest
        for p, offset in held_offsets(record, lowest, partitions).items():
            if p not in offsets or offset < offsets[p]:
                offsets[p], holders[p] = offset, name
    return Holds(offsets, Check(nodes.folder, version), holders)


async def _lowest(
    nodes: SubscriptionNodes, now_ms: int, grace_ms: int, name: str
) -> tuple[SubscriptionRecord, Positions] | None:
    """A subscription's record, and its lowest positions of the grace period; renews its marks."""
    subscription = await nodes.read(name, fresh=False)
    if subscription is None:
        return None
    marks = await nodes.marks(name)
    lowest = lowest_positions(marks, subscription.floor, now_ms, grace_ms)
    await nodes.renew_marks(subscription, lowest.add, lowest.forget)
    return subscription.record, lowest.positions
