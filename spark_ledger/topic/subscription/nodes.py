"""The nodes of a topic's subscriptions, read and written.

Always true: a record is written by compare-and-set on the version that was read, in one multi with
all other checks. After a lost response the record is read again after a sync: every record has its
owner's random token and its epoch, so an equal record with the next version is the one that this
process wrote. While the
cluster is held no subscription is made, sought or deleted; an existing subscription stays in use,
since no rows are lost if its position goes back.
"""

import difflib
import json
import unicodedata
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from pyroaring import BitMap64

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.cluster import multi_unless_held
from spark_ledger.metadata.store import (
    ANY_VERSION,
    Check,
    Create,
    Delete,
    MetadataStore,
    MultiFailed,
    NodeExists,
    NoNode,
    Operation,
    OutcomeUnknown,
    Set,
    StoreUnavailable,
    Versioned,
    Watcher,
)
from spark_ledger.metadata.store_calls import TRIES_MAX, names_in, read
from spark_ledger.topic.acks.entries import AckKey, AckState
from spark_ledger.topic.acks.nodes import States, Succession
from spark_ledger.topic.log.names import escape, unescape
from spark_ledger.topic.log.records import log_unreadable, readable
from spark_ledger.topic.subscription import records as subscription_records
from spark_ledger.topic.subscription.records import (
    Mark,
    Positions,
    SubscriptionKind,
    SubscriptionRecord,
    SubscriptionShare,
    needed_before_going_back,
    newest,
    storable,
    with_shares,
)

NEW = -1  # the version of a record that does not exist yet
NAME_CHARS_MAX = 255
NEAREST_MAX = 3


@dataclass(frozen=True, slots=True)
class SubscriptionView:
    """A subscription as it was read. `created_ms`, `written_ms` (of the node that was written last)
    and `used_ms` (of the last use by consumers, or the last move by another process than a broker)
    are by the store's clock. `shares` are by broker, each with its node's version."""

    name: str
    record: SubscriptionRecord
    version: int
    created_ms: int
    shares: Mapping[str, tuple[SubscriptionShare, int]] = field(default_factory=dict)
    written_ms: int = 0
    used_ms: int = 0

    @property
    def floor(self) -> dict[int, int]:
        """The positions in the nodes: the subscription is at or after these positions."""
        shares = (share for share, _ in self.shares.values())
        return with_shares(self.record.floor, self.record.epoch, shares)

    @property
    def acked_before(self) -> AckKey | None:
        """The key under which ack ledgers have what consumers acknowledged before the last
        query; None once a broker has a share again."""
        acked_by = None if self.shares else self.record.acked_by
        return None if acked_by is None else AckKey(self.name, *acked_by)

    def used_by(self, brokers: Container[str]) -> bool:
        """Whether consumers are connected at one of these brokers."""
        return any(broker in brokers for broker in self._using)

    def lost_users(self, alive: Container[str]) -> list[str]:
        """The brokers that had consumers and are not alive: nobody wrote when these consumers
        used the subscription last."""
        return [broker for broker in self._using if broker not in alive]

    @property
    def _using(self) -> list[str]:
        return [
            broker
            for broker, (share, _) in self.shares.items()
            if share.used and share.epoch == self.record.epoch
        ]


def check_name(name: str) -> None:
    """Raises errors.OptionInvalid for a name that no subscription can have."""
    if not 0 < len(name) <= NAME_CHARS_MAX:
        raise errors.OptionInvalid(
            f"a subscription's name has 1 to {NAME_CHARS_MAX} characters, not {len(name)}",
            subscription=name,
        )
    if any(unicodedata.category(character) == "Cc" for character in name):
        raise errors.OptionInvalid(
            f"a subscription's name has no control characters, and {name!r} has one",
            subscription=name,
        )


