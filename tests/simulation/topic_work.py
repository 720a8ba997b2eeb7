"""Topics in a run: the runs of queries that write to them, and readers.

Always true: every row names the attempt and the task that wrote it, so each row read can be traced
to its commit; the log in the store, not a client's memory of it, decides what was committed
(topic_ghost.py). Drivers die, stand still and are replaced while they live; all share one
checkpoint. A query writes to one topic or, batch by batch, to some of several, and a replay of a
batch to others (hazard 10). topic_upkeep.py has the processes that trim, merge, checkpoint and
clean.
"""

import asyncio
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyarrow as pa

from spark_ledger import errors
from spark_ledger.errors import LedgerError, TopicNotFound
from spark_ledger.metadata.store import StoreError
from spark_ledger.metadata.store_calls import unavailable_while
from spark_ledger.topic.checkpointer import Checkpointer
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.commit.commit import CommitKind, CommitOutcome, TxnKey
from spark_ledger.topic.commit.fingerprint import Fingerprint
from spark_ledger.topic.commit.replay import QueryBatch, TaskWork
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.state import TopicState
from spark_ledger.topic.log.topic_log import fold_agreeing
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.read.plan import Cutting, plan_read
from spark_ledger.topic.write import INLINE_TASK_BYTES_MAX, TaskResult, TaskSettings
from tests.kit.history import History
from tests.kit.loop_task import LoopTask
from tests.kit.slices import read_task
from tests.simulation import invariants
from tests.simulation.chaos import Plan
from tests.simulation.store import EPOCH_MS
from tests.simulation.topic_ghost import PRODUCED, LogGhost, TopicGhost, TopicJudge, live_name
from tests.simulation.topic_limits import draw_limits
from tests.simulation.topic_replays import Checkpoints, PlannedBatch
from tests.simulation.world import Client, World

TOPIC = "t"
KEYS = [b"k%d" % number for number in range(5)]
ANY = "*"
"""The target of a query whose rows choose their topics."""
RUNS_MAX = 40
PATIENCE_S = {False: (3.0, 30.0, 120.0, 120.0), True: (1.0, 3.0, 10.0, 120.0)}
"""After which another run begins, whether the one before it has ended or not."""
ROLLED_AT_BYTES = (1 << 30, 1 << 30, 300)
"""Half of the ledgers, or nearly so, are closed as soon as a task has ended."""
DELETE_DELAYS_MS = (0, 2_000, 10_000, 24 * 3600 * 1000)


MOMENT_S = 1e-6
"""What was committed in the moment in which a read begins may come after it."""


class TopicRead(NamedTuple):
    """What a reader was given; all there was, if it asked at `begun_s`."""

    topic_id: str
    rows: Mapping[tuple[int, int], tuple[str, int]]
    """By partition and offset: the task attempt that wrote the row, and its number there."""
    begun_s: float | None


