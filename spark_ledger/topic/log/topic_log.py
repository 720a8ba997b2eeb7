"""Folding a topic's log into its state.

Always true: head is read first, and then the log by number, never by listing. If a commit below
head.next is missing, a checkpoint took its place: the fold reads head and checkpoint again, and
starts at the checkpoint (hazard 7). If the commit is still missing, the fold raises an error: a
missing commit is never the log's end. A folded commit is not read again, with one exception: after
FOLDED_MAX commits the fold takes a newer checkpoint as its root and reads the commits after that
checkpoint, so that a state does not grow with its age.

Reads may lag behind other sessions' commits unless the fold is `fresh`. A fold never goes back,
unless the store went back: after each connection the log in the store is compared once with the
commit that was folded last. In an older copy of the store this commit differs or is missing; the
version of a node does not show an older copy, because this version may have grown as high again.

In the states of several topics a shared commit is in all states or in none (T9). A reader folds
topics one after another, and a commit over two topics may come in between: then one state has the
commit and the other lacks the commit, and both topics are folded again until the states agree
(hazard 14). Always true: the logs of two topics have their shared commits in the same order, so if
their states agree on the last shared commit, they agree on all. A state keeps its last
SHARED_COMMITS_MAX shared commits; a commit that it may have forgotten counts as present.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import MetadataStore, NoNode, Versioned, Watcher
from spark_ledger.metadata.store_calls import look_up, read
from spark_ledger.topic.log import checkpoint, records, state
from spark_ledger.topic.log.blobs import read_blob, unpack
from spark_ledger.topic.log.checkpoint import CheckpointRecord, Root, StoredRoot
from spark_ledger.topic.log.records import Commit, Head, SpilledBody, TopicLife
from spark_ledger.topic.log.state import SHARED_COMMITS_MAX, TopicState

READS_AT_ONCE = 64
BODIES_AT_ONCE = 4  # each of some MiB
FOLDED_MAX = 128  # commits of two checkpoints: a root's ledgers are dropped two checkpoints later
LOOK_AGAIN_COMMITS = 64  # after a look for a newer checkpoint, until the next look
TRIES_MAX = 5


@dataclass(frozen=True, slots=True)
class NewestCheckpoint:
    """The newest checkpoint: its record, the version of the record's node, and its root (or the
    previous checkpoint's root, if the newest root cannot be read)."""

    record: CheckpointRecord
    version: int
    root: Root


class _CommitMissing(Exception):
    """A commit is missing: a checkpoint took its place, but this process may not see the checkpoint
    yet."""


_log = logging.getLogger(__name__)


class LoggedCommit(NamedTuple):
    """A commit in the log; `created_ms`: when the store made its node."""

    number: int
    created_ms: int
    commit: Commit


