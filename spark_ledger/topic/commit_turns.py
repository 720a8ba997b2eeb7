"""Turns: a commit that lost again and again asks the others to let it go first (hazard 13).

A commit over 40 busy topics has to win 40 races at once. After LOSSES_MAX losses it writes its id
into the head of each of its topics, in the order of topic ids, which changes nothing but the head's
version: whoever was about to commit loses, looks, and sees whose turn it is. Always true: a turn is
a wish; each commit waits TURN_WAIT_S_MAX for all turns together and then goes on; the next commit
to the topic takes the turn out of head. Safety stays with compare-and-set, and topics taken in one
order cannot dead-lock.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from spark_ledger.metadata import paths
from spark_ledger.metadata.store import (
    BadVersion,
    MetadataStore,
    NoNode,
    OutcomeUnknown,
    StoreError,
    Watcher,
)
from spark_ledger.topic import records
from spark_ledger.topic.records import Head
from spark_ledger.topic.store_calls import each

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
        """The commit was not made: nobody need wait for it. Who cannot be told waits."""
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
        """The topic's head once it is nobody else's turn there, or patience is used up; None where
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
