"""The ledger's record and what recovery does to it: 3, 17, 18, 19, 22, 23, 39, T15."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from spark_ledger.config import ClientConfig
from spark_ledger.errors import LedgerError
from spark_ledger.metadata.ledger_record import LedgerRecord, RecordState
from tests.simulation.ghost import Ghost, LedgerGhost
from tests.simulation.invariants.judge import invariant, require, write_set
from tests.simulation.invariants.repair import is_of_repair, judge_move


@invariant("38")
def who_deletes_a_record_names_the_ledger(
    ghost: Ghost, ledger: LedgerGhost, named: frozenset[int]
) -> None:
    """A ledger's record goes only in a write that names the ledger as deleted (`named`: what it
    names of the folder)."""
    what = f"the record of ledger {ledger.ledger_id} went, and the ledger is not named as deleted"
    require(ledger.ledger_id in named, "38", what)


@invariant("38")
def what_is_named_as_deleted_stays_named(
    ghost: Ghost, before: frozenset[int], after: frozenset[int]
) -> None:
    """The set of deleted ledgers only grows."""
    gone = sorted(before - after)
    require(not gone, "38", f"ledgers {gone[:5]} were named as deleted, and are named no more")


@invariant("3")
def closed_never_changes(ghost: Ghost, before: LedgerRecord, after: LedgerRecord) -> None:
    """After CLOSED: state, last entry, length, rows and fragments' first ids never change."""
    if before.closed:
        require(_end(before) == _end(after), "3", f"CLOSED {_end(before)} became {_end(after)}")


@invariant("17")
def fragments_rise_within_what_is_confirmed(
    ghost: Ghost, ledger: LedgerGhost, before: LedgerRecord, after: LedgerRecord
) -> None:
    """Fragment keys start at 0 and strictly rise; each ensemble has E distinct members; a new key
    is <= LAC + 1 of its author and >= the last key; the fragments before it stay."""
    firsts = [fragment.first_entry for fragment in after.fragments]
    last, new = before.last_fragment.first_entry, after.last_fragment.first_entry
    what = f"ledger {ledger.ledger_id}: fragment {new} after {last}"
    require(firsts[0] == 0 and firsts == sorted(set(firsts)), "17", f"{what}: keys {firsts}")
    members = set(after.last_fragment.ensemble)
    require(len(members) == after.ensemble_size, "17", f"{what}: on {len(members)} bookies")
    require(new >= last, "17", what)
    if is_of_repair(before, after):
        return  # invariant 18 judges which members it may change
    if after.state is RecordState.OPEN:
        for known, by in ((ledger.confirmed, "its author"), (ledger.durable_prefix, "anybody")):
            require(new <= known + 1, "17", f"{what}, beyond what {by} knows confirmed ({known})")
    kept = min(len(before.fragments), len(after.fragments)) - 1
    require(before.fragments[:kept] == after.fragments[:kept], "17", f"{what}: history changed")


@invariant("17")
def members_are_where_they_may_be(ghost: Ghost, record: LedgerRecord) -> None:
    """With racks "hard" no two members of a write set are on one rack, of a new ensemble and after
    each change; a policy of one's own decides about each member."""
    members, size = record.last_fragment.ensemble, record.ensemble_size
    what = f"ledger {record.ledger_id} is on {list(members)}"
    if ghost.hard_racks:
        racks = [ghost.homes[bookie].rack for bookie in members]
        near = [(s, (s + d) % size) for s in range(size) for d in range(1, record.write_quorum)]
        same = [racks[one] for one, other in near if racks[one] == racks[other]]
        require(not same, "17", f"{what}, of which one write set has the rack {same[:1]} twice")
    if ghost.banned:
        ban = [bookie for bookie in members if ghost.homes[bookie].address == ghost.banned]
        require(not ban, "17", f"{what}, of which the policy takes none at {ghost.banned}")


@invariant("18")
def every_move_is_a_row_of_the_table(
    ghost: Ghost,
    ledger: LedgerGhost | None,
    before: LedgerRecord | None,
    after: LedgerRecord | None,
    author: str,
) -> None:
    """Each accepted metadata write has the guard of its row true on the version it replaced: the
    state, the client that may make the move, and that nothing else of the record changes."""
    move = (before.state.value if before else "absent", after.state.value if after else "absent")
    ledger_id = (before or after).ledger_id  # type: ignore[union-attr]
    what = f"ledger {ledger_id} went from {move[0]} to {move[1]} by {author}"
    require(move in _MOVES, "18", what)
    if before is None or after is None or ledger is None:
        fresh = after is None or len(after.fragments) == 1
        require(fresh, "18", f"{what} with more than its first fragment")
        return
    changed = [name for name in _FIELDS if getattr(before, name) != getattr(after, name)]
    allowed = _MOVES[move]
    require(set(changed) <= set(allowed), "18", f"{what}, changing its {', '.join(changed)}")
    if is_of_repair(before, after):
        judge_move(before, after, what)
        return
    require(before.joining == after.joining, "18", f"{what}, changing who joins")
    if before.state is RecordState.OPEN and after.state is not RecordState.IN_RECOVERY:
        require(author == ledger.author, "18", f"{what}, but its writer is {ledger.author}")
    if move == ("OPEN", "OPEN"):
        _judge_change(before, after, what)
    if move == ("OPEN", "CLOSED"):
        same = after.last_entry == ledger.confirmed
        require(same, "18", f"{what} at {after.last_entry}, its LAC is {ledger.confirmed}")


