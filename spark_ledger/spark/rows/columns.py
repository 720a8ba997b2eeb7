"""The columns of a read: the default columns, the columns that a user may declare, and how they are
made from the rows of entries.

    binary, string   Kafka's: key value topic partition offset timestamp timestampType,
                     with includeHeaders: headers,
                     with includeMetadata: eventTime ledgerId entryId batchIndex messageId
                     schemaVersion valueSize, with includeProducer: producerName sequenceId
    json, arrow,     the payload's columns, then __key __topic __partition __offset
    schema           __publishTime __eventTime __messageId __messageProperties,
                     with includeMetadata: __ledgerId __entryId __batchIndex __schemaVersion,
                     with includeProducer: __producerName __sequenceId

Always true: the default schema is Kafka's, name for name and type for type. A user's .schema()
chooses among all columns of the format by name, in upper or lower case, without an option such as
includeHeaders. Key and value may be text or bytes. Only requested columns are made. Key, value,
headers and event time share the entry's memory; the others are whole numpy columns or cached
constants. A column that the entry does not have is null in every row. Nothing here loops over rows.
pyarrow.compute takes 35 ms to load, and only the columns and filters that need it load it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from spark_ledger.errors import (
    SchemaIncompatible,
    SchemaMissingColumn,
    SchemaReservedColumn,
    SchemaTypeMismatch,
    SchemaUnknownColumn,
)
from spark_ledger.spark.options.options import ShapeOptions
from spark_ledger.spark.options.table import PAYLOAD_FORMATS
from spark_ledger.topic.entry.arrow_arrays import of_list, of_numpy
from spark_ledger.topic.entry.message_batch import (
    CLIENT_VERSION,
    EVENT_TIME,
    HEADERS,
    KEY,
    PRODUCER_NAME,
    SEQUENCE_ID,
    TYPED_NAMES,
    VALUE,
)
from spark_ledger.topic.read.row_blocks import Block
from spark_ledger.topic.schema.records import RESERVED_NAMES

Kinds = tuple[DataType, ...]
"""The types that a column may have; the first is the default."""
MakeColumn = Callable[[Block, str, pa.DataType], pa.Array]
"""Makes a column of this type from rows; the text is the topic's name."""

HEADERS_TYPE = ArrayType(
    StructType([StructField("key", StringType()), StructField("value", BinaryType())])
)
VERSION_COLUMN = "__schemaVersion"
CREATE_TIME = 0
"""Kafka's timestampType for the time at which the writer made the entry."""
BYTES: Kinds = (BinaryType(), StringType())
TEXT: Kinds = (StringType(),)
INT: Kinds = (IntegerType(),)
LONG: Kinds = (LongType(),)
TIME: Kinds = (TimestampType(),)


class Column(NamedTuple):
    """A column that a read has beside the payload's columns, made from the column `entry_column` of
    an entry (None: not from a column). `shape_option` is the field of ShapeOptions that adds the
    column to the default columns; empty for a default column."""

    name: str
    kinds: Kinds
    make: MakeColumn
    entry_column: str | None = None
    shape_option: str = ""


# -- the columns that a reader offers, and that a user may declare --------------------------------


def has_payload(value_format: str) -> bool:
    """Whether the format has typed rows, with the payload's columns in place of `value`."""
    return value_format in PAYLOAD_FORMATS


def read_schema(
    shape: ShapeOptions, payload: StructType | None = None, *, with_version: bool = False
) -> StructType:
    """The columns of a read for which the user declares no schema; `payload` are the payload's
    columns in a format with typed rows, `with_version` adds the schema's version to them. Raises
    SchemaReservedColumn."""
    payload_fields: list[StructField] = []
    if has_payload(shape.value_format):
        assert payload is not None, "the payload's columns are looked up first"
        payload_fields = payload.fields
        for column in payload_fields:
            check_not_reserved(column.name)
    is_text = shape.value_format == "string"
    other_fields = [
        StructField(column.name, TEXT[0] if is_text and column.name == "value" else column.kinds[0])
        for column in _columns(shape.value_format).values()
        if not column.shape_option
        or getattr(shape, column.shape_option)
        or (with_version and column.name == VERSION_COLUMN)
    ]
    return StructType([*payload_fields, *other_fields])


