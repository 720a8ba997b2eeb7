"""Filters that decide what a batch reads."""

import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from spark_ledger.spark.filters import Bounds, bounds_of
from spark_ledger.topic.actions import Append
from spark_ledger.topic.read_plan import plan_read
from spark_ledger.topic.records import Commit
from spark_ledger.topic.segments import Segment
from spark_ledger.topic.state import TopicState, apply, empty

APP = {"commit_id": "c", "app_id": "a", "target": "t", "version": 0, "run_id": "r", "intent": "i"}
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
COMPARED = {
    EqualTo: lambda at, value: at == value,
    EqualNullSafe: lambda at, value: at == value,
    GreaterThan: lambda at, value: at > value,
    GreaterThanOrEqual: lambda at, value: at >= value,
    LessThan: lambda at, value: at < value,
    LessThanOrEqual: lambda at, value: at <= value,
    In: lambda at, value: at in value,
}


def written(*times: tuple[int, int]) -> TopicState:
    """A partition of segments of ten rows, written between these milliseconds each."""
    parts = [
        Segment(0, 7 + i, 1, ((0, 0),), (10,), 10, 100, first, last)
        for i, (first, last) in enumerate(times)
    ]
    return apply(empty("id", 1), 0, Commit(**APP, actions=(Append(tuple(parts)),)), 1)


def read(state: TopicState, bounds: Bounds) -> list[int]:
    """The offsets that are read."""
    end = state.partitions[0].end_offset
    start, stop = bounds.clipped({"t": {0: 0}}, {"t": {0: end}})
    ranges = {p: (at, stop["t"][p]) for p, at in start["t"].items()}
    tasks = bounds.pruned(plan_read(state, ranges))
    stretches = [one for task in tasks for one in task.stretches]
    for one in stretches:
        assert int(one.table.bases[0]) <= one.lo < one.hi <= int(one.table.ends[-1])
    return [at for one in stretches for at in range(one.lo, one.hi)]


def at(millis: float) -> datetime.datetime:
    return EPOCH + datetime.timedelta(milliseconds=millis)


def test_without_filters_everything_is_read():
    assert read(written((1, 2), (3, 4)), bounds_of([])) == list(range(20))


def test_segments_written_at_other_times_are_not_read():
    state = written((100, 200), (300, 400), (150, 350), (500, 600))
    since = bounds_of([GreaterThanOrEqual(("timestamp",), at(350))])
    assert read(state, since) == list(range(10, 40))
    until = bounds_of([LessThan(("timestamp",), at(150.001))])
    assert read(state, until) == [*range(10), *range(20, 30)]
    both = bounds_of([GreaterThan(("timestamp",), at(200)), LessThan(("timestamp",), at(300))])
    assert read(state, both) == list(range(20, 30))


def test_partitions_that_are_not_asked_for_are_not_read():
    start, end = {"t": {0: 1, 1: 2, 2: 3}}, {"t": {0: 9, 1: 9, 2: 9}}
    some = bounds_of([In(("partition",), (0, 2, None)), LessThan(("Partition",), 2)])
    assert some.clipped(start, end) == ({"t": {0: 1}}, {"t": {0: 9}})
    none = bounds_of([In(("partition",), (0,)), In(("partition",), (1,))])
    assert none.clipped(start, end) == ({"t": {}}, {"t": {}})


@pytest.mark.parametrize(
    "one",
    [
        IsNotNull(("offset",)),
        Not(EqualTo(("offset",), 3)),
        EqualTo(("key",), b"3"),
        EqualTo(("offset", "inner"), 3),
        EqualTo(("offset",), 3.0),
        EqualTo(("offset",), True),
        In(("offset",), (1, "2")),
        GreaterThan(("timestamp",), datetime.datetime(2024, 1, 1)),
        EqualNullSafe(("offset",), None),
    ],
)
def test_a_filter_that_is_not_understood_leaves_nothing_out(one):
    assert bounds_of([one]) == Bounds()


VALUES = st.integers(-3, 33)
FILTERS = st.one_of(
    *[st.builds(kind, st.just(("offset",)), VALUES) for kind in COMPARED if kind is not In],
    st.builds(In, st.just(("offset",)), st.lists(VALUES, max_size=3).map(tuple)),
)


@settings(deadline=None)
@given(st.lists(FILTERS, max_size=4))
def test_every_offset_that_passes_is_read_and_none_twice(filters):
    found = read(written((1, 1), (1, 1), (1, 1)), bounds_of(filters))
    passing = [n for n in range(30) if all(COMPARED[type(f)](n, f.value) for f in filters)]
    assert set(passing) <= set(found)
    assert found == sorted(set(found))
    if not any(isinstance(f, In) for f in filters):
        assert found == passing
