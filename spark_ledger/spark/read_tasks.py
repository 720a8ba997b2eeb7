"""What runs inside a Spark task that reads: rows out of ledgers. Connections are kept from task to
task in the Python worker (topic/blocking.py, which remembers its pid)."""

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from spark_ledger.spark import schema
from spark_ledger.topic import blocking
from spark_ledger.topic.read_plan import ReadTask


def read_rows(
    service_url: str, task: ReadTask | None, declared: StructType
) -> Iterator[pa.RecordBatch]:
    """The task's rows as Spark's columns; none for the task that Spark makes of an empty plan."""
    if task is None:
        return
    columns = to_arrow_schema(declared, timezone="UTC")
    for rows in blocking.topics(service_url).read(task):
        yield schema.to_spark(rows, task.topic, columns)
