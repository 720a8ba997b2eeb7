"""Subscriptions of a topic by name: opened by queries, created, sought, deleted, listed, and the
rows that they hold against retention.

Always true: a subscription has one owner at a time, the owner of the record's epoch. A new run of
the owner's query takes over at once. Another query takes over once the owner has released the
subscription, or the owner's intent has ended, or this process has seen no heartbeat of this intent
for a lease, in one unbroken session; clocks are never compared. To create, delete, seek or take
over a subscription gives the subscriptions' node a new version, which a trim checks (hazards 37,
38).
"""

import asyncio
import builtins
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import (
    Check,
    MetadataStore,
    Operation,
    OutcomeUnknown,
    SessionState,
    Set,
)
from spark_ledger.metadata.store_calls import (
    Tries,
    read,
    unavailable_while,
)
from spark_ledger.process import LruCache
from spark_ledger.topic.acks.entries import AckState
from spark_ledger.topic.acks.ledger import discard_ledger
from spark_ledger.topic.log import records
from spark_ledger.topic.log.holds import GRACE_MS, Holds
from spark_ledger.topic.log.intents import SUPERSEDED, Intent, Intents, Sighting
from spark_ledger.topic.log.records import IntentState
from spark_ledger.topic.log.segment_table import TableChunk
from spark_ledger.topic.log.state import NO_TABLES, Tables, TopicState
from spark_ledger.topic.log.topic_log import TopicLog
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.read.live import ends_of
from spark_ledger.topic.subscription import records as subscription_records
from spark_ledger.topic.subscription import seek_target
from spark_ledger.topic.subscription.cursor import Cursor, CursorContext, open_intent
from spark_ledger.topic.subscription.cursor_ledger import storable_record
from spark_ledger.topic.subscription.lag import PartitionLag, topic_lag
from spark_ledger.topic.subscription.listing import SubscriptionInfo, held, listed
from spark_ledger.topic.subscription.nodes import (
    SubscriptionNodes,
    SubscriptionView,
    brokers_serving,
)
from spark_ledger.topic.subscription.present import (
    MovedPositions,
    moved_from_owners,
    present_positions,
)
from spark_ledger.topic.subscription.records import (
    NO_PROPERTIES,
    Claim,
    Positions,
    SubscriptionKind,
    SubscriptionRecord,
    fits,
    fitting,
    in_every_partition,
    storable,
)
from spark_ledger.topic.subscription.seek_target import End, SeekTarget

LEASE_S = 300.0
SIGHTINGS_MAX = 10_000

_log = logging.getLogger(__name__)

ReadChunks = Callable[[Sequence[TableChunk]], Awaitable[Tables]]


