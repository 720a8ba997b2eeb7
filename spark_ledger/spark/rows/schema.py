"""The columns by name and type: what a reader offers, what it may be asked for.

    binary, string   Kafka's: key value topic partition offset timestamp timestampType,
                     with includeHeaders: headers,
                     with includeMetadata: eventTime ledgerId entryId batchIndex messageId
                     schemaVersion valueSize, with includeProducer: producerName sequenceId
    json and typed   the payload's own columns, then __key __topic __partition __offset
                     __publishTime __eventTime __messageId __messageProperties,
                     with includeMetadata: __ledgerId __entryId __batchIndex __schemaVersion,
                     with includeProducer: __producerName __sequenceId

Always true: the default schema is Kafka's, name for name and type for type; a user's .schema() is
a projection by name, without regard to case, of all columns that the format has, whether an option
adds them to the default or not; text and bytes of key and value may be either.
"""

from collections.abc import Iterable

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
    SchemaMissingColumn,
    SchemaReservedColumn,
    SchemaTypeMismatch,
    SchemaUnknownColumn,
)
from spark_ledger.spark.options.options import ShapeOptions
from spark_ledger.spark.options.table import PAYLOAD_FORMATS
from spark_ledger.topic.entry.message_batch import (
    EVENT_TIME,
    HEADERS,
    KEY,
    PRODUCER_NAME,
    SEQUENCE_ID,
    TYPED_NAMES,
    VALUE,
)

HEADERS_TYPE = ArrayType(
    StructType([StructField("key", StringType()), StructField("value", BinaryType())])
)
RESERVED_PREFIX = "__"

__all__ = ["DEFAULT_SCHEMA", "check_projection"]

Kinds = tuple[DataType, ...]
_BYTES: Kinds = (BinaryType(), StringType())
_TEXT: Kinds = (StringType(),)
_INT: Kinds = (IntegerType(),)
_LONG: Kinds = (LongType(),)
_TIME: Kinds = (TimestampType(),)
_HEADERS: Kinds = (HEADERS_TYPE,)

_KAFKAS: dict[str, Kinds] = {
    "key": _BYTES,
    "value": _BYTES,
    "topic": _TEXT,
    "partition": _INT,
    "offset": _LONG,
    "timestamp": _TIME,
    "timestampType": _INT,
}
_PLACE: dict[str, Kinds] = {
    "eventTime": _TIME,
    "ledgerId": _LONG,
    "entryId": _LONG,
    "batchIndex": _INT,
    "messageId": _TEXT,
    "schemaVersion": _INT,
    "valueSize": _INT,
}
_PRODUCER: dict[str, Kinds] = {"producerName": _TEXT, "sequenceId": _LONG}
_TYPED: dict[str, Kinds] = {
    "__key": _BYTES,
    "__topic": _TEXT,
    "__partition": _INT,
    "__offset": _LONG,
    "__publishTime": _TIME,
    "__eventTime": _TIME,
    "__messageId": _TEXT,
    "__messageProperties": _HEADERS,
}
_TYPED_PLACE: dict[str, Kinds] = {
    "__ledgerId": _LONG,
    "__entryId": _LONG,
    "__batchIndex": _INT,
    "__schemaVersion": _INT,
}
_TYPED_PRODUCER: dict[str, Kinds] = {"__producerName": _TEXT, "__sequenceId": _LONG}
_UNTYPED_ALL = {**_KAFKAS, "headers": _HEADERS, **_PLACE, **_PRODUCER}
_TYPED_ALL = {**_TYPED, **_TYPED_PLACE, **_TYPED_PRODUCER}
_IN_ENTRY = {
    "key": KEY,
    "value": VALUE,
    "valuesize": VALUE,
    "headers": HEADERS,
    "eventtime": EVENT_TIME,
    "__key": KEY,
    "__eventtime": EVENT_TIME,
    "__messageproperties": HEADERS,
    "producername": PRODUCER_NAME,
    "sequenceid": SEQUENCE_ID,
    "__producername": PRODUCER_NAME,
    "__sequenceid": SEQUENCE_ID,
}
"""What a column of a reader is made of in an entry."""


def _struct(columns: dict[str, Kinds]) -> list[StructField]:
    return [StructField(name, kinds[0]) for name, kinds in columns.items()]


DEFAULT_SCHEMA = StructType(_struct(_KAFKAS))
"""Kafka's."""


def has_payload(value_format: str) -> bool:
    """Whether a reader's rows have the payload's own columns in place of `value`."""
    return value_format in PAYLOAD_FORMATS


