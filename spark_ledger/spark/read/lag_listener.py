"""How far a query is behind the topics it reads, after each of its progresses.

    listener = spark_ledger.LagListener()
    spark.streams.addListener(listener)

Always true: a lag is made of the progress alone, without a request to the cluster. Rows are counted
between `endOffset`, up to which the query has read, and `latestOffset`, the end of the topics at
the beginning of the batch; holes count. The source reports bytes and time at the beginning of the
batch: a lag has the share of the bytes for the remaining rows, and the time unchanged, both 0 if no
row remains. The last LAGS_KEPT lags of each query are kept.
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
from spark_ledger.spark.options.start_positions import IDS, split
from spark_ledger.spark.spark_version import check_lag

LAGS_KEPT = 1000
QUERIES_KEPT = 100
_ROWS, _BYTES, _MILLIS = "_rowsBehind", "_bytesBehind", "_millisBehind"


@dataclass(frozen=True, slots=True)
class QueryLag:
    """The lag of one source in one progress. The first four numbers have the names and types of the
    metrics of Spark's Kafka source, over all partitions; `rowsBehind` is their sum, `millisBehind`
    the time since the commit of the oldest row that is not read yet. None: unknown."""

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
    """Collects the lags of all queries of a session that read topics, and prints each to `file`
    (None: standard output; `echo=False`: nowhere). Add it with `spark.streams.addListener`; any
    thread may call it. Raises NewerSparkNeeded on a Spark whose progress events carry no lag."""

    def __init__(self, *, echo: bool = True, file: TextIO | None = None) -> None:
        check_lag()
        self._echo = echo
        self._file = file
        self._lock = threading.Lock()
        self._lags: dict[str, deque[QueryLag]] = {}

    def lags(self, query_id: str | None = None) -> list[QueryLag]:
        """The lags received, oldest first: of one query, by its id or name, or (None) of all."""
        with self._lock:
            every = [lag for lags in self._lags.values() for lag in lags]
        return [lag for lag in every if query_id in (None, lag.query_id, lag.name)]

    def last(self, query_id: str | None = None) -> QueryLag | None:
        """The newest of `lags(query_id)`; None before the first progress."""
        heard = self.lags(query_id)
        return max(heard, key=lambda lag: lag.timestamp) if heard else None

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
        """Its lags stay. If an error of ours ended the query, print it."""
        why = None if event.exception is None else cause_of(event.exception)
        if self._echo and why is not None:
            print(f"query {event.id} failed: {why}", file=self._file or sys.stdout, flush=True)

    def _keep(self, lag: QueryLag) -> None:
        with self._lock:
            lags = self._lags.pop(lag.query_id, None) or deque(maxlen=LAGS_KEPT)
            lags.append(lag)
            self._lags[lag.query_id] = lags  # at the end: the least recently seen query goes first
            while len(self._lags) > QUERIES_KEPT:
                del self._lags[next(iter(self._lags))]


def lags_of(progress: Mapping[str, Any]) -> list[QueryLag]:
    """The lag of each source of a progress (its JSON, parsed) that reads topics."""
    lags = []
    for source in progress.get("sources", ()):
        latest, end = _object(source.get("latestOffset")), _object(source.get("endOffset"))
        behind = rows_behind(end, latest)
        if not behind:
            continue
        lags.append(
            QueryLag(
                query_id=str(progress["id"]),
                name=progress.get("name"),
                batch_id=int(progress["batchId"]),
                timestamp=str(progress["timestamp"]),
                minOffsetsBehindLatest=min(behind),
                maxOffsetsBehindLatest=max(behind),
                avgOffsetsBehindLatest=sum(behind) / len(behind),
                estimatedTotalBytesBehindLatest=_left(latest.get(_BYTES), latest, sum(behind)),
                rowsBehind=sum(behind),
                millisBehind=0 if not any(behind) else _whole(latest.get(_MILLIS)),
            )
        )
    return lags


def rows_behind(end: Mapping[str, Any], latest: Mapping[str, Any]) -> list[int]:
    """For each partition of `latest`, an offset of a source that reads topics, the number of
    offsets that `end` is below it; empty for any other source. A partition that `end` lacks counts
    whole."""
    if IDS not in latest:
        return []
    newest, _ = split(latest, "latestOffset")
    read, _ = split(end, "endOffset")
    return [
        max(0, offset - read.get(topic, {}).get(partition, 0))
        for topic, offsets in newest.items()
        for partition, offset in offsets.items()
    ]


def _object(offset: Any) -> Mapping[str, Any]:
    """An offset of a progress: Spark gives objects, or their text."""
    if isinstance(offset, str):
        try:
            offset = json.loads(offset)
        except ValueError:
            return {}
    return offset if isinstance(offset, Mapping) else {}


def _left(size: Any, latest: Mapping[str, Any], rows: int) -> int | None:
    """An estimate of the bytes of the remaining rows, out of `size` for all."""
    before = max(rows, _whole(latest.get(_ROWS)) or 0)
    return None if size is None else int(size) * rows // max(1, before)


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)
