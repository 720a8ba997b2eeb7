"""Which ledgers there are that were made for topics, and which of them the topics refer to: those
of their rows, of their log, and of their subscriptions.

Always true: a ledger is found through the blocks of ids recorded under an intent, never by listing
all ledgers, and counts only if its record names that intent: what LedgerClient made is not among
them. Any listing that fails ends the look (hazard 46). A closed ledger is read once; of ended
intents only ids without a ledger are looked at again, seldom: a writer that is late may still make
one.

A topic's references are read after everything that was acknowledged before the call,
from its newest checkpoint on, whose rows may be in other ledgers than the commits said; what a
root names that is still needed (it, the one before, their chunks) counts too. Whatever cannot be
read is a problem of the topic, which keeps all of its ledgers; only the metadata store's silence
ends the look at all topics.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.ledger_record import LedgerState
from spark_ledger.metadata.store import MetadataStore, NoNode
from spark_ledger.metadata.store_calls import each, look_up, names_in, read
from spark_ledger.topic.checkpointer import with_losses
from spark_ledger.topic.log import checkpoint, records
from spark_ledger.topic.log.blobs import ChunkStore
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.state import TopicState
from spark_ledger.topic.log.topic_log import Checkpointed, TopicLog
from spark_ledger.topic.log.topics import policies_now
from spark_ledger.topic.subscription import records as subscription_records
from spark_ledger.topic.upkeep.garbage import LedgerSeen, TopicSeen

LATE_LOOK_S = 3600.0
CLOSED_KNOWN_MAX = 1_000_000
TRIES_MAX = 3
TOPICS_AT_ONCE = 4
LOGS_KEPT_MAX = 1000
READS_AT_ONCE = 64


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
    `recovering` those that were in recovery at the last look, `met` those of open intents."""

    store: MetadataStore
    closed: dict[int, LedgerSeen] = field(default_factory=dict)
    recovering: dict[int, None] = field(default_factory=dict)
    met: dict[int, None] = field(default_factory=dict)
    _ended: dict[str, _Ended] = field(default_factory=dict)
    _blocks: dict[str, dict[str, list[int]]] = field(default_factory=dict)

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
        self.met = {one.id: None for one in ledgers if one.intent in opened}
        there = {one.id for one in ledgers}
        self.closed = {id_: one for id_, one in self.closed.items() if id_ in there}
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
        closed_in = node.set_in if record.closed else 0
        return LedgerSeen(
            *(ledger_id, intent_id, record.topic, record.closed, node.created_ms, recovering),
            closed_in=closed_in,
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
            name: [i for i in ids if i in there or i not in self.met]
            for name, ids in blocks.items()
        }
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


@dataclass(frozen=True, slots=True)
class _Folded:
    """The ledgers of a topic's rows and log as of a state and a checkpoint, and which ledgers it
    dropped when."""

    next: int
    checkpoint: int | None
    ledgers: frozenset[int]
    dropped: Mapping[int, int]


