"""A subscription's consumers at several brokers."""

import asyncio

from spark_ledger.metadata import paths
from spark_ledger.topic.subscription.consumer_cursors import ConsumerCursors
from spark_ledger.topic.subscription.seek_target import End
from tests.unit.spark_ledger.topic.stage import play

NAME = "dashboard"
PARTITIONS = 4


class Broker:
    """Its cursors, in a process of their own."""

    def __init__(self, stage, client, name):
        self.stage, self.client, self.name = stage, client, name
        self.cursors = ConsumerCursors(client.store, client.subscriptions, name, client.rng)

    async def start(self):
        await self.client.store.create(paths.broker(self.name), b"{}", ephemeral=True, parents=True)
        return self

    async def die(self):
        await self.cursors.close()
        await self.client.store.delete(paths.broker(self.name))

    async def open(self, at=0, name=NAME, **options):
        async def start():
            return dict.fromkeys(range(PARTITIONS), at)

        return await self.cursors.open(self.stage.topic, name, start, **options)


async def broker(stage, name):
    return await Broker(stage, await stage.another(), name).start()


async def adopted(cursor, partition, epoch):
    """The position from which consumers go on."""
    return (await cursor.adopt(partition, epoch)).position


async def written(*cursors):
    for _ in range(300):
        if not any(one.dirty or one.must_reread for one in cursors if one.failure is None):
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it is not written")


def shares_of(stage):
    return stage.world.store.peek_children(paths.subscription_share(stage.topic.id, NAME))


async def opened(stage, query="q", run="r", *, client=None):
    """The subscription in the hands of a query's run, in a process of its own."""
    client = client or await stage.another()
    return await client.subscriptions.open(stage.topic, NAME, query, run, start=End.EARLIEST)


async def positions(stage):
    return await stage.client.subscriptions.positions(stage.topic.id, NAME)


def play_here(act):
    play(act, partitions=PARTITIONS)
