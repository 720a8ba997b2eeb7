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
from spark_ledger.topic.arrow_arrays import of_list, of_numpy
from spark_ledger.topic.message_batch import EVENT_TIME, HEADERS, KEY, TYPED_NAMES, VALUE
from spark_ledger.topic.slice_reader import Rows

CREATE_TIME = 0
"""The timestampType of Kafka that says: the time the writer made the entry."""

Column = Callable[[Rows, str, pa.DataType], pa.Array]


def to_spark(
    rows: Rows, topic: str, schema: pa.Schema, payload: Sequence[pa.Array] | None = None
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


def with_keys(rows: Rows, made: pa.RecordBatch, keys: Sequence[bytes]) -> pa.RecordBatch:
    """Of `made`, the columns of `rows`, the rows that have one of the keys."""
    import pyarrow.compute as pc

    column = _stored(rows, KEY)
    if column is None:
        return made.slice(0, 0)
    mask = pc.is_in(column, value_set=of_list(keys, pa.binary()))
    return made if pc.all(mask).as_py() else made.filter(mask)


def _stored(rows: Rows, name: str) -> pa.Array | None:
    """A column of the entry, None if it has none."""
    batch = rows.record_batch
    at = batch.schema.get_field_index(TYPED_NAMES.get(name, name) if rows.typed else name)
    return None if at < 0 else batch.column(at)


def _entrys(name: str) -> Column:
    def column(rows: Rows, topic: str, kind: pa.DataType) -> pa.Array:
        stored = _stored(rows, name)
        return pa.nulls(rows.record_batch.num_rows, kind) if stored is None else _as(stored, kind)

    return column


def _value(rows: Rows, topic: str, kind: pa.DataType) -> pa.Array:
    _check_untyped(rows, topic)
    return _entrys(VALUE)(rows, topic, kind)


def _value_size(rows: Rows, topic: str, kind: pa.DataType) -> pa.Array:
    import pyarrow.compute as pc

    _check_untyped(rows, topic)
    stored = _stored(rows, VALUE)
    if stored is None:
        return pa.nulls(rows.record_batch.num_rows, kind)
    return pc.binary_length(stored).cast(kind)


def _check_untyped(rows: Rows, topic: str) -> None:
    if rows.typed:
        raise SchemaIncompatible(
            f"partition {rows.partition} of topic {topic!r} has typed rows from offset "
            f"{rows.offset} on: they have columns of their own and no value",
            "Read them with valueFormat=arrow.",
        )


def _as(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Bytes as `kind`. Text is not checked to be UTF-8, as in Spark's own CAST."""
    if column.type.equals(kind):
        return column
    if pa.types.is_string(kind) and pa.types.is_binary(column.type):
        return column.view(kind)
    return column.cast(kind)


def _offsets(rows: Rows, topic: str, kind: pa.DataType) -> pa.Array:
    return _counted(rows, rows.offset, kind)


def _indexes(rows: Rows, topic: str, kind: pa.DataType) -> pa.Array:
    return _counted(rows, rows.entry_row, kind)


def _counted(rows: Rows, first: int, kind: pa.DataType) -> pa.Array:
    count = rows.record_batch.num_rows
    return of_numpy(np.arange(first, first + count, dtype=kind.to_pandas_dtype()))


def _times(rows: Rows, topic: str, kind: pa.DataType) -> pa.Array:
    return of_numpy(rows.each_ms() * 1000).view(kind)


def _message_ids(rows: Rows, topic: str, kind: pa.DataType) -> pa.Array:
    """`ledger:entry:partition:index` of each row."""
    import pyarrow.compute as pc

    entry = f"{rows.ledger_id}:{rows.entry_id}:{rows.partition}:"
    count = rows.record_batch.num_rows
    texts = _number_texts(_rounded(rows.entry_row + count)).slice(rows.entry_row, count)
    return pc.binary_join_element_wise(of_list([entry], pa.string())[0], texts, "")


def _each(value_of: Callable[[Rows, str], str | int]) -> Column:
    return lambda rows, topic, kind: _repeated(value_of(rows, topic), kind, rows)


@lru_cache(maxsize=2)
def _number_texts(count: int) -> pa.Array:
    return of_numpy(np.arange(count)).cast(pa.string())


@lru_cache(maxsize=64)
def _constant(value: str | int, kind: pa.DataType, count: int) -> pa.Array:
    return pa.repeat(of_list([value], kind)[0], count)  # pa.scalar loads pandas


def _repeated(value: str | int, kind: pa.DataType, rows: Rows) -> pa.Array:
    """`value` for each row: a slice of a column that is kept, its length rounded up."""
    count = rows.record_batch.num_rows
    return _constant(value, kind, _rounded(count)).slice(0, count)


def _rounded(count: int) -> int:
    """So that what is kept serves batches of many lengths."""
    return max(1024, 1 << (count - 1).bit_length())


def _filled(rows: Rows, value: int, kind: pa.DataType) -> pa.Array:
    """As `_repeated` for values that are another for each entry."""
    return of_numpy(np.full(rows.record_batch.num_rows, value, dtype=kind.to_pandas_dtype()))


_TOPIC = _each(lambda rows, topic: topic)
_PARTITION = _each(lambda rows, topic: rows.partition)
_SCHEMA_VERSION = _each(lambda rows, topic: rows.schema_version)


def _ledger_ids(rows: Rows, topic: str, kind: pa.DataType) -> pa.Array:
    return _filled(rows, rows.ledger_id, kind)


def _entry_ids(rows: Rows, topic: str, kind: pa.DataType) -> pa.Array:
    return _filled(rows, rows.entry_id, kind)


_COLUMNS: dict[str, Column] = {
    "key": _entrys(KEY),
    "value": _value,
    "topic": _TOPIC,
    "partition": _PARTITION,
    "offset": _offsets,
    "timestamp": _times,
    "timestamptype": _each(lambda rows, topic: CREATE_TIME),
    "headers": _entrys(HEADERS),
    "eventtime": _entrys(EVENT_TIME),
    "ledgerid": _ledger_ids,
    "entryid": _entry_ids,
    "batchindex": _indexes,
    "messageid": _message_ids,
    "schemaversion": _SCHEMA_VERSION,
    "valuesize": _value_size,
}
_TYPED_COLUMNS: dict[str, Column] = {
    "__key": _entrys(KEY),
    "__topic": _TOPIC,
    "__partition": _PARTITION,
    "__offset": _offsets,
    "__publishtime": _times,
    "__eventtime": _entrys(EVENT_TIME),
    "__messageid": _message_ids,
    "__messageproperties": _entrys(HEADERS),
    "__ledgerid": _ledger_ids,
    "__entryid": _entry_ids,
    "__batchindex": _indexes,
    "__schemaversion": _SCHEMA_VERSION,
}
