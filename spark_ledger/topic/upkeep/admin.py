"""Steering topics: what an administrator, the CLI and maintenance do to one, each as a commit.

Always true: whatever changes a topic's rows or partitions is one commit under an intent of its own
that ends with it; nothing a subscription still needs goes unless it is forced, and that is decided
with the check of the subscriptions node in the same multi (hazard 37). Rows that go are read no
more at once; the bookies keep them for the delete delay.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spark_ledger import errors
from spark_ledger.metadata.cluster import not_held
from spark_ledger.metadata.store import Check
from spark_ledger.metadata.store_calls import LONG_AGO_MS, reachable
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log.actions import Action, Grow, Terminate, Trim
from spark_ledger.topic.log.holds import GRACE_MS
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.names import parse_topic
from spark_ledger.topic.log.policies import ENSEMBLE_SIZE, INHERIT, changed
from spark_ledger.topic.log.state import PartitionState, Tables, TopicState
from spark_ledger.topic.log.topics import PARTITIONS_MAX, TopicInfo, policies_now
from spark_ledger.topic.subscription import seek_target
from spark_ledger.topic.subscription.seek_target import SeekTarget
from spark_ledger.topic.upkeep import retention

TRIES_MAX = 5
END = Terminate()


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """Offsets [start, end) of a partition; how many rows of them there are, in so many segments
    and about so many bytes; `live` if it ends in a segment that is still appended to."""

    partition: int
    start_offset: int
    end_offset: int
    rows: int
    bytes: int
    segments: int
    live: bool


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """What there is to say of a topic. `ledgers` are those that its rows are in, `reclaimable`
    those that wait for the delete delay, or for their writer. Times by the store's clock."""

    info: TopicInfo
    commits: int
    committed_ms: int
    terminated: bool
    partitions: tuple[PartitionFacts, ...]
    ledgers: tuple[int, ...]
    reclaimable: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(one.rows for one in self.partitions)

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.partitions)


@dataclass(frozen=True, slots=True)
class Trimmed:
    """By partition where it starts now, of those that were trimmed; how many rows went."""

    starts: Mapping[int, int]
    rows: int


