"""Clients without a queue ask for one message at a time, and take no batches: rows of Spark come to
them one by one."""

import pytest

from spark_ledger.broker.dispatch.subscriptions import Subscription
from spark_ledger.broker.wire.commands import AckType, MessageId, Refusal, SubscriptionType
from spark_ledger.broker.wire.frames import PulsarFrameReader
from spark_ledger.topic.entry import pulsar_batch
from tests.unit.spark_ledger.broker.consumers import (
    EXCLUSIVE,
    LEDGER,
    SHARED,
    consumer_of,
    play,
    settle,
)
from tests.unit.spark_ledger.broker.spark_rows import of_spark, partition_of


class Payloads:
    """What a consumer gets: the value of each message outside of a batch."""

    def __init__(self, consumer):
        self.values, self._send = [], consumer.link.send
        consumer.link.send = self

    def __call__(self, frame):
        (one,) = PulsarFrameReader().feed(frame)
        if one.command.HasField("message"):
            batch = pulsar_batch.parse(one.batch)
            if not batch.metadata.HasField("num_messages_in_batch"):
                self.values.append(
                    (batch.metadata.partition_key, bytes(one.batch)[batch.payload_at :])
                )
        self._send(frame)


def offsets(consumer):
    return [at for at, _ in consumer.link.messages]


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED, SubscriptionType.KEY_SHARED])
def test_one_row_of_spark_comes_for_each_permit(kind):
    async def act(made):
        partition = partition_of(of_spark(3), of_spark(2, 3))
        one = consumer_of(Subscription("s", kind, None), partition)
        made.append(one)
        payloads = Payloads(one)
        for count in range(1, 6):
            one.dispatcher.flow(one, 1)
            await settle()
            assert offsets(one) == list(range(count))
            assert one.permits == 0
        assert payloads.values == [(f"k{n}", b"v%d" % n) for n in range(5)]
        for offset in (1, 0, 3):
            id_ = MessageId(ledgerId=LEDGER, entryId=offset)
            list(one.dispatcher.acknowledge(one, id_, AckType.INDIVIDUAL))
        acks = one.dispatcher.acks
        assert acks.missing(0, 5) == [(2, 3), (4, 5)], "each row is acknowledged by itself"

    play(act)


def test_a_client_with_a_queue_gets_the_batch():
    async def act(made):
        one = consumer_of(Subscription("s", EXCLUSIVE, None), partition_of(of_spark(3)))
        made.append(one)
        one.dispatcher.flow(one, 2)
        await settle()
        assert offsets(one) == [0]
        assert one.permits == -1

    play(act)


def test_of_a_shared_batch_of_spark_the_others_get_the_rest():
    async def act(made):
        partition, subscription = partition_of(of_spark(4)), Subscription("s", SHARED, None)
        rows = consumer_of(subscription, partition, "rows")
        rows.dispatcher.flow(rows, 1)
        await settle()
        other = consumer_of(subscription, partition, "other")
        other.dispatcher.flow(other, 10)
        made += [rows, other]
        await settle()
        assert rows.link.messages == [(0, [])]
        assert other.link.messages == [(0, [0b1110])]
        id_ = MessageId(ledgerId=LEDGER, entryId=0)
        list(rows.dispatcher.acknowledge(rows, id_, AckType.INDIVIDUAL))
        assert rows.dispatcher.acks.missing(0, 4) == [(1, 4)]
        rows.dispatcher.redeliver(rows, None)
        list(other.dispatcher.acknowledge(other, id_, AckType.INDIVIDUAL))
        assert rows.dispatcher.acks.mark == 4

    play(act)


def test_a_row_that_was_given_back_is_not_named_by_a_late_ack_of_its_batch():
    async def act(made):
        partition, subscription = partition_of(of_spark(3)), Subscription("s", SHARED, None)
        rows = consumer_of(subscription, partition, "rows")
        rows.dispatcher.flow(rows, 1)
        await settle()
        rows.dispatcher.redeliver(rows, None)
        other = consumer_of(subscription, partition, "other")
        other.dispatcher.flow(other, 10)
        made += [rows, other]
        await settle()
        id_ = MessageId(ledgerId=LEDGER, entryId=0)
        with pytest.raises(Refusal):
            list(rows.dispatcher.acknowledge(rows, id_, AckType.INDIVIDUAL))
        assert rows.dispatcher.acks.mark == 0

    play(act)
