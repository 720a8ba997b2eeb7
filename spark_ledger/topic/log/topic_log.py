"""Folding a topic's log into its state.

Always true: head is read first and the log by number, never by listing; a number below head.next
that is missing means that a checkpoint took its place: look at head and checkpoint again, and start
there (hazard 7); still missing is an error, never an end. What was folded once is not read again,
but for the commits after a newer checkpoint, which is taken as the new root after FOLDED_MAX
commits, so that a state does not grow with its age. Reads may lag behind other sessions' commits
unless the fold is `fresh`; a fold never goes back, unless the store did: after each connection to
the store it is compared once with the commit that was folded last, which is not the same, or not
there, in an older copy of the store. Versions do not tell: the copy's may be as high again by then.

States of several topics show each commit over them in all of them or in none (T9). A reader folds
topics one after another, and a commit over two of them may come in between: then one state has it
and the other has not, and they are folded again until they agree (hazard 14). Always true: two
topics have the commits that they share in one order, so their states agree on all of them if they
agree on the last. A state keeps the last ACROSS_KEPT_MAX of these; what it may have forgotten is
taken to be in it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import MetadataStore, NoNode, Versioned, Watcher
from spark_ledger.metadata.store_calls import look_up, read
from spark_ledger.topic.log import checkpoint, records, state
from spark_ledger.topic.log.blobs import read_blob, unpack
from spark_ledger.topic.log.checkpoint import CheckpointRecord, Root, StoredRoot
from spark_ledger.topic.log.records import Commit, Head, Spilled, TopicLife
from spark_ledger.topic.log.state import ACROSS_KEPT_MAX, TopicState

READS_AT_ONCE = 64
BODIES_AT_ONCE = 4  # each of some MiB
FOLDED_MAX = 128  # two checkpoints: what a root names is dropped two checkpoints later
LOOK_AGAIN = 64
TRIES_MAX = 5


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """The newest checkpoint: its record, that node's version, its root (or, where that cannot be
    read, the root before it)."""

    record: CheckpointRecord
    version: int
    root: Root


class _Missing(Exception):
    """What should be there is not: a checkpoint took its place, or will be found to have."""


_log = logging.getLogger(__name__)


class TopicLog:
    """One topic's log, folded as far as this process has read it."""

    def __init__(self, store: MetadataStore, topic_id: str, ledgers: LedgerStore) -> None:
        self.store = store
        self.topic_id = topic_id
        self._ledgers = ledgers
        self._head_path = paths.topic_head(topic_id)
        self._state: TopicState | None = None
        self._root_next = 0
        self._looked_at = 0
        self._offered: TopicState | None = None
        self._trimmed = 0
        self._decoded: tuple[bytes, Root] | None = None
        self._next: tuple[int, Versioned] | None = None  # a commit that was read beside head
        self._last: tuple[int, str] | None = None  # number and id of the commit folded last
        self._compared = store.connections
        self.histories = 0
        """How often what was folded turned out to be of another store, which was given up."""
        self._turn = asyncio.Lock()

    @property
    def known(self) -> TopicState | None:
        """The last folded state, from memory; it may be old. Callable from any thread."""
        return self._state

    @property
    def root_next(self) -> int:
        """The first commit that the fold did not take from a checkpoint."""
        return self._root_next

    @property
    def trimmed(self) -> int:
        """Commits below it are not in the log any more; there may be more of them."""
        return self._trimmed

    @property
    def is_doubted(self) -> bool:
        """Whether the store was connected to again since it was compared with what is folded."""
        return self._compared != self.store.connections

    async def fold(
        self, *, fresh: bool = False, watch: Watcher | None = None, heard: bool = False
    ) -> TopicState:
        """The topic's state at the head, reading only commits not folded yet.

        `fresh` syncs first, so that every commit acknowledged before the call is seen. `watch` is
        set on head, before it is read. `heard`: there is a commit more, probably, which is read
        beside head. Deleted topics fold to a state with `deleted`.
        Raises errors.TopicNotFound, errors.TopicDeleted (its log is not whole any more),
        errors.UnsupportedFormat, errors.DataUnavailable, errors.DigestMismatch,
        errors.Unavailable (bodies and checkpoints), store.StoreUnavailable.
        """
        if fresh:
            await self.store.sync(self._head_path)
        async with self._turn:
            return await self._fold(watch, heard=heard, synced=fresh)

    async def fold_from_checkpoint(self) -> tuple[TopicState, Checkpointed | None]:
        """The state, folded from the newest checkpoint, and that checkpoint. Raises as `fold`."""
        await self.store.sync(self._head_path)
        async with self._turn:
            newest = await self._newest()
            if newest is not None and newest.root.state.next > self._root_next:
                self._offered = newest.root.state
            return await self._fold(None, synced=True), newest

    async def checkpointed(self) -> Checkpointed | None:
        """The newest checkpoint, None if there is none. Raises as `fold`."""
        await self.store.sync(self._head_path)
        return await self._newest()

    async def commits(self) -> AsyncIterator[tuple[int, int, Commit]]:
        """What is left of the log, oldest first: each commit's number, when the store made it (ms),
        and the commit. Nothing is folded. Raises as `fold`."""
        newest = await self.checkpointed()
        first = 0 if newest is None else newest.record.trimmed
        head = records.decode_head((await self._get(self._head_path)).value)
        for number in range(first, head.next):
            node = await read(self.store, paths.topic_log(self.topic_id, number))
            if node is not None:  # a newer checkpoint took its place otherwise
                commit = await self._commit(records.decode_commit(node.value))
                yield number, node.created_ms, commit

    def note_trimmed(self, trimmed: int) -> None:
        """Commits below `trimmed` were deleted."""
        self._trimmed = max(self._trimmed, trimmed)

    def offer(self, root: TopicState) -> None:
        """The state of a checkpoint that was published: the next fold starts there."""
        if root.next > self._root_next:
            self._offered = root

    def forget(self) -> None:
        """The metadata store went back in time: the next fold reads everything anew."""
        self.histories += 1
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._state = self._offered = self._next = self._last = None
        self._root_next = self._looked_at = self._trimmed = 0

    # -- folding ------------------------------------------------------------------------------

    async def _fold(
        self, watch: Watcher | None, *, heard: bool = False, synced: bool = False
    ) -> TopicState:
        before, connections = self._state, self.store.connections
        doubted = self.is_doubted
        if doubted and not synced:
            await self.store.sync(self._head_path)
        node, self._next = await self._head_and_next(watch, heard)
        if doubted:
            await self._compare()
            self._compared = connections
        known = self._state
        if (doubted or synced) and known is not None and node.version < known.head_version:
            self._forget(f"its head has version {node.version}, and had {known.head_version}")
        for tries in range(TRIES_MAX):
            head = records.decode_head(node.value)
            try:
                folded = await self._folded(head, look=tries > 0)
            except (_Missing, errors.NoSuchLedger) as error:
                problem = error
            else:
                self._next = None
                if self._state is None and before is not None and folded.next < before.next:
                    self.histories += 1  # found by a checkpoint
                self._state = _at_head(folded, self._state, node, head)
                return self._state
            await self.store.sync(self._head_path)
            node = await self._get(self._head_path)
        if head.life is TopicLife.DELETED:
            raise errors.TopicDeleted(f"topic {self.topic_id} was deleted", topic_id=self.topic_id)
        raise errors.UnsupportedFormat(f"topic {self.topic_id} cannot be folded: {problem}")

    async def _compare(self) -> None:
        """Whether the commit that was folded last is in the log as it was; else forget."""
        known, last = self._state, self._last
        if known is None or not known.next:
            return
        if last is None or last[0] != known.next - 1:
            self._begin_anew()  # a checkpoint had it: that is read again
            return
        node = await look_up(self.store, paths.topic_log(self.topic_id, last[0]))
        if node is None and await read(self.store, paths.topic_checkpoint(self.topic_id)):
            self._begin_anew()  # a checkpoint may have taken its place
        elif node is None or records.decode_commit(node.value).commit_id != last[1]:
            self._forget(f"its commit {last[0]} is {'gone' if node is None else 'another'}")

    def _forget(self, why: str) -> None:
        """A log never goes back in one store: this one is older, as after a restored backup.
        Nothing that was folded before holds."""
        _log.error(
            "the metadata store is an older one by the log of topic %s: %s; the topic is read anew",
            *(self.topic_id, why),
        )
        self.forget()

    async def _head_and_next(
        self, watch: Watcher | None, heard: bool
    ) -> tuple[Versioned, tuple[int, Versioned] | None]:
        """Head and, where it was `heard` that there is one, the commit that comes next."""
        known = self._state
        if known is None or not heard:
            return await self._get(self._head_path, watch), None
        path = paths.topic_log(self.topic_id, known.next)
        node, found = await asyncio.gather(
            self._get(self._head_path, watch), read(self.store, path)
        )
        return node, None if found is None else (known.next, found)

    async def _folded(self, head: Head, *, look: bool) -> TopicState:
        """The state up to head, or up to what is known if that is more."""
        known = self._state
        begin, root_next = await self._begin(head, look=look)
        end = max(head.next, 0 if known is None else known.next)
        if begin.next > end:
            raise _Missing(f"head is at {head.next}, the checkpoint at {begin.next}")
        folded = await self._applied(begin, end)
        self._root_next = root_next
        return folded

    async def _begin(self, head: Head, *, look: bool) -> tuple[TopicState, int]:
        """The state to fold on, and where its root is."""
        known, offered = self._state, self._offered
        grown = head.next - max(self._root_next, self._looked_at - FOLDED_MAX + LOOK_AGAIN)
        if offered is not None and offered.next > self._root_next:
            self._offered = None
            return offered, offered.next
        if known is None or look or grown > FOLDED_MAX:
            self._looked_at = head.next
            newest = await self._newest()
            if newest is not None and newest.root.state.next > self._root_next:
                return newest.root.state, newest.root.state.next
        if known is not None:
            return known, self._root_next
        node = await self._get(paths.topic(self.topic_id))
        return state.empty(self.topic_id, records.decode_topic(node.value).partitions), 0

    async def _applied(self, folded: TopicState, end: int) -> TopicState:
        while folded.next < end:
            last = min(end, folded.next + READS_AT_ONCE)
            nodes = await asyncio.gather(
                *(self._commit_node(number) for number in range(folded.next, last))
            )
            bodies = [records.decode_commit(node.value) for node in nodes]
            for at in range(0, len(bodies), BODIES_AT_ONCE):
                some = bodies[at : at + BODIES_AT_ONCE]
                commits = await asyncio.gather(*map(self._commit, some))
                for commit, node in zip(commits, nodes[at:], strict=False):
                    folded = state.apply(folded, folded.next, commit, node.created_ms)
            if bodies:
                self._last = folded.next - 1, bodies[-1].commit_id
        return folded

    async def _commit_node(self, number: int) -> Versioned:
        if self._next is not None and self._next[0] == number:
            return self._next[1]
        path = paths.topic_log(self.topic_id, number)
        node = await look_up(self.store, path)
        if node is None:
            raise _Missing(f"commit {number} is missing below its head")
        return node

    async def _commit(self, found: Commit | Spilled) -> Commit:
        if isinstance(found, Commit):
            return found
        body = records.decode_commit(unpack(await read_blob(self._ledgers, found.body)))
        if isinstance(body, Spilled) or body.commit_id != found.commit_id:
            raise errors.UnsupportedFormat(f"ledger {found.body.ledger_id} has another body")
        return replace(body, body_ledger=found.body.ledger_id)

    # -- the checkpoint -----------------------------------------------------------------------

    async def _newest(self) -> Checkpointed | None:
        node = await read(self.store, paths.topic_checkpoint(self.topic_id))
        if node is None:  # or not seen yet: then a commit is missing, and the fold syncs
            return None
        record = checkpoint.decode_record(node.value)
        self.note_trimmed(record.trimmed)
        try:
            root = await self._root(record.root)
        except (errors.DataUnavailable, errors.DigestMismatch, errors.UnsupportedFormat):
            if record.previous_root is None:
                raise
            root = await self._root(record.previous_root)  # the log goes back to it
        return Checkpointed(record, node.version, root)

    async def _root(self, stored: StoredRoot) -> Root:
        value = stored if isinstance(stored, bytes) else await read_blob(self._ledgers, stored)
        known = self._decoded
        if known is None or known[0] != value:  # frequent looks mostly find the same
            known = self._decoded = (value, checkpoint.decode_root(value))
        return known[1]

    async def _get(self, path: str, watch: Watcher | None = None) -> Versioned:
        try:
            return await self.store.get(path, watch)
        except NoNode:
            node = await look_up(self.store, path)
        if node is None:
            raise errors.TopicNotFound(
                f"there is no topic with id {self.topic_id}", topic_id=self.topic_id
            )
        return node


