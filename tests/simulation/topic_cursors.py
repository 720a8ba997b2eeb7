"""A subscription in a run: runs of a query, one after another or two at once, that move it on, and
back, and an operator who seeks it.

Always true: a position that a run learned to be durable is noted (T12). From the moment that a
later run has the subscription, positions given to an earlier one must never become durable. A
subscription holds the rows that it has not passed, from the moment that it was made or that a step
back is durable (T10). A run may die in the moment in which it learns that its position is durable.
"""

import asyncio
from dataclasses import dataclass, field

from spark_ledger.errors import LedgerError
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic.subscription.cursor import Cursor
from spark_ledger.topic.subscription.records import decode_subscription
from spark_ledger.topic.subscription.seek_target import End
from tests.simulation import invariants
from tests.simulation.topic_ghost import LogGhost, Positions, Whereabouts
from tests.simulation.topic_work import TOPIC, TopicWork
from tests.simulation.world import Client

NAME, QUERY = "s", "reading query"
DURABLE_S = 8.0


@dataclass
class Confirmed:
    """What is known of the subscription of one topic id."""

    epoch: int = 0
    """Positions given to an owner of an earlier epoch from now on cannot be written."""
    lowest: Positions = field(default_factory=dict)
    """By partition: the position that was confirmed, or to which a step back was asked since."""
    sought: Positions | None = None
    """The position of a seek after which no run has had the subscription."""
    doubtful: bool = False
    """A seek is under way, or its outcome is unknown: the subscription may be anywhere."""

    def told(self, at: Positions) -> None:
        self.lowest = {p: min(self.lowest[p], at.get(p, 0)) for p in self.lowest}


