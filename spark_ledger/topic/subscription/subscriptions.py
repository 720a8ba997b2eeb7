"""Subscriptions of a topic by name: opened by queries, created, sought, deleted, listed, and the
rows that they hold against retention.

Always true: a subscription has one owner at a time, that of the record's epoch; its own query takes
over at once, another query once the owner released it, or the owner's intent has ended, or this
process saw no heartbeat of the intent for a lease in one unbroken session (it never compares
clocks); creating, deleting, seeking and taking over give the subscriptions' node a new version,
which a trim checks (hazards 37, 38).
"""

import asyncio
import builtins
import logging
import random
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial

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
    TRIES_MAX,
    Tries,
    each,
    reachable,
    read,
    store_now_ms,
)
from spark_ledger.process import Newest
from spark_ledger.topic.log import records
from spark_ledger.topic.log.holds import GRACE_MS, Holds
from spark_ledger.topic.log.intents import SUPERSEDED, Intent, Intents, Sighting
from spark_ledger.topic.log.records import IntentState
from spark_ledger.topic.log.segment_table import TableChunk
from spark_ledger.topic.log.state import UNREAD, Tables, TopicState
from spark_ledger.topic.log.topic_log import TopicLog
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.read.live import ends_of
from spark_ledger.topic.subscription import cursor_ledger, seek_target
from spark_ledger.topic.subscription import records as subscription_records
from spark_ledger.topic.subscription.cursor import Cursor, Surroundings, open_intent
from spark_ledger.topic.subscription.lag import PartitionLag, topic_lag
from spark_ledger.topic.subscription.nodes import Seen, SubscriptionNodes, brokers_serving
from spark_ledger.topic.subscription.records import (
    Claim,
    Positions,
    SubscriptionKind,
    SubscriptionRecord,
    fits,
    stored,
)
from spark_ledger.topic.subscription.seek_target import End, SeekTarget

LEASE_S = 300.0
SIGHTINGS_MAX = 10_000
READS_AT_ONCE = 64

_log = logging.getLogger(__name__)

ReadChunks = Callable[[Sequence[TableChunk]], Awaitable[Tables]]


