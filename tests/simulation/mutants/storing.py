"""Bugs of a storage node with several directories, and of what reclaims its space."""

import asyncio
from typing import Any

from bookie_server.journal import checkpoint
from bookie_server.ledgers import cluster_ledgers
from bookie_server.logs.scan import locations_in
from bookie_server.reclaim import compact as compactor
from bookie_server.storage import storage as ledger_storage
from spark_ledger.metadata import paths
from spark_ledger.metadata.deleted_ledgers import IDS_PER_FOLDER
from spark_ledger.metadata.store import StoreError
from tests.simulation.mutants.mutant import Mutant

SEVERAL = {
    "quorum": (3, 3, 2),
    "bookies": 3,
    "faults": ("power", "kill", "slow disk"),
    "between_s": 0.4,
    "writers": 2,
    "recoverers": 1,
    "tailers": 0,
    "journals": 2,
    "directories": 2,
    "tight": False,
    "entries": (10, 30),
    "over_budget": False,
}
RECLAIMED = {
    **SEVERAL,
    "chaos_s": 18.0,
    "recoverers": 3,
    "journals": 1,
    "directories": 1,
    "tight": True,
    "entries": (15, 40),
}
UNREADABLE = {**RECLAIMED, "faults": ("kill", "suspension", "stall")}
OLDER = {**RECLAIMED, "faults": ("kill", "older store")}


def marks_as_one(move: Any) -> Any:
    """The positions of several journals are put in one order: what is beyond the one is beyond
    the other."""

    async def moved(self: Any, flush: Any) -> None:
        furthest = max(flush.marks.values(), default=None)
        await move(self, flush._replace(marks=dict.fromkeys(flush.marks, furthest)))

    return moved


def marked_when_one_is_flushed(write: Any) -> Any:
    """The first directory whose part is durable writes the mark, as if it spoke for all."""

    async def written(self: Any, flush: Any) -> None:
        live = self.directories.live
        if flush.marks is not None and len(live) > 1:
            first = live[0]
            entries = flush.half.to_write(flush.parts.get(first.id, ()))
            await first.write(entries, flush.changes)
            marks = {i: checkpoint.JournalMark(position) for i, position in flush.marks.items()}
            await checkpoint.write(first.disk, {**self._marks, **marks})
            await asyncio.sleep(0.3)  # the other one is slower
        await write(self, flush)

    return written


def source_removed_before_the_index(finish: Any) -> Any:
    """The old log goes when the index points to the copy, not when that is durable."""

    async def finished(self: Any, copy_id: int, source: int, *, is_doubtful: bool) -> None:
        pointing, whole = await self._move_index(copy_id, source)
        if whole:
            await self._remove_source(source, is_doubtful=is_doubtful)
        if pointing:
            await self._store.logs.finish_copy(copy_id)

    return finished


def doubts_before_the_index_turned(finish: Any) -> Any:
    """What the index still points to in a log is taken for lost before it points to the copy."""

    async def finished(self: Any, copy_id: int, source: int, *, is_doubtful: bool) -> None:
        for place in await locations_in(self._store.index, source):
            self._quarantine(place.ledger_id, place.entry_id, "its log is compacted")
        await finish(self, copy_id, source, is_doubtful=is_doubtful)

    return finished


def error_taken_for_a_deletion(init: Any) -> Any:
    """A record that cannot be read is a ledger that was deleted; nobody looks twice."""

    def made(self: Any, metadata: Any, cluster_id: str) -> None:
        async def deleted(ledger_ids: Any) -> list[int]:
            gone = []
            for ledger_id in ledger_ids:
                try:
                    await metadata.get(paths.ledger(ledger_id))
                except StoreError:
                    gone.append(ledger_id)
            return gone

        async def the_same(ledger_ids: Any) -> list[int]:
            return list(ledger_ids)

        async def known() -> bool:
            return True

        init(self, metadata, cluster_id)
        self.find_deleted, self.confirm_deleted, self.was_store_ours = deleted, the_same, known

    return made


def absence_taken_for_a_deletion(named: Any) -> Any:
    """A ledger without a record was deleted, whatever was named."""

    async def every(self: Any, folder: str) -> Any:
        first = paths.first_in_folder(folder)
        return range(first, first + IDS_PER_FOLDER)

    return every


S = ledger_storage.LedgerStorage
MUTANTS = (
    Mutant("marks compared as one", "BK#4844", S, "_move_checkpoint", marks_as_one, SEVERAL),
    Mutant(
        "mark moved when one directory is flushed",
        "BK#3329",
        S,
        "_write",
        marked_when_one_is_flushed,
        SEVERAL,
    ),
    Mutant(
        "source removed before the index is durable",
        "BK#1534",
        compactor.Compactor,
        "_finish",
        source_removed_before_the_index,
        RECLAIMED,
    ),
    Mutant(
        "what was copied taken for damaged",
        "limbo",
        compactor.Compactor,
        "_finish",
        doubts_before_the_index_turned,
        RECLAIMED,
    ),
    Mutant(
        "error taken for a deleted ledger",
        "BK#870",
        cluster_ledgers.ClusterLedgers,
        "__init__",
        error_taken_for_a_deletion,
        UNREADABLE,
    ),
    Mutant(
        *(
            "absence taken for a deletion",
            "C9",
            cluster_ledgers.ClusterLedgers,
            "_read_deleted_set",
        ),
        *(absence_taken_for_a_deletion, OLDER),
    ),
)
