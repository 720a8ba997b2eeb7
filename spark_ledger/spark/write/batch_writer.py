"""Batch writes. Always true: a write is one commit under one (app id, version), made when every
task has ended well; abort deletes nothing. With txnAppId inside foreachBatch it goes by the rule of
a query's batch (topic/commit/replay.py)."""

import secrets
from collections.abc import Iterator, Mapping

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from spark_ledger.spark.options.options import WriteOptions
from spark_ledger.spark.write import job as write_job
from spark_ledger.spark.write.job import WriteJob
from spark_ledger.spark.write.target import WrittenTopic, find_or_make
from spark_ledger.spark.write.tasks import TaskProperties, Written, commit_rows, write_rows
from spark_ledger.spark.write.topic_writers import Task
from spark_ledger.topic import blocking
from spark_ledger.topic.commit.replay import OnReplay
from spark_ledger.topic.log.intents import Intent


def planned_writer(
    options: WriteOptions, schema: StructType, overwrite: bool
) -> "LedgerBatchWriter":
    """The writer of one job, made in the driver: everything is checked, the intent is open."""
    job = WriteJob.of(options, schema, overwrite)
    cluster = blocking.topics(options.service_url, options.outage_timeout_s, begins=True)
    known = cluster.run(write_job.check(cluster.client, job, fresh=True))
    replaced = []
    target = options.txn_target
    if overwrite or (options.txn_app_id and options.topic):
        topic = known.get(options.target) or cluster.run(
            find_or_make(cluster.client, options, options.target, fresh=True)
        )
        known[options.target] = topic
        replaced = [topic.info.id] if overwrite else []
        target = topic.txn_target
    app_id = options.txn_app_id or f"batch-{secrets.token_hex(16)}"
    opened = cluster.client.intents.open_batch_intent(
        app_id,
        secrets.token_hex(16),
        target,
        overwrites=replaced,
        random=options.txn_app_id is None,
    )
    return LedgerBatchWriter(job, known, cluster.run(opened))


class LedgerBatchWriter(DataSourceArrowWriter):
    """Goes from the driver to the tasks and to the process that commits."""

    def __init__(self, job: WriteJob, known: Mapping[str, WrittenTopic], intent: Intent) -> None:
        self.job = job
        self.known = known
        self.intent = intent
        self.version = job.options.txn_version or 0

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        spark = TaskProperties.of(TaskContext.get())
        task = Task(self.intent, spark.index, spark.attempt, self._about(spark))
        on_replay = self._on_replay(in_query=spark.query_id is not None)
        known, version = self.known, self.version
        return write_rows(
            self.job, task, iterator, version=version, on_replay=on_replay, known=known
        )

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        written = [message for message in messages if isinstance(message, Written)]
        commit_rows(self.job, self.intent, self.version, written, last=True)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing: what was written is in no commit, and only the janitor deletes."""

    def _on_replay(self, *, in_query: bool) -> OnReplay | None:
        """A thread that foreachBatch started may not know of the query, but the option is heard."""
        if self.job.options.txn_app_id is None:
            return None
        asked = self.job.options.on_replay is not None
        return self.job.on_replay if in_query or asked else OnReplay.IGNORE

    def _about(self, spark: TaskProperties) -> Mapping[str, str]:
        if self.job.options.txn_app_id is None:
            return spark.about
        txn = {"txnAppId": self.job.options.txn_app_id, "txnVersion": str(self.version)}
        return {**spark.about, **txn}
