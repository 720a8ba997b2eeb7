"""Lists the ledgers that were made for topics, and the ledgers to which topics refer: the ledgers
of their rows, of their log, and of their subscriptions.

Always true: the inventory lists the ids in the blocks recorded under an intent, never all ledgers.
A ledger counts only if its record names the intent, so ledgers of LedgerClient are not in the
inventory. Any listing that fails ends the call (hazard 46). A closed ledger is read once. An id of
an ended intent that has no ledger is read again, but seldom: a late writer may still make the
ledger.

A topic's references include all commits that were acknowledged before the call. The topic is folded
from its newest checkpoint, because a checkpoint moves rows to other ledgers; the ledgers of the
newest root, of the previous root, and of their chunks count too. If a part of a topic cannot be
read, the topic has a problem, and all its ledgers are kept. Only a metadata store that does not
respond ends the call for all topics.
"""

import asyncio
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.ledger_record import LedgerRecord, RecordState
from spark_ledger.metadata.store import MetadataStore, NoNode
from spark_ledger.metadata.store_calls import (
    Tries,
    call_each,
    look_up,
    names_in,
    read,
    unavailable_while,
)
from spark_ledger.topic.acks.copies import ledgers_of_copies
from spark_ledger.topic.acks.nodes import AckNodes
from spark_ledger.topic.checkpointer import with_losses
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log import checkpoint, records
from spark_ledger.topic.log.blobs import ChunkStore
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.state import TopicState
from spark_ledger.topic.log.topic_log import NewestCheckpoint, TopicLog
from spark_ledger.topic.log.topics import read_policies
from spark_ledger.topic.subscription import records as subscription_records
from spark_ledger.topic.upkeep.garbage import LedgerSeen, TopicSeen

REREAD_ENDED_S = 3600.0
CLOSED_KEPT_MAX = 1_000_000
TRIES_MAX = 3
TOPICS_AT_ONCE = 4
LOGS_KEPT_MAX = 1000
READS_AT_ONCE = 64


@dataclass(slots=True)
class _EndedIntent:
    """The ledger ids of an ended intent, the ids without a ledger (`absent`), and when the absent
    ids were last read."""

    ids: tuple[int, ...]
    absent: tuple[int, ...] = ()
    read_s: float | None = None


