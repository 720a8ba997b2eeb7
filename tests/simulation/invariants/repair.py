"""Copies that are made elsewhere, and slots that are given away for it: R1 to R5."""

from typing import NamedTuple

from spark_ledger.metadata.ledger_record import Fragment, JoiningBookie, LedgerRecord, RecordState
from tests.simulation.ghost import BookieGhost, Ghost, Home, LedgerGhost
from tests.simulation.invariants.judge import invariant, require, write_set

SEEN_S = 1.0
"""After this time an observer has seen a registration, an append or a change of a record."""
SLACK_S = 0.5
"""Between what is seen here and there."""
NOWHERE = Home("", "")


class Swap(NamedTuple):
    """In `record`, which the store has now, the slot of `fragment` is `new`'s and was `old`'s."""

    record: LedgerRecord
    fragment: Fragment
    slot: int
    old: str
    new: str


def is_of_repair(before: LedgerRecord, after: LedgerRecord) -> bool:
    """Whether the move is one of repair, by its changes: the joining bookies, or members anywhere
    except at an open ledger's end."""
    if before.state is not after.state:
        return False
    same_past = before.fragments[:-1] == after.fragments[:-1]
    longer = len(after.fragments) > len(before.fragments)
    return before.joining != after.joining or before.closed or not (same_past or longer)


def swaps_of(before: LedgerRecord, after: LedgerRecord) -> list[Swap]:
    """The slots that change hands with a move of repair."""
    return [
        Swap(after, now, slot, old, new)
        for was, now in zip(before.fragments, after.fragments, strict=False)
        for slot, (old, new) in enumerate(zip(was.ensemble, now.ensemble, strict=True))
        if old != new
    ]


def judge_move(before: LedgerRecord, after: LedgerRecord, what: str) -> None:
    """Of invariant 18: fragments begin where they began; one slot at a time goes to the bookie that
    was joining for it, which joins no longer; and only settled fragments change."""
    firsts = [[each.first_entry for each in one.fragments] for one in (before, after)]
    require(firsts[0] == firsts[1], "18", f"{what}, whose fragments begin at {firsts}")
    swaps = swaps_of(before, after)
    require(len(swaps) <= 1, "18", f"{what}, giving away {len(swaps)} slots at once")
    came = [one for one in after.joining if one not in before.joining]
    went = [one for one in before.joining if one not in after.joining]
    for swap in swaps:
        place = (swap.fragment.first_entry, swap.slot, swap.new)
        right = [one for one in went if (one.first_entry, one.slot, one.bookie_id) == place]
        require(bool(right) and not came, "18", f"{what}, to {swap.new}, which was not joining")
    last = before.last_fragment.first_entry
    touched = [one.first_entry for one in came] + [swap.fragment.first_entry for swap in swaps]
    for first in touched:
        settled = before.closed or (before.state is RecordState.OPEN and first < last)
        require(settled, "18", f"{what}, touching the fragment at {first}, which is not settled")


def is_better(ghost: Ghost, record: LedgerRecord, one: JoiningBookie) -> bool:
    """Whether the bookie that joins shares its rack or address with fewer of its write sets."""
    ensemble = record.fragment_of(one.first_entry).ensemble
    size = len(ensemble)
    sets = [{(first + i) % size for i in range(record.write_quorum)} for first in range(size)]
    beside = {slot for some in sets if one.slot in some for slot in some} - {one.slot}
    others = [ghost.homes.get(ensemble[slot], NOWHERE) for slot in sorted(beside)]

    def shared(bookie: str) -> int:
        home = ghost.homes.get(bookie, NOWHERE)
        return sum(
            (bool(home.rack) and home.rack == other.rack)
            + (bool(home.address) and home.address == other.address)
            for other in others
        )

    return shared(ensemble[one.slot]) > shared(one.bookie_id)


def entries_of_slot(swap: Swap) -> range:
    """The entries of the fragment that there are for certain."""
    record, first = swap.record, swap.fragment.first_entry
    later = [each.first_entry for each in record.fragments if each.first_entry > first]
    end = [] if record.last_entry is None else [record.last_entry + 1]
    return range(first, min([*later, *end], default=first))


@invariant("R1")
def a_slot_goes_to_who_has_every_entry(
    ghost: Ghost, ledger: LedgerGhost, bookie: BookieGhost, swap: Swap
) -> None:
    """A swap names a bookie only if it durably has every entry of that slot of that fragment, and,
    where a CLOSED ledger ends, was fenced: nothing of long ago is added there any more. Durably:
    what it took from repair, or showed in answer to a fence, if it acknowledges before it syncs."""
    kept = [e for e in entries_of_slot(swap) if _keeps(swap, e)]
    lacks = [e for e in kept if bookie.bookie_id not in ledger.stored.get(e, {})]
    if swap.record.durability == "page-cache":
        lacks = [e for e in kept if (ledger.ledger_id, e) not in bookie.synced]
    what = f"ledger {ledger.ledger_id}: the slot {swap.slot} from {swap.fragment.first_entry} on"
    require(not lacks, "R1", f"{what} goes to {swap.new}, which lacks {lacks}")
    at_end = swap.record.closed and swap.fragment == swap.record.last_fragment
    fenced = not at_end or ledger.ledger_id in bookie.fence_replied
    require(fenced, "R1", f"{what} of a CLOSED ledger goes to {swap.new}, which is not fenced")


