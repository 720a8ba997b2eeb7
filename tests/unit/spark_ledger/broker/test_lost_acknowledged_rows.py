"""Subscriptions of a topic whose page-cache durability lost rows with all copies: later rows get
the offsets of the lost rows, and no subscription passes over these later rows."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from spark_ledger import errors
from spark_ledger.broker.dispatch.delays import DelayIndex
from spark_ledger.broker.dispatch.subscriptions import TopicSubscriptions
from spark_ledger.topic.acks.nodes import AckNodes
from spark_ledger.topic.subscription import records
from spark_ledger.topic.subscription.records import SubscriptionKind
from tests.kit.subscribing import subscribed
from tests.unit.spark_ledger.broker.owners import Sent
from tests.unit.spark_ledger.broker.two_brokers import Brokers, named
from tests.unit.spark_ledger.topic.acking_brokers import acking_broker, acknowledge
from tests.unit.spark_ledger.topic.stage import play

LINK = SimpleNamespace(send=lambda frame: None)


async def stored(broker, count):
    topic, partition = await broker.partition(named(0))
    for _ in range(count):
        sent = Sent(b"x")
        partition.writer.append(sent)
        await sent.over.wait()
    return topic, partition


async def acknowledged_before_the_loss(stage, *offsets, up_to=0):
    """An owner of an earlier epoch gave receipts for these rows, of which the partition has none:
    its power failed, and that of all bookies."""
    lost = await acking_broker(stage, "lost")
    cursor, acks = await lost.consume(0, name="s")
    acks.add_up_to(up_to)
    await acknowledge(cursor, acks, *offsets)
    return lost, cursor


async def page_cache(stage):
    await stage.client.topics.change_policies("t", {"durability": "page-cache"})
    stage.topic = await stage.client.topics.open("t")


@pytest.mark.parametrize("in_share", [False, True])
def test_messages_that_get_offsets_of_lost_rows_are_not_acknowledged(in_share, monkeypatch):
    async def act(stage):
        await page_cache(stage)
        lost, cursor = await acknowledged_before_the_loss(stage, up_to=10)
        if in_share:
            await lost.release(cursor)
        await lost.die()
        b = await Brokers(stage).new("b")
        release = b.cursors.release

        async def late(*of):
            await asyncio.sleep(3)
            await release(*of)

        monkeypatch.setattr(b.cursors, "release", late)
        await b.lookup(named(0), authoritative=True)
        await b.partition(named(0))
        listed = await stage.client.subscriptions.list(stage.topic.id)
        assert listed[0].positions[0] == 0, "retention goes by the share"
        topic, partition = await stored(b, 12)  # before a consumer comes
        consumer = await subscribed(topic, partition, link=LINK)
        assert consumer.dispatcher.acks.mark == 0
        await asyncio.sleep(3)
        assert (await stage.client.subscriptions.positions(stage.topic.id, "s"))[0] == 0
        await b.close()

    play(act)


async def positions(stage):
    infos = await stage.client.subscriptions.list(stage.topic.id)
    return {info.name: (info.kind, info.positions[0]) for info in infos}


@pytest.mark.parametrize("ends", ["released", "killed"])
def test_positions_without_an_ack_ledger_go_back_those_of_queries_too(ends):
    async def act(stage):
        await page_cache(stage)
        subscriptions = stage.client.subscriptions
        await subscriptions.create_for_consumers(stage.topic.id, "s", {0: 10})
        query = await subscriptions.open(stage.topic, "q", "query", "run", start={0: 0})
        query.advance({0: 10})
        await query.durable()
        await (query.release() if ends == "released" else query.abandon())
        b = await Brokers(stage).new("b")
        await b.lookup(named(0), authoritative=True)
        topic, partition = await stored(b, 12)
        assert await positions(stage) == {
            "q": (SubscriptionKind.QUERY, 0),
            "s": (SubscriptionKind.CONSUMER, 0),
        }
        consumer = await subscribed(topic, partition, name="q", link=LINK)
        assert consumer.dispatcher.acks.mark == 0
        await b.close()

    play(act)


def test_a_query_goes_back_no_further_than_a_commit_and_keeps_what_consumers_acknowledged():
    async def act(stage):
        await page_cache(stage)
        lost, cursor = await acknowledged_before_the_loss(stage, 2, 7)
        await lost.release(cursor)
        intent = await stage.intent()
        await stage.commit(intent, 0, await stage.written(intent, [b"x", b"y", b"z"]))
        query = await stage.client.subscriptions.open(stage.topic, "s", "query", "run")
        query.advance({0: 1})
        await query.durable()
        other = await stage.client.subscriptions.open(stage.topic, "q", "query", "run")
        other.advance({0: 3})
        await other.durable()
        await lost.die()
        b = await Brokers(stage).new("b")
        await b.lookup(named(0), authoritative=True)
        await b.partition(named(0))
        assert {name: at for name, (_, at) in (await positions(stage)).items()} == {"s": 1, "q": 3}
        await query.release()
        await other.release()
        topic, partition = await stored(b, 12)
        consumer = await subscribed(topic, partition, link=LINK)
        assert (consumer.dispatcher.acks.mark, [*consumer.dispatcher.acks.rows]) == (1, [2])
        await b.close()

    play(act)


def test_a_query_of_more_partitions_than_fit_into_a_record_goes_back_by_one_write(monkeypatch):
    monkeypatch.setattr(records, "POSITIONS_BYTES_MAX", 20)

    async def act(stage):
        await page_cache(stage)
        subscriptions, seeks = stage.client.subscriptions, []
        query = await subscriptions.open(stage.topic, "q", "query", "run")
        query.advance({0: 10, 1: 10, 2: 0})
        await query.durable()
        await query.release()
        b = await Brokers(stage).new("b")
        seek = b.client.subscriptions.seek

        async def counted(*of, **how):
            seeks.append(of)
            return await seek(*of, **how)

        monkeypatch.setattr(b.client.subscriptions, "seek", counted)
        for number in range(3):
            await b.lookup(named(number), authoritative=True)
        topic, _ = await b.partition(named(0))
        assert sorted(topic.partitions) == [0, 1, 2]
        assert await subscriptions.positions(stage.topic.id, "q") == dict.fromkeys(range(3), 0)
        assert len(seeks) == 1
        again = await subscriptions.open(stage.topic, "q", "query", "later")
        assert await again.recovered() == dict.fromkeys(range(3), 0)
        await again.release()
        await b.close()

    play(act, partitions=3)


def test_a_partition_whose_subscriptions_cannot_go_back_waits_and_stops_no_other(monkeypatch):
    async def act(stage):
        await page_cache(stage)
        create = stage.client.subscriptions.create_for_consumers
        await create(stage.topic.id, "s", {0: 10, 1: 10})
        b = await Brokers(stage).new("b")
        for number in (0, 1):
            await b.lookup(named(number), authoritative=True)
        adopt, failures = TopicSubscriptions.adopt, [errors.Unavailable("for a while")]

        async def adopt_later(subscriptions, name, log):
            if failures and log.number == 0:
                raise failures.pop()
            await adopt(subscriptions, name, log)

        monkeypatch.setattr(TopicSubscriptions, "adopt", adopt_later)
        opening = (b.partition(named(number)) for number in (0, 1))
        first, second = await asyncio.gather(*opening, return_exceptions=True)
        assert isinstance(first, errors.Unavailable) and isinstance(second, tuple)
        await b.partition(named(0))
        (info,) = await stage.client.subscriptions.list(stage.topic.id)
        assert info.positions == {0: 0, 1: 0}
        await b.close()

    play(act, partitions=2)


def test_rows_acknowledged_beyond_a_gap_are_forgotten_with_the_rows():
    async def act(stage):
        await page_cache(stage)
        lost, _ = await acknowledged_before_the_loss(stage, 2, 5, 7)
        brokers = Brokers(stage)
        a = await brokers.new("a")
        await lost.die()
        await a.lookup(named(0), authoritative=True)
        topic, partition = await stored(a, 12)
        consumer = await subscribed(topic, partition, link=LINK)
        assert not consumer.dispatcher.acks.rows
        await a.close()

    play(act)


@pytest.mark.parametrize("comes_back", ["after", "before"])
def test_rows_acknowledged_before_a_query_came_are_forgotten_with_the_rows(comes_back):
    async def act(stage):
        await page_cache(stage)
        lost, cursor = await acknowledged_before_the_loss(stage, 2, 5, 7)
        await lost.release(cursor)
        query = await stage.client.subscriptions.open(stage.topic, "s", "query", "run")
        if comes_back == "after":
            await query.release()
        brokers = Brokers(stage)
        a = await brokers.new("a")
        await lost.die()
        await a.lookup(named(0), authoritative=True)
        topic, partition = await stored(a, 12)
        if comes_back == "before":
            await query.release()
        consumer = await subscribed(topic, partition, link=LINK)
        assert (consumer.dispatcher.acks.mark, [*consumer.dispatcher.acks.rows]) == (0, [])
        await a.close()

    play(act)


def test_a_position_in_a_commit_that_the_owner_has_not_read_stays(monkeypatch):
    async def act(stage):
        await page_cache(stage)
        b = await Brokers(stage).new("b")
        await b.lookup(named(0), authoritative=True)
        topic, partition = await b.partition(named(0))
        query = await acking_broker(stage, "query")
        await query.release(await query.open(at=3, name="s"))
        intent = await stage.intent()
        rows = await stage.written(intent, [b"x", b"y", b"z"])
        with monkeypatch.context() as patched:
            before = partition.log.held
            patched.setattr(type(partition.log), "held", property(lambda _: before))
            await stage.commit(intent, 0, rows)
            assert partition.log.end == 0
            consumer = await subscribed(topic, partition, link=LINK)
            assert consumer.dispatcher.acks.mark == 3
        await b.close()

    play(act)


def test_acknowledgements_are_synced_where_rows_are_not():
    async def act(stage):
        await page_cache(stage)
        b = await Brokers(stage).new("b")
        await b.lookup(named(0), authoritative=True)
        topic, partition = await stored(b, 3)
        consumer = await subscribed(topic, partition, link=LINK)
        consumer.dispatcher.acks.add(1, 2)
        consumer.dispatcher.save_position()
        durable = asyncio.Event()
        consumer.dispatcher.when_durable(lambda error: durable.set())
        await durable.wait()
        node = await AckNodes(stage.client.ledgers, stage.topic.id).get(0)
        rows = partition.log.open_end.live.ledger_id
        kinds = [
            (await stage.client.ledgers.open(ledger_id, recover=False)).record.durability
            for ledger_id in (rows, node.pointer.ledger_id)
        ]
        assert kinds == ["page-cache", "synced"]
        await b.close()

    play(act)


def test_delays_of_lost_messages_hold_no_later_message():
    async def act(stage):
        await page_cache(stage)
        lost, cursor = await acknowledged_before_the_loss(stage)
        offsets = np.arange(4, dtype=np.int64)
        index = DelayIndex()
        for offset in offsets.tolist():
            index.add(offset, 1 << 50)
        cursor.keep_delays(0, index)
        await asyncio.sleep(3)
        await lost.die()
        b = await Brokers(stage).new("b")
        await b.lookup(named(0), authoritative=True)
        await b.partition(named(0))
        await asyncio.sleep(3)
        states = await AckNodes(stage.client.ledgers, stage.topic.id).states(0)
        assert [key.name for key in states] == ["s"]
        await b.close()

    play(act)
