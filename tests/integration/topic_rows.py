"""Rows that are written to and read from topics of a real cluster."""

import pyarrow as pa
from pyspark.sql.types import StringType, StructField, StructType

from spark_ledger.cli.common import with_topics
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.commit.commit import TxnKey
from spark_ledger.topic.read.plan import plan_read
from spark_ledger.topic.write import TaskSettings
from tests.kit.loop_task import LoopTask


def write(service_url: str, name: str, *batches: list[str]) -> None:
    """A commit for each batch of rows, each in a ledger of its own."""

    async def work(client: TopicClient) -> None:
        info = await client.topics.open(name)
        for version, rows in enumerate(batches):
            intent = await client.intents.open_batch_intent("app", f"run-{version}", name)
            settings = TaskSettings(inline_bytes_max=0)
            writer = LoopTask(client, info, intent, task_index=0, settings=settings)
            await writer.write(None, pa.array(rows))
            txn = TxnKey("app", name, version, intent.run_id)
            result = await writer.finish()
            await client.commit_topics({info.id: [result]}, txn, intent.id, finish_intent=True)

    with_topics(service_url, work)


def write_and_commit(topics, info, version, rows, compression="none"):
    client = topics.client
    run_id = f"run-of-{info.id}"
    intent = topics.run(client.intents.open_query_intent(info.id, run_id, "target"))
    settings = TaskSettings(compression=compression)
    task = topics.task_writer(info, intent, task_index=0, settings=settings)
    for start in range(0, len(rows), 1000):
        part = pa.array(rows[start : start + 1000], pa.binary())
        task.write(part, part)
    txn = TxnKey(intent.app_id, intent.target, version, intent.run_id)
    return topics.run(client.commit_topics({info.id: [task.start_finish()()]}, txn, intent.id))


def read_all(topics, info, **options):
    state = topics.run(topics.client.log(info.id).fold(fresh=True))
    ranges = {partition: (0, end) for partition, end in state.end_offsets().items()}
    found = []
    for task in plan_read(state, ranges, **options):
        for rows in topics.read(task):
            found += rows.record_batch["value"].to_pylist()
    return found


VALUE = StructType([StructField("value", StringType())])
