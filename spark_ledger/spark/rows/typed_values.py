"""Typed rows: a row's payload as columns in Spark and in a topic.

    valueFormat   rows in the topic                     columns in Spark
    json          `value` is JSON text, or typed rows   the payload's
    arrow         typed rows: the payload's columns     the payload's
    schema        as arrow, by a schema that was registered before; in a read also values that
                  Pulsar's clients encoded by a schema (client_values.py)

Always true: the driver, or each task once, chooses the schema before it writes or reads a row; then
whole columns are selected and cast by name. The payload has the types that topic/schema/records.py
lists; in a read every column is nullable. Rows that do not fit are an error with their topic,
partition and offset.

To write: call `ValueWriter.of(...)` with the DataFrame's schema in the driver, and
`writer.version(...)` once for each topic; then pass `values(...)` of each batch to a task writer
whose settings have `schema_version(...)`. To read: call `ValueReader.of(...)` in the driver, and
`columns(...)` for each entry's rows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DayTimeIntervalType,
    MapType,
    NumericType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
    TimeType,
)

from spark_ledger.errors import OptionConflict, SchemaIncompatible, SchemaTypeMismatch
from spark_ledger.spark.options.table import NO_SCHEMA
from spark_ledger.spark.rows.columns import entry_columns
from spark_ledger.spark.spark_version import arrow_schema, spark_schema
from spark_ledger.topic.entry import json_values
from spark_ledger.topic.entry.message_batch import CLIENT_VERSION, VALUE, column_of
from spark_ledger.topic.entry.payload_columns import check_convertible, conform
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.read.row_blocks import Block
from spark_ledger.topic.schema import rules as schema_rules
from spark_ledger.topic.schema.records import UNREGISTERED, SchemaVersion, canonical
from spark_ledger.topic.schema.registry import SchemaRegistry, not_registered
from spark_ledger.topic.schema.rules import SchemaMode
from spark_ledger.topic.values.reader import ClientReader

JSON, ARROW, SCHEMA = "json", "arrow", "schema"
NO_CLIENTS: Mapping[str, ClientReader] = {}
SparkSchema: TypeAlias = StructType
"""For modules that name Spark's schema in an annotation without loading Spark."""

_SIMPLE = (
    BinaryType,
    BooleanType,
    DateType,
    DayTimeIntervalType,
    NumericType,
    StringType,
    TimestampNTZType,
    TimestampType,
    TimeType,
)


def arrow_payload(payload: StructType) -> pa.Schema:
    """The payload's columns as a topic has them; the payload may have no column.

    Raises errors.SchemaTypeMismatch for a type that no topic has, errors.SchemaReservedColumn,
    errors.SchemaUnknownColumn for a repeated name.
    """
    if not payload.fields:
        return pa.schema([])
    for field in payload.fields:
        _check_type(field.dataType, field.name)
    return canonical(arrow_schema(payload))


def spark_payload(schema: pa.Schema) -> StructType:
    """A topic's columns as a read gives them: every column may be null."""
    return spark_schema(schema_rules.nullable(schema))


