"""What recovery decided, against the definitions as sets: 20, 21, 24.

The answers are those that truly reached the recoverer (RecoveryGhost), not what it made of them.
"""

from collections.abc import Collection, Container, Sequence
from itertools import combinations

from bookie_server.api.status import Meaning
from tests.simulation.ghost import Ghost, LedgerGhost, RecoveryGhost
from tests.simulation.invariants.judge import Violation, invariant, require, write_set
from tests.simulation.naming import listed


def hits_every_ack_quorum(members: Sequence[str], ack_quorum: int, heard: Container[str]) -> bool:
    """The set definition: whichever Qa members had acknowledged it, one of them was heard."""
    return all(
        any(bookie in heard for bookie in acks) for acks in combinations(members, ack_quorum)
    )


@invariant("24")
def recovery_decides_by_every_ack_quorum(
    ghost: Ghost, ledger: LedgerGhost, entry_id: int | None, heard: Collection[str]
) -> None:
    """Coverage and negatives equal their set definitions: before a tail is read every ack quorum
    of every write set has a fenced member (`entry_id` None); before a ledger ends, every ack
    quorum of the entry after the end has a member that lacks it (who_counts_as_lacking)."""
    fragment = ledger.recovered_from
    assert fragment is not None
    size = ledger.record.ensemble_size
    entries = range(size) if entry_id is None else (entry_id,)
    heard = [*heard, *ledger.declared_gone] if entry_id is None else heard
    for entry in entries:
        members = write_set(ledger.record, entry, fragment.ensemble)
        if not hits_every_ack_quorum(members, ledger.ack_quorum, heard):
            raise Violation("24", _too_few(ledger, members, entry_id, heard))


def who_counts_as_lacking(
    ledger: LedgerGhost, entry_id: int, told: RecoveryGhost
) -> dict[str, Meaning]:
    """The bookies whose answer that they lack the entry counts, and that answer. A denial counts
    always. The answer of a bookie that lacks the entry after a torn tail counts once each member of
    the write set has given one of the two, and only when the denials do not suffice. A bookie that
    was declared gone counts as one with a torn tail."""
    assert ledger.recovered_from is not None
    denied = dict.fromkeys(told.who_said(entry_id, Meaning.NEGATIVE), Meaning.NEGATIVE)
    members = write_set(ledger.record, entry_id, ledger.recovered_from.ensemble)
    torn = [*told.who_said(entry_id, Meaning.TORN), *ledger.declared_gone]
    if hits_every_ack_quorum(members, ledger.ack_quorum, denied):
        return denied
    if all(bookie in denied or bookie in torn for bookie in members):
        return denied | dict.fromkeys(torn, Meaning.TORN)
    return denied


def _too_few(
    ledger: LedgerGhost, members: Sequence[str], entry_id: int | None, heard: Container[str]
) -> str:
    """What recovery did on the word of too few of the members."""
    found = [bookie for bookie in members if bookie in heard]
    who = f"only {listed(found)}" if found else "none"
    needed = len(members) - ledger.ack_quorum + 1
    if entry_id is None:
        took, had = "read the tail", "had told it that they were fenced"
    else:
        took, had = f"took entry {entry_id} for absent", "had denied it in answer to a fencing read"
    return (
        f"ledger {ledger.ledger_id}: recovery {took}, but {who} of {listed(members)} {had};"
        f" {needed} are needed"
    )


@invariant("20")
def recovery_stays_in_the_last_fragment(
    ghost: Ghost, ledger: LedgerGhost, entry_id: int, what: str
) -> None:
    """Recovery never reads or writes below first_entry(last fragment)."""
    fragment = ledger.recovered_from
    if fragment is not None:
        first = fragment.first_entry
        require(
            entry_id >= first,
            "20",
            f"recovery of ledger {ledger.ledger_id} {what} entry {entry_id}, below {first}",
        )


@invariant("20")
def recovery_ends_before_the_first_that_nobody_has(
    ghost: Ghost, ledger: LedgerGhost, last_entry: int, told: RecoveryGhost
) -> None:
    """Recovery closes at (first unrecoverable - 1): no lower than any LAC that it heard, and a
    bookie has delivered to it every entry above the highest of them."""
    fragment = ledger.recovered_from
    assert fragment is not None
    start = max([fragment.first_entry - 1, *told.fenced.values()])
    what = f"recovery closed ledger {ledger.ledger_id} at {last_entry}"
    require(last_entry >= start, "20", f"{what}, but knew {start} to be confirmed")
    for entry_id in range(start + 1, last_entry + 1):
        found = told.who_said(entry_id, Meaning.POSITIVE)
        require(bool(found), "20", f"{what}, but nobody had given it entry {entry_id}")


@invariant("21")
def crashed_recoveries_change_nothing(
    ghost: Ghost, ledger: LedgerGhost, last_entry: int, read: dict[int, bytes]
) -> None:
    """k recoverers crashed at arbitrary points, then one finishing: 1-6 hold."""
    record = ledger.record
    what = f"after {list(ledger.recoveries)} ledger {ledger.ledger_id}"
    require(record.closed and record.last_entry == last_entry, "21", f"{what} is {record}")
    require(last_entry >= ledger.acked, "21", f"{what} ends at {last_entry} < {ledger.acked}")
    require(
        list(read) == list(range(last_entry + 1)),
        "21",
        f"{what} ends at {last_entry} and reads as {list(read)}",
    )
    require(
        list(read.values()) == ledger.submitted[: last_entry + 1],
        "21",
        f"{what} does not read as the payloads in the order of their appends",
    )
