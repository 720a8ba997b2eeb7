"""Brokers of a subscription that write ack ledgers, each in a process of its own."""

import asyncio

from spark_ledger.broker.dispatch.acks import Acks
from spark_ledger.metadata import paths
from spark_ledger.topic.subscription.consumer_cursors import ConsumerCursors
from tests.unit.spark_ledger.topic.ack_owners import Made
from tests.unit.spark_ledger.topic.consumers import NAME, PARTITIONS


class AckingBroker:
    def __init__(self, stage, client, name):
        self.stage, self.client, self.name = stage, client, name
        self.cursors = ConsumerCursors(client.store, client.subscriptions, name, client.rng)
        self.topic_acks = self.cursors.open_topic_acks(
            stage.topic, self._make_ledger, lambda: self.now_ms
        )
        self.now_ms = 0
        self._intent = None
        self._writer = None
        self._hangs = False

    def stop_writing_acks(self):
        """From now on no write of an ack ledger ends."""
        self._hangs = True
        if self._writer is not None:
            self._writer.append = self._hang

    async def _hang(self, *_, **__):
        await asyncio.Event().wait()

    async def _make_ledger(self):
        if self._hangs:
            await self._hang()
        if self._intent is None:
            self._intent = await self.client.intents.open_system_intent("broker", "t")
        ledger_id = await self.client.intents.ledger_id(self._intent)
        options = {"ledger_id": ledger_id, "intent": self._intent.id, "announce_lac": True}
        writer = await self.client.ledgers.create(3, 3, 2, topic=self.stage.topic.id, **options)
        self._writer = writer
        return Made(writer, self._intent)

    async def die(self):
        """As after kill -9, once other brokers have seen it."""
        await self.cursors.close()
        self.topic_acks.end()
        await self.client.store.delete(paths.broker(self.name))

    async def open(self, at=0, name=NAME):
        async def start():
            return dict.fromkeys(range(PARTITIONS), at)

        return await self.cursors.open(self.stage.topic, name, start)

    async def consume(self, epoch, at=0, name=NAME, partition=0):
        """(cursor, acks) of consumers of one partition."""
        cursor = await self.open(at, name)
        state = await cursor.adopt(partition, epoch)
        acks = Acks(state.position, state.rows)
        cursor.track(partition, acks)
        return cursor, acks

    async def release(self, cursor):
        await self.cursors.release(cursor, 10.0)


async def acknowledge(cursor, acks, *offsets, partition=0):
    """Returns once the receipts are given."""
    for offset in offsets:
        acks.add(offset, offset + 1)
    cursor.advance(partition, acks.durable)
    await cursor.acks_durable(partition)


async def acking_broker(stage, name):
    made = AckingBroker(stage, await stage.another(), name)
    await made.client.store.create(paths.broker(name), b"{}", ephemeral=True, parents=True)
    return made


def share_writes(stage, name=NAME):
    """How often the store was asked to write a share so far."""
    return sum(
        stage.world.store.peek(f"{folder}/{broker}").version
        for folder in [paths.subscription_share(stage.topic.id, name)]
        for broker in stage.world.store.peek_children(folder)
    )


async def announced():
    """A writer of a ledger announces its last entry to readers after a while without adds."""
    await asyncio.sleep(2)
