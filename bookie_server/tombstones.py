"""Tombstones: which of the ledgers this node has met were deleted since, so that it refuses adds.

A sweep now and then reads the record of each ledger that was met. Always true:
- a ledger is buried only if the metadata store, after a sync, has no record of it for the second
  time, while it holds the cluster (id and epoch) that this node serves: an error, a time-out, an
  empty store or another cluster's buries nothing;
- more than a tenth of the ledgers (and more than MASS_MIN) that vanish together are buried only if
  the next sweep finds them gone too: a store restored or emptied by mistake says the same;
- a burial is durable, as a fence is, and refuses normal adds from the moment it is decided;
  recovery's adds are taken, and no entry is removed here;
- reads are paced (READS_PER_S) and on nobody's way: an add never waits for a sweep.
"""

import asyncio
import logging
from collections.abc import Sequence

from bookie_server.ledger_directory import LedgerDirectory
from spark_ledger.metadata import cluster, paths
from spark_ledger.metadata.cluster import BadClusterRecord, Cluster
from spark_ledger.metadata.store import MetadataStore, NoNode, StoreError

READS_PER_S = 200
READS_AT_ONCE = 20
MASS_MIN, MASS_SHARE = 10, 0.1
_log = logging.getLogger(__name__)


class Tombstones:
    """The sweeps of one node, which serves the cluster with the id `cluster_id`."""

    def __init__(
        self, ledgers: LedgerDirectory, metadata: MetadataStore, cluster_id: str, sweep_s: float
    ) -> None:
        self._ledgers = ledgers
        self._metadata = metadata
        self._cluster_id = cluster_id
        self._sweep_s = sweep_s
        self._served: Cluster | None = None  # as the first sweep found it
        self._vanished: dict[int, None] = {}  # in a mass, in the last sweep

    async def run(self) -> None:
        """Sweep every `sweep_s` until cancelled. Raises JournalFailed."""
        while True:
            await asyncio.sleep(self._sweep_s)
            try:
                await self.sweep()
            except (StoreError, BadClusterRecord) as failure:
                _log.warning("looking for deleted ledgers was given up for now: %r", failure)

    async def sweep(self) -> list[int]:
        """Bury what was deleted; returns which. Raises StoreError, BadClusterRecord: then nothing
        was buried. Raises JournalFailed."""
        if self._served is None and not await self._store_is_ours():
            return []
        known = self._ledgers.alive()
        absent = await self._absent(known) if known else []
        if absent:
            absent = await self._confirmed(absent)
        buried = self._not_too_many(absent, len(known))
        if buried:
            _log.info("%d ledgers were deleted, the first is %d", len(buried), buried[0])
            await self._ledgers.bury(buried)
        return buried

    async def _absent(self, ledger_ids: Sequence[int]) -> list[int]:
        """Those that have no record, as far as a replica knows that may lag behind."""
        absent = []
        for count, ledger_id in enumerate(ledger_ids, 1):
            if await self._is_absent(ledger_id):
                absent.append(ledger_id)
            if count % READS_AT_ONCE == 0:
                await asyncio.sleep(READS_AT_ONCE / READS_PER_S)
        return absent

    async def _confirmed(self, ledger_ids: Sequence[int]) -> list[int]:
        """Those of them that have no record after a sync either; none in a store that is not
        that of our cluster."""
        if not await self._store_is_ours():
            return []
        absent = await self._absent(ledger_ids)
        return absent if await self._store_is_ours() else []

    async def _store_is_ours(self) -> bool:
        """After a sync: the cluster is ours, and the folder of its ledgers is there."""
        found = await cluster.read(self._metadata)
        if found is None or found.cluster_id != self._cluster_id:
            _log.error("the metadata store holds %s, not cluster %s", found, self._cluster_id)
            return False
        self._served = self._served or found
        if found != self._served:
            _log.error("the metadata store holds %s, it was %s", found, self._served)
            return False
        try:
            await self._metadata.get(paths.LEDGERS)
        except NoNode:
            _log.error("the metadata store has no folder %s", paths.LEDGERS)
            return False
        return True

    async def _is_absent(self, ledger_id: int) -> bool:
        try:
            await self._metadata.get(paths.ledger(ledger_id))
        except NoNode:
            return True
        return False

    def _not_too_many(self, absent: list[int], known: int) -> list[int]:
        """What may be buried now: all, unless so many are gone that it may be a mistake."""
        before, self._vanished = self._vanished, {}
        if len(absent) <= max(MASS_MIN, known * MASS_SHARE):
            return absent
        self._vanished = dict.fromkeys(absent)
        again = [ledger_id for ledger_id in absent if ledger_id in before]
        _log.error(
            "%d of %d ledgers have no record any more; %d of them had none in the sweep before"
            " either and are taken for deleted",
            *(len(absent), known, len(again)),
        )
        return again
