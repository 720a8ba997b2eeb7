"""Messages for consumers of a Shared subscription: what one loop of the broker spends on each.

Lone messages and batches of 100, 200 bytes each, are sent by the dispatcher to 1, 4 and 20
consumers that are clients in name only: they count frames, give permits, and acknowledge each
message or batch. An Exclusive consumer, which acknowledges nothing here, stands beside them.
"""

import argparse
import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

from spark_ledger.broker.dispatch.dispatcher import Consumer
from spark_ledger.broker.dispatch.subscriptions import Subscription
from spark_ledger.broker.log.partition import Partition
from spark_ledger.broker.log.tail import Stored
from spark_ledger.broker.wire.commands import AckType, MessageId, SubscriptionType
from tests.kit.pulsar_batches import batch_of, lone, message

LEDGER, VALUE_BYTES, BATCH_MESSAGES, READ_BATCHES, TURN = 1, 200, 100, 1_000, 100
EXCLUSIVE, SHARED = SubscriptionType.EXCLUSIVE, SubscriptionType.SHARED


class Stock:
    """A partition whose batches are all in memory."""

    number = shown = start = 0
    ledger, title, is_terminated = LEDGER, "messages", False
    held = SimpleNamespace(end_offset=0)

    def __init__(self, batches: int, messages: int) -> None:
        self.listeners: dict[asyncio.Event, None] = {}
        value = message(b"x" * VALUE_BYTES)
        data = lone(value) if messages == 1 else batch_of([value] * messages)
        begins = range(0, batches * messages, messages)
        self.messages = messages
        self.batches = [Stored(at, messages, data, messages > 1) for at in begins]
        self.end = batches * messages

    async def read(self, offset: int, bytes_max: int = 0, *, lossy: bool = False) -> list[Stored]:
        at = offset // self.messages
        return self.batches[at : at + READ_BATCHES]

    def removed(self, lo: int, hi: int) -> list[tuple[int, int]]:
        return []


class CountingLink:
    """A connection that counts frames."""

    open = True

    def __init__(self) -> None:
        self.frames = 0
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.room_listeners: dict[object, asyncio.Event] = {}

    def send(self, frame: bytes) -> None:
        self.frames += 1

    async def room(self) -> None:
        await self.has_room.wait()


async def spent(kind: SubscriptionType, batches: int, messages: int, consumers: int) -> None:
    stock = Stock(batches, messages)
    subscription = Subscription("s", kind, None)
    dispatcher = subscription.dispatcher(cast(Partition, stock), 0)
    members, links = [], [CountingLink() for _ in range(consumers)]
    for number, link in enumerate(links):
        member = Consumer(cast(Any, link), number, f"c{number}", 0, dispatcher, lambda _: None)
        dispatcher.join(member)
        members.append(member)
    begun, acks_s, seen = time.process_time(), 0.0, [0] * consumers
    for member in members:
        dispatcher.flow(member, READ_BATCHES * messages)
    while sum(link.frames for link in links) < batches:
        await asyncio.sleep(0)
        for place, (member, link) in enumerate(zip(members, links, strict=True)):
            came = link.frames - seen[place]
            if came >= TURN:
                seen[place] = link.frames
                ack_begun = time.process_time()
                for entry in list(member.pending):
                    id_ = MessageId(ledgerId=LEDGER, entryId=entry)
                    for _ in dispatcher.acknowledge(member, id_, AckType.INDIVIDUAL):
                        pass
                acks_s += time.process_time() - ack_begun
                dispatcher.flow(member, came * messages)
    sent_s = time.process_time() - begun - acks_s
    figures = f"{1e6 * sent_s / batches:.1f} us sent, {1e6 * acks_s / batches:.1f} us acknowledged"
    print(f"{kind.name:9}  {messages:3} messages  {consumers:2} consumers  {figures}")
    for member in members:
        dispatcher.leave(member)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=100_000)
    batches = parser.parse_args().batches
    for messages in (1, BATCH_MESSAGES):
        await spent(EXCLUSIVE, batches, messages, 1)
        for consumers in (1, 4, 20):
            await spent(SHARED, batches, messages, consumers)


if __name__ == "__main__":
    asyncio.run(main())
