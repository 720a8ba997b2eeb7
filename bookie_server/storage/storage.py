"""The storage of a node: journals, write cache, entry logs and indexes behind one class.

Always true for its callers:
- an append is durable when its future is done (of a page-cache ledger: written), and is found again
  after any crash;
- entries given to `put` and states given to `set_state` are seen at once, and are durable with the
  record that the caller appends, or with the next flush;
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
  checkpoint moves; the failure of the last one ends all flushing: unflushed records stay in the
  journals, and the checkpoint stays where it is: a later flush that succeeds would carry it past
  records that no flush brought to a log (as in BK#4114);
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
from bookie_server.journal.checkpoint import JournalMark, Marks
from bookie_server.journal.format import Position, Record, RecordKind, body_crc
from bookie_server.journal.writer import SPACE_PAUSE_S, Journal
from bookie_server.lanes import Lane, Work
from bookie_server.logs.index import (
    EVERY_LEDGER,
    IndexChanges,
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
from spark_ledger.async_tasks import woken


class _Flush(NamedTuple):
    """What one flush carries to its final place. `parts`: the ledgers that go to each directory;
    `marks` is None while replaying; `puts`: how many puts each direct log had."""

    half: CacheHalf
    parts: dict[str, list[int]]
    changes: IndexChanges
    marks: dict[str, Position] | None
    reliefs: Sequence[asyncio.Future[None]]
    puts: Mapping[str, int]


class LedgerStorage:
    """Made by replay.open_storage; `run` is its task. All of it runs on one event loop; a function
    that is not `async` runs in one step of that loop."""

    def __init__(self, stores: Stores, config: StorageConfig) -> None:
        self.directories = stores
        """The ledger directories: which live, and which may hold a ledger's entries."""
        self._config = config
        self.cache = WriteCache(config.write_cache_bytes, config.recovery_reserve_bytes)
        """Entries that are still to be flushed; only `put` and `put_all` put entries here."""
        self._states = LedgerStates()
        self.reader = EntryReader(self.cache, self._stores_of, self.quarantine, config)
        """Reads stored entries; this class reports changes to it."""
        stores.on_drop = self._directory_dropped
        stores.on_damage = lambda: self.on_doubt()
        self.on_doubt: Callable[[], None] = lambda: None
        """Called when `damage` was found, or a ledger was quarantined that was not "lost" yet."""
        self.on_quarantine: Callable[[int], None] = lambda _: None
        """Called with the ledger of each quarantine, also of one that was "lost" already."""
        self._journals = Journals(self.record)
        self._direct_writes = DirectWrites(
            self._journals, self._states, stores, self.cache, config.large_entry_bytes
        )
        self._marks: dict[str, JournalMark] = {}
        self._absent_journals: list[str] = []
        self._attached = False
        self._hurried = False
        self._flush_begun: _Flush | None = None
        self._flushing = Work()
        self.flushes = 0
        """How many flushes have ended; an entry moves from cache to index only in a flush."""
        self._wake = asyncio.Event()
        self._stopping = False

    @classmethod
    async def open(
        cls, directories: Directories, config: StorageConfig, space: DiskMonitor | None = None
    ) -> tuple["LedgerStorage", Marks | None]:
        """The stores as they are on disk, and the checkpoint (None: none was written). Journal
        records beyond it are still to be replayed. Raises DiskFailed."""
        storage = cls(await Stores.open(directories, config), config)
        storage.directories.space = space
        copies, away, marks = await storage.directories.read()
        storage._states.load(copies, away)
        await storage.directories.purge(storage._states.all())
        storage._marks = dict(marks or {})
        return storage, marks

    async def forget_replayed_logs(self) -> None:
        """Remove the marks of direct logs of earlier runs: all their entries are flushed. Raises
        DiskFailed when no directory is left."""
        await self.directories.forget_replayed_logs()

    async def attach(
        self,
        opened: Mapping[str, Journal],
        failures: Mapping[str, str],
        replayed: Mapping[str, Sequence[int]],
    ) -> None:
        """Move the checkpoint past the journals' earlier segments: all their records are flushed.
        `failures`: directories whose journal could not be opened, and why.

        The checkpoint is durable when this returns, and the old segments are gone; the damaged
        segments in `replayed` (by each directory that was replayed) are kept under another name.
        From here on every flush moves the checkpoint.
        """
        assert not self.has_unflushed, "the checkpoint would pass what no store has"
        journals = self._journals
        journals.begin(opened, failures)
        await self.directories.purge(self._states.all())
        present = (*journals.live, *journals.failures)
        needed = [journal_id for journal_id, mark in self._marks.items() if not mark.retired]
        self._absent_journals = [i for i in needed if i not in present]
        self._attached = True
        journals.on_failure = self._on_journal_failure
        for i, mark in self._marks.items():
            missed = i not in replayed and (mark.missed or not mark.retired)
            self._marks[i] = mark._replace(retired=True, missed=missed)
        self._marks.update({i: JournalMark(position) for i, position in journals.synced().items()})
        await self.directories.write_checkpoint(self._marks)
        for journal_id, file_ids in replayed.items():
            for file_id in file_ids:
                await journals.set_aside(journal_id, file_id)
        await journals.forget_before(journals.synced())
        self.directories.log_missing(self._states.all())

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
        """A text for each directory that the node had and that no setting names, by role and id: a
        ledger directory until every ledger gave it up, a journal directory for this run."""
        why = "it was missing at the start; what it held last may be lost"
        ledgers = self.directories.absent(self._states.all())
        return {"journal": dict.fromkeys(self._absent_journals, why), "ledger": ledgers}

    def drop(self, directory_id: str, error: DiskFailed) -> None:
        """The directory is lost: do not use it any more."""
        self.directories.drop(directory_id, error)
        self._journals.fail(directory_id, error)

    def _directory_dropped(self) -> None:
        self.reader.lost_directory()
        may_flush = self._attached and self._flush_begun is None and self.directories.live
        if may_flush and self.cache.active.locations:
            self.begin_flush()  # entries of the lost directory are in memory alone
        self._wake.set()

    @property
    def is_complete(self) -> bool:
        """Whether every ledger directory that a setting or a state names lives."""
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
        """The state of every ledger, and of EVERY_LEDGER, by id."""
        return self._states.all()

    def set_state(self, state: LedgerState) -> LedgerState:
        """Set the state; durable with the caller's record or the next flush. Returns it with its
        revision and directories, as a record must have it."""
        if state.met and not self.directories.has_home(state) and state.ledger_id != EVERY_LEDGER:
            state = self.directories.settled(state)
        return self._states.set(state)

    def restore_state(self, state: LedgerState) -> LedgerState:
        """As `set_state`, of a change in an earlier run: the revision stays."""
        earlier = self._states.get(state.ledger_id)
        if earlier is not None and earlier.directories != state.directories:
            state = self.directories.back_again(state, earlier)
        return self._states.restore(state)

    def limbo(self, ledger_id: int) -> LimboReason:
        """Why an entry of the ledger that is not found is unknown; NONE: it is absent. Counts
        EVERY_LEDGER's limbo and missing directories too."""
        every, own = self._states.get(EVERY_LEDGER), self._states.get(ledger_id)
        reasons = [state.limbo for state in (every, own) if state is not None]
        lost = own is not None and not self.directories.is_whole(own)
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
        """The journal record of the ledger's present state."""
        state = self._states.get(ledger_id)
        if state is None:
            return None
        body = encode_ledger_state(state)
        return Record(RecordKind.LEDGER, ledger_id, -1, body, body_crc(body))

    def forget(self, ledger_id: int) -> None:
        """Forget the ledger and its state; no entry of it may be in cache or index."""
        assert not self.in_cache(ledger_id)
        self._states.forget(ledger_id)
        self._journals.forget(ledger_id)
        self._direct_writes.forget(ledger_id)
        self.reader.deleted(ledger_id)

    # -- journals --

    def rescue(self, ledger_id: int) -> list[asyncio.Future[None]]:
        """Append the ledger's entries that are in memory alone, as the directory with their records
        is lost, to a journal: done when they are durable there."""
        lost = self.cache.with_lost_locations(ledger_id, self.directories.lives)
        return [
            self._journals.append([Record(RecordKind.ENTRY, ledger_id, entry_id, entry, crc)])
            for entry_id, entry in lost.items()
            for crc in [unpack_header(entry).payload_crc]
        ]

    def append(
        self, records: Sequence[Record], lane: Lane = Lane.BULK, after: Sequence[int] = ()
    ) -> asyncio.Future[None]:
        """The future is done when the records, and all earlier appends of their ledgers and of the
        ledgers `after`, are durable; in the page-cache lane, when they are written.

        Without records and `after` it is a barrier: done when all earlier appends are. Fails with
        JournalFailed. Shield it: to cancel it would end only the waiting.
        """
        return self._direct_writes.append(records, lane, after)

    async def shown_is_durable(self, ledger_id: int) -> None:
        """Return when all entries of the ledger that can be read now are durable, also those that
        are under way or were in a journal that failed. Raises JournalFailed."""
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
        """Pending bytes beyond this would wait for disk space."""
        return self._journals.room_bytes

    @property
    def wait_s(self) -> float:
        """Seconds until there should be room again: in journals, write cache and directories."""
        flush_s = self._flushing.left_s(asyncio.get_running_loop().time())
        return max(self._journals.wait_s, self._direct_writes.wait_s, flush_s)

    def _on_journal_failure(self) -> None:
        """Flush at once: the failed journal's records go to their final place."""
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
        """`put` of entries that no reader has seen (they follow all stored entries of the ledger,
        or the node serves no reads yet), if there is room for all of them; False: nothing was put.
        """
        needed = sum(map(len, entries.values())) + (len(entries) - 1) * ENTRY_OVERHEAD_BYTES
        if not self.has_room(needed, reserve=reserve):
            return False
        self.cache.active.put_all(ledger_id, entries)
        if self.cache.half_used and self._flush_begun is None:
            self.begin_flush()
        return True

    def replay_locations(self, ledger_id: int, locations: Sequence[DirectLocation]) -> bool:
        """Note the locations of entries that a directory has already; False: there is no room."""
        if not self.has_room(len(locations) * ENTRY_OVERHEAD_BYTES):
            return False
        self.cache.active.replay_all(ledger_id, locations)
        return True

    def put(self, ledger_id: int, entry_id: int, entry: Buffer) -> None:
        """Make the entry readable, in place of an earlier copy; durable with the caller's
        record."""
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
        """Whether an entry or a change of a state is in no directory or index yet."""
        return bool(self.cache.active.bytes or self._states.has_changes)

    def begin_flush(self) -> None:
        """Swap the halves; `run` (or `flush`) carries the full one out. No flush may be under
        way."""
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
            woke = await woken(self._wake, self._config.flush_interval_s)
            if not woke and self._flush_begun is None:  # the cache may begin a flush meanwhile
                if not self.has_unflushed:
                    continue
                self.begin_flush()
            self._wake.clear()
            await self.carry_out()

    async def flush(self) -> None:
        """Bring all stored entries to their final place. Only while `run` does not run."""
        if self._flush_begun is not None:
            await self.carry_out()
        self.begin_flush()
        await self.carry_out()

    def hurry(self) -> None:
        """The node stops: writes that wait for disk space fail."""
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
        """Carry out each flush that begins until `durable` is done, which may wait for one after a
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
        """The ledgers by the directory that takes their entries; a ledger without one gets one."""
        parts: dict[str, list[int]] = {}
        for ledger_id in ledger_ids:
            state = self._states.get(ledger_id)
            if state is not None and (settled := self.directories.settled(state)) != state:
                state = self._states.set(settled)
            parts.setdefault(self.directories.home(state), []).append(ledger_id)
        return parts

    async def carry_out(self) -> None:
        """Carry out the flush that was begun, if one was. Raises DiskFailed."""
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
        """Write every part to a living directory; while none has space this waits, and the node is
        read-only. Raises DiskFailed."""
        parts, changes = flush.parts, flush.changes
        homes = _homes(parts)
        while flush.half.direct_writes:
            await asyncio.shield(next(iter(flush.half.direct_writes)))
        puts: Mapping[str, int] = flush.puts
        flush.half.drop_locations(self.directories.lives)  # these are written again, from memory
        while homeless := await self.directories.write(flush.half, parts, changes, puts):
            flush.half.drop_locations(self.directories.lives)
            puts = {}
            parts, changes = self._parts(homeless), self._states.take_changes()
            homes.update(_homes(parts))
            if not all(map(self.directories.has_space, parts)):
                if self._hurried or not self._attached:
                    raise DiskFull("no ledger directory has space for what the journals hold")
                await asyncio.sleep(SPACE_PAUSE_S)
        states = [state for i in homes if (state := self._states.get(i)) is not None]
        if any(len(state.directories) > 1 for state in states):
            self.reader.moving()
            await self.directories.delete_replaced(flush.half, homes, states)

    async def _move_checkpoint(self, flush: _Flush) -> None:
        """Move each mark to where its journal was synced when the flush began. All records of a
        journal that had failed by then are in their final place."""
        assert flush.marks is not None
        marks = {i: JournalMark(position) for i, position in flush.marks.items()}
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
    """The directory to which each ledger goes."""
    return {ledger_id: home for home, ids in parts.items() for ledger_id in ids}