def check_projection(declared: StructType, value_format: str = "binary") -> None:
    """Raises SchemaUnknownColumn or SchemaTypeMismatch for a column that no read has, and
    SchemaMissingColumn without any column. The payload's columns are not checked here."""
    check_names_differ(declared)
    if not declared.fields:
        raise SchemaMissingColumn("the declared schema has no column", "Declare at least one.")
    columns = _columns(value_format)
    for column in declared.fields:
        read_column = columns.get(column.name.lower())
        if read_column is not None:
            check_type(column, read_column.kinds)
        elif not has_payload(value_format):
            names = ", ".join(read_column.name for read_column in columns.values())
            raise SchemaUnknownColumn(
                f"a topic has no column {column.name!r}", f"Declare some of: {names}."
            )


def payload_of(declared: StructType) -> StructType:
    """The payload's columns among the declared columns."""
    return StructType([column for column in declared.fields if column.name.lower() not in _TYPED])


def entry_columns(
    declared: StructType,
    value_format: str = "binary",
    payload_names: Iterable[str] = (),
    *,
    with_key: bool = False,
) -> frozenset[str]:
    """The columns of an entry to decode for the declared columns, by their names in entries.
    `payload_names` are the payload's columns as the versions of the topic's schema spell them.
    `with_key`: a filter needs the key."""
    columns = _columns(value_format)
    declared_names = {name.lower() for name in declared.names}
    sources = {columns[name].entry_column for name in declared_names if name in columns}
    names = {name for name in (*sources, KEY if with_key else None) if name is not None}
    names |= {TYPED_NAMES[name] for name in names if name in TYPED_NAMES}  # such as __key for key
    if has_payload(value_format):
        names |= {name for name in payload_names if name.lower() in declared_names}
        has_payload_columns = bool(declared_names - _TYPED.keys())
        names |= {VALUE} if value_format == "json" and has_payload_columns else set()
    return frozenset(names)


def is_read_column(column: StructField, value_format: str) -> bool:
    """Whether a column has the name and a type of a column that a read makes, such as offset. A
    write ignores such a column."""
    read_column = _columns(value_format).get(column.name.lower())
    return (
        read_column is not None
        and read_column.name == column.name
        and any(_is_same_type(column.dataType, kind) for kind in read_column.kinds)
    )


def check_type(column: StructField, allowed: Kinds) -> None:
    """Raises SchemaTypeMismatch."""
    if not any(_is_same_type(column.dataType, kind) for kind in allowed):
        kinds = " or ".join(kind.simpleString().upper() for kind in allowed)
        raise SchemaTypeMismatch(
            f"column {column.name!r} is {column.dataType.simpleString().upper()}, not {kinds}",
            f"Cast it to {kinds}.",
        )


def check_names_differ(declared: StructType) -> None:
    """Raises SchemaUnknownColumn if two names are equal without regard to case."""
    names = [name.lower() for name in declared.names]
    for name in names:
        if names.count(name) > 1:
            raise SchemaUnknownColumn(f"there are two columns {name!r}", "Select one of them.")


def check_not_reserved(name: str) -> None:
    """Raises SchemaReservedColumn if a column of the payload has the name of a column that a read
    has beside the payload."""
    if name.lower() in RESERVED_NAMES:
        raise SchemaReservedColumn(f"a column of the payload cannot be named {name!r}")


def _is_same_type(kind: DataType, other: DataType) -> bool:
    """Whether the types are the same, without regard to nullability."""
    return kind.simpleString() == other.simpleString()


def _columns(value_format: str) -> dict[str, Column]:
    return _TYPED if has_payload(value_format) else _UNTYPED


# -- the rows of an entry as columns ---------------------------------------------------------------


def to_spark(
    rows: Block,
    topic: str,
    schema: pa.Schema,
    payload: Sequence[pa.Array] | None = None,
    *,
    null_value: bool = False,
) -> pa.RecordBatch:
    """The rows as the columns that `schema` names. `payload` are the payload's columns among these,
    in the order of `schema` (typed_values.py makes them); None in a format without payload columns.
    With `null_value`, columns that are made from the value are null.

    Raises SchemaIncompatible if `value` is requested and the rows are typed: they have no value.
    """
    if not len(schema):
        return rows.record_batch.select([])
    by_name = _UNTYPED if payload is None else _TYPED
    payload_columns = iter(payload or ())
    arrays = []
    for field in schema:
        column = by_name.get(field.name.lower())
        if column is None:
            array = _cast(next(payload_columns), field.type)
        elif null_value and column.entry_column == VALUE:
            array = pa.nulls(rows.num_rows, field.type)
        else:
            array = column.make(rows, topic, field.type)
        arrays.append(array)
    assert next(payload_columns, None) is None, "every column of the payload is in the schema"
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def with_keys(
    rows: Block,
    batch: pa.RecordBatch,
    keys: Sequence[bytes] | None,
    kept: pa.Array | None = None,
) -> pa.RecordBatch:
    """The rows of `batch` that have one of the keys (None: any key), and that the mask `kept` has.
    `batch` was made from `rows`, row by row."""
    if keys is None:
        return batch if kept is None else batch.filter(kept)
    import pyarrow.compute as pc

    column = _entry_column(rows, KEY)
    if column is None:
        return batch.slice(0, 0)
    mask = pc.is_in(column, value_set=of_list(keys, pa.binary()))
    mask = mask if kept is None else pc.and_(mask, kept)
    return batch if pc.all(mask).as_py() else batch.filter(mask)