class TopicCursors:
    """The runs of one query that uses a subscription of the first topic."""

    def __init__(self, work: TopicWork) -> None:
        self.work = work
        self.world = work.world
        rng = self.world.loop.random_for("topic cursors")
        self.runs = rng.choice((4, 6, 9)) if work.plan.churn else rng.choice((0, 0, 2, 3))
        self.mortality = 0.2
        """The share of owners that die in the moment in which they learn that it is durable."""
        self.rng = rng
        self.ends_at = self.world.loop.now + work.plan.chaos_s
        self.known: dict[str, Confirmed] = {}

    async def supervise(self) -> None:
        """Run after run; most take over from one that is still alive."""
        begun = []
        for run in range(1, self.runs + 1):
            await asyncio.sleep(self.rng.uniform(0.5, 5))
            client = await self.world.client("subscriber")
            begun.append(client.run(self.use(client, run), "subscribes"))
            if self.rng.random() < 0.3:
                seeker = await self.world.client("seeker")
                begun.append(seeker.run(self.seek(seeker), "seeks"))
        for outcome in await asyncio.gather(*begun, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    async def use(self, client: Client, run: int) -> None:
        topics = self.work.client(client)
        try:
            info = await topics.topics.open(TOPIC)
            log = self.work.ghost.logs[info.id]
            known = self.known.setdefault(info.id, Confirmed())
            lowest, sought, sought_in = dict(known.lowest), known.sought, known.epoch
            cursor = await topics.subscriptions.open(
                info, NAME, QUERY, f"subscriber-{run}", start=End.EARLIEST
            )
            self.world.ghost.meet("subscription opened")
            found = await cursor.recovered()  # from now on no earlier owner can write
            epoch = cursor._subscription.record.epoch
            known.epoch = max(known.epoch, epoch)
            if sought is not None and epoch == sought_in + 1:
                starts = dict(log.starts())
                for p, offset in found.items():
                    invariants.a_cursor_is_found_where_it_was_put(
                        self.world.ghost, NAME, p, offset, max(sought.get(p, 0), starts.get(p, 0))
                    )
            known.sought = None
            if NAME not in log.subscriptions:
                self._is_at(log, found)
            for p, offset in lowest.items():
                invariants.a_cursor_is_found_where_it_was_confirmed(
                    self.world.ghost, NAME, p, found.get(p), min(offset, known.lowest.get(p, 0))
                )
            await self._move(client, cursor, log, dict(found), epoch)
        except (LedgerError, StoreError) as error:
            self.work.met(client, "subscription", error)

    async def _move(
        self, client: Client, cursor: Cursor, log: LogGhost, at: Positions, epoch: int
    ) -> None:
        known = self.known[log.topic_id]
        while self.world.loop.now < self.ends_at:
            await asyncio.sleep(client.rng.uniform(0.2, 1 if self.work.plan.churn else 3))
            before, at = at, self._next(client, log, at)
            if at == before:
                continue  # it is durable already, also if another run has the subscription now
            told_in = known.epoch
            if told_in <= epoch:  # else nothing of it may be written
                known.told(at)
                _whereabouts(log).goes_to(self.world.loop.now, at)
            cursor.advance(at)
            if not cursor._is_dirty():
                continue  # clipped to what is kept it is where it was confirmed
            try:
                async with asyncio.timeout(DURABLE_S):
                    await cursor.durable()
            except TimeoutError:
                continue
            self.world.ghost.meet("cursor durable")
            invariants.only_the_current_epoch_writes(self.world.ghost, NAME, epoch, told_in)
            if known.epoch <= epoch:
                known.lowest = {} if known.doubtful else dict(at)
                self._is_at(log, at)
            if client.rng.random() < self.mortality:
                self.world.ghost.meet("cursor's owner died once it was told")
                client.kill()
        if client.rng.random() < 0.5:
            await cursor.release()
        else:
            await cursor.abandon()

    def _is_at(self, log: LogGhost, at: Positions) -> None:
        """It is there, durably, or at the first row kept."""
        there = {p: max(at.get(p, 0), start) for p, start in log.starts()}
        _whereabouts(log).is_at(self.world.loop.now, there)

    def _next(self, client: Client, log: LogGhost, at: Positions) -> Positions:
        """Mostly forward, and now and then back to what is kept."""
        ends, starts = log.state.end_offsets(), dict(log.starts())
        if client.rng.random() < 0.25:
            self.world.ghost.meet("cursor goes back")
            return {p: client.rng.randint(starts[p], max(at.get(p, 0), starts[p])) for p in ends}
        return {p: client.rng.randint(min(at.get(p, 0), end), end) for p, end in ends.items()}

    def _epoch(self, topic_id: str) -> int:
        node = self.world.store.peek(paths.subscription(topic_id, NAME))
        return -1 if node is None else decode_subscription(node.value).epoch

    async def seek(self, client: Client) -> None:
        """Put the subscription back to the first row, also if a run has it."""
        topics = self.work.client(client)
        try:
            info = await topics.topics.open(TOPIC)
            known = self.known.setdefault(info.id, Confirmed())
            log = self.work.ghost.logs[info.id]
            known.lowest, known.sought, known.doubtful = {}, None, True
            before = self._epoch(info.id)
            try:
                at = await topics.subscriptions.seek(info.id, NAME, End.EARLIEST, force=True)
            finally:
                self._put(info.id, before + 1)
            self.world.ghost.meet("subscription sought")
            after = self._epoch(info.id)
            if after >= 0:  # else its topic is gone by now
                invariants.only_the_current_epoch_writes(self.world.ghost, NAME, after, before + 1)
            node = self.world.store.peek(paths.subscription(info.id, NAME))
            record = None if node is None else decode_subscription(node.value)
            if record is not None and not record.live and dict(record.floor) == at:  # not moved on
                known.epoch, known.lowest, known.doubtful = record.epoch, dict(at), False
                self._is_at(log, at)
        except (LedgerError, StoreError) as error:
            self.work.met(client, "seek", error)

    def _put(self, topic_id: str, epoch: int) -> None:
        """Note what a seek has left in the store, even if no client learned its outcome: only a
        seek raises the epoch and lets go."""
        node = self.world.store.peek(paths.subscription(topic_id, NAME))
        record = None if node is None else decode_subscription(node.value)
        if record is not None and not record.live and record.epoch == epoch:
            known = self.known[topic_id]
            known.epoch, known.sought = epoch, dict(record.floor)


def _whereabouts(log: LogGhost) -> Whereabouts:
    return log.subscriptions.setdefault(NAME, Whereabouts())
