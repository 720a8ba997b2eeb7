"""Consumers of a subscription that several share, as Pulsar's clients are: each acknowledges one by
one, asks for messages again, takes few or many, leaves, and comes back.

Always true: what no consumer acknowledged comes to one of them, and the run ends only when all is
acknowledged; a row is pending at one consumer of a broker at most; a broker sends no more than a
consumer has asked for, but for the rest of a batch; a message is counted as often as it was asked
for again, or less. A cumulative acknowledgement counts for nothing.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from spark_ledger.broker.dispatch.sharing import Sharing
from spark_ledger.broker.names import ledger_number, message_id
from spark_ledger.broker.wire.commands import InitialPosition, SubscriptionType, signed
from tests.simulation import invariants
from tests.simulation.brokers.acked import Session
from tests.simulation.brokers.consumer import (
    ASK_S,
    CONSUMER_ID,
    CUMULATIVE,
    INDIVIDUAL,
    SILENT_S,
    ConsumerModel,
    dispatcher_of,
    is_set,
)
from tests.simulation.brokers.link import Link
from tests.simulation.store import EPOCH_MS

if TYPE_CHECKING:
    from tests.simulation.brokers.work import BrokerWork

SHARED_NAME = "shared"
PERMITS = (1, 3, 20, 200)


class SharedConsumerModel(ConsumerModel):
    """One of several of a partition."""

    SUBSCRIPTION, KIND, SHARES = SHARED_NAME, SubscriptionType.SHARED, True

    def __init__(self, work: "BrokerWork", name: str, partition: int) -> None:
        super().__init__(work, name, partition, self.SUBSCRIPTION, self.KIND)
        place = (self.SUBSCRIPTION, partition)
        self._asked_again = work.asked_again.setdefault(place, Counter())
        self._rows: dict[int, list[int]] = {}
        """By the offset of what it was given, the rows that are not masked."""
        self._waits = self.rng.choice((0.3, 0.3, 0.8))
        """How often it acknowledges nothing when it looks."""
        self._is_asking = False
        """It seeks, or deletes the subscription."""

    async def _session(self, link: Link) -> None:
        if self.subscription in self.work.away:
            return
        link.heard = lambda name, part, batch: self._heard(link, name, part, batch)
        link.watch(self._is_sent)
        self._unacked.clear()
        self._rows.clear()
        self._joining.forget()
        asked_s = self._loop.now
        await link.ask(
            "subscribe",
            topic=self._topic,
            subscription=self.subscription,
            subType=self.kind,
            consumer_id=CONSUMER_ID,
            consumer_name=self.name,
            initialPosition=InitialPosition.EARLIEST,
        )
        self._met = Session(asked_s, self._loop.now)
        permits = self.rng.choice(PERMITS)
        self._permits = 0
        self._asks_for(link, permits)
        ends_s = self._loop.now + self.stay_s
        while not link.gone and not self.done:
            await asyncio.sleep(self.rng.uniform(0.05, 0.6))
            if self._unacked and self.rng.random() < self.work.asks_again:
                self._asks_again(link)
            self._acknowledge(link)
            await self._asks_for_a_receipt(link)
            if self.subscription in self.work.away:
                await self._makes_way(link)
                return
            if not self.acked.asking and self.rng.random() < self._may_seek:
                await self._seek(link)
                return
            silent_s = self._loop.now - link.heard_s
            if silent_s > SILENT_S:
                return
            if silent_s > ASK_S:
                link.send("ping")
            if self._permits < permits // 2 + 1:
                self._asks_for(link, permits)
            if not self.work.over and self._loop.now > ends_s:
                await self._leaves(link)
                return

    async def _makes_way(self, link: Link) -> None:
        """For a query: it acknowledges some of what it has, with receipts, and leaves gaps."""
        for _ in range(min(3, len(self._unacked) // 2)):
            await self._asks_for_a_receipt(link, 1.0)
        await link.ask("close_consumer", consumer_id=CONSUMER_ID)

    async def _leaves(self, link: Link) -> None:
        draw = self.rng.random()
        if draw < self.work.deletes and not self.acked.asking:
            await self._asking(self._unsubscribes(link))
        elif draw < 0.5:
            await link.ask("close_consumer", consumer_id=CONSUMER_ID)

    async def _seek(self, link: Link) -> None:
        await self._asking(super()._seek(link))

    async def _asking(self, asks: Coroutine[Any, Any, None]) -> None:
        self._is_asking = True
        try:
            await asks
        finally:
            self._is_asking = False

    def _asks_for(self, link: Link, permits: int) -> None:
        self._permits += permits
        link.send("flow", consumer_id=CONSUMER_ID, messagePermits=permits)

    def _asks_again(self, link: Link) -> None:
        """For all that it has, or for one message of it."""
        if self.rng.random() < 0.2:
            asked, self._unacked = self._unacked, []
            link.send("redeliver", consumer_id=CONSUMER_ID)
            self._asked_again.update(offset for offset, _, _ in asked)
            self._asked_again[-1] += 1  # also for what is on its way
        else:
            offset, _, _ = self._unacked.pop(self.rng.randrange(len(self._unacked)))
            number = ledger_number(self.work.log.topic_id)
            id_ = message_id(number, offset, self.partition)
            link.send("redeliver", consumer_id=CONSUMER_ID, message_ids=[id_])
            self._asked_again[offset] += 1

    def _acknowledge(self, link: Link) -> None:
        """Some of what it was given, or all, each by itself; a batch in part at times."""
        rng, number = self.rng, ledger_number(self.work.log.topic_id)
        if not self._unacked or (rng.random() < self._waits and not self.work.over):
            return
        if rng.random() < 0.05:
            last, _, _ = self._unacked[-1]
            self._ack(link, CUMULATIVE, message_id(number, last, self.partition))
        count = len(self._unacked) if self.work.over else rng.randint(1, len(self._unacked))
        for _ in range(count):
            offset, end, known = self._unacked.pop(rng.randrange(len(self._unacked)))
            if end - offset > 1 and rng.random() < 0.2 and not self.work.over:
                at = rng.choice(self._rows[offset])
                self._ack(link, INDIVIDUAL, message_id(number, offset, self.partition, at - offset))
                self.acked.all_of(at, at + 1, self._met)
                self._unacked.append((offset, end, known))
                return
            self._ack(link, INDIVIDUAL, message_id(number, offset, self.partition))
            for row in self._rows[offset]:
                self.acked.all_of(row, row + 1, self._met)

    def _rows_of(self, offset: int, end: int) -> list[int]:
        return self._rows[offset]

    # -- what comes ----------------------------------------

    def _heard(self, link: Link, name: str, part: Any, batch: bytes | None) -> None:
        if name == "close_consumer" and not self._is_asking:
            link.close()
        else:
            super()._heard(link, name, part, batch)

    def _comes(self, part: Any, batch: bytes) -> None:
        ghost, entry = self.work.world.ghost, signed(part.message_id.entryId)
        asked = self._asked_again[entry] + self._asked_again[-1]
        invariants.a_count_is_of_requests(
            ghost, self.process.name, entry, part.redelivery_count, asked
        )
        if not self.work.chunks:
            invariants.no_more_is_sent_than_asked_for(
                ghost, self.process.name, entry, self._permits
            )
        super()._comes(part, batch)

    def _given(self, part: Any, values: list[bytes]) -> None:
        work, ghost = self.work, self.work.world.ghost
        offset = signed(part.message_id.entryId)
        end, words = offset + len(values), list(part.ack_set)
        invariants.nothing_is_told_that_is_not_confirmed(
            ghost, self.process.name, self.partition, end, work.truth.confirmed(self.partition)
        )
        work.rows_are(self.partition, offset, values)
        ghost.meet("message of a shared subscription consumed")
        if values[0] in work.due_ms:
            ghost.meet("delayed message consumed")
            invariants.no_delayed_message_is_early(
                *(ghost, self.process.name, offset, work.due_ms[values[0]]),
                EPOCH_MS + int(self._loop.now * 1000),
            )
        if part.redelivery_count:
            ghost.meet("message of a shared subscription asked for again")
        rows = [row for row in range(offset, end) if not words or is_set(words, row - offset)]
        if self.acked.judged(self._met):
            self._judge_receipts(rows)
        self.acked.sought = None  # what comes first may come to another one
        self._rows[offset] = rows
        self._is_given(offset, end, words)
        self._began = 0

    def _is_sent(self, link: Link, name: str, part: Any) -> None:
        """The broker sends it: what it has of the subscription then."""
        sharing = self._sharing(link) if name == "message" else None
        if sharing is not None:
            self.work.judged(self._judge, sharing)

    def _sharing(self, link: Link) -> Sharing | None:
        return getattr(dispatcher_of(self, link), "sharing", None)

    def _judge(self, sharing: Sharing) -> None:
        """What is pending at its broker, and what waits."""
        holders = Counter(
            row
            for member in sharing.members
            for part in member.pending.values()
            for lo, hi in part.ranges
            for row in range(lo, hi)
        )
        holders.update(row for row in sharing.waiting if row in holders)
        twice = [row for row, count in holders.items() if count > 1]
        invariants.a_row_is_pending_at_one_consumer(
            self.work.world.ghost, self.subscription, self.partition, twice
        )


class KeySharedConsumerModel(SharedConsumerModel):
    """One of several of a partition that share it by keys: slots of keys change hands."""

    SUBSCRIPTION, KIND = "by key", SubscriptionType.KEY_SHARED

    async def _session(self, link: Link) -> None:
        self._last_of_key: dict[str, int] = {}
        await super()._session(link)

    def _given(self, part: Any, values: list[bytes]) -> None:
        super()._given(part, values)
        if self._asked_again or not self.acked.judged(self._met):
            return
        offset, acked = signed(part.message_id.entryId), self.acked
        for row in self._rows[offset]:
            key = self.work.keys.get(values[row - offset])
            if key is not None and values[row - offset] not in self.work.due_ms:
                self._judge_order(self._last_of_key, key, row)
                if row not in acked.came:
                    self._judge_order(acked.last_of_key, key, row)
                    acked.came[row] = None

    def _judge_order(self, last_of_key: dict[str, int], key: str, row: int) -> None:
        before, last_of_key[key] = last_of_key.get(key, -1), row
        invariants.a_key_is_in_order(
            self.work.world.ghost, self.subscription, self.partition, before, row
        )

    def _judge(self, sharing: Sharing) -> None:
        super()._judge(sharing)
        holders: dict[int, set[int]] = {}
        for number, member in enumerate(sharing.members):
            for part in member.pending.values():
                for lo, hi in (gap for own in part.ranges for gap in sharing.acks.missing(*own)):
                    slots = part.slots
                    if len(slots) > 1:
                        slots = slots[lo - part.offset : hi - part.offset]
                    for slot in slots:
                        holders.setdefault(slot, set()).add(number)
        shared = [slot for slot, members in holders.items() if len(members) > 1]
        invariants.a_slot_is_at_one_consumer(
            self.work.world.ghost, self.subscription, self.partition, shared
        )


def consumers_that_share(work: "BrokerWork", *, by_key: bool = False) -> list[ConsumerModel]:
    model = KeySharedConsumerModel if by_key else SharedConsumerModel
    rng = work.world.loop.random_for(f"consumers that share{' by key' if by_key else ''}")
    return [
        model(work, f"{number} of {model.SUBSCRIPTION}", partition)
        for partition in range(work.partitions)
        for number in range(rng.choice((2, 3, 4)))
    ]


def limits_of_sharing(work: "BrokerWork", broker: str) -> dict[str, int]:
    """How many messages the broker's consumers may have without acknowledging them."""
    rng = work.world.loop.random_for(f"limits of {broker}")
    return {
        "consumer_unacked_max": rng.choice((0, 3, 50_000)),
        "subscription_unacked_max": rng.choice((0, 5, 200_000)),
    }
