"""The storage of a node: journals, write cache, entry logs and indexes behind one class.

Always true for its callers:
- an append is durable when its future is done (in the page-cache lane: written), and a start finds
  it after any crash;
- `put` and `set_state` take effect at once; the entry or state is durable with the record that the
  caller appends, or with the next flush;
- an entry that the storage may have had and cannot read never counts as absent: the entry is
  Undeliverable, or its ledger is in `limbo`;
- a failure that leaves no journal or no ledger directory is final.

Always true inside:
- a flush takes these steps: in one step of the event loop it takes the journals' synced positions
  and swaps the cache halves; it writes the entries, sorted by (ledger, entry), to the entry logs of
  their directories, then index and ledger states; it syncs all of these; it moves the checkpoint;
  it removes journal segments;
- only this class computes the checkpoint. The checkpoint never moves back. It passes a record (also
  a fence or an explicit LAC) only after every living directory has its part of the record durably;
- when a directory fails, it is dropped, and another directory takes its part of the flush before
  the checkpoint moves. When the last directory fails, there are no more flushes and the checkpoint
  stays: a later flush would move it past records that no flush wrote to a log (as in BK#4114);
- a read looks in the active half, the flushing half, the read cache, then in index and log: in this
  order a flush under way never hides an entry.
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
    worse_reason,
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
    """The contents of one flush. `parts`: by directory, the ledgers whose entries it takes. `puts`:
    by directory, how many puts its direct log had. `marks`: the journals' synced positions, None
    during replay. `reliefs`: see Journals.reliefs."""

    half: CacheHalf
    parts: dict[str, list[int]]
    changes: IndexChanges
    marks: dict[str, Position] | None
    reliefs: Sequence[asyncio.Future[None]]
    puts: Mapping[str, int]


class LedgerStorage:
    """Made by replay.open_storage; `run` is its task. All methods run on one event loop; a method
    that is not `async` runs in one step of that loop."""

    def __init__(self, stores: Stores, config: StorageConfig) -> None:
        self.directories = stores
        """The ledger directories."""
        self._config = config
        self.cache = WriteCache(config.write_cache_bytes, config.recovery_reserve_bytes)
        """Entries that no flush has written yet; only `put` and `put_all` add to it."""
        self._states = LedgerStates()
        self.reader = EntryReader(self.cache, self._stores_of, self.quarantine, config)
        """Reads stored entries; this class reports changes to it."""
        stores.on_drop = self._directory_dropped
        stores.on_damage = lambda: self.on_loss()
        self.on_loss: Callable[[], None] = lambda: None
        """Called when an index is damaged, or a quarantine puts a ledger in limbo "lost"."""
        self.on_quarantine: Callable[[int], None] = lambda _: None
        """Called with the ledger id at each quarantine."""
        self._journals = Journals(self._state_record)
        self._direct_writes = DirectWrites(
            self._journals, self._states, stores, self.cache, config.large_entry_bytes
        )
        self._marks: dict[str, JournalMark] = {}
        self._absent_journal_ids: list[str] = []
        self._has_journals = False
        self._is_hurrying = False
        self._current_flush: _Flush | None = None
        self._flush_rate = Work()
        self.flushes = 0
        """How many flushes have ended; an entry moves from cache to index only in a flush."""
        self._wake = asyncio.Event()
        self._is_stopping = False

    @classmethod
    async def open(
        cls, directories: Directories, config: StorageConfig, space: DiskMonitor | None = None
    ) -> tuple["LedgerStorage", Marks | None]:
        """The storage as it is on disk, and its checkpoint (None: no checkpoint was written). The
        caller replays the journal records after the checkpoint. Raises DiskFailed."""
        storage = cls(await Stores.open(directories, config), config)
        storage.directories.space = space
        current, outdated, marks = await storage.directories.read_states()
        storage._states.load(current, outdated)
        await storage.directories.purge(storage._states.all())
        storage._marks = dict(marks or {})
        return storage, marks

    async def forget_replayed_logs(self) -> None:
        """Remove the marks of the direct logs of earlier runs, whose entries are all flushed.
        Raises DiskFailed when no directory is left."""
        await self.directories.forget_replayed_logs()

    async def attach(
        self,
        live_journals: Mapping[str, Journal],
        failures: Mapping[str, str],
        damaged_segments: Mapping[str, Sequence[int]],
    ) -> None:
        """Use these journals, after all earlier segments were replayed and flushed, and move the
        checkpoint past the earlier segments. `failures`: by directory id, why other journals could
        not be opened. `damaged_segments`: by directory id, the ids of segments with damage, for
        each journal that was replayed.

        When this returns, the checkpoint is durable, the earlier segments are removed, and the
        damaged segments are renamed. From here on every flush moves the checkpoint.
        """
        assert not self.has_unflushed, "the checkpoint would pass records that are not flushed"
        journals = self._journals
        journals.begin(live_journals, failures)
        await self.directories.purge(self._states.all())
        present_ids = (*journals.live, *journals.failures)
        needed_ids = [journal_id for journal_id, mark in self._marks.items() if not mark.retired]
        self._absent_journal_ids = [i for i in needed_ids if i not in present_ids]
        self._has_journals = True
        journals.on_failure = self._on_journal_failure
        for i, mark in self._marks.items():
            is_missed = i not in damaged_segments and (mark.missed or not mark.retired)
            self._marks[i] = mark._replace(retired=True, missed=is_missed)
        self._marks.update({i: JournalMark(position) for i, position in journals.synced().items()})
        await self.directories.write_checkpoint(self._marks)
        for journal_id, file_ids in damaged_segments.items():
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
        """Why ledger or journal directories were lost, by directory id."""
        return {**self.directories.failures, **self._journals.failures}

    def failure(self, directory_id: str) -> str:
        """Why the directory was lost; empty while it lives."""
        journal_failure = self._journals.failures.get(directory_id)
        return journal_failure or self.directories.failures.get(directory_id, "")

    def absent(self) -> dict[str, dict[str, str]]:
        """By role and directory id, a text for each directory that the node once had and that no
        setting names. A ledger directory is listed until every ledger gave it up, a journal
        directory during this run."""
        why = "it was missing at the start; its last records may be lost"
        ledger_texts = self.directories.absent(self._states.all())
        return {"journal": dict.fromkeys(self._absent_journal_ids, why), "ledger": ledger_texts}

    def drop(self, directory_id: str, error: DiskFailed) -> None:
        """Stop using a directory that is lost."""
        self.directories.drop(directory_id, error)
        self._journals.fail(directory_id, error)

    def _directory_dropped(self) -> None:
        self.reader.forget_cached()
        may_flush = self._has_journals and self._current_flush is None and self.directories.live
        if may_flush and self.cache.active.locations:
            self.begin_flush()  # entries of the lost directory are only in memory
        self._wake.set()

    @property
    def is_complete(self) -> bool:
        """Whether every ledger directory that a setting or a state names lives."""
        return not self.directories.failures and all(
            map(self.directories.is_whole, self._states.all())
        )

    def _stores_of(self, ledger_id: int) -> list[DirectoryStore]:
        return self.directories.stores_of(self._states.get(ledger_id))

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
        """Set the state; durable with the caller's record or the next flush. Returns the state with
        its new revision and its directories, for the caller's record."""
        if state.met and not self.directories.has_home(state) and state.ledger_id != EVERY_LEDGER:
            state = self.directories.with_home(state)
        return self._states.set(state)

    def restore_state(self, state: LedgerState) -> LedgerState:
        """Set a state that a replay read: it keeps its revision."""
        earlier = self._states.get(state.ledger_id)
        if earlier is not None and earlier.directories != state.directories:
            state = self.directories.keep_returned(state, earlier)
        return self._states.restore(state)

    def limbo(self, ledger_id: int) -> LimboReason:
        """Why a missing entry of the ledger counts as unknown; NONE: it counts as absent. The limbo
        of EVERY_LEDGER and missing directories count too."""
        every_state, state = self._states.get(EVERY_LEDGER), self._states.get(ledger_id)
        if state is not None and not self.directories.is_whole(state):
            return LimboReason.LOST
        states = [s for s in (every_state, state) if s is not None]
        return reduce(worse_reason, [s.limbo for s in states], LimboReason.NONE)

    def quarantine(self, ledger_id: int, entry_id: int, why: str) -> None:
        """Note that the stored copy of the entry is bad: put its ledger in limbo "lost"."""
        state = self._states.get(ledger_id) or LedgerState(ledger_id, met=False)
        self.on_quarantine(ledger_id)
        if state.limbo is not LimboReason.LOST and not state.deleted:
            self.set_state(replace(state, limbo=LimboReason.LOST))
            if self._has_journals and (record := self._state_record(ledger_id)) is not None:
                self.append([record])
            self.on_loss()

    def _state_record(self, ledger_id: int) -> Record | None:
        """The journal record of the ledger's present state."""
        state = self._states.get(ledger_id)
        if state is None:
            return None
        body = encode_ledger_state(state)
        return Record(RecordKind.LEDGER, ledger_id, -1, body, body_crc(body))

    def forget(self, ledger_id: int) -> None:
        """Forget the ledger and its state. Cache and index may have no entry of the ledger."""
        assert not self.in_cache(ledger_id)
        self._states.forget(ledger_id)
        self._journals.forget(ledger_id)
        self._direct_writes.forget(ledger_id)
        self.reader.drop_ledger(ledger_id)

    # -- journals --

    def rescue(self, ledger_id: int) -> list[asyncio.Future[None]]:
        """Append to a journal the ledger's cached entries whose only record was in a lost
        directory. The futures are done when the entries are durable in the journal."""
        entries = self.cache.with_lost_locations(ledger_id, self.directories.lives)
        return [
            self._journals.append([Record(RecordKind.ENTRY, ledger_id, entry_id, entry, crc)])
            for entry_id, entry in entries.items()
            for crc in [unpack_header(entry).payload_crc]
        ]

    def append(
        self, records: Sequence[Record], lane: Lane = Lane.BULK, after: Sequence[int] = ()
    ) -> asyncio.Future[None]:
        """The future is done when the records, and all earlier appends of their ledgers and of the
        ledgers `after`, are durable; in the page-cache lane, when they are written.

        With neither records nor `after` the append is a barrier: its future is done when all
        earlier appends are done. The future fails with JournalFailed. The append goes on even if
        its future is cancelled, so callers shield the future.
        """
        return self._direct_writes.append(records, lane, after)

    async def await_durable(self, ledger_id: int) -> None:
        """Wait until all entries of the ledger that can be read now are durable: also entries whose
        append is under way, or that were in a journal that failed. Raises JournalFailed."""
        if self._direct_writes.is_under_way(ledger_id) or self._journals.is_under_way(ledger_id):
            await asyncio.shield(self.append([], Lane.RECOVERY, [ledger_id]))

    @property
    def journals_end(self) -> asyncio.Future[None]:
        """Done when the journals are closed; fails when no journal is left."""
        return self._journals.end

    @property
    def pending_bytes(self) -> int:
        """Bytes appended and not yet durable."""
        return self._journals.pending_bytes + self._direct_writes.pending_bytes

    @property
    def pending_bytes_max(self) -> int:
        """The pending bytes beyond which appends would wait for disk space."""
        return self._journals.room_bytes

    @property
    def wait_s(self) -> float:
        """Seconds until there should be room again: in journals, write cache and directories."""
        flush_s = self._flush_rate.left_s(asyncio.get_running_loop().time())
        return max(self._journals.wait_s, self._direct_writes.wait_s, flush_s)

    def _on_journal_failure(self) -> None:
        """Flush at once: the failed journal's records go to entry logs and index."""
        if self._current_flush is None and self.directories.live:
            self.begin_flush()

    # -- entries --

    def has_room(self, entry_bytes: int, *, reserve: bool = False) -> bool:
        """Whether `put` may be called; with `reserve`, recovery's reserve of the cache counts too.
        If there is no room and no flush is under way, this begins a flush."""
        needed_bytes = entry_bytes + ENTRY_OVERHEAD_BYTES
        if not self.cache.has_room(needed_bytes, reserve=reserve) and self._current_flush is None:
            self.begin_flush()
        return self.cache.has_room(needed_bytes, reserve=reserve)

    def put_all(self, ledger_id: int, entries: dict[int, Buffer], *, reserve: bool = False) -> bool:
        """`put` entries, if there is room for all of them. Returns whether they were put. No reader
        may have seen an earlier copy: the ids are above all stored ids of the ledger, or the node
        serves no reads yet."""
        entries_bytes = sum(map(len, entries.values())) + (len(entries) - 1) * ENTRY_OVERHEAD_BYTES
        if not self.has_room(entries_bytes, reserve=reserve):
            return False
        self.cache.active.put_all(ledger_id, entries)
        if self.cache.is_half_used and self._current_flush is None:
            self.begin_flush()
        return True

    def replay_locations(self, ledger_id: int, locations: Sequence[DirectLocation]) -> bool:
        """Add the locations of replayed entries in direct logs. Returns False if there is no
        room."""
        if not self.has_room(len(locations) * ENTRY_OVERHEAD_BYTES):
            return False
        self.cache.active.replay_all(ledger_id, locations)
        return True

    def put(self, ledger_id: int, entry_id: int, entry: Buffer) -> None:
        """Make the entry readable, in place of an earlier copy. The caller's record makes it
        durable."""
        self.cache.active.put(ledger_id, entry_id, entry)
        self.reader.drop_cached_entry(ledger_id, entry_id)
        if self.cache.is_half_used and self._current_flush is None:
            self.begin_flush()

    def in_cache(self, ledger_id: int) -> bool:
        """Whether the ledger has entries that no flush has written yet."""
        return self.cache.last(ledger_id) is not None

    # -- flush --

    @property
    def is_flushing(self) -> bool:
        """Whether a flush is under way."""
        return self._current_flush is not None

    @property
    def has_unflushed(self) -> bool:
        return self._has_unindexed or any(
            [store.direct_log.has_ended_logs for store in self.directories.live]
        )

    @property
    def _has_unindexed(self) -> bool:
        """Whether the indexes lack an entry or a change of a state."""
        return bool(self.cache.active.bytes or self._states.has_changes)

    def begin_flush(self) -> None:
        """Swap the halves of the cache; `run` (or `flush`) then writes the full half. No flush may
        be under way."""
        assert self._current_flush is None, "one flush at a time"
        self._flush_rate.begin(self.cache.active.bytes, asyncio.get_running_loop().time())
        marks = self._journals.synced() if self._has_journals else None
        half = self.cache.swap()
        parts = self._parts(list(half.ledgers))
        changes = self._states.take_changes()
        puts = {store.id: store.direct_log.puts for store in self.directories.live}
        self._current_flush = _Flush(half, parts, changes, marks, self._journals.reliefs(), puts)
        self._wake.set()

    def stop(self) -> None:
        """End `run` after the flush that is under way."""
        self._is_stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Flush when half of the cache is used, and at least every flush_interval_s.

        Raises DiskFailed.
        """
        while not self._is_stopping:
            self.directories.check_some_live()
            woke = await woken(self._wake, self._config.flush_interval_s)
            if not woke and self._current_flush is None:  # `put` may have begun a flush meanwhile
                if not self.has_unflushed:
                    continue
                self.begin_flush()
            self._wake.clear()
            await self.carry_out()

    async def flush(self) -> None:
        """Write all cached entries to logs and index. The caller calls this only while `run` does
        not run."""
        if self._current_flush is not None:
            await self.carry_out()
        self.begin_flush()
        await self.carry_out()

    def hurry(self) -> None:
        """Fail the writes that wait for disk space, as the node stops."""
        self._is_hurrying = True
        self._journals.hurry()

    async def close(self) -> None:
        """Flush, seal the journals, close the directories. The caller calls this only after `run`
        has ended. Raises JournalFailed, DiskFailed."""
        await self._flush_until(self.append([]))
        await self.flush()
        await self._journals.close()
        if self._has_journals and not self._has_unindexed:
            retired = {i: mark._replace(retired=True) for i, mark in self._marks.items()}
            await self.directories.write_checkpoint(retired)
        await self.reader.close()
        await self.directories.close()

    async def _flush_until(self, durable: asyncio.Future[None]) -> None:
        """Carry out flushes until `durable` is done: the appends in a failed journal wait for a
        flush. Raises JournalFailed, DiskFailed."""
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
        """By directory, the ledgers whose entries it takes. A ledger without a living home gets a
        new home."""
        parts: dict[str, list[int]] = {}
        for ledger_id in ledger_ids:
            state = self._states.get(ledger_id)
            if state is not None and (new_state := self.directories.with_home(state)) != state:
                state = self._states.set(new_state)
            parts.setdefault(self.directories.home_id(state), []).append(ledger_id)
        return parts

    async def carry_out(self) -> None:
        """Carry out the flush under way, if there is one. Raises DiskFailed."""
        flush = self._current_flush
        if flush is None:
            return
        try:
            await self._write(flush)
        except DiskFailed as error:
            self._journals.relieve(flush.reliefs, error)
            raise
        self.cache.drop_flushed()
        self._current_flush = None
        self._flush_rate.end(asyncio.get_running_loop().time())
        self.flushes += 1
        if flush.marks is not None:
            await self._move_checkpoint(flush)

    async def _write(self, flush: _Flush) -> None:
        """Write every part to a living directory. While no directory has space, this waits and the
        node is read-only. Raises DiskFailed."""
        parts, changes = flush.parts, flush.changes
        homes = _homes(parts)
        while flush.half.direct_writes:
            await asyncio.shield(next(iter(flush.half.direct_writes)))
        puts: Mapping[str, int] = flush.puts
        # entries of lost direct logs are written from memory
        flush.half.drop_locations(self.directories.lives)
        while unwritten := await self.directories.write(flush.half, parts, changes, puts):
            flush.half.drop_locations(self.directories.lives)
            puts = {}
            parts, changes = self._parts(unwritten), self._states.take_changes()
            homes.update(_homes(parts))
            if not all(map(self.directories.has_space, parts)):
                if self._is_hurrying or not self._has_journals:
                    raise DiskFull("no ledger directory has space for the journals' entries")
                await asyncio.sleep(SPACE_PAUSE_S)
        states = [state for i in homes if (state := self._states.get(i)) is not None]
        if any(len(state.directories) > 1 for state in states):
            self.reader.note_move()
            await self.directories.delete_replaced(flush.half, homes, states)

    async def _move_checkpoint(self, flush: _Flush) -> None:
        """Move each mark to the position where its journal was synced when the flush began. A
        journal that had failed before the flush is retired: the flush wrote all its records."""
        assert flush.marks is not None
        marks = {i: JournalMark(position) for i, position in flush.marks.items()}
        failed_ids = [i for i in self._marks if i in self._journals.failures and i not in marks]
        marks.update({i: self._marks[i]._replace(retired=True) for i in failed_ids})
        marks = {**self._marks, **marks}
        for journal_id, mark in self._marks.items():
            assert marks[journal_id] >= mark, "a mark never moves back"
        if marks != self._marks:
            await self.directories.write_checkpoint(marks)
            self._marks = marks
            await self._journals.forget_before(flush.marks)
        self._journals.relieve(flush.reliefs)
        if self._journals.reliefs() and self._current_flush is None:
            self.begin_flush()


def _homes(parts: Mapping[str, Sequence[int]]) -> dict[int, str]:
    """By ledger, the directory that takes its entries."""
    return {ledger_id: home for home, ids in parts.items() for ledger_id in ids}
