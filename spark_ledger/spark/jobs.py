"""Work that is spread over Spark's tasks, with the same code inside as without Spark.

    spark_ledger.compact(spark, "flights")      merges the small segments of a topic
    spark-ledger ledger audit --spark           checks every ledger

Always true: what a merge is, is topic/upkeep/compactor.py's: the driver plans and commits, tasks
read and write. A commit takes what one attempt of each task wrote, as Spark hands it to the driver:
what other attempts wrote, or all when the driver dies before its commit, is in no topic, under an
intent that ends with the job or is condemned once its heartbeat stops; the janitor deletes it. An
audit (repair/audit.py) changes nothing: the driver lists the ledgers and what topics refer to, each
task checks some, and what they found is added up.
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
from spark_ledger.repair.audit import Audit, Referred, audit_some, referred_by
from spark_ledger.repair.service import tokens_of
from spark_ledger.spark.session import check_session
from spark_ledger.spark.worker import worker_python
from spark_ledger.spark.write.tasks import heartbeats
from spark_ledger.topic import blocking
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.upkeep import compactor
from spark_ledger.topic.upkeep.compactor import Compacted, Compaction, Merged, MergeTask
from spark_ledger.topic.upkeep.merge_plan import MERGED_BYTES, MergeLimits

A = TypeVar("A")
B = TypeVar("B")


def run_each(spark: SparkSession, do: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """What `do` made of each item, in their order, by a Spark task for each. An item may be done
    more than once; what is returned is of one attempt. Raises what Spark's job raises."""
    numbers = spark.range(0, len(items), 1, max(1, len(items)))  # one to a Spark task
    packed = [pickle.dumps(item) for item in items]
    made = numbers.mapInArrow(partial(_each, do, packed), "number LONG, made BINARY")
    found = {row.number: row.made for row in made.collect()}
    return [pickle.loads(found[number]) for number in range(len(items))]


def _each(
    do: Callable[[Any], Any], packed: Sequence[bytes], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            made = pickle.dumps(do(pickle.loads(packed[number])))
            columns = [pa.array([number], pa.int64()), pa.array([made], pa.binary())]
            yield pa.RecordBatch.from_arrays(columns, names=["number", "made"])


ROUND_BYTES = 8 << 30  # of rows merged by one commit
TASK_BYTES = 64 << 20  # a Spark task reads and writes about so much, or one merge
TASKS_MIN = 32  # while each has this much to do:
TASK_BYTES_MIN = 4 << 20
TASK_LEDGERS, TASK_LEDGERS_MIN = 1000, 16  # that a task of an audit checks

Group = tuple[MergeTask, ...]


def compact(
    spark: SparkSession,
    topic: str,
    service_url: str | None = None,
    *,
    merged_bytes: int = MERGED_BYTES,
) -> Compacted:
    """Merge the small segments that the topic has now into ones of about `merged_bytes` bytes, by
    Spark tasks.

    Rows keep offset, columns, timestamp and commit time; readers and writers go on meanwhile.
    Durable on return: every merge that the result counts. Each is one commit, so a job that ends
    early leaves a valid topic, and the next one goes on. `service_url` None: LEDGER_SERVICE_URL,
    else the default. Raises errors.OptionInvalid, errors.BadConfig, errors.TopicNotFound,
    errors.TopicNameInvalid, errors.TxnConflict (the topic is rearranged again and again),
    errors.Unavailable; what reading and writing raise comes as the error of Spark's job.
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
        return compaction.done
    finally:
        cluster.run(compaction.aclose())


def run_tasks(
    spark: SparkSession,
    do: Callable[[Group], list[Merged]],
    tasks: Sequence[MergeTask],
) -> list[Merged]:
    """What `do` made of each task, in their order, by as many Spark tasks as there are groups."""
    return [one for some in run_each(spark, do, grouped(tasks)) for one in some]


def grouped(tasks: Sequence[MergeTask]) -> list[Group]:
    """The tasks in their order, those together that one Spark task carries out."""
    total = sum(task.bytes for task in tasks)
    limit = min(TASK_BYTES, max(TASK_BYTES_MIN, total // TASKS_MIN))
    groups: list[list[MergeTask]] = []
    held = 0
    for task in tasks:
        if not groups or held + task.bytes > limit:
            groups.append([])
            held = 0
        groups[-1].append(task)
        held += task.bytes
    return [tuple(group) for group in groups]


def merge_group(service_url: str, topic: TopicInfo, intent: Intent, group: Group) -> list[Merged]:
    """In a Spark task: read and write. Raises as compactor.merge."""
    cluster = blocking.topics(service_url)
    with heartbeats(cluster, intent):
        made = [cluster.run(compactor.merge(cluster.client, topic, intent, task)) for task in group]
    return [one for some in made for one in some]


def audit(spark: SparkSession, service_url: str, *, deep: bool = False) -> Audit:
    """Check every ledger by Spark tasks. Raises errors.Unavailable, errors.OptionInvalid."""
    check_session(spark)
    cluster = blocking.topics(service_url)
    ledger_ids, referred = cluster.run(_survey(cluster.client))
    size = min(TASK_LEDGERS, max(TASK_LEDGERS_MIN, len(ledger_ids) // TASKS_MIN))
    groups = [ledger_ids[at : at + size] for at in range(0, len(ledger_ids), size)]
    do = partial(audit_group, service_url, deep, referred)
    result = Audit()
    try:
        for part in run_each(spark, do, groups):
            result.merge(part)
    except PySparkException as failure:
        raise Unavailable(
            f"the Spark job of the audit failed: {_why(failure)}", "Spark's own log tells more."
        ) from failure
    return result


def session() -> SparkSession:
    """The one that is active, else one as Spark's own configuration says. Raises BadConfig."""
    os.environ.setdefault("PYSPARK_PYTHON", worker_python())
    builder = SparkSession.builder.appName("spark-ledger ledger audit")
    try:
        return builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    except Exception as failure:
        raise BadConfig(
            f"Spark cannot be started: {_why(failure)}",
            "It is started as SPARK_HOME, SPARK_CONF_DIR and PYSPARK_SUBMIT_ARGS say, and needs"
            " Java 17.",
        ) from failure


def audit_group(
    service_url: str, deep: bool, referred: Referred, ledger_ids: Sequence[int]
) -> Audit:
    """In a Spark task. Raises errors.Unavailable."""
    cluster = blocking.topics(service_url)

    async def work() -> Audit:
        ledgers = cluster.client.ledgers
        tokens = await tokens_of(ledgers)
        return await audit_some(ledgers, tokens, ledger_ids, deep=deep, referred=referred)

    return cluster.run(work())


async def _survey(topics: TopicClient) -> tuple[list[int], Referred]:
    return [ledger_id async for ledger_id in topics.ledgers.list()], await referred_by(topics)


def _why(failure: Exception) -> str:
    """What a task of ours said, if any did; else what Spark said first."""
    return cause_of(failure) or str(failure).strip().partition("\n")[0]
