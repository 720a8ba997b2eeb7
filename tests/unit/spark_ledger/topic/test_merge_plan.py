"""Which segments are merged: small neighbours of one slot of time, never across a hole."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_ledger.topic.log import state
from spark_ledger.topic.log.actions import Append, Hole, Replace, Trim
from spark_ledger.topic.log.records import Commit
from spark_ledger.topic.log.segment_table import BlobPointer, Interval, Intervals, TableChunk
from spark_ledger.topic.log.state import PartitionState
from spark_ledger.topic.upkeep.merge_plan import (
    QUIET_MS,
    MergeLimits,
    UpkeepLimits,
    merged_up_to,
    plan_merges,
    ranges_to_search,
)
from tests.kit.segments_seen import segments_of
from tests.unit.spark_ledger.topic.stage import segment

LIMITS = MergeLimits(bytes_max=8_000, slot_ms=1_000)  # small is below 1,000 bytes: 9 rows


def after(topic, at_ms, *done):
    return state.apply(topic, topic.next, Commit("c", "a", "t", 0, "r", "i", tuple(done)), at_ms)


def topic_of(*rows, at_ms=0):
    """A commit of one segment of so many rows (100 bytes each), a ledger each."""
    topic = state.empty("id", 1)
    for number, count in enumerate(rows):
        topic = after(topic, at_ms, Append((segment(number, count),)))
    return topic


def planned(topic, lo=0, hi=10**9, limits=LIMITS):
    return [(m.start, m.end) for m in plan_merges(topic.partitions[0], lo, hi, limits)]


def test_small_neighbours_become_one_and_large_ones_stay():
    topic = topic_of(1, 2, 3, 50, 4, 50, 1, 1)

    assert planned(topic) == [(0, 6), (110, 112)]


def test_a_merge_says_what_it_takes_away():
    merge = plan_merges(topic_of(1, 2, 3, at_ms=7).partitions[0], 0, 6, LIMITS)[0]

    assert (merge.partition, merge.segments, merge.bytes) == (0, 3, 600)
    assert (merge.ledgers, merge.commit_times) == ((0, 1, 2), ((6, 7),))


def test_a_merge_says_when_each_row_was_committed_also_of_segments_that_were_merged_before():
    topic = state.empty("id", 1)
    for number, at_ms in enumerate([100, 200, 200, 300]):
        topic = after(topic, at_ms, Append((segment(number, 2),)))
    merge = Replace(0, 0, 4, (segment(9, 4),), 4, (), (((2, 100), (2, 200)),))
    once = after(after(topic, 400, merge), 500, Trim(((0, 1),)))

    (first,) = plan_merges(topic.partitions[0], 0, 8, LIMITS)
    (again,) = plan_merges(once.partitions[0], 0, 8, LIMITS)

    assert first.commit_times == ((2, 100), (4, 200), (2, 300))
    assert (again.start, again.commit_times) == (1, ((1, 100), (4, 200), (2, 300)))


def test_a_merge_is_no_larger_than_it_may_be():
    topic = topic_of(*[9] * 20)

    assert planned(topic) == [(0, 72), (72, 144), (144, 180)]


def test_rows_of_two_slots_of_time_stay_apart_also_when_planned_again():
    topic = state.empty("id", 1)
    for number, at_ms in enumerate([100, 999, 1_000, 1_999, 2_500]):
        topic = after(topic, at_ms, Append((segment(number, 1),)))

    assert planned(topic) == [(0, 2), (2, 4)]


def test_no_merge_goes_across_a_hole_or_below_the_start():
    topic = after(topic_of(2, 2, 2, 2, 2, 2), 0, Hole(0, 4, 6))
    assert planned(topic) == [(0, 4), (6, 12)]

    topic = after(topic, 0, Trim(((0, 1),)))
    assert planned(topic) == [(1, 4), (6, 12)]


def test_of_a_range_only_whole_segments_are_merged():
    topic = topic_of(2, 2, 2, 2, 2)

    assert planned(topic, 1, 9) == [(2, 8)]
    assert planned(topic, 1, 2) == []


def test_inline_segments_are_merged_and_no_ledger_is_named_for_them():
    inline = {"ledger_id": -1, "inline": (b"x",), "entries": ((0, 0),)}
    one = segment(1, 3)
    values = {name: getattr(one, name) for name in one.__slots__}
    topic = topic_of(1)
    topic = after(topic, 0, Append((type(one)(**{**values, **inline}),)))

    assert [m.ledgers for m in plan_merges(topic.partitions[0], 0, 9, LIMITS)] == [(0,)]


@settings(deadline=None)
@given(st.lists(st.integers(1, 14), max_size=40), st.integers(0, 200), st.integers(0, 200))
def test_merges_are_apart_whole_small_and_leave_none_that_could_be_joined(rows, lo, hi):
    topic = topic_of(*rows)
    bounds = set(itertools.accumulate(rows, initial=0))
    merges = plan_merges(topic.partitions[0], lo, hi, LIMITS)

    for merge in merges:
        assert {merge.start, merge.end} <= bounds
        assert lo <= merge.start < merge.end <= hi
        assert merge.bytes == 100 * (merge.end - merge.start) <= LIMITS.bytes_max
        assert merge.segments >= 2
    for one, other in itertools.pairwise(merges):
        assert one.end <= other.start
        joined = one.end == other.start
        assert not joined or one.bytes + other.bytes > LIMITS.bytes_max


# -- merging that nobody asked for ----------------------------------------------------------------

HOUR = MergeLimits(bytes_max=80_000, slot_ms=600_000)  # small is below 10,000 bytes: 99 rows


def upkeep_limits(now_ms, limits=HOUR):
    return replace(limits, upkeep_limits=UpkeepLimits(now_ms, counted_bytes_min=100))


def carried_out(topic, at_ms, merges):
    """The topic once a commit has put a segment in the place of each merge's."""
    done = [
        Replace(
            *(m.partition, m.start, m.end, (segment(1000 + m.start, m.end - m.start),)),
            *(topic.next, (), (m.commit_times,)),
        )
        for m in merges
    ]
    return after(topic, at_ms, *done) if done else topic


