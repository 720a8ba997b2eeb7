"""The base of both kinds of dispatchers of a subscription in one partition. It reads the partition
from the subscription's position on, goes on after failures, and has the acknowledgements.

Always true: the dispatcher keeps the read position, and the messages that are sent and not
acknowledged. Its kind decides which consumers get messages: one active consumer
(active_dispatcher.py), or several consumers that share (shared_dispatcher.py). Messages that were
not acknowledged are sent again (at least once). A consumer's permits and its connection's room
bound the messages that are sent. All chunks of a message are sent when the dispatcher comes to the
last chunk, with the last chunk's id, wherever the consumer began: so the broker never sends part of
an incomplete message, and a client acknowledges only the last chunk.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyroaring import BitMap64

from spark_ledger import errors
from spark_ledger.async_tasks import woken
from spark_ledger.broker.dispatch.acks import Acks, SentBatches
from spark_ledger.broker.dispatch.key_slots import KeyedBatches
from spark_ledger.broker.dispatch.policies import Policy
from spark_ledger.broker.dispatch.sharing import Member
from spark_ledger.broker.log.partition import READ_BYTES, UNREADABLE, Partition
from spark_ledger.broker.log.tail import Stored
from spark_ledger.broker.wire.commands import AckType, MessageId, command
from spark_ledger.broker.wire.frames import encode, with_batch
from spark_ledger.broker.wire.link import ClientFacts, Link
from spark_ledger.broker.wire.sends import Messages
from spark_ledger.rates import Allowance
from spark_ledger.topic.acks.served import Receipt
from spark_ledger.topic.acks.sets import AckBudget
from spark_ledger.topic.entry.pulsar_batch import (
    CHUNKS_MAGIC,
    LAST_MAGIC,
    chunk_in,
    chunks_of,
    earlier_offsets,
    is_last_chunk,
)
from spark_ledger.topic.log.state import PartitionState
from spark_ledger.topic.subscription.consumer_cursor import ConsumerCursor

RETRY_S, LOST_RETRY_S = 1.0, 60.0
"""The first pause after a failed read, and the longest pause if rows cannot be read."""
MEMORY_WAIT_S = 1.0
"""How long a dispatcher whose sets take too much memory waits until it looks again."""
LOG_EVERY_S = 600.0
HOLE_WAIT_S = 0.01
"""How long a dispatcher waits at a hole until it reads again."""
_CHUNKED_BEGINS = [magic.to_bytes(2, "big") for magic in (CHUNKS_MAGIC, LAST_MAGIC)]

_log = logging.getLogger(__name__)


class Consumer(Member):
    """One consumer at the dispatcher of a partition. `epoch` counts its client's requests to send
    everything again; None if the client does not count them."""

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
        super().__init__(name, priority, lambda: link.has_room.is_set())
        self.link = link
        self.id = consumer_id
        self.dispatcher = dispatcher
        self.sent = SentBatches()
        partition = dispatcher.partition
        self.messages = Messages(consumer_id, partition.ledger, partition.number_in_ids)
        self.messages.epoch = epoch
        self.sending: asyncio.Task[None] | None = None
        self.on_end = on_end
        self.has_asked = False
        """Whether the client has asked for messages: then it has handled the response to
        SUBSCRIBE."""
        self.asked_ms = 0
        """When the client asked for messages last, by the store's clock; 0: it has not asked."""
        self.has_reached_end = False
        """Whether REACHED_END_OF_TOPIC is sent, or is not to be sent any more."""
        self.client: ClientFacts | None = None

    def deliver(self, frame: bytes, messages: int) -> None:
        """Send so many messages."""
        self.link.send(frame)
        for allowance in self.dispatcher.allowances:
            allowance.take(messages, len(frame))

    def announce_end(self) -> None:
        """Send REACHED_END_OF_TOPIC, but not to the C++ client: that client takes the command for
        invalid, and cuts its connection."""
        self.has_reached_end = True
        if self.client is None or not self.client.is_cpp:
            self.link.send(encode(command("reached_end_of_topic", consumer_id=self.id)))

    def end(self) -> None:
        """Send the consumer away: its client then looks the topic up again."""
        self.on_end(self)


class Pause(NamedTuple):
    """Why a subscription reads no new messages. ACKNOWLEDGED: the sets of messages that are
    acknowledged beyond gaps, or wait, take too much memory. DELAYED: too many messages are delayed.
    "": it reads on. `logged_s` is when a pause was logged last."""

    reason: str
    logged_s: float


