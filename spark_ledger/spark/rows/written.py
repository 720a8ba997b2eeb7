"""The columns that are written: which may be, what each is, and which rows go to which topic.

    binary, string   value, key (text or bytes), topic (STRING), partition (INT), headers (array of
                     structs of key and value, or a map), eventTime or timestamp (TIMESTAMP)
    json and typed   the payload's own columns, and beside them __key __topic __partition
                     __messageProperties __eventTime

Always true: a column that would be ignored is an error that names it. Excepted are what a reader
says of where a row was (`offset`, `timestampType`, ...: written again, it is elsewhere), and what
something else goes before: `topic` and `partition` beside the options topic and routing, and
`timestamp` beside `eventTime`. A row without a topic is an error, never lost; rows of a topic keep
their order. Nothing here loops over rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from spark_ledger.errors import (
    NullTopic,
    OptionMissing,
    SchemaMissingColumn,
    SchemaUnknownColumn,
)
from spark_ledger.spark.options.options import IN_SQL, WriteOptions
from spark_ledger.spark.rows.schema import (
    HEADERS_TYPE,
    Kinds,
    check_named_once,
    check_not_reserved,
    check_type,
    has_payload,
    is_place,
)
from spark_ledger.topic.entry.arrow_arrays import as_numpy, of_numpy
from spark_ledger.topic.log.names import parse_topic

_TEXTS = ArrayType(
    StructType([StructField("key", StringType()), StructField("value", StringType())])
)
_HEADERS: Kinds = (
    HEADERS_TYPE,
    _TEXTS,
    MapType(StringType(), StringType()),
    MapType(StringType(), BinaryType()),
)
_BYTES: Kinds = (StringType(), BinaryType())
_UNTYPED: dict[str, tuple[str, Kinds]] = {
    "value": ("value", _BYTES),
    "key": ("key", _BYTES),
    "topic": ("topic", (StringType(),)),
    "partition": ("partition", (IntegerType(),)),
    "headers": ("headers", _HEADERS),
    "eventtime": ("event_time", (TimestampType(),)),
    "timestamp": ("event_time", (TimestampType(),)),
}
_BESIDE: dict[str, tuple[str, Kinds]] = {
    "__key": ("key", _BYTES),
    "__topic": ("topic", (StringType(),)),
    "__partition": ("partition", (IntegerType(),)),
    "__messageproperties": ("headers", _HEADERS),
    "__eventtime": ("event_time", (TimestampType(),)),
}


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """Equally long columns, None where there is none. `values` is the column `value`, or a record
    batch of the payload's own columns (which valueFormat=json packs into text)."""

    values: pa.Array | pa.RecordBatch
    keys: pa.Array | None = None
    topics: pa.Array | None = None
    partitions: pa.Array | None = None
    headers: pa.Array | None = None
    event_times: pa.Array | None = None

    def __len__(self) -> int:
        typed = isinstance(self.values, pa.RecordBatch)
        return int(self.values.num_rows) if typed else len(self.values)

    def take(self, indexes: pa.Array) -> "WrittenRows":
        return WrittenRows(*(None if one is None else one.take(indexes) for one in self._columns()))

    def slice(self, start: int, count: int) -> "WrittenRows":
        cut = (None if one is None else one.slice(start, count) for one in self._columns())
        return WrittenRows(*cut)

    def _columns(self) -> list[pa.Array | pa.RecordBatch | None]:
        return [getattr(self, one.name) for one in fields(self)]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Which column is what, by the names that the rows have; `routing` as the option, decided."""

    routing: str
    payload: tuple[str, ...] = ()
    value: str | None = None
    key: str | None = None
    topic: str | None = None
    partition: str | None = None
    headers: str | None = None
    event_time: str | None = None

    def as_written(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The columns that are written, by what they are: under whatever name that came."""
        roles = ("value", "key", "topic", "partition", "headers", "event_time")
        found = {role: getattr(self, role) for role in roles}
        named = {role: name for role, name in found.items() if name is not None}
        columns = [batch.column(name) for name in (*self.payload, *named.values())]
        return pa.RecordBatch.from_arrays(columns, [*self.payload, *named])

    def rows(self, batch: pa.RecordBatch) -> WrittenRows:
        """The columns of a batch that Spark hands over."""

        def column(name: str | None) -> pa.Array | None:
            return None if name is None else batch.column(name)

        values = batch.select(list(self.payload)) if self.payload else column(self.value)
        return WrittenRows(
            values=values,
            keys=column(self.key),
            topics=column(self.topic),
            partitions=column(self.partition),
            headers=column(self.headers),
            event_times=column(self.event_time),
        )