def test_what_came_just_now_is_left_alone_and_few_segments_wait_until_their_slot_is_closed():
    topic = topic_of(*[1] * 7, at_ms=1_000)

    assert planned(topic, limits=upkeep_limits(1_000 + QUIET_MS)) == []
    assert planned(topic, limits=upkeep_limits(600_000 + QUIET_MS - 1)) == []
    assert planned(topic, limits=upkeep_limits(600_000 + QUIET_MS)) == [(0, 7)]
    more = after(topic, 2_000, Append((segment(9, 1),)))
    assert planned(more, limits=upkeep_limits(2_000 + QUIET_MS)) == []
    assert planned(more, limits=upkeep_limits(2_001 + QUIET_MS)) == [(0, 8)]


def test_a_segment_that_is_large_beside_the_others_is_not_copied_for_their_sake():
    open_ms, closed_ms = 1 + QUIET_MS, 600_000 + QUIET_MS

    assert planned(topic_of(50, *[1] * 9), limits=upkeep_limits(open_ms)) == [(50, 59)]
    assert planned(topic_of(*[1] * 9, 50, 2, 2), limits=upkeep_limits(closed_ms)) == [
        (0, 9),
        (59, 63),
    ]
    assert planned(topic_of(8, 3, 3, 2), limits=upkeep_limits(closed_ms)) == [(0, 16)]


def test_when_other_merges_become_worth_it_is_known_ahead():
    topic = topic_of(*[1] * 8, at_ms=700_000)
    now_ms, looks = 700_000, []
    while (found := upkeep_limits(now_ms).next_look_ms(700_000)) is not None:
        looks.append(found)
        now_ms = found
    assert looks == [700_001 + QUIET_MS, 1_200_001 + QUIET_MS]
    assert planned(topic, limits=upkeep_limits(looks[0])) == [(0, 8)]
    assert MergeLimits().next_look_ms(700_000) is None


@pytest.mark.parametrize("commits_s", [4, 45])
@pytest.mark.parametrize("rows", [1, 30])
def test_each_row_is_copied_a_few_times_however_long_a_topic_grows(commits_s, rows):
    """A pass once a minute, for an hour and until all is settled; the slots are of ten minutes."""
    topic, copies, floor = state.empty("id", 1), np.zeros(0, np.int64), 0
    for at_s in range(0, 6_000, 1):
        if at_s % commits_s == 0 and at_s < 3_600:
            topic = after(topic, at_s * 1_000, Append((segment(at_s, rows),)))
            copies = np.append(copies, np.zeros(rows, np.int64))
        if at_s % 60 == 59:
            limits = upkeep_limits(at_s * 1_000)
            merges = plan_merges(topic.partitions[0], floor, 10**9, limits)
            for one in merges:
                copies[one.start : one.end] += 1
            topic = carried_out(topic, at_s * 1_000, merges)
            assert not plan_merges(topic.partitions[0], floor, 10**9, limits), "at once again"
            floor = merged_up_to(topic.partitions[0], floor, limits)

    assert copies.max() <= 4
    left = [one.segment.rows for one in segments_of(topic.partitions[0])]
    assert len(left) <= 2 * len(copies) // 100 + 6 * 4
    assert floor == len(copies), "nothing of it will be looked at again"


def test_of_a_checkpoints_chunk_whose_segments_are_not_small_nothing_is_looked_for():
    chunk = TableChunk(BlobPointer(1, 0, 0, 0, 1, 1), segments=10, rows=100)

    def held(bytes_):
        some = [Interval(0, 100, chunk, bytes_, 0, 0), Interval(100, 130, None, 0, 0, 0)]
        return PartitionState(0, 0, 130, Intervals(some))

    assert ranges_to_search(held(10 * 10_000), 0, upkeep_limits(0)) == [(100, 130)]
    assert ranges_to_search(held(10 * 9_999), 0, upkeep_limits(0)) == [(0, 130)]
    assert ranges_to_search(held(10 * 10_000), 0) == [(0, 130)]
    assert ranges_to_search(held(10 * 9_999), 120, upkeep_limits(0)) == [(120, 130)]
