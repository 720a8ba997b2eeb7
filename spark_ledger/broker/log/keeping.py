"""How a broker keeps a topic, even one that is idle for months: the broker raises the heartbeat of
its intent, and notices when another broker has partitions of the topic.

Always true: the record of owners has one watch, which shows a change at once. Even if the watch is
lost, the record is read every LOOK_S. No write of the broker depends on these reads. So they need
no sync, and thousands of idle topics cost the metadata store little.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from spark_ledger import errors
from spark_ledger.async_tasks import woken
from spark_ledger.broker.log.topic_commits import TopicCommits
from spark_ledger.metadata.store import StoreError, Watcher
from spark_ledger.topic.log.names import TopicName
from spark_ledger.topic.read.follower import TopicFollower

LOOK_S = 60.0
FIRST_LOOK_S = 5.0
AGAIN_S, AGAIN_S_MAX = 1.0, 8.0

_log = logging.getLogger(__name__)


class Look(Protocol):
    async def __call__(self, *, fresh: bool, watch: Watcher | None) -> None:
        """Give up the partitions that other brokers have by now; OwnedTopic.look."""


class HeartbeatLoop:
    """Raises the heartbeat for one topic, and looks which partitions other brokers have."""

    def __init__(self, commits: TopicCommits, look: Look) -> None:
        self._commits = commits
        self._look = look
        self._look_again = asyncio.Event()
        self._is_watched = False

    async def run(self) -> None:
        """Keep the topic until this task is cancelled."""
        await asyncio.sleep(FIRST_LOOK_S)
        while True:
            self._look_again.clear()
            try:
                await self._commits.heartbeat()
                await self._look_watching()
                await woken(self._look_again, LOOK_S)
            except (errors.LedgerError, StoreError) as error:
                name = self._commits.topic.name
                _log.warning("which brokers have topic %s is not known now: %s", name, error)
                await asyncio.sleep(AGAIN_S)
            except Exception:
                _log.exception("which brokers have topic %s: a defect", self._commits.topic.name)
                await asyncio.sleep(AGAIN_S)

    async def _look_watching(self) -> None:
        """Raises errors.Unavailable."""
        watch = None if self._is_watched else self._record_changed
        self._is_watched = True
        try:
            await self._look(fresh=False, watch=watch)
        except BaseException:
            if watch is not None:  # it is not known whether the store set the watch
                self._is_watched = False
            raise

    def _record_changed(self) -> None:
        self._is_watched = False
        self._look_again.set()


async def follow(
    follower: TopicFollower,
    name: TopicName,
    on_commit: Callable[[bool], None],
    on_end: Callable[[Exception], None],
) -> None:
    """Call `on_commit` after each commit to the topic, with True if the state before came from a
    metadata store that was given up. When the topic is deleted, or its follower has failed for
    good, call `on_end` with the reason, and return. After a transient error wait, and try again; an
    error that lasts is logged once."""
    next_commit, history_number, pause_s = -1, follower.log.history_number, AGAIN_S
    while True:
        try:
            state = await follower.wait_for_commit(next_commit)
            next_commit, pause_s = state.next, AGAIN_S
            if state.deleted:
                on_end(errors.TopicDeleted(f"topic {name} was deleted"))
                return
            before, history_number = history_number, follower.log.history_number
            on_commit(before != history_number)
        except Exception as error:
            if follower.failure is not None:
                on_end(follower.failure)
                return
            if pause_s == AGAIN_S:
                is_defect = not isinstance(error, errors.LedgerError | StoreError)
                _log.warning("topic %s is not followed now: %s", name, error, exc_info=is_defect)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, AGAIN_S_MAX)
