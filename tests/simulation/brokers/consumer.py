"""Consumers and readers as Pulsar's clients are: permits, acks, seeks, and again after a loss.

Always true: of a durable subscription what no consumer acknowledged comes, to one or another of
them; a reader goes on with the batch that it was given last. Everything given is compared with what
is known of its offset, and after a seek what comes first with what was sought. Who does not know
where its subscription is, for a seek or a deletion had no answer, seeks its beginning. Where the
run has chunks it joins them, and asks now and then which message is the last.
"""

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from spark_ledger.broker.dispatch.dispatcher import Dispatcher
from spark_ledger.broker.dispatch.policies import policy_of
from spark_ledger.broker.names import ledger_number, message_id
from spark_ledger.broker.wire.commands import (
    InitialPosition,
    MessageId,
    Refusal,
    SubscriptionType,
    signed,
)
from spark_ledger.metadata import paths
from spark_ledger.topic.subscription.records import decode_subscription
from tests.simulation import invariants
from tests.simulation.brokers import chunks
from tests.simulation.brokers.acked import Acked, Session
from tests.simulation.brokers.link import Link, Lost, session
from tests.simulation.brokers.wire import jitter
from tests.simulation.store import EPOCH_MS

if TYPE_CHECKING:
    from tests.simulation.brokers.work import BrokerWork

CONSUMER_ID = 1
PERMITS = (3, 20, 200)
ASK_S, SILENT_S = 5.0, 10.0
"""A broker that is silent for so long is asked whether it lives, and is left."""
INDIVIDUAL, CUMULATIVE = 0, 1
LEAVING = "leaving"
"""Of a subscription of one consumer, which deletes it at times: how its name begins."""
ENDS = 2**64 - 1, 2**63 - 1
"""What the ids of the beginning and the end are made of."""
BACK_S, OFF_S = 12.0, 1.0
"""So far back in time it is sought at most; and so far brokers' clocks may be off, with a rest."""
ASKS_FOR_THE_LAST = 0.05
RECEIPTS = 0.25
"""How often an acknowledgement asks for a receipt."""


