"""Subscriptions in their broker: their consumers, where these begin, and what is acknowledged.

Always true: at most one consumer of a partition is active: the only one (Exclusive, Reader), or of
a Failover subscription the one at place `partition mod n` of those by priority, then name; the
next one begins at the mark, so what was not acknowledged comes again (at least once). A durable
subscription is a cursor of the topic layer, of kind CONSUMER: acknowledging moves it in the
background, a second apart at most, and the last one to leave writes where it is. What is sent is
bounded by the permits that the consumer gave, and by the connection's room. A message's chunks are
sent with its last one, all with its id, wherever the consumer began: so the broker never sends part
of an incomplete message, and a client acknowledges only the last chunk. The durable position is
never beyond the first offset that is not acknowledged, and only a seek moves it back.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

from spark_ledger import errors
from spark_ledger.broker.dispatch.acks import Acks, SentBatches, ack_set, acked_in
from spark_ledger.broker.names import offset_of
from spark_ledger.broker.owner.partition import UNREADABLE, Partition
from spark_ledger.broker.owner.tail import STEP_BATCHES_MAX, Stored
from spark_ledger.broker.wire.commands import (
    AckType,
    MessageId,
    Refusal,
    ServerError,
    SubscriptionType,
    command,
    signed,
)
from spark_ledger.broker.wire.frames import encode, with_batch
from spark_ledger.broker.wire.sends import Messages
from spark_ledger.topic.entry.pulsar_batch import (
    chunk_in,
    chunks_of,
    earlier_offsets,
    is_last_chunk,
)
from spark_ledger.topic.subscription.consumer_cursors import ConsumerCursor

RETRY_S, LOST_RETRY_S = 1.0, 60.0
TELL_EVERY_S = 600.0
SOON_S = 0.01

_log = logging.getLogger(__name__)


class Link(Protocol):
    """A client's connection, as a consumer uses it."""

    def send(self, frame: bytes) -> None: ...

    async def room(self) -> None:
        """Return when what was sent before has gone out, all but a bounded rest."""

    async def answers(self) -> bool:
        """Whether its client is there; if not, it has ended by then."""