class SubscriptionNodes:
    """The subscriptions' nodes of one topic. All methods raise StoreUnavailable and OutcomeUnknown,
    except where their text describes another result."""

    def __init__(self, store: MetadataStore, topic_id: str) -> None:
        self.store = store
        self.topic_id = topic_id
        self.folder = paths.subscriptions(topic_id)

    async def ensure_folder(self) -> int:
        """Makes the topic's node of subscriptions if it does not exist; returns its version. Raises
        errors.TopicNotFound."""
        for _ in range(TRIES_MAX):
            node = await read(self.store, self.folder)
            if node is not None:
                return node.version
            try:
                await self.store.create(self.folder, subscription_records.encode_subscriptions())
            except (NodeExists, OutcomeUnknown):
                await self.store.sync(self.folder)
            except NoNode:
                raise errors.TopicNotFound(
                    f"there is no topic with id {self.topic_id}", topic_id=self.topic_id
                ) from None
        raise StoreUnavailable(f"{self.folder} could not be made: {TRIES_MAX} answers were lost")

    async def names(self) -> list[str]:
        return [unescape(name) for name in await names_in(self.store, self.folder)]

    async def read(
        self, name: str, *, fresh: bool = True, watch: Watcher | None = None
    ) -> SubscriptionView | None:
        """The subscription; None if it does not exist. With `fresh` it is not older than this call.
        `watch` is set on the record before the record is read."""
        path = self.path(name)
        if fresh:
            await self.store.sync(path)
        node = await read(self.store, path, watch)
        if node is None:
            return None
        record = subscription_records.decode_subscription(node.value)
        consumers = record.kind is SubscriptionKind.CONSUMER
        nodes = await self._shares(name) if consumers else {}
        shares = {
            broker: (subscription_records.decode_share(share.value), share.version)
            for broker, share in nodes.items()
        }
        written_ms = max(read_node.modified_ms for read_node in (node, *nodes.values()))
        used_ms = [node.modified_ms]
        for broker, (share, _) in shares.items():
            used_ms.append(nodes[broker].modified_ms if share.used_ms is None else share.used_ms)
        return SubscriptionView(
            name, record, node.version, node.created_ms, shares, written_ms, max(used_ms)
        )

    async def _shares(self, name: str) -> dict[str, Versioned]:
        """The nodes of the shares, by broker. The multi that removes a share puts its positions
        into another share: so if a share is removed during the read, all shares are read again."""
        for _ in range(TRIES_MAX):
            brokers = await names_in(self.store, self.share(name))
            nodes = await self.store.get_many([self.share(name, broker) for broker in brokers])
            present = [node for node in nodes if node is not None]
            if len(present) == len(brokers):
                return dict(zip(brokers, present, strict=True))
        raise StoreUnavailable(f"{self.share(name)} changed each time that it was read")

    async def ensure_shares(self, name: str) -> None:
        """Makes the folder of shares, if the subscription exists."""
        if await read(self.store, self.share(name)) is None:
            with suppress(NodeExists, NoNode, OutcomeUnknown):
                await self.store.create(self.share(name))

    def first_share(self, name: str, record: SubscriptionRecord, broker_id: str) -> list[Operation]:
        """The operations that give a broker a share of a subscription; they belong to the multi
        that makes the subscription."""
        share = SubscriptionShare(record.epoch, True, {})
        value = subscription_records.encode_share(share)
        return [Create(self.share(name)), Create(self.share(name, broker_id), value)]

    async def get(self, name: str) -> SubscriptionView:
        """As `read`. Raises errors.SubscriptionNotFound, which lists near names."""
        subscription = await self.read(name)
        if subscription is None:
            raise await self.not_found(name)
        return subscription

    async def not_found(self, name: str) -> errors.SubscriptionNotFound:
        nearest = difflib.get_close_matches(name, await self.names(), n=NEAREST_MAX)
        hint = f"; similar names: {', '.join(sorted(nearest))}" if nearest else ""
        what = f"there is no subscription '{name}'{hint}"
        return errors.SubscriptionNotFound(what, subscription=name)

    async def marks(self, name: str) -> list[Mark]:
        """The marks in the order in which they were made; empty if the subscription is being
        deleted. A mark that cannot be read has no position, so that all rows are held."""
        marks = []
        for child in await names_in(self.store, self._marks(name)):
            path = f"{self._marks(name)}/{child}"
            if not child.isdecimal():
                log_unreadable(path, "a mark's name is a number")
                continue
            node = await read(self.store, path)
            if node is not None:
                positions = readable(path, node, subscription_records.decode_mark)
                marks.append(Mark(int(child), node.created_ms, positions or {}))
        return marks

    async def create(
        self, name: str, record: SubscriptionRecord, *others: Operation
    ) -> SubscriptionView | None:
        """Makes the subscription, with its first mark. None: the subscription exists, or one of
        `others` failed."""
        value = subscription_records.encode_subscription(record)
        operations = [
            Create(self.path(name), value),
            Create(self._marks(name)),
            self.mark(name, 0, record.floor),
            self.touch(),
        ]
        return await self._write(name, record, NEW, [*operations, *others], unless_held=True)

    async def write(
        self,
        subscription: SubscriptionView,
        record: SubscriptionRecord,
        *others: Operation,
        unless_held: bool = False,
    ) -> SubscriptionView | None:
        """Replaces the record that was read. None: the record has changed since, or one of `others`
        failed. With `unless_held` (for a user's request) only while the cluster is not held; the
        process that uses the subscription goes on writing while the cluster is held."""
        value = subscription_records.encode_subscription(record)
        operation = Set(self.path(subscription.name), value, subscription.version)
        operations = [operation, *others]
        return await self._write(
            subscription.name, record, subscription.version, operations, unless_held=unless_held
        )

    async def delete(self, subscription: SubscriptionView, *others: Operation) -> bool:
        """Removes the subscription with its marks. False: the record or a share has changed
        since, or one of `others` failed. Raises OutcomeUnknown if the subscription may be gone."""
        folder = self._marks(subscription.name)
        operations: list[Operation] = [
            *self.without_shares(subscription),
            *(Delete(f"{folder}/{m}", ANY_VERSION) for m in await names_in(self.store, folder)),
            Delete(folder, ANY_VERSION),
            Delete(self.path(subscription.name), subscription.version),
            self.touch(),
        ]
        if await read(self.store, self.share(subscription.name)) is not None:
            operations.insert(
                len(subscription.shares), Delete(self.share(subscription.name), ANY_VERSION)
            )
        try:
            await multi_unless_held(self.store, [*operations, *others])
            return True
        except MultiFailed:
            return False

    def without_shares(self, subscription: SubscriptionView) -> list[Operation]:
        """The operations that remove the shares, if the shares have not changed since they were
        read."""
        return [
            Delete(self.share(subscription.name, broker), version)
            for broker, (_, version) in subscription.shares.items()
        ]

    async def note_lost_users(self, subscription: SubscriptionView, brokers: Sequence[str]) -> None:
        """Writes that no consumer at these brokers uses the subscription: from now on it counts as
        unused. A lost race or response is not an error: a later caller does it. Raises
        errors.MetadataHeld."""
        operations: list[Operation] = [Check(self.path(subscription.name), subscription.version)]
        for broker in brokers:
            share, version = subscription.shares[broker]
            value = subscription_records.encode_share(replace(share, used=False))
            operations.append(Set(self.share(subscription.name, broker), value, version))
        with suppress(MultiFailed, OutcomeUnknown):
            await multi_unless_held(self.store, operations)

    def touch(self) -> Operation:
        """The operation that makes every earlier planned trim fail."""
        return Set(self.folder, subscription_records.encode_subscriptions(), ANY_VERSION)

    def step_back(self, name: str, marks: Sequence[Mark], positions: Positions) -> list[Operation]:
        """The operations of a step back to `positions`; `marks` were read for it. If the newest
        mark is already as low, no mark is made. But then the multi checks that no mark was made
        since: such a mark would hide the step back once it is the mark that counts."""
        number = needed_before_going_back(marks, positions) if marks else 0
        if number is not None:
            return [self.touch(), self.mark(name, number, positions)]
        following = marks[-1].number + 1
        delete = Delete(self._marks(name, following), ANY_VERSION)
        return [self.touch(), self.mark(name, following, positions), delete]

    def mark(self, name: str, number: int, positions: Positions) -> Operation:
        value = subscription_records.encode_mark(storable(positions))
        return Create(self._marks(name, number), value)

    async def renew_marks(
        self, subscription: SubscriptionView, add: int | None, forget: Sequence[int]
    ) -> None:
        """Makes the mark with number `add`, of the positions in `subscription`, if the record has
        not changed since it was read (otherwise the subscription may have gone back, and the mark
        would hide this). Removes the marks in `forget`. A lost race or response is not an error:
        the next caller does both."""
        name = subscription.name
        operations: list[Operation] = [
            Delete(self._marks(name, number), ANY_VERSION) for number in forget
        ]
        if add is not None:
            operations.append(self.mark(name, add, subscription.floor))
        if operations:
            try:
                await self.store.multi([Check(self.path(name), subscription.version), *operations])
            except (MultiFailed, OutcomeUnknown):
                return

    def path(self, name: str) -> str:
        """Raises errors.OptionInvalid for an invalid name."""
        check_name(name)
        return paths.subscription(self.topic_id, escape(name))

    def share(self, name: str, broker_id: str | None = None) -> str:
        return paths.subscription_share(self.topic_id, escape(name), broker_id)

    def _marks(self, name: str, number: int | None = None) -> str:
        return paths.subscription_marks(self.topic_id, escape(name), number)

    async def _write(
        self,
        name: str,
        record: SubscriptionRecord,
        version: int,
        operations: list[Operation],
        *,
        unless_held: bool,
    ) -> SubscriptionView | None:
        try:
            if unless_held:
                await multi_unless_held(self.store, operations)
            else:
                await self.store.multi(operations)
        except MultiFailed:
            return None
        except OutcomeUnknown:
            current = await self.read(name)
            was_written = (
                current is not None and current.record == record and current.version == version + 1
            )
            return current if was_written else None
        if version == NEW:
            return await self.read(name, fresh=False)
        return SubscriptionView(name, record, version + 1, 0)


