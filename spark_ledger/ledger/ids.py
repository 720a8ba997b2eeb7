"""Ledger ids: blocks taken off one counter by compare-and-set.

Always true: an id is handed out once; ids rise from FIRST_ID; a block whose answer was lost is
left unused (a gap), never handed out a second time.
"""

import asyncio
import json
from contextlib import suppress

from spark_ledger.errors import LedgerError, Unavailable
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import (
    BadVersion,
    MetadataStore,
    NodeExists,
    NoNode,
    OutcomeUnknown,
    StoreError,
)

FIRST_ID = 1
BLOCK_IDS = 16


class LedgerIds:
    """Ids for one client; it keeps what is left of its last block."""

    def __init__(self, metadata: MetadataStore) -> None:
        self._metadata = metadata
        self._block = range(0)
        self._allocating = asyncio.Lock()

    async def next(self) -> int:
        """One id; those who ask at once share a block. Raises Unavailable."""
        async with self._allocating:
            if not self._block:
                self._block = await self.allocate(BLOCK_IDS)
            first, self._block = self._block[0], self._block[1:]
            return first

    async def allocate(self, count: int) -> range:
        """`count` consecutive ids that nobody else has or will get. Raises Unavailable."""
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        try:
            while True:
                with suppress(BadVersion, OutcomeUnknown, NodeExists):
                    return await self._take(count)
                await self._metadata.sync(paths.LEDGER_IDS)
        except StoreError as failure:
            raise Unavailable(f"no ledger ids can be had: {failure!r}") from failure

    async def _take(self, count: int) -> range:
        try:
            node = await self._metadata.get(paths.LEDGER_IDS)
        except NoNode:
            await self._metadata.create(paths.LEDGER_IDS, _encode(FIRST_ID + count), parents=True)
            return range(FIRST_ID, FIRST_ID + count)
        first = _decode(node.value)
        await self._metadata.set(paths.LEDGER_IDS, _encode(first + count), node.version)
        return range(first, first + count)


def _encode(next_id: int) -> bytes:
    return json.dumps({"next": next_id}).encode()


def _decode(value: bytes) -> int:
    try:
        return int(json.loads(value)["next"])
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{paths.LEDGER_IDS} is damaged: {value!r}") from error
