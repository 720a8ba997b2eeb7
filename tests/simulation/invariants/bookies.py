"""What one bookie says, before and after it crashed: 5, 12, 13, 14, 15."""

from tests.simulation.ghost import BookieGhost, Ghost, Identity, LedgerGhost
from tests.simulation.invariants.judge import invariant, require


@invariant("5")
def one_content_for_one_entry(
    ghost: Ghost, ledger: LedgerGhost, entry_id: int, identity: Identity, where: str
) -> None:
    """No two valid different byte strings are ever stored, served, or acked for an entry."""
    known = ledger.identities.setdefault(entry_id, identity)
    require(
        known == identity,
        "5",
        f"ledger {ledger.ledger_id} entry {entry_id} is {identity} {where}, but was {known}",
    )


@invariant("12")
def a_fenced_negative_is_final(
    ghost: Ghost, bookie: BookieGhost, ledger_id: int, entry_id: int
) -> None:
    """A bookie that gave a negative under a fence flag never later accepts a normal add of it."""
    require(
        (ledger_id, entry_id) not in bookie.fenced_negatives,
        "12",
        f"{bookie.bookie_id} denied ledger {ledger_id} entry {entry_id} to a recoverer and then"
        " took it from a writer",
    )


@invariant("13")
def a_fence_survives_a_crash(
    ghost: Ghost, bookie: BookieGhost, ledger_id: int, fenced: bool
) -> None:
    """Every reply to a fencing request follows the durable fence record."""
    require(
        fenced, "13", f"{bookie.bookie_id} had replied to a fence of ledger {ledger_id}, forgot it"
    )


@invariant("14")
def no_normal_add_begins_after_a_fence_reply(
    ghost: Ghost, bookie: BookieGhost, ledger_id: int, begun: int
) -> None:
    """Per (bookie, ledger): no normal add is accepted after the first fence reply."""
    fenced = bookie.fence_replied.get(ledger_id)
    require(
        fenced is None or begun < fenced,
        "14",
        f"{bookie.bookie_id} said that ledger {ledger_id} is fenced and then took a normal add",
    )


@invariant("15")
def an_acknowledged_add_survives_a_crash(
    ghost: Ghost, bookie: BookieGhost, ledger_id: int, entry_id: int, status: str
) -> None:
    """Every add OK follows a sync covering it: after a crash the entry is still served."""
    require(
        status == "OK",
        "15",
        f"{bookie.bookie_id} had acknowledged ledger {ledger_id} entry {entry_id} and answers"
        f" {status} after its restart",
    )
