"""Bugs of a bookie's flush, checkpoint, rolls, collection, compaction and limbo as an engineer may
make them.

Each is looked for at the points of the deeds named with it (tests/storage), or by seeds.
"""

from dataclasses import replace
from typing import Any

from bookie_server.disk.interface import Disk
from bookie_server.journal import checkpoint
from bookie_server.journal.writer import Journal
from bookie_server.ledgers import registry
from bookie_server.ledgers.limbo import Limbo
from bookie_server.ledgers.registry import LedgerHandles
from bookie_server.logs.entry_log import COMPACTING, FOLDER, EntryLogs, _copy_path, _path
from bookie_server.reclaim import collect as garbage_collector
from bookie_server.reclaim import compact as compactor
from bookie_server.start import replay
from bookie_server.storage.directories import DirectoryStore, Stores
from bookie_server.storage.storage import LedgerStorage
from bookie_server.storage.write_cache import CacheHalf
from spark_ledger.repair.copies import Copies
from tests.simulation.mutants.mutant import Mutant
from tests.simulation.mutants.storing import RECLAIMED, SEVERAL

POWER = {**SEVERAL, "directories": 1, "journals": 1}
CACHED = {
    **RECLAIMED,
    "faults": ("power", "power cut while writing", "kill"),
    "page_cache": True,
    "lasting": False,
    "password": False,
}
LOST = {
    **RECLAIMED,
    "faults": ("lost directory", "kill", "power cut while writing"),
    "tight": False,
}


# -- flush and checkpoint ------------------------------------------------------------------------


def segments_go_first(move: Any) -> Any:
    """Segments are removed, then the checkpoint that needs them no more is written."""

    async def moved(self: Any, flush: Any) -> None:
        await self._journals.forget_before(flush.marks)
        await move(self, flush)

    return moved


def written_in_place(write: Any) -> Any:
    """The checkpoint is overwritten where it lies."""

    async def written(disk: Disk, marks: Any) -> None:
        await disk.make_folder(checkpoint.FOLDER)
        if checkpoint.PATH.split("/")[1] in await disk.list(checkpoint.FOLDER):
            await disk.remove(checkpoint.PATH)
        file = await disk.create(checkpoint.PATH)
        try:
            await file.append([checkpoint.encode(marks)], sync=True)
        finally:
            await file.close()

    return written


def without_what_changed(write: Any) -> Any:
    """A flush writes entries, and no states."""

    async def written(self: Any, flush: Any) -> None:
        await write(self, flush._replace(changes=type(flush.changes)((), ())))

    return written


def index_not_synced(write: Any) -> Any:
    """A flush gives the index what it has and leaves it to sync by itself."""

    async def written(
        self: Any, entries: Any, changes: Any, placed: Any = (), puts: int = 0
    ) -> None:
        async def later() -> None:
            return None

        sync, self.index.sync = self.index.sync, later
        try:
            await write(self, entries, changes, placed, puts)
        finally:
            self.index.sync = sync

    return written


def dropped_before_it_is_written(carry_out: Any) -> Any:
    """The write cache lets a half go when its flush begins."""

    async def carried_out(self: Any) -> None:
        cache = self.cache
        if self._current_flush is not None:
            cache.flushing = CacheHalf()
            cache.drop_flushed = lambda: None
        try:
            await carry_out(self)
        finally:
            cache.__dict__.pop("drop_flushed", None)

    return carried_out


def checkpoint_in_one(write_checkpoint: Any) -> Any:
    """Of several directories the first has the checkpoint, and others keep an older one."""

    async def written(self: Any, marks: Any) -> None:
        await checkpoint.write(self.live[0].disk, marks)

    return written


# -- journals ------------------------------------------------------------------------------------


def rolls_unsynced(roll: Any) -> Any:
    """A full segment is left without the sync that was put off."""

    async def rolled(self: Any) -> None:
        self._sync_at = None
        await roll(self)

    return rolled


