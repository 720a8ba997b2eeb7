"""The ledger directories of a node: the entry logs and the index of each directory, which
directories live, and which directory takes a ledger's entries.

Always true:
- a directory's id is in its identity file and never changes;
- a flush, a compaction or a deletion holds `index_lock` while it changes entry locations: a flush
  at the same time as a compaction could write the old location of a moved entry back;
- after a failed write the directory is never written again;
- a ledger's directories are recorded in its state, never computed. The last of them is the ledger's
  home: it takes the new entries. When the home is lost, another directory is recorded after it;
- every living directory gets all states; entries go to their ledger's home only;
- a directory is dropped for the rest of the run if it fails, or if its index is damaged and another
  directory lives;
- while a directory that may hold entries of a ledger is missing, the ledger is not whole
  (`is_whole`): a missing entry is unknown. The ledger is whole again when the directory is back.
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

NEAR_SHARE = 0.9  # new ledgers go to directories with 0.9 of the most free bytes, or more
INDEX_BYTES, INDEX_ENTRY_BYTES = 128 << 10, 64  # of a flush, and of each entry, in the index
_NO_PUTS: Mapping[str, int] = {}
_UNNAMED = "no directory in the settings has this id"
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
    monitor.DirectoryState. `path`: the folder's path for processes of this host; empty: unknown."""

    id: str
    disk: Disk
    index: EntryIndex
    name: str = "ledger"
    file_system: str = ""
    path: str = ""


