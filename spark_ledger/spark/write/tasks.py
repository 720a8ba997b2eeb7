"""The code inside a Spark task that writes: rows into ledgers.

Always true: connections, open ledgers, the query's intent and the facts of its topics are kept from
task to task in the Python worker (topic/blocking.py, which remembers its pid); a task that writes
shows by heartbeats that its intent is in use; its message names only acknowledged entries. If the
number of a batch was committed before its run began, the batch's rows are compared with the
committed ones and not written again, unless the user wants that (topic/commit/replay.py). A task
that fails drops the kept intent and topics, and an attempt that repeats another does not use them:
they may be why the other failed (an intent condemned meanwhile, a topic that was deleted).
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
from spark_ledger.topic.commit.replay import OnReplay, QueryBatch, TaskWork, work_of
from spark_ledger.topic.log.intents import QUERY, Intent
from spark_ledger.topic.write import TaskResult

QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"
RUN_ID = "spark.jobGroup.id"

HEARTBEAT_S = 60.0
"""The time between heartbeats of an intent in use; the janitor's lease is many times as long."""
TOPIC_S = 10.0
"""How long a query's tasks keep what they read of a topic; after that they see that it grew."""
WRITE_AGAIN = (
    "Write again, or restart the query from the same checkpoint: the topic is made again then."
)


@dataclass
class Written(WriterCommitMessage):
    """A task's message to the driver: its result for each topic. `batch` counts the task's rows of
    a query's batch (None in a batch job outside queries); `versions` are the schema versions of
    typed rows, by topic's id."""

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
    def extra_headers(self) -> dict[str, str]:
        """Headers for bad records: which query and batch wrote them."""
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
) -> Written:
    """Write all of a task's rows; returns when all are acknowledged. They will be committed as
    `version`; `on_replay` is None if that version is never written again: then rows are not
    counted; `topics` are topics as the driver saw them.

    Raises CheckpointBehind before it takes a row; MessageTooBig, NullTopic, NotEnoughBookies,
    LedgerFenced, Unavailable ...: then none of the rows is visible.
    """
    intent, counted = task.intent, Fingerprint()
    cluster = blocking.topics(job.options.service_url, job.options.outage_timeout_s)
    exclude_from_gc(Moment.CONNECTED)
    if on_replay is not None:
        work = _work(cluster, intent, version, on_replay)
        batches = _counted(batches, job, counted)
        if work is TaskWork.COMPARE:
            for _ in batches:
                pass
            cluster.until_back()
            return Written(intent, (), _batch(counted, on_replay))

    def find(names: Sequence[str]) -> Mapping[str, WrittenTopic]:
        topics_of_driver = topics or {}
        unknown = [name for name in names if name not in topics_of_driver]
        return {**topics_of_driver, **topics_of(cluster, job.options, unknown, intent.run_id)}

    with topic_names_in_errors(cluster), heartbeats(cluster, intent):
        writers = TopicWriters(cluster, job, task, find)
        try:
            for batch in batches:
                if batch.num_rows:
                    writers.write(job.plan.rows(batch))
            results = writers.finish()
            cluster.until_back()  # here Spark can stop the query, not while its commit waits
            return Written(intent, results, _batch(counted, on_replay), writers.versions)
        except BaseException:
            drop_cached(lambda cached: cached.id == intent.id)
            writers.abort()
            raise


def _work(cluster: BlockingTopics, intent: Intent, version: int, on_replay: OnReplay) -> TaskWork:
    """What to do with the rows; above `w0` this needs no request."""
    if version > intent.record.w0:
        return TaskWork.WRITE
    record = cluster.run(cluster.client.intents.recorded(intent))
    return work_of(record, intent.app_id, version, on_replay)


def _counted(
    batches: Iterable[pa.RecordBatch], job: WriteJob, counted: Fingerprint
) -> Iterator[pa.RecordBatch]:
    """The same batches, each counted when the caller takes it."""
    for batch in batches:
        counted.add(job.plan.as_written(batch))
        yield batch


def _batch(counted: Fingerprint, on_replay: OnReplay | None) -> QueryBatch | None:
    return None if on_replay is None else QueryBatch(counted.content, on_replay)


