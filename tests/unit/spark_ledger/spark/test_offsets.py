"""Offsets: what Spark stores, what it is compared with, where a read begins."""

import json

import pytest

from spark_ledger.errors import (
    OffsetsMalformed,
    OffsetsNotAssigned,
    OffsetsOutOfRange,
    OffsetsStartAfterEnd,
    PartitionRemoved,
    TimestampNotFound,
    TopicDeleted,
    TopicRecreated,
)
from spark_ledger.spark.options import offsets
from spark_ledger.spark.options.offsets import TopicEnds, TrimmedRange
from spark_ledger.spark.options.start_positions import (
    AtSubscription,
    parse_offsets,
    parse_time,
    parse_times,
)

T = {"t": TopicEnds("id-1", (5, 0), (10, 3))}
ONE_OF_T = {"t": TopicEnds("id-1", (5, 0), (10, 3), assigned=(1,))}


def resolved(text, known=T, **how):
    return offsets.resolve(parse_offsets(text, "startingOffsets"), known, **how)


def test_an_offset_has_sorted_keys_and_the_topics_id():
    known = {"t": TopicEnds("id-1", (0,) * 11, (1,) * 11)}
    offset = offsets.encode(offsets.ends_of(known), known)
    assert json.dumps(offset) == json.dumps(offset, sort_keys=True)
    assert offset["_ids"] == {"t": "id-1"}


def test_what_is_encoded_is_decoded():
    assert offsets.decode(offsets.encode({"t": {0: 7, 1: 2}}, T), T) == {"t": {0: 7, 1: 2}}


def test_a_topic_whose_name_begins_with_an_underscore_is_no_remark():
    known = {"_ids": TopicEnds("id-9", (0,), (4,))}
    offset = offsets.encode({"_ids": {0: 3}}, known)
    assert offset == {
        "_ids": {"persistent://public/default/_ids": "id-9"},
        "persistent://public/default/_ids": {"0": 3},
    }
    assert offsets.decode(offset, known) == {"_ids": {0: 3}}


def test_what_a_progress_adds_to_its_latest_offset_is_passed_over():
    offset = {"_ids": {"t": "id-1"}, "_rowsBehind": 7, "t": {"0": 7, "1": 1}}
    assert offsets.decode(offset, T) == {"t": {0: 7, 1: 1}}


def test_a_partition_that_came_later_starts_at_its_beginning():
    assert offsets.decode({"t": {"0": 7}}, T) == {"t": {0: 7, 1: 0}}


def test_a_topic_that_the_query_reads_since_later_starts_at_its_beginning():
    known = {"t": T["t"], "u": TopicEnds("id-2", (3,), (4,))}
    assert offsets.decode({"t": {"0": 7, "1": 1}}, known) == {"t": {0: 7, 1: 1}, "u": {0: 3}}


def test_a_topic_that_is_not_read_any_more_is_an_error_unless_losses_are_accepted():
    offset = {"gone": {"0": 1}, "t": {"0": 7}}
    with pytest.raises(OffsetsNotAssigned, match=r"'gone', which .* set failOnDataLoss to false"):
        offsets.decode(offset, T)
    with pytest.raises(
        TopicDeleted, match=r"'gone', which was deleted\. Set failOnDataLoss to false"
    ):
        offsets.decode(offset, T, by_pattern=True)
    assert offsets.decode(offset, T, lossy=True) == {"t": {0: 7, 1: 0}}


def test_a_partition_that_is_gone_or_not_read_any_more_is_an_error_unless_losses_are_accepted():
    with pytest.raises(PartitionRemoved, match=r"partition 2 .* does not exist"):
        offsets.decode({"t": {"0": 7, "1": 0, "2": 0}}, T)
    with pytest.raises(PartitionRemoved, match=r"partition 0 .* not read any more"):
        offsets.decode({"t": {"0": 7, "1": 2}}, ONE_OF_T)
    assert offsets.decode({"t": {"0": 7, "1": 2}}, ONE_OF_T, lossy=True) == {"t": {1: 2}}


