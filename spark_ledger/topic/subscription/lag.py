"""How far behind a topic's end a position is: rows, bytes and time. Pure.

Always true: offsets without a row (trimmed, in a hole, or of a message's earlier chunks) do not
count as lag; no value is negative. The lag is computed from the given state and tables, and nothing
is read. So bytes are estimates, and so are times in a live segment or in a chunk without a table.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from spark_ledger.topic.log.segment_table import TableChunk
from spark_ledger.topic.log.state import NO_TABLES, PartitionState, Tables, TopicState
from spark_ledger.topic.read.live import EMPTY_END, LiveEnd
from spark_ledger.topic.subscription.records import Positions

NO_LIVE_ENDS: Mapping[int, LiveEnd] = {}
NO_ACKED: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """`position` is the first offset that is not consumed, `end` one past the last row; `millis` is
    the time since the commit of the first row at or after the position (0: no such row)."""

    position: int
    end: int
    rows: int
    bytes: int
    millis: int


def topic_lag(
    state: TopicState,
    positions: Positions,
    now_ms: int,
    *,
    ends: Mapping[int, int] | None = None,
    live_ends: Mapping[int, LiveEnd] = NO_LIVE_ENDS,
    tables: Tables = NO_TABLES,
    acked: Mapping[int, int] = NO_ACKED,
) -> dict[int, PartitionLag]:
    """The lag of each partition in `positions` that the topic has; `now_ms` is by the store's
    clock. `live_ends` are the ends of live segments, `ends` the offsets from which on rows of live
    segments do not count. `tables` are those of chunks that the caller read. `acked`: by partition
    the number of rows beyond the position that were acknowledged one by one; these do not count."""
    lags = {}
    for number in sorted(positions):
        if number < len(state.partitions):
            partition, live = state.partitions[number], live_ends.get(number, EMPTY_END)
            live_end = partition.end_offset + live.rows if ends is None else ends.get(number, 0)
            end = max(partition.end_offset, live_end)
            now = max(now_ms, state.commit_ms)
            lag = partition_lag(partition, positions[number], end, live, now, tables)
            lags[number] = replace(lag, rows=max(0, lag.rows - acked.get(number, 0)))
    return lags


def partition_lag(
    partition: PartitionState,
    position: int,
    end: int,
    live: LiveEnd,
    now_ms: int,
    tables: Tables = NO_TABLES,
) -> PartitionLag:
    """The lag of one partition whose rows end at `end`; otherwise as `topic_lag`. The bytes and
    times of a live segment are assumed to be spread evenly over its rows."""
    lo, hi = max(position, partition.start_offset), partition.end_offset
    live_offsets = max(0, end - max(hi, lo))
    size = partition.bytes_between(lo, hi)
    since_ms = first_commit_ms(partition, lo, tables)
    if live_offsets and live.rows:
        size += live.bytes * min(live_offsets, live.rows) // live.rows
        if since_ms is None:
            consumed = max(hi, lo) - hi
            since_ms = live.first_ms + (live.last_ms - live.first_ms) * consumed // live.rows
    millis = 0 if since_ms is None else max(0, now_ms - since_ms)
    rows = partition.rows_between(lo, hi)
    if live_offsets:
        rows += live_offsets - live.rowless.count_between(end - live_offsets, end)
    return PartitionLag(position, max(end, hi), rows, size, millis)


def first_commit_ms(
    partition: PartitionState, offset: int, tables: Tables = NO_TABLES
) -> int | None:
    """When the first row at or after the offset was committed; None if no commit has such a row.
    Times are assumed to rise evenly within a chunk without a table, and within a segment born live,
    whose first row was stored at `min_ms`."""
    for interval in partition.intervals.between(offset, partition.end_offset):
        source = interval.source
        if source is None:
            continue
        table = tables.get(source) if isinstance(source, TableChunk) else source
        lo = max(offset, interval.lo)
        if table is None:
            between_ms = interval.last_ms - interval.first_ms
            rows = interval.hi - interval.lo
            return interval.first_ms + between_ms * (lo - interval.lo) // rows
        part = table.between(partition.number, lo, lo + 1)
        if part.counted[0]:
            first_ms, last_ms = int(part.min_ms[0]), int(part.commits_ms[0])
            passed = (lo - int(part.bases[0])) / int(part.rows[0])
            return min(last_ms, first_ms + int((last_ms - first_ms) * passed))
        _, times = part.commit_times(lo, lo + 1)
        return int(times[0])
    return None


def spark_metrics(lags: Iterable[PartitionLag]) -> dict[str, str]:
    """The lag of all partitions of a query, with the names of Spark's Kafka source, and the lag in
    time; numbers are text, as in a query's progress."""
    every = list(lags)
    rows = [lag.rows for lag in every] or [0]
    return {
        "minOffsetsBehindLatest": str(min(rows)),
        "maxOffsetsBehindLatest": str(max(rows)),
        "avgOffsetsBehindLatest": str(sum(rows) / len(rows)),
        "estimatedTotalBytesBehindLatest": str(sum(lag.bytes for lag in every)),
        "millisBehindLatest": str(max((lag.millis for lag in every), default=0)),
    }
