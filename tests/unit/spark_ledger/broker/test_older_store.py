"""A broker beside a metadata store that goes back in time and is accepted."""

import asyncio

from spark_ledger.broker import names
from tests.kit.subscribing import subscribed
from tests.simulation.restoring import copied
from tests.unit.spark_ledger.broker.background import Brokers
from tests.unit.spark_ledger.topic.older_store import accepted_older, committed
from tests.unit.spark_ledger.topic.stage import play

PARTITION = names.parse("t-partition-0")


def test_a_broker_begins_anew_with_its_topics_once_an_older_store_is_accepted():
    async def act(stage):
        client = await stage.another()
        await committed(stage, client, "r1", 0, [b"a"])
        a = await Brokers(stage).new("a")
        await a.lookup(PARTITION, authoritative=True)
        topic, partition = await a.partition(PARTITION)
        sent_away = []
        await subscribed(topic, partition, end=lambda: sent_away.append(1))
        copy = copied(stage.world.store)
        await committed(stage, client, "r1", 1, [b"lost"] * 100)
        await asyncio.sleep(5)
        assert [batch.end for batch in await partition.log.read(0)] == [1, 101]

        await accepted_older(stage, copy, 30)
        await committed(stage, await stage.another(), "r2", 1, [b"new"] * 5)
        await asyncio.sleep(60)

        assert sent_away == [1]
        await a.lookup(PARTITION, authoritative=True)
        _, again = await a.partition(PARTITION)
        assert again is not partition
        assert [batch.end for batch in await again.log.read(0)] == [1, 6]
        await a.seal()

    play(act)
