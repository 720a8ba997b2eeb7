"""The lag of a query behind the topics that it reads, after each of its progress events.

    listener = spark_ledger.LagListener()
    spark.streams.addListener(listener)

Always true: a lag is computed from the progress alone, without a request to the cluster. Rows are
counted between `endOffset`, up to which the query has read, and `latestOffset`, the end of the
topics at the beginning of the batch; offsets without a row count. The source reports the bytes of
all rows that remained at the beginning of the batch, and the age of the oldest row. After the batch
fewer rows remain: a lag has these rows' share of the bytes, and the reported age. Bytes and age are
0 if no row remains. The listener keeps the last LAGS_KEPT lags of each query.
"""

import json
import sys
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from spark_ledger.errors import cause_of
from spark_ledger.spark.options.start_positions import IDS, offsets_and_ids
from spark_ledger.spark.spark_version import check_lag

LAGS_KEPT = 1000
QUERIES_KEPT = 100
_ROWS, _BYTES, _MILLIS = "_rowsBehind", "_bytesBehind", "_millisBehind"
"""What LedgerStreamReader adds to the offsets in `latestOffset`."""


@dataclass(frozen=True, slots=True)
class QueryLag:
    """The lag of one source in one progress. The four numbers `...BehindLatest` have the names and
    types of the metrics of Spark's Kafka source: the fewest, most and average rows that a partition
    is behind, and the bytes. `rowsBehind` is the sum of rows, `millisBehind` the time since the
    commit of the oldest row that is not read yet. None: the source reported no number."""

    query_id: str
    name: str | None
    batch_id: int
    timestamp: str
    minOffsetsBehindLatest: int
    maxOffsetsBehindLatest: int
    avgOffsetsBehindLatest: float
    estimatedTotalBytesBehindLatest: int | None
    rowsBehind: int
    millisBehind: int | None

    def __str__(self) -> str:
        size = self.estimatedTotalBytesBehindLatest
        return (
            f"{self.timestamp} {self.name or self.query_id} batch {self.batch_id}:"
            f" {self.rowsBehind} rows behind"
            f" (a partition {self.minOffsetsBehindLatest} to {self.maxOffsetsBehindLatest},"
            f" {self.avgOffsetsBehindLatest:.1f} on average)"
            f"{'' if size is None else f', {size} bytes'}"
            f"{'' if self.millisBehind is None else f', {self.millisBehind} ms'}"
        )


class LagListener(StreamingQueryListener):
    """Collects the lags of all queries of a session that read topics, and prints each lag to `file`
    (None: standard output; `echo=False`: prints nothing). Add the listener with
    `spark.streams.addListener`; any thread may call its methods. Raises NewerSparkNeeded on a Spark
    whose progress events carry no lag."""

    def __init__(self, *, echo: bool = True, file: TextIO | None = None) -> None:
        check_lag()
        self._echo = echo
        self._file = file
        self._lock = threading.Lock()
        self._lags: dict[str, deque[QueryLag]] = {}

    def lags(self, query_id: str | None = None) -> list[QueryLag]:
        """The lags of a query (its id or name), or of all queries (None); the oldest lag of each
        query is first."""
        with self._lock:
            all_lags = [lag for lags in self._lags.values() for lag in lags]
        return [lag for lag in all_lags if query_id in (None, lag.query_id, lag.name)]

    def last(self, query_id: str | None = None) -> QueryLag | None:
        """The newest of `lags(query_id)`; None before the first progress."""
        lags = self.lags(query_id)
        return max(lags, key=lambda lag: lag.timestamp) if lags else None

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Does nothing: there is no progress yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        for lag in lags_of(json.loads(event.progress.json)):
            self._keep(lag)
            if self._echo:
                print(lag, file=self._file or sys.stdout, flush=True)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Does nothing: the last lag still holds."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Print the error of this package that ended the query, if any; the lags stay."""
        cause = None if event.exception is None else cause_of(event.exception)
        if self._echo and cause is not None:
            print(f"query {event.id} failed: {cause}", file=self._file or sys.stdout, flush=True)

    def _keep(self, lag: QueryLag) -> None:
        with self._lock:
            lags = self._lags.pop(lag.query_id, None) or deque(maxlen=LAGS_KEPT)
            lags.append(lag)
            self._lags[lag.query_id] = lags  # at the dict's end; queries are removed from its start
            while len(self._lags) > QUERIES_KEPT:
                del self._lags[next(iter(self._lags))]


def lags_of(progress: Mapping[str, Any]) -> list[QueryLag]:
    """The lag of each source that reads topics, by the parsed JSON of a progress."""
    lags = []
    for source in progress.get("sources", ()):
        latest, end = _object(source.get("latestOffset")), _object(source.get("endOffset"))
        rows = rows_behind(end, latest)
        if not rows:
            continue
        lags.append(
            QueryLag(
                query_id=str(progress["id"]),
                name=progress.get("name"),
                batch_id=int(progress["batchId"]),
                timestamp=str(progress["timestamp"]),
                minOffsetsBehindLatest=min(rows),
                maxOffsetsBehindLatest=max(rows),
                avgOffsetsBehindLatest=sum(rows) / len(rows),
                estimatedTotalBytesBehindLatest=_bytes_behind(latest, sum(rows)),
                rowsBehind=sum(rows),
                millisBehind=0 if not any(rows) else _int(latest.get(_MILLIS)),
            )
        )
    return lags


def rows_behind(end: Mapping[str, Any], latest: Mapping[str, Any]) -> list[int]:
    """For each partition of `latest`, its offset there minus its offset in `end` (0 if `end` lacks
    the partition). Empty if `latest` has no IDS, the ids of topics: the source reads no topics."""
    if IDS not in latest:
        return []
    latest_offsets, _ids = offsets_and_ids(latest, "latestOffset")
    end_offsets, _ids = offsets_and_ids(end, "endOffset")
    return [
        max(0, offset - end_offsets.get(topic, {}).get(partition, 0))
        for topic, offsets in latest_offsets.items()
        for partition, offset in offsets.items()
    ]


def _object(offset: Any) -> Mapping[str, Any]:
    """The offset, which Spark gives as an object or as JSON text; empty if it is neither."""
    if isinstance(offset, str):
        try:
            offset = json.loads(offset)
        except ValueError:
            return {}
    return offset if isinstance(offset, Mapping) else {}


def _bytes_behind(latest: Mapping[str, Any], rows: int) -> int | None:
    """An estimate: the share of the reported bytes for the remaining rows."""
    size = latest.get(_BYTES)
    reported_rows = max(rows, _int(latest.get(_ROWS)) or 0)
    return None if size is None else int(size) * rows // max(1, reported_rows)


def _int(value: Any) -> int | None:
    return None if value is None else int(value)