def counted_acks(
    subscription: SubscriptionView, states: Mapping[int, States]
) -> dict[int, AckState]:
    """By partition what the subscription's consumers acknowledged: the state of the ack ledger; or
    the position in the shares, if an owner of a later epoch wrote the position (an owner with older
    software, which writes no ack ledger). A partition without either is left out. What consumers
    acknowledged before a query came counts from the position in the record on, unless the query has
    gone back below it."""
    key, is_before = acks_key_of(subscription), subscription.acked_before is not None
    shares = (share for share, _ in subscription.shares.values())
    counted = {
        partition: AckState(position, BitMap64(), epoch)
        for partition, (epoch, position) in newest(subscription.record.epoch, shares).items()
    }
    for partition, by_key in states.items():
        state, share = by_key.get(key), counted.get(partition)
        if state is not None and is_before:
            position = subscription.record.floor.get(partition, 0)
            if state.position > position:
                continue
            state = Succession(key, key, position).state(state)
        if state is not None and (share is None or state.owner_epoch >= share.owner_epoch):
            counted[partition] = state
    return counted


def key_of(subscription: SubscriptionView) -> AckKey:
    return AckKey(subscription.name, subscription.record.owner, subscription.record.epoch)


def acks_key_of(subscription: SubscriptionView) -> AckKey:
    """The key under which ack ledgers have what the subscription's consumers acknowledged."""
    return subscription.acked_before or key_of(subscription)


