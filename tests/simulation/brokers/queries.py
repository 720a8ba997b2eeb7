"""A query of Spark takes over a subscription that consumers share, reads on, and gives it back.

Always true: the query goes forward only, so what had a receipt stays acknowledged, and so does what
is before its durable position (B22); a row that the query is not given was acknowledged (B7). The
consumers leave before; in half of the cases they may come again as soon as the query has the
subscription, and brokers refuse them until the query gives it back. A run that dies, or does not
learn that it gave the subscription back, is followed by another run of the query, or an operator
ends the run's claim and leaves the position. The highest position that a run was given then counts
as acknowledged: whether a run got less far is not known.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from spark_ledger.errors import LedgerError, SubscriptionBusy
from spark_ledger.metadata.store import MetadataStore, StoreError
from spark_ledger.topic.acks.asking import OwnedAcks, decode_answer, encode_answer
from spark_ledger.topic.subscription.acked_now import acked_now
from spark_ledger.topic.subscription.cursor import Cursor
from spark_ledger.topic.subscription.records import later
from spark_ledger.topic.subscription.seek_target import End
from tests.simulation import invariants
from tests.simulation.brokers.acked import Acked, Session
from tests.simulation.topic_ghost import BROKERED
from tests.simulation.world import Client

if TYPE_CHECKING:
    from tests.simulation.brokers.work import BrokerWork

QUERY = "query between consumers"
LEAVE_S = 2.0
PATIENCE_S = 15.0
"""How long it waits for the consumers to leave."""
DURABLE_S = 8.0


class QueryBetween:
    """One hand-over of the subscription `name`, from consumers and back to them."""

    def __init__(self, work: "BrokerWork", name: str, acked: dict[int, Acked]) -> None:
        self._work = work
        self._name = name
        self._acked = acked
        """By partition."""
        now_s = work.world.loop.now
        self._rng = work.world.loop.random_for(f"query between consumers of {name} {now_s}")
        self._patient_until_s = now_s + PATIENCE_S
        self._highest: dict[int, int] = {}
        self._durable: dict[int, int] = {}
        """Where a run learned that it is."""

    async def passes(self) -> None:
        work, loop = self._work, self._work.world.loop
        work.away[self._name] = None
        await asyncio.sleep(self._rng.uniform(0.0, LEAVE_S))
        if self._rng.random() < 0.5 and self._is_known:
            await self._done_by("looks", self._looks)
        if not self._is_known:  # a consumer had begun to seek
            work.away.pop(self._name, None)
            return
        for at in self._acked.values():
            at.asks(loop.now, keeps=True)
        while not await self._done_by("reads", self._reads):
            if self._rng.random() < 0.3 and await self._done_by("takes it", self._takes):
                break
            await asyncio.sleep(self._rng.uniform(0.0, 1.0))
        work.away.pop(self._name, None)
        for partition, at in self._acked.items():
            offset, durable = self._highest.get(partition, 0), self._durable.get(partition, 0)
            at.answered(loop.now, offset, offset)
            at.received(0, durable, Session(loop.now, loop.now), loop.now)

    @property
    def _is_known(self) -> bool:
        return all(at.sure and not at.asking for at in self._acked.values())

    async def _done_by(
        self, doing: str, work: Callable[[Client], Coroutine[Any, Any, bool]]
    ) -> bool:
        """Whether a process of its own has done it; some of those that fail live on, as zombies."""
        client = await self._work.world.client(f"query between consumers {doing}")
        acting = client.run(work(client), f"{doing} {self._name}")
        (outcome,) = await asyncio.gather(acting, return_exceptions=True)
        if isinstance(outcome, bool):
            return outcome
        if not isinstance(
            outcome, LedgerError | StoreError | TimeoutError | asyncio.CancelledError
        ):
            raise outcome
        if isinstance(outcome, LedgerError | StoreError):
            self._work.work.met(client, f"query between consumers {doing}", outcome)
        if self._rng.random() < 0.5:
            client.kill()
        is_busy = isinstance(outcome, SubscriptionBusy)
        return is_busy and self._work.world.loop.now > self._patient_until_s

    async def _looks(self, client: Client) -> bool:
        """What is acknowledged, as for the first offset of a query with startingSubscription."""
        work, asked_s = self._work, self._work.world.loop.now
        present = await acked_now(client.ledgers, work.log.topic_id, self._name, self._ask)
        for partition, at in self._acked.items():
            position, rows = present.positions.get(partition, 0), present.acked.get(partition, ())
            received = [row for row, then_s in at.with_receipt.items() if then_s < asked_s]
            invariants.what_has_a_receipt_is_not_sent_again(
                *(work.world.ghost, QUERY, partition),
                [row for row in received if row >= position and row not in rows],
            )
            self._passes_over(partition, [*range(position), *rows])
        work.world.ghost.meet("acknowledgements looked at for a query")
        return True

    async def _ask(
        self, _store: MetadataStore, topic_id: str, name: str, brokers: Collection[str]
    ) -> list[OwnedAcks]:
        """As asking.ask_owners: some brokers do not answer."""
        answers = []
        for one in self._work.living():
            await asyncio.sleep(self._rng.uniform(0.0, 0.1))
            is_heard = one.listening and one.process.alive and not one.process.paused
            if not is_heard or one.broker.id not in brokers or self._rng.random() < 0.3:
                continue
            acks = one.broker.cursors.acks_of(topic_id)
            answer = encode_answer([] if acks is None else acks.of_subscription(name))
            answers += decode_answer(answer)
        return answers

    async def _reads(self, client: Client) -> bool:
        """One run: whether it gave the subscription back."""
        topics, rng, loop = self._work.work.client(client), self._rng, self._work.world.loop
        info = await topics.topics.open(BROKERED)
        run = f"{loop.now} {client.name}"
        cursor = await topics.subscriptions.open(info, self._name, QUERY, run, start=End.EARLIEST)
        self._work.world.ghost.meet("subscription of consumers taken over by a query")
        if rng.random() < 0.5:
            self._work.away.pop(self._name, None)
        found = await cursor.recovered()
        self._is_found(found)
        at = {partition: found.get(partition, 0) for partition in self._acked}
        rows_max = rng.choice((0, 2, 2, 1_000))
        for _ in range(rng.choice((1, 1, 2))):
            ends = {p: min(self._end(p), offset + rows_max) for p, offset in at.items()}
            at = {p: rng.randint(offset, max(offset, ends[p])) for p, offset in at.items()}
            await self._advances(client, cursor, at)
        await cursor.release()
        released = "was released" in str(cursor.failure)
        if released:
            self._durable = later(self._durable, at)
        self._work.world.ghost.meet(f"query {'gave' if released else 'may have given'} it back")
        return released

    async def _advances(self, client: Client, cursor: Cursor, at: dict[int, int]) -> None:
        self._highest = later(self._highest, at)
        cursor.advance(at)
        draw = self._rng.random()
        if draw < 0.15:
            await asyncio.sleep(self._rng.uniform(0.0, 1.0))
            self._dies(client)
        async with asyncio.timeout(DURABLE_S):
            await cursor.durable()
        self._durable = later(self._durable, at)
        if draw > 0.85:
            self._dies(client)

    def _dies(self, client: Client) -> None:
        self._work.world.ghost.meet("query killed that has a subscription of consumers")
        client.kill()

    async def _takes(self, client: Client) -> bool:
        """An operator takes the subscription from whatever has it, where it is."""
        topics, topic_id = self._work.work.client(client), self._work.log.topic_id
        at = await topics.subscriptions.seek(topic_id, self._name, {}, force=True)
        self._is_found(at)
        self._durable = later(self._durable, at)
        self._work.world.ghost.meet("subscription of consumers taken from a query")
        return True

    def _is_found(self, at: dict[int, int]) -> None:
        ghost = self._work.world.ghost
        for partition, offset in at.items():
            invariants.a_cursor_is_found_where_it_was_confirmed(
                *(ghost, self._name, partition, offset, self._durable.get(partition, 0))
            )
            known = self._highest.get(partition, 0)
            if partition in self._acked:
                self._passes_over(partition, range(known, offset))

    def _passes_over(self, partition: int, rows: Iterable[int]) -> None:
        """The query is not given these rows."""
        acked, truth = self._acked[partition], self._work.truth
        left_out = [row for row in rows if acked.left_out(row, row + 1)]
        invariants.a_consumer_passes_over_nothing(
            *(self._work.world.ghost, QUERY, partition),
            [row for row in left_out if truth.has_row(partition, row)],
        )

    def _end(self, partition: int) -> int:
        return self._work.truth.confirmed(partition)
