"""Tombstones and garbage collection: which ledgers were deleted, which stored entries may go, and
which entry logs go because of that.

Always true of the sweeps that bury deleted ledgers:
- a ledger is buried only if two looks, the second one after a sync, find that the set of deleted
  ledgers names it, that it has no record, and that the store holds the cluster (id and epoch) that
  this node serves. So an error, a time-out, an empty store, another cluster's store, an older copy
  of our store, or a lost record buries nothing;
- a burial is durable, as a fence is, and refuses normal adds from the moment it is decided;
  recovery's adds are taken, and it removes no entry.

Always true of collection:
- entries are removed in three cases only. The ledger was buried durably, and the metadata store,
  after one more sync, still names it as deleted, without a record. Or the ledger is CLOSED and
  surplus: at two looks its record had no copy on this bookie, between them no entry came and no
  repair compared its entries here (a repair compares before the record names the bookie), and
  every bookie in the record responds that it has its copies (ledgers/peers.py). Or a directory
  holds entries of ledgers that are not its own (`drop_strays`);
- the store held the cluster (id and epoch) that this node serves before and after each look; an
  error, a time-out or a malformed record means keep;
- if more than a tenth of a directory's ledgers (and more than MASS_MIN) are strays, their entries
  are removed only if the next pass finds the same ledgers;
- entries are removed from the index first, durably, and an add of these entries waits meanwhile; a
  log is removed when the index points to no record in it;
- a ledger's state and handle are forgotten only when cache and index have no entry of it, and no
  entry came during two more flushes: then a replay would read no record of it. An add that was
  under way then finds that its handle takes no more adds. A surplus ledger that a repair compared
  meanwhile is no longer surplus: its fence stays, as the record may name this bookie.

Always true of a directory's logs (StoreLogs): a ledger counts as dead only while the index points
to no entry of it and the node takes no more of them, and the index is read again before a log goes
because of that; a log whose map cannot be read is left alone until the next pass. A growing log is
ended early if most of it is dead and it gets no more entries: so it can be removed or compacted. As
a log with a living entry leaves a small log behind, only one look between two compactions ends logs
with living entries early.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

from bookie_server.disk.interface import DiskFailed
from bookie_server.lanes import Pace
from bookie_server.ledgers.cluster_ledgers import ClusterLedgers
from bookie_server.ledgers.peers import Peers
from bookie_server.ledgers.registry import LedgerHandles
from bookie_server.logs.index import EVERY_LEDGER, LedgerState
from bookie_server.logs.scan import LogMap, read_map, scan_for_map, write_map_file
from bookie_server.storage.directories import DirectoryStore
from bookie_server.storage.storage import LedgerStorage

FLUSHES_BEFORE_FORGETTING = 2
_DEAD_COUNT_MIN = 10_000
MASS_MIN, MASS_SHARE = 10, 0.1
_log = logging.getLogger(__name__)


class Tombstones:
    """The sweeps of one node."""

    def __init__(self, ledgers: LedgerHandles, records: ClusterLedgers) -> None:
        self._ledgers = ledgers
        self._records = records

    async def sweep(self) -> list[int]:
        """Bury the deleted ledgers; returns them. Raises StoreError, BadClusterRecord: then no
        ledger was buried. Raises JournalFailed."""
        if not await self._records.is_known():
            return []
        deleted = await self._records.deleted(self._ledgers.alive())
        buried = await self._records.confirmed_deleted(deleted)
        if buried:
            _log.info("%d ledgers were deleted, the first is %d", len(buried), buried[0])
            await self._ledgers.bury(buried)
        return buried


class EarlyEnd(NamedTuple):
    """When a growing log is ended before it is full: it got no entry for `idle_s`, has at least
    `dead_bytes_min` of dead ledgers, and less than `live_share_max` of its bytes are living."""

    live_share_max: float
    dead_bytes_min: int
    idle_s: float


class StoreLogs:
    """The sealed entry logs of one directory: their maps, and which ledgers in them are dead.
    `lives`: whether the node keeps the ledger's entries: then the ledger is not dead."""

    def __init__(self, store: DirectoryStore, lives: Callable[[int], bool], pace: Pace) -> None:
        self.store = store
        self.maps: dict[int, LogMap] = {}
        self.dead: dict[int, None] = {}
        self._shares: dict[int, float] = {}  # by log: its live share, if that is still right
        self.failures = 0
        self.removed = 0
        self.index_failed = False
        """A crash may undo changes of the index: no log goes because of them."""
        self._lives = lives
        self._pace = pace
        self._dead_count = 0
        self._look_lock = asyncio.Lock()
        self._growing_since: dict[int, tuple[int, float]] = {}  # by log: its end, since that time
        self.may_end_living = True
        """Whether `end_dying` may end a log with a living entry; False once it has done so."""

    async def end_dying(self, now_s: float, early_end: EarlyEnd) -> None:
        """End the growing logs that meet `early_end`. Raises DiskFailed."""
        before, self._growing_since = self._growing_since, {}
        may_end_living = self.may_end_living
        for log in self.store.growing_logs():
            end, since_s = before.get(log.log_id, (0, now_s))
            since_s = since_s if end == log.file.end else now_s
            end = log.file.end
            self._growing_since[log.log_id] = end, since_s
            if now_s - since_s < early_end.idle_s or end < early_end.dead_bytes_min:
                continue
            growing_map = LogMap(log.log_id, end, end, log.shares, has_footer=False)
            await self._find_dead(growing_map)
            live = growing_map.live_bytes(self.dead)
            is_dying = (
                live < early_end.live_share_max * growing_map.record_bytes
                and growing_map.record_bytes - live >= early_end.dead_bytes_min
            )
            if is_dying and (not live or may_end_living):
                self.may_end_living = self.may_end_living and not live
                await self.store.end_growing_log(log, end)

    async def look(self) -> None:
        """Read the maps of logs sealed since the last look; forget those of removed logs.

        Raises DiskFailed when the index cannot be read."""
        async with self._look_lock:
            sealed = self.store.logs.sealed_ids()
            self.maps = {log_id: self.maps[log_id] for log_id in sealed if log_id in self.maps}
            for log_id in sealed:
                if log_id not in self.maps and (log_map := await self._map(log_id)) is not None:
                    await self._find_dead(log_map)
                    self.maps[log_id] = log_map
            self._forget_dead()

    async def shares(self) -> Mapping[int, float]:
        """By log, the share of its record bytes that belongs to living ledgers, 0 for an empty log;
        the event loop is free between two logs."""
        self._shares = {i: share for i, share in self._shares.items() if i in self.maps}
        for log_id, log_map in list(self.maps.items()):
            if log_id not in self._shares:
                total = log_map.record_bytes
                self._shares[log_id] = log_map.live_bytes(self.dead) / total if total else 0.0
                await asyncio.sleep(0)
        return dict(self._shares)

    def note_dead(self, ledger_id: int) -> None:
        """The index points to no entry of the ledger, and the node takes no more of them."""
        if ledger_id not in self.dead:
            self.dead[ledger_id] = None
            self._shares = {}

    async def remove_dead_logs(self) -> int:
        """Remove the logs without living entries; returns the freed bytes."""
        freed_bytes = 0
        if self.index_failed:
            return 0
        for log_id, share in (await self.shares()).items():
            log_map = self.maps.get(log_id)
            if share or log_map is None:
                continue
            try:
                if await self._is_dead(log_map):
                    freed_bytes += await self._remove(log_map)
            except DiskFailed as error:
                self._note_failure(log_id, error)
        return freed_bytes

    async def _map(self, log_id: int) -> LogMap | None:
        try:
            log_map = await read_map(self.store.logs, self.store.disk, log_id)
            return log_map if log_map is not None else await self._scan(log_id)
        except DiskFailed as error:
            self._note_failure(log_id, error)
            return None

    async def _scan(self, log_id: int) -> LogMap:
        store = self.store
        async with store.index_lock:
            await store.index.sync()  # a crash cannot undo what the scan sees
        log_map = await scan_for_map(store.logs, store.index, log_id, self._pace)
        if log_map.whole:
            try:
                await write_map_file(store.disk, log_map)
            except DiskFailed as error:  # no space, say: this run has the map in memory
                _log.warning("the map of log %d is not kept: %s", log_id, error)
        return log_map

    async def _find_dead(self, log_map: LogMap) -> None:
        for ledger_id in log_map.ledger_ids:
            if ledger_id in self.dead or self._lives(ledger_id):
                continue
            if await self.store.index.last(ledger_id) is None:
                self.note_dead(ledger_id)

    def _forget_dead(self) -> None:
        """When `dead` is large, remove the ledgers that are in no log any more."""
        if len(self.dead) > 2 * self._dead_count + _DEAD_COUNT_MIN:
            present = {i: None for log_map in self.maps.values() for i in log_map.ledger_ids}
            self.dead = {ledger_id: None for ledger_id in self.dead if ledger_id in present}
            self._dead_count = len(self.dead)

    async def _is_dead(self, log_map: LogMap) -> bool:
        """Whether all ledgers of the log are dead, by the index itself."""
        for ledger_id in log_map.ledger_ids:
            if self._lives(ledger_id) or await self.store.index.last(ledger_id) is not None:
                self.dead.pop(ledger_id, None)
                self._shares = {}
                return False
        return True

    async def _remove(self, log_map: LogMap) -> int:
        logs = self.store.logs
        if log_map.log_id not in logs.sealed_ids():
            return 0
        del self.maps[log_map.log_id]
        if not log_map.whole:
            await logs.set_aside(log_map.log_id)
            return 0
        await logs.remove(log_map.log_id)
        self.removed += 1
        return log_map.file_bytes

    def _note_failure(self, log_id: int, error: DiskFailed) -> None:
        self.failures += 1
        _log.warning("reclaim leaves log %d alone for now: %s", log_id, error)