def test_offsets_of_a_topic_made_anew_are_refused_whatever_losses_are_accepted():
    with pytest.raises(TopicRecreated, match=r"id-0.*id-1"):
        offsets.decode({"_ids": {"t": "id-0"}, "t": {"0": 7, "1": 0}}, T, lossy=True)


def test_a_negative_offset_in_a_checkpoint_is_refused():
    with pytest.raises(OffsetsMalformed, match="negative"):
        offsets.decode({"t": {"0": -2, "1": 0}}, T)


def test_earliest_and_latest_mean_the_ends_of_every_partition_that_is_read():
    assert resolved("earliest") == {"t": {0: 5, 1: 0}}
    assert resolved("Latest") == {"t": {0: 10, 1: 3}}
    assert resolved("latest", ONE_OF_T) == {"t": {1: 3}}


def test_minus_two_and_minus_one_mean_earliest_and_latest():
    assert resolved('{"t":{"0":-2,"1":-1}}') == {"t": {0: 5, 1: 3}}


def test_the_text_of_a_progress_report_is_taken():
    assert resolved('{"_ids":{"t":"id-1"},"t":{"0":6,"1":1}}') == {"t": {0: 6, 1: 1}}


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ('{"u":{"0":1}}', OffsetsNotAssigned, "'u'"),
        ("{}", OffsetsNotAssigned, "'t'"),
        ('{"t":{"0":6}}', OffsetsNotAssigned, "misses partition 1"),
        ('{"t":{"0":6,"1":0,"2":0}}', OffsetsNotAssigned, "no partition 2"),
        ('{"t":{"0":11,"1":0}}', OffsetsOutOfRange, "ends at 10"),
        ('{"t":{"0":4,"1":0}}', OffsetsOutOfRange, "begins at 5"),
        ('{"_ids":{"t":"id-0"},"t":{"0":6,"1":0}}', TopicRecreated, "id-0"),
    ],
)
def test_offsets_that_do_not_fit_the_topics_are_refused_with_what_is_wrong(text, kind, says):
    with pytest.raises(kind, match=says):
        resolved(text)


def test_a_partition_that_is_not_assigned_is_not_named():
    assert resolved('{"t":{"1":2}}', ONE_OF_T) == {"t": {1: 2}}
    with pytest.raises(OffsetsNotAssigned, match=r"names partition 0 .* not read"):
        resolved('{"t":{"0":6,"1":2}}', ONE_OF_T)


def test_an_assigned_partition_that_is_not_there_is_refused():
    known = {"t": TopicEnds("id-1", (0,), (3,), assigned=(0, 4))}
    with pytest.raises(OffsetsNotAssigned, match="no partition 4"):
        resolved("earliest", known)


def test_an_offset_that_is_kept_no_more_is_the_first_kept_one_where_losses_are_accepted():
    assert resolved('{"t":{"0":4,"1":0}}', lossy=True) == {"t": {0: 5, 1: 0}}


def test_what_is_kept_no_more_is_told_with_its_rows():
    text = offsets.rows_trimmed([TrimmedRange("t", 0, 2, 5, 3)])
    assert "[LEDGER_DATA_LOSS.TRIMMED] 3 rows to be read were removed: offsets 2 to 4" in str(text)
    assert text.facts == {"rows": 3}


def test_a_start_after_the_end_is_refused():
    with pytest.raises(OffsetsStartAfterEnd, match="starts at 3, ends at 2"):
        offsets.check_order({"t": {0: 1, 1: 3}}, {"t": {0: 1, 1: 2}})


def test_a_position_past_the_end_is_seen():
    assert offsets.is_within({"t": {0: 10, 1: 3}}, T)
    assert not offsets.is_within({"t": {0: 10, 1: 4}}, T)
    assert not offsets.is_within({"t": {2: 0}}, T)
    with pytest.raises(OffsetsOutOfRange, match="the start is 4 for partition 1"):
        offsets.check_within({"t": {0: 10, 1: 4}}, T, "the start")


