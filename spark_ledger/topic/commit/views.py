"""What this process last saw of all that its commits depend on: so most cost one write, no read.

Always true: nothing here decides alone. A commit's multi checks the version of each thing that was
looked at, so an old view loses the race and changes nothing; whoever is refused by a view that was
not read after a sync looks again. After an own commit the next view is computed, not read: a write
raises a node's version by one, and whoever else wrote made it rise further. Only the time of an own
commit is not known until the log is folded; no guard asks for it.

And turns: a commit that lost again and again asks the others to let it go first (hazard 13). A
commit over 40 busy topics has to win 40 races at once. After LOSSES_MAX losses it writes its id
into the head of each of its topics, in the order of topic ids, which changes nothing but the head's
version: whoever was about to commit loses, looks, and sees whose turn it is. Always true: a turn is
a wish; each commit waits TURN_WAIT_S_MAX for all turns together and then goes on; the next commit
to the topic takes the turn out of head. Safety stays with compare-and-set, and topics taken in one
order cannot dead-lock.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import (
    BadVersion,
    MetadataStore,
    NoNode,
    OutcomeUnknown,
    StoreError,
    Watcher,
)
from spark_ledger.metadata.store_calls import each, look_up, read
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

T = TypeVar("T")

KEPT_MAX = 256
"""Intents and transaction records, of 64 KiB at most each, and topics."""
UNFOLDED_MAX = 64
"""Own commits on top of a folded state; each is in memory twice until it is folded."""


class _Newest(Generic[T]):
    """The values that were used last, KEPT_MAX of them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, T] = OrderedDict()

    def get(self, key: str) -> T | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: str, value: T) -> None:
        self._kept[key] = value
        self._kept.move_to_end(key)
        if len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)


@dataclass(frozen=True, slots=True)
class SchemaNode:
    """A topic's schema; `version` is that of its node, None: there is none."""

    head: SchemaHead = field(default_factory=SchemaHead)
    version: int | None = None


@dataclass(slots=True)
class _TopicView:
    """`unfolded` own commits are in `state` that no fold has read. `contended`: others commit to
    the topic too, so head is worth a read before a multi that would lose. `schema`: the node, None
    until it is asked for; what it says may come into force only with a new version of head, so one
    that was absent is asked for again when others have committed."""

    state: TopicState | None = None
    unfolded: int = 0
    contended: bool = False
    schema: SchemaNode | None = None


class CommitViews:
    """Of one process and store."""

    def __init__(self, store: MetadataStore, log: Callable[[str], TopicLog]) -> None:
        self._store = store
        self._log = log
        self._intents: _Newest[Intent] = _Newest()
        self._txns: _Newest[tuple[TxnRecord, int]] = _Newest()
        self._topics: _Newest[_TopicView] = _Newest()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def one_at_a_time(self, name: str) -> asyncio.Lock:
        """Commits of this process that depend on the same thing are made one after another."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    async def intent(self, intent_id: str, *, fresh: bool) -> Intent:
        """Raises errors.LedgerFenced when there is none."""
        known = None if fresh else self._intents.get(intent_id)
        if known is None:
            node = await look_up(self._store, paths.intent(intent_id))
            if node is None:
                raise errors.LedgerFenced(f"there is no intent {intent_id}")
            known = Intent(intent_id, records.decode_intent(node.value), node.version)
            self._intents.put(intent_id, known)
        return known

    async def txn(self, path: str, *, fresh: bool) -> tuple[TxnRecord, int] | None:
        """The transaction record and its node's version, None where there is none."""
        known = None if fresh else self._txns.get(path)
        if known is None:
            node = await look_up(self._store, path)
            if node is None:
                return None
            known = (records.decode_txn(node.value), node.version)
            self._txns.put(path, known)
        return known

    def needs_fold(self, topic_id: str) -> bool:
        """Whether the topic's head is to be read before a commit is tried."""
        view = self._view(topic_id)
        known = self._known(topic_id, view)
        if known is None or known.turn:
            return True
        return view.contended or view.unfolded >= UNFOLDED_MAX

    def known(self, topic_id: str) -> TopicState | None:
        """The newest state that is in memory."""
        return self._known(topic_id, self._view(topic_id))

    async def is_newest(self, known: TopicState) -> bool:
        """Whether nobody has changed the topic since, as far as the replica has heard. Raises
        StoreUnavailable."""
        try:
            node = await self._store.get(paths.topic_head(known.topic_id))
        except NoNode:
            return False
        return node.version <= known.head_version

    async def state(self, topic_id: str, *, fold: bool, fresh: bool) -> TopicState:
        """The topic as it is now, or as it was when this process last looked or committed."""
        view = self._view(topic_id)
        known = self._known(topic_id, view)
        if known is not None and not fold:
            return known
        folded = await self._log(topic_id).fold(fresh=fresh)
        if known is not None and folded.head_version == known.head_version:
            view.contended = False
        return _taken(view, folded)

    async def schema(self, topic_id: str, *, fresh: bool) -> SchemaNode:
        """The topic's schema, not older than `state` of it. Raises StoreUnavailable,
        errors.UnsupportedFormat."""
        view = self._view(topic_id)
        if fresh or view.schema is None:
            node = await read(self._store, paths.topic_schema(topic_id))
            view.schema = SchemaNode()
            if node is not None:
                view.schema = SchemaNode(decode_head(node.value), node.version)
        return view.schema

    async def schema_versions(self, topic_id: str, head: SchemaHead) -> dict[int, SchemaVersion]:
        """The versions of the topic's schema by number, proposed ones too. Raises
        StoreUnavailable, errors.UnsupportedFormat."""
        numbers = range(1, head.last + 1)
        nodes = await self._store.get_many([paths.topic_schema(topic_id, n) for n in numbers])
        there = [node for node in nodes if node is not None]
        versions = [decode_version(node.value) for node in there]
        if len(versions) < len(numbers):
            raise errors.UnsupportedFormat(
                f"{len(versions)} of {len(numbers)} versions of the schema of topic id {topic_id}"
                " are there"
            )
        return {version.number: version for version in versions}

    def forget_schema(self, topic_id: str) -> None:
        """An own write changed it."""
        self._view(topic_id).schema = None

    def state_is(self, after: TopicState) -> None:
        """An own commit made it so."""
        view = self._view(after.topic_id)
        view.state = after
        view.unfolded += 1

    def intent_is(self, intent: Intent) -> None:
        """An own write made it so."""
        self._intents.put(intent.id, intent)

    def txn_is(self, path: str, record: TxnRecord, version: int) -> None:
        """An own write made it so."""
        self._txns.put(path, (record, version))

    def lost(self, topic_id: str) -> None:
        """Another committed to the topic."""
        self._view(topic_id).contended = True

    def _view(self, topic_id: str) -> _TopicView:
        view = self._topics.get(topic_id)
        if view is None:
            view = _TopicView()
            self._topics.put(topic_id, view)
        return view

    def _known(self, topic_id: str, view: _TopicView) -> TopicState | None:
        """The newest state in memory; a fold that caught up takes the place of own commits."""
        folded = self._log(topic_id).known
        return view.state if folded is None else _taken(view, folded)


