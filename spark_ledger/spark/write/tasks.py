"""The code inside a Spark task that writes: rows into ledgers.

Always true: a Python worker keeps connections, open ledgers, the query's intent and its topics from
task to task (topic/blocking.py; a forked process makes new ones). A task that writes shows by
heartbeats that its intent (the run's record of the ledgers it makes) is in use. A task's message
has only acknowledged entries. If the number of a batch was committed before the run began, the
batch's rows are compared with the committed rows and not written again, unless onReplay requires a
new write (topic/commit/replay.py). A task that fails drops the cached intent and topics, and a
second attempt does not use them: a condemned intent or a deleted topic may have caused the failure.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from spark_ledger.errors import (
    CommitOverTooManyTopics,
    SchemaIncompatible,
    TopicDeleted,
    Unavailable,
)
from spark_ledger.process import background_loop
from spark_ledger.spark.options.options import WriteOptions
from spark_ledger.spark.worker import Moment, TtlCache, exclude_from_gc
from spark_ledger.spark.write.job import (
    WriteJob,
    WrittenTopic,
    find_or_make,
    find_or_make_all,
    too_many_topics,
)
from spark_ledger.spark.write.topic_writers import Task, TopicWriters
from spark_ledger.topic import blocking
from spark_ledger.topic.blocking import BlockingTopics
from spark_ledger.topic.commit.commit import CommitKind, CommitOutcome, TxnKey
from spark_ledger.topic.commit.fingerprint import Fingerprint, batch_content
from spark_ledger.topic.commit.replay import OnReplay, QueryBatch, TaskWork, task_work
from spark_ledger.topic.log.intents import QUERY, Intent
from spark_ledger.topic.write import TaskResult

QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"
RUN_ID = "spark.jobGroup.id"

HEARTBEAT_S = 60.0
"""The time between heartbeats of an intent in use; the janitor's lease is many times as long."""
TOPIC_S = 10.0
"""How long a query's tasks use a cached topic; then they read its number of partitions again."""
WRITE_AGAIN = (
    "Write again, or restart the query from the same checkpoint: this makes the topic again."
)


