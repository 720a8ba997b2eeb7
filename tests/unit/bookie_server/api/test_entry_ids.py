"""Entry ids that rise: as spans on the wire, as ranges where they are neighbours."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bookie_server.api.messages import as_entry_ids, has_id, ids_from, ids_in, spans_of

RISING = st.sets(st.integers(0, 60), min_size=1).map(sorted)


@given(RISING)
def test_spans_are_neighbours_that_rise_and_hold_just_the_ids(ids):
    spans = spans_of(as_entry_ids(ids))
    assert [e for first, last in spans for e in range(first, last + 1)] == ids
    assert all(first > last + 1 for (_, last), (first, _) in pairwise(spans))
    assert spans == spans_of(ids), "whatever they are kept in"


@given(RISING, st.integers(1, 70))
def test_of_spans_as_many_ids_are_taken_as_are_allowed(ids, count_max):
    assert list(ids_in(spans_of(ids), count_max)) == ids[:count_max]


@given(RISING, st.integers(0, 61))
def test_ids_are_found_and_cut_at_any_id(ids, at):
    assert has_id(as_entry_ids(ids), at) == (at in ids)
    assert list(ids_from(as_entry_ids(ids), at)) == [e for e in ids if e >= at]


@given(RISING)
def test_neighbours_are_a_range(ids):
    assert isinstance(as_entry_ids(ids), range) == (ids[-1] - ids[0] == len(ids) - 1)
    assert list(as_entry_ids(ids)) == ids


def test_a_range_is_never_counted_out():
    whole = range(2**63)
    assert spans_of(whole) == [(0, 2**63 - 1)]
    assert ids_in([(5, 2**63 - 1)], 3) == range(5, 8)
    assert ids_in([(5, 5), (7, 2**63 - 1)], 3) == (5, 7, 8)
    assert ids_from(whole, 2**62) == range(2**62, 2**63)


def test_of_no_ids_there_are_no_spans():
    assert spans_of(()) == spans_of(range(0)) == []
    assert as_entry_ids(()) == ()
