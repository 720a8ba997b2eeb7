"""The batches of an entry, for consumers, made in bounded steps. Pure.

Always true: batches of Pulsar's producers are returned byte for byte. Rows of Spark are cut into
batches of ROWS_MAX, counted from the first row of their entry, and large batches are cut again by
bytes. So each read gets the same batches. Batches are made in steps, and each step yields the
batches that are complete. A step handles at most STEP_BATCHES_MAX batches of producers, or rows of
Spark with STEP_CELLS_MAX cells (a cell is a value of a row; a single row may have more).
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa

from spark_ledger import errors
from spark_ledger.broker.log.tail import STEP_BATCHES_MAX, Stored
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.arrow_arrays import offsets_of
from spark_ledger.topic.entry.json_values import encode_for_clients
from spark_ledger.topic.entry.message_batch import (
    EVENT_TIME,
    HEADERS,
    KEY,
    TYPED_NAMES,
    TYPES,
    VALUE,
    Header,
    Longs,
    column_of,
    decode_header,
)
from spark_ledger.topic.read.pieces import PIECE_DTYPE, EntryPieces
from spark_ledger.topic.read.slice_reader import FetchedEntry

ROWS_MAX = 1000
STEP_CELLS_MAX = 8000


def schema_version_of(fetched: FetchedEntry) -> int:
    """The version of the topic's schema that the rows of the entry have; 0 if they have none, or
    the entry cannot be read."""
    try:
        return decode_header(fetched.entry.payload).schema_version
    except (errors.BadEntry, errors.UnsupportedFormat):
        return 0


def batches_in(fetched: FetchedEntry, schema_version: bytes = b"") -> Iterator[list[Stored]]:
    """The batches that have requested rows of the entry, in order. Each step yields a list of
    batches, which may be empty. Batches of rows of Spark get the `schema_version`. Raises
    errors.BadEntry, errors.UnsupportedFormat."""
    payload = fetched.entry.payload
    header = decode_header(payload)
    fetched.check(header)
    for piece in fetched.pieces:
        if header.has_batches:
            yield from _producers_batches(memoryview(payload)[header.body_at :], header, piece)
        else:
            yield from _batches_of_rows(fetched, header, piece, schema_version)


def _producers_batches(body: memoryview, header: Header, piece: np.void) -> Iterator[list[Stored]]:
    _, _, skip, take, lo = piece.tolist()
    hi, at, step = lo + take, lo - skip, list[Stored]()
    for count, (messages, data) in enumerate(pulsar_batch.split_frames(body, header.rows), 1):
        if at + messages > lo and at < hi:
            batched = messages > 1 or _is_batched(data)
            step.append(Stored(at, messages, bytes(data), batched))
        at += messages
        if not count % STEP_BATCHES_MAX:
            yield step
            step = []
    yield step


def _is_batched(data: memoryview) -> bool:
    chunk = pulsar_batch.is_earlier_chunk(data) or pulsar_batch.is_last_chunk(data)
    return not chunk and pulsar_batch.parse(data).batched


def _batches_of_rows(
    fetched: FetchedEntry, header: Header, piece: np.void, schema_version: bytes
) -> Iterator[list[Stored]]:
    """The batches that have rows of the piece, which names rows of one partition in the entry. The
    entry is decoded once."""
    partition, first_row, skip, take, offset = piece.tolist()
    rows = next(share.rows for share in header.shares if share.partition == partition)
    start = skip - skip % ROWS_MAX
    end = min(rows, start + -(-(skip + take - start) // ROWS_MAX) * ROWS_MAX)
    base = offset - skip
    piece_of_batches = (partition, first_row, start, end - start, base + start)
    pieces: EntryPieces = np.array([piece_of_batches], dtype=PIECE_DTYPE)
    block = FetchedEntry(fetched.entry, pieces).block()
    columns, times = block.record_batch, block.row_times_ms()
    ends = ends_of_steps(cells_of(columns))
    for at in range(0, end - start, ROWS_MAX):
        place, until = base + start + at, min(at + ROWS_MAX, end - start)
        places = [at, *ends[(ends > at) & (ends < until)].tolist(), until]
        steps = (untyped(columns.slice(lo, hi - lo), block.typed) for lo, hi in pairwise(places))
        written_ms = times[at:until].tolist()
        for batch in pulsar_batch.encode_rows(steps, written_ms, place, schema_version):
            if batch is None:
                yield []
                continue
            yield [Stored(place, batch.rows, batch.data, batch.batched)]
            place += batch.rows


def untyped(rows: pa.RecordBatch, typed: bool) -> pa.RecordBatch:
    """The rows with the columns of message_batch.TYPES. A typed row's payload (its columns beside
    key, event time and headers) becomes JSON in the column for the value."""
    if not typed:
        return rows
    payload = [name for name in rows.schema.names if name not in TYPED_NAMES.values()]
    others = {name: column_of(rows, TYPED_NAMES[name]) for name in (KEY, EVENT_TIME, HEADERS)}
    columns = {**others, VALUE: encode_for_clients(rows.select(payload))}
    return pa.RecordBatch.from_arrays([columns[name] for name in TYPES], names=list(TYPES))


def cells_of(rows: pa.RecordBatch) -> Longs:
    """How many values each row has: columns, fields, and elements of lists."""
    counts = np.zeros(rows.num_rows, dtype=np.int64)
    for column in rows.columns:
        counts += _cells(column)
    return counts


def _cells(column: pa.Array) -> "Longs | int":
    kind = column.type
    if pa.types.is_struct(kind):
        return sum(map(_cells, column.flatten()))
    if not (pa.types.is_list(kind) or pa.types.is_map(kind) or pa.types.is_large_list(kind)):
        return 1
    offsets = offsets_of(column)
    inside = [column.keys, column.items] if pa.types.is_map(kind) else [column.values]
    counts = np.ones(len(column), dtype=np.int64)
    for values in inside:
        cells = _cells(values)
        before = cells * np.arange(len(values) + 1) if isinstance(cells, int) else _sums(cells)
        counts += before[offsets[1:]] - before[offsets[:-1]]
    return counts


def _sums(numbers: Longs) -> Longs:
    return np.concatenate([[0], np.cumsum(numbers)])


def ends_of_steps(cells: Longs) -> Longs:
    """The ends of steps: a step has STEP_CELLS_MAX cells at most, or one row."""
    sums, ends, at = np.cumsum(cells), list[int](), 0
    while at < len(cells):
        before = int(sums[at - 1]) if at else 0
        at = max(at + 1, int(np.searchsorted(sums, before + STEP_CELLS_MAX, side="right")))
        ends.append(at)
    return np.array(ends, dtype=np.int64)