class TopicWork:
    """The actors of one run that use topics."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.plan = plan
        self.rng = world.loop.random_for("topic")
        self.ghost = TopicGhost()
        self.judge = TopicJudge(world, self.ghost)
        self.partitions = self.rng.choice((1, 2, 3))
        self.batches = self.rng.randint(6, 16) if plan.churn else self.rng.randint(2, 6)
        self.followers = self.rng.choice((0, 1, 1) if plan.churn else (0, 0, 1))
        self.queries = [f"query-{n + 1}" for n in range(self.rng.choice((1, 1, 2)))]
        self.names = self.rng.choice(((TOPIC,), (TOPIC,), (TOPIC, "u"), (TOPIC, "u", "v")))
        wide = len(self.names) > 1
        self.targets = {
            q: self.rng.choice((ANY, ANY, TOPIC)) if wide else TOPIC for q in self.queries
        }
        self.overwriters = self._draw_overwriters()
        self.limits = draw_limits(world.loop.random_for("topic limits"))
        self.ghost.grace_s = self.limits.grace_ms / 1000
        rewinds = "rewinds" in plan.also
        self.checkpoints = Checkpoints(world, rewinds, self.ghost.next_version)
        self.inline_bytes = (0, 0, INLINE_TASK_BYTES_MAX)
        """Of these a task draws up to how many bytes it makes no ledger for."""
        self.ask: Any = None
        """How owners of live segments are asked for them (brokers/process.py)."""
        self._attempts = 0
        self._runs = 0
        self.used: list[tuple[Client, TopicClient]] = []
        """Every process that uses topics, alive or not."""
        self._reads: list[TopicRead] = []
        self._gone = False
        self._made = asyncio.Lock()

    def _draw_overwriters(self) -> list[str]:
        """The queries that overwrite: one, or all. They write to one topic, as in production."""
        if "overwrites" not in self.plan.also:
            return []
        rng = self.world.loop.random_for("topic overwrites")
        found = rng.choice((self.queries[:1], self.queries))
        self.targets |= dict.fromkeys(found, TOPIC)
        return found

    # -- the query -------------------------------------------------------------------------------

    async def supervise(self, query: str) -> None:
        """Run after run until every batch is committed; some begin while another still lives."""
        async with self._made:
            for name in self.names:
                if self.ghost.named(name) is None:
                    await self._create_topic(name)
        self.ghost.next_version[query] = 0
        drivers: list[asyncio.Task[None]] = []
        calm_runs = 0  # what chaos may kill it may kill for ever
        while self._unfinished(query) and calm_runs < RUNS_MAX:
            calm_runs += self.world.observers.well_since is not None
            if self._gone:
                await self._make_again()
            driver = await self._start_run(query)
            drivers.append(driver)
            patience_s = self.rng.choice(PATIENCE_S[self.plan.churn]) * (1 + self._runs // 10)
            await asyncio.wait({driver}, timeout=patience_s)  # one task: no order to depend on
            if driver.done() and not driver.cancelled():
                driver.result()  # what it was judged by
            if self.rng.random() < 0.3:
                await asyncio.sleep(self.rng.uniform(0, 2))
        done = not self._unfinished(query)
        invariants.every_committer_ends(self.world.ghost, f"{query} in {RUNS_MAX} calm runs", done)
        for outcome in await asyncio.gather(*drivers, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    async def _make_again(self) -> None:
        """Make the topics again, if the process that deleted one died before it made the next."""
        async with self._made:
            self._gone = False
            for name in self.names:
                await self._create_topic(name)

    def _unfinished(self, query: str) -> bool:
        return self.ghost.next_version[query] < self.batches

    async def _create_topic(self, name: str) -> None:
        policies = TopicPolicies(
            *self.plan.quorum,
            retention_ms=self.rng.choice((None, None, 4_000)),
            retention_bytes=self.rng.choice((None, None, 400)),
            ledger_bytes_max=self.rng.choice(ROLLED_AT_BYTES),
            delete_delay_ms=self.rng.choice(DELETE_DELAYS_MS),
        )
        for _ in range(RUNS_MAX):
            client = await self.world.client("admin")
            topics = self.client(client).topics
            creation = client.run(topics.create(name, self.partitions, policies, exist_ok=True))
            (outcome,) = await asyncio.gather(creation, return_exceptions=True)
            if isinstance(outcome, TopicInfo):
                invariants.every_committer_ends(self.world.ghost, "the topic", True)
                return
            if not isinstance(outcome, LedgerError | asyncio.CancelledError):
                raise outcome
            self.world.trace.note(client.name, f"create topic: {outcome!r}")
            await asyncio.sleep(1)
        invariants.every_committer_ends(self.world.ghost, "the topic", False)

    def next_run(self) -> int:
        self._runs += 1
        return self._runs

    async def _start_run(self, query: str) -> "asyncio.Task[None]":
        run = self.next_run()
        driver = await self.world.client("driver")
        executor = await self.world.client("executor")
        self.world.ghost.meet("topic run")
        return driver.run(self._drive(driver, executor, query, run), "drives")

    async def _drive(self, driver: Client, executor: Client, query: str, run: int) -> None:
        try:
            await self._run_batches(driver, executor, query, run)
        except LedgerError as error:
            self._gone = self._gone or isinstance(error, TopicNotFound)
            if isinstance(error, errors.CheckpointBehind | errors.ReplayDiffers):
                self.checkpoints.refused(query, error)
            self.met(driver, "run", error)

    async def _run_batches(self, driver: Client, executor: Client, query: str, run: int) -> None:
        topics, tasks = self.client(driver), self.client(executor)
        target, checkpoint = self.targets[query], self.ghost.next_version
        self.checkpoints.restored(query)
        infos = [await topics.topics.open(name) for name in self.names]
        replaced = [infos[0].id] if query in self.overwriters else []
        while self._unfinished(query):
            version = checkpoint[query]
            planned = self.checkpoints.planned(query, version, overwrites=bool(replaced))
            draw = self.rng if planned is None else planned.rng("topics")
            intent = await topics.intents.open_query_intent(
                query, f"run-{run}", target, overwrites=replaced
            )
            some = infos[:1]
            if target == ANY:
                some = draw.sample(infos, draw.randint(1, len(infos)))
            if planned is not None:
                await self.checkpoints.look(topics, intent, planned, version)
            results = await self.run_tasks(executor, tasks, some, intent, version, planned)
            txn = TxnKey(query, target, version, f"run-{run}")
            if self.rng.random() < 0.3:
                results = await self._as_named_now(topics, infos, results)
            if replaced and draw.random() < 0.1:  # complete mode has nothing to tell
                self.ghost.expected[intent.id, version, infos[0].id] = []
                results = {infos[0].id: []}
                if planned is not None:
                    planned.counted = Fingerprint()
            batch = None if planned is None else planned.batch
            content = self.ghost.contents[intent.id, version] = (
                "" if planned is None else planned.content
            )
            try:
                with self.heard_by((query, version, content), run):
                    outcome = await self._commit(topics, results, txn, intent, batch)
            except errors.LedgerFenced as error:
                self.met(driver, "commit", error)
                continue  # condemned as stale: a new generation; superseded: opening it says so
            self.judge_commit((query, version, content), run, outcome)
            self.checkpoints.done(query)
            checkpoint[query] = max(checkpoint[query], version + 1)
            await asyncio.sleep(driver.rng.uniform(0, 1.5))

    async def _commit(
        self,
        topics: TopicClient,
        results: dict[str, list[TaskResult]],
        txn: TxnKey,
        intent: Intent,
        batch: QueryBatch | None,
    ) -> CommitOutcome:
        """An overwrite that is refused for a subscription's rows is made all the same at last."""
        replaced = intent.record.snapshots.keys()
        try:
            return await topics.commit_topics(
                results, txn, intent.id, overwrite=replaced, batch=batch
            )
        except errors.SubscriptionBusy:
            self.world.ghost.meet("overwrite of held rows refused")
            self.ghost.overwritten_held[intent.id, txn.version] = None
            return await topics.commit_topics(
                results, txn, intent.id, overwrite=replaced, batch=batch, overwrite_held=True
            )

    async def _as_named_now(
        self, topics: TopicClient, infos: list[TopicInfo], results: dict[str, list[TaskResult]]
    ) -> dict[str, list[TaskResult]]:
        """The results under the ids that the topics' names have now: those of a topic that was
        deleted since are dropped (hazard 36)."""
        found = {}
        for info in infos:
            if info.id in results:
                now = await topics.topics.open(info.name.full)
                found[now.id] = results[info.id]
        return found

    async def run_tasks(
        self,
        executor: Client,
        tasks: TopicClient,
        infos: list[TopicInfo],
        intent: Any,
        version: int,
        planned: PlannedBatch | None = None,
    ) -> dict[str, list[TaskResult]]:
        """By topic id one result of each task; some tasks have a second attempt, whose result is
        used or not. A batch that is only compared has no result."""
        draw = self.rng if planned is None else planned.rng("tasks")
        indexes: list[int] = []
        for index in range(draw.choice((1, 1, 2, 3))):
            indexes += [index] * self.rng.choice((1, 1, 1, 2))
        if planned is not None:
            for index in sorted(set(indexes)):
                for info in infos:
                    counts = _counts(planned.rng(info.name.short, index))
                    planned.count(info.name.short, index, sum(counts))
            if planned.work is TaskWork.COMPARE:
                return {}
        work = [
            asyncio.shield(
                executor.run(
                    self._task(executor, tasks, infos, intent, version, index, attempt, planned)
                )
            )
            for attempt, index in enumerate(indexes)
        ]
        by_task: dict[int, list[tuple[TaskResult, str]]] = {}
        ended = await asyncio.gather(*work, return_exceptions=True)
        for index, outcome in zip(indexes, ended, strict=True):
            if isinstance(outcome, asyncio.CancelledError):
                raise errors.Unavailable("the executor was killed")
            if isinstance(outcome, BaseException):
                raise outcome
            if index not in by_task or self.rng.random() < 0.5:
                by_task[index] = outcome
        found: dict[str, list[TaskResult]] = {}
        for info in infos:
            expected = self.ghost.expected[intent.id, version, info.id] = []
            for index in sorted(by_task):
                for result, name in by_task[index]:
                    if result.topic_id == info.id:
                        found.setdefault(info.id, []).append(result)
                        expected += [name] * len(result.segments)
        return found

    async def _task(
        self,
        executor: Client,
        tasks: TopicClient,
        infos: list[TopicInfo],
        intent: Any,
        version: int,
        index: int,
        attempt: int,
        planned: PlannedBatch | None,
    ) -> list[tuple[TaskResult, str]]:
        """What it wrote to each topic, and the name its rows have."""
        rng = executor.rng
        settings = TaskSettings(inline_bytes_max=rng.choice(self.inline_bytes))
        found = []
        for info in infos:
            self._attempts += 1
            name = f"a{self._attempts}"
            counts = _counts(rng if planned is None else planned.rng(info.name.short, index))
            self.ghost.rows_of[name], self.ghost.topic_of[name] = sum(counts), info.id
            writer = LoopTask(
                tasks,
                info,
                intent,
                task_index=index,
                attempt=attempt,
                partitions=await self._partitions_now(tasks, info),
                settings=settings,
            )
            written = 0
            for count in counts:
                rows = range(written, written + count)
                values = [f"{name}:{version}:{row}".encode() for row in rows]
                keys = [rng.choice((None, KEYS[rng.randrange(5)])) for _ in rows]
                self.ghost.key_of.update(zip(values, keys, strict=True))
                await writer.write(pa.array(keys, pa.binary()), pa.array(values, pa.binary()))
                written += count
                await asyncio.sleep(rng.choice((0, 0.05, 0.2 if self.plan.churn else 1.0)))
            found.append((await writer.finish(), name))
        return found

    async def _partitions_now(self, tasks: TopicClient, info: TopicInfo) -> int | None:
        """How many partitions the topic has, as far as this process knows; None if topics do not
        grow in this run. The driver that commits may have seen fewer."""
        if "growth" not in self.plan.also:
            return None
        with unavailable_while(f"reading topic '{info.name}'"):
            state = await tasks.log(info.id).fold()
        return len(state.partitions)

    @contextmanager
    def heard_by(self, key: tuple[str, int, str], run: int) -> Iterator[None]:
        """What a commit ends with is true (T2): `errors.Unavailable` says that it was not made."""
        before = self._commits_of(key, run)
        try:
            yield
        except errors.Unavailable:
            made = self._commits_of(key, run) - before
            invariants.what_ended_as_not_committed_is_not(self.world.ghost, f"run-{run}", made)
            raise

    def _commits_of(self, key: tuple[str, int, str], run: int) -> int:
        return sum(
            commit.run_id == f"run-{run}" and self.ghost.key_of_commit(commit) == key
            for log in self.ghost.logs.values()
            for commit in log.commits.values()
        )

    def judge_commit(self, key: tuple[str, int, str], run: int, outcome: Any) -> None:
        """It returned success: T1 and T2 at that moment."""
        ghost = self.world.ghost
        self.world.trace.note("commit", f"{key} by run {run}: {outcome.kind.value}")
        self.world.ghost.meet(f"commit {outcome.kind.value}")
        if outcome.kind is CommitKind.ALREADY:
            key = self.ghost.replayed(key)
        times = len(self.ghost.authors.get(key, ()))
        invariants.a_commit_that_returned_is_in_the_log_once(ghost, key, times)
        mine = f"run-{run}"
        for log in self.ghost.logs.values():
            for number, commit in log.commits.items():
                if self.ghost.key_of_commit(commit) == key and commit.run_id != mine:
                    later = log.logged_at[number] > self.ghost.begun_at[mine]
                    invariants.success_is_of_ones_own_or_earlier_rows(
                        ghost, mine, commit.run_id, later
                    )

    # -- reading -----------------------------------------------------------------------------------

    async def read_often(self, client: Client) -> None:
        """Read topics from the beginning, again and again, until the run ends."""
        topics = self.client(client)
        end = self.world.loop.now + self.plan.chaos_s
        while self.world.loop.now < end:
            await asyncio.sleep(client.rng.uniform(0.5, 5))
            try:
                await self.read_all(topics, fresh=client.rng.random() < 0.5)
                if self.overwriters:
                    await self._read_late(client, topics)
            except (LedgerError, StoreError) as error:  # a fold's errors are the store's
                self.met(client, "read topic", error)

    async def _read_late(self, client: Client, topics: TopicClient) -> None:
        """The rows of a state that is old by then: what was replaced since is read as it was, as
        long as its ledgers are there."""
        log = self.ghost.named(TOPIC)
        if log is None:
            return
        state = await topics.log(log.topic_id).fold()
        await asyncio.sleep(client.rng.uniform(0, 6))
        await self._read_topic(topics, state)

    async def read_all(
        self, topics: TopicClient, *, fresh: bool
    ) -> dict[str, dict[int, list[bytes]]]:
        """Every row of every topic and partition, judged as it comes."""
        begun_s = self.world.loop.now if fresh else None
        there = [topic_id for topic_id, log in self.ghost.logs.items() if not log.state.deleted]
        logs = [topics.log(topic_id) for topic_id in there]
        states = await fold_agreeing(logs, fresh=fresh)
        self.judge_states(states)
        return {state.topic_id: await self._read_topic(topics, state, begun_s) for state in states}

    def judge_states(self, states: list[TopicState]) -> None:
        """States that were given out as those of one moment."""
        by_id = {state.topic_id: state for state in states}
        for topic_id, state in by_id.items():
            self.judge.compared(topic_id, state)
        for commit_id, numbers in self.ghost.shared.items():
            seen = {t: n < by_id[t].next for t, n in numbers.items() if t in by_id}
            invariants.topics_are_seen_together(self.world.ghost, commit_id, seen)

    async def _read_topic(
        self, topics: TopicClient, state: TopicState, begun_s: float | None = None
    ) -> dict[int, list[bytes]]:
        """The rows of the state; with the time, it is as fresh as what was asked for then."""
        starts = state.start_offsets()
        ranges = {p: (starts[p], end) for p, end in state.end_offsets().items()}
        newer, read = await topics.state_with_tables(state, ranges)
        if newer is not state:  # what was trimmed since is not there to be read
            self.judge.compared(state.topic_id, newer)
            starts = newer.start_offsets()
            ranges = {p: (max(lo, starts[p]), hi) for p, (lo, hi) in ranges.items()}
            ranges = {p: (min(lo, hi), hi) for p, (lo, hi) in ranges.items()}
        found: dict[int, list[bytes]] = {partition: [] for partition in ranges}
        offsets: dict[int, list[int]] = {partition: [] for partition in ranges}
        cutting = Cutting(self.rng.choice((1, 3)))
        log = self.ghost.logs[state.topic_id]
        whole = topics if self._has_chunks(log) else None
        for task in plan_read(newer, ranges, topic=log.name, cutting=cutting, read=read):
            async for rows in read_task(topics.ledgers, task, whole):
                values = rows.record_batch.column("value").to_pylist()
                for place, value in enumerate(values, rows.offset):
                    self.judge_row(log, rows.partition, place, value)
                    found[rows.partition].append(value)
                    offsets[rows.partition].append(place)
        authors: dict[tuple[int, int], tuple[str, int]] = {}
        for partition, (start, end) in ranges.items():
            rowless = self._rowless(log, partition)
            invariants.offsets_are_dense(
                self.world.ghost, partition, offsets[partition], start, end, rowless
            )
            values_at = zip(offsets[partition], found[partition], strict=True)
            read_at = {offset: value for offset, value in values_at}
            for offset in range(start, end):  # that of a chunk is judged as what brokers stored
                stored = log.stored_by_brokers(partition, offset)
                authors[partition, offset] = _author(read_at.get(offset, b""), stored)
        self._reads.append(TopicRead(state.topic_id, authors, begun_s))
        return found

    def _rowless(self, log: LogGhost, partition: int) -> dict[int, None]:
        """The offsets that chunks of messages took."""
        if not self._has_chunks(log):
            return {}
        spans = log.spans.get(partition, ())
        each = ((span.base + n, row) for span in spans for n, row in enumerate(span.rows or ()))
        return {offset: None for offset, row in each if row is None}

    def _has_chunks(self, log: LogGhost) -> bool:
        truth = self.ghost.truth
        return truth is not None and truth.log is log and truth.chunks.any_sent

    def judge_row(self, log: LogGhost, partition: int, offset: int, value: bytes) -> None:
        ghost = self.world.ghost
        place = (log.topic_id, partition, offset)
        invariants.an_offset_is_one_row_for_ever(ghost, self.ghost.offsets, place, value)
        span = log.span_at(partition, offset)
        if span is not None and span.rows is not None:  # brokers stored it
            row = (span.rows[offset - span.base] or b"none").decode()
            invariants.a_row_is_where_its_commit_put_it(ghost, place, value.decode(), row)
            return
        attempt = value.decode().split(":")[0]
        invariants.nothing_of_one_topic_is_in_another(
            ghost, place, self.ghost.topic_of.get(attempt, ""), log.topic_id
        )
        invariants.every_row_read_was_committed(ghost, attempt in self.ghost.committed, value)
        if offset < log.state.partitions[partition].start_offset:
            ghost.meet("row read that was taken away before")
        wanted = "nobody" if span is None else span.attempt
        invariants.a_row_is_where_its_commit_put_it(ghost, place, attempt, wanted)

    def judge_live_row(self, log: LogGhost, offset: int, value: bytes, ledger_id: int) -> None:
        """A row of partition 0 that no commit has yet: it keeps its offset when one has (T3)."""
        ghost, place = self.world.ghost, (log.topic_id, 0, offset)
        invariants.an_offset_is_one_row_for_ever(ghost, self.ghost.offsets, place, value)
        named = value.startswith(f"{live_name(ledger_id)}:".encode()) and ledger_id in log.lives
        invariants.every_row_read_was_committed(ghost, named, value)

    async def audit(self, client: Client) -> None:
        """Everything committed and not trimmed is there: each row once, a task's in their order.
        Each reader during the run got the rows that were committed before it began."""
        await self.read_all(self.client(client), fresh=True)
        history = History()
        for topic_id, log in self.ghost.logs.items():
            places = log.places()
            attempts = [one for one in self.ghost.committed if self.ghost.topic_of[one] == topic_id]
            for attempt in attempts:
                at = self.ghost.committed[attempt]
                for value in self._rows_of(attempt):
                    place = places.get(value)
                    history.promised(topic_id, value, at=at, place=place, lane=attempt)
            for attempt in log.trimmed_attempts():
                history.let_go(topic_id, self._rows_of(attempt))
        for read in self._reads:
            begun, whole = (read.begun_s or 0.0) - MOMENT_S, read.begun_s is not None
            produced = [row for row in read.rows.values() if row[0].startswith(PRODUCED)]
            history.attempted(read.topic_id, produced)  # judged by the brokers' truth
            history.read(read.topic_id, read.rows.items(), begun=begun, whole=whole)
        invariants.what_was_promised_of_topics_is_read(self.world.ghost, history)

    def _rows_of(self, attempt: str) -> list[tuple[str, int]]:
        return [(attempt, row) for row in range(self.ghost.rows_of[attempt])]

    # -- for the other actors ------------------------------------------------------------------

    def client(self, client: Client) -> TopicClient:
        """The topic layer of one simulated process."""
        loop = client.world.loop
        clock_ms = lambda: EPOCH_MS + int(loop.time() * 1000)  # noqa: E731
        topics = TopicClient(client.ledgers, client.rng, clock_ms, self.ask)
        topics.checkpoints = Checkpointer(
            *(client.ledgers, topics.intents, topics.blobs, topics.chunks, topics.log),
            commits_apart=self.limits.every,
        )
        self.used.append((client, topics))
        return topics

    def met(self, client: Client, doing: str, error: LedgerError | StoreError) -> None:
        """It failed, as it may."""
        self.world.trace.note(client.name, f"{doing}: {error}")
        self.world.ghost.meet(f"{doing}: {type(error).__name__}")

    def noted(self, commit_id: str, topic_id: str, body: bytes) -> None:
        """A commit is about to be sent (topic_limits.Noted)."""
        self.ghost.bodies[commit_id, topic_id] = body


def _author(value: bytes, produced: tuple[str, int] | None) -> tuple[str, int]:
    """The task attempt that wrote the row, and which of its rows it is; of what brokers stored,
    where it is."""
    if produced is not None:
        return produced
    attempt, _, row = value.decode().split(":")
    return attempt, int(row)


def _counts(rng: random.Random) -> list[int]:
    """How many rows a task has for a topic, by column that Spark hands over."""
    return [rng.randint(1, 12) for _ in range(rng.choice((1, 1, 2)))]