@invariant("R1")
def who_took_a_slot_has_all_of_it(
    ghost: Ghost, bookie_id: str, ledger_id: int, lacking: list[int]
) -> None:
    """The same, by what the bookie answers, asked past the network: at the swap, at the end."""
    what = f"{bookie_id} took a slot of ledger {ledger_id}"
    require(not lacking, "R1", f"{what} and lacks {lacking}")


@invariant("R2")
def a_swap_takes_no_copy_away(ghost: Ghost, ledger: LedgerGhost, swap: Swap) -> None:
    """Because of a swap an acknowledged entry never has fewer copies at members that the record
    names than it had, or than Qw. (No process can know that the new member was lost just now.)"""
    if ghost.bookie(swap.new).wiped:
        return
    slot, ensemble = swap.slot, swap.fragment.ensemble
    was = [*ensemble[:slot], swap.old, *ensemble[slot + 1 :]]
    for entry_id in entries_of_slot(swap):
        if entry_id > ledger.acked:
            break
        before = _copies(ghost, ledger, entry_id, write_set(swap.record, entry_id, was))
        after = _copies(ghost, ledger, entry_id, write_set(swap.record, entry_id, ensemble))
        require(
            len(after) >= min(len(before), ledger.write_quorum),
            "R2",
            f"ledger {ledger.ledger_id} entry {entry_id} was on {before}, is on {after}",
        )


@invariant("R3")
def work_ends(ghost: Ghost, left: list[str], within_s: float) -> None:
    """When all is quiet, and every bookie that will come back is back, everything is whole and the
    list of work is empty, or each ledger on it has its reason."""
    require(not left, "R3", f"not whole {within_s:.0f} s after all was closed: {left}")


@invariant("R3")
def no_reason_is_taken_off_unseen(ghost: Ghost, what: str, seen: int | None, version: int) -> None:
    """A worker takes a ledger off the list of work only at the version that it has seen: a reason
    that came meanwhile is not taken off with the others."""
    require(seen == version, "R3", f"{what} is taken off at version {version}, seen at {seen}")


@invariant("R4", when=lambda ghost: ghost.answers_come_whole)
def nothing_is_copied_that_is_not_missing(
    ghost: Ghost, ledger: LedgerGhost, client: str, bookie_id: str, entry_id: int
) -> None:
    """Repair copies no entry to a bookie that has just shown it the entry."""
    require(
        (client, bookie_id, entry_id) not in ledger.shown,
        "R4",
        f"{client} copies ledger {ledger.ledger_id} entry {entry_id} to {bookie_id}, which had"
        " shown it that it has it",
    )


@invariant("R4", when=lambda ghost: ghost.calm_repair)
def nobody_joins_for_who_is_there(
    ghost: Ghost, before: LedgerRecord, after: LedgerRecord, now_s: float
) -> None:
    """Copies are made elsewhere of a bookie that is gone, or drained: no bookie joins in the place
    of one that has been registered for so long that a worker of repair had to see it, except one
    that shares its rack, or its address, with fewer of a write set."""
    for one in after.joining:
        if one in before.joining:
            continue
        old = before.fragment_of(one.first_entry).ensemble[one.slot]
        here_s = now_s - ghost.registered_s.get(old, now_s)
        require(
            here_s < SEEN_S or old in ghost.drained or is_better(ghost, before, one),
            "R4",
            f"{one.bookie_id} joins ledger {before.ledger_id} in the place of {old}, which is"
            f" registered for {here_s:.1f} s",
        )


@invariant("R5")
def a_bookie_is_lost_after_the_whole_delay(
    ghost: Ghost, lost: list[str], seen_gone_s: dict[str, float], whole_s: float
) -> None:
    """A bookie counts as lost only when the auditor saw it gone all through the delay, in one
    session that was whole (`whole_s`: for so long it was), however many are lost together."""
    delay_s = ghost.lost_bookie_delay_s
    early = {b: min(whole_s, seen_gone_s.get(b, 0.0)) for b in lost}
    early = {b: for_s for b, for_s in early.items() if for_s < delay_s - SLACK_S}
    require(not early, "R5", f"lost after {early} s, not after {delay_s} s")


@invariant("R5", when=lambda ghost: ghost.calm_repair)
def a_ledger_that_moves_is_left_alone(ghost: Ghost, ledger: LedgerGhost, now_s: float) -> None:
    """Repair recovers no OPEN ledger that moved within half of the delay: its writer lives."""
    idle_s = now_s - max([0.0, *ledger.moves_s[-1:]])
    require(
        idle_s >= ghost.lost_bookie_delay_s / 2 - SEEN_S,
        "R5",
        f"ledger {ledger.ledger_id} moved {idle_s:.1f} s ago, and is recovered by repair",
    )


def _keeps(swap: Swap, entry_id: int) -> bool:
    return swap.new in write_set(swap.record, entry_id, swap.fragment.ensemble)


def _copies(ghost: Ghost, ledger: LedgerGhost, entry_id: int, members: list[str]) -> list[str]:
    stored = ledger.stored.get(entry_id, {})
    return [each for each in members if each in stored and not ghost.bookie(each).wiped]
