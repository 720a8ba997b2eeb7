"""The sinks of a stream and of a batch.

Always true: a micro-batch becomes visible by one commit under (query id, target, batch id), so a
replay adds nothing, and a batch of the same number with other rows is refused
(topic/commit/replay.py); abort deletes nothing. In complete mode the rows of a batch replace all
rows that the topic had when the run began, and the rows of the run's earlier batches.

Spark makes a new writer in the driver for each commit; the writer gets the query and the run only
from the tasks' messages. If commit fails, Spark makes another writer for abort; if that writer's
constructor fails, Spark hides the error of the commit. So the constructor makes no request: the
topics are checked when Spark sends the writer to its tasks, and the tasks raise the errors.

A batch write is one commit under one (app id, version), made when every task has ended without an
error. A batch write with txnAppId inside foreachBatch follows the rule of a query's batch.
"""

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from spark_ledger.errors import LedgerError, Unavailable
from spark_ledger.spark.options.options import WriteOptions
from spark_ledger.spark.worker import TtlCache
from spark_ledger.spark.write.job import (
    WriteJob,
    WrittenTopic,
    check_replaceable,
    check_topics,
    find_or_make,
)
from spark_ledger.spark.write.tasks import (
    TaskMessage,
    TaskProperties,
    commit_rows,
    query_intent,
    write_rows,
)
from spark_ledger.spark.write.topic_writers import Task
from spark_ledger.topic import blocking
from spark_ledger.topic.commit.replay import OnReplay
from spark_ledger.topic.log.intents import Intent

CHECKED_S = 60.0
"""How long a process relies on its last check of the topics that a query's options name."""

_passed_checks: TtlCache[tuple[WriteOptions, str, bool], bool] = TtlCache(CHECKED_S)


class LedgerStreamWriter(DataSourceStreamArrowWriter):
    """The writer of a stream. Spark makes two writers for every micro-batch: one to plan the tasks,
    and one to commit."""

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        self.job = WriteJob.of(options, schema, overwrite)
        self.refusal: LedgerError | None = None
        self.unreachable: Unavailable | None = None
        self._key = (options, schema.json(), overwrite)

    def __getstate__(self) -> dict[str, Any]:
        """The state for the tasks, after the check."""
        if not (self.refusal or self.unreachable or _passed_checks.get(self._key)):
            self._check()
        return self.__dict__

    def _check(self) -> None:
        """Keep the error for the tasks if the batch certainly cannot be written. In an outage of
        the store only the tasks wait, as Spark can stop a waiting task. The tasks of a query's
        first batch do not wait, but raise the error: the query's URL may be wrong."""
        options = self.job.options
        cluster = None
        try:
            cluster = blocking.topics(options.service_url, options.outage_timeout_s, fail_fast=True)
            if cluster.is_disconnected:
                return
            cluster.run(check_topics(cluster.client, self.job, fresh=True))
            _passed_checks.put(self._key, True)
        except LedgerError as error:
            if cluster is None and isinstance(error, Unavailable):
                self.unreachable = error
            else:
                self.refusal = error

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        if self.refusal is not None:
            raise self.refusal
        properties = TaskProperties.of(TaskContext.get())
        assert properties.query_id and properties.run_id, "a stream is written by a streaming query"
        assert properties.batch_id is not None, "a micro-batch has a number"
        if self.unreachable is not None and properties.batch_id == 0:
            raise self.unreachable
        intent = query_intent(
            self.job, properties.query_id, properties.run_id, is_retry=properties.attempt > 0
        )
        task = Task(intent, properties.index, properties.attempt, properties.bad_record_headers)
        on_replay = self.job.on_replay
        return write_rows(
            self.job, task, iterator, version=properties.batch_id, on_replay=on_replay
        )

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        from_tasks = [message for message in messages if isinstance(message, TaskMessage)]
        if from_tasks:
            intent = from_tasks[0].intent
            commit_rows(self.job, intent, batchId, from_tasks, ends_intent=False)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Does nothing: the written rows are in no commit, and only the janitor deletes."""


def open_batch_writer(
    options: WriteOptions, schema: StructType, overwrite: bool
) -> "LedgerBatchWriter":
    """The writer of one job, made in the driver after all checks, with an open intent."""
    job = WriteJob.of(options, schema, overwrite)
    cluster = blocking.topics(options.service_url, options.outage_timeout_s, fail_fast=True)
    topics = cluster.run(check_topics(cluster.client, job, fresh=True))
    replaced_topics = []
    target = options.txn_target
    if overwrite or (options.txn_app_id and options.topic):
        topic = topics.get(options.target) or cluster.run(
            find_or_make(cluster.client, options, options.target, fresh=True)
        )
        topics[options.target] = topic
        replaced_topics = [topic.info.id] if overwrite else []
        if overwrite and options.txn_app_id is None:  # with an id, the commit may exist already
            cluster.run(check_replaceable(cluster.client, options, topic))
        target = topic.txn_target
    app_id = options.txn_app_id or f"batch-{secrets.token_hex(16)}"
    open_intent = cluster.client.intents.open_batch_intent(
        app_id,
        secrets.token_hex(16),
        target,
        overwrites=replaced_topics,
        random=options.txn_app_id is None,
    )
    return LedgerBatchWriter(job, topics, cluster.run(open_intent))


class LedgerBatchWriter(DataSourceArrowWriter):
    """The writer of a batch job. Spark sends the writer from the driver to the tasks and to the
    process that commits."""

    def __init__(self, job: WriteJob, topics: Mapping[str, WrittenTopic], intent: Intent) -> None:
        self.job = job
        self.topics = topics
        self.intent = intent
        self.version = job.options.txn_version or 0

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        properties = TaskProperties.of(TaskContext.get())
        task = Task(
            *(self.intent, properties.index, properties.attempt),
            self._bad_record_headers(properties),
        )
        on_replay = self._on_replay(in_query=properties.query_id is not None)
        topics, version = self.topics, self.version
        return write_rows(
            self.job, task, iterator, version=version, on_replay=on_replay, topics=topics
        )

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        from_tasks = [message for message in messages if isinstance(message, TaskMessage)]
        commit_rows(self.job, self.intent, self.version, from_tasks, ends_intent=True)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Does nothing: the written rows are in no commit, and only the janitor deletes."""

    def _on_replay(self, *, in_query: bool) -> OnReplay | None:
        """The rule for a replay. Inside a query, and with option onReplay, the rule of a query's
        batch counts: a thread that foreachBatch started may not have the query's properties."""
        if self.job.options.txn_app_id is None:
            return None
        has_option = self.job.options.on_replay is not None
        return self.job.on_replay if in_query or has_option else OnReplay.IGNORE

    def _bad_record_headers(self, properties: TaskProperties) -> Mapping[str, str]:
        if self.job.options.txn_app_id is None:
            return properties.bad_record_headers
        txn = {"txnAppId": self.job.options.txn_app_id, "txnVersion": str(self.version)}
        return {**properties.bad_record_headers, **txn}