class TopicAdmin:
    """Methods take a topic's name as a user types it and raise errors.TopicNotFound,
    errors.TopicNameInvalid, errors.Unavailable; what changes a topic errors.CommitContended and
    errors.CommitOutcomeUnknown too (doing it again is harmless)."""

    def __init__(self, client: TopicClient) -> None:
        self._client = client

    async def create(
        self, name: str, partitions: int = 1, policies: Mapping[str, Any] | None = None
    ) -> TopicInfo:
        """Raises errors.TopicExists, errors.BadConfig, errors.NotEnoughBookies when an ensemble
        size is given and fewer bookies are registered."""
        wanted = changed(await self._client.topics.inherited(name), policies or {})
        if policies and ENSEMBLE_SIZE in policies:
            try:
                await self._check_bookies(name, wanted.ensemble_size)
            except errors.NotEnoughBookies:
                if await self._client.topics.find(name) is None:
                    raise
        return await self._client.topics.create(name, partitions, wanted)

    async def describe(self, name: str) -> TopicFacts:
        """The topic as it is now; reads what is in its checkpoint."""
        info = await self._client.topics.open(name)
        state, read = await self._read(info)
        kept = set(state.ledgers(read))
        dropped = sorted(state.dropped.keys() - kept)  # until a checkpoint, also those that went
        there = await self._client.ledgers.cluster.records.read_many(dropped)
        return TopicFacts(
            info=info,
            commits=state.next,
            committed_ms=state.commit_ms,
            terminated=state.terminated,
            partitions=tuple(_facts(held, read) for held in state.partitions),
            ledgers=tuple(sorted(kept)),
            reclaimable=tuple(
                ledger for ledger, one in zip(dropped, there, strict=True) if one is not None
            ),
        )

    async def delete(self, name: str) -> TopicInfo:
        """When it returns no process can commit to the topic or read it by name, and the writer of
        a live segment of it is fenced. Rows and nodes go after the delete delay."""
        info = await self._client.topics.delete(name)
        with reachable(f"deleting topic '{info.name}'"):
            state = await self._client.log(info.id).fold(fresh=True)
        live = [held.live.ledger_id for held in state.partitions if held.live is not None]
        await asyncio.gather(*(self._client.ledgers.recover(ledger_id) for ledger_id in live))
        return info

    async def change_policies(self, name: str, changes: Mapping[str, Any]) -> TopicInfo:
        """Raises errors.BadConfig, errors.NotEnoughBookies as `create`. See
        Topics.change_policies."""
        if changes.get(ENSEMBLE_SIZE, INHERIT) != INHERIT:
            before = (await self._client.topics.open(name)).policies
            wanted = changed(before, {n: one for n, one in changes.items() if one != INHERIT})
            if wanted.ensemble_size != before.ensemble_size:
                await self._check_bookies(name, wanted.ensemble_size)
        return await self._client.topics.change_policies(name, changes)

    async def _check_bookies(self, name: str, ensemble_size: int) -> None:
        """Only of a size that is given: no user chose the default."""
        what = f"a ledger of topic '{parse_topic(name).short}'"
        await self._client.ledgers.check_registered(ensemble_size, what)

    async def grow(self, name: str, partitions: int) -> TopicInfo:
        """Give the topic so many partitions, more than it has. Rows stay where they are; which
        partition a key is of changes. Raises errors.BadConfig."""
        info = await self._client.topics.open(name)
        if partitions > PARTITIONS_MAX:
            raise errors.BadConfig(f"partitions must be 1 to {PARTITIONS_MAX}, got {partitions}")
        if not info.policies.partitioned:
            raise errors.BadConfig(
                f"topic '{info.name}' is not partitioned, and Pulsar's clients use it so",
                f"`spark-ledger topic set {info.name.short} partitioned=true` first, and start"
                " those clients again.",
            )
        there = len((await self._state(info)).partitions)
        if partitions <= there:
            raise errors.BadConfig(
                f"topic '{info.name}' has {there} partitions, {partitions} were asked for",
                "Ask for more than there are: partitions only grow.",
            )
        await self._commit(info, "grow", [Grow(partitions)])
        return info

    async def terminate(self, name: str) -> TopicInfo:
        """Nothing can be appended any more; what is there can be read. Live segments end in the
        same commit, so their owners are fenced. Raises as seal.sealed."""
        info = await self._client.topics.open(name)
        await self._past_live(info, "terminate", lambda state: () if state.terminated else (END,))
        return info

    async def _past_live(
        self, info: TopicInfo, purpose: str, wanted: Callable[[TopicState], Sequence[Action]]
    ) -> None:
        """One commit of what seals every live segment, and of the actions that are wanted of that
        state; none where there is nothing to do. An owner that stopped while the cluster is held
        could not go on: so that is asked first."""
        with reachable("asking whether the metadata store is held"):
            await not_held(self._client.store)
        for tries in range(TRIES_MAX):
            state = await self._state(info)
            lives = [(info.id, held.live) for held in state.partitions if held.live is not None]
            async with self._client.past_live.ended(lives) as ended:
                rest = wanted(state)
                opens = [] if END in rest else ended.opens(info.id)
                actions = [*ended.seals(info.id), *rest, *opens]
                try:
                    if actions:
                        await self._commit(info, purpose, actions)
                    return
                except errors.TxnConflict:  # an owner went on meanwhile
                    if tries == TRIES_MAX - 1:
                        raise

    async def trim(self, name: str, target: SeekTarget, *, force: bool = False) -> Trimmed:
        """Rows below the target go: offsets by partition, what was committed before a time, or all
        that there are, those of live segments too, which end. Partitions whose rows all come after
        it stay as they are.

        Raises as seal.sealed, errors.SubscriptionBusy (a subscription still needs some of them, and
        it is not forced), errors.OffsetsOutOfRange, errors.OffsetsNotAssigned.
        """
        info = await self._client.topics.open(name)
        if target is seek_target.End.LATEST:
            await self._past_live(info, "seal", lambda state: ())
        for tries in range(TRIES_MAX):
            state = await self._state(info)
            read = await self._client.chunks.load(seek_target.chunks_needed(state, target))
            starts = state.start_offsets()
            found = await seek_target.exactly(self._client.ledgers, state, target, read)
            points = {p: to for p, to in found.items() if to > starts[p]}
            if not points:
                return Trimmed({}, 0)
            checks = [] if force else [await self._free(info, state, points)]
            try:
                await self._commit(info, "trim", [Trim(tuple(sorted(points.items())))], checks)
            except errors.TxnConflict:
                if tries == TRIES_MAX - 1:
                    raise
                continue
            return Trimmed(points, _rows_below(state, points))
        raise AssertionError("the last try raises or returns")

    async def _free(self, info: TopicInfo, state: TopicState, points: Mapping[int, int]) -> Check:
        """That no subscription needs a row below the points, as the multi is to check it."""
        holds = await self._client.subscriptions.holds(info.id, len(state.partitions))
        starts = state.start_offsets()
        held = holds.first({p: (starts[p], to) for p, to in points.items()})
        if held is not None:
            partition, offset = held
            raise errors.SubscriptionBusy(
                f"subscription {holds.by[partition]!r} of topic '{info.name}' holds partition"
                f" {partition} from offset {offset} on, the lowest at which it stood in the last"
                f" {GRACE_MS // 60_000} minutes; {points[partition]} was asked for",
                "Trim less, wait until what it has read is that long ago, delete it, or force it.",
                subscription=holds.by[partition],
                partition=partition,
                offset=offset,
            )
        return holds.check

    async def _commit(
        self,
        info: TopicInfo,
        purpose: str,
        actions: Sequence[Action],
        checks: Sequence[Check] = (),
    ) -> None:
        intents = self._client.intents
        intent = await intents.open_system_intent(purpose, info.name.full)
        try:
            await self._client.commit_actions(
                info.id, actions, intent, checks=checks, finish_intent=True
            )
        except errors.LedgerError:
            await intents.try_finish(intent)
            raise

    async def _state(self, info: TopicInfo) -> TopicState:
        with reachable(f"reading topic '{info.name}'"):
            return await self._client.log(info.id).fold(fresh=True)

    async def _read(self, info: TopicInfo) -> tuple[TopicState, Tables]:
        for tries in range(TRIES_MAX):
            state = await self._state(info)
            try:
                return state, await self._client.chunks.load(state.chunks())
            except errors.NoSuchLedger:  # a newer checkpoint took the place of a chunk
                if tries == TRIES_MAX - 1:
                    raise
        raise AssertionError("the last try raises or returns")


