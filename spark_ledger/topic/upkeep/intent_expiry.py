"""Removes old intents and old blocks of ledger ids from the metadata store.

Always true: an intent goes KEPT_MS after its end at the earliest, by the store's clock, and never
while one of its ledgers has a record: the janitor needs the intent to find its ledgers. One multi
removes an intent and the transaction record of its random app id, so a process that later looks for
the outcome of a commit under it reads neither, and reports that the outcome is unknown (hazard 12).
The records of named app ids stay, and so do the intents of queries: a zombie that makes its intent
again must meet the ended one (hazard 11). A block of ledger ids, of any intent, goes once it is
older than KEPT_MS and no ledger with one of its ids has a record: no process uses ids that it took
that long ago (intents.IDS_KEPT_S).

A pass looks at INTENTS_PER_PASS intents, the next pass goes on after them; a round begins once in
ROUND_S.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from spark_ledger.metadata import paths
from spark_ledger.metadata.store import (
    ANY_VERSION,
    Delete,
    MetadataStore,
    MultiFailed,
    NoNode,
    NotEmpty,
    Operation,
    OutcomeUnknown,
    Versioned,
)
from spark_ledger.metadata.store_calls import call_each, names_in, read
from spark_ledger.topic.log import records
from spark_ledger.topic.log.intents import BATCH, SYSTEM
from spark_ledger.topic.log.names import escape
from spark_ledger.topic.log.records import IntentRecord, IntentState

KEPT_MS = 7 * 86_400_000
ROUND_S = 3600.0
INTENTS_PER_PASS = 500
INTENTS_AT_ONCE = 8
_OWN = (BATCH, SYSTEM)  # kinds with random ids: an id is never made again


@dataclass(frozen=True, slots=True)
class Expired:
    """What a pass removed."""

    intents: int = 0
    blocks: int = 0


NOTHING_EXPIRED = Expired()


@dataclass(slots=True)
class IntentExpiry:
    """The work of one observer. Two may work at once: each removal is guarded, and done once."""

    store: MetadataStore
    _left: deque[str] = field(default_factory=deque)
    _began_s: float | None = None

    async def once(self, now_ms: int) -> Expired:
        """A pass, at `now_ms` by the store's clock. Raises StoreUnavailable."""
        await self._begin_round()
        names = [self._left.popleft() for _ in range(min(INTENTS_PER_PASS, len(self._left)))]
        removed = await call_each(lambda name: self._look(name, now_ms), names, INTENTS_AT_ONCE)
        intents = sum(expired.intents for expired in removed)
        return Expired(intents, sum(expired.blocks for expired in removed))

    async def _begin_round(self) -> None:
        now_s = asyncio.get_running_loop().time()
        waits = self._began_s is not None and now_s - self._began_s < ROUND_S
        if self._left or waits or await read(self.store, paths.INTENTS) is None:
            return
        self._began_s = now_s
        self._left.extend(sorted(await self.store.children(paths.INTENTS)))

    async def _look(self, intent_id: str, now_ms: int) -> Expired:
        node = await read(self.store, paths.intent(intent_id))
        if node is None:
            return Expired()
        record = records.decode_intent(node.value)
        names, removed = await names_in(self.store, paths.intent_blocks(intent_id)), 0
        for name in names:
            removed += await self._remove_block(f"{paths.intent_blocks(intent_id)}/{name}", now_ms)
        over = record.state is not IntentState.OPEN and node.modified_ms + KEPT_MS <= now_ms
        if not over or removed < len(names) or record.kind not in _OWN:
            return Expired(0, removed)
        return Expired(int(await self._remove(intent_id, record, node)), removed)

    async def _remove_block(self, path: str, now_ms: int) -> int:
        """1 if the block is gone, else 0."""
        node = await read(self.store, path)
        if node is None:
            return 1
        if node.created_ms + KEPT_MS > now_ms:
            return 0
        block = records.decode_block(node.value)
        for ledger_id in range(block.first, block.first + block.count):
            if await read(self.store, paths.ledger(ledger_id)) is not None:
                return 0
        return int(await self._done([Delete(path, node.version)]))

    async def _remove(self, intent_id: str, record: IntentRecord, node: Versioned) -> bool:
        operations: list[Operation] = [
            Delete(paths.intent_heartbeat(intent_id), ANY_VERSION),
            Delete(paths.intent_blocks(intent_id), ANY_VERSION),
            Delete(paths.intent(intent_id), node.version),
        ]
        txn = paths.txn(escape(record.app_id), escape(record.target))
        recorded = await read(self.store, txn) if record.random else None
        if recorded is not None:
            operations.append(Delete(txn, recorded.version))
        if not await self._done(operations):
            return False
        if record.random:
            await self._forget(txn.rpartition("/")[0])
        return True

    async def _done(self, operations: list[Operation]) -> bool:
        """Whether the store applied them; if that is not certain, a later round tries again."""
        try:
            await self.store.multi(operations)
        except (MultiFailed, OutcomeUnknown):
            return False
        return True

    async def _forget(self, folder: str) -> None:
        """Deletes the folder of an app id, unless it has another record."""
        try:
            await self.store.delete(folder)
        except (NoNode, NotEmpty, OutcomeUnknown):
            return
