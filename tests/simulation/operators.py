"""An operator in a run: whatever `spark-ledger` offers to look at a cluster and to change it, while
everything goes wrong; and small jobs that write once, to a topic of their own, and end it.

Always true: it promises nothing and waits for no other client; whatever it does may fail, with an
error that names the reason. What it takes away for ever (a topic that is terminated, or has new
policies) is its own.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pyarrow as pa

from spark_ledger.bookies.bookie_client import CallFailed, ask_info
from spark_ledger.errors import LedgerError
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import StoreError
from spark_ledger.metadata.store_calls import store_now_ms, take_role
from spark_ledger.repair.auditor import Auditor
from spark_ledger.repair.decommission import forget
from spark_ledger.repair.limbo import repair_everywhere
from spark_ledger.repair.worker import Worker
from spark_ledger.topic import views
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.commit.commit import TxnKey
from spark_ledger.topic.commit.draft import RowKind
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.schema.client_rules import Strategy
from spark_ledger.topic.schema.client_schemas import ClientSchema, ClientSchemaType
from spark_ledger.topic.schema.records import Compatibility
from spark_ledger.topic.subscription.seek_target import End
from spark_ledger.topic.upkeep import live_repair
from spark_ledger.topic.upkeep.admin import TopicAdmin
from spark_ledger.topic.upkeep.upkeep import Upkeep
from tests.kit.loop_task import LoopTask
from tests.simulation import invariants
from tests.simulation.ledger_work import LedgerWork
from tests.simulation.limbo_work import TOKENS
from tests.simulation.topic_ghost import LIVE, Whereabouts
from tests.simulation.topic_work import TopicWork
from tests.simulation.world import Client

NAME = "operator"
JOB = "o"
"""The topic of small jobs."""
VIEWS = (
    "topics",
    "partitions",
    "subscriptions",
    "lag",
    "commits",
    "segments",
    "ledgers",
    "bookies",
)
SCHEMA = pa.schema([pa.field("value", pa.binary())])


class LedgerOperator:
    """Of one run, for ledgers and bookies."""

    def __init__(self, work: LedgerWork) -> None:
        self._work = work
        self._world = work.world

    async def operate(self, client: Client) -> None:
        """One thing after the other until the chaos' time is over."""
        ways: list[Callable[[Client], Awaitable[None]]] = [
            *(self._list, self._repair_listed, self._repair, self._forget, self._look)
        ]
        end = self._world.loop.now + self._work.plan.chaos_s
        while self._world.loop.now < end:
            await asyncio.sleep(client.rng.uniform(0.3, 3))
            way = client.rng.choice(ways)
            try:
                await way(client)
            except (LedgerError, StoreError) as error:
                self._work.met(client, way.__name__.strip("_"), error)
        await client.ledgers.close()

    async def _list(self, client: Client) -> None:
        await client.ledgers.check_registered(self._work.plan.quorum[0], "a ledger")
        for info in client.directory.writable()[:1]:
            with suppress(CallFailed):
                await ask_info(client.network, info.address, 5.0)
        listed = [ledger_id async for ledger_id in client.ledgers.list()]
        self._world.trace.note(client.name, f"lists {len(listed)} ledgers")

    async def _repair_listed(self, client: Client) -> None:
        """What bookies say now, once."""
        await Auditor(client.ledgers, TOKENS).look()
        await Worker(client.ledgers, TOKENS).round()

    async def _repair(self, client: Client) -> None:
        """Compare every copy of one ledger, closing it before."""
        if self._work.made:
            ledger_id = client.rng.choice(self._work.made)
            password = self._work.password_of(ledger_id)
            await repair_everywhere(client.ledgers, ledger_id, password)
            self._world.ghost.meet("every copy of a ledger compared")

    async def _forget(self, client: Client) -> None:
        """Take a bookie off the list whose disk is lost for good, unless a ledger names it."""
        bookies = self._world.ghost.bookies.values()
        lost = [bookie.bookie_id for bookie in bookies if bookie.wiped]
        if lost:
            await forget(client.ledgers, client.rng.choice(lost))
            self._world.ghost.meet("lost bookie forgotten")

    async def _look(self, client: Client) -> None:
        """At an open ledger, at its record only."""
        if self._work.made:
            ledger_id = client.rng.choice(self._work.made)
            password = self._work.password_of(ledger_id)
            reader = await client.ledgers.open(ledger_id, recover=False, password=password)
            await reader.refresh_record()


