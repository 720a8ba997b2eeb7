from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.topic.log import state
from spark_ledger.topic.log.actions import Append
from spark_ledger.topic.log.records import Commit
from tests.kit.segments_seen import end_of, segments_of
from tests.unit.spark_ledger.topic.stage import segment


def commit(*segments):
    return Commit("c", "a", "t", 0, "r", "i", (Append(tuple(segments)),))


def test_offsets_are_dense_in_each_partition_and_follow_the_order_of_commits():
    topic = state.empty("id", 2)

    topic = state.apply(topic, 0, commit(segment(1, 10, 5), segment(2, 7, partition=1)), 100)
    topic = state.apply(topic, 1, commit(segment(3, 4)), 200)

    assert topic.end_offsets() == {0: 19, 1: 7}
    assert [(p.base, end_of(p), p.commit) for p in segments_of(topic.partitions[0])] == [
        (0, 15, 0),
        (15, 19, 1),
    ]
    assert topic.ledgers() == [1, 2, 3]


def test_a_state_stays_as_it_is_when_others_grow_from_it():
    early = state.apply(state.empty("id", 1), 0, commit(segment(1, 10)), 100)

    one = state.apply(early, 1, commit(segment(2, 1)), 100)
    other = state.apply(early, 1, commit(segment(3, 2)), 100)

    ledgers = [
        [p.segment.ledger_id for p in segments_of(s.partitions[0])] for s in (early, one, other)
    ]
    assert ledgers == [[1], [1, 2], [1, 3]]
    assert [s.end_offsets()[0] for s in (early, one, other)] == [10, 11, 12]


def test_only_the_segments_with_a_row_in_the_range_are_found():
    topic = state.empty("id", 1)
    for number in range(5):
        topic = state.apply(topic, number, commit(segment(number, 10)), 100)
    held = topic.partitions[0]

    def ledgers(lo, hi):
        return [placed.segment.ledger_id for placed in segments_of(held, lo, hi)]

    assert ledgers(0, 50) == [0, 1, 2, 3, 4]
    assert ledgers(10, 20) == [1]
    assert ledgers(19, 21) == [1, 2]
    assert ledgers(49, 50) == [4]
    assert ledgers(20, 20) == ledgers(50, 60) == []
    assert held.bytes_between(5, 15) == 1000


def test_a_commit_that_does_not_follow_is_an_error_and_not_a_hole():
    with pytest.raises(errors.UnsupportedFormat, match="commit 1 does not follow commit -1"):
        state.apply(state.empty("id", 1), 1, commit(segment(1, 1)), 100)


def test_a_segment_of_a_partition_that_there_is_not_is_an_error():
    with pytest.raises(errors.UnsupportedFormat, match="partition 3 of 1"):
        state.apply(state.empty("id", 1), 0, commit(segment(1, 1, partition=3)), 100)


def test_commit_time_never_goes_back_and_demands_on_writers_never_go_down():
    topic = state.apply(state.empty("id", 1), 0, replace(commit(segment(1, 1)), min_writer=2), 500)
    topic = state.apply(topic, 1, commit(segment(2, 1)), 400)

    assert topic.commit_ms == segments_of(topic.partitions[0])[1].commit_ms == 500
    assert topic.min_writer == 2
