"""What the metadata store says of ledgers to those who remove something because of it.

Always true: absence deletes nothing. A ledger counts as deleted only if the set of deleted ledgers
names it (spark_ledger/metadata/deleted_ledgers.py) and it has no record; one that merely has no
record is *unrecorded*: the store may be an older copy, or have lost a record. A response counts
only if the store, after a sync, held the cluster (id and epoch) that this node serves before and
after it was read; an error or a time-out is a StoreError and no response; reads are paced
(READS_PER_S) and delay no request.
"""

import asyncio
import logging
from collections.abc import Sequence

from spark_ledger.metadata import cluster, deleted_ledgers, ledger_record, paths
from spark_ledger.metadata.cluster import Cluster
from spark_ledger.metadata.deleted_ledgers import BadDeletedSet
from spark_ledger.metadata.ledger_record import BadLedgerRecord, LedgerRecord
from spark_ledger.metadata.store import MetadataStore
from spark_ledger.metadata.store_calls import read

READS_PER_S = 200
READS_AT_ONCE = 20
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

    async def deleted(self, ledger_ids: Sequence[int]) -> list[int]:
        """Those that were deleted, as far as a replica knows that may lag behind: one read for the
        ledgers of a folder, and one for each that the set names."""
        found, count = [], 0
        for folder, ids in deleted_ledgers.by_folder(ledger_ids).items():
            named = await self._named(folder)
            count += 1
            await _pause(count)
            for ledger_id in ids:
                if ledger_id not in named:
                    continue
                if await read(self._metadata, paths.ledger(ledger_id)) is None:
                    found.append(ledger_id)
                count += 1
                await _pause(count)
        return found

    async def confirmed_deleted(self, ledger_ids: Sequence[int]) -> list[int]:
        """Those that were deleted, after a sync; none in a store that is not our cluster's."""
        if not ledger_ids or not await self.store_is_ours():
            return []
        found = await self.deleted(ledger_ids)
        return found if found and await self.store_is_ours() else []

    async def unrecorded(self, ledger_ids: Sequence[int]) -> list[int] | None:
        """Those that have no record and are not named as deleted, after a sync; None where a store
        was asked that is not our cluster's, or is held."""
        if not await self.store_is_ours():
            return None
        absent = []
        for count, ledger_id in enumerate(ledger_ids, 1):
            if await read(self._metadata, paths.ledger(ledger_id)) is None:
                absent.append(ledger_id)
            await _pause(count)
        named = {i: None for i in await self.deleted(absent)}
        if not await self.store_is_ours():
            return None
        return [ledger_id for ledger_id in absent if ledger_id not in named]

    async def _named(self, folder: str) -> frozenset[int]:
        """None of a set that is damaged."""
        try:
            return await deleted_ledgers.named(self._metadata, folder)
        except BadDeletedSet as damage:
            _log.error("%s: no ledger of it is taken for deleted", damage)
            return frozenset()

    async def confirmed_elsewhere(
        self, ledger_ids: Sequence[int], bookie_id: str
    ) -> dict[int, LedgerRecord]:
        """The records of those that are CLOSED and whose every copy is, after a sync, another
        bookie's. (A store that knows of none as it is asked first is asked for nothing more.)"""
        found = await self._elsewhere(ledger_ids, bookie_id)
        if not found or not await self.store_is_ours():
            return {}
        found = await self._elsewhere([*found], bookie_id)
        return found if found and await self.store_is_ours() else {}

    async def _elsewhere(
        self, ledger_ids: Sequence[int], bookie_id: str
    ) -> dict[int, LedgerRecord]:
        """As far as a replica knows that may lag behind."""
        found = {}
        for count, ledger_id in enumerate(ledger_ids, 1):
            record = await self._record(ledger_id)
            if record is not None and record.closed and not record.names(bookie_id):
                found[ledger_id] = record
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

    async def _record(self, ledger_id: int) -> LedgerRecord | None:
        """None of one that is not there or cannot be understood."""
        node = await read(self._metadata, paths.ledger(ledger_id))
        try:
            return None if node is None else ledger_record.decode(node.value)
        except BadLedgerRecord as error:
            _log.error("ledger %d: %s", ledger_id, error)
            return None


async def _pause(count: int) -> None:
    if count % READS_AT_ONCE == 0:
        await asyncio.sleep(READS_AT_ONCE / READS_PER_S)
