"""A Python source and a Python sink that store nothing: what a micro-batch costs without us.

The source gives one row a trigger for ever; both sides are Arrow, as ours are.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

SCHEMA = "key binary, value binary"


@dataclass
class Rows(InputPartition):
    first: int
    last: int


class OneRowReader(DataSourceStreamReader):
    def initialOffset(self) -> dict:
        return {"row": 0}

    def latestOffset(self, start: dict, limit: object) -> dict:
        return {"row": start["row"] + 1}

    def partitions(self, start: dict, end: dict) -> list[InputPartition]:
        return [Rows(start["row"], end["row"])]

    def read(self, partition: Rows) -> Iterator[pa.RecordBatch]:
        keys = [str(row).encode() for row in range(partition.first, partition.last)]
        yield pa.record_batch({"key": keys, "value": keys})


class NothingWriter(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()

    def commit(self, messages: list, batchId: int) -> None:
        pass

    def abort(self, messages: list, batchId: int) -> None:
        pass


class Nothing(DataSource):
    """format("nothing"), registered by the benchmark that uses it."""

    @classmethod
    def name(cls) -> str:
        return "nothing"

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return OneRowReader()

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return NothingWriter()
