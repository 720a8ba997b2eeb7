"""The entries and answers that readers get: 1, 4, 6, 9, 10, 11."""

from collections.abc import Mapping

from bookie_server.api.entry import Buffer
from tests.kit.history import History, HistoryBroken
from tests.simulation.ghost import Ghost, LedgerGhost
from tests.simulation.invariants.judge import Violation, invariant, require


@invariant("1")
def an_acked_entry_is_readable_byte_for_byte(
    ghost: Ghost, ledger: LedgerGhost, read: dict[int, bytes]
) -> None:
    """Every acked entry is in what a recovery-open reads while <= Qa-1 per window are lost."""
    for entry_id in range(ledger.acked + 1):
        require(
            read.get(entry_id) == ledger.submitted[entry_id],
            "1",
            f"ledger {ledger.ledger_id}: acked entry {entry_id} reads as"
            f" {_short(read.get(entry_id))}, was {_short(ledger.submitted[entry_id])}",
        )


@invariant("1")
def what_was_promised_of_ledgers_is_read(ghost: Ghost, history: History) -> None:
    """A client that recovered a ledger reads every entry that was acked before the recovery began,
    each at its id; no read has anything else there. The violation is of the invariant that the
    history breaks."""
    try:
        history.check()
    except HistoryBroken as broken:
        raise Violation("1" if broken.kind == "lost" else "6", str(broken)) from broken


@invariant("4")
def all_opens_end_at_the_same_entry(ghost: Ghost, ledger: LedgerGhost, last_entry: int) -> None:
    """All recovery-opens of a ledger return the same last_entry: the one in the store."""
    require(
        ledger.record.last_entry == last_entry,
        "4",
        f"ledger {ledger.ledger_id} opened with recovery ends at {last_entry}, the store says"
        f" {ledger.record.last_entry}",
    )


@invariant("6")
def entries_come_whole_and_in_the_order_submitted(
    ghost: Ghost, ledger: LedgerGhost, first: int, read: Mapping[int, Buffer]
) -> None:
    """Entries 0..last_entry all exist; the order of payloads is the order of appends."""
    ids = list(read)
    require(
        ids == list(range(first, first + len(ids))),
        "6",
        f"ledger {ledger.ledger_id}: a read from {first} returned {ids}",
    )
    for entry_id, payload in read.items():
        known = entry_id < len(ledger.submitted)
        require(
            known and ledger.submitted[entry_id] == payload,
            "6",
            f"ledger {ledger.ledger_id}: entry {entry_id} reads as {_short(payload)}",
        )


@invariant("9")
def a_confirmed_position_was_durable_when_it_was_said(
    ghost: Ghost, ledger: LedgerGhost, lac: int, where: str
) -> None:
    """Any LAC in any header, reply or handle: all entries <= it were Qa-durable by then, and it
    is <= the eventual CLOSED.last_entry."""
    ledger.lac_heard = max(ledger.lac_heard, lac)
    last = ledger.record.last_entry
    if lac > ledger.durable_prefix:
        why = f"entries are on an ack quorum only up to {ledger.durable_prefix}"
    elif last is not None and lac > last:
        why = f"the ledger is CLOSED at {last}"
    else:
        return
    raise Violation("9", f"ledger {ledger.ledger_id}: LAC {lac} {where}, but {why}")


@invariant("9")
def a_handle_never_goes_back(ghost: Ghost, ledger_id: int, before: int, lac: int, who: str) -> None:
    """The LAC of a reader's or writer's handle never goes back."""
    require(lac >= before, "9", f"ledger {ledger_id}: the LAC at {who} went from {before} to {lac}")


@invariant("10")
def nothing_returned_lies_beyond_the_end(
    ghost: Ghost, ledger: LedgerGhost, entry_id: int, confirmed: int
) -> None:
    """Confirmed reads never return e > LAC (`confirmed`: what the handle or its caller knew), and
    no entry beyond the eventual last_entry, with whatever version of the record; judged when an
    entry is returned and, with what ever was returned, when the ledger is closed."""
    ledger.returned = max(ledger.returned, entry_id)
    what = f"ledger {ledger.ledger_id}: entry {entry_id} was returned"
    require(entry_id <= confirmed, "10", f"{what} to a reader that knew {confirmed} confirmed")
    last = ledger.record.last_entry
    require(last is None or entry_id <= last, "10", f"{what}, the ledger is CLOSED at {last}")


@invariant("11", over_budget=True)
def a_confirmed_read_ends_in_bytes(
    ghost: Ghost, ledger: LedgerGhost, wanted: range, got: int
) -> None:
    """For e <= LAC or <= last_entry a read ends in the bytes or in an error that is not
    end-of-stream; it never ends early in silence."""
    require(
        got == len(wanted),
        "11",
        f"ledger {ledger.ledger_id}: {got} of the confirmed entries {wanted} were returned"
        " without an error",
    )


@invariant("11", over_budget=True)
def what_is_there_has_no_end(ghost: Ghost, ledger_id: int, told: str) -> None:
    """A reader of confirmed entries, or of an open ledger, never gets the answer that there is no
    such entry or ledger, or that it ends there; `told`: that answer, "" without one."""
    require(not told, "11", f"ledger {ledger_id} is there, and its reader was told: {told}")


def _short(payload: Buffer | None) -> str:
    return "nothing" if payload is None else f"{bytes(payload[:24])!r} ({len(payload)} bytes)"
