"""The ledger directories of a node: what one stores (entry logs and index), which live, where a
ledger's entries go.

Always true:
- a directory's id is in its identity file and never changes;
- a caller that changes where entries lie (a flush, a compaction, a deletion) holds `index_lock`, so
  none of them sees half of another's work: a flush beside a compaction could write the old location
  of a moved entry back;
- after a failed write nothing more is written to the directory;
- a ledger's directories are recorded in its state, never computed; the last of them takes its new
  entries, and another is added (and recorded) when that one is gone;
- states are written to every living directory, entries to their own alone;
- a directory that fails, or whose index is damaged while another one lives, is dropped for the
  rest of the run, with its reason; while a directory that may hold entries of a ledger is not
  there, the ledger is not whole (`is_whole`): what is not found of it is unknown. One that comes
  back whole heals that by itself.
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
    Changes,
    EntryIndex,
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
    """A folder for journal segments; `name` is what people call it, its path."""

    id: str
    disk: Disk
    name: str = "journal"
    file_system: str = ""


@dataclass(frozen=True, slots=True)
class LedgerDirectory:
    """A folder for entry logs, with the index that was opened in it. `file_system`: see
    monitor.DirectoryState. `path`: where processes of this host find it, if they can."""

    id: str
    disk: Disk
    index: EntryIndex
    name: str = "ledger"
    file_system: str = ""
    path: str = ""


class Directories(NamedTuple):
    """What a node is started on. `failed`: ledger directories that cannot be opened, by id: why;
    `failed_names` has what they are called in messages."""

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
        self, entries: Entries, changes: Changes, direct: Sequence[Location] = (), puts: int = 0
    ) -> None:
        """Entries, what changed, and where entries lie that are here already: durable when it
        returns. With that the index has all that it needs of the direct log's first `puts`.

        Raises DiskFailed: then nothing of it may be relied on.
        """
        marks = self.direct_log.marks(puts)
        async with self.index_lock:
            locations = [*await self.logs.write(entries), *direct]
            if changes.forgotten:
                await self.index.delete_states(changes.forgotten)
            if changes.states:  # first: the index may sync by itself, and then not all of it
                await self.index.put_ledgers(changes.states)
            if locations:
                await self.index.put(locations)
            if marks:  # last, for the same reason
                await self.index.mark_logs(marks)
            if locations or marks or changes.states or changes.forgotten:
                await self.index.sync()
        self.direct_log.settle(puts, marks)

    def written_logs(self) -> list[GrowingLog]:
        """Those that are written: by flushes, and with large entries."""
        written = (self.logs.written, self.direct_log.written)
        return [log for log in written if log is not None]

    async def end_written(self, log: GrowingLog, end: int) -> None:
        """End one of these that ends at `end` still. Raises DiskFailed."""
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
        wanted: Callable[[int], bool] = lambda _: True,
        going: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> int:
        """Let the index forget the entries of those of the ledgers that are still `wanted` gone
        when their turn comes; returns of how many it had some. Durable when it returns.

        While those of one go, in the context of `going`. Raises DiskFailed.
        """
        deleted = 0
        async with self.index_lock:
            for ledger_id in ledger_ids:
                if await self.index.last(ledger_id) is not None and wanted(ledger_id):
                    with going(ledger_id):
                        await self.index.delete_ledger(ledger_id)
                    deleted += 1
            if deleted:
                await self.index.sync()
        return deleted

    async def delete_entries(self, entries: Mapping[int, Iterable[int]]) -> None:
        """Let the index forget those of the entries (ids by ledger) that it has. Durable when it
        returns. Raises DiskFailed."""
        deleted = False
        async with self.index_lock:
            for ledger_id, entry_ids in entries.items():
                last = await self.index.last(ledger_id)
                held = [each for each in entry_ids if last is not None and each <= last]
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
        """Directories that are not there, by id: why."""
        self.space: DiskMonitor | None = None
        self.on_drop: Callable[[], None] = lambda: None
        """Called in the step in which a directory is dropped."""
        self.damage = ""
        """Why the index of the only directory that lives is not to be trusted."""
        self.on_damage: Callable[[], None] = lambda: None
        self._given: dict[str, int] = {}  # ledgers that `choose` gave each directory
        self._any_absent = False  # whether states name directories that no setting names
        for store in stores:
            store.index.on_damage = partial(self._index_damaged, store.id)
            store.direct_log.on_failure = partial(self.drop, store.id)

    @classmethod
    async def open(cls, directories: Directories, config: StorageConfig) -> "Stores":
        """Raises DiskFailed when none can be opened."""
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

    # -- which there are --

    @property
    def live(self) -> list[DirectoryStore]:
        return list(self._live.values())

    def of(self, state: LedgerState | None) -> list[DirectoryStore]:
        """The living directories that may hold entries of the ledger, the one that takes new ones
        last."""
        if state is None or not state.directories:
            return self.live
        return [self._live[each] for each in state.directories if each in self._live]

    def has_home(self, state: LedgerState) -> bool:
        """Whether new entries of the ledger have a living directory to go to."""
        return bool(state.directories) and state.directories[-1] in self._live

    def is_whole(self, state: LedgerState) -> bool:
        """Whether every directory that may hold entries of the ledger lives."""
        return all(each in self._live for each in state.directories)

    def missing(self, state: LedgerState) -> int:
        """Which of its directories do not live: bit n for the n-th."""
        return sum(1 << n for n, each in enumerate(state.directories) if each not in self._live)

    def tell_missing(self, states: Iterable[LedgerState]) -> None:
        """One log line for each directory that is not there and may hold entries of ledgers. Those
        that are in limbo themselves need to be repaired, whatever comes back."""
        states = list(states)
        counts = self._counts_of_missing(states)
        doubted = self._counts_of_missing([state for state in states if state.limbo])
        self._any_absent = any(each not in self.failures for each in counts)
        for directory_id, count in counts.items():
            why = self.failures.get(directory_id, _UNKNOWN)
            _log.error(
                "ledger directory %s is not there (%s): %d ledgers are in limbo until they are"
                " repaired or it comes back, %d of them until they are repaired",
                *(directory_id, why, count, doubted.get(directory_id, 0)),
            )

    def absent(self, states: Iterable[LedgerState]) -> dict[str, str]:
        """Directories that may hold entries of ledgers and that no directory given is, by id, and
        how that is told: until each of those ledgers gave them up. Found by `tell_missing`."""
        if not self._any_absent:
            return {}
        counts = self._counts_of_missing(states)
        found = {each: count for each, count in counts.items() if each not in self.failures}
        self._any_absent = bool(found)
        return {each: f"{_UNKNOWN} (ledgers with entries there: {n})" for each, n in found.items()}

    def _counts_of_missing(self, states: Iterable[LedgerState]) -> dict[str, int]:
        """By directory that does not live: how many ledgers may have entries there."""
        return Counter(i for state in states for i in state.directories if i not in self._live)

    def without_missing(self, state: LedgerState) -> LedgerState:
        """The state, as its next revision will say it, without directories that do not live: they
        are given up."""
        if self.is_whole(state):
            return state
        living = tuple(each for each in state.directories if each in self._live)
        gone = [each for each in state.directories if each not in self._live]
        given_up = {**dict(state.given_up), **dict.fromkeys(gone, state.revision + 1)}
        return self.settled(
            replace(state, directories=living, given_up=tuple(sorted(given_up.items())))
        )

    def back_again(self, state: LedgerState, known: LedgerState) -> LedgerState:
        """`state` as it was logged and replayed after `known`. A directory that it gives up, which
        lives and was recorded until now, is recorded still: what the journal held before this
        record may have been flushed there."""
        if known.ledger_id == EVERY_LEDGER:
            return state
        back = [i for i in known.directories if i in self._live and i not in state.directories]
        if not back or not state.directories:
            return state
        directories = (*back, *state.directories)
        return replace(state, directories=directories, revision=state.revision + 1)

    async def purge(self, states: Iterable[LedgerState]) -> None:
        """Durably drop from the living directories what they hold of ledgers that gave them up and
        do not record them again. Raises DiskFailed when no directory is left."""
        garbage: dict[str, list[int]] = {}
        for state in states:
            for each, _ in state.given_up:
                if each in self._live and each not in state.directories:
                    garbage.setdefault(each, []).append(state.ledger_id)
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
        """A damaged index costs its directory while others are left; the last one goes on with
        what can be read of it, and takes no new entries."""
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
            why = "; ".join(self.failures[each] for each in sorted(self.failures))
            raise DiskFailed(f"no ledger directory is left: {why}")

    # -- where entries go --

    def choose(self) -> str:
        """The directory for a new ledger: of those that have space and about as much of it as any,
        the one that was given fewest ledgers in this run (free space is looked at now and then)."""
        self.check()
        space = self.space
        if space is None or len(self._live) == 1:
            return next(iter(self._live))
        roomy = [each for each in self._live if space.has_space(each)] or list(self._live)
        most = max(map(space.free_bytes, roomy))
        near = [each for each in roomy if space.free_bytes(each) >= NEAR_SHARE * most]
        chosen = min(near, key=lambda each: self._given.get(each, 0))
        self._given[chosen] = self._given.get(chosen, 0) + 1
        return chosen

    def settled(self, state: LedgerState) -> LedgerState:
        """The state with a living directory that takes the ledger's entries; a full one only
        while no other has space."""
        current = state.directories[-1] if state.directories else ""
        if current in self._live and (self.has_space(current) or len(self._live) == 1):
            return state
        home = self.choose()
        if current in self._live and not self.has_space(home):
            return state
        others = [each for each in state.directories if each != home]
        return replace(state, directories=(*others, home))

    def has_space(self, directory_id: str) -> bool:
        return self.space is None or self.space.has_space(directory_id)

    def home_with_space(self, state: LedgerState) -> DirectoryStore | None:
        """The living directory with space where entries of the ledger go; None: that one is not,
        or is still to be chosen."""
        home = state.directories[-1] if state.directories else ""
        return self._live[home] if home in self._live and self.has_space(home) else None

    def home(self, state: LedgerState | None) -> str:
        """Where entries of the ledger are written."""
        if state is None or not state.directories:
            return next(iter(self._live))
        return state.directories[-1]

    # -- what is written --

    async def write(
        self,
        half: CacheHalf,
        parts: Mapping[str, Sequence[int]],
        changes: Changes,
        puts: Mapping[str, int] = _NONE,
    ) -> list[int]:
        """Bring each directory its part (ledger ids) of the half, and all of them the changes. Of
        what is in direct logs, `puts` says how much this half and those before have (by directory).

        Returns the ledgers of directories that failed, had failed, or have no space for their part,
        of which nothing is written then (BK#4114): their part, or some of it, is nowhere. All else
        is durable when it returns. Raises DiskFailed when no directory is left.
        """
        for each in [each for each in self._live if each not in parts]:
            await self._has_room(each, half, ())  # it gives its reserve back for what comes here
        full = [home for home, ids in parts.items() if not await self._has_room(home, half, ids)]
        fitting = {home: ids for home, ids in parts.items() if home not in full}
        direct = _direct_locations(half, fitting)
        passed = _NONE if full else puts  # what lies here of the others is not told yet
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
        """Whether an entry of the ledger lies in a directory that does not live any more."""
        locations = half.locations.get(ledger_id, {}).values()
        return any(each.directory not in self._live for each in locations)

    def lives(self, directory_id: str) -> bool:
        return directory_id in self._live

    async def _has_room(self, home: str, half: CacheHalf, ledger_ids: Sequence[int]) -> bool:
        if self.space is None or home not in self._live:
            return True
        size, count = half.bytes_to_write(ledger_ids)
        needed_bytes = size + count * (RECORD_HEADER_BYTES + INDEX_ENTRY_BYTES) + INDEX_BYTES
        try:
            return await self.space.make_room(home, needed_bytes)
        except DiskFailed as error:  # it cannot even be asked
            self.drop(home, error)
            return False

    async def delete_replaced(
        self, half: CacheHalf, homes: Mapping[int, str], states: Iterable[LedgerState]
    ) -> None:
        """Durably drop what other directories hold of the half's entries, which are durable in
        their `homes` (by ledger): recovery may have replaced a copy that is bad. An entry that lies
        where its direct log has it replaces none.

        Raises DiskFailed when no directory is left.
        """
        replaced: dict[str, dict[int, Iterable[int]]] = {}
        for state in states:
            home = homes[state.ledger_id]
            for each in state.directories if home in self._live else ():
                if each != home and each in self._live:
                    written = [entry_id for _, entry_id, _ in half.to_write([state.ledger_id])]
                    replaced.setdefault(each, {})[state.ledger_id] = written
        if replaced:
            stores = [self._live[each] for each in replaced]
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

    async def read(
        self, first_journal: str
    ) -> tuple[list[list[LedgerState]], list[list[LedgerState]], Marks | None]:
        """The states of each directory that was there to the last, those of each that was away (its
        checkpoint is not the furthest), and the furthest marks; None: no checkpoint ever was.

        A checkpoint that cannot be read counts as one that says nothing (everything is replayed,
        which is harmless). The index carries the state of EVERY_LEDGER from a directory's first
        start on: a checkpoint beside an index without it means that the index was lost. Such a
        directory is dropped when there are others. Raises DiskFailed.
        """
        states: dict[str, list[LedgerState]] = {}
        marks: Marks | None = None
        copies: dict[str, Marks] = {}
        bare: list[DirectoryStore] = []
        for store in self.live:
            try:
                found = await _read_checkpoint(store, first_journal)
                known = await store.index.ledgers()
            except DiskFailed as error:
                self.drop(store.id, error)
                continue
            states[store.id] = [_at_home(state, store.id) for state in known]
            copies[store.id] = found or {}
            if found is not None and not any(each.ledger_id == EVERY_LEDGER for each in known):
                bare.append(store)
            if found is not None:
                marks = checkpoint.furthest(found, marks or {})
        self.check()
        for store in bare if len(bare) < len(self._live) else ():
            self.drop(store.id, DiskFailed("its index is empty although there is a checkpoint"))
        current = [store.id for store in self.live if copies[store.id] == (marks or {})]
        current = current or list(self._live)  # each was away once: which is right is unknown
        away = [store.id for store in self.live if store.id not in current]
        return [states[each] for each in current], [states[each] for each in away], marks


async def _outcomes(writes: Sequence[Coroutine[Any, Any, None]]) -> Sequence[BaseException | None]:
    """How each ended; a single one, as on most nodes, needs no task of its own."""
    if len(writes) != 1:
        found: list[BaseException | None] = await asyncio.gather(*writes, return_exceptions=True)
        return found
    try:
        await writes[0]
    except Exception as error:
        return [error]
    return [None]


async def _read_checkpoint(store: DirectoryStore, first_journal: str) -> Marks | None:
    try:
        return await checkpoint.read(store.disk, first_journal)
    except BadCheckpoint as error:
        _log.error("ledger directory %s: %s", store.id, error)
        return {}


def _at_home(state: LedgerState, directory_id: str) -> LedgerState:
    """States were written without directories while there was only one."""
    if state.directories or state.ledger_id == EVERY_LEDGER:
        return state
    return replace(state, directories=(directory_id,))


def _direct_locations(
    half: CacheHalf, parts: Mapping[str, Sequence[int]]
) -> dict[str, list[Location]]:
    """By directory, where entries of these ledgers lie already."""
    direct: dict[str, list[Location]] = {}
    for ledger_id in (i for ids in parts.values() for i in ids):
        for each in half.locations.get(ledger_id, {}).values():
            direct.setdefault(each.directory, []).append(each.location)
    return direct
