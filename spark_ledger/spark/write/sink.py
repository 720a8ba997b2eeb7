"""The streaming sink.

Always true: a micro-batch becomes visible by one commit under (query id, target, batch id), so a
replay adds nothing, and what is not one is refused (topic/commit/replay.py); the driver's writer
object is a new one each time and learns the query and the run from its tasks' messages only; abort
deletes nothing. In complete mode the rows of a batch take the place of all that the topic had when
the run began, and of the run's own. Spark makes a writer for commit, and another for abort when
commit failed; if that cannot be made, Spark hides why commit failed. So making one makes no call:
what the cluster has to say against a batch is asked for when the writer is sent to its tasks, and
they raise it.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from spark_ledger.errors import LedgerError, Unavailable
from spark_ledger.spark.options.options import WriteOptions
from spark_ledger.spark.worker.ttl_cache import TtlCache
from spark_ledger.spark.write import job as write_job
from spark_ledger.spark.write.job import WriteJob
from spark_ledger.spark.write.tasks import (
    TaskProperties,
    Written,
    commit_rows,
    query_intent,
    write_rows,
)
from spark_ledger.spark.write.topic_writers import Task
from spark_ledger.topic import blocking

CHECKED_S = 60.0
"""How long a process goes by its last look at the topics that a query's options name."""

_checked: TtlCache[tuple[WriteOptions, str, bool], bool] = TtlCache(CHECKED_S)


class LedgerStreamWriter(DataSourceStreamArrowWriter):
    """Made for every micro-batch twice: where its tasks are planned and where it is committed."""

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        self.job = WriteJob.of(options, schema, overwrite)
        self.refusal: LedgerError | None = None
        self.unreachable: Unavailable | None = None
        self._key = (options, schema.json(), overwrite)

    def __getstate__(self) -> dict[str, Any]:
        """For the tasks."""
        known = self.refusal or self.unreachable or _checked.get(self._key)
        if known is None:
            self._check()
        return self.__dict__

    def _check(self) -> None:
        """Whether the batch cannot be written, as far as can be told before its rows are seen. In
        an outage it is left to the tasks, which wait, but for those of a query that only begins,
        whose URL may be wrong: Spark can stop tasks, and not what waits here."""
        options = self.job.options
        cluster = None
        try:
            cluster = blocking.topics(options.service_url, options.outage_timeout_s, begins=True)
            if cluster.away:
                return
            cluster.run(write_job.check(cluster.client, self.job, fresh=True))
            _checked.put(self._key, True)
        except LedgerError as error:
            if cluster is None and isinstance(error, Unavailable):
                self.unreachable = error
            else:
                self.refusal = error

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        if self.refusal is not None:
            raise self.refusal
        spark = TaskProperties.of(TaskContext.get())
        assert spark.query_id and spark.run_id, "a stream is written by a streaming query"
        assert spark.batch_id is not None, "a micro-batch has a number"
        if self.unreachable is not None and spark.batch_id == 0:
            raise self.unreachable
        intent = query_intent(self.job, spark.query_id, spark.run_id, again=spark.attempt > 0)
        task = Task(intent, spark.index, spark.attempt, spark.about)
        on_replay = self.job.on_replay
        return write_rows(self.job, task, iterator, version=spark.batch_id, on_replay=on_replay)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        written = [message for message in messages if isinstance(message, Written)]
        if written:
            commit_rows(self.job, written[0].intent, batchId, written, last=False)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing: what was written is in no commit, and only the janitor deletes."""
