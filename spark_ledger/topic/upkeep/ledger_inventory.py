"""Which ledgers there are that were made for topics, found through the intents.

Always true: a ledger is found through the blocks of ids recorded under an intent, never by listing
all ledgers, and counts only if its record names that intent: what LedgerClient made is not among
them. Any listing that fails ends the look (hazard 46). A closed ledger is read once; of ended
intents only ids without a ledger are looked at again, seldom: a writer that is late may still make
one.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from spark_ledger import errors
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.ledger_record import LedgerState
from spark_ledger.metadata.store import MetadataStore, NoNode
from spark_ledger.metadata.store_calls import each, look_up, read
from spark_ledger.topic.log import records
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.upkeep.garbage import LedgerSeen

LATE_LOOK_S = 3600.0
CLOSED_KNOWN_MAX = 1_000_000


@dataclass(slots=True)
class _Ended:
    """An intent that takes no more blocks: its ids, and when those without a ledger were last
    looked at."""

    ids: tuple[int, ...]
    absent: tuple[int, ...] = ()
    looked_s: float | None = None


@dataclass(slots=True)
class LedgerInventory:
    """Of one observer; it remembers what cannot change. `closed` are the closed ledgers it knows,
    `recovering` those that were in recovery at the last look."""

    store: MetadataStore
    closed: dict[int, LedgerSeen] = field(default_factory=dict)
    recovering: dict[int, None] = field(default_factory=dict)
    _ended: dict[str, _Ended] = field(default_factory=dict)
    _blocks: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    _met: dict[int, None] = field(default_factory=dict)

    async def look(self, intents: Sequence[Intent], *, every: bool = False) -> list[LedgerSeen]:
        """The ledgers of these intents, by intent and id; `stuck` are those that were in recovery
        at the last look, too. `every`: look at all ids of ended intents now. Raises StoreError, and
        errors.UnsupportedFormat for a record that cannot be read."""
        if every:
            for ended in self._ended.values():
                ended.looked_s = None
        ids = {intent.id for intent in intents}
        self._ended = {id_: one for id_, one in self._ended.items() if id_ in ids}
        opened = {intent.id for intent in intents if intent.open}
        self._blocks = {id_: one for id_, one in self._blocks.items() if id_ in opened}
        found = await each(self._of_intent, intents, 8)
        ledgers = [ledger for some in found for ledger in some]
        before, self.recovering = self.recovering, {one.id: None for one in ledgers if one.stuck}
        return [replace(one, stuck=one.stuck and one.id in before) for one in ledgers]

    def learn(self, ledgers: Iterable[LedgerSeen]) -> None:
        """Remember these closed ledgers, with what else is known of them."""
        for one in ledgers:
            assert one.closed, "what is not closed changes"
            if one.id in self.closed or len(self.closed) < CLOSED_KNOWN_MAX:
                self.closed[one.id] = one

    def forget(self, ledgers: Iterable[int]) -> None:
        """They are gone."""
        for ledger_id in ledgers:
            self.closed.pop(ledger_id, None)

    async def read(self, ledger_id: int, intent_id: str) -> LedgerSeen | None:
        """The ledger, `stuck` if it is in recovery; None if there is none, or it is not the
        intent's."""
        node = await read(self.store, paths.ledger(ledger_id))
        if node is None:
            return None
        try:
            record = ledger_record.decode(node.value)
        except ledger_record.BadLedgerRecord as damage:
            raise errors.UnsupportedFormat(
                f"the record of ledger {ledger_id}: {damage}"
            ) from damage
        if record.intent != intent_id:
            return None
        recovering = record.state is LedgerState.IN_RECOVERY
        return LedgerSeen(
            *(ledger_id, intent_id, record.topic, record.closed, node.created_ms, recovering)
        )

    async def _of_intent(self, intent: Intent) -> list[LedgerSeen]:
        if intent.open:
            return await self._of_open(intent)
        ended = self._ended.get(intent.id)
        if ended is None:
            ended = self._ended[intent.id] = _Ended(await self._ids(intent.id))
        now_s = asyncio.get_running_loop().time()
        late = ended.looked_s is None or now_s - ended.looked_s >= LATE_LOOK_S
        absent = () if late else ended.absent
        found = await self._read_all([i for i in ended.ids if i not in absent], intent.id)
        there = {one.id for one in found}
        ended.absent = tuple(i for i in ended.ids if i not in there)
        ended.looked_s = now_s if late else ended.looked_s
        return found

    async def _of_open(self, intent: Intent) -> list[LedgerSeen]:
        """A block does not change, and a ledger that was there and is gone does not come back."""
        path, before = paths.intent_blocks(intent.id), self._blocks.get(intent.id, {})

        names = await self.store.children(path)
        new = [name for name in names if name not in before]
        listed = await each(lambda name: self._block(f"{path}/{name}"), new)
        came = dict(zip(new, listed, strict=True))
        blocks = {name: before[name] if name in before else came[name] for name in names}
        found = await self._read_all([i for ids in blocks.values() for i in ids], intent.id)
        there = {one.id: None for one in found}
        self._blocks[intent.id] = {
            name: [i for i in ids if i in there or i not in self._met]
            for name, ids in blocks.items()
        }
        for ids in blocks.values():
            for gone in (i for i in ids if i not in there):
                self._met.pop(gone, None)
        self._met |= there
        return found

    async def _block(self, path: str) -> list[int]:
        """Its ids; none of one that was removed just now."""
        node = await read(self.store, path)
        if node is None:
            return []
        block = records.decode_block(node.value)
        return list(range(block.first, block.first + block.count))

    async def _ids(self, intent_id: str) -> tuple[int, ...]:
        path = paths.intent_blocks(intent_id)
        try:
            names = await self.store.children(path)
        except NoNode:
            if await look_up(self.store, paths.intent(intent_id)) is not None:
                raise  # a listing that fails
            return ()  # removed just now
        blocks = await each(lambda name: self._block(f"{path}/{name}"), names)
        return tuple(i for ids in blocks for i in ids)

    async def _read_all(self, ids: Iterable[int], intent_id: str) -> list[LedgerSeen]:
        found = {ledger_id: self.closed.get(ledger_id) for ledger_id in ids}
        asked = [ledger_id for ledger_id, known in found.items() if known is None]
        answers = await each(lambda ledger_id: self.read(ledger_id, intent_id), asked)
        found.update(zip(asked, answers, strict=True))
        return [seen for seen in found.values() if seen is not None]
