"""Tombstones and garbage collection: which ledgers were deleted, which stored entries may go, and
which entry logs go because of that.

Always true of the sweeps that bury deleted ledgers:
- a ledger is buried only if the set of deleted ledgers names it and it has no record, twice, the
  second time after a sync, while the store holds the cluster (id and epoch) that this node serves:
  an error, a time-out, an empty store, another cluster's or an older copy of ours buries nothing,
  and neither does a record that was lost;
- a burial is durable, as a fence is, and refuses normal adds from the moment it is decided;
  recovery's adds are taken, and it removes no entry.

Always true of collection:
- entries go in three cases only. The ledger was buried durably, and the metadata store, after one
  more sync, still names it as deleted, without a record. Or the ledger is CLOSED and surplus: by
  its record it had no copy on this bookie at two looks, between them no entry of it came and no
  repair compared its entries here (a repair compares before the record names the bookie), and
  every bookie in the record responds that it has its copies (ledgers/peers.py). Or a directory
  holds entries of ledgers that are not its own (`drop_strays`);
- the store held the cluster (id and epoch) that this node serves before and after each look; an
  error, a time-out or a malformed record means keep;
- if more than a tenth of the ledgers of a directory (and more than MASS_MIN) would go as strays,
  they go only if the next pass finds the same;
- entries leave the index first, durably, and an add of them waits meanwhile; a log goes when the
  index points to no record in it;
- a ledger is forgotten (state and handle) only when cache and index have no entry of it, and after
  two more flushes none has come: then no journal segment that a replay would read has a record of
  it. An add that was under way meets a handle that takes no more adds. A surplus ledger that a
  repair compared meanwhile is not surplus any more: its fence stays, and the record may name this
  bookie.

Always true of a directory's logs (StoreLogs): a ledger counts as dead only while the index points
to no entry of it and the node takes no more of them, and the index is read again before a log goes
because of that; a log whose map cannot be read is left alone until the next pass. A log that is
still written is ended early if most of it is dead and it gets no more entries: so it may go, or be
compacted. A log with a living entry leaves a small log behind, so between two compactions only one
such log of flushes and one such direct log are ended early.
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
_DEAD_KEPT_MIN = 10_000
MASS_MIN, MASS_SHARE = 10, 0.1
_log = logging.getLogger(__name__)


class Tombstones:
    """The sweeps of one node."""

    def __init__(self, ledgers: LedgerHandles, records: ClusterLedgers) -> None:
        self._ledgers = ledgers
        self._records = records

    async def sweep(self) -> list[int]:
        """Bury the deleted ledgers; returns them. Raises StoreError, BadClusterRecord: then none
        was buried. Raises JournalFailed."""
        if not await self._records.is_known():
            return []
        deleted = await self._records.deleted(self._ledgers.alive())
        buried = await self._records.confirmed_deleted(deleted)
        if buried:
            _log.info("%d ledgers were deleted, the first is %d", len(buried), buried[0])
            await self._ledgers.bury(buried)
        return buried


class Dying(NamedTuple):
    """When a log that is still written is ended before it is full: it got no entry for `idle_s`,
    has at least so many bytes of dead ledgers, and a smaller share of living ones."""

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
        self._shares: dict[int, float] = {}  # of logs whose share has not changed since
        self.failures = 0
        self.removed = 0
        self.index_failed = False
        """A crash may undo changes of the index: no log goes because of them."""
        self._lives = lives
        self._pace = pace
        self._dead_kept = 0
        self._looking = asyncio.Lock()
        self._written: dict[int, tuple[int, float]] = {}  # by log: its end, and since when
        self.may_end_living = True
        """Whether `end_dying` may end a log with a living entry; False once it has done so."""

    async def end_dying(self, now_s: float, dying: Dying) -> None:
        """End those of the logs still written that meet `dying`. Raises DiskFailed."""
        before, self._written = self._written, {}
        may_end_living = self.may_end_living
        for log in self.store.growing_logs():
            end, since_s = before.get(log.log_id, (0, now_s))
            since_s = since_s if end == log.file.end else now_s
            end = log.file.end
            self._written[log.log_id] = end, since_s
            if now_s - since_s < dying.idle_s or end < dying.dead_bytes_min:
                continue
            written = LogMap(log.log_id, end, end, log.shares, has_footer=False)
            await self._find_dead(written)
            live = written.live_bytes(self.dead)
            is_dying = (
                live < dying.live_share_max * written.record_bytes
                and written.record_bytes - live >= dying.dead_bytes_min
            )
            if is_dying and (not live or may_end_living):
                self.may_end_living = self.may_end_living and not live
                await self.store.end_growing_log(log, end)

    async def look(self) -> None:
        """Take in the logs that were sealed since the last look, and forget those that went.

        Raises DiskFailed when the index cannot be read."""
        async with self._looking:
            sealed = self.store.logs.sealed_ids()
            self.maps = {log_id: self.maps[log_id] for log_id in sealed if log_id in self.maps}
            for log_id in sealed:
                if log_id not in self.maps and (log_map := await self._map(log_id)) is not None:
                    await self._find_dead(log_map)
                    self.maps[log_id] = log_map
            self._forget_dead()

    async def shares(self) -> Mapping[int, float]:
        """The part of each log's records that belongs to living ledgers, 0 for an empty log; the
        loop is free between two logs."""
        self._shares = {i: share for i, share in self._shares.items() if i in self.maps}
        for log_id, log_map in list(self.maps.items()):
            if log_id not in self._shares:
                total = log_map.record_bytes
                self._shares[log_id] = log_map.live_bytes(self.dead) / total if total else 0.0
                await asyncio.sleep(0)
        return dict(self._shares)

    def found_dead(self, ledger_id: int) -> None:
        """The index points to no entry of the ledger, and the node takes no more of them."""
        if ledger_id not in self.dead:
            self.dead[ledger_id] = None
            self._shares = {}

    async def remove_dead_logs(self) -> int:
        """Remove the logs without living entries; returns the bytes freed."""
        freed = 0
        if self.index_failed:
            return 0
        for log_id, share in (await self.shares()).items():
            log_map = self.maps.get(log_id)
            if share or log_map is None:
                continue
            try:
                if await self._is_dead(log_map):
                    freed += await self._remove(log_map)
            except DiskFailed as error:
                self._gave_up(log_id, error)
        return freed

    async def _map(self, log_id: int) -> LogMap | None:
        try:
            log_map = await read_map(self.store.logs, self.store.disk, log_id)
            return log_map if log_map is not None else await self._scan(log_id)
        except DiskFailed as error:
            self._gave_up(log_id, error)
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
                self.found_dead(ledger_id)

    def _forget_dead(self) -> None:
        """Forget the dead ledgers that are in no log any more, once they are many."""
        if len(self.dead) > 2 * self._dead_kept + _DEAD_KEPT_MIN:
            present = {i: None for log_map in self.maps.values() for i in log_map.ledger_ids}
            self.dead = {ledger_id: None for ledger_id in self.dead if ledger_id in present}
            self._dead_kept = len(self.dead)

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

    def _gave_up(self, log_id: int, error: DiskFailed) -> None:
        self.failures += 1
        _log.warning("reclaim leaves log %d alone for now: %s", log_id, error)


class _Idle(NamedTuple):
    """A ledger without stored entries: its state and the number of flushes when a pass saw that
    first."""

    state: LedgerState
    flushes: int


class _Surplus(NamedTuple):
    """A ledger that has no copy here by its record: what the last look saw of it."""

    state: LedgerState
    last_entries: tuple[int | None, ...]
    uses: int


class MassRule:
    """If more than a tenth of the ledgers (and more than MASS_MIN) would go at once, they go only
    if the next look finds the same: a defect in the states would look like that too."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._before: dict[int, None] = {}

    def allowed(self, ledger_ids: Sequence[int], total: int) -> list[int]:
        """Those of the ledgers, which are some of `total`, that may go now."""
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
        self._surplus: dict[int, _Surplus] = {}
        self._dropped: dict[int, int] = {}  # surplus ledgers until they are forgotten, and `uses`
        self._idle: dict[int, _Idle] = {}

    def lives(self, ledger_id: int, directory_id: str = "") -> bool:
        """Whether the node keeps entries of the ledger, in that directory."""
        state = self._storage.state(ledger_id)
        if state is None or state.deleted or ledger_id in self._dropped:
            return False
        return not directory_id or not state.directories or directory_id in state.directories

    async def drop_strays(self, logs: StoreLogs) -> list[int]:
        """Drop the directory's entries of ledgers without a state, or whose state records other
        directories: they gave it up, and it came back. Returns these ledgers. Raises DiskFailed."""
        every, directory = self._storage.state(EVERY_LEDGER), logs.store
        if every is None or every.limbo:
            return []  # states may be missing
        stored = await directory.index.ledger_ids()
        still = partial(self._is_stray, directory_id=directory.id)
        rule = MassRule("are stored in a directory that is not theirs")
        mass = self._stray_mass.setdefault(directory.id, rule)
        dropped = mass.allowed(list(filter(still, stored)), len(stored))
        if dropped:
            _log.info("%d strays go, the first is %d", len(dropped), dropped[0])
            await directory.delete_ledgers(dropped, still, self._handles.leaving_index)
        for ledger_id in filter(still, dropped):
            logs.found_dead(ledger_id)
        return dropped

    def _is_stray(self, ledger_id: int, directory_id: str) -> bool:
        """Whether the ledger's state does not record the directory, as a flush does before it
        writes there."""
        state = self._storage.state(ledger_id)
        if state is None:
            return True
        return bool(state.directories) and directory_id not in state.directories

    async def drop_deleted(self, directories: Sequence[StoreLogs]) -> list[int]:
        """Drop the entries of deleted ledgers, and forget the ledgers that are gone altogether;
        returns the ledgers whose entries went. Raises StoreError, BadClusterRecord: then nothing
        was dropped."""
        states = self._storage.states()
        deleted = [state.ledger_id for state in states if state.deleted]
        stored = [i for i in deleted if await self._stored(i, directories)]
        for ledger_id in stored:  # an entry came since the last pass: its time begins anew
            self._idle.pop(ledger_id, None)
        dropped = await self._records.confirmed_deleted(stored)
        await self._drop(dropped, directories)
        await self._forget([*deleted, *self._dropped], directories)
        return dropped

    async def drop_surplus(self, directories: Sequence[StoreLogs]) -> list[int]:
        """Drop the entries of ledgers that are surplus at this look and were at the one before, if
        each bookie in the record has its copies; returns these ledgers. Raises StoreError,
        BadClusterRecord: then nothing was dropped."""
        surplus: dict[int, _Surplus] = {}
        alive = [i for i in self._handles.alive() if self._can_be_surplus(i)]
        records = await self._records.confirmed_elsewhere(alive, self._bookie_id)
        for ledger_id in records:
            state = self._storage.state(ledger_id)
            if state is not None and self._can_be_surplus(ledger_id):
                uses = self._handles.uses(ledger_id)
                last = await _last_entries(ledger_id, directories)
                surplus[ledger_id] = _Surplus(state, last, uses)
        again = [i for i, now in surplus.items() if self._surplus.get(i) == now]
        self._surplus = surplus
        dropped = [i for i in again if await self._peers.have_all(records[i])]
        self._dropped.update((ledger_id, surplus[ledger_id].uses) for ledger_id in dropped)
        touched = await self._drop(dropped, directories, lambda i: self._is_still(i, surplus[i]))
        for ledger_id in touched:
            self._dropped.pop(ledger_id, None)
        return [ledger_id for ledger_id in dropped if ledger_id not in touched]

    def _is_still(self, ledger_id: int, surplus: _Surplus) -> bool:
        """Whether no add or fencing read of the ledger came since the look, not even of equal
        entries."""
        same = self._storage.state(ledger_id) == surplus.state
        quiet = self._handles.uses(ledger_id) == surplus.uses
        return same and quiet and not self._storage.in_cache(ledger_id)

    def _can_be_surplus(self, ledger_id: int) -> bool:
        state = self._storage.state(ledger_id)
        quiet = not self._storage.in_cache(ledger_id) and ledger_id not in self._dropped
        return state is not None and not state.limbo and quiet

    async def _stored(self, ledger_id: int, directories: Sequence[StoreLogs]) -> bool:
        return any(last is not None for last in await _last_entries(ledger_id, directories))

    async def _drop(
        self,
        ledger_ids: Sequence[int],
        directories: Sequence[StoreLogs],
        is_still: Callable[[int], bool] = lambda _: True,
    ) -> list[int]:
        """Drop the ledgers' entries; returns the ledgers that were kept, as they had changed."""
        touched: dict[int, None] = {}
        if not ledger_ids:
            return []
        _log.info("entries of %d ledgers go, the first is %d", len(ledger_ids), ledger_ids[0])
        for logs in directories:
            try:
                going = self._handles.leaving_index
                touched.update(await _delete(logs.store, ledger_ids, is_still, going))
            except DiskFailed as error:
                logs.index_failed = True
                _log.error("ledgers could not be removed from an index: %s", error)
        for ledger_id in ledger_ids:
            self._storage.reader.deleted(ledger_id)
        return list(touched)

    async def _forget(self, gone: Sequence[int], directories: Sequence[StoreLogs]) -> None:
        """Forget those of the deleted and dropped ledgers of which no entry is left."""
        before, self._idle = self._idle, {}
        complete = self._storage.is_complete
        for ledger_id in gone:
            state, flushes = self._storage.state(ledger_id), self._storage.flushes
            if state is None or not self._storage.directories.is_whole(state):
                continue
            if ledger_id in self._dropped and not self._is_untouched(ledger_id):
                del self._dropped[ledger_id]  # it was compared, so the record may name us by now
                continue
            if await self._stored(ledger_id, directories) or self._storage.in_cache(ledger_id):
                if not state.deleted:
                    self._dropped.pop(ledger_id, None)  # a copy is being made here: not surplus
                continue
            for logs in directories:
                logs.found_dead(ledger_id)
            idle = before.get(ledger_id, _Idle(state, flushes))
            idle = idle if idle.state == state else _Idle(state, flushes)
            quiet = self._storage.flushes == flushes and self._storage.state(ledger_id) == state
            quiet = quiet and complete  # a directory that is away brings back its states
            quiet = quiet and (state.deleted or self._is_untouched(ledger_id))
            old = flushes >= idle.flushes + FLUSHES_BEFORE_FORGETTING
            if quiet and old and self._handles.forget(ledger_id):
                self._storage.forget(ledger_id)  # in one step: no request comes in between
                self._dropped.pop(ledger_id, None)
            else:
                self._idle[ledger_id] = idle

    def _is_untouched(self, ledger_id: int) -> bool:
        """Whether no entry of a surplus ledger came or was compared here since the look: a process
        that finds its fence here relies on the fence."""
        return self._dropped.get(ledger_id) == self._handles.uses(ledger_id)


async def _last_entries(ledger_id: int, directories: Sequence[StoreLogs]) -> tuple[int | None, ...]:
    """The last entry of the ledger in each index. An index that fails may have entries: -1."""
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
    """Delete the ledgers for which `is_still` holds; returns the others. No flush writes between
    that check and the deletion."""
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
