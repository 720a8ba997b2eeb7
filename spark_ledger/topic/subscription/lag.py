"""How far behind a topic's end a position is: rows, bytes and time. Pure.

Always true: rows that are not there (trimmed, in a hole, or chunks of a message that its last one
counts for) are no lag; nothing is negative; what
is counted is what the state at hand holds, without reading a chunk: bytes, and times inside a chunk
that was not read or a live segment, are about.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spark_ledger.topic.log.segment_table import Chunk
from spark_ledger.topic.log.state import UNREAD, PartitionState, Tables, TopicState
from spark_ledger.topic.read.live import EMPTY, LiveEnd
from spark_ledger.topic.subscription.records import Positions

NO_LIVES: Mapping[int, LiveEnd] = {}


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """`position` is the first offset that is not consumed, `end` one past the last row;
    `millis` how long the oldest row beyond the position has been committed, 0 if there is none."""

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
    lives: Mapping[int, LiveEnd] = NO_LIVES,
    read: Tables = UNREAD,
) -> dict[int, PartitionLag]:
    """For each partition that `positions` has and the topic too, by the store's clock `now_ms`.
    `lives` is what is known of live segments; their rows count up to `ends`, where these are given.
    """
    found = {}
    for partition in sorted(positions):
        if partition < len(state.partitions):
            held, live = state.partitions[partition], lives.get(partition, EMPTY)
            seen = held.end_offset + live.rows if ends is None else ends.get(partition, 0)
            end = max(held.end_offset, seen)
            now = max(now_ms, state.commit_ms)
            found[partition] = partition_lag(held, positions[partition], end, live, now, read)
    return found


def partition_lag(
    held: PartitionState,
    position: int,
    end: int,
    live: LiveEnd,
    now_ms: int,
    read: Tables = UNREAD,
) -> PartitionLag:
    """As `topic_lag`, of one partition whose rows end at `end`. Of rows of a live segment bytes and
    times are taken to be spread evenly."""
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
        rows += left - live.rowless.within(end - left, end)
    return PartitionLag(position, max(end, hi), rows, size, millis)


def first_commit_ms(held: PartitionState, offset: int, read: Tables = UNREAD) -> int | None:
    """When the first row at or beyond the offset was committed; None if no commit has one. Within
    a chunk that was not read, and a segment born live, times are taken to rise evenly."""
    for one in held.intervals.between(offset, held.end_offset):
        if one.source is None:
            continue
        table = read.get(one.source) if isinstance(one.source, Chunk) else one.source
        lo = max(offset, one.lo)
        if table is None:
            return one.first_ms + (one.last_ms - one.first_ms) * (lo - one.lo) // (one.hi - one.lo)
        part = table.between(held.number, lo, lo + 1)
        if part.counted[0]:
            first_ms, last_ms = int(part.min_ms[0]), int(part.commits_ms[0])
            passed = (lo - int(part.bases[0])) / int(part.rows[0])
            return min(last_ms, first_ms + int((last_ms - first_ms) * passed))
        _, times = part.commit_times(lo, lo + 1)
        return int(times[0])
    return None


def spark_metrics(lags: Iterable[PartitionLag]) -> dict[str, str]:
    """Of all partitions of a query, under the names that Spark's Kafka source gives them, and the
    time; the text of numbers, as in a query's progress."""
    every = list(lags)
    rows = [lag.rows for lag in every] or [0]
    return {
        "minOffsetsBehindLatest": str(min(rows)),
        "maxOffsetsBehindLatest": str(max(rows)),
        "avgOffsetsBehindLatest": str(sum(rows) / len(rows)),
        "estimatedTotalBytesBehindLatest": str(sum(lag.bytes for lag in every)),
        "millisBehindLatest": str(max((lag.millis for lag in every), default=0)),
    }
