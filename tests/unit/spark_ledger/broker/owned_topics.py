"""A topic of a simulated cluster that one broker owns, and a client's connection to it."""

import asyncio

from tests.unit.spark_ledger.broker.two_brokers import Brokers, named


class ClientLink:
    """One client's connection."""

    def __init__(self):
        self.has_room, self.room_listeners = asyncio.Event(), {}

    def send(self, frame):
        pass


async def owned(stage, number=0):
    broker = await Brokers(stage).new("a")
    await broker.lookup(named(number), authoritative=True)
    topic, partition = await broker.partition(named(number))
    return broker, topic, partition


async def listed(stage):
    return [info.name for info in await stage.client.subscriptions.list(stage.topic.id)]
