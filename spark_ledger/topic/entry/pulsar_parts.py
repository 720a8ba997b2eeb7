"""Batches of an entry as columns, in parts of bounded memory. Pure.

Always true: batches are decoded in their order, as many together as decompress to PART_BYTES_MAX
and have PART_ROWS_MAX messages, or one that is larger; a batch without a requested row is not
decoded. A batch that cannot be decoded comes by itself, with the reason, between the rows of the
others.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from spark_ledger import errors
from spark_ledger.topic.entry.message_batch import VALUE, Longs, Whole
from spark_ledger.topic.entry.pulsar_batch import (
    Batch,
    fault_of,
    is_earlier_chunk,
    is_last_chunk,
    parse,
    put_together,
    unpacked_bytes,
)
from spark_ledger.topic.entry.pulsar_columns import decoded, publish_times

PART_BYTES_MAX = 32 << 20
PART_ROWS_MAX = 1 << 20


class PulsarPart(NamedTuple):
    """Rows of an entry: their columns, the time at which each was published by its producer's
    clock, and the number of each among the entry's rows, rising."""

    columns: pa.RecordBatch
    times_ms: Longs
    rows_at: Longs


class BadBatch(NamedTuple):
    """A batch that cannot be decoded; it has `rows` rows of the entry, from row `row` on."""

    row: int
    rows: int
    data: memoryview
    why: errors.UnsupportedFormat


class Chunks(NamedTuple):
    """The chunked messages in an entry, by the row of the entry with their last chunk: the payloads
    of the chunks before it (`whole`), or why these cannot be read (`faults`). A message in neither
    has no row."""

    whole: Whole
    faults: Mapping[int, errors.UnsupportedFormat]


NO_CHUNKS = Chunks({}, {})


class _Placed(NamedTuple):
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
    """The parts of an entry's batches that have a row in `row_range`, from the first up to before
    the second. Each batch comes with its number of messages."""
    value = columns is None or VALUE in columns
    held: list[_Placed] = []
    size = count = row = 0
    for messages, data in batches:
        begin, row = row, row + messages
        if begin >= row_range[1] or row <= row_range[0] or is_earlier_chunk(data):
            continue
        try:
            batch = _batch(data, messages, chunks, begin, value=value)
        except errors.UnsupportedFormat as why:
            yield from _decoded(held, columns)
            held, size, count = [], 0, 0
            yield BadBatch(begin, messages, data, why)
            continue
        if batch is None:
            continue
        more = unpacked_bytes(batch)
        if held and (size + more > PART_BYTES_MAX or count + messages > PART_ROWS_MAX):
            yield from _decoded(held, columns)
            held, size, count = [], 0, 0
        held.append(_Placed(begin, messages, data, batch))
        size, count = size + more, count + messages
    yield from _decoded(held, columns)


def _batch(
    data: memoryview, messages: int, chunks: Chunks, row: int, *, value: bool
) -> Batch | None:
    """The batch, None if it has no row. Raises errors.UnsupportedFormat."""
    if is_last_chunk(data):
        if row in chunks.faults:
            raise chunks.faults[row]
        if row not in chunks.whole:
            return None
        batch = put_together(chunks.whole[row], data, value=value)
    else:
        batch = parse(data)
    if batch.messages != messages:
        raise errors.BadEntry(
            f"a batch of {batch.messages} messages is counted as {messages} in its entry"
        )
    if (fault := fault_of(batch)) is not None:
        raise errors.BadEntry(fault)
    return batch


def _decoded(
    held: list[_Placed], columns: Collection[str] | None
) -> Iterator[PulsarPart | BadBatch]:
    """The held batches decoded together, or by halves if one of them cannot be decoded."""
    if not held:
        return
    batches = [placed.batch for placed in held]
    try:
        made = decoded(batches, columns)
    except errors.UnsupportedFormat as why:
        if len(held) == 1:
            yield BadBatch(held[0].row, held[0].rows, held[0].data, why)
            return
        half = len(held) // 2
        yield from _decoded(held[:half], columns)
        yield from _decoded(held[half:], columns)
        return
    counts = np.array([placed.rows for placed in held], np.int64)
    before = np.cumsum(counts) - counts
    begins = np.array([placed.row for placed in held], np.int64)
    rows_at = np.repeat(begins - before, counts) + np.arange(made.num_rows)
    yield PulsarPart(made, np.repeat(publish_times(batches), counts), rows_at)
