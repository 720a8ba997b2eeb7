"""The columns of a reader: which it offers, which a user may declare, how they come out of entries.

    binary, string   Kafka's: key value topic partition offset timestamp timestampType,
                     with includeHeaders: headers,
                     with includeMetadata: eventTime ledgerId entryId batchIndex messageId
                     schemaVersion valueSize, with includeProducer: producerName sequenceId
    json and typed   the payload's own columns, then __key __topic __partition __offset
                     __publishTime __eventTime __messageId __messageProperties,
                     with includeMetadata: __ledgerId __entryId __batchIndex __schemaVersion,
                     with includeProducer: __producerName __sequenceId

Always true: the default schema is Kafka's, name for name and type for type; a user's .schema() is
a projection by name, without regard to case, of all columns of the format, whether an option adds
them to the default or not; key and value may be text or bytes. Only requested columns are made;
key, value, headers and event time are the entry's own memory, the others are whole numpy columns or
constants that are kept; a column that the entry does not have is null in every row. Nothing here
loops over rows. pyarrow.compute takes 35 ms to load, and only the columns and filters that need it
load it.
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
Make = Callable[[Block, str, pa.DataType], pa.Array]
"""(rows, topic, type): the column of these rows."""

HEADERS_TYPE = ArrayType(
    StructType([StructField("key", StringType()), StructField("value", BinaryType())])
)
CREATE_TIME = 0
"""Kafka's timestampType for the time at which the writer made the entry."""
BYTES: Kinds = (BinaryType(), StringType())
TEXT: Kinds = (StringType(),)
INT: Kinds = (IntegerType(),)
LONG: Kinds = (LongType(),)
TIME: Kinds = (TimestampType(),)


class Column(NamedTuple):
    """A column that a reader has beside those of the payload. It is made of the entry's column
    `stored`; `added` is the field of ShapeOptions that adds it to the default columns (empty: it is
    one of them)."""

    name: str
    kinds: Kinds
    make: Make
    stored: str | None = None
    added: str = ""


# -- the columns that a reader offers, and that a user may declare --------------------------------


def has_payload(value_format: str) -> bool:
    """Whether a reader's rows have the payload's own columns in place of `value`."""
    return value_format in PAYLOAD_FORMATS


def read_schema(shape: ShapeOptions, payload: StructType | None = None) -> StructType:
    """The columns of a reader if the user declares none; `payload` are the payload's columns if the
    format has such. Raises SchemaReservedColumn."""
    own: list[StructField] = []
    if has_payload(shape.value_format):
        assert payload is not None, "the payload's columns are looked up first"
        own = payload.fields
        for column in own:
            check_not_reserved(column.name)
    text = shape.value_format == "string"
    more = [
        StructField(column.name, TEXT[0] if text and column.name == "value" else column.kinds[0])
        for column in _columns(shape.value_format).values()
        if not column.added or getattr(shape, column.added)
    ]
    return StructType([*own, *more])


def check_projection(declared: StructType, value_format: str = "binary") -> None:
    """Raises SchemaUnknownColumn or SchemaTypeMismatch for a column that no reader has,
    SchemaMissingColumn for no column at all; it does not check the payload's own columns."""
    check_named_once(declared)
    if not declared.fields:
        raise SchemaMissingColumn("the declared schema has no column", "Declare at least one.")
    offered = _columns(value_format)
    for column in declared.fields:
        allowed = offered.get(column.name.lower())
        if allowed is not None:
            check_type(column, allowed.kinds)
        elif not has_payload(value_format):
            names = ", ".join(column.name for column in offered.values())
            raise SchemaUnknownColumn(
                f"a topic has no column {column.name!r}", f"Declare some of: {names}."
            )


def payload_of(declared: StructType) -> StructType:
    """The payload's own columns among the declared ones."""
    return StructType([column for column in declared.fields if column.name.lower() not in _TYPED])


def entry_columns(
    declared: StructType,
    value_format: str = "binary",
    stored: Iterable[str] = (),
    *,
    with_key: bool = False,
) -> frozenset[str]:
    """The columns of an entry to decode, by their names there; no other column is built. `stored`
    are the names in the versions of the topic's schema; `with_key` is for a filter on keys."""
    columns = _columns(value_format)
    names = {name.lower() for name in declared.names}
    made_of = {columns[name].stored for name in names if name in columns}
    decoded = {name for name in (*made_of, KEY if with_key else None) if name is not None}
    decoded |= {TYPED_NAMES[name] for name in decoded if name in TYPED_NAMES}
    if has_payload(value_format):
        decoded |= {name for name in stored if name.lower() in names}
        decoded |= {VALUE} if value_format == "json" and names - _TYPED.keys() else set()
    return frozenset(decoded)


