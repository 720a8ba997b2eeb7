"""What runs inside a Spark task that writes: rows into a ledger.

Always true: connections, open ledgers and the query's intent are kept from task to task in the
Python worker (topic/blocking.py, which remembers its pid); a task that writes shows by heartbeats
that its intent is in use; its message names only entries that were acknowledged.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from spark_ledger.spark import schema
from spark_ledger.spark.options import WriteOptions
from spark_ledger.topic import blocking
from spark_ledger.topic.blocking import BlockingTopics
from spark_ledger.topic.intents import Intent
from spark_ledger.topic.task_writer import TaskResult, TaskSettings
from spark_ledger.topic.topics import TopicInfo

HEARTBEAT_S = 60.0
"""How often an intent in use is shown to be; the janitor's lease is many times as long."""


@dataclass
class Written(WriterCommitMessage):
    """A task's message to the driver."""

    intent: Intent
    result: TaskResult


@dataclass
class _Kept:
    intent: Intent
    until: float


_intents: dict[tuple[str, str, str, str], _Kept] = {}


def write_rows(
    options: WriteOptions,
    topic: TopicInfo,
    intent: Intent,
    context: TaskContext,
    batches: Iterator[pa.RecordBatch],
) -> Written:
    """Write all of a task's rows; returns when every one is acknowledged.

    Raises MessageTooBig, NotEnoughBookies, LedgerFenced, Unavailable: then nothing of it is
    visible.
    """
    cluster = blocking.topics(options.service_url)
    writer = cluster.task_writer(
        topic,
        intent,
        task_index=context.partitionId(),
        attempt=context.attemptNumber(),
        settings=TaskSettings(compression=options.compression),
    )
    beating = cluster.run(_start_beating(cluster, intent))
    try:
        for batch in batches:
            writer.write(*schema.key_and_value(batch))
        return Written(intent, writer.finish())
    except BaseException:
        writer.abort()
        raise
    finally:
        cluster.run(_stop(beating))


def query_intent(service_url: str, query_id: str, run_id: str, target: str) -> Intent:
    """The intent of the query's run on `target`, looked at again once in HEARTBEAT_S."""
    key = (service_url, query_id, run_id, target)
    kept = _intents.get(key)
    if kept is None or kept.until < time.monotonic():
        cluster = blocking.topics(service_url)
        intents = cluster.client.intents
        kept = _Kept(cluster.run(intents.open_query_intent(*key[1:])), time.monotonic())
        kept.until += HEARTBEAT_S
        cluster.run(intents.heartbeat(kept.intent))
        _intents[key] = kept
    return kept.intent


async def _start_beating(cluster: BlockingTopics, intent: Intent) -> "asyncio.Task[None]":
    async def beat() -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await cluster.client.intents.heartbeat(intent)

    return asyncio.create_task(beat(), name=f"heartbeat of intent {intent.id}")


async def _stop(beating: "asyncio.Task[None]") -> None:
    beating.cancel()
