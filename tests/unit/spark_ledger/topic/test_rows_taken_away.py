"""What a state knows of rows that went or moved: commit times, and since when nothing refers."""

import pytest

from spark_ledger import errors
from spark_ledger.topic.log import actions, state
from spark_ledger.topic.log.actions import Append, Hole, Overwrite, Replace, Trim
from spark_ledger.topic.log.records import Commit
from spark_ledger.topic.log.segment_table import SegmentTable
from tests.kit.segments_seen import end_of, segments_of
from tests.unit.spark_ledger.topic.stage import segment

TIMES = (((10, 0), (10, 100)),)


def after(topic, at_ms, *done):
    commit = Commit("c", "a", "t", 0, "r", "i", tuple(done))
    return state.apply(topic, topic.next, commit, at_ms)


def topic_of(*ledgers):
    """Ten rows of each ledger, committed 100 ms apart."""
    topic = state.empty("id", 1)
    for number, ledger in enumerate(ledgers):
        topic = after(topic, 100 * number, Append((segment(ledger, 10),)))
    return topic


def test_rows_that_a_merge_moves_keep_the_time_they_were_committed_at():
    topic = topic_of(1, 2, 3)

    topic = after(topic, 9_000, Replace(0, 0, 20, (segment(9, 20),), 3, (1, 2), TIMES))

    held = topic.partitions[0]
    assert [(end_of(p), p.commit_ms, p.times) for p in segments_of(held)] == [
        (20, 100, ((10, 0), (10, 100))),
        (30, 200, ()),
    ]
    assert [(one.first_ms, one.last_ms) for one in held.intervals] == [(0, 100), (200, 200)]


def test_the_times_of_merged_rows_are_stored_with_their_segment():
    topic = after(topic_of(1, 2, 3), 9_000, Replace(0, 0, 20, (segment(9, 20),), 3, (), TIMES))
    held = SegmentTable.of(segments_of(topic.partitions[0]))

    found = SegmentTable.decode(held.encode())

    assert list(found) == segments_of(topic.partitions[0])
    rows, times = found.part(0, 2).commit_times(5, 25)
    assert (rows.tolist(), times.tolist()) == ([5, 10, 5], [0, 100, 200])
    rows, times = found.part(1, 2).commit_times(20, 21)
    assert (rows.tolist(), times.tolist()) == ([1], [200])


@pytest.mark.parametrize(
    "times",
    [
        (((10, 100),), ((10, 50),)),
        (((10, 0), (10, 100)),),
        (((10, 0),), ((10, 10_000),)),
        (((9, 0),), ((11, 100),)),
    ],
    ids=["falling", "of one segment", "to come", "of other rows"],
)
def test_times_that_rows_cannot_have_are_refused(times):
    pair = segment(9, 10), segment(9, 10, first=1)
    with pytest.raises(errors.UnsupportedFormat, match="times that cannot be theirs"):
        after(topic_of(1, 2), 9_000, Replace(0, 0, 20, pair, 2, (1, 2), times))


def test_a_ledger_that_was_used_again_is_dropped_when_it_last_lost_rows():
    topic = topic_of(1)
    topic = after(topic, 1_000, Overwrite((segment(1, 5, first=1),), 1, (1,)))
    assert topic.dropped == {1: 1_000}

    topic = after(topic, 2_000, Trim(((0, 15),), (1,)))

    assert topic.dropped == {1: 2_000}


@pytest.mark.parametrize(
    "taken",
    [
        Trim(((0, 10),), (1,)),
        Hole(0, 5, 10, (1,)),
        Replace(0, 0, 10, (segment(9, 10),), 2, (1,)),
        Overwrite((segment(9, 5),), 2, (1,)),
    ],
)
def test_a_ledger_that_only_a_checkpoint_names_is_dropped_by_whoever_takes_its_rows(taken):
    """Its author folded every commit, and so saw the rows where the first commit had put them."""
    topic = topic_of(1)
    moved_by_a_checkpoint = topic_of(7)

    topic, moved_by_a_checkpoint = (
        after(one, 1_000, taken) for one in (topic, moved_by_a_checkpoint)
    )

    assert topic.dropped == {1: 1_000}
    assert moved_by_a_checkpoint.dropped == {1: 1_000, 7: 1_000}


def test_a_ledger_that_an_action_takes_rows_of_and_puts_them_back_into_is_not_dropped():
    topic = after(topic_of(1), 1_000, Replace(0, 0, 10, (segment(1, 10, first=1),), 1))

    assert topic.dropped == {}


def test_a_merge_is_read_back_as_it_was_written():
    merge = Replace(0, 0, 20, (segment(9, 20),), 3, (1, 2), TIMES)
    plain = actions.to_json(merge)

    assert actions.from_json(plain) == merge
    del plain["committed"]
    assert actions.from_json(plain).committed == ()
