"""Places told ahead of time: given out once, forgotten in time."""

import pytest

from bookie_server.api.messages import EntryPlace
from spark_ledger.bookies.told_places import Reading, ToldPlaces

ONE, TWO = Reading("b1", 7, b""), Reading("b2", 7, b"")


def places(*sizes):
    return [EntryPlace("/d", f"{number}.log", 0, size) for number, size in enumerate(sizes)]


def test_places_are_given_out_once_in_the_order_of_the_ids():
    told, some = ToldPlaces(), places(5, 5, 5)
    told.remember(ONE, (3, 5, 8), some)
    assert told.take(ONE, range(5, 6), 99) == [some[1]]
    assert told.take(ONE, range(5, 6), 99) == []
    assert told.take(ONE, (3, 8), 99) == [some[0], some[2]]
    assert len(told) == 0


def test_bytes_end_what_is_given_out_after_one_at_least():
    told, some = ToldPlaces(), places(5, 5, 5)
    told.remember(ONE, range(3), some)
    assert told.take(ONE, range(3), 1) == some[:1]
    assert told.take(ONE, range(1, 3), 6) == some[1:]


def test_where_one_is_not_known_none_is_given_out():
    told = ToldPlaces()
    told.remember(ONE, (0, 2), places(5, 5))
    assert told.take(ONE, range(3), 99) == []
    assert told.take(TWO, (0, 2), 99) == [], "of another bookie"
    assert told.take(ONE._replace(token=b"x"), (0, 2), 99) == [], "by another right"
    assert len(told) == 2


def test_what_was_asked_for_meanwhile_is_dropped():
    told = ToldPlaces()
    told.remember(ONE, range(4), places(5, 5, 5, 5))
    told.drop(ONE, range(1, 9))
    assert (len(told), len(told.take(ONE, range(1), 99))) == (1, 1)


def test_a_place_that_is_told_again_counts_once_and_is_the_newer_one():
    told, newer = ToldPlaces(), places(7)
    told.remember(ONE, range(1), places(5))
    told.remember(ONE, range(1), newer)
    assert len(told) == 1
    assert told.take(ONE, range(1), 99) == newer


@pytest.mark.parametrize("again", [False, True])
def test_beyond_the_most_those_of_the_reading_that_asked_longest_ago_go(again):
    told = ToldPlaces(places_max=5)
    told.remember(ONE, range(2), places(5, 5))
    told.remember(TWO, range(2), places(5, 5))
    if again:
        told.remember(ONE, range(2, 3), places(5))
    told.remember(Reading("b3", 7, b""), range(2), places(5, 5))
    gone, kept = (TWO, ONE) if again else (ONE, TWO)
    assert told.take(gone, range(2), 99) == []
    assert len(told.take(kept, range(2), 99)) == 2
    assert len(told) == 2 + again


def test_of_what_is_forgotten_nothing_is_left():
    told = ToldPlaces()
    told.remember(ONE, range(2), places(5, 5))
    told.remember(ONE, range(2, 2), [])
    told.forget(ONE)
    told.forget(ONE)
    assert len(told) == 0
