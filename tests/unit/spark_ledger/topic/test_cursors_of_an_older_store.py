"""Positions of consumers beside a metadata store that goes back in time."""

import asyncio
from functools import partial

import pytest

from spark_ledger import errors
from spark_ledger.metadata import hold, paths
from spark_ledger.metadata.cluster import Hold
from spark_ledger.topic.subscription.consumer_cursors import ConsumerCursors
from tests.simulation.restoring import copied, go_back
from tests.simulation.world import CLUSTER_ID
from tests.unit.spark_ledger.topic.acking_brokers import acking_broker, acknowledge, share_writes
from tests.unit.spark_ledger.topic.consumers import play_here, written
from tests.unit.spark_ledger.topic.older_store import committed
from tests.unit.spark_ledger.topic.stage import play

NAME = "s"


async def position(stage):
    client = await stage.another()
    return (await client.subscriptions.positions(stage.topic.id, NAME))[0]


class Scene:
    """A broker's cursor that is written at 1, behind the first of the topic's rows."""

    async def made(self, stage):
        self.writer, client = await stage.another(), await stage.another()
        await committed(stage, self.writer, "r1", 0, [b"a"])
        self.store = client.store
        follower = await client.follow(stage.topic.id, "t", 60.0)
        await client.store.create(paths.broker("a"), b"{}", ephemeral=True, parents=True)
        self.cursors = ConsumerCursors(client.store, client.subscriptions, "a", client.rng)

        async def start():
            return {0: 0}

        history = partial(follower.confirmed_history_number, 5.0)
        self.cursor = await self.cursors.open(stage.topic, NAME, start, history)
        await self.cursor.adopt(0, 1)
        await self.moved(1)
        return self

    async def moved(self, offset):
        self.cursor.advance(0, offset)
        await written(self.cursor)


@pytest.mark.parametrize("away_s", [0, 6])
def test_a_position_among_rows_that_an_older_store_does_not_have_is_not_written_to_it(away_s):
    async def act(stage):
        scene = await Scene().made(stage)
        copy = copied(stage.world.store)
        await committed(stage, scene.writer, "r1", 1, [b"given up"] * 100)
        await asyncio.sleep(5)  # until it is followed
        if away_s:
            scene.store.suspend(away_s)
        scene.cursor.advance(0, 101)  # of the version that the copy has, too
        await asyncio.sleep(away_s / 4)  # a write is made, and waits for a connection
        go_back(stage.world.store, copy)
        await asyncio.sleep(60)
        assert await position(stage) == 1
        assert isinstance(scene.cursor.failure, errors.LedgerFenced)

    play(act)


def test_a_position_is_written_again_to_an_older_store_that_has_all_rows():
    async def act(stage):
        scene = await Scene().made(stage)
        await committed(stage, scene.writer, "r1", 1, [b"b"] * 100)
        copy = copied(stage.world.store)
        await scene.moved(50)
        await scene.moved(60)
        go_back(stage.world.store, copy)
        assert await position(stage) == 1
        await scene.moved(70)
        assert await position(stage) == 70
        assert scene.cursor.failure is None

    play(act)


def test_no_position_is_written_while_the_store_is_held_nor_after_an_accept():
    async def act(stage):
        scene = await Scene().made(stage)
        await committed(stage, scene.writer, "r1", 1, [b"b"] * 100)
        await hold.put(stage.world.store.session("bookie"), CLUSTER_ID, Hold("older", "b1"))
        scene.cursor.advance(0, 50)
        await asyncio.sleep(30)
        assert await position(stage) == 1
        assert scene.cursor.failure is None
        await hold.accept(stage.world.store.session("person"))
        await asyncio.sleep(30)
        assert await position(stage) == 1
        assert isinstance(scene.cursor.failure, errors.LedgerFenced)

    play(act)


async def accepted(stage):
    await hold.put(stage.world.store.session("bookie"), CLUSTER_ID, Hold("older", "b1"))
    await hold.accept(stage.world.store.session("person"))


def test_a_broker_that_outlives_an_accept_takes_acknowledgements_over_at_its_second_try():
    async def act(stage):
        a, b = await acking_broker(stage, "a"), await acking_broker(stage, "b")
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 0, 4)
        other_cursor, other_acks = await b.consume(1, name="t", partition=1)
        await acknowledge(
            other_cursor, other_acks, 0, partition=1
        )  # b has read the cluster's record
        await a.die()
        await accepted(stage)
        with pytest.raises(errors.Unavailable, match="changed meanwhile"):
            await b.topic_acks.of(0, 2)
        assert (await b.topic_acks.of(0, 2)).epoch == 2

    play_here(act)


def test_no_cursor_from_before_an_accept_writes_after_acknowledgements_were_taken_over():
    async def act(stage):
        a, b = await acking_broker(stage, "a"), await acking_broker(stage, "b")
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 0)
        old, old_acks = await b.consume(1, name="t", partition=1)
        await acknowledge(old, old_acks, 0, partition=1)
        await b.cursors.release(old, 10.0)
        old, old_acks = await b.consume(1, name="t", partition=1)
        await a.die()
        await accepted(stage)
        with pytest.raises(errors.Unavailable):
            await b.topic_acks.of(0, 2)  # by this the broker knows the present cluster's record
        written_before = share_writes(stage, "t")
        old_acks.add_up_to(3)
        old.advance(1, old_acks.durable)
        await asyncio.sleep(600)
        assert isinstance(old.failure, errors.LedgerFenced)
        assert share_writes(stage, "t") == written_before

    play_here(act)