def test_a_partition_unknown_to_the_target_does_not_advance():
    assert offsets.earlier_positions({"t": {0: 9, 1: 4}}, {"t": {0: 7}}) == {"t": {0: 7, 1: 0}}
    assert offsets.earlier_positions({"t": {0: 9}, "u": {0: 3}}, {"t": {0: 9}}) == {
        "t": {0: 9},
        "u": {0: 0},
    }


def test_the_further_of_two_positions_is_taken_partition_by_partition():
    assert offsets.later_positions({"t": {0: 9, 1: 4}}, {"t": {0: 10}}) == {"t": {0: 10, 1: 4}}


def test_a_moment_is_looked_up_for_every_partition_and_found_is_where_it_starts():
    at_ms = 1_700_000_000_000
    place = parse_time(str(at_ms), "startingTimestamp", "error")
    assert offsets.times_to_look_up(place, T) == {"t": {0: at_ms, 1: at_ms}}
    assert offsets.times_to_look_up(place, ONE_OF_T) == {"t": {1: at_ms}}
    assert offsets.resolve(place, T, {"t": {0: 7, 1: 0}}) == {"t": {0: 7, 1: 0}}


@pytest.mark.parametrize(("missing", "at"), [("latest", 3), ("earliest", 0)])
def test_a_partition_without_such_a_row_starts_where_the_strategy_says(missing, at):
    place = parse_times('{"t":{"0":0,"1":100000000000}}', "startingOffsetsByTimestamp", missing)
    assert offsets.times_to_look_up(place, T) == {"t": {0: 0, 1: 10**11}}
    assert offsets.resolve(place, T, {"t": {0: 7}}) == {"t": {0: 7, 1: at}}


def test_a_partition_without_such_a_row_is_an_error_that_says_when_and_where():
    place = parse_time("2024-05-01", "startingTimestamp", "error")
    says = r"startingTimestamp is 2024-05-01T00:00:00.000Z \(1714521600000\) for partition 1"
    with pytest.raises(TimestampNotFound, match=says):
        offsets.resolve(place, T, {"t": {0: 7}})


@pytest.mark.parametrize(("text", "told"), [("2024-05-01", True), ("2024-05-01T00:00Z", False)])
def test_a_time_too_late_that_says_no_zone_names_the_option_for_it(text, told):
    place = parse_time(text, "startingTimestamp", "error")
    with pytest.raises(TimestampNotFound) as raised:
        offsets.resolve(place, T, {"t": {0: 7}})
    assert ("option timeZone" in str(raised.value)) is told
    assert str(raised.value).endswith(TimestampNotFound.remedy)


def test_of_a_partition_without_any_row_it_is_said_that_no_time_can_help():
    place = parse_time("2024-05-01", "startingTimestamp", "error")
    empty = {"t": TopicEnds("id", (0, 3), (9, 3))}
    says = r"partition 1 of topic 't', which has no row at all\. Set its start: .*latest"
    with pytest.raises(TimestampNotFound, match=says):
        offsets.resolve(place, empty, {"t": {0: 7}})


def test_times_name_every_partition_that_is_read_and_no_other():
    place = parse_times('{"t":{"0":0}}', "startingOffsetsByTimestamp", "error")
    with pytest.raises(OffsetsNotAssigned, match="misses partition 1"):
        offsets.times_to_look_up(place, T)
    with pytest.raises(OffsetsNotAssigned, match="names partition 0"):
        offsets.times_to_look_up(place, ONE_OF_T)


def test_a_subscription_is_where_its_cursor_stands_and_elsewhere_at_the_beginning():
    place = AtSubscription("startingSubscription", "s")
    assert offsets.resolve(place, T, {"t": {1: 2}}) == {"t": {0: 5, 1: 2}}
    with pytest.raises(OffsetsOutOfRange, match="subscription 's' is 4 for partition 1"):
        offsets.resolve(place, T, {"t": {1: 4}})
