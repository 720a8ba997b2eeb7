"""What the streaming source answers the driver, with topics that live in the test."""

import asyncio
import dataclasses
import json
from types import SimpleNamespace

import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from spark_ledger.errors import OffsetOfAnotherStore, OffsetsOutOfRange
from spark_ledger.spark.options import offsets
from spark_ledger.spark.options.offsets import TopicEnds
from spark_ledger.spark.options.options import stream_read_options
from spark_ledger.spark.options.start_positions import AtTime
from spark_ledger.spark.read.planning import ReadStart
from spark_ledger.spark.read.source import LedgerStreamReader
from spark_ledger.spark.rows.columns import DEFAULT_SCHEMA
from spark_ledger.topic.subscription.lag import PartitionLag
from tests.kit import curves


class TopicsInATest:
    """`seen` is what memory says, `true` what a sync would bring; `syncs` counts those. `made_by`
    has the tokens of the commits that made the rows before offsets, by partition and offset;
    `checked` are the tokens that were compared."""

    def __init__(self, *ends: int) -> None:
        self.true = self.seen = ends
        self.syncs = 0
        self.heard = False
        self.planned = []
        self.made_by = {}
        self.checked = []
        self.shorter_logs = 0
        self.infos = {}
        self.cluster = SimpleNamespace(client=SimpleNamespace(store=None), run=asyncio.run)
        self._told = {}

    def ends(self):
        if not self._told or self._told["t"].ends != self.seen:
            self._told = {"t": TopicEnds("id-1", (0,) * len(self.seen), self.seen)}
        return self._told

    def catch_up(self):
        heard, self.heard = self.heard, False
        if heard:
            self.seen = self.true
        return heard

    def fresh_ends(self):
        self.syncs += 1
        self.seen = self.true
        return self.ends()

    def start(self, place, confirmed):
        return ReadStart(offsets.resolve(place, confirmed), {})

    def tokens(self, positions):
        known = {
            p: self.made_by[p, at] for p, at in positions["t"].items() if (p, at) in self.made_by
        }
        return {"t": known} if known else {}

    def check_tokens(self, positions, tokens, what):
        self.checked.append(tokens["t"])
        for p, token in tokens["t"].items():
            if self.made_by.get((p, positions["t"][p]), token) != token:
                raise OffsetOfAnotherStore(what)

    def curves(self, start, end, acked):
        return lambda topic, partition, lo, hi: curves.even(lo, hi, 10 * (hi - lo))

    def lags(self, positions, now_ms, acked):
        ends = enumerate(self.seen)
        return [
            PartitionLag(positions["t"][p], end, end - positions["t"][p], 0, 7) for p, end in ends
        ]

    def plan(self, start, end, acked):
        self.planned.append((start, end))
        return ["a task"]

    def values(self, declared):
        return None


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
    assert end == {**offset(5, 7), "_first": start, "_zoneless": []}
    assert polled.latestOffset(end, ReadAllAvailable()) == offset(9, 9)


def test_batch_0_planned_again_after_a_restart_begins_and_ends_where_it_did():
    topics = TopicsInATest(9, 9)
    again = reader(topics, startingOffsets='{"t": {"0": -1, "1": 3}}')
    end = {**offset(5, 7), "_first": offset(5, 1)}
    again.partitions(again.initialOffset(), end)
    (planned,) = topics.planned
    assert planned[:2] == ({"t": {0: 5, 1: 1}}, {"t": {0: 5, 1: 7}})
    assert again.latestOffset(end, ReadAllAvailable()) == offset(9, 9)


def test_batch_0_of_a_query_whose_other_sources_had_rows_has_none_of_this_one_after_a_restart():
    topics = TopicsInATest(9, 9)
    again = reader(topics)
    again.partitions(again.initialOffset(), offset(5, 7))
    (planned,) = topics.planned
    assert planned[:2] == ({"t": {0: 5, 1: 7}}, {"t": {0: 5, 1: 7}})


def test_a_poll_is_not_idle_by_memory_that_a_change_was_heard_to_have_outrun():
    """Spark's processAllAvailable returns at the first idle poll after its call."""
    topics = TopicsInATest(5, 7)
    polled = reader(topics, startingOffsets="earliest")
    end = polled.latestOffset(polled.initialOffset(), ReadAllAvailable())
    assert polled.latestOffset(end, ReadAllAvailable()) is end
    before = topics.syncs
    topics.true, topics.heard = (6, 9), True
    end = polled.latestOffset(end, ReadAllAvailable())
    assert (end, topics.syncs) == (offset(6, 9), before)
    assert polled.latestOffset(end, ReadAllAvailable()) is end


