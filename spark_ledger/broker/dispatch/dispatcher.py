"""The dispatcher of a subscription in one partition: what is sent to its consumers, what they
acknowledge, and from which offset on messages are sent again.

Always true: the read position, the permits, and what is sent and not acknowledged belong to the
dispatcher; which consumer gets messages is its policy's decision (policies.py). Another active
consumer begins at the mark, so messages that were not acknowledged are sent again (at least once).
A consumer's permits and its connection's room bound what is sent. All chunks of a message are sent
when the dispatcher comes to the last chunk, with the last chunk's id, wherever the consumer began:
so the broker never sends part of an incomplete message, and a client acknowledges only the last
chunk.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator

from spark_ledger import errors
from spark_ledger.async_tasks import woken
from spark_ledger.broker.dispatch.acks import Acks, SentBatches, ack_set
from spark_ledger.broker.dispatch.policies import Policy, may_get
from spark_ledger.broker.names import offset_of
from spark_ledger.broker.owner.partition import UNREADABLE, Partition
from spark_ledger.broker.owner.tail import STEP_BATCHES_MAX, Stored
from spark_ledger.broker.wire.commands import AckType, MessageId, command
from spark_ledger.broker.wire.frames import encode, with_batch
from spark_ledger.broker.wire.link import ClientFacts, Link
from spark_ledger.broker.wire.sends import Messages
from spark_ledger.topic.entry.pulsar_batch import (
    chunk_in,
    chunks_of,
    earlier_offsets,
    is_last_chunk,
)
from spark_ledger.topic.subscription.consumer_cursor import ConsumerCursor

RETRY_S, LOST_RETRY_S = 1.0, 60.0
CROWDED_S = 1.0
LOG_EVERY_S = 600.0
SOON_S = 0.01

_log = logging.getLogger(__name__)


class Consumer:
    """What the dispatcher of a partition keeps of one consumer. `epoch` counts its client's
    requests to send everything again; None if the client does not count them."""

    def __init__(
        self,
        link: Link,
        consumer_id: int,
        name: str,
        priority: int,
        dispatcher: "Dispatcher",
        on_end: Callable[["Consumer"], None],
        epoch: int | None = None,
    ) -> None:
        self.link = link
        self.id = consumer_id
        self.name = name
        self.priority = priority
        self.dispatcher = dispatcher
        self.permits = 0
        self.sent = SentBatches()
        partition = dispatcher.partition
        self.messages = Messages(consumer_id, partition.ledger, partition.shown)
        self.messages.epoch = epoch
        self.sending: asyncio.Task[None] | None = None
        self.on_end = on_end
        self.client: ClientFacts | None = None

    def end(self) -> None:
        """Send the consumer away: its client is to look the topic up again."""
        self.on_end(self)


class Dispatcher:
    """For a subscription that begins at `mark` in the partition; `cursor` makes its position
    durable, None if no position is to be durable."""

    def __init__(
        self, partition: Partition, policy: Policy, mark: int, cursor: ConsumerCursor | None
    ) -> None:
        self.partition = partition
        self.acks = Acks(mark, budget=None if cursor is None else cursor.ack_budget)
        self.consumers: list[Consumer] = []
        self.active: Consumer | None = None
        self.awaits_consumers = False
        """Whether a seek has sent the consumers away, and none of them is back yet."""
        self._policy = policy
        self._cursor = cursor
        self.position = mark
        self._rewinds = 0
        self._rewind_event = asyncio.Event()
        self._wake = asyncio.Event()
        self._logged_failure: tuple[object, float] = (None, 0.0)
        self._is_crowded = False

    # -- consumers -----------------------------------------------------------------------------

    def admits(self) -> bool:
        """Whether one more consumer may join."""
        return self._policy.admits(self.consumers)

    def join(self, consumer: Consumer) -> None:
        self.partition.listeners[self._wake] = None
        self.consumers.append(consumer)
        self.awaits_consumers = False
        self._choose()

    def leave(self, consumer: Consumer) -> None:
        if consumer not in self.consumers:
            return
        self.consumers.remove(consumer)
        if consumer.sending is not None:
            consumer.sending.cancel()
        if not self.consumers:
            self.partition.listeners.pop(self._wake, None)
        self._choose()

    def _choose(self) -> None:
        active = self._policy.active(self.consumers, self.partition.number)
        if active is not self.active:
            self.active = active
            self.rewind()
            if active is not None and (active.sending is None or active.sending.done()):
                active.sending = asyncio.get_running_loop().create_task(self._send_to(active))
        if self._policy.announces:
            for consumer in self.consumers:
                is_active = consumer is active
                change = command(
                    "active_consumer_change", consumer_id=consumer.id, is_active=is_active
                )
                consumer.link.send(encode(change))

    def flow(self, consumer: Consumer, permits: int) -> None:
        """The consumer's client takes `permits` more messages."""
        consumer.permits += permits
        self._wake.set()

    def redeliver(self, consumer: Consumer, epoch: int | None) -> None:
        """The consumer's client asks for everything again: messages that it gets from now on have
        that `epoch`."""
        consumer.messages.epoch = epoch
        if consumer is self.active:
            self.rewind()

    def rewind(self) -> None:
        """Send again what is not acknowledged."""
        self.position = self.acks.mark
        self._rewinds += 1
        self._rewind_event.set()
        self._wake.set()

    def seek(self, offset: int) -> None:
        """From `offset` on nothing is acknowledged, and everything below it is. The consumers are
        sent away, and begin there when they come back. Raises as `save_position`."""
        self.acks.reset(offset)
        self.awaits_consumers = True
        self.save_position()
        for consumer in list(self.consumers):
            consumer.end()

    def move_up(self, offset: int) -> None:
        """Acknowledge everything below `offset`, and send none of it any more. Raises as
        `save_position`."""
        if self.acks.add_up_to(offset):
            self._pass_over(self.acks.mark)
            self.save_position()

    def save_position(self) -> None:
        """Make the position durable. Raises as ConsumerCursor.check."""
        if self._cursor is not None:
            self._cursor.check()
            self._cursor.advance(self.partition.number, self.acks.durable)

    def acknowledge(
        self, consumer: Consumer, message_id: MessageId, ack_type: AckType
    ) -> Iterator[bool]:
        """Acknowledge in steps: one for each range of the id's set, and one at least. Yields
        whether the step moved the mark. Offsets beyond the confirmed end were not sent, and are
        ignored."""
        partition, acks = self.partition, self.acks
        offset = offset_of(message_id, partition.ledger)
        if ack_type == AckType.CUMULATIVE:
            end = consumer.sent.cumulative_end(message_id, offset)
            yield end <= partition.end and acks.add_up_to(end)
            return
        ranges = consumer.sent.acknowledged_ranges(message_id, offset)
        for lo, hi in ranges:
            yield hi <= partition.end and acks.add(lo, hi)
        if not ranges:
            yield False

    # -- sending -----------------------------------------------------------------------------

    async def _send_to(self, consumer: Consumer) -> None:
        """Send messages as long as the consumer is the active one. `lossy`: the next read leaves
        lost rows out."""
        pause_s, lossy = RETRY_S, False
        while consumer is self.active:
            try:
                if not await self._may_send(consumer):
                    return
                rewinds = self._rewinds
                self._pass_over(self.partition.start)
                batches = await self.partition.read(self.position, lossy=lossy)
                if rewinds == self._rewinds:
                    await self._send_all(consumer, batches, lossy)
                await asyncio.sleep(0)
                pause_s, lossy = RETRY_S, False
            except (errors.Unavailable, errors.DataUnavailable, errors.RowsTrimmed) as error:
                _log.warning("consumer '%s' waits: %s", consumer.name, error)
                await asyncio.sleep(RETRY_S)
            except (errors.TopicDeleted, errors.TopicNotFound, errors.LedgerFenced) as error:
                _log.error("consumer '%s' ends: %s", consumer.name, error)
                consumer.end()
                return
            except Exception as error:
                is_lost = isinstance(error, UNREADABLE)
                lossy = is_lost and not lossy and await self.partition.skips_lost()
                self._log_failure(consumer, error, lossy)
                if not lossy:
                    await self._pause(pause_s)
                    pause_s = min(2 * pause_s, LOST_RETRY_S)

    async def _may_send(self, consumer: Consumer) -> bool:
        """Wait until there is a batch that the consumer may get; False once another consumer is
        active."""
        while not may_get(consumer, self.active) or self.partition.end <= self.position:
            if consumer is not self.active:
                return False
            self._wake.clear()
            await self._wake.wait()
        while not self.acks.may_send(self.position):
            if consumer is not self.active:
                return False
            self._log_crowded()
            await self._pause(CROWDED_S)
        self._is_crowded = False
        await consumer.link.room()
        return consumer is self.active

    def _log_crowded(self) -> None:
        """Log once that the acknowledged sets take too much."""
        if not self._is_crowded:
            _log.warning(
                "%s: a subscription pauses at offset %d: its sets of acknowledged messages take %d"
                " bytes. Messages before it are not acknowledged: the first is at offset %d",
                *(self.partition.title, self.position, self.acks.bytes, self.acks.mark),
            )
        self._is_crowded = True

    async def _pause(self, seconds: float) -> None:
        """Wait before a failed read is tried again; a rewind ends the pause. The consumer stays: if
        it were sent away, its client would subscribe again at once."""
        self._rewind_event.clear()
        await woken(self._rewind_event, seconds)

    def _log_failure(self, consumer: Consumer, error: Exception, lossy: bool) -> None:
        """Log a failure once for a position, and again after LOG_EVERY_S."""
        now_s, place = asyncio.get_running_loop().time(), (self.position, lossy)
        if self._logged_failure[0] == place and now_s < self._logged_failure[1] + LOG_EVERY_S:
            return
        self._logged_failure = place, now_s
        defect = None if isinstance(error, errors.LedgerError) else error
        does = "passes over rows that cannot be read" if lossy else "pauses"
        hint = ""
        if isinstance(error, UNREADABLE) and not lossy:
            hint = " The policy on_lost_rows=skip of the topic passes over such rows."
        what = (consumer.name, does, self.partition.title, self.position)
        _log.error(
            "consumer '%s' %s of %s at offset %d: %s%s",
            *(*what, error, hint),
            exc_info=defect,
        )

    async def _send_all(self, consumer: Consumer, batches: list[Stored], lossy: bool) -> None:
        if not batches:  # a hole up to the confirmed end, or the log will soon have a seal
            await self._pass_over_hole()
        rewinds = self._rewinds
        for count, batch in enumerate(batches, 1):
            await consumer.link.room()
            if not count % STEP_BATCHES_MAX:
                await asyncio.sleep(0)
            if consumer.permits <= 0 or rewinds != self._rewinds:
                return
            if batch.end <= self.position:
                continue
            self._pass_over(batch.offset)
            if not batch.has_rows:
                self._pass_over(batch.end)
                continue
            for lo, hi in self.partition.removed(batch.offset, batch.end):
                self.acks.add(lo, hi)
            missing = self.acks.missing(max(batch.offset, self.position), batch.end)
            if missing and is_last_chunk(batch.data):
                await self._send_message(consumer, batch, lossy)
            elif missing:
                await self._send(consumer, batch, missing)
            if rewinds != self._rewinds:
                return
            self.position = batch.end

    async def _pass_over_hole(self) -> None:
        held = self.partition.held
        starts = [
            interval.lo
            for interval in held.intervals.between(self.position, held.end_offset)
            if interval.source is not None and interval.lo >= self.position
        ]
        if starts:
            self._pass_over(starts[0])
        elif self.position < held.end_offset:
            self._pass_over(held.end_offset)
        else:
            await asyncio.sleep(SOON_S)

    def _pass_over(self, offset: int) -> None:
        """Go on at `offset`: there is no row before it, thus nothing to acknowledge."""
        if offset > self.position:
            self.acks.pass_over(self.position, offset)
            self.position = offset

    async def _send_message(self, consumer: Consumer, last: Stored, lossy: bool) -> None:
        """Send a message in its chunks; `last` is the last chunk. Once begun, all chunks are
        sent."""
        consumer.sent.note(last.offset, last.messages)
        frame = consumer.messages.command(last.offset, ())
        offsets = earlier_offsets(last.data)
        for offset in offsets:
            chunk = await self._chunk(offset, lossy)
            if chunk is None:
                _log.warning(
                    "a message of %d chunks is passed over: the one at offset %d of %s is the"
                    " last, and the one at offset %d is not kept any more",
                    *(len(offsets) + 1, last.offset, self.partition.title, offset),
                )
                self.acks.add(last.offset, last.end)
                return
            _send_part(consumer, frame, chunk_in(chunk.data))
            await consumer.link.room()
        _send_part(consumer, frame, chunk_in(last.data))

    async def _chunk(self, offset: int, lossy: bool) -> Stored | None:
        """The chunk at `offset`; None if it is not kept any more, or is lost and passed over."""
        try:
            return await self.partition.chunk(offset)
        except UNREADABLE:
            if lossy:
                return None
            raise

    async def _send(
        self, consumer: Consumer, batch: Stored, missing: list[tuple[int, int]]
    ) -> None:
        """Send a batch, or a message in chunks: each chunk takes a permit, and all have one id.
        Once begun, all chunks are sent."""
        acks = ack_set(missing, batch.offset, batch.messages) if batch.batched else ()
        frame = consumer.messages.command(batch.offset, acks)
        consumer.sent.note(batch.offset, batch.messages)
        first, *others = chunks_of(batch.data)
        consumer.link.send(with_batch(frame, first))
        consumer.permits -= sum(hi - lo for lo, hi in missing)
        for chunk in others:
            await consumer.link.room()
            _send_part(consumer, frame, chunk)


def _send_part(consumer: Consumer, command_before: bytes, chunk: memoryview) -> None:
    consumer.link.send(with_batch(command_before, chunk))
    consumer.permits -= 1