async def retain(
    client: TopicClient, info: TopicInfo, intent: Intent | None, now_ms: int
) -> Trimmed:
    """Let go what the topic's retention does not keep, in one commit under the intent, which is
    not ended; without an intent only say what would go. `now_ms` is by the store's clock.

    Raises errors.TxnConflict when a subscription came or went back, or the policies were changed
    meanwhile: the next pass decides anew; what committing raises.
    """
    with reachable(f"reading topic '{info.name}'"):
        now = await policies_now(client.store, info.id)
        policies = now.policies
        if policies.retention_ms is None and policies.retention_bytes is None:
            return Trimmed({}, 0)
        state = await client.log(info.id).fold(fresh=True)
    if state.deleted or now_ms == LONG_AGO_MS:
        return Trimmed({}, 0)
    holds = await client.subscriptions.holds(info.id, len(state.partitions), now_ms)
    needed = retention.chunks_needed(state, policies, now_ms, holds.offsets)
    read = await client.chunks.load(needed)
    points = retention.trim_points(state, policies, now_ms, holds.offsets, read)
    if points and intent is not None:
        checks = [holds.check, *now.checks]
        await client.commit_actions(
            info.id, [Trim(tuple(sorted(points.items())))], intent, checks=checks
        )
    return Trimmed(points, _rows_below(state, points))


def _rows_below(state: TopicState, points: Mapping[int, int]) -> int:
    cut = ((state.partitions[p], offset) for p, offset in points.items())
    return sum(held.rows_between(held.start_offset, offset) for held, offset in cut)


def _facts(held: PartitionState, read: Tables) -> PartitionFacts:
    start, end = held.start_offset, held.end_offset
    return PartitionFacts(
        partition=held.number,
        start_offset=start,
        end_offset=end,
        rows=held.rows_between(start, end),
        bytes=held.bytes_between(start, end),
        segments=sum(len(part.table) for part in held.stretches(start, end, read)),
        live=held.live is not None,
    )
