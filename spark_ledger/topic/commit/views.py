"""Views: the last values that this process has of the nodes that its commits depend on. With them
most commits cost one write and no read.

Always true: a view alone decides nothing. A commit's multi checks the version of each node that the
commit read, so a commit from an old view loses the race and changes nothing. If a view speaks
against a commit, the commit reads the node again after a sync before it gives up. After a commit of
this process the next view is computed, not read: a write raises a node's version by one, and a
write of another process raises the version further. A computed state lacks only the time of the
commit, until the log is folded; no guard needs this time.

And turns: a commit that lost many races asks the others to let it go first (hazard 13). A commit
over 40 busy topics has to win 40 races at once. After LOSSES_MAX losses it writes its id into the
head of each of its topics, in the order of topic ids. This changes the version of head, so a commit
that was about to be sent loses, reads again, and sees the turn. Always true: a turn is a wish; each
commit waits TURN_WAIT_S_MAX for all turns together and then goes on; the next commit to the topic
takes the turn out of head. Safety stays with compare-and-set. Because all commits take turns in the
same order of topics, turns cannot dead-lock.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from spark_ledger import errors
from spark_ledger.async_tasks import woken
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import (
    BadVersion,
    MetadataStore,
    NoNode,
    OutcomeUnknown,
    StoreError,
    Watcher,
)
from spark_ledger.metadata.store_calls import call_each, look_up, read
from spark_ledger.process import LruCache
from spark_ledger.topic.log import records, state
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.records import Commit, Head, TxnRecord
from spark_ledger.topic.log.state import TopicState
from spark_ledger.topic.log.topic_log import TopicLog
from spark_ledger.topic.schema.records import (
    SchemaHead,
    SchemaVersion,
    decode_head,
    decode_version,
)

VIEWS_MAX = 256
"""How many intents are kept, how many transaction records (of 64 KiB at most), how many topics."""
UNFOLDED_MAX = 64
"""How many commits of this process a computed state may have that no fold has read."""


@dataclass(frozen=True, slots=True)
class SchemaNode:
    """A topic's schema. `version` is its node's version (None: the topic has no such node)."""

    head: SchemaHead = field(default_factory=SchemaHead)
    version: int | None = None


@dataclass(slots=True)
class _TopicView:
    """`unfolded`: the number of commits of this process in `state` that no fold has read.
    `is_contended`: others commit to the topic too, so a commit reads head first, since its multi
    would probably lose. `schema`: None until it was read. While the topic has no schema node, the
    node is read again after each commit of others, since such a commit may have put a schema into
    force."""

    state: TopicState | None = None
    unfolded: int = 0
    is_contended: bool = False
    schema: SchemaNode | None = None


class CommitViews:
    """The views of one process on one store."""

    def __init__(self, store: MetadataStore, log: Callable[[str], TopicLog]) -> None:
        self._store = store
        self._log = log
        self._intents = LruCache[str, Intent](VIEWS_MAX)
        self._txns = LruCache[str, tuple[TxnRecord, int]](VIEWS_MAX)
        self._topics = LruCache[str, _TopicView](VIEWS_MAX)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def one_at_a_time(self, name: str) -> asyncio.Lock:
        """The lock under which this process makes commits that depend on the same topic or
        record."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    async def intent(self, intent_id: str, *, fresh: bool) -> Intent:
        """The intent; with `fresh` read now, else maybe an older view. Raises errors.LedgerFenced
        if there is no such intent."""
        intent = None if fresh else self._intents.get(intent_id)
        if intent is None:
            node = await look_up(self._store, paths.intent(intent_id))
            if node is None:
                raise errors.LedgerFenced(f"there is no intent {intent_id}")
            intent = Intent(intent_id, records.decode_intent(node.value), node.version)
            self._intents.put(intent_id, intent)
        return intent

    async def txn(self, path: str, *, fresh: bool) -> tuple[TxnRecord, int] | None:
        """The transaction record and its node's version; None if there is no record."""
        recorded = None if fresh else self._txns.get(path)
        if recorded is None:
            node = await look_up(self._store, path)
            if node is None:
                return None
            recorded = (records.decode_txn(node.value), node.version)
            self._txns.put(path, recorded)
        return recorded

    def needs_fold(self, topic_id: str) -> bool:
        """Whether a commit has to read the topic's head before it is tried."""
        view = self._view(topic_id)
        newest = self._newest_state(topic_id, view)
        if newest is None or newest.turn:
            return True
        return view.is_contended or view.unfolded >= UNFOLDED_MAX

    def newest_state(self, topic_id: str) -> TopicState | None:
        """The newest state in memory, None if there is no state."""
        return self._newest_state(topic_id, self._view(topic_id))

    async def is_newest(self, state: TopicState) -> bool:
        """Whether the connected replica of the store shows no later change of the topic. Raises
        StoreUnavailable."""
        try:
            node = await self._store.get(paths.topic_head(state.topic_id))
        except NoNode:
            return False
        return node.version <= state.head_version

    async def state(self, topic_id: str, *, fold: bool, fresh: bool) -> TopicState:
        """The topic's state. Without `fold` it may be the newest state in memory; with `fold` the
        log is read, and with `fresh` it is read after a sync."""
        view = self._view(topic_id)
        newest = self._newest_state(topic_id, view)
        if newest is not None and not fold:
            return newest
        folded = await self._log(topic_id).fold(fresh=fresh)
        if newest is not None and folded.head_version == newest.head_version:
            view.is_contended = False
        return _newer_state(view, folded)

    async def schema(self, topic_id: str, *, fresh: bool) -> SchemaNode:
        """The topic's schema, not older than the `state` in the topic's view. Raises
        StoreUnavailable, errors.UnsupportedFormat."""
        view = self._view(topic_id)
        if fresh or view.schema is None:
            node = await read(self._store, paths.topic_schema(topic_id))
            view.schema = SchemaNode()
            if node is not None:
                view.schema = SchemaNode(decode_head(node.value), node.version)
        return view.schema

    async def schema_versions(self, topic_id: str, head: SchemaHead) -> dict[int, SchemaVersion]:
        """All versions of columns of the topic's schema by number, also proposed versions. Raises
        StoreUnavailable, errors.UnsupportedFormat."""
        numbers = range(1, head.last + 1)
        nodes = await self._store.get_many([paths.topic_schema(topic_id, n) for n in numbers])
        version_nodes = [node for node in nodes if node is not None]
        versions = [decode_version(node.value) for node in version_nodes]
        if len(versions) < len(numbers):
            raise errors.UnsupportedFormat(
                f"the store has {len(versions)} of {len(numbers)} versions of the schema of topic"
                f" id {topic_id}"
            )
        return {v.number: v for v in versions if isinstance(v, SchemaVersion)}

    def forget_schema(self, topic_id: str) -> None:
        """Called after a write of this process changed the schema."""
        self._view(topic_id).schema = None

    def set_state(self, after: TopicState) -> None:
        """Called after a commit of this process: the topic is in this state."""
        view = self._view(after.topic_id)
        view.state = after
        view.unfolded += 1

    def set_intent(self, intent: Intent) -> None:
        """Called after this process wrote the intent."""
        self._intents.put(intent.id, intent)

    def set_txn(self, path: str, record: TxnRecord, version: int) -> None:
        """Called after this process wrote the record."""
        self._txns.put(path, (record, version))

    def note_contention(self, topic_id: str) -> None:
        """Called when another process committed to the topic."""
        self._view(topic_id).is_contended = True

    def _view(self, topic_id: str) -> _TopicView:
        view = self._topics.get(topic_id)
        if view is None:
            view = _TopicView()
            self._topics.put(topic_id, view)
        return view

    def _newest_state(self, topic_id: str, view: _TopicView) -> TopicState | None:
        """The newest state in memory: the folded state, or the state that this process computed
        after its own commits."""
        folded = self._log(topic_id).last_state
        return view.state if folded is None else _newer_state(view, folded)


