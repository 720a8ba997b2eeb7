"""Tombstones: which of the ledgers this node has met were deleted since, so that it refuses adds.

A sweep now and then reads the record of each ledger that was met. Always true:
- a ledger is buried only if the metadata store, after a sync, has no record of it for the second
  time, while it holds the cluster (id and epoch) that this node serves: an error, a time-out, an
  empty store or another cluster's buries nothing;
- more than a tenth of the ledgers (and more than MASS_MIN) that vanish together are buried only if
  the next sweep finds them gone too: a store restored or emptied by mistake says the same;
- a burial is durable, as a fence is, and refuses normal adds from the moment it is decided;
  recovery's adds are taken, and no entry is removed here (garbage_collector.py does that).
"""

import logging

from bookie_server.cluster_ledgers import ClusterLedgers
from bookie_server.ledger_handles import LedgerHandles
from bookie_server.reclaim_plan import MassRule

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