class TopicLog:
    """One topic's log, folded as far as this process has read it."""

    def __init__(self, store: MetadataStore, topic_id: str, ledgers: LedgerStore) -> None:
        self.store = store
        self.topic_id = topic_id
        self._ledgers = ledgers
        self._head_path = paths.topic_head(topic_id)
        self._state: TopicState | None = None
        self._checkpoint_end = 0
        self._next_at_last_look = 0  # `head.next` when the fold last looked for a checkpoint
        self._offered_root: TopicState | None = None
        self._trimmed = 0
        self._decoded_root: tuple[bytes, Root] | None = None
        self._next: tuple[int, Versioned] | None = None  # a commit that was read beside head
        self._last: tuple[int, str] | None = None  # number and id of the commit folded last
        self._compared_connections = store.connections
        self.history_number = 0
        """Counted up when the log drops its folded state because the metadata store went back."""
        self._lock = asyncio.Lock()

    @property
    def last_state(self) -> TopicState | None:
        """The last folded state, which may be old; does not read. Any thread may call this."""
        return self._state

    @property
    def checkpoint_end(self) -> int:
        """The first commit that the fold did not take from a checkpoint."""
        return self._checkpoint_end

    @property
    def trimmed(self) -> int:
        """Commits below this number are not in the log any more; a newer checkpoint may have
        replaced more commits."""
        return self._trimmed

    @property
    def is_doubted(self) -> bool:
        """Whether a new connection was made since the store was compared with the folded state."""
        return self._compared_connections != self.store.connections

    async def fold(
        self, *, fresh: bool = False, watch: Watcher | None = None, commit_expected: bool = False
    ) -> TopicState:
        """The topic's state at the head; reads only commits that are not folded yet.

        `fresh` syncs first, so that the state has every commit acknowledged before the call.
        `watch` is set on head, before head is read. `commit_expected`: there probably is a new
        commit, which is read together with head. A deleted topic has a state with `deleted`.
        Raises errors.TopicNotFound, errors.TopicDeleted (commits are missing from the log),
        errors.UnsupportedFormat, errors.DataUnavailable, errors.DigestMismatch,
        errors.Unavailable (bodies and checkpoints), store.StoreUnavailable.
        """
        if fresh:
            await self.store.sync(self._head_path)
        async with self._lock:
            return await self._fold(watch, commit_expected=commit_expected, synced=fresh)

    async def fold_from_checkpoint(self) -> tuple[TopicState, NewestCheckpoint | None]:
        """The state, folded from the newest checkpoint, and that checkpoint. Raises as `fold`."""
        await self.store.sync(self._head_path)
        async with self._lock:
            newest = await self._read_checkpoint()
            if newest is not None and newest.root.state.next > self._checkpoint_end:
                self._offered_root = newest.root.state
            return await self._fold(None, synced=True), newest

    async def newest_checkpoint(self) -> NewestCheckpoint | None:
        """The newest checkpoint, None if there is no checkpoint. Raises as `fold`."""
        await self.store.sync(self._head_path)
        return await self._read_checkpoint()

    async def commits(self) -> AsyncIterator[LoggedCommit]:
        """The commits that are in the log, oldest first. Does not fold them. Raises as `fold`."""
        newest = await self.newest_checkpoint()
        first = 0 if newest is None else newest.record.trimmed
        head = records.decode_head((await self._get(self._head_path)).value)
        for number in range(first, head.next):
            node = await read(self.store, paths.topic_log(self.topic_id, number))
            if node is not None:  # otherwise a newer checkpoint took the commit's place
                commit = await self._commit(records.decode_commit(node.value))
                yield LoggedCommit(number, node.created_ms, commit)

    def note_trimmed(self, trimmed: int) -> None:
        """Notes that commits below `trimmed` were deleted."""
        self._trimmed = max(self._trimmed, trimmed)

    def start_next_fold_at(self, root: TopicState) -> None:
        """Offers the state of a published checkpoint: the next fold starts at this state."""
        if root.next > self._checkpoint_end:
            self._offered_root = root

    def forget(self) -> None:
        """Drops the folded state, as the metadata store went back in time: the next fold reads
        everything again."""
        self.history_number += 1
        self._drop_state()

    def _drop_state(self) -> None:
        self._state = self._offered_root = self._next = self._last = None
        self._checkpoint_end = self._next_at_last_look = self._trimmed = 0

    # -- folding ------------------------------------------------------------------------------

    async def _fold(
        self, watch: Watcher | None, *, commit_expected: bool = False, synced: bool = False
    ) -> TopicState:
        state_before, connections = self._state, self.store.connections
        is_doubted = self.is_doubted
        if is_doubted and not synced:
            await self.store.sync(self._head_path)
        node, self._next = await self._head_and_next(watch, commit_expected)
        if is_doubted:
            await self._compare()
            self._compared_connections = connections
        last = self._state
        if (is_doubted or synced) and last is not None and node.version < last.head_version:
            self._note_older_store(
                f"its head has version {node.version}, and had {last.head_version}"
            )
        for tries in range(TRIES_MAX):
            head = records.decode_head(node.value)
            try:
                folded = await self._fold_to(head, read_checkpoint=tries > 0)
            except (_CommitMissing, errors.NoSuchLedger) as error:
                problem = error
            else:
                self._next = None
                if (
                    self._state is None
                    and state_before is not None
                    and folded.next < state_before.next
                ):
                    self.history_number += 1  # the checkpoint shows that the store went back
                self._state = _at_head(folded, self._state, node, head)
                return self._state
            await self.store.sync(self._head_path)
            node = await self._get(self._head_path)
        if head.life is TopicLife.DELETED:
            raise errors.TopicDeleted(f"topic {self.topic_id} was deleted", topic_id=self.topic_id)
        raise errors.UnsupportedFormat(f"topic {self.topic_id} cannot be folded: {problem}")

    async def _compare(self) -> None:
        """Forgets the folded state, unless the log has the commit that was folded last, with the
        id that was folded."""
        folded, last = self._state, self._last
        if folded is None or not folded.next:
            return
        if last is None or last[0] != folded.next - 1:
            self._drop_state()  # a checkpoint had that commit: the fold reads the checkpoint again
            return
        node = await look_up(self.store, paths.topic_log(self.topic_id, last[0]))
        if node is None and await read(self.store, paths.topic_checkpoint(self.topic_id)):
            self._drop_state()  # a checkpoint may have taken the commit's place
        elif node is None or records.decode_commit(node.value).commit_id != last[1]:
            self._note_older_store(
                f"its commit {last[0]} is {'missing' if node is None else 'another commit'}"
            )

    def _note_older_store(self, why: str) -> None:
        """Forgets the folded state. In one store a log never goes back, so this store is an older
        copy, such as a restored backup, and the folded state does not fit its log."""
        _log.error(
            "the metadata store is an older one by the log of topic %s: %s; the topic is read anew",
            *(self.topic_id, why),
        )
        self.forget()

    async def _head_and_next(
        self, watch: Watcher | None, commit_expected: bool
    ) -> tuple[Versioned, tuple[int, Versioned] | None]:
        """Head, and with `commit_expected` the next commit, if the log has it."""
        folded = self._state
        if folded is None or not commit_expected:
            return await self._get(self._head_path, watch), None
        path = paths.topic_log(self.topic_id, folded.next)
        node, commit = await asyncio.gather(
            self._get(self._head_path, watch), read(self.store, path)
        )
        return node, None if commit is None else (folded.next, commit)

    async def _fold_to(self, head: Head, *, read_checkpoint: bool) -> TopicState:
        """The state up to head, or up to the last folded state if this state has more commits."""
        last = self._state
        base, checkpoint_end = await self._fold_base(head, read_checkpoint=read_checkpoint)
        end = max(head.next, 0 if last is None else last.next)
        if base.next > end:
            raise _CommitMissing(f"head is at {head.next}, the checkpoint at {base.next}")
        folded = await self._apply_commits(base, end)
        self._checkpoint_end = checkpoint_end
        return folded

    async def _fold_base(self, head: Head, *, read_checkpoint: bool) -> tuple[TopicState, int]:
        """The state to which the next commits are applied, and the number of the first commit after
        the state's root."""
        folded, offered = self._state, self._offered_root
        grown = head.next - max(
            self._checkpoint_end, self._next_at_last_look - FOLDED_MAX + LOOK_AGAIN_COMMITS
        )
        if offered is not None and offered.next > self._checkpoint_end:
            self._offered_root = None
            return offered, offered.next
        if folded is None or read_checkpoint or grown > FOLDED_MAX:
            self._next_at_last_look = head.next
            newest = await self._read_checkpoint()
            if newest is not None and newest.root.state.next > self._checkpoint_end:
                return newest.root.state, newest.root.state.next
        if folded is not None:
            return folded, self._checkpoint_end
        node = await self._get(paths.topic(self.topic_id))
        return state.empty(self.topic_id, records.decode_topic(node.value).partitions), 0

    async def _apply_commits(self, folded: TopicState, end: int) -> TopicState:
        while folded.next < end:
            last = min(end, folded.next + READS_AT_ONCE)
            nodes = await asyncio.gather(
                *(self._commit_node(number) for number in range(folded.next, last))
            )
            bodies = [records.decode_commit(node.value) for node in nodes]
            for at in range(0, len(bodies), BODIES_AT_ONCE):
                batch = bodies[at : at + BODIES_AT_ONCE]
                commits = await asyncio.gather(*map(self._commit, batch))
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
            raise _CommitMissing(f"commit {number} is missing below its head")
        return node

    async def _commit(self, node: Commit | SpilledBody) -> Commit:
        if isinstance(node, Commit):
            return node
        body = records.decode_commit(unpack(await read_blob(self._ledgers, node.body)))
        if isinstance(body, SpilledBody) or body.commit_id != node.commit_id:
            raise errors.UnsupportedFormat(f"ledger {node.body.ledger_id} has another body")
        return replace(body, body_ledger=node.body.ledger_id)

    # -- the checkpoint -----------------------------------------------------------------------

    async def _read_checkpoint(self) -> NewestCheckpoint | None:
        node = await read(self.store, paths.topic_checkpoint(self.topic_id))
        if node is None:  # if this read lags, the fold misses a commit, syncs and reads again
            return None
        record = checkpoint.decode_record(node.value)
        self.note_trimmed(record.trimmed)
        try:
            root = await self._root(record.root)
        except (errors.DataUnavailable, errors.DigestMismatch, errors.UnsupportedFormat):
            if record.previous_root is None:
                raise
            root = await self._root(record.previous_root)  # the log has all commits after it
        return NewestCheckpoint(record, node.version, root)

    async def _root(self, stored: StoredRoot) -> Root:
        value = stored if isinstance(stored, bytes) else await read_blob(self._ledgers, stored)
        decoded = self._decoded_root
        if decoded is None or decoded[0] != value:  # frequent reads mostly return the same root
            decoded = self._decoded_root = (value, checkpoint.decode_root(value))
        return decoded[1]

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
    folded: TopicState, last: TopicState | None, node: Versioned, head: Head
) -> TopicState:
    """The state with the values of head, or of the last state if the last state is newer."""
    if last is not None and node.version < last.head_version:
        return replace(folded, head_version=last.head_version, deleted=last.deleted, turn=last.turn)
    deleted = head.life is TopicLife.DELETED
    return replace(folded, head_version=node.version, deleted=deleted, turn=head.turn)