def test_an_offset_carries_the_tokens_of_the_commits_before_it_and_changes_only_when_it_moves():
    topics = TopicsInATest(5, 7)
    topics.made_by = {(0, 5): 50, (1, 7): 70, (0, 6): 60}
    polled = reader(topics, startingOffsets="earliest")
    end = polled.latestOffset(polled.initialOffset(), ReadAllAvailable())
    assert end["_commits"] == {"t": {"0": 50, "1": 70}}
    topics.made_by[1, 7] = 71  # as a merge by software that knows no tokens might have it
    topics.true = topics.seen = (6, 7)
    moved = polled.latestOffset(json.loads(json.dumps(end)), ReadAllAvailable())
    assert moved["_commits"] == {"t": {"0": 60, "1": 70}}
    assert polled.latestOffset(moved, ReadAllAvailable()) is moved


def test_an_offset_of_an_older_store_is_an_error_once_new_rows_have_passed_it():
    topics = TopicsInATest(5, 7)
    topics.made_by = {(0, 5): 50, (1, 7): 70}
    before = reader(topics, startingOffsets="earliest")
    end = before.latestOffset(before.initialOffset(), ReadAllAvailable())
    restored = TopicsInATest(90, 95)
    restored.made_by = {(0, 5): 51, (1, 7): 70}
    for call in (
        lambda: reader(restored).latestOffset(end, ReadAllAvailable()),
        lambda: reader(restored).partitions(offset(0, 0), end),
    ):
        with pytest.raises(OffsetOfAnotherStore):
            call()


def test_offsets_without_tokens_are_taken():
    topics = TopicsInATest(5, 7)
    assert reader(topics).latestOffset(offset(1, 2), ReadAllAvailable()) == offset(5, 7)
    assert topics.checked == []


def test_offsets_that_the_run_gave_are_compared_only_after_a_log_that_went_back():
    topics = TopicsInATest(5, 7)
    topics.made_by = {(0, 5): 50}
    polled = reader(topics, startingOffsets="earliest")
    end = polled.latestOffset(polled.initialOffset(), ReadAllAvailable())
    polled.partitions(polled.initialOffset(), end)
    topics.true = topics.seen = (6, 7)
    polled.latestOffset(end, ReadAllAvailable())
    assert topics.checked == []
    topics.shorter_logs, topics.made_by = 1, {(0, 5): 51}
    with pytest.raises(OffsetOfAnotherStore):
        polled.latestOffset(end, ReadAllAvailable())


def test_an_offset_beyond_the_end_names_the_restored_store_as_a_cause():
    with pytest.raises(OffsetsOutOfRange, match="restored from an older backup"):
        reader(TopicsInATest(5, 7)).latestOffset(offset(6, 7), ReadAllAvailable())


def test_an_idle_poll_returns_the_very_start_without_a_round_trip():
    topics = TopicsInATest(5, 7)
    polled = reader(topics)
    start = offset(5, 7)
    assert polled.latestOffset(start, ReadAllAvailable()) is start
    for _ in range(10):
        assert polled.latestOffset(start, ReadAllAvailable()) is start
    assert topics.syncs == 1  # the first poll of a run


def test_idle_polls_of_a_thousand_partitions_decode_the_same_offset_once(monkeypatch):
    decoded, decode = [], offsets.decode

    def counting(offset, known, **options):
        decoded.append(offset)
        return decode(offset, known, **options)

    monkeypatch.setattr(offsets, "decode", counting)
    polled = reader(TopicsInATest(*[5] * 1_000))
    for _ in range(10):
        start = offset(*[5] * 1_000)
        assert polled.latestOffset(start, ReadAllAvailable()) is start
    assert len(decoded) == 1


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


def test_the_reported_offset_says_how_far_behind_the_query_is():
    polled = reader(TopicsInATest(5, 7))
    polled.latestOffset(offset(1, 7), ReadMaxRows(1))
    said = polled.reportLatestOffset()
    assert {name: said[name] for name in ("_ids", "t")} == offset(5, 7)
    assert (said["_rowsBehind"], said["_bytesBehind"], said["_millisBehind"]) == (4, 0, 7)
    assert said["_metrics"]["maxOffsetsBehindLatest"] == "4"


def test_tasks_are_planned_for_the_range():
    topics = TopicsInATest(5)
    (task,) = reader(topics).partitions(offset(1), offset(5))
    assert isinstance(task, InputPartition)
    assert topics.planned == [({"t": {0: 1}}, {"t": {0: 5}})]


