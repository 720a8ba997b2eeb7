"""The watches of lists of topics that one client has.

Always true: a client gets the list, and then its changes in their order, each once. While a
connection has no room, no change is sent; the changes of this time are then sent as one change.
"""

import asyncio
from typing import Any

from spark_ledger.broker.topic_lists import MatchingTopics, TopicLists
from spark_ledger.broker.wire.commands import Refusal, ServerError, command
from spark_ledger.broker.wire.frames import encode
from spark_ledger.broker.wire.link import Link

NAMES_AT_ONCE = 5_000
"""How many names one frame has at most; further names of a change go into further frames. A name
has some 620 bytes at most."""


class TopicWatches:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._tasks: dict[int, asyncio.Task[None] | None] = {}
        """By the client's number of the watch; None: the watch is being opened."""

    async def open(self, lists: TopicLists, request: Any) -> MatchingTopics:
        """The list; from now on its changes are sent. An earlier watch of this number ends. Raises
        as TopicLists.watch."""
        self.close(request.watcher_id)
        self._tasks[request.watcher_id] = None
        try:
            matching = await lists.watch(request.namespace, request.topics_pattern)
        except BaseException:
            self.close(request.watcher_id)
            raise
        if self._tasks.get(request.watcher_id, self) is not None or not self._link.open:
            lists.leave(matching)
            message = f"the watch {request.watcher_id} was closed before it was made"
            raise Refusal(ServerError.SERVICE_NOT_READY, message)
        sending = self._send_changes(request.watcher_id, matching, matching.topics)
        task = self._tasks[request.watcher_id] = asyncio.get_running_loop().create_task(sending)
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