def _newer_state(view: _TopicView, folded: TopicState) -> TopicState:
    """The newer of `folded` and the view's state; the view keeps the newer state. The view's state
    is newer if a commit of this process was made during the fold, or if the replica lacks such a
    commit."""
    if view.state is None or folded.head_version >= view.state.head_version:
        is_by_others = view.state is None or folded.head_version > view.state.head_version
        if is_by_others and view.schema is not None and view.schema.version is None:
            view.schema = None
        view.state, view.unfolded = folded, 0
    return view.state


def state_after(before: TopicState, commit: Commit) -> TopicState:
    """The state after the commit, without the commit's time, which the next fold adds. Raises
    errors.UnsupportedFormat for a commit that no fold could apply."""
    after = state.apply(before, before.next, commit, before.commit_ms)
    return replace(after, head_version=before.head_version + 1, turn="")


LOSSES_MAX = 5
TURN_WAIT_S_MAX = 2.0


class Turns:
    """The turns of one commit on its topics."""

    def __init__(self, store: MetadataStore, commit_id: str, topic_ids: Sequence[str]) -> None:
        self._store = store
        self._commit_id = commit_id
        self._topic_ids = sorted(topic_ids)
        self._patience_s = TURN_WAIT_S_MAX
        self._topics_with_turn: list[str] = []

    async def wait_for_others(self, topic_ids: Sequence[str]) -> None:
        """Waits while another commit has the turn on one of the topics, as long as patience lasts.
        Raises store.StoreUnavailable."""
        nodes = await call_each(self._head, sorted(topic_ids))
        for topic_id, head in zip(sorted(topic_ids), nodes, strict=True):
            if self._waits_for(head):
                await self._head_without_turn(topic_id)

    async def take(self) -> None:
        """Asks for the turn on every topic. Raises store.StoreUnavailable."""
        for topic_id in self._topic_ids:
            node = await self._head_without_turn(topic_id)
            if node is None or node[0].turn == self._commit_id:
                continue
            head, version = node
            wish = records.encode_head(replace(head, turn=self._commit_id))
            self._topics_with_turn.append(topic_id)
            with suppress(BadVersion, NoNode, OutcomeUnknown):  # without a turn, the race decides
                await self._store.set(paths.topic_head(topic_id), wish, version)

    def forget(self) -> None:
        """Called after the commit was made; its multi took the turn out of each head."""
        self._topics_with_turn.clear()

    async def give_back(self) -> None:
        """Called if the commit was not made: takes its turns out of the heads, so that no other
        commit waits for it. If the store does not respond, others wait until their patience ends.
        """
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(TURN_WAIT_S_MAX):
                for topic_id in self._topics_with_turn:
                    await self._give_back(topic_id)

    async def _give_back(self, topic_id: str) -> None:
        node = await self._head(topic_id)
        if node is not None and node[0].turn == self._commit_id:
            value = records.encode_head(replace(node[0], turn=""))
            await self._store.set(paths.topic_head(topic_id), value, node[1])

    async def _head_without_turn(self, topic_id: str) -> tuple[Head, int] | None:
        """Waits until no other commit has the topic's turn, or patience is used up. Returns the
        topic's head and the version of head; None if there is no such topic."""
        loop = asyncio.get_running_loop()
        node = await self._head(topic_id)
        while self._waits_for(node):
            changed, began_s = asyncio.Event(), loop.time()
            node = await self._head(topic_id, changed.set)
            if self._waits_for(node):
                await woken(changed, self._patience_s)
                self._patience_s -= loop.time() - began_s
                node = await self._head(topic_id)
        return node

    def _waits_for(self, node: tuple[Head, int] | None) -> bool:
        turn = "" if node is None else node[0].turn
        return turn not in ("", self._commit_id) and self._patience_s > 0

    async def _head(self, topic_id: str, watch: Watcher | None = None) -> tuple[Head, int] | None:
        try:
            node = await self._store.get(paths.topic_head(topic_id), watch)
        except NoNode:
            return None
        return records.decode_head(node.value), node.version
