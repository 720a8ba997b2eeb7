"""The operations of an administrator, the CLI and maintenance on a topic, each as a commit.

Always true: each change of a topic's rows or partitions is one commit under its own intent, which
ends with the commit. Rows that a subscription still needs are taken away only by force; the multi
of the commit checks the subscriptions node (hazard 37). Rows that were taken away cannot be read
afterwards; the bookies keep them for the delete delay.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spark_ledger import errors
from spark_ledger.metadata.cluster import not_held_checks
from spark_ledger.metadata.store import Check
from spark_ledger.metadata.store_calls import LONG_AGO_MS, Tries, unavailable_while
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.commit.hand_over import EndingSegment
from spark_ledger.topic.log.actions import Action, Grow, Terminate, Trim
from spark_ledger.topic.log.holds import GRACE_MS
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.names import parse_topic
from spark_ledger.topic.log.policies import (
    ENSEMBLE_SIZE,
    INHERIT,
    PARTITIONS_MAX,
    NamespacePolicies,
    TopicPolicies,
    with_changes,
)
from spark_ledger.topic.log.state import PartitionState, Tables, TopicState
from spark_ledger.topic.log.topics import TopicInfo, read_policies
from spark_ledger.topic.subscription import seek_target
from spark_ledger.topic.subscription.seek_target import SeekTarget
from spark_ledger.topic.upkeep import retention

TRIES_MAX = 5
TERMINATE = Terminate()


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """Offsets [start, end) of a partition, the number of their rows and segments, and an estimate
    of their bytes. `live`: whether the partition has a live segment."""

    partition: int
    start_offset: int
    end_offset: int
    rows: int
    bytes: int
    segments: int
    live: bool


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """`ledgers` hold the topic's rows; `reclaimable` are dropped ledgers that stay until the delete
    delay ends, or until their writer ends. Times are by the store's clock."""

    info: TopicInfo
    commits: int
    committed_ms: int
    terminated: bool
    partitions: tuple[PartitionFacts, ...]
    ledgers: tuple[int, ...]
    reclaimable: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(partition.rows for partition in self.partitions)

    @property
    def bytes(self) -> int:
        return sum(partition.bytes for partition in self.partitions)


@dataclass(frozen=True, slots=True)
class TrimResult:
    """The new start offsets of the trimmed partitions; how many rows were taken away."""

    starts: Mapping[int, int]
    rows: int


