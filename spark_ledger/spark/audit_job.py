"""The audit of all ledgers (repair/audit.py) as a Spark job, for clusters of very many.

    the driver lists the ledgers and what topics refer to -> each task checks some -> counts and
    what is wrong are added up

Always true: a task runs the code that the command runs without Spark; nothing is changed.
"""

import os
from collections.abc import Sequence
from functools import partial

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from spark_ledger.errors import BadConfig, Unavailable
from spark_ledger.repair.audit import Audit, Referred, audit_some, referred_by
from spark_ledger.repair.service import tokens_of
from spark_ledger.spark.session import check_session
from spark_ledger.spark.spread import run_each
from spark_ledger.spark.worker.causes import cause_of
from spark_ledger.spark.worker.worker_python import worker_python
from spark_ledger.topic import blocking
from spark_ledger.topic.client import TopicClient

TASK_LEDGERS, TASK_LEDGERS_MIN, TASKS_MIN = 1000, 16, 32


def audit(spark: SparkSession, service_url: str, *, deep: bool = False) -> Audit:
    """Check every ledger by Spark tasks. Raises errors.Unavailable, errors.OptionInvalid."""
    check_session(spark)
    cluster = blocking.topics(service_url)
    ledger_ids, referred = cluster.run(_survey(cluster.client))
    do = partial(audit_group, service_url, deep, referred)
    result = Audit()
    try:
        for part in run_each(spark, do, grouped(ledger_ids)):
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


def grouped(ledger_ids: Sequence[int]) -> list[Sequence[int]]:
    """Those together that one Spark task checks."""
    size = min(TASK_LEDGERS, max(TASK_LEDGERS_MIN, len(ledger_ids) // TASKS_MIN))
    return [ledger_ids[at : at + size] for at in range(0, len(ledger_ids), size)]


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
