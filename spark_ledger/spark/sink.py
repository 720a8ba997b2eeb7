"""The streaming sink.

Always true: a micro-batch becomes visible by one commit under (query id, target, batch id), so a
replay adds nothing; the driver's writer object is a new one each time and learns the query and
the run from its tasks' messages only; abort deletes nothing.
"""

from collections.abc import Iterator

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from spark_ledger.errors import OptionInvalid
from spark_ledger.spark import write_tasks
from spark_ledger.spark.options import WriteOptions
from spark_ledger.spark.schema import check_written
from spark_ledger.spark.target import open_target, results_of, target_name
from spark_ledger.spark.write_tasks import Written
from spark_ledger.topic import blocking
from spark_ledger.topic.commit import TxnKey

QUERY_ID = "sql.streaming.queryId"
RUN_ID = "spark.jobGroup.id"


class LedgerStreamWriter(DataSourceStreamArrowWriter):
    """Made for every micro-batch twice: where its tasks are planned and where it is committed."""

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        check_written(schema)
        if overwrite:
            raise OptionInvalid("a topic cannot be overwritten", "Use outputMode('append').")
        self.options = options
        self.topic = open_target(blocking.topics(options.service_url), options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None, "a writer writes inside a Spark task"
        query_id, run_id = (context.getLocalProperty(name) for name in (QUERY_ID, RUN_ID))
        assert query_id and run_id, "a stream is written by a streaming query"
        target = target_name(self.options)
        intent = write_tasks.query_intent(self.options.service_url, query_id, run_id, target)
        return write_tasks.write_rows(self.options, self.topic, intent, context, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        written = [message for message in messages if isinstance(message, Written)]
        if not written:
            return
        intent, topic_id = written[0].intent, written[0].result.topic_id
        txn = TxnKey(intent.app_id, intent.target, batchId, intent.run_id)
        cluster = blocking.topics(self.options.service_url)
        cluster.run(cluster.client.commit(topic_id, txn, intent.id, results_of(messages)))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing: what was written is in no commit, and only the janitor deletes."""
