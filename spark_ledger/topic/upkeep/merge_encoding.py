"""Rows to be merged on their way to entries: those of Spark through the encoder that tasks have,
with the time of each, producers' batches as they are (batch_copies.py).

Always true: the rows of a partition stay in their order.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from spark_ledger.topic.entry.arrow_arrays import of_numpy
from spark_ledger.topic.entry.batch_encoder import BatchEncoder, EncodedEntry
from spark_ledger.topic.entry.message_batch import (
    EVENT_TIME,
    HEADERS,
    KEY,
    TYPED_NAMES,
    VALUE,
    column_of,
)
from spark_ledger.topic.entry.routing import Router, Routing
from spark_ledger.topic.log.segment_table import Longs
from spark_ledger.topic.read.row_blocks import Block
from spark_ledger.topic.upkeep.batch_copies import BatchCopies, Copied
from spark_ledger.topic.upkeep.merge_plan import Merge

GATHER_BYTES_MAX = 4 << 20
TIMES_MAX = 4096  # of a partition's rows that wait to be an entry
TIME_PART = 256  # of an entry's bytes there is one time at most,
TIME_PART_SHARED = 128  # or of one that is shared
_BESIDE = frozenset(TYPED_NAMES.values())


class MergeEncoder:
    """Rows and batches on their way to entries; what cannot be in an entry with those before it
    begins another."""

    def __init__(self, merges: Sequence[Merge], entry_bytes_max: int, compression: str) -> None:
        self._merges = merges
        self._entry_bytes_max = entry_bytes_max
        self._compression = compression
        self._encoding: _Encoding | None = None
        self._copies = BatchCopies()

    def add(self, part: Block | Copied) -> Iterator[EncodedEntry]:
        if isinstance(part, Copied):
            yield from self._encoded()
            yield from self._copies.add(part)
            return
        yield from self._copies.flush()
        if self._encoding is None or not self._encoding.takes(part):
            yield from self._encoded()
            self._encoding = _Encoding(part, self._merges, self._entry_bytes_max, self._compression)
        yield from self._encoding.add(part)

    def flush(self) -> Iterator[EncodedEntry]:
        yield from self._encoded()
        yield from self._copies.flush()

    def _encoded(self) -> Iterator[EncodedEntry]:
        encoding, self._encoding = self._encoding, None
        if encoding is not None:
            yield from encoding.flush()


class _Encoding:
    """Rows of one kind on their way to entries, by the encoder that tasks have: it keeps the order
    of a partition's rows, so entries are given the rows' times in that order."""

    def __init__(
        self, first: Block, merges: Sequence[Merge], entry_bytes_max: int, compression: str
    ) -> None:
        self._first = first
        self._several = len(merges) > 1
        self._times: dict[int, Runs] = {}
        self._waiting = 0  # times of rows that are in no entry yet
        self._times_max = min(TIMES_MAX, entry_bytes_max // TIME_PART)
        self._waiting_max = entry_bytes_max // TIME_PART_SHARED
        last = merges[-1].partition
        gathered = GATHER_BYTES_MAX + (sum(one.bytes for one in merges) if self._several else 0)
        self._encoder = BatchEncoder(
            Router(Routing.COLUMN if self._several else Routing.SPARK, last + 1, last),
            lambda: int(first.runs["written_ms"][0]),
            compression=compression,
            entry_bytes_max=entry_bytes_max,
            gather_bytes_max=gathered,
            key_filters=True,
            schema_version=first.schema_version,
        )

    def takes(self, rows: Block) -> bool:
        """Whether the rows may be in an entry with the first."""
        one = self._first
        same = (one.typed, one.schema_version) == (rows.typed, rows.schema_version)
        most = max(map(len, self._times.values()), default=0)
        if most >= self._times_max or self._waiting >= self._waiting_max:
            return False
        return same and (not one.typed or one.record_batch.schema == rows.record_batch.schema)

    def add(self, rows: Block) -> Iterator[EncodedEntry]:
        batch = rows.record_batch
        beside = {name: _beside(batch, name, rows.typed) for name in (KEY, EVENT_TIME, HEADERS)}
        if rows.typed:
            values = batch.select([name for name in batch.schema.names if name not in _BESIDE])
        else:
            values = column_of(batch, VALUE)
        partitions = of_numpy(rows.each("partition")) if self._several else None
        self._note_times(rows)
        return map(
            self._timed,
            self._encoder.add(
                beside[KEY],
                values,
                event_times=beside[EVENT_TIME],
                headers=beside[HEADERS],
                partitions=partitions,
            ),
        )

    def flush(self) -> Iterator[EncodedEntry]:
        return map(self._timed, self._encoder.flush())

    def _note_times(self, rows: Block) -> None:
        times, start = rows.each_ms(), 0
        for partition, count in rows.runs[["partition", "rows"]].tolist():
            of_partition = self._times.setdefault(partition, Runs())
            before = len(of_partition)
            of_partition.add(times[start : start + count])
            self._waiting += len(of_partition) - before
            start += count

    def _timed(self, entry: EncodedEntry) -> EncodedEntry:
        times = []
        for share in entry.shares:
            of_share = self._times[share.partition]
            before = len(of_share)
            times += of_share.taken(share.rows)
            self._waiting += len(of_share) - before
        return replace(entry, written_ms=max(ms for _, ms in times), times=times)


class Runs:
    """So many rows of one time each, taken from the front."""

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._runs = deque(runs)

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, times: Longs) -> None:
        """The rows that come next were written at these times, one for each."""
        firsts = np.flatnonzero(np.diff(times, prepend=times[:1] - 1))
        counts = np.diff(firsts, append=len(times))
        for count, ms in zip(counts.tolist(), times[firsts].tolist(), strict=True):
            if self._runs and self._runs[-1][1] == ms:
                count += self._runs.pop()[0]
            self._runs.append((count, ms))

    def taken(self, rows: int) -> list[tuple[int, int]]:
        """The runs of the next so many rows."""
        found = []
        while rows:
            count, ms = self._runs.popleft()
            if count > rows:
                self._runs.appendleft((count - rows, ms))
            found.append((min(count, rows), ms))
            rows -= found[-1][0]
        return found


def _beside(batch: pa.RecordBatch, name: str, typed: bool) -> pa.Array | None:
    at = batch.schema.get_field_index(TYPED_NAMES[name] if typed else name)
    return None if at < 0 else batch.column(at)
