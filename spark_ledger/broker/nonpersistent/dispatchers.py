"""How messages of a non-persistent topic reach the consumers of a subscription.

Always true: a message is sent when it comes, or dropped and counted: there is no backlog. It is
dropped if the consumer that is to get it has no permits, or its connection has no room, or if a
rate lets no more pass now. What is sent counts as acknowledged at once, so no message is sent
again. Which consumer gets a message is decided as in other topics (policies.py): the dispatchers
are those of other topics, without reads.
"""

import asyncio
from collections.abc import Iterator

from spark_ledger.broker.dispatch.acks import ack_set
from spark_ledger.broker.dispatch.active_dispatcher import ActiveDispatcher
from spark_ledger.broker.dispatch.dispatcher import Consumer, Dispatcher
from spark_ledger.broker.dispatch.key_slots import slots_of
from spark_ledger.broker.dispatch.shared_dispatcher import SharedDispatcher
from spark_ledger.broker.dispatch.slot_owners import within
from spark_ledger.broker.limits import throttle_s
from spark_ledger.broker.log.tail import Stored
from spark_ledger.broker.wire.commands import AckType, MessageId
from spark_ledger.broker.wire.frames import with_batch


class PassingDispatcher(Dispatcher):
    """What both kinds of dispatchers have in common."""

    dropped = 0
    """How many messages no consumer could take."""
    _began_s = 0.0

    def join(self, consumer: Consumer) -> None:
        super().join(consumer)
        self._began_s = self._began_s or asyncio.get_running_loop().time()

    @property
    def drop_rate(self) -> float:
        """How many messages a second were dropped since the first consumer came."""
        passed_s = asyncio.get_running_loop().time() - self._began_s
        return self.dropped / max(1.0, passed_s)

    def push(self, batch: Stored) -> None:
        """Send the batch, or drop it."""
        self.acks.add_up_to(batch.end)
        self.position = batch.end
        if throttle_s(self.allowances):
            self.dropped += batch.messages
        else:
            self._send(batch)

    def _send(self, batch: Stored) -> None:
        """Send the batch's messages to consumers that can take them; drop the others."""
        raise NotImplementedError

    def acknowledge(
        self, consumer: Consumer, message_id: MessageId, ack_type: AckType
    ) -> Iterator[bool]:
        """Nothing to do: what is sent is acknowledged."""
        return iter(())


class PassingActive(PassingDispatcher, ActiveDispatcher):
    """Of an Exclusive or Failover subscription, and of a reader."""

    async def _send_to(self, consumer: Consumer) -> None:
        """Nothing to do: `push` sends."""

    def _send(self, batch: Stored) -> None:
        consumer, rows = self.active, [(batch.offset, batch.end)]
        if consumer is not None and consumer.ranges:
            rows = within(batch.offset, slots_of(batch), rows, consumer.ranges)
        count = sum(hi - lo for lo, hi in rows)
        if consumer is None or consumer.permits <= 0 or not consumer.has_room():
            self.dropped += count
        elif rows:
            acks = ack_set(rows, batch.offset, batch.messages) if batch.batched else ()
            frame = consumer.messages.command(batch.offset, acks)
            consumer.deliver(with_batch(frame, batch.data), count)
            consumer.permits -= count


class PassingShared(PassingDispatcher, SharedDispatcher):
    """Of a Shared or Key_Shared subscription."""

    async def _step(self, lossy: bool) -> bool:
        return False  # there is nothing to read: `push` sends

    def _send(self, batch: Stored) -> None:
        rows, sharing = [(batch.offset, batch.end)], self.sharing
        sharing.choice.begin_read()
        sent_to = []
        for part in sharing.choice.parts_of(batch, rows, rows):
            consumer = sharing.receiver_of(part)
            if consumer is None:
                self.dropped += part.unacked
            else:
                self._give(consumer, batch, part, lossy=False)
                sent_to.append((consumer, part.offset))
        for consumer, entry in sent_to:
            sharing.update(consumer, entry)
