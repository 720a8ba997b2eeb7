"""Subscriptions that consumers share are moved from outside, as the command line and the admin API
do: reset, skipped, cleared, expired, deleted; and, where the plan has it, queries take them over.

Always true: a move waits until no other one is under way, of a consumer or from outside. What a
move that got no answer has done is unknown, until a move is answered that keeps nothing of before;
so a consumer seeks after it. A reset moves one partition, and keeps what is acknowledged in others.
"""

import asyncio
from typing import TYPE_CHECKING

from spark_ledger.errors import LedgerError
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic.subscription.seek_target import CommittedSince, End
from spark_ledger.topic.upkeep.subscription_moves import SubscriptionMoves
from tests.simulation.brokers.acked import Acked
from tests.simulation.brokers.queries import QueryBetween
from tests.simulation.store import EPOCH_MS
from tests.simulation.world import Client

if TYPE_CHECKING:
    from tests.simulation.brokers.work import BrokerWork

WAYS = ("reset", "reset", "to the beginning", "skip", "skip", "clear", "expire", "delete")
KEEPS = ("skip", "expire")
"""They move forward alone, and what is acknowledged beyond stays so."""


class MovesFromOutside:
    """Of the subscriptions of one run that consumers share."""

    def __init__(self, work: "BrokerWork", end_s: float) -> None:
        self._work = work
        self._end_s = end_s
        self._rng = work.world.loop.random_for("moves from outside")
        self._every_s = self._rng.choice((None, 2.0, 6.0))
        self._queries_rng = work.world.loop.random_for("queries between consumers")
        self._by_queries = 0.0
        """The share of the moves that a query makes."""
        if "queries" in work.work.plan.also:
            self._by_queries = self._queries_rng.choice((0.5, 1.0))
            self._every_s = self._every_s or 4.0

    async def go_on(self) -> None:
        loop = self._work.world.loop
        while self._every_s is not None:
            await asyncio.sleep(self._rng.uniform(0.0, 2 * self._every_s))
            if loop.now >= self._end_s:
                return
            names = sorted({name for name, _ in self._work.asked_again})
            name = self._rng.choice(names)
            acked = {p: at for (of, p), at in self._work.acked.items() if of == name}
            if any(at.asking for at in acked.values()):
                continue
            is_known = all(at.sure for at in acked.values())
            if is_known and self._queries_rng.random() < self._by_queries:
                await QueryBetween(self._work, name, acked).passes()
            else:
                await self._move(name, acked)

    async def _move(self, name: str, acked: dict[int, Acked]) -> None:
        work, now_s = self._work, self._work.world.loop.now
        way, partition = self._rng.choice(WAYS), self._rng.choice(sorted(acked))
        goes_back = [p for p in acked if way not in KEEPS and (way != "reset" or p == partition)]
        for number, at in acked.items():
            at.asks(now_s, keeps=number not in goes_back)
        for number in goes_back:
            work.places.may_go_back(name, number)
        client = await work.world.client("operator of subscriptions")
        moving = client.run(self._moved(client, name, way, partition), f"{way} {name}")
        (moved,) = await asyncio.gather(moving, return_exceptions=True)
        if not isinstance(moved, dict):
            for at in acked.values():
                at.unanswered()
            if not isinstance(moved, LedgerError | StoreError | asyncio.CancelledError):
                raise moved
            work.work.met(client, f"{way} from outside", moved)
            return
        for number, at in acked.items():
            offset = moved.get(number, 0)
            at.answered(work.world.loop.now, offset, offset)
        for number in goes_back:
            work.places.went_back(name, number)
            work.places.forget(name, number)
        work.world.ghost.meet(f"subscription moved from outside: {way}")

    async def _moved(self, client: Client, name: str, way: str, partition: int) -> dict[int, int]:
        rng, work = self._rng, self._work
        moves = SubscriptionMoves(work.work.client(client), work.log.topic_id)
        if way == "skip":
            return await moves.skip(name, rng.choice((0, 1, 5, 50)), partition)
        if way == "expire":
            at_s = max(0.0, work.world.loop.now - rng.uniform(0.0, 10.0))
            return await moves.expire(name, CommittedSince(EPOCH_MS + int(at_s * 1000)))
        if way == "clear":
            return await moves.clear(name)
        if way == "delete":
            await moves.delete(name)
            return {}
        end = work.truth.confirmed(partition)
        to_offset = {partition: rng.randint(0, end)}
        return await moves.reset(name, End.EARLIEST if way != "reset" else to_offset)
