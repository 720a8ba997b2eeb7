"""What topics refer to: the ledgers of their rows, of their log, and of their subscriptions.

Always true: a topic's references are read after everything that was acknowledged before the call,
from its newest checkpoint on, whose rows may be in other ledgers than the commits said; what a
root names that is still needed (it, the one before, their chunks) counts too. Whatever cannot be
read is a problem of the topic, which keeps all of its ledgers; only the metadata store's silence
ends the look at all topics.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import MetadataStore
from spark_ledger.metadata.store_calls import each, names_in, read
from spark_ledger.topic.checkpointer import with_losses
from spark_ledger.topic.log import checkpoint
from spark_ledger.topic.log.blobs import ChunkStore
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.state import TopicState
from spark_ledger.topic.log.topic_log import Checkpointed, TopicLog
from spark_ledger.topic.log.topics import policies_now
from spark_ledger.topic.subscription import records as subscription_records
from spark_ledger.topic.upkeep.garbage import TopicSeen

TRIES_MAX = 3
TOPICS_AT_ONCE = 4
LOGS_KEPT_MAX = 1000
READS_AT_ONCE = 64


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
