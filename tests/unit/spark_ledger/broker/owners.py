"""Owners of partitions on the simulated cluster, and messages sent to them."""

import asyncio

from spark_ledger.broker.log.ownership import Ownership
from spark_ledger.broker.log.topic_commits import RollLimits, TopicCommits
from spark_ledger.broker.produce.live_writer import LiveWriter
from spark_ledger.topic.client import TopicClient
from tests.kit.pulsar_batches import batch_of, message
from tests.unit.spark_ledger.topic.stage import NOW_MS


class Sent:
    def __init__(self, *values, first=0, producer="p"):
        messages = [message(value) for value in values]
        self.batches = [batch_of(messages, producer=producer, sequence_id=first)]
        self.size, self.batched = len(self.batches[0]), True
        self.unpacked = self.size
        self.producer = self.producer_name = producer
        self.chunk = None
        self.first_sequence_id = self.last_sequence_id = first + len(values) - 1
        self.doubled = False
        self.messages = len(values)
        self.counts = [self.messages]
        self.offsets, self.errors = [], []
        self.over = asyncio.Event()

    def stored(self, offset):
        self.offsets.append(offset)
        self.over.set()

    def duplicate(self):
        self.doubled = True
        self.over.set()

    def failed(self, error):
        self.errors.append(error)
        self.over.set()


class Owner:
    """A broker's hand on partition 0; `clock_ms` is what it takes for the store's time."""

    clock_ms = NOW_MS

    def __init__(self, stage, client, name, limits=None):
        self.stage, self.seen = stage, []
        self.ownership = Ownership(client.store, name, f"pulsar://{name}:1", self.answers)
        self.client, self.limits = client, limits or RollLimits()

    async def answers(self, url):
        return False

    async def take(self, idle_s=60.0):
        await self.ownership.membership.register()
        topic = self.stage.topic
        await self.ownership.choose(topic.id, 0, topic.partitions, here=True)
        owners = await self.ownership.owners(topic.id)
        epochs = owners.epochs_of(self.ownership.broker_id)
        self.commits = TopicCommits(self.client, topic, self.ownership, lambda: self.clock_ms)
        self.commits.epochs.update(epochs)
        self.writer = LiveWriter(
            *(self.commits, 0, self.limits), lambda *about: self.stored(*about), idle_s
        )
        await self.writer.start()
        return self

    def stored(self, offset, batch):
        self.seen.append((offset, batch))

    def send(self, *batches):
        sent = [Sent(*values) for values in batches]
        for one in sent:
            self.writer.append(one)
        return sent

    async def all_stored(self, sent):
        await asyncio.gather(*(one.over.wait() for one in sent))
        assert not any(one.errors for one in sent)
        return [one.offsets for one in sent]


async def owner_of(stage, name="a", limits=None):
    return await Owner(stage, stage.client, name, limits).take()


async def another_of(stage, name="b"):
    process = await stage.world.client(f"process of {name}")
    client = TopicClient(process.ledgers, process.rng, lambda: NOW_MS, stage.owners.ask)
    return Owner(stage, client, name)


async def deduplicating(owner):
    await owner.client.topics.change_policies("t", {"deduplication": True})
    owner.stage.topic = await owner.client.topics.open("t")
    return await owner.take()


async def sent_by(owner, *firsts):
    """Batches of two messages with these first sequence ids; whether each was a duplicate."""
    batches = [Sent(b"%d" % first, b"%d" % (first + 1), first=first) for first in firsts]
    for one in batches:
        owner.writer.append(one)
    await asyncio.gather(*(one.over.wait() for one in batches))
    assert not any(one.errors for one in batches)
    return [one.doubled for one in batches]


async def fenced_by_another(stage, owner):
    """The live ledger is recovered by somebody else."""
    await (await stage.another()).ledgers.recover(owner.writer.open_end.live.ledger_id)