@dataclass(frozen=True, slots=True)
class SubscriptionInfo:
    """A subscription in a listing. `positions` are its positions, exact once it is released; while
    it is used they may be some seconds behind."""

    name: str
    kind: SubscriptionKind
    live: bool
    query_id: str
    run_id: str
    epoch: int
    created_ms: int
    ledger_id: int | None
    positions: Positions


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
        self._ledgers = ledgers
        self._intents = intents
        self._log_of = log_of
        self._rng = rng
        self._read_chunks = read_chunks
        self._lease_s = lease_s
        self._cursors: dict[Cursor, None] = {}
        self._sightings = Newest[str, Sighting](SIGHTINGS_MAX)
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
        """The subscription in the hands of this run, made at `start` if it does not exist; an
        existing one keeps its position. `partitions`: the query reads only these. `kind` CONSUMER:
        a broker opens it for Pulsar's consumers.

        Reads only the metadata store: the cursor reads the earlier position in the background.
        Raises errors.SubscriptionBusy, errors.LedgerFenced (a newer run of the query has it),
        errors.TopicNotFound, errors.TopicDeleted.
        """
        nodes = SubscriptionNodes(self.store, topic.id)
        claim = Claim(query_id, run_id, self._token(), partitions=partitions, kind=kind)
        nodes.path(name)
        with reachable(f"opening subscription '{name}' of topic '{topic.name}'"):
            await nodes.ensure_folder()
            tries = Tries(self._rng)
            while True:
                seen = await self._seen_free(nodes, name, claim)
                intent = await open_intent(self._intents, claim, topic.id, name)
                claim = replace(claim, intent=intent.id)
                opened = await self._claim(nodes, name, seen, claim, intent, start)
                if opened is not None:
                    log = self._log_of(topic.id)
                    around = Surroundings(
                        nodes, self._ledgers, self._intents, log, topic, self._rng
                    )
                    return self._kept(Cursor(around, opened, claim, intent, new=seen is None))
                await tries.lost(f"others took subscription '{name}' again and again")

    async def reserve(
        self,
        topic: TopicInfo,
        name: str,
        *,
        start: SeekTarget,
        partitions: tuple[int, ...] | None = None,
    ) -> None:
        """For a query that has no id yet: checks that it could open the subscription. If that does
        not exist, it is made at `start`, unused, and holds the rows from there on.

        Raises errors.SubscriptionBusy, errors.TopicNotFound, errors.TopicDeleted.
        """
        nodes = SubscriptionNodes(self.store, topic.id)
        claim = Claim("", "", self._token(), partitions=partitions)
        nodes.path(name)
        with reachable(f"reading subscription '{name}' of topic '{topic.name}'"):
            await nodes.ensure_folder()
            tries = Tries(self._rng)
            while await self._seen_free(nodes, name, claim) is None:
                floor = stored(await self._resolve(topic.id, start, partitions))
                record = SubscriptionRecord(
                    claim.kind, owner=claim.owner, floor=floor, partitions=partitions
                )
                if await self._made(nodes, name, record) is not None:
                    return
                await tries.lost(f"others took subscription '{name}' again and again")

    async def close(self) -> None:
        """Gives up every open cursor, as a crash would; the caller releases them before."""
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
    ) -> dict[int, int]:
        """Makes a subscription that no query uses yet; returns its positions: all rows from there
        on are held when this returns. Raises errors.SubscriptionExists, errors.TopicNotFound,
        errors.TopicDeleted, errors.OffsetsOutOfRange."""
        nodes = SubscriptionNodes(self.store, topic_id)
        with reachable(f"creating subscription '{name}'"):
            await nodes.ensure_folder()
            if await nodes.read(name) is None:
                positions = _fitting(await self._resolve(topic_id, at))
                record = SubscriptionRecord(kind, owner=self._token(), floor=positions)
                made = await self._made(nodes, name, record)
                if made is not None:
                    return made
        if not exist_ok:
            raise errors.SubscriptionExists(
                f"there is a subscription '{name}' already", subscription=name
            )
        return await self.positions(topic_id, name)

    async def create_for_consumers(self, topic_id: str, name: str, at: Positions) -> None:
        """Makes a subscription for Pulsar's consumers, at these positions, which may be in live
        segments; does nothing if it exists. Positions that do not fit into the record may only be
        the first rows kept.

        Raises errors.OptionInvalid, errors.TopicNotFound, errors.TopicDeleted.
        """
        nodes = SubscriptionNodes(self.store, topic_id)
        with reachable(f"creating subscription '{name}'"):
            await nodes.ensure_folder()
            if not fits(at) and dict(at) != (await self._state(topic_id)).start_offsets():
                raise subscription_records.too_many(name)
            kind, floor = SubscriptionKind.CONSUMER, stored(at)
            record = SubscriptionRecord(kind, owner=self._token(), floor=floor)
            await self._made(nodes, name, record)

    async def delete(self, topic_id: str, name: str, *, force: bool = False) -> None:
        """Removes it: it holds no rows any more. If it is in use, only with `force`; its query then
        goes on without it. Raises errors.SubscriptionNotFound, errors.SubscriptionBusy."""
        nodes = SubscriptionNodes(self.store, topic_id)
        with reachable(f"deleting subscription '{name}'"):
            tries = Tries(self._rng)
            while True:
                seen = await nodes.read(name)
                if seen is None:
                    if tries.made:
                        return
                    raise await nodes.not_found(name)
                await self._check_free(topic_id, seen, force)
                gone = False
                try:
                    gone = await nodes.delete(seen, *await self._condemn_owner(seen.record))
                except OutcomeUnknown:
                    _log.info("subscription '%s' may be deleted: it is read again", name)
                if gone:
                    await self._discard(seen.record)
                    return
                await tries.lost(f"subscription '{name}' changes again and again")

    async def seek(
        self, topic_id: str, name: str, target: SeekTarget, *, force: bool = False
    ) -> dict[int, int]:
        """Sets it to `target`, or to the first row kept if that is later; returns its positions.
        If it is in use, only with `force`, which takes it from its query.

        Raises errors.SubscriptionNotFound, errors.SubscriptionBusy, errors.OffsetsOutOfRange,
        errors.OffsetsNotAssigned, errors.TopicDeleted.
        """
        nodes = SubscriptionNodes(self.store, topic_id)
        with reachable(f"seeking subscription '{name}'"):
            tries = Tries(self._rng)
            while True:
                seen = await nodes.get(name)
                await self._check_free(topic_id, seen, force)
                resolved = await self._resolve(topic_id, target)
                positions = _fitting({**await self._position(nodes, seen), **resolved})
                marks = await nodes.marks(name)
                others = nodes.going_back(name, marks, positions)
                others += await self._condemn_owner(seen.record)
                record = subscription_records.sought(seen.record, self._token(), positions)
                moved = await nodes.write(seen, record, *others, by_user=True)
                if moved is not None:
                    await self._discard(seen.record)
                    return await self._clip(nodes, moved)
                await tries.lost(f"subscription '{name}' changes again and again")

    async def list(
        self,
        topic_id: str,
        *,
        exact: bool = False,
        unreadable: dict[str, errors.LedgerError] | None = None,
    ) -> list[SubscriptionInfo]:
        """Every subscription of the topic, by name. With `exact` it also reads positions from
        cursor ledgers. If a subscription cannot be read, its error goes into `unreadable`, by its
        name, and the others are returned; without `unreadable` the error is raised."""
        nodes = SubscriptionNodes(self.store, topic_id)

        async def position(name: str) -> tuple[Seen, dict[int, int]] | None:
            try:
                seen = await nodes.read(name, fresh=False)
                if seen is None:
                    return None
                return seen, await self._position(nodes, seen) if exact else seen.floor
            except errors.LedgerError as error:
                if unreadable is None:
                    raise
                unreadable[name] = error
                return None

        with reachable("listing subscriptions"):
            await self.store.sync(nodes.folder)
            there = await each(position, await nodes.names(), READS_AT_ONCE)
            brokers = await brokers_serving(self.store, topic_id)
            return [_info(*listed, brokers) for listed in there if listed is not None]

    async def used_by_consumers(self, topic_id: str, name: str) -> bool:
        """Whether its consumers are connected at a broker that has a partition of the topic."""
        nodes = SubscriptionNodes(self.store, topic_id)
        with reachable(f"reading subscription '{name}'"):
            seen = await nodes.read(name)
            return seen is not None and seen.used_by(await brokers_serving(self.store, topic_id))

    async def positions(self, topic_id: str, name: str) -> dict[int, int]:
        """The subscription's positions, from the record and its cursor ledger, without disturbing
        its owner: they may lack a write under way. Raises errors.SubscriptionNotFound."""
        nodes = SubscriptionNodes(self.store, topic_id)
        with reachable(f"reading subscription '{name}'"):
            seen = await nodes.get(name)
            return await self._position(nodes, seen)

    async def lag(self, topic_id: str, name: str, now_ms: int) -> dict[int, PartitionLag]:
        """Its lag by partition, which includes confirmed rows of live segments; `now_ms` is by the
        store's clock. Raises as `positions` and `live.ends_of`."""
        positions = await self.positions(topic_id, name)
        with reachable(f"reading topic {topic_id}"):
            state = await self._log_of(topic_id).fold(fresh=True)
        return topic_lag(state, positions, now_ms, lives=await ends_of(self._ledgers, state))

    # -- for retention and the janitor -----------------------------------------------------------

    async def holds(
        self, topic_id: str, partitions: int, now_ms: int | None = None, grace_ms: int = GRACE_MS
    ) -> Holds:
        """The rows that the topic's subscriptions hold: those from the lowest position on that each
        had since `grace_ms` ago; `now_ms` is by the store's clock (None: the time is read if there
        is a subscription). Makes and removes marks of these positions. A trim or an overwrite
        checks in the same multi that no subscription came or went back since. Raises
        errors.TopicNotFound."""
        nodes = SubscriptionNodes(self.store, topic_id)
        held: dict[int, int] = {}
        by: dict[int, str] = {}
        with reachable(f"reading the subscriptions of topic {topic_id}"):
            await self.store.sync(nodes.folder)
            version = await nodes.ensure_folder()  # before the records: see Holds.check
            names = await nodes.names()
            if names and now_ms is None:
                now_ms = await store_now_ms(self.store)
            held_by = partial(self._held, nodes, now_ms or 0, grace_ms)
            read_holds = await each(held_by, names, READS_AT_ONCE)
        for name, its in zip(names, read_holds, strict=True):
            if its is None:
                continue
            record, lowest = its
            for p, offset in subscription_records.held_by(record, lowest, partitions).items():
                if p not in held or offset < held[p]:
                    held[p], by[p] = offset, name
        return Holds(held, Check(nodes.folder, version), by)

    async def _held(
        self, nodes: SubscriptionNodes, now_ms: int, grace_ms: int, name: str
    ) -> tuple[SubscriptionRecord, Positions] | None:
        """A subscription with its lowest position of the grace period; its marks are renewed."""
        seen = await nodes.read(name, fresh=False)
        if seen is None:
            return None
        marks = await nodes.marks(name)
        held = subscription_records.held(marks, seen.floor, now_ms, grace_ms)
        await nodes.renew_marks(seen, held.add, held.forget)
        return seen.record, held.positions

    # -- owners --------------------------------------------------------------------------------

    async def _seen_free(self, nodes: SubscriptionNodes, name: str, claim: Claim) -> Seen | None:
        """The subscription, if `claim` may have it; None: it does not exist. Raises
        errors.SubscriptionBusy."""
        seen = await nodes.read(name)
        if seen is None:
            return None
        if seen.record.query_id != claim.query_id and await self._alive(seen.record):
            raise subscription_records.busy(name, seen.record)
        if claim.kind is SubscriptionKind.QUERY:
            await self._check_no_consumers(nodes.topic_id, seen)
        return seen

    async def _claim(
        self,
        nodes: SubscriptionNodes,
        name: str,
        seen: Seen | None,
        claim: Claim,
        intent: Intent,
        start: SeekTarget,
    ) -> Seen | None:
        """Tries once to make the claim the owner; None: the nodes changed meanwhile."""
        check = Check(paths.intent(intent.id), intent.version)
        if seen is None:
            positions = await self._resolve(nodes.topic_id, start, claim.partitions)
            return await nodes.create(name, subscription_records.created(claim, positions), check)
        record = subscription_records.taken(seen.record, claim)
        others = [nodes.touch(), check, *await self._condemn_owner(seen.record, but=intent.id)]
        if seen.shares:
            record = replace(record, floor=_fitting(seen.floor))
            others += nodes.without_shares(seen)
        return await nodes.write(seen, record, *others)

    async def _alive(self, record: SubscriptionRecord) -> bool:
        """Whether its owner may be at work: the owner did not release it, the owner's intent is
        open, and this process has not seen the intent silent for a lease."""
        if not record.live:
            return False
        intent = await self._intent(record.intent)
        if intent is None or not intent.open:
            return False
        node = await read(self.store, paths.intent_heartbeat(intent.id))
        if node is None:
            return False
        now_s = asyncio.get_running_loop().time()
        seen = self._sightings.get(intent.id)
        changed = seen is None or not seen.same(node.version, self._session)
        if seen is None or changed:
            seen = Sighting(node.version, now_s, self._session)
        self._sightings.put(intent.id, seen)
        if changed:
            return True
        connected = self.store.session_state is SessionState.CONNECTED
        return not connected or now_s - seen.since_s < self._lease_s

    async def _condemn_owner(
        self, record: SubscriptionRecord, but: str = ""
    ) -> builtins.list[Operation]:
        """The operations that end the owner's intent in a multi that takes the subscription from
        it."""
        intent = await self._intent(record.intent)
        if intent is None or not intent.open or intent.id == but:
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

    async def _check_free(self, topic_id: str, seen: Seen, force: bool) -> None:
        """Raises errors.SubscriptionBusy if it must not be taken from its owner."""
        if force:
            return
        if await self._alive(seen.record):
            raise subscription_records.busy(seen.name, seen.record)
        await self._check_no_consumers(topic_id, seen)

    async def _check_no_consumers(self, topic_id: str, seen: Seen) -> None:
        """Raises errors.SubscriptionBusy."""
        if seen.shares and seen.used_by(await brokers_serving(self.store, topic_id)):
            raise errors.SubscriptionBusy(
                f"subscription '{seen.name}' is used by consumers of a broker",
                subscription=seen.name,
            )

    async def _discard(self, record: SubscriptionRecord) -> None:
        """Fence and delete a ledger that the record does not name any more."""
        if record.ledger_id is not None:
            await cursor_ledger.discard(self._ledgers, record.ledger_id)

    # -- positions -------------------------------------------------------------------------------

    async def _made(
        self, nodes: SubscriptionNodes, name: str, record: SubscriptionRecord
    ) -> dict[int, int] | None:
        """Makes it; returns its positions. None: it exists already."""
        made = await nodes.create(name, record)
        return None if made is None else await self._clip(nodes, made)

    async def _resolve(
        self, topic_id: str, target: SeekTarget, partitions: tuple[int, ...] | None = None
    ) -> dict[int, int]:
        """The target's positions in these partitions (None: in all)."""
        state = await self._state(topic_id)
        chunks = seek_target.chunks_needed(state, target)
        read = await self._read_chunks(chunks) if chunks else UNREAD
        needs_lives = seek_target.needs_lives(state, target)
        lives = await ends_of(self._ledgers, state) if needs_lives else seek_target.NO_LIVES
        positions = await seek_target.exactly(self._ledgers, state, target, read, lives)
        return {p: at for p, at in positions.items() if partitions is None or p in partitions}

    async def _state(self, topic_id: str) -> TopicState:
        state = await self._log_of(topic_id).fold(fresh=True)
        if state.deleted:
            raise errors.TopicDeleted(f"topic {topic_id} was deleted", topic_id=topic_id)
        return state

    async def _clip(self, nodes: SubscriptionNodes, seen: Seen) -> dict[int, int]:
        """Raises the positions to the first rows kept. Once a step back is written, no trim passes
        it, so only earlier trims count."""
        state = await self._state(nodes.topic_id)
        positions = subscription_records.clipped(seen.record.floor, state.start_offsets())
        if positions != seen.record.floor:
            await nodes.write(seen, replace(seen.record, floor=positions))
        return positions

    async def _position(self, nodes: SubscriptionNodes, seen: Seen) -> dict[int, int]:
        for _ in range(TRIES_MAX):
            if seen.record.ledger_id is None:
                break
            try:
                last = await cursor_ledger.last_entry(
                    self._ledgers, seen.record.ledger_id, fence=False
                )
                floor = subscription_records.later(
                    seen.record.floor, {} if last is None else last.positions
                )
                return replace(seen, record=replace(seen.record, floor=floor)).floor
            except errors.NoSuchLedger:  # its owner went on in another ledger, or it is lost
                again = await nodes.get(seen.name)
                if again.record.ledger_id == seen.record.ledger_id:
                    break
                seen = again
        return seen.floor

    def _kept(self, cursor: Cursor) -> Cursor:
        failed = [open_ for open_ in self._cursors if open_.failure is not None]
        for open_ in failed:
            del self._cursors[open_]
        self._cursors[cursor] = None
        return cursor

    def _token(self) -> str:
        return f"{self._rng.getrandbits(128):032x}"

    def _session_changed(self, _: SessionState) -> None:
        self._session += 1


def _fitting(positions: dict[int, int]) -> dict[int, int]:
    if not fits(positions):
        raise errors.OptionInvalid(
            f"the positions of {len(positions)} partitions do not fit into one record",
            "Let the query that uses the subscription move it.",
        )
    return positions


def _info(seen: Seen, positions: Positions, brokers: Container[str]) -> SubscriptionInfo:
    record = seen.record
    return SubscriptionInfo(
        seen.name,
        record.kind,
        record.live or seen.used_by(brokers),
        record.query_id,
        record.run_id,
        record.epoch,
        seen.created_ms,
        record.ledger_id,
        positions,
    )