@dataclass(slots=True)
class LedgerInventory:
    """The inventory of one janitor. `closed` are remembered CLOSED ledgers, whose records do not
    change. `unreadable` are the ledgers whose records could not be read in this pass. `recovering`
    are the ledgers that were in recovery at the last `look`, `of_open_intents`
    the ledgers that open intents had then."""

    store: MetadataStore
    closed: dict[int, LedgerSeen] = field(default_factory=dict)
    unreadable: dict[int, None] = field(default_factory=dict)
    recovering: dict[int, None] = field(default_factory=dict)
    of_open_intents: dict[int, None] = field(default_factory=dict)
    _ended_intents: dict[str, _EndedIntent] = field(default_factory=dict)
    _blocks: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    _has_unreadable_blocks: bool = False

    @property
    def has_unreadable(self) -> bool:
        """Whether the last `look` left out a ledger or a block that cannot be read."""
        return bool(self.unreadable) or self._has_unreadable_blocks

    async def look(
        self, intents: Sequence[Intent], *, reread_ended: bool = False
    ) -> list[LedgerSeen]:
        """The ledgers of these intents, by intent and id. A ledger is `stuck` if it is in recovery
        now, and was in recovery at the last call. `reread_ended`: read all ids of ended intents
        now. Raises StoreError."""
        self.unreadable, self._has_unreadable_blocks = {}, False
        if reread_ended:
            for ended in self._ended_intents.values():
                ended.read_s = None
        ids = {intent.id for intent in intents}
        self._ended_intents = {
            id_: ended for id_, ended in self._ended_intents.items() if id_ in ids
        }
        open_ids = {intent.id for intent in intents if intent.is_open}
        self._blocks = {id_: blocks for id_, blocks in self._blocks.items() if id_ in open_ids}
        by_intent = await call_each(self._ledgers_of_intent, intents, 8)
        ledgers = [ledger for of_intent in by_intent for ledger in of_intent]
        self.of_open_intents = {ledger.id: None for ledger in ledgers if ledger.intent in open_ids}
        existing_ids = {ledger.id for ledger in ledgers}
        self.closed = {id_: ledger for id_, ledger in self.closed.items() if id_ in existing_ids}
        before = self.recovering
        self.recovering = {ledger.id: None for ledger in ledgers if ledger.stuck}
        return [replace(ledger, stuck=ledger.stuck and ledger.id in before) for ledger in ledgers]

    def learn(self, ledgers: Iterable[LedgerSeen]) -> None:
        """Remembers these closed ledgers."""
        for ledger in ledgers:
            assert ledger.closed, "the record of an open ledger changes"
            if ledger.id in self.closed or len(self.closed) < CLOSED_KEPT_MAX:
                self.closed[ledger.id] = ledger

    def forget(self, ledgers: Iterable[int]) -> None:
        """Forgets these deleted ledgers."""
        for ledger_id in ledgers:
            self.closed.pop(ledger_id, None)

    async def read(self, ledger_id: int, intent_id: str) -> LedgerSeen | None:
        """The ledger, `stuck` if it is in recovery; None if the ledger does not exist, belongs to
        another intent, or is `unreadable` now."""
        node = await read(self.store, paths.ledger(ledger_id))
        if node is None:
            return None
        record = records.readable(f"the record of ledger {ledger_id}", node, _decode_record)
        if record is None:
            self.unreadable[ledger_id] = None
            return None
        if record.intent != intent_id:
            return None
        recovering = record.state is RecordState.IN_RECOVERY
        closed_in = node.set_in if record.closed else 0
        return LedgerSeen(
            *(ledger_id, intent_id, record.topic, record.closed, node.created_ms, recovering),
            closed_in=closed_in,
        )

    async def _ledgers_of_intent(self, intent: Intent) -> list[LedgerSeen]:
        if intent.is_open:
            return await self._ledgers_of_open(intent)
        ended = self._ended_intents.get(intent.id)
        if ended is None:
            blocks = await self._ids_by_block(intent.id)
            ended = _EndedIntent(tuple(i for ids in blocks for i in ids or ()))
            if None not in blocks:
                self._ended_intents[intent.id] = ended
        now_s = asyncio.get_running_loop().time()
        is_due = ended.read_s is None or now_s - ended.read_s >= REREAD_ENDED_S
        absent = () if is_due else ended.absent
        ledgers = await self._read_all([i for i in ended.ids if i not in absent], intent.id)
        existing_ids = {ledger.id for ledger in ledgers}
        existing_ids.update(self.unreadable)
        ended.absent = tuple(i for i in ended.ids if i not in existing_ids)
        ended.read_s = now_s if is_due else ended.read_s
        return ledgers

    async def _ledgers_of_open(self, intent: Intent) -> list[LedgerSeen]:
        """Reads each block only once, as blocks do not change, and no id of a deleted ledger."""
        path, before = paths.intent_blocks(intent.id), self._blocks.get(intent.id, {})

        names = await self.store.children(path)
        new = [name for name in names if name not in before]
        block_ids = await call_each(lambda name: self._block(f"{path}/{name}"), new)
        new_blocks = dict(zip(new, block_ids, strict=True))
        ids_by_name = {
            **before,
            **{name: ids for name, ids in new_blocks.items() if ids is not None},
        }
        blocks = {name: ids_by_name[name] for name in names if name in ids_by_name}
        ledgers = await self._read_all([i for ids in blocks.values() for i in ids], intent.id)
        existing_ids = {**self.unreadable, **{ledger.id: None for ledger in ledgers}}
        self._blocks[intent.id] = {
            name: [i for i in ids if i in existing_ids or i not in self.of_open_intents]
            for name, ids in blocks.items()
        }
        return ledgers

    async def _block(self, path: str) -> list[int] | None:
        """The block's ids; empty if the block was removed meanwhile; None if it cannot be read."""
        node = await read(self.store, path)
        if node is None:
            return []
        block = records.readable(path, node, records.decode_block)
        if block is None:
            self._has_unreadable_blocks = True
            return None
        return list(range(block.first, block.first + block.count))

    async def _ids_by_block(self, intent_id: str) -> list[list[int] | None]:
        path = paths.intent_blocks(intent_id)
        try:
            names = await self.store.children(path)
        except NoNode:
            if await look_up(self.store, paths.intent(intent_id)) is not None:
                raise  # the listing failed
            return []  # the intent was removed meanwhile
        return await call_each(lambda name: self._block(f"{path}/{name}"), names)

    async def _read_all(self, ids: Iterable[int], intent_id: str) -> list[LedgerSeen]:
        by_id = {ledger_id: self.closed.get(ledger_id) for ledger_id in ids}
        unread = [ledger_id for ledger_id, closed in by_id.items() if closed is None]
        ledgers = await call_each(lambda ledger_id: self.read(ledger_id, intent_id), unread)
        by_id.update(zip(unread, ledgers, strict=True))
        return [seen for seen in by_id.values() if seen is not None]


