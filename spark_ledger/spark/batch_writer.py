"""Batch writes. Always true: a write is one commit under one (app id, version), made when every
task has ended well; abort deletes nothing."""

import secrets
from collections.abc import Iterator

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from spark_ledger.errors import OptionInvalid
from spark_ledger.spark import write_tasks
from spark_ledger.spark.options import WriteOptions
from spark_ledger.spark.schema import check_written
from spark_ledger.spark.target import open_target, results_of, target_name
from spark_ledger.topic import blocking
from spark_ledger.topic.commit import TxnKey
from spark_ledger.topic.intents import Intent
from spark_ledger.topic.topics import TopicInfo


def planned_writer(options: WriteOptions, schema: StructType, overwrite: bool) -> "LedgerWriter":
    """The writer of one job, made in the driver: the topic exists, the intent is open."""
    check_written(schema)
    if overwrite:
        raise OptionInvalid("a topic cannot be overwritten", "Use mode('append').")
    cluster = blocking.topics(options.service_url)
    topic = open_target(cluster, options)
    app_id = options.txn_app_id or f"batch-{secrets.token_hex(16)}"
    target = target_name(options)
    intents = cluster.client.intents
    intent = cluster.run(intents.open_batch_intent(app_id, secrets.token_hex(16), target))
    return LedgerWriter(options, topic, intent)


class LedgerWriter(DataSourceArrowWriter):
    """Goes from the driver to the tasks and to the process that commits."""

    def __init__(self, options: WriteOptions, topic: TopicInfo, intent: Intent) -> None:
        self.options = options
        self.topic = topic
        self.intent = intent

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None, "a writer writes inside a Spark task"
        return write_tasks.write_rows(self.options, self.topic, self.intent, context, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        cluster, intent = blocking.topics(self.options.service_url), self.intent
        txn = TxnKey(intent.app_id, intent.target, self.options.txn_version or 0, intent.run_id)
        cluster.run(
            cluster.client.commit(
                self.topic.id, txn, intent.id, results_of(messages), finish_intent=True
            )
        )

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing: what was written is in no commit, and only the janitor deletes."""
