"""Tombstones and garbage collection: finds deleted ledgers, and removes the stored entries and the
entry logs that are not needed any more.

Always true of the sweeps that bury deleted ledgers:
- a ledger is buried only if two looks, the second of them after a sync, show that the set of
  deleted ledgers names it, that it has no record, and that the store holds the cluster (id and
  epoch) that this node serves. So an error, a time-out, an empty store, another cluster's store, an
  older copy of our store, or a lost record buries no ledger;
- a tombstone is durable. From the moment when it is set normal adds are refused; recovery's adds
  are taken, and no entry is removed.

Always true of collection:
- entries are removed in three cases only:
  the ledger is *deleted*: it was buried durably, and the metadata store, after one more sync, still
  names it as deleted, without a record;
  the ledger is *surplus*: it is CLOSED, at two looks its record had no copy on this bookie, between
  the two looks no entry came and no repair compared its entries here (a repair compares before the
  record names the bookie), and every bookie in the record responds that it has its copies
  (ledgers/peers.py);
  the ledger is a *stray* in a directory: its state does not record the directory (`drop_strays`);
- the store held the cluster (id and epoch) that this node serves before and after each look; after
  an error, a time-out or with a malformed record the entries are kept;
- if more than a tenth of a directory's ledgers (and more than MASS_MIN) are strays, their entries
  are removed only if the next pass finds the same ledgers;
- entries are removed from the index first, durably, and an add of these entries waits meanwhile; a
  log is removed when the index points to no record in it;
- a ledger's state and handle are forgotten only when cache and index have no entry of it, and no
  entry came during two more flushes: then a replay would read no record of it. An add that is under
  way at that time fails, as its handle takes no more adds. A surplus ledger that a repair compared
  meanwhile is no longer surplus: its fence stays, as the record may name this bookie.

Always true of a directory's logs (StoreLogs): a ledger counts as dead only while the index points
to no entry of it and the node takes no more of its entries. The index is read again before a log is
removed. A log whose map cannot be read stays until the next pass. A growing log is ended early if
most of it is dead and it gets no more entries, so that it can be removed or compacted. To end a log
with living entries leaves a small log: so between two compactions only one look ends such logs
early.
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

    def __init__(self, ledgers: LedgerHandles, cluster_ledgers: ClusterLedgers) -> None:
        self._ledgers = ledgers
        self._cluster_ledgers = cluster_ledgers

    async def sweep(self) -> list[int]:
        """Bury the deleted ledgers; returns their ids. Raises StoreError, BadClusterRecord: then no
        ledger was buried. Raises JournalFailed."""
        if not await self._cluster_ledgers.was_store_ours():
            return []
        candidates = await self._cluster_ledgers.find_deleted(self._ledgers.unburied_ids())
        deleted_ids = await self._cluster_ledgers.confirm_deleted(candidates)
        if deleted_ids:
            _log.info("%d ledgers were deleted, the first is %d", len(deleted_ids), deleted_ids[0])
            await self._ledgers.bury(deleted_ids)
        return deleted_ids


class EarlyEnd(NamedTuple):
    """The conditions under which a growing log is ended before it is full: it got no entry for
    `idle_s`, has at least `dead_bytes_min` of dead ledgers, and less than `live_share_max` of its
    bytes are living."""

    live_share_max: float
    dead_bytes_min: int
    idle_s: float


class StoreLogs:
    """The sealed entry logs of one directory: their maps, and which ledgers in them are dead.
    `lives` decides whether the node keeps a ledger's entries: then the ledger is not dead."""

    def __init__(self, store: DirectoryStore, lives: Callable[[int], bool], pace: Pace) -> None:
        self.store = store
        self.maps: dict[int, LogMap] = {}
        self.dead_ids: dict[int, None] = {}
        self._shares: dict[int, float] = {}  # by log: its live share, while the share is valid
        self.failures = 0
        self.removed_count = 0
        self.has_index_failed = False
        """A crash may undo changes of the index: no log is removed because of them."""
        self._lives = lives
        self._pace = pace
        self._dead_count = 0
        self._look_lock = asyncio.Lock()
        self._growing_since: dict[int, tuple[int, float]] = {}  # by log: its end, since that time
        self.may_end_living = True
        """Whether `end_dying` may end a log with a living entry. It sets this to False then."""

    async def end_dying(self, now_s: float, early_end: EarlyEnd) -> None:
        """End the growing logs that meet `early_end`. Raises DiskFailed."""
        earlier, self._growing_since = self._growing_since, {}
        may_end_living = self.may_end_living
        for log in self.store.growing_logs():
            end, since_s = earlier.get(log.log_id, (0, now_s))
            since_s = since_s if end == log.file.end else now_s
            end = log.file.end
            self._growing_since[log.log_id] = end, since_s
            if now_s - since_s < early_end.idle_s or end < early_end.dead_bytes_min:
                continue
            growing_map = LogMap(log.log_id, end, end, log.shares, has_footer=False)
            await self._find_dead(growing_map)
            live = growing_map.live_bytes(self.dead_ids)
            is_dying = (
                live < early_end.live_share_max * growing_map.record_bytes
                and growing_map.record_bytes - live >= early_end.dead_bytes_min
            )
            if is_dying and (not live or may_end_living):
                self.may_end_living = self.may_end_living and not live
                await self.store.end_growing_log(log, end)

    async def look(self) -> None:
        """Read the maps of logs that were sealed since the last look; forget the maps of removed
        logs. Raises DiskFailed when the index cannot be read."""
        async with self._look_lock:
            sealed_ids = self.store.logs.sealed_ids()
            self.maps = {log_id: self.maps[log_id] for log_id in sealed_ids if log_id in self.maps}
            for log_id in sealed_ids:
                if log_id not in self.maps and (log_map := await self._map(log_id)) is not None:
                    await self._find_dead(log_map)
                    self.maps[log_id] = log_map
            self._forget_dead()

    async def shares(self) -> Mapping[int, float]:
        """By log, the share of its record bytes that belongs to living ledgers; 0 for an empty log.
        Other tasks run between two logs."""
        self._shares = {i: share for i, share in self._shares.items() if i in self.maps}
        for log_id, log_map in list(self.maps.items()):
            if log_id not in self._shares:
                total = log_map.record_bytes
                self._shares[log_id] = log_map.live_bytes(self.dead_ids) / total if total else 0.0
                await asyncio.sleep(0)
        return dict(self._shares)

    def note_dead(self, ledger_id: int) -> None:
        """Note that the index points to no entry of the ledger, and that the node takes no more of
        its entries."""
        if ledger_id not in self.dead_ids:
            self.dead_ids[ledger_id] = None
            self._shares = {}

    async def remove_dead_logs(self) -> int:
        """Remove the logs without living entries; returns the freed bytes."""
        freed_bytes = 0
        if self.has_index_failed:
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
            await store.index.sync()  # so that a crash cannot undo locations that the scan sees
        log_map = await scan_for_map(store.logs, store.index, log_id, self._pace)
        if log_map.is_whole:
            try:
                await write_map_file(store.disk, log_map)
            except DiskFailed as error:  # for example no space: this run has the map in memory
                _log.warning("the map of log %d is not kept: %s", log_id, error)
        return log_map

    async def _find_dead(self, log_map: LogMap) -> None:
        for ledger_id in log_map.ledger_ids:
            if ledger_id in self.dead_ids or self._lives(ledger_id):
                continue
            if await self.store.index.last(ledger_id) is None:
                self.note_dead(ledger_id)

    def _forget_dead(self) -> None:
        """When `dead_ids` is large, remove the ledgers that are in no log any more from it."""
        if len(self.dead_ids) > 2 * self._dead_count + _DEAD_COUNT_MIN:
            present = {i: None for log_map in self.maps.values() for i in log_map.ledger_ids}
            self.dead_ids = {ledger_id: None for ledger_id in self.dead_ids if ledger_id in present}
            self._dead_count = len(self.dead_ids)

    async def _is_dead(self, log_map: LogMap) -> bool:
        """Whether all ledgers of the log are dead, by the index itself."""
        for ledger_id in log_map.ledger_ids:
            if self._lives(ledger_id) or await self.store.index.last(ledger_id) is not None:
                self.dead_ids.pop(ledger_id, None)
                self._shares = {}
                return False
        return True

    async def _remove(self, log_map: LogMap) -> int:
        logs = self.store.logs
        if log_map.log_id not in logs.sealed_ids():
            return 0
        del self.maps[log_map.log_id]
        if not log_map.is_whole:
            await logs.set_aside(log_map.log_id)
            return 0
        await logs.remove(log_map.log_id)
        self.removed_count += 1
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
    """A ledger that has no copy here by its record: its state, its last entry in each index, and
    its number of uses (LedgerHandle.use_count) at a look."""

    state: LedgerState
    last_entries: tuple[int | None, ...]
    use_count: int


