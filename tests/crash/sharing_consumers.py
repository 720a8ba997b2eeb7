"""Consumers of shared subscriptions, which do what consumers do: each joins, takes messages for a
while, acknowledges lone messages, batches and parts of batches with receipts, gives some back,
hangs now and then, leaves in good order or without a word, and joins again.

They are plain sockets, since Pulsar's Python client has no receipts of acknowledgements. All that a
client sees goes into the history of the subscription (tests/kit/deliveries.py).
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from benchmarks.socket_client import SocketClient
from spark_ledger.broker.wire.commands import MessageId, SubscriptionType, command
from spark_ledger.topic.entry import pulsar_batch
from tests.crash.broker_kills import PATIENCE_S
from tests.kit.deliveries import Deliveries, Message

CONSUMERS = 20
PERMITS = 40
JOIN_TIMEOUT_S = 15.0
LIFE_S, HANG_S = (2.0, 20.0), (2.0, 9.0)
HANG_SHARE, ABRUPT_SHARE, NACK_SHARE, PART_SHARE = 0.3, 0.5, 0.03, 0.3
ROUND_MAX, ROUND_EVERY_S = 20, 0.02
WORD = 64


@dataclass(slots=True)
class Entry:
    """A lone message or a batch that a session has; `open`: the messages that the session has not
    acknowledged, by their index; `size`: the number of messages in the batch, 0: a lone one."""

    id: MessageId
    size: int
    cost: int
    open: dict[int, Message]

    def acknowledge(self, indexes: list[int] | None = None) -> tuple[MessageId, list[Message]]:
        """An id for these messages of the batch, or for all that is left."""
        id_ = MessageId(ledgerId=self.id.ledgerId, entryId=self.id.entryId)
        if indexes is not None:
            bits = (1 << self.size) - 1
            for index in indexes:
                bits &= ~(1 << index)
            id_.ack_set.extend(_words(bits, self.size))
            id_.batch_size = self.size
        return id_, [self.open.pop(index) for index in indexes or list(self.open)]


def _words(bits: int, size: int) -> Iterator[int]:
    for begin in range(0, size, WORD):
        word = bits >> begin & (1 << WORD) - 1
        yield word - (1 << WORD) if word >> WORD - 1 else word


class Session:
    """One consumer at one partition, from its join to its end."""

    def __init__(
        self, deliveries: Deliveries, topic: str, name: str, partition: int, rng: random.Random
    ) -> None:
        self._deliveries = deliveries
        self._topic = topic
        self._name = name
        self._partition = partition
        self._rng = rng
        self._entries: list[Entry] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._client: SocketClient | None = None
        self._credit = 0
        self.ended = asyncio.Event()

    async def join(self, urls: list[str]) -> None:
        """Raises OSError, RuntimeError, TimeoutError."""
        topic = f"persistent://public/default/{self._topic}-partition-{self._partition}"
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            url = self._rng.choice(urls)
            client = await SocketClient.connected(url)
            try:
                owner = await client.look_up(topic)
                if owner != url:
                    await client.close()
                    client = await SocketClient.connected(owner)
                    await client.look_up(topic)
                self._client, client.on_end = client, self.end
                is_by_key = self._deliveries.by_key
                kind = SubscriptionType.KEY_SHARED if is_by_key else SubscriptionType.SHARED
                fields = {"subType": kind, "consumer_name": self._name}
                await client.subscribe(
                    topic, self._deliveries.name, 0, self._take, PERMITS, **fields
                )
            except BaseException:
                self.end()
                await client.close()
                raise
        self._deliveries.counts["joins"] += 1

    def _take(self, part: Any, data: bytes) -> None:
        if self.ended.is_set():
            return
        batch = pulsar_batch.parse(data)
        payload = bytes(pulsar_batch.payload_of(batch))
        values = [payload]
        if batch.batched:
            parts = pulsar_batch.messages_in(payload, batch.messages)
            values = [payload[at : at + message.payload_size] for message, at in parts]
        mask = sum((word & (1 << WORD) - 1) << WORD * at for at, word in enumerate(part.ack_set))
        messages = {}
        for index, value in enumerate(values):
            if part.ack_set and not mask >> index & 1:
                continue
            key, _, number = value.decode().rpartition(":")
            messages[index] = (key, int(number))
            place = (self._partition, part.message_id.entryId + index)
            self._deliveries.delivered(self._name, messages[index], place)
        size = len(values) if batch.batched else 0
        self._entries.append(Entry(part.message_id, size, len(messages), messages))

    async def work(self, is_calm: asyncio.Event, is_over: asyncio.Event) -> None:
        """Until the broker ends the session, its own time is over, or, if calm, all is over."""
        rng, loop = self._rng, asyncio.get_running_loop()
        leave_at = loop.time() + rng.uniform(*LIFE_S)
        hang_at = leave_at * 2 if rng.random() > HANG_SHARE else rng.uniform(loop.time(), leave_at)
        while not (self.ended.is_set() or is_over.is_set()):
            await asyncio.sleep(ROUND_EVERY_S)
            if not is_calm.is_set() and loop.time() > leave_at:
                return
            if not is_calm.is_set() and loop.time() > hang_at:
                self._deliveries.counts["hangs"] += 1
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.ended.wait(), rng.uniform(*HANG_S))
                hang_at = leave_at * 2
            await self._round(is_calm.is_set())

    async def _round(self, is_calm: bool) -> None:
        """Acknowledge some of what is there, and give some back."""
        taken, self._entries = self._entries[:ROUND_MAX], self._entries[ROUND_MAX:]
        acks, nacks = [], []
        for entry in taken:
            if not is_calm and self._rng.random() < NACK_SHARE and self._is_loose(entry):
                nacks.append(entry)
            elif entry.size > 1 and len(entry.open) > 1 and self._rng.random() < PART_SHARE:
                indexes = self._rng.sample(
                    list(entry.open), self._rng.randrange(1, len(entry.open))
                )
                acks.append(entry.acknowledge(sorted(indexes)))
                self._entries.append(entry)
            else:
                acks.append(entry.acknowledge())
                self._credit += entry.cost
        while acks:
            count = self._rng.randint(1, 5)
            task = asyncio.create_task(self._acknowledge(acks[:count]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            del acks[:count]
        await asyncio.sleep(0)  # acknowledgements are sent before what is given back
        if self.ended.is_set():
            return
        assert self._client is not None
        if nacks:
            for entry in nacks:
                for message in entry.open.values():
                    self._deliveries.nacked(self._name, message)
                self._credit += entry.cost
            ids = [entry.id for entry in nacks]
            self._client.send(command("redeliver", consumer_id=0, message_ids=ids))
        if self._credit >= PERMITS // 2:
            self._client.send(command("flow", consumer_id=0, messagePermits=self._credit))
            self._credit = 0

    def _is_loose(self, entry: Entry) -> bool:
        """Of a Key_Shared subscription every second key is acknowledged in order only."""
        key = next(iter(entry.open.values()))[0]
        return not self._deliveries.by_key or int(key.rpartition("-")[2]) % 2 == 0

    async def _acknowledge(self, acks: list[tuple[MessageId, list[Message]]]) -> None:
        if self.ended.is_set():
            return
        assert self._client is not None
        messages = [message for _, acked in acks for message in acked]
        for message in messages:
            self._deliveries.asked(self._name, message)
        try:
            await self._client.acknowledge(0, [id_ for id_, _ in acks])
        except RuntimeError:
            self._deliveries.counts["refused"] += 1
            self.end()
        except OSError:
            return  # no client knows what became of it
        else:
            for message in messages:
                self._deliveries.receipt(self._name, message)

    async def leave(self) -> None:
        """In good order or without a word."""
        if self._client is None:
            return
        says_so = not self.ended.is_set() and self._rng.random() > ABRUPT_SHARE
        self.end()
        if says_so:
            with suppress(OSError, RuntimeError, TimeoutError):
                async with asyncio.timeout(JOIN_TIMEOUT_S):
                    await self._client.close_consumer(0)
        await self._client.close()
        await asyncio.gather(*self._tasks)

    def end(self) -> None:
        if not self.ended.is_set():
            self.ended.set()
            self._deliveries.left(self._name)


class Consuming:
    """All consumers of a subscription: so many of each partition. `urls`: of the brokers."""

    def __init__(
        self,
        deliveries: Deliveries,
        topic: str,
        partitions: int,
        urls: list[str],
        rng: random.Random,
    ) -> None:
        self.deliveries = deliveries
        self.is_calm, self.is_over = asyncio.Event(), asyncio.Event()
        self._topic = topic
        self._urls = urls
        seats = [(number, part) for number in range(CONSUMERS) for part in range(partitions)]
        self._tasks = [
            asyncio.create_task(self._consume(number, part, random.Random(rng.random())))
            for number, part in seats
        ]

    async def _consume(self, number: int, partition: int, rng: random.Random) -> None:
        joins = 0
        while not self.is_over.is_set():
            joins += 1
            name = f"{number}-{partition}-{joins}"
            session = Session(self.deliveries, self._topic, name, partition, rng)
            try:
                await session.join(self._urls)
                await session.work(self.is_calm, self.is_over)
            except (OSError, RuntimeError, TimeoutError):
                self.deliveries.counts["joins in vain"] += 1
            await session.leave()
            await asyncio.sleep(rng.uniform(0.0, 1.0))

    def check_alive(self) -> None:
        """Raises what a consumer raised, and AssertionError for what is wrong so far."""
        for task in self._tasks:
            if task.done() and not self.is_over.is_set():
                task.result()
        self.deliveries.raise_faults()

    async def drained(self, stored: list[Message], backlog: Callable[[], int]) -> None:
        """Return once all stored messages are acknowledged, and the broker knows it."""
        self.is_calm.set()
        left, until_s = (-1, -1), 0.0
        while left != (0, 0):
            await asyncio.sleep(0.5)
            self.check_alive()
            missing = self.deliveries.missing(stored)
            now = len(missing), await asyncio.to_thread(backlog)
            if now != left:
                left, until_s = now, time.monotonic() + PATIENCE_S
            text = f"{self.deliveries.name}: {left[0]} left, {missing[:5]}, backlog {left[1]}"
            assert time.monotonic() < until_s, text

    async def finish(self) -> None:
        self.is_over.set()
        await asyncio.gather(*self._tasks)
