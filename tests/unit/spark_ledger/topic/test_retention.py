"""Which rows a topic lets go: whole segments, by commit time and size, never held ones."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_ledger.topic.log import state
from spark_ledger.topic.log.actions import Append, Hole
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.records import Commit
from spark_ledger.topic.log.segment_table import (
    BlobPointer,
    Interval,
    Intervals,
    SegmentTable,
    TableChunk,
)
from spark_ledger.topic.upkeep import retention
from tests.unit.spark_ledger.topic.stage import segment

FOR_EVER = TopicPolicies()


def after(topic, at_ms, *done):
    return state.apply(topic, topic.next, Commit("c", "a", "t", 0, "r", "i", tuple(done)), at_ms)


def topic_of(times, partitions=1):
    """For each time a commit of a segment of 10 rows (1,000 bytes) of its own ledger to each
    partition."""
    topic = state.empty("id", partitions)
    for number, at_ms in enumerate(times):
        some = tuple(segment(100 * p + number, 10, partition=p) for p in range(partitions))
        topic = after(topic, at_ms, Append(some))
    return topic


def kept(**limits):
    return replace(FOR_EVER, **limits)


def in_one_chunk(topic):
    """The same topic with all segments of a partition in a chunk; and the chunks as read."""
    read, partitions = {}, []
    for held in topic.partitions:
        table = SegmentTable.join([one.source for one in held.intervals])
        chunk = TableChunk(BlobPointer(9_000 + held.number, 0, 0, 0, 1, 0), len(table))
        read[chunk] = table
        every = list(held.intervals)
        whole = Interval(
            *(held.start_offset, held.end_offset, chunk, sum(one.bytes for one in every)),
            *(every[0].first_ms, every[-1].last_ms),
        )
        partitions.append(replace(held, intervals=Intervals([whole])))
    return replace(topic, partitions=tuple(partitions)), read


def test_a_topic_without_limits_keeps_all():
    assert retention.trim_points(topic_of([0, 1]), FOR_EVER, 10**15) == {}


def test_rows_committed_longer_ago_than_the_limit_go():
    topic = topic_of([0, 100, 200, 300], partitions=2)

    assert retention.trim_points(topic, kept(retention_ms=100), 300) == {0: 20, 1: 20}
    assert retention.trim_points(topic, kept(retention_ms=300), 300) == {}
    assert retention.trim_points(topic, kept(retention_ms=10), 900) == {0: 40, 1: 40}


@pytest.mark.parametrize(
    ("bytes_max", "point"), [(1, 30), (1000, 30), (1001, 20), (2500, 10), (4000, None)]
)
def test_of_each_partition_at_least_the_bytes_that_are_to_be_kept_stay(bytes_max, point):
    topic = topic_of([0] * 4, partitions=2)
    points = {} if point is None else {0: point, 1: point}

    assert retention.trim_points(topic, kept(retention_bytes=bytes_max), 0) == points


def test_what_either_limit_lets_go_goes():
    topic = topic_of([0, 100, 200, 300])
    both = kept(retention_ms=150, retention_bytes=1000)

    assert retention.trim_points(topic, both, 300) == {0: 30}


@pytest.mark.parametrize(("hold", "point"), [(0, None), (9, None), (10, 10), (25, 20), (99, 40)])
def test_nothing_that_a_subscription_still_needs_goes(hold, point):
    topic = topic_of([0] * 4)
    points = {} if point is None else {0: point}

    assert retention.trim_points(topic, kept(retention_ms=1), 99, {0: hold}) == points


def test_commit_times_count_and_not_what_a_writers_clock_said():
    old_clock = replace(segment(1, 10), min_ms=0, max_ms=0, event_min_ms=0, event_max_ms=0)
    topic = after(state.empty("id", 1), 5_000, Append((old_clock,)))

    assert retention.trim_points(topic, kept(retention_ms=1_000), 6_000) == {}


def test_a_hole_that_was_made_lately_does_not_keep_old_rows_behind_it():
    topic = after(topic_of([0, 100, 200]), 900, Hole(0, 10, 20))

    assert retention.trim_points(topic, kept(retention_ms=100), 1_000) == {0: 30}


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=12),
    st.integers(1, 400),
    st.integers(1, 12_000),
    st.integers(0, 120),
)
def test_segments_in_chunks_and_in_memory_are_let_go_alike(steps, age_ms, bytes_max, hold):
    times = [sum(steps[: i + 1]) for i in range(len(steps))]
    topic = topic_of(times)
    stored, read = in_one_chunk(topic)
    limits = kept(retention_ms=age_ms, retention_bytes=bytes_max)
    now_ms, holds = times[-1] + 20, {0: hold}

    needed = retention.chunks_needed(stored, limits, now_ms, holds)
    points = retention.trim_points(
        stored, limits, now_ms, holds, {chunk: read[chunk] for chunk in needed}
    )

    assert points == retention.trim_points(topic, limits, now_ms, holds)
    left = topic.partitions[0].bytes_between(points.get(0, 0), len(times) * 10)
    old = [time < now_ms - age_ms for time in times]
    assert all(old[: points.get(0, 0) // 10]) or left >= bytes_max


ACKNOWLEDGED = replace(FOR_EVER, retention="acknowledged")


def test_what_every_subscription_passed_goes_where_there_is_one_subscription_at_least():
    topic = topic_of([0, 100, 200], partitions=3)
    holds = {0: 25, 1: 30}

    assert retention.trim_points(topic, ACKNOWLEDGED, 200, holds) == {0: 20, 1: 30}
    assert retention.trim_points(topic, FOR_EVER, 200, holds) == {}
    chunked, read = in_one_chunk(topic)
    assert retention.trim_points(chunked, ACKNOWLEDGED, 200, holds, read) == {0: 20, 1: 30}


def test_acknowledged_rows_stay_as_long_as_the_limits_say():
    topic = topic_of([0, 100, 200])
    limits = replace(ACKNOWLEDGED, retention_ms=150)

    assert retention.trim_points(topic, limits, 200, {0: 30}) == {0: 10}
