"""A topic at a broker: the partitions of the topic that this broker owns, and the subscriptions.

Always true: before a partition is served, the segment that an earlier owner left open is sealed.
No subscription has then acknowledged offsets beyond the partition's end (lost_rows.py). When
another broker has the partition, or the topic was deleted, this broker sends the producers and
consumers of the partition away: they look the partition up again. Clients of other partitions stay.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from spark_ledger.async_tasks import BackgroundTasks, cancel
from spark_ledger.broker.dispatch.subscriptions import TopicSubscriptions
from spark_ledger.broker.log.keeping import HeartbeatLoop, follow
from spark_ledger.broker.log.partition import Partition
from spark_ledger.broker.log.tail import TailBudget
from spark_ledger.broker.log.topic_commits import RollLimits, TopicCommits
from spark_ledger.broker.owner.backlogs import Backlogs
from spark_ledger.broker.owner.lost_rows import LostRows
from spark_ledger.broker.owner.owned_partition import OwnedPartition, owned_elsewhere
from spark_ledger.broker.produce.live_writer import LiveWriter
from spark_ledger.metadata.store import Watcher
from spark_ledger.metadata.store_calls import call_each
from spark_ledger.topic.log.state import TopicState
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.read.follower import TopicFollower
from spark_ledger.topic.read.live import LiveEnds
from spark_ledger.topic.subscription.consumer_cursors import ConsumerCursors

REREAD_S = 60.0
"""The head of a topic is read this often even if no watch reports a change."""
CATCH_UP_S, CERTAIN_S = 0.1, 5.0
"""A read of a partition waits CATCH_UP_S, at most, until a commit that a watch reported is folded.
After a new connection to the store it waits CERTAIN_S until it is sure of the store's history."""
LEDGERS_ASKED_AT_ONCE = 8
DECIDE_S, UNDECIDED_S = 10.0, 0.5
"""How long a broker that gives a partition up waits, at most, until it is decided which batches
under way are stored. UNDECIDED_S is for a broker without contact to the store."""
ACKS_CLOSED_S = 5.0
"""How long a broker that stops waits, at most, until its consumers' acknowledgements are
durable."""

_log = logging.getLogger(__name__)


