"""Answers of one bookie, before and after it crashed: 5, 12, 13, 14, 15, 16, 25, 30, T13."""

from bookie_server.api.status import Meaning, Status, meaning
from bookie_server.logs.index import EVERY_LEDGER
from spark_ledger.metadata.ledger_record import entries_kept, should_keep
from tests.simulation.ghost import BookieGhost, Ghost, Identity, LedgerGhost
from tests.simulation.invariants.judge import Violation, invariant, require


@invariant("5", over_budget=True)
def one_content_for_one_entry(
    ghost: Ghost, ledger: LedgerGhost, entry_id: int, identity: Identity, where: str
) -> None:
    """No two valid different byte strings are ever stored, served, or acked for an entry."""
    known = ledger.identities.setdefault(entry_id, identity)
    if known != identity:
        what = f"ledger {ledger.ledger_id} entry {entry_id} is {identity} {where}, but was {known}"
        raise Violation("5", what)


@invariant("12")
def a_fenced_negative_is_final(
    ghost: Ghost, bookie: BookieGhost, ledger_id: int, entry_id: int, begun: int
) -> None:
    """A bookie that gave a negative under a fence flag never later accepts a normal add for that
    ledger, and never has accepted the entry it denied. Nothing resets it: restart, delete, wipe."""
    said = bookie.bookie_id
    require(
        (ledger_id, entry_id) not in bookie.fenced_negatives,
        "12",
        f"{said} denied ledger {ledger_id} entry {entry_id} to a recoverer and then took it from a"
        " writer",
    )
    require(
        begun < bookie.denied.get(ledger_id, begun + 1),
        "12",
        f"{said} denied an entry of ledger {ledger_id} to a recoverer and took entry {entry_id},"
        " sent afterwards, from a writer",
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
    """Every add OK follows a sync covering it: after a crash the entry is still served (from a
    rotten disk, while a directory is not there, and of a ledger of page-cache durability after a
    power cut: it is not denied). Not so what is no business of the bookie any more."""
    ledger = ghost.ledgers.get(ledger_id)
    cached = ledger is not None and ledger.record.durability == "page-cache"
    cached = cached and (ledger_id, entry_id) not in bookie.synced
    doubtful = bookie.rotten or ledger_id in bookie.partial or (bookie.unsynced and cached)
    unknown = doubtful and meaning(Status[status]) is Meaning.UNKNOWN
    released = ledger is not None and _released(bookie, ledger, entry_id)
    require(
        status == "OK" or unknown or released,
        "15",
        f"{bookie.bookie_id} had acknowledged ledger {ledger_id} entry {entry_id} and answers"
        f" {status} after its restart",
    )


@invariant("15")
def who_lost_nothing_does_not_say_that_it_did(
    ghost: Ghost, bookie: BookieGhost, lost: list[int], found_again: bool
) -> None:
    """A start reports no ledger as lost (`lost`: the ledgers that it reports, or EVERY_LEDGER) if
    no disk was damaged and no directory lost: kills, power cuts and disks that fail for a while
    cost nothing that was durable. Otherwise each crash would be a loss for clients that count on
    the bookie. This does not hold if it ever started only with directories that cannot know.

    Nor of a ledger of which nothing has to be here, if a directory is there again that a run before
    lacked (`found_again`). If no ledger recorded that one it was not missed, so the ledger may have
    been collected and forgotten meanwhile; it alone knows of it then, which is a doubt until the
    record is looked at. Nothing acknowledged is lost by that: only ledgers without a record, and
    CLOSED ones that other bookies have all copies of, are ever collected. Of any other ledger such
    a doubt is a loss, and judged as one."""
    harmed = bookie.rotten or bookie.bereft or bookie.unsure
    over = [i for i in lost if found_again and _is_over(bookie, ghost.ledgers.get(i))]
    said = ["every ledger" if i == EVERY_LEDGER else f"ledger {i}" for i in lost if i not in over]
    require(
        harmed or not said,
        "15",
        f"nothing was done to the disks of {bookie.bookie_id}, and it says that it lost entries of"
        f" {', '.join(said)}",
    )


@invariant("15")
def a_healthy_node_quarantines_nothing(ghost: Ghost, bookie: BookieGhost, ledger_id: int) -> None:
    """A node that runs finds an entry bad only where a disk was damaged or a directory lost; else
    it would put what is whole into limbo, and others would have to copy it."""
    require(
        bookie.rotten or bookie.bereft or bookie.unsure,
        "15",
        f"nothing was done to the disks of {bookie.bookie_id}, and it quarantines ledger"
        f" {ledger_id}",
    )


@invariant("16", over_budget=True)
def what_was_acknowledged_is_never_denied(
    ghost: Ghost, bookie: BookieGhost, ledger: LedgerGhost, entry_id: int, begun: int
) -> None:
    """A bookie that once acked e answers OK or unknown for e until its ledger is deleted, never
    a negative: also after a crash, a torn write or bit rot. `begun`: when the read began. What
    does not belong to it when a ledger was compared and cleared is not brought back; a bookie that
    lost a directory does not know of ledgers whose record no longer names it."""
    acked = bookie.stored.get((ledger.ledger_id, entry_id))
    released = _released(bookie, ledger, entry_id)
    foreign = bookie.bereft and not _named(bookie, ledger)
    require(
        ledger.deleted or acked is None or begun < acked or released or foreign,
        "16",
        f"{bookie.bookie_id} had acknowledged ledger {ledger.ledger_id} entry {entry_id} and denies"
        " it now",
    )


@invariant("16", over_budget=True)
def what_a_start_cannot_read_is_said_to_be_lost(
    ghost: Ghost, bookie: BookieGhost, unsaid: list[str]
) -> None:
    """What was synced in a ledger directory before it was acknowledged, and cannot be read at a
    start, puts its ledger in limbo: "lost", or "torn" if it was written last (rot there looks like
    a torn write). `unsaid`: of which that was not so."""
    require(
        not unsaid,
        "16",
        f"{bookie.bookie_id} cannot read {', '.join(unsaid)} and does not say that it lost that",
    )


def _named(bookie: BookieGhost, ledger: LedgerGhost) -> bool:
    return ledger.names(bookie.bookie_id)


def _is_over(bookie: BookieGhost, ledger: LedgerGhost | None) -> bool:
    """Whether nothing of the ledger has to be at the bookie: it was deleted, or others keep it."""
    if ledger is None:
        return False
    return ledger.deleted or (ledger.closed and not _named(bookie, ledger))


def _released(bookie: BookieGhost, ledger: LedgerGhost, entry_id: int) -> bool:
    """Whether the ledger is closed and the bookie is in no fragment of it (what it has is collected
    as over-replicated), or was compared and cleared there (or may have been, before a kill) and the
    entry is not one of those that its record wants there."""
    if ledger.closed and not _named(bookie, ledger):
        return True
    ways = (bookie.cleared, bookie.compared, bookie.told_to_clear)
    if not any(ledger.ledger_id in way for way in ways) or ledger.record.last_entry is None:
        return False
    kept = entries_kept(ledger.record, bookie.bookie_id, ledger.record.last_entry)
    return not any(
        entry_id in entries and should_keep(ledger.record, slot, entry_id) for entries, slot in kept
    )


@invariant("25")
def a_copy_goes_to_its_write_set(
    ghost: Ghost, ledger: LedgerGhost, entry_id: int, bookie_id: str
) -> None:
    """Whoever sends a copy of e (or the explicit LAC e) agrees on ws(e): slots e .. e + Qw - 1
    modulo E, of an ensemble that was published."""
    record = ledger.record
    mask = ledger.slots.get(bookie_id, 0)
    size = record.ensemble_size
    slots = [(entry_id + i) % size for i in range(record.write_quorum)]
    if not any([mask >> slot & 1 for slot in slots]):
        raise Violation(
            "25",
            f"ledger {ledger.ledger_id} entry {entry_id} was sent to {bookie_id}, which has the"
            f" slots {mask:b} of {size}; its write set is {slots}",
        )


@invariant("30")
def an_identity_is_answered_for_by_its_own_disk_only(
    ghost: Ghost, address: str, bookie_id: str, statuses: list[Status]
) -> None:
    """A blank or partly blank bookie, or another one at that address, never answers under an
    identity that has been used, except unknown."""
    behind = ghost.serving.get(address, bookie_id)
    blank = behind != bookie_id or ghost.bookie(bookie_id).wiped
    told = [status.name for status in statuses if meaning(status) is not Meaning.UNKNOWN]
    require(
        not (blank and told),
        "30",
        f"{address}, which holds the disk of {behind}, answered {told} for {bookie_id}",
    )


@invariant("T13")
def equal_entries_are_taken_and_others_refused(
    ghost: Ghost, ledger: LedgerGhost, entry_id: int, identity: Identity, status: Status, who: str
) -> None:
    """Equal payload re-adds always succeed, different ones never; so no recovery is blocked by a
    holder. (Succeed: nothing but the node's own state, such as overload, may stand against it.)"""
    equal = ledger.identities.get(entry_id, identity) == identity
    if status is (Status.CONFLICTING_ENTRY if equal else Status.OK):
        what = f"{who} answered {status.name} to ledger {ledger.ledger_id} entry {entry_id}"
        told = "an equal entry" if equal else "another entry under its id"
        raise Violation("T13", f"{what}, {told}")


@invariant("T13")
def a_refused_token_decides_nothing(
    ghost: Ghost, ledger: LedgerGhost, entry_id: int, answers: int, refusals: int, needed: int
) -> None:
    """A refused token never counts: without the refusals there are answers enough. (`answers`:
    confirmed fences, or negatives, of the entry's write set.)"""
    require(
        answers >= needed or answers + refusals < needed,
        "T13",
        f"recovery of ledger {ledger.ledger_id} decided the write set of entry {entry_id} on"
        f" {answers} answers and {refusals} refusals of a token; {needed} answers are needed",
    )