FOLDS_MAX = 50


def states_agree(states: Iterable[TopicState]) -> bool:
    """Whether every shared commit is in the states of all its topics or in none."""
    return not disagreeing_topics(states)


def disagreeing_topics(states: Iterable[TopicState]) -> list[str]:
    """The ids of topics whose states disagree: a commit over two topics is in the state of one
    topic and missing from the state of the other."""
    by_id = {state.topic_id: state for state in states}
    last = {
        (topic_id, other): shared.commit_id
        for topic_id, state in by_id.items()
        for shared in state.shared_commits
        for other in shared.others
        if other in by_id
    }
    disagreeing: dict[str, None] = {}
    for (topic_id, other), commit_id in last.items():
        other_id = last.get((other, topic_id))
        is_forgotten = other_id is None and len(by_id[other].shared_commits) >= SHARED_COMMITS_MAX
        if other_id != commit_id and not is_forgotten:
            disagreeing |= dict.fromkeys((topic_id, other))
    return sorted(disagreeing)


async def fold_agreeing(logs: Sequence[TopicLog], *, fresh: bool = True) -> list[TopicState]:
    """The topics' states, folded until each shared commit is in all of them or in none.

    Raises as TopicLog.fold; errors.Unavailable if the states disagree after FOLDS_MAX folds.
    """
    folded = await asyncio.gather(*(log.fold(fresh=fresh) for log in logs))
    states = {state.topic_id: state for state in folded}
    for _ in range(FOLDS_MAX):
        disagreeing = disagreeing_topics(states.values())
        if not disagreeing:
            return [states[log.topic_id] for log in logs]
        behind = [log for log in logs if log.topic_id in disagreeing]
        folded = await asyncio.gather(*(log.fold(fresh=True) for log in behind))
        states |= {state.topic_id: state for state in folded}
    raise errors.Unavailable(
        f"commits over several of {len(logs)} topics came faster than the topics could be read"
    )
