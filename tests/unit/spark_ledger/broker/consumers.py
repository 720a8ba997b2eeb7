"""Consumers of a subscription, over scripted batches."""

import asyncio
from types import SimpleNamespace

from spark_ledger import errors
from spark_ledger.broker.dispatch.dispatcher import Consumer
from spark_ledger.broker.log.tail import (
    Stored,
)
from spark_ledger.broker.wire.commands import SubscriptionType
from spark_ledger.broker.wire.frames import PulsarFrameReader
from tests.kit.pulsar_batches import batch_of, lone, message

EXCLUSIVE, FAILOVER = SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER
SHARED = SubscriptionType.SHARED


LEDGER = 77
LOST = errors.RowsLost("they are gone", rows=3)


class Batches:
    """A partition whose batches have these sizes; 1 is a lone message."""

    def __init__(self, *sizes, number=0):
        self.number = self.number_in_ids = number
        self.title = f"partition {number} of topic t"
        self.ledger = LEDGER
        self.is_terminated = False
        self.listeners, self.stored, self.start, self.end = {}, [], 0, 0
        self.held, self.holes = SimpleNamespace(end_offset=0), []
        for size in sizes:
            self.add(size)

    def add(self, size):
        data = lone(message(b"x")) if size == 1 else batch_of([message(b"x")] * size)
        self.stored.append(Stored(self.end, size, data, size > 1))
        self.end += size
        for listener in self.listeners:
            listener.set()

    def messages_at(self, offset):
        """It has no batch in memory."""

    async def read(self, offset, bytes_max=None, *, lossy=False):
        return [one for one in self.stored if one.end > max(offset, self.start)][:2]

    def removed(self, lo, hi):
        trimmed = [(lo, min(hi, self.start))] if lo < self.start else []
        return trimmed + [(max(lo, a), min(hi, b)) for a, b in self.holes if a < hi and b > lo]


class Losing(Batches):
    """A partition whose batches at `gone` cannot be read."""

    def __init__(self, *sizes, gone=(), why=LOST):
        super().__init__(*sizes)
        self.gone, self.why, self.skips, self.reads = list(gone), why, False, 0

    async def read(self, offset, bytes_max=None, *, lossy=False):
        self.reads += 1
        batches = [one for one in self.stored if one.end > offset]
        if lossy:
            return [one for one in batches if one.offset not in self.gone][:2]
        before = []
        for one in batches:
            if one.offset in self.gone:
                break
            before.append(one)
        if batches and not before:
            raise self.why
        return before[:2]

    async def skips_lost(self):
        return self.skips


class Wire:
    """A connection that keeps what is sent: (offset, ack set) of messages, who is active."""

    def __init__(self):
        self.messages, self.active, self.open = [], [], asyncio.Event()
        self.epochs, self.redeliveries, self.ends = [], [], 0
        self.has_room, self.room_listeners = self.open, {}
        self.open.set()

    def send(self, frames):
        for frame in PulsarFrameReader().feed(frames):
            if frame.command.HasField("message"):
                message = frame.command.message
                self.messages.append((message.message_id.entryId, list(message.ack_set)))
                self.redeliveries.append(message.redelivery_count)
                self.epochs.append(
                    message.consumer_epoch if message.HasField("consumer_epoch") else None
                )
            elif frame.command.HasField("reached_end_of_topic"):
                self.ends += 1
            else:
                self.active.append(frame.command.active_consumer_change.is_active)

    async def room(self):
        await self.open.wait()


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def until(condition):
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it does not come about")


def consumer_of(subscription, partition, name="a", priority=0, mark=0):
    dispatcher = subscription.dispatcher(partition, mark)
    made = Consumer(Wire(), 1, name, priority, dispatcher, lambda one: None)
    made.dispatcher.join(made)
    return made


def play(act):
    async def main():
        made = []
        await act(made)
        for one in made:
            one.dispatcher.leave(one)

    asyncio.run(main())
