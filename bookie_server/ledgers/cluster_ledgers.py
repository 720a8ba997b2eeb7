"""What the metadata store says of ledgers to those who remove something because of it.

Always true: a response counts only if the store, after a sync, held the cluster (id and epoch) that
this node serves before and after it was read; an error or a time-out is a StoreError and no
response; reads are paced (READS_PER_S) and delay no request; when so many ledgers would go at once
that the store may have been restored or emptied by mistake, MassRule has them wait.
"""

import asyncio
import logging
from collections.abc import Sequence

from spark_ledger.metadata import cluster, ledger_record, paths
from spark_ledger.metadata.cluster import Cluster
from spark_ledger.metadata.ledger_record import BadLedgerRecord
from spark_ledger.metadata.store import MetadataStore
from spark_ledger.metadata.store_calls import read

READS_PER_S = 200
READS_AT_ONCE = 20
MASS_MIN, MASS_SHARE = 10, 0.1
_log = logging.getLogger(__name__)


class ClusterLedgers:
    """The ledgers of the cluster with the id `cluster_id`."""

    def __init__(self, metadata: MetadataStore, cluster_id: str) -> None:
        self._metadata = metadata
        self._cluster_id = cluster_id
        self._served: Cluster | None = None  # as it was found first

    async def is_known(self) -> bool:
        """Whether the store was ours once in this run; it is asked if it was not yet."""
        return self._served is not None or await self.store_is_ours()

    async def absent(self, ledger_ids: Sequence[int]) -> list[int]:
        """Those that have no record, as far as a replica knows that may lag behind."""
        absent = []
        for count, ledger_id in enumerate(ledger_ids, 1):
            if await read(self._metadata, paths.ledger(ledger_id)) is None:
                absent.append(ledger_id)
            await _pause(count)
        return absent

    async def confirmed_absent(self, ledger_ids: Sequence[int]) -> list[int]:
        """Those that have no record after a sync; none in a store that is not our cluster's."""
        if not ledger_ids or not await self.store_is_ours():
            return []
        absent = await self.absent(ledger_ids)
        return absent if absent and await self.store_is_ours() else []

    async def confirmed_elsewhere(self, ledger_ids: Sequence[int], bookie_id: str) -> list[int]:
        """Those that are CLOSED and whose every copy is, after a sync, another bookie's. (A store
        that knows of none as it is asked first is asked for nothing more.)"""
        found = await self._elsewhere(ledger_ids, bookie_id)
        if not found or not await self.store_is_ours():
            return []
        found = await self._elsewhere(found, bookie_id)
        return found if found and await self.store_is_ours() else []

    async def _elsewhere(self, ledger_ids: Sequence[int], bookie_id: str) -> list[int]:
        """As far as a replica knows that may lag behind."""
        found = []
        for count, ledger_id in enumerate(ledger_ids, 1):
            if await self._is_elsewhere(ledger_id, bookie_id):
                found.append(ledger_id)
            await _pause(count)
        return found

    async def store_is_ours(self) -> bool:
        """After a sync: the cluster is ours, and the folder of its ledgers is there."""
        found = await cluster.read(self._metadata)
        if found is None or found.cluster_id != self._cluster_id:
            _log.error("the metadata store holds %s, not cluster %s", found, self._cluster_id)
            return False
        if found.hold is not None:
            _log.warning("the metadata store is held, nothing is deleted: %s", found.hold.why)
            return False
        self._served = self._served or found
        if found.epoch < self._served.epoch:
            _log.error("the metadata store holds %s, it was %s", found, self._served)
            return False
        if found != self._served:  # a person accepted it: from the next look on it counts
            self._served = found
            return False
        if await read(self._metadata, paths.LEDGERS) is None:
            _log.error("the metadata store has no folder %s", paths.LEDGERS)
            return False
        return True

    async def _is_elsewhere(self, ledger_id: int, bookie_id: str) -> bool:
        """Not by a record that is not there or cannot be understood."""
        node = await read(self._metadata, paths.ledger(ledger_id))
        try:
            record = None if node is None else ledger_record.decode(node.value)
        except BadLedgerRecord as error:
            _log.error("ledger %d: %s", ledger_id, error)
            return False
        return record is not None and record.closed and not record.names(bookie_id)


class MassRule:
    """More than a tenth of the ledgers (and more than MASS_MIN) that would go at once go only if
    the look after this one finds the same: a store restored or emptied by mistake says so too."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._before: dict[int, None] = {}

    def allowed(self, ledger_ids: Sequence[int], known: int) -> list[int]:
        """Those of the ledgers, out of `known`, that may go now."""
        before, self._before = self._before, {}
        if len(ledger_ids) <= max(MASS_MIN, known * MASS_SHARE):
            return list(ledger_ids)
        self._before = dict.fromkeys(ledger_ids)
        again = [ledger_id for ledger_id in ledger_ids if ledger_id in before]
        if again:
            _log.info(
                "%d of %d ledgers %s; two looks said so of %d of them: these go",
                *(len(ledger_ids), known, self._what, len(again)),
            )
        if len(again) < len(ledger_ids):
            _log.warning(
                "%d of %d ledgers %s; waits for the next look to confirm",
                *(len(ledger_ids) - len(again), known, self._what),
            )
        return again


async def _pause(count: int) -> None:
    if count % READS_AT_ONCE == 0:
        await asyncio.sleep(READS_AT_ONCE / READS_PER_S)
