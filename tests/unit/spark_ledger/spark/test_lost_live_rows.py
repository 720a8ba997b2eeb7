"""A query whose topic lost live rows with all copies: later rows get the offsets of the lost rows,
and the query does not take them for rows that it has read."""

from types import SimpleNamespace

import pytest

from spark_ledger.errors import OffsetOfAnotherStore
from spark_ledger.spark.options.options import stream_read_options
from spark_ledger.spark.read import topics_read
from spark_ledger.spark.read.topics_read import TopicsRead
from tests.kit.settings import with_settings
from tests.unit.spark_ledger.broker.owners import Sent
from tests.unit.spark_ledger.broker.two_brokers import Brokers, named
from tests.unit.spark_ledger.topic.stage import play


async def stored(broker, count):
    await broker.lookup(named(0), authoritative=True)
    _, partition = await broker.partition(named(0))
    for _ in range(count):
        sent = Sent(b"x")
        partition.writer.append(sent)
        await sent.over.wait()
        assert not sent.errors


async def power_fails(world):
    for node in world.nodes:
        node.kill("none")
        world.ghost.bookie(node.bookie_id).unsynced = True
    for node in world.nodes:
        await node.start()


@pytest.mark.parametrize("durability", ["page-cache", "synced"])
def test_a_running_query_finds_that_rows_before_its_offset_were_lost(durability, monkeypatch):
    calls = []

    async def act(stage):
        cluster = SimpleNamespace(client=stage.client, run=calls.append)
        monkeypatch.setattr(topics_read.blocking, "topics", lambda *_, **__: cluster)
        monkeypatch.setattr(topics_read, "exclude_from_gc", lambda moment: None)
        await stage.client.topics.change_policies("t", {"durability": durability})
        stage.topic = await stage.client.topics.open("t")
        brokers = Brokers(stage)
        world = stage.world
        world.config = with_settings(world.config, explicit_lac_s=600.0)  # it would be synced
        a = await brokers.new("a")
        process = world.clients[-1]
        await process.run(stored(a, 4))
        topics = TopicsRead(stream_read_options({"topic": "t"}))
        await calls.pop()
        topics.fresh_ends()
        assert (await calls.pop())["t"].ends == (3,)
        position = {"t": {0: 3}}
        tokens = topics.tokens(position)
        assert tokens["t"] and not topics.tokens({"t": {0: 4}}), "of known rows only"
        process.kill()
        brokers.dead.add(a.ownership.url)
        await power_fails(world)
        await stored(await brokers.new("b"), 9)
        topics.fresh_ends()
        await calls.pop()
        topics.check_tokens(position, tokens, "the query's offset")
        if durability == "synced":
            await calls.pop()
            assert topics.shorter_logs == 0
        else:
            with pytest.raises(OffsetOfAnotherStore, match="offset 3 of partition 0"):
                await calls.pop()
            assert topics.shorter_logs == 1, "so the source compares the tokens"
            world.observers.violations.clear()  # they expect that a copy keeps each row

    play(act)
