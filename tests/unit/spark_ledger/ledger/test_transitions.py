"""Every move of a ledger's record, from every state, and judged again after a lost answer."""

import dataclasses

import pytest

from spark_ledger.ledger import transitions as t
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord, RecordState

ABC = ("a", "b", "c")


WHOLE = (Fragment(0, ABC),)


def record(state=RecordState.OPEN, fragments=WHOLE, end=None):
    names = ("last_entry", "length_bytes", "rows")
    ends = {} if end is None else dict(zip(names, end, strict=True))
    return LedgerRecord(7, 3, 3, 2, tuple(fragments), state, **ends)


CLOSED = record(RecordState.CLOSED, end=(4, 50, 5))
IN_RECOVERY = record(RecordState.IN_RECOVERY)


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
    assert isinstance(t.change_ensemble(once, {1: "b"}, {1: "d"}, 5), t.NoWriteNeeded)


def test_a_change_is_refused_when_no_failed_bookie_sits_in_its_slot_any_more():
    other = record(fragments=(Fragment(0, ("a", "x", "c")),))
    assert isinstance(t.change_ensemble(other, {1: "b"}, {1: "d"}, 5), t.MoveRefusal)


@pytest.mark.parametrize("found", [IN_RECOVERY, CLOSED], ids=["in recovery", "closed"])
def test_a_change_is_refused_once_the_ledger_is_not_open(found):
    assert isinstance(t.change_ensemble(found, {1: "b"}, {1: "d"}, 5), t.MoveRefusal)


def test_a_fragment_below_the_last_one_is_a_defect():
    twice = record(fragments=(Fragment(0, ABC), Fragment(5, ("a", "d", "c"))))
    with pytest.raises(AssertionError):
        t.change_ensemble(twice, {1: "d"}, {1: "e"}, 4)


def test_the_writer_closes_an_open_ledger_once():
    end = t.LastEntry(4, 50, 5)
    closed = written(t.close(record(), end))
    assert (closed.state, t.end_of(closed)) == (RecordState.CLOSED, end)
    assert isinstance(t.close(closed, end), t.NoWriteNeeded)
    assert isinstance(t.close(closed, t.LastEntry(3, 40, 4)), t.MoveRefusal)


def test_the_writer_does_not_close_a_ledger_in_recovery():
    assert isinstance(t.close(IN_RECOVERY, t.LastEntry(4, 50, 5)), t.MoveRefusal)


def test_recovery_marks_joins_and_leaves_closed_ledgers_alone():
    assert written(t.mark_in_recovery(record())).state is RecordState.IN_RECOVERY
    assert isinstance(t.mark_in_recovery(IN_RECOVERY), t.NoWriteNeeded)
    assert isinstance(t.mark_in_recovery(CLOSED), t.NoWriteNeeded)


def test_recovery_closes_with_its_ensemble_changes_in_one_write():
    tail = (Fragment(0, ABC), Fragment(3, ("a", "d", "c")))
    closed = written(t.close_recovered(IN_RECOVERY, tail[0], tail, t.LastEntry(4, 50, 5)))
    assert closed.fragments == tail
    assert t.end_of(closed) == t.LastEntry(4, 50, 5)


def test_recovery_keeps_swaps_that_repair_made_in_older_fragments_meanwhile():
    began = record(RecordState.IN_RECOVERY, (Fragment(0, ABC), Fragment(5, ("a", "d", "c"))))
    swapped = record(RecordState.IN_RECOVERY, (Fragment(0, ("x", "b", "c")), began.fragments[1]))
    closed = written(
        t.close_recovered(swapped, began.fragments[1], began.fragments[1:], t.LastEntry(4, 50, 5))
    )
    assert closed.fragments == swapped.fragments


def test_recovery_adopts_what_another_recovery_closed():
    tail = (Fragment(0, ABC),)
    assert isinstance(
        t.close_recovered(CLOSED, tail[0], tail, t.LastEntry(2, 1, 1)), t.NoWriteNeeded
    )


def test_recovery_does_not_close_a_ledger_that_is_open_or_has_another_last_fragment():
    tail = (Fragment(0, ABC),)
    began = Fragment(0, ABC)
    assert isinstance(
        t.close_recovered(record(), began, tail, t.LastEntry(4, 50, 5)), t.MoveRefusal
    )
    for fragments in ((began, Fragment(5, ABC)), (Fragment(0, ("a", "x", "c")),)):
        moved = record(RecordState.IN_RECOVERY, fragments)
        assert isinstance(
            t.close_recovered(moved, began, tail, t.LastEntry(4, 50, 5)), t.MoveRefusal
        )


