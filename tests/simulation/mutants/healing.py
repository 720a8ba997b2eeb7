"""Bugs of self-healing: who counts as lost, who joins, what is copied, when a slot is given away,
and what becomes of the list of work."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from bookie_server import add
from spark_ledger.errors import LedgerError, NoSuchLedger
from spark_ledger.ledger import transitions
from spark_ledger.ledger.ensemble_change import AbsentMembers
from spark_ledger.metadata import paths
from spark_ledger.metadata.ledger_record import JoiningBookie, LedgerRecord
from spark_ledger.metadata.store import NoNode, OutcomeUnknown
from spark_ledger.repair import copies, slots, work_list, worker
from spark_ledger.repair.auditor import Absence
from spark_ledger.repair.copies import Copies
from tests.simulation.mutants.mutant import Mutant

HEALS: Mapping[str, Any] = {
    "quorum": (3, 3, 2),
    "bookies": 5,
    "faults": ("kill",),
    "between_s": 1.0,
    "chaos_s": 30.0,
    "writers": 2,
    "recoverers": 1,
    "tailers": 0,
    "journals": 1,
    "directories": 1,
    "tight": True,
    "places": 0,
    "healing": True,
    "over_budget": False,
    "lasting": False,
    "operators": False,
}
DISTURBED = {**HEALS, "faults": ("kill", "expiry", "suspension", "pause")}
BLIND = {**HEALS, "faults": ("kill", "partition", "loss")}
RACKED = {**HEALS, "chaos_s": 10.0, "racks": "soft", "own_policy": False}
STRIPED = {**HEALS, "quorum": (4, 3, 2), "bookies": 6}
CACHED = {
    **HEALS,
    "quorum": (3, 3, 3),
    "faults": ("power", "power everywhere"),
    "between_s": 0.5,
    "page_cache": True,
    "password": False,
}


def nobody_is_named(run: Any) -> Any:
    """Copies are made at once, and who gets them is named with the swap."""

    async def made(self: Any) -> Any:
        known = await self._records.read(self._ledger_id, fresh=True)
        joining = self._choose_joining(known.record)
        return await self._fill(known, joining) if joining else await run(self)

    return made


def any_joining_will_do(swap: Any) -> Any:
    """A swap looks who is joining, and not whether it is the joining that was copied for."""

    def swapped(record: LedgerRecord, old: str, new: JoiningBookie) -> Any:
        found = record.joining_at(new.first_entry, new.slot)
        same = found is not None and found.bookie_id == new.bookie_id
        return swap(record, old, found if same else new)

    return swapped


def unsupplied_is_forgotten(bring_back: Any) -> Any:
    """What no peer supplies does not stand in the way of the swap."""

    async def brought(self: Any, entries: range, slot: int) -> None:
        await bring_back(self, entries, slot)
        self.unsupplied.clear()

    return brought


def everything_is_settled(_: Any) -> Any:
    """The end of an OPEN ledger is repaired too."""
    return lambda record, first_entry: True


def fences_nobody(init: Any) -> Any:
    """Who joins a CLOSED ledger is not fenced."""

    def made(self: Any, *args: Any, fence: bool, **options: Any) -> None:
        init(self, *args, fence=False, **options)

    return made


def who_joins_is_no_keeper(_: Any) -> Any:
    """Whose name is only that of somebody joining keeps nothing by the record: GC takes it."""

    def names(self: Any, bookie_id: str) -> bool:
        return any(bookie_id in fragment.ensemble for fragment in self.fragments)

    return names


def reasons_hold_for_ever(_: Any) -> Any:
    """Whether the bookie is back is not looked at when the work begins."""
    return lambda reason, now: True


def taken_off_at_any_version(remove: Any) -> Any:
    """A ledger is taken off the list whatever reason came meanwhile."""

    async def taken(store: Any, work: Any) -> None:
        with suppress(NoNode, OutcomeUnknown):
            await store.delete(paths.underreplicated(work.ledger_id))

    return taken


def never_taken_off(remove: Any) -> Any:
    """What is whole stays on the list."""

    async def stays(store: Any, work: Any) -> None:
        return

    return stays


def sessions_are_one(look: Any) -> Any:
    """Absence counts across a broken session."""

    def looked(self: Any, now: Any, session: int, known: Any, registered: Any) -> None:
        look(self, now, 1, known, registered)

    return looked


def sooner_for_several(gone: Any) -> Any:
    """Where two are gone they are lost after half of the delay."""

    def all_gone(self: Any, now_s: float, delay_s: float) -> frozenset[str]:
        several = gone(self, now_s, delay_s / 2)
        return several if len(several) > 1 else gone(self, now_s, delay_s)

    return all_gone


def every_writer_is_gone(_: Any) -> Any:
    """An OPEN ledger is recovered whether its writer moves or not."""

    async def may(self: Any, known: Any) -> bool:
        return True

    return may


def one_copy_too_few(keeps: Any) -> Any:
    """The last slot of each write set is not taken for one."""

    def kept(record: LedgerRecord, slot: int, entry_id: int) -> bool:
        return (slot - entry_id) % record.ensemble_size < record.write_quorum - 1

    return kept


def copies_ride_with_adds(_: Any) -> Any:
    """What recovery and repair add is acknowledged before it is synced, as the writer's adds of a
    page-cache ledger are."""
    return lambda add, handle: handle.lane


def everything_is_copied(lacking: Any) -> Any:
    """What is there already is copied again."""

    async def all_of_it(self: Any, entries: range, slot: int) -> Any:
        async for _ in lacking(self, entries, slot):
            pass
        yield [each for each in entries if copies.should_keep(self._record, slot, each)]

    return all_of_it


def nobody_leaves(_: Any) -> Any:
    """Who joined in the place of a bookie that is back goes on joining for ever."""

    async def stays(self: Any, known: Any, going: Any) -> None:
        return

    return stays


def locked_for_ever(lock: Any) -> Any:
    """A lock does not end with the session of who took it."""

    async def locked(store: Any, ledger_id: int) -> bool:
        plain = store.create

        async def create(path: str, value: bytes = b"", **options: Any) -> None:
            await plain(path, value, **{**options, "ephemeral": False})

        store.create = create
        try:
            return bool(await lock(store, ledger_id))
        finally:
            store.create = plain

    return locked


def never_asked_again(_: Any) -> Any:
    """Whether the bookie is back is not asked while its copies are made elsewhere."""

    def pace_of(self: Any, absent: str) -> Any:
        return copies.unpaced

    return pace_of


def deleted_is_a_hindrance(repair: Any) -> Any:
    """That a ledger was deleted stands in the way of its repair, as any error does."""

    async def repaired(self: Any, work: Any) -> Any:
        try:
            return await repair(self, work)
        except NoSuchLedger as gone:
            raise LedgerError(gone.what) from gone

    return repaired


def draining_is_forgotten(give_away: Any) -> Any:
    """Copies of a bookie that is drained are made at others that are lost or drained."""

    async def given(*args: Any, avoid: Any = (), **options: Any) -> Any:
        return await give_away(*args, **options)

    return given


def one_rack_is_as_good(_: Any) -> Any:
    """Nobody sees that two copies are on one rack, and others are there."""
    return lambda *_: []


def left_by_its_writer(_: Any) -> Any:
    """A writer that is idle replaces no member that is drained."""

    async def drained(self: Any) -> list[str]:
        return []

    return drained


M = Mutant
MUTANTS = (
    M(
        *("copies before a bookie is named", "BK#1534", slots._Move, "run"),
        *(nobody_is_named, HEALS),
    ),
    M(
        *("swapped although no peer supplies an entry", "BK#870", Copies, "bring_back"),
        *(unsupplied_is_forgotten, BLIND),
    ),
    M(
        *("end of an open ledger repaired", "BK#3329", transitions, "is_fragment_complete"),
        *(everything_is_settled, HEALS),
    ),
    M("joining bookie left unfenced", "protocol 1.9", Copies, "__init__", fences_nobody, HEALS),
    M(
        *("back and not looked at", "protocol 1.10", worker, "_still_holds"),
        *(reasons_hold_for_ever, HEALS),
    ),
    M(
        *("taken off the list at any version", "protocol 1.10", work_list, "remove"),
        *(taken_off_at_any_version, DISTURBED),
    ),
    M("never taken off the list", "protocol 1.10", work_list, "remove", never_taken_off, HEALS),
    M(
        *("absence counted across sessions", "BK#4872", Absence, "look"),
        *(sessions_are_one, DISTURBED),
    ),
    M(
        *("lost sooner where several are", "protocol 1.10", Absence, "gone"),
        *(sooner_for_several, HEALS),
    ),
    M(
        *("open ledger of a living writer recovered", "BK#1908", worker.Worker, "_may_close"),
        *(every_writer_is_gone, HEALS),
    ),
    M("write set one short", "protocol 1.7", copies, "should_keep", one_copy_too_few, STRIPED),
    M("copies not synced", "page cache", add, "_lane", copies_ride_with_adds, CACHED),
    M("everything copied again", "protocol 1.9", Copies, "_lacking", everything_is_copied, HEALS),
    M(
        *("no joining bookie leaves", "protocol 1.9", worker.Worker, "_withdraw"),
        *(nobody_leaves, BLIND),
    ),
    M(
        "two on one rack unseen",
        "protocol 1.10",
        slots,
        "misplaced_in",
        one_rack_is_as_good,
        RACKED,
    ),
)

BACK, GONE_AGAIN = "healing, it is back", "healing, back, and gone again"
REACHED: tuple[tuple[Mutant, tuple[str, ...]], ...] = (
    (
        M(
            *("any joining will do", "protocol 1.9", transitions, "swap"),
            *(any_joining_will_do, DISTURBED),
        ),
        (GONE_AGAIN,),
    ),
    (
        M(
            *("joining bookie is no keeper", "BK#4844", LedgerRecord, "names"),
            *(who_joins_is_no_keeper, HEALS),
        ),
        ("healing, drained, and garbage goes",),
    ),
    (
        M("lock for ever", "protocol 1.9", work_list, "lock", locked_for_ever, DISTURBED),
        ("healing",),
    ),
    (
        M(
            *("never asked again", "protocol 1.10", worker.Worker, "_pace_of"),
            *(never_asked_again, HEALS),
        ),
        (BACK,),
    ),
    (
        M(
            *("deleted and listed for ever", "protocol 1.10", worker.Worker, "_repair"),
            *(deleted_is_a_hindrance, HEALS),
        ),
        ("healing, deleted by others",),
    ),
    (
        M(
            *(
                "drained member left by its writer",
                "protocol 1.10",
                AbsentMembers,
                "_read_drained_ids",
            ),
            *(left_by_its_writer, HEALS),
        ),
        ("decommission, its writer is idle",),
    ),
)
"""Looked for at the points of these deeds first (reach.py)."""

UNCAUGHT = (
    M(
        *("copies made at who is to go", "protocol 1.10", slots, "give_away"),
        *(draining_is_forgotten, HEALS),
    ),
)
"""It breaks nothing: who is drained is read-only, and who is lost is not registered, so nobody
chooses them anyhow."""
