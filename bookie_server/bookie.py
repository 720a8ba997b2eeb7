"""One storage node: what it promises, in which order, and what it answers."""

import asyncio

from bookie_server.api.messages import Request, Response
from bookie_server.disk import Disk
from bookie_server.entry_index import EntryIndex
from bookie_server.storage_config import StorageConfig
from spark_ledger.metadata.store import MetadataStore


class Bookie:
    """Order and decisions of one node. All of it runs on one event loop."""

    bookie_id: str
    failed: asyncio.Future[None]
    """Done with an exception when the journal or the storage failed: the process must exit."""

    @classmethod
    async def start(
        cls,
        bookie_id: str,
        journal_disk: Disk,
        ledger_disk: Disk,
        index: EntryIndex,
        metadata: MetadataStore,
        config: StorageConfig,
    ) -> "Bookie":
        """Replay what the journal holds beyond the checkpoint; ready to serve when it returns."""
        raise NotImplementedError

    @property
    def readonly_reason(self) -> str:
        """Why normal adds are refused by this node as a whole; empty when it is writable."""
        raise NotImplementedError

    async def handle(self, request: Request) -> Response:
        """Carry out any request of api.messages. Never raises for a bad request."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Drain what is under way, flush, seal the journal, close the index."""
        raise NotImplementedError
