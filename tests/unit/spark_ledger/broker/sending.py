"""Clients that send and consume chunked messages over a connection's link."""

import asyncio
from types import SimpleNamespace

from spark_ledger.broker.dispatch.dispatcher import Consumer
from spark_ledger.broker.dispatch.subscriptions import Subscription
from spark_ledger.broker.log.partition import Partition
from spark_ledger.broker.log.tail import TailBudget
from spark_ledger.broker.produce.chunks import ChunksOfProducer
from spark_ledger.broker.produce.producer import NO_ID, Producer, Run
from spark_ledger.broker.produce.waiting import RefusedMessages
from spark_ledger.broker.wire.commands import AccessMode, ServerError, SubscriptionType
from spark_ledger.broker.wire.frames import PulsarFrameReader
from spark_ledger.broker.wire.sends import Send
from spark_ledger.metrics import Counter
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.read.live import ends_of, live_task
from spark_ledger.topic.read.plan import plan_read
from tests.kit.pulsar_batches import lone, message
from tests.kit.rows import read_rows

WHOLE = b"a message that is cut"


TURNS_MAX, TURN_S = 6000, 0.01


async def until(so):
    for _ in range(TURNS_MAX):
        if so():
            return
        await asyncio.sleep(TURN_S)
    raise AssertionError("it does not come about")


class Sending:
    """A producer on the owner's broker."""

    def __init__(self, owner, name="p"):
        self.owner, self.link = owner, Link()
        deduplicates = owner.stage.topic.policies.deduplication
        log = SimpleNamespace(number_in_ids=0, ledger=7, deduplicates=deduplicates)
        partition = SimpleNamespace(number=0, log=log)
        partition.refused = vars(owner).setdefault("refused", RefusedMessages())
        mode = AccessMode.SHARED
        self.producer = Producer(self.link, 1, 1, name, mode, 0, 0, partition, None)
        self.incomplete = Counter("incomplete", "")
        self.chunks = ChunksOfProducer(self.producer, self.incomplete, ServerError.CHECKSUM)

    def append(self, run):
        run.number_sends()
        self.owner.writer.append(run)

    def lone(self, value, sequence_id=0):
        data = lone(message(value), sequence_id=sequence_id)
        run = Run(self.producer, "p", batched=False)
        last = sequence_id if self.producer.partition.log.deduplicates else NO_ID
        assert run.add(Send(1, sequence_id, 0, False), data, "p", False, 1, last)
        self.append(run)

    def send(self, *parts, sequence_id=5):
        for data in parts:
            parsed = pulsar_batch.parse(data, check=True)
            self.chunks.take(Send(1, sequence_id, 0, True), data, parsed, self.append)

    async def said(self, count):
        await until(lambda: len(self.link.said) >= count)
        return self.link.said


async def all_sent(owner):
    """Until nothing waits."""
    await until(lambda: not (owner.writer.backlog.waiting or owner.writer.backlog.under_way))


async def rows_between(client, stage, lo, hi, **live):
    """(offset, value) as a reader sees them: of commits, then of the live segment."""
    state = await client.log(stage.topic.id).fold(fresh=True)
    held = state.partitions[0]
    tasks = []
    if lo < held.end_offset:
        tasks += plan_read(state, {0: (lo, min(hi, held.end_offset))}, topic="t")
    if held.live is not None and hi > held.end_offset:
        known = (await ends_of(client.ledgers, state))[0]
        tasks += [one for one in [live_task("t", state, 0, lo, known)] if one is not None]
    found = []
    for task in tasks:
        async for part in read_rows(client, task):
            found += enumerate(part.record_batch.column("value").to_pylist(), part.offset)
    return found


async def closed(owner):
    await owner.writer.close()


class Consuming:
    """A consumer of the owner's partition, from `mark` on; without the tail if not `kept`."""

    async def begin(
        self, stage, owner, mark=0, *, kept=True, tail_bytes=1 << 20, permits=100, cursor=None
    ):
        self.stage, self.owner = stage, owner
        self.state = await owner.commits.state()
        budget = TailBudget(tail_bytes if kept else 1)
        self.partition = Partition(stage.client, stage.topic, 0, lambda: self.state, budget)
        self.partition.open_end = owner.writer.open_end
        if kept:
            owner.stored = self.partition.add_stored
        self.frames = []
        subscription = Subscription("s", SubscriptionType.EXCLUSIVE, cursor)
        self.dispatcher = subscription.dispatcher(self.partition, mark)
        self.consumer = Consumer(self, 1, "c", 0, self.dispatcher, lambda one: None)
        self.consumer.dispatcher.join(self.consumer)
        self.consumer.dispatcher.flow(self.consumer, permits)
        return self

    def send(self, frame):
        self.frames += PulsarFrameReader().feed(frame)

    async def room(self):
        """There is."""

    async def got(self, count):
        for _ in range(TURNS_MAX):
            if len(self.frames) >= count:
                break
            self.state = await self.owner.commits.state()
            self.partition.wake()
            await asyncio.sleep(TURN_S)
        return [(one.command.message.message_id.entryId, bytes(one.batch)) for one in self.frames]


class Link:
    """`said`: of each answer the sequence id and the offset, None of one stored before, or why it
    was refused."""

    def __init__(self):
        self.said, self.away, self.waiting = [], False, 0
        self.is_read, self.looks = True, []
        self.drop = ServerError.CHECKSUM

    def send(self, frame):
        for one in PulsarFrameReader().feed(frame):
            if one.command.HasField("send_error"):
                refused = one.command.send_error
                self.said.append((refused.sequence_id, refused.message))
                continue
            found = one.command.send_receipt
            at = found.message_id.entryId
            self.said.append((found.sequence_id, None if at == 2**64 - 1 else at))

    def send_producer_away(self, producer):
        self.away = True

    def stored(self, size):
        pass

    def later(self, seconds, do):
        self.looks.append(do)

    def look(self):
        """The time is over."""
        looks, self.looks = self.looks, []
        for do in looks:
            do()
