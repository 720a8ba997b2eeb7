"""Bugs of large entries that are written once: what is synced when, what is waited for, and what
may be reclaimed."""

from typing import Any

from bookie_server import entry_log, placed_log, placing, replay, write_cache
from bookie_server.entry_log import FOLDER
from bookie_server.replayed import Replayed
from tests.simulation.mutants.mutant import Mutant

PLACED = {
    "quorum": (3, 3, 2),
    "bookies": 3,
    "faults": ("power", "slow disk"),
    "between_s": 0.4,
    "writers": 2,
    "recoverers": 1,
    "tailers": 0,
    "journals": 1,
    "directories": 1,
    "tight": False,
    "entries": (10, 30),
    "over_budget": False,
    "large": 65,
}
AGAIN = {**PLACED, "faults": ("power", "pause", "zombie", "slow disk"), "recoverers": 3}
AWAY = {**PLACED, "faults": ("directory away", "kill"), "directories": 2}
FULL = {**PLACED, "faults": ("disk full",), "chaos_s": 18.0, "between_s": 0.8, "tight": True}
ROLLED = {
    **PLACED,
    "faults": ("kill",),
    "chaos_s": 18.0,
    "recoverers": 3,
    "tight": True,
    "entries": (15, 40),
}
"""Small logs, and ledgers that are deleted from them."""
FLUSHED = {**ROLLED, "faults": ("kill", "slow disk"), "large": 300}


def no_sync_of_the_data(append_synced: Any) -> Any:
    async def appended(self: Any, chunk: Any, disk: Any) -> Any:
        places = await self.append(chunk)
        await disk.sync_dir(FOLDER)
        return places

    return appended


def no_sync_of_the_name(append_synced: Any) -> Any:
    async def appended(self: Any, chunk: Any, disk: Any) -> Any:
        return await self.append(chunk, sync=True)

    return appended


def acknowledged_before_the_journal(written: Any) -> Any:
    def told(self: Any, large: Any, placed: Any, places: Any) -> None:
        if not large.done.done():
            large.done.set_result(None)
        written(self, large, placed, places)

    return told


def forgets_places(place: Any) -> Any:
    async def nothing(self: Any, ledger_id: int, places: Any) -> None:
        return

    return nothing


def waits_for_no_place(init: Any) -> Any:
    class _Unseen(dict[Any, Any]):
        def __bool__(self) -> bool:
            return False

    def made(self: Any) -> None:
        init(self)
        self.placing = _Unseen()

    return made


def sealed_when_full(seal: Any) -> Any:
    def sealed(self: Any, log_id: int) -> None:
        if log_id in self._full:
            del self._full[log_id]
            self._logs.seal(log_id)

    return sealed


def forgets_the_absent(judge: Any) -> Any:
    async def nothing(absent: Any, storage: Any) -> None:
        return

    return nothing


def waits_for_nothing(before: Any) -> Any:
    return lambda self, records, lane, after: []


SYNC = "BP-46 (15)"
P, L = placing.Placing, placed_log.PlacedLog
G, H = entry_log.GrowingLog, write_cache.CacheHalf
MUTANTS = (
    Mutant("data of a place not synced", SYNC, G, "append_synced", no_sync_of_the_data, PLACED),
    Mutant("name of its log not synced", SYNC, G, "append_synced", no_sync_of_the_name, PLACED),
    Mutant(
        "ack before the journal has the place",
        SYNC,
        P,
        "_written",
        acknowledged_before_the_journal,
        PLACED,
    ),
    Mutant("places forgotten at replay", "BP-46, 2", Replayed, "_place", forgets_places, PLACED),
    Mutant("flush does not wait for places", "placing", H, "__init__", waits_for_no_place, FLUSHED),
    Mutant("log sealed as soon as it is full", "placing", L, "_seal", sealed_when_full, FULL),
    Mutant(
        "place in an absent directory forgotten",
        "placing",
        replay,
        "_judge_absent",
        forgets_the_absent,
        AWAY,
    ),
    Mutant("nobody waits for large entries", "placing", P, "_before", waits_for_nothing, AGAIN),
)