class _EmptyLedger(NamedTuple):
    """A ledger without stored entries: its state, and the number of flushes at the pass that first
    found it empty."""

    state: LedgerState
    flushes: int


class _SurplusLedger(NamedTuple):
    """What a look saw of a ledger that has no copy here by its record."""

    state: LedgerState
    last_entries: tuple[int | None, ...]
    uses: int


class MassRule:
    """If a look would remove more than a tenth of the ledgers (and more than MASS_MIN), only those
    that the next look finds too are removed: the cause may be a defect in the states."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._before: dict[int, None] = {}

    def allowed(self, ledger_ids: Sequence[int], total: int) -> list[int]:
        """Those of these ledgers, of `total` in all, that may be removed now."""
        before, self._before = self._before, {}
        if len(ledger_ids) <= max(MASS_MIN, total * MASS_SHARE):
            return list(ledger_ids)
        self._before = dict.fromkeys(ledger_ids)
        again = [ledger_id for ledger_id in ledger_ids if ledger_id in before]
        if again:
            _log.info(
                "%d of %d ledgers %s; two looks found %d of them so: these go",
                *(len(ledger_ids), total, self._what, len(again)),
            )
        if len(again) < len(ledger_ids):
            _log.warning(
                "%d of %d ledgers %s; waits for the next look to confirm",
                *(len(ledger_ids) - len(again), total, self._what),
            )
        return again


class GarbageCollector:
    """The collection of one node. One pass at a time."""

    def __init__(
        self,
        storage: LedgerStorage,
        handles: LedgerHandles,
        records: ClusterLedgers,
        bookie_id: str,
        peers: Peers,
    ) -> None:
        self._storage = storage
        self._handles = handles
        self._records = records
        self._peers = peers
        self._bookie_id = bookie_id
        self._stray_mass: dict[str, MassRule] = {}  # by directory
        self._surplus: dict[int, _SurplusLedger] = {}
        self._dropped: dict[int, int] = {}  # by surplus ledger, until it is forgotten: its uses
        self._empty: dict[int, _EmptyLedger] = {}

    def lives(self, ledger_id: int, directory_id: str = "") -> bool:
        """Whether the node keeps entries of the ledger, in that directory."""
        state = self._storage.state(ledger_id)
        if state is None or state.deleted or ledger_id in self._dropped:
            return False
        return not directory_id or not state.directories or directory_id in state.directories

    async def drop_strays(self, logs: StoreLogs) -> list[int]:
        """Drop entries of ledgers that have no state, or whose state records other directories:
        the ledgers gave this directory up, and it came back. Returns these ledgers. Raises
        DiskFailed."""
        every, directory = self._storage.state(EVERY_LEDGER), logs.store
        if every is None or every.limbo:
            return []  # states may be missing
        stored = await directory.index.ledger_ids()
        is_stray = partial(self._is_stray, directory_id=directory.id)
        rule = MassRule("are stored in a directory that is not theirs")
        mass_rule = self._stray_mass.setdefault(directory.id, rule)
        dropped = mass_rule.allowed(list(filter(is_stray, stored)), len(stored))
        if dropped:
            _log.info("%d strays go, the first is %d", len(dropped), dropped[0])
            await directory.delete_ledgers(dropped, is_stray, self._handles.leaving_index)
        for ledger_id in filter(is_stray, dropped):
            logs.note_dead(ledger_id)
        return dropped

    def _is_stray(self, ledger_id: int, directory_id: str) -> bool:
        """Whether the ledger's state does not record the directory. (A flush records it before it
        writes entries there.)"""
        state = self._storage.state(ledger_id)
        if state is None:
            return True
        return bool(state.directories) and directory_id not in state.directories

    async def drop_deleted(self, directories: Sequence[StoreLogs]) -> list[int]:
        """Drop the entries of deleted ledgers; forget ledgers without entries, as the head of this
        file demands. Returns the ledgers whose entries were dropped. Raises StoreError,
        BadClusterRecord: then nothing was dropped."""
        states = self._storage.states()
        deleted = [state.ledger_id for state in states if state.deleted]
        stored = [i for i in deleted if await self._has_entries(i, directories)]
        for ledger_id in stored:  # it is not empty: its wait for flushes begins anew
            self._empty.pop(ledger_id, None)
        dropped = await self._records.confirmed_deleted(stored)
        await self._drop(dropped, directories)
        await self._forget([*deleted, *self._dropped], directories)
        return dropped

    async def drop_surplus(self, directories: Sequence[StoreLogs]) -> list[int]:
        """Drop the entries of ledgers that this look and the last one found surplus, if each bookie
        in the record has its copies; returns these ledgers. Raises StoreError, BadClusterRecord:
        then nothing was dropped."""
        surplus: dict[int, _SurplusLedger] = {}
        alive = [i for i in self._handles.alive() if self._can_be_surplus(i)]
        records = await self._records.confirmed_elsewhere(alive, self._bookie_id)
        for ledger_id in records:
            state = self._storage.state(ledger_id)
            if state is not None and self._can_be_surplus(ledger_id):
                uses = self._handles.uses(ledger_id)
                last = await _last_entries(ledger_id, directories)
                surplus[ledger_id] = _SurplusLedger(state, last, uses)
        again = [i for i, now in surplus.items() if self._surplus.get(i) == now]
        self._surplus = surplus
        dropped = [i for i in again if await self._peers.have_all(records[i])]
        self._dropped.update((ledger_id, surplus[ledger_id].uses) for ledger_id in dropped)
        changed = await self._drop(
            dropped, directories, lambda i: self._is_unchanged(i, surplus[i])
        )
        for ledger_id in changed:
            self._dropped.pop(ledger_id, None)
        return [ledger_id for ledger_id in dropped if ledger_id not in changed]

    def _is_unchanged(self, ledger_id: int, surplus: _SurplusLedger) -> bool:
        """Whether no add or fencing read of the ledger came since the look, not even of equal
        entries."""
        is_same = self._storage.state(ledger_id) == surplus.state
        is_quiet = self._handles.uses(ledger_id) == surplus.uses
        return is_same and is_quiet and not self._storage.in_cache(ledger_id)

    def _can_be_surplus(self, ledger_id: int) -> bool:
        state = self._storage.state(ledger_id)
        is_quiet = not self._storage.in_cache(ledger_id) and ledger_id not in self._dropped
        return state is not None and not state.limbo and is_quiet

    async def _has_entries(self, ledger_id: int, directories: Sequence[StoreLogs]) -> bool:
        return any(last is not None for last in await _last_entries(ledger_id, directories))

    async def _drop(
        self,
        ledger_ids: Sequence[int],
        directories: Sequence[StoreLogs],
        is_still: Callable[[int], bool] = lambda _: True,
    ) -> list[int]:
        """Drop the ledgers' entries; returns the ledgers that had changed and were kept."""
        changed: dict[int, None] = {}
        if not ledger_ids:
            return []
        _log.info("entries of %d ledgers go, the first is %d", len(ledger_ids), ledger_ids[0])
        for logs in directories:
            try:
                going = self._handles.leaving_index
                changed.update(await _delete(logs.store, ledger_ids, is_still, going))
            except DiskFailed as error:
                logs.index_failed = True
                _log.error("ledgers could not be removed from an index: %s", error)
        for ledger_id in ledger_ids:
            self._storage.reader.deleted(ledger_id)
        return list(changed)

    async def _forget(self, ledger_ids: Sequence[int], directories: Sequence[StoreLogs]) -> None:
        """Forget the ledgers that have been empty during two flushes."""
        before, self._empty = self._empty, {}
        is_complete = self._storage.is_complete
        for ledger_id in ledger_ids:
            state, flushes = self._storage.state(ledger_id), self._storage.flushes
            if state is None or not self._storage.directories.is_whole(state):
                continue
            if ledger_id in self._dropped and not self._is_untouched(ledger_id):
                del self._dropped[ledger_id]  # it was compared, so the record may name us by now
                continue
            if await self._has_entries(ledger_id, directories) or self._storage.in_cache(ledger_id):
                if not state.deleted:
                    self._dropped.pop(ledger_id, None)  # a copy is being made here: not surplus
                continue
            for logs in directories:
                logs.note_dead(ledger_id)
            empty = before.get(ledger_id, _EmptyLedger(state, flushes))
            empty = empty if empty.state == state else _EmptyLedger(state, flushes)
            is_quiet = self._storage.flushes == flushes and self._storage.state(ledger_id) == state
            is_quiet = is_quiet and is_complete  # a directory that is away brings back its states
            is_quiet = is_quiet and (state.deleted or self._is_untouched(ledger_id))
            is_old = flushes >= empty.flushes + FLUSHES_BEFORE_FORGETTING
            if is_quiet and is_old and self._handles.forget(ledger_id):
                self._storage.forget(ledger_id)  # in one step: no request comes in between
                self._dropped.pop(ledger_id, None)
            else:
                self._empty[ledger_id] = empty

    def _is_untouched(self, ledger_id: int) -> bool:
        """Whether no entry of a surplus ledger came or was compared here since the look. (After a
        comparison, repair relies on the ledger's fence here.)"""
        return self._dropped.get(ledger_id) == self._handles.uses(ledger_id)


async def _last_entries(ledger_id: int, directories: Sequence[StoreLogs]) -> tuple[int | None, ...]:
    """The last entry of the ledger in each index; -1 for an index that fails, as it may have
    entries."""
    last_entries: list[int | None] = []
    for logs in directories:
        try:
            last_entries.append(await logs.store.index.last(ledger_id))
        except DiskFailed:
            last_entries.append(-1)
    return tuple(last_entries)


async def _delete(
    store: DirectoryStore,
    ledger_ids: Sequence[int],
    is_still: Callable[[int], bool],
    going: Callable[[int], AbstractContextManager[None]],
) -> dict[int, None]:
    """Delete the entries of ledgers for which `is_still` holds; returns the other ledgers. No flush
    writes between that check and the deletion."""
    kept: dict[int, None] = {}
    async with store.index_lock:
        for ledger_id in ledger_ids:
            if is_still(ledger_id):
                with going(ledger_id):
                    await store.index.delete_ledger(ledger_id)
            else:
                kept[ledger_id] = None
        await store.index.sync()
    return kept