def is_place(column: StructField, value_format: str) -> bool:
    """Whether this column, of this type, is the place of a row: readers have it, writers do not."""
    of_reader = _columns(value_format).get(column.name.lower())
    return (
        of_reader is not None
        and of_reader.name == column.name
        and any(_same(column.dataType, kind) for kind in of_reader.kinds)
    )


def check_type(column: StructField, allowed: Kinds) -> None:
    """Raises SchemaTypeMismatch."""
    if not any(_same(column.dataType, kind) for kind in allowed):
        kinds = " or ".join(kind.simpleString().upper() for kind in allowed)
        raise SchemaTypeMismatch(
            f"column {column.name!r} is {column.dataType.simpleString().upper()}, not {kinds}",
            f"Cast it to {kinds}.",
        )


def check_named_once(declared: StructType) -> None:
    """Raises SchemaUnknownColumn for a repeated name, without regard to case."""
    names = [name.lower() for name in declared.names]
    for name in names:
        if names.count(name) > 1:
            raise SchemaUnknownColumn(f"there are two columns {name!r}", "Select one of them.")


def check_not_reserved(name: str) -> None:
    """Raises SchemaReservedColumn for a column of the payload with the name of a column that a
    reader has beside them."""
    if name.lower() in RESERVED_NAMES:
        raise SchemaReservedColumn(f"a column of the payload cannot be named {name!r}")


def _same(kind: DataType, other: DataType) -> bool:
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
    """The columns that `schema` names. `payload` are the payload's own columns among them, in their
    order (typed_values.py makes them); None in a format without such columns. With `null_value` the
    columns made of the value are null.

    Raises SchemaIncompatible if `value` is requested and the rows are typed: they have no value.
    """
    if not len(schema):
        return rows.record_batch.select([])
    by_name = _UNTYPED if payload is None else _TYPED
    own = iter(payload or ())
    columns = []
    for field in schema:
        column = by_name.get(field.name.lower())
        if column is None:
            made = _as(next(own), field.type)
        elif null_value and column.stored == VALUE:
            made = pa.nulls(rows.num_rows, field.type)
        else:
            made = column.make(rows, topic, field.type)
        columns.append(made)
    assert next(own, None) is None, "every column of the payload has its place"
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def with_keys(rows: Block, made: pa.RecordBatch, keys: Sequence[bytes]) -> pa.RecordBatch:
    """The rows of `made` that have one of the keys; `made` are the columns of `rows`."""
    import pyarrow.compute as pc

    column = _stored(rows, KEY)
    if column is None:
        return made.slice(0, 0)
    mask = pc.is_in(column, value_set=of_list(keys, pa.binary()))
    return made if pc.all(mask).as_py() else made.filter(mask)


def _stored(rows: Block, name: str) -> pa.Array | None:
    """A column of the entry, None if the entry lacks it."""
    batch = rows.record_batch
    at = batch.schema.get_field_index(TYPED_NAMES.get(name, name) if rows.typed else name)
    return None if at < 0 else batch.column(at)


def _entrys(name: str, *, of_typed: bool = True) -> Make:
    """Makes a column out of the entry's. Not `of_typed`: only batches of Pulsar's producers have
    this column, and typed rows may have a column of their own with its name."""

    def column(rows: Block, topic: str, kind: pa.DataType) -> pa.Array:
        stored = _stored(rows, name) if of_typed or not rows.typed else None
        return pa.nulls(rows.num_rows, kind) if stored is None else _as(stored, kind)

    return column


def _value(rows: Block, topic: str, kind: pa.DataType) -> pa.Array:
    _check_untyped(rows, topic)
    return _entrys(VALUE)(rows, topic, kind)


def _value_size(rows: Block, topic: str, kind: pa.DataType) -> pa.Array:
    import pyarrow.compute as pc

    _check_untyped(rows, topic)
    stored = _stored(rows, VALUE)
    if stored is None:
        return pa.nulls(rows.num_rows, kind)
    return pc.binary_length(stored).cast(kind)


def _check_untyped(rows: Block, topic: str) -> None:
    if rows.typed:
        partition, offset = rows.place_of(0)
        raise SchemaIncompatible(
            f"partition {partition} of topic {topic!r} has typed rows from offset "
            f"{offset} on: they have columns of their own and no value",
            "Read them with valueFormat=arrow; of a topic with rows of both kinds, give"
            " onOtherFormat=skip or null.",
        )


