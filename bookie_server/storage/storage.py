"""The storage of a node: journals, write cache, entry logs and indexes behind one class.

Always true for whoever uses it:
- what was appended is durable when its future is done (of a page-cache ledger: written), and is
  found again after any crash;
- what `put` and `set_state` were given is seen at once, and durable with the record that the caller
  appends, or with the next flush;
- an entry that it may have had and cannot give is Undeliverable, or its ledger is in `limbo`:
  never merely absent;
- its first failure that leaves it without a journal or without a ledger directory is final.

Always true inside:
- a flush goes: take the journals' synced positions and swap the cache in one step; entries sorted
  by (ledger, entry) to the entry logs of their directories, index, ledger states, all synced;
  checkpoint; only then are journal segments removed;
- the checkpoint is computed here and nowhere else, moves only after every living directory has
  everything before it, fences and explicit LACs included, in its final place, and never back;
- a directory that fails is dropped, and its part of the flush goes to another before the
  checkpoint moves; the failure of the last one ends all flushing: what was not flushed stays in
  the journals, and the checkpoint stays where it is: a later flush that succeeds would carry it
  past records that no flush brought to a log (as in BK#4114);
- an entry is looked for in the active half, the flushing half, then in read cache, index and log:
  in that order a flush under way can never hide it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

from bookie_server.api.entry import Buffer, unpack_header
from bookie_server.config import StorageConfig
from bookie_server.disk.interface import DiskFailed, DiskFull
from bookie_server.disk.monitor import DiskMonitor
from bookie_server.journal.checkpoint import Mark, Marks
from bookie_server.journal.format import Position, Record, RecordKind, body_crc
from bookie_server.journal.writer import SPACE_PAUSE_S, Journal
from bookie_server.lanes import Lane, Work
from bookie_server.logs.index import (
    EVERY_LEDGER,
    Changes,
    LedgerState,
    LedgerStates,
    LimboReason,
    encode_ledger_state,
    worse,
)
from bookie_server.storage.appends import DirectWrites, Journals
from bookie_server.storage.directories import Directories, DirectoryStore, Stores
from bookie_server.storage.entry_reader import EntryReader
from bookie_server.storage.write_cache import (
    ENTRY_OVERHEAD_BYTES,
    CacheHalf,
    DirectLocation,
    WriteCache,
)


class _Flush(NamedTuple):
    """What one flush carries to its final place: `parts` says which ledgers go to which directory;
    `marks` is None while replaying; `puts`: how much had been put into each direct log."""

    half: CacheHalf
    parts: dict[str, list[int]]
    changes: Changes
    marks: dict[str, Position] | None
    reliefs: Sequence[asyncio.Future[None]]
    puts: Mapping[str, int]


class LedgerStorage:
    """Made by replay.open_storage; `run` is its task. All of it runs on one event loop; what is not
    `async` happens in one step of it."""

    def __init__(self, stores: Stores, config: StorageConfig) -> None:
        self.directories = stores
        """The ledger directories: which live, and which may hold a ledger's entries."""
        self._config = config
        self.cache = WriteCache(config.write_cache_bytes, config.recovery_reserve_bytes)
        """What is to be flushed: entries are put by way of `put` and `put_all` only."""
        self._states = LedgerStates()
        self.reader = EntryReader(self.cache, self._stores_of, self.quarantine, config)
        """Reads what is stored; told here of what changes."""
        stores.on_drop = self._directory_dropped
        stores.on_damage = lambda: self.on_doubt()
        self.on_doubt: Callable[[], None] = lambda: None
        """Called when a ledger was quarantined that was not "lost", or `damage` found."""
        self.on_quarantine: Callable[[int], None] = lambda _: None
        """Called with the ledger of each quarantine, also of one that was "lost" already."""
        self._journals = Journals(self.record)
        self._direct_writes = DirectWrites(
            self._journals, self._states, stores, self.cache, config.large_entry_bytes
        )
        self._marks: dict[str, Mark] = {}
        self._absent_journals: list[str] = []
        self._attached = False
        self._hurried = False
        self._flush_begun: _Flush | None = None
        self._flushing = Work()
        self.flushes = 0
        """How many have ended; an entry moves from cache to index only in one."""
        self._wake = asyncio.Event()
        self._stopping = False

    @classmethod
    async def open(
        cls, directories: Directories, config: StorageConfig, space: DiskMonitor | None = None
    ) -> tuple["LedgerStorage", Marks | None]:
        """The stores as they are on disk, and the checkpoint (None: there never was one). What the
        journals hold beyond it is still to be replayed. Raises DiskFailed."""
        storage = cls(await Stores.open(directories, config), config)
        storage.directories.space = space
        copies, away, marks = await storage.directories.read(directories.journals[0].id)
        storage._states.load(copies, away)
        await storage.directories.purge(storage._states.all())
        storage._marks = dict(marks or {})
        return storage, marks

    async def forget_replayed_logs(self) -> None:
        """All that direct logs of earlier runs hold is flushed: they need no marks any more. Raises
        DiskFailed when no directory is left."""
        await self.directories.forget_replayed_logs()

    async def attach(
        self,
        opened: Mapping[str, Journal],
        failures: Mapping[str, str],
        replayed: Mapping[str, Sequence[int]],
    ) -> None:
        """All that the journals' earlier segments hold is flushed: the checkpoint moves past them.
        `failures`: directories whose journal could not be opened, and why.

        It is durable when this returns, and the old segments are gone; those that `replayed` names
        as damaged, by each directory that was replayed, are kept under another name. From here on
        every flush moves the checkpoint.
        """
        assert not self.has_unflushed, "the checkpoint would pass what no store has"
        journals = self._journals
        journals.begin(opened, failures)
        await self.directories.purge(self._states.all())
        there = (*journals.live, *journals.failures)
        needed = [journal_id for journal_id, mark in self._marks.items() if not mark.retired]
        self._absent_journals = [each for each in needed if each not in there]
        self._attached = True
        journals.on_failure = self._on_journal_failure
        for i, mark in self._marks.items():
            missed = i not in replayed and (mark.missed or not mark.retired)
            self._marks[i] = mark._replace(retired=True, missed=missed)
        self._marks.update({i: Mark(position) for i, position in journals.synced().items()})
        await self.directories.write_checkpoint(self._marks)
        for journal_id, file_ids in replayed.items():
            for file_id in file_ids:
                await journals.set_aside(journal_id, file_id)
        await journals.forget_before(journals.synced())
        self.directories.tell_missing(self._states.all())

    # -- directories --

    @property
    def stores(self) -> list[DirectoryStore]:
        """The ledger directories that live."""
        return self.directories.live

    @property
    def failures(self) -> dict[str, str]:
        """Directories of either kind that were lost, by id: why."""
        return {**self.directories.failures, **self._journals.failures}

    def failure(self, directory_id: str) -> str:
        """Why the directory was lost; empty while it lives."""
        stores, journals = self.directories.failures, self._journals.failures
        return journals.get(directory_id) or stores.get(directory_id, "")

    def absent(self) -> dict[str, dict[str, str]]:
        """Directories that were known and were not given at the start, by role and id, and what to
        tell of them: a ledger directory until every ledger gave it up, a journal for this run."""
        why = "it was missing at the start; what it held last may be lost"
        ledgers = self.directories.absent(self._states.all())
        return {"journal": dict.fromkeys(self._absent_journals, why), "ledger": ledgers}

    def drop(self, directory_id: str, error: DiskFailed) -> None:
        """The directory was found to be lost: not used any more."""
        self.directories.drop(directory_id, error)
        self._journals.fail(directory_id, error)

    def _directory_dropped(self) -> None:
        self.reader.lost_directory()
        may_flush = self._attached and self._flush_begun is None and self.directories.live
        if may_flush and self.cache.active.locations:
            self.begin_flush()  # what lay there is in memory alone
        self._wake.set()

    @property
    def is_complete(self) -> bool:
        """Whether every ledger directory that is known of is there."""
        return not self.directories.failures and all(
            map(self.directories.is_whole, self._states.all())
        )

    def _stores_of(self, ledger_id: int) -> list[DirectoryStore]:
        return self.directories.of(self._states.get(ledger_id))

    # -- ledger states --

    @property
    def ledger_count(self) -> int:
        return len(self._states)

    def state(self, ledger_id: int) -> LedgerState | None:
        return self._states.get(ledger_id)

    def states(self) -> list[LedgerState]:
        """What is known of every ledger, and of EVERY_LEDGER, by id."""
        return self._states.all()

    def set_state(self, state: LedgerState) -> LedgerState:
        """Known from now on; durable with the caller's record or the next flush.

        Returns it with its revision and directories: that is what a record must say.
        """
        if state.met and not self.directories.has_home(state) and state.ledger_id != EVERY_LEDGER:
            state = self.directories.settled(state)
        return self._states.set(state)

    def restore_state(self, state: LedgerState) -> LedgerState:
        """As `set_state`, of something that happened in an earlier run: it is no new revision."""
        known = self._states.get(state.ledger_id)
        if known is not None and known.directories != state.directories:
            state = self.directories.back_again(state, known)
        return self._states.restore(state)

    def limbo(self, ledger_id: int) -> LimboReason:
        """Why what is not found of the ledger is unknown; NONE: it is absent.

        EVERY_LEDGER's limbo, and directories that are not there, are taken into account.
        """
        every, state = self._states.get(EVERY_LEDGER), self._states.get(ledger_id)
        reasons = [each.limbo for each in (every, state) if each is not None]
        lost = state is not None and not self.directories.is_whole(state)
        return LimboReason.LOST if lost else reduce(worse, reasons, LimboReason.NONE)

    def quarantine(self, ledger_id: int, entry_id: int, why: str) -> None:
        """The copy of the entry here is bad: its ledger is in limbo "lost" from now on."""
        state = self._states.get(ledger_id) or LedgerState(ledger_id, met=False)
        self.on_quarantine(ledger_id)
        if state.limbo is not LimboReason.LOST and not state.deleted:
            self.set_state(replace(state, limbo=LimboReason.LOST))
            if self._attached and (record := self.record(ledger_id)) is not None:
                self.append([record])
            self.on_doubt()

    def record(self, ledger_id: int) -> Record | None:
        """The journal's record of what is known of the ledger now."""
        state = self._states.get(ledger_id)
        if state is None:
            return None
        body = encode_ledger_state(state)
        return Record(RecordKind.LEDGER, ledger_id, -1, body, body_crc(body))

    def forget(self, ledger_id: int) -> None:
        """The ledger's state too; nothing of it may be in cache or index."""
        assert not self.in_cache(ledger_id)
        self._states.forget(ledger_id)
        self._journals.forget(ledger_id)
        self._direct_writes.forget(ledger_id)
        self.reader.deleted(ledger_id)

    # -- journals --

    def rescue(self, ledger_id: int) -> list[asyncio.Future[None]]:
        """What is in memory alone of the ledger's entries, for the directory where they were
        written is lost, goes to the journal: done when it is durable there."""
        lost = self.cache.with_lost_locations(ledger_id, self.directories.lives)
        return [
            self._journals.append([Record(RecordKind.ENTRY, ledger_id, entry_id, entry, crc)])
            for entry_id, entry in lost.items()
            for crc in [unpack_header(entry).payload_crc]
        ]

    def append(
        self, records: Sequence[Record], lane: Lane = Lane.BULK, after: Sequence[int] = ()
    ) -> asyncio.Future[None]:
        """The future is done when the records are durable, and so is what was appended before of
        their ledgers and of the ledgers `after`; in the page-cache lane, when they are written.

        With neither it is a barrier: done when all that was appended before is. Fails with
        JournalFailed. Shield it: cancelling it cancels nothing but the waiting.
        """
        return self._direct_writes.append(records, lane, after)

    async def shown_is_durable(self, ledger_id: int) -> None:
        """Return when all that can be read of a fenced ledger now is durable, also what is under
        way, or failed with one of several journals. Raises JournalFailed."""
        if self._direct_writes.is_under_way(ledger_id) or self._journals.is_under_way(ledger_id):
            await asyncio.shield(self.append([], Lane.RECOVERY, [ledger_id]))

    @property
    def journals_ended(self) -> asyncio.Future[None]:
        """Fails when no journal is left."""
        return self._journals.ended

    @property
    def pending_bytes(self) -> int:
        """Bytes appended and not yet durable."""
        return self._journals.pending_bytes + self._direct_writes.pending_bytes

    @property
    def pending_bytes_max(self) -> int:
        """More than so much pending would wait for disk space."""
        return self._journals.room_bytes

    @property
    def wait_s(self) -> float:
        """Seconds until there should be room again: in journals, write cache and directories."""
        flush_s = self._flushing.left_s(asyncio.get_running_loop().time())
        return max(self._journals.wait_s, self._direct_writes.wait_s, flush_s)

    def _on_journal_failure(self) -> None:
        """What the journal had goes to its final place as soon as can be."""
        if self._flush_begun is None and self.directories.live:
            self.begin_flush()

    # -- entries --

    def has_room(self, entry_bytes: int, *, reserve: bool = False) -> bool:
        """Whether `put` may be called (`reserve`: recovery's share of the cache too); begins
        a flush when that makes room."""
        needed = entry_bytes + ENTRY_OVERHEAD_BYTES
        if not self.cache.has_room(needed, reserve=reserve) and self._flush_begun is None:
            self.begin_flush()
        return self.cache.has_room(needed, reserve=reserve)

    def put_all(self, ledger_id: int, entries: dict[int, Buffer], *, reserve: bool = False) -> bool:
        """`put` of entries that nobody has read yet (they lie above all that are stored of the
        ledger, or nobody reads at all), if there is room for all of them; False: nothing was put.
        """
        needed = sum(map(len, entries.values())) + (len(entries) - 1) * ENTRY_OVERHEAD_BYTES
        if not self.has_room(needed, reserve=reserve):
            return False
        self.cache.active.put_all(ledger_id, entries)
        if self.cache.half_used and self._flush_begun is None:
            self.begin_flush()
        return True

    def replay_locations(self, ledger_id: int, locations: Sequence[DirectLocation]) -> bool:
        """Entries lie in a directory already; False: there was no room to note it."""
        if not self.has_room(len(locations) * ENTRY_OVERHEAD_BYTES):
            return False
        self.cache.active.replay_all(ledger_id, locations)
        return True

    def put(self, ledger_id: int, entry_id: int, entry: Buffer) -> None:
        """Readable from now on, in place of an earlier copy; durable with the caller's record."""
        self.cache.active.put(ledger_id, entry_id, entry)
        self.reader.overwritten(ledger_id, entry_id)
        if self.cache.half_used and self._flush_begun is None:
            self.begin_flush()

    def in_cache(self, ledger_id: int) -> bool:
        """Whether entries of the ledger are still to be flushed."""
        return self.cache.last(ledger_id) is not None

    # -- flush --

    @property
    def is_flushing(self) -> bool:
        """Whether a flush was begun and has not ended."""
        return self._flush_begun is not None

    @property
    def has_unflushed(self) -> bool:
        return self._lacks_final_place or any(
            [store.direct_log.has_ended for store in self.directories.live]
        )

    @property
    def _lacks_final_place(self) -> bool:
        """Whether something is in no directory yet, or no index has it."""
        return bool(self.cache.active.bytes or self._states.has_changes)

    def begin_flush(self) -> None:
        """Swap the halves; `run` (or `flush`) carries the full one out. None may be under way."""
        assert self._flush_begun is None, "one flush at a time"
        self._flushing.begun(self.cache.active.bytes, asyncio.get_running_loop().time())
        marks = self._journals.synced() if self._attached else None
        half = self.cache.swap()
        parts = self._parts(list(half.ledgers))
        changes = self._states.take_changes()
        puts = {store.id: store.direct_log.puts for store in self.directories.live}
        self._flush_begun = _Flush(half, parts, changes, marks, self._journals.reliefs(), puts)
        self._wake.set()

    def stop(self) -> None:
        """Let `run` end after the flush that is under way."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Flush when the cache asks for it, and at least every flush_interval_s.

        Raises DiskFailed.
        """
        while not self._stopping:
            self.directories.check()
            try:
                async with asyncio.timeout(self._config.flush_interval_s):
                    await self._wake.wait()
            except TimeoutError:
                if self._flush_begun is None:  # else the cache asked for it in the same moment
                    if not self.has_unflushed:
                        continue
                    self.begin_flush()
            self._wake.clear()
            await self.carry_out()

    async def flush(self) -> None:
        """Everything stored so far is in its final place. Only while `run` does not run."""
        if self._flush_begun is not None:
            await self.carry_out()
        self.begin_flush()
        await self.carry_out()

    def hurry(self) -> None:
        """The node stops: what waits for disk space fails instead."""
        self._hurried = True
        self._journals.hurry()

    async def close(self) -> None:
        """Write everything to its final place, seal the journals, close the stores. Only after
        `run` has ended. Raises JournalFailed, DiskFailed."""
        await self._flush_until(self.append([]))
        await self.flush()
        await self._journals.close()
        if self._attached and not self._lacks_final_place:
            retired = {i: mark._replace(retired=True) for i, mark in self._marks.items()}
            await self.directories.write_checkpoint(retired)
        await self.reader.close()
        await self.directories.close()

    async def _flush_until(self, durable: asyncio.Future[None]) -> None:
        """Carry out what flushes are begun: what is to be `durable` may wait for one, after a
        journal failed. Raises JournalFailed, DiskFailed."""
        durable.add_done_callback(lambda _: self._wake.set())
        while not durable.done():
            self._wake.clear()
            await self.carry_out()
            if not durable.done():
                await self._wake.wait()
        await asyncio.shield(durable)

    def abandon(self) -> None:
        """End at once, as a crash would."""
        for store in self.directories.live:
            store.direct_log.abandon()
        self._journals.abandon()

    def _parts(self, ledger_ids: Sequence[int]) -> dict[str, list[int]]:
        """Which of the ledgers go to which directory; one that has none yet is given one."""
        parts: dict[str, list[int]] = {}
        for ledger_id in ledger_ids:
            state = self._states.get(ledger_id)
            if state is not None and (settled := self.directories.settled(state)) != state:
                state = self._states.set(settled)
            parts.setdefault(self.directories.home(state), []).append(ledger_id)
        return parts

    async def carry_out(self) -> None:
        """Of the flush that was begun, if one was. Raises DiskFailed."""
        flush = self._flush_begun
        if flush is None:
            return
        try:
            await self._write(flush)
        except DiskFailed as error:
            self._journals.relieve(flush.reliefs, error)
            raise
        self.cache.drop_flushed()
        self._flush_begun = None
        self._flushing.ended(asyncio.get_running_loop().time())
        self.flushes += 1
        if flush.marks is not None:
            await self._move_checkpoint(flush)

    async def _write(self, flush: _Flush) -> None:
        """Every part is in a directory that lives when it returns; while none has space it waits,
        and the node is read-only. Raises DiskFailed."""
        parts, changes = flush.parts, flush.changes
        homes = _homes(parts)
        while flush.half.direct_writes:
            await asyncio.shield(next(iter(flush.half.direct_writes)))
        puts: Mapping[str, int] = flush.puts
        flush.half.drop_locations(self.directories.lives)  # these go elsewhere, from memory
        while homeless := await self.directories.write(flush.half, parts, changes, puts):
            flush.half.drop_locations(self.directories.lives)
            puts = {}
            parts, changes = self._parts(homeless), self._states.take_changes()
            homes.update(_homes(parts))
            if not all(map(self.directories.has_space, parts)):
                if self._hurried or not self._attached:
                    raise DiskFull("no ledger directory has space for what the journals hold")
                await asyncio.sleep(SPACE_PAUSE_S)
        states = [state for each in homes if (state := self._states.get(each)) is not None]
        if any(len(state.directories) > 1 for state in states):
            self.reader.moving()
            await self.directories.delete_replaced(flush.half, homes, states)

    async def _move_checkpoint(self, flush: _Flush) -> None:
        """Each mark to where its journal was synced when the flush began. A journal that had
        failed by then has nothing any more that is not in its final place."""
        assert flush.marks is not None
        marks = {i: Mark(position) for i, position in flush.marks.items()}
        gone = [i for i in self._marks if i in self._journals.failures and i not in marks]
        marks.update({i: self._marks[i]._replace(retired=True) for i in gone})
        marks = {**self._marks, **marks}
        for journal_id, mark in self._marks.items():
            assert marks[journal_id] >= mark, "a mark never moves back"
        if marks != self._marks:
            await self.directories.write_checkpoint(marks)
            self._marks = marks
            await self._journals.forget_before(flush.marks)
        self._journals.relieve(flush.reliefs)
        if self._journals.reliefs() and self._flush_begun is None:
            self.begin_flush()


def _homes(parts: Mapping[str, Sequence[int]]) -> dict[int, str]:
    """To which directory each ledger goes."""
    return {ledger_id: home for home, ids in parts.items() for ledger_id in ids}