class Consumer:
    """Of one partition, for one connection."""

    def __init__(
        self,
        link: Link,
        consumer_id: int,
        name: str,
        priority: int,
        place: "PlaceInPartition",
        on_end: Callable[["Consumer"], None],
        epoch: int | None = None,
    ) -> None:
        self.link = link
        self.id = consumer_id
        self.name = name
        self.priority = priority
        self.place = place
        self._on_end = on_end
        self._messages = Messages(consumer_id, place.partition.ledger, place.partition.shown)
        self._messages.epoch = epoch
        self._permits = 0
        self._position = 0
        self._active = False
        self._rewound = 0
        self._wake = asyncio.Event()
        place.partition.listeners[self._wake] = None
        self._sent = SentBatches()
        self._sent_back = asyncio.Event()
        self._lossy = False  # what is read next is read without rows that are lost
        self._told: tuple[object, float] = (None, 0.0)
        self._task = asyncio.get_running_loop().create_task(self._pump())

    def flow(self, permits: int) -> None:
        self._permits += permits
        self._wake.set()

    def activate(self, active: bool) -> None:
        if active and not self._active:
            self.rewind()
        self._active = active
        self._wake.set()

    def redeliver(self, epoch: int | None) -> None:
        """Its client asks for all again: what it gets from now on is of that epoch."""
        self._messages.epoch = epoch
        self.rewind()

    def rewind(self) -> None:
        """Send again what is not acknowledged."""
        self._position = self.place.acks.mark
        self._rewound += 1
        self._sent_back.set()
        self._wake.set()

    def acknowledge(self, message_id: MessageId, ack_type: AckType) -> Iterator[bool]:
        """In steps, one at least, one for each stretch of the id's set: whether each moved the
        mark. What is beyond the confirmed end was not sent, and counts for nothing."""
        partition, acks = self.place.partition, self.place.acks
        offset = offset_of(message_id, partition.ledger)
        if ack_type == AckType.CUMULATIVE:
            end = self.acknowledged_up_to(message_id, offset)
            yield end <= partition.end and acks.up_to(end)
            return
        stretches = self.acknowledged(message_id, offset)
        for lo, hi in stretches:
            yield hi <= partition.end and acks.add(lo, hi)
        if not stretches:
            yield False

    def acknowledged(self, message_id: MessageId, offset: int) -> list[tuple[int, int]]:
        """The offsets that an id acknowledges by itself: one message of a batch, a whole batch, or
        the part of it in the id's set. How many messages a batch has is known from when it was
        sent, never from the id. For a batch that was not sent to this consumer (another broker sent
        it, for example) a set is ignored, and an id without a set acknowledges one message."""
        start = signed(message_id.entryId)
        messages = self._sent.messages(start)
        if message_id.ack_set:
            return [] if messages is None else acked_in(message_id.ack_set, start, messages)
        if message_id.batch_index >= 0:
            inside = messages is None or message_id.batch_index < messages
            return [(offset, offset + 1)] if inside else []
        return [(start, start + (messages or 1))]

    def acknowledged_up_to(self, message_id: MessageId, offset: int) -> int:
        """One past the last offset that a cumulative ack names, by what was sent, as above. An id
        that is no batch of those sent names the last message before a batch (its consumer is in the
        middle of that)."""
        start = signed(message_id.entryId)
        messages = self._sent.messages(start)
        if message_id.ack_set:
            parts = acked_in(message_id.ack_set, start, messages or 0)
            return parts[0][1] if parts and parts[0][0] == start else start
        if message_id.batch_index >= 0:
            return offset + 1 if messages is None else min(offset + 1, start + messages)
        return start + (messages or 1)

    def end(self) -> None:
        """Send it away: it is to look its topic up again."""
        self._on_end(self)

    async def close(self) -> None:
        self.place.partition.listeners.pop(self._wake, None)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _pump(self) -> None:
        """Send what there is, as long as the consumer is the active one and has permits."""
        pause_s = RETRY_S
        while True:
            try:
                await self._until_it_may_send()
                rewound = self._rewound
                self._pass_over(self.place.partition.start)
                batches = await self._read()
                if rewound == self._rewound:
                    await self._send_all(batches)
                await asyncio.sleep(0)
                pause_s, self._lossy = RETRY_S, False
            except (errors.Unavailable, errors.DataUnavailable, errors.RowsTrimmed) as error:
                _log.warning("consumer '%s' waits: %s", self.name, error)
                await asyncio.sleep(RETRY_S)
            except (errors.TopicDeleted, errors.TopicNotFound, errors.LedgerFenced) as error:
                _log.error("consumer '%s' ends: %s", self.name, error)
                self._on_end(self)
                return
            except Exception as error:
                before, lost = self._lossy, isinstance(error, UNREADABLE)
                self._lossy = lost and not before and await self.place.partition.skips_lost()
                self._tell(error)
                if not self._lossy:
                    await self._pause(pause_s)
                    pause_s = min(2 * pause_s, LOST_RETRY_S)

    async def _read(self) -> list[Stored]:
        if self._lossy:
            return await self.place.partition.read(self._position, lossy=True)
        return await self.place.partition.read(self._position)

    async def _chunk(self, offset: int) -> Stored | None:
        """None where it is not kept, or is lost and passed over."""
        try:
            return await self.place.partition.chunk(offset)
        except UNREADABLE:
            if self._lossy:
                return None
            raise

    async def _pause(self, seconds: float) -> None:
        """What cannot be read is tried again then, or once it is to send from another place. The
        consumer stays: a client whose consumer is sent away subscribes again at once."""
        self._sent_back.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._sent_back.wait()

    def _tell(self, error: Exception) -> None:
        """Once for a position, and now and then."""
        now_s, place = asyncio.get_running_loop().time(), (self._position, self._lossy)
        if self._told[0] == place and now_s < self._told[1] + TELL_EVERY_S:
            return
        self._told = place, now_s
        unknown = None if isinstance(error, errors.LedgerError) else error
        does = "passes over rows that cannot be read" if self._lossy else "pauses"
        hint = ""
        if isinstance(error, UNREADABLE) and not self._lossy:
            hint = " The policy on_lost_rows=skip of the topic passes over such rows."
        what = (self.name, does, self.place.partition.title, self._position)
        _log.error(
            "consumer '%s' %s of %s at offset %d: %s%s",
            *(*what, error, hint),
            exc_info=unknown,
        )

    async def _until_it_may_send(self) -> None:
        partition = self.place.partition
        while not self._active or self._permits <= 0 or partition.end <= self._position:
            self._wake.clear()
            await self._wake.wait()
        await self.link.room()

    async def _send_all(self, batches: list[Stored]) -> None:
        if not batches:  # a hole up to what is confirmed, or it is known in a moment
            await self._over_hole()
        rewound = self._rewound
        for count, batch in enumerate(batches, 1):
            await self.link.room()
            if not count % STEP_BATCHES_MAX:
                await asyncio.sleep(0)
            if self._permits <= 0 or not self._active or rewound != self._rewound:
                return
            if batch.end <= self._position:
                continue
            self._pass_over(batch.offset)
            if not batch.has_rows:
                self._pass_over(batch.end)
                continue
            for lo, hi in self.place.partition.removed(batch.offset, batch.end):
                self.place.acks.add(lo, hi)
            missing = self.place.acks.missing(max(batch.offset, self._position), batch.end)
            if missing and is_last_chunk(batch.data):
                await self._send_message(batch)
            elif missing:
                await self._send(batch, missing)
            if rewound != self._rewound:
                return
            self._position = batch.end

    async def _over_hole(self) -> None:
        held = self.place.partition.held
        nexts = [
            interval.lo
            for interval in held.intervals.between(self._position, held.end_offset)
            if interval.source is not None and interval.lo >= self._position
        ]
        if nexts:
            self._pass_over(nexts[0])
        elif self._position < held.end_offset:
            self._pass_over(held.end_offset)
        else:
            await asyncio.sleep(SOON_S)

    def _pass_over(self, offset: int) -> None:
        """Nothing is between the position and the offset: there is nothing to acknowledge."""
        if offset > self._position:
            self.place.acks.pass_over(self._position, offset)
            self._position = offset

    async def _send_message(self, last: Stored) -> None:
        """A message in its chunks, of which `last` is the last; once begun it is sent whole."""
        partition = self.place.partition
        sent = self._messages.command(last.offset, ())
        self._sent.note(last.offset, last.messages)
        offsets = earlier_offsets(last.data)
        for offset in offsets:
            chunk = await self._chunk(offset)
            if chunk is None:
                _log.warning(
                    "a message of %d chunks is passed over: the one at offset %d of %s is the"
                    " last, and the one at offset %d is not kept any more",
                    *(len(offsets) + 1, last.offset, partition.title, offset),
                )
                self.place.acks.add(last.offset, last.end)
                return
            self._send_chunk(sent, chunk)
            await self.link.room()
        self._send_chunk(sent, last)

    def _send_chunk(self, sent: bytes, chunk: Stored) -> None:
        self.link.send(with_batch(sent, chunk_in(chunk.data)))
        self._permits -= 1

    async def _send(self, batch: Stored, missing: list[tuple[int, int]]) -> None:
        """A batch, or a message with its chunks: each takes a permit, and they have one id; once
        begun it is sent whole."""
        acks = ack_set(missing, batch.offset, batch.messages) if batch.batched else ()
        sent = self._messages.command(batch.offset, acks)
        self._sent.note(batch.offset, batch.messages)
        first, *others = chunks_of(batch.data)
        self.link.send(with_batch(sent, first))
        self._permits -= sum(hi - lo for lo, hi in missing)
        for chunk in others:
            await self.link.room()
            self.link.send(with_batch(sent, chunk))
            self._permits -= 1


