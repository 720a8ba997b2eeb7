"""Writing for queries for which Spark allows no sink but `foreach`: update mode, real-time mode.

Always true: when a task ends without an error, one commit makes all its rows of an epoch visible;
after an error no row is visible. No row is lost when Spark repeats an epoch, and no row is doubled
when Spark repeats the epoch with the same rows in the same partitions (topic/parts.py). The memory
of gathered rows is bounded.
"""

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from pyspark import TaskContext
from pyspark.sql.conversion import LocalDataToArrowConversion
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    MapType,
    Row,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from spark_ledger.errors import OptionInvalid, OptionMissing, SchemaTypeMismatch
from spark_ledger.spark.options.options import stream_write_options
from spark_ledger.spark.options.values import option_text
from spark_ledger.spark.write.job import WriteJob
from spark_ledger.spark.write.tasks import (
    TaskProperties,
    adding_topic_names_to_errors,
    drop_intents_and_topics,
    heartbeats,
    query_intent,
    topics_of,
)
from spark_ledger.spark.write.topic_writers import Task, TopicWriters
from spark_ledger.topic import blocking
from spark_ledger.topic.log.intents import PARTS, Intent
from spark_ledger.topic.parts import Part, commit_part
from spark_ledger.topic.write import TaskResult

ROWS_MAX = 512
"""How many gathered rows are turned into columns and written together; fewer, if they take more
than an eighth of maxInFlightBytes."""

_TEXT_OR_BYTES = (str, bytes, bytearray)
_TIMES = ("eventtime", "timestamp")


class ForeachWriter:
    """The writer for `df.writeStream.foreach(writer)`. Spark sends it from the driver to tasks."""

    def __init__(
        self, options: Mapping[str, str], schema: StructType | None, app_id: str | None
    ) -> None:
        self._options = stream_write_options(options)
        self._schema = schema
        self._app_id = app_id
        if schema is not None:
            WriteJob.of(self._options, schema)  # raises now if such rows cannot be written
        elif self._options.typed:
            raise OptionMissing(
                f"schema is not given, and valueFormat={self._options.value_format} needs it",
                "Give schema=df.schema of the DataFrame that is written.",
            )

    def open(self, partition_id: int, epoch_id: int) -> bool:
        self._partition_and_epoch = (partition_id, epoch_id)
        self._properties = TaskProperties.of(TaskContext.get())
        self._rows: list[Row] = []
        self._bytes = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._task: _ForeachTask | None = None
        return True

    def process(self, row: Row) -> None:
        self._rows.append(row)
        self._bytes += sum(map(_size, row))
        if len(self._rows) >= ROWS_MAX or self._bytes > self._options.max_in_flight_bytes // 8:
            self._write()

    def close(self, error: BaseException | None) -> None:
        """Commits, unless there was an error. Raises the errors of writing and of commits."""
        try:
            if error is None and self._rows:
                self._write()
            if error is None and self._task is not None:
                self._task.commit(Part(*self._partition_and_epoch, self._digest.hexdigest()))
                self._task = None
        finally:
            self._rows = []
            if self._task is not None:
                self._task.abort()

    def _write(self) -> None:
        rows, self._rows, self._bytes = self._rows, [], 0
        schema = self._schema or schema_of(rows)
        job = WriteJob.of(self._options, schema)
        if self._task is None:
            app_id = self._app_id or self._properties.query_id
            if app_id is None:
                raise OptionMissing(
                    "Spark gives no id of this query", "Give app_id, a name of your choice."
                )
            self._task = _ForeachTask(job, self._properties, app_id)
        table = LocalDataToArrowConversion.convert(rows, schema, use_large_var_types=False)
        for batch in table.combine_chunks().to_batches():
            self._digest.update(batch.serialize())
            self._task.writers.write(job.plan.rows(batch))


