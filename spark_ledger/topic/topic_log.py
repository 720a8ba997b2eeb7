"""Folding a topic's log into its state.

Always true: head is read first and the log by number, never by listing; a number below head.next
that is missing is an error, never an end (hazard 7); what was folded once is never read again.
Reads may lag behind other sessions' commits unless the fold is `fresh`; a fold never goes back.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import MetadataStore, NoNode, Versioned, Watcher
from spark_ledger.topic import records, state
from spark_ledger.topic.records import Head, Spilled, TopicLife
from spark_ledger.topic.state import TopicState
from spark_ledger.topic.store_calls import look_up

READS_AT_ONCE = 64


class TopicLog:
    """One topic's log, folded as far as this process has read it."""

    def __init__(self, store: MetadataStore, topic_id: str) -> None:
        self.store = store
        self.topic_id = topic_id
        self._head_path = paths.topic_head(topic_id)
        self._state: TopicState | None = None
        self._turn = asyncio.Lock()

    @property
    def known(self) -> TopicState | None:
        """The last folded state, from memory; it may be old. Callable from any thread."""
        return self._state

    async def fold(self, *, fresh: bool = False, watch: Watcher | None = None) -> TopicState:
        """The topic's state at the head, reading only commits not folded yet.

        `fresh` syncs first, so that every commit acknowledged before the call is seen. `watch` is
        set on head, before it is read. Deleted topics fold to a state with `deleted`.
        Raises errors.TopicNotFound, errors.UnsupportedFormat, store.StoreUnavailable.
        """
        if fresh:
            await self.store.sync(self._head_path)
        async with self._turn:
            node = await self._get(self._head_path, watch)
            head = records.decode_head(node.value)
            folded = await self._fold_to(head)
            if folded.head_version <= node.version:
                self._state = replace(
                    folded,
                    head_version=node.version,
                    deleted=head.life is TopicLife.DELETED,
                )
            else:
                self._state = folded
            return self._state

    async def watch_head(self, changed: Callable[[], None]) -> TopicState:
        """Fold, and call `changed` once after head changes or the session is in doubt."""
        return await self.fold(watch=changed)

    async def _fold_to(self, head: Head) -> TopicState:
        folded = self._state or await self._beginning()
        while folded.next < head.next:
            end = min(head.next, folded.next + READS_AT_ONCE)
            nodes = await asyncio.gather(
                *(self._commit_node(number) for number in range(folded.next, end))
            )
            for node in nodes:
                commit = records.decode_commit(node.value)
                assert not isinstance(commit, Spilled)
                folded = state.apply(folded, folded.next, commit, node.created_ms)
        return folded

    async def _beginning(self) -> TopicState:
        node = await self._get(paths.topic(self.topic_id))
        return state.empty(self.topic_id, records.decode_topic(node.value).partitions)

    async def _commit_node(self, number: int) -> Versioned:
        path = paths.topic_log(self.topic_id, number)
        node = await look_up(self.store, path)
        if node is None:
            raise errors.UnsupportedFormat(
                f"commit {number} of topic {self.topic_id} is missing below its head"
            )
        return node

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