def ends_at_a_missing_segment(records: Any) -> Any:
    """A segment that is missing counts as the end of the journal."""

    async def until_then(self: Any) -> Any:
        async for some in records(self):
            yield some
        self._losses.clear()

    return until_then


def replays_from_the_next(begin: Any) -> Any:
    """Replay begins with the segment after the one that the mark lies in."""

    async def later(disk: Any, mark: Any, replayed: Any) -> Any:
        if mark is not None:
            position = mark.position
            mark = mark._replace(position=position._replace(offset=1 << 40))
        return await begin(disk, mark, replayed)

    return later


# -- collection and compaction -------------------------------------------------------------------


def surplus_at_the_first_look(drop: Any) -> Any:
    """What the record says belongs elsewhere goes at the first look."""

    async def at_once(self: Any, directories: Any) -> Any:
        await drop(self, directories)
        return await drop(self, directories)

    return at_once


def forgotten_at_once(flushes: Any) -> Any:
    """A deleted ledger is forgotten without waiting for flushes."""
    return 0


def forgotten_with_entries_here(stored: Any) -> Any:
    """What is in an index of a ledger that was deleted is not asked when it is forgotten."""

    async def nothing(self: Any, ledger_id: int, directories: Any) -> bool:
        return False

    return nothing


def index_let_go_unsynced(delete: Any) -> Any:
    """Entries that are collected leave the index, which is synced with the next flush."""

    async def unsynced(store: Any, ledger_ids: Any, is_still: Any, going: Any) -> Any:
        async def later() -> None:
            return None

        sync, store.index.sync = store.index.sync, later
        try:
            return await delete(store, ledger_ids, is_still, going)
        finally:
            store.index.sync = sync

    return unsynced


def never_redone(redo: Any) -> Any:
    """A start does not finish what a compaction left between copy and source."""

    async def nothing(self: Any) -> None:
        return None

    return nothing


def published_unsynced(publish: Any) -> Any:
    """A copy has its final name before it is synced."""

    async def published(self: Any, copy: Any, source: int) -> None:
        await copy.append_footer()
        await copy.file.close()
        path = _copy_path(copy.log_id, source)
        await self._disk.rename(_path(copy.log_id, COMPACTING), path)
        await self._disk.sync_dir(FOLDER)
        self._unfinished_copies[copy.log_id] = source

    return published


def turned_by_half(turn_to: Any) -> Any:
    """The index is turned for the first run of a chunk."""

    async def turned(self: Any, chunk: Any, source: int) -> int:
        return int(await turn_to(self, chunk._replace(records=chunk.records[:1]), source))

    return turned


# -- limbo ---------------------------------------------------------------------------------------


def no_tail_in_doubt(doubt: Any) -> Any:
    """A torn tail puts nothing in doubt."""
    return lambda ending, storage: None


def closed_ones_are_whole(judge: Any) -> Any:
    """After a torn tail CLOSED ledgers are not counted."""

    async def whole(self: Any, record: Any) -> str:
        return ""

    return whole


def walk_fences_nobody(put_in_limbo_or_fence: Any) -> Any:
    """What a walk finds IN_RECOVERY or CLOSED is not fenced again."""

    async def unfenced(self: Any, judgements: Any) -> None:
        await put_in_limbo_or_fence(
            self, [(ledger_id, limbo, False) for ledger_id, limbo, _ in judgements]
        )

    return unfenced


def any_revision_clears(answer: Any) -> Any:
    """What changed since the comparison began does not count."""

    async def answered(self: Any, request: Any) -> Any:
        if request.clear:
            _, revision = self._sent_state(request.ledger_id)
            request = replace(request, revision=revision)
        return await answer(self, request)

    return answered


def compares_the_first_window(lacking: Any) -> Any:
    """Repair compares the first window of entries, and clears."""

    async def first(self: Any, entries: range, slot: int) -> Any:
        async for some in lacking(self, entries, slot):
            yield some
            return

    return first


def torn_covers_lost(worse: Any) -> Any:
    """The reason found last is the one that counts."""
    return lambda one, other: other or one