class ConsumerModel:
    """Of one partition; `subscription` "": a reader."""

    SHARES = False
    """Others consume at the same time."""

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
        self.seeks = work.seeks
        self.at = 0
        """One past the last offset that it was given."""
        self._began = 0
        self._permits = 0
        self._unacked: list[tuple[int, int, bool]] = []
        self._joining = chunks.Joining(work.world.ghost, self.process.name)
        self._receipts_rng = work.world.loop.random_for(f"receipts of {name} {partition}")
        self._chunks_rng = work.world.loop.random_for(f"chunks of consumer {name} {partition}")
        self._given_here = -1
        """The last offset that it was given in this session."""
        self._being_sent = -1
        """The offset of the message that its broker sent it last."""
        self.stay_s = self.rng.choice((2.0, 10.0, 60.0))
        self._met = Session(0.0, 0.0)

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
        if not self.acked.sure:
            return False
        if self.subscription:
            return not self._with_rows(self.acked.left_out(0, end))
        return not self._with_rows(range(self.at, end))

    def _with_rows(self, offsets: Iterable[int]) -> list[int]:
        """Those that are no chunks before the last one of a message."""
        return [at for at in offsets if self.work.truth.has_row(self.partition, at)]

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
        self._joining.forget()
        self._given_here = self._being_sent = -1
        options: dict[str, Any] = {"durable": bool(self.subscription)}
        if not self.subscription:
            options["start_message_id"] = self._start()
        else:
            self._began = 0
        if self.kind is SubscriptionType.FAILOVER:
            link.watch(self._leaves_broker)
        asked_s = self._loop.now
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
        self._met = Session(asked_s, self._loop.now)
        permits = self.rng.choice(PERMITS)
        self._permits = permits
        link.send("flow", consumer_id=CONSUMER_ID, messagePermits=permits)
        ends_s = self._loop.now + self.stay_s
        while not link.gone and not self.done:
            await asyncio.sleep(self.rng.uniform(0.05, 0.6))
            self._acknowledge(link)
            await self._asks_for_a_receipt(link)
            if not self.acked.asking and self.rng.random() < self._may_seek:
                await self._seek(link)
                return
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
            if self.work.chunks and self._chunks_rng.random() < ASKS_FOR_THE_LAST:
                await self._asks_for_the_last(link)
        if self.work.chunks and not link.gone:
            await self._asks_for_the_last(link)

    async def _asks_for_the_last(self, link: Link) -> None:
        """As has_message_available of Pulsar's clients does."""
        given = self._given_here
        _, heard = await link.ask("get_last_message_id", consumer_id=CONSUMER_ID)
        found = heard.last_message_id
        last = signed(found.entryId) + max(0, found.batch_index)
        end, ghost = self.work.truth.confirmed(self.partition), self.work.world.ghost
        there = 0 <= last < end and self.work.truth.has_row(self.partition, last)
        self.work.judged(
            invariants.the_last_message_is_the_last_with_a_row,
            *(ghost, self.process.name, last, there, given, end),
        )
        ghost.meet("last message asked for")

    @property
    def _may_seek(self) -> float:
        if not self.acked.sure:
            return 0.5
        return 0.0 if self.work.over else self.seeks

    @property
    def _loop(self) -> Any:
        return self.work.world.loop

    async def _leaves(self, link: Link) -> None:
        if self.subscription.startswith(LEAVING) and self.rng.random() < 0.5:
            await self._unsubscribes(link)
        elif self.rng.random() < 0.5:
            await link.ask("close_consumer", consumer_id=CONSUMER_ID)

    # -- seeks ----------------------------------------

    async def _unsubscribes(self, link: Link) -> None:
        """The subscription is gone; one that is made anew begins at the beginning."""
        name, before = self.subscription, self._owner()
        self.acked.asks(self._loop.now)
        self.work.places.may_go_back(name, self.partition)
        try:
            await link.ask("unsubscribe", consumer_id=CONSUMER_ID, force=self.SHARES)
        except Lost:
            self.acked.unanswered()
            raise
        there = before is not None and before == self._owner()
        invariants.a_deleted_subscription_is_gone(self.work.world.ghost, name, there)
        self.acked.answered(self._loop.now, 0, 0)
        self.work.places.went_back(name, self.partition)
        self.work.world.ghost.meet("subscription of consumers deleted")

    def _owner(self) -> str | None:
        """The token of the subscription that the store has now: one made anew has another."""
        node = self.work.world.store.peek(
            paths.subscription(self.work.log.topic_id, self.subscription)
        )
        return None if node is None else decode_subscription(node.value).owner

    async def _seek(self, link: Link) -> None:
        """To an offset that it was given, to an end, or to a time."""
        acked, ghost = self.acked, self.work.world.ghost
        at, options = self._wanted()
        by_time = "message_publish_time" in options
        acked.asks(self._loop.now)
        if self.subscription:
            to = 0 if by_time else int(min(at, self.work.truth.confirmed(self.partition)))
            self.work.places.may_go_back(self.subscription, self.partition, to)
        self._unacked.clear()
        try:
            await link.ask("seek", consumer_id=CONSUMER_ID, **options)
        except Lost:
            acked.unanswered()
            raise
        end = self.work.truth.confirmed(self.partition)
        lo, hi = self._written_at(at, end) if by_time else (min(at, end), min(at, end))
        if not by_time and "message_id" in options and at > self.at:  # the end
            lo, hi = self.at, end
        acked.answered(self._loop.now, lo, hi)
        self.at = self._began = hi
        ghost.meet("subscription sought by time" if by_time else "subscription sought by id")
        if self.subscription:
            self.work.places.went_back(self.subscription, self.partition)
            self.work.has_sought(link.server)

    def _wanted(self) -> tuple[float, dict[str, Any]]:
        """An offset, or a time in seconds, and the fields that name it."""
        by_time = self.acked.sure and self.rng.random() < 0.3
        return self._wanted_time() if by_time else self._wanted_offset()

    def _wanted_offset(self) -> tuple[float, dict[str, Any]]:
        number, draw = ledger_number(self.work.log.topic_id), self.rng.random()
        if draw < 0.2 or not self.acked.sure:
            return 0, {"message_id": MessageId(ledgerId=ENDS[0], entryId=ENDS[0])}
        if draw < 0.3:
            return float("inf"), {"message_id": MessageId(ledgerId=ENDS[1], entryId=ENDS[1])}
        at = self.rng.randint(0, self.at)
        index = min(at, self.rng.choice((-1, -1, 0, 1)))  # as if it were in a batch
        start = at - max(0, index)
        return at, {"message_id": message_id(number, start, self.partition, index)}

    def _wanted_time(self) -> tuple[float, dict[str, Any]]:
        at_s = self._loop.now - self.rng.uniform(-OFF_S, BACK_S)
        return at_s, {"message_publish_time": EPOCH_MS + max(0, int(at_s * 1000))}

    def _written_at(self, at_s: float, end: int) -> tuple[int, int]:
        """Between which offsets lies what was written first from that time on."""
        lo, hi, known = 0, end, self.work.work.ghost.offsets
        for at in range(end):
            value = known.get((self.work.log.topic_id, self.partition, at))
            if self.work.truth.received.get(value, at_s) < at_s - OFF_S:
                lo = at + 1
            if self.work.truth.first_sent_s.get(value, at_s) > at_s + OFF_S:
                hi = min(hi, at)
        return lo, hi

    def _start(self) -> MessageId:
        """A reader's: the beginning, or the last batch that it was given."""
        number = ledger_number(self.work.log.topic_id)
        if not self.at:
            return MessageId(ledgerId=ENDS[0], entryId=ENDS[0])
        self.at = self._began
        return message_id(number, self._began, self.partition)

    # -- what comes ----------------------------------------

    def _heard(self, link: Link, name: str, part: Any, batch: bytes | None) -> None:
        if name == "message":
            assert batch is not None
            self.work.judged(self._comes, part, batch)
        elif name == "close_consumer" and not self.acked.asking:
            link.close()
        elif name == "close_consumer":
            link.ending = True

    def _comes(self, part: Any, batch: bytes) -> None:
        whole = self._joining.whole(batch, signed(part.message_id.entryId))
        if whole is None:
            self._permits -= 1
        else:
            self._given(part, chunks.values_of(whole))

    def _given(self, part: Any, values: list[bytes]) -> None:
        work, ghost = self.work, self.work.world.ghost
        offset = signed(part.message_id.entryId)
        end, known = offset + len(values), list(part.ack_set)
        invariants.nothing_is_told_that_is_not_confirmed(
            ghost, self.process.name, self.partition, end, work.truth.confirmed(self.partition)
        )
        work.rows_are(self.partition, offset, values)
        ghost.meet("message consumed" if self.subscription else "message read")
        if not self.acked.judged(self._met):
            self._is_given(offset, end, known)
            return
        if self.acked.sought is not None:
            (lo, hi), self.acked.sought = self.acked.sought, None
            while hi < offset and not work.truth.has_row(self.partition, hi):
                hi += 1
            invariants.what_was_sought_comes_first(ghost, self.process.name, (lo, hi), offset, end)
        hidden = [at for at in range(offset, end) if known and not is_set(known, at - offset)]
        self._judge_receipts(at for at in range(offset, end) if at not in hidden)
        left_out = [at for at in hidden if at in self.acked.left_out(at, at + 1)]
        if not self.subscription:  # rows of Spark that were merged are in larger batches
            left_out = [at for at in left_out if at >= self.at] + [*range(self.at, offset)]
        else:
            left_out += self.acked.left_out(self._began, offset)
        invariants.a_consumer_passes_over_nothing(
            ghost, self.process.name, self.partition, self._with_rows(left_out)
        )
        self._is_given(offset, end, known)

    def _judge_receipts(self, rows: Iterable[int]) -> None:
        """Of the rows that it is given."""
        again = [row for row in rows if self.acked.had_receipt(row, self._met)]
        invariants.what_has_a_receipt_is_not_sent_again(
            *(self.work.world.ghost, self.process.name, self.partition, again)
        )

    def _is_given(self, offset: int, end: int, known: list[int]) -> None:
        hidden = sum(bool(known) and not is_set(known, i) for i in range(end - offset))
        self.at = max(self.at, end)
        self._given_here = max(self._given_here, end - 1)
        self._began = end if self.subscription else offset
        self._permits -= end - offset - hidden
        self._unacked.append((offset, end, bool(known)))

    def _leaves_broker(self, link: Link, name: str, part: Any) -> None:
        """The broker sends it; of a failover subscription to the active consumer alone (B14),
        whatever the clients know of that by now."""
        if name != "message" or self._goes_on(part):
            return
        dispatcher = dispatcher_of(self, link)
        if dispatcher is not None:
            active = policy_of(self.kind).active(dispatcher.consumers, self.partition)
            self.work.judged(
                invariants.one_consumer_is_given_messages_at_a_time,
                *(self.work.world.ghost, (link.server.name, self.subscription, self.partition)),
                *(self.name, "" if active is None else active.name),
            )

    def _goes_on(self, part: Any) -> bool:
        """Whether it is one more chunk of a message that was begun, which is sent whole."""
        before, self._being_sent = self._being_sent, signed(part.message_id.entryId)
        return self.work.chunks and before == self._being_sent

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
            self.acked.all_of(offset, end, self._met)
            return
        upto = len(self._unacked) if self.work.over else rng.randint(1, len(self._unacked))
        offset, end, _ = self._unacked[upto - 1]
        del self._unacked[:upto]
        if end - offset > 1 and rng.random() < 0.2 and not self.work.over:
            inside = rng.randint(0, end - offset - 2)
            self._ack(link, CUMULATIVE, message_id(number, offset, self.partition, inside))
            self.acked.all_up_to(offset + inside + 1, self._met)
            self._unacked.insert(0, (offset, end, False))
            return
        self._ack(link, CUMULATIVE, message_id(number, offset, self.partition))
        self.acked.all_up_to(end, self._met)

    async def _asks_for_a_receipt(self, link: Link, share: float = RECEIPTS) -> None:
        """Acknowledges one of what it was given, often beyond others, and waits for the answer."""
        if not self._unacked or not self.subscription or self._receipts_rng.random() > share:
            return
        offset, end, _ = self._unacked.pop(self._receipts_rng.randrange(len(self._unacked)))
        number, met = ledger_number(self.work.log.topic_id), self._met
        rows = self._rows_of(offset, end)
        for row in rows:
            self.acked.all_of(row, row + 1, met)
        options = {"consumer_id": CONSUMER_ID, "ack_type": INDIVIDUAL}
        found = [message_id(number, offset, self.partition)]
        _, answer = await link.ask("ack", message_id=found, **options)
        if not answer.HasField("error"):
            for row in rows:
                self.acked.received(row, row + 1, met, self._loop.now)
            self.work.world.ghost.meet("receipt of an acknowledgement")

    def _rows_of(self, offset: int, end: int) -> Iterable[int]:
        """What an acknowledgement of all of a message acknowledges."""
        return range(offset, end)

    def _ack(self, link: Link, kind: int, found: MessageId) -> None:
        self.work.world.ghost.meet("acknowledged")
        link.send("ack", consumer_id=CONSUMER_ID, ack_type=kind, message_id=[found])


def is_set(words: list[int], bit: int) -> bool:
    word = words[bit // 64] if bit // 64 < len(words) else 0
    return bool((word >> (bit % 64)) & 1)


def dispatcher_of(consumer: ConsumerModel, link: Link) -> Dispatcher | None:
    """The dispatcher of the consumer's subscription at the broker of its connection."""
    topic = link.server.broker.open_topic(consumer.work.log.topic_id)
    if topic is None:
        return None
    try:
        subscription = topic.subscriptions.named(consumer.subscription)
    except Refusal:
        return None
    return subscription.dispatcher_of(consumer.partition)
