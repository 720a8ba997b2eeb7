"""The columns of a write: which are allowed, the role of each, the topic of each row, and the rows
that cannot be written and go to badRecordsTopic.

    binary, string   value, key (text or bytes), topic (STRING), partition (INT), headers (array of
                     structs of key and value, or a map), eventTime or timestamp (TIMESTAMP)
    json and typed   the payload's own columns, and beside them __key __topic __partition
                     __messageProperties __eventTime
    a bad record     `value` is the row's value, cut to VALUE_BYTES_MAX (null if the payload is
                     columns), `key` its key, cut likewise; its headers are `reason`, `topic`,
                     `partition` (as the row had them, null if it had none), then the caller's facts
                     of the write (`queryId`, `batchId`, ...)

Always true: a column that would be ignored is an error that names it. Exceptions are a reader's
columns for the place of a row (`offset`, `timestampType`, ...: written again, the row is elsewhere)
and columns that something else overrides: `topic` and `partition` beside the options topic and
routing, and `timestamp` beside `eventTime`. A row without a topic is an error, never lost; rows of
a topic keep their order. A row is good or bad, never both or neither, and no good row is refused
later for a reason that is judged here (no topic, an impossible topic, a partition that does not
exist, a row larger than an entry). A bad row is kept with its reason, which begins with the class
of the error that it would have been. Nothing here loops over rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from spark_ledger.errors import (
    MessageTooBig,
    NullTopic,
    OptionConflict,
    OptionMissing,
    PartitionInvalid,
    SchemaMissingColumn,
    SchemaUnknownColumn,
    TopicNameInvalid,
)
from spark_ledger.spark.options.options import IN_SQL, WriteOptions
from spark_ledger.spark.rows.columns import (
    HEADERS_TYPE,
    INT,
    TEXT,
    TIME,
    Kinds,
    check_named_once,
    check_not_reserved,
    check_type,
    has_payload,
    is_place,
)
from spark_ledger.topic.entry import row_columns
from spark_ledger.topic.entry.arrow_arrays import as_numpy, of_numpy
from spark_ledger.topic.entry.message_batch import HEADERS_TYPE as STORED_HEADERS_TYPE
from spark_ledger.topic.log.names import parse_topic

VALUE_BYTES_MAX = 64 << 10

Mask = npt.NDArray[np.bool_]

_TEXTS = ArrayType(
    StructType([StructField("key", StringType()), StructField("value", StringType())])
)
_BYTES: Kinds = (StringType(), BinaryType())
_ROLES: dict[str, Kinds] = {
    "value": _BYTES,
    "key": _BYTES,
    "topic": TEXT,
    "partition": INT,
    "headers": (
        *(HEADERS_TYPE, _TEXTS),
        *(MapType(StringType(), StringType()), MapType(StringType(), BinaryType())),
    ),
    "event_time": TIME,
}
"""The roles of columns, and the types of each."""
_UNTYPED = {role: role for role in ("value", "key", "topic", "partition", "headers")}
_UNTYPED |= {"eventtime": "event_time", "timestamp": "event_time"}
_BESIDE = {
    "__key": "key",
    "__topic": "topic",
    "__partition": "partition",
    "__messageproperties": "headers",
    "__eventtime": "event_time",
}


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """Columns of equal length, None for a missing one. `values` is the column `value`, or a record
    batch of the payload's own columns (valueFormat=json packs them into text)."""

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
        return WrittenRows(
            *(None if column is None else column.take(indexes) for column in self._columns())
        )

    def _columns(self) -> list[pa.Array | pa.RecordBatch | None]:
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The column of each role, by its name in the rows; `routing` as the option, decided."""

    routing: str
    payload: tuple[str, ...] = ()
    value: str | None = None
    key: str | None = None
    topic: str | None = None
    partition: str | None = None
    headers: str | None = None
    event_time: str | None = None

    def as_written(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The columns to write, named by their roles, whatever their names were."""
        by_role = {role: getattr(self, role) for role in _ROLES}
        named = {role: name for role, name in by_role.items() if name is not None}
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
    """The roles of the columns of a write.

    Raises SchemaUnknownColumn, SchemaMissingColumn, SchemaReservedColumn, SchemaTypeMismatch,
    OptionMissing if nothing names a topic.
    """
    check_named_once(written)
    typed = has_payload(options.value_format)
    by_role, payload = _sorted_out(written, options.value_format)
    if typed and not payload:
        raise SchemaMissingColumn("there is no column of a payload to write", "Select one.")
    if not typed and "value" not in by_role:
        raise SchemaMissingColumn("there is no column 'value' to write")
    if options.topic is None and "topic" not in by_role:
        raise OptionMissing(
            "no topic is named",
            "Add option 'topic' or a column topic, or give the topic to save() or start()."
            f" {IN_SQL}",
        )
    if options.topic is not None:
        by_role.pop("topic", None)
    return WritePlan(_routing(options.routing, by_role), payload, **by_role)


