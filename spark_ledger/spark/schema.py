"""The columns: what a reader offers, what it was asked for, what a writer takes.

Always true: the default schema is Kafka's, name for name and type for type; a user's .schema() is
a projection of it by name (key and value also as STRING); what is written has a column `value`,
may have `key`, both STRING or BINARY, and nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass
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
    """The two columns of a batch to be written, as binary, whatever their order and case."""
    columns = {field.name.lower(): batch.column(i) for i, field in enumerate(batch.schema)}
    key = columns.get("key")
    return None if key is None else _binary(key), _binary(columns["value"])


@dataclass(frozen=True)
class Rows:
    """Rows of one entry on their way to Spark: neighbours in one partition of one topic."""

    key: pa.Array
    value: pa.Array
    topic: str
    partition: int
    first_offset: int
    written_ms: int

    def __len__(self) -> int:
        return len(self.value)


def to_spark(rows: Rows, schema: pa.Schema) -> pa.RecordBatch:
    """The columns that `schema` names; key and value are the entry's own memory."""
    columns = [_COLUMNS[field.name.lower()](rows, field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _check_type(column: StructField, allowed: tuple[DataType, ...]) -> None:
    if not any(isinstance(column.dataType, type(kind)) for kind in allowed):
        wanted = " or ".join(kind.simpleString().upper() for kind in allowed)
        raise SchemaTypeMismatch(
            f"column {column.name!r} is {column.dataType.simpleString().upper()}, not {wanted}",
            f"Cast it to {wanted}.",
        )


def _binary(column: pa.Array) -> pa.Array:
    """STRING as its bytes, without a copy; large offsets become small ones."""
    if pa.types.is_string(column.type):
        return column.view(pa.binary())
    if pa.types.is_binary(column.type):
        return column
    return column.cast(pa.binary())


def _as(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Bytes as `kind`. Text is not checked to be UTF-8, as in Spark's own CAST."""
    if column.type.equals(kind):
        return column
    if pa.types.is_string(kind):
        return column.view(kind)
    return column.cast(kind)


def _offsets(rows: Rows, kind: pa.DataType) -> pa.Array:
    first = rows.first_offset
    return pa.array(np.arange(first, first + len(rows), dtype=np.int64))


def _times(rows: Rows, kind: pa.DataType) -> pa.Array:
    return pa.array(np.full(len(rows), rows.written_ms * 1000, dtype=np.int64)).view(kind)


@lru_cache(maxsize=64)
def _constant(value: str | int, kind: pa.DataType, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), rows)


def _repeated(value: str | int, kind: pa.DataType, rows: int) -> pa.Array:
    """`value`, `rows` times: a slice of one that is kept, its length rounded up."""
    return _constant(value, kind, max(1024, 1 << (rows - 1).bit_length())).slice(0, rows)


_COLUMNS: dict[str, Callable[[Rows, pa.DataType], pa.Array]] = {
    "key": lambda rows, kind: _as(rows.key, kind),
    "value": lambda rows, kind: _as(rows.value, kind),
    "topic": lambda rows, kind: _repeated(rows.topic, kind, len(rows)),
    "partition": lambda rows, kind: _repeated(rows.partition, kind, len(rows)),
    "offset": _offsets,
    "timestamp": _times,
    "timestamptype": lambda rows, kind: _repeated(CREATE_TIME, kind, len(rows)),
}