@dataclass(slots=True)
class Reads:
    """Where a dispatcher read last, and the failure that was logged last."""

    at: int
    failed_at: object = None
    logged_s: float = 0.0


NO_PAUSE = Pause("", float("-inf"))
ACKNOWLEDGED, DELAYED = "acknowledged", "delayed"


class Dispatcher(ABC):
    """The dispatcher of a subscription that begins at `mark` in the partition; `rows` beyond the
    mark are acknowledged. `cursor` makes acknowledgements durable; None: they stay in memory.
    `budget` counts the memory of the subscription's sets."""

    def __init__(
        self,
        partition: Partition,
        policy: Policy,
        mark: int,
        cursor: ConsumerCursor | None,
        rows: BitMap64 | None = None,
        budget: AckBudget | None = None,
    ) -> None:
        self.partition = partition
        self.acks = Acks(mark, rows, budget)
        self.acks.keeps_changes = cursor is not None
        if cursor is not None:
            cursor.track(partition.number, self.acks)
        self.consumers: list[Consumer] = []
        self.active: Consumer | None = None
        """The only consumer that gets messages; None if several consumers share them, or there is
        no consumer."""
        self.awaits_consumers = False
        """Whether a seek has sent the consumers away, and no consumer is back yet."""
        self.position = mark
        self.pause = NO_PAUSE
        self.allowances: Sequence[Allowance] = ()
        self._spark_batches = KeyedBatches()
        self._policy = policy
        self._cursor = cursor
        self._rewinds = 0
        self._rewind_event = asyncio.Event()
        self._wake = asyncio.Event()
        self._reads = Reads(mark)

    # -- consumers -----------------------------------------------------------------------------

    @abstractmethod
    def _has_joined(self, consumer: Consumer) -> None: ...

    @abstractmethod
    def _has_left(self, consumer: Consumer) -> None: ...

    def admits(self) -> bool:
        """Whether one more consumer may join."""
        return self._policy.admits(self.consumers)

    def join(self, consumer: Consumer) -> None:
        self.partition.listeners[self._wake] = None
        self.consumers.append(consumer)
        self.awaits_consumers = False
        self._has_joined(consumer)

    def leave(self, consumer: Consumer) -> None:
        if consumer not in self.consumers:
            return
        self.consumers.remove(consumer)
        if consumer.sending is not None:
            consumer.sending.cancel()
        if not self.consumers:
            self.partition.listeners.pop(self._wake, None)
        self._has_left(consumer)

    def flow(self, consumer: Consumer, permits: int) -> None:
        """The consumer's client takes `permits` more messages."""
        if not consumer.has_asked:
            consumer.has_asked, consumer.takes_rows = True, permits == 1
        self._add_permits(consumer, permits)

    @abstractmethod
    def _add_permits(self, consumer: Consumer, permits: int) -> None: ...

    @abstractmethod
    def redeliver(self, consumer: Consumer, epoch: int | None, entries: Iterable[int] = ()) -> None:
        """Send these entries again, as the consumer's client asks; without entries, everything.
        Messages that the client gets from now on have this `epoch`."""

    @abstractmethod
    def acknowledge(
        self, consumer: Consumer, message_id: MessageId, ack_type: AckType
    ) -> Iterator[bool]:
        """Acknowledge in steps: a step for each range of the id's set, and at least one step.
        Yields whether the step moved the mark. Raises Refusal for a message that was not sent: it
        is beyond the confirmed end, or its batch is not known."""

    def acknowledge_lone(self, consumer: Consumer, ack: Any) -> Sequence[MessageId]:
        """Acknowledge one by one the messages outside of batches that an ACK names and that are at
        the consumer, without steps. Returns the ids that name others."""
        ids: Sequence[MessageId] = ack.message_id
        return ids

    def rewind(self) -> None:
        """Send the messages that are not acknowledged again."""
        self.position = self.acks.mark
        self._rewinds += 1
        self._rewind_event.set()
        self._wake.set()

    def seek(self, offset: int) -> None:
        """Set the position: everything below `offset` is acknowledged, and nothing from `offset`
        on. The consumers are sent away, and begin at `offset` when they come back. Raises as
        ConsumerCursor.check."""
        if self._cursor is not None:
            self._cursor.check()
        self.acks.reset(offset)
        self.awaits_consumers = True
        if self._cursor is not None:
            self._cursor.seek(self.partition.number, offset)
        self._send_consumers_away()

    def _send_consumers_away(self) -> None:
        for consumer in list(self.consumers):
            consumer.end()

    def move_up(self, offset: int) -> None:
        """Acknowledge everything below `offset`: no message below `offset` is sent any more. Raises
        as `save_position`."""
        if self.acks.add_up_to(offset):
            self._pass_over(self.acks.mark)
            self.save_position()

    def announce_end(self) -> None:
        """If the topic is terminated, and all its messages are acknowledged, send each consumer
        REACHED_END_OF_TOPIC once."""
        consumers = [c for c in self.consumers if c.has_asked and not c.has_reached_end]
        if self.acks.mark < self.partition.end or not consumers:
            return
        with suppress(errors.Unavailable):
            if not self.partition.is_terminated:
                return
            for consumer in consumers:
                consumer.announce_end()

    def save_position(self) -> None:
        """Make the position durable. Raises as ConsumerCursor.check."""
        self.announce_end()
        if self._cursor is not None:
            self._cursor.check()
            self._cursor.advance(self.partition.number, self.acks.durable)

    def when_durable(self, receipt: Receipt) -> None:
        """Call `receipt` once the acknowledgements so far are durable, with None, or with the error
        because of which they are not; at once if acknowledgements stay in memory."""
        if self._cursor is None:
            receipt(None)
        else:
            self._cursor.when_durable(self.partition.number, receipt)

    # -- reading -----------------------------------------------------------------------------

    async def _go_on(
        self, title: str, step: Callable[[bool], Awaitable[bool]], end: Callable[[], None]
    ) -> None:
        """Take steps until a step returns False. The argument of a step: whether its reads leave
        lost rows out. A step that fails is taken again after a pause. If no further step can
        succeed, `end` is called."""
        pause_s, lossy = RETRY_S, False
        while True:
            try:
                if not await step(lossy):
                    return
                await asyncio.sleep(0)
                pause_s, lossy = RETRY_S, False
            except (errors.Unavailable, errors.DataUnavailable, errors.RowsTrimmed) as error:
                _log.warning("%s waits: %s", title, error)
                await asyncio.sleep(RETRY_S)
            except (errors.TopicDeleted, errors.TopicNotFound, errors.LedgerFenced) as error:
                _log.error("%s ends: %s", title, error)
                end()
                return
            except Exception as error:
                is_lost = isinstance(error, UNREADABLE)
                lossy = is_lost and not lossy and await self.partition.skips_lost()
                self._log_failure(title, error, lossy)
                if not lossy:
                    await self._wait_for_rewind(pause_s)
                    pause_s = min(2 * pause_s, LOST_RETRY_S)

    def _note_pause(self, reason: str, bytes_used: int = 0) -> None:
        """Note why no new messages are read ("": they are read). A pause is logged, LOG_EVERY_S
        after the last logged pause at the earliest."""
        if not reason and not self.pause.reason:
            return
        now_s, logged_s = asyncio.get_running_loop().time(), self.pause.logged_s
        if reason and now_s >= logged_s + LOG_EVERY_S:
            logged_s = now_s
            _log.warning(
                "%s: a subscription pauses at offset %d: its %s messages take %d bytes. The first"
                " message that is not acknowledged is at offset %d",
                *(self.partition.title, self.position, reason, bytes_used, self.acks.mark),
            )
        self.pause = Pause(reason, logged_s)

    def _has_memory(self) -> bool:
        return self.acks.may_send(self.position)

    def _lacks_memory(self) -> bool:
        """Whether no new message may be sent until the sets, measured anew, take less memory."""
        if not self._has_memory():
            self.acks.memory.budget.measure()
        return not self._has_memory()

    def drop(self) -> None:
        """Give memory back: the dispatcher is not used any more."""
        self.acks.memory.drop()

    async def _wait_for_rewind(self, seconds: float) -> None:
        """Wait for a rewind, at most for `seconds`. The consumer stays: if it were sent away, its
        client would subscribe again at once."""
        self._rewind_event.clear()
        await woken(self._rewind_event, seconds)

    def _log_failure(self, title: str, error: Exception, lossy: bool) -> None:
        """Log a failure once for a position, and again after LOG_EVERY_S."""
        now_s, reads = asyncio.get_running_loop().time(), self._reads
        if reads.failed_at == (reads.at, lossy) and now_s < reads.logged_s + LOG_EVERY_S:
            return
        reads.failed_at, reads.logged_s = (reads.at, lossy), now_s
        defect = None if isinstance(error, errors.LedgerError) else error
        verb = "passes over rows that cannot be read" if lossy else "pauses"
        hint = ""
        if isinstance(error, UNREADABLE) and not lossy:
            hint = " The policy on_lost_rows=skip of the topic passes over such rows."
        _log.error(
            "%s %s of %s at offset %d: %s%s",
            *(title, verb, self.partition.title, reads.at, error, hint),
            exc_info=defect,
        )

    async def _pass_over_hole(self) -> None:
        """Go on after a read without rows. Either a hole reaches up to the confirmed end, or the
        log does not have the seal of the live segment yet."""
        following = row_after(self.partition.held, self.position)
        if following is None:
            await asyncio.sleep(HOLE_WAIT_S)
        else:
            self._pass_over(following)

    def _pass_over(self, offset: int) -> None:
        """Go on at `offset`: no offset from the position up to `offset` has a row."""
        if offset > self.position:
            self.acks.pass_over(self.position, offset)
            self.position = offset

    async def _read(self, at: int, lossy: bool, bytes_max: int = READ_BYTES) -> list[Stored]:
        """The batches from offset `at` on, as Partition.read reads them. Their rows that were
        trimmed or taken out count as acknowledged."""
        batches = await self.partition.read(at, bytes_max, lossy=lossy)
        if batches:
            for lo, hi in self.partition.removed(batches[0].offset, batches[-1].end):
                self.acks.add(lo, hi)
        return batches

    def _missing(self, batch: Stored, start: int) -> list[tuple[int, int]]:
        """The ranges of a batch that `_read` returned, from `start` on, that are not
        acknowledged."""
        return self.acks.missing(max(batch.offset, start), batch.end)

    # -- sending -----------------------------------------------------------------------------

    async def _send_message(
        self, consumer: Consumer, last: Stored, redeliveries: int, lossy: bool
    ) -> None:
        """Send a message in its chunks; `last` is the last chunk. Each chunk takes a permit, but
        all chunks are sent even if there are too few permits."""
        frame = consumer.messages.command(last.offset, (), redeliveries)
        if not is_last_chunk(last.data):
            first, *others = chunks_of(last.data)
            _send_chunk(consumer, frame, first)
            for chunk in others:
                await consumer.link.room()
                _send_chunk(consumer, frame, chunk)
            return
        offsets = earlier_offsets(last.data)
        for offset in offsets:
            earlier = await self._chunk(offset, lossy)
            if earlier is None:
                _log.warning(
                    "a message of %d chunks is passed over: its last chunk is at offset %d of %s,"
                    " and its chunk at offset %d is not kept any more",
                    *(len(offsets) + 1, last.offset, self.partition.title, offset),
                )
                self.acks.add(last.offset, last.end)
                return
            _send_chunk(consumer, frame, chunk_in(earlier.data))
            await consumer.link.room()
        _send_chunk(consumer, frame, chunk_in(last.data))

    async def _chunk(self, offset: int, lossy: bool) -> Stored | None:
        """The chunk at `offset`; None if the topic does not keep the chunk any more, or the chunk
        is lost and `lossy`."""
        try:
            return await self.partition.chunk(offset)
        except UNREADABLE:
            if lossy:
                return None
            raise


def row_after(held: PartitionState, offset: int) -> int | None:
    """The first offset with a row after the hole at `offset`; without such a row, the end of the
    log; None if `offset` is not below that end."""
    starts = [
        interval.lo
        for interval in held.intervals.between(offset, held.end_offset)
        if interval.source is not None and interval.lo >= offset
    ]
    if starts and starts[0] > offset:
        return starts[0]
    return held.end_offset if offset < held.end_offset and not starts else None


def is_in_chunks(batch: Stored) -> bool:
    """Whether the batch is a message that is sent in several chunks."""
    return batch.messages == 1 and bytes(batch.data[:2]) in _CHUNKED_BEGINS


def _send_chunk(consumer: Consumer, frame: bytes, chunk: memoryview) -> None:
    consumer.deliver(with_batch(frame, chunk), 1)
    consumer.permits -= 1