def test_a_partition_that_came_while_the_query_runs_is_read_from_its_beginning():
    topics = TopicsInATest(5)
    polled = reader(topics)
    start = polled.latestOffset(offset(1), ReadAllAvailable())
    assert start == offset(5)
    topics.seen = (5, 3)
    end = polled.latestOffset(start, ReadAllAvailable())
    assert end == offset(5, 3)
    polled.partitions(start, end)
    assert topics.planned == [({"t": {0: 5, 1: 0}}, {"t": {0: 5, 1: 3}})]


def test_limits_on_rows_and_bytes_count_together():
    polled = reader(TopicsInATest(100), maxOffsetsPerTrigger="8", maxBytesPerTrigger="50")
    assert polled.latestOffset(offset(0), polled.getDefaultReadLimit()) == offset(5)


def test_few_rows_are_held_back_after_the_first_batch_until_the_delay_is_over(monkeypatch):
    topics, now_s = TopicsInATest(3), [1000.0]
    monkeypatch.setattr("spark_ledger.spark.read.source.time.monotonic", lambda: now_s[0])
    polled = reader(topics, minOffsetsPerTrigger="10", maxTriggerDelay="5s")
    limit = polled.getDefaultReadLimit()
    start = polled.latestOffset(offset(0), limit)
    assert start == offset(3)
    topics.seen = (6,)
    assert polled.latestOffset(start, limit) is start
    now_s[0] += 5.0
    assert polled.latestOffset(start, limit) == offset(6)


def test_rows_that_are_gone_are_none_of_those_that_are_waited_for(monkeypatch):
    topics, now_s = TopicsInATest(3), [1000.0]
    monkeypatch.setattr("spark_ledger.spark.read.source.time.monotonic", lambda: now_s[0])
    polled = reader(topics, minOffsetsPerTrigger="10")
    limit = polled.getDefaultReadLimit()
    start = polled.latestOffset(offset(0), limit)
    topics.seen = (3000,)
    topics.curves = lambda *_: lambda topic, partition, lo, hi: curves.even(hi - 6, hi)
    assert polled.latestOffset(start, limit) is start


def test_a_query_with_a_subscription_signs_its_offsets_and_keeps_its_sign(monkeypatch):
    told = []

    class Cursor:
        def check(self):
            pass

        def advance(self, positions):
            told.append(positions)

    def opened(cluster, info, name, query_id, run_id, *, start, partitions):
        told.append((name, query_id, start))
        return Cursor()

    monkeypatch.setattr("spark_ledger.spark.read.source.open_cursor", opened)
    topics = TopicsInATest(5)
    topics.cluster, topics.infos = None, {"t": "info"}
    topics.options = stream_read_options({"topic": "t", "subscription": "s"})
    start = {**offset(2), "_query": "q-1"}
    polled = reader(topics, subscription="s")
    end = polled.latestOffset(start, ReadAllAvailable())
    assert end == {**offset(5), "_query": "q-1"}
    polled.commit(end)
    assert polled.latestOffset(end, ReadAllAvailable()) is end
    assert told == [("s", "q-1", {0: 2}), {0: 2}, {0: 5}, {0: 5}]


def test_only_the_tasks_of_batch_0_compare_a_time_that_says_no_zone_with_the_sessions():
    topics = TopicsInATest(5, 7)
    polled = reader(topics)
    first = {**offset(3, 3), "_first": offset(0, 0)}
    polled.options = dataclasses.replace(
        polled.options, starting=AtTime("x", "error", 5, zoneless_times=(("2024-05-01", 5),))
    )
    (planned,) = polled.partitions(offset(0, 0), first)
    assert planned.value.zoneless_times == (("2024-05-01", 5),)
    (planned,) = polled.partitions(first, offset(5, 7))
    assert planned.value.zoneless_times == ()


def test_batch_0_is_compared_by_the_times_it_was_planned_by_whatever_is_said_after_a_restart():
    topics = TopicsInATest(5, 7)
    polled = reader(topics, startingOffsets="earliest")
    time = ("2024-05-01", 1_714_521_600_000)
    start = polled.initialOffset()
    polled.options = dataclasses.replace(
        polled.options, starting=AtTime("x", "earliest", 5, zoneless_times=(time,))
    )
    end = json.loads(json.dumps(polled.latestOffset(start, ReadAllAvailable())))
    again = reader(topics, startingOffsets="earliest")  # timeZone was added
    (planned, *_) = again.partitions(again.initialOffset(), end)
    assert planned.value.zoneless_times == (time,)
    assert again.latestOffset(end, ReadAllAvailable()) is not None