def _entry_column(rows: Block, name: str) -> pa.Array | None:
    """A column of the entry; None if the entry lacks this column."""
    batch = rows.record_batch
    index = batch.schema.get_field_index(TYPED_NAMES.get(name, name) if rows.typed else name)
    return None if index < 0 else batch.column(index)


def _from_entry(name: str, *, in_typed_rows: bool = True) -> MakeColumn:
    """Makes a column from the entry's column `name`. Without `in_typed_rows` the column is null in
    typed rows: only batches of Pulsar's producers have this column, and in typed rows its name may
    be that of a column of the payload."""

    def make(rows: Block, topic: str, kind: pa.DataType) -> pa.Array:
        column = _entry_column(rows, name) if in_typed_rows or not rows.typed else None
        return pa.nulls(rows.num_rows, kind) if column is None else _cast(column, kind)

    return make


def _value(rows: Block, topic: str, kind: pa.DataType) -> pa.Array:
    _check_untyped(rows, topic)
    return _from_entry(VALUE)(rows, topic, kind)


def _value_size(rows: Block, topic: str, kind: pa.DataType) -> pa.Array:
    import pyarrow.compute as pc

    _check_untyped(rows, topic)
    column = _entry_column(rows, VALUE)
    if column is None:
        return pa.nulls(rows.num_rows, kind)
    return pc.binary_length(column).cast(kind)


def _check_untyped(rows: Block, topic: str) -> None:
    if rows.typed:
        partition, offset = rows.place_of(0)
        raise SchemaIncompatible(
            f"partition {partition} of topic {topic!r} has typed rows from offset "
            f"{offset} on: these have the payload's columns and no value",
            "Read them with valueFormat=arrow; of a topic with rows of both kinds, give"
            " onOtherFormat=skip or null.",
        )


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """The column as `kind`. As in Spark's CAST, bytes become text without a check of UTF-8."""
    if column.type.equals(kind):
        return column
    if pa.types.is_string(kind) and pa.types.is_binary(column.type):
        return column.view(kind)
    return column.cast(kind)


def _counting_up(name: str) -> MakeColumn:
    """Makes a column whose values count up in each run (rows of one entry and partition)."""
    return lambda rows, topic, kind: of_numpy(
        rows.row_numbers(name).astype(kind.to_pandas_dtype(), copy=False)
    )


def _same_in_run(name: str) -> MakeColumn:
    """Makes a column of a value that all rows of a run share."""
    return lambda rows, topic, kind: of_numpy(
        rows.row_values(name).astype(kind.to_pandas_dtype(), copy=False)
    )


def _times(rows: Block, topic: str, kind: pa.DataType) -> pa.Array:
    return of_numpy(rows.row_times_ms() * 1000).view(kind)


def _message_ids(rows: Block, topic: str, kind: pa.DataType) -> pa.Array:
    """`ledger:entry:partition:index` of each row."""
    import pyarrow.compute as pc

    if len(rows.runs) == 1:
        ((partition, _, count, ledger, entry, first_row, _),) = rows.runs.tolist()  # fields of RUN
        texts = _number_texts(_round_up(first_row + count)).slice(first_row, count)
        place = of_list([f"{ledger}:{entry}:{partition}:"], pa.string())[0]
        return pc.binary_join_element_wise(place, texts, "")
    parts = (*map(rows.row_values, ("ledger", "entry", "partition")), rows.row_numbers("entry_row"))
    return pc.binary_join_element_wise(*(of_numpy(part).cast(pa.string()) for part in parts), ":")