def test_an_empty_ledger_closes_at_minus_one_with_no_bytes_and_no_rows():
    closed = written(t.close(record(), t.LastEntry(-1, 0, 0)))
    assert (closed.last_entry, closed.length_bytes, closed.rows) == (-1, 0, 0)


# -- the table: every move from every state --------------------------------------------------------

END = t.LastEntry(4, 50, 5)
ROWS = {
    # move: (what it makes of OPEN, of IN_RECOVERY, of CLOSED at END), what it may change
    "change": (
        lambda found: t.change_ensemble(found, {1: "b"}, {1: "d"}, 5),
        (t.Write, t.MoveRefusal, t.MoveRefusal),
        {"fragments"},
    ),
    "close": (
        lambda found: t.close(found, END),
        (t.Write, t.MoveRefusal, t.NoWriteNeeded),
        {"state", "last_entry", "length_bytes", "rows"},
    ),
    "mark": (t.mark_in_recovery, (t.Write, t.NoWriteNeeded, t.NoWriteNeeded), {"state"}),
    "close recovered": (
        lambda found: t.close_recovered(
            found, Fragment(0, ABC), (Fragment(0, ("x", "b", "c")),), END
        ),
        (t.MoveRefusal, t.Write, t.NoWriteNeeded),
        {"state", "fragments", "last_entry", "length_bytes", "rows"},
    ),
}
FOUND = (record(), IN_RECOVERY, CLOSED)
CELLS = [
    pytest.param(move, found, kind, changes, id=f"{name} when {found.state.value}")
    for name, (move, kinds, changes) in ROWS.items()
    for found, kind in zip(FOUND, kinds, strict=True)
]


@pytest.mark.parametrize(("move", "found", "kind", "changes"), CELLS)
def test_each_move_is_made_found_made_or_refused_by_the_state_it_meets(move, found, kind, changes):
    judged = move(found)
    assert isinstance(judged, kind)
    if isinstance(judged, t.Write):
        names = [field.name for field in dataclasses.fields(found)]
        made = judged.record
        assert {name for name in names if getattr(found, name) != getattr(made, name)} <= changes
    if isinstance(judged, t.MoveRefusal):
        assert judged.why


@pytest.mark.parametrize(("move", "found", "kind", "changes"), CELLS)
def test_a_move_that_was_made_is_found_made_when_it_is_judged_again(move, found, kind, changes):
    judged = move(found)
    if isinstance(judged, t.Write):
        assert isinstance(move(judged.record), t.NoWriteNeeded)


@pytest.mark.parametrize("first", ROWS)
@pytest.mark.parametrize("second", ROWS)
def test_after_any_other_move_a_move_is_refused_done_or_keeps_what_the_other_made(first, second):
    """A write that was judged on the old record and lost the race is judged on the new one."""
    for found in FOUND:
        made = ROWS[first][0](found)
        if first == second or not isinstance(made, t.Write):
            continue
        judged = ROWS[second][0](made.record)
        if made.record.closed:
            assert not isinstance(judged, t.Write), "CLOSED never changes"
        elif isinstance(judged, t.Write) and first == "change":
            assert judged.record.fragments == made.record.fragments
        elif isinstance(judged, t.Write):
            assert judged.record.closed, "IN_RECOVERY goes to CLOSED only"


@pytest.mark.parametrize(
    "end", [t.LastEntry(3, 40, 4), t.LastEntry(4, 51, 5), t.LastEntry(4, 50, 6)], ids=str
)
def test_a_close_at_another_end_than_the_ledger_is_closed_at_is_refused(end):
    assert isinstance(t.close(CLOSED, end), t.MoveRefusal)


def test_a_change_of_some_of_the_failed_slots_keeps_the_others():
    changed = written(t.change_ensemble(record(), {1: "b"}, {1: "d"}, 5))
    again = written(t.change_ensemble(changed, {2: "c"}, {2: "e"}, 5))
    assert again.fragments == (Fragment(0, ABC), Fragment(5, ("a", "d", "e")))


def test_a_bookie_that_comes_back_to_its_slot_is_a_change_and_not_a_lost_answer():
    """C -> D -> C: the record already had this member there, two fragments ago."""
    away = written(t.change_ensemble(record(), {1: "b"}, {1: "d"}, 5))
    back = written(t.change_ensemble(away, {1: "d"}, {1: "b"}, 8))
    assert [f.ensemble[1] for f in back.fragments] == ["b", "d", "b"]
