"""Rows of Spark come to consumers of keys: cut out of their batch, or masked in it."""

from spark_ledger.broker.dispatch.key_slots import slot_of
from spark_ledger.broker.dispatch.shared_dispatcher import SharingRules
from spark_ledger.broker.dispatch.sharing import UnackedLimits
from spark_ledger.broker.dispatch.subscriptions import Subscription
from spark_ledger.broker.wire.commands import AckType, MessageId, SubscriptionType
from spark_ledger.broker.wire.frames import PulsarFrameReader
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.message_batch import KEY
from spark_ledger.topic.entry.pulsar_columns import decode_batches
from tests.unit.spark_ledger.broker.consumers import EXCLUSIVE, LEDGER, consumer_of, play, settle
from tests.unit.spark_ledger.broker.spark_rows import of_spark, partition_of

KEY_SHARED = SubscriptionType.KEY_SHARED


class Keys:
    """By offset the keys that a consumer gets; masked ones are not among them."""

    def __init__(self, consumer):
        self.keys, self._send = {}, consumer.link.send
        consumer.link.send = self

    def __call__(self, frame):
        (got,) = PulsarFrameReader().feed(frame)
        part = got.command.message
        rows = decode_batches([pulsar_batch.parse(got.batch, check=True)]).column(KEY).to_pylist()
        bits = list(part.ack_set) or [-1]
        for at, key in enumerate(rows):
            if bits[at // 64] >> at % 64 & 1:
                assert part.message_id.entryId + at not in self.keys
                self.keys[part.message_id.entryId + at] = key
        self._send(frame)


def acknowledge(consumer, offset):
    id_ = MessageId(ledgerId=LEDGER, entryId=offset)
    list(consumer.dispatcher.acknowledge(consumer, id_, AckType.INDIVIDUAL))


def test_each_row_comes_to_the_consumer_of_its_key_and_is_acknowledged_by_itself():
    async def act(made):
        partition = partition_of(of_spark(40), of_spark(20, 40))
        subscription = Subscription("s", KEY_SHARED, None)
        consumers = [consumer_of(subscription, partition, name) for name in "abc"]
        made += consumers
        got = [Keys(consumer) for consumer in consumers]
        for consumer in consumers:
            consumer.dispatcher.flow(consumer, 100)
        await settle()
        owner_of = subscription.dispatcher_of(0).sharing.choice._owners.owner_of
        for consumer, of_consumer in zip(consumers, got, strict=True):
            mine = [row for row in range(60) if owner_of(slot_of(b"k%d" % row)) is consumer]
            assert of_consumer.keys == {row: b"k%d" % row for row in mine}
            assert consumer.permits == 100 - len(mine)
        acks = consumers[0].dispatcher.acks
        for consumer, of_consumer in zip(consumers, got, strict=True):
            before = {row for lo, hi in acks.missing(0, 60) for row in range(lo, hi)}
            for offset in list(consumer.pending):
                acknowledge(consumer, offset)
            after = {row for lo, hi in acks.missing(0, 60) for row in range(lo, hi)}
            assert before - after == of_consumer.keys.keys()
        assert acks.mark == 60

    play(act)


def test_a_batch_that_is_sent_in_part_when_the_limit_is_reached_is_sent_once():
    async def act(made):
        partition = partition_of(of_spark(40))
        rules = SharingRules(UnackedLimits(0, 10))
        subscription = Subscription("s", KEY_SHARED, None, rules)
        consumers = [consumer_of(subscription, partition, name) for name in "ab"]
        made += consumers
        got = [Keys(consumer) for consumer in consumers]
        for consumer in consumers:
            consumer.dispatcher.flow(consumer, 100)
        acks = consumers[0].dispatcher.acks
        await settle()
        sent = got[0].keys | got[1].keys
        assert 10 <= len(sent) < 40
        assert set(consumers[0].dispatcher.sharing.waiting) == set(range(40)) - sent.keys()
        while acks.mark < 40:
            assert any(consumer.pending for consumer in consumers)
            for consumer in consumers:
                for offset in list(consumer.pending):
                    acknowledge(consumer, offset)
            await settle()
        assert sorted([*got[0].keys, *got[1].keys]) == list(range(40))

    play(act)


def test_a_consumer_of_ranges_acknowledges_only_the_rows_of_its_ranges():
    async def act(made):
        partition = partition_of(of_spark(40))
        consumer = consumer_of(Subscription("s", EXCLUSIVE, None), partition)
        consumer.ranges = ((0, 32_767),)
        made.append(consumer)
        got = Keys(consumer)
        consumer.dispatcher.flow(consumer, 100)
        await settle()
        mine = {row for row in range(40) if slot_of(b"k%d" % row) <= 32_767}
        assert got.keys.keys() == mine
        for offset, masked in consumer.link.messages:
            assert not masked
            acknowledge(consumer, offset)
        left = consumer.dispatcher.acks.missing(0, 40)
        assert {row for lo, hi in left for row in range(lo, hi)} == set(range(40)) - mine

    play(act)
