import pytest

from spark_ledger.topic.log.intents import Sighting
from spark_ledger.topic.upkeep.garbage import PAUSE_LEASES, judge

LEASE_S = 900.0


@pytest.mark.parametrize(("opened", "silent"), [(1, ["a"]), (2, ["a"]), (10, ["a", "b"])])
def test_a_few_writers_that_fell_silent_are_condemned_at_once(opened, silent):
    judged = judge(opened, silent, None, 0, LEASE_S)

    assert (judged.condemn, judged.alarm) == (tuple(silent), "")


def test_many_that_fall_silent_together_are_left_alone_at_first_and_said():
    judged = judge(10, ["a", "b", "c"], None, 50, LEASE_S)

    assert (judged.condemn, judged.since_s) == ((), 50)
    assert "3 of 10 writers fell silent together" in judged.alarm
    later = judge(10, ["a", "b", "c"], judged.since_s, 50 + LEASE_S, LEASE_S)
    assert (later.condemn, later.since_s) == ((), 50)


def test_after_the_pause_a_few_of_many_are_condemned_in_each_pass():
    now_s = 50 + PAUSE_LEASES * LEASE_S

    assert judge(10, list("abcdefgh"), 50, now_s, LEASE_S).condemn == ("a", "b")
    assert judge(3, list("abc"), 50, now_s, LEASE_S).condemn == ("a",)


def test_once_they_are_heard_of_again_the_pause_is_forgotten():
    judged = judge(10, ["a"], 50, 60, LEASE_S)

    assert judged.since_s is None


def test_an_intent_is_the_same_only_with_the_same_heartbeat_in_the_same_session():
    seen = Sighting(3, 10.0, 1)

    assert seen.matches(3, 1)
    assert not seen.matches(4, 1)
    assert not seen.matches(3, 2)
