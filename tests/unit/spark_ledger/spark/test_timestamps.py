"""The rows that were committed since a moment."""

import datetime

import pytest

from spark_ledger.errors import OptionInvalid, OptionMissing
from spark_ledger.spark.options import start_positions
from spark_ledger.spark.options.options import batch_read_options
from spark_ledger.topic.log.actions import Append, OpenLive
from spark_ledger.topic.log.records import Commit
from spark_ledger.topic.log.segment_table import (
    BlobPointer,
    Interval,
    Intervals,
    SegmentTable,
    TableChunk,
)
from spark_ledger.topic.log.segments import Segment
from spark_ledger.topic.log.state import PartitionState, TopicState, apply, empty
from tests.kit.segments_seen import segments_of

APP = {"commit_id": "c", "app_id": "a", "target": "t", "version": 0, "run_id": "r", "intent": "i"}


def committed(*parts: tuple[int, int, int]) -> TopicState:
    """A topic of two partitions after a commit for each (partition, rows, milliseconds)."""
    state = empty("id", 2)
    for number, (partition, rows, millis) in enumerate(parts):
        segment = Segment(partition, 7 + number, 1, ((0, 0),), (rows,), rows, 9, 1, 1)
        state = apply(state, number, Commit(**APP, actions=(Append((segment,)),)), millis)
    return state


def test_a_time_without_a_zone_is_refused_where_the_session_was_given_another():
    zone = datetime.timezone(datetime.timedelta(hours=1))
    taken = start_positions.millis_of("2024-05-01T12:00", zone)
    assert taken is not None
    for same in (None, "+01:00", "Africa/Lagos", "a zone that Spark alone knows"):
        start_positions.check_zone([("2024-05-01T12:00", taken)], same)
    with pytest.raises(OptionInvalid, match=r"taken for 2024-05-01T11:00.* Asia/Kolkata"):
        start_positions.check_zone([("2024-05-01T12:00", taken)], "Asia/Kolkata")


def test_a_query_that_began_in_another_zone_is_told_to_begin_anew():
    taken = start_positions.millis_of("2024-05-01T12:00", datetime.UTC)
    zoneless_times = [("2024-05-01T12:00", taken)]
    for in_checkpoint in (True, False):
        with pytest.raises(OptionInvalid) as raised:
            start_positions.check_zone(zoneless_times, "Asia/Kolkata", in_checkpoint=in_checkpoint)
        assert ("start with a new checkpoint" in str(raised.value)) is in_checkpoint


def test_each_partition_starts_at_its_first_row_of_that_time_or_later():
    state = committed((0, 10, 100), (1, 5, 100), (0, 10, 200))
    assert start_positions.offsets_since(state, {0: 100, 1: 100}) == {0: 0, 1: 0}
    assert start_positions.offsets_since(state, {0: 101, 1: 0}) == {0: 10, 1: 0}


def test_a_partition_without_such_a_row_is_left_out():
    state = committed((0, 10, 100), (1, 5, 100), (0, 10, 200))
    assert start_positions.offsets_since(state, {0: 200, 1: 101}) == {0: 10}
    assert start_positions.offsets_since(empty("id", 1), {0: 0}) == {}


def test_rows_of_a_live_segment_are_newer_than_any_moment():
    opened = Commit(**APP, actions=(OpenLive(0, 9, 1, "owner", 1),))
    state = apply(committed((0, 10, 100)), 1, opened, 300)
    assert start_positions.offsets_since(state, {0: 101, 1: 101}) == {0: 10}


def test_a_moment_within_a_chunk_needs_it_read():
    placed = segments_of(committed((0, 10, 100), (0, 10, 200)).partitions[0])
    chunk = TableChunk(BlobPointer(1, 1, 0, 0, 9, 9), 2)
    kept = PartitionState(0, 0, 20, Intervals([Interval(0, 20, chunk, 18, 100, 200)]))
    state = TopicState("id", (kept,))
    assert start_positions.chunks_for_times(state, {0: 150}) == [chunk]
    assert start_positions.chunks_for_times(state, {0: 201}) == []
    assert start_positions.offsets_since(state, {0: 150}, {chunk: SegmentTable.of(placed)}) == {
        0: 10
    }


@pytest.mark.parametrize(
    "given",
    [
        {"startingTimestamp": "1714557600"},
        {"endingTimestamp": "1"},
        {"startingOffsetsByTimestamp": '{"t":{"0":1714557600}}'},
        {"startingOffsetsByTimestamp": '{"t":{"0":"99999999999"}}'},
    ],
)
def test_a_time_in_seconds_is_refused_with_the_milliseconds_to_give(given):
    with pytest.raises(OptionInvalid, match=r"probably seconds. Give milliseconds \(\d+000\)"):
        batch_read_options({"topic": "t", **given})


@pytest.mark.parametrize("zone", ["Mars", "+25:00", "1", "../x"])
def test_what_is_no_time_zone_is_refused(zone):
    with pytest.raises(OptionInvalid, match=f"timeZone is {zone!r}".replace("+", r"\+")):
        batch_read_options({"topic": "t", "startingTimestamp": "1700000000005", "timeZone": zone})


def test_a_time_zone_without_a_time_is_refused():
    with pytest.raises(OptionMissing, match="timeZone has no effect without it"):
        batch_read_options({"topic": "t", "timeZone": "UTC"})