class Subscriptions:
    """Every method raises errors.Unavailable if the metadata store does not respond, and
    errors.OptionInvalid for an invalid name of a subscription."""

    def __init__(
        self,
        ledgers: LedgerStore,
        intents: Intents,
        log_of: Callable[[str], TopicLog],
        rng: random.Random,
        *,
        read_chunks: ReadChunks,
        lease_s: float = LEASE_S,
    ) -> None:
        self.store: MetadataStore = ledgers.metadata
        self.ledgers = ledgers
        self._intents = intents
        self._log_of = log_of
        self._rng = rng
        self._read_chunks = read_chunks
        self._lease_s = lease_s
        self._cursors: dict[Cursor, None] = {}
        self._sightings = LruCache[str, Sighting](SIGHTINGS_MAX)
        self._session = 0
        self.store.add_session_listener(self._session_changed)

    # -- used by a query ---------------------------------------------------------------------

    async def open(
        self,
        topic: TopicInfo,
        name: str,
        query_id: str,
        run_id: str,
        *,
        start: SeekTarget = End.LATEST,
        partitions: tuple[int, ...] | None = None,
        kind: SubscriptionKind = SubscriptionKind.QUERY,
    ) -> Cursor:
        """Opens the subscription for this run, and returns its cursor. If the subscription does not
        exist, it is made at `start`; an existing subscription keeps its position. `partitions`: the
        query reads only these. `kind` CONSUMER: a broker opens it for Pulsar's consumers.

        Reads only the metadata store: the cursor reads the earlier position in the background.
        Raises errors.SubscriptionBusy, errors.LedgerFenced (a newer run of the query has it),
        errors.TopicNotFound, errors.TopicDeleted.
        """
        nodes = SubscriptionNodes(self.store, topic.id)
        claim = Claim(query_id, run_id, self._token(), partitions=partitions, kind=kind)
        nodes.path(name)  # checks the name
        with unavailable_while(f"opening subscription '{name}' of topic '{topic.name}'"):
            await nodes.ensure_folder()
            tries = Tries(self._rng)
            while True:
                subscription = await self._read_claimable(nodes, name, claim)
                intent = await open_intent(self._intents, claim, topic.id, name)
                claim = replace(claim, intent=intent.id)
                opened = await self._claim(nodes, name, subscription, claim, intent, start)
                if opened is not None:
                    log = self._log_of(topic.id)
                    context = CursorContext(
                        nodes, self.ledgers, self._intents, log, topic, self._rng
                    )
                    return self._remember(
                        Cursor(context, opened, claim, intent, new=subscription is None)
                    )
                await tries.retry_or_raise(f"others took subscription '{name}' again and again")

    async def reserve(
        self,
        topic: TopicInfo,
        name: str,
        *,
        start: SeekTarget,
        partitions: tuple[int, ...] | None = None,
    ) -> None:
        """For a query that has no id yet: checks that it could open the subscription. If the
        subscription does not exist, it is made at `start`, unused, and holds the rows from `start`
        on.

        Raises errors.SubscriptionBusy, errors.TopicNotFound, errors.TopicDeleted.
        """
        nodes = SubscriptionNodes(self.store, topic.id)
        claim = Claim("", "", self._token(), partitions=partitions)
        nodes.path(name)  # checks the name
        with unavailable_while(f"reading subscription '{name}' of topic '{topic.name}'"):
            await nodes.ensure_folder()
            tries = Tries(self._rng)
            while await self._read_claimable(nodes, name, claim) is None:
                floor = storable(await self._resolve(topic.id, start, partitions))
                record = SubscriptionRecord(
                    claim.kind, owner=claim.owner, floor=floor, partitions=partitions
                )
                if await self._create_record(nodes, name, record) is not None:
                    return
                await tries.retry_or_raise(f"others took subscription '{name}' again and again")

    async def close(self) -> None:
        """Gives up every open cursor, as a crash would; the caller releases cursors before."""
        await asyncio.gather(*(cursor.abandon() for cursor in list(self._cursors)))
        self._cursors.clear()

    # -- by name -----------------------------------------------------------------------------

    async def create(
        self,
        topic_id: str,
        name: str,
        at: SeekTarget = End.LATEST,
        *,
        kind: SubscriptionKind = SubscriptionKind.QUERY,
        exist_ok: bool = False,
        properties: Mapping[str, str] = NO_PROPERTIES,
    ) -> dict[int, int]:
        """Makes a subscription that no query uses yet, and returns its positions. When this
        returns, all rows from these positions on are held. Raises errors.SubscriptionExists,
        errors.TopicNotFound, errors.TopicDeleted, errors.OffsetsOutOfRange."""
        nodes = SubscriptionNodes(self.store, topic_id)
        with unavailable_while(f"creating subscription '{name}'"):
            await nodes.ensure_folder()
            if await nodes.read(name) is None:
                positions = fitting(await self._resolve(topic_id, at))
                record = SubscriptionRecord(
                    kind, owner=self._token(), floor=positions, properties=properties
                )
                made = await self._create_record(nodes, name, record)
                if made is not None:
                    return made
        if not exist_ok:
            raise errors.SubscriptionExists(
                f"there is a subscription '{name}' already", subscription=name
            )
        return await self.positions(topic_id, name)

    async def create_for_consumers(
        self,
        topic_id: str,
        name: str,
        at: Positions,
        broker_id: str = "",
        properties: Mapping[str, str] = NO_PROPERTIES,
    ) -> SubscriptionView | None:
        """Makes a subscription for Pulsar's consumers, at these positions, which may be in live
        segments; does nothing if the subscription exists. With `broker_id` this broker has a share
        from the beginning, and the subscription is returned. None if the subscription existed, or
        was moved to the first rows kept: then the caller reads it. Positions that do not fit into
        the record are refused, unless they are those of the first rows kept.

        Raises errors.OptionInvalid, errors.TopicNotFound, errors.TopicDeleted.
        """
        nodes = SubscriptionNodes(self.store, topic_id)
        with unavailable_while(f"creating subscription '{name}'"):
            await nodes.ensure_folder()
            if not fits(at) and dict(at) != (await self._state(topic_id)).start_offsets():
                raise subscription_records.too_many(name)
            kind, floor = SubscriptionKind.CONSUMER, storable(at)
            record = SubscriptionRecord(
                kind, owner=self._token(), floor=floor, properties=properties
            )
            share = nodes.first_share(name, record, broker_id) if broker_id else []
            made = await nodes.create(name, record, *share)
            is_at_start = made is not None and await self._clip(nodes, made) == record.floor
            return made if is_at_start and broker_id else None

    async def delete(
        self,
        topic_id: str,
        name: str,
        *,
        force: bool = False,
        owned: Collection[int] = (),
        seen: SubscriptionView | None = None,
    ) -> bool:
        """Removes the subscription: it holds no rows any more. If it is in use, it is removed only
        with `force`; its query then goes on without it. `owned`: the caller owns these partitions,
        and gives no receipt for the subscription any more. `seen`: removes it only as it was read
        then; False if it has changed since. Raises errors.SubscriptionNotFound,
        errors.SubscriptionBusy."""
        nodes = SubscriptionNodes(self.store, topic_id)
        with unavailable_while(f"deleting subscription '{name}'"):
            tries = Tries(self._rng)
            while True:
                subscription = await nodes.read(name)
                if subscription is None:
                    if tries.failed:
                        return True
                    raise await nodes.not_found(name)
                if seen not in (None, subscription):
                    return False
                await self._check_free(topic_id, subscription, force)
                is_deleted = False
                moved = await moved_from_owners(self.ledgers, nodes, subscription, owned)
                ending = await self._ending_owner(subscription.record) + await moved.operations()
                try:
                    is_deleted = await nodes.delete(subscription, *ending)
                except OutcomeUnknown:
                    _log.info("subscription '%s' may be deleted: it is read again", name)
                if is_deleted:
                    await self._discard(subscription.record)
                    return True
                await tries.retry_or_raise(f"subscription '{name}' changes again and again")

    async def seek(
        self,
        topic_id: str,
        name: str,
        target: SeekTarget,
        *,
        force: bool = False,
        keeps_acks: bool = False,
    ) -> dict[int, int]:
        """Sets the subscription to `target`, or to the first row kept if this is later. Returns its
        positions. If the subscription is in use, it is set only with `force`, which takes it from
        its query. Acknowledgements beyond a new position are forgotten, unless `keeps_acks`; those
        in partitions that an offset target leaves out stay.

        Raises errors.SubscriptionNotFound, errors.SubscriptionBusy, errors.OffsetsOutOfRange,
        errors.OffsetsNotAssigned, errors.TopicDeleted.
        """
        return await self._set_positions(
            *(topic_id, name, lambda _: self._resolve(topic_id, target)),
            force=force,
            keeps_acks=keeps_acks,
        )

    async def move_up(
        self, topic_id: str, name: str, to: Callable[[int, AckState], int]
    ) -> dict[int, int]:
        """Moves the subscription forward in each partition to the offset that `to` returns for the
        partition's number and acknowledgements; a lower offset changes nothing. Rows that its
        consumers acknowledged beyond the new position stay acknowledged; the consumers are
        disconnected, as by a forced seek. Returns the subscription's positions. Raises as `seek`.
        """

        async def new_positions(moved: MovedPositions) -> dict[int, int]:
            return moved.moved_up((await self._state(topic_id)).start_offsets(), to)

        return await self._set_positions(topic_id, name, new_positions, force=True, keeps_acks=True)

    async def _set_positions(
        self,
        topic_id: str,
        name: str,
        new_positions: Callable[[MovedPositions], Awaitable[dict[int, int]]],
        *,
        force: bool,
        keeps_acks: bool = False,
    ) -> dict[int, int]:
        """`new_positions` are those of the partitions that are moved."""
        nodes = SubscriptionNodes(self.store, topic_id)
        with unavailable_while(f"seeking subscription '{name}'"):
            tries = Tries(self._rng)
            while True:
                subscription = await nodes.get(name)
                await self._check_free(topic_id, subscription, force)
                moved = await moved_from_owners(self.ledgers, nodes, subscription)
                targets = await new_positions(moved)
                positions = {**moved.present.positions, **targets}
                record = subscription_records.sought(subscription.record, self._token(), positions)
                record, acks = await moved.kept(record, () if keeps_acks else targets)
                operations = nodes.step_back(name, await nodes.marks(name), positions) + acks
                operations += await self._ending_owner(subscription.record)
                storing = storable_record(self.ledgers, self._intents, topic_id, record)
                async with storing as (record, checks):
                    operations += checks
                    sought = await nodes.write(subscription, record, *operations, unless_held=True)
                if sought is not None:
                    await self._discard(subscription.record)
                    return positions | await self._clip(nodes, sought)
                await tries.retry_or_raise(f"subscription '{name}' changes again and again")

    async def list(
        self,
        topic_id: str,
        *,
        exact: bool = False,
        unreadable: dict[str, errors.LedgerError] | None = None,
    ) -> list[SubscriptionInfo]:
        """Every subscription of the topic, by name. With `exact` it also reads positions from
        cursor ledgers. If a subscription cannot be read, the error goes into `unreadable` under the
        subscription's name, and the others are returned; without `unreadable` it is raised."""
        return await listed(self.ledgers, topic_id, exact=exact, unreadable=unreadable)

    async def used_by_consumers(self, topic_id: str, name: str) -> bool:
        """Whether consumers of the subscription are connected at a broker that has a partition of
        the topic."""
        with unavailable_while(f"reading subscription '{name}'"):
            subscription = await SubscriptionNodes(self.store, topic_id).read(name)
            return subscription is not None and await self._has_consumers(topic_id, subscription)

    async def is_of_query(self, topic_id: str, name: str, query_id: str) -> bool:
        """Whether no other query or consumer has used the subscription since the query did, and no
        operator has moved it; true as well if the subscription does not exist."""
        with unavailable_while(f"reading subscription '{name}'"):
            subscription = await SubscriptionNodes(self.store, topic_id).read(name)
        if subscription is None:
            return True
        record = subscription.record
        return record.kind is SubscriptionKind.QUERY and record.query_id == query_id

    async def positions(self, topic_id: str, name: str) -> dict[int, int]:
        """The subscription's positions, from the record and the cursor ledger, without disturbing
        the owner: a write under way may be missing. Raises errors.SubscriptionNotFound."""
        nodes = SubscriptionNodes(self.store, topic_id)
        with unavailable_while(f"reading subscription '{name}'"):
            subscription = await nodes.get(name)
            return (await present_positions(self.ledgers, nodes, subscription)).positions

    async def lag(self, topic_id: str, name: str, now_ms: int) -> dict[int, PartitionLag]:
        """The subscription's lag by partition, which includes confirmed rows of live segments;
        `now_ms` is by the store's clock. Raises as `positions` and `live.ends_of`."""
        nodes = SubscriptionNodes(self.store, topic_id)
        with unavailable_while(f"reading topic {topic_id}"):
            subscription = await nodes.get(name)
            present = await present_positions(self.ledgers, nodes, subscription)
            state = await self._log_of(topic_id).fold(fresh=True)
        ends = await ends_of(self.ledgers, state)
        at = in_every_partition(subscription.record, present.positions, state.start_offsets())
        return topic_lag(state, at, now_ms, live_ends=ends, acked=present.acked_beyond)

    async def holds(
        self, topic_id: str, partitions: int, now_ms: int | None = None, grace_ms: int = GRACE_MS
    ) -> Holds:
        """The rows that the topic's subscriptions hold, as `listing.held`."""
        return await held(self.store, topic_id, partitions, now_ms, grace_ms)

    # -- owners --------------------------------------------------------------------------------

    async def _read_claimable(
        self, nodes: SubscriptionNodes, name: str, claim: Claim
    ) -> SubscriptionView | None:
        """The subscription, if `claim` may take it; None if it does not exist. Raises
        errors.SubscriptionBusy."""
        subscription = await nodes.read(name)
        if subscription is None:
            return None
        if subscription.record.query_id != claim.query_id and await self._alive(
            subscription.record
        ):
            raise subscription_records.busy(name, subscription.record)
        if claim.kind is SubscriptionKind.QUERY:
            await self._check_no_consumers(nodes.topic_id, subscription)
        return subscription

    async def _claim(
        self,
        nodes: SubscriptionNodes,
        name: str,
        subscription: SubscriptionView | None,
        claim: Claim,
        intent: Intent,
        start: SeekTarget,
    ) -> SubscriptionView | None:
        """Tries once to make the claim the owner; None: the nodes changed meanwhile."""
        check = Check(paths.intent(intent.id), intent.version)
        if subscription is None:
            positions = await self._resolve(nodes.topic_id, start, claim.partitions)
            return await nodes.create(name, subscription_records.created(claim, positions), check)
        record = subscription_records.taken(subscription.record, claim)
        ending = await self._ending_owner(subscription.record, except_intent=intent.id)
        operations = [nodes.touch(), check, *ending]
        if subscription.shares:
            moved = await moved_from_owners(self.ledgers, nodes, subscription)
            record = replace(record, floor=fitting(moved.present.positions))
            record, acks = await moved.kept(record)
            operations += [*nodes.without_shares(subscription), *acks]
        return await nodes.write(subscription, record, *operations)

    async def _alive(self, record: SubscriptionRecord) -> bool:
        """Whether the owner may be at work: it did not release the subscription, its intent is
        open, and this process has not seen the intent silent for a lease."""
        if not record.live:
            return False
        intent = await self._intent(record.intent)
        if intent is None or not intent.is_open:
            return False
        node = await read(self.store, paths.intent_heartbeat(intent.id))
        if node is None:
            return False
        now_s = asyncio.get_running_loop().time()
        sighting = self._sightings.get(intent.id)
        changed = sighting is None or not sighting.matches(node.version, self._session)
        if sighting is None or changed:
            sighting = Sighting(node.version, now_s, self._session)
        self._sightings.put(intent.id, sighting)
        if changed:
            return True
        connected = self.store.session_state is SessionState.CONNECTED
        return not connected or now_s - sighting.since_s < self._lease_s

    async def _ending_owner(
        self, record: SubscriptionRecord, except_intent: str = ""
    ) -> builtins.list[Operation]:
        """The operations that end the owner's intent, for a multi that takes the subscription from
        the owner; an empty list if the intent is `except_intent`."""
        intent = await self._intent(record.intent)
        if intent is None or not intent.is_open or intent.id == except_intent:
            return []
        ended = replace(intent.record, state=IntentState.CONDEMNED, why=SUPERSEDED)
        return [Set(paths.intent(intent.id), records.encode_intent(ended), intent.version)]

    async def _intent(self, intent_id: str) -> Intent | None:
        if not intent_id:
            return None
        try:
            return await self._intents.get(intent_id)
        except errors.LedgerFenced:
            return None

    async def _check_free(self, topic_id: str, subscription: SubscriptionView, force: bool) -> None:
        """Raises errors.SubscriptionBusy if the subscription must not be taken from its owner."""
        if force:
            return
        if await self._alive(subscription.record):
            raise subscription_records.busy(subscription.name, subscription.record)
        await self._check_no_consumers(topic_id, subscription)

    async def _check_no_consumers(self, topic_id: str, subscription: SubscriptionView) -> None:
        """Raises errors.SubscriptionBusy."""
        if subscription.shares and await self._has_consumers(topic_id, subscription):
            raise errors.SubscriptionBusy(
                f"subscription '{subscription.name}' is used by consumers of a broker",
                "Stop the consumers, or choose another name. Under consumers `spark-ledger"
                " subscription reset` or `clear` moves the subscription, and `delete --force` (by"
                " HTTP: force=true) deletes it.",
                subscription=subscription.name,
            )

    async def _has_consumers(self, topic_id: str, subscription: SubscriptionView) -> bool:
        return subscription.used_by(await brokers_serving(self.store, topic_id))

    async def _discard(self, record: SubscriptionRecord) -> None:
        """Fences and deletes the record's ledger, which a newer record does not name any more."""
        if record.ledger_id is not None:
            await discard_ledger(self.ledgers, record.ledger_id)

    # -- positions -------------------------------------------------------------------------------

    async def _create_record(
        self, nodes: SubscriptionNodes, name: str, record: SubscriptionRecord
    ) -> dict[int, int] | None:
        """Makes the subscription; returns its positions. None: the subscription exists already."""
        made = await nodes.create(name, record)
        return None if made is None else await self._clip(nodes, made)

    async def _resolve(
        self, topic_id: str, target: SeekTarget, partitions: tuple[int, ...] | None = None
    ) -> dict[int, int]:
        """The target's positions in these partitions (None: in all partitions)."""
        state = await self._state(topic_id)
        chunks = seek_target.chunks_needed(state, target)
        tables = await self._read_chunks(chunks) if chunks else NO_TABLES
        live_ends = seek_target.NO_LIVE_ENDS
        if seek_target.needs_live_ends(state, target):
            live_ends = await ends_of(self.ledgers, state)
        positions = await seek_target.exactly(self.ledgers, state, target, tables, live_ends)
        return {p: at for p, at in positions.items() if partitions is None or p in partitions}

    async def _state(self, topic_id: str) -> TopicState:
        state = await self._log_of(topic_id).fold(fresh=True)
        if state.deleted:
            raise errors.TopicDeleted(f"topic {topic_id} was deleted", topic_id=topic_id)
        return state

    async def _clip(
        self, nodes: SubscriptionNodes, subscription: SubscriptionView
    ) -> dict[int, int]:
        """Raises the positions to the first rows kept. Once a step back is written, no trim passes
        its positions, so only earlier trims matter."""
        state = await self._state(nodes.topic_id)
        positions = subscription_records.clipped(subscription.record.floor, state.start_offsets())
        if positions != subscription.record.floor:
            await nodes.write(subscription, replace(subscription.record, floor=positions))
        return positions

    def _remember(self, cursor: Cursor) -> Cursor:
        """Keeps the cursor for `close`, and forgets cursors that have failed."""
        kept = [open_cursor for open_cursor in self._cursors if open_cursor.failure is None]
        self._cursors = dict.fromkeys([*kept, cursor])
        return cursor

    def _token(self) -> str:
        return f"{self._rng.getrandbits(128):032x}"

    def _session_changed(self, _: SessionState) -> None:
        self._session += 1
