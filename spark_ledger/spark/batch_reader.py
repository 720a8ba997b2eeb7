"""Batch reads. Always true: a read is planned after a sync, so it holds all that was committed
before; filters that were pushed down only leave out what Spark would (filters.py)."""

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from spark_ledger.spark import offsets, read_tasks
from spark_ledger.spark.driver_state import TopicsRead
from spark_ledger.spark.filters import Bounds, bounds_of
from spark_ledger.spark.options import ReadOptions
from spark_ledger.spark.schema import check_projection


def batch_reader(options: ReadOptions, schema: StructType) -> "LedgerBatchReader":
    """Spark refuses every read of a class with pushFilters unless push-down is enabled."""
    made = FilteredBatchReader if options.filter_pushdown else LedgerBatchReader
    return made(options, schema)


class LedgerBatchReader(DataSourceReader):
    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_projection(schema, options.value_format)
        self.options = options
        self.schema = schema
        self.bounds = Bounds()

    def partitions(self) -> Sequence[InputPartition]:
        topics = TopicsRead(self.options)
        known = topics.fresh_ends()
        start = topics.positions(self.options.starting, known)
        end = topics.positions(self.options.ending, known)
        offsets.check_order(start, end)
        start, end = self.bounds.clipped(start, end)
        tasks = self.bounds.pruned(topics.plan(start, end))
        return read_tasks.partitions_of(tasks, topics.values(self.schema))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_tasks.read_rows(self.options, partition.value, self.schema)


class FilteredBatchReader(LedgerBatchReader):
    """With filters on offset, timestamp and partition that decide what is read."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """All of them are still to be applied by Spark."""
        self.bounds = bounds_of(filters)
        return filters