@dataclass(frozen=True, slots=True)
class ValueWriter:
    """How a DataFrame's payload columns become values. Picklable. `schema` is in the form in which
    topics register schemas (canonical). With `mode` None no schema is registered or compared."""

    value_format: str
    schema: pa.Schema
    mode: SchemaMode | None

    @classmethod
    def of(cls, value_format: str, payload: StructType, schema_mode: str) -> "ValueWriter":
        """`payload` are the payload's columns. Raises the errors of arrow_payload;
        errors.SchemaTypeMismatch for text with a collation, which no topic keeps;
        errors.SchemaMissingColumn without columns; errors.OptionConflict."""
        for field in payload.fields:
            _check_not_collated(field.dataType, field.name)
        schema = canonical(arrow_payload(payload))
        if value_format == JSON:
            json_values.check_schema(schema)
        if schema_mode != NO_SCHEMA:
            return cls(value_format, schema, SchemaMode(schema_mode))
        if value_format == SCHEMA:
            raise OptionConflict(
                "valueFormat=schema writes by the registered schema, schemaMode=none by no schema",
                "Give valueFormat=arrow, or leave schemaMode out.",
            )
        return cls(value_format, schema, mode=None)

    async def version(self, schemas: SchemaRegistry, topic: TopicInfo) -> SchemaVersion | None:
        """The version of the topic's schema for the rows, registered if necessary; None for
        schemaMode=none. Raises the errors of SchemaRegistry.for_write."""
        if self.mode is None:
            return None
        must_exist = self.value_format == SCHEMA
        return await schemas.for_write(topic, self.schema, self.mode, must_exist=must_exist)

    def values(
        self, payload: pa.RecordBatch, version: SchemaVersion | None
    ) -> pa.Array | pa.RecordBatch:
        """The rows of `payload` as a topic has them: the `values` for TaskWriter.write.

        Raises errors.SchemaIncompatible for a null in a column that is NOT NULL in the version,
        errors.SchemaTypeMismatch for a number that JSON does not have.
        """
        rows = conform(payload, self.schema if version is None else version.schema)
        return json_values.encode_json(rows) if self.value_format == JSON else rows

    def misfits(self, payload: pa.RecordBatch, version: SchemaVersion | None) -> pa.Array | None:
        """For each row the reason for which `values` refuses the row, else null; None if `values`
        accepts all rows. Each refused range is halved until single rows are refused."""
        reasons: dict[int, str] = {}
        ranges = [(0, payload.num_rows)]
        while ranges:
            start, end = ranges.pop()
            try:
                self.values(payload.slice(start, end - start), version)
            except (SchemaIncompatible, SchemaTypeMismatch) as error:
                half = (start + end) // 2
                if end - start == 1:
                    reasons[start] = str(error)
                else:
                    ranges += [(start, half), (half, end)]
        if not reasons:
            return None
        numbers = np.full(payload.num_rows, -1)
        numbers[list(reasons)] = np.arange(len(reasons))
        return pa.array(reasons.values(), pa.string()).take(pa.array(numbers, mask=numbers < 0))

    def schema_version(self, version: SchemaVersion | None) -> int:
        """The schema version in the entries: TaskSettings.schema_version."""
        if version is None or self.value_format == JSON:
            return UNREGISTERED
        return version.number


@dataclass(frozen=True, slots=True)
class ValueReader:
    """How rows of a topic become a DataFrame's payload columns. Picklable. `payload` is canonical
    (see ValueWriter), in the order of the DataFrame. `entry_names` are the columns' names as they
    may be spelled in entries; None if the spellings are unknown."""

    value_format: str
    payload: pa.Schema
    entry_names: tuple[str, ...] | None
    clients: Mapping[str, ClientReader]
    """For topics whose rows may be values of Pulsar's clients, by the topics' short names."""

    @classmethod
    def of(
        cls,
        value_format: str,
        payload: StructType,
        registered: pa.Schema | None,
        clients: Mapping[str, ClientReader] = NO_CLIENTS,
    ) -> "ValueReader":
        """`payload` are the columns to read; `registered` are the topics' columns, of
        `registered_schema` or of client_values.read_schema_of.

        Raises errors.SchemaMissingColumn and errors.SchemaTypeMismatch for a column that the
        topics do not have or have as another type, and the errors of arrow_payload.
        """
        schema = arrow_payload(payload)
        if value_format == JSON:
            json_values.check_schema(schema)
        elif registered is not None:
            check_convertible(registered, schema)
        if not len(schema):
            return cls(value_format, schema, (), clients)
        if registered is None:
            return cls(value_format, schema, None, clients)
        lower_names = {name.lower() for name in schema.names}
        registered_names = [name for name in registered.names if name.lower() in lower_names]
        names = tuple(dict.fromkeys([*schema.names, *registered_names]))
        return cls(value_format, schema, names, clients)

    def entry_columns(
        self, declared: StructType, *, with_key: bool = False
    ) -> frozenset[str] | None:
        """The columns of an entry to decode for all `declared` columns; None: all columns.
        `with_key`: a filter needs the key."""
        if self.entry_names is None:
            return None
        names = entry_columns(declared, self.value_format, self.entry_names, with_key=with_key)
        for reader in self.clients.values():
            names |= reader.entry_columns if len(self.payload) else {CLIENT_VERSION}
        return names

    def conformed(self, batch: pa.RecordBatch, rows: Block, topic: str) -> list[pa.Array]:
        """The payload's columns of clients' values, in order. Raises errors.SchemaIncompatible."""
        try:
            return list(conform(batch, self.payload).columns)
        except SchemaIncompatible as error:
            raise _with_place(error, rows, topic) from error

    def columns(self, rows: Block, topic: str) -> list[pa.Array]:
        """The payload's columns of the rows, in order. Raises errors.SchemaIncompatible."""
        if not len(self.payload):
            return []
        try:
            return list(self._read(rows).columns)
        except SchemaIncompatible as error:
            raise _with_place(error, rows, topic) from error

    def _read(self, rows: Block) -> pa.RecordBatch:
        batch = rows.record_batch
        if rows.typed:
            return conform(batch, self.payload)  # payload and other columns share no name
        if self.value_format == JSON:
            return json_values.decode_json(column_of(batch, VALUE), self.payload)
        raise SchemaIncompatible(
            "the values are bytes, not columns",
            "Read them with valueFormat=json or binary; for a topic with rows of both kinds, give"
            " onOtherFormat=skip or null.",
        )


