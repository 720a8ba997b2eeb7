"""What one micro-batch takes of the backlog."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
)

from spark_ledger.spark.options import limits
from spark_ledger.spark.options.limits import (
    NEVER_MS,
    Curve,
    GivenCurve,
    Limits,
    admit,
    curve_of,
)
from spark_ledger.spark.options.offsets import Positions
from spark_ledger.topic.log.actions import Append, Hole
from spark_ledger.topic.log.records import Commit
from spark_ledger.topic.log.segment_table import BlobPointer, Interval, Intervals, TableChunk
from spark_ledger.topic.log.segments import Segment
from spark_ledger.topic.log.state import PartitionState, apply, empty
from spark_ledger.topic.read.acked import AckedRows
from tests.kit import curves as curves_of
from tests.kit.segments_seen import segments_of

APP = {"commit_id": "c", "app_id": "a", "target": "t", "version": 0, "run_id": "r", "intent": "i"}


def segment(rows: int, size: int, ledger_id: int = 7) -> Segment:
    return Segment(0, ledger_id, 1, ((0, 0),), (rows,), rows, size, 1, 1)


def held(*segments: Segment, hole: tuple[int, int] | None = None) -> PartitionState:
    """A partition whose commits have one segment each; commit n was made at n + 1 hours."""
    state = empty("id", 1)
    actions = [Append((one,)) for one in segments]
    for number, action in enumerate([*actions, *([Hole(0, *hole)] if hole else [])]):
        commit = Commit(**APP, actions=(action,))
        state = apply(state, number, commit, (number + 1) * 3_600_000)
    return state.partitions[0]


def taken(backlogs: dict[str, Sequence[Curve]], limits_: Limits) -> dict[str, list[int]]:
    """How many offsets each partition advances."""
    start: Positions = {t: {p: c.lo for p, c in enumerate(cs)} for t, cs in backlogs.items()}
    end: Positions = {t: {p: c.hi for p, c in enumerate(cs)} for t, cs in backlogs.items()}
    at = admit(start, end, limits_, lambda topic, p, lo, hi: backlogs[topic][p])
    return {t: [at[t][p] - start[t][p] for p in start[t]] for t in start}


def even(rows: int, size: int = 0, since_ms: int = 0) -> Curve:
    return curves_of.even(0, rows, size, since_ms)


def test_without_a_limit_everything_is_taken():
    assert taken({"t": [even(5), even(7)]}, Limits(rows_min=100)) == {"t": [5, 7]}


def test_rows_are_shared_by_backlog():
    assert taken({"t": [even(100), even(300)]}, Limits(rows_max=8)) == {"t": [2, 6]}


def test_bytes_are_shared_by_backlog():
    backlog = {"t": [even(100, 100_000), even(3000, 300_000)]}
    (large, small) = taken(backlog, Limits(bytes_max=40_000))["t"]
    assert (large, small) == (10, pytest.approx(300, abs=1))


def test_both_limits_hold_at_once_and_what_one_partition_cannot_use_another_can():
    backlog = {"t": [even(100, 100_000_000), even(1_000_000, 100_000_000)]}
    (large, small) = taken(backlog, Limits(rows_max=1000, bytes_max=10_000_000))["t"]
    assert large * 1_000_000 + small * 100 <= 10_000_000
    assert 998 <= large + small <= 1000  # the rows are used up, though not the bytes
    assert large >= 1


def test_a_row_larger_than_the_limit_on_bytes_is_taken_alone():
    backlog = {"t": [even(10, 10_000_000), even(10, 10_000_000)]}
    assert taken(backlog, Limits(bytes_max=5)) == {"t": [1, 0]}


def test_a_small_backlog_beside_a_large_one_gets_a_row_each_time():
    assert taken({"t": [even(1_000_000), even(1)]}, Limits(rows_max=10))["t"] == [9, 1]


def test_with_fewer_rows_than_partitions_those_that_wait_longest_go_first():
    backlog = {"t": [even(50, since_ms=3), even(50, since_ms=1), even(50, since_ms=2)]}
    assert taken(backlog, Limits(rows_max=2)) == {"t": [0, 1, 1]}


def test_several_topics_share_one_limit():
    assert taken({"a": [even(30)], "b": [even(10)]}, Limits(rows_max=4)) == {"a": [3], "b": [1]}


ROWS_AND_BYTES = st.tuples(st.integers(0, 50), st.integers(0, 5000))


@given(
    st.lists(ROWS_AND_BYTES, min_size=1, max_size=6),
    st.none() | st.integers(1, 200),
    st.none() | st.integers(1, 9000),
)
def test_a_batch_is_within_both_limits_or_one_row_and_uses_one_of_them_up(parts, rows, size):
    curves = [curves_of.even(3, 3 + count, some, p) for p, (count, some) in enumerate(parts)]
    at = taken({"t": curves}, Limits(rows, size))["t"]
    backlog = sum(count for count, _ in parts)
    took_rows = sum(at)
    took_bytes = sum(c.bytes_to(c.lo + n) for c, n in zip(curves, at, strict=True))
    assert all(0 <= n <= count for n, (count, _) in zip(at, parts, strict=True))
    assert took_rows >= min(1, backlog)
    if took_rows > 1:
        assert rows is None or took_rows <= rows
        assert size is None or took_bytes <= size
    if size is None and rows is not None:
        assert took_rows == min(rows, backlog)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 1000)), min_size=1, max_size=8))
def test_a_curve_is_exact_at_the_edges_of_segments(parts):
    partition = held(*(segment(rows, size, 7 + i) for i, (rows, size) in enumerate(parts)))
    curve = curve_of(partition, 0, partition.end_offset)
    at, added = 0, 0
    for rows, size in parts:
        at, added = at + rows, added + size
        assert (curve.rows_to(at), curve.bytes_to(at)) == (at, added)
        assert curve.end_by_bytes(0, added) == at
        assert curve.end_by_rows(0, at) == at
        assert curve.end_by_bytes(0, added - 1) < at


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(0, 2000))
def test_no_further_offset_would_fit(offset, size):
    partition = held(segment(10, 500), segment(30, 90), segment(20, 1200))
    curve = curve_of(partition, 0, 60)
    to = curve.end_by_bytes(offset, size)
    assert offset <= to <= 60
    assert curve.bytes_to(to) - curve.bytes_to(offset) <= size
    assert to == 60 or curve.bytes_to(to + 1) - curve.bytes_to(offset) > size


def test_a_curve_begins_and_ends_inside_of_segments():
    curve = curve_of(held(segment(10, 100), segment(10, 1000)), 5, 15)
    assert (curve.lo, curve.hi) == (5, 15)
    assert [curve.bytes_to(at) for at in (5, 10, 15)] == [0, 50, 550]
    assert curve.since_ms == 3_600_000


def test_a_hole_is_no_rows_and_no_bytes_and_is_passed_with_the_row_before_it():
    curve = curve_of(held(segment(10, 100), segment(10, 100), hole=(5, 15)), 0, 20)
    assert (curve.rows_to(20), curve.bytes_to(20)) == (10, 100)
    assert curve.end_by_rows(0, 5) == 15
    assert taken({"t": [curve]}, Limits(rows_max=6)) == {"t": [16]}


def test_rows_that_were_trimmed_use_nothing_of_a_limit():
    """2,990 unread rows are gone and 100 new ones follow: ten batches of ten rows."""
    kept = held(*[segment(10, 100)] * 309)
    kept.start_offset = 2990
    kept.intervals = kept.intervals.from_offset(2990)
    at, batches = 0, 0
    while at < 3090:
        curve = curve_of(kept, at, 3090)
        at += taken({"t": [curve]}, Limits(rows_max=10))["t"][0]
        batches += 1
    assert batches == 10
    assert curve_of(kept, 0, 2000).rows == 0
    assert taken({"t": [curve_of(kept, 0, 2000)]}, Limits(rows_max=1)) == {"t": [2000]}


def batches_until(is_read, ends, more, given_limits, since_of=lambda p, batch: NEVER_MS, sizes=()):
    """How many batches there are until partition `is_read` has been read to its end; after each of
    them the others have `more` rows more. `sizes`: bytes of a row of each partition."""
    at, ends = [0] * len(ends), list(ends)
    for batch in range(1, 1000):

        def curve(topic, p, lo, hi, batch=batch):
            size = (hi - lo) * (sizes[p] if sizes else 0)
            return curves_of.even(lo, hi, size, since_of(p, batch))

        start, end = {"t": dict(enumerate(at))}, {"t": dict(enumerate(ends))}
        at = list(limits.admit(start, end, given_limits, curve)["t"].values())
        if at[is_read] == ends[is_read]:
            return batch
        ends = [hi + more * (p != is_read) for p, hi in enumerate(ends)]
    raise AssertionError("it waits for ever")


@pytest.mark.parametrize("since_ms", [5, NEVER_MS])
def test_a_partition_of_one_row_comes_soon_beside_large_ones_that_wait_equally_long(since_ms):
    since_of = lambda p, batch: since_ms  # noqa: E731
    assert batches_until(10, [*[300] * 10, 1], 0, Limits(rows_max=1), since_of) < 60
    assert batches_until(3, [100, 100, 100, 1], 50, Limits(rows_max=3), since_of) < 20


def test_a_row_of_a_live_segment_comes_soon_beside_rows_of_commits_that_keep_coming():
    since_of = lambda p, batch: NEVER_MS if p == 1 else batch  # noqa: E731
    assert batches_until(1, [100, 1], 1, Limits(rows_max=1), since_of) < 20


def test_a_row_larger_than_the_limit_on_bytes_comes_soon_beside_a_busy_partition():
    sizes = [100, 2_000_000]
    assert batches_until(1, [1000, 1], 1000, Limits(bytes_max=1_000_000), sizes=sizes) < 20


def test_a_backlog_that_is_only_a_hole_is_passed_at_once():
    curve = curve_of(held(segment(10, 100), hole=(0, 10)), 0, 10)
    assert taken({"t": [curve]}, Limits(rows_max=1)) == {"t": [10]}


def test_a_chunk_that_was_not_read_counts_as_rows_of_equal_size():
    chunk = TableChunk(BlobPointer(1, 1, 0, 0, 9, 9), 100)
    kept = PartitionState(0, 0, 100, Intervals([Interval(0, 100, chunk, 1000, 5, 9)]))
    curve = curve_of(kept, 0, 100)
    assert (curve.end_by_bytes(0, 500), curve.since_ms) == (50, 5)
    table = segments_of(held(segment(10, 900), segment(90, 100)))
    read = {chunk: limits.SegmentTable.of(table)}
    assert curve_of(kept, 0, 100, read).end_by_bytes(0, 900) == 10


def test_rows_of_a_live_segment_follow_those_of_the_commits():
    curve = curve_of(held(segment(10, 100)), 0, 30, live_bytes=400)
    assert (curve.hi, curve.rows_to(30), curve.bytes_to(30)) == (30, 30, 500)
    assert curve_of(held(segment(10, 100)), 20, 30, live_bytes=100).bytes_to(30) == 100


def test_spark_is_told_of_one_limit_and_all_are_obeyed_unless_it_says_none():
    every = Limits(10, 1000, 5)
    assert limits.read_limit(every) == ReadMaxRows(10)
    assert limits.read_limit(Limits(bytes_max=1000)) == ReadMaxBytes(1000)
    assert limits.read_limit(Limits(rows_min=5)) == ReadMinRows(5)
    assert limits.read_limit(Limits()) == ReadAllAvailable()
    assert limits.effective_limits(every, ReadMaxRows(10)) == every
    assert limits.effective_limits(every, ReadAllAvailable()) == Limits()


@pytest.mark.parametrize(
    ("backlog", "since_ms", "waits"),
    [
        (4, None, False),  # the first of a run does not wait
        (4, 0, True),
        (4, 899_999, True),
        (4, 900_000, False),
        (5, 0, False),
        (0, 5, True),
    ],
)
def test_few_rows_are_held_back_until_there_are_enough_or_the_delay_is_over(
    backlog, since_ms, waits
):
    assert limits.holds_back(Limits(rows_min=5), backlog, since_ms) is waits
    assert not limits.holds_back(Limits(rows_max=5), backlog, since_ms)


SEGMENTS = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 900)), min_size=1, max_size=6)


@settings(deadline=None)
@given(SEGMENTS, st.none() | st.tuples(st.integers(0, 90), st.integers(1, 40)), st.data())
def test_rows_that_are_left_out_count_nothing_on_a_curve(parts, hole, data):
    total = sum(rows for rows, _ in parts)
    if hole is not None:
        hole = (hole[0] % total, min(total, hole[0] % total + hole[1]))
    partition = held(*(segment(rows, size) for rows, size in parts), hole=hole)
    lo, hi = sorted(data.draw(st.tuples(st.integers(0, total), st.integers(0, total))))
    acked = data.draw(st.sets(st.integers(0, total - 1), min_size=1))
    base = curve_of(partition, lo, hi)
    rows = AckedRows({0: BitMap64(acked)})
    if not rows.count(0, lo, hi):
        return
    curve = GivenCurve(base, 0, rows)

    def is_row(offset):
        return base.rows_to(offset + 1) > base.rows_to(offset)

    rows_to = {lo: 0}
    for offset in range(lo, hi):
        rows_to[offset + 1] = rows_to[offset] + (is_row(offset) and offset not in acked)
    assert {offset: curve.rows_to(offset) for offset in rows_to} == rows_to
    assert curve.rows == rows_to[hi]
    sizes = [curve.bytes_to(offset) for offset in range(lo, hi + 1)]
    assert sizes == sorted(sizes)
    assert curve.bytes <= base.bytes + len(parts)
    at = data.draw(st.integers(lo, hi))
    count, size = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 900))
    assert curve.end_by_rows(at, count) == max(
        offset for offset in range(at, hi + 1) if rows_to[offset] <= rows_to[at] + count
    )
    assert curve.end_by_bytes(at, size) == max(
        offset
        for offset in range(at, hi + 1)
        if curve.bytes_to(offset) <= curve.bytes_to(at) + size
    )


def test_the_row_that_uses_up_a_limit_takes_the_acknowledged_rows_behind_it_along():
    """Else the next batch has no row."""
    rows = AckedRows({0: BitMap64([*range(18), 19])})
    curve = GivenCurve(curve_of(held(segment(20, 100)), 0, 20), 0, rows)
    (end,) = taken({"t": [curve]}, Limits(rows_max=1))["t"]
    assert end == 20


@settings(deadline=None)
@given(st.integers(20, 200), st.data(), st.integers(1, 50))
def test_a_limit_on_rows_is_used_up_by_rows_that_are_given(total, data, limit):
    acked = data.draw(st.sets(st.integers(0, total - 1), min_size=1))
    rows = AckedRows({0: BitMap64(acked)})
    curve = GivenCurve(curve_of(held(segment(total, 100)), 0, total), 0, rows)
    (at,) = taken({"t": [curve]}, Limits(rows_max=limit))["t"]
    assert rows.unacked_count(0, 0, at) == min(limit, total - len(acked))
    if total - len(acked) <= limit:
        assert at == total
