"""How far behind a topic's end a position is: rows, bytes and time. Pure.

Always true: offsets without a row (trimmed, in a hole, or of a message's earlier chunks) do not
count as lag; no value is negative. The lag is computed from the given state and reads no chunk, so
bytes, and times inside a live segment or a chunk that was not read, are estimates.
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
    the time since the commit of the first row at or after the position, 0 if there is no such row.
    """

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
    read: Tables = NO_TABLES,
    acked: Mapping[int, int] = NO_ACKED,
) -> dict[int, PartitionLag]:
    """The lag of each partition in `positions` that the topic has; `now_ms` is by the store's
    clock. `live_ends` are the ends of live segments; with `ends`, their rows count only up to these
    offsets. `acked`: by partition the number of rows beyond the position that were acknowledged one
    by one; they do not count as lag."""
    lags = {}
    for partition in sorted(positions):
        if partition < len(state.partitions):
            held, live = state.partitions[partition], live_ends.get(partition, EMPTY_END)
            seen = held.end_offset + live.rows if ends is None else ends.get(partition, 0)
            end = max(held.end_offset, seen)
            now = max(now_ms, state.commit_ms)
            lag = partition_lag(held, positions[partition], end, live, now, read)
            lags[partition] = replace(lag, rows=max(0, lag.rows - acked.get(partition, 0)))
    return lags


def partition_lag(
    held: PartitionState,
    position: int,
    end: int,
    live: LiveEnd,
    now_ms: int,
    read: Tables = NO_TABLES,
) -> PartitionLag:
    """The lag of one partition whose rows end at `end`; otherwise as `topic_lag`. The bytes and
    times of a live segment are assumed to be spread evenly over its rows."""
    lo, hi = max(position, held.start_offset), held.end_offset
    left = max(0, end - max(hi, lo))
    size = held.bytes_between(lo, hi)
    since_ms = first_commit_ms(held, lo, read)
    if left and live.rows:
        size += live.bytes * min(left, live.rows) // live.rows
        if since_ms is None:
            passed = max(hi, lo) - hi
            since_ms = live.first_ms + (live.last_ms - live.first_ms) * passed // live.rows
    millis = 0 if since_ms is None else max(0, now_ms - since_ms)
    rows = held.rows_between(lo, hi)
    if left:
        rows += left - live.rowless.count_between(end - left, end)
    return PartitionLag(position, max(end, hi), rows, size, millis)


def first_commit_ms(held: PartitionState, offset: int, read: Tables = NO_TABLES) -> int | None:
    """When the first row at or after the offset was committed; None if no commit has such a row.
    Within a chunk that was not read, and within a segment born live, times are assumed to rise
    evenly."""
    for interval in held.intervals.between(offset, held.end_offset):
        source = interval.source
        if source is None:
            continue
        table = read.get(source) if isinstance(source, TableChunk) else source
        lo = max(offset, interval.lo)
        if table is None:
            between_ms = interval.last_ms - interval.first_ms
            rows = interval.hi - interval.lo
            return interval.first_ms + between_ms * (lo - interval.lo) // rows
        part = table.between(held.number, lo, lo + 1)
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
