"""A consumer is sent back to the mark while something else of it waits: nothing that was not sent
counts as acknowledged, and all comes again."""

import asyncio

import pytest

from spark_ledger.broker.dispatch import active_dispatcher
from spark_ledger.broker.dispatch.subscriptions import Subscription
from spark_ledger.broker.log.partition import Stored
from spark_ledger.broker.wire.commands import AckType, MessageId, SubscriptionType
from tests.kit.pulsar_batches import chunked, whole_of
from tests.unit.spark_ledger.broker.consumers import (
    LEDGER,
    Batches,
    consumer_of,
    play,
    settle,
)
from tests.unit.spark_ledger.broker.spark_rows import of_spark, partition_of

EXCLUSIVE, FAILOVER = SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER


class SlowBatches(Batches):
    """A partition whose reads wait for `open`."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.open, self.reads = asyncio.Event(), 0
        self.open.set()

    async def read(self, offset, bytes_max=None, *, lossy=False):
        found = await super().read(offset)
        self.reads += 1
        await self.open.wait()
        return found


def offsets(consumer):
    return [at for at, _ in consumer.link.messages]


@pytest.fixture
def no_delay(monkeypatch):
    """A newly active consumer gets messages at once."""
    monkeypatch.setattr(active_dispatcher, "FAILOVER_DELAY_S", 0.0)


@pytest.mark.usefixtures("no_delay")
@pytest.mark.parametrize("way", ["redeliver", "failover"])
def test_what_is_sent_back_while_a_read_waits_begins_at_the_mark(way):
    async def act(made):
        partition = SlowBatches(1, 1, 1, 1)
        subscription = Subscription("s", FAILOVER, None)
        one = consumer_of(subscription, partition, "b")
        made.append(one)
        one.dispatcher.flow(one, 2)
        await settle()
        assert offsets(one) == [0, 1]
        partition.open.clear()
        one.dispatcher.flow(one, 100)
        await settle()  # it reads from offset 2
        if way == "redeliver":
            one.dispatcher.redeliver(one, 1)
        else:  # another consumer comes, is the active one, and goes
            other = consumer_of(subscription, partition, "a")
            made.append(other)
            other.dispatcher.leave(other)
        one.link.messages.clear()
        partition.open.set()
        await settle()
        assert one.dispatcher.acks.durable == 0, "nobody acknowledged offsets 0 and 1"
        assert offsets(one) == [0, 1, 2, 3]

    play(act)


def test_what_is_sent_back_while_the_connection_is_full_begins_at_the_mark():
    async def act(made):
        one = consumer_of(Subscription("s", EXCLUSIVE, None), Batches(1, 1))
        made.append(one)
        wire, send = one.link, one.link.send

        def send_and_fill(frame):
            send(frame)
            wire.open.clear()

        wire.send = send_and_fill
        one.dispatcher.flow(one, 100)
        await settle()
        assert offsets(one) == [0]
        one.dispatcher.rewind()
        wire.send = send
        wire.open.set()
        await settle()
        assert one.dispatcher.acks.durable == 0, "nobody acknowledged offset 0"
        assert offsets(one) == [0, 0, 1]

    play(act)


def test_what_is_sent_back_in_the_middle_of_a_message_begins_at_the_mark():
    async def act(made):
        partition = Batches(1)
        partition.stored.append(Stored(1, 1, whole_of(chunked(b"abc", 3)), False))
        partition.end = 2
        partition.add(1)
        one = consumer_of(Subscription("s", EXCLUSIVE, None), partition)
        made.append(one)
        wire, send = one.link, one.link.send

        def send_and_fill(frame):
            send(frame)
            if wire.messages[-1][0] == 1:
                wire.open.clear()

        wire.send = send_and_fill
        one.dispatcher.flow(one, 100)
        await settle()
        assert offsets(one) == [0, 1]
        one.dispatcher.rewind()
        wire.send = send
        wire.open.set()
        await settle()
        assert one.dispatcher.acks.durable == 0, "nobody acknowledged offset 0"
        assert offsets(one) == [0, *[1] * 3, 0, *[1] * 3, 2]

    play(act)


@pytest.mark.usefixtures("no_delay")
def test_a_consumer_that_stands_still_in_the_middle_of_a_message_does_not_stop_the_next_one():
    async def act(made):
        partition = Batches()
        partition.stored.append(Stored(0, 1, whole_of(chunked(b"abc", 3)), False))
        partition.end = 1
        partition.add(1)
        subscription = Subscription("s", FAILOVER, None)
        first = consumer_of(subscription, partition, "b")
        made.append(first)
        send = first.link.send

        def send_and_fill(frame):
            send(frame)
            if first.link.messages:
                first.link.open.clear()

        first.link.send = send_and_fill
        first.dispatcher.flow(first, 100)
        await settle()
        assert offsets(first) == [0]
        second = consumer_of(subscription, partition, "a")
        made.append(second)
        second.dispatcher.flow(second, 100)
        await settle()
        assert offsets(second) == [0, 0, 0, 1]
        first.link.send = send
        first.link.open.set()
        await settle()
        assert offsets(first) == [0, 0, 0], "a message that is begun is sent whole, and no more"
        second.dispatcher.leave(second)
        await settle()
        assert offsets(first) == [0, 0, 0, 0, 0, 0, 1]

    play(act)


@pytest.mark.usefixtures("no_delay")
def test_a_consumer_that_is_not_active_and_asks_for_everything_again_changes_nothing_for_others():
    async def act(made):
        partition, subscription = Batches(1, 1), Subscription("s", FAILOVER, None)
        active, other = (consumer_of(subscription, partition, name) for name in "ab")
        made += [active, other]
        for consumer in made:
            consumer.dispatcher.flow(consumer, 100)
        await settle()
        other.dispatcher.redeliver(other, 7)
        await settle()
        assert offsets(active) == [0, 1]
        active.dispatcher.leave(active)
        await settle()
        assert offsets(other) == [0, 1]
        assert other.link.epochs == [7, 7]

    play(act)


@pytest.mark.parametrize("is_sent_again", [False, True])
@pytest.mark.parametrize("ack_type", AckType)
def test_an_id_names_no_row_that_a_merge_put_behind_it_after_it_was_sent(is_sent_again, ack_type):
    async def act(made):
        partition = partition_of(of_spark(3))
        one = consumer_of(Subscription("s", EXCLUSIVE, None), partition)
        made.append(one)
        one.dispatcher.flow(one, 3)
        await settle()
        partition.stored, partition.end = [of_spark(13)], 13
        if is_sent_again:
            one.dispatcher.redeliver(one, 1)
        one.dispatcher.flow(one, 100)
        await settle()
        assert one.link.messages == [(0, []), *([(0, [])] if is_sent_again else []), (3, [])]
        list(one.dispatcher.acknowledge(one, MessageId(ledgerId=LEDGER, entryId=0), ack_type))
        assert one.dispatcher.acks.mark == 3
        list(one.dispatcher.acknowledge(one, MessageId(ledgerId=LEDGER, entryId=3), ack_type))
        assert one.dispatcher.acks.mark == 13

    play(act)
