"""The node's background work on stored entries, and its schedule: sweeps, collection, compaction,
scrub.

Always true:
- in a pass, deleted ledgers are buried before their entries are collected;
- a log without living entries is removed and never copied. Of the other logs, the log with the
  least living share is compacted first. A log is compacted only if its copy fits into the free
  space: so reclaim goes on even if the disk is full;
- while the metadata store fails, every ledger is kept, and all other work goes on;
- a pass skips a directory that fails and goes on with the others;
- all work can be cancelled at any await: a later pass or run takes it up again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

from bookie_server.config import StorageConfig
from bookie_server.disk.interface import DiskFailed
from bookie_server.journal.writer import JournalFailed
from bookie_server.lanes import Pace
from bookie_server.ledgers.cluster_ledgers import ClusterLedgers
from bookie_server.ledgers.peers import Peers
from bookie_server.ledgers.registry import LedgerHandles
from bookie_server.logs.index import EVERY_LEDGER
from bookie_server.logs.scan import LogMap
from bookie_server.reclaim.collect import EarlyEnd, GarbageCollector, StoreLogs, Tombstones
from bookie_server.reclaim.compact import Compactor
from bookie_server.reclaim.scrub import Scrub
from bookie_server.storage.storage import LedgerStorage
from spark_ledger.metadata import unrecorded as unrecorded_ledgers
from spark_ledger.metadata.cluster import BadClusterRecord
from spark_ledger.metadata.store import MetadataStore, StoreError

EARLY_END_SHARE = 64  # a growing log is ended early only if its dead bytes are 1/64 of a full log
COPY_MARGIN_BYTES = 1 << 20  # header, fillers, footer and map of a copy
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Facts:
    """The results of reclaim in this run. `ledgers`: the number of ledgers whose entries were
    dropped. `unrecorded`: the number of ledgers that are kept without a record. `live_share`: the
    living share of all sealed logs at the last pass."""

    passes: int = 0
    ledgers: int = 0
    unrecorded: int = 0
    logs_removed: int = 0
    logs_compacted: int = 0
    freed_bytes: int = 0
    failures: int = 0
    sealed_logs: int = 0
    live_share: float = 1.0


class _Directory(NamedTuple):
    """Reclaim of one ledger directory."""

    logs: StoreLogs
    compactor: Compactor


class Reclaim:
    """The reclaim of one node; without a cluster id no ledger counts as deleted."""

    def __init__(
        self,
        storage: LedgerStorage,
        ledgers: LedgerHandles,
        metadata: MetadataStore,
        config: StorageConfig,
        bookie_id: str,
        cluster_id: str,
        peers: Peers,
    ) -> None:
        self._storage = storage
        self._metadata = metadata
        self._bookie_id = bookie_id
        self._config = config
        self._cluster_id = cluster_id
        self._cluster_ledgers = ClusterLedgers(metadata, cluster_id)
        self._tombstones = Tombstones(ledgers, self._cluster_ledgers)
        self._collector = GarbageCollector(
            storage, ledgers, self._cluster_ledgers, bookie_id, peers
        )
        self._pace = Pace(config.compaction_bytes_per_s)
        self._early_end = EarlyEnd(
            config.major_compaction_share,
            config.entry_log_bytes_max // EARLY_END_SHARE,
            config.gc_interval_s,
        )
        self._directories: dict[str, _Directory] = {}
        self.scrub = Scrub(lambda: storage.stores, storage.quarantine, config)
        self.facts = Facts()

    async def run(self) -> None:
        """Do all work on schedule, until cancelled."""
        await asyncio.gather(self._run_collections(), self._run_compactions(), self.scrub.run())

    def describe(self) -> str:
        """The facts in a sentence; empty before the first pass."""
        facts = self.facts
        if not facts.passes:
            return ""
        return (
            f"{facts.passes} passes: {facts.freed_bytes} bytes freed by {facts.logs_removed} logs"
            f" removed and {facts.logs_compacted} compacted, {facts.ledgers} ledgers dropped,"
            f" {facts.unrecorded} kept without a record;"
            f" {facts.sealed_logs} sealed logs, {facts.live_share:.0%} of their bytes live;"
            f" {facts.failures} failures; scrub: {self.scrub.passes} passes,"
            f" {self.scrub.bad_entries} bad entries"
        )

    # -- collection --

    async def _run_collections(self) -> None:
        loop, config = asyncio.get_running_loop(), self._config
        sweep_at_s = loop.time() + config.tombstone_sweep_s
        surplus_at_s = loop.time() + config.overreplicated_wait_s
        collect_at_s = loop.time() + config.gc_interval_s
        while True:
            await asyncio.sleep(min(sweep_at_s, surplus_at_s, collect_at_s) - loop.time())
            sweep, surplus = loop.time() >= sweep_at_s, loop.time() >= surplus_at_s
            await self.collect(sweep=sweep, surplus=surplus)
            now_s = loop.time()
            sweep_at_s = now_s + config.tombstone_sweep_s if sweep else sweep_at_s
            surplus_at_s = now_s + config.overreplicated_wait_s if surplus else surplus_at_s
            collect_at_s = now_s + config.gc_interval_s

    async def collect(self, *, sweep: bool, surplus: bool) -> None:
        """Drop the entries of deleted ledgers, then remove dead logs. With `sweep`, first bury
        deleted ledgers; with `surplus`, also drop the entries of surplus ledgers and strays."""
        collector, directories = self._collector, [d.logs for d in self._living()]
        if self._cluster_id:
            if sweep:
                await self._or_none(self._tombstones.sweep())
            dropped = await self._or_none(collector.drop_deleted(directories)) or []
            if surplus:
                dropped += await self._or_none(collector.drop_surplus(directories)) or []
                await self._or_none(self._count_unrecorded())
            self.facts.ledgers += len(dropped)
        if surplus:
            for logs in [d.logs for d in self._living()]:
                with _log_failure(logs):
                    self.facts.ledgers += len(await collector.drop_strays(logs))
        for logs in directories:
            with _log_failure(logs):
                count_before = logs.removed_count
                await logs.end_dying(asyncio.get_running_loop().time(), self._early_end)
                await logs.look()
                self.facts.freed_bytes += await logs.remove_dead_logs()
                self.facts.logs_removed += logs.removed_count - count_before
        self.facts.passes += 1
        await self._update_facts()

    async def _or_none(self, work: Awaitable[T]) -> T | None:
        """The outcome of the work; None if the metadata store or a journal failed: then this pass
        keeps all ledgers. (When a journal fails and others live, the next flush is its relief.)"""
        try:
            return await work
        except (StoreError, BadClusterRecord, DiskFailed, JournalFailed) as failure:
            _log.warning("the look for deleted ledgers was given up for now: %r", failure)
            return None

    async def _count_unrecorded(self) -> None:
        """Count and publish the unrecorded ledgers, which are kept, as the store may be an older
        copy; also unrecorded ledgers that an earlier version buried."""
        ids = [state.ledger_id for state in self._storage.states()]
        unrecorded_ids = await self._cluster_ledgers.find_unrecorded(
            [ledger_id for ledger_id in ids if ledger_id != EVERY_LEDGER]
        )
        if unrecorded_ids is None:
            return
        await unrecorded_ledgers.publish(self._metadata, self._bookie_id, unrecorded_ids)
        if len(unrecorded_ids) > self.facts.unrecorded:
            _log.warning(
                "%d ledgers have no record in the metadata store and are not named as deleted, the"
                " first is %d: they are kept (spark-ledger ledger unrecorded)",
                *(len(unrecorded_ids), unrecorded_ids[0]),
            )
        self.facts.unrecorded = len(unrecorded_ids)

    # -- compaction --

    async def _run_compactions(self) -> None:
        loop, config = asyncio.get_running_loop(), self._config
        await self.redo()
        minor_at_s = loop.time() + config.minor_compaction_s
        major_at_s = loop.time() + config.major_compaction_s
        while True:
            await asyncio.sleep(min(minor_at_s, major_at_s) - loop.time())
            is_major = loop.time() >= major_at_s
            share = config.major_compaction_share if is_major else config.minor_compaction_share
            await self.compact(share)
            minor_at_s = loop.time() + config.minor_compaction_s
            major_at_s = loop.time() + config.major_compaction_s if is_major else major_at_s

    async def redo(self) -> None:
        """Take up the compactions that an earlier run did not finish."""
        for directory in self._living():
            await directory.compactor.redo()

    async def compact(self, share_max: float) -> None:
        """Compact every log with a live share under `share_max`, if its copy fits the disk."""
        for directory in self._living():
            directory.logs.may_end_living = True
            await directory.compactor.redo()
            maps: list[LogMap] = []
            with _log_failure(directory.logs):
                maps = await _emptiest(directory.logs, share_max)
            for log_map in maps:
                with _log_failure(directory.logs):
                    await self._compact_one(directory, log_map)
        await self._update_facts()

    async def _compact_one(self, directory: _Directory, log_map: LogMap) -> None:
        logs = directory.logs
        free_bytes = await logs.store.disk.free_bytes()
        is_present = log_map.log_id in logs.store.logs.sealed_ids() and directory in self._living()
        if not is_present or log_map.live_bytes(logs.dead_ids) + COPY_MARGIN_BYTES > free_bytes:
            return
        freed_bytes = await directory.compactor.compact(log_map)
        if freed_bytes is not None:
            self.facts.freed_bytes += freed_bytes
            self.facts.logs_compacted += 1

    # -- directories --

    def _living(self) -> list[_Directory]:
        """The directories that live."""
        for store in self._storage.stores:
            if store.id not in self._directories:
                lives = partial(self._collector.lives, directory_id=store.id)
                self._directories[store.id] = _Directory(
                    StoreLogs(store, lives, self._pace),
                    Compactor(store, self._storage.quarantine, self._pace),
                )
        return [self._directories[store.id] for store in self._storage.stores]

    async def _update_facts(self) -> None:
        live_bytes = total_bytes = log_count = failures = 0
        for directory in self._living():
            maps = directory.logs.maps
            for log_id, share in (await directory.logs.shares()).items():
                if (log_map := maps.get(log_id)) is not None:
                    live_bytes += round(share * log_map.record_bytes)
                    total_bytes += log_map.record_bytes
                    log_count += 1
            failures += directory.logs.failures + directory.compactor.failures
        self.facts.sealed_logs = log_count
        self.facts.live_share = live_bytes / total_bytes if total_bytes else 1.0
        self.facts.failures = failures


@contextmanager
def _log_failure(logs: StoreLogs) -> Iterator[None]:
    """Log a failure of the directory and go on; the next flush shows whether the directory
    lives."""
    try:
        yield
    except DiskFailed as error:
        logs.failures += 1
        _log.error("reclaim leaves a ledger directory alone for now: %s", error)


async def _emptiest(logs: StoreLogs, share_max: float) -> list[LogMap]:
    """The maps of the logs with a live share under `share_max` and above 0, the least share first.
    Raises DiskFailed."""
    await logs.look()
    shares = await logs.shares()
    log_ids = [log_id for log_id, share in shares.items() if 0.0 < share < share_max]
    return [logs.maps[log_id] for log_id in sorted(log_ids, key=lambda i: (shares[i], i))]
