"""The code inside a Spark task that reads: rows out of ledgers as Spark's columns.

Always true: a task decodes only the entries' columns that the declared columns need; with
`keyFilter` the task gives only rows with the filter's keys. A worker keeps its connections from
task to task (topic/blocking.py; a forked process makes new connections).
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from spark_ledger.spark.options import start_positions
from spark_ledger.spark.options.options import ReadOptions
from spark_ledger.spark.rows import columns
from spark_ledger.spark.rows.other_format import OnOtherFormat, OtherRows
from spark_ledger.spark.spark_version import arrow_schema
from spark_ledger.spark.worker import Moment, exclude_from_gc
from spark_ledger.topic import blocking
from spark_ledger.topic.read.bad_entries import OnBadEntry
from spark_ledger.topic.read.plan import Cutting, ReadTask, pack_tasks
from spark_ledger.topic.read.row_blocks import Block

if TYPE_CHECKING:
    from spark_ledger.spark.rows.client_values import ClientPayloads
    from spark_ledger.spark.rows.typed_values import ValueReader


SESSION_ZONE = "spark.sql.session.timeZone"
MICRO_BATCH = "streaming.sql.batchId"
PLANS_KEPT_MAX = 1000
_WARNED = "warned"
_first_batches: dict[str, str] = {}
"""For each plan of a batch read, the micro-batch in which this process first read by the plan, or
_WARNED after the warning."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaskReads:
    """The reads of one Spark task, topic after topic, as Spark sends them to the executor. `values`
    reads the payload of typed rows (None: a read of bytes). `zoneless_times` are the texts without
    a zone at whose times the query begins, each with its milliseconds in the driver's zone."""

    tasks: tuple[ReadTask, ...]
    values: "ValueReader | None"
    zoneless_times: tuple[tuple[str, int], ...]
    batch_plan: str = ""
    """A random text that identifies the plan of a batch read."""


def partitions_of(
    options: ReadOptions,
    tasks: list[ReadTask],
    values: "ValueReader | None",
    zoneless_times: tuple[tuple[str, int], ...] = (),
    batch_plan: str = "",
) -> list[InputPartition]:
    cutting = Cutting(options.min_partitions or 1, options.task_bytes, options.task_rows)
    groups = pack_tasks(tasks, cutting)
    return [
        InputPartition(TaskReads(group, values, zoneless_times, batch_plan)) for group in groups
    ]


def read_rows(
    options: ReadOptions, reads: TaskReads | None, declared: StructType
) -> Iterator[pa.RecordBatch]:
    """The task's rows as Spark's columns. `reads` None: a task without rows, which Spark makes for
    an empty plan. Raises the errors of task_reader.fetch_with_replans, BadEntry,
    SchemaIncompatible, OptionInvalid for times without a zone."""
    if reads is None:
        return iter(())
    if reads.zoneless_times:
        check_zone(reads.zoneless_times, in_checkpoint=True)
    if reads.batch_plan:
        warn_of_old_plan(reads.batch_plan, micro_batch(), reads.tasks[0].topic)
    values, keys = reads.values, options.key_filter
    arrow = arrow_schema(declared)
    columns_to_decode = _entry_columns(options, values, declared)
    cluster = blocking.topics(options.service_url, options.outage_timeout_s)
    exclude_from_gc(Moment.CONNECTED)

    others = OtherRows(OnOtherFormat(options.on_other_format), typed=values is not None)
    clients = _client_payloads(values, others, options.on_bad_entry)

    def to_spark(rows: Block, topic: str) -> pa.RecordBatch:
        if clients is not None and not rows.typed and topic in clients.topics:
            decoded = clients.of(rows, topic)
            batch = columns.to_spark(decoded.rows, topic, arrow, decoded.columns)
            return columns.with_keys(rows, batch, keys, decoded.kept)
        is_other = others.accepts(rows, topic)
        if is_other and others.policy is OnOtherFormat.SKIP:
            return arrow_nulls(arrow, count=0)
        payload = None
        if values is not None:
            nulls = arrow_nulls(values.payload, rows.num_rows).columns
            payload = nulls if is_other else values.columns(rows, topic)
        batch = columns.to_spark(rows, topic, arrow, payload, null_value=is_other)
        return columns.with_keys(rows, batch, keys)

    def batches() -> Iterator[pa.RecordBatch]:
        for task in reads.tasks:
            for rows in cluster.read(
                task,
                columns_to_decode,
                keys=keys,
                lossy=not options.fail_on_data_loss,
                on_bad_entry=OnBadEntry(options.on_bad_entry),
            ):
                yield to_spark(rows, task.topic)
        others.end()
        if clients is not None:
            clients.end()

    return filter(attrgetter("num_rows"), batches())


def _client_payloads(
    values: "ValueReader | None", others: OtherRows, on_bad_entry: str
) -> "ClientPayloads | None":
    """None if no topic has values of clients."""
    if values is None or not values.clients:
        return None
    from spark_ledger.spark.rows.client_values import ClientPayloads

    return ClientPayloads(values, others, on_bad_entry)


def arrow_nulls(schema: pa.Schema, count: int) -> pa.RecordBatch:
    columns = [pa.nulls(count, field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def micro_batch() -> str | None:
    """The micro-batch of a query that this task belongs to; None in a batch job."""
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(MICRO_BATCH)


def warn_of_old_plan(batch_plan: str, current: str | None, topic: str) -> None:
    """Warn once, in the worker's log, if the `current` micro-batch reads by a batch plan of an
    earlier micro-batch: Spark plans the static side of a join in a query's first micro-batch, and
    keeps that plan."""
    if current is None:
        return
    first = _first_batches.setdefault(batch_plan, current)
    if first not in (current, _WARNED):
        _first_batches[batch_plan] = _WARNED
        _log.warning(
            "micro-batch %s reads topic %r by a plan of micro-batch %s, and does not see later"
            " rows. To see them, read the topic within foreachBatch, by load.",
            *(current, topic, first),
        )
    while len(_first_batches) > PLANS_KEPT_MAX:
        del _first_batches[next(iter(_first_batches))]


def check_zone(zoneless_times: tuple[tuple[str, int], ...], *, in_checkpoint: bool = False) -> None:
    """Raises OptionInvalid if a text is another moment in the session's zone."""
    start_positions.check_zone(zoneless_times, session_time_zone(), in_checkpoint=in_checkpoint)


def session_time_zone() -> str | None:
    """The time zone that the user set for this task's session, if any."""
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(SESSION_ZONE)


def _entry_columns(
    options: ReadOptions, values: "ValueReader | None", declared: StructType
) -> frozenset[str] | None:
    """The columns of an entry to decode; None: all."""
    with_key = options.key_filter is not None
    if values is None:
        return columns.entry_columns(declared, options.value_format, with_key=with_key)
    return values.entry_columns(declared, with_key=with_key)