def _decode_record(value: bytes) -> LedgerRecord:
    try:
        return ledger_record.decode(value)
    except ledger_record.BadLedgerRecord as damage:
        raise errors.UnsupportedFormat(str(damage)) from damage


@dataclass(frozen=True, slots=True)
class _FoldedReferences:
    """The ledgers of a topic's rows and log, at commit `next` and with the `checkpoint` node of
    this version; and the ledgers that the topic dropped, with the time."""

    next: int
    checkpoint: int | None
    ledgers: frozenset[int]
    dropped: Mapping[int, int]


class References:
    """Reads the references of topics, for one observer. Reads a topic again only if it changed."""

    def __init__(self, store: MetadataStore, ledgers: LedgerStore) -> None:
        self.store = store
        self._ledgers = ledgers
        self._chunks = ChunkStore(ledgers)
        self._logs: dict[str, TopicLog] = {}
        self._references: dict[str, _FoldedReferences] = {}

    async def deleted(self) -> dict[str, int]:
        """The deleted topics whose deletion is still recorded, with the time of the deletion (the
        store's clock)."""
        names = await names_in(self.store, paths.TOPICS_DELETED)
        nodes = await call_each(lambda name: read(self.store, paths.topic_deleted(name)), names)
        by_name = zip(names, nodes, strict=True)
        return {name: node.created_ms for name, node in by_name if node is not None}

    async def without_tree(self) -> frozenset[str]:
        """The deleted topics whose tree was removed: no process makes a ledger for these topics."""
        names = await names_in(self.store, paths.TOPICS_DELETED)
        trees = await call_each(lambda name: read(self.store, paths.topic(name)), names)
        return frozenset(name for name, tree in zip(names, trees, strict=True) if tree is None)

    async def policies(self, topic_id: str) -> TopicPolicies | None:
        """The topic's policies; None if there is no such topic, or its record cannot be read."""
        try:
            return (await read_policies(self.store, topic_id)).policies
        except (errors.TopicNotFound, errors.UnsupportedFormat):
            return None

    async def of(self, topic_ids: Sequence[str], deleted: dict[str, int]) -> dict[str, TopicSeen]:
        """The topics as they are now, by id. `deleted` is an earlier result of the method
        `deleted`."""

        async def seen(topic_id: str) -> TopicSeen:
            return await self._of(topic_id, deleted.get(topic_id))

        return {topic.id: topic for topic in await call_each(seen, topic_ids, TOPICS_AT_ONCE)}

    async def _of(self, topic_id: str, deleted_ms: int | None) -> TopicSeen:
        policies = await self.policies(topic_id)
        if deleted_ms is not None:
            return TopicSeen(topic_id, policies or TopicPolicies(), deleted_ms=deleted_ms)
        if policies is None:
            return TopicSeen(topic_id, problem=f"its topic {topic_id} does not exist")
        try:
            return await self._folded_topic(topic_id, policies)
        except errors.LedgerError as error:
            self._forget(topic_id)
            return TopicSeen(topic_id, policies, problem=f"its topic cannot be read: {error}")

    async def _folded_topic(self, topic_id: str, policies: TopicPolicies) -> TopicSeen:
        tries = Tries(tries_max=TRIES_MAX)
        while True:
            state, newest = await self._log(topic_id).fold_from_checkpoint()
            if newest is not None and newest.root.state.next != newest.record.next:
                # only the newest root names some of the topic's ledgers
                what = f"the newest checkpoint of topic {topic_id} cannot be read"
                raise errors.DataUnavailable(what)
            try:
                rows = await self._of_rows(topic_id, state, newest)
            except errors.NoSuchLedger:  # a newer checkpoint replaced the chunk in this ledger
                missing = f"chunks of topic {topic_id} are missing"
                await tries.retry_or_raise(errors.DataUnavailable(missing))
                continue
            cursors = await self._of_subscriptions(topic_id)
            acks = await self._of_acks(topic_id)
            referred = rows.ledgers | cursors | acks
            return TopicSeen(topic_id, policies, referred, rows.dropped, rows.checkpoint)

    async def _of_rows(
        self, topic_id: str, state: TopicState, newest: NewestCheckpoint | None
    ) -> _FoldedReferences:
        version = None if newest is None else newest.version
        before = self._references.get(topic_id)
        if before is not None and (before.next, before.checkpoint) == (state.next, version):
            return before
        ledgers = {*state.bodies, *checkpoint.chunk_ledgers(state)}
        ledgers.update(state.ledgers(await self._chunks.load(state.chunks())))
        if newest is not None:
            ledgers.update(newest.record.root_ledgers(), newest.root.earlier_ledgers)
            ledgers.update(checkpoint.chunk_ledgers(newest.root.state))
            state = await with_losses(state, newest.root.state, self._chunks)
        folded = _FoldedReferences(state.next, version, frozenset(ledgers), dict(state.dropped))
        self._references[topic_id] = folded
        return folded

    async def _of_subscriptions(self, topic_id: str) -> frozenset[int]:
        """The cursor ledgers."""
        path = paths.subscriptions(topic_id)
        names = await names_in(self.store, path)
        nodes = await call_each(
            lambda name: read(self.store, f"{path}/{name}"), names, READS_AT_ONCE
        )
        decoded = [subscription_records.decode_subscription(node.value) for node in nodes if node]
        ids = (subscription.ledger_id for subscription in decoded)
        return frozenset(ledger_id for ledger_id in ids if ledger_id is not None)

    async def _of_acks(self, topic_id: str) -> frozenset[int]:
        """The ack ledgers, and the ledgers of copies. Raises errors.UnsupportedFormat."""
        nodes = AckNodes(self._ledgers, topic_id)
        names = await names_in(self.store, paths.acks(topic_id))
        partitions = sorted(int(name) for name in names if name.isdigit())
        named = await call_each(partial(nodes.get, fresh=False), partitions, READS_AT_ONCE)
        ids = (node.pointer.ledger_id for node in named if node is not None)
        of_owners = frozenset(ledger_id for ledger_id in ids if ledger_id is not None)
        return of_owners | await ledgers_of_copies(self.store, topic_id, names)

    def _log(self, topic_id: str) -> TopicLog:
        if topic_id not in self._logs:
            if len(self._logs) >= LOGS_KEPT_MAX:
                self._forget(next(iter(self._logs)))
            self._logs[topic_id] = TopicLog(self.store, topic_id, self._ledgers)
        return self._logs[topic_id]

    def _forget(self, topic_id: str) -> None:
        self._logs.pop(topic_id, None)
        self._references.pop(topic_id, None)


async def referred_by(topics: TopicClient) -> dict[str, Container[int] | None]:
    """By topic id the ledgers to which the topic refers now. None: the topic cannot be read, and
    may refer to any ledger. Raises LedgerError."""
    references = References(topics.store, topics.ledgers)
    with unavailable_while("looking up what topics refer to"):
        ids = [info.id for info in await topics.topics.list()]
        seen = await references.of(ids, await references.deleted())
    return {topic.id: None if topic.problem else topic.referred for topic in seen.values()}
