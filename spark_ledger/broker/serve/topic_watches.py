"""The watches of lists of topics that one client has.

Always true: a client gets the changes of a list in their order, each once, and after the list.
While a connection has no room, no change is sent; what happened meanwhile becomes one change.
"""

import asyncio
from typing import Any

from spark_ledger.broker.topic_lists import MatchingTopics, TopicLists
from spark_ledger.broker.wire.commands import Refusal, ServerError, command
from spark_ledger.broker.wire.frames import encode
from spark_ledger.broker.wire.link import Link

NAMES_AT_ONCE = 5_000
"""More names of a change go into further frames: a name has some 620 bytes at most."""


class TopicWatches:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._tasks: dict[int, asyncio.Task[None] | None] = {}
        """By the client's number of the watch; None: the watch is being opened."""

    async def open(self, lists: TopicLists, part: Any) -> MatchingTopics:
        """The list, whose changes are sent from now on. A watch of this number ends. Raises as
        TopicLists.watch."""
        self.close(part.watcher_id)
        self._tasks[part.watcher_id] = None
        try:
            matching = await lists.watch(part.namespace, part.topics_pattern)
        except BaseException:
            self.close(part.watcher_id)
            raise
        if self._tasks.get(part.watcher_id, self) is not None or not self._link.open:
            lists.leave(matching)
            message = f"the watch {part.watcher_id} was closed before it was made"
            raise Refusal(ServerError.SERVICE_NOT_READY, message)
        sending = self._send_changes(part.watcher_id, matching, matching.topics)
        task = self._tasks[part.watcher_id] = asyncio.get_running_loop().create_task(sending)
        task.add_done_callback(lambda _: lists.leave(matching))
        return matching

    def close(self, watcher_id: int) -> None:
        task = self._tasks.pop(watcher_id, None)
        if task is not None:
            task.cancel()

    def close_all(self) -> None:
        for watcher_id in list(self._tasks):
            self.close(watcher_id)

    async def _send_changes(
        self, watcher_id: int, matching: MatchingTopics, sent: list[str]
    ) -> None:
        while True:
            await matching.change_since(sent)
            await self._link.room()
            change, sent = await matching.change_since(sent), matching.topics
            for first in range(0, max(len(change.new), len(change.deleted)), NAMES_AT_ONCE):
                update = command(
                    "watch_topic_update",
                    watcher_id=watcher_id,
                    new_topics=change.new[first : first + NAMES_AT_ONCE],
                    deleted_topics=change.deleted[first : first + NAMES_AT_ONCE],
                    topics_hash=matching.hash,
                )
                self._link.send(encode(update))
