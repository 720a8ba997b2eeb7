"""The tries of a change that other changes precede: how many, with which pauses, and the error."""

import asyncio
import random

import pytest

from spark_ledger import errors
from spark_ledger.metadata import store_calls
from spark_ledger.metadata.store_calls import TRIES_MAX, Tries, pause_s


@pytest.fixture
def pauses(monkeypatch):
    slept = []

    async def sleep(pause_s):
        slept.append(pause_s)

    monkeypatch.setattr(store_calls.asyncio, "sleep", sleep)
    return slept


def lose(tries, times, why="others were first"):
    async def run():
        for _ in range(times):
            await tries.retry_or_raise(why)

    asyncio.run(run())


def test_a_change_that_loses_all_but_the_last_try_may_be_made_then():
    tries = Tries()
    lose(tries, TRIES_MAX - 1)
    assert tries.failed == TRIES_MAX - 1


def test_after_the_last_try_the_text_is_raised_as_contended():
    with pytest.raises(errors.CommitContended, match="others were first"):
        lose(Tries(tries_max=3), 3)


def test_after_the_last_try_an_error_that_the_caller_has_is_raised_as_it_is():
    conflict = errors.TxnConflict("an owner went on")
    with pytest.raises(errors.TxnConflict) as raised:
        lose(Tries(tries_max=2), 2, conflict)
    assert raised.value is conflict


def test_tries_with_a_generator_pause_as_pause_s_computes_and_those_without_do_not(pauses):
    lose(Tries(random.Random(7)), 4)
    rng = random.Random(7)
    assert pauses == [pause_s(rng, tries) for tries in range(4)]
    pauses.clear()
    lose(Tries(), 4)
    assert pauses == []


def test_the_first_tries_that_are_free_cost_no_pause(pauses):
    lose(Tries(random.Random(7), tries_without_pause=2), 4)
    rng = random.Random(7)
    assert pauses == [pause_s(rng, tries) for tries in (2, 3)]


def test_a_pause_doubles_with_each_lost_try_up_to_a_second_and_varies_by_half():
    longest = [0.004 * 2**tries for tries in range(8)] + [1.0] * 30
    for tries, most_s in enumerate(longest):
        drawn = [pause_s(random.Random(seed), tries) for seed in range(200)]
        assert 0.5 * most_s <= min(drawn) < 0.55 * most_s
        assert 0.95 * most_s < max(drawn) <= most_s
