"""A partition's rows of an entry, encoded and decoded at once: for tests of single entries. The
product encodes header and body apart, and decodes an entry for all partitions (slice_reader.py)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from bookie_server.api.entry import Buffer
from spark_ledger import errors
from spark_ledger.topic.entry.message_batch import (
    Header,
    Longs,
    Share,
    TimeRuns,
    decode_body_and_times,
    decode_header,
    encode_body,
    encode_header,
)


@dataclass(frozen=True, slots=True)
class MessageBatch:
    """A partition's rows of an entry, the first of which is row `first_row` of the partition's
    segment. `record_batch` has what the entry has of the columns asked for, and its number of
    rows even without one; see `column_of`. `times_ms` is when each row was written, None where all
    were at `written_ms`."""

    partition: int
    first_row: int
    written_ms: int
    record_batch: pa.RecordBatch
    typed: bool = False
    schema_version: int = 0
    times_ms: Longs | None = None

    @property
    def rows(self) -> int:
        return int(self.record_batch.num_rows)


def encode_batch(
    record_batch: pa.RecordBatch,
    shares: Sequence[Share],
    *,
    written_ms: int,
    compression: str = "none",
    typed: bool = False,
    schema_version: int = 0,
    times: TimeRuns = (),
) -> list[Buffer]:
    """The payload's buffers, in order; their concatenation is the payload."""
    header = encode_header(
        shares, written_ms, typed=typed, schema_version=schema_version, times=times
    )
    return [header, *encode_body(record_batch, compression)]


def decode_batch(
    payload: Buffer, *, partition: int | None = None, columns: Collection[str] | None = None
) -> MessageBatch:
    """The batch in an entry's payload, of a shared one the rows of `partition`. Uncompressed
    columns are views of it, not copies; columns that are not among `columns` (None: all) are not
    even decompressed.

    Raises errors.UnsupportedFormat for what decode_header refuses, a shared entry without rows of
    the partition, a header that does not fit the rows, a damaged stream or one with other types.
    """
    header = decode_header(payload)
    at, share = _share_of(header, partition)
    record_batch, _ = decode_body_and_times(payload, header, columns)
    if len(header.index) > 1:
        record_batch = record_batch.slice(at, share.rows)
    times = header.each_ms()
    return MessageBatch(
        share.partition,
        share.first_row,
        header.written_ms,
        record_batch,
        header.typed,
        header.schema_version,
        None if times is None else times[at : at + share.rows],
    )


def _share_of(header: Header, partition: int | None) -> tuple[int, Share]:
    """The stream's row that the partition's rows begin with, and their share."""
    index = header.index
    if len(header.index) == 1:
        return 0, Share._make(index[0].item())
    if partition is None:
        raise ValueError(f"the rows of which of {len(index)} partitions?")
    at = int(np.searchsorted(index["partition"], partition))
    if at == len(index) or index["partition"][at] != partition:
        raise errors.UnsupportedFormat(
            f"an entry with rows of {len(index)} partitions has none of partition {partition}"
        )
    return int(index["rows"][:at].sum(dtype=np.int64)), Share._make(index[at].item())
