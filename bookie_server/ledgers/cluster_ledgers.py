"""Which ledgers are deleted, unrecorded, or only on other bookies, by the metadata store. Reclaim
and limbo act on it.

Always true: a ledger counts as deleted only if it has no record and the set of deleted ledgers
names it (spark_ledger/metadata/deleted_ledgers.py). A ledger that has no record and is in no such
set is *unrecorded*: the store may be an older copy, or have lost the record. A result counts only
if the store, after a sync, is our cluster's (id and epoch) both before and after the reads. An
error or a time-out is a StoreError, not a result. Reads are paced (READS_PER_S) and delay no
request.
"""

import asyncio
import logging
from collections.abc import Sequence

from spark_ledger.metadata import cluster, deleted_ledgers, ledger_record, paths
from spark_ledger.metadata.cluster import ClusterRecord
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
        self._served_cluster: ClusterRecord | None = None  # None: the store was not ours yet

    async def was_store_ours(self) -> bool:
        """Whether the store was our cluster's at some time in this run, or is now."""
        return self._served_cluster is not None or await self.store_is_ours()

    async def find_deleted(self, ledger_ids: Sequence[int]) -> list[int]:
        """The deleted ledgers among these, by a replica that may lag: one read for each folder of
        records, and one for each ledger that the folder's set names."""
        deleted, count = [], 0
        for folder, ids in deleted_ledgers.by_folder(ledger_ids).items():
            deleted_ids = await self._read_deleted_set(folder)
            count += 1
            await _pause(count)
            for ledger_id in ids:
                if ledger_id not in deleted_ids:
                    continue
                if await read(self._metadata, paths.ledger(ledger_id)) is None:
                    deleted.append(ledger_id)
                count += 1
                await _pause(count)
        return deleted

    async def confirm_deleted(self, ledger_ids: Sequence[int]) -> list[int]:
        """The deleted ledgers among these, after a sync; empty if the store is not our
        cluster's."""
        if not ledger_ids or not await self.store_is_ours():
            return []
        deleted = await self.find_deleted(ledger_ids)
        return deleted if deleted and await self.store_is_ours() else []

    async def find_unrecorded(self, ledger_ids: Sequence[int]) -> list[int] | None:
        """The ledgers among these that have no record and are not named as deleted, after a sync;
        None if the store is not our cluster's, or has a hold."""
        if not await self.store_is_ours():
            return None
        absent = []
        for count, ledger_id in enumerate(ledger_ids, 1):
            if await read(self._metadata, paths.ledger(ledger_id)) is None:
                absent.append(ledger_id)
            await _pause(count)
        deleted_ids = {i: None for i in await self.find_deleted(absent)}
        if not await self.store_is_ours():
            return None
        return [ledger_id for ledger_id in absent if ledger_id not in deleted_ids]

    async def _read_deleted_set(self, folder: str) -> frozenset[int]:
        """The ledgers that the set of the folder names; empty if the set is damaged."""
        try:
            return await deleted_ledgers.read_deleted(self._metadata, folder)
        except BadDeletedSet as damage:
            _log.error("%s: no ledger of it counts as deleted", damage)
            return frozenset()

    async def confirm_elsewhere(
        self, ledger_ids: Sequence[int], bookie_id: str
    ) -> dict[int, LedgerRecord]:
        """The records of the ledgers among these that are CLOSED and do not name the bookie, after
        a sync. Reads without a sync come first: usually they find no ledger, and no sync is
        needed."""
        records = await self._find_elsewhere(ledger_ids, bookie_id)
        if not records or not await self.store_is_ours():
            return {}
        records = await self._find_elsewhere([*records], bookie_id)
        return records if records and await self.store_is_ours() else {}

    async def _find_elsewhere(
        self, ledger_ids: Sequence[int], bookie_id: str
    ) -> dict[int, LedgerRecord]:
        """As `confirm_elsewhere`, by a replica that may lag."""
        records = {}
        for count, ledger_id in enumerate(ledger_ids, 1):
            record = await self._record(ledger_id)
            if record is not None and record.closed and not record.names(bookie_id):
                records[ledger_id] = record
            await _pause(count)
        return records

    async def store_is_ours(self) -> bool:
        """Whether, after a sync, the store is our cluster's, has no hold, and has the folder of
        ledgers."""
        stored = await cluster.read(self._metadata)
        if stored is None or stored.cluster_id != self._cluster_id:
            _log.error("the metadata store has %s, not cluster %s", stored, self._cluster_id)
            return False
        if stored.hold is not None:
            _log.warning("the metadata store is held, nothing is deleted: %s", stored.hold.why)
            return False
        self._served_cluster = self._served_cluster or stored
        if stored.epoch < self._served_cluster.epoch:
            text = "the metadata store has %s, and had %s before"
            _log.error(text, stored, self._served_cluster)
            return False
        if stored != self._served_cluster:  # a person accepted the store: ours from the next call
            self._served_cluster = stored
            return False
        if await read(self._metadata, paths.LEDGERS) is None:
            _log.error("the metadata store has no folder %s", paths.LEDGERS)
            return False
        return True

    async def _record(self, ledger_id: int) -> LedgerRecord | None:
        """The ledger's record; None if it does not exist or is malformed."""
        node = await read(self._metadata, paths.ledger(ledger_id))
        try:
            return None if node is None else ledger_record.decode(node.value)
        except BadLedgerRecord as error:
            _log.error("ledger %d: %s", ledger_id, error)
            return None


async def _pause(count: int) -> None:
    if count % READS_AT_ONCE == 0:
        await asyncio.sleep(READS_AT_ONCE / READS_PER_S)
