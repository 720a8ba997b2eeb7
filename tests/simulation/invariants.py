"""The invariants, one function each, numbered as in docs/simulation.md.

Always true: a function here only reads the ghost and what it is given, and raises Violation; it
is called on every event that can break it, so it must cost little.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from spark_ledger.ledger.quorum import Quorum
from spark_ledger.metadata.ledger_record import LedgerRecord, LedgerState
from tests.simulation.ghost import BookieGhost, Ghost, Identity, LedgerGhost

F = TypeVar("F", bound=Callable[..., None])


class Violation(AssertionError):
    """An invariant does not hold. `name` is its number: "8", "T2", "liveness"."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"invariant {name}: {what}")
        self.name = name


def invariant(name: str) -> Callable[[F], F]:
    """Count in the ghost how often the invariant `name` was judged; its first argument is the
    ghost."""

    def decorate(judge: F) -> F:
        @wraps(judge)
        def counted(ghost: Ghost, *args: Any) -> None:
            ghost.checks[name] = ghost.checks.get(name, 0) + 1
            judge(ghost, *args)

        counted.number = name  # type: ignore[attr-defined]
        return counted  # type: ignore[return-value]

    return decorate


def _require(holds: bool, name: str, what: str) -> None:
    if not holds:
        raise Violation(name, what)


# -- acknowledgements ----------------------------------------------------------------------------


@invariant("2")
def closed_last_entry_covers_every_ack(ghost: Ghost, ledger: LedgerGhost) -> None:
    """CLOSED.last_entry >= every id ever acked on the ledger, before or after the close."""
    last = ledger.record.last_entry
    _require(
        last is None or last >= ledger.acked,
        "2",
        f"ledger {ledger.ledger_id} is CLOSED at {last} but entry {ledger.acked} was acked",
    )


@invariant("7")
def acks_come_in_order_and_never_after_a_failure(
    ghost: Ghost, ledger: LedgerGhost, entry_id: int, ok: bool
) -> None:
    """Acks are delivered in id order, at most once; after a failed add no later one succeeds."""
    if not ok:
        ledger.failed = True
        return
    what = f"ledger {ledger.ledger_id}: entry {entry_id} acked"
    _require(not ledger.failed, "7", f"{what} after a failed add")
    _require(entry_id == ledger.acked + 1, "7", f"{what} after {ledger.acked}")


@invariant("8")
def an_acked_entry_is_on_an_ack_quorum_of_the_published_ensemble(
    ghost: Ghost, ledger: LedgerGhost, entry_id: int
) -> None:
    """At ack time at least Qa of the bookies that the store's record lists for ws(e) hold e."""
    members = write_set(ledger.record, entry_id)
    holders = [b for b in members if b in ledger.stored.get(entry_id, {})]
    _require(
        len(holders) >= ledger.ack_quorum,
        "8",
        f"ledger {ledger.ledger_id} entry {entry_id} acked; of its published write set {members}"
        f" only {holders} hold it",
    )


@invariant("29")
def no_ack_after_delete(ghost: Ghost, ledger: LedgerGhost, entry_id: int) -> None:
    """After delete returned, no add on that ledger is acked: no bookie that took the add later
    counts. (An answer sent before may still be on its way.)"""
    before = ledger.stored_at_delete
    _require(
        before is None or before.get(entry_id, 0) >= ledger.ack_quorum,
        "29",
        f"ledger {ledger.ledger_id} entry {entry_id} was stored and acked after the deletion",
    )


# -- what bookies say ------------------------------------------------------------------------------


@invariant("5")
def one_content_for_one_entry(
    ghost: Ghost, ledger: LedgerGhost, entry_id: int, identity: Identity, where: str
) -> None:
    """No two valid different byte strings are ever stored, served, or acked for an entry."""
    known = ledger.identities.setdefault(entry_id, identity)
    _require(
        known == identity,
        "5",
        f"ledger {ledger.ledger_id} entry {entry_id} is {identity} {where}, but was {known}",
    )


@invariant("9")
def a_confirmed_position_was_durable_when_it_was_said(
    ghost: Ghost, ledger: LedgerGhost, lac: int, where: str
) -> None:
    """Any LAC in any header, reply or handle: all entries <= it were Qa-durable by then, and it
    is <= the eventual CLOSED.last_entry."""
    ledger.lac_heard = max(ledger.lac_heard, lac)
    what = f"ledger {ledger.ledger_id}: LAC {lac} {where}"
    _require(
        lac <= ledger.durable_prefix,
        "9",
        f"{what}, but entries are on an ack quorum only up to {ledger.durable_prefix}",
    )
    last = ledger.record.last_entry
    _require(last is None or lac <= last, "9", f"{what}, but the ledger is CLOSED at {last}")


