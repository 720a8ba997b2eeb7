"""Merging the small segments of a topic as a Spark job.

    spark_ledger.compact(spark, "flights")

Always true: what a merge is, is topic/upkeep/compactor.py's: the driver plans and commits, tasks
read and write. A commit takes what one attempt of each task wrote, as Spark hands it to the driver:
what other attempts wrote, or all when the driver dies before its commit, is in no topic, under an
intent that ends with the job or is condemned once its heartbeat stops; the janitor
deletes it.
"""

from collections.abc import Callable, Sequence
from functools import partial

from pyspark.sql import SparkSession

from spark_ledger.config import resolve_service_url, whole
from spark_ledger.spark.session import check_session
from spark_ledger.spark.spread import run_each
from spark_ledger.spark.write.tasks import heartbeats
from spark_ledger.topic import blocking
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.upkeep import compactor
from spark_ledger.topic.upkeep.compactor import Compacted, Compaction, Merged, MergeTask
from spark_ledger.topic.upkeep.merge_plan import MERGED_BYTES, MergeLimits

ROUND_BYTES = 8 << 30  # of rows merged by one commit
TASK_BYTES = 64 << 20  # a Spark task reads and writes about so much, or one merge
TASKS_MIN = 32  # while each has this much to do:
TASK_BYTES_MIN = 4 << 20

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
