"""The dispatcher of a subscription whose consumers share its messages.

Always true: rows that wait to be sent again are sent before new rows, the oldest first. While rows
wait, only a consumer that may get none of them gets new rows. The model (sharing.py) decides which
consumer gets which rows. One task reads and sends, and never waits for a single consumer: a message
in chunks, which takes as long as its consumer needs, has its own task. The dispatcher keeps no
rows: rows that cannot be sent are read again, as a rule from the partition's memory.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyroaring import BitMap64

from spark_ledger.async_tasks import woken
from spark_ledger.broker.dispatch.acks import BatchPart, ack_set, first_row_and_rest
from spark_ledger.broker.dispatch.delays import DelayIndex, HeldMessages
from spark_ledger.broker.dispatch.dispatcher import (
    ACKNOWLEDGED,
    DELAYED,
    HOLE_WAIT_S,
    MEMORY_WAIT_S,
    Consumer,
    Dispatcher,
    is_in_chunks,
    row_after,
)
from spark_ledger.broker.dispatch.lone import (
    acknowledge_lone,
    bytes_for,
    lone_run,
    replay_lone,
    replay_run,
    send_lone,
)
from spark_ledger.broker.dispatch.policies import Policy
from spark_ledger.broker.dispatch.sharing import ReceiverChoice, Sharing, UnackedLimits
from spark_ledger.broker.limits import DispatchRates, SubscribeCounts, throttle_s
from spark_ledger.broker.log.partition import READ_BYTES, Partition
from spark_ledger.broker.log.tail import STEP_BATCHES_MAX, Stored
from spark_ledger.broker.names import offset_of
from spark_ledger.broker.wire.commands import AckType, MessageId
from spark_ledger.broker.wire.frames import with_batch
from spark_ledger.topic.acks.sets import ACK_BYTES_MAX, AckBudget, next_row, rows_in
from spark_ledger.topic.subscription.consumer_cursor import ConsumerCursor

_DENSE_ROWS = STEP_BATCHES_MAX // 32
"""If more than this number of the next STEP_BATCHES_MAX rows wait, they are read together,
otherwise batch by batch: a read of one batch costs as much as 30 batches of a larger read."""
REPLAY_READS = 20
"""While a consumer awaits new rows, so many reads of one batch with waiting rows follow each other,
or one larger read."""
STEP_SENDS_MAX = 250
"""How many batches are sent or held in one step of the loop, except in a run: each takes some 30
us, and a batch that is cut out counts twice."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SharingRules:
    """What the subscriptions of a topic have in common. `earliest_ms` returns
    a time that the store's clock has passed; None if no such time is known. `ack_budget` counts all
    sets at this broker, and `delay_budget` all indexes; the sets of one subscription take at most
    `ack_bytes_max`. `indexes` has the index of delayed messages of each partition. Without `delays`
    delayed messages are sent at once."""

    limits: UnackedLimits = UnackedLimits()  # noqa: RUF009
    earliest_ms: Callable[[], int | None] = lambda: None
    ack_budget: AckBudget | None = None
    ack_bytes_max: int = ACK_BYTES_MAX
    indexes: dict[int, DelayIndex] = field(default_factory=dict)
    delay_budget: AckBudget | None = None
    delays: bool = True
    rates: DispatchRates = field(default_factory=DispatchRates)
    subscribes: SubscribeCounts = field(default_factory=SubscribeCounts)

    def held(self, partition: int, budget: AckBudget) -> HeldMessages:
        index = self.indexes.setdefault(partition, DelayIndex(self.delay_budget))
        return HeldMessages(index, self.earliest_ms, budget)


