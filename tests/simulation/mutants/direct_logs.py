"""Bugs of large entries that are written once: what an ack waits for, what a start reads of direct
logs, and how far their marks may go."""

from typing import Any

from bookie_server.logs import direct_log, entry_log
from bookie_server.start import applier, replay
from bookie_server.storage import appends
from bookie_server.storage import storage as ledger_storage
from bookie_server.storage.directories import DirectoryStore
from bookie_server.storage.write_cache import CacheHalf
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
FULL = {**PLACED, "faults": ("kill", "slow disk"), "tight": True}
"""Small logs, soon full."""
ROLLED = {
    **PLACED,
    "faults": ("kill", "slow disk"),
    "chaos_s": 18.0,
    "between_s": 0.3,
    "writers": 4,
    "streams": 2,
    "tight": True,
    "entries": (30, 60),
}
"""Small logs, and flushes that fill several of them."""
ROTTEN = {
    **PLACED,
    "faults": ("bit rot", "power cut while writing", "kill"),
    "between_s": 0.3,
    "recoverers": 3,
}
BEREFT = {
    **PLACED,
    "quorum": (5, 5, 5),
    "bookies": 5,
    "faults": ("lost directory", "kill"),
    "directories": 2,
    "between_s": 0.3,
    "chaos_s": 18.0,
    "recoverers": 2,
}


class _Unsynced:
    """A log's file whose writes nobody syncs."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    async def append(self, buffers: Any, *, sync: bool = False) -> Any:
        return await self._file.append(buffers)


def no_sync_of_the_data(append: Any) -> Any:
    async def appended(self: Any, chunk: Any, *, sync: bool = False) -> Any:
        file, self.file = self.file, _Unsynced(self.file) if sync else self.file
        try:
            return await append(self, chunk, sync=sync)
        finally:
            self.file = file

    return appended


def no_sync_of_the_name(begin: Any) -> Any:
    async def begun(self: Any) -> Any:
        self._log = await self._logs.begin()
        await self._log.file.sync()
        await self._index.mark_logs({self._log.log_id: self._log.file.end})
        await self._index.sync()
        return self._log

    return begun


def no_sync_of_the_mark(begin: Any) -> Any:
    async def begun(self: Any) -> Any:
        self._log = await self._logs.begin()
        await self._log.sync(self._disk)
        await self._index.mark_logs({self._log.log_id: self._log.file.end})
        return self._log

    return begun


def tells_nobody(tell: Any) -> Any:
    return lambda self, ledger_id, store: None


def reads_no_direct_log(replay_direct_logs: Any) -> Any:
    async def nothing(storage: Any, replayed: Any) -> None:
        return

    return nothing


def forgets_marks_at_once(replay_direct_logs: Any) -> Any:
    async def placed(storage: Any, replayed: Any) -> None:
        await replay_direct_logs(storage, replayed)
        await storage.forget_replayed_logs()

    return placed


def marks_as_of_now(write: Any) -> Any:
    async def written(
        self: Any, entries: Any, changes: Any, placed: Any = (), puts: int = 0
    ) -> None:
        await write(self, entries, changes, placed, self.direct_log.puts)

    return written


def mark_gone_when_full(end: Any) -> Any:
    async def ended(self: Any, log: Any) -> None:
        await end(self, log)
        await self._index.mark_logs({log.log_id: None})

    return ended


def damage_is_torn(judge: Any) -> Any:
    def judged(self: Any, end: int, synced: int) -> Any:
        damaged, torn = judge(self, end, synced)
        return [], [*damaged, *torn]

    return judged


def torn_is_damage(judge: Any) -> Any:
    return lambda self, end, synced: judge(self, end, end)


def rescues_nothing(rescue: Any) -> Any:
    return lambda self, ledger_id: []


def waits_for_no_place(init: Any) -> Any:
    class _Unseen(dict[Any, Any]):
        def __bool__(self) -> bool:
            return False

    def made(self: Any) -> None:
        init(self)
        self.direct_writes = _Unseen()

    return made


def waits_for_nothing(before: Any) -> Any:
    return lambda self, records, lane, after: []


SYNC = "BP-46 (15)"
P, L = appends.DirectWrites, direct_log.DirectLog
G, C = entry_log.GrowingLog, applier.Coverage
S = ledger_storage.LedgerStorage
MUTANTS = (
    Mutant("data of a place not synced", SYNC, G, "append", no_sync_of_the_data, PLACED),
    Mutant("name of its log not synced", SYNC, L, "_begin_log", no_sync_of_the_name, PLACED),
    Mutant("mark of its log not synced", SYNC, L, "_begin_log", no_sync_of_the_mark, PLACED),
    Mutant(
        "place in a directory that no record names",
        SYNC,
        P,
        "_name_directory",
        tells_nobody,
        PLACED,
    ),
    Mutant(
        "direct logs not read at a start",
        "BP-46, 2",
        replay,
        "replay_direct_logs",
        reads_no_direct_log,
        PLACED,
    ),
    Mutant(
        "marks forgotten before the flush of a start",
        "direct writes",
        replay,
        "replay_direct_logs",
        forgets_marks_at_once,
        PLACED,
    ),
    Mutant(
        "mark beyond what the flush has",
        "BK#4740",
        DirectoryStore,
        "write",
        marks_as_of_now,
        PLACED,
    ),
    Mutant("mark gone when its log is full", "direct writes", L, "_end", mark_gone_when_full, FULL),
    Mutant("damage taken for a torn place", "limbo", C, "judge", damage_is_torn, ROTTEN),
    Mutant("torn place taken for damage", "limbo", C, "judge", torn_is_damage, ROTTEN),
    Mutant("nothing rescued from memory", "direct writes", S, "rescue", rescues_nothing, BEREFT),
    Mutant(
        "flush does not wait for places",
        "direct writes",
        CacheHalf,
        "__init__",
        waits_for_no_place,
        ROLLED,
    ),
    Mutant(
        "no request waits for large entries",
        "direct writes",
        P,
        "_earlier_appends",
        waits_for_nothing,
        AGAIN,
    ),
)