class PlaceInPartition:
    """Where a subscription is in one partition, and its consumers there."""

    def __init__(self, partition: Partition, mark: int) -> None:
        self.partition = partition
        self.acks = Acks(mark)
        self.consumers: list[Consumer] = []
        self.sought = False
        """A seek has sent its consumers away, and they come back to where that put it."""

    def active(self, kind: SubscriptionType) -> Consumer | None:
        if not self.consumers:
            return None
        if kind is SubscriptionType.EXCLUSIVE:
            return self.consumers[0]
        ordered = sorted(self.consumers, key=lambda one: (one.priority, one.name))
        best = [one for one in ordered if one.priority == ordered[0].priority]
        return best[self.partition.number % len(best)]


class Subscription:
    """Of a topic, by name, while consumers of this broker have it. `cursor` None: it is not
    durable."""

    def __init__(self, name: str, kind: SubscriptionType, cursor: ConsumerCursor | None) -> None:
        self.name = name
        self.kind = kind
        self.cursor = cursor
        self._places: dict[int, PlaceInPartition] = {}

    @property
    def durable(self) -> bool:
        return self.cursor is not None

    @property
    def used(self) -> bool:
        return any(place.consumers for place in self._places.values())

    @property
    def sought(self) -> bool:
        """Whether a seek has sent consumers away that are not back."""
        return any(place.sought for place in self._places.values())

    @property
    def consumers(self) -> list[Consumer]:
        return [one for place in self._places.values() for one in place.consumers]

    def has_place(self, partition: int) -> bool:
        return partition in self._places

    def leave_partition(self, partition: int) -> list[Consumer]:
        """Forget the position in that partition, which another broker has from now on; returns the
        partition's consumers."""
        place = self._places.pop(partition, None)
        return [] if place is None else list(place.consumers)

    def place(self, partition: Partition, mark: int) -> PlaceInPartition:
        """Its place in that partition; new, or of a reader that comes, it is at `mark`."""
        place = self._places.get(partition.number)
        left = place is not None and not place.sought and not place.consumers
        if place is None or (left and not self.durable):
            place = PlaceInPartition(partition, mark)
            self._places[partition.number] = place
        return place

    def before(self, kind: SubscriptionType, partition: int) -> list[Consumer]:
        """Those because of which one more cannot come, or is not the active one."""
        if kind is not self.kind:
            return self.consumers
        place = self._places.get(partition)
        active = None if place is None else place.active(kind)
        return [] if active is None else [active]

    def check(self, kind: SubscriptionType, partition: int) -> None:
        """Whether one more consumer may come. Raises Refusal."""
        place = self._places.get(partition)
        if self.used and kind is not self.kind:
            raise Refusal(
                ServerError.CONSUMER_BUSY,
                f"subscription '{self.name}' is used as {self.kind.name}, not {kind.name}",
            )
        if kind is SubscriptionType.EXCLUSIVE and place is not None and place.consumers:
            raise Refusal(
                ServerError.CONSUMER_BUSY,
                f"subscription '{self.name}' has an exclusive consumer already",
            )

    def join(self, consumer: Consumer) -> None:
        consumer.place.consumers.append(consumer)
        consumer.place.sought = False
        self._choose(consumer.place)

    def leave(self, consumer: Consumer) -> None:
        if consumer in consumer.place.consumers:
            consumer.place.consumers.remove(consumer)
            self._choose(consumer.place)

    def _choose(self, place: PlaceInPartition) -> None:
        active = place.active(self.kind)
        for consumer in place.consumers:
            consumer.activate(consumer is active)
            if self.kind is SubscriptionType.FAILOVER:
                change = command(
                    "active_consumer_change", consumer_id=consumer.id, is_active=consumer is active
                )
                consumer.link.send(encode(change))

    def moved(self, place: PlaceInPartition) -> None:
        """Make durable where it is."""
        if self.cursor is not None:
            self.cursor.check()
            self.cursor.advance(place.partition.number, place.acks.durable)

    def seek(self, place: PlaceInPartition, offset: int) -> None:
        """Put it to the offset in that partition; its consumers there are sent away."""
        place.acks.reset(offset)
        place.sought = True
        self.moved(place)
        for one in list(place.consumers):
            one.end()
