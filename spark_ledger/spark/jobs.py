"""Compaction and audit by Spark tasks; each task runs the same code as without Spark.

    spark_ledger.compact(spark, "flights")      merges the small segments of a topic
    spark-ledger ledger audit --spark           checks every ledger

Always true: topic/upkeep/compactor.py decides about merges: the driver plans and commits, tasks
read and write. Spark gives the driver the result of one attempt of each task, and the commit has
the rows of these attempts. No topic gets rows of other attempts, or rows of a driver that dies
before its commit. Their ledgers are under an intent (the job's record of the ledgers it makes). The
intent ends with the job, or is condemned when its heartbeat stops; then the janitor deletes the
ledgers. An audit (repair/audit.py) changes nothing: the driver lists the ledgers and the references
of topics, each task checks some of the ledgers, and the driver adds up the tasks' findings.
"""

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from spark_ledger.config import resolve_service_url, whole
from spark_ledger.errors import BadConfig, Unavailable, cause_of
from spark_ledger.repair.audit import Audit, References, audit_batch
from spark_ledger.repair.service import tokens_of
from spark_ledger.spark.session import check_session
from spark_ledger.spark.worker import worker_python
from spark_ledger.spark.write.tasks import heartbeats
from spark_ledger.topic import blocking
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.upkeep import compactor
from spark_ledger.topic.upkeep.compactor import Compaction, CompactionResult, MergeResult, MergeTask
from spark_ledger.topic.upkeep.ledger_inventory import referred_by
from spark_ledger.topic.upkeep.merge_plan import MERGED_BYTES, MergeLimits

A = TypeVar("A")
B = TypeVar("B")


