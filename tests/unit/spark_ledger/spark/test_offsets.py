"""Offsets: what a user may give, what Spark stores, what one micro-batch takes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_ledger.errors import (
    OffsetsMalformed,
    OffsetsNotAssigned,
    OffsetsOutOfRange,
    OffsetsStartAfterEnd,
    TopicRecreated,
)
from spark_ledger.spark import offsets
from spark_ledger.spark.offsets import TopicEnds

T = {"t": TopicEnds("id-1", (5, 0), (10, 3))}


def test_an_offset_has_sorted_keys_and_the_topics_id():
    offset = offsets.encode({"t": (1,) * 11}, {"t": TopicEnds("id-1", (0,) * 11, (1,) * 11)})
    assert json.dumps(offset) == json.dumps(offset, sort_keys=True)
    assert offset["_ids"] == {"t": "id-1"}


def test_what_is_encoded_is_decoded():
    assert offsets.decode(offsets.encode({"t": (7, 2)}, T), T) == {"t": (7, 2)}


def test_a_partition_that_came_later_starts_at_its_beginning():
    assert offsets.decode({"t": {"0": 7}}, T) == {"t": (7, 0)}


def test_a_topic_that_the_query_reads_since_later_starts_at_its_beginning():
    known = {"t": T["t"], "u": TopicEnds("id-2", (3,), (4,))}
    assert offsets.decode({"t": {"0": 7, "1": 1}}, known) == {"t": (7, 1), "u": (3,)}
    with pytest.raises(OffsetsNotAssigned, match="'gone', which is not read"):
        offsets.decode({"gone": {"0": 1}, "t": {"0": 7}}, T)


def test_offsets_of_a_topic_made_anew_are_refused():
    with pytest.raises(TopicRecreated, match=r"id-0.*id-1"):
        offsets.decode({"_ids": {"t": "id-0"}, "t": {"0": 7, "1": 0}}, T)


def test_earliest_and_latest_mean_the_ends_of_every_partition():
    assert offsets.resolve("earliest", "startingOffsets", T) == {"t": (5, 0)}
    assert offsets.resolve("Latest", "startingOffsets", T) == {"t": (10, 3)}


def test_minus_two_and_minus_one_mean_earliest_and_latest():
    assert offsets.resolve('{"t":{"0":-2,"1":-1}}', "startingOffsets", T) == {"t": (5, 3)}


def test_the_text_of_a_progress_report_is_taken():
    text = '{"_ids":{"t":"id-1"},"t":{"0":6,"1":1}}'
    assert offsets.resolve(text, "startingOffsets", T) == {"t": (6, 1)}


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("soon", OffsetsMalformed, "soon"),
        ("[1]", OffsetsMalformed, "object"),
        ('{"t":3}', OffsetsMalformed, "whole numbers"),
        ('{"t":{"0":1.5,"1":0}}', OffsetsMalformed, "1.5"),
        ('{"t":{"x":1}}', OffsetsMalformed, "x"),
        ('{"t":{"0":true,"1":0}}', OffsetsMalformed, "true"),
        ('{"t":{"0":-3,"1":0}}', OffsetsMalformed, "-3"),
        ('{"u":{"0":1}}', OffsetsNotAssigned, "'u'"),
        ("{}", OffsetsNotAssigned, "'t'"),
        ('{"t":{"0":6}}', OffsetsNotAssigned, "partition 1"),
        ('{"t":{"0":6,"1":0,"2":0}}', OffsetsNotAssigned, "partition 2"),
        ('{"t":{"0":11,"1":0}}', OffsetsOutOfRange, "ends at 10"),
        ('{"t":{"0":4,"1":0}}', OffsetsOutOfRange, "begins at 5"),
        ('{"_ids":{"t":"id-0"},"t":{"0":6,"1":0}}', TopicRecreated, "id-0"),
    ],
)
def test_bad_offsets_are_refused_with_what_is_wrong(text, kind, says):
    with pytest.raises(kind, match=says):
        offsets.resolve(text, "startingOffsets", T)


def test_a_start_after_the_end_is_refused():
    with pytest.raises(OffsetsStartAfterEnd, match="starts at 3, ends at 2"):
        offsets.check_order({"t": (1, 3)}, {"t": (1, 2)})


def test_a_partition_unknown_to_the_target_does_not_advance():
    assert offsets.nearest({"t": (9, 4)}, {"t": (7,)}) == {"t": (7, 0)}


POSITIONS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=6)


@given(POSITIONS, st.integers(1, 200))
def test_a_limit_is_used_up_exactly_and_shared_by_backlog(ranges, rows_max):
    start = {"t": tuple(first for first, _ in ranges)}
    end = {"t": tuple(first + rows for first, rows in ranges)}
    admitted = offsets.admit(start, end, rows_max)
    backlog = offsets.rows_between(start, end)
    assert offsets.rows_between(start, admitted) == min(rows_max, backlog)
    for (first, rows), at in zip(ranges, admitted["t"], strict=True):
        assert first <= at <= first + rows
        assert backlog <= rows_max or abs((at - first) - rows_max * rows / backlog) <= 1
