"""What a partition's writer does next, as a function of its situation."""

import pytest

from spark_ledger import errors
from spark_ledger.broker.produce import step
from spark_ledger.broker.produce.step import (
    MOVES,
    LedgerCounts,
    WriterSituation,
    WriterState,
    WriterStep,
    has_room,
    moved,
    next_step,
    state_after_leaving,
    stored_count,
)
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord, RecordState
from spark_ledger.topic.entry.message_batch import NO_ROWLESS

SEALED_NEXT = (
    WriterState.STOPPED,
    WriterState.ROLLING,
    WriterState.IDLE,
    WriterState.FAILED,
    WriterState.UNDECIDED,
)


def open_with(**about):
    return WriterSituation(**{"state": WriterState.OPEN, "waits": False, "closing": False, **about})


def without_segment(state, *, waits=False, closing=False):
    return WriterSituation(state, waits, closing)


def test_the_work_rests_where_nothing_is_open_and_nothing_waits():
    assert next_step(without_segment(WriterState.NOTHING)) is WriterStep.REST
    assert next_step(without_segment(WriterState.NOTHING, closing=True)) is WriterStep.REST


@pytest.mark.parametrize("state", [state for state in WriterState if state is not WriterState.OPEN])
@pytest.mark.parametrize("closing", [False, True])
def test_what_waits_opens_the_next_segment_whatever_became_of_the_last_one(state, closing):
    assert next_step(without_segment(state, waits=True, closing=closing)) is WriterStep.OPEN


@pytest.mark.parametrize("state", [WriterState.STOPPED, WriterState.ROLLING])
def test_a_segment_that_stopped_or_rolls_is_followed_by_another_unless_the_partition_closes(state):
    assert next_step(without_segment(state)) is WriterStep.OPEN
    assert next_step(without_segment(state, closing=True)) is WriterStep.SEAL


@pytest.mark.parametrize("state", [WriterState.IDLE, WriterState.FAILED, WriterState.UNDECIDED])
def test_a_segment_that_ended_is_sealed_although_nothing_waits(state):
    assert next_step(without_segment(state)) is WriterStep.SEAL


@pytest.mark.parametrize("about", [{}, {"asked": True}, {"full": True}, {"under_way": 3}])
def test_a_broken_ledger_is_recovered_before_anything_else(about):
    assert next_step(open_with(broken=True, waits=True, **about)) is WriterStep.DECIDE


@pytest.mark.parametrize("end", ["asked", "is_long", "full", "idle", "closing"])
def test_a_segment_ends_once_nothing_is_under_way(end):
    assert next_step(open_with(**{end: True}, under_way=1)) is WriterStep.APPEND
    assert next_step(open_with(**{end: True})) in (WriterStep.STOP, WriterStep.LEAVE)


@pytest.mark.parametrize("waits", [False, True])
def test_a_committer_gets_the_segment_whatever_waits_and_its_ledger_stays_open(waits):
    assert next_step(open_with(asked=True, waits=waits, full=True)) is WriterStep.STOP
    assert next_step(open_with(is_long=True, waits=waits, full=True)) is WriterStep.STOP


def test_a_full_ledger_is_left_at_once_and_an_idle_one_or_one_that_closes_when_nothing_waits():
    assert next_step(open_with(full=True, waits=True)) is WriterStep.LEAVE
    for end in ("idle", "closing"):
        assert next_step(open_with(**{end: True}, waits=True)) is WriterStep.APPEND
        assert next_step(open_with(**{end: True})) is WriterStep.LEAVE


def test_an_open_segment_that_nothing_ends_takes_what_comes():
    assert next_step(open_with()) is WriterStep.APPEND
    assert next_step(open_with(waits=True, under_way=8)) is WriterStep.APPEND


def test_entries_are_sent_while_something_waits_and_few_are_under_way(monkeypatch):
    monkeypatch.setattr(step, "INFLIGHT_ENTRIES_MAX", 2)
    assert has_room(open_with(waits=True, under_way=1))
    assert not has_room(open_with(waits=True, under_way=2))
    assert not has_room(open_with(under_way=1))


@pytest.mark.parametrize("end", ["asked", "is_long", "full"])
def test_no_entry_is_sent_to_a_segment_that_is_to_end(end):
    assert not has_room(open_with(waits=True, **{end: True}))


def test_after_a_ledger_is_left_the_next_is_opened_at_once_unless_it_is_idle_or_closes():
    assert state_after_leaving(open_with(full=True)) is WriterState.ROLLING
    assert state_after_leaving(open_with(idle=True)) is WriterState.IDLE
    assert state_after_leaving(open_with(full=True, closing=True)) is WriterState.IDLE


def test_each_state_has_its_moves_and_a_segment_that_ended_leads_to_an_open_one_or_to_nothing():
    assert set(MOVES) == set(WriterState)
    for state in SEALED_NEXT:
        assert moved(state, WriterState.OPEN, "read back") is WriterState.OPEN
        assert moved(state, WriterState.NOTHING, "sealed") is WriterState.NOTHING
        assert moved(WriterState.OPEN, state, "ended") is state


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (WriterState.OPEN, WriterState.OPEN),
        (WriterState.NOTHING, WriterState.STOPPED),
        (WriterState.NOTHING, WriterState.UNDECIDED),
        (WriterState.STOPPED, WriterState.ROLLING),
        (WriterState.UNDECIDED, WriterState.FAILED),
    ],
)
def test_a_move_that_is_not_in_the_table_names_both_ends_and_its_cause(before, after):
    with pytest.raises(AssertionError) as why:
        moved(before, after, "the test says so")
    assert all(text in str(why.value) for text in (before.value, after.value, "the test says so"))


def test_the_counts_of_a_segment_go_on_from_what_its_ledger_had_before():
    counts = LedgerCounts(entries=3, rows=30, bytes=300)
    rowless = NO_ROWLESS.with_next(31)
    counts.add(2, 20, NO_ROWLESS, 1000)
    counts.add(1, 10, rowless, 1005)
    counts.add(4, 40, rowless, 1010)
    assert (counts.entries, counts.rows, counts.bytes) == (6, 37, 370)
    assert counts.written_ms == (1000, 1010), "of its first and its last entry"
    assert (counts.rowless, counts.rowless_stored) == (rowless, NO_ROWLESS)


def closed_at(last_entry, rows):
    closed = (RecordState.CLOSED, last_entry, 1000, rows)
    return LedgerRecord(1, 1, 1, 1, (Fragment(0, ("b:1",)),), *closed)


@pytest.mark.parametrize(("last_entry", "stored"), [(4, 0), (5, 1), (7, 3)])
def test_a_closed_record_decides_how_many_entries_under_way_are_stored(last_entry, stored):
    assert stored_count(5, 1, closed_at(last_entry, 100), 50) == stored


def test_a_ledger_that_was_closed_before_an_acknowledged_entry_has_lost_rows():
    with pytest.raises(errors.RowsLost) as lost:
        stored_count(5, 1, closed_at(3, 40), 50)
    assert lost.value.facts["rows"] == 10
