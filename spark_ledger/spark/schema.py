"""The columns: what a reader offers, what it was asked for, what a writer takes.

Always true: the default schema is Kafka's, name for name and type for type; a user's .schema() is
a projection of it by name (key and value also as STRING); what is written has a column `value`,
may have `key`, both STRING or BINARY, and nothing else.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from spark_ledger.errors import SchemaMissingColumn, SchemaTypeMismatch, SchemaUnknownColumn
from spark_ledger.topic.slice_reader import Rows

CREATE_TIME = 0
"""The timestampType of Kafka that says: the time the writer made the entry."""

_OFFERED: dict[str, tuple[str, tuple[DataType, ...]]] = {
    "key": ("key", (BinaryType(), StringType())),
    "value": ("value", (BinaryType(), StringType())),
    "topic": ("topic", (StringType(),)),
    "partition": ("partition", (IntegerType(),)),
    "offset": ("offset", (LongType(),)),
    "timestamp": ("timestamp", (TimestampType(),)),
    "timestamptype": ("timestampType", (IntegerType(),)),
}
_TAKEN = ("key", "value")

DEFAULT_SCHEMA = StructType([StructField(name, kinds[0]) for name, kinds in _OFFERED.values()])


def check_projection(declared: StructType) -> None:
    """Raises SchemaUnknownColumn or SchemaTypeMismatch for a column that no reader has."""
    for column in declared.fields:
        if column.name.lower() not in _OFFERED:
            offered = ", ".join(name for name, _ in _OFFERED.values())
            raise SchemaUnknownColumn(
                f"a topic has no column {column.name!r}", f"Declare some of: {offered}."
            )
        _check_type(column, _OFFERED[column.name.lower()][1])


def check_written(written: StructType) -> None:
    """Raises an error that names the first column which cannot be written, or `value` if it is
    missing."""
    names = [column.name.lower() for column in written.fields]
    for column in written.fields:
        if column.name.lower() not in _TAKEN:
            raise SchemaUnknownColumn(f"column {column.name!r} cannot be written to a topic")
        _check_type(column, (StringType(), BinaryType()))
    for name in sorted(set(names)):
        if names.count(name) > 1:
            raise SchemaUnknownColumn(f"there are two columns {name!r}", "Select one of them.")
    if "value" not in names:
        raise SchemaMissingColumn("there is no column 'value' to write")


def key_and_value(batch: pa.RecordBatch) -> tuple[pa.Array | None, pa.Array]:
    """The two columns of a batch to be written, whatever their order and case."""
    columns = {field.name.lower(): batch.column(i) for i, field in enumerate(batch.schema)}
    return columns.get("key"), columns["value"]


def to_spark(rows: Rows, topic: str, schema: pa.Schema) -> pa.RecordBatch:
    """The columns that `schema` names; key and value are the entry's own memory."""
    columns = [_COLUMNS[field.name.lower()](rows, topic, field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _check_type(column: StructField, allowed: tuple[DataType, ...]) -> None:
    if not any(isinstance(column.dataType, type(kind)) for kind in allowed):
        wanted = " or ".join(kind.simpleString().upper() for kind in allowed)
        raise SchemaTypeMismatch(
            f"column {column.name!r} is {column.dataType.simpleString().upper()}, not {wanted}",
            f"Cast it to {wanted}.",
        )


def _as(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Bytes as `kind`. Text is not checked to be UTF-8, as in Spark's own CAST."""
    if column.type.equals(kind):
        return column
    if pa.types.is_string(kind):
        return column.view(kind)
    return column.cast(kind)


def _offsets(rows: Rows) -> pa.Array:
    count = rows.record_batch.num_rows
    return pa.array(np.arange(rows.offset, rows.offset + count, dtype=np.int64))


def _times(rows: Rows, kind: pa.DataType) -> pa.Array:
    count = rows.record_batch.num_rows
    return pa.array(np.full(count, rows.written_ms * 1000, dtype=np.int64)).view(kind)


@lru_cache(maxsize=64)
def _constant(value: str | int, kind: pa.DataType, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), count)


def _repeated(value: str | int, kind: pa.DataType, rows: Rows) -> pa.Array:
    """`value` for each row: a slice of a column that is kept, its length rounded up."""
    count = rows.record_batch.num_rows
    return _constant(value, kind, max(1024, 1 << (count - 1).bit_length())).slice(0, count)


_COLUMNS: dict[str, Callable[[Rows, str, pa.DataType], pa.Array]] = {
    "key": lambda rows, topic, kind: _as(rows.record_batch.column(0), kind),
    "value": lambda rows, topic, kind: _as(rows.record_batch.column(1), kind),
    "topic": lambda rows, topic, kind: _repeated(topic, kind, rows),
    "partition": lambda rows, topic, kind: _repeated(rows.partition, kind, rows),
    "offset": lambda rows, topic, kind: _offsets(rows),
    "timestamp": lambda rows, topic, kind: _times(rows, kind),
    "timestamptype": lambda rows, topic, kind: _repeated(CREATE_TIME, kind, rows),
}