def _at_head(
    folded: TopicState, known: TopicState | None, node: Versioned, head: Head
) -> TopicState:
    """The state with what head says, or what was known of it if that is newer."""
    if known is not None and node.version < known.head_version:
        return replace(
            folded, head_version=known.head_version, deleted=known.deleted, turn=known.turn
        )
    deleted = head.life is TopicLife.DELETED
    return replace(folded, head_version=node.version, deleted=deleted, turn=head.turn)


FOLDS_MAX = 50


def agree(states: Iterable[TopicState]) -> bool:
    """Whether every commit over several topics is in all of these states or in none."""
    return not torn(states)


def torn(states: Iterable[TopicState]) -> list[str]:
    """The topics, by id, of which one has a commit that it shares with the other, which has not."""
    by_id = {one.topic_id: one for one in states}
    last = {
        (topic_id, other): shared.commit_id
        for topic_id, one in by_id.items()
        for shared in one.across
        for other in shared.others
        if other in by_id
    }
    found: dict[str, None] = {}
    for (topic_id, other), commit_id in last.items():
        seen = last.get((other, topic_id))
        forgotten = seen is None and len(by_id[other].across) >= ACROSS_KEPT_MAX
        if seen != commit_id and not forgotten:
            found |= dict.fromkeys((topic_id, other))
    return sorted(found)


async def fold_agreeing(logs: Sequence[TopicLog], *, fresh: bool = True) -> list[TopicState]:
    """The topics' states at one moment, as far as commits over several of them go.

    Raises as TopicLog.fold; errors.Unavailable when no such moment was met in FOLDS_MAX folds.
    """
    folded = await asyncio.gather(*(log.fold(fresh=fresh) for log in logs))
    states = {one.topic_id: one for one in folded}
    for _ in range(FOLDS_MAX):
        late = torn(states.values())
        if not late:
            return [states[log.topic_id] for log in logs]
        again = [log for log in logs if log.topic_id in late]
        folded = await asyncio.gather(*(log.fold(fresh=True) for log in again))
        states |= {one.topic_id: one for one in folded}
    raise errors.Unavailable(
        f"{len(logs)} topics are committed to together faster than they can be read"
    )
