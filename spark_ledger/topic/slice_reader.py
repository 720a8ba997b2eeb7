"""Reading a planned slice: entries fetched ahead, checked, cut to the rows asked for.

Always true: rows come in order of offsets, each once; an entry whose header does not say what the
plan says (partition, first row, rows) is an error, never rows. A slice is read up to its planned
end or raises: a negative is never an end.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pyarrow as pa

from spark_ledger.ledger.client import LedgerStore
from spark_ledger.topic.read_plan import ReadSlice, ReadTask


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of a partition: columns key and value (binary); the first has offset
    `offset`; all were written at `written_ms` (the row's timestamp, as Kafka's CreateTime)."""

    partition: int
    offset: int
    written_ms: int
    record_batch: pa.RecordBatch


def read_slice(ledgers: LedgerStore, planned: ReadSlice) -> AsyncIterator[Rows]:
    """The slice's rows in order. Raises errors.NoSuchLedger (fold again: replaced or trimmed),
    errors.RowsLost, errors.DataUnavailable, errors.DigestMismatch, errors.UnsupportedFormat."""
    raise NotImplementedError


def read_task(ledgers: LedgerStore, task: ReadTask) -> AsyncIterator[Rows]:
    """The rows of all slices of a task, in order. Raises as read_slice."""
    raise NotImplementedError