class TopicAdmin:
    """Methods take a topic's name in the forms that a user may type, and raise
    errors.TopicNotFound, errors.TopicNameInvalid, errors.Unavailable. Methods that change a topic
    also raise errors.CommitContended and errors.CommitOutcomeUnknown (to repeat the call is
    harmless)."""

    def __init__(self, client: TopicClient) -> None:
        self._client = client

    async def create(
        self, name: str, partitions: int = 1, policies: Mapping[str, Any] | None = None
    ) -> TopicInfo:
        """Raises errors.TopicExists, errors.BadConfig; errors.NotEnoughBookies if `policies` has an
        ensemble size and fewer bookies are registered."""
        effective = with_changes(await self._client.topics.inherited_policies(name), policies or {})
        if policies and ENSEMBLE_SIZE in policies:
            try:
                await self._check_bookies(name, effective.ensemble_size)
            except errors.NotEnoughBookies:
                if await self._client.topics.find(name) is None:
                    raise
        return await self._client.topics.create(name, partitions, effective)

    async def describe(self, name: str) -> TopicFacts:
        """The topic as it is now; reads the chunks of its checkpoint."""
        info = await self._client.topics.open(name)
        state, tables = await self._state_and_tables(info)
        ledgers = set(state.ledgers(tables))
        dropped = sorted(state.dropped.keys() - ledgers)  # deleted ledgers too, until a checkpoint
        records = await self._client.ledgers.cluster.records.read_many(dropped)
        return TopicFacts(
            info=info,
            commits=state.next,
            committed_ms=state.commit_ms,
            terminated=state.terminated,
            partitions=tuple(_facts(partition, tables) for partition in state.partitions),
            ledgers=tuple(sorted(ledgers)),
            reclaimable=tuple(
                ledger
                for ledger, record in zip(dropped, records, strict=True)
                if record is not None
            ),
        )

    async def delete(self, name: str) -> TopicInfo:
        """When this returns, no process can commit to the topic or read it by name, and the writers
        of its live segments are fenced. Rows and nodes are deleted after the delete delay."""
        info = await self._client.topics.delete(name)
        with unavailable_while(f"deleting topic '{info.name}'"):
            state = await self._client.log(info.id).fold(fresh=True)
        live_ledgers = [
            partition.live.ledger_id for partition in state.partitions if partition.live is not None
        ]
        await asyncio.gather(
            *(self._client.ledgers.recover(ledger_id) for ledger_id in live_ledgers)
        )
        return info

    async def change_policies(self, name: str, changes: Mapping[str, Any]) -> TopicInfo:
        """Raises errors.BadConfig, errors.NotEnoughBookies as `create`. See
        Topics.change_policies."""
        if changes.get(ENSEMBLE_SIZE, INHERIT) != INHERIT:
            before = (await self._client.topics.open(name)).policies
            own_values = {policy: value for policy, value in changes.items() if value != INHERIT}
            after = with_changes(before, own_values)
            if after.ensemble_size != before.ensemble_size:
                await self._check_bookies(name, after.ensemble_size)
        return await self._client.topics.change_policies(name, changes)

    async def set_namespace(self, namespace: str, changes: Mapping[str, Any]) -> NamespacePolicies:
        """See Topics.set_namespace. Raises errors.NotEnoughBookies as `create`."""
        if changes.get(ENSEMBLE_SIZE, INHERIT) != INHERIT:
            before = await self._client.topics.namespace(namespace) or NamespacePolicies()
            after = before.with_changes(changes)
            await self.check_namespace(namespace, before, after)
        return await self._client.topics.set_namespace(namespace, changes)

    async def check_namespace(
        self, namespace: str, before: NamespacePolicies, after: NamespacePolicies
    ) -> None:
        """Raises errors.NotEnoughBookies if topics would get larger ensembles than the cluster has
        bookies."""
        sizes = [TopicPolicies(**present.topics).ensemble_size for present in (before, after)]
        if sizes[0] != sizes[1]:
            what = f"a ledger of namespace '{namespace}'"
            await self._client.ledgers.check_registered(sizes[1], what)

    async def _check_bookies(self, name: str, ensemble_size: int) -> None:
        """Checks that enough bookies are registered; called only if a user chose the size."""
        what = f"a ledger of topic '{parse_topic(name).short}'"
        await self._client.ledgers.check_registered(ensemble_size, what)

    async def grow(self, name: str, partitions: int) -> TopicInfo:
        """Gives the topic this number of partitions, which must be higher than before. Rows stay in
        their partitions; new rows of a key may go to another partition. Raises errors.BadConfig."""
        info = await self._client.topics.open(name)
        if partitions > PARTITIONS_MAX:
            raise errors.BadConfig(f"partitions must be 1 to {PARTITIONS_MAX}, got {partitions}")
        if not info.policies.partitioned:
            raise errors.BadConfig(
                f"topic '{info.name}' is not partitioned, and Pulsar's clients rely on that",
                f"`spark-ledger topic set {info.name.short} partitioned=true` first, and start"
                " these clients again.",
            )
        current = len((await self._state(info)).partitions)
        if partitions <= current:
            raise errors.BadConfig(
                f"topic '{info.name}' has {current} partitions, and cannot get {partitions}",
                "Give a higher number: partitions only grow.",
            )
        await self._client.topics.check_room(info.name, partitions - current)
        await self._commit(info, "grow", [Grow(partitions)])
        await self._client.topics.note_growth(info, partitions)
        return info

    async def terminate(self, name: str) -> TopicInfo:
        """The topic takes no more rows; its rows can be read. The same commit ends live segments,
        so their owners are fenced. Raises as seal.seal_live_segment."""
        info = await self._client.topics.open(name)
        await self._commit_with_seals(
            info, "terminate", lambda state: () if state.terminated else (TERMINATE,)
        )
        return info

    async def _commit_with_seals(
        self, info: TopicInfo, purpose: str, plan: Callable[[TopicState], Sequence[Action]]
    ) -> None:
        """Makes one commit that seals every live segment and has the actions that `plan` returns
        for the state; makes no commit without an action. First checks that the cluster is not held:
        an owner that stops for the commit could not open a new segment in a held cluster."""
        with unavailable_while("asking whether the metadata store is held"):
            await not_held_checks(self._client.store)
        tries = Tries(tries_max=TRIES_MAX)
        while True:
            state = await self._state(info)
            lives = [
                EndingSegment(info.id, partition.live)
                for partition in state.partitions
                if partition.live
            ]
            async with self._client.live_committer.end_segments(lives) as ended:
                other_actions = plan(state)
                opens = [] if TERMINATE in other_actions else ended.opens(info.id)
                actions = [*ended.seals(info.id), *other_actions, *opens]
                try:
                    if actions:
                        await self._commit(info, purpose, actions)
                    return
                except errors.TxnConflict as conflict:  # an owner went on meanwhile
                    await tries.retry_or_raise(conflict)

    async def trim(self, name: str, target: SeekTarget, *, force: bool = False) -> TrimResult:
        """Takes away the rows below the target: offsets by partition, a commit time, or the end.
        With the end it takes away all rows, also those of live segments, and ends these segments.

        Raises as seal.seal_live_segment, errors.SubscriptionBusy (a subscription still needs some
        of the rows, and `force` is false), errors.OffsetsOutOfRange, errors.OffsetsNotAssigned.
        """
        info = await self._client.topics.open(name)
        if target is seek_target.End.LATEST:
            await self._commit_with_seals(info, "seal", lambda state: ())
        tries = Tries(tries_max=TRIES_MAX)
        while True:
            state = await self._state(info)
            tables = await self._client.chunks.load(seek_target.chunks_needed(state, target))
            starts = state.start_offsets()
            targets = await seek_target.exactly(self._client.ledgers, state, target, tables)
            points = {p: offset for p, offset in targets.items() if offset > starts[p]}
            if not points:
                return TrimResult({}, 0)
            checks = [] if force else [await self._check_holds(info, state, points)]
            try:
                await self._commit(info, "trim", [Trim(tuple(sorted(points.items())))], checks)
                return TrimResult(points, _rows_below(state, points))
            except errors.TxnConflict as conflict:
                await tries.retry_or_raise(conflict)

    async def _check_holds(
        self, info: TopicInfo, state: TopicState, points: Mapping[int, int]
    ) -> Check:
        """Checks that no subscription needs a row below the points; returns the check for the
        multi. Raises errors.SubscriptionBusy."""
        holds = await self._client.subscriptions.holds(info.id, len(state.partitions))
        starts = state.start_offsets()
        held = holds.first_held({p: (starts[p], to) for p, to in points.items()})
        if held is not None:
            partition, offset = held
            raise errors.SubscriptionBusy(
                f"subscription {holds.holders[partition]!r} of topic '{info.name}' holds partition"
                f" {partition} from offset {offset} on, its lowest position in the last"
                f" {GRACE_MS // 60_000} minutes; the trim would go to {points[partition]}",
                "Trim fewer rows, wait until the subscription has been past these rows that long,"
                " delete the subscription, or force the trim.",
                subscription=holds.holders[partition],
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
        with unavailable_while(f"reading topic '{info.name}'"):
            return await self._client.log(info.id).fold(fresh=True)

    async def _state_and_tables(self, info: TopicInfo) -> tuple[TopicState, Tables]:
        tries = Tries(tries_max=TRIES_MAX)
        while True:
            state = await self._state(info)
            try:
                return state, await self._client.chunks.load(state.chunks())
            except errors.NoSuchLedger as error:  # a newer checkpoint replaced a chunk
                await tries.retry_or_raise(error)


async def retain(
    client: TopicClient, info: TopicInfo, intent: Intent | None, now_ms: int
) -> TrimResult:
    """Trims the rows that the topic's retention does not keep, in one commit under the intent,
    which stays open. Without an intent it trims no rows, and returns the result that a trim would
    have. `now_ms` is by the store's clock.

    Raises errors.TxnConflict if meanwhile a subscription was made or moved back, or the policies
    were changed (the next pass decides again), and as TopicClient.commit_actions.
    """
    with unavailable_while(f"reading topic '{info.name}'"):
        current = await read_policies(client.store, info.id)
        policies = current.policies
        if not policies.trims:
            return TrimResult({}, 0)
        state = await client.log(info.id).fold(fresh=True)
    if state.deleted or now_ms == LONG_AGO_MS:
        return TrimResult({}, 0)
    holds = await client.subscriptions.holds(info.id, len(state.partitions), now_ms)
    chunks = retention.chunks_needed(state, policies, now_ms, holds.offsets)
    tables = await client.chunks.load(chunks)
    points = retention.trim_points(state, policies, now_ms, holds.offsets, tables)
    if points and intent is not None:
        checks = [holds.check, *current.checks]
        await client.commit_actions(
            info.id, [Trim(tuple(sorted(points.items())))], intent, checks=checks
        )
    return TrimResult(points, _rows_below(state, points))


def _rows_below(state: TopicState, points: Mapping[int, int]) -> int:
    trims = ((state.partitions[p], offset) for p, offset in points.items())
    return sum(partition.rows_between(partition.start_offset, to) for partition, to in trims)


def _facts(partition: PartitionState, tables: Tables) -> PartitionFacts:
    start, end = partition.start_offset, partition.end_offset
    return PartitionFacts(
        partition=partition.number,
        start_offset=start,
        end_offset=end,
        rows=partition.rows_between(start, end),
        bytes=partition.bytes_between(start, end),
        segments=sum(len(part.table) for part in partition.stretches(start, end, tables)),
        live=partition.live is not None,
    )