class StatesAtStart(NamedTuple):
    """The states by directory: `current` of directories whose checkpoint is the furthest,
    `outdated` of directories that missed the end of the last run. `marks`: the furthest marks;
    None: no checkpoint was written."""

    current: list[list[LedgerState]]
    outdated: list[list[LedgerState]]
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
        """Write entries, changes of states, and locations of entries in the direct log (`direct`):
        durable when this returns. `direct` includes all locations of the direct log's first `puts`
        that the index needs.

        Raises DiskFailed: then any part may be missing.
        """
        marks = self.direct_log.marks(puts)
        async with self.index_lock:
            locations = [*await self.logs.write(entries), *direct]
            if changes.forgotten_ids:
                await self.index.delete_states(changes.forgotten_ids)
            if changes.states:  # before the locations, as the index may sync a part by itself
                await self.index.put_ledgers(changes.states)
            if locations:
                await self.index.put(locations)
            if marks:  # after the locations, as the index may sync a part by itself
                await self.index.mark_logs(marks)
            if locations or marks or changes.states or changes.forgotten_ids:
                await self.index.sync()
        self.direct_log.note_marked(puts, marks)

    def growing_logs(self) -> list[GrowingLog]:
        """The log of flushes and the log of large entries, if they exist."""
        logs = (self.logs.growing_log, self.direct_log.growing_log)
        return [log for log in logs if log is not None]

    async def end_growing_log(self, log: GrowingLog, end: int) -> None:
        """End one of the `growing_logs`, if its file still ends at `end`. Raises DiskFailed."""
        async with self.index_lock:  # no flush writes
            if log.file.end != end:
                return
            if log is self.logs.growing_log:
                await self.logs.end_growing_log()
            elif log is self.direct_log.growing_log:
                await self.direct_log.end_growing_log()

    async def forget_replayed_logs(self) -> None:
        """Remove the marks of the direct logs of earlier runs: the index has all their entries.
        Durable when this returns. Raises DiskFailed."""
        if marks := await self.index.marked_logs():
            await self.index.mark_logs(dict.fromkeys(marks))
            await self.index.sync()

    async def delete_ledgers(
        self,
        ledger_ids: Iterable[int],
        is_dead: Callable[[int], bool] = lambda _: True,
        deleting: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> int:
        """Remove the entries of these ledgers from the index, except ledgers that are not `is_dead`
        when their turn comes. Durable when this returns. Returns the number of ledgers that had
        entries.

        Each ledger's entries are removed within the context `deleting(ledger_id)`. Raises
        DiskFailed.
        """
        deleted_count = 0
        async with self.index_lock:
            for ledger_id in ledger_ids:
                if await self.index.last(ledger_id) is not None and is_dead(ledger_id):
                    with deleting(ledger_id):
                        await self.index.delete_ledger(ledger_id)
                    deleted_count += 1
            if deleted_count:
                await self.index.sync()
        return deleted_count

    async def delete_entries(self, entries: Mapping[int, Iterable[int]]) -> None:
        """Durably remove these entries (ids by ledger) from the index. Raises DiskFailed."""
        must_sync = False
        async with self.index_lock:
            for ledger_id, entry_ids in entries.items():
                last = await self.index.last(ledger_id)
                candidate_ids = [
                    entry_id for entry_id in entry_ids if last is not None and entry_id <= last
                ]
                if candidate_ids:
                    await self.index.delete(ledger_id, candidate_ids)
                    must_sync = True
            if must_sync:
                await self.index.sync()

    async def close(self) -> None:
        """Raises DiskFailed."""
        await self.direct_log.close()
        async with self.index_lock:
            await self.logs.close()
            await self.index.close()


class Stores:
    """The ledger directories of a node. Made by `open`."""

    def __init__(self, stores: Sequence[DirectoryStore], failures: Mapping[str, str]) -> None:
        self._live = {store.id: store for store in stores}
        self.failures = dict(failures)
        """Why directories are missing, by id."""
        self.space: DiskMonitor | None = None
        self.on_drop: Callable[[], None] = lambda: None
        """Called in the step in which a directory is dropped."""
        self.damage = ""
        """How the index of the only living directory is damaged; empty: it is undamaged."""
        self.on_damage: Callable[[], None] = lambda: None
        self._chosen_counts: dict[str, int] = {}  # by directory: how many new ledgers it got
        self._has_absent = False  # whether states name directories that no setting names
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

    def stores_of(self, state: LedgerState | None) -> list[DirectoryStore]:
        """The living directories that may hold entries of the ledger, its home last."""
        if state is None or not state.directories:
            return self.live
        return [self._live[i] for i in state.directories if i in self._live]

    def has_home(self, state: LedgerState) -> bool:
        """Whether the ledger's home lives."""
        return bool(state.directories) and state.directories[-1] in self._live

    def is_whole(self, state: LedgerState) -> bool:
        """Whether every directory that may hold entries of the ledger lives."""
        return all(directory_id in self._live for directory_id in state.directories)

    def missing_bits(self, state: LedgerState) -> int:
        """Bit n is set if the ledger's n-th directory does not live."""
        return sum(1 << n for n, i in enumerate(state.directories) if i not in self._live)

    def log_missing(self, states: Iterable[LedgerState]) -> None:
        """Log a line for each missing directory that may hold entries of ledgers. A ledger whose
        own state is in limbo needs a repair even if the directory comes back."""
        states = list(states)
        counts = self._counts_of_missing(states)
        limbo_counts = self._counts_of_missing([state for state in states if state.limbo])
        self._has_absent = any(directory_id not in self.failures for directory_id in counts)
        for directory_id, count in counts.items():
            why = self.failures.get(directory_id, _UNNAMED)
            _log.error(
                "ledger directory %s is not there (%s): %d ledgers are in limbo until they are"
                " repaired or the directory comes back, %d of them until they are repaired",
                *(directory_id, why, count, limbo_counts.get(directory_id, 0)),
            )

    def absent(self, states: Iterable[LedgerState]) -> dict[str, str]:
        """By id, a text for each directory that a state names and no setting names. `log_missing`
        has to be called before: it sets `_has_absent`."""
        if not self._has_absent:
            return {}
        counts = self._counts_of_missing(states)
        absent = {i: count for i, count in counts.items() if i not in self.failures}
        self._has_absent = bool(absent)
        return {i: f"{_UNNAMED} (ledgers with entries there: {n})" for i, n in absent.items()}

    def _counts_of_missing(self, states: Iterable[LedgerState]) -> dict[str, int]:
        """How many ledgers may have entries in each directory that does not live."""
        return Counter(i for state in states for i in state.directories if i not in self._live)

    def without_missing(self, state: LedgerState) -> LedgerState:
        """The state, to be recorded with the next revision, in which the directories that do not
        live are given up."""
        if self.is_whole(state):
            return state
        living_ids = tuple(i for i in state.directories if i in self._live)
        lost_ids = [i for i in state.directories if i not in self._live]
        given_up = {**dict(state.given_up), **dict.fromkeys(lost_ids, state.revision + 1)}
        return self.with_home(
            replace(state, directories=living_ids, given_up=tuple(sorted(given_up.items())))
        )

    def keep_returned(self, state: LedgerState, earlier: LedgerState) -> LedgerState:
        """The replayed `state`, which follows the state `earlier`. A living directory that `state`
        gave up is recorded again, as a flush of this replay may have written entries there."""
        if earlier.ledger_id == EVERY_LEDGER:
            return state
        returned_ids = [
            i for i in earlier.directories if i in self._live and i not in state.directories
        ]
        if not returned_ids or not state.directories:
            return state
        directories = (*returned_ids, *state.directories)
        return replace(state, directories=directories, revision=state.revision + 1)

    async def purge(self, states: Iterable[LedgerState]) -> None:
        """Durably remove from each living directory the entries of ledgers that gave it up and do
        not record it again. Raises DiskFailed when no directory is left."""
        garbage: dict[str, list[int]] = {}
        for state in states:
            for directory_id, _ in state.given_up:
                if directory_id in self._live and directory_id not in state.directories:
                    garbage.setdefault(directory_id, []).append(state.ledger_id)
        for directory_id, ledger_ids in garbage.items():
            try:
                count = await self._live[directory_id].delete_ledgers(ledger_ids)
                if count:
                    text = "directory %s is back: its entries of %d ledgers are removed"
                    _log.info(text, directory_id, count)
            except DiskFailed as error:
                self.drop(directory_id, error)
        self.check_some_live()

    def drop(self, directory_id: str, error: DiskFailed) -> None:
        """Stop using the directory."""
        store = self._live.pop(directory_id, None)
        if store is not None:
            store.direct_log.fail(error)
            self.failures[directory_id] = str(error)
            _log.error("ledger directory %s is dropped: %s", directory_id, error)
            self.on_drop()
            if self.space is not None:
                self.space.poke()  # Info shows the drop at once

    def _index_damaged(self, directory_id: str, error: IndexDamaged) -> None:
        """Drop a directory with a damaged index. The last directory stays, and takes no entries."""
        if directory_id not in self._live or self.damage:
            return
        if len(self._live) > 1:
            self.drop(directory_id, error)
            return
        self.damage = str(error)
        _log.error("ledger directory %s: %s; the node is read-only", directory_id, error)
        self.on_damage()

    def check_some_live(self) -> None:
        """Raises DiskFailed when no directory is left."""
        if not self._live:
            why = "; ".join(self.failures[directory_id] for directory_id in sorted(self.failures))
            raise DiskFailed(f"no ledger directory is left: {why}")

    # -- where entries go --

    def choose_home(self) -> str:
        """The directory for a new ledger: of the directories with nearly the most free space, the
        directory that got the fewest ledgers in this run, as free space is measured seldom."""
        self.check_some_live()
        space = self.space
        if space is None or len(self._live) == 1:
            return next(iter(self._live))
        with_space = [i for i in self._live if space.has_space(i)] or list(self._live)
        free_bytes_max = max(map(space.free_bytes, with_space))
        candidates = [i for i in with_space if space.free_bytes(i) >= NEAR_SHARE * free_bytes_max]
        directory_id = min(candidates, key=lambda i: self._chosen_counts.get(i, 0))
        self._chosen_counts[directory_id] = self._chosen_counts.get(directory_id, 0) + 1
        return directory_id

    def with_home(self, state: LedgerState) -> LedgerState:
        """The state with a living home. A full home is replaced if another directory has space."""
        current = state.directories[-1] if state.directories else ""
        if current in self._live and (self.has_space(current) or len(self._live) == 1):
            return state
        home = self.choose_home()
        if current in self._live and not self.has_space(home):
            return state
        others = [i for i in state.directories if i != home]
        return replace(state, directories=(*others, home))

    def has_space(self, directory_id: str) -> bool:
        return self.space is None or self.space.has_space(directory_id)

    def home_with_space(self, state: LedgerState) -> DirectoryStore | None:
        """The ledger's home; None if the home does not live, has no space, or is not chosen yet."""
        home = state.directories[-1] if state.directories else ""
        return self._live[home] if home in self._live and self.has_space(home) else None

    def home_id(self, state: LedgerState | None) -> str:
        """The id of the ledger's home; if no home is recorded, the id of a living directory."""
        if state is None or not state.directories:
            return next(iter(self._live))
        return state.directories[-1]

    # -- writes --

    async def write(
        self,
        half: CacheHalf,
        parts: Mapping[str, Sequence[int]],
        changes: IndexChanges,
        puts: Mapping[str, int] = _NO_PUTS,
    ) -> list[int]:
        """Write to each directory its part (ledger ids) of the half, and to all directories the
        changes. `puts`: by directory, how many puts of its direct log are in this half and earlier
        halves.

        Returns the ledgers that have to be written again: their directory failed now or before, or
        has no space for its part (then nothing of the part is written: BK#4114). All other ledgers'
        entries are durable when this returns. Raises DiskFailed when no directory is left.
        """
        for directory_id in [i for i in self._live if i not in parts]:
            await self._has_room(directory_id, half, ())  # may free the disk's reserve, for changes
        full_homes = [
            home for home, ids in parts.items() if not await self._has_room(home, half, ids)
        ]
        fitting_parts = {home: ids for home, ids in parts.items() if home not in full_homes}
        direct = _direct_locations(half, fitting_parts)
        # the direct locations of a full home's part are not written: no log's mark may move
        mark_puts = _NO_PUTS if full_homes else puts
        await self._run_on(
            self.live,
            lambda store: store.write(
                half.to_write(fitting_parts.get(store.id, ())),
                changes,
                direct.get(store.id, ()),
                mark_puts.get(store.id, 0),
            ),
        )
        return [
            i
            for home, ids in parts.items()
            for i in ids
            if home in full_homes or home not in self._live or self._has_lost_locations(half, i)
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
        except DiskFailed as error:  # even the directory's free space cannot be read
            self.drop(home, error)
            return False

    async def delete_replaced(
        self, half: CacheHalf, homes: Mapping[int, str], states: Iterable[LedgerState]
    ) -> None:
        """Durably remove older copies of the half's entries from all directories except the
        ledger's home, which has the entries durably: recovery may have replaced a bad copy. Entries
        in direct logs have no older copies.

        Raises DiskFailed when no directory is left.
        """
        replaced_copies: dict[str, dict[int, Iterable[int]]] = {}
        for state in states:
            home = homes[state.ledger_id]
            for other in state.directories if home in self._live else ():
                if other != home and other in self._live:
                    entry_ids = [entry_id for _, entry_id, _ in half.to_write([state.ledger_id])]
                    replaced_copies.setdefault(other, {})[state.ledger_id] = entry_ids
        if replaced_copies:
            stores = [self._live[directory_id] for directory_id in replaced_copies]
            await self._run_on(
                stores, lambda store: store.delete_entries(replaced_copies[store.id])
            )

    async def forget_replayed_logs(self) -> None:
        """Raises DiskFailed when no directory is left."""
        await self._run_on(self.live, DirectoryStore.forget_replayed_logs)

    async def write_checkpoint(self, marks: Marks) -> None:
        """Durable in every living directory. Raises DiskFailed when no directory is left."""
        await self._run_on(self.live, lambda store: checkpoint.write(store.disk, marks))

    async def close(self) -> None:
        """Raises DiskFailed."""
        for store in self.live:
            await store.close()

    async def _run_on(
        self,
        stores: Sequence[DirectoryStore],
        work: Callable[[DirectoryStore], Coroutine[Any, Any, None]],
    ) -> None:
        """Do the work on each store, and drop the stores on which it fails. Raises DiskFailed when
        no directory is left."""
        outcomes = await _outcomes([work(store) for store in stores])
        for store, outcome in zip(stores, outcomes, strict=True):
            if isinstance(outcome, DiskFailed):
                self.drop(store.id, outcome)
            elif outcome is not None:
                raise outcome
        self.check_some_live()

    # -- at a start --

    async def read_states(self) -> StatesAtStart:
        """The states of all directories.

        A checkpoint that cannot be read counts as a checkpoint without marks (all records are
        replayed, which is harmless). From a directory's first start on its index has the state of
        EVERY_LEDGER. If there is a checkpoint and the index lacks that state, the index was lost;
        then the directory is dropped, if another directory has its index. Raises DiskFailed.
        """
        states: dict[str, list[LedgerState]] = {}
        marks: Marks | None = None
        copies: dict[str, Marks] = {}
        stores_without_index: list[DirectoryStore] = []
        for store in self.live:
            try:
                own_marks = await _read_checkpoint(store)
                indexed = await store.index.ledgers()
            except DiskFailed as error:
                self.drop(store.id, error)
                continue
            states[store.id] = [_with_directory(state, store.id) for state in indexed]
            copies[store.id] = own_marks or {}
            if own_marks is not None:
                if not any(state.ledger_id == EVERY_LEDGER for state in indexed):
                    stores_without_index.append(store)
                marks = checkpoint.furthest(own_marks, marks or {})
        self.check_some_live()
        for store in stores_without_index if len(stores_without_index) < len(self._live) else ():
            self.drop(store.id, DiskFailed("its index is empty although there is a checkpoint"))
        current = [store.id for store in self.live if copies[store.id] == (marks or {})]
        current = current or list(self._live)  # if each copy lacks some of the furthest marks
        outdated = [store.id for store in self.live if store.id not in current]
        return StatesAtStart([states[i] for i in current], [states[i] for i in outdated], marks)


async def _outcomes(writes: Sequence[Coroutine[Any, Any, None]]) -> Sequence[BaseException | None]:
    """The error of each write, or None; a single write, as on most nodes, needs no task."""
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


def _with_directory(state: LedgerState, directory_id: str) -> LedgerState:
    """The state; if an early version wrote it, which recorded no directories, with the directory
    from which it was read."""
    if state.directories or state.ledger_id == EVERY_LEDGER:
        return state
    return replace(state, directories=(directory_id,))


def _direct_locations(
    half: CacheHalf, parts: Mapping[str, Sequence[int]]
) -> dict[str, list[Location]]:
    """By directory, the locations that entries of these ledgers have in direct logs."""
    direct: dict[str, list[Location]] = {}
    for ledger_id in (i for ids in parts.values() for i in ids):
        for directory_id, location in half.locations.get(ledger_id, {}).values():
            direct.setdefault(directory_id, []).append(location)
    return direct
