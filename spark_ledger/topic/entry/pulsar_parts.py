"""An entry's batches (messages that a producer sent together) as columns, in parts of limited
memory. Pure.

Always true: batches are decoded in their order. A part is made of batches that together decompress
to PART_BYTES_MAX and have PART_ROWS_MAX messages at most, or of one larger batch. A batch without a
requested row is not decoded. A batch that cannot be decoded is returned by itself, with the reason.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from spark_ledger import errors
from spark_ledger.topic.entry.message_batch import VALUE, EarlierPayloads, Longs
from spark_ledger.topic.entry.pulsar_batch import (
    Batch,
    fault_of,
    is_earlier_chunk,
    is_last_chunk,
    join_chunks,
    parse,
    unpacked_bytes,
)
from spark_ledger.topic.entry.pulsar_columns import decode_batches, publish_times

PART_BYTES_MAX = 32 << 20
PART_ROWS_MAX = 1 << 20


class PulsarPart(NamedTuple):
    """Rows of an entry: their columns; the time at which each row was published, by its producer's
    clock; and the number of each row within the entry, rising."""

    columns: pa.RecordBatch
    times_ms: Longs
    rows_at: Longs


class BadBatch(NamedTuple):
    """A batch that cannot be decoded: `rows` rows of the entry, from row `row` on."""

    row: int
    rows: int
    data: memoryview
    why: errors.UnsupportedFormat


class Chunks(NamedTuple):
    """The messages in chunks whose last chunk is in an entry, by the row of the last chunk:
    `earlier_payloads` has the payloads of the other chunks, or `faults` why these cannot be read. A
    message in neither has no row.
    """

    earlier_payloads: EarlierPayloads
    faults: Mapping[int, errors.UnsupportedFormat]


NO_CHUNKS = Chunks({}, {})


class _BatchAtRow(NamedTuple):
    row: int
    rows: int
    data: memoryview
    batch: Batch


def parts_of(
    batches: Iterable[tuple[int, memoryview]],
    row_range: tuple[int, int],
    columns: Collection[str] | None = None,
    chunks: Chunks = NO_CHUNKS,
) -> Iterator[PulsarPart | BadBatch]:
    """The parts of an entry's batches that have a row in `row_range` (start, end exclusive).
    `batches` has each batch with its number of messages."""
    needs_value = columns is None or VALUE in columns
    waiting: list[_BatchAtRow] = []
    size = count = row = 0
    for messages, data in batches:
        begin, row = row, row + messages
        if begin >= row_range[1] or row <= row_range[0] or is_earlier_chunk(data):
            continue
        try:
            batch = _batch(data, messages, chunks, begin, value=needs_value)
        except errors.UnsupportedFormat as why:
            yield from _decode_parts(waiting, columns)
            waiting, size, count = [], 0, 0
            yield BadBatch(begin, messages, data, why)
            continue
        if batch is None:
            continue
        batch_bytes = unpacked_bytes(batch)
        if waiting and (size + batch_bytes > PART_BYTES_MAX or count + messages > PART_ROWS_MAX):
            yield from _decode_parts(waiting, columns)
            waiting, size, count = [], 0, 0
        waiting.append(_BatchAtRow(begin, messages, data, batch))
        size, count = size + batch_bytes, count + messages
    yield from _decode_parts(waiting, columns)


def _batch(
    data: memoryview, messages: int, chunks: Chunks, row: int, *, value: bool
) -> Batch | None:
    """The batch; None if the batch has no row. Raises errors.UnsupportedFormat."""
    if is_last_chunk(data):
        if row in chunks.faults:
            raise chunks.faults[row]
        if row not in chunks.earlier_payloads:
            return None
        batch = join_chunks(chunks.earlier_payloads[row], data, value=value)
    else:
        batch = parse(data)
    if batch.messages != messages:
        raise errors.BadEntry(
            f"a batch of {batch.messages} messages is counted as {messages} in its entry"
        )
    if (fault := fault_of(batch)) is not None:
        raise errors.BadEntry(fault)
    return batch


def _decode_parts(
    waiting: list[_BatchAtRow], columns: Collection[str] | None
) -> Iterator[PulsarPart | BadBatch]:
    """Decodes the waiting batches together; if a batch cannot be decoded, each half by itself."""
    if not waiting:
        return
    batches = [at_row.batch for at_row in waiting]
    try:
        columns_of_rows = decode_batches(batches, columns)
    except errors.UnsupportedFormat as why:
        if len(waiting) == 1:
            yield BadBatch(waiting[0].row, waiting[0].rows, waiting[0].data, why)
            return
        half = len(waiting) // 2
        yield from _decode_parts(waiting[:half], columns)
        yield from _decode_parts(waiting[half:], columns)
        return
    counts = np.array([at_row.rows for at_row in waiting], np.int64)
    rows_before = np.cumsum(counts) - counts
    begins = np.array([at_row.row for at_row in waiting], np.int64)
    rows_at = np.repeat(begins - rows_before, counts) + np.arange(columns_of_rows.num_rows)
    yield PulsarPart(columns_of_rows, np.repeat(publish_times(batches), counts), rows_at)