def _schema_versions(rows: Block, topic: str, kind: pa.DataType) -> pa.Array:
    """The topic's numbers of the versions; 0 for a row without a version."""
    index = -1 if rows.typed else rows.record_batch.schema.get_field_index(CLIENT_VERSION)
    if index < 0:
        return _VERSION_OF_BLOCK(rows, topic, kind)
    return _cast(rows.record_batch.column(index).fill_null(0), kind)


def _constant_column(value_of: Callable[[Block, str], str | int]) -> MakeColumn:
    """Makes a column with one value in all rows: a slice of a longer, cached column."""

    def make(rows: Block, topic: str, kind: pa.DataType) -> pa.Array:
        count = rows.num_rows
        return _constant(value_of(rows, topic), kind, _round_up(count)).slice(0, count)

    return make


@lru_cache(maxsize=2)
def _number_texts(count: int) -> pa.Array:
    return of_numpy(np.arange(count)).cast(pa.string())


@lru_cache(maxsize=64)
def _constant(value: str | int, kind: pa.DataType, count: int) -> pa.Array:
    return pa.repeat(of_list([value], kind)[0], count)  # pa.scalar loads pandas


def _round_up(count: int) -> int:
    """The count rounded up, so that a cached column serves batches of many lengths."""
    return max(1024, 1 << (count - 1).bit_length())


# -- all columns -----------------------------------------------------------------------------------

_TOPIC = _constant_column(lambda rows, topic: topic)
_VERSION_OF_BLOCK = _constant_column(lambda rows, topic: rows.schema_version)
_HEADERS: Kinds = (HEADERS_TYPE,)
_META, _PRODUCER = "include_metadata", "include_producer"


def _by_lower(*columns: Column) -> dict[str, Column]:
    return {column.name.lower(): column for column in columns}


_UNTYPED = _by_lower(
    Column("key", BYTES, _from_entry(KEY), KEY),
    Column("value", BYTES, _value, VALUE),
    Column("topic", TEXT, _TOPIC),
    Column("partition", INT, _same_in_run("partition")),
    Column("offset", LONG, _counting_up("offset")),
    Column("timestamp", TIME, _times),
    Column("timestampType", INT, _constant_column(lambda rows, topic: CREATE_TIME)),
    Column("headers", _HEADERS, _from_entry(HEADERS), HEADERS, "include_headers"),
    Column("eventTime", TIME, _from_entry(EVENT_TIME), EVENT_TIME, _META),
    Column("ledgerId", LONG, _same_in_run("ledger"), shape_option=_META),
    Column("entryId", LONG, _same_in_run("entry"), shape_option=_META),
    Column("batchIndex", INT, _counting_up("entry_row"), shape_option=_META),
    Column("messageId", TEXT, _message_ids, shape_option=_META),
    Column("schemaVersion", INT, _VERSION_OF_BLOCK, shape_option=_META),
    Column("valueSize", INT, _value_size, VALUE, _META),
    Column(
        "producerName",
        TEXT,
        _from_entry(PRODUCER_NAME, in_typed_rows=False),
        PRODUCER_NAME,
        _PRODUCER,
    ),
    Column(
        "sequenceId", LONG, _from_entry(SEQUENCE_ID, in_typed_rows=False), SEQUENCE_ID, _PRODUCER
    ),
)
_TYPED = _by_lower(
    Column("__key", BYTES, _from_entry(KEY), KEY),
    Column("__topic", TEXT, _TOPIC),
    Column("__partition", INT, _same_in_run("partition")),
    Column("__offset", LONG, _counting_up("offset")),
    Column("__publishTime", TIME, _times),
    Column("__eventTime", TIME, _from_entry(EVENT_TIME), EVENT_TIME),
    Column("__messageId", TEXT, _message_ids),
    Column("__messageProperties", _HEADERS, _from_entry(HEADERS), HEADERS),
    Column("__ledgerId", LONG, _same_in_run("ledger"), shape_option=_META),
    Column("__entryId", LONG, _same_in_run("entry"), shape_option=_META),
    Column("__batchIndex", INT, _counting_up("entry_row"), shape_option=_META),
    Column(VERSION_COLUMN, INT, _schema_versions, shape_option=_META),
    *(
        _UNTYPED[name]._replace(name=f"__{_UNTYPED[name].name}")
        for name in ("producername", "sequenceid")
    ),
)
DEFAULT_SCHEMA = StructType(
    [StructField(c.name, c.kinds[0]) for c in _UNTYPED.values() if not c.shape_option]
)
"""The schema of Spark's Kafka source."""