def payload_of(written: StructType, plan: WritePlan) -> StructType:
    """The payload's own columns, in their order."""
    return StructType([field for field in written.fields if field.name in plan.payload])


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
        yield name, rest.take(of_numpy(order[start:end]))  # a copy: it keeps no others in memory


def _numbered(rows: WrittenRows) -> tuple[list[str], npt.NDArray[np.int64]]:
    """The short names of the rows' topics, and for each row the index of its topic."""
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


def _sorted_out(written: StructType, value_format: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """The names of columns by their roles, and the names of the payload's columns, without columns
    for the place of a row."""
    typed = has_payload(value_format)
    roles = _BESIDE if typed else _UNTYPED
    by_role: dict[str, str] = {}
    payload = []
    for column in written.fields:
        what = roles.get(column.name.lower())
        if what is not None:
            check_type(column, _ROLES[what])
            if what not in by_role or column.name.lower() == "eventtime":
                by_role[what] = column.name
        elif is_place(column, value_format):
            continue
        elif typed:
            check_not_reserved(column.name)
            payload.append(column.name)
        else:
            raise SchemaUnknownColumn(
                f"column {column.name!r} cannot be written to a topic",
                "Set valueFormat=arrow to write columns as they are, or select key and value only.",
            )
    return by_role, tuple(payload)


def _routing(asked: str | None, by_role: dict[str, str]) -> str:
    if asked is None:
        return "column" if "partition" in by_role else "hash"
    if asked == "column" and "partition" not in by_role:
        raise SchemaMissingColumn(
            "routing is 'column', but there is no column 'partition'",
            "Add an INT column partition, or choose another routing.",
        )
    if asked != "column":
        by_role.pop("partition", None)
    return asked


def misfits(
    rows: WrittenRows,
    *,
    entry_bytes_max: int | None,
    partitions: int | None = None,
    aside: str | None = None,
) -> pa.Array | None:
    """For each row the reason for which it cannot be written, null for a good row; None if all are
    good.

    `partitions` is the number of the topic's partitions; it matters if rows have a partition of
    their own, and is None while the rows of different topics are together. With `entry_bytes_max`
    None the rows' sizes are not checked. `aside` is the topic for bad records: no row may name it.
    """
    masks: list[tuple[Mask, str]] = []
    if rows.topics is not None:
        masks += _by_topic(rows.topics, aside)
    if rows.partitions is not None and partitions is not None:
        masks.append(_by_partition(rows.partitions, partitions))
    if entry_bytes_max is not None:
        masks.append(_by_size(rows, entry_bytes_max))
    masks = [(mask, reason) for mask, reason in masks if mask.any()]
    if not masks:
        return None
    reasons = pa.nulls(len(rows), pa.string())
    for mask, reason in reversed(masks):  # the first of several reasons counts
        reasons = pc.if_else(of_numpy(mask), pa.scalar(reason), reasons)
    return reasons


def good_and_bad(
    rows: WrittenRows, reasons: pa.Array, extra_headers: Mapping[str, str]
) -> tuple[WrittenRows, WrittenRows]:
    """The good rows, and the bad ones as records of the topic for bad records, each with the
    `extra_headers` too."""
    bad = as_numpy(reasons.is_valid())
    indexes = of_numpy(np.flatnonzero(bad))
    lost = rows.take(indexes)
    values: pa.Array = pa.nulls(len(lost), pa.binary())
    if not isinstance(lost.values, pa.RecordBatch):
        values = _cut(lost.values)
    records = WrittenRows(
        values=values,
        keys=None if lost.keys is None else _cut(lost.keys),
        headers=_headers(lost, reasons.take(indexes), extra_headers),
        event_times=lost.event_times,
    )
    return rows.take(of_numpy(np.flatnonzero(~bad))), records


def _by_topic(topics: pa.Array, aside: str | None) -> list[tuple[Mask, str]]:
    encoded = topics.dictionary_encode()
    names = [_short(name) for name in encoded.dictionary.to_pylist()]
    missing = as_numpy(topics.is_null())

    def rows_of(name: str | None) -> Mask:
        mask = np.zeros(len(topics), dtype=bool)
        wrong = np.array([topic == name for topic in names], dtype=bool)
        mask[~missing] = wrong[as_numpy(encoded.indices.drop_null())]
        return mask

    masks = [
        (missing, f"[{NullTopic.error_class}] the row has no topic"),
        (rows_of(None), f"[{TopicNameInvalid.error_class}] no topic can have this name"),
    ]
    if aside is not None:
        reason = f"[{OptionConflict.error_class}] the row's topic is that of bad records"
        masks.append((rows_of(aside), reason))
    return masks


def _short(name: str) -> str | None:
    """The short name; None if no topic can have this name."""
    try:
        return parse_topic(name).short
    except TopicNameInvalid:
        return None


def _by_partition(column: pa.Array, partitions: int) -> tuple[Mask, str]:
    exists = pc.and_(pc.greater_equal(column, 0), pc.less(column, partitions))
    mask = ~as_numpy(pc.fill_null(exists, False))
    reason = f"[{PartitionInvalid.error_class}] the topic has {partitions} partitions"
    return mask, reason


def _by_size(rows: WrittenRows, entry_bytes_max: int) -> tuple[Mask, str]:
    sizes, overhead = [np.zeros(0, dtype=np.int64)], 0
    for part in row_columns.stored(rows.keys, rows.values, rows.event_times, rows.headers):
        sizes.append(row_columns.row_bytes(part))
        overhead = max(overhead, row_columns.overhead_bytes_max(part.schema))
    room = entry_bytes_max - overhead
    reason = f"[{MessageTooBig.error_class}] larger than the {room} bytes of an entry"
    return np.concatenate(sizes) > room, reason


def _cut(column: pa.Array) -> pa.Array:
    """The first bytes of each row; text may end inside of a character."""
    whole = row_columns.as_binary(column, "value")
    return pc.binary_slice(whole, 0, VALUE_BYTES_MAX)


def _headers(rows: WrittenRows, reasons: pa.Array, extra_headers: Mapping[str, str]) -> pa.Array:
    """For each row a list of headers, with the same names in all rows."""
    count = len(rows)
    nothing = pa.nulls(count, pa.binary())
    partitions = None if rows.partitions is None else rows.partitions.cast(pa.string())
    columns = {
        "reason": reasons,
        "topic": nothing if rows.topics is None else rows.topics,
        "partition": nothing if partitions is None else partitions,
        **{name: pa.repeat(pa.scalar(text), count) for name, text in extra_headers.items()},
    }
    width = len(columns)
    values = pa.concat_arrays([column.cast(pa.binary()) for column in columns.values()])
    in_rows = np.arange(width * count).reshape(width, count).T.ravel()
    names = pa.array(list(columns)).take(pa.array(np.tile(np.arange(width), count)))
    pairs = pa.StructArray.from_arrays([names, values.take(pa.array(in_rows))], ["key", "value"])
    offsets = pa.array(np.arange(0, width * count + 1, width, dtype=np.int32))
    return pa.ListArray.from_arrays(offsets, pairs).cast(STORED_HEADERS_TYPE)