class MassRule:
    """If a look would remove more than a tenth of the ledgers (and more than MASS_MIN), only the
    ledgers that the next look finds again are removed: the cause may be a defect in the states.
    `what` describes the ledgers in log lines."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._ids_of_last_look: dict[int, None] = {}

    def allowed(self, ledger_ids: Sequence[int], total: int) -> list[int]:
        """The ledgers among these that may be removed now; `total`: the number of all ledgers."""
        earlier_ids, self._ids_of_last_look = self._ids_of_last_look, {}
        if len(ledger_ids) <= max(MASS_MIN, total * MASS_SHARE):
            return list(ledger_ids)
        self._ids_of_last_look = dict.fromkeys(ledger_ids)
        confirmed_ids = [ledger_id for ledger_id in ledger_ids if ledger_id in earlier_ids]
        if confirmed_ids:
            _log.info(
                "%d of %d ledgers %s; two looks found %d of them: their entries are removed",
                *(len(ledger_ids), total, self._what, len(confirmed_ids)),
            )
        if len(confirmed_ids) < len(ledger_ids):
            _log.warning(
                "%d of %d ledgers %s; waits for the next look to confirm",
                *(len(ledger_ids) - len(confirmed_ids), total, self._what),
            )
        return confirmed_ids


class GarbageCollector:
    """The collection of one node. One pass at a time."""

    def __init__(
        self,
        storage: LedgerStorage,
        handles: LedgerHandles,
        cluster_ledgers: ClusterLedgers,
        bookie_id: str,
        peers: Peers,
    ) -> None:
        self._storage = storage
        self._handles = handles
        self._cluster_ledgers = cluster_ledgers
        self._peers = peers
        self._bookie_id = bookie_id
        self._mass_rules: dict[str, MassRule] = {}  # of strays, by directory
        self._surplus: dict[int, _SurplusLedger] = {}
        # use counts of surplus ledgers whose entries were dropped, until the ledger is forgotten
        self._dropped_use_counts: dict[int, int] = {}
        self._empty: dict[int, _EmptyLedger] = {}

    def lives(self, ledger_id: int, directory_id: str = "") -> bool:
        """Whether the node keeps the entries of the ledger in the directory; without a directory
        id, in any directory."""
        state = self._storage.state(ledger_id)
        if state is None or state.deleted or ledger_id in self._dropped_use_counts:
            return False
        return not directory_id or not state.directories or directory_id in state.directories

    async def drop_strays(self, logs: StoreLogs) -> list[int]:
        """Drop from a directory the entries of ledgers that have no state, or whose state records
        other directories: the ledgers gave this directory up, and it came back. Returns these
        ledgers. Raises DiskFailed."""
        every_state, directory = self._storage.state(EVERY_LEDGER), logs.store
        if every_state is None or every_state.limbo:
            return []  # states may be missing
        stored_ids = await directory.index.ledger_ids()
        is_stray = partial(self._is_stray, directory_id=directory.id)
        rule = MassRule("are stored in a directory that is not theirs")
        mass_rule = self._mass_rules.setdefault(directory.id, rule)
        stray_ids = mass_rule.allowed(list(filter(is_stray, stored_ids)), len(stored_ids))
        if stray_ids:
            text = "entries of %d strays are removed, the first is %d"
            _log.info(text, len(stray_ids), stray_ids[0])
            await directory.delete_ledgers(stray_ids, is_stray, self._handles.removing_from_index)
        for ledger_id in filter(is_stray, stray_ids):
            logs.note_dead(ledger_id)
        return stray_ids

    def _is_stray(self, ledger_id: int, directory_id: str) -> bool:
        """Whether the ledger's state does not record the directory. (A flush records a directory
        before it writes entries to it.)"""
        state = self._storage.state(ledger_id)
        if state is None:
            return True
        return bool(state.directories) and directory_id not in state.directories

    async def drop_deleted(self, directories: Sequence[StoreLogs]) -> list[int]:
        """Drop the entries of deleted ledgers, and forget ledgers without entries. Returns the
        ledgers whose entries were dropped. Raises StoreError, BadClusterRecord: then no entry was
        dropped."""
        states = self._storage.states()
        buried_ids = [state.ledger_id for state in states if state.deleted]
        stored_ids = [i for i in buried_ids if await self._has_entries(i, directories)]
        for ledger_id in stored_ids:  # not empty any more: the wait for flushes begins anew
            self._empty.pop(ledger_id, None)
        deleted_ids = await self._cluster_ledgers.confirm_deleted(stored_ids)
        await self._drop(deleted_ids, directories)
        await self._forget([*buried_ids, *self._dropped_use_counts], directories)
        return deleted_ids

    async def drop_surplus(self, directories: Sequence[StoreLogs]) -> list[int]:
        """Drop the entries of ledgers that are surplus at this look and unchanged since the last
        look, if each bookie in the record has its copies; returns these ledgers. Raises StoreError,
        BadClusterRecord: then no entry was dropped."""
        surplus: dict[int, _SurplusLedger] = {}
        candidates = [i for i in self._handles.unburied_ids() if self._can_be_surplus(i)]
        records = await self._cluster_ledgers.confirm_elsewhere(candidates, self._bookie_id)
        for ledger_id in records:
            state = self._storage.state(ledger_id)
            if state is not None and self._can_be_surplus(ledger_id):
                use_count = self._handles.use_count(ledger_id)
                last = await _last_entries(ledger_id, directories)
                surplus[ledger_id] = _SurplusLedger(state, last, use_count)
        unchanged_ids = [i for i, seen in surplus.items() if self._surplus.get(i) == seen]
        self._surplus = surplus
        surplus_ids = [i for i in unchanged_ids if await self._peers.have_all(records[i])]
        self._dropped_use_counts.update((i, surplus[i].use_count) for i in surplus_ids)
        kept_ids = await self._drop(
            surplus_ids, directories, lambda i: self._is_unchanged(i, surplus[i])
        )
        for ledger_id in kept_ids:
            self._dropped_use_counts.pop(ledger_id, None)
        return [ledger_id for ledger_id in surplus_ids if ledger_id not in kept_ids]

    def _is_unchanged(self, ledger_id: int, surplus: _SurplusLedger) -> bool:
        """Whether no add or fencing read of the ledger came since the look, not even of equal
        entries."""
        is_same = self._storage.state(ledger_id) == surplus.state
        is_quiet = self._handles.use_count(ledger_id) == surplus.use_count
        return is_same and is_quiet and not self._storage.in_cache(ledger_id)

    def _can_be_surplus(self, ledger_id: int) -> bool:
        state = self._storage.state(ledger_id)
        is_quiet = (
            not self._storage.in_cache(ledger_id) and ledger_id not in self._dropped_use_counts
        )
        return state is not None and not state.limbo and is_quiet

    async def _has_entries(self, ledger_id: int, directories: Sequence[StoreLogs]) -> bool:
        return any(last is not None for last in await _last_entries(ledger_id, directories))

    async def _drop(
        self,
        ledger_ids: Sequence[int],
        directories: Sequence[StoreLogs],
        may_drop: Callable[[int], bool] = lambda _: True,
    ) -> list[int]:
        """Drop the entries of these ledgers; returns the ledgers that had to be kept, as `may_drop`
        was False when their turn came."""
        kept_ids: dict[int, None] = {}
        if not ledger_ids:
            return []
        text = "entries of %d ledgers are removed, the first is %d"
        _log.info(text, len(ledger_ids), ledger_ids[0])
        for logs in directories:
            try:
                deleting = self._handles.removing_from_index
                kept_ids.update(await _delete(logs.store, ledger_ids, may_drop, deleting))
            except DiskFailed as error:
                logs.has_index_failed = True
                _log.error("ledgers could not be removed from an index: %s", error)
        for ledger_id in ledger_ids:
            self._storage.reader.drop_ledger(ledger_id)
        return list(kept_ids)

    async def _forget(self, ledger_ids: Sequence[int], directories: Sequence[StoreLogs]) -> None:
        """Forget the ledgers that have been empty during two flushes."""
        earlier, self._empty = self._empty, {}
        is_complete = self._storage.is_complete
        for ledger_id in ledger_ids:
            state, flushes = self._storage.state(ledger_id), self._storage.flushes
            if state is None or not self._storage.directories.is_whole(state):
                continue
            if ledger_id in self._dropped_use_counts and not self._is_untouched(ledger_id):
                # a repair compared the ledger, so the record may name this bookie by now
                del self._dropped_use_counts[ledger_id]
                continue
            if await self._has_entries(ledger_id, directories) or self._storage.in_cache(ledger_id):
                if not state.deleted:
                    # a copy is being made here: the ledger is not surplus
                    self._dropped_use_counts.pop(ledger_id, None)
                continue
            for logs in directories:
                logs.note_dead(ledger_id)
            empty = earlier.get(ledger_id, _EmptyLedger(state, flushes))
            empty = empty if empty.state == state else _EmptyLedger(state, flushes)
            is_quiet = self._storage.flushes == flushes and self._storage.state(ledger_id) == state
            is_quiet = is_quiet and is_complete  # a directory that is away brings back its states
            is_quiet = is_quiet and (state.deleted or self._is_untouched(ledger_id))
            is_old = flushes >= empty.flushes + FLUSHES_BEFORE_FORGETTING
            if is_quiet and is_old and self._handles.forget(ledger_id):
                self._storage.forget(ledger_id)  # in this step: no request comes in between
                self._dropped_use_counts.pop(ledger_id, None)
            else:
                self._empty[ledger_id] = empty

    def _is_untouched(self, ledger_id: int) -> bool:
        """Whether no entry of a surplus ledger came or was compared here since the look. (After a
        comparison, repair relies on the fence of the ledger on this bookie.)"""
        return self._dropped_use_counts.get(ledger_id) == self._handles.use_count(ledger_id)


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
    may_delete: Callable[[int], bool],
    deleting: Callable[[int], AbstractContextManager[None]],
) -> dict[int, None]:
    """Delete the entries of the ledgers for which `may_delete` is True; returns the other ledgers.
    No flush writes between the check and the deletion."""
    kept_ids: dict[int, None] = {}
    async with store.index_lock:
        for ledger_id in ledger_ids:
            if may_delete(ledger_id):
                with deleting(ledger_id):
                    await store.index.delete_ledger(ledger_id)
            else:
                kept_ids[ledger_id] = None
        await store.index.sync()
    return kept_ids
