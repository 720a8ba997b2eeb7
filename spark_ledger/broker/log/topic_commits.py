"""What a broker commits to a topic's log: opens and seals of all partitions that it has, together.

Always true: one commit is under way for a topic at a time, and requests of partitions that come
meanwhile go into the next commit (hazard 16). If one request cannot be committed, every other
request is committed by itself. All commits are under one intent of this broker, and its heartbeat
shows that the broker is alive. A ledger made under an intent that has ended is not committed under
the next intent (hazard 4: a janitor deletes the ledger). After another broker has taken a
partition, this broker opens no ledger in it: no ledger appears after the other broker has read the
log (hazard 31).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from spark_ledger import errors
from spark_ledger.async_tasks import SharedReads
from spark_ledger.broker.log.holds import SegmentHold, SegmentHolds
from spark_ledger.broker.log.ownership import Deposed, Ownership
from spark_ledger.broker.settings import DEFAULTS, BrokerSettings
from spark_ledger.ledger.client import VersionedRecord
from spark_ledger.ledger.records import IdSpent
from spark_ledger.ledger.writer import AsyncLedgerWriter
from spark_ledger.metadata.store import Check, Watcher
from spark_ledger.topic.client import NO_ROW_KINDS, TopicClient
from spark_ledger.topic.commit.draft import RowKind
from spark_ledger.topic.commit.hand_over import owner_name
from spark_ledger.topic.commit.seal import EMPTY_EXTENT, Extent
from spark_ledger.topic.log.actions import ANY_OPENING, Action, OpenLive
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.policies import PAGE_CACHE, SYNCED, TopicPolicies
from spark_ledger.topic.log.segments import LiveSegment
from spark_ledger.topic.log.state import TopicState
from spark_ledger.topic.log.topics import TopicInfo

PAUSE_S, PAUSE_S_MAX = 0.1, 5.0
LEDGERS_AT_ONCE = 100
"""How many ledgers one multi makes: a tenth of ZooKeeper's 1 MiB for a request."""

RETENTION_PARTS = 4
ROLL_BYTES_MIN = 1 << 20
_log = logging.getLogger(__name__)

TAKES_NO_ROWS = (
    *(Deposed, errors.TopicDeleted, errors.TopicNotFound, errors.TopicTerminated),
    errors.SchemaIncompatible,
)
"""Lasting errors: after them this broker opens no ledger for producers' messages."""
_OF_ONE_PARTITION = (errors.TxnConflict, errors.SchemaIncompatible, ValueError)
"""Errors that may come from the actions of one partition: then each request is committed by
itself."""


class MadeLedger(NamedTuple):
    """A new ledger, and the intent under which it was made."""

    writer: AsyncLedgerWriter
    intent: Intent


class _Request(NamedTuple):
    """Actions to commit. `made_under`: the intent of the ledger that the actions open; `owned`: a
    check that this broker still owns the partition; `kind`: that of the rows to come."""

    actions: tuple[Action, ...]
    made_under: Intent | None
    owned: Check | None
    kind: RowKind
    done: "asyncio.Future[None]"


