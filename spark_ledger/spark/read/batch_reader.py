"""Batch reads. Always true: a read is planned after a sync, so it holds all that was committed
before. No filter is taken from Spark (options.py says why)."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from spark_ledger.errors import RowsTrimmed, TopicDeleted
from spark_ledger.spark.options import offsets
from spark_ledger.spark.options.options import ReadOptions
from spark_ledger.spark.read import tasks as read_tasks
from spark_ledger.spark.read.topics_read import TopicsRead
from spark_ledger.spark.rows.schema import check_projection
from spark_ledger.spark.spark_version import planned

AGAIN = "Load it again: Spark keeps the plan of a DataFrame's first query for all that follow."


class LedgerBatchReader(DataSourceReader):
    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_projection(schema, options.value_format)
        self.options = options
        self.schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        topics = TopicsRead(self.options)
        known = topics.fresh_ends()
        start = topics.positions(self.options.starting, known)
        end = topics.positions(self.options.ending, known)
        offsets.check_order(start, end)
        tasks = topics.plan(start, end)
        return read_tasks.partitions_of(tasks, topics.values(self.schema))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        read_tasks.check_zone(self.options.zoneless)  # also where nothing is read
        try:
            yield from read_tasks.read_rows(self.options, planned(partition), self.schema)
        except (RowsTrimmed, TopicDeleted) as error:  # it was there when this was planned
            raise type(error)(error.what, AGAIN, **error.facts) from None
