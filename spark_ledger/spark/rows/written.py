"""The columns of a write: the allowed columns and their roles, the topic of each row; and the bad
rows, which go to badRecordsTopic.

    binary, string   value, key (text or bytes), topic (STRING), partition (INT), headers (array of
                     structs of key and value, or a map), eventTime or timestamp (TIMESTAMP)
    json, arrow,     the payload's columns, and beside them __key __topic __partition
    schema           __messageProperties __eventTime
    a bad record     `value` is the row's value, cut to VALUE_BYTES_MAX (null for a typed row);
                     `key` is the row's, cut in the same way; the headers are `reason`, `topic`,
                     `partition` (the row's, or null), then the caller's facts of the write
                     (`queryId`, `batchId`, ...)

Always true: a column that would be ignored is an error with the column's name. Exceptions are a
read's columns for the place of a row (`offset`, `timestampType`, ...: the row will have another
place), `topic` if there is an option topic, `partition` if there is an option routing, and
`timestamp` beside `eventTime`. A row without a topic is an error, never lost; rows of a topic keep
their order. A row is bad if it has no topic, an impossible topic, a partition that does not exist,
or more bytes than an entry. No other row is refused later for one of these reasons. A bad row is
kept with its reason, which begins with the class of the error that the row would have raised.
Nothing here loops over rows.
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
    check_names_differ,
    check_not_reserved,
    check_type,
    has_payload,
    is_read_column,
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
"""The roles of columns, and the types that a column of each role may have."""
_UNTYPED = {role: role for role in ("value", "key", "topic", "partition", "headers")}
_UNTYPED |= {"eventtime": "event_time", "timestamp": "event_time"}
_TYPED = {
    "__key": "key",
    "__topic": "topic",
    "__partition": "partition",
    "__messageproperties": "headers",
    "__eventtime": "event_time",
}


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """Columns of equal length, None for a missing column. `values` is the column `value`, or a
    record batch of the payload's columns (valueFormat=json makes text of these)."""

    values: pa.Array | pa.RecordBatch
    keys: pa.Array | None = None
    topics: pa.Array | None = None
    partitions: pa.Array | None = None
    headers: pa.Array | None = None
    event_times: pa.Array | None = None

    def __len__(self) -> int:
        is_typed = isinstance(self.values, pa.RecordBatch)
        return int(self.values.num_rows) if is_typed else len(self.values)

    def take(self, indexes: pa.Array) -> "WrittenRows":
        return WrittenRows(
            *(None if column is None else column.take(indexes) for column in self._columns())
        )

    def _columns(self) -> list[pa.Array | pa.RecordBatch | None]:
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The name of the column for each role, and the routing: the option's, or its default."""

    routing: str
    payload: tuple[str, ...] = ()
    value: str | None = None
    key: str | None = None
    topic: str | None = None
    partition: str | None = None
    headers: str | None = None
    event_time: str | None = None

    def columns_by_role(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The columns to write; each column with a role is renamed to its role."""
        roles = {role: getattr(self, role) for role in _ROLES}
        by_role = {role: name for role, name in roles.items() if name is not None}
        columns = [batch.column(name) for name in (*self.payload, *by_role.values())]
        return pa.RecordBatch.from_arrays(columns, [*self.payload, *by_role])

    def rows(self, batch: pa.RecordBatch) -> WrittenRows:
        """The rows of a batch that Spark passes."""

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


def plan_write(schema: StructType, options: WriteOptions) -> WritePlan:
    """The roles of the columns of a write.

    Raises SchemaUnknownColumn, SchemaMissingColumn, SchemaReservedColumn, SchemaTypeMismatch,
    OptionMissing if neither an option nor a column names a topic.
    """
    check_names_differ(schema)
    is_typed = has_payload(options.value_format)
    by_role, payload = _roles_and_payload(schema, options.value_format)
    if is_typed and not payload:
        raise SchemaMissingColumn("there is no column of a payload to write", "Select one.")
    if not is_typed and "value" not in by_role:
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


def payload_of(schema: StructType, plan: WritePlan) -> StructType:
    """The payload's columns, in their order in the schema."""
    return StructType([field for field in schema.fields if field.name in plan.payload])


def topic_names(rows: WrittenRows) -> list[str]:
    """The short names of the topics in the column `topic`, in the order of their first rows. Raises
    NullTopic, TopicNameInvalid."""
    return list(_topic_indexes(rows)[0])


def by_topic(rows: WrittenRows) -> Iterator[tuple[str, WrittenRows]]:
    """For each topic in the column `topic`, in the order of its first row: its short name, and its
    rows in their order.

    Raises NullTopic, TopicNameInvalid.
    """
    names, indexes = _topic_indexes(rows)
    rest = replace(rows, topics=None)
    if len(names) == 1:
        yield names[0], rest
        return
    ends = np.cumsum(np.bincount(indexes, minlength=len(names))).tolist()
    order = np.argsort(indexes, kind="stable")
    for name, start, end in zip(names, [0, *ends], ends, strict=False):
        yield name, rest.take(of_numpy(order[start:end]))  # a copy does not keep all rows in memory


def _topic_indexes(rows: WrittenRows) -> tuple[list[str], npt.NDArray[np.int64]]:
    """The short names of the rows' topics, and for each row the index of its topic."""
    topics = rows.topics
    assert topics is not None, "there is a column of topics"
    if topics.null_count:
        row = int(np.flatnonzero(as_numpy(topics.is_null()))[0])
        raise NullTopic(
            f"{topics.null_count} of the {len(topics)} rows of one batch of a task have no topic:"
            f" the first is row {row} of this batch"
        )
    encoded = topics.dictionary_encode()
    names = [parse_topic(name).short for name in encoded.dictionary.to_pylist()]
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return list(number), np.array([number[name] for name in names], np.int64)[
        as_numpy(encoded.indices)
    ]


def _roles_and_payload(
    schema: StructType, value_format: str
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The names of columns by their roles, and the names of the payload's columns. Columns for the
    place of a row are left out."""
    is_typed = has_payload(value_format)
    roles = _TYPED if is_typed else _UNTYPED
    by_role: dict[str, str] = {}
    payload = []
    for column in schema.fields:
        role = roles.get(column.name.lower())
        if role is not None:
            check_type(column, _ROLES[role])
            if role not in by_role or column.name.lower() == "eventtime":
                by_role[role] = column.name
        elif is_read_column(column, value_format):
            continue
        elif is_typed:
            check_not_reserved(column.name)
            payload.append(column.name)
        else:
            raise SchemaUnknownColumn(
                f"column {column.name!r} cannot be written to a topic",
                "Set valueFormat=arrow to write typed rows, or select key and value only.",
            )
    return by_role, tuple(payload)


def _routing(option: str | None, by_role: dict[str, str]) -> str:
    """The routing. Removes the role `partition` if the routing does not use the column."""
    if option is None:
        return "column" if "partition" in by_role else "hash"
    if option == "column" and "partition" not in by_role:
        raise SchemaMissingColumn(
            "routing is 'column', but there is no column 'partition'",
            "Add an INT column partition, or choose another routing.",
        )
    if option != "column":
        by_role.pop("partition", None)
    return option


def misfits(
    rows: WrittenRows,
    *,
    entry_bytes_max: int | None,
    partitions: int | None = None,
    bad_records_topic: str | None = None,
) -> pa.Array | None:
    """For each row the reason for which the row cannot be written, null for a good row; None if all
    rows are good.

    `partitions` is the topic's number of partitions, for the check of a column `partition` (None:
    no check, as the rows are of several topics). `entry_bytes_max` None: sizes are not checked. No
    row may name `bad_records_topic`, the topic for bad records.
    """
    masks: list[tuple[Mask, str]] = []
    if rows.topics is not None:
        masks += _topic_masks(rows.topics, bad_records_topic)
    if rows.partitions is not None and partitions is not None:
        masks.append(_partition_mask(rows.partitions, partitions))
    if entry_bytes_max is not None:
        masks.append(_size_mask(rows, entry_bytes_max))
    masks = [(mask, reason) for mask, reason in masks if mask.any()]
    if not masks:
        return None
    reasons = pa.nulls(len(rows), pa.string())
    for mask, reason in reversed(masks):  # a row with several reasons gets the first
        reasons = pc.if_else(of_numpy(mask), pa.scalar(reason), reasons)
    return reasons


def good_and_bad(
    rows: WrittenRows, reasons: pa.Array, extra_headers: Mapping[str, str]
) -> tuple[WrittenRows, WrittenRows]:
    """The good rows, and a bad record for each bad row: a row of the topic for bad records. Its
    headers are the bad row's reason, topic and partition, and `extra_headers`."""
    is_bad = as_numpy(reasons.is_valid())
    indexes = of_numpy(np.flatnonzero(is_bad))
    bad_rows = rows.take(indexes)
    values: pa.Array = pa.nulls(len(bad_rows), pa.binary())
    if not isinstance(bad_rows.values, pa.RecordBatch):
        values = _cut_values(bad_rows.values)
    records = WrittenRows(
        values=values,
        keys=None if bad_rows.keys is None else _cut_values(bad_rows.keys),
        headers=_bad_record_headers(bad_rows, reasons.take(indexes), extra_headers),
        event_times=bad_rows.event_times,
    )
    return rows.take(of_numpy(np.flatnonzero(~is_bad))), records


def _topic_masks(topics: pa.Array, bad_records_topic: str | None) -> list[tuple[Mask, str]]:
    encoded = topics.dictionary_encode()
    names = [_short(name) for name in encoded.dictionary.to_pylist()]
    is_null = as_numpy(topics.is_null())

    def rows_of(name: str | None) -> Mask:
        mask = np.zeros(len(topics), dtype=bool)
        is_name = np.array([topic == name for topic in names], dtype=bool)
        mask[~is_null] = is_name[as_numpy(encoded.indices.drop_null())]
        return mask

    masks = [
        (is_null, f"[{NullTopic.error_class}] the row has no topic"),
        (rows_of(name=None), f"[{TopicNameInvalid.error_class}] no topic can have this name"),
    ]
    if bad_records_topic is not None:
        reason = f"[{OptionConflict.error_class}] the row's topic is that of bad records"
        masks.append((rows_of(bad_records_topic), reason))
    return masks


def _short(name: str) -> str | None:
    """The short name; None if no topic can have this name."""
    try:
        return parse_topic(name).short
    except TopicNameInvalid:
        return None


def _partition_mask(column: pa.Array, partitions: int) -> tuple[Mask, str]:
    exists = pc.and_(pc.greater_equal(column, 0), pc.less(column, partitions))
    mask = ~as_numpy(pc.fill_null(exists, False))
    reason = f"[{PartitionInvalid.error_class}] the topic has {partitions} partitions"
    return mask, reason


def _size_mask(rows: WrittenRows, entry_bytes_max: int) -> tuple[Mask, str]:
    sizes, overhead = [np.zeros(0, dtype=np.int64)], 0
    for batch in row_columns.stored_batches(rows.keys, rows.values, rows.event_times, rows.headers):
        sizes.append(row_columns.row_bytes(batch))
        overhead = max(overhead, row_columns.overhead_bytes_max(batch.schema))
    room = entry_bytes_max - overhead
    reason = f"[{MessageTooBig.error_class}] larger than the {room} bytes of an entry"
    return np.concatenate(sizes) > room, reason


def _cut_values(column: pa.Array) -> pa.Array:
    """The first bytes of each value; a text may end within a character."""
    values = row_columns.as_binary(column, "value")
    return pc.binary_slice(values, 0, VALUE_BYTES_MAX)


def _bad_record_headers(
    rows: WrittenRows, reasons: pa.Array, extra_headers: Mapping[str, str]
) -> pa.Array:
    """For each row a list of headers, with the same names in all rows."""
    count = len(rows)
    nulls = pa.nulls(count, pa.binary())
    partitions = None if rows.partitions is None else rows.partitions.cast(pa.string())
    columns = {
        "reason": reasons,
        "topic": nulls if rows.topics is None else rows.topics,
        "partition": nulls if partitions is None else partitions,
        **{name: pa.repeat(pa.scalar(text), count) for name, text in extra_headers.items()},
    }
    width = len(columns)
    values = pa.concat_arrays([column.cast(pa.binary()) for column in columns.values()])
    row_by_row = np.arange(width * count).reshape(width, count).T.ravel()
    names = pa.array(list(columns)).take(pa.array(np.tile(np.arange(width), count)))
    pairs = pa.StructArray.from_arrays([names, values.take(pa.array(row_by_row))], ["key", "value"])
    offsets = pa.array(np.arange(0, width * count + 1, width, dtype=np.int32))
    return pa.ListArray.from_arrays(offsets, pairs).cast(STORED_HEADERS_TYPE)