def commit_rows(
    job: WriteJob, intent: Intent, version: int, written: Sequence[Written], *, last: bool
) -> CommitOutcome:
    """Make the tasks' rows visible, in all topics at once; with `last` the intent ends.

    An overwrite replaces a topic's rows even without new rows; the topic that the option names
    exists after a write without rows, with its schema. Raises as TopicClient.commit_topics.
    """
    options = job.options
    cluster = blocking.topics(options.service_url, options.outage_timeout_s)
    exclude_from_gc(Moment.CONNECTED)
    counted = [message.batch for message in written if message.batch is not None]
    batch = None
    if counted:
        batch = QueryBatch(
            batch_content(counts.content for counts in counted), counted[0].on_replay
        )
    replaced = intent.record.snapshots.keys()
    results: dict[str, list[TaskResult]] = {topic_id: [] for topic_id in sorted(replaced)}
    versions: dict[str, frozenset[int]] = {}
    for message in written:
        for result in message.results:
            results.setdefault(result.topic_id, []).append(result)
        for topic_id, numbers in message.versions.items():
            versions[topic_id] = versions.get(topic_id, frozenset()) | numbers
    txn = TxnKey(intent.app_id, intent.target, version, intent.run_id)
    with topic_names_in_errors(cluster):
        if not results and options.topic is not None and version > intent.record.w0:
            made = cluster.run(find_or_make(cluster.client, options, options.topic))
            results[made.info.id] = []
        if job.values is not None and options.topic is not None and not all(results.values()):
            named = cluster.run(find_or_make(cluster.client, options, options.topic))
            if named.info.id in results and named.info.id not in versions:
                under = cluster.run(job.values.version(cluster.client.schemas, named.info))
                if under is not None:
                    versions[named.info.id] = frozenset({under.number})
        committing = cluster.client.commit_topics(
            results,
            txn,
            intent.id,
            overwrite=replaced,
            overwrite_held=options.overwrite_held,
            kinds=job.row_kinds(results, versions),
            user_metadata=options.user_metadata or "",
            finish_intent=last,
            batch=batch,
        )
        try:
            outcome = cluster.run(committing)
        except CommitOverTooManyTopics as error:
            raise cluster.run(too_many_topics(cluster.client, error.what, list(results))) from None
    if outcome.kind is not CommitKind.COMMITTED:
        _log.warning("%s", _nothing_written(txn, batch, outcome.kind))
    return outcome


def _nothing_written(txn: TxnKey, batch: QueryBatch | None, kind: CommitKind) -> str:
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
    """The topics as a run's tasks saw them up to TOPIC_S ago; topics that are not kept are found,
    or made, together."""
    kept = {name: _topics.get((options.service_url, run_id, name)) for name in names}
    unknown = [name for name, topic in kept.items() if topic is None]
    if unknown:
        topics = cluster.run(find_or_make_all(cluster.client, options, unknown))
        for name, topic in zip(unknown, topics, strict=True):
            kept[name] = _topics.put((options.service_url, run_id, name), topic)
    return {name: topic for name, topic in kept.items() if topic is not None}


def query_intent(
    job: WriteJob, query_id: str, run_id: str, *, again: bool = False, kind: str = QUERY
) -> Intent:
    """The intent of the query's run on its target, read again once in HEARTBEAT_S, and by each
    attempt that does a task `again`. A topic that the options name is found first, or made: the
    target is this topic with its id, as it has no commits of an older topic of the same name."""
    options = job.options
    cluster = blocking.topics(options.service_url, options.outage_timeout_s)
    if again:
        drop_cached(lambda cached: (cached.app_id, cached.run_id) == (query_id, run_id))
    target, replaced = options.txn_target, []
    if options.topic is not None:
        topic = topics_of(cluster, options, [options.topic], run_id)[options.topic]
        target = topic.txn_target
        replaced = [topic.info.id] if job.overwrite else []
    key = (options.service_url, query_id, run_id, target, kind)
    open_intent = _intents.get(key)
    if open_intent is not None:
        return open_intent
    intents = cluster.client.intents
    opened = intents.open_query_intent(query_id, run_id, target, overwrites=replaced, kind=kind)
    intent = cluster.run(opened)
    cluster.run(intents.heartbeat(intent))
    return _intents.put(key, intent)


def drop_cached(is_meant: Callable[[Intent], bool]) -> None:
    """Drop the kept intents that are meant, and all kept topics: the next caller reads them
    again."""
    _intents.drop_if(is_meant)
    _topics.drop_if(lambda _: True)


@contextmanager
def topic_names_in_errors(cluster: BlockingTopics) -> Iterator[None]:
    """Errors in the context name the topic, not only its id. An error of a topic that was deleted
    meanwhile also gets a remedy for writers."""
    try:
        yield
    except SchemaIncompatible as error:
        what, name, topic_id = error.what, None, error.facts.get("topic_id")
        if isinstance(topic_id, str) and topic_id in what:
            with suppress(Unavailable):
                name = cluster.run(cluster.client.topics.name_of(topic_id))
        what = what if name is None else what.replace(str(topic_id), name.short)
        raise SchemaIncompatible(what, error.remedy, **error.facts) from None
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
    """Shows by heartbeats, inside the context, that the intent is in use."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await cluster.client.intents.heartbeat(intent)

    beating = background_loop().submit(beat())
    try:
        yield
    finally:
        beating.cancel()