class TopicOperator:
    """Of one run, for topics and subscriptions."""

    def __init__(self, work: TopicWork) -> None:
        self.work = work
        self.world = work.world
        self._jobs = 0
        self._end = self.world.loop.now + work.plan.chaos_s
        self._later = self.world.loop.random_for("operator of topics, drawn later")
        """For what came later: it draws nothing of the client's generator."""

    async def operate(self, client: Client) -> None:
        topics = self.work.client(client)
        ways: list[Callable[[Client, TopicClient], Awaitable[None]]] = [
            *(self._describe, self._view, self._subscribe, self._truncate, self._upkeep),
            *(self._job, self._job, self._schema, self._end_jobs, self._policies),
        ]
        while client.process.alive and self.world.loop.now < self._end:
            await asyncio.sleep(client.rng.uniform(0.2, 2))
            way = client.rng.choice(ways)
            for each in (way, self._unopened) if self._later.random() < 0.2 else (way,):
                try:
                    await each(client, topics)
                except (LedgerError, StoreError) as error:
                    self.work.met(client, each.__name__.strip("_"), error)

    # -- looking -----------------------------------------------------------------------------------

    async def _describe(self, client: Client, topics: TopicClient) -> None:
        admin = TopicAdmin(topics)
        for info in await topics.topics.list():
            await topics.topics.name_of(info.id)
            facts = await admin.describe(info.name.full)
            topics.forget_log(info.id)
            state = self.work.ghost.logs[info.id].state
            for known in facts.partitions:
                end = state.partitions[known.partition].end_offset
                invariants.an_end_told_was_committed(self.world.ghost, known.end_offset, end)

    async def _view(self, client: Client, topics: TopicClient) -> None:
        for view in client.rng.sample(VIEWS, 4):
            for part in await views.plan(topics, view):
                await views.read(topics, part)

    async def _unopened(self, client: Client, topics: TopicClient) -> None:
        """As `topic repair` does before it changes anything."""
        for name in (LIVE, *self.work.names):
            info = await topics.topics.find(name)
            if info is not None:
                for one in await live_repair.find_unopened(topics, info):
                    self.world.trace.note(client.name, f"cannot be opened: {one}")

    # -- subscriptions -----------------------------------------------------------------------------

    async def _subscribe(self, client: Client, topics: TopicClient) -> None:
        """Make a subscription without a user: it holds every row from the first that is kept, until
        it is deleted (T10)."""
        name = client.rng.choice(("held", "reserved"))
        info = await topics.topics.open(client.rng.choice(self.work.names))
        log, subscriptions = self.work.ghost.logs[info.id], topics.subscriptions
        there = [one.name for one in await subscriptions.list(info.id, exact=True)]
        if name in there and client.rng.random() < 0.5:
            log.subscriptions.pop(name, None)  # before the outcome is known
            await subscriptions.delete(info.id, name)
            return
        if name not in there and name == "held":
            await subscriptions.create(info.id, name, End.EARLIEST)
        elif name not in there:
            await subscriptions.reserve(info, name, start=End.EARLIEST)
        at = await subscriptions.positions(info.id, name)
        there_at = {p: max(at.get(p, 0), start) for p, start in log.starts()}
        log.subscriptions.setdefault(name, Whereabouts()).is_at(self.world.loop.now, there_at)
        self.world.ghost.meet("unused subscription holds rows")
        await subscriptions.list(info.id)
        await subscriptions.lag(info.id, name, await store_now_ms(topics.store))

    # -- what is kept ------------------------------------------------------------------------------

    async def _truncate(self, client: Client, topics: TopicClient) -> None:
        info = await topics.topics.open(client.rng.choice(self.work.names))
        if (await TopicAdmin(topics).trim(info.name.full, End.LATEST)).starts:
            self.world.ghost.meet("topic truncated")

    async def _upkeep(self, client: Client, topics: TopicClient) -> None:
        """A pass over everything, as the process that maintains a cluster makes it."""
        if not await take_role(client.session, paths.MAINTAINER):
            return
        upkeep = Upkeep(topics)
        try:
            report = await upkeep.once(force=True)
        finally:
            await upkeep.close()
        told = [report.summary(), *report.warnings()]
        self.world.trace.note(client.name, "; ".join(map(str, told)))
        self.world.ghost.meet("pass over the whole cluster")

    # -- small jobs --------------------------------------------------------------------------------

    async def _job(self, client: Client, topics: TopicClient) -> None:
        """Write a batch once, under an app id that is not used again."""
        admin = TopicAdmin(topics)
        if await topics.topics.find(JOB) is None:
            e, qw, qa = self.work.plan.quorum
            sizes = {"ensemble_size": e, "write_quorum": qw, "ack_quorum": qa}
            await admin.create(JOB, client.rng.choice((1, 2)), sizes)
        info = await topics.topics.open(JOB)
        self._jobs += 1
        app_id, run_id = f"job-{self._jobs}", f"run of job-{self._jobs}"
        intent = await topics.intents.open_batch_intent(app_id, run_id, JOB, random=True)
        results = await self.work.run_tasks(client, topics, [info], intent, 0)
        await topics.intents.txn_record(intent)
        if client.rng.random() < 0.3:  # its tasks give up; only the janitor deletes
            await LoopTask(topics, info, intent, task_index=0, attempt=99).abort()
            return
        txn = TxnKey(app_id, intent.target, 0, run_id)
        found = {info.id: results.get(info.id, [])}
        row_kinds = {info.id: await self._kind(topics, info)}
        await topics.commit_topics(found, txn, intent.id, finish_intent=True, row_kinds=row_kinds)
        self.world.ghost.meet("job committed")

    async def _kind(self, topics: TopicClient, info: TopicInfo) -> RowKind:
        """The kind of a job's rows, which no client reads: only its commit judges it."""
        if self._later.random() < 0.5:
            return RowKind.BYTES
        under = await topics.schemas.for_write(info, SCHEMA)
        return RowKind(frozenset({under.number}))

    async def _schema(self, client: Client, topics: TopicClient) -> None:
        info = await topics.topics.open(JOB)
        await topics.schemas.set_compatibility(info, client.rng.choice([*Compatibility]))
        columns = [SCHEMA, SCHEMA.append(pa.field("more", pa.int64()))]
        await topics.schemas.register(info, client.rng.choice(columns))
        await topics.schemas.for_write(info, SCHEMA)
        await topics.schemas.for_read([info])
        self.world.ghost.meet("schema registered")
        if self._later.random() < 0.7:
            await topics.schemas.withdraw(info)
            self.world.ghost.meet("schema withdrawn")
            whole_number = ClientSchema(ClientSchemaType.INT32)
            await topics.schemas.register_client(info, whole_number, Strategy.FULL)

    async def _policies(self, client: Client, topics: TopicClient) -> None:
        changes = {"retention_ms": client.rng.choice((None, 2_000))}
        await TopicAdmin(topics).change_policies(JOB, changes)

    async def _end_jobs(self, client: Client, topics: TopicClient) -> None:
        """Nothing is appended any more, and the topic goes."""
        info = await topics.topics.open(JOB)
        await TopicAdmin(topics).terminate(JOB)
        self.world.ghost.meet("topic terminated")
        await asyncio.sleep(client.rng.uniform(0, 2))
        await TopicAdmin(topics).delete(JOB)
        self.work.ghost.logs[info.id].gone_s = self.world.loop.now
