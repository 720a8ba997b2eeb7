"""The rows of a partition that a subscription has acknowledged, and the batches and parts of
batches that were sent to a consumer. Pure.

Always true: every offset below `mark` is acknowledged or has no row; only `reset` moves `mark` and
`durable` back. The batch that was sent decides which messages a client's id acknowledges. The
counts in the id are not used, so the number of messages in that batch bounds the work. If the batch
was not sent to the consumer (another broker sent it, for example), the id's set is ignored, and an
id without a set acknowledges one message.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap64

from spark_ledger.broker.log.tail import Stored
from spark_ledger.broker.wire.commands import MessageId, Refusal, ServerError, signed
from spark_ledger.topic.acks.sets import (
    ACK_BYTES_MAX,
    AckBudget,
    AckChanges,
    Counts,
    Measured,
    Range,
    bytes_of,
    next_in,
    ranges_of,
    run_end,
    within,
)

SENT_BATCHES_MAX = 100_000
"""How many sent batches are kept for a consumer, of 16 bytes each."""
BATCH_MESSAGES_MAX = 1 << 22
"""A batch of 8 MiB has less messages than this number."""
_BITS = 64


class Acks:
    """Always true: `mark` is not acknowledged, and has or may get a row; `rows` are the
    acknowledged rows beyond the mark. No acknowledgement is forgotten: AckBudget bounds their
    memory, since dispatch stops beyond the budget. Acknowledging twice changes nothing.

    `durable` is the offset at which a later consumer begins: one past the last acknowledged row
    below the mark. Offsets between `durable` and the mark have no rows, but may be the first chunks
    of a message that is not acknowledged: a consumer skips them, and retention must keep them."""

    def __init__(
        self, mark: int, rows: BitMap64 | None = None, budget: AckBudget | None = None
    ) -> None:
        """`rows`: the rows beyond the mark that were acknowledged before. `budget` counts the
        memory of the sets."""
        self.mark = self.durable = mark
        self.rows = BitMap64() if rows is None else rows
        self._rowless = BitMap64()  # offsets passed over beyond the mark; may overlap `rows`
        self._added = BitMap64()  # the part of `rows` that was added since `take_changes`
        self._was_reset = False
        self.keeps_changes = True
        """Whether `take_changes` is called: the acknowledgements become durable."""
        budget = AckBudget(ACK_BYTES_MAX) if budget is None else budget
        self.memory = Measured(budget, self._bytes)
        if self.rows:
            self.rows.remove_range(0, mark)
            self._raise_mark(mark)
            self.memory.measure()

    @property
    def end(self) -> int:
        """One past the highest offset that is acknowledged or has no row; `mark` at least."""
        highest = [offsets.max() + 1 for offsets in (self.rows, self._rowless) if offsets]
        return max([self.mark, *highest])

    def may_send(self, offset: int) -> bool:
        """Whether the message at `offset` may be sent: the sets do not take too much memory, or it
        fills a gap in them."""
        return not self.memory.budget.is_over or offset < self.end

    def _bytes(self) -> int:
        return sum(map(bytes_of, (self.rows, self._rowless, self._added)))

    @property
    def ranges(self) -> Iterator[tuple[int, int]]:
        """The acknowledged or rowless offsets beyond the mark, in rising order with gaps between
        them."""
        at, end = self.mark, self.end
        while at < end:
            start = min(next_in(self.rows, at, end), next_in(self._rowless, at, end))
            at = self._run_end(start)
            if start < at:
                yield start, at

    def reset(self, mark: int) -> None:
        """Begin anew at `mark`: no row from `mark` on is acknowledged."""
        self.mark = self.durable = mark
        for offsets in (self.rows, self._rowless, self._added):
            offsets.clear()
        self._was_reset = True
        self.memory.measure()

    def add_up_to(self, end: int) -> bool:
        """Acknowledge all rows below `end`. Returns whether the mark moved."""
        return self._move(end, end)

    def add(self, start: int, end: int) -> bool:
        """Acknowledge the offsets [start, end). Returns whether the mark moved."""
        if start <= self.mark:
            return self._move(end, end)
        if start < end:
            self.rows.add_range(start, end)
            if self.keeps_changes:
                self._added.add_range(start, end)
            self.memory.changed()
        return False

    def add_each(self, offsets: Iterable[int]) -> None:
        """Acknowledge these offsets."""
        added = BitMap64(offsets)
        added.remove_range(0, self.mark)
        self.rows |= added
        if self.keeps_changes:
            self._added |= added
        if self.mark in added:
            self._raise_mark(self.mark)
        self.memory.changed()

    def pass_over(self, start: int, end: int) -> None:
        """Note that the offsets [start, end) have no row to acknowledge."""
        if start <= self.mark:
            self._move(end, 0)
        elif start < end:
            self._rowless.add_range(start, end)
            self.memory.changed()

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """The ranges of [start, end) that are not acknowledged."""
        start = max(start, self.mark)
        if start >= end:
            return []
        count = self.rows.range_cardinality(start, end)
        if count == end - start:
            return []
        if not count and not self._rowless:
            return [(start, end)]
        acked = within(self.rows, start, end) | within(self._rowless, start, end)
        acked.flip_inplace(start, end)
        return ranges_of(acked)

    def missing_count(self, start: int, end: int) -> int:
        """How many of the offsets [start, end) are not acknowledged."""
        if self._rowless:
            return sum(hi - lo for lo, hi in self.missing(start, end))
        start = max(start, self.mark)
        return end - start - self.rows.range_cardinality(start, end) if start < end else 0

    def missing_of(self, offsets: Iterable[int]) -> BitMap64:
        """Those of the offsets that are not acknowledged."""
        missing = BitMap64(offsets) - self.rows - self._rowless
        missing.remove_range(0, self.mark)
        return missing

    def missing_end(self, start: int, end: int) -> int:
        """The end of the run of offsets from `start` on that are not acknowledged; at most
        `end`."""
        if start < self.mark:
            return start
        return min(next_in(self.rows, start, end), next_in(self._rowless, start, end), end)

    def take_changes(self) -> AckChanges:
        """The changes of the rows beyond the mark since the last call of this method."""
        changes = AckChanges(self._was_reset, self._added)
        self._was_reset, self._added = False, BitMap64()
        return changes

    def _move(self, mark: int, row_end: int) -> bool:
        if mark <= self.mark:
            return False
        self.durable = max(self.durable, row_end)
        self._raise_mark(mark)
        self.memory.changed()
        return True

    def _raise_mark(self, mark: int) -> None:
        """Raise the mark to `mark`, or to the end of the acknowledged run that has `mark`."""
        before, self.mark = self.mark, self._run_end(mark)
        if self.durable < self.mark and (acked := within(self.rows, before, self.mark)):
            self.durable = max(self.durable, acked.max() + 1)
        for offsets in (self.rows, self._rowless, self._added):
            offsets.remove_range(before, self.mark)

    def _run_end(self, at: int) -> int:
        """The first offset from `at` on that is neither acknowledged nor rowless."""
        while True:
            if at in self.rows:
                at = run_end(self.rows, at)
            elif at in self._rowless:
                at = run_end(self._rowless, at)
            else:
                return at


class SentBatches:
    """The batches that were sent to a consumer, by the offset of their first message. Beyond
    SENT_BATCHES_MAX the batches at the lowest offsets are forgotten."""

    def __init__(self) -> None:
        self._starts = array("q")
        self._message_counts = array("q")

    def note(self, start: int, messages: int) -> None:
        """Note that a batch is sent, for the first time or again."""
        at = len(self._starts)
        if at and start <= self._starts[-1]:
            at = bisect_left(self._starts, start)
            if self._starts[at] == start:
                self._message_counts[at] = messages
                return
        self._starts.insert(at, start)
        self._message_counts.insert(at, messages)
        self._forget_lowest()

    def note_lone(self, offsets: list[int]) -> None:
        """Messages outside of batches are sent, with rising offsets."""
        if self._starts and offsets and offsets[0] <= self._starts[-1]:
            for offset in offsets:
                self.note(offset, 1)
            return
        self._starts.extend(offsets)
        self._message_counts.extend([1] * len(offsets))
        self._forget_lowest()

    def _forget_lowest(self) -> None:
        if len(self._starts) > SENT_BATCHES_MAX:
            del self._starts[: SENT_BATCHES_MAX // 4 + 1]
            del self._message_counts[: SENT_BATCHES_MAX // 4 + 1]

    def message_count(self, start: int) -> int | None:
        """The number of messages of the sent batch that begins at `start`; None if no such batch
        was sent."""
        at = bisect_left(self._starts, start)
        was_sent = at < len(self._starts) and self._starts[at] == start
        return self._message_counts[at] if was_sent else None


class SentEntries(SentBatches):
    """As SentBatches, with two more facts. `masked` has the entries of parts in which some messages
    were masked: an id without a set does not name these messages. `redeliveries` counts how often
    clients have asked for an entry again."""

    def __init__(self) -> None:
        super().__init__()
        self.masked = BitMap64()
        self.redeliveries = Counts()

    @property
    def bytes(self) -> int:
        """About how much memory `masked` and `redeliveries` take."""
        return bytes_of(self.masked) + self.redeliveries.bytes

    def forget_below(self, mark: int) -> None:
        """Forget the entries with messages only below `mark`: these are acknowledged. A batch has
        BATCH_MESSAGES_MAX messages at most."""
        end = max(0, mark - BATCH_MESSAGES_MAX)
        self.masked.remove_range(0, end)
        self.redeliveries.forget(0, end)


class BatchPart(NamedTuple):
    """Rows of a batch that one MESSAGE gives to one consumer. `offset` is the offset of the batch's
    first message, and the entry of the MESSAGE's id; `messages` is the size of the batch. `unacked`
    rows of `ranges` are not acknowledged. `is_masked`: some rows of the batch are neither
    acknowledged nor in this part. `slots`, only for Key_Shared, has the slots of the keys: one for
    all messages, or one for each message. `is_cut`: the part is sent as a new batch, cut out of a
    larger batch."""

    offset: int
    messages: int
    ranges: list[Range]
    unacked: int
    is_masked: bool = False
    slots: tuple[int, ...] = ()
    is_cut: bool = False


def part_of(batch: Stored, missing: list[Range], to_send: list[Range]) -> BatchPart:
    """The part of a batch that gives the ranges `to_send`; `missing` are all ranges of the batch
    that are not acknowledged."""
    if len(to_send) == 1:
        ((lo, hi),) = to_send
        rows = hi - lo
    else:
        rows = sum(hi - lo for lo, hi in to_send)
    is_masked = to_send is not missing and rows < sum(hi - lo for lo, hi in missing)
    return BatchPart(batch.offset, batch.messages, to_send, rows, is_masked)


def first_row_and_rest(part: BatchPart) -> tuple[BatchPart, BatchPart | None]:
    """The first row of the part as a lone message, and a part with the other rows. Because of
    `is_masked` an id without a set does not name the other messages with the same entry."""
    (lo, hi), *others = part.ranges
    row = BatchPart(lo, 1, [(lo, lo + 1)], 1, True, part.slots)
    ranges = ([(lo + 1, hi)] if lo + 1 < hi else []) + others
    if not ranges:
        return row, None
    return row, part._replace(ranges=ranges, unacked=part.unacked - 1, is_masked=True)


class PendingParts:
    """The parts that are pending at a consumer, by their entries, in the order in which they were
    sent. For a part of one message only its slot is kept: 100 bytes instead of 350."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: dict[int, BatchPart | int] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, entry: int) -> bool:
        return entry in self._parts

    def __iter__(self) -> Iterator[int]:
        return iter(self._parts)

    def __setitem__(self, entry: int, part: BatchPart) -> None:
        slots = part.slots
        is_lone = part.messages == 1 and not part.is_masked and not part.is_cut and len(slots) < 2
        self._parts[entry] = (slots[0] if slots else 0) if is_lone else part

    def __getitem__(self, entry: int) -> BatchPart:
        part = self._parts[entry]
        if isinstance(part, int):
            slots = (part,) if part else ()
            return BatchPart(entry, 1, [(entry, entry + 1)], 1, False, slots)
        return part

    def __delitem__(self, entry: int) -> None:
        del self._parts[entry]

    def get(self, entry: int) -> BatchPart | None:
        return self[entry] if entry in self._parts else None

    def add_lone(self, offsets: Iterable[int], slots: Iterable[int]) -> None:
        """Messages outside of batches were sent, with these slots."""
        self._parts.update(zip(offsets, slots, strict=True))

    def take_lone(self, entries: Iterable[int]) -> dict[int, int]:
        """Remove those of the entries that are pending as messages outside of batches. Returns
        these entries with their slots (0: no slot)."""
        parts, slots = self._parts, {}
        for entry in entries:
            slot = parts.get(entry)
            if isinstance(slot, int):
                slots[entry] = slot
                del parts[entry]
        return slots

    def values(self) -> list[BatchPart]:
        return [self[entry] for entry in self._parts]

    def clear(self) -> None:
        self._parts.clear()