def read_schema(shape: ShapeOptions, payload: StructType | None = None) -> StructType:
    """What a reader offers when the user declares nothing; `payload` are the payload's columns
    where the format has such. Raises SchemaReservedColumn."""
    if has_payload(shape.value_format):
        assert payload is not None, "the payload's columns are looked up first"
        for column in payload.fields:
            check_not_reserved(column.name)
        more = dict(_TYPED)
        if shape.include_metadata:
            more |= _TYPED_PLACE
        if shape.include_producer:
            more |= _TYPED_PRODUCER
        return StructType([*payload.fields, *_struct(more)])
    columns = dict(_KAFKAS)
    if shape.value_format == "string":
        columns["value"] = _TEXT
    if shape.include_headers:
        columns["headers"] = _HEADERS
    if shape.include_metadata:
        columns |= _PLACE
    if shape.include_producer:
        columns |= _PRODUCER
    return StructType(_struct(columns))


def check_projection(declared: StructType, value_format: str = "binary") -> None:
    """Raises SchemaUnknownColumn, SchemaReservedColumn or SchemaTypeMismatch for a column that no
    reader has, SchemaMissingColumn if there is none; of the payload's own columns only the names
    are looked at."""
    check_named_once(declared)
    if not declared.fields:
        raise SchemaMissingColumn("the declared schema has no column", "Declare at least one.")
    payload = has_payload(value_format)
    offered = _by_lower(_TYPED_ALL if payload else _UNTYPED_ALL)
    for column in declared.fields:
        known = offered.get(column.name.lower())
        if known is not None:
            check_type(column, known[1])
        elif payload:
            check_not_reserved(column.name)
        else:
            names = ", ".join(name for name, _ in offered.values())
            raise SchemaUnknownColumn(
                f"a topic has no column {column.name!r}", f"Declare some of: {names}."
            )


def payload_of(declared: StructType) -> StructType:
    """The payload's own columns among those of a reader with such."""
    return StructType([one for one in declared.fields if one.name.lower() not in _TYPED_LOWER])


def entry_columns(
    declared: StructType,
    value_format: str = "binary",
    stored: Iterable[str] = (),
    *,
    with_key: bool = False,
) -> frozenset[str]:
    """What must be decoded of an entry, by the names there; everything else is never built.
    `stored` are the names that the versions of the topic's schema have; `with_key` for a filter
    on keys."""
    wanted = {name.lower() for name in declared.names}
    found = {_IN_ENTRY[name] for name in wanted if name in _IN_ENTRY}
    found |= {KEY} if with_key else set()
    found |= {TYPED_NAMES[name] for name in found if name in TYPED_NAMES}
    if has_payload(value_format):
        found |= {name for name in stored if name.lower() in wanted}
        found |= {VALUE} if value_format == "json" and wanted - _TYPED_LOWER else set()
    return frozenset(found)


def is_place(column: StructField, typed: bool) -> bool:
    """Whether a reader has this column, of this type, and no writer: it says where a row is."""
    kinds = (_TYPED_ALL if typed else _UNTYPED_ALL).get(column.name, ())
    return any(_same(column.dataType, kind) for kind in kinds)


def check_type(column: StructField, allowed: Kinds) -> None:
    """Raises SchemaTypeMismatch."""
    if not any(_same(column.dataType, kind) for kind in allowed):
        wanted = " or ".join(kind.simpleString().upper() for kind in allowed)
        raise SchemaTypeMismatch(
            f"column {column.name!r} is {column.dataType.simpleString().upper()}, not {wanted}",
            f"Cast it to {wanted}.",
        )


def check_named_once(declared: StructType) -> None:
    """Raises SchemaUnknownColumn for a name that is there twice, without regard to case."""
    names = [name.lower() for name in declared.names]
    for name in names:
        if names.count(name) > 1:
            raise SchemaUnknownColumn(f"there are two columns {name!r}", "Select one of them.")


def check_not_reserved(name: str) -> None:
    """Raises SchemaReservedColumn."""
    if name.startswith(RESERVED_PREFIX):
        raise SchemaReservedColumn(f"a column of the payload cannot be named {name!r}")


def _same(one: DataType, other: DataType) -> bool:
    """Whether they are one type, whatever may be null."""
    return one.simpleString() == other.simpleString()


def _by_lower(columns: dict[str, Kinds]) -> dict[str, tuple[str, Kinds]]:
    return {name.lower(): (name, kinds) for name, kinds in columns.items()}


_TYPED_LOWER: frozenset[str] = frozenset(_by_lower(_TYPED_ALL))