def _as(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Bytes as `kind`. Text is not checked to be UTF-8, as in Spark's own CAST."""
    if column.type.equals(kind):
        return column
    if pa.types.is_string(kind) and pa.types.is_binary(column.type):
        return column.view(kind)
    return column.cast(kind)


def _counted(name: str) -> Make:
    """Makes a column that counts up from row to row."""
    return lambda rows, topic, kind: of_numpy(
        rows.each_counted(name).astype(kind.to_pandas_dtype(), copy=False)
    )


def _runs(name: str) -> Make:
    """Makes a column of a value that the rows of a run share."""
    return lambda rows, topic, kind: of_numpy(
        rows.each(name).astype(kind.to_pandas_dtype(), copy=False)
    )


def _times(rows: Block, topic: str, kind: pa.DataType) -> pa.Array:
    return of_numpy(rows.each_ms() * 1000).view(kind)


def _message_ids(rows: Block, topic: str, kind: pa.DataType) -> pa.Array:
    """`ledger:entry:partition:index` of each row."""
    import pyarrow.compute as pc

    if len(rows.runs) == 1:
        ((partition, _, count, ledger, entry, first, _),) = rows.runs.tolist()
        texts = _number_texts(_rounded(first + count)).slice(first, count)
        place = of_list([f"{ledger}:{entry}:{partition}:"], pa.string())[0]
        return pc.binary_join_element_wise(place, texts, "")
    parts = (*map(rows.each, ("ledger", "entry", "partition")), rows.each_counted("entry_row"))
    return pc.binary_join_element_wise(*(of_numpy(part).cast(pa.string()) for part in parts), ":")


def _repeated(value_of: Callable[[Block, str], str | int]) -> Make:
    """Makes a column of one value: a slice of a longer column that is kept."""

    def column(rows: Block, topic: str, kind: pa.DataType) -> pa.Array:
        count = rows.num_rows
        return _constant(value_of(rows, topic), kind, _rounded(count)).slice(0, count)

    return column


@lru_cache(maxsize=2)
def _number_texts(count: int) -> pa.Array:
    return of_numpy(np.arange(count)).cast(pa.string())


@lru_cache(maxsize=64)
def _constant(value: str | int, kind: pa.DataType, count: int) -> pa.Array:
    return pa.repeat(of_list([value], kind)[0], count)  # pa.scalar loads pandas


def _rounded(count: int) -> int:
    """The length rounded up, so that a kept column serves batches of many lengths."""
    return max(1024, 1 << (count - 1).bit_length())


# -- all of them -----------------------------------------------------------------------------------

_TOPIC = _repeated(lambda rows, topic: topic)
_SCHEMA_VERSION = _repeated(lambda rows, topic: rows.schema_version)
_HEADERS: Kinds = (HEADERS_TYPE,)
_META, _PRODUCER = "include_metadata", "include_producer"


def _by_lower(*columns: Column) -> dict[str, Column]:
    return {column.name.lower(): column for column in columns}


_UNTYPED = _by_lower(
    Column("key", BYTES, _entrys(KEY), KEY),
    Column("value", BYTES, _value, VALUE),
    Column("topic", TEXT, _TOPIC),
    Column("partition", INT, _runs("partition")),
    Column("offset", LONG, _counted("offset")),
    Column("timestamp", TIME, _times),
    Column("timestampType", INT, _repeated(lambda rows, topic: CREATE_TIME)),
    Column("headers", _HEADERS, _entrys(HEADERS), HEADERS, "include_headers"),
    Column("eventTime", TIME, _entrys(EVENT_TIME), EVENT_TIME, _META),
    Column("ledgerId", LONG, _runs("ledger"), None, _META),
    Column("entryId", LONG, _runs("entry"), None, _META),
    Column("batchIndex", INT, _counted("entry_row"), None, _META),
    Column("messageId", TEXT, _message_ids, None, _META),
    Column("schemaVersion", INT, _SCHEMA_VERSION, None, _META),
    Column("valueSize", INT, _value_size, VALUE, _META),
    Column("producerName", TEXT, _entrys(PRODUCER_NAME, of_typed=False), PRODUCER_NAME, _PRODUCER),
    Column("sequenceId", LONG, _entrys(SEQUENCE_ID, of_typed=False), SEQUENCE_ID, _PRODUCER),
)
_TYPED = _by_lower(
    Column("__key", BYTES, _entrys(KEY), KEY),
    Column("__topic", TEXT, _TOPIC),
    Column("__partition", INT, _runs("partition")),
    Column("__offset", LONG, _counted("offset")),
    Column("__publishTime", TIME, _times),
    Column("__eventTime", TIME, _entrys(EVENT_TIME), EVENT_TIME),
    Column("__messageId", TEXT, _message_ids),
    Column("__messageProperties", _HEADERS, _entrys(HEADERS), HEADERS),
    Column("__ledgerId", LONG, _runs("ledger"), None, _META),
    Column("__entryId", LONG, _runs("entry"), None, _META),
    Column("__batchIndex", INT, _counted("entry_row"), None, _META),
    Column("__schemaVersion", INT, _SCHEMA_VERSION, None, _META),
    *(
        _UNTYPED[name]._replace(name=f"__{_UNTYPED[name].name}")
        for name in ("producername", "sequenceid")
    ),
)
DEFAULT_SCHEMA = StructType(
    [StructField(c.name, c.kinds[0]) for c in _UNTYPED.values() if not c.added]
)
"""Kafka's."""