class References:
    """Of one observer; it remembers from call to call what did not change."""

    def __init__(self, store: MetadataStore, ledgers: LedgerStore) -> None:
        self.store = store
        self._ledgers = ledgers
        self._chunks = ChunkStore(ledgers)
        self._logs: dict[str, TopicLog] = {}
        self._folded: dict[str, _Folded] = {}

    async def deleted(self) -> dict[str, int]:
        """The topics that were deleted and are not wholly gone, with when (the store's clock)."""
        names = await names_in(self.store, paths.TOPICS_DELETED)
        nodes = await each(lambda name: read(self.store, paths.topic_deleted(name)), names)
        found = zip(names, nodes, strict=True)
        return {name: node.created_ms for name, node in found if node is not None}

    async def bare(self) -> frozenset[str]:
        """The topics that were deleted and have no tree any more: no ledger is made for them."""
        names = await names_in(self.store, paths.TOPICS_DELETED)
        trees = await each(lambda name: read(self.store, paths.topic(name)), names)
        return frozenset(name for name, tree in zip(names, trees, strict=True) if tree is None)

    async def policies(self, topic_id: str) -> TopicPolicies | None:
        """The topic's policies; None if there is no such topic, or none that can be read."""
        try:
            return (await policies_now(self.store, topic_id)).policies
        except (errors.TopicNotFound, errors.UnsupportedFormat):
            return None

    async def of(self, topic_ids: Sequence[str], deleted: dict[str, int]) -> dict[str, TopicSeen]:
        """What there is to know of each of the topics now. `deleted` as of before."""

        async def one(topic_id: str) -> TopicSeen:
            return await self._of(topic_id, deleted.get(topic_id))

        return {topic.id: topic for topic in await each(one, topic_ids, TOPICS_AT_ONCE)}

    async def _of(self, topic_id: str, deleted_ms: int | None) -> TopicSeen:
        policies = await self.policies(topic_id)
        if deleted_ms is not None:
            return TopicSeen(topic_id, policies or TopicPolicies(), deleted_ms=deleted_ms)
        if policies is None:
            return TopicSeen(topic_id, problem=f"its topic {topic_id} is not known")
        try:
            return await self._folded_topic(topic_id, policies)
        except errors.LedgerError as error:
            self._forget(topic_id)
            return TopicSeen(topic_id, policies, problem=f"its topic cannot be read: {error}")

    async def _folded_topic(self, topic_id: str, policies: TopicPolicies) -> TopicSeen:
        for _ in range(TRIES_MAX):
            state, newest = await self._log(topic_id).fold_from_checkpoint()
            if newest is not None and newest.root.state.next != newest.record.next:
                what = f"the newest checkpoint of topic {topic_id} cannot be read"
                raise errors.DataUnavailable(what)  # what only that root names is not known
            try:
                rows = await self._of_rows(topic_id, state, newest)
            except errors.NoSuchLedger:  # of a chunk: a newer checkpoint took its place
                continue
            cursors = await self._of_subscriptions(topic_id)
            referred = rows.ledgers | cursors
            return TopicSeen(topic_id, policies, referred, rows.dropped, rows.checkpoint)
        raise errors.DataUnavailable(f"chunks of topic {topic_id} are not there")

    async def _of_rows(
        self, topic_id: str, state: TopicState, newest: Checkpointed | None
    ) -> _Folded:
        version = None if newest is None else newest.version
        before = self._folded.get(topic_id)
        if before is not None and (before.next, before.checkpoint) == (state.next, version):
            return before
        found = {*state.bodies, *checkpoint.chunk_ledgers(state)}
        found.update(state.ledgers(await self._chunks.load(state.chunks())))
        if newest is not None:
            found.update(newest.record.root_ledgers(), newest.root.before)
            found.update(checkpoint.chunk_ledgers(newest.root.state))
            state = await with_losses(state, newest.root.state, self._chunks)
        made = _Folded(state.next, version, frozenset(found), dict(state.dropped))
        self._folded[topic_id] = made
        return made

    async def _of_subscriptions(self, topic_id: str) -> frozenset[int]:
        """The cursor ledgers."""
        path = paths.subscriptions(topic_id)
        names = await names_in(self.store, path)
        nodes = await each(lambda name: read(self.store, f"{path}/{name}"), names, READS_AT_ONCE)
        found = [subscription_records.decode_subscription(node.value) for node in nodes if node]
        return frozenset(one.ledger_id for one in found if one.ledger_id is not None)

    def _log(self, topic_id: str) -> TopicLog:
        if topic_id not in self._logs:
            if len(self._logs) >= LOGS_KEPT_MAX:
                self._forget(next(iter(self._logs)))
            self._logs[topic_id] = TopicLog(self.store, topic_id, self._ledgers)
        return self._logs[topic_id]

    def _forget(self, topic_id: str) -> None:
        self._logs.pop(topic_id, None)
        self._folded.pop(topic_id, None)
