"""The ledger directories of a node: what a directory stores (entry logs and index), which
directories live, where a ledger's entries go.

Always true:
- a directory's id is in its identity file and never changes;
- a caller that changes locations of entries (a flush, a compaction, a deletion) holds `index_lock`,
  so none of them sees half of another's work: a flush beside a compaction could write the old
  location of a moved entry back;
- after a failed write nothing more is written to the directory;
- a ledger's directories are recorded in its state, never computed; the last of them takes its new
  entries, and another is added (and recorded) when that one is gone;
- states are written to every living directory, entries to their own alone;
- a directory that fails, or whose index is damaged while another one lives, is dropped for the
  rest of the run, with its reason; while a directory that may hold entries of a ledger is missing,
  the ledger is not whole (`is_whole`): an entry that is not found is unknown. A directory that
  comes back whole ends that by itself.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from bookie_server.api.entry import Buffer
from bookie_server.config import StorageConfig
from bookie_server.disk.interface import Disk, DiskFailed
from bookie_server.disk.monitor import DiskMonitor
from bookie_server.journal import checkpoint
from bookie_server.journal.checkpoint import BadCheckpoint, Marks
from bookie_server.logs.direct_log import DirectLog
from bookie_server.logs.entry_log import RECORD_HEADER_BYTES, EntryLogs, GrowingLog
from bookie_server.logs.index import (
    EVERY_LEDGER,
    EntryIndex,
    IndexChanges,
    IndexDamaged,
    LedgerState,
    Location,
)
from bookie_server.logs.rebuild import refuse_half_rebuilt
from bookie_server.storage.write_cache import CacheHalf

NEAR_SHARE = 0.9  # of the most free bytes: directories between which ledgers are spread
INDEX_BYTES, INDEX_ENTRY_BYTES = 128 << 10, 64  # of index and checkpoint, by a flush
_NONE: Mapping[str, int] = {}
_UNKNOWN = "none of the directories given has this id"
_log = logging.getLogger(__name__)

Entries = Iterator[tuple[int, int, Buffer]]
"""(ledger, entry id, entry), sorted by ledger and entry id."""


@dataclass(frozen=True, slots=True)
class JournalDirectory:
    """A folder for journal segments; `name` is its name in messages: its path."""

    id: str
    disk: Disk
    name: str = "journal"
    file_system: str = ""


@dataclass(frozen=True, slots=True)
class LedgerDirectory:
    """A folder for entry logs, with the index that was opened in it. `file_system`: see
    monitor.DirectoryState. `path`: where processes of this host find it; empty: they cannot."""

    id: str
    disk: Disk
    index: EntryIndex
    name: str = "ledger"
    file_system: str = ""
    path: str = ""


class StatesAtStart(NamedTuple):
    """The states of each directory that was there to the last, those of each that was away (its
    checkpoint is not the furthest), and the furthest marks; None: no checkpoint was written."""

    current: list[list[LedgerState]]
    away: list[list[LedgerState]]
    marks: Marks | None


class Directories(NamedTuple):
    """The directories on which a node starts. `failed`: why ledger directories cannot be opened, by
    id; `failed_names`: their names in messages."""

    journals: Sequence[JournalDirectory]
    ledgers: Sequence[LedgerDirectory]
    failed: Mapping[str, str] = {}
    failed_names: Mapping[str, str] = {}


class DirectoryStore:
    """One ledger directory. Made by `open`."""

    def __init__(self, directory: LedgerDirectory, logs: EntryLogs, direct_log: DirectLog) -> None:
        self.id = directory.id
        self.disk = directory.disk
        self.path = directory.path
        self.index = directory.index
        self.logs = logs
        self.direct_log = direct_log
        self.index_lock = asyncio.Lock()

    @classmethod
    async def open(cls, directory: LedgerDirectory, config: StorageConfig) -> "DirectoryStore":
        """Raises DiskFailed."""
        await refuse_half_rebuilt(directory.disk)
        logs = await EntryLogs.open(directory.disk, config, await directory.index.marked_logs())
        spare_bytes = config.write_cache_bytes
        direct_log = DirectLog(directory.disk, logs, directory.index, config, spare_bytes)
        return cls(directory, logs, direct_log)

    async def write(
        self,
        entries: Entries,
        changes: IndexChanges,
        direct: Sequence[Location] = (),
        puts: int = 0,
    ) -> None:
        """Write entries, changes of states, and the locations of entries that are here already
        (`direct`): durable when it returns. With that the index has all that it needs of the direct
        log's first `puts`.

        Raises DiskFailed: then any part of it may be missing.
        """
        marks = self.direct_log.marks(puts)
        async with self.index_lock:
            locations = [*await self.logs.write(entries), *direct]
            if changes.forgotten:
                await self.index.delete_states(changes.forgotten)
            if changes.states:  # first: the index may sync a part of this by itself
                await self.index.put_ledgers(changes.states)
            if locations:
                await self.index.put(locations)
            if marks:  # last, for the same reason
                await self.index.mark_logs(marks)
            if locations or marks or changes.states or changes.forgotten:
                await self.index.sync()
        self.direct_log.settle(puts, marks)

    def written_logs(self) -> list[GrowingLog]:
        """The logs that are being written: by flushes, and with large entries."""
        written = (self.logs.written, self.direct_log.written)
        return [log for log in written if log is not None]

    async def end_written(self, log: GrowingLog, end: int) -> None:
        """End one of the `written_logs`, if it still ends at `end`. Raises DiskFailed."""
        async with self.index_lock:  # no flush writes
            if log.file.end != end:
                return
            if log is self.logs.written:
                await self.logs.end_written()
            elif log is self.direct_log.written:
                await self.direct_log.end_written()

    async def forget_replayed_logs(self) -> None:
        """The index has all that it needs of the direct logs of earlier runs: durable when it
        returns. Raises DiskFailed."""
        if marks := await self.index.marked_logs():
            await self.index.mark_logs(dict.fromkeys(marks))
            await self.index.sync()

    async def delete_ledgers(
        self,
        ledger_ids: Iterable[int],
        is_dead: Callable[[int], bool] = lambda _: True,
        going: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> int:
        """Remove the entries of the ledgers from the index; a ledger that is not `is_dead` when its
        turn comes is left out. Returns of how many ledgers the index had entries. Durable when it
        returns.

        Each ledger's entries are removed in the context of `going`. Raises DiskFailed.
        """
        deleted = 0
        async with self.index_lock:
            for ledger_id in ledger_ids:
                if await self.index.last(ledger_id) is not None and is_dead(ledger_id):
                    with going(ledger_id):
                        await self.index.delete_ledger(ledger_id)
                    deleted += 1
            if deleted:
                await self.index.sync()
        return deleted

    async def delete_entries(self, entries: Mapping[int, Iterable[int]]) -> None:
        """Remove those of the entries (ids by ledger) that the index has. Durable when it returns.
        Raises DiskFailed."""
        deleted = False
        async with self.index_lock:
            for ledger_id, entry_ids in entries.items():
                last = await self.index.last(ledger_id)
                held = [entry_id for entry_id in entry_ids if last is not None and entry_id <= last]
                if held:
                    await self.index.delete(ledger_id, held)
                    deleted = True
            if deleted:
                await self.index.sync()

    async def close(self) -> None:
        """Raises DiskFailed."""
        await self.direct_log.close()
        async with self.index_lock:
            await self.logs.close()
            await self.index.close()


class Stores:
    """Made by `open`."""

    def __init__(self, stores: Sequence[DirectoryStore], failures: Mapping[str, str]) -> None:
        self._live = {store.id: store for store in stores}
        self.failures = dict(failures)
        """Why directories are missing, by id."""
        self.space: DiskMonitor | None = None
        self.on_drop: Callable[[], None] = lambda: None
        """Called in the step in which a directory is dropped."""
        self.damage = ""
        """Why the index of the only living directory is not to be trusted."""
        self.on_damage: Callable[[], None] = lambda: None
        self._given: dict[str, int] = {}  # ledgers that `choose` gave each directory
        self._any_absent = False  # states name directories that no setting names
        for store in stores:
            store.index.on_damage = partial(self._index_damaged, store.id)
            store.direct_log.on_failure = partial(self.drop, store.id)

    @classmethod
    async def open(cls, directories: Directories, config: StorageConfig) -> "Stores":
        """Raises DiskFailed when no ledger directory can be opened."""
        stores, failures = [], dict(directories.failed)
        for directory in directories.ledgers:
            try:
                stores.append(await DirectoryStore.open(directory, config))
            except DiskFailed as error:
                if len(directories.ledgers) == 1:
                    raise
                failures[directory.id] = str(error)
                _log.error("ledger directory %s cannot be opened: %s", directory.name, error)
        if not stores:
            raise DiskFailed(f"no ledger directory can be opened: {failures}")
        return cls(stores, failures)

    # -- which live --

    @property
    def live(self) -> list[DirectoryStore]:
        return list(self._live.values())

    def of(self, state: LedgerState | None) -> list[DirectoryStore]:
        """The living directories that may hold entries of the ledger; the last one takes its new
        entries."""
        if state is None or not state.directories:
            return self.live
        return [self._live[i] for i in state.directories if i in self._live]

    def has_home(self, state: LedgerState) -> bool:
        """Whether the directory for the ledger's new entries lives."""
        return bool(state.directories) and state.directories[-1] in self._live

    def is_whole(self, state: LedgerState) -> bool:
        """Whether every directory that may hold entries of the ledger lives."""
        return all(directory_id in self._live for directory_id in state.directories)

    def missing(self, state: LedgerState) -> int:
        """Which of its directories do not live: bit n for the n-th."""
        return sum(1 << n for n, i in enumerate(state.directories) if i not in self._live)

    def log_missing(self, states: Iterable[LedgerState]) -> None:
        """Log a line for each missing directory that may hold entries of ledgers. Ledgers that are
        in limbo by their own state need a repair even if the directory comes back."""
        states = list(states)
        counts = self._counts_of_missing(states)
        doubted = self._counts_of_missing([state for state in states if state.limbo])
        self._any_absent = any(directory_id not in self.failures for directory_id in counts)
        for directory_id, count in counts.items():
            why = self.failures.get(directory_id, _UNKNOWN)
            _log.error(
                "ledger directory %s is not there (%s): %d ledgers are in limbo until they are"
                " repaired or it comes back, %d of them until they are repaired",
                *(directory_id, why, count, doubted.get(directory_id, 0)),
            )

    def absent(self, states: Iterable[LedgerState]) -> dict[str, str]:
        """A text for each directory that states name and no setting does, by id, until each ledger
        with entries there gave it up. `log_missing` finds out whether there are such directories.
        """
        if not self._any_absent:
            return {}
        counts = self._counts_of_missing(states)
        absent = {i: count for i, count in counts.items() if i not in self.failures}
        self._any_absent = bool(absent)
        return {i: f"{_UNKNOWN} (ledgers with entries there: {n})" for i, n in absent.items()}

    def _counts_of_missing(self, states: Iterable[LedgerState]) -> dict[str, int]:
        """How many ledgers may have entries in each directory that does not live."""
        return Counter(i for state in states for i in state.directories if i not in self._live)

    def without_missing(self, state: LedgerState) -> LedgerState:
        """The state after it gave up the directories that do not live; its next revision is the one
        that records this."""
        if self.is_whole(state):
            return state
        living = tuple(i for i in state.directories if i in self._live)
        gone = [i for i in state.directories if i not in self._live]
        given_up = {**dict(state.given_up), **dict.fromkeys(gone, state.revision + 1)}
        return self.settled(
            replace(state, directories=living, given_up=tuple(sorted(given_up.items())))
        )

    def back_again(self, state: LedgerState, earlier: LedgerState) -> LedgerState:
        """A replayed `state` that follows `earlier`. A directory that it gives up, but that lives
        and is in `earlier`, stays recorded: entries that the journal had before this record may
        have been flushed there."""
        if earlier.ledger_id == EVERY_LEDGER:
            return state
        back = [i for i in earlier.directories if i in self._live and i not in state.directories]
        if not back or not state.directories:
            return state
        directories = (*back, *state.directories)
        return replace(state, directories=directories, revision=state.revision + 1)

    async def purge(self, states: Iterable[LedgerState]) -> None:
        """Durably drop from each living directory the entries of ledgers that gave it up and do not
        record it again. Raises DiskFailed when no directory is left."""
        garbage: dict[str, list[int]] = {}
        for state in states:
            for directory_id, _ in state.given_up:
                if directory_id in self._live and directory_id not in state.directories:
                    garbage.setdefault(directory_id, []).append(state.ledger_id)
        for directory_id, ledger_ids in garbage.items():
            try:
                dropped = await self._live[directory_id].delete_ledgers(ledger_ids)
                if dropped:
                    _log.info("directory %s is back: %d ledgers go", directory_id, dropped)
            except DiskFailed as error:
                self.drop(directory_id, error)
        self.check()

    def drop(self, directory_id: str, error: DiskFailed) -> None:
        """The directory is not used any more."""
        store = self._live.pop(directory_id, None)
        if store is not None:
            store.direct_log.fail(error)
            self.failures[directory_id] = str(error)
            _log.error("ledger directory %s is dropped: %s", directory_id, error)
            self.on_drop()
            if self.space is not None:
                self.space.poke()  # Info shows it at once

    def _index_damaged(self, directory_id: str, error: IndexDamaged) -> None:
        """A directory with a damaged index is dropped while others are left; the last directory
        goes on with the entries that can still be read, and takes no new ones."""
        if directory_id not in self._live or self.damage:
            return
        if len(self._live) > 1:
            self.drop(directory_id, error)
            return
        self.damage = str(error)
        _log.error("ledger directory %s: %s; the node is read-only", directory_id, error)
        self.on_damage()

    def check(self) -> None:
        """Raises DiskFailed when no directory is left."""
        if not self._live:
            why = "; ".join(self.failures[directory_id] for directory_id in sorted(self.failures))
            raise DiskFailed(f"no ledger directory is left: {why}")

    # -- where entries go --

    def choose(self) -> str:
        """The directory for a new ledger: of those whose free space is near the largest, the one
        that got the fewest ledgers in this run (free space is measured now and then)."""
        self.check()
        space = self.space
        if space is None or len(self._live) == 1:
            return next(iter(self._live))
        roomy = [i for i in self._live if space.has_space(i)] or list(self._live)
        most = max(map(space.free_bytes, roomy))
        near = [i for i in roomy if space.free_bytes(i) >= NEAR_SHARE * most]
        chosen = min(near, key=lambda i: self._given.get(i, 0))
        self._given[chosen] = self._given.get(chosen, 0) + 1
        return chosen

    def settled(self, state: LedgerState) -> LedgerState:
        """The state with a living directory for the ledger's new entries; a full one only while
        no other has space."""
        current = state.directories[-1] if state.directories else ""
        if current in self._live and (self.has_space(current) or len(self._live) == 1):
            return state
        home = self.choose()
        if current in self._live and not self.has_space(home):
            return state
        others = [i for i in state.directories if i != home]
        return replace(state, directories=(*others, home))

    def has_space(self, directory_id: str) -> bool:
        return self.space is None or self.space.has_space(directory_id)

    def home_with_space(self, state: LedgerState) -> DirectoryStore | None:
        """The directory for the ledger's new entries; None: it does not live, has no space, or is
        still to be chosen."""
        home = state.directories[-1] if state.directories else ""
        return self._live[home] if home in self._live and self.has_space(home) else None

    def home(self, state: LedgerState | None) -> str:
        """The id of the directory for the ledger's new entries."""
        if state is None or not state.directories:
            return next(iter(self._live))
        return state.directories[-1]

    # -- what is written --

    async def write(
        self,
        half: CacheHalf,
        parts: Mapping[str, Sequence[int]],
        changes: IndexChanges,
        puts: Mapping[str, int] = _NONE,
    ) -> list[int]:
        """Bring each directory its part (ledger ids) of the half, and all of them the changes.
        `puts`: by directory, how many puts of its direct log are in this half and those before.

        Returns the ledgers of directories that failed, had failed, or have no space for their part
        (then nothing of the part is written: BK#4114). Entries of these ledgers may be in no
        directory; all else is durable when it returns. Raises DiskFailed when no directory is left.
        """
        for directory_id in [i for i in self._live if i not in parts]:
            await self._has_room(directory_id, half, ())  # it may free its reserve for the changes
        full = [home for home, ids in parts.items() if not await self._has_room(home, half, ids)]
        fitting = {home: ids for home, ids in parts.items() if home not in full}
        direct = _direct_locations(half, fitting)
        passed = _NONE if full else puts  # direct locations of the full ones' part are not written
        await self._on(
            self.live,
            lambda store: store.write(
                half.to_write(fitting.get(store.id, ())),
                changes,
                direct.get(store.id, ()),
                passed.get(store.id, 0),
            ),
        )
        return [
            i
            for home, ids in parts.items()
            for i in ids
            if home in full or home not in self._live or self._has_lost_locations(half, i)
        ]

    def _has_lost_locations(self, half: CacheHalf, ledger_id: int) -> bool:
        """Whether an entry of the ledger has its location in a directory that does not live."""
        locations = half.locations.get(ledger_id, {}).values()
        return any(location.directory not in self._live for location in locations)

    def lives(self, directory_id: str) -> bool:
        return directory_id in self._live

    async def _has_room(self, home: str, half: CacheHalf, ledger_ids: Sequence[int]) -> bool:
        if self.space is None or home not in self._live:
            return True
        size, count = half.bytes_to_write(ledger_ids)
        needed_bytes = size + count * (RECORD_HEADER_BYTES + INDEX_ENTRY_BYTES) + INDEX_BYTES
        try:
            return await self.space.make_room(home, needed_bytes)
        except DiskFailed as error:  # even its free space cannot be read
            self.drop(home, error)
            return False

    async def delete_replaced(
        self, half: CacheHalf, homes: Mapping[int, str], states: Iterable[LedgerState]
    ) -> None:
        """Durably drop the copies that other directories hold of the half's entries, which are
        durable in their `homes` (by ledger): recovery may have replaced a bad copy. An entry with a
        location in a direct log replaces none.

        Raises DiskFailed when no directory is left.
        """
        replaced: dict[str, dict[int, Iterable[int]]] = {}
        for state in states:
            home = homes[state.ledger_id]
            for other in state.directories if home in self._live else ():
                if other != home and other in self._live:
                    written = [entry_id for _, entry_id, _ in half.to_write([state.ledger_id])]
                    replaced.setdefault(other, {})[state.ledger_id] = written
        if replaced:
            stores = [self._live[directory_id] for directory_id in replaced]
            await self._on(stores, lambda store: store.delete_entries(replaced[store.id]))

    async def forget_replayed_logs(self) -> None:
        """See DirectoryStore. Raises DiskFailed when none is left."""
        await self._on(self.live, DirectoryStore.forget_replayed_logs)

    async def write_checkpoint(self, marks: Marks) -> None:
        """Durable in every living directory. Raises DiskFailed when none is left."""
        await self._on(self.live, lambda store: checkpoint.write(store.disk, marks))

    async def close(self) -> None:
        """Raises DiskFailed."""
        for store in self.live:
            await store.close()

    async def _on(
        self,
        stores: Sequence[DirectoryStore],
        work: Callable[[DirectoryStore], Coroutine[Any, Any, None]],
    ) -> None:
        """A store on which the work fails is dropped. Raises DiskFailed when none is left."""
        outcomes = await _outcomes([work(store) for store in stores])
        for store, outcome in zip(stores, outcomes, strict=True):
            if isinstance(outcome, DiskFailed):
                self.drop(store.id, outcome)
            elif outcome is not None:
                raise outcome
        self.check()

    # -- what is there at start --

    async def read(self) -> StatesAtStart:
        """The states of all directories.

        A checkpoint that cannot be read counts as one without marks (everything is replayed, which
        is harmless). The index has the state of EVERY_LEDGER from a directory's first start on: a
        checkpoint beside an index without it means that the index was lost. Such a directory is
        dropped when there are others. Raises DiskFailed.
        """
        states: dict[str, list[LedgerState]] = {}
        marks: Marks | None = None
        copies: dict[str, Marks] = {}
        bare: list[DirectoryStore] = []
        for store in self.live:
            try:
                own_marks = await _read_checkpoint(store)
                indexed = await store.index.ledgers()
            except DiskFailed as error:
                self.drop(store.id, error)
                continue
            states[store.id] = [_at_home(state, store.id) for state in indexed]
            copies[store.id] = own_marks or {}
            if own_marks is not None:
                if not any(state.ledger_id == EVERY_LEDGER for state in indexed):
                    bare.append(store)
                marks = checkpoint.furthest(own_marks, marks or {})
        self.check()
        for store in bare if len(bare) < len(self._live) else ():
            self.drop(store.id, DiskFailed("its index is empty although there is a checkpoint"))
        current = [store.id for store in self.live if copies[store.id] == (marks or {})]
        current = current or list(self._live)  # each was away once: any may be the right one
        away = [store.id for store in self.live if store.id not in current]
        return StatesAtStart([states[i] for i in current], [states[i] for i in away], marks)