def _taken(view: _TopicView, folded: TopicState) -> TopicState:
    """The newer one: an own commit that the replica has not, or that came during the fold, will
    lose or be right."""
    if view.state is None or folded.head_version >= view.state.head_version:
        others = view.state is None or folded.head_version > view.state.head_version
        if others and view.schema is not None and view.schema.version is None:
            view.schema = None
        view.state, view.unfolded = folded, 0
    return view.state


def following(before: TopicState, commit: Commit) -> TopicState:
    """The state once the commit follows on it; its times are filled in by the next fold.
    Raises errors.UnsupportedFormat for a commit that could not be folded."""
    after = state.apply(before, before.next, commit, before.commit_ms)
    return replace(after, head_version=before.head_version + 1, turn="")


LOSSES_MAX = 5
TURN_WAIT_S_MAX = 2.0


class Turns:
    """Of one commit over these topics."""

    def __init__(self, store: MetadataStore, commit_id: str, topic_ids: Sequence[str]) -> None:
        self._store = store
        self._commit_id = commit_id
        self._topic_ids = sorted(topic_ids)
        self._patience_s = TURN_WAIT_S_MAX
        self._taken: list[str] = []

    async def let_others_go(self, topic_ids: Sequence[str]) -> None:
        """Wait while it is another commit's turn on one of the topics, as long as patience lasts.
        Raises store.StoreUnavailable."""
        heads = await each(self._head, sorted(topic_ids))
        for topic_id, head in zip(sorted(topic_ids), heads, strict=True):
            if self._waits_for(head):
                await self._free_head(topic_id)

    async def take(self) -> None:
        """Ask for the turn on every topic. Raises store.StoreUnavailable."""
        for topic_id in self._topic_ids:
            found = await self._free_head(topic_id)
            if found is None or found[0].turn == self._commit_id:
                continue
            head, version = found
            wish = records.encode_head(replace(head, turn=self._commit_id))
            self._taken.append(topic_id)
            with suppress(BadVersion, NoNode, OutcomeUnknown):  # the race decides, as ever
                await self._store.set(paths.topic_head(topic_id), wish, version)

    def used(self) -> None:
        """The commit was made, which took the turn out of each head."""
        self._taken.clear()

    async def give_back(self) -> None:
        """The commit was not made: no other need wait for it. One that cannot be told waits."""
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(TURN_WAIT_S_MAX):
                for topic_id in self._taken:
                    await self._give_back(topic_id)

    async def _give_back(self, topic_id: str) -> None:
        found = await self._head(topic_id)
        if found is not None and found[0].turn == self._commit_id:
            free = records.encode_head(replace(found[0], turn=""))
            await self._store.set(paths.topic_head(topic_id), free, found[1])

    async def _free_head(self, topic_id: str) -> tuple[Head, int] | None:
        """The topic's head once no other has the turn there, or patience is used up; None where
        there is no topic."""
        loop = asyncio.get_running_loop()
        found = await self._head(topic_id)
        while self._waits_for(found):
            changed, began_s = asyncio.Event(), loop.time()
            found = await self._head(topic_id, changed.set)
            if self._waits_for(found):
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._patience_s):
                        await changed.wait()
                self._patience_s -= loop.time() - began_s
                found = await self._head(topic_id)
        return found

    def _waits_for(self, found: tuple[Head, int] | None) -> bool:
        turn = "" if found is None else found[0].turn
        return turn not in ("", self._commit_id) and self._patience_s > 0

    async def _head(self, topic_id: str, watch: Watcher | None = None) -> tuple[Head, int] | None:
        try:
            node = await self._store.get(paths.topic_head(topic_id), watch)
        except NoNode:
            return None
        return records.decode_head(node.value), node.version
