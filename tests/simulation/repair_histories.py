"""The smallest histories that break the invariants of repair (R1 to R5), and the same unbroken."""

from dataclasses import replace
from typing import Any

from spark_ledger.metadata.ledger_record import Fragment, JoiningBookie, LedgerRecord, RecordState
from tests.simulation import invariants as I
from tests.simulation.ghost import Ghost, Home, LedgerGhost
from tests.simulation.invariants.repair import Swap

MEMBERS = Fragment(0, ("a", "b", "d"))
CLOSED = LedgerRecord(
    *(1, 3, 3, 2, (MEMBERS,)), RecordState.CLOSED, last_entry=2, length_bytes=3, rows=3
)
SWAP = Swap(CLOSED, MEMBERS, 2, "c", "d")
OPENED: dict[str, Any] = {
    "state": RecordState.OPEN,
    **dict.fromkeys(("last_entry", "length_bytes", "rows")),
}
JOINED = replace(CLOSED, joining=(JoiningBookie(0, 2, "e", "1"),))


def given(ghost: Ghost, ledger: LedgerGhost, *entries: int, fenced: bool = True) -> Any:
    """d has these entries of the ledger."""
    for entry_id in entries:
        ledger.stored[entry_id]["d"] = None
    if fenced:
        ghost.bookie("d").fence_replied[1] = 1
    return ledger, ghost.bookie("d"), SWAP


def cached(ghost: Ghost, ledger: LedgerGhost, *synced: int) -> Any:
    """The ledger is of page-cache durability; d has all, and these are synced."""
    given(ghost, ledger, 0, 1, 2)
    ghost.bookie("d").synced.update(dict.fromkeys((1, entry_id) for entry_id in synced))
    return ledger, ghost.bookie("d"), SWAP._replace(record=replace(CLOSED, durability="page-cache"))


def calm(ghost: Ghost, since_s: float, *, drained: bool = False) -> Any:
    """Since then d is registered; e joins in its place at second 10."""
    ghost.calm_repair, ghost.registered_s["d"] = True, since_s
    if drained:
        ghost.drained["d"] = None
    return CLOSED, JOINED, 10.0


def on_racks(ghost: Ghost, **racks: str) -> Any:
    """As `calm`; bookies are on these racks."""
    ghost.homes = {bookie: Home(f"{bookie}:1", rack) for bookie, rack in racks.items()}
    return calm(ghost, 2.0)


def at_addresses(ghost: Ghost, **addresses: str) -> Any:
    """As `calm`; bookies are there, on no known rack: one may have a new disk since."""
    ghost.homes = {bookie: Home(address, "") for bookie, address in addresses.items()}
    return calm(ghost, 2.0)


def shown(ledger: LedgerGhost, *entries: int) -> Any:
    """Of which d has shown these to x, which copies entry 1."""
    ledger.shown.update(dict.fromkeys(("x", "d", entry_id) for entry_id in entries))
    return ledger, "x", "d", 1


def moves(ghost: Ghost, ledger: LedgerGhost, at_s: float) -> Any:
    """The ledger moved then, and is recovered at second 20."""
    ghost.calm_repair, ghost.lost_bookie_delay_s = True, 10.0
    ledger.moves_s.append(at_s)
    return ledger, 20.0


def lost(ghost: Ghost, seen_gone_s: float, whole_s: float) -> Any:
    """d is lost, seen gone for so long, in a session that was whole for so long."""
    ghost.lost_bookie_delay_s = 10.0
    return ["d"], {"d": seen_gone_s}, whole_s


def swapped(*ensemble: str, **changes: Any) -> LedgerRecord:
    """JOINED, whose fragment has these members now, and nobody who joins."""
    return replace(JOINED, fragments=(Fragment(0, ensemble),), joining=(), **changes)


