"""Consumers of a subscription that several share, as Pulsar's clients are: each acknowledges one by
one, asks for messages again, takes few or many, leaves, and comes back.

Always true: what no consumer acknowledged comes to one of them, and the run ends only when all is
acknowledged; a row is pending at one consumer of a broker at most; a broker sends no more than a
consumer has asked for, but for the rest of a batch; a message is counted as often as it was asked
for again, or less. A cumulative acknowledgement counts for nothing.
"""

import asyncio
from collections import Counter
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

if TYPE_CHECKING:
    from tests.simulation.brokers.work import BrokerWork

SHARED_NAME = "shared"
PERMITS = (1, 3, 20, 200)


class SharedConsumerModel(ConsumerModel):
    """One of several of a partition."""

    SUBSCRIPTION, KIND = SHARED_NAME, SubscriptionType.SHARED

    def __init__(self, work: "BrokerWork", name: str, partition: int) -> None:
        super().__init__(work, name, partition, self.SUBSCRIPTION, self.KIND)
        place = (self.SUBSCRIPTION, partition)
        self._asked_again = work.asked_again.setdefault(place, Counter())
        self._rows: dict[int, list[int]] = {}
        """By the offset of what it was given, the rows that are not masked."""

    async def _session(self, link: Link) -> None:
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
            self._acknowledge(link)
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
            if self.rng.random() < 0.05:
                self._asks_again(link)
            if not self.work.over and self._loop.now > ends_s:
                if self.rng.random() < 0.5:
                    await link.ask("close_consumer", consumer_id=CONSUMER_ID)
                return

    def _asks_for(self, link: Link, permits: int) -> None:
        self._permits += permits
        link.send("flow", consumer_id=CONSUMER_ID, messagePermits=permits)

    def _asks_again(self, link: Link) -> None:
        """For all that it has, or for one message of it."""
        if self.rng.random() < 0.3:
            asked, self._unacked = self._unacked, []
            link.send("redeliver", consumer_id=CONSUMER_ID)
            self._asked_again.update(offset for offset, _, _ in asked)
            self._asked_again[-1] += 1  # also for what is on its way
        elif self._unacked:
            offset, _, _ = self._unacked.pop(self.rng.randrange(len(self._unacked)))
            number = ledger_number(self.work.log.topic_id)
            id_ = message_id(number, offset, self.partition)
            link.send("redeliver", consumer_id=CONSUMER_ID, message_ids=[id_])
            self._asked_again[offset] += 1

    def _acknowledge(self, link: Link) -> None:
        """Some of what it was given, or all, each by itself; a batch in part at times."""
        rng, number = self.rng, ledger_number(self.work.log.topic_id)
        if not self._unacked or (rng.random() < 0.3 and not self.work.over):
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

    # -- what comes ----------------------------------------

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
        if part.redelivery_count:
            ghost.meet("message of a shared subscription asked for again")
        self.acked.judged(self._met)
        self.acked.sought = None  # what comes first may come to another one
        self._rows[offset] = [
            row for row in range(offset, end) if not words or is_set(words, row - offset)
        ]
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
