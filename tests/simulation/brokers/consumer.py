"""Consumers and readers as Pulsar's clients are: permits, acknowledgements, and again after a loss.

Always true: of a durable subscription what no consumer acknowledged comes, to one or another of
them; a reader goes on with the batch that it was given last. Everything given is compared with what
is known of its offset.
"""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spark_ledger.broker.names import ledger_number, message_id
from spark_ledger.broker.wire.commands import InitialPosition, MessageId, SubscriptionType, signed
from tests.simulation import invariants
from tests.simulation.brokers.link import Link, session
from tests.simulation.brokers.truth import values_of
from tests.simulation.brokers.wire import jitter

if TYPE_CHECKING:
    from tests.simulation.brokers.work import BrokerWork

CONSUMER_ID = 1
PERMITS = (3, 20, 200)
ASK_S, SILENT_S = 5.0, 10.0
"""A broker that is silent for so long is asked whether it lives, and is left."""
INDIVIDUAL, CUMULATIVE = 0, 1


@dataclass
class Acked:
    """What the consumers of a subscription have sent acknowledgements of, of one partition; whether
    they came to the broker nobody knows."""

    up_to: int = 0
    single: dict[int, None] = field(default_factory=dict)

    def left_out(self, lo: int, hi: int) -> list[int]:
        """Which of these offsets were not acknowledged."""
        return [at for at in range(max(lo, self.up_to), hi) if at not in self.single]

    def all_up_to(self, end: int) -> None:
        self.up_to = max(self.up_to, end)


