"""The ledger's record and what recovery does to it: 3, 17, 18, 19, 20, 22, 23."""

from typing import Any

from spark_ledger.metadata.ledger_record import LedgerRecord, LedgerState
from tests.simulation.ghost import Ghost, LedgerGhost
from tests.simulation.invariants.judge import invariant, require, write_set


@invariant("3")
def closed_never_changes(ghost: Ghost, before: LedgerRecord, after: LedgerRecord) -> None:
    """After CLOSED: state, last entry, length, rows and fragments' first ids never change."""
    if before.closed:
        require(_end(before) == _end(after), "3", f"CLOSED {_end(before)} became {_end(after)}")


@invariant("17")
def fragments_rise_within_what_is_confirmed(
    ghost: Ghost, ledger: LedgerGhost, before: LedgerRecord, after: LedgerRecord
) -> None:
    """Fragment keys start at 0 and rise; a new key is <= LAC + 1 and >= the last key."""
    last, new = before.last_fragment.first_entry, after.last_fragment.first_entry
    what = f"ledger {ledger.ledger_id}: fragment {new} after {last}"
    require(new >= last, "17", what)
    if after.state is LedgerState.OPEN:
        limit = ledger.durable_prefix + 1
        require(new <= limit, "17", f"{what}, beyond what is confirmed ({limit - 1})")
    kept = min(len(before.fragments), len(after.fragments)) - 1
    require(before.fragments[:kept] == after.fragments[:kept], "17", f"{what}: history changed")


@invariant("18")
def every_move_is_a_row_of_the_table(
    ghost: Ghost, before: LedgerRecord | None, after: LedgerRecord | None
) -> None:
    """Each accepted metadata write has the guard of its row true on the version it replaced."""
    state_before = before.state.value if before else "absent"
    state_after = after.state.value if after else "absent"
    allowed = {
        ("absent", "OPEN"),
        ("OPEN", "OPEN"),
        ("OPEN", "CLOSED"),
        ("OPEN", "IN_RECOVERY"),
        ("IN_RECOVERY", "CLOSED"),
        ("CLOSED", "absent"),
    }
    move = (state_before, state_after)
    ledger_id = (before or after).ledger_id  # type: ignore[union-attr]
    require(move in allowed, "18", f"ledger {ledger_id} went from {move[0]} to {move[1]}")
    if move == ("OPEN", "IN_RECOVERY"):
        assert before is not None and after is not None
        require(before.fragments == after.fragments, "18", f"ledger {ledger_id}: fragments changed")


@invariant("19")
def members_stand_still_in_recovery(
    ghost: Ghost, before: LedgerRecord, after: LedgerRecord
) -> None:
    """Between IN_RECOVERY and CLOSED the last fragment's members never change in the store."""
    states = (before.state, after.state)
    if states == (LedgerState.IN_RECOVERY, LedgerState.IN_RECOVERY):
        require(
            before.last_fragment == after.last_fragment,
            "19",
            f"ledger {before.ledger_id}: the last fragment changed in recovery",
        )


@invariant("20")
def recovery_stays_in_the_last_fragment(
    ghost: Ghost, ledger: LedgerGhost, entry_id: int, what: str
) -> None:
    """Recovery never reads or writes below first_entry(last fragment)."""
    record = ledger.record
    if record.state is LedgerState.IN_RECOVERY:
        first = record.last_fragment.first_entry
        require(
            entry_id >= first,
            "20",
            f"recovery of ledger {ledger.ledger_id} {what} entry {entry_id}, below {first}",
        )


@invariant("22")
def the_closed_tail_is_on_an_ack_quorum(
    ghost: Ghost, ledger: LedgerGhost, before: LedgerRecord, after: LedgerRecord
) -> None:
    """At the closing CAS each tail entry is on >= Qa members of the published ensemble."""
    assert after.last_entry is not None
    for entry_id in range(before.last_fragment.first_entry, after.last_entry + 1):
        members = write_set(after, entry_id)
        holders = [b for b in members if b in ledger.stored.get(entry_id, {})]
        require(
            len(holders) >= ledger.ack_quorum,
            "22",
            f"ledger {ledger.ledger_id} CLOSED at {after.last_entry}; entry {entry_id} is on"
            f" {holders} of {members}",
        )


@invariant("23")
def the_length_is_the_sum_of_the_payloads(
    ghost: Ghost, ledger: LedgerGhost, record: LedgerRecord
) -> None:
    """length == sum of payload sizes 0..last_entry, and rows the sum of rows, however closed."""
    assert record.last_entry is not None
    count = record.last_entry + 1
    length = sum(len(payload) for payload in ledger.submitted[:count])
    rows = sum(ledger.submitted_rows[:count])
    what = f"ledger {ledger.ledger_id} CLOSED at {record.last_entry}"
    require(count <= len(ledger.submitted), "23", f"{what}, beyond what was submitted")
    found = (record.length_bytes, record.rows)
    require(
        found == (length, rows), "23", f"{what} with (bytes, rows) {found}, not {(length, rows)}"
    )


def _end(record: LedgerRecord) -> tuple[Any, ...]:
    firsts = tuple(fragment.first_entry for fragment in record.fragments)
    return (record.state.value, record.last_entry, record.length_bytes, record.rows, firsts)
