"""The offset of a partition that a client's request asks for, and the message ids of the response.

Always true: the partition still keeps the offset, or the offset is its end. Message ids that
clients compare have the entry of a batch (hazard 58).
"""

from typing import Any

from spark_ledger.broker import names
from spark_ledger.broker.dispatch.dispatcher import Dispatcher
from spark_ledger.broker.log.partition import Partition
from spark_ledger.broker.log.tail import Stored
from spark_ledger.broker.names import message_id, offset_of
from spark_ledger.broker.wire.commands import EARLIEST, LATEST, InitialPosition, MessageId, signed


def offset_named(partition: Partition, id_: MessageId) -> int:
    """The offset of the message that an id names, moved into the range from the partition's start
    to its end. The offset is that of the message, not of its batch, since a merge may have put rows
    of Spark into other batches. Raises Refusal."""
    place = (signed(id_.ledgerId), signed(id_.entryId))
    if place == (EARLIEST, EARLIEST):
        return partition.start
    if LATEST in place:
        return partition.end
    offset = offset_of(id_, partition.ledger)
    return min(max(offset, partition.start), partition.end)


async def start_of_reader(partition: Partition, subscribe: Any, now_ms: int) -> int:
    """The offset at which SUBSCRIBE lets a reader begin. Raises Refusal, and as Partition.since."""
    if subscribe.start_message_rollback_duration_sec:
        return await partition.since(now_ms - subscribe.start_message_rollback_duration_sec * 1000)
    if subscribe.HasField("start_message_id"):
        return offset_named(partition, subscribe.start_message_id)
    is_earliest = subscribe.initialPosition == InitialPosition.EARLIEST
    return partition.start if is_earliest else partition.end


async def target_of_seek(partition: Partition, seek: Any) -> int:
    """The offset that SEEK asks for. Raises Refusal, and as Partition.since."""
    if seek.HasField("message_id"):
        return offset_named(partition, seek.message_id)
    return await partition.since(seek.message_publish_time)


async def last_and_mark(dispatcher: Dispatcher) -> tuple[MessageId, MessageId]:
    """The id of the partition's last message, and the id of the last message below the
    subscription's mark. Raises as Partition.last."""
    partition = dispatcher.partition
    last = await partition.last()
    number, ledger = partition.number_in_ids, partition.ledger
    if last is None:
        last_id = names.id_of_no_message(number)
    else:
        index = last.messages - 1 if last.batched else names.NO_BATCH
        last_id = message_id(ledger, last.offset, number, index)
        if last.batched:
            last_id.batch_size = last.messages
    return last_id, message_id(ledger, marked_entry(dispatcher.acks.mark, last), number)


def marked_entry(mark: int, last: Stored | None) -> int:
    """The entry of the last batch that is completely below the mark. Clients only compare this
    entry with the entry of the partition's last batch; they never take it for a message within a
    batch."""
    if last is None or mark <= last.offset:
        return mark - 1
    return last.offset if mark >= last.end else last.offset - 1
