"""Every move of a ledger's record, from every state, and judged again after a lost answer."""

import pytest

from spark_ledger.ledger import transitions as t
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord, LedgerState

ABC = ("a", "b", "c")


WHOLE = (Fragment(0, ABC),)


def record(state=LedgerState.OPEN, fragments=WHOLE, end=None):
    names = ("last_entry", "length_bytes", "rows")
    ends = {} if end is None else dict(zip(names, end, strict=True))
    return LedgerRecord(7, 3, 3, 2, tuple(fragments), state, **ends)


CLOSED = record(LedgerState.CLOSED, end=(4, 50, 5))
IN_RECOVERY = record(LedgerState.IN_RECOVERY)


def written(move):
    assert isinstance(move, t.Write), move
    return move.record


def test_a_change_appends_a_fragment_after_the_last_add_confirmed():
    changed = written(t.change_ensemble(record(), {1: "b"}, {1: "d"}, 5))
    assert changed.fragments == (Fragment(0, ABC), Fragment(5, ("a", "d", "c")))


def test_a_change_replaces_a_last_fragment_that_holds_no_entry():
    changed = written(t.change_ensemble(record(), {0: "a", 2: "c"}, {0: "d", 2: "e"}, 0))
    assert changed.fragments == (Fragment(0, ("d", "b", "e")),)


def test_a_change_whose_answer_was_lost_is_recognised_when_it_is_judged_again():
    once = written(t.change_ensemble(record(), {1: "b"}, {1: "d"}, 5))
    assert isinstance(t.change_ensemble(once, {1: "b"}, {1: "d"}, 5), t.Done)


def test_a_change_is_refused_when_no_failed_bookie_sits_in_its_slot_any_more():
    other = record(fragments=(Fragment(0, ("a", "x", "c")),))
    assert isinstance(t.change_ensemble(other, {1: "b"}, {1: "d"}, 5), t.Refused)


@pytest.mark.parametrize("found", [IN_RECOVERY, CLOSED], ids=["in recovery", "closed"])
def test_a_change_is_refused_once_the_ledger_is_not_open(found):
    assert isinstance(t.change_ensemble(found, {1: "b"}, {1: "d"}, 5), t.Refused)


def test_a_fragment_below_the_last_one_is_a_defect():
    twice = record(fragments=(Fragment(0, ABC), Fragment(5, ("a", "d", "c"))))
    with pytest.raises(AssertionError):
        t.change_ensemble(twice, {1: "d"}, {1: "e"}, 4)


def test_the_writer_closes_an_open_ledger_once():
    end = t.End(4, 50, 5)
    closed = written(t.close(record(), end))
    assert (closed.state, t.end_of(closed)) == (LedgerState.CLOSED, end)
    assert isinstance(t.close(closed, end), t.Done)
    assert isinstance(t.close(closed, t.End(3, 40, 4)), t.Refused)


def test_the_writer_does_not_close_a_ledger_in_recovery():
    assert isinstance(t.close(IN_RECOVERY, t.End(4, 50, 5)), t.Refused)


def test_recovery_marks_joins_and_leaves_closed_ledgers_alone():
    assert written(t.mark_in_recovery(record())).state is LedgerState.IN_RECOVERY
    assert isinstance(t.mark_in_recovery(IN_RECOVERY), t.Done)
    assert isinstance(t.mark_in_recovery(CLOSED), t.Done)


def test_recovery_closes_with_its_ensemble_changes_in_one_write():
    tail = (Fragment(0, ABC), Fragment(3, ("a", "d", "c")))
    closed = written(t.close_recovered(IN_RECOVERY, tail, t.End(4, 50, 5)))
    assert closed.fragments == tail
    assert t.end_of(closed) == t.End(4, 50, 5)


def test_recovery_keeps_swaps_that_repair_made_in_older_fragments_meanwhile():
    began = record(LedgerState.IN_RECOVERY, (Fragment(0, ABC), Fragment(5, ("a", "d", "c"))))
    swapped = record(LedgerState.IN_RECOVERY, (Fragment(0, ("x", "b", "c")), began.fragments[1]))
    closed = written(t.close_recovered(swapped, began.fragments[1:], t.End(4, 50, 5)))
    assert closed.fragments == swapped.fragments


def test_recovery_adopts_what_another_recovery_closed():
    assert isinstance(t.close_recovered(CLOSED, (Fragment(0, ABC),), t.End(2, 1, 1)), t.Done)


def test_recovery_does_not_close_a_ledger_that_is_open_or_has_another_last_fragment():
    tail = (Fragment(0, ABC),)
    assert isinstance(t.close_recovered(record(), tail, t.End(4, 50, 5)), t.Refused)
    moved = record(LedgerState.IN_RECOVERY, (Fragment(0, ABC), Fragment(5, ABC)))
    assert isinstance(t.close_recovered(moved, tail, t.End(4, 50, 5)), t.Refused)


def test_an_empty_ledger_closes_at_minus_one_with_no_bytes_and_no_rows():
    closed = written(t.close(record(), t.End(-1, 0, 0)))
    assert (closed.last_entry, closed.length_bytes, closed.rows) == (-1, 0, 0)
