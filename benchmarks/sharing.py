"""Messages for consumers of a Shared subscription: what one loop of the broker spends on each.

Lone messages and batches of 100, 200 bytes each, are sent by the dispatcher to 1, 4 and 20
consumers that are clients in name only: they count frames, give permits, and acknowledge each
message or batch. An Exclusive consumer, which acknowledges nothing here, stands beside them.

With --standing-still: of 20 Key_Shared consumers the first takes nothing, until the others have
their messages, which are outside of batches and have random keys; then it takes its own.

With --within: a consumer acknowledges four of five messages of batches of so many messages, one
after the other. The model alone is measured.
"""

import argparse
import asyncio
import random
import time
from types import SimpleNamespace
from typing import Any, cast

from spark_ledger.broker.dispatch.acks import Acks, BatchPart, ack_set
from spark_ledger.broker.dispatch.dispatcher import Consumer
from spark_ledger.broker.dispatch.round_robin import RoundRobin
from spark_ledger.broker.dispatch.shared_dispatcher import SharedDispatcher
from spark_ledger.broker.dispatch.sharing import Member, Sharing, UnackedLimits
from spark_ledger.broker.dispatch.subscriptions import Subscription
from spark_ledger.broker.log.partition import Partition
from spark_ledger.broker.log.tail import Stored
from spark_ledger.broker.wire.commands import AckType, MessageId, SubscriptionType
from spark_ledger.topic.acks.sets import bytes_of
from tests.kit.pulsar_batches import batch_of, lone, message

LEDGER, VALUE_BYTES, BATCH_MESSAGES, READ_BATCHES, TURN = 1, 200, 100, 1_000, 100
EXCLUSIVE, SHARED = SubscriptionType.EXCLUSIVE, SubscriptionType.SHARED
KEYS, BLOCK, CONSUMERS = 100_000, 1 << 18, 20


class Stock:
    """A partition whose batches are all in memory."""

    number = number_in_ids = start = 0
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

    def messages_at(self, offset: int) -> int | None:
        return None


class KeyedStock(Stock):
    """Messages outside of batches with KEYS keys in a random order, made as they are read."""

    def __init__(self, rows: int) -> None:
        super().__init__(0, 1)
        value = b"x" * VALUE_BYTES
        data = [lone(message(value, key=f"key {number}")) for number in range(KEYS)]
        self.block = random.Random(1).choices(data, k=BLOCK)
        self.end, self.reads = rows, 0

    async def read(self, offset: int, bytes_max: int = 0, *, lossy: bool = False) -> list[Stored]:
        self.reads += 1
        until = min(self.end, offset + (READ_BATCHES if bytes_max > 1 else 1))
        return [Stored(at, 1, self.block[at % BLOCK], False) for at in range(offset, until)]


class CountingLink:
    """A connection that counts frames."""

    open = True

    def __init__(self) -> None:
        self.frames = 0
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.room_listeners: dict[object, asyncio.Event] = {}

    def send(self, frame: bytes) -> None:
        at, size = 0, len(frame)  # several messages may come together
        while at < size:
            at += 4 + int.from_bytes(frame[at : at + 4], "big")
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


def memory() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))


async def standing_still(rows: int) -> None:
    stock = KeyedStock(rows)
    subscription = Subscription("s", SubscriptionType.KEY_SHARED, None)
    dispatcher = subscription.dispatcher(cast(Partition, stock), 0)
    assert isinstance(dispatcher, SharedDispatcher)
    sharing, begun_bytes = dispatcher.sharing, memory()
    members, links = [], [CountingLink() for _ in range(CONSUMERS)]
    for number, link in enumerate(links):
        member = Consumer(cast(Any, link), number, f"c{number}", 0, dispatcher, lambda _: None)
        dispatcher.join(member)
        members.append(member)
    others = members[1:]

    async def take(takers: list[Consumer], until: int) -> None:
        begun_s, acks_s, step_s, stock.reads = time.process_time(), 0.0, 0.0, 0
        before, end = dispatcher.position, min(until, rows)
        taken = sum(link.frames for link in links)
        for member in takers:
            dispatcher.flow(member, 1_000 - member.permits)
        while dispatcher.position < end if before < end else dispatcher.acks.mark < end:
            step_begun_s = time.process_time()
            await asyncio.sleep(0)
            ack_begun_s = time.process_time()
            step_s = max(step_s, ack_begun_s - step_begun_s)
            for member in takers:
                if len(member.pending) >= 500 or dispatcher.position >= rows:
                    entries = list(member.pending)
                    sharing.acknowledge_lone(member, entries)
                    dispatcher.flow(member, len(entries))
            acks_s += time.process_time() - ack_begun_s
        spent_s = time.process_time() - begun_s - acks_s
        sent = sum(link.frames for link in links) - taken
        waiting = max(1, len(sharing.waiting))
        counted = bytes_of(sharing.waiting) + sharing.choice.bytes
        print(
            f"{dispatcher.position:10,} rows read, {sent:10,} sent: {1e6 * spent_s / sent:.1f} us"
            f" each, {stock.reads:,} reads, longest step {1e3 * step_s:.0f} ms;"
            f" {len(sharing.waiting):,} wait: {counted / waiting:.1f} bytes each counted, memory"
            f" {(memory() - begun_bytes) >> 20} MiB",
            flush=True,
        )

    await take(others, rows // 10)
    await take(others, rows)
    await take(members, rows)
    for member in members:
        dispatcher.leave(member)


def within_batches(messages: int) -> float:
    """The processor's time, in microseconds, of an acknowledgement of one message of a batch."""
    batches = max(2, 20_000 // messages)
    sharing = Sharing(Acks(0), UnackedLimits(0, 0), RoundRobin(), lambda: None)
    member = Member("consumer", 0, lambda: True)
    sharing.join(member)
    spent_s, acks = 0.0, 0
    for start in range(0, batches * messages, messages):
        end = start + messages
        sharing.give(member, BatchPart(start, messages, [(start, end)], messages), messages)
        sent, ids = Acks(start), []
        for offset in range(start, end):
            if offset % 5:
                sent.add(offset, offset + 1)
                words = ack_set(sent.missing(start, end), start, messages)
                index = offset - start
                id_ = MessageId(ledgerId=LEDGER, entryId=start, batch_index=index, ack_set=words)
                ids.append((id_, offset))
        began_s = time.process_time()
        for message_id, offset in ids:
            for _ in sharing.acknowledge(member, message_id, offset, batches * messages):
                pass
        spent_s += time.process_time() - began_s
        acks += len(ids)
    return spent_s / acks * 1e6


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=100_000)
    parser.add_argument("--standing-still", type=int, default=0, metavar="ROWS")
    parser.add_argument("--within", type=int, default=0, metavar="MESSAGES")
    arguments = parser.parse_args()
    batches = arguments.batches
    if arguments.within:
        spent_us = within_batches(arguments.within)
        print(f"batches of {arguments.within}: {spent_us:.1f} us for a message's acknowledgement")
        return
    if arguments.standing_still:
        await standing_still(arguments.standing_still)
        return
    for messages in (1, BATCH_MESSAGES):
        await spent(EXCLUSIVE, batches, messages, 1)
        for consumers in (1, 4, 20):
            await spent(SHARED, batches, messages, consumers)


if __name__ == "__main__":
    asyncio.run(main())
