"""What a writer is told, and what becomes of what it was told: 2, 7, 8, 29."""

from spark_ledger.errors import NoSuchLedger
from spark_ledger.metadata.ledger_record import LedgerRecord
from tests.simulation.ghost import Ghost, LedgerGhost
from tests.simulation.invariants.judge import invariant, require, write_set


@invariant("2")
def closed_last_entry_covers_every_ack(ghost: Ghost, ledger: LedgerGhost) -> None:
    """CLOSED.last_entry >= every id ever acked on the ledger, before or after the close."""
    last = ledger.record.last_entry
    require(
        last is None or last >= ledger.acked,
        "2",
        f"ledger {ledger.ledger_id} is CLOSED at {last} but entry {ledger.acked} was acked",
    )


@invariant("7", over_budget=True)
def acks_come_in_order_and_never_after_a_failure(
    ghost: Ghost, ledger: LedgerGhost, entry_id: int, ok: bool
) -> None:
    """Acks are delivered in id order, at most once; after a failed add no later one succeeds."""
    if not ok:
        ledger.failed = True
        return
    what = f"ledger {ledger.ledger_id}: entry {entry_id} acked"
    require(not ledger.failed, "7", f"{what} after a failed add")
    require(entry_id == ledger.acked + 1, "7", f"{what} after {ledger.acked}")


@invariant("8")
def an_acked_entry_is_on_an_ack_quorum_of_the_published_ensemble(
    ghost: Ghost, ledger: LedgerGhost, entry_id: int
) -> None:
    """At ack time at least Qa of the bookies that the store's record lists for ws(e) hold e."""
    members = write_set(ledger.record, entry_id)
    holders = [b for b in members if b in ledger.stored.get(entry_id, {})]
    require(
        len(holders) >= ledger.ack_quorum,
        "8",
        f"ledger {ledger.ledger_id} entry {entry_id} acked; of its published write set {members}"
        f" only {holders} hold it",
    )


@invariant("8")
def what_a_change_moves_is_on_an_ack_quorum(
    ghost: Ghost, ledger: LedgerGhost, before: LedgerRecord, after: LedgerRecord
) -> None:
    """What was acked and belongs to other bookies since an ensemble change is on Qa of those: a
    change takes no copy of an entry out of account that it had when it was acked."""
    if after.closed or before.last_fragment == after.last_fragment:
        return  # what a recovery made is judged when it closes (22)
    for entry_id in range(after.last_fragment.first_entry, ledger.acked + 1):
        members = write_set(after, entry_id)
        holders = [b for b in members if b in ledger.stored.get(entry_id, {})]
        require(
            len(holders) >= ledger.ack_quorum,
            "8",
            f"ledger {ledger.ledger_id}: a change moved entry {entry_id}, which was acked, to"
            f" {members}, of which only {holders} hold it",
        )


@invariant("29")
def a_writer_is_told_of_a_deletion_that_is_one(
    ghost: Ghost, ledger: LedgerGhost, error: BaseException | None
) -> None:
    """An append fails with "there is no such ledger" only when its record is gone."""
    told = isinstance(error, NoSuchLedger)
    what = f"the writer of ledger {ledger.ledger_id}, which is there, was told: {error}"
    require(ledger.deleted or not told, "29", what)


@invariant("29")
def no_ack_after_delete(ghost: Ghost, ledger: LedgerGhost, entry_id: int) -> None:
    """After delete returned, no add on that ledger is acked: no bookie that took the add later
    counts. (An answer sent before may still be on its way.)"""
    before = ledger.stored_at_delete
    require(
        before is None or before.get(entry_id, 0) >= ledger.ack_quorum,
        "29",
        f"ledger {ledger.ledger_id} entry {entry_id} was stored and acked after the deletion",
    )
