"""A cluster with topics on which a deed is done, and the judgement of all that came of it.

Always true: nothing goes wrong here but what a fate brings; each process is a client of the world
with a topic layer of its own; what is committed, trimmed, checkpointed and deleted is judged when
the store applies it (topic_ghost.py), and at the end everything is read and brought to rest.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from spark_ledger.errors import LedgerError
from spark_ledger.metadata.store import StoreError
from spark_ledger.metadata.store_calls import store_now_ms
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.commit.commit import TxnKey
from spark_ledger.topic.log.names import parse_topic
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.records import decode_topic_pointer
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.upkeep.admin import TopicAdmin, retain
from spark_ledger.topic.upkeep.janitor import Janitor
from tests.simulation import invariants
from tests.simulation.audit import Audit
from tests.simulation.invariants import require
from tests.simulation.ledger_work import LedgerWork
from tests.simulation.limbo_work import LimboWork
from tests.simulation.plan import Plan
from tests.simulation.topic_cursors import TopicCursors
from tests.simulation.topic_ghost import LogGhost
from tests.simulation.topic_live import TopicLive
from tests.simulation.topic_rest import TopicRest
from tests.simulation.topic_work import ANY, TOPIC, TopicWork
from tests.simulation.world import Client, World

QUORUM = (3, 3, 2)
PLAN = Plan(
    quorum=QUORUM,
    bookies=3,
    faults=(),
    chaos_s=1.0,
    between_s=1.0,
    writers=0,
    recoverers=0,
    tailers=0,
    topics=True,
)
PATIENCE_S = 240.0
COMMIT_S = 20.0  # less than the store is away (fates.py)
"""Simulated seconds in which who comes after a process that died can do what it came for."""
LEASE_S = 20.0


class Stage:
    """Made in a loop; `begin` it first."""

    def __init__(self) -> None:
        self.world = World()
        self.work = TopicWork(self.world, PLAN)
        self.work.names, self.work.queries = (TOPIC,), ["q", "r"]
        self.cursors = TopicCursors(self.work)
        self.cursors.mortality = 0.0
        self.live = TopicLive(self.work)
        self.ledgers = LedgerWork(self.world, PLAN)
        self.sleeper: tuple[Client, asyncio.Task[None]] | None = None
        """A process that stands still before its commit, and what it does."""
        self._topics: dict[str, TopicClient] = {}
        self._runs = 0

    async def begin(self, **policies: Any) -> None:
        """Three bookies, topic "t" with two partitions."""
        await self.world.prepare(PLAN.bookies)
        await self.create(await self.world.client("founder"), TOPIC, **policies)

    def topics(self, client: Client) -> TopicClient:
        if client.name not in self._topics:
            topics = self._topics[client.name] = self.work.client(client)
            holds = topics.subscriptions.holds

            async def held(topic_id: str, partitions: int, now_ms: int | None = None) -> Any:
                return await holds(topic_id, partitions, now_ms, 0)

            topics.subscriptions.holds = held  # type: ignore[method-assign, assignment]
        return self._topics[client.name]

    def log(self, name: str = TOPIC) -> LogGhost:
        """The topic that has the name now, or had it last."""
        found = self.work.ghost.named(name)
        if found is None:
            named = [each for each in self.work.ghost.logs.values() if each.name.endswith(name)]
            found = named[-1]
        return found

    async def create(self, client: Client, name: str, **policies: Any) -> TopicInfo:
        policies = {"delete_delay_ms": 0, **policies}
        made = TopicPolicies(*QUORUM, **policies)
        return await self.topics(client).topics.create(name, 2, made, exist_ok=True)

    # -- verbs -----------------------------------------------------------------------------------

    def new_run(self) -> int:
        self._runs += 1
        return self._runs

    async def batch(
        self,
        client: Client,
        version: int,
        run: int,
        *,
        query: str = "q",
        names: Sequence[str] = (TOPIC,),
        overwrite: bool = False,
        asleep: bool = False,
    ) -> None:
        """One micro-batch of a query's run: its intent, its tasks, its commit, judged (T1, T2);
        `asleep`: it stands still before the commit."""
        topics, work = self.topics(client), self.work
        infos = [await topics.topics.open(name) for name in names]
        target = ANY if len(names) > 1 else TOPIC
        replaced = [infos[0].id] if overwrite else []
        intent = await topics.intents.open_query_intent(
            query, f"run-{run}", target, overwrites=replaced
        )
        results = await work.run_tasks(client, topics, infos, intent, version, None)
        txn = TxnKey(query, target, version, f"run-{run}")
        work.ghost.contents[intent.id, version] = ""
        if asleep:  # as after SIGSTOP, until somebody lets it go on
            client.process.pause()
            await asyncio.sleep(0)
        replaced = intent.record.snapshots.keys()
        with work.heard_by((query, version, ""), run):
            outcome = await topics.commit_topics(
                results, txn, intent.id, overwrite=replaced, timeout_s=COMMIT_S
            )
        work.judge_commit((query, version, ""), run, outcome)

    async def batches(self, versions: Sequence[int], **options: Any) -> Client:
        """Batches one after another by a process of their own."""
        client, run = await self.world.client("writer"), self.new_run()
        for version in versions:
            await client.run(self.batch(client, version, run, **options))
        return client

    async def checkpoint(self, client: Client) -> None:
        await self.topics(client).checkpoints.make(self.log().topic_id)

    async def trim(self, client: Client, share: float) -> None:
        ends = self.log().state.end_offsets()
        points = {p: int(end * share) for p, end in ends.items()}
        await TopicAdmin(self.topics(client)).trim(TOPIC, points)

    async def retain(self, client: Client) -> None:
        topics = self.topics(client)
        info = await topics.topics.open(TOPIC)
        intent = await topics.intents.open_system_intent("retain", TOPIC)
        await retain(topics, info, intent, await store_now_ms(topics.store))
        await topics.intents.finish(intent.id)

    def janitor(self, client: Client) -> Janitor:
        return Janitor(client.session, client.ledgers, client.rng, lease_s=LEASE_S)

    async def subscribes(self, client: Client, run: int, seconds: float) -> None:
        """A run of a query that uses a subscription of topic "t", forth and back (T10, T12)."""
        self.cursors.ends_at = self.world.loop.now + seconds
        await self.cursors.use(client, run)

    async def owns(self, client: Client, seconds: float) -> None:
        """An owner of the live segment of topic "live", for a few ledgers (T7)."""
        self.live.ends_at = self.world.loop.now + seconds
        await self.live.owns_for_a_while(client, self.topics(client))

    # -- others ----------------------------------------------------------------------------------

    async def patiently(
        self,
        name: str,
        doing: Callable[[Client], Awaitable[Any]],
        may: type[Exception] | None = None,
    ) -> Any:
        """Done by a new process, again and again until it succeeds, or ends with what it may."""
        client = await self.world.client(name)
        deadline = self.world.loop.now + PATIENCE_S
        while True:
            try:
                return await client.run(_awaited(doing, client), name)
            except (LedgerError, StoreError) as error:
                if may is not None and isinstance(error, may):
                    return None
                self.work.met(client, name, error)
                late = self.world.loop.now > deadline
                invariants.every_committer_ends(self.world.ghost, f"{name}: {error}", not late)
                await asyncio.sleep(2)

    async def wake(self) -> None:
        """Who stood still before its commit goes on; it may be refused."""
        if self.sleeper is not None:
            client, work = self.sleeper
            client.process.resume()
            (outcome,) = await asyncio.gather(work, return_exceptions=True)
            if isinstance(outcome, BaseException) and not isinstance(outcome, LedgerError):
                raise outcome

    # -- the end ---------------------------------------------------------------------------------

    async def judge(self) -> None:
        """Everything committed is there and readable, and after cleaning nothing is left over."""
        world = self.world
        world.observers.well_since = world.loop.now
        world.check()
        reader = await world.client("reader")
        problem = ""
        try:
            await reader.run(self.work.read_all(self.work.client(reader), fresh=True), "reads")
        except LedgerError as error:
            problem = f"{type(error).__name__}: {error}"
        invariants.what_is_committed_is_readable_at_once(world.ghost, problem)
        self._judge_names()
        await TopicRest(self.work, lambda ledger: False).comes()
        auditor = await world.client("auditor")
        await Audit(world, self.ledgers, auditor).every_ledger()
        await auditor.run(self.work.audit(auditor))
        await auditor.run(self.live.audit(auditor))
        await LimboWork(world, PLAN, self.ledgers).ends()
        world.check()

    def _judge_names(self) -> None:
        """Who is not deleted can be found, and be deleted."""
        for log in self.work.ghost.logs.values():
            path = parse_topic(log.name).path
            node = self.world.store.peek(path)
            named = node is not None and decode_topic_pointer(node.value) == log.topic_id
            require(named != log.state.deleted, "T11", f"topic {log.topic_id} and its name {path}")


async def _awaited(doing: Callable[[Client], Awaitable[Any]], client: Client) -> Any:
    return await doing(client)
