"""Batch reads. Always true: a read is planned after a sync, so it holds all that was committed
before."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from spark_ledger.spark import offsets, read_tasks
from spark_ledger.spark.driver_state import TopicsRead
from spark_ledger.spark.options import ReadOptions
from spark_ledger.spark.schema import check_projection


class LedgerBatchReader(DataSourceReader):
    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_projection(schema)
        self.options = options
        self.schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        topics = TopicsRead(self.options.service_url, self.options.topics)
        known = topics.fresh_ends()
        start = offsets.resolve(self.options.starting, known)
        end = offsets.resolve(self.options.ending, known)
        offsets.check_order(start, end)
        planned = topics.plan(
            start, end, self.options.min_partitions or 1, self.options.fail_on_data_loss
        )
        return [InputPartition(task) for task in planned]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_tasks.read_rows(self.options.service_url, partition.value, self.schema)
