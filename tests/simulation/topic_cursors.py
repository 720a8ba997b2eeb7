"""A subscription in a run: runs of a query, one after another or two at once, that move it on.

Always true: what a run was told to be durable is noted with the position (T12), and from the moment
a later run has the subscription, what an earlier one is told still must never become durable; a
subscription holds what it has not passed from the moment that it was made (T10).
"""

import asyncio

from spark_ledger.errors import LedgerError
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic.cursor import Cursor
from spark_ledger.topic.seek_target import End
from tests.simulation import invariants
from tests.simulation.topic_ghost import LogGhost
from tests.simulation.topic_work import TOPIC, TopicWork
from tests.simulation.world import Client

NAME, QUERY = "s", "reading query"
DURABLE_S = 8.0


class TopicCursors:
    """The runs of one query that uses a subscription of the first topic."""

    def __init__(self, work: TopicWork) -> None:
        self.work = work
        self.world = work.world
        rng = self.world.loop.random_for("topic cursors")
        self.runs = rng.choice((0, 0, 2, 3))
        self.rng = rng
        self._end = self.world.loop.now + work.plan.chaos_s
        self._epoch = 0
        self._confirmed: dict[int, int] = {}

    async def supervise(self) -> None:
        """Run after run; most take over from one that is still alive."""
        begun = []
        for run in range(1, self.runs + 1):
            await asyncio.sleep(self.rng.uniform(0.5, 5))
            client = await self.world.client("subscriber")
            begun.append(client.run(self._use(client, run), "subscribes"))
        for outcome in await asyncio.gather(*begun, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    async def _use(self, client: Client, run: int) -> None:
        topics = self.work.client(client)
        try:
            info = await topics.topics.open(TOPIC)
            log = self.work.ghost.logs[info.id]
            confirmed = dict(self._confirmed)
            cursor = await topics.subscriptions.open(
                info, NAME, QUERY, f"subscriber-{run}", start=End.EARLIEST
            )
            epoch = self._epoch = self._epoch + 1
            self.world.ghost.meet("subscription opened")
            log.ceilings.setdefault(NAME, dict(log.state.end_offsets()))
            found = await cursor.recovered()
            for p, offset in confirmed.items():
                invariants.a_cursor_is_found_where_it_was_confirmed(
                    self.world.ghost, NAME, p, found.get(p), offset
                )
            await self._move(client, cursor, log, dict(found), epoch)
        except (LedgerError, StoreError) as error:
            self.work.met(client, "subscription", error)

    async def _move(
        self, client: Client, cursor: Cursor, log: LogGhost, at: dict[int, int], epoch: int
    ) -> None:
        while self.world.loop.now < self._end:
            await asyncio.sleep(client.rng.uniform(0.2, 3))
            ends = log.state.end_offsets()
            before = at
            at = {p: client.rng.randint(min(at.get(p, 0), end), end) for p, end in ends.items()}
            if at == before:
                continue  # it is durable already, whoever has it now
            told_in = self._epoch
            ceiling = log.ceilings[NAME]
            ceiling |= {p: max(ceiling.get(p, 0), offset) for p, offset in at.items()}
            cursor.advance(at)
            try:
                async with asyncio.timeout(DURABLE_S):
                    await cursor.durable()
            except TimeoutError:
                continue
            self.world.ghost.meet("cursor durable")
            invariants.only_the_current_epoch_writes(self.world.ghost, NAME, epoch, told_in)
            self._confirmed = {p: max(self._confirmed.get(p, 0), at[p]) for p in at}
        if client.rng.random() < 0.5:
            await cursor.release()
        else:
            await cursor.abandon()
