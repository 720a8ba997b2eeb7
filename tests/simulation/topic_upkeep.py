"""Upkeep of topics in a run, while queries write to them and other clients read: maintenance trims,
merges and checkpoints, a janitor takes intents away, subscriptions move and hold rows.

Always true: each of them may be killed or stand still at any moment, two of a kind may be at work
at once; what fails of it is tried again later or never.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from spark_ledger.errors import LedgerError
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import StoreError
from spark_ledger.metadata.store_calls import store_now_ms
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.upkeep.admin import TopicAdmin, retain
from spark_ledger.topic.upkeep.compactor import compact
from spark_ledger.topic.upkeep.janitor import Janitor
from spark_ledger.topic.upkeep.merge_plan import MergeLimits
from spark_ledger.topic.upkeep.upkeep import Merging, TopicHead
from tests.simulation.topic_ghost import BROKERED, LIVE, LogGhost
from tests.simulation.topic_work import TopicWork
from tests.simulation.world import Client

LEASE_S = 20.0
HOURS, QUIET_MS = MergeLimits(slot_ms=4_000), 300
PARTITIONS_MAX = 8


class TopicUpkeep:
    """The actors of one run that no other client waits for."""

    def __init__(self, work: TopicWork) -> None:
        self.work = work
        self.world = work.world
        rng = self.world.loop.random_for("topic upkeep")
        self.maintainers = rng.choice((0, 1, 1, 2))
        self.churn = work.plan.churn
        if self.churn:
            self.maintainers = 2
        self.janitors = 2 if "janitors" in work.plan.also else 1
        self._cleaning = 0
        self.recreations = rng.choice((0, 0, 0, 1, 2))
        self._end = self.world.loop.now + work.plan.chaos_s

    async def maintain(self, client: Client) -> None:
        """One thing after the other, on topics as they come."""
        topics = self.work.client(client)
        holds = topics.subscriptions.holds
        grace_ms = self.work.limits.grace_ms

        async def held(topic_id: str, partitions: int, now_ms: int | None = None) -> Any:
            return await holds(topic_id, partitions, now_ms, grace_ms)

        topics.subscriptions.holds = held  # type: ignore[method-assign, assignment]
        ways: list[Callable[[Client, TopicClient, LogGhost], Awaitable[None]]] = [
            *(self._checkpoint, self._checkpoint, self._retain, self._trim, self._merge)
        ]
        while client.process.alive and self.world.loop.now < self._end:
            await asyncio.sleep(
                client.rng.uniform(0.05, 0.5) if self.churn else client.rng.uniform(0.2, 3)
            )
            logs = [log for log in self.work.ghost.logs.values() if not log.state.deleted]
            if not logs:
                continue
            way = client.rng.choice(ways)
            try:
                await way(client, topics, client.rng.choice(logs))
            except (LedgerError, StoreError) as error:
                self.work.met(client, way.__name__.strip("_"), error)

    async def _checkpoint(self, client: Client, topics: TopicClient, log: LogGhost) -> None:
        await topics.checkpoints.make(log.topic_id)

    async def _retain(self, client: Client, topics: TopicClient, log: LogGhost) -> None:
        info = await topics.topics.open(log.name)
        intent = await topics.intents.open_system_intent("retain", log.name)
        try:
            now_ms = await store_now_ms(topics.store)
            if (await retain(topics, info, intent, now_ms)).starts:
                self.world.ghost.meet("rows retained no more")
        finally:
            await topics.intents.finish(intent.id)

    async def _trim(self, client: Client, topics: TopicClient, log: LogGhost) -> None:
        """Anywhere, or right up to what subscriptions hold, which is as far as it may be."""
        used = [one for one in self.work.ghost.logs.values() if one.subscriptions]
        right_up = bool(used) and client.rng.random() < 0.6
        log = used[-1] if right_up else log
        if log.name.endswith(f"/{BROKERED}"):  # each of its rows is to be read by everybody
            return
        ends = (await topics.log(log.topic_id).fold()).end_offsets()
        points = {p: client.rng.randint(0, end) for p, end in ends.items() if end}
        if right_up:
            now_ms = await store_now_ms(topics.store)
            holds = await topics.subscriptions.holds(log.topic_id, len(ends), now_ms)
            points = {p: at for p, at in holds.offsets.items() if at <= ends[p]}
        if right_up or (points and client.rng.random() < 0.5):
            trimmed = await TopicAdmin(topics).trim(log.name, points)
            if trimmed.starts:
                self.world.ghost.meet("rows trimmed")

    async def _merge(self, client: Client, topics: TopicClient, log: LogGhost) -> None:
        if log.state.next % 2:
            await self._merge_unasked(topics, log)
        elif (await compact(topics, log.name)).commits:
            self.world.ghost.meet("segments merged")

    async def _merge_unasked(self, topics: TopicClient, log: LogGhost) -> None:
        """As maintenance does it, with hours of seconds; what fails is tried again or never."""
        merging = Merging(topics, HOURS, bytes_per_s=None, quiet_ms=QUIET_MS)
        head = TopicHead(await topics.topics.open(log.name), log.state.next)
        report = await merging.once([head], await store_now_ms(topics.store))
        if report.merged:
            self.world.ghost.meet("segments merged")
            self.world.ghost.meet("segments merged without being asked")
        await merging.close()

    async def kept_going(self, name: str, work: Callable[[Client], Awaitable[None]]) -> None:
        """One process after another that does this work, until the end: each may be killed."""
        while self.world.loop.now < self._end:
            client = await self.world.client(name)
            task = client.run(_awaited(work, client), "works")
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            if client.process.alive:
                if isinstance(outcome, BaseException):
                    raise outcome
                return
            await asyncio.sleep(1)

    async def grow(self, client: Client) -> None:
        """Give topics more partitions under everybody's hands."""
        admin = TopicAdmin(self.work.client(client))
        while client.process.alive and self.world.loop.now < self._end:
            await asyncio.sleep(client.rng.uniform(0.05, 0.3) * self.work.plan.chaos_s)
            logs = [log for log in self.work.ghost.logs.values() if not log.state.deleted]
            logs = [log for log in logs if len(log.state.partitions) < PARTITIONS_MAX]
            if not logs:
                continue
            log = client.rng.choice(logs)
            try:
                await admin.grow(log.name, len(log.state.partitions) + client.rng.choice((1, 1, 2)))
                self.world.ghost.meet("topic grown")
            except (LedgerError, StoreError) as error:
                self.work.met(client, "grow", error)

    # -- deleted and made again ------------------------------------------------------------------

    async def recreate(self, client: Client) -> None:
        """Delete a topic under everybody's hands and make another one of its name, once or twice
        or over and over (hazard 36)."""
        often = "replacements" in self.work.plan.also
        for _ in range(10 if often else self.recreations):
            rest = client.rng.uniform(0.02, 0.2) if often else client.rng.uniform(0.2, 0.6)
            await asyncio.sleep(rest * self.work.plan.chaos_s)
            if often and self.world.loop.now >= self._end:
                return
            log = self.work.ghost.named(client.rng.choice((*self.work.names, LIVE)))
            if log is None:
                continue
            topics = self.work.client(client)
            try:
                await TopicAdmin(topics).delete(log.name)
                log.gone_s = self.world.loop.now
                self.world.ghost.meet("topic deleted")
                if client.rng.random() < 0.5:
                    await asyncio.sleep(client.rng.uniform(0, 2))
                partitions = len(log.state.partitions)
                await topics.topics.create(log.name, partitions, log.policies)
                self.world.ghost.meet("topic made again")
            except (LedgerError, StoreError) as error:
                self.work.met(client, "recreate", error)

    # -- the janitor -------------------------------------------------------------------------------

    async def clean(self, client: Client) -> None:
        """Pass after pass; some take an intent as stale that is not."""
        janitor = Janitor(client.session, client.ledgers, client.rng, lease_s=LEASE_S)
        while client.process.alive and self.world.loop.now < self._end:
            await asyncio.sleep(
                client.rng.uniform(0.5, 2) if self.churn else client.rng.uniform(1, 8)
            )
            intents = self.world.store.peek_children(paths.INTENTS)
            condemn = [client.rng.choice(intents)] if intents and client.rng.random() < 0.3 else []
            self._cleaning += 1
            if self._cleaning > 1:
                self.world.ghost.meet("two janitors at work during the chaos")
            try:
                report = await janitor.clean(condemn=condemn, force=True)
            except LedgerError as error:
                self.work.met(client, "clean", error)
                continue
            finally:
                self._cleaning -= 1
            self.world.trace.note(client.name, f"cleaned: {report}")
            self.world.ghost.meet("janitor pass")
            if report.deleted:
                self.world.ghost.meet("janitor deleted")


async def _awaited(work: Callable[[Client], Awaitable[None]], client: Client) -> None:
    await work(client)