async def _outcomes(writes: Sequence[Coroutine[Any, Any, None]]) -> Sequence[BaseException | None]:
    """How each write ended; a single one, as on most nodes, needs no task of its own."""
    if len(writes) != 1:
        ends: list[BaseException | None] = await asyncio.gather(*writes, return_exceptions=True)
        return ends
    try:
        await writes[0]
    except Exception as error:
        return [error]
    return [None]


async def _read_checkpoint(store: DirectoryStore) -> Marks | None:
    try:
        return await checkpoint.read(store.disk)
    except BadCheckpoint as error:
        _log.error("ledger directory %s: %s", store.id, error)
        return {}


def _at_home(state: LedgerState, directory_id: str) -> LedgerState:
    """States were written without directories while a node had only one."""
    if state.directories or state.ledger_id == EVERY_LEDGER:
        return state
    return replace(state, directories=(directory_id,))


def _direct_locations(
    half: CacheHalf, parts: Mapping[str, Sequence[int]]
) -> dict[str, list[Location]]:
    """By directory, the locations that entries of these ledgers have already."""
    direct: dict[str, list[Location]] = {}
    for ledger_id in (i for ids in parts.values() for i in ids):
        for placed in half.locations.get(ledger_id, {}).values():
            direct.setdefault(placed.directory, []).append(placed.location)
    return direct
