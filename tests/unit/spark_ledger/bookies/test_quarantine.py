"""Who is chosen last, and for how long. Time is a number that the tests set."""

import random

from spark_ledger.bookies.directory import DOUBT_S, Quarantine


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def new(failures=3, window_s=60.0, quarantine_s=120.0):
    clock = Clock()
    return Quarantine(failures, window_s, quarantine_s, clock), clock


def fail(quarantine, clock, times, every_s=5.0, bookie="a"):
    for _ in range(times):
        clock.now += every_s
        quarantine.note_failure(bookie)


def test_nobody_is_suspected_at_first_or_for_answering():
    quarantine, _ = new()
    quarantine.note_response("a")
    assert quarantine.suspects() == quarantine.ids_in_doubt() == []
    assert quarantine.reason_for("a") == ""


def test_one_unanswered_call_is_doubt_for_ten_seconds():
    quarantine, clock = new()
    quarantine.note_failure("a")
    clock.now += DOUBT_S - 0.1
    assert quarantine.suspects() == quarantine.ids_in_doubt() == ["a"]
    assert quarantine.reason_for("a") == "gave no answer lately"
    clock.now += 0.1
    assert quarantine.suspects() == []


def test_an_answer_ends_doubt_at_once():
    quarantine, _ = new()
    quarantine.note_failure("a")
    quarantine.note_response("a")
    assert quarantine.suspects() == []


def test_a_bookie_that_another_answered_sooner_than_is_chosen_last_for_a_while_but_not_in_doubt():
    quarantine, clock = new()
    quarantine.note_overtaken("a")
    assert quarantine.suspects() == ["a"]
    assert quarantine.ids_in_doubt() == []
    assert quarantine.reason_for("a") == "another responded sooner"
    clock.now += DOUBT_S
    assert quarantine.suspects() == []
    quarantine.note_overtaken("a")
    quarantine.note_response("a")
    assert quarantine.suspects() == []


def test_one_answer_in_between_ends_doubt_but_not_quarantine():
    quarantine, clock = new()
    for _ in range(3):
        fail(quarantine, clock, 1)
        quarantine.note_response("a")
    assert quarantine.ids_in_doubt() == []
    assert quarantine.suspects() == ["a"]
    assert "in quarantine for another 120 s" in quarantine.reason_for("a")


def test_quarantine_ends_by_itself_counted_from_the_last_failure():
    quarantine, clock = new()
    fail(quarantine, clock, 4)
    clock.now += 119.9
    assert quarantine.suspects() == ["a"]
    clock.now += 0.1
    assert quarantine.suspects() == []


def test_failures_further_apart_than_the_window_are_no_quarantine():
    quarantine, clock = new(window_s=60)
    fail(quarantine, clock, 9, every_s=31)
    clock.now += DOUBT_S
    assert quarantine.suspects() == []


def test_calls_that_fail_together_count_once():
    quarantine, clock = new()
    for _ in range(10):
        clock.now += 0.05
        quarantine.note_failure("a")
    quarantine.note_response("a")
    assert quarantine.suspects() == []


def test_slow_answers_count_like_failures_but_are_no_doubt():
    quarantine, clock = new()
    for _ in range(3):
        assert quarantine.suspects() == []
        clock.now += 2
        quarantine.note_slow("a")
    assert quarantine.ids_in_doubt() == []
    assert quarantine.suspects() == ["a"]


def test_a_quarantine_of_no_time_is_off_while_doubt_stays():
    quarantine, clock = new(quarantine_s=0)
    fail(quarantine, clock, 5)
    assert quarantine.suspects() == ["a"]
    quarantine.note_response("a")
    assert quarantine.suspects() == []


def test_suspects_are_sorted_and_one_bookie_says_nothing_of_another():
    quarantine, _ = new()
    for bookie in ("c", "a", "b"):
        quarantine.note_failure(bookie)
    quarantine.note_response("b")
    assert quarantine.suspects() == ["a", "c"]


def test_memory_is_a_few_numbers_whatever_fails_how_often():
    quarantine, clock = new(failures=3)
    fail(quarantine, clock, 10_000, every_s=1)
    assert len(quarantine._doubts["a"].troubles) <= 3


def test_by_chance_quarantine_equals_its_definition_over_the_whole_history():
    for seed in range(60):
        rng = random.Random(seed)
        failures, window_s, quarantine_s = rng.randint(1, 4), rng.choice([5, 20]), 15.0
        quarantine, clock = new(failures, window_s, quarantine_s)
        history: list[float] = []
        until = 0.0
        for _ in range(200):
            clock.now += rng.choice([0.3, 1, 2, 7])
            if rng.random() < 0.5:
                rng.choice([quarantine.note_failure, quarantine.note_slow])("a")
                if not history or clock.now - history[-1] >= 1:
                    history.append(clock.now)
                    if sum(clock.now - at <= window_s for at in history) >= failures:
                        until = clock.now + quarantine_s
            quarantine.note_response("a")
            assert quarantine.suspects() == (["a"] if clock.now < until else [])
