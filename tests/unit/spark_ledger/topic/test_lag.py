from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.topic.log import state
from spark_ledger.topic.log.actions import Append, Hole, Trim
from spark_ledger.topic.log.records import Commit
from spark_ledger.topic.log.segment_table import BlobPointer, Interval, Intervals, TableChunk
from spark_ledger.topic.read.live import LiveEnd
from spark_ledger.topic.subscription import seek_target
from spark_ledger.topic.subscription.lag import PartitionLag, spark_metrics, topic_lag
from spark_ledger.topic.subscription.seek_target import CommittedSince, End
from tests.unit.spark_ledger.topic.stage import segment


def folded(*steps, partitions=1):
    """The state after commits of (store's time, action)."""
    topic = state.empty("id", partitions)
    for number, (at_ms, action) in enumerate(steps):
        commit = Commit("c", "a", "t", number, "r", "i", (action,))
        topic = state.apply(topic, number, commit, at_ms)
    return topic


def append(ledger_id, *entry_rows, partition=0):
    return Append((segment(ledger_id, *entry_rows, partition=partition),))


TOPIC = folded((1000, append(1, 10)), (2000, append(2, 5)), (4000, append(3, 20)))


def in_a_chunk(topic):
    """The same topic whose partition is in a chunk that was not read, and that chunk's table."""
    held = topic.partitions[0]
    lo, hi = held.start_offset, held.end_offset
    (part,) = held.stretches(lo, hi)
    chunk = TableChunk(BlobPointer(7, 1, 0, 0, 100, 0), len(part.table))
    one = Interval(lo, hi, chunk, held.bytes_between(lo, hi), 1000, 4000)
    moved = replace(held, intervals=Intervals([one]))
    return replace(topic, partitions=(moved,)), {chunk: part.table}


def test_rows_bytes_and_time_behind_are_those_of_the_rows_beyond_the_position():
    assert topic_lag(TOPIC, {0: 12}, 9000) == {0: PartitionLag(12, 35, 23, 2300, 7000)}
    assert topic_lag(TOPIC, {0: 15}, 9000) == {0: PartitionLag(15, 35, 20, 2000, 5000)}


def test_who_has_read_all_is_nothing_behind():
    assert topic_lag(TOPIC, {0: 35}, 9000) == {0: PartitionLag(35, 35, 0, 0, 0)}
    assert topic_lag(state.empty("id", 1), {0: 0}, 9000) == {0: PartitionLag(0, 0, 0, 0, 0)}


def test_rows_that_are_trimmed_or_in_a_hole_are_no_lag():
    topic = folded(
        (1000, append(1, 10)),
        (2000, append(2, 5)),
        (4000, append(3, 20)),
        (5000, Hole(0, 10, 20)),
        (6000, Trim(((0, 4),))),
    )
    assert topic_lag(topic, {0: 0}, 9000)[0].rows == 6 + 15
    assert topic_lag(topic, {0: 12}, 9000) == {0: PartitionLag(12, 35, 15, 1500, 5000)}


def test_rows_of_a_live_segment_count_as_far_as_they_were_seen():
    assert topic_lag(TOPIC, {0: 30}, 9000, ends={0: 42})[0].rows == 12
    assert topic_lag(TOPIC, {0: 40}, 9000, ends={0: 42}) == {0: PartitionLag(40, 42, 2, 0, 0)}


def test_bytes_and_time_of_rows_of_a_live_segment_count_as_if_they_were_spread_evenly():
    lives = {0: LiveEnd(9, 10, 1000, first_ms=6000, last_ms=8000)}
    assert topic_lag(TOPIC, {0: 35}, 9000, live_ends=lives) == {
        0: PartitionLag(35, 45, 10, 1000, 3000)
    }
    assert topic_lag(TOPIC, {0: 40}, 9000, live_ends=lives) == {
        0: PartitionLag(40, 45, 5, 500, 2000)
    }
    assert topic_lag(TOPIC, {0: 25}, 9000, live_ends=lives) == {
        0: PartitionLag(25, 45, 20, 2000, 5000)
    }
    assert topic_lag(TOPIC, {0: 45}, 9000, live_ends=lives) == {0: PartitionLag(45, 45, 0, 0, 0)}
    seen = {0: 43}
    assert topic_lag(TOPIC, {0: 41}, 9000, ends=seen, live_ends=lives)[0].bytes == 200


def test_a_clock_behind_the_stores_makes_no_negative_lag():
    assert topic_lag(TOPIC, {0: 34}, 0)[0].millis == 0
    assert topic_lag(TOPIC, {0: 0}, 0)[0].millis == 3000


def test_a_partition_that_is_not_read_or_not_there_has_no_lag():
    topic = folded((1000, append(1, 10, partition=1)), partitions=2)
    assert list(topic_lag(topic, {1: 0, 7: 0}, 9000)) == [1]


def test_lag_in_a_chunk_that_was_not_read_is_about_and_exact_when_it_was():
    topic, read = in_a_chunk(TOPIC)
    assert topic_lag(topic, {0: 12}, 9000)[0].rows == 23
    assert topic_lag(topic, {0: 12}, 9000)[0].bytes == 2300
    assert topic_lag(topic, {0: 12}, 9000)[0].millis == 9000 - (1000 + 3000 * 12 // 35)
    assert topic_lag(topic, {0: 12}, 9000, tables=read)[0].millis == 7000


def test_the_metrics_have_the_names_that_sparks_kafka_source_gives_them():
    lags = [PartitionLag(0, 10, 10, 1000, 5), PartitionLag(0, 3, 3, 500, 50)]
    assert spark_metrics(lags) == {
        "minOffsetsBehindLatest": "3",
        "maxOffsetsBehindLatest": "10",
        "avgOffsetsBehindLatest": "6.5",
        "estimatedTotalBytesBehindLatest": "1500",
        "millisBehindLatest": "50",
    }
    assert spark_metrics([])["maxOffsetsBehindLatest"] == "0"


@pytest.mark.parametrize(
    ("ms", "offset"),
    [(0, 0), (1000, 0), (1001, 10), (2000, 10), (2001, 15), (4000, 15), (4001, 35)],
)
def test_a_time_is_the_first_row_committed_at_or_after_it(ms, offset):
    chunked, read = in_a_chunk(TOPIC)
    target = CommittedSince(ms)
    assert seek_target.resolve(TOPIC, target) == {0: offset}
    assert seek_target.resolve(chunked, target, read) == {0: offset}
    assert seek_target.chunks_needed(chunked, target) == (list(read) if offset < 35 else [])


def test_earliest_is_the_first_row_kept_and_an_offset_below_it_means_it():
    topic = folded((1000, append(1, 10)), (2000, Trim(((0, 4),))))
    assert seek_target.resolve(topic, End.EARLIEST) == {0: 4}
    assert seek_target.resolve(topic, End.LATEST) == {0: 10}
    assert seek_target.resolve(topic, {0: 2}) == {0: 4}
    assert seek_target.resolve(topic, CommittedSince(0)) == {0: 4}


@pytest.mark.parametrize(
    ("offsets", "error"),
    [
        ({0: 36}, errors.OffsetsOutOfRange),
        ({0: -1}, errors.OffsetsOutOfRange),
        ({1: 0}, errors.OffsetsNotAssigned),
    ],
)
def test_offsets_outside_of_the_topic_are_refused(offsets, error):
    with pytest.raises(error):
        seek_target.resolve(TOPIC, offsets)