def run_each(spark: SparkSession, do: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """The results of `do` for the items, in their order, by a Spark task for each item. Spark may
    repeat a task; its result is that of one attempt. Raises the errors of Spark's job."""
    numbers = spark.range(0, len(items), 1, max(1, len(items)))  # a number for each Spark task
    packed = [pickle.dumps(item) for item in items]
    results = numbers.mapInArrow(partial(_do_each, do, packed), "number LONG, result BINARY")
    by_number = {row.number: row.result for row in results.collect()}
    return [pickle.loads(by_number[number]) for number in range(len(items))]


def _do_each(
    do: Callable[[Any], Any], packed: Sequence[bytes], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            result = pickle.dumps(do(pickle.loads(packed[number])))
            columns = [pa.array([number], pa.int64()), pa.array([result], pa.binary())]
            yield pa.RecordBatch.from_arrays(columns, names=["number", "result"])


ROUND_BYTES = 8 << 30  # of the rows that one commit merges
TASK_BYTES = 64 << 20  # of the rows that one Spark task merges; a single merge may be larger
TASKS_MIN = 32  # a job has fewer tasks if each would have less than TASK_BYTES_MIN
TASK_BYTES_MIN = 4 << 20
TASK_LEDGERS, TASK_LEDGERS_MIN = 1000, 16  # ledgers that one task of an audit checks

Group = tuple[MergeTask, ...]


def compact(
    spark: SparkSession,
    topic: str,
    service_url: str | None = None,
    *,
    merged_bytes: int = MERGED_BYTES,
) -> CompactionResult:
    """Merge the small segments that the topic has now into segments of about `merged_bytes` bytes,
    by Spark tasks.

    Rows keep offset, columns, timestamp and commit time; readers and writers go on meanwhile.
    Durable on return: every merge that the result counts. Each merge is one commit: if a job ends
    early, the topic stays valid, and the next job continues. `service_url` None:
    LEDGER_SERVICE_URL, else the default. Raises errors.OptionInvalid, errors.BadConfig,
    errors.TopicNotFound, errors.TopicNameInvalid, errors.TxnConflict (other commits rearrange the
    topic again and again), errors.Unavailable; an error of reading or writing fails Spark's job.
    """
    check_session(spark)
    url = resolve_service_url(service_url)
    limits = MergeLimits(bytes_max=whole("merged_bytes", merged_bytes))
    cluster = blocking.topics(url)
    info = cluster.run(cluster.client.topics.open(topic))

    compaction = Compaction(cluster.client, info, limits, ROUND_BYTES)
    try:
        while tasks := cluster.run(compaction.plan()):
            intent = compaction.intent
            with heartbeats(cluster, intent):
                merged = run_tasks(spark, partial(merge_group, url, info, intent), tasks)
            cluster.run(compaction.commit(merged))
        return compaction.total
    finally:
        cluster.run(compaction.aclose())


def run_tasks(
    spark: SparkSession,
    do: Callable[[Group], list[MergeResult]],
    tasks: Sequence[MergeTask],
) -> list[MergeResult]:
    """The results of `do` for the tasks, in their order, by a Spark task for each group."""
    return [merged for group in run_each(spark, do, group_tasks(tasks)) for merged in group]


def group_tasks(tasks: Sequence[MergeTask]) -> list[Group]:
    """The tasks in their order, grouped by the Spark task that carries them out."""
    total = sum(task.bytes for task in tasks)
    limit = min(TASK_BYTES, max(TASK_BYTES_MIN, total // TASKS_MIN))
    groups: list[list[MergeTask]] = []
    group_bytes = 0
    for task in tasks:
        if not groups or group_bytes + task.bytes > limit:
            groups.append([])
            group_bytes = 0
        groups[-1].append(task)
        group_bytes += task.bytes
    return [tuple(group) for group in groups]


def merge_group(
    service_url: str, topic: TopicInfo, intent: Intent, group: Group
) -> list[MergeResult]:
    """In a Spark task: carry out a group's merges. Raises the errors of reads and writes."""
    cluster = blocking.topics(service_url)
    with heartbeats(cluster, intent):
        results = [
            cluster.run(compactor.merge(cluster.client, topic, intent, task)) for task in group
        ]
    return [merge for merges in results for merge in merges]


def audit(spark: SparkSession, service_url: str, *, deep: bool = False) -> Audit:
    """Check every ledger by Spark tasks. Raises errors.Unavailable, errors.OptionInvalid."""
    check_session(spark)
    cluster = blocking.topics(service_url)
    ledger_ids, referred = cluster.run(_ledgers_and_references(cluster.client))
    size = min(TASK_LEDGERS, max(TASK_LEDGERS_MIN, len(ledger_ids) // TASKS_MIN))
    groups = [ledger_ids[at : at + size] for at in range(0, len(ledger_ids), size)]
    do = partial(audit_group, service_url, deep, referred)
    result = Audit()
    try:
        for part in run_each(spark, do, groups):
            result.merge(part)
    except PySparkException as failure:
        raise Unavailable(
            f"the Spark job of the audit failed: {_reason(failure)}", "Look into Spark's own log."
        ) from failure
    return result


def session() -> SparkSession:
    """The active session, else a new one with Spark's own configuration. Raises BadConfig."""
    os.environ.setdefault("PYSPARK_PYTHON", worker_python())
    builder = SparkSession.builder.appName("spark-ledger ledger audit")
    try:
        return builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    except Exception as failure:
        raise BadConfig(
            f"Spark cannot be started: {_reason(failure)}",
            "Check SPARK_HOME, SPARK_CONF_DIR and PYSPARK_SUBMIT_ARGS; Spark needs Java 17.",
        ) from failure


def audit_group(
    service_url: str, deep: bool, referred: References, ledger_ids: Sequence[int]
) -> Audit:
    """In a Spark task: check these ledgers. Raises errors.Unavailable."""
    cluster = blocking.topics(service_url)

    async def audit_ledgers() -> Audit:
        ledgers = cluster.client.ledgers
        tokens = await tokens_of(ledgers)
        return await audit_batch(ledgers, tokens, ledger_ids, deep=deep, referred=referred)

    return cluster.run(audit_ledgers())


async def _ledgers_and_references(topics: TopicClient) -> tuple[list[int], References]:
    return [ledger_id async for ledger_id in topics.ledgers.list()], await referred_by(topics)


def _reason(failure: Exception) -> str:
    """The message of this package's first error in a task; without such an error, the first line
    of Spark's message."""
    return cause_of(failure) or str(failure).strip().partition("\n")[0]
