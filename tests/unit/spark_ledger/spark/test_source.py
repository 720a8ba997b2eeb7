"""What the streaming source answers the driver, with topics that live in the test."""

import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from spark_ledger.errors import OffsetsOutOfRange
from spark_ledger.spark.offsets import TopicEnds
from spark_ledger.spark.options import stream_read_options
from spark_ledger.spark.schema import DEFAULT_SCHEMA
from spark_ledger.spark.source import LedgerStreamReader


class TopicsInATest:
    """`seen` is what memory says, `true` what a sync would bring; `syncs` counts those."""

    def __init__(self, *ends: int) -> None:
        self.true = self.seen = ends
        self.syncs = 0
        self.planned = []

    def ends(self):
        return {"t": TopicEnds("id-1", (0,) * len(self.seen), self.seen)}

    def fresh_ends(self):
        self.syncs += 1
        self.seen = self.true
        return self.ends()

    def plan(self, start, end, min_partitions, fail_on_data_loss):
        self.planned.append((start, end, min_partitions, fail_on_data_loss))
        return ["a task"]


def reader(topics: TopicsInATest, **given: str) -> LedgerStreamReader:
    made = LedgerStreamReader(stream_read_options({"topic": "t", **given}), DEFAULT_SCHEMA)
    made._topics = topics
    return made


def offset(*positions: int) -> dict:
    by_partition = {str(p): at for p, at in enumerate(positions)}
    return {"_ids": {"t": "id-1"}, "t": by_partition}


def test_the_first_offset_is_read_after_a_sync():
    topics = TopicsInATest(5, 7)
    topics.seen = (0, 0)
    assert reader(topics).initialOffset() == offset(5, 7)
    assert topics.syncs == 1


def test_the_first_offset_stays_while_spark_asks_for_it_again():
    topics = TopicsInATest(5, 7)
    polled = reader(topics)
    start = polled.initialOffset()
    topics.true = topics.seen = (9, 9)
    assert polled.initialOffset() == start == offset(5, 7)


def test_a_partition_that_begins_at_latest_has_no_row_in_batch_0_and_all_later_ones_in_batch_1():
    topics = TopicsInATest(5, 7)
    polled = reader(topics, startingOffsets='{"t": {"0": -1, "1": 3}}')
    start = polled.initialOffset()
    topics.true = topics.seen = (9, 9)
    end = polled.latestOffset(start, ReadAllAvailable())
    assert end == offset(5, 7)
    assert polled.latestOffset(end, ReadAllAvailable()) == offset(9, 9)


def test_batch_0_planned_again_after_a_restart_ends_where_the_query_began():
    topics = TopicsInATest(9, 9)
    again = reader(topics, startingOffsets='{"t": {"0": -1, "1": 3}}')
    again.partitions(again.initialOffset(), offset(5, 7))
    (planned,) = topics.planned
    assert planned[:2] == ({"t": {0: 5, 1: 3}}, {"t": {0: 5, 1: 7}})
    assert again.latestOffset(offset(5, 7), ReadAllAvailable()) == offset(9, 9)


def test_an_idle_poll_returns_the_very_start_without_a_round_trip():
    topics = TopicsInATest(5, 7)
    polled = reader(topics)
    start = offset(5, 7)
    assert polled.latestOffset(start, ReadAllAvailable()) is start
    for _ in range(10):
        assert polled.latestOffset(start, ReadAllAvailable()) is start
    assert topics.syncs == 1  # the first poll of a run


def test_new_rows_are_offered_up_to_the_limit_shared_by_backlog():
    polled = reader(TopicsInATest(100, 300), maxOffsetsPerTrigger="8")
    assert polled.getDefaultReadLimit() == ReadMaxRows(8)
    assert polled.latestOffset(offset(0, 0), ReadMaxRows(8)) == offset(2, 6)
    assert polled.latestOffset(offset(0, 0), ReadAllAvailable()) == offset(100, 300)


def test_a_start_ahead_of_memory_is_looked_at_again_before_anything_is_said():
    topics = TopicsInATest(5)
    polled = reader(topics)
    polled.latestOffset(offset(5), ReadAllAvailable())
    topics.true = (9,)  # committed, but memory has not heard of it
    assert polled.latestOffset(offset(7), ReadAllAvailable()) == offset(9)


def test_a_start_past_the_end_is_an_error():
    with pytest.raises(OffsetsOutOfRange, match="is 7 for partition 0"):
        reader(TopicsInATest(5)).latestOffset(offset(7), ReadAllAvailable())


def test_available_now_stops_at_what_was_there_when_it_was_prepared():
    topics = TopicsInATest(5)
    polled = reader(topics)
    polled.prepareForTriggerAvailableNow()
    topics.true = topics.seen = (9, 4)
    assert polled.latestOffset(offset(2), ReadAllAvailable()) == offset(5, 0)
    start = offset(5, 0)
    assert polled.latestOffset(start, ReadAllAvailable()) is start
    ahead = offset(6, 1)
    assert polled.latestOffset(ahead, ReadAllAvailable()) is ahead


def test_the_reported_offset_says_how_many_rows_are_behind():
    polled = reader(TopicsInATest(5, 7))
    polled.latestOffset(offset(1, 7), ReadMaxRows(1))
    assert polled.reportLatestOffset() == {**offset(5, 7), "_rowsBehind": 4}


def test_tasks_are_planned_for_the_range_with_what_the_user_asked_for():
    topics = TopicsInATest(5)
    (task,) = reader(topics, minPartitions="3", failOnDataLoss="false").partitions(
        offset(1), offset(5)
    )
    assert isinstance(task, InputPartition)
    assert topics.planned == [({"t": {0: 1}}, {"t": {0: 5}}, 3, False)]
