"""Removes old intents and old blocks of ledger ids from the metadata store.

Always true: an intent is removed KEPT_MS after its end at the earliest, by the store's clock, and
never while one of its ledgers has a record: the janitor needs the intent to find the ledgers. One
multi removes an intent and the transaction record of its random app id. A process that later looks
for the outcome of a commit under the intent finds neither, and reports that the outcome is unknown
(hazard 12). The records of app ids that users chose stay. The intents of queries stay, too: an old
run that makes its intent again must find the ended intent (hazard 11). A block of ledger ids, of
any intent, is removed when it is older than KEPT_MS and no ledger with one of its ids has a record:
no process uses ids of such an old block (intents.IDS_KEPT_S).

An intent or a block that cannot be read stays, and is logged.

A pass looks at INTENTS_PER_PASS intents, and the next pass at the following intents. A round over
all intents begins once in ROUND_S at most.
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
_RANDOM_ID_KINDS = (BATCH, SYSTEM)  # kinds with random ids, which no process makes again


@dataclass(frozen=True, slots=True)
class ExpiryResult:
    """The numbers of intents and of blocks that a pass removed."""

    intents: int = 0
    blocks: int = 0


NOTHING_EXPIRED = ExpiryResult()


@dataclass(slots=True)
class IntentExpiry:
    """Removes old intents, for one process. Two processes may do this at once: each removal is
    guarded."""

    store: MetadataStore
    _remaining: deque[str] = field(default_factory=deque)
    _began_s: float | None = None

    async def once(self, now_ms: int) -> ExpiryResult:
        """A pass, at `now_ms` by the store's clock. Raises StoreUnavailable."""
        await self._begin_round()
        names = [
            self._remaining.popleft() for _ in range(min(INTENTS_PER_PASS, len(self._remaining)))
        ]
        removed = await call_each(lambda name: self._expire(name, now_ms), names, INTENTS_AT_ONCE)
        intents = sum(result.intents for result in removed)
        return ExpiryResult(intents, sum(result.blocks for result in removed))

    async def _begin_round(self) -> None:
        now_s = asyncio.get_running_loop().time()
        is_too_soon = self._began_s is not None and now_s - self._began_s < ROUND_S
        if self._remaining or is_too_soon or await read(self.store, paths.INTENTS) is None:
            return
        self._began_s = now_s
        self._remaining.extend(sorted(await self.store.children(paths.INTENTS)))

    async def _expire(self, intent_id: str, now_ms: int) -> ExpiryResult:
        node = await read(self.store, paths.intent(intent_id))
        if node is None:
            return ExpiryResult()
        record = records.readable(f"intent {intent_id}", node, records.decode_intent)
        if record is None:
            return ExpiryResult()
        names, removed_blocks = await names_in(self.store, paths.intent_blocks(intent_id)), 0
        for name in names:
            removed_blocks += await self._remove_block(
                f"{paths.intent_blocks(intent_id)}/{name}", now_ms
            )
        may_go = record.state is not IntentState.OPEN and node.modified_ms + KEPT_MS <= now_ms
        if not may_go or removed_blocks < len(names) or record.kind not in _RANDOM_ID_KINDS:
            return ExpiryResult(0, removed_blocks)
        return ExpiryResult(int(await self._remove(intent_id, record, node)), removed_blocks)

    async def _remove_block(self, path: str, now_ms: int) -> int:
        """Removes the block if it may go. Returns 1 if the block does not exist afterwards, else
        0."""
        node = await read(self.store, path)
        if node is None:
            return 1
        if node.created_ms + KEPT_MS > now_ms:
            return 0
        block = records.readable(path, node, records.decode_block)
        if block is None:
            return 0
        for ledger_id in range(block.first, block.first + block.count):
            if await read(self.store, paths.ledger(ledger_id)) is not None:
                return 0
        return int(await self._apply([Delete(path, node.version)]))

    async def _remove(self, intent_id: str, record: IntentRecord, node: Versioned) -> bool:
        operations: list[Operation] = [
            Delete(paths.intent_heartbeat(intent_id), ANY_VERSION),
            Delete(paths.intent_blocks(intent_id), ANY_VERSION),
            Delete(paths.intent(intent_id), node.version),
        ]
        txn = paths.txn(escape(record.app_id), escape(record.target))
        txn_node = await read(self.store, txn) if record.random else None
        if txn_node is not None:
            operations.append(Delete(txn, txn_node.version))
        if not await self._apply(operations):
            return False
        if record.random:
            await self._remove_folder(txn.rpartition("/")[0])
        return True

    async def _apply(self, operations: list[Operation]) -> bool:
        """Whether the store certainly applied the operations; if not, a later round tries again."""
        try:
            await self.store.multi(operations)
        except (MultiFailed, OutcomeUnknown):
            return False
        return True

    async def _remove_folder(self, folder: str) -> None:
        """Deletes the folder of an app id, unless it has another record."""
        try:
            await self.store.delete(folder)
        except (NoNode, NotEmpty, OutcomeUnknown):
            return