OF_REPAIR: list[Any] = [
    (
        *("18", I.every_move_is_a_row_of_the_table),
        lambda g, x: (x, JOINED, swapped("a", "b", "e"), "healer"),
        lambda g, x: (x, JOINED, swapped("a", "b", "f"), "healer"),
    ),
    (
        *("18", I.every_move_is_a_row_of_the_table),
        lambda g, x: (x, JOINED, swapped("a", "b", "e"), "healer"),
        lambda g, x: (x, JOINED, swapped("a", "e", "d"), "healer"),
    ),
    (
        *("18", I.every_move_is_a_row_of_the_table),
        lambda g, x: (x, CLOSED, JOINED, "healer"),
        lambda g, x: (x, *(replace(r, **OPENED) for r in (CLOSED, JOINED)), "healer"),
    ),
    (
        *("18", I.every_move_is_a_row_of_the_table),
        lambda g, x: (x, JOINED, CLOSED, "healer"),
        lambda g, x: (x, JOINED, replace(CLOSED, rows=4), "healer"),
    ),
    (
        *("R1", I.a_slot_goes_to_who_has_every_entry),
        lambda g, x: given(g, x, 0, 1, 2),
        lambda g, x: given(g, x, 0, 2),
    ),
    (
        *("R1", I.a_slot_goes_to_who_has_every_entry),
        lambda g, x: given(g, x, 0, 1, 2),
        lambda g, x: given(g, x, 0, 1, 2, fenced=False),
    ),
    (
        *("R1", I.a_slot_goes_to_who_has_every_entry),
        lambda g, x: cached(g, x, 0, 1, 2),
        lambda g, x: cached(g, x, 0, 1),
    ),
    (
        *("R1", I.who_took_a_slot_has_all_of_it),
        lambda g, x: ("d", 1, []),
        lambda g, x: ("d", 1, [2]),
    ),
    (
        *("R2", I.a_swap_takes_no_copy_away),
        lambda g, x: (given(g, x, 0, 1, 2)[0], SWAP),
        lambda g, x: (given(g, x, 0, 1)[0], SWAP),
    ),
    (*("R3", I.work_ends), lambda g, x: ([], 1.0), lambda g, x: (["ledger 1"], 1.0)),
    (
        *("R3", I.no_reason_is_taken_off_unseen),
        lambda g, x: ("ledger 1", 2, 2),
        lambda g, x: ("ledger 1", 2, 3),
    ),
    (
        *("R4", I.nothing_is_copied_that_is_not_missing),
        lambda g, x: shown(x, 0),
        lambda g, x: shown(x, 0, 1),
    ),
    (
        *("R4", I.nobody_joins_for_who_is_there),
        lambda g, x: calm(g, 9.5),
        lambda g, x: calm(g, 2.0),
    ),
    (
        *("R4", I.nobody_joins_for_who_is_there),
        lambda g, x: calm(g, 2.0, drained=True),
        lambda g, x: calm(g, 2.0),
    ),
    (
        *("R4", I.nobody_joins_for_who_is_there),
        lambda g, x: on_racks(g, a="r2", b="r1", d="r1", e="r3"),
        lambda g, x: on_racks(g, a="r2", b="r1", d="r1", e="r2"),
    ),
    (
        *("R4", I.nobody_joins_for_who_is_there),
        lambda g, x: at_addresses(g, a="a:1", b="b:1", d="b:1", e="e:1"),
        lambda g, x: at_addresses(g, a="a:1", b="b:1", d="b:1", e="a:1"),
    ),
    (
        *("R5", I.a_ledger_that_moves_is_left_alone),
        lambda g, x: moves(g, x, 14.0),
        lambda g, x: moves(g, x, 17.0),
    ),
    (
        *("R5", I.a_bookie_is_lost_after_the_whole_delay),
        lambda g, x: lost(g, 11.0, 12.0),
        lambda g, x: lost(g, 5.0, 12.0),
    ),
    (
        *("R5", I.a_bookie_is_lost_after_the_whole_delay),
        lambda g, x: lost(g, 11.0, 12.0),
        lambda g, x: lost(g, 11.0, 5.0),
    ),
]