class SharedDispatcher(Dispatcher):
    """Arguments as Dispatcher's. `choice` decides which consumer gets a part; `held` has the
    delayed messages."""

    def __init__(
        self,
        partition: Partition,
        policy: Policy,
        mark: int,
        cursor: ConsumerCursor | None,
        choice: ReceiverChoice,
        limits: UnackedLimits,
        held: HeldMessages,
        rows: BitMap64 | None = None,
        budget: AckBudget | None = None,
    ) -> None:
        super().__init__(partition, policy, mark, cursor, rows, budget)
        self.held = held
        self.sharing = Sharing(self.acks, limits, choice, self._wake.set, partition.messages_at)
        self._sending: asyncio.Task[None] | None = None
        self._failure: Exception | None = None  # of a message in chunks; the next step raises it
        self._sends = 0  # in this step, as STEP_SENDS_MAX counts them

    def _has_joined(self, consumer: Consumer) -> None:
        if len(self.consumers) == 1:
            self.held.begin()
        self.sharing.join(consumer)
        consumer.link.room_listeners[consumer] = self._wake
        if self._sending is None or self._sending.done():
            steps = self._go_on("a shared subscription", self._step, self._send_consumers_away)
            self._sending = asyncio.get_running_loop().create_task(steps)

    def _has_left(self, consumer: Consumer) -> None:
        consumer.link.room_listeners.pop(consumer, None)
        self.sharing.leave(consumer)
        if not self.consumers:
            self.rewind()

    def rewind(self) -> None:
        super().rewind()
        (self.held.begin if self.consumers else self.held.end)()

    def seek(self, offset: int) -> None:
        self.sharing.forget()
        try:
            super().seek(offset)
        finally:
            self.rewind()

    def move_up(self, offset: int) -> None:
        super().move_up(offset)
        self.sharing.passed(self.acks.mark)
        self.held.drop(0, self.acks.mark)

    def _add_permits(self, consumer: Consumer, permits: int) -> None:
        self.sharing.flow(consumer, permits)

    def redeliver(self, consumer: Consumer, epoch: int | None, entries: Iterable[int] = ()) -> None:
        consumer.messages.epoch = epoch
        self.sharing.redeliver(consumer, list(entries) or None)

    def acknowledge(
        self, consumer: Consumer, message_id: MessageId, ack_type: AckType
    ) -> Iterator[bool]:
        offset = offset_of(message_id, self.partition.ledger)
        if ack_type == AckType.CUMULATIVE:
            _warn_of_cumulative(consumer, offset)
            return iter((False,))
        return self.sharing.acknowledge(consumer, message_id, offset, self.partition.end)

    def acknowledge_lone(self, consumer: Consumer, ack: Any) -> Sequence[MessageId]:
        return acknowledge_lone(self.sharing, consumer, ack, self.partition.ledger)

    # -- sending -----------------------------------------------------------------------------

    async def _step(self, lossy: bool) -> bool:
        """Send waiting rows; without such rows, read on and send new rows; wait if no row may be
        sent. False without consumers."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        self._wake.clear()
        self._sends = 0
        if not self.consumers:
            return False
        if self.sharing.work():
            return True
        if wait_s := throttle_s(self.allowances):
            await woken(self._wake, wait_s)
            return True
        self.held.look(max(self.acks.mark, self.partition.start))
        self.sharing.choice.begin_read()
        has_sent = await self._replay(lossy) or await self._send_due(lossy)
        if (not has_sent or self.sharing.awaits_new_rows()) and self._may_read_on():
            if self._lacks_memory():
                self._note_pause(ACKNOWLEDGED, self.acks.memory.budget.bytes)
                if not has_sent:
                    await woken(self._wake, MEMORY_WAIT_S)
                return True
            has_sent |= await self._read_on(lossy)
        if not has_sent and self.consumers and not lossy:
            self.announce_end()
            await woken(self._wake, self.held.wait_s())
        return True

    def _may_read_on(self) -> bool:
        may_read, is_full = self.partition.end > self.position, self.held.is_full
        self._note_pause(DELAYED if may_read and is_full else "", self.held.index.bytes)
        return may_read and not is_full and self.sharing.may_send_more()

    def _has_memory(self) -> bool:
        return super()._has_memory() and not self.sharing.is_full

    def drop(self) -> None:
        super().drop()
        self.sharing.memory.drop()
        self.held.memory.drop()

    async def _send_due(self, lossy: bool) -> bool:
        """Send delayed messages that are due, oldest first. Returns whether anything changed."""
        rewinds, due, has_changed = self._rewinds, self.held.due, False
        at = next_row(due, 0)
        while at is not None and self.sharing.may_read_on():
            self._reads.at = at
            batches = await self._read(at, lossy, _read_bytes(due, at))
            if rewinds != self._rewinds:
                return True
            if not batches:
                await self._forget_hole(at)
                return True
            for batch in batches:
                if batch.offset > at:
                    self._forget(at, batch.offset)
                if batch.offset in due:
                    if not self._send_batch(batch, batch.offset, lossy):
                        return has_changed
                    due.discard(batch.offset)
                    has_changed = True
                    self._sends += 1
                    if await self._is_rewound(rewinds):
                        return True
                at = next_row(due, max(at, batch.end))
                if at is None:
                    return has_changed
            if await self._is_rewound(rewinds, is_long=True):
                return True
        return has_changed

    async def _replay(self, lossy: bool) -> bool:
        """Send the waiting rows that consumers may get now, as long as no consumer awaits new
        rows, or REPLAY_READS reads. Returns whether anything changed."""
        rewinds, has_changed, reads = self._rewinds, False, 0
        at = self.sharing.next_replay()
        while at is not None:
            self._reads.at = at
            batches = await self._read(at, lossy, _read_bytes(self.sharing.waiting, at))
            if rewinds != self._rewinds:
                return True
            if not batches:
                await self._forget_hole(at)
                return True
            for index, batch in enumerate(batches):
                if batch.end <= at:
                    continue
                if batch.offset > at:
                    self._forget(at, batch.offset)
                    has_changed = True
                run = [] if self.allowances else replay_run(batches, index, self.sharing)
                has_changed |= replay_lone(self.sharing, run) or self._replay_batch(batch, lossy)
                self._sends += 1
                if await self._is_rewound(rewinds, is_long=bool(run)):
                    return True
                following = self.sharing.next_replay(max(at + 1, (run or [batch])[-1].end))
                if following is None:
                    return has_changed
                at = following
            if await self._is_rewound(rewinds, is_long=True):
                return True
            reads += REPLAY_READS if len(batches) > 1 else 1
            if reads >= REPLAY_READS and self.sharing.awaits_new_rows():
                return has_changed
        return has_changed

    def _replay_batch(self, batch: Stored, lossy: bool) -> bool:
        missing = self._missing(batch, batch.offset) if batch.has_rows else []
        waiting = [gap for lo, hi in missing for gap in rows_in(self.sharing.waiting, lo, hi)]
        if not waiting:
            self.sharing.drop(batch.offset, batch.end)
            return True
        has_sent = False
        for part in self.sharing.choice.parts_of(batch, missing, waiting):
            if (consumer := self.sharing.receiver_of(part)) is not None:
                self._give(consumer, batch, part, lossy)
                has_sent = True
        return has_sent

    async def _forget_hole(self, at: int) -> None:
        """Forget a hole at the waiting offset `at`."""
        if (following := row_after(self.partition.held, at)) is not None:
            self._forget(at, following)
        else:
            await asyncio.sleep(HOLE_WAIT_S)

    def _forget(self, lo: int, hi: int) -> None:
        """Forget the rows in [lo, hi), which do not exist any more."""
        self.sharing.drop(lo, hi)
        self.held.drop(lo, hi)
        self.acks.pass_over(lo, hi)

    async def _read_on(self, lossy: bool) -> bool:
        """Read new rows, and send those that may be sent. Returns whether anything changed."""
        rewinds = self._rewinds
        self._pass_over(self.partition.start)
        start, acked = self.position, self.acks.rows
        self.position = self._reads.at = self.held.pass_over(start, acked)
        if self.position >= self.partition.end or self.held.may_pass_on(start, self.position):
            return True
        size = min(bytes_for(self.sharing), self.held.read_bytes(self.position, acked))
        batches = await self._read(self.position, lossy, size)
        if rewinds != self._rewinds:
            return True
        if not batches:
            await self._pass_over_hole()
            return True
        count = 0
        while count < len(batches):
            batch = batches[count]
            run = [] if self.allowances else lone_run(batches, count, self.position, self.sharing)
            if run:
                sent = send_lone(self.sharing, run)
                self.position = batch.offset + sent
                if sent < len(run):
                    break
            elif batch.end > self.position:
                self._sends += 1
                self._pass_over(batch.offset)
                is_sent = not batch.has_rows or self.held.holds(batch)
                if not is_sent and not self._send_batch(batch, self.position, lossy):
                    break
                if batch.has_rows:
                    self.position = batch.end
                else:
                    self._pass_over(batch.end)
            count += len(run) or 1
            if await self._is_rewound(rewinds, is_long=bool(run)):
                return True
        return self.position > start

    async def _is_rewound(self, rewinds: int, *, is_long: bool = False) -> bool:
        """End a long step. Returns whether it stops: for a rewind, or because a rate is reached."""
        if is_long or self._sends >= STEP_SENDS_MAX:
            self._sends = 0
            await asyncio.sleep(0)
        return rewinds != self._rewinds or throttle_s(self.allowances) > 0

    def _send_batch(self, batch: Stored, start: int, lossy: bool) -> bool:
        """Send the batch's rows from `start` on, or let them wait. False: neither is possible."""
        missing = to_send = self._missing(batch, batch.offset)
        if batch.offset < start:
            to_send = self._missing(batch, start)
        if not to_send:
            return True
        has_placed = False
        for part in self.sharing.choice.parts_of(batch, missing, to_send):
            if (consumer := self.sharing.receiver_of(part)) is not None:
                rest = self._give(consumer, batch, part, lossy)
                if rest is not None:
                    self.sharing.wait(rest)
            elif has_placed or self.sharing.may_read_on():
                self.sharing.wait(part)
            else:
                return False
            has_placed = True
        return True

    def _give(
        self, member: object, batch: Stored, part: BatchPart, lossy: bool
    ) -> BatchPart | None:
        """Send the part to the consumer. A consumer that takes rows of Spark one by one gets only
        the first row. Returns the part with the other rows; None if there are no others."""
        assert isinstance(member, Consumer)
        consumer, sharing = member, self.sharing
        if is_in_chunks(batch):
            redeliveries = sharing.sent.redeliveries[part.offset]
            sharing.give(consumer, part, 0)  # each chunk takes its permit
            consumer.is_busy = True
            sends = _send_chunks(self, consumer, batch, redeliveries, lossy)
            consumer.sending = asyncio.get_running_loop().create_task(sends)
            return None
        rest = None
        if consumer.takes_rows and not part.slots and self._spark_batches.has_rows_of_spark(batch):
            part, rest = first_row_and_rest(part)
            batch = Stored(part.offset, 1, self._spark_batches.lone(batch, part.offset), False)
        acks = ack_set(part.ranges, part.offset, part.messages) if batch.batched else ()
        frame = consumer.messages.command(part.offset, acks, sharing.sent.redeliveries[part.offset])
        self._sends += part.is_cut
        cut = sharing.choice.cut(batch, part, is_lone=consumer.takes_rows) if part.is_cut else None
        consumer.deliver(with_batch(frame, batch.data if cut is None else cut), part.unacked)
        sharing.give(consumer, part, part.unacked)
        return rest


async def _send_chunks(
    dispatcher: SharedDispatcher,
    consumer: Consumer,
    last: Stored,
    redeliveries: int,
    lossy: bool,
) -> None:
    """Send a message in chunks, however long its consumer takes."""
    try:
        await dispatcher._send_message(consumer, last, redeliveries, lossy)
    except Exception as error:
        dispatcher._failure = error
        dispatcher.sharing.give_back(consumer, [last.offset])
    consumer.is_busy = False
    dispatcher.sharing.update(consumer, last.offset)
    dispatcher._wake.set()


def _read_bytes(rows: BitMap64, at: int) -> int:
    """How many bytes to read from `at` on, so that the next of the rows are read."""
    is_dense = rows.range_cardinality(at, at + STEP_BATCHES_MAX) > _DENSE_ROWS
    return READ_BYTES if is_dense else 1


def _warn_of_cumulative(consumer: Consumer, offset: int) -> None:
    _log.warning(
        "consumer '%s' acknowledges offset %d of %s cumulatively, which counts for nothing: an"
        " acknowledgement of a shared subscription has to name each message",
        *(consumer.name, offset, consumer.dispatcher.partition.title),
    )
