"""option("metadata", view): a listing of topics, ledgers or bookies as a DataFrame. VIEWS has the
names of the views (these views are listings; SQL's views are something else).

Always true: the columns are those of topic/views.py, in Spark's types. A user's .schema() may name
some of them, in upper or lower case, with the same types. Several tasks read a large view. A view
of all topics leaves out a topic that is deleted meanwhile.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from spark_ledger.errors import SchemaTypeMismatch, SchemaUnknownColumn
from spark_ledger.spark.options.options import ReadOptions
from spark_ledger.spark.spark_version import spark_schema, value_of
from spark_ledger.topic import blocking, views
from spark_ledger.topic.blocking import BlockingTopics

VIEWS = tuple(views.SCHEMAS)


def schema_of(view: str) -> StructType:
    """The columns of a view, one of VIEWS."""
    return spark_schema(views.SCHEMAS[view])


class ListingReader(DataSourceReader):
    """A view of the topics that the options name; of all topics if the options name no topic."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        """Raises SchemaUnknownColumn, SchemaTypeMismatch."""
        assert options.metadata is not None, "a listing is a read with the option `metadata`"
        self.options = options
        self.view = options.metadata
        self._columns = _columns(self.view, schema)
        self._names = schema.names

    def partitions(self) -> Sequence[InputPartition]:
        cluster = blocking.topics(self.options.service_url)
        parts = cluster.run(views.plan(cluster.client, self.view, _topics(cluster, self.options)))
        return [InputPartition(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        part: views.ViewPart | None = value_of(partition)
        if part is None:  # the task that Spark makes of an empty plan
            return
        cluster = blocking.topics(self.options.service_url)
        for batch in cluster.run(views.read(cluster.client, part)):
            columns = [batch.column(name) for name in self._columns]
            yield pa.RecordBatch.from_arrays(columns, names=self._names)


def table(service_url: str, view: str, topic: str | None = None) -> pa.Table:
    """The whole view as one table, read by this process."""
    cluster = blocking.topics(service_url)

    async def read() -> list[pa.RecordBatch]:
        names = None if topic is None else [topic]
        parts = await views.plan(cluster.client, view, names)
        return [batch for part in parts for batch in await views.read(cluster.client, part)]

    return pa.Table.from_batches(cluster.run(read()), views.SCHEMAS[view])


def _topics(cluster: BlockingTopics, options: ReadOptions) -> Sequence[str] | None:
    """The topics that the options name, or that their pattern matches; None: all."""
    if options.pattern is None:
        return options.topics or None
    infos = cluster.run(cluster.client.topics.list())
    return options.matching(info.name.short for info in infos)


def _columns(view: str, declared: StructType) -> list[str]:
    """The view's names of the declared columns, in the declared order."""
    fields: dict[str, Any] = {field.name.lower(): field for field in schema_of(view).fields}
    columns = []
    for column in declared.fields:
        field = fields.get(column.name.lower())
        if field is None:
            names = ", ".join(field.name for field in fields.values())
            raise SchemaUnknownColumn(
                f"the listing of {view} has no column {column.name!r}", f"It has {names}."
            )
        if field.dataType.simpleString() != column.dataType.simpleString():
            kind = field.dataType.simpleString().upper()
            declared_kind = column.dataType.simpleString().upper()
            raise SchemaTypeMismatch(
                f"column {column.name!r} is {declared_kind}, not {kind}", f"Declare it as {kind}."
            )
        columns.append(field.name)
    return columns