@dataclass
class TaskMessage(WriterCommitMessage):
    """A task's message to the driver, with its result for each topic. `batch` has the fingerprint
    of the task's rows of a query's batch (None in a batch job outside queries). `versions` are the
    schema versions of typed rows, by the topic's id."""

    intent: Intent
    results: tuple[TaskResult, ...]
    batch: QueryBatch | None = None
    versions: Mapping[str, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TaskProperties:
    """Spark's facts of a task; a batch job has no query, except inside foreachBatch."""

    index: int
    attempt: int
    query_id: str | None
    batch_id: int | None
    run_id: str | None

    @classmethod
    def of(cls, context: TaskContext | None) -> "TaskProperties":
        assert context is not None, "a writer writes inside a Spark task"
        batch_id = context.getLocalProperty(BATCH_ID)
        return cls(
            context.partitionId(),
            context.attemptNumber(),
            context.getLocalProperty(QUERY_ID),
            None if batch_id is None else int(batch_id),
            context.getLocalProperty(RUN_ID),
        )

    @property
    def bad_record_headers(self) -> dict[str, str]:
        """Headers of bad records: the query and batch that wrote them."""
        facts = {"queryId": self.query_id, "batchId": self.batch_id}
        return {name: str(value) for name, value in facts.items() if value is not None}


_log = logging.getLogger(__name__)
_intents: TtlCache[tuple[str, str, str, str, str], Intent] = TtlCache(HEARTBEAT_S)
_topics: TtlCache[tuple[str, str, str], WrittenTopic] = TtlCache(TOPIC_S)


def write_rows(
    job: WriteJob,
    task: Task,
    batches: Iterable[pa.RecordBatch],
    *,
    version: int,
    on_replay: OnReplay | None = None,
    topics: Mapping[str, WrittenTopic] | None = None,
) -> TaskMessage:
    """Write all of a task's rows; returns when all are acknowledged. The driver will commit them as
    `version`. `on_replay` None: this version is never written again, so the rows need no
    fingerprint. `topics` are topics that the driver has looked up.

    Raises CheckpointBehind before a row is taken; MessageTooBig, NullTopic, NotEnoughBookies,
    LedgerFenced, Unavailable and other errors. After an error no row of the write becomes visible.
    """
    intent, fingerprint = task.intent, Fingerprint()
    cluster = blocking.topics(job.options.service_url, job.options.outage_timeout_s)
    exclude_from_gc(Moment.CONNECTED)
    if on_replay is not None:
        work = _task_work(cluster, intent, version, on_replay)
        batches = _with_fingerprint(batches, job, fingerprint)
        if work is TaskWork.COMPARE:
            for _ in batches:
                pass
            cluster.wait_for_store()
            return TaskMessage(intent, (), _query_batch(fingerprint, on_replay))

    def find(names: Sequence[str]) -> Mapping[str, WrittenTopic]:
        driver_topics = topics or {}
        others = [name for name in names if name not in driver_topics]
        return {**driver_topics, **topics_of(cluster, job.options, others, intent.run_id)}

    with adding_topic_names_to_errors(cluster), heartbeats(cluster, intent):
        writers = TopicWriters(cluster, job, task, find)
        try:
            for batch in batches:
                if batch.num_rows:
                    writers.write(job.plan.rows(batch))
            results = writers.finish()
            cluster.wait_for_store()  # in an outage wait here, where Spark can stop the query
            return TaskMessage(
                intent, results, _query_batch(fingerprint, on_replay), writers.versions
            )
        except BaseException:
            drop_intents_and_topics(lambda cached: cached.id == intent.id)
            writers.abort()
            raise


def _task_work(
    cluster: BlockingTopics, intent: Intent, version: int, on_replay: OnReplay
) -> TaskWork:
    """Whether the task writes or compares its rows. A version above `w0`, the last version that was
    committed when the intent was made, needs no request."""
    if version > intent.record.w0:
        return TaskWork.WRITE
    record = cluster.run(cluster.client.intents.txn_record(intent))
    return task_work(record, intent.app_id, version, on_replay)


def _with_fingerprint(
    batches: Iterable[pa.RecordBatch], job: WriteJob, fingerprint: Fingerprint
) -> Iterator[pa.RecordBatch]:
    """The same batches; each is added to the fingerprint when the caller takes it."""
    for batch in batches:
        fingerprint.add(job.plan.columns_by_role(batch))
        yield batch


def _query_batch(fingerprint: Fingerprint, on_replay: OnReplay | None) -> QueryBatch | None:
    return None if on_replay is None else QueryBatch(fingerprint.content, on_replay)


def commit_rows(
    job: WriteJob,
    intent: Intent,
    version: int,
    messages: Sequence[TaskMessage],
    *,
    ends_intent: bool,
) -> CommitOutcome:
    """Make the tasks' rows visible, in all topics at once; with `ends_intent` the intent ends.

    An overwrite without new rows removes a topic's rows too. After a write without rows the topic
    that the option names exists, with its schema. Raises the errors of TopicClient.commit_topics.
    """
    options = job.options
    cluster = blocking.topics(options.service_url, options.outage_timeout_s)
    exclude_from_gc(Moment.CONNECTED)
    task_batches = [message.batch for message in messages if message.batch is not None]
    batch = None
    if task_batches:
        content = batch_content(task_batch.content for task_batch in task_batches)
        batch = QueryBatch(content, task_batches[0].on_replay)
    replaced_topics = intent.record.snapshots.keys()
    results: dict[str, list[TaskResult]] = {topic_id: [] for topic_id in sorted(replaced_topics)}
    versions: dict[str, frozenset[int]] = {}
    for message in messages:
        for result in message.results:
            results.setdefault(result.topic_id, []).append(result)
        for topic_id, numbers in message.versions.items():
            versions[topic_id] = versions.get(topic_id, frozenset()) | numbers
    txn = TxnKey(intent.app_id, intent.target, version, intent.run_id)
    with adding_topic_names_to_errors(cluster):
        if not results and options.topic is not None and version > intent.record.w0:
            topic = cluster.run(find_or_make(cluster.client, options, options.topic))
            results[topic.info.id] = []
        if job.values is not None and options.topic is not None and not all(results.values()):
            topic = cluster.run(find_or_make(cluster.client, options, options.topic))
            if topic.info.id in results and topic.info.id not in versions:
                schema = cluster.run(job.values.version(cluster.client.schemas, topic.info))
                if schema is not None:
                    versions[topic.info.id] = frozenset({schema.number})
        commit = cluster.client.commit_topics(
            results,
            txn,
            intent.id,
            overwrite=replaced_topics,
            overwrite_held=options.overwrite_held,
            row_kinds=job.row_kinds(results, versions),
            user_metadata=options.user_metadata or "",
            finish_intent=ends_intent,
            batch=batch,
        )
        try:
            outcome = cluster.run(commit)
        except CommitOverTooManyTopics as error:
            raise cluster.run(too_many_topics(cluster.client, error.what, list(results))) from None
    if outcome.kind is not CommitKind.COMMITTED:
        _log.warning("%s", _replay_text(txn, batch, outcome.kind))
    return outcome


def _replay_text(txn: TxnKey, batch: QueryBatch | None, kind: CommitKind) -> str:
    rows = "the rows" if batch is None else f"{batch.content.rows} rows"
    version = f"version {txn.version} of '{txn.app_id}'"
    if kind is CommitKind.SKIPPED:
        return f"{rows} were not written: {version} is committed to '{txn.target}' with other rows"
    if batch is not None and batch.on_replay is not OnReplay.IGNORE:
        return f"{rows} were not written again: {version} is committed to '{txn.target}'"
    return f"{rows} were not written: {version}, or a later one, is committed to '{txn.target}'"


def topics_of(
    cluster: BlockingTopics, options: WriteOptions, names: Sequence[str], run_id: str
) -> dict[str, WrittenTopic]:
    """The topics of these names, as a task of the run in this process read them at most TOPIC_S
    ago; all other topics are found, or made, together."""
    cached = {name: _topics.get((options.service_url, run_id, name)) for name in names}
    missing = [name for name, topic in cached.items() if topic is None]
    if missing:
        topics = cluster.run(find_or_make_all(cluster.client, options, missing))
        for name, topic in zip(missing, topics, strict=True):
            cached[name] = _topics.put((options.service_url, run_id, name), topic)
    return {name: topic for name, topic in cached.items() if topic is not None}


def query_intent(
    job: WriteJob, query_id: str, run_id: str, *, is_retry: bool = False, kind: str = QUERY
) -> Intent:
    """The intent of the query's run on its target; read anew after HEARTBEAT_S, and in a task's
    second attempt (`is_retry`). The topic that the options name is found or made first, as the
    target has the topic's id: an older topic of the same name has another target."""
    options = job.options
    cluster = blocking.topics(options.service_url, options.outage_timeout_s)
    if is_retry:
        run = query_id, run_id
        drop_intents_and_topics(lambda cached: (cached.app_id, cached.run_id) == run)
    target, replaced_topics = options.txn_target, []
    if options.topic is not None:
        topic = topics_of(cluster, options, [options.topic], run_id)[options.topic]
        target = topic.txn_target
        replaced_topics = [topic.info.id] if job.overwrite else []
    key = (options.service_url, query_id, run_id, target, kind)
    cached_intent = _intents.get(key)
    if cached_intent is not None:
        return cached_intent
    intents = cluster.client.intents
    intent = cluster.run(
        intents.open_query_intent(query_id, run_id, target, overwrites=replaced_topics, kind=kind)
    )
    cluster.run(intents.heartbeat(intent))
    return _intents.put(key, intent)


def drop_intents_and_topics(is_stale: Callable[[Intent], bool]) -> None:
    """Drop the cached intents for which `is_stale` is true, and all cached topics: the next caller
    reads them again."""
    _intents.drop_if(is_stale)
    _topics.drop_if(lambda _: True)


@contextmanager
def adding_topic_names_to_errors(cluster: BlockingTopics) -> Iterator[None]:
    """Put the topic's name into errors of the context that have only the topic's id. TopicDeleted
    gets a remedy for writers, too."""
    try:
        yield
    except SchemaIncompatible as error:
        what, name, topic_id = error.what, None, error.facts.get("topic_id")
        if isinstance(topic_id, str) and topic_id in what:
            with suppress(Unavailable):
                name = cluster.run(cluster.client.topics.name_of(topic_id))
        what = what if name is None else what.replace(str(topic_id), name.short)
        raise type(error)(what, error.remedy, **error.facts) from None
    except TopicDeleted as error:
        what, name, topic_id = error.what, None, error.facts.get("topic_id")
        if isinstance(topic_id, str):
            with suppress(Unavailable):
                name = cluster.run(cluster.client.topics.name_of(topic_id))
        if name is not None:
            what = f"topic '{name}' (id {topic_id}) was deleted"
        raise TopicDeleted(what, WRITE_AGAIN, **error.facts) from None


@contextmanager
def heartbeats(cluster: BlockingTopics, intent: Intent) -> Iterator[None]:
    """Send heartbeats of the intent while the context is open."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await cluster.client.intents.heartbeat(intent)

    heartbeat_task = background_loop().submit(beat())
    try:
        yield
    finally:
        heartbeat_task.cancel()