def _judge_change(before: LedgerRecord, after: LedgerRecord, what: str) -> None:
    """At least one slot has a new owner, a bookie that owned no other slot."""
    old, new = before.last_fragment.ensemble, after.last_fragment.ensemble
    came = [bookie for was, bookie in zip(old, new, strict=True) if was != bookie]
    require(bool(came), "18", f"{what}, replacing nobody")
    require(not set(came) & set(old), "18", f"{what}, giving {came} a second slot or another's")


@invariant("18")
def an_id_of_its_own_is_never_taken(ghost: Ghost, error: LedgerError) -> None:
    """absent -> OPEN: a creator that finds its id in use looks whose record it is. Ids come from
    blocks that no other client has, so the record is its own, made by a write whose answer was
    lost."""
    require(type(error) is not LedgerError, "18", f"a creator was told: {error}")


_MOVES: dict[tuple[str, str], tuple[str, ...]] = {
    ("absent", "OPEN"): (),
    ("OPEN", "OPEN"): ("fragments", "joining"),
    ("OPEN", "CLOSED"): ("state", "last_entry", "length_bytes", "rows"),
    ("OPEN", "IN_RECOVERY"): ("state",),
    ("IN_RECOVERY", "CLOSED"): ("state", "last_entry", "length_bytes", "rows", "fragments"),
    ("IN_RECOVERY", "IN_RECOVERY"): ("joining",),
    ("CLOSED", "CLOSED"): ("fragments", "joining"),
    ("CLOSED", "absent"): (),
}
"""By move: the fields it may change."""

BUSY_S = ClientConfig().replica_timeout_s / 2
_FIELDS = tuple(field.name for field in fields(LedgerRecord))


@invariant("19")
def members_stand_still_in_recovery(
    ghost: Ghost, before: LedgerRecord, after: LedgerRecord
) -> None:
    """Between IN_RECOVERY and CLOSED the last fragment's members never change in the store."""
    states = (before.state, after.state)
    if states == (RecordState.IN_RECOVERY, RecordState.IN_RECOVERY):
        require(
            before.last_fragment == after.last_fragment,
            "19",
            f"ledger {before.ledger_id}: the last fragment changed in recovery",
        )


@invariant("T15", when=lambda ghost: ghost.only_overload)
def overload_changes_no_ensemble(
    ghost: Ghost, ledger: LedgerGhost, before: LedgerRecord, after: LedgerRecord, now: float
) -> None:
    """Ensemble changes per overload = 0: "busy, retry after" is sent to the same bookie again. A
    slot fails only at the per-replica time-out; half of it is left for what was on its way."""
    old, new = before.last_fragment.ensemble, after.last_fragment.ensemble
    for bookie in [was for was, bookie in zip(old, new, strict=True) if was != bookie]:
        busy_s = now - ledger.busy_since.get(bookie, now)
        require(
            busy_s >= BUSY_S,
            "T15",
            f"ledger {ledger.ledger_id}: {bookie} was replaced after {busy_s:.1f} s of overload",
        )


@invariant("22")
def the_closed_tail_is_on_an_ack_quorum(
    ghost: Ghost, ledger: LedgerGhost, before: LedgerRecord, after: LedgerRecord
) -> None:
    """At the closing CAS each tail entry is on >= Qa members of the published ensemble. (Our
    target is Qw: how often it was met is counted.)"""
    assert after.last_entry is not None
    whole = True
    for entry_id in range(before.last_fragment.first_entry, after.last_entry + 1):
        members = write_set(after, entry_id)
        holders = [b for b in members if b in ledger.stored.get(entry_id, {})]
        require(
            len(holders) >= ledger.ack_quorum,
            "22",
            f"ledger {ledger.ledger_id} CLOSED at {after.last_entry}; entry {entry_id} is on"
            f" {holders} of {members}",
        )
        whole = whole and len(holders) == len(members)
    ghost.meet("closed with its tail on " + ("the whole write set" if whole else "an ack quorum"))


@invariant("39")
def every_entry_has_its_copies(
    ghost: Ghost, ledger: LedgerGhost, has: Mapping[str, Collection[int]]
) -> None:
    """In the end each entry of a closed ledger is at Qa members of those that its record names;
    what was at a member that lost its disk counts as if it were there still."""
    assert ledger.record.last_entry is not None
    for entry_id in range(ledger.record.last_entry + 1):
        members = write_set(ledger.record, entry_id)
        holders = [b for b in members if entry_id in has.get(b, ()) or ghost.bookie(b).wiped]
        require(
            len(holders) >= ledger.ack_quorum,
            "39",
            f"ledger {ledger.ledger_id} is CLOSED at {ledger.record.last_entry}; of {members}"
            f" only {holders} have entry {entry_id}, or lost it with their disk",
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
