"""Rows that cannot be written, told apart from the others: what badRecordsTopic gets.

Always true: a row is good or bad, never both or neither; the good ones keep their order, and none
of them is refused later for what is judged here (no topic, a topic that cannot be, a partition that
is not there, a row larger than an entry); a bad one is kept with its reason, which begins with the
class of the error that it would have been. Nothing here loops over rows.

A bad record: `value` is the row's value, cut to VALUE_BYTES_MAX (null if the payload is columns),
`key` its key, cut likewise; its headers are `reason`, `topic`, `partition` (as the row had them,
null if it had none), then what the caller says of the write (`queryId`, `batchId`, ...).
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_ledger import errors
from spark_ledger.spark.rows.written import WrittenRows
from spark_ledger.topic.entry import row_columns
from spark_ledger.topic.entry.arrow_arrays import as_numpy, of_numpy
from spark_ledger.topic.entry.message_batch import HEADERS_TYPE
from spark_ledger.topic.log.names import parse_topic

VALUE_BYTES_MAX = 64 << 10

Mask = npt.NDArray[np.bool_]


def misfits(
    rows: WrittenRows,
    *,
    entry_bytes_max: int | None,
    partitions: int | None = None,
    aside: str | None = None,
) -> pa.Array | None:
    """For each row why it cannot be written, null for a good one; None if all are good.

    `partitions` is how many the topic has; it is looked at where rows have a partition of their
    own, and None while the topics of the rows are not told apart yet. With `entry_bytes_max` None
    the rows' sizes are not looked at. `aside` is the topic for bad records: no row's own.
    """
    found: list[tuple[Mask, str]] = []
    if rows.topics is not None:
        found += _by_topic(rows.topics, aside)
    if rows.partitions is not None and partitions is not None:
        found.append(_by_partition(rows.partitions, partitions))
    if entry_bytes_max is not None:
        found.append(_by_size(rows, entry_bytes_max))
    found = [(mask, reason) for mask, reason in found if mask.any()]
    if not found:
        return None
    reasons = pa.nulls(len(rows), pa.string())
    for mask, reason in reversed(found):  # of two, the first is told
        reasons = pc.if_else(of_numpy(mask), pa.scalar(reason), reasons)
    return reasons


def told_apart(
    rows: WrittenRows, reasons: pa.Array, about: Mapping[str, str]
) -> tuple[WrittenRows, WrittenRows]:
    """The good rows, and the bad ones as records of the topic for such. `about` are more headers,
    the same for each."""
    bad = as_numpy(reasons.is_valid())
    indexes = of_numpy(np.flatnonzero(bad))
    lost = rows.take(indexes)
    values: pa.Array = pa.nulls(len(lost), pa.binary())
    if not isinstance(lost.values, pa.RecordBatch):
        values = _cut(lost.values)
    records = WrittenRows(
        values=values,
        keys=None if lost.keys is None else _cut(lost.keys),
        headers=_headers(lost, reasons.take(indexes), about),
        event_times=lost.event_times,
    )
    return rows.take(of_numpy(np.flatnonzero(~bad))), records


def _by_topic(topics: pa.Array, aside: str | None) -> list[tuple[Mask, str]]:
    encoded = topics.dictionary_encode()
    names = [_short(name) for name in encoded.dictionary.to_pylist()]
    missing = as_numpy(topics.is_null())

    def rows_of(name: str | None) -> Mask:
        mask = np.zeros(len(topics), dtype=bool)
        wrong = np.array([one == name for one in names], dtype=bool)
        mask[~missing] = wrong[as_numpy(encoded.indices.drop_null())]
        return mask

    found = [
        (missing, f"[{errors.NullTopic.error_class}] the row has no topic"),
        (rows_of(None), f"[{errors.TopicNameInvalid.error_class}] no topic can have this name"),
    ]
    if aside is not None:
        reason = f"[{errors.OptionConflict.error_class}] the row's topic is that of bad records"
        found.append((rows_of(aside), reason))
    return found


def _short(name: str) -> str | None:
    """None: no topic can have this name."""
    try:
        return parse_topic(name).short
    except errors.TopicNameInvalid:
        return None


def _by_partition(column: pa.Array, partitions: int) -> tuple[Mask, str]:
    there = pc.and_(pc.greater_equal(column, 0), pc.less(column, partitions))
    mask = ~as_numpy(pc.fill_null(there, False))
    reason = f"[{errors.PartitionInvalid.error_class}] the topic has {partitions} partitions"
    return mask, reason


def _by_size(rows: WrittenRows, entry_bytes_max: int) -> tuple[Mask, str]:
    sizes, overhead = [np.zeros(0, dtype=np.int64)], 0
    for part in row_columns.stored(rows.keys, rows.values, rows.event_times, rows.headers):
        sizes.append(row_columns.row_bytes(part))
        overhead = max(overhead, row_columns.overhead_bytes_max(part.schema))
    room = entry_bytes_max - overhead
    reason = f"[{errors.MessageTooBig.error_class}] larger than the {room} bytes of an entry"
    return np.concatenate(sizes) > room, reason


def _cut(column: pa.Array) -> pa.Array:
    """The first bytes of each row; text may end inside of a character."""
    whole = row_columns.as_binary(column, "value")
    return pc.binary_slice(whole, 0, VALUE_BYTES_MAX)


def _headers(rows: WrittenRows, reasons: pa.Array, about: Mapping[str, str]) -> pa.Array:
    """A list of the same names for each row."""
    count = len(rows)
    nothing = pa.nulls(count, pa.binary())
    partitions = None if rows.partitions is None else rows.partitions.cast(pa.string())
    columns = {
        "reason": reasons,
        "topic": nothing if rows.topics is None else rows.topics,
        "partition": nothing if partitions is None else partitions,
        **{name: pa.repeat(pa.scalar(text), count) for name, text in about.items()},
    }
    width = len(columns)
    values = pa.concat_arrays([column.cast(pa.binary()) for column in columns.values()])
    in_rows = np.arange(width * count).reshape(width, count).T.ravel()
    names = pa.array(list(columns)).take(pa.array(np.tile(np.arange(width), count)))
    pairs = pa.StructArray.from_arrays([names, values.take(pa.array(in_rows))], ["key", "value"])
    offsets = pa.array(np.arange(0, width * count + 1, width, dtype=np.int32))
    return pa.ListArray.from_arrays(offsets, pairs).cast(HEADERS_TYPE)