@invariant("12")
def a_fenced_negative_is_final(
    ghost: Ghost, bookie: BookieGhost, ledger_id: int, entry_id: int
) -> None:
    """A bookie that gave a negative under a fence flag never later accepts a normal add of it."""
    _require(
        (ledger_id, entry_id) not in bookie.fenced_negatives,
        "12",
        f"{bookie.bookie_id} denied ledger {ledger_id} entry {entry_id} to a recoverer and then"
        " took it from a writer",
    )


@invariant("14")
def no_normal_add_begins_after_a_fence_reply(
    ghost: Ghost, bookie: BookieGhost, ledger_id: int, begun: int
) -> None:
    """Per (bookie, ledger): no normal add is accepted after the first fence reply."""
    fenced = bookie.fence_replied.get(ledger_id)
    _require(
        fenced is None or begun < fenced,
        "14",
        f"{bookie.bookie_id} said that ledger {ledger_id} is fenced and then took a normal add",
    )


@invariant("13")
def a_fence_survives_a_crash(
    ghost: Ghost, bookie: BookieGhost, ledger_id: int, fenced: bool
) -> None:
    """Every reply to a fencing request follows the durable fence record."""
    _require(
        fenced, "13", f"{bookie.bookie_id} had replied to a fence of ledger {ledger_id}, forgot it"
    )


@invariant("15")
def an_acknowledged_add_survives_a_crash(
    ghost: Ghost, bookie: BookieGhost, ledger_id: int, entry_id: int, status: str
) -> None:
    """Every add OK follows a sync covering it: after a crash the entry is still served."""
    _require(
        status == "OK",
        "15",
        f"{bookie.bookie_id} had acknowledged ledger {ledger_id} entry {entry_id} and answers"
        f" {status} after its restart",
    )


@invariant("20")
def recovery_stays_in_the_last_fragment(
    ghost: Ghost, ledger: LedgerGhost, entry_id: int, what: str
) -> None:
    """Recovery never reads or writes below first_entry(last fragment)."""
    record = ledger.record
    if record.state is LedgerState.IN_RECOVERY:
        first = record.last_fragment.first_entry
        _require(
            entry_id >= first,
            "20",
            f"recovery of ledger {ledger.ledger_id} {what} entry {entry_id}, below {first}",
        )


# -- the ledger's record ---------------------------------------------------------------------------


@invariant("3")
def closed_never_changes(ghost: Ghost, before: LedgerRecord, after: LedgerRecord) -> None:
    """After CLOSED: state, last entry, length, rows and fragments' first ids never change."""
    if before.closed:
        _require(_end(before) == _end(after), "3", f"CLOSED {_end(before)} became {_end(after)}")


@invariant("17")
def fragments_rise_within_what_is_confirmed(
    ghost: Ghost, ledger: LedgerGhost, before: LedgerRecord, after: LedgerRecord
) -> None:
    """Fragment keys start at 0 and rise; a new key is <= LAC + 1 and >= the last key."""
    last, new = before.last_fragment.first_entry, after.last_fragment.first_entry
    what = f"ledger {ledger.ledger_id}: fragment {new} after {last}"
    _require(new >= last, "17", what)
    if after.state is LedgerState.OPEN:
        limit = ledger.durable_prefix + 1
        _require(new <= limit, "17", f"{what}, beyond what is confirmed ({limit - 1})")
    kept = min(len(before.fragments), len(after.fragments)) - 1
    _require(before.fragments[:kept] == after.fragments[:kept], "17", f"{what}: history changed")


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
    _require(move in allowed, "18", f"ledger {ledger_id} went from {move[0]} to {move[1]}")
    if move == ("OPEN", "IN_RECOVERY"):
        assert before is not None and after is not None
        _require(
            before.fragments == after.fragments, "18", f"ledger {ledger_id}: fragments changed"
        )


@invariant("19")
def members_stand_still_in_recovery(
    ghost: Ghost, before: LedgerRecord, after: LedgerRecord
) -> None:
    """Between IN_RECOVERY and CLOSED the last fragment's members never change in the store."""
    states = (before.state, after.state)
    if states == (LedgerState.IN_RECOVERY, LedgerState.IN_RECOVERY):
        _require(
            before.last_fragment == after.last_fragment,
            "19",
            f"ledger {before.ledger_id}: the last fragment changed in recovery",
        )