def cumulative_end(message_id: MessageId, offset: int, messages: int | None) -> int:
    """One past the last offset that a cumulative ack acknowledges. If no sent batch begins at the
    id's entry, the id names the last message before a batch that the consumer acknowledges in part.
    `messages` as in `acknowledged_ranges`."""
    start = signed(message_id.entryId)
    if start < 0:  # the last message before the first batch
        return 0
    if message_id.ack_set:
        parts = acked_in(message_id.ack_set, start, messages or 0)
        return parts[0][1] if parts and parts[0][0] == start else start
    if message_id.batch_index >= 0:
        return offset + 1 if messages is None else min(offset + 1, start + messages)
    return start + (messages or 1)


def acknowledged_ranges(
    message_id: MessageId, offset: int, messages: int | None, acks: Acks | None = None
) -> list[tuple[int, int]]:
    """The offsets that an id acknowledges in an individual ack: one message of a batch (`offset`),
    a whole batch, or the batch's messages that the id's set names. A client's set names all
    messages of the batch that the client ever acknowledged; those that are in `acks` already are
    left out. `messages` is the size of the batch that was sent; None if the size is not known."""
    start = signed(message_id.entryId)
    if message_id.ack_set:
        return [] if messages is None else acked_in(message_id.ack_set, start, messages, acks)
    if message_id.batch_index >= 0:
        inside = messages is None or message_id.batch_index < messages
        return [(offset, offset + 1)] if inside else []
    return [(start, start + (messages or 1))]


