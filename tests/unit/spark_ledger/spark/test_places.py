"""Where a read begins, as users write it."""

from datetime import UTC

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_ledger.errors import OffsetsMalformed, OptionInvalid, TopicNameInvalid
from spark_ledger.spark.options import start_positions as places
from spark_ledger.spark.options.start_positions import EARLIEST, AtEdge, AtOffsets, AtTime


def test_words_mean_the_ends_whatever_their_case():
    assert places.parse_offsets(" Earliest ", "x") == AtEdge("x", EARLIEST)


def test_a_topic_is_the_same_however_its_name_is_written():
    given_ = places.parse_offsets('{"persistent://public/default/t":{"0":1}}', "x")
    assert given_ == AtOffsets("x", {"t": {0: 1}}, {})
    with pytest.raises(OffsetsMalformed, match="each once"):
        places.parse_offsets('{"t":{"0":1},"public/default/t":{"0":2}}', "x")
    with pytest.raises(TopicNameInvalid, match="a b"):
        places.parse_offsets('{"a b":{"0":1}}', "x")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("soon", "'soon'"),
        ("[1]", "object"),
        ('{"t":3}', "whole numbers"),
        ('{"t":{"0":1.5,"1":0}}', "1.5"),
        ('{"t":{"x":1}}', "x"),
        ('{"t":{"00":1}}', "00"),
        ('{"t":{"²":1}}', "u00b2"),
        ('{"t":{"0":true,"1":0}}', "true"),
        ('{"t":{"0":-3,"1":0}}', "only -1 and -2"),
        ('{"t":{"0":9223372036854775808}}', "9223372036854775808"),
        ('{"t":{"0":1,"0":2}}', "JSON"),
        ('{"_ids":["t"],"t":{"0":1}}', "ids"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_text_that_is_no_offsets_is_refused_with_what_is_wrong(text, says):
    with pytest.raises(OffsetsMalformed, match=says):
        places.parse_offsets(text, "startingOffsets")


@pytest.mark.parametrize(
    ("text", "millis"),
    [
        ("0", 0),
        ("1714557600000", 1714557600000),
        ("2024-05-01T10:00:00Z", 1714557600000),
        ("2024-05-01T10:00", 1714557600000),
        ("2024-05-01 12:00:00+02:00", 1714557600000),
        ("2024-05-01", 1714521600000),
        ("2024-05-01T10:00:00.0001Z", 1714557600001),
    ],
)
def test_a_moment_is_milliseconds_or_iso_text_in_a_zone_and_parts_of_one_round_up(text, millis):
    assert places.parse_time(text, "startingTimestamp", "error", UTC) == AtTime(
        "startingTimestamp", "error", every_ms=millis
    )


@pytest.mark.parametrize(
    "text",
    ["soon", "-1", "1.5", "2024-13-01", "1969-12-31T23:59:59Z", "253402300800000", "9" * 30],
)
def test_what_is_no_moment_is_refused_with_both_forms(text):
    with pytest.raises(OptionInvalid, match=r"endingTimestamp is .* ISO text"):
        places.parse_time(text, "endingTimestamp", "latest")


@given(st.integers(0, places.MS_MAX))
def test_a_moment_in_a_message_can_be_given_again(millis):
    assert places.millis_of(places.as_text(millis)) == millis


def test_times_by_partition_are_numbers_or_texts():
    times = '{"t":{"0":1700000000000,"1":"1970-01-01T00:00:01Z"}}'
    place = places.parse_times(times, "x", "latest")
    by_partition = {"t": {0: 1_700_000_000_000, 1: 1000}}
    assert place == AtTime("x", "latest", by_partition=by_partition)


@pytest.mark.parametrize(
    "text",
    [
        "no",
        "7",
        '{"t":5}',
        '{"t":{"a":5}}',
        '{"t":{"0":-1}}',
        '{"t":{"0":true}}',
        '{"t":{"0":[]}}',
        '{"t":{"0":5,"0":6}}',
        '{"t":{"0":5},"public/default/t":{"0":6}}',
    ],
)
def test_times_that_are_malformed_are_refused(text):
    with pytest.raises(OptionInvalid, match="startingOffsetsByTimestamp is"):
        places.parse_times(text, "startingOffsetsByTimestamp", "error")


def test_partitions_are_assigned_by_topic():
    assert places.parse_assigned('{"b":[2,0],"public/default/a":[1]}', "assign") == {
        "b": (0, 2),
        "a": (1,),
    }


@pytest.mark.parametrize(
    "text",
    [
        "t",
        "[0]",
        "{}",
        '{"t":[]}',
        '{"t":0}',
        '{"t":[0,0]}',
        '{"t":[-1]}',
        '{"t":["0"]}',
        '{"t":[true]}',
        '{"t":[0],"t":[1]}',
        '{"t":[0],"public/default/t":[1]}',
    ],
)
def test_assignments_that_are_malformed_are_refused(text):
    with pytest.raises(OptionInvalid, match="assign"):
        places.parse_assigned(text, "assign")