@invariant("10")
def nothing_returned_lies_beyond_the_end(ghost: Ghost, ledger: LedgerGhost) -> None:
    """No entry beyond the eventual last_entry is ever returned by a confirmed read."""
    last = ledger.record.last_entry
    top = max(ledger.returned, ledger.lac_heard)
    _require(
        last is None or top <= last,
        "10",
        f"ledger {ledger.ledger_id}: entry {top} was confirmed to somebody, CLOSED at {last}",
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
        _require(
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
    _require(count <= len(ledger.submitted), "23", f"{what}, beyond what was submitted")
    found = (record.length_bytes, record.rows)
    _require(
        found == (length, rows), "23", f"{what} with (bytes, rows) {found}, not {(length, rows)}"
    )


# -- reads -----------------------------------------------------------------------------------------


@invariant("1")
def an_acked_entry_is_readable_byte_for_byte(
    ghost: Ghost, ledger: LedgerGhost, read: dict[int, bytes]
) -> None:
    """Every acked entry is in what a recovery-open reads while <= Qa-1 per window are lost."""
    for entry_id in range(ledger.acked + 1):
        _require(
            read.get(entry_id) == ledger.submitted[entry_id],
            "1",
            f"ledger {ledger.ledger_id}: acked entry {entry_id} reads as"
            f" {_short(read.get(entry_id))}, was {_short(ledger.submitted[entry_id])}",
        )


@invariant("4")
def all_opens_end_at_the_same_entry(ghost: Ghost, ledger: LedgerGhost, last_entry: int) -> None:
    """All recovery-opens of a ledger return the same last_entry: the one in the store."""
    _require(
        ledger.record.last_entry == last_entry,
        "4",
        f"ledger {ledger.ledger_id} opened with recovery ends at {last_entry}, the store says"
        f" {ledger.record.last_entry}",
    )


@invariant("6")
def entries_come_whole_and_in_the_order_submitted(
    ghost: Ghost, ledger: LedgerGhost, first: int, read: dict[int, bytes]
) -> None:
    """Entries 0..last_entry all exist; the order of payloads is the order of appends."""
    ids = list(read)
    _require(
        ids == list(range(first, first + len(ids))),
        "6",
        f"ledger {ledger.ledger_id}: a read from {first} returned {ids}",
    )
    for entry_id, payload in read.items():
        known = entry_id < len(ledger.submitted)
        _require(
            known and ledger.submitted[entry_id] == payload,
            "6",
            f"ledger {ledger.ledger_id}: entry {entry_id} reads as {_short(payload)}",
        )


@invariant("11")
def a_confirmed_read_ends_in_bytes(
    ghost: Ghost, ledger: LedgerGhost, wanted: range, got: int
) -> None:
    """For e <= LAC or <= last_entry a read ends in the bytes or in an error that is not
    end-of-stream; it never ends early in silence."""
    _require(
        got == len(wanted),
        "11",
        f"ledger {ledger.ledger_id}: {got} of the confirmed entries {wanted} were returned"
        " without an error",
    )


# -- topics ----------------------------------------------------------------------------------------


@invariant("T1")
def a_commit_that_returned_is_in_the_log_once(
    ghost: Ghost, key: tuple[str, int], times: int
) -> None:
    """A commit that returned success is in every later fold, once."""
    _require(times == 1, "T1", f"{key} returned success and is {times} times in the log")


@invariant("T2")
def a_version_contributes_rows_at_most_once(ghost: Ghost, key: tuple[str, int], times: int) -> None:
    """Each (transaction key, version) contributes rows at most once."""
    _require(times <= 1, "T2", f"{key} contributes rows {times} times")


@invariant("T3")
def an_offset_is_one_row_for_ever(
    ghost: Ghost, known: dict[Any, Any], place: tuple[str, int, int], row: Any
) -> None:
    """Offset -> row is a function for ever, per topic id."""
    first = known.setdefault(place, row)
    _require(first == row, "T3", f"{place} read as {row!r}, was {first!r}")


@invariant("T3")
def offsets_are_dense(ghost: Ghost, partition: int, offsets: list[int], end: int) -> None:
    """Offsets of a partition are 0 .. end-1, each once, in order."""
    _require(
        offsets == list(range(end)),
        "T3",
        f"partition {partition} ends at {end} and reads as {len(offsets)} offsets {offsets[-5:]}",
    )


@invariant("T5")
def every_row_read_was_committed(ghost: Ghost, committed: bool, row: Any) -> None:
    """No reader returns a row that is in no commit: never one of a failed, aborted or condemned
    attempt."""
    _require(committed, "T5", f"row {row!r} was read and is in no commit")


# -- the rest --------------------------------------------------------------------------------------


def write_set(record: LedgerRecord, entry_id: int) -> list[str]:
    """The bookies that the record lists for an entry."""
    quorum = Quorum(record.ensemble_size, record.write_quorum, record.ack_quorum)
    ensemble = record.fragment_of(entry_id).ensemble
    return [ensemble[slot] for slot in quorum.write_set(entry_id)]


def _end(record: LedgerRecord) -> tuple[Any, ...]:
    firsts = tuple(fragment.first_entry for fragment in record.fragments)
    return (record.state.value, record.last_entry, record.length_bytes, record.rows, firsts)


def _short(payload: bytes | None) -> str:
    return "nothing" if payload is None else f"{payload[:24]!r} ({len(payload)} bytes)"