def after_unacknowledged(acks: Acks, count: int, end: int) -> int:
    """The offset below which there are `count` messages that are not acknowledged; `end` if fewer
    than `count` such messages are below `end`."""
    offset = acks.mark
    for lo, hi in acks.missing(acks.mark, end) if count else ():
        offset = min(hi, lo + count)
        count -= offset - lo
        if not count:
            return offset
    return max(offset, end) if count else offset


def is_unclear(message_id: MessageId, messages: int | None) -> bool:
    """Whether an id may name more messages than it acknowledges: it names a whole batch, or a set
    of a batch's messages, and the size of the batch is not known."""
    return messages is None and (bool(message_id.ack_set) or message_id.batch_index < 0)


def not_sent(entry: int) -> Refusal:
    """The answer to an ack whose id names messages that were not, or not all, acknowledged."""
    return Refusal(
        ServerError.METADATA,
        f"the batch at entry {entry} was not sent since the consumer came: the broker sends it"
        " again, acknowledge it then",
    )


def never_sent(entry: int, end: int) -> Refusal:
    """The answer to an ack whose id names no message of the partition, which ends at `end`."""
    return Refusal(
        ServerError.METADATA,
        f"no message of entry {entry} was sent: the messages of the partition end at offset {end}",
    )


def ack_set(missing: list[tuple[int, int]], start: int, messages: int) -> list[int]:
    """The set of a batch at `start` for CommandMessage, in signed words of 64 bits: the bit of a
    message is 1 if the message is not acknowledged. The set is empty if no message is
    acknowledged."""
    if missing == [(start, start + messages)]:
        return []
    bits = np.zeros(-(-messages // _BITS) * _BITS, dtype=np.uint8)
    for lo, hi in missing:
        bits[lo - start : hi - start] = 1
    words: list[int] = np.packbits(bits, bitorder="little").view("<i8").tolist()
    return words


def acked_in(
    words: Sequence[int], start: int, messages: int, acks: Acks | None = None
) -> list[tuple[int, int]]:
    """The offsets of the batch at `start` that an ack's set acknowledges, whose bits are 0, and
    that are not in `acks`."""
    set_bytes = np.array(words[: -(-messages // _BITS)], dtype="<i8").view(np.uint8)
    bits = np.ones(messages + 2, dtype=np.int8)  # one more bit at each end
    bits[1:-1] = 0
    unacked = np.unpackbits(set_bytes, bitorder="little")[:messages]
    bits[1 : 1 + len(unacked)] = unacked
    if acks is not None:
        rows = within(acks.rows, start, start + messages).to_array()
        bits[np.frombuffer(rows, dtype=np.int64) - (start - 1)] = 1
        bits[1 : max(1, acks.mark - start + 1)] = 1
    ends = (np.flatnonzero(np.diff(bits)) + start).tolist()
    return list(zip(ends[::2], ends[1::2], strict=True))
