"""Owners of a partition that make acknowledgements durable, each in a process of its own."""

import asyncio
from typing import NamedTuple

from spark_ledger import errors
from spark_ledger.broker.dispatch.acks import Acks
from spark_ledger.ledger.writer import AsyncLedgerWriter
from spark_ledger.metadata.cluster import ClusterGuard
from spark_ledger.metadata.shared_multis import SharedMultis
from spark_ledger.topic.acks.context import AckContext, InlinePace
from spark_ledger.topic.acks.entries import AckKey
from spark_ledger.topic.acks.nodes import AckNodes
from spark_ledger.topic.acks.partition_acks import PartitionAcks
from spark_ledger.topic.acks.sets import AckBudget
from spark_ledger.topic.log.intents import Intent
from tests.unit.spark_ledger.topic.stage import play

KEY = AckKey("s", "token", 1)


class Made(NamedTuple):
    writer: AsyncLedgerWriter
    intent: Intent


class Subscription:
    """As a broker serves it: `moved` once its record names another owner."""

    def __init__(self):
        self.failure, self.is_moved, self.shares, self.verified = None, False, {}, 0

    def fail(self, error):
        self.failure = self.failure or error

    async def verify(self):
        self.verified += 1
        if self.is_moved:
            self.fail(errors.LedgerFenced("it was moved"))

    def was_durable(self, partition, epoch, position):
        self.shares[partition] = (epoch, position)


class Owner:
    """Of partition 0, in an epoch."""

    def __init__(self, stage, client, epoch):
        self.stage, self.client, self.epoch = stage, client, epoch
        self.moved = set()
        self.ledgers = []
        self.refuses = False
        self.lowest = self.now_ms = 0
        self.intent = None
        self.budget = AckBudget(1 << 20)

    async def take_over(self):
        self.context = AckContext(
            *(self.client.ledgers, self.stage.topic, self.make_ledger, self.is_needed),
            *(self.lowest_position, lambda: self.now_ms),
            *(ClusterGuard(self.client.store), InlinePace(), self.client.rng),
            *(SharedMultis(self.client.store), self.budget),
        )
        self.acks = await PartitionAcks.opened(self.context, 0, self.epoch)
        return self

    async def make_ledger(self):
        if self.refuses:
            raise errors.NotEnoughBookies("the test has none")
        if self.intent is None:
            self.intent = await self.client.intents.open_system_intent("broker", "t")
        ledger_id = await self.client.intents.ledger_id(self.intent)
        options = {"ledger_id": ledger_id, "intent": self.intent.id, "announce_lac": True}
        writer = await self.client.ledgers.create(3, 3, 2, topic=self.stage.topic.id, **options)
        self.ledgers.append(writer.ledger_id)
        return Made(writer, self.intent)

    async def lowest_position(self, partition):
        return self.lowest

    async def is_needed(self, partition, key, state):
        return key not in self.moved

    def serve(self, key=KEY, mark=0):
        """The subscription's consumers come; what they acknowledged is as the owner knows it."""
        state = self.acks.state(key)
        acks = Acks(mark) if state is None else Acks(state.position, state.rows)
        subscription = Subscription()
        self.acks.serve(key, subscription, acks, is_state=state is not None)
        return subscription, acks

    async def acknowledge(self, acks, *offsets, key=KEY):
        """Returns once the receipts are given."""
        for offset in offsets:
            acks.add(offset, offset + 1)
        self.acks.changed(key)
        await self.acks.durable(key)


async def owner(stage, epoch):
    return await Owner(stage, await stage.another(), epoch).take_over()


async def durable(stage, key=KEY):
    """(position, rows beyond it) as any process reads it; None: not known. The writer announces
    its last entry to readers after a while without adds."""
    await asyncio.sleep(2)
    client = await stage.another()
    state = (await AckNodes(client.ledgers, stage.topic.id).states(0)).get(key)
    return None if state is None else (state.position, list(state.rows))


async def eventually(condition):
    for _ in range(600):
        if await condition():
            return
        await asyncio.sleep(0.5)
    raise AssertionError("it did not come")


def play_here(act):
    play(act, partitions=1)