class _ForeachTask:
    """The write of one task, from the task's first rows to `commit` or `abort`."""

    def __init__(self, job: WriteJob, properties: TaskProperties, app_id: str) -> None:
        run_id = properties.run_id or app_id
        self._job = job
        service_url, outage_s = job.options.service_url, job.options.outage_timeout_s
        is_first_batch = properties.batch_id == 0  # a new query with a wrong URL fails soon
        self._cluster = cluster = blocking.topics(service_url, outage_s, fail_fast=is_first_batch)
        self._intent: Intent = query_intent(
            job, app_id, run_id, is_retry=properties.attempt > 0, kind=PARTS
        )
        self._heartbeats = ExitStack()
        self._heartbeats.enter_context(heartbeats(cluster, self._intent))
        bad_record_headers = properties.bad_record_headers
        task = Task(self._intent, properties.index, properties.attempt, bad_record_headers)
        self.writers = TopicWriters(
            cluster, job, task, lambda names: topics_of(cluster, job.options, names, run_id)
        )

    def commit(self, part: Part) -> None:
        client, user_metadata = self._cluster.client, self._job.options.user_metadata or ""
        results: dict[str, list[TaskResult]] = {}
        with self._heartbeats, adding_topic_names_to_errors(self._cluster):
            for result in self.writers.finish():
                results.setdefault(result.topic_id, []).append(result)
            row_kinds = self._job.row_kinds(results, self.writers.versions)
            commit = commit_part(
                *(client, results, self._intent, part),
                user_metadata=user_metadata,
                row_kinds=row_kinds,
            )
            self._cluster.run(commit)

    def abort(self) -> None:
        drop_intents_and_topics(lambda cached: cached.id == self._intent.id)
        self._heartbeats.close()
        self.writers.abort()


def foreach_writer(
    topic: str | None = None,
    *,
    schema: StructType | str | None = None,
    app_id: str | None = None,
    **options: Any,
) -> ForeachWriter:
    """A writer for `df.writeStream.foreach(...)`, for queries for which Spark allows no other sink.

    `topic` and `options` are those of a streaming write (docs/spark.md). Rows of a partition and
    epoch are durable and visible when Spark has closed their writer without an error: `close`
    commits the rows, and recognises an epoch that Spark repeats. The argument `schema` is the
    DataFrame's schema, as a StructType or DDL text. Typed rows (`valueFormat` json, arrow or
    schema) need this argument; without it, key and value may be STRING or BINARY. `app_id`, if
    given, is used in place of the query's id; it is needed where Spark gives no id. Raises
    LEDGER_OPTION.*; also LEDGER_SCHEMA.* if `schema` is given.
    """
    texts = {name: option_text(value) for name, value in options.items() if value is not None}
    if topic is not None:
        texts["topic"] = topic
    shape: Any = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    if not isinstance(shape, StructType | None):
        raise OptionInvalid(
            f"schema is {schema!r}, neither a StructType nor text",
            "Give schema=df.schema of the DataFrame that is written, or DDL text.",
        )
    if app_id is not None and (not isinstance(app_id, str) or not app_id):
        raise OptionInvalid(f"app_id is {app_id!r}, not a name", "Give text that is not empty.")
    return ForeachWriter(texts, shape, app_id)


def schema_of(rows: list[Row]) -> StructType:
    """The schema of rows, by the names and first values of columns. Raises SchemaTypeMismatch."""
    columns = []
    for i, name in enumerate(rows[0].__fields__):
        first_value = next((row[i] for row in rows if row[i] is not None), None)
        columns.append(StructField(name, _data_type(name, first_value)))
    return StructType(columns)


def _data_type(name: str, value: Any) -> DataType:
    lower = name.lower()
    if lower in ("key", "value"):
        if value is not None and not isinstance(value, _TEXT_OR_BYTES):
            raise SchemaTypeMismatch(
                f"column {name!r} has a Python {type(value).__name__}, not text or bytes",
                "Cast it to STRING or BINARY.",
            )
        return StringType() if isinstance(value, str) else BinaryType()
    if lower == "headers":
        return _headers_type(value)
    if lower in _TIMES:
        return TimestampType()
    return IntegerType() if lower == "partition" else StringType()


def _headers_type(headers: Any) -> DataType:
    """The type of `headers`: a map, or an array of pairs. The values are STRING if any value is
    text, else BINARY."""
    pairs = headers.items() if isinstance(headers, dict) else headers or ()
    has_text = any(isinstance(pair[1], str) for pair in pairs)
    value_type: DataType = StringType() if has_text else BinaryType()
    if isinstance(headers, dict):
        return MapType(StringType(), value_type)
    fields = [StructField("key", StringType()), StructField("value", value_type)]
    return ArrayType(StructType(fields))


def _size(value: Any) -> int:
    """The size of the text and bytes in a value, at any depth."""
    if isinstance(value, _TEXT_OR_BYTES):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.keys())) + sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0