def plan_write(written: StructType, options: WriteOptions) -> WritePlan:
    """What the columns of a write are.

    Raises SchemaUnknownColumn, SchemaMissingColumn, SchemaReservedColumn, SchemaTypeMismatch,
    OptionMissing when nothing names a topic.
    """
    check_named_once(written)
    typed = has_payload(options.value_format)
    found, payload = _sorted_out(written, typed)
    if typed and not payload:
        raise SchemaMissingColumn("there is no column of a payload to write", "Select one.")
    if not typed and "value" not in found:
        raise SchemaMissingColumn("there is no column 'value' to write")
    if options.topic is None and "topic" not in found:
        raise OptionMissing(
            "no topic is named",
            "Add option 'topic' or a column topic, or give the topic to save() or start()."
            f" {IN_SQL}",
        )
    if options.topic is not None:
        found.pop("topic", None)
    return WritePlan(_routing(options.routing, found), payload, **found)


def payload_of(written: StructType, plan: WritePlan) -> StructType:
    """The payload's own columns, in their order."""
    return StructType([one for one in written.fields if one.name in plan.payload])


def topics_named(rows: WrittenRows) -> list[str]:
    """The topics that the column names, by their short names, in the order of their first rows.
    Raises as `by_topic`."""
    return list(_numbered(rows)[0])


def by_topic(rows: WrittenRows) -> Iterator[tuple[str, WrittenRows]]:
    """Each topic that the column names, by its short name, in the order of its first row, and its
    rows in their order.

    Raises NullTopic, TopicNameInvalid.
    """
    short, codes = _numbered(rows)
    rest = replace(rows, topics=None)
    if len(short) == 1:
        yield short[0], rest
        return
    ends = np.cumsum(np.bincount(codes, minlength=len(short))).tolist()
    order = np.argsort(codes, kind="stable")
    for name, start, end in zip(short, [0, *ends], ends, strict=False):
        yield name, rest.take(of_numpy(order[start:end]))  # rows kept keep no others in memory


def _numbered(rows: WrittenRows) -> tuple[list[str], npt.NDArray[np.int64]]:
    """The short names of the rows' topics, and of each row which of them it is for."""
    topics = rows.topics
    assert topics is not None, "there is a column of topics"
    if topics.null_count:
        row = int(np.flatnonzero(as_numpy(topics.is_null()))[0])
        raise NullTopic(
            f"{topics.null_count} of the {len(topics)} rows of one batch of a task have no topic,"
            f" first row {row} of this batch"
        )
    encoded = topics.dictionary_encode()
    names = [parse_topic(name).short for name in encoded.dictionary.to_pylist()]
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return list(number), np.array([number[name] for name in names], np.int64)[
        as_numpy(encoded.indices)
    ]


def _sorted_out(written: StructType, typed: bool) -> tuple[dict[str, str], tuple[str, ...]]:
    """By what they are the names of the columns that are known, and the others, without those that
    say where a row was."""
    known = _BESIDE if typed else _UNTYPED
    found: dict[str, str] = {}
    payload = []
    for column in written.fields:
        what, kinds = known.get(column.name.lower(), (None, ()))
        if what is not None:
            check_type(column, kinds)
            if what not in found or column.name.lower() == "eventtime":
                found[what] = column.name
        elif is_place(column, typed):
            continue
        elif typed:
            check_not_reserved(column.name)
            payload.append(column.name)
        else:
            raise SchemaUnknownColumn(
                f"column {column.name!r} cannot be written to a topic",
                "Set valueFormat=arrow to write columns as they are, or select key and value only.",
            )
    return found, tuple(payload)


def _routing(asked: str | None, found: dict[str, str]) -> str:
    if asked is None:
        return "column" if "partition" in found else "hash"
    if asked == "column" and "partition" not in found:
        raise SchemaMissingColumn(
            "routing is 'column', but there is no column 'partition'",
            "Add an INT column partition, or choose another routing.",
        )
    if asked != "column":
        found.pop("partition", None)
    return asked
