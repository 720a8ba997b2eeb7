"""A topic in a run: the runs of a query, readers, and a janitor that takes intents away.

Always true: every row says which attempt of which task wrote it, so whatever is read can be traced
to what was committed; the log in the store, not anybody's memory of it, says what was committed.
Drivers die, stand still and are replaced while they live; all share one checkpoint.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from spark_ledger import errors
from spark_ledger.errors import LedgerError
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic import records
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.commit import TxnKey
from spark_ledger.topic.janitor import Janitor
from spark_ledger.topic.policies import TopicPolicies
from spark_ledger.topic.read_plan import Cutting, plan_read
from spark_ledger.topic.segments import Segment
from spark_ledger.topic.task_writer import INLINE_TASK_BYTES_MAX, TaskSettings
from spark_ledger.topic.topics import TopicInfo
from tests.simulation import invariants
from tests.simulation.chaos import Plan
from tests.simulation.invariants import Violation
from tests.simulation.store import EPOCH_MS, Change, Commit
from tests.simulation.world import Client, World

TOPIC = "t"
RUNS_MAX = 40


@dataclass
class TopicGhost:
    """What was written and committed, by the log itself."""

    topic_id: str = ""
    next_version: dict[str, int] = field(default_factory=dict)
    """By query, its checkpoint: what a new run begins with."""
    rows_of: dict[str, int] = field(default_factory=dict)
    """By task attempt: how many rows it wrote."""
    attempt_of: dict[Segment, str] = field(default_factory=dict)
    """By segment: the task attempt that wrote it."""
    committed: dict[str, None] = field(default_factory=dict)
    """Task attempts whose rows are in the log."""
    log: dict[int, records.Commit] = field(default_factory=dict)
    logged_at: dict[int, int] = field(default_factory=dict)
    """By commit: the zxid that made it."""
    begun_at: dict[str, int] = field(default_factory=dict)
    """By run: the zxid that made its first intent."""
    times: dict[tuple[str, int], int] = field(default_factory=dict)
    """By (app id, version): how many commits contribute rows."""
    referenced: dict[int, None] = field(default_factory=dict)
    """Ledgers that a commit names."""
    offsets: dict[Any, bytes] = field(default_factory=dict)
    """(topic id, partition, offset): the row first read there."""


class TopicWork:
    """The actors of one run that use a topic."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.plan = plan
        self.rng = world.loop.random_for("topic")
        self.ghost = TopicGhost()
        self.partitions = self.rng.choice((1, 2, 3))
        self.batches = self.rng.randint(2, 6)
        self.queries = [f"query-{n + 1}" for n in range(self.rng.choice((1, 1, 2)))]
        self._attempts = 0
        self._runs = 0
        self._made = asyncio.Lock()
        world.store.listeners.append(self._committed)

    # -- the query -------------------------------------------------------------------------------

    async def supervise(self, query: str) -> None:
        """Run after run until every batch is committed; some begin while another still lives."""
        async with self._made:
            if not self.ghost.topic_id:
                await self._create_topic()
        self.ghost.next_version[query] = 0
        drivers: list[asyncio.Task[None]] = []
        while self._unfinished(query) and self._runs < RUNS_MAX:
            driver = await self._start_run(query)
            drivers.append(driver)
            patience_s = self.rng.choice((3.0, 30.0, 120.0, 120.0))
            await asyncio.wait({driver}, timeout=patience_s)  # one task: no order to depend on
            if self.rng.random() < 0.3:
                await asyncio.sleep(self.rng.uniform(0, 2))
        done = not self._unfinished(query)
        invariants.every_committer_ends(self.world.ghost, f"{query} in {RUNS_MAX} runs", done)
        for outcome in await asyncio.gather(*drivers, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    def _unfinished(self, query: str) -> bool:
        return self.ghost.next_version[query] < self.batches

    async def _create_topic(self) -> None:
        policies = TopicPolicies(*self.plan.quorum)
        for _ in range(RUNS_MAX):
            client = await self.world.client("admin")
            topics = topic_client(client).topics
            creation = client.run(topics.create(TOPIC, self.partitions, policies, exist_ok=True))
            (outcome,) = await asyncio.gather(creation, return_exceptions=True)
            if isinstance(outcome, TopicInfo):
                self.ghost.topic_id = outcome.id
                invariants.every_committer_ends(self.world.ghost, "the topic", True)
                return
            if not isinstance(outcome, LedgerError | asyncio.CancelledError):
                raise outcome
            self.world.trace.note(client.name, f"create topic: {outcome!r}")
            await asyncio.sleep(1)
        invariants.every_committer_ends(self.world.ghost, "the topic", False)

    async def _start_run(self, query: str) -> "asyncio.Task[None]":
        self._runs += 1
        run = self._runs
        driver = await self.world.client("driver")
        executor = await self.world.client("executor")
        self.world.ghost.meet("topic run")
        return driver.run(self._drive(driver, executor, query, run), "drives")

    async def _drive(self, driver: Client, executor: Client, query: str, run: int) -> None:
        try:
            await self._run_batches(driver, executor, query, run)
        except LedgerError as error:
            self._met(driver, "run", error)

    async def _run_batches(self, driver: Client, executor: Client, query: str, run: int) -> None:
        topics, tasks = topic_client(driver), topic_client(executor)
        info = await topics.topics.open(TOPIC)
        checkpoint = self.ghost.next_version
        while self._unfinished(query):
            version = checkpoint[query]
            intent = await topics.intents.open_query_intent(query, f"run-{run}", TOPIC)
            results = await self._run_tasks(executor, tasks, info, intent, version)
            txn = TxnKey(query, TOPIC, version, f"run-{run}")
            try:
                outcome = await topics.commit(info.id, txn, intent.id, results)
            except errors.LedgerFenced as error:
                self._met(driver, "commit", error)
                continue  # condemned as stale: a new generation; superseded: opening it says so
            self._judge_commit((query, version), run, outcome)
            checkpoint[query] = max(checkpoint[query], version + 1)
            await asyncio.sleep(driver.rng.uniform(0, 1.5))

    async def _run_tasks(
        self, executor: Client, tasks: TopicClient, info: Any, intent: Any, version: int
    ) -> list[Any]:
        """One result of each task; some tasks have a second attempt, whose result is not used."""
        indexes: list[int] = []
        for index in range(self.rng.choice((1, 1, 2, 3))):
            indexes += [index] * self.rng.choice((1, 1, 1, 2))
        work = [
            asyncio.shield(
                executor.run(self._task(executor, tasks, info, intent, version, index, attempt))
            )
            for attempt, index in enumerate(indexes)
        ]
        by_task: dict[int, Any] = {}
        ended = await asyncio.gather(*work, return_exceptions=True)
        for index, outcome in zip(indexes, ended, strict=True):
            if isinstance(outcome, asyncio.CancelledError):
                raise errors.Unavailable("the executor was killed")
            if isinstance(outcome, BaseException):
                raise outcome
            by_task[index] = outcome
        return list(by_task.values())

    async def _task(
        self,
        executor: Client,
        tasks: TopicClient,
        info: Any,
        intent: Any,
        version: int,
        index: int,
        attempt: int,
    ) -> Any:
        self._attempts += 1
        name = f"a{self._attempts}"
        rng = executor.rng
        counts = [rng.randint(1, 12) for _ in range(rng.choice((1, 1, 2)))]
        self.ghost.rows_of[name] = sum(counts)
        settings = TaskSettings(inline_bytes_max=rng.choice((0, 0, INLINE_TASK_BYTES_MAX)))
        writer = tasks.task_writer(
            info, intent, task_index=index, attempt=attempt, settings=settings
        )
        written = 0
        for count in counts:
            rows = range(written, written + count)
            values = [f"{name}:{version}:{row}".encode() for row in rows]
            keys = [rng.choice((None, b"k%d" % rng.randrange(5))) for _ in rows]
            await writer.write(pa.array(keys, pa.binary()), pa.array(values, pa.binary()))
            written += count
            await asyncio.sleep(rng.choice((0, 0.05, 1.0)))
        result = await writer.finish()
        for segment in result.segments:
            self.ghost.attempt_of[segment] = name
        return result

    def _judge_commit(self, key: tuple[str, int], run: int, outcome: Any) -> None:
        """It returned success: T1 and T2 at that moment."""
        ghost = self.world.ghost
        self.world.trace.note("commit", f"{key} by run {run}: {outcome.kind.value}")
        self.world.ghost.meet(f"commit {outcome.kind.value}")
        times = self.ghost.times.get(key, 0)
        invariants.a_commit_that_returned_is_in_the_log_once(ghost, key, times)
        mine = f"run-{run}"
        for number, commit in self.ghost.log.items():
            if (commit.app_id, commit.version) == key and commit.run_id != mine:
                later = self.ghost.logged_at[number] > self.ghost.begun_at[mine]
                invariants.success_is_of_ones_own_or_earlier_rows(ghost, mine, commit.run_id, later)

    # -- reading -----------------------------------------------------------------------------------

    async def read_often(self, client: Client) -> None:
        topics = topic_client(client)
        end = self.world.loop.now + self.plan.chaos_s
        while self.world.loop.now < end:
            await asyncio.sleep(client.rng.uniform(0.5, 5))
            if not self.ghost.topic_id:
                continue
            try:
                await self.read_all(topics, fresh=client.rng.random() < 0.5)
            except (LedgerError, StoreError) as error:  # a fold's errors are the store's
                self._met(client, "read topic", error)

    async def read_all(self, topics: TopicClient, *, fresh: bool) -> dict[int, list[bytes]]:
        """Every row of every partition, judged as it comes."""
        log = topics.log(self.ghost.topic_id)
        state = await log.fold(fresh=fresh)
        ranges = {p: (0, end) for p, end in state.end_offsets().items()}
        found: dict[int, list[bytes]] = {partition: [] for partition in ranges}
        offsets: dict[int, list[int]] = {partition: [] for partition in ranges}
        read = await topics.tables(state, ranges)
        cutting = Cutting(self.rng.choice((1, 3)))
        for task in plan_read(state, ranges, topic=TOPIC, cutting=cutting, read=read):
            async for rows in topics.read(task):
                values = rows.record_batch.column("value").to_pylist()
                for place, value in enumerate(values, rows.offset):
                    self._judge_row(rows.partition, place, value)
                    found[rows.partition].append(value)
                    offsets[rows.partition].append(place)
        for partition, (_, end) in ranges.items():
            invariants.offsets_are_dense(self.world.ghost, partition, offsets[partition], end)
        return found

    def _judge_row(self, partition: int, offset: int, value: bytes) -> None:
        ghost = self.world.ghost
        place = (self.ghost.topic_id, partition, offset)
        invariants.an_offset_is_one_row_for_ever(ghost, self.ghost.offsets, place, value)
        attempt = value.decode().split(":")[0]
        invariants.every_row_read_was_committed(ghost, attempt in self.ghost.committed, value)

    async def audit(self, client: Client) -> None:
        """Everything committed is there: each row once, a task's rows in their order."""
        found = await self.read_all(topic_client(client), fresh=True)
        counted: dict[str, int] = {}
        for partition, values in found.items():
            last: dict[str, int] = {}
            for value in values:
                attempt, _, row = value.decode().split(":")
                before = last.get(attempt, -1)
                invariants.a_tasks_rows_keep_their_order(
                    self.world.ghost, partition, before, int(row)
                )
                last[attempt] = int(row)
                counted[attempt] = counted.get(attempt, 0) + 1
        for attempt in self.ghost.committed:
            wanted, there = self.ghost.rows_of[attempt], counted.get(attempt, 0)
            invariants.what_was_committed_is_all_there(self.world.ghost, attempt, there, wanted)

    # -- the janitor -------------------------------------------------------------------------------

    async def clean(self, client: Client) -> None:
        """Pass after pass; some take an intent as stale that is not."""
        janitor = Janitor(client.session, client.ledgers, client.rng, lease_s=20.0)
        end = self.world.loop.now + self.plan.chaos_s
        while self.world.loop.now < end:
            await asyncio.sleep(client.rng.uniform(1, 8))
            intents = self.world.store.peek_children(paths.INTENTS)
            condemn = [client.rng.choice(intents)] if intents and client.rng.random() < 0.3 else []
            try:
                report = await janitor.clean(condemn=condemn, force=True)
            except LedgerError as error:
                self._met(client, "clean", error)
                continue
            self.world.trace.note(client.name, f"cleaned: {report}")
            self.world.ghost.meet("janitor pass")
            if report.deleted:
                self.world.ghost.meet("janitor deleted")

    # -- the store's listener ------------------------------------------------------------------

    def _committed(self, commit: Commit) -> None:
        try:
            for change in commit.changes:
                self._changed(change, commit.zxid)
        except Violation as violation:
            self.world.observers.violated(violation)
        except Exception as error:  # the store must answer all the same
            defect = Violation("no defect", f"judging write {commit.zxid} raised {error!r}")
            self.world.observers.violated(defect)

    def _changed(self, change: Change, zxid: int) -> None:
        if change.path.startswith(paths.LEDGERS) and change.after is None:
            ledger_id = int(change.path.removeprefix(paths.LEDGERS).replace("/", ""))
            gone = ledger_id in self.ghost.referenced
            invariants.what_a_commit_names_is_there(self.world.ghost, ledger_id, gone)
        is_intent = change.path.count("/") == 2 and change.path.startswith(paths.INTENTS)
        if is_intent and change.before is None and change.after is not None:
            intent = records.decode_intent(change.after.value)
            self.ghost.begun_at.setdefault(intent.run_id, zxid)
        inside_log = "/log/" in change.path and change.path.startswith(paths.TOPIC_IDS)
        if inside_log and change.before is None and change.after is not None:
            number = int(change.path.rpartition("/")[2])
            self.ghost.logged_at[number] = zxid
            self._logged(number, records.decode_commit(change.after.value))

    def _logged(self, number: int, commit: records.Commit) -> None:
        ghost = self.ghost
        ghost.log[number] = commit
        key = (commit.app_id, commit.version)
        ghost.times[key] = ghost.times.get(key, 0) + 1
        invariants.a_version_contributes_rows_at_most_once(self.world.ghost, key, ghost.times[key])
        for action in commit.actions:
            for segment in action.segments:
                ghost.committed[ghost.attempt_of[segment]] = None
                if not segment.inline:
                    ghost.referenced[segment.ledger_id] = None
                    self._judge_segment(segment)

    def _judge_segment(self, segment: Segment) -> None:
        """At the commit its ledger is there, and every entry of it was acked to its writer."""
        ghost, ledger = self.world.ghost, self.world.ghost.ledgers[segment.ledger_id]
        invariants.what_a_commit_names_is_there(ghost, ledger.ledger_id, ledger.deleted)
        invariants.what_is_committed_was_acked(ghost, ledger, segment.last_entry)

    def _met(self, client: Client, doing: str, error: LedgerError | StoreError) -> None:
        self.world.trace.note(client.name, f"{doing}: {error}")
        self.world.ghost.meet(f"{doing}: {type(error).__name__}")


def topic_client(client: Client) -> TopicClient:
    """The topic layer of one simulated process."""
    loop = client.world.loop
    return TopicClient(client.ledgers, client.rng, lambda: EPOCH_MS + int(loop.time() * 1000))