def needs(subscription: SubscriptionView, partition: int, key: AckKey, state: AckState) -> bool:
    """Whether an owner must keep this state of the subscription. A state from before a query is not
    needed once the query has passed it."""
    is_passed = state.end <= subscription.record.floor.get(partition, 0)
    return key == acks_key_of(subscription) and not (subscription.acked_before and is_passed)


async def brokers_alive(store: MetadataStore) -> frozenset[str]:
    return frozenset(await names_in(store, paths.BROKERS_ALIVE))


async def served_since_ms(store: MetadataStore) -> int | None:
    """When the broker that has lived longest registered, by the store's clock; None: no broker
    lives."""
    names = await names_in(store, paths.BROKERS_ALIVE)
    nodes = await store.get_many([f"{paths.BROKERS_ALIVE}/{name}" for name in names])
    return min((node.created_ms for node in nodes if node is not None), default=None)


async def brokers_serving(store: MetadataStore, topic_id: str) -> frozenset[str]:
    """The living brokers that have a partition of the topic; all living brokers if the record of
    owners is missing or not readable. A broker that lost all its partitions does not count: it
    disconnects its consumers once it notices the loss."""
    alive = await brokers_alive(store)
    node = await read(store, paths.brokers_of_topic(topic_id))
    if node is None:
        return alive
    try:
        owners = json.loads(node.value)["brokers"]
        return alive & {broker for broker, owned in owners.items() if owned["partitions"]}
    except errors.MALFORMED:
        return alive
