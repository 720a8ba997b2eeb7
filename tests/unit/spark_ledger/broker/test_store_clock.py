"""How far this machine's clock is from the metadata store's: what an answer that took long says."""

import asyncio

import pytest

from spark_ledger.broker import store_contact
from spark_ledger.broker.store_contact import CLOCK_TRIES, StoreClock
from spark_ledger.metadata.store import StoreUnavailable

NEVER = -1
OFF_MS = 7_000  # of the store's clock, ahead of this machine's


class Clocks:
    """This machine's and the store's, which tells its own after the first time and answers after
    the second, of each question."""

    store = None

    def __init__(self, *answers_ms, off_ms=OFF_MS):
        self.now_ms, self.off_ms = 1_000_000, off_ms
        self.answers_ms = [*answers_ms]

    def time_ns(self):
        return self.now_ms * 1_000_000

    monotonic_ns = time_ns

    async def store_now_ms(self, _):
        there_ms, back_ms = self.answers_ms.pop(0)
        if back_ms == NEVER:
            raise StoreUnavailable("no answer")
        self.now_ms += there_ms
        told_ms = self.now_ms + self.off_ms
        self.now_ms += back_ms
        return told_ms


@pytest.fixture
def measured(monkeypatch):
    def measured(*answers_ms):
        """By how much the clock is wrong then, and how many questions were left."""
        clocks, clock = Clocks(*answers_ms), StoreClock()
        monkeypatch.setattr(store_contact, "store_now_ms", clocks.store_now_ms)
        monkeypatch.setattr(store_contact, "time", clocks)
        asyncio.run(clock.measure(clocks))
        return clock.now_ms() - (clocks.now_ms + OFF_MS), len(clocks.answers_ms)

    return measured


def test_an_answer_that_comes_soon_is_asked_for_once(measured):
    assert measured((2, 2), (2, 2)) == (0, 1)


def test_an_answer_that_was_held_up_does_not_count_where_another_comes_sooner(measured):
    assert measured((2, 1000), (1000, 2), (5, 3)) == (1, 0)


def test_of_answers_that_are_all_slow_the_fastest_counts(measured):
    answers_ms = [(100, 400)] * CLOCK_TRIES
    answers_ms[1] = (50, 10)
    assert measured(*answers_ms) == (20, 0)


@pytest.mark.parametrize(
    ("off_ms", "wrong_ms"),
    [(0, 0), (8, -8), (-30, 30), (9, -9), (10, 11), (-32, 11)],
)
def test_clocks_that_no_answer_shows_to_differ_count_as_equal(monkeypatch, off_ms, wrong_ms):
    answers_ms = [(30, 8), (50, 20), (50, 20), (40, 40), (70, 90)]
    clocks, clock = Clocks(*answers_ms, off_ms=off_ms), StoreClock()
    monkeypatch.setattr(store_contact, "store_now_ms", clocks.store_now_ms)
    monkeypatch.setattr(store_contact, "time", clocks)
    asyncio.run(clock.measure(clocks))
    assert clock.now_ms() - (clocks.now_ms + off_ms) == wrong_ms


def test_an_answer_counts_where_the_next_does_not_come(measured):
    assert measured((100, 100), (5, NEVER), (5, 5)) == (0, 1)
    with pytest.raises(StoreUnavailable):
        measured((5, NEVER), (5, 5))


@pytest.fixture
def bounded(monkeypatch):
    def bounded(*answers_ms, later_ms=0):
        """How far the lower bound is below the store's time, some time after the measurement."""
        clocks, clock = Clocks(*answers_ms), StoreClock()
        monkeypatch.setattr(store_contact, "store_now_ms", clocks.store_now_ms)
        monkeypatch.setattr(store_contact, "time", clocks)
        asyncio.run(clock.measure(clocks))
        clocks.now_ms += later_ms
        return clocks.now_ms + OFF_MS - clock.earliest_ms()

    return bounded


def test_the_lower_bound_is_behind_the_store_by_the_way_back_of_the_best_answer(bounded):
    assert bounded((1, 3)) == 3
    assert bounded((1, 400), (900, 2), (400, 100), (300, 100), (300, 100)) == 2


def test_the_lower_bound_falls_behind_by_what_clocks_may_differ(bounded):
    assert bounded((1, 3), later_ms=100_000) == 3 + 10


def test_there_is_no_lower_bound_before_the_store_has_responded():
    assert StoreClock().earliest_ms() is None