async def registered_schema(
    schemas: SchemaRegistry, topics: Iterable[TopicInfo], value_format: str, *, declared: bool
) -> pa.Schema | None:
    """The payload's columns in a read of the topics. None if the user `declared` the columns and
    these cannot be compared with the schemas: a topic has no schema, or the topics' schemas have no
    common type for a column. Raises errors.SchemaNotRegistered, errors.SchemaIncompatible."""
    topics = list(topics)
    by_topic = [(await schemas.of(topic)).versions for topic in topics]
    for topic, versions in zip(topics, by_topic, strict=True):
        if not versions:
            if declared and value_format != SCHEMA:
                return None
            raise not_registered(topic)
    try:
        return await schemas.for_read(topics)
    except SchemaIncompatible:
        if declared:
            return None
        raise


def _with_place(error: SchemaIncompatible, rows: Block, topic: str) -> SchemaIncompatible:
    """The error with the offsets of the rows that do not fit, or of the single row."""
    row = error.facts.get("row")
    first = row if isinstance(row, int) else 0
    partition, offset = rows.place_of(first)
    place = f"offset {offset}" if isinstance(row, int) else _offsets_text(rows)
    version = f" (version {rows.schema_version} of its schema)" if rows.schema_version else ""
    return SchemaIncompatible(
        f"topic {topic!r}, partition {partition}, {place}{version}: {error.what}",
        error.remedy,
        **error.facts,
    )


def _offsets_text(rows: Block) -> str:
    first, last = rows.place_of(0), rows.place_of(rows.num_rows - 1)
    if bool((rows.runs["partition"] == first[0]).all()):
        return f"offsets {first[1]} to {last[1]}"
    return f"offset {first[1]} and others up to offset {last[1]} of partition {last[0]}"


def _check_not_collated(kind: DataType, path: str) -> None:
    """Raises SchemaTypeMismatch for text with a collation: a reader would sort and compare the
    column in another way."""
    if isinstance(kind, StructType):
        for field in kind.fields:
            _check_not_collated(field.dataType, f"{path}.{field.name}")
    elif isinstance(kind, ArrayType):
        _check_not_collated(kind.elementType, f"{path}.element")
    elif isinstance(kind, MapType):
        _check_not_collated(kind.keyType, f"{path}.key")
        _check_not_collated(kind.valueType, f"{path}.value")
    elif isinstance(kind, StringType) and kind.simpleString() != "string":
        raise SchemaTypeMismatch(
            f"column {path!r} is {kind.simpleString().upper()}, and a topic keeps no collation",
            "Cast it to STRING, and give the collation where the column is read.",
        )


def _check_type(kind: DataType, path: str) -> None:
    """Raises SchemaTypeMismatch for types of no topic: VARIANT, VOID, intervals of months..."""
    if isinstance(kind, StructType) and kind.fields:
        for field in kind.fields:
            _check_type(field.dataType, f"{path}.{field.name}")
    elif isinstance(kind, ArrayType):
        _check_type(kind.elementType, f"{path}.element")
    elif isinstance(kind, MapType):
        _check_type(kind.keyType, f"{path}.key")
        _check_type(kind.valueType, f"{path}.value")
    elif not isinstance(kind, _SIMPLE):
        raise SchemaTypeMismatch(
            f"column {path!r} is {kind.simpleString().upper()}, which no column of a topic may be",
            "Cast it, for example to STRING, or leave it out.",
        )
