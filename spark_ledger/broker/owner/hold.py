"""A live segment past which somebody commits: its owner does not go on by itself for a while.

    asked -> handed over, or refused -> over: in a commit, all who hold it gone, or too late

Always true: it begins once for a segment, however many ask, and all get one answer; who comes later
does not prolong it. The owners of a topic's held segments wait together, so that a commit past a
hundred of them is looked for once: in what the topic's follower hears of, and in one look where
nobody holds any more.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from spark_ledger.topic.commit.hand_over import Handed
from spark_ledger.topic.log.segments import LiveSegment
from spark_ledger.topic.log.state import TopicState
from spark_ledger.topic.read.follower import TopicFollower


class Hold:
    """Of the live segment that commit `opened` began in a ledger, until `until_s` of the loop's
    clock at the latest."""

    def __init__(self, ledger_id: int, opened: int, until_s: float) -> None:
        self.ledger_id = ledger_id
        self.opened = opened
        self.until_s = until_s
        self.over = asyncio.Event()
        """Nobody holds it any more."""
        self.when_over: Callable[[], None] | None = None
        self.answer: asyncio.Future[Handed | None] = asyncio.get_running_loop().create_future()
        """What is handed over, or None: nothing is."""
        self._holders = 0

    def holds(self, live: LiveSegment | None) -> bool:
        """Whether it is this live segment."""
        return live is not None and (live.ledger_id, live.opened) == (self.ledger_id, self.opened)

    def join(self) -> None:
        """One more holds it."""
        self._holders += 1

    def leave(self) -> None:
        """One of those who hold it has gone."""
        self._holders -= 1
        if not self._holders:
            self.end()

    def end(self) -> None:
        """Nobody holds it any more."""
        self.over.set()
        if self.when_over is not None:
            self.when_over()

    def hand(self, handed: Handed | None) -> None:
        """As `answer`. Only the first counts."""
        if not self.answer.done():
            self.answer.set_result(handed)


class Holds:
    """Of a topic's partitions, those that are held. `look` reads the log without a sync."""

    def __init__(
        self,
        follow: Callable[[], Awaitable[TopicFollower]],
        look: Callable[[], Awaitable[TopicState]],
    ) -> None:
        self._follow = follow
        self._look = look
        self._waiting: dict[Hold, tuple[int, asyncio.Future[TopicState | None]]] = {}
        self._stirred = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def past(self, partition: int, hold: Hold) -> TopicState | None:
        """The topic as soon as the held segment is live no more; None where it is still when the
        hold is over. Raises as TopicFollower.state and `look`."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[TopicState | None] = loop.create_future()
        self._waiting[hold] = partition, waiting
        hold.when_over = self._stirred.set
        self._stirred.set()
        if self._task is None:
            self._task = loop.create_task(self._work())
        try:
            return await waiting
        finally:
            hold.when_over = None
            self._waiting.pop(hold, None)

    async def _work(self) -> None:
        try:
            follower = await self._follow()
            follower.listeners[self._tell] = None
            try:
                while self._waiting:
                    self._stirred.clear()
                    self._tell(follower.state())
                    await self._look_for_those_over()
                    await self._stir()
            finally:
                del follower.listeners[self._tell]
        except Exception as error:
            for _, waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(error)
        finally:
            self._task = None

    async def _look_for_those_over(self) -> None:
        """They are over by a commit, mostly, of which this process hears at about the same time."""
        now_s = asyncio.get_running_loop().time()
        over = [one for one in self._waiting if one.over.is_set() or one.until_s <= now_s]
        if over:
            self._tell(await self._look())
        for hold in over:
            self._result(hold, None)

    async def _stir(self) -> None:
        """Until there is another hold, one is over, or it is too late for one."""
        if self._waiting:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(hold.until_s for hold in self._waiting)):
                    await self._stirred.wait()

    def _tell(self, state: TopicState) -> None:
        for hold, (partition, _) in list(self._waiting.items()):
            knows = state.next > hold.opened
            if state.deleted or (knows and not hold.holds(state.partitions[partition].live)):
                self._result(hold, state)

    def _result(self, hold: Hold, state: TopicState | None) -> None:
        """Of one that waits."""
        if hold in self._waiting:
            _, waiting = self._waiting.pop(hold)
            if not waiting.done():
                waiting.set_result(state)
            if not self._waiting:
                self._stirred.set()
