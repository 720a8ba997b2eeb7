"""Each invariant's function fails on the smallest history that breaks it, under its own number,
and passes on the same history unbroken; those that do not hold over budget are silent there."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from bookie_server.api.status import Meaning, Status
from bookie_server.logs.index import EVERY_LEDGER
from spark_ledger.errors import LedgerError, NoSuchLedger, Unavailable
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord, RecordState
from tests.kit.history import History
from tests.simulation import invariants
from tests.simulation.brokers.histories import OF_BROKERS
from tests.simulation.ghost import Ghost, Home, LedgerGhost, RecoveryGhost
from tests.simulation.healing import gone_since
from tests.simulation.invariants import ALL, Violation
from tests.simulation.repair_histories import OF_REPAIR
from tests.simulation.topic_histories import OF_TOPICS

OPEN = LedgerRecord(1, 3, 3, 2, (Fragment(0, ("a", "b", "c")),))
IN_RECOVERY = replace(OPEN, state=RecordState.IN_RECOVERY)
IDENTITY, OTHER = (1, 0, 1, 1, 1, 7), (1, 0, 1, 1, 1, 8)
CHANGED = (*OPEN.fragments, Fragment(2, ("a", "b", "d")))


def busy(ghost: Ghost, ledger: LedgerGhost, bookie_id: str) -> LedgerGhost:
    """Nothing is wrong but that the bookie has been busy since second 1."""
    ghost.only_overload, ledger.busy_since[bookie_id] = True, 1.0
    return ledger


def homes(ghost: Ghost, *racks: str, banned: str = "") -> LedgerRecord:
    """a, b and c have these racks, which must differ, and none of them may be at `banned`."""
    ghost.homes = {name: Home(f"{name}:1", rack) for name, rack in zip("abc", racks, strict=True)}
    ghost.hard_racks, ghost.banned = True, banned
    return OPEN


def closed(last_entry: int, **fields: object) -> LedgerRecord:
    end = {"last_entry": last_entry, "length_bytes": last_entry + 1, "rows": last_entry + 1}
    return replace(OPEN, state=RecordState.CLOSED, **{**end, **fields})


def history() -> tuple[Ghost, LedgerGhost]:
    """Entries 0..2 of one byte and one row each, acked by a, b and c; a bookie d beside them."""
    ghost = Ghost()
    ledger = ghost.ledgers[1] = LedgerGhost(1, 2, 3, OPEN, "writer")
    ledger.adopt(OPEN)
    ledger.submitted, ledger.submitted_rows = [b"0", b"1", b"2"], [1, 1, 1]
    ledger.acked = ledger.confirmed = ledger.durable_prefix = 2
    ledger.recovered_from = OPEN.last_fragment
    for entry_id in range(3):
        ledger.stored[entry_id] = dict.fromkeys("abc")
        for bookie in "abc":
            ghost.bookie(bookie).stored[1, entry_id] = 10 + entry_id
    ghost.serving = {"a:1": "a"}
    return ghost, ledger


def recovered_at(begun_s: float, *entries: int) -> History:
    """What was read by who recovered a ledger whose entry 1 was acked at second 1.5."""
    found = History()
    for entry_id, acked_s in enumerate((1.0, 1.5)):
        found.promised("ledger 1", entry_id, at=acked_s, place=(0, entry_id))
    found.read("ledger 1", [((0, n), which) for n, which in enumerate(entries)], begun=begun_s)
    return found


def told(*negatives: str, lac: int = 1, given: tuple[int, ...] = (2,)) -> RecoveryGhost:
    found = RecoveryGhost(fenced=dict.fromkeys("ab", lac))
    for entry_id in given:
        found.hear(entry_id, "a", Meaning.POSITIVE)
    for bookie in negatives:
        found.hear(3, bookie, Meaning.NEGATIVE)
    return found


def at(ledger: LedgerGhost, record: LedgerRecord) -> LedgerGhost:
    ledger.record = record
    return ledger


def bereft(ghost: Ghost) -> object:
    ghost.bookie("a").bereft = True
    return ghost.bookie("a")


def deleted(ledger: LedgerGhost, acked: int) -> LedgerGhost:
    ledger.adopt(None)
    ledger.delete_returned()
    ledger.stored[acked] = dict.fromkeys("abc")
    return ledger


def fenced(ghost: Ghost, moment: int, entry_id: int = 9) -> object:
    bookie = ghost.bookie("a")
    bookie.fence_replied[1] = bookie.denied[1] = bookie.fenced_negatives[1, entry_id] = moment
    return bookie


I = invariants  # noqa: E741
READ = {0: b"0", 1: b"1", 2: b"2"}
HALF = {0: b"0", 1: b"1"}
CASES: list[tuple[str, Callable[..., None], Callable, Callable]] = [
    # number, function, arguments that hold, arguments that break it
    (
        *("1", I.an_acked_entry_is_readable_byte_for_byte),
        lambda g, x: (x, READ),
        lambda g, x: (x, HALF),
    ),
    (
        *("2", I.closed_last_entry_covers_every_ack),
        lambda g, x: (at(x, closed(2)),),
        lambda g, x: (at(x, closed(1)),),
    ),
    (
        *("3", I.closed_never_changes),
        lambda g, x: (closed(2), closed(2)),
        lambda g, x: (closed(2), closed(3)),
    ),
    (
        *("4", I.all_opens_end_at_the_same_entry),
        lambda g, x: (at(x, closed(2)), 2),
        lambda g, x: (at(x, closed(2)), 1),
    ),
    (
        *("5", I.one_content_for_one_entry),
        lambda g, x: (x, 0, IDENTITY, ""),
        lambda g, x: (x.identities.setdefault(0, OTHER) and x, 0, IDENTITY, ""),
    ),
    (
        *("1", I.what_was_promised_of_ledgers_is_read),
        lambda g, x: (recovered_at(1.0, 0),),
        lambda g, x: (recovered_at(2.0, 0),),
    ),
    (
        *("6", I.entries_come_whole_and_in_the_order_submitted),
        lambda g, x: (x, 0, READ),
        lambda g, x: (x, 0, {0: b"1", 1: b"0"}),
    ),
    (
        *("7", I.acks_come_in_order_and_never_after_a_failure),
        lambda g, x: (x, 3, True),
        lambda g, x: (x, 4, True),
    ),
    (
        *("8", I.an_acked_entry_is_on_an_ack_quorum_of_the_published_ensemble),
        lambda g, x: (x, 2),
        lambda g, x: (at(x, replace(OPEN, fragments=(Fragment(0, ("a", "d", "e")),))), 2),
    ),
    (
        *("8", I.what_a_change_moves_is_on_an_ack_quorum),
        lambda g, x: (x, OPEN, replace(OPEN, fragments=CHANGED)),  # 2 of its 3 have entry 2
        lambda g, x: (x, OPEN, replace(OPEN, fragments=(Fragment(0, ("a", "d", "e")),))),
    ),
    (
        *("9", I.a_confirmed_position_was_durable_when_it_was_said),
        lambda g, x: (x, 2, ""),
        lambda g, x: (x, 3, ""),
    ),
    (
        *("9", I.a_handle_never_goes_back),
        lambda g, x: (1, 2, 2, ""),
        lambda g, x: (1, 2, 1, ""),
    ),
    (
        *("10", I.nothing_returned_lies_beyond_the_end),
        lambda g, x: (x, 2, 2),
        lambda g, x: (at(x, closed(1)), 2, 2),
    ),
    (
        *("10", I.nothing_returned_lies_beyond_the_end),
        lambda g, x: (x, 2, 2),
        lambda g, x: (x, 2, 1),
    ),
    (
        *("11", I.a_confirmed_read_ends_in_bytes),
        lambda g, x: (x, range(3), 3),
        lambda g, x: (x, range(3), 2),
    ),
    (
        *("11", I.what_is_there_has_no_end),
        lambda g, x: (1, ""),
        lambda g, x: (1, "there is no entry 1"),
    ),
    (
        *("12", I.a_fenced_negative_is_final),
        lambda g, x: (fenced(g, 5), 1, 3, 4),
        lambda g, x: (fenced(g, 5), 1, 3, 6),
    ),
    (
        *("12", I.a_fenced_negative_is_final),
        lambda g, x: (fenced(g, 5), 1, 3, 4),
        lambda g, x: (fenced(g, 5, entry_id=3), 1, 3, 4),
    ),
    (
        *("13", I.a_fence_survives_a_crash),
        lambda g, x: (g.bookie("a"), 1, True),
        lambda g, x: (g.bookie("a"), 1, False),
    ),
    (
        *("14", I.no_normal_add_begins_after_a_fence_reply),
        lambda g, x: (fenced(g, 5), 1, 4),
        lambda g, x: (fenced(g, 5), 1, 6),
    ),
    (
        *("15", I.an_acknowledged_add_survives_a_crash),
        lambda g, x: (g.bookie("a"), 1, 0, "OK"),
        lambda g, x: (g.bookie("a"), 1, 0, "LIMBO"),
    ),
    (
        *("15", I.who_lost_nothing_does_not_say_that_it_did),
        lambda g, x: (g.bookie("a"), [], True),
        lambda g, x: (g.bookie("a"), [EVERY_LEDGER], True),
    ),
    (
        *("15", I.a_healthy_node_quarantines_nothing),
        lambda g, x: (bereft(g), 1),
        lambda g, x: (g.bookie("a"), 1),
    ),
    (
        *("16", I.what_was_acknowledged_is_never_denied),
        lambda g, x: (g.bookie("a"), x, 2, 11),
        lambda g, x: (g.bookie("a"), x, 2, 13),
    ),
    (
        *("16", I.what_a_start_cannot_read_is_said_to_be_lost),
        lambda g, x: (g.bookie("a"), []),
        lambda g, x: (g.bookie("a"), ["ledger 1 entry 2"]),
    ),
    (
        *("17", I.members_are_where_they_may_be),
        lambda g, x: (homes(g, "r1", "r2", "r3"),),
        lambda g, x: (homes(g, "r1", "r2", "r1"),),
    ),
    (
        *("17", I.members_are_where_they_may_be),
        lambda g, x: (homes(g, "r1", "r2", "r3", banned="d:1"),),
        lambda g, x: (homes(g, "r1", "r2", "r3", banned="c:1"),),
    ),
    (
        *("17", I.fragments_rise_within_what_is_confirmed),
        lambda g, x: (x, OPEN, replace(OPEN, fragments=CHANGED)),
        lambda g, x: (
            setattr(x, "confirmed", 0) or x,
            OPEN,
            replace(OPEN, fragments=CHANGED),
        ),
    ),
    (
        *("18", I.every_move_is_a_row_of_the_table),
        lambda g, x: (x, OPEN, replace(OPEN, fragments=CHANGED), "writer"),
        lambda g, x: (x, OPEN, replace(OPEN, fragments=CHANGED), "recoverer"),
    ),
    (
        *("18", I.every_move_is_a_row_of_the_table),
        lambda g, x: (x, OPEN, closed(2), "writer"),
        lambda g, x: (x, OPEN, closed(1), "writer"),
    ),
    (
        *("18", I.every_move_is_a_row_of_the_table),
        lambda g, x: (x, OPEN, IN_RECOVERY, "anybody"),
        lambda g, x: (x, OPEN, replace(IN_RECOVERY, custom={"a": "b"}), "anybody"),
    ),
    (
        *("18", I.every_move_is_a_row_of_the_table),
        lambda g, x: (x, closed(2), None, "anybody"),
        lambda g, x: (x, OPEN, None, "anybody"),
    ),
    (
        *("19", I.members_stand_still_in_recovery),
        lambda g, x: (IN_RECOVERY, IN_RECOVERY),
        lambda g, x: (IN_RECOVERY, replace(IN_RECOVERY, fragments=CHANGED)),
    ),
    (
        *("18", I.an_id_of_its_own_is_never_taken),
        lambda g, x: (Unavailable("the store is away"),),
        lambda g, x: (LedgerError("ledger id 1 is taken"),),
    ),
    (
        *("T15", I.overload_changes_no_ensemble),
        lambda g, x: (busy(g, x, "c"), OPEN, replace(OPEN, fragments=CHANGED), 9.0),
        lambda g, x: (busy(g, x, "c"), OPEN, replace(OPEN, fragments=CHANGED), 2.0),
    ),
    (
        *("20", I.recovery_stays_in_the_last_fragment),
        lambda g, x: (x, 0, "read"),
        lambda g, x: (setattr(x, "recovered_from", CHANGED[-1]) or x, 1, "read"),
    ),
    (
        *("20", I.recovery_ends_before_the_first_that_nobody_has),
        lambda g, x: (x, 2, told("b", "c")),
        lambda g, x: (x, 2, told("b", "c", given=())),
    ),
    (
        *("20", I.recovery_ends_before_the_first_that_nobody_has),
        lambda g, x: (x, 2, told("b", "c")),
        lambda g, x: (x, 0, told("b", "c")),
    ),
    (
        *("38", I.who_deletes_a_record_names_the_ledger),
        lambda g, x: (x, frozenset((x.ledger_id, 2))),
        lambda g, x: (x, frozenset((2,))),
    ),
    (
        *("38", I.what_is_named_as_deleted_stays_named),
        lambda g, x: (frozenset((2,)), frozenset((1, 2))),
        lambda g, x: (frozenset((2,)), frozenset((1,))),
    ),
    (
        *("21", I.crashed_recoveries_change_nothing),
        lambda g, x: (at(x, closed(2)), 2, READ),
        lambda g, x: (at(x, closed(2)), 2, HALF),
    ),
    (
        *("39", I.every_entry_has_its_copies),
        lambda g, x: (at(x, closed(1)), {"a": {0, 1}, "b": {0}, "c": {1}}),
        lambda g, x: (at(x, closed(1)), {"a": {0, 1}, "b": {0}, "c": set()}),
    ),
    (
        *("22", I.the_closed_tail_is_on_an_ack_quorum),
        lambda g, x: (x, IN_RECOVERY, closed(2)),
        lambda g, x: (x, IN_RECOVERY, closed(2, fragments=(Fragment(0, ("a", "d", "e")),))),
    ),
    (
        *("23", I.the_length_is_the_sum_of_the_payloads),
        lambda g, x: (x, closed(2)),
        lambda g, x: (x, closed(2, length_bytes=4)),
    ),
    (
        *("24", I.recovery_decides_by_every_ack_quorum),
        lambda g, x: (x, 3, {"a", "b"}),
        lambda g, x: (x, 3, {"a"}),
    ),
    (
        *("24", I.recovery_decides_by_every_ack_quorum),
        lambda g, x: (x, None, {"a", "b"}),
        lambda g, x: (x, None, {"d", "a"}),
    ),
    (
        *("25", I.a_copy_goes_to_its_write_set),
        lambda g, x: (x, 2**53, "a"),
        lambda g, x: (x, 2**53, "d"),
    ),
    (
        *("25", I.a_copy_goes_to_its_write_set),
        lambda g, x: (at(x, replace(OPEN, write_quorum=2)), 1, "b"),
        lambda g, x: (at(x, replace(OPEN, write_quorum=2)), 1, "a"),
    ),
    (
        *("29", I.no_ack_after_delete),
        lambda g, x: (deleted(x, 3), 2),
        lambda g, x: (deleted(x, 3), 3),
    ),
    (
        *("29", I.a_writer_is_told_of_a_deletion_that_is_one),
        lambda g, x: (deleted(x, 3), NoSuchLedger("ledger 1 was deleted")),
        lambda g, x: (x, NoSuchLedger("ledger 1 was deleted")),
    ),
    (
        *("30", I.an_identity_is_answered_for_by_its_own_disk_only),
        lambda g, x: ("a:1", "b", [Status.WRONG_BOOKIE]),
        lambda g, x: ("a:1", "b", [Status.NO_SUCH_ENTRY]),
    ),
    (
        *("33", I.the_same_seed_gives_the_same_run),
        lambda g, x: (1, ("f", 2), ("f", 2)),
        lambda g, x: (1, ("f", 2), ("e", 2)),
    ),
    (
        *("34", I.everything_under_way_ends),
        lambda g, x: ([], 1.0),
        lambda g, x: (["an add"], 1.0),
    ),
    (
        *("34", I.a_healthy_cluster_takes_what_is_pending),
        lambda g, x: (1, 0, 1.0, 2.0),
        lambda g, x: (1, 0, 3.0, 2.0),
    ),
    (
        *("34", I.a_waiting_reader_is_told),
        lambda g, x: ("entry 2", 0.4, 0.5),
        lambda g, x: ("entry 2", 0.6, 0.5),
    ),
    (
        *("35", I.every_ledger_can_be_closed),
        lambda g, x: (x, None, 1.0),
        lambda g, x: (x, TimeoutError(), 1.0),
    ),
    (
        *("37", I.what_is_in_limbo_is_repaired),
        lambda g, x: ([], 1.0),
        lambda g, x: (["ledger 1 at b1:1, lost"], 1.0),
    ),
    (
        *("37", I.what_was_cleared_is_whole),
        lambda g, x: ("a", 1, []),
        lambda g, x: ("a", 1, [3]),
    ),
    (
        *("34", I.a_core_is_enough),
        lambda g, x: (1.0, 2.0, ""),
        lambda g, x: (3.0, 2.0, ""),
    ),
    (
        *("34", I.a_core_is_enough),
        lambda g, x: (1.0, 2.0, ""),
        lambda g, x: (1.0, 2.0, "TimedOut"),
    ),
    (
        *("36", I.a_hung_bookie_blocks_nothing),
        lambda g, x: ("a read", 1.0, 2.0, None),
        lambda g, x: ("a read", 3.0, 2.0, None),
    ),
    (
        *("36", I.a_hung_bookie_blocks_nothing),
        lambda g, x: ("a read", 1.0, 2.0, None),
        lambda g, x: ("a read", 1.0, 2.0, KeyError()),
    ),
    (
        *("T13", I.equal_entries_are_taken_and_others_refused),
        lambda g, x: (x, 0, IDENTITY, Status.OK, "a"),
        lambda g, x: (x, 0, IDENTITY, Status.CONFLICTING_ENTRY, "a"),
    ),
    (
        *("T13", I.equal_entries_are_taken_and_others_refused),
        lambda g, x: (x.identities.setdefault(0, OTHER) and x, 0, OTHER, Status.OK, "a"),
        lambda g, x: (x.identities.setdefault(0, OTHER) and x, 0, IDENTITY, Status.OK, "a"),
    ),
    (
        *("T13", I.a_refused_token_decides_nothing),
        lambda g, x: (x, 3, 2, 1, 2),
        lambda g, x: (x, 3, 1, 1, 2),
    ),
    *OF_TOPICS,
    *OF_REPAIR,
    *OF_BROKERS,
]

OVER_BUDGET = ("5", "7", "11", "16", "34")
"""What holds however many disks are lost: nothing is silently wrong, and everything ends."""

IDS = [f"{number}-{function.__name__}" for number, function, *_ in CASES]


@pytest.mark.parametrize(("number", "judge", "holding", "breaking"), CASES, ids=IDS)
def test_it_passes_on_what_holds_and_fails_under_its_number_on_what_does_not(
    number, judge, holding, breaking
):
    ghost, ledger = history()
    judge(ghost, *holding(ghost, ledger))
    assert ghost.checks == {number: 1}
    ghost, ledger = history()
    with pytest.raises(Violation) as failed:
        judge(ghost, *breaking(ghost, ledger))
    assert failed.value.name == number


@pytest.mark.parametrize(("number", "judge", "holding", "breaking"), CASES, ids=IDS)
def test_over_budget_only_silent_wrongs_count(number, judge, holding, breaking):
    ghost, ledger = history()
    ghost.over_budget = True
    of_the_healthy = (
        *(I.a_healthy_cluster_takes_what_is_pending, I.a_waiting_reader_is_told),
        I.a_core_is_enough,
    )
    silent = judge in of_the_healthy or number not in OVER_BUDGET
    if silent:
        judge(ghost, *breaking(ghost, ledger))
    else:
        with pytest.raises(Violation):
            judge(ghost, *breaking(ghost, ledger))
    assert bool(ghost.checks) is not silent


def test_every_function_has_a_history_that_breaks_it():
    tried = {function.__name__ for _, function, *_ in CASES}
    assert [name for names in ALL.values() for name in names if name not in tried] == []


def test_what_lies_beyond_the_end_of_a_cleared_ledger_may_be_denied_and_nothing_else():
    ghost, ledger = history()
    bookie = ghost.bookie("a")
    bookie.stored[ledger.ledger_id, 9] = 1
    ledger.record = replace(
        ledger.record, state=RecordState.CLOSED, last_entry=8, length_bytes=8, rows=8
    )
    with pytest.raises(Violation):
        I.what_was_acknowledged_is_never_denied(ghost, bookie, ledger, 9, 2)
    bookie.cleared[ledger.ledger_id] = 1
    I.what_was_acknowledged_is_never_denied(ghost, bookie, ledger, 9, 2)
    bookie.stored[ledger.ledger_id, 8] = 1
    with pytest.raises(Violation):
        I.what_was_acknowledged_is_never_denied(ghost, bookie, ledger, 8, 2)


def test_who_lacks_an_entry_after_a_torn_tail_counts_once_all_of_the_write_set_have_spoken():
    _, ledger = history()
    ledger.recovered_from = ledger.record.last_fragment
    told, members = RecoveryGhost(), ledger.record.last_fragment.ensemble
    for bookie in members[:-1]:
        told.hear(3, bookie, Meaning.TORN)
    assert I.who_counts_as_lacking(ledger, 3, told) == {}
    told.hear(3, members[-1], Meaning.NEGATIVE)
    assert len(I.who_counts_as_lacking(ledger, 3, told)) == len(members)


def test_a_rotten_bookie_may_know_nothing_but_denies_nothing():
    ghost, _ = history()
    ghost.bookie("a").rotten = True
    I.an_acknowledged_add_survives_a_crash(ghost, ghost.bookie("a"), 1, 0, "LIMBO")
    with pytest.raises(Violation):
        I.an_acknowledged_add_survives_a_crash(ghost, ghost.bookie("a"), 1, 0, "NO_SUCH_ENTRY")


def test_who_started_without_a_directory_may_not_know_what_it_held_but_denies_nothing():
    ghost, _ = history()
    bookie = ghost.bookie("a")
    bookie.partial[1] = None
    I.an_acknowledged_add_survives_a_crash(ghost, bookie, 1, 0, "LIMBO")
    for ledger_id, status in ((1, "NO_SUCH_ENTRY"), (2, "LIMBO")):
        with pytest.raises(Violation):
            I.an_acknowledged_add_survives_a_crash(ghost, bookie, ledger_id, 0, status)


@pytest.mark.parametrize("way", ["compared", "told_to_clear"])
def test_what_a_closed_ledger_does_not_want_on_a_bookie_is_not_brought_back_to_it(way):
    ghost, ledger = history()
    bookie = ghost.bookie("a")
    end = {"last_entry": 8, "length_bytes": 8, "rows": 8}
    ledger.record = replace(ledger.record, state=RecordState.CLOSED, **end)
    getattr(bookie, way)[ledger.ledger_id] = 1
    I.an_acknowledged_add_survives_a_crash(ghost, bookie, ledger.ledger_id, 9, "NO_SUCH_ENTRY")
    with pytest.raises(Violation):
        I.an_acknowledged_add_survives_a_crash(ghost, bookie, ledger.ledger_id, 8, "NO_SUCH_ENTRY")


@pytest.mark.parametrize("over", ["deleted", "closed, and others keep it"])
def test_who_finds_a_directory_again_may_doubt_what_it_has_no_part_in_and_nothing_else(over):
    ghost, ledger = history()
    bookie = ghost.bookie("no member")
    said = I.who_lost_nothing_does_not_say_that_it_did
    with pytest.raises(Violation, match="ledger 1"):
        said(ghost, bookie, [ledger.ledger_id], True)
    if over == "deleted":
        ledger.deleted = True
    else:
        ledger.record = closed(2)
        with pytest.raises(Violation, match="ledger 1"):
            said(ghost, ghost.bookie("a"), [ledger.ledger_id], True)
    said(ghost, bookie, [ledger.ledger_id], True)
    with pytest.raises(Violation, match="ledger 1"):
        said(ghost, bookie, [ledger.ledger_id], False)
    with pytest.raises(Violation, match="of ledger 2"):
        said(ghost, bookie, [ledger.ledger_id, 2], True)


def test_a_deleted_ledgers_entries_may_be_denied():
    ghost, ledger = history()
    ledger.deleted = True
    I.what_was_acknowledged_is_never_denied(ghost, ghost.bookie("a"), ledger, 2, 13)


def test_too_few_negatives_are_told_with_the_names_of_bookies():
    members = [f"00000000-0000-0000-0000-0000000{n:05}" for n in (1001, 1002, 1003)]
    record = replace(OPEN, fragments=(Fragment(0, tuple(members)),))
    ledger = LedgerGhost(7, 2, 3, record, recovered_from=record.last_fragment)
    with pytest.raises(I.Violation) as broken:
        I.recovery_decides_by_every_ack_quorum(Ghost(), ledger, 3, {members[0]: None})
    assert str(broken.value) == (
        "invariant 24: ledger 7: recovery took entry 3 for absent, but only b1 of b1, b2 and b3"
        " had denied it in answer to a fencing read; 2 are needed"
    )


def test_a_member_of_a_fragment_that_was_published_with_a_later_one_takes_its_copies():
    ghost, ledger = history()
    fragments = (Fragment(0, ("a", "b", "d")), Fragment(2, ("a", "b", "e")))
    ledger.adopt(closed(2, fragments=fragments))
    I.a_copy_goes_to_its_write_set(ghost, ledger, 1, "d")
    with pytest.raises(Violation, match="25"):
        I.a_copy_goes_to_its_write_set(ghost, ledger, 1, "f")


def test_a_bookie_that_goes_during_a_look_counts_as_gone_from_then_on():
    ghost = Ghost(homes={name: Home("", "") for name in ("before", "meanwhile", "here")})
    ghost.registered_s = {"meanwhile": 0.0, "here": 0.0}
    ghost.unregistered("before", 4.0)
    begun = gone_since(ghost, {}, 10.0)
    assert begun == {"before": 10.0}
    ghost.unregistered("meanwhile", 12.0)
    assert gone_since(ghost, begun, 10.0) == {"before": 10.0, "meanwhile": 12.0}
