"""The dispatcher of an Exclusive or Failover subscription: one consumer, the active one, gets all
messages.

Always true: a new active consumer begins at the mark, and so does a consumer that asks for
everything again. A consumer may ask for ranges of slots (hashes of keys): it gets only messages of
these slots, and other messages are not acknowledged. If the last Failover consumer may still hold
messages, the next consumer waits for a second: acknowledgements under way come first, so fewer
messages are sent twice.
"""

import asyncio
from collections.abc import Iterable, Iterator

from spark_ledger.broker.dispatch.acks import (
    ack_set,
    acknowledged_ranges,
    cumulative_end,
    is_unclear,
    never_sent,
    not_sent,
)
from spark_ledger.broker.dispatch.dispatcher import (
    ACKNOWLEDGED,
    MEMORY_WAIT_S,
    Consumer,
    Dispatcher,
    is_in_chunks,
)
from spark_ledger.broker.dispatch.key_slots import slots_of
from spark_ledger.broker.dispatch.policies import may_get
from spark_ledger.broker.dispatch.slot_owners import within
from spark_ledger.broker.limits import throttle_s
from spark_ledger.broker.log.tail import STEP_BATCHES_MAX, Stored
from spark_ledger.broker.names import offset_of
from spark_ledger.broker.wire.commands import AckType, MessageId, command, signed
from spark_ledger.broker.wire.frames import encode, with_batch
from spark_ledger.topic.acks.sets import Range

FAILOVER_DELAY_S = 1.0
ANNOUNCE_S = 0.5
"""The broker announces the active consumer this long after a change. Go's client ignores an
announcement that comes before it has handled the response to its SUBSCRIBE."""