FLUSHES = ("flush", "flush of two and two", "flush of a fence", "roll of entry logs", "replay")
COMPACTIONS = ("compaction", "collection", "reclaim beside a flush")
WALKS = ("walk after a lost fence", "walk after a lost entry")
T = Mutant
REACHED: tuple[tuple[Mutant, tuple[str, ...]], ...] = (
    (
        T(
            *("segments go before the checkpoint", "checkpoint", LedgerStorage),
            *("_move_checkpoint", segments_go_first, POWER),
        ),
        FLUSHES,
    ),
    (T("checkpoint in place", "checkpoint", checkpoint, "write", written_in_place, POWER), FLUSHES),
    (
        T("flush without states", "BK#4843", LedgerStorage, "_write", without_what_changed, POWER),
        FLUSHES,
    ),
    (
        T("flush leaves the index", "BP-46", DirectoryStore, "write", index_not_synced, POWER),
        FLUSHES,
    ),
    (
        T(
            *("cache let go too early", "BP-46", LedgerStorage, "carry_out"),
            *(dropped_before_it_is_written, POWER),
        ),
        FLUSHES,
    ),
    (
        T(
            *("checkpoint in one directory", "BK#3329", Stores, "write_checkpoint"),
            *(checkpoint_in_one, SEVERAL),
        ),
        FLUSHES,
    ),
    (
        T("roll without a sync", "BK#3830", Journal, "_use_next_segment", rolls_unsynced, CACHED),
        ("roll of the journal",),
    ),
    (
        T("replay from after the mark", "BP-46", replay, "_replay", replays_from_the_next, POWER),
        ("replay", "flush"),
    ),
    (
        T(
            *("surplus at the first look", "collection", garbage_collector.GarbageCollector),
            *("drop_surplus", surplus_at_the_first_look, RECLAIMED),
        ),
        ("collection of a copy",),
    ),
    (
        T(
            *("forgotten at once", "collection", garbage_collector, "FLUSHES_BEFORE_FORGETTING"),
            *(forgotten_at_once, RECLAIMED),
        ),
        COMPACTIONS,
    ),
    (
        T(
            *("forgotten with entries here", "collection", garbage_collector.GarbageCollector),
            *("_has_entries", forgotten_with_entries_here, RECLAIMED),
        ),
        COMPACTIONS,
    ),
    (
        T(
            *("collected from an index unsynced", "collection", garbage_collector, "_delete"),
            *(index_let_go_unsynced, RECLAIMED),
        ),
        COMPACTIONS,
    ),
    (
        T(
            "compaction never redone",
            "compaction",
            compactor.Compactor,
            "redo",
            never_redone,
            RECLAIMED,
        ),
        COMPACTIONS,
    ),
    (
        T(
            "copy published unsynced",
            "BK#1534",
            EntryLogs,
            "publish_copy",
            published_unsynced,
            RECLAIMED,
        ),
        COMPACTIONS,
    ),
    (
        T(
            "index turned by half",
            "compaction",
            compactor.Compactor,
            "_move_chunk",
            turned_by_half,
            RECLAIMED,
        ),
        COMPACTIONS,
    ),
    (T("no tail in doubt", "limbo", replay, "judge_ending", no_tail_in_doubt, CACHED), ()),
    (
        T("closed ones are whole", "limbo", Limbo, "_judge_closed", closed_ones_are_whole, LOST),
        WALKS,
    ),
    (
        T(
            "walk fences no ledger",
            "limbo",
            LedgerHandles,
            "put_in_limbo_or_fence",
            walk_fences_nobody,
            LOST,
        ),
        WALKS,
    ),
    (T("any revision clears", "limbo", Limbo, "respond", any_revision_clears, LOST), ()),
    (
        T(
            *("first window compared", "limbo", Copies, "_lacking"),
            *(compares_the_first_window, LOST),
        ),
        ("repair of limbo",),
    ),
    (T("limbo reason found last", "limbo", registry, "worse_reason", torn_covers_lost, LOST), ()),
)