class OwnedTopic:
    """`on_end` is called once, when this broker no longer has the topic; `on_closed` once all work
    for the topic has ended."""

    def __init__(
        self,
        commits: TopicCommits,
        cursors: ConsumerCursors,
        follower: TopicFollower,
        budget: TailBudget,
        limits: RollLimits,
        on_end: Callable[["OwnedTopic"], None],
        on_closed: Callable[["OwnedTopic"], Awaitable[None]],
    ) -> None:
        self._commits = commits
        self._follower = follower
        self._budget = budget
        self._limits = limits
        self._on_end = on_end
        self._on_closed = on_closed
        self._partitions: dict[int, OwnedPartition] = {}
        self._leaving: dict[int, OwnedPartition] = {}
        self._owning = asyncio.Lock()
        self._beside = BackgroundTasks(self._log_failed_task)
        self._acks = cursors.open_topic_acks(commits.topic, commits.new_ack_ledger, commits.now_ms)
        self.subscriptions = TopicSubscriptions(self, commits, cursors, self._beside)
        self.backlogs = Backlogs(self, commits)
        self._background: list[asyncio.Task[None]] = []
        self.is_ended = False

    @property
    def info(self) -> TopicInfo:
        return self._commits.topic

    @property
    def state(self) -> TopicState:
        return self._follower.state()

    async def start(self) -> None:
        """Follow the topic's log. Raises errors.TopicDeleted, errors.Unavailable."""
        await self._follower.wait_for_commit((await self._commits.state()).next - 1)
        loop = asyncio.get_running_loop()
        self._background = [
            loop.create_task(follow(self._follower, self.info.name, self._on_commit, self.give_up)),
            loop.create_task(HeartbeatLoop(self._commits, self.look).run()),
            loop.create_task(self.backlogs.go_on()),
        ]

    async def serve_partitions(self, epochs: Mapping[int, int]) -> dict[int, BaseException]:
        """Serve these partitions from now on, each in its epoch: a segment that is open is sealed
        first. Returns the errors of the partitions that cannot be served, by number."""
        async with self._owning:
            for number, epoch in epochs.items():
                self.learn(number, epoch)
            open_here = {**self._partitions, **self._leaving}
            new = {
                n: epoch for n, epoch in epochs.items() if n not in open_here and not self.is_ended
            }
            self._commits.epochs.update(new)
            opened = await asyncio.gather(*map(self._open, new), return_exceptions=True)
            if new:
                await self._follower.wait_for_commit((await self._commits.state()).next - 1)
            lost_rows = LostRows(self._commits, self.subscriptions, self._acks)
            failures, outcomes = {}, await lost_rows.forget_acks_of_lost_rows(opened)
            for number, outcome in zip(new, outcomes, strict=True):
                if isinstance(outcome, OwnedPartition):
                    self._partitions[number] = outcome
                else:
                    self._commits.epochs.pop(number, None)
                    failures[number] = outcome
            return failures

    async def _open(self, number: int) -> OwnedPartition:
        state, budget = self._follower.state, self._budget
        log = Partition(self._commits.client, self.info, number, state, budget, self._catch_up)
        writer = LiveWriter(self._commits, number, self._limits, log.add_stored)
        log.open_end = writer.open_end  # how far rows of the live segment are confirmed
        epoch = self._commits.epochs[number]
        await writer.start()
        return OwnedPartition(self.info, log, writer, epoch, self._beside.start)

    async def _catch_up(self) -> int:
        if self._follower.is_behind:
            await self._follower.catch_up(CATCH_UP_S)
        return await self._follower.confirmed_history_number(CERTAIN_S)

    @property
    def partitions(self) -> Mapping[int, OwnedPartition]:
        """The partitions that this broker has, by number."""
        return self._partitions

    def send_clients_away(self, number: int) -> None:
        """Send the partition's clients away, although the partition stays at this broker: they look
        the topic up, and come back."""
        self._partitions[number].send_producers_away()
        self.subscriptions.send_away(number)  # the positions stay here

    def has(self, number: int) -> bool:
        return number in self._partitions

    def partition(self, number: int) -> OwnedPartition:
        """Raises Refusal if this broker does not have the partition."""
        partition = self._partitions.get(number)
        if partition is None:
            raise owned_elsewhere(self.info, number)
        return partition

    def _on_commit(self, another_store: bool) -> None:
        for number, partition in list(self._partitions.items()):
            if another_store:
                partition.log.forget()  # the rows in memory
                # the subscriptions' positions in the partition are also those of the earlier store
                self.subscriptions.send_consumers_away(number)
                self._acks.leave(number)
            partition.log.wake()

    async def look(self, *, fresh: bool = True, watch: Watcher | None = None) -> None:
        """Give up the partitions that other brokers have by now; without any partition, end the
        topic here. `fresh` and `watch` as in TopicCommits.lost_partitions. Raises
        errors.Unavailable."""
        await self.look_for_lost(fresh=fresh, watch=watch)
        async with self._owning:
            if not self._partitions and not self._leaving and not self.is_ended:
                self.is_ended = True
                self._on_end(self)
                await self._close()

    async def look_for_lost(self, *, fresh: bool = True, watch: Watcher | None = None) -> None:
        lost = await self._commits.lost_partitions(fresh=fresh, watch=watch)
        self._lose([number for number in lost if number in self._partitions])

    def learn(self, number: int, epoch: int) -> None:
        """Note that by the record of owners this broker owns the partition in `epoch`. If the
        partition is open here in an earlier epoch, another broker had the partition meanwhile. The
        state here is then out of date, and the partition is given up."""
        if self.has(number) and self._commits.epochs[number] < epoch:
            self._lose([number])

    async def leave_fenced(self) -> None:
        """For a broker that does not reach the store: give up the partitions whose live ledger is
        fenced, so that their clients go to the owner that fenced the ledger. Batches under way
        cannot be decided without the store: their producers send them again."""

        async def leave_if_fenced(number: int) -> None:
            partition = self._partitions.get(number)
            if partition is None or not await partition.is_fenced():
                return
            if self._partitions.get(number) is partition:
                self._lose([number], UNDECIDED_S)

        await call_each(leave_if_fenced, list(self._partitions), LEDGERS_ASKED_AT_ONCE)

    def _lose(self, numbers: list[int], decide_s: float = DECIDE_S) -> None:
        for number in numbers:
            self._leave(number)
            # at once: a consumer that stayed here would keep its subscription in use
            self.subscriptions.send_consumers_away(number)
            self._acks.leave(number)
        if numbers:
            _log.warning("other brokers have partitions %s of %s", numbers, self.info.name)
            self._beside.start(self._leave_to_others(numbers, decide_s))

    def _leave(self, number: int) -> None:
        partition = self._leaving[number] = self._partitions.pop(number)
        partition.is_left = True

    def give_up(self, error: Exception) -> None:
        """End the topic at this broker because of `error`: the topic was deleted, for example.
        Once it is decided which batches under way are stored, all clients are sent away; a producer
        sends the other batches again."""
        if self.is_ended:
            return
        self.is_ended = True
        _log.warning("topic %s is given up: %s", self.info.name, error)
        self._on_end(self)
        for number in list(self._partitions):
            self._leave(number)
        self._beside.start(self._leave_to_others(list(self._leaving), end=True))

    async def _leave_to_others(
        self, numbers: list[int], decide_s: float = DECIDE_S, *, end: bool = False
    ) -> None:
        writers = [self._leaving[number].writer for number in numbers]
        with suppress(TimeoutError):
            async with asyncio.timeout(decide_s):
                await asyncio.gather(*(writer.close() for writer in writers))
        for number in numbers:
            self._send_away(self._leaving[number])
            self._acks.leave(number)
            self._commits.epochs.pop(number, None)
            self._leaving.pop(number, None)
        if end:
            await self._close()

    async def _close(self) -> None:
        for task in self._background:
            if task is not asyncio.current_task():
                task.cancel()
        self._acks.end()  # stops its writes
        await self._commits.close()
        await self._on_closed(self)

    def _send_away(self, partition: OwnedPartition) -> None:
        partition.send_producers_away()
        self.subscriptions.send_consumers_away(partition.number)

    async def seal(self) -> None:
        """Take no more messages, store the waiting messages, and seal the live segments."""
        await asyncio.gather(*(owned.writer.close() for owned in list(self._partitions.values())))

    async def close(self) -> None:
        """Store the waiting messages, seal the live segments, write the subscriptions' positions,
        and end the topic here."""
        await cancel(*self._background)
        self.is_ended = True
        await asyncio.gather(*(owned.writer.close() for owned in self._partitions.values()))
        for partition in list(self._partitions.values()):
            self._send_away(partition)
        await self.subscriptions.release_all()
        await self._acks.close(ACKS_CLOSED_S)
        await self._close()

    # -- for the topic's subscriptions ---------------------------------------------------------

    def readable_partition(self, number: int) -> Partition:
        """Raises Refusal if this broker does not have the partition."""
        return self.partition(number).log

    async def history(self) -> int:
        return await self._follower.confirmed_history_number(CERTAIN_S)

    async def offsets(self, *, earliest: bool) -> Mapping[int, int]:
        return self.state.start_offsets() if earliest else await self._ends()

    async def _ends(self) -> dict[int, int]:
        """The end of each partition, also of the partitions that other brokers own; rows of live
        segments are counted."""
        state = await self._commits.state()
        others = [other for other in state.partitions if other.number not in self._partitions]
        live_ends = LiveEnds(self._commits.client.ledgers)
        await live_ends.refresh(other.live for other in others if other.live is not None)
        ends = state.end_offsets()
        for other in others:
            if other.live is not None:
                ends[other.number] = other.live.base + live_ends.end_of(other.live).rows
        return {**ends, **{number: owned.log.end for number, owned in self._partitions.items()}}

    def _log_failed_task(self, error: BaseException) -> None:
        _log.error("background work of topic %s has failed", self.info.name, exc_info=error)