class ActiveDispatcher(Dispatcher):
    _begin_s = 0.0
    """The time from which on the active consumer gets messages, by the loop's clock."""
    _announcement: asyncio.TimerHandle | None = None

    def _has_joined(self, consumer: Consumer) -> None:
        self._choose()

    def _has_left(self, consumer: Consumer) -> None:
        self._choose()

    def _choose(self) -> None:
        active = self._policy.active(self.consumers, self.partition.number)
        if active is not self.active:
            self.active = active
            self._delay_next()
            self.rewind()
            if active is not None and (active.sending is None or active.sending.done()):
                sends = self._send_to(active)
                active.sending = asyncio.get_running_loop().create_task(sends)
        if self._policy.announces:
            if self._announcement is not None:
                self._announcement.cancel()
            loop = asyncio.get_running_loop()
            self._announcement = loop.call_later(ANNOUNCE_S, self._announce)

    def _announce(self) -> None:
        """Announce to each consumer whether it is the active consumer."""
        for consumer in self.consumers:
            is_active = consumer is self.active
            change = command("active_consumer_change", consumer_id=consumer.id, is_active=is_active)
            consumer.link.send(encode(change))

    def _delay_next(self) -> None:
        """Delay the next consumer of a Failover subscription, if the last consumer may hold
        messages that it has not acknowledged."""
        if self._policy.announces and self.position > self.acks.mark:
            self._begin_s = asyncio.get_running_loop().time() + FAILOVER_DELAY_S

    def seek(self, offset: int) -> None:
        self._delay_next()
        super().seek(offset)

    def _add_permits(self, consumer: Consumer, permits: int) -> None:
        consumer.permits += permits
        self._wake.set()

    def redeliver(self, consumer: Consumer, epoch: int | None, entries: Iterable[int] = ()) -> None:
        """If the consumer is active, send it everything again, not only `entries`."""
        consumer.messages.epoch = epoch
        if consumer is self.active:
            self.rewind()

    def acknowledge(
        self, consumer: Consumer, message_id: MessageId, ack_type: AckType
    ) -> Iterator[bool]:
        """As Dispatcher.acknowledge. The entry of an id is the first offset of a batch."""
        partition, acks = self.partition, self.acks
        offset, entry = offset_of(message_id, partition.ledger), signed(message_id.entryId)
        messages = consumer.sent.message_count(entry)
        if messages is None:  # the batch was sent before the consumer came, for example
            messages = partition.messages_at(entry)
        if ack_type == AckType.CUMULATIVE:
            end = cumulative_end(message_id, offset, messages)
            if end > partition.end:
                raise never_sent(entry, partition.end)
            yield acks.add_up_to(end)
            return
        if entry < 0 or offset >= partition.end:
            raise never_sent(entry, partition.end)
        ranges = acknowledged_ranges(message_id, offset, messages, acks)
        for lo, hi in ranges:
            yield hi <= partition.end and acks.add(lo, hi)
        if not ranges:
            yield False
        if is_unclear(message_id, messages):
            raise not_sent(entry)

    # -- sending -----------------------------------------------------------------------------

    async def _send_to(self, consumer: Consumer) -> None:
        """Send messages while the consumer is active. A `lossy` step leaves lost rows out."""

        async def step(lossy: bool) -> bool:
            if not await self._may_send(consumer):
                return False
            rewinds = self._rewinds
            self._pass_over(self.partition.start)
            self._reads.at = self.position  # for the log of a failure
            batches = await self._read(self.position, lossy)
            if rewinds == self._rewinds:
                await self._send_all(consumer, batches, lossy)
            return True

        await self._go_on(f"consumer '{consumer.name}'", step, consumer.end)

    async def _may_send(self, consumer: Consumer) -> bool:
        """Wait until there is a batch that the consumer may get, and memory for acknowledged rows;
        False if another consumer is active."""
        wait_s = self._begin_s - asyncio.get_running_loop().time()
        while wait_s > 0 and consumer is self.active:
            await asyncio.sleep(wait_s)
            wait_s = self._begin_s - asyncio.get_running_loop().time()
        while not may_get(consumer, self.active) or self.partition.end <= self.position:
            if consumer is not self.active:
                return False
            self._wake.clear()
            self.announce_end()
            await self._wake.wait()
        while self._lacks_memory():
            if consumer is not self.active:
                return False
            self._note_pause(ACKNOWLEDGED, self.acks.memory.budget.bytes)
            await self._wait_for_rewind(MEMORY_WAIT_S)
        while (wait_s := throttle_s(self.allowances)) and consumer is self.active:
            await self._wait_for_rewind(wait_s)
        self._note_pause("")
        await consumer.link.room()
        return consumer is self.active

    async def _send_all(self, consumer: Consumer, batches: list[Stored], lossy: bool) -> None:
        if not batches:
            await self._pass_over_hole()
        rewinds = self._rewinds
        for count, batch in enumerate(batches, 1):
            await consumer.link.room()
            if not count % STEP_BATCHES_MAX:
                await asyncio.sleep(0)
            if consumer.permits <= 0 or rewinds != self._rewinds or throttle_s(self.allowances):
                return
            if batch.end <= self.position:
                continue
            self._pass_over(batch.offset)
            if not batch.has_rows:
                self._pass_over(batch.end)
                continue
            missing = self._missing(batch, self.position)
            sent = consumer.sent.message_count(batch.offset)
            takes_part = consumer.takes_rows  # its client takes single messages only
            takes_part |= sent is not None and sent != batch.messages  # rows were merged since
            if consumer.ranges and missing:
                in_ranges = within(batch.offset, slots_of(batch), missing, consumer.ranges)
                takes_part |= in_ranges != missing
                missing = in_ranges
            if missing and is_in_chunks(batch):
                consumer.sent.note(batch.offset, batch.messages)
                await self._send_message(consumer, batch, 0, lossy)
            elif missing and takes_part and self._spark_batches.has_rows_of_spark(batch):
                if not await self._send_rows(consumer, batch, missing):
                    return
            elif missing:
                acks = ack_set(missing, batch.offset, batch.messages) if batch.batched else ()
                frame = consumer.messages.command(batch.offset, acks)
                consumer.sent.note(batch.offset, batch.messages)
                count = sum(hi - lo for lo, hi in missing)
                consumer.deliver(with_batch(frame, batch.data), count)
                consumer.permits -= count
            if rewinds != self._rewinds:
                return
            self.position = batch.end

    async def _send_rows(self, consumer: Consumer, batch: Stored, missing: list[Range]) -> bool:
        """Send rows of Spark, neighbouring rows as one batch, or each row alone to a client that
        takes no batches. An id names no more rows than it named before: otherwise a client would
        acknowledge rows that it does not have. False if the consumer may get no more rows now."""
        rewinds, parts = self._rewinds, list(_as_sent(consumer, missing))
        if consumer.takes_rows:
            parts = [(row, row + 1) for lo, hi in missing for row in range(lo, hi)]
        for lo, hi in parts:
            await consumer.link.room()
            if rewinds != self._rewinds:
                return False
            self.position = lo
            if consumer.permits <= 0 or throttle_s(self.allowances):
                return False
            if consumer.takes_rows:
                data = self._spark_batches.lone(batch, lo)
            else:
                data = self._spark_batches.cut(batch, lo, hi - lo)
            consumer.sent.note(lo, hi - lo)
            consumer.deliver(with_batch(consumer.messages.command(lo, ()), data), hi - lo)
            consumer.permits -= hi - lo
        return True


def _as_sent(consumer: Consumer, ranges: Iterable[Range]) -> Iterator[Range]:
    """The ranges, cut where batches that were sent to the consumer end."""
    for lo, hi in ranges:
        while lo < hi:
            sent = consumer.sent.message_count(lo)
            end = hi if sent is None else min(hi, lo + sent)
            yield lo, end
            lo = end
