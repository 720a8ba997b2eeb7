"""The rows of an entry as Spark's columns.

Always true: only the columns that are asked for are made; key, value, headers and event time are
the entry's own memory, the others whole columns of numpy or constants that are kept; a column that
the entry does not have is null in every row. Nothing here loops over rows. pyarrow.compute takes
35 ms to load and is loaded by the columns and filters that need it.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa

from spark_ledger.errors import SchemaIncompatible
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

CREATE_TIME = 0
"""The timestampType of Kafka that says: the time the writer made the entry."""

Column = Callable[[Block, str, pa.DataType], pa.Array]


def to_spark(
    rows: Block, topic: str, schema: pa.Schema, payload: Sequence[pa.Array] | None = None
) -> pa.RecordBatch:
    """The columns that `schema` names. `payload` are those of them that are the payload's own, in
    their order (typed_values.py makes them); None in a format that has no such columns.

    Raises SchemaIncompatible when `value` is asked for and the rows have none, as they are typed.
    """
    if not len(schema):
        return rows.record_batch.select([])
    known = _COLUMNS if payload is None else _TYPED_COLUMNS
    own = iter(payload or ())
    columns = []
    for field in schema:
        make = known.get(field.name.lower())
        made = _as(next(own), field.type) if make is None else make(rows, topic, field.type)
        columns.append(made)
    assert next(own, None) is None, "every column of the payload has its place"
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def with_keys(rows: Block, made: pa.RecordBatch, keys: Sequence[bytes]) -> pa.RecordBatch:
    """Of `made`, the columns of `rows`, the rows that have one of the keys."""
    import pyarrow.compute as pc

    column = _stored(rows, KEY)
    if column is None:
        return made.slice(0, 0)
    mask = pc.is_in(column, value_set=of_list(keys, pa.binary()))
    return made if pc.all(mask).as_py() else made.filter(mask)


def _stored(rows: Block, name: str) -> pa.Array | None:
    """A column of the entry, None if it has none."""
    batch = rows.record_batch
    at = batch.schema.get_field_index(TYPED_NAMES.get(name, name) if rows.typed else name)
    return None if at < 0 else batch.column(at)


def _entrys(name: str) -> Column:
    def column(rows: Block, topic: str, kind: pa.DataType) -> pa.Array:
        stored = _stored(rows, name)
        return pa.nulls(rows.num_rows, kind) if stored is None else _as(stored, kind)

    return column


def _producers(name: str) -> Column:
    """What only batches of Pulsar's producers have; typed rows may have a column of that name."""

    def column(rows: Block, topic: str, kind: pa.DataType) -> pa.Array:
        stored = None if rows.typed else _stored(rows, name)
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
            "Read them with valueFormat=arrow.",
        )


def _as(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Bytes as `kind`. Text is not checked to be UTF-8, as in Spark's own CAST."""
    if column.type.equals(kind):
        return column
    if pa.types.is_string(kind) and pa.types.is_binary(column.type):
        return column.view(kind)
    return column.cast(kind)


def _counted(name: str) -> Column:
    """Counted up from row to row."""

    def column(rows: Block, topic: str, kind: pa.DataType) -> pa.Array:
        return of_numpy(rows.each_counted(name).astype(kind.to_pandas_dtype(), copy=False))

    return column


def _runs(name: str) -> Column:
    """What rows that are together in an entry have in common."""

    def column(rows: Block, topic: str, kind: pa.DataType) -> pa.Array:
        return of_numpy(rows.each(name).astype(kind.to_pandas_dtype(), copy=False))

    return column


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


def _each(value_of: Callable[[Block, str], str | int]) -> Column:
    return lambda rows, topic, kind: _repeated(value_of(rows, topic), kind, rows)


@lru_cache(maxsize=2)
def _number_texts(count: int) -> pa.Array:
    return of_numpy(np.arange(count)).cast(pa.string())


@lru_cache(maxsize=64)
def _constant(value: str | int, kind: pa.DataType, count: int) -> pa.Array:
    return pa.repeat(of_list([value], kind)[0], count)  # pa.scalar loads pandas


def _repeated(value: str | int, kind: pa.DataType, rows: Block) -> pa.Array:
    """`value` for each row: a slice of a column that is kept, its length rounded up."""
    count = rows.num_rows
    return _constant(value, kind, _rounded(count)).slice(0, count)


def _rounded(count: int) -> int:
    """So that what is kept serves batches of many lengths."""
    return max(1024, 1 << (count - 1).bit_length())


_TOPIC = _each(lambda rows, topic: topic)
_SCHEMA_VERSION = _each(lambda rows, topic: rows.schema_version)


_COLUMNS: dict[str, Column] = {
    "key": _entrys(KEY),
    "value": _value,
    "topic": _TOPIC,
    "partition": _runs("partition"),
    "offset": _counted("offset"),
    "timestamp": _times,
    "timestamptype": _each(lambda rows, topic: CREATE_TIME),
    "headers": _entrys(HEADERS),
    "eventtime": _entrys(EVENT_TIME),
    "ledgerid": _runs("ledger"),
    "entryid": _runs("entry"),
    "batchindex": _counted("entry_row"),
    "messageid": _message_ids,
    "schemaversion": _SCHEMA_VERSION,
    "valuesize": _value_size,
    "producername": _producers(PRODUCER_NAME),
    "sequenceid": _producers(SEQUENCE_ID),
}
_TYPED_COLUMNS: dict[str, Column] = {
    "__key": _entrys(KEY),
    "__topic": _TOPIC,
    "__partition": _runs("partition"),
    "__offset": _counted("offset"),
    "__publishtime": _times,
    "__eventtime": _entrys(EVENT_TIME),
    "__messageid": _message_ids,
    "__messageproperties": _entrys(HEADERS),
    "__ledgerid": _runs("ledger"),
    "__entryid": _runs("entry"),
    "__batchindex": _counted("entry_row"),
    "__schemaversion": _SCHEMA_VERSION,
    "__producername": _producers(PRODUCER_NAME),
    "__sequenceid": _producers(SEQUENCE_ID),
}
