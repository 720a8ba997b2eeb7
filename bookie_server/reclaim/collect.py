"""Tombstones and garbage collection: which ledgers were deleted, what of the stored ledgers may go,
and what goes because of it.

Always true of the sweeps that bury what was deleted:
- a ledger is buried only if the metadata store, after a sync, has no record of it for the second
  time, while it holds the cluster (id and epoch) that this node serves: an error, a time-out, an
  empty store or another cluster's buries nothing;
- more than a tenth of the ledgers (and more than MASS_MIN) that vanish together are buried only if
  the next sweep finds them gone too: a store restored or emptied by mistake says the same;
- a burial is durable, as a fence is, and refuses normal adds from the moment it is decided;
  recovery's adds are taken, and no entry is removed by it.

Always true of collection:
- entries go only of a ledger that was buried durably and that the metadata store,
  after one more sync, still has no record of; or of one that is CLOSED and has had no copy on this
  bookie for two looks, between which nothing of it came here and nobody compared what is here, as
  repair does before the record names the bookie; or what a directory holds of ledgers that are not
  its own (`drop_strays`);
- the store held the cluster (id and epoch) this node serves before and after each look; an error,
  a time-out or a record that cannot be understood means keep; more than a tenth of the ledgers
  (and more than MASS_MIN) go only if the next pass finds the same;
- entries leave the index first, durably, and an add of them waits meanwhile; a log goes when
  the index points to nothing in it;
- a ledger is forgotten (state and handle) only when nothing of it is in cache and index and two
  flushes later nothing has come: then no journal segment that a replay would read speaks of it. An
  add that was under way meets a handle that takes nothing any more. A surplus ledger that somebody
  compared meanwhile is none any more: its fence stays, and the record may name this bookie.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

from bookie_server.disk.interface import DiskFailed
from bookie_server.ledgers.cluster_ledgers import ClusterLedgers, MassRule
from bookie_server.ledgers.registry import LedgerHandles
from bookie_server.logs.index import EVERY_LEDGER, LedgerState
from bookie_server.reclaim.store_logs import StoreLogs
from bookie_server.storage.directories import DirectoryStore
from bookie_server.storage.storage import LedgerStorage

FLUSHES_BEFORE_FORGETTING = 2
_log = logging.getLogger(__name__)


class Tombstones:
    """The sweeps of one node."""

    def __init__(self, ledgers: LedgerHandles, records: ClusterLedgers) -> None:
        self._ledgers = ledgers
        self._records = records
        self._mass = MassRule("have no record any more")

    async def sweep(self) -> list[int]:
        """Bury what was deleted; returns which. Raises StoreError, BadClusterRecord: then nothing
        was buried. Raises JournalFailed."""
        if not await self._records.is_known():
            return []
        known = self._ledgers.alive()
        absent = await self._records.absent(known) if known else []
        if absent:
            absent = await self._records.confirmed_absent(absent)
        buried = self._mass.allowed(absent, len(known))
        if buried:
            _log.info("%d ledgers were deleted, the first is %d", len(buried), buried[0])
            await self._ledgers.bury(buried)
        return buried


class _Idle(NamedTuple):
    """A ledger of which nothing is stored, as it was found first."""

    state: LedgerState
    flushes: int


class _Surplus(NamedTuple):
    """A ledger that has no copy here by its record, as it was found last."""

    state: LedgerState
    last_entries: tuple[int | None, ...]
    adds: int


class GarbageCollector:
    """The collection of one node. One pass at a time."""

    def __init__(
        self,
        storage: LedgerStorage,
        handles: LedgerHandles,
        records: ClusterLedgers,
        bookie_id: str,
    ) -> None:
        self._storage = storage
        self._handles = handles
        self._records = records
        self._bookie_id = bookie_id
        self._deleted_mass = MassRule("were deleted and hold entries here")
        self._surplus_mass = MassRule("are kept by other bookies only")
        self._stray_mass: dict[str, MassRule] = {}  # by directory
        self._surplus: dict[int, _Surplus] = {}
        self._dropped: dict[int, int] = {}  # surplus ledgers until they are forgotten, and `adds`
        self._idle: dict[int, _Idle] = {}

    def lives(self, ledger_id: int, directory_id: str = "") -> bool:
        """Whether entries of the ledger are worth keeping, in that directory."""
        state = self._storage.state(ledger_id)
        if state is None or state.deleted or ledger_id in self._dropped:
            return False
        return not directory_id or not state.directories or directory_id in state.directories

    async def drop_strays(self, logs: StoreLogs, directory: DirectoryStore) -> list[int]:
        """Drop what the directory holds of ledgers without a state, or whose state records other
        directories: it was given up and came back. Returns of which. Raises DiskFailed."""
        every = self._storage.state(EVERY_LEDGER)
        if every is None or every.limbo:
            return []  # not all that is here is known
        stored = await directory.index.ledger_ids()
        strays = [i for i in stored if self._is_stray(i, directory.id)]
        rule = MassRule("are stored in a directory that is not theirs")
        mass = self._stray_mass.setdefault(directory.id, rule)
        dropped = mass.allowed(strays, len(stored))
        if dropped:
            _log.info("%d strays go, the first is %d", len(dropped), dropped[0])
            still = partial(self._is_stray, directory_id=directory.id)
            await directory.delete_ledgers(dropped, still, self._handles.going)
        for ledger_id in dropped:
            if self._is_stray(ledger_id, directory.id):
                logs.found_dead(ledger_id)
        return dropped

    def _is_stray(self, ledger_id: int, directory_id: str) -> bool:
        """A flush records the directory before it writes there."""
        state = self._storage.state(ledger_id)
        if state is None:
            return True
        return bool(state.directories) and directory_id not in state.directories

    async def drop_deleted(self, directories: Sequence[StoreLogs]) -> list[int]:
        """Drop the entries of what was deleted, and forget what is gone altogether; returns whose
        entries went. Raises StoreError, BadClusterRecord: then nothing was dropped."""
        states = self._storage.states()
        deleted = [state.ledger_id for state in states if state.deleted]
        stored = [i for i in deleted if await self._stored(i, directories)]
        for ledger_id in stored:  # something came since the last pass: its time begins anew
            self._idle.pop(ledger_id, None)
        absent = await self._records.confirmed_absent(stored)
        dropped = self._deleted_mass.allowed(absent, len(states))
        await self._drop(dropped, directories)
        await self._forget([*deleted, *self._dropped], directories)
        return dropped

    async def drop_surplus(self, directories: Sequence[StoreLogs]) -> list[int]:
        """Drop the entries of ledgers that were found surplus by the look before this one too;
        returns which. Raises StoreError, BadClusterRecord: then nothing was dropped."""
        found: dict[int, _Surplus] = {}
        alive = [i for i in self._handles.alive() if self._can_be_surplus(i)]
        for ledger_id in await self._records.confirmed_elsewhere(alive, self._bookie_id):
            state = self._storage.state(ledger_id)
            if state is not None and self._can_be_surplus(ledger_id):
                adds = self._handles.adds(ledger_id)
                last = await _last_entries(ledger_id, directories)
                found[ledger_id] = _Surplus(state, last, adds)
        again = [i for i, now in found.items() if self._surplus.get(i) == now]
        self._surplus = found
        dropped = self._surplus_mass.allowed(again, len(alive))
        self._dropped.update((ledger_id, found[ledger_id].adds) for ledger_id in dropped)
        touched = await self._drop(dropped, directories, lambda i: self._is_still(i, found[i]))
        for ledger_id in touched:
            self._dropped.pop(ledger_id, None)
        return [ledger_id for ledger_id in dropped if ledger_id not in touched]

    def _is_still(self, ledger_id: int, found: _Surplus) -> bool:
        """Whether nothing of the ledger came since it was found, equal entries included."""
        same = self._storage.state(ledger_id) == found.state
        quiet = self._handles.adds(ledger_id) == found.adds
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
        """Returns those that were kept, for they were not as they had been any more."""
        touched: dict[int, None] = {}
        if not ledger_ids:
            return []
        _log.info("entries of %d ledgers go, the first is %d", len(ledger_ids), ledger_ids[0])
        for logs in directories:
            try:
                going = self._handles.going
                touched.update(await _delete(logs.store, ledger_ids, is_still, going))
            except DiskFailed as error:
                logs.index_failed = True
                _log.error("ledgers could not be removed from an index: %s", error)
        for ledger_id in ledger_ids:
            self._storage.dropped(ledger_id)
        return list(touched)

    async def _forget(self, gone: Sequence[int], directories: Sequence[StoreLogs]) -> None:
        """Of the ledgers that are deleted or dropped, forget those of which nothing is left."""
        before, self._idle = self._idle, {}
        complete = self._storage.is_complete
        for ledger_id in gone:
            state, flushes = self._storage.state(ledger_id), self._storage.flushes
            if state is None or not self._storage.is_whole(state):
                continue
            if ledger_id in self._dropped and not self._is_untouched(ledger_id):
                del self._dropped[ledger_id]  # it was compared, so the record may name us by now
                continue
            if await self._stored(ledger_id, directories) or self._storage.in_cache(ledger_id):
                if not state.deleted:
                    self._dropped.pop(ledger_id, None)  # it is being copied here: it is no surplus
                continue
            for logs in directories:
                logs.found_dead(ledger_id)
            idle = before.get(ledger_id, _Idle(state, flushes))
            idle = idle if idle.state == state else _Idle(state, flushes)
            quiet = self._storage.flushes == flushes and self._storage.state(ledger_id) == state
            quiet = quiet and complete  # a directory that is away brings back what it knew
            quiet = quiet and (state.deleted or self._is_untouched(ledger_id))
            old = flushes >= idle.flushes + FLUSHES_BEFORE_FORGETTING
            if quiet and old and self._handles.forget(ledger_id):
                self._storage.forget(ledger_id)  # in one step: no request comes in between
                self._dropped.pop(ledger_id, None)
            else:
                self._idle[ledger_id] = idle

    def _is_untouched(self, ledger_id: int) -> bool:
        """Whether nothing of a surplus ledger came or was compared here since it was found: who
        finds it fenced here counts on that."""
        return self._dropped.get(ledger_id) == self._handles.adds(ledger_id)


async def _last_entries(ledger_id: int, directories: Sequence[StoreLogs]) -> tuple[int | None, ...]:
    """What each index has of the ledger. One that fails has something, as far as anybody knows."""
    found: list[int | None] = []
    for logs in directories:
        try:
            found.append(await logs.store.index.last(ledger_id))
        except DiskFailed:
            found.append(-1)
    return tuple(found)


async def _delete(
    store: DirectoryStore,
    ledger_ids: Sequence[int],
    is_still: Callable[[int], bool],
    going: Callable[[int], AbstractContextManager[None]],
) -> dict[int, None]:
    """Returns those that were kept. No flush brings anything between the request and the end."""
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