class ConsumerModel:
    """Of one partition; `subscription` "": a reader."""

    def __init__(
        self,
        work: "BrokerWork",
        name: str,
        partition: int,
        subscription: str,
        kind: SubscriptionType = SubscriptionType.EXCLUSIVE,
    ) -> None:
        self.work = work
        self.name = name
        self.partition = partition
        self.subscription = subscription
        self.kind = kind
        self.process = work.world.loop.process(f"consumer {name} {partition}")
        self.rng = work.world.loop.random_for(f"consumer {name} {partition}")
        self.acked = Acked()
        if subscription:
            self.acked = work.acked.setdefault((subscription, partition), self.acked)
        self.at = 0
        """One past the last offset that it was given."""
        self._began = 0
        self._permits = 0
        self._unacked: list[tuple[int, int, bool]] = []
        self._stay_s = self.rng.choice((2.0, 10.0, 60.0))

    def told(self) -> str:
        end = self.work.truth.confirmed(self.partition)
        who = f"consumer {self.name} of '{self.subscription}', partition {self.partition}"
        return f"{who}: at {self.at} of {end}"

    @property
    def done(self) -> bool:
        """It has all there is: of a subscription all is acknowledged, by whomever."""
        if not (self.work.over and self.work.produced):
            return False
        end = self.work.truth.confirmed(self.partition)
        if self.subscription:
            return not self.acked.left_out(0, end)
        return self.at >= end

    async def run(self) -> None:
        world, brokers = self.work.world, self.work.brokers
        while not self.done:
            await session(world, brokers, self.process, self.rng, self._topic, self._session)
            await asyncio.sleep(jitter(self.rng))

    @property
    def _topic(self) -> str:
        return self.work.partition_name(self.partition)

    async def _session(self, link: Link) -> None:
        link.heard = lambda name, part, batch: self._heard(link, name, part, batch)
        self._unacked.clear()
        options: dict[str, Any] = {"durable": bool(self.subscription)}
        if not self.subscription:
            options["start_message_id"] = self._start()
        else:
            self._began = 0
        await link.ask(
            "subscribe",
            topic=self._topic,
            subscription=self.subscription or f"reader {self.name} {self.partition}",
            subType=self.kind,
            consumer_id=CONSUMER_ID,
            consumer_name=self.name,
            initialPosition=InitialPosition.EARLIEST,
            **options,
        )
        permits = self.rng.choice(PERMITS)
        self._permits = permits
        link.send("flow", consumer_id=CONSUMER_ID, messagePermits=permits)
        ends_s = self.work.world.loop.now + self._stay_s
        while not link.gone and not self.done:
            await asyncio.sleep(self.rng.uniform(0.05, 0.6))
            self._acknowledge(link)
            silent_s = self.work.world.loop.now - link.heard_s
            if silent_s > SILENT_S:
                return
            if silent_s > ASK_S:
                link.send("ping")
            if self._permits < permits // 2 + 1:
                self._permits += permits
                link.send("flow", consumer_id=CONSUMER_ID, messagePermits=permits)
            if self.rng.random() < 0.02 and self.subscription:
                link.send("redeliver", consumer_id=CONSUMER_ID)
                self._unacked.clear()
            if not self.work.over and self.work.world.loop.now > ends_s:
                await self._leaves(link)
                return

    async def _leaves(self, link: Link) -> None:
        if self.rng.random() < 0.5:
            await link.ask("close_consumer", consumer_id=CONSUMER_ID)

    def _start(self) -> MessageId:
        """A reader's: the beginning, or the last batch that it was given."""
        number = ledger_number(self.work.log.topic_id)
        if not self.at:
            return MessageId(ledgerId=2**64 - 1, entryId=2**64 - 1)
        self.at = self._began
        return message_id(number, self._began, self.partition)

    # -- what comes ----------------------------------------

    def _heard(self, link: Link, name: str, part: Any, batch: bytes | None) -> None:
        if name == "message":
            assert batch is not None
            self.work.judged(self._given, part, batch)
        elif name == "close_consumer":
            link.close()

    def _given(self, part: Any, batch: bytes) -> None:
        work, ghost = self.work, self.work.world.ghost
        values, offset = values_of(batch), signed(part.message_id.entryId)
        end, known = offset + len(values), list(part.ack_set)
        invariants.nothing_is_told_that_is_not_confirmed(
            ghost, self.process.name, self.partition, end, work.truth.confirmed(self.partition)
        )
        work.rows_are(self.partition, offset, values)
        ghost.meet("message consumed" if self.subscription else "message read")
        hidden = [at for at in range(offset, end) if known and not _is_set(known, at - offset)]
        left_out = [at for at in hidden if at in self.acked.left_out(at, at + 1)]
        if self.subscription:
            left_out += self.acked.left_out(self._began, offset)
        else:
            left_out += [*range(self.at, offset)]
        invariants.a_consumer_passes_over_nothing(
            ghost, self.process.name, self.partition, left_out
        )
        self.at = max(self.at, end)
        self._began = end if self.subscription else offset
        self._permits -= len(values) - len(hidden)
        self._unacked.append((offset, end, bool(known)))

    def _acknowledge(self, link: Link) -> None:
        """Some of what it was given, or all, in either way."""
        if not self._unacked or not self.subscription:
            return
        rng, number = self.rng, ledger_number(self.work.log.topic_id)
        if rng.random() < 0.3 and not self.work.over:
            return
        if rng.random() < 0.25:
            offset, end, _ = self._unacked.pop(rng.randrange(len(self._unacked)))
            self._ack(link, INDIVIDUAL, message_id(number, offset, self.partition))
            self.acked.single.update(dict.fromkeys(range(offset, end)))
            return
        upto = len(self._unacked) if self.work.over else rng.randint(1, len(self._unacked))
        offset, end, _ = self._unacked[upto - 1]
        del self._unacked[:upto]
        if end - offset > 1 and rng.random() < 0.2 and not self.work.over:
            inside = rng.randint(0, end - offset - 2)
            self._ack(link, CUMULATIVE, message_id(number, offset, self.partition, inside))
            self.acked.all_up_to(offset + inside + 1)
            self._unacked.insert(0, (offset, end, False))
            return
        self._ack(link, CUMULATIVE, message_id(number, offset, self.partition))
        self.acked.all_up_to(end)

    def _ack(self, link: Link, kind: int, found: MessageId) -> None:
        self.work.world.ghost.meet("acknowledged")
        link.send("ack", consumer_id=CONSUMER_ID, ack_type=kind, message_id=[found])


def _is_set(words: list[int], bit: int) -> bool:
    word = words[bit // 64] if bit // 64 < len(words) else 0
    return bool((word >> (bit % 64)) & 1)
