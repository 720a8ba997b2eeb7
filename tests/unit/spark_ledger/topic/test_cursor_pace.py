from dataclasses import replace

import pytest

from spark_ledger.topic.subscription.cursor import (
    FLOOR_EVERY_S,
    IDLE_S,
    OFTEN_S,
    WRITE_EVERY_S,
    Situation,
    Step,
    next_look_s,
    next_step,
)

AT_REST = Situation(1000.0, 999.0, 999.0, dirty=False, behind=False, small=True)
MOVED = replace(AT_REST, dirty=True, behind=True)
USED = replace(MOVED, open=True)


def test_who_moves_seldom_is_written_to_the_record_and_who_moves_often_to_a_ledger():
    assert next_step(replace(MOVED, written_s=1000 - OFTEN_S)) is Step.INLINE
    assert next_step(replace(MOVED, written_s=1001 - OFTEN_S)) is Step.NEW_LEDGER
    assert next_step(replace(MOVED, written_s=float("-inf"))) is Step.INLINE


def test_a_ledger_is_used_until_it_is_full():
    assert next_step(USED) is Step.APPEND
    assert next_step(replace(USED, full=True)) is Step.NEW_LEDGER


def test_without_a_ledger_to_be_had_the_record_takes_the_position_if_it_fits():
    assert next_step(replace(MOVED, refused=True)) is Step.INLINE
    assert next_step(replace(MOVED, refused=True, small=False)) is Step.NEW_LEDGER


def test_positions_that_do_not_fit_go_to_a_ledger_however_seldom():
    assert next_step(replace(MOVED, written_s=0.0, small=False)) is Step.NEW_LEDGER


def test_the_record_hears_now_and_then_of_a_ledger_that_is_used():
    late = replace(USED, floor_s=1000 - FLOOR_EVERY_S)
    assert next_step(late) is Step.FLOOR
    assert next_step(replace(late, full=True)) is Step.INLINE
    assert next_step(replace(late, small=False)) is Step.APPEND


def test_an_idle_ledger_is_left():
    idle = replace(AT_REST, open=True, written_s=1000 - IDLE_S)
    assert next_step(idle) is Step.INLINE
    assert next_step(replace(idle, small=False)) is Step.LEAVE
    assert next_step(replace(idle, written_s=1001 - IDLE_S)) is Step.NOTHING


@pytest.mark.parametrize("every_s", [1.0, 20.0, 29.0, 31.0, 60.0, 119.0, 121.0, 600.0])
def test_who_moves_regularly_does_not_open_a_ledger_each_time(every_s):
    now, opened, steps = MOVED, 0, 0
    now = replace(now, now_s=0.0, written_s=float("-inf"), floor_s=float("-inf"))
    for move in range(100):
        due = every_s * move
        if now.open and due >= now.written_s + IDLE_S:
            now = replace(now, open=False)
        now = replace(now, now_s=due, dirty=True)
        step = next_step(now)
        opened += step is Step.NEW_LEDGER
        inline = step is Step.INLINE
        now = replace(now, written_s=due, open=not inline and (now.open or opened > 0))
        now = replace(now, floor_s=due if step is not Step.APPEND else now.floor_s)
        steps += step is not Step.NOTHING
    assert steps == 100
    assert opened <= 1


@pytest.mark.parametrize("dirty", [True, False])
@pytest.mark.parametrize("open_", [True, False])
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("behind", [True, False])
def test_there_is_no_moment_to_look_at_which_nothing_is_to_do(dirty, open_, small, behind):
    """Else a cursor would wake for nothing, again and again."""
    now = Situation(0.1, 0.1 + 0.2, 0.7, dirty, behind, small, open=open_)
    look_s = next_look_s(now)
    assert look_s >= now.written_s + WRITE_EVERY_S
    if look_s != float("inf"):
        assert next_step(replace(now, now_s=look_s)) is not Step.NOTHING
