"""Budgets in bytes, and when a refused caller is told to come back."""

import pytest

from bookie_server.lanes import RETRY_AFTER_MS_MAX, Budget, Throughput, Work, retry_after_ms


def test_recovery_finds_room_in_its_reserve_when_the_others_used_up_theirs():
    budget = Budget(100, 30)
    budget.take(100)
    assert not budget.has_room(1)
    assert budget.has_room(30, recovery=True)
    assert not budget.has_room(31, recovery=True)
    budget.give_back(100)
    assert budget.has_room(5000), "one of any size fits an idle budget"


def test_nothing_is_given_back_twice():
    budget = Budget(100, 30)
    budget.take(10)
    budget.give_back(10)
    with pytest.raises(AssertionError):
        budget.give_back(10)


def test_who_is_refused_is_told_to_come_back_when_the_work_under_way_should_be_done():
    work = Work()
    work.begin(1000, 10.0)
    work.end(12.0)  # 500 bytes a second
    work.begin(500, 20.0)
    assert work.left_s(20.25) == pytest.approx(0.75)
    assert work.left_s(20.9) == pytest.approx(0.45), "it has ended when he comes"
    assert work.left_s(24.0) == pytest.approx(2.0), "it is slower than the last one was"
    work.end(25.0)
    assert work.left_s(26.0) == 0
    assert work.left_s(26.0, 400) > 0, "and what waits behind it"


def test_work_of_which_nothing_is_known_is_asked_for_less_and_less_often():
    work = Work()
    work.begin(1000, 0.0)
    assert [work.left_s(now) for now in (0.0, 1.0, 4.0)] == [0, 0.5, 2]


def test_work_without_bytes_says_nothing_of_the_speed():
    work = Work()
    work.begin(0, 0.0)
    work.end(5.0)
    work.begin(1000, 10.0)
    assert work.left_s(10.0) == 0


def test_the_throughput_follows_what_was_done_lately():
    throughput = Throughput()
    assert throughput.seconds_for(100) is None
    throughput.note(1000, 1.0)
    assert throughput.seconds_for(500) == 0.5
    for _ in range(20):
        throughput.note(100, 1.0)
    assert throughput.seconds_for(100) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(("wait_s", "told"), [(0, 20), (0.01, 20), (0.3, 300), (90, 1000)])
def test_the_time_to_come_back_is_bounded(wait_s, told):
    assert retry_after_ms(wait_s, 20) == told
    assert told <= RETRY_AFTER_MS_MAX


def test_one_caller_has_a_share_of_a_budget_and_recovery_all_of_it():
    budget = Budget(100, 20)
    assert budget.has_room(90, caller="slow"), "one request fits, whatever its size"
    budget.take(30, "slow")
    assert budget.has_room(20, caller="slow")
    assert not budget.has_room(21, caller="slow")
    assert budget.has_room(90, recovery=True, caller="slow")
    assert budget.has_room(70, caller="another")
    budget.take(40, "another")
    assert not budget.has_room(31, caller="a third")
    budget.give_back(30, "slow")
    assert budget.has_room(50, caller="slow")
    budget.give_back(40, "another")
    for change in (budget.take, budget.take, budget.give_back, budget.give_back):
        change(0, "of an answer without bytes")
    assert budget._by_caller == {}, "who has nothing is not remembered"