@dataclass(frozen=True, slots=True)
class RollLimits:
    """When the next live ledger begins: at the limit that is reached first. The limits have two
    reasons: retention deletes whole ledgers, and after a bookie has failed the repair of one ledger
    is not to copy too many bytes at once. A seal or a reader's search takes no longer in a larger
    ledger.

    If the topic has deduplication, the next owner of a partition reads the whole live segment, for
    the last sequence id of each producer. So a segment with `entries_read` entries or `bytes_read`
    bytes is sealed, and the next segment is opened in the same ledger."""

    bytes: int = DEFAULTS.roll_bytes
    entries: int = DEFAULTS.roll_entries
    age_s: float = DEFAULTS.roll_age_s
    entries_read: int = DEFAULTS.roll_entries_read
    bytes_read: int = DEFAULTS.roll_bytes_read

    @staticmethod
    def of(settings: BrokerSettings, policies: TopicPolicies) -> "RollLimits":
        """The limits by settings and policies. A live ledger has at most a quarter of the time or
        of the bytes that the topic's retention keeps (but ROLL_BYTES_MIN may be more)."""
        size, age_s = settings.roll_bytes, settings.roll_age_s
        if policies.retention_ms is not None:
            age_s = min(age_s, max(1.0, policies.retention_ms / 1000 / RETENTION_PARTS))
        if policies.retention_bytes is not None:
            size = min(size, max(ROLL_BYTES_MIN, policies.retention_bytes // RETENTION_PARTS))
        entries_read = settings.roll_entries_read
        if policies.deduplication_entries_max is not None:
            entries_read = min(entries_read, policies.deduplication_entries_max)
        return RollLimits(
            size, settings.roll_entries, age_s, entries_read, settings.roll_bytes_read
        )

    def reached(self, size: int, entries: int, age_s: float) -> bool:
        return size >= self.bytes or entries >= self.entries or age_s >= self.age_s

    def is_long(self, live: LiveSegment | None, size: int, entries: int) -> bool:
        """Whether the live segment has to be sealed, to bound what the next owner reads. `size` and
        `entries` are those of the segment's ledger."""
        return live is not None and (
            size - live.bytes_before >= self.bytes_read
            or entries - live.first_entry >= self.entries_read
        )


@dataclass(frozen=True, slots=True)
class NextLedger:
    """The ledger that is opened next, made under `intent`. The ledger is new, or it had live
    segments before. Then `extent` has its size, commit `after` opened its last segment, and its
    first segment was opened at `opened_s` of the loop's clock."""

    writer: AsyncLedgerWriter
    intent: Intent
    extent: Extent = EMPTY_EXTENT
    after: int = ANY_OPENING
    opened_s: float = 0.0

    def is_usable(self, intent: Intent) -> bool:
        """Whether the ledger can be opened under that intent."""
        return self.intent.id == intent.id and self.writer.failure is None

    def is_open_in(self, live: LiveSegment) -> bool:
        """Whether `live`, by the topic's log, is a new segment in this ledger, and the ledger can
        still be written."""
        is_here = self.writer.ledger_id == live.ledger_id and self.after != live.opened
        return is_here and self.writer.failure is None


class TopicCommits:
    """A broker's commits for its partitions of a topic; `epochs` has the epoch of each partition.
    `clock_ms` estimates the store's time."""

    def __init__(
        self,
        client: TopicClient,
        topic: TopicInfo,
        ownership: Ownership,
        clock_ms: Callable[[], int],
    ) -> None:
        self.client = client
        self.topic = topic
        self.epochs: dict[int, int] = {}
        self._ownership = ownership
        self._clock_ms = clock_ms
        self._last_ms = 0
        self._intent: Intent | None = None
        self._opening = asyncio.Lock()
        log = client.log(topic.id)
        self._look = SharedReads[None, TopicState](lambda _: log.fold(fresh=True))
        self._holds = SegmentHolds(partial(client.follow, topic.id, topic.name.short), log.fold)
        self._requests: list[_Request] = []
        self._commit_task: asyncio.Task[None] | None = None
        self._ledger_requests: dict[str, list[asyncio.Future[MadeLedger]]] = {}
        """By the durability of the requested ledgers."""
        self._make_task: asyncio.Task[None] | None = None

    @property
    def owner_name(self) -> str:
        """This broker's name in the log, as the owner of the segments that it opens."""
        return owner_name(self._ownership.broker_id)

    @property
    def may_lose_offsets(self) -> bool:
        """Whether all copies of a row may be lost, and another row may get the row's offset."""
        return self.topic.policies.durability == PAGE_CACHE

    def now_ms(self) -> int:
        """The time for a new entry: an estimate of the store's time that never falls."""
        self._last_ms = max(self._last_ms, self._clock_ms())
        return self._last_ms

    async def check_owner(self, partition: int) -> Check:
        """A check that holds as long as no partition of the topic gets another owner. Raises
        Deposed, errors.Unavailable."""
        if partition not in self.epochs:
            raise Deposed(f"this broker gave partition {partition} of {self.topic.name} up")
        return await self._ownership.check(self.topic.id, partition, self.epochs[partition])

    async def lost_partitions(
        self, *, fresh: bool = True, watch: Watcher | None = None
    ) -> list[int]:
        """The partitions that this broker no longer owns by the record. `fresh`: the record is read
        after a sync of the store. `watch` is set on the record. Raises errors.Unavailable."""
        epochs = dict(self.epochs)
        now = await self._ownership.owners(self.topic.id, fresh=fresh, watch=watch)
        mine = now.epochs_of(self._ownership.broker_id)
        return [number for number, epoch in epochs.items() if mine.get(number) != epoch]

    async def state(self) -> TopicState:
        """The topic's state, not older than this call. Partitions that ask at once share one read.
        Raises errors.TopicDeleted, errors.Unavailable."""
        return self._checked(await self._look(None))

    def _checked(self, state: TopicState) -> TopicState:
        if state.deleted:
            raise errors.TopicDeleted(f"topic {self.topic.name} was deleted")
        self._last_ms = max(self._last_ms, state.commit_ms)
        return state

    async def past(self, partition: int, hold: SegmentHold) -> TopicState | None:
        """The topic's state as soon as the held segment is no longer live. None: the segment is
        still live when the hold is over. Raises errors.LedgerError."""
        state = await self._holds.past(partition, hold)
        return None if state is None else self._checked(state)

    async def intent(self) -> Intent:
        async with self._opening:
            if self._intent is None:
                intents = self.client.intents
                self._intent = await intents.open_system_intent("broker", self.topic.id)
            return self._intent

    async def renew_intent(self, ended: Intent | None) -> None:
        """Make the next call of `intent` open another intent, as `ended` may have ended. If another
        intent was opened meanwhile, it stays: ledgers are made under it."""
        async with self._opening:
            if ended is not None and ended is self._intent:
                await self.client.intents.try_finish(ended)
                self._intent = None

    async def heartbeat(self) -> None:
        if self._intent is not None:
            await self.client.intents.heartbeat(self._intent)

    async def close(self) -> None:
        if self._commit_task is not None:
            await asyncio.gather(self._commit_task, return_exceptions=True)
        await self.renew_intent(self._intent)

    async def new_ledger(self) -> MadeLedger:
        """A new ledger for rows of a partition. Ledgers that partitions request at once are made by
        one multi. Raises errors.LedgerError: errors.LedgerFenced if the intent has ended."""
        return await self._new_ledger(self.topic.policies.durability)

    async def new_ack_ledger(self) -> MadeLedger:
        """A new ledger for acknowledgements. They are synced, whatever the topic's durability:
        their receipts promise that. Raises errors.LedgerError."""
        return await self._new_ledger(SYNCED)

    async def _new_ledger(self, durability: str) -> MadeLedger:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[MadeLedger] = loop.create_future()
        self._ledger_requests.setdefault(durability, []).append(future)
        if self._make_task is None:
            self._make_task = loop.create_task(self._make_ledgers())
        return await future

    async def _make_ledgers(self) -> None:
        try:
            while self._ledger_requests:
                durability, waiting = self._ledger_requests.popitem()
                futures, rest = waiting[:LEDGERS_AT_ONCE], waiting[LEDGERS_AT_ONCE:]
                if rest:
                    self._ledger_requests[durability] = rest
                intent: Intent | None = None
                try:
                    intent = await self.intent()
                    ledgers = await self._create_ledgers(intent, len(futures), durability)
                except Exception as error:
                    if isinstance(error, errors.LedgerFenced):
                        await self.renew_intent(intent)
                    _fail(futures, error)
                    continue
                for future, ledger in zip(futures, ledgers, strict=True):
                    if future.done():  # the request was cancelled
                        ledger.writer.abandon()
                    else:
                        future.set_result(ledger)
        finally:
            self._make_task = None

    async def _create_ledgers(
        self, intent: Intent, count: int, durability: str
    ) -> list[MadeLedger]:
        policies = (await self.client.topics.again(self.topic) or self.topic).policies
        while True:
            ids = [await self.client.intents.ledger_id(intent) for _ in range(count)]
            with suppress(IdSpent):
                writers = await self.client.ledgers.create_several(
                    ids,
                    policies.ensemble_size,
                    policies.write_quorum,
                    policies.ack_quorum,
                    intent=intent.id,
                    topic=self.topic.id,
                    durability=durability,
                    announce_lac=True,
                )
                return [MadeLedger(writer, intent) for writer in writers]

    async def recovered(
        self, ledger_id: int, partition: int, stops: Callable[[], bool]
    ) -> VersionedRecord:
        """Recover a ledger that has failed; returns its CLOSED record. Recovery is tried again
        until `stops()`. Raises Deposed if another broker has the partition; after `stops()`, raises
        as LedgerStore.recover."""
        pause_s = PAUSE_S
        while True:
            try:
                return await self.client.ledgers.recover(ledger_id)
            except (errors.Unavailable, errors.DataUnavailable, errors.NotEnoughBookies) as error:
                _log.warning("ledger %d cannot be recovered now: %s", ledger_id, error)
                if stops():
                    raise
            with suppress(errors.Unavailable):
                await self.check_owner(partition)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def opening(self, partition: int, following: NextLedger) -> OpenLive:
        """The action that opens the ledger `following` as the partition's live segment."""
        writer, extent = following.writer, following.extent
        return OpenLive(
            *(partition, writer.ledger_id, writer.version, self.owner_name),
            *(self.epochs[partition], self.topic.policies.deduplication),
            *(extent.entries, extent.rows, extent.bytes),
        )

    async def commit(
        self,
        actions: Sequence[Action],
        made_under: Intent | None = None,
        owned: Check | None = None,
        kind: RowKind = RowKind.BYTES,
    ) -> None:
        """Commit these actions, together with the actions of other partitions. `made_under`: the
        intent of a ledger that the actions open; `owned`: an earlier result of `check_owner`;
        `kind`: that of the rows in the segments that the actions open.
        Raises errors.LedgerError: errors.LedgerFenced if `made_under` is no longer this broker's
        intent."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests.append(_Request(tuple(actions), made_under, owned, kind, future))
        if self._commit_task is None:
            self._commit_task = asyncio.get_running_loop().create_task(self._work())
        await future

    async def _work(self) -> None:
        try:
            while self._requests:
                requests, self._requests = self._requests, []
                await self._commit_all(requests)
        finally:
            self._commit_task = None

    async def _commit_all(self, requests: list[_Request]) -> None:
        intent: Intent | None = None
        try:
            intent = await self.intent()
            requests = _made_under(intent, requests)
            actions = [action for request in requests for action in request.actions]
            if actions:
                owned = dict.fromkeys(
                    request.owned for request in requests if request.owned is not None
                )
                opened_kinds = {
                    request.kind
                    for request in requests
                    if any(isinstance(action, OpenLive) for action in request.actions)
                }
                kind = RowKind.BYTES if RowKind.BYTES in opened_kinds else RowKind.OBJECTS
                await self.client.commit_actions(
                    self.topic.id,
                    actions,
                    intent,
                    checks=[*owned],
                    row_kinds={self.topic.id: kind} if opened_kinds else NO_ROW_KINDS,
                )
        except Exception as error:
            if isinstance(error, errors.LedgerFenced):
                await self.renew_intent(intent)
            elif isinstance(error, _OF_ONE_PARTITION) and len(requests) > 1:
                for request in requests:
                    await self._commit_all([request])
                return
            _fail([request.done for request in requests], error)
        else:
            for request in requests:
                if not request.done.done():
                    request.done.set_result(None)


def _made_under(intent: Intent, requests: list[_Request]) -> list[_Request]:
    """The requests that open no ledger, or a ledger made under `intent`. The other requests
    fail."""
    valid = [r for r in requests if r.made_under is None or r.made_under.id == intent.id]
    error = errors.LedgerFenced("the intent under which a ledger was made has ended")
    _fail([request.done for request in requests if request not in valid], error)
    return valid


def _fail(futures: Sequence["asyncio.Future[Any]"], error: Exception) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)
