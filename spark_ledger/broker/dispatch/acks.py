"""What of a partition a subscription has acknowledged, and what was sent to a consumer. Pure.

Always true: every offset below `mark` is acknowledged or has no row; only `reset` moves `mark` and
`durable` back. What a client's id acknowledges is judged by what was sent: the id's own counts are
not used, so the work is bounded by the messages of the batch that the id names. For a batch that
was not sent to the consumer (another broker sent it, for example) the id's set is ignored, and an
id without a set acknowledges one message.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from spark_ledger.broker.wire.commands import MessageId, signed

RANGES_MAX = 10_000
SENT_BATCHES_MAX = 100_000
"""Each takes 16 bytes."""
_BITS = 64


class Acks:
    """Always true: `ranges` are the acknowledged offsets beyond the mark, in rising order with gaps
    between them. There are RANGES_MAX at most: when there are more, the highest range is forgotten,
    and its messages are sent again. Acknowledging twice changes nothing.

    `durable` is where a later consumer begins: one past the last acknowledged row below the mark.
    Offsets between `durable` and the mark have no rows, but may be the first chunks of a message
    that is not acknowledged: a consumer skips them, and retention must keep them."""

    def __init__(self, mark: int) -> None:
        self.mark = self.durable = mark
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._row_ends: list[int] = []  # for each range: one past its last row, 0 without rows

    @property
    def ranges(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def reset(self, mark: int) -> None:
        """From `mark` on nothing is acknowledged."""
        self.mark = self.durable = mark
        self._starts.clear()
        self._ends.clear()
        self._row_ends.clear()

    def add_up_to(self, end: int) -> bool:
        """Everything below `end` is acknowledged. Returns whether the mark moved."""
        return self._move(end, end)

    def add(self, start: int, end: int) -> bool:
        """Offsets [start, end) are acknowledged. Returns whether the mark moved."""
        return self._add(start, end, end)

    def pass_over(self, start: int, end: int) -> None:
        """Offsets [start, end) have no row to acknowledge."""
        self._add(start, end, 0)

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """The ranges of [start, end) that are not acknowledged."""
        gaps, at = [], max(start, self.mark)
        for i in range(bisect_right(self._ends, at), len(self._starts)):
            if self._starts[i] >= end or at >= end:
                break
            if at < self._starts[i]:
                gaps.append((at, self._starts[i]))
            at = self._ends[i]
        if at < end:
            gaps.append((at, end))
        return gaps

    def _add(self, start: int, end: int, row_end: int) -> bool:
        if start <= self.mark:
            return self._move(end, row_end)
        if start >= end:
            return False
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
            row_end = max(row_end, *self._row_ends[first:last])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        self._row_ends[first:last] = [row_end]
        if len(self._starts) > RANGES_MAX:
            self._starts.pop()
            self._ends.pop()
            self._row_ends.pop()
        return False

    def _move(self, mark: int, row_end: int) -> bool:
        if mark <= self.mark:
            return False
        self.mark, self.durable = mark, max(self.durable, row_end)
        reached = 0
        while reached < len(self._starts) and self._starts[reached] <= self.mark:
            self.mark = max(self.mark, self._ends[reached])
            self.durable = max(self.durable, self._row_ends[reached])
            reached += 1
        for column in (self._starts, self._ends, self._row_ends):
            del column[:reached]
        return True


class SentBatches:
    """The batches that were sent to a consumer, by the offset of their first message. There are
    SENT_BATCHES_MAX at most: when there are more, the batches at the lowest offsets are
    forgotten."""

    def __init__(self) -> None:
        self._starts = array("q")
        self._message_counts = array("q")

    def note(self, start: int, messages: int) -> None:
        """A batch is sent, for the first time or again."""
        at = len(self._starts)
        if at and start <= self._starts[-1]:
            at = bisect_left(self._starts, start)
            if self._starts[at] == start:
                self._message_counts[at] = messages
                return
        self._starts.insert(at, start)
        self._message_counts.insert(at, messages)
        if len(self._starts) > SENT_BATCHES_MAX:
            del self._starts[: SENT_BATCHES_MAX // 4 + 1]
            del self._message_counts[: SENT_BATCHES_MAX // 4 + 1]

    def message_count(self, start: int) -> int | None:
        """How many messages the batch at `start` has; None if no batch was sent that begins
        there."""
        at = bisect_left(self._starts, start)
        was_sent = at < len(self._starts) and self._starts[at] == start
        return self._message_counts[at] if was_sent else None

    def acknowledged_ranges(self, message_id: MessageId, offset: int) -> list[tuple[int, int]]:
        """As the function of this name, for what was sent."""
        count = self.message_count(signed(message_id.entryId))
        return acknowledged_ranges(message_id, offset, count)

    def cumulative_end(self, message_id: MessageId, offset: int) -> int:
        """One past the last offset that a cumulative ack names. An id whose entry is no batch that
        was sent names the last message before a batch that the consumer acknowledges in part."""
        start = signed(message_id.entryId)
        messages = self.message_count(start)
        if message_id.ack_set:
            parts = acked_in(message_id.ack_set, start, messages or 0)
            return parts[0][1] if parts and parts[0][0] == start else start
        if message_id.batch_index >= 0:
            return offset + 1 if messages is None else min(offset + 1, start + messages)
        return start + (messages or 1)


def acknowledged_ranges(
    message_id: MessageId, offset: int, messages: int | None
) -> list[tuple[int, int]]:
    """The offsets that an id acknowledges in an individual ack: one message of a batch (`offset`),
    a whole batch, or the messages of it in the id's set. `messages` is the size of the batch that
    was sent; None if it is not known."""
    start = signed(message_id.entryId)
    if message_id.ack_set:
        return [] if messages is None else acked_in(message_id.ack_set, start, messages)
    if message_id.batch_index >= 0:
        inside = messages is None or message_id.batch_index < messages
        return [(offset, offset + 1)] if inside else []
    return [(start, start + (messages or 1))]


def ack_set(missing: list[tuple[int, int]], start: int, messages: int) -> list[int]:
    """The set of a batch at `start` for CommandMessage, in signed words of 64 bits: a bit is 1
    where the message is not acknowledged. The set is empty if no message is acknowledged."""
    if missing == [(start, start + messages)]:
        return []
    bits = np.zeros(-(-messages // _BITS) * _BITS, dtype=np.uint8)
    for lo, hi in missing:
        bits[lo - start : hi - start] = 1
    words: list[int] = np.packbits(bits, bitorder="little").view("<i8").tolist()
    return words


def acked_in(words: Sequence[int], start: int, messages: int) -> list[tuple[int, int]]:
    """The offsets of the batch at `start` that an ack's set acknowledges: their bits are 0. The
    result has RANGES_MAX ranges at most: Acks would forget more."""
    set_bytes = np.array(words[: -(-messages // _BITS)], dtype="<i8").view(np.uint8)
    bits = np.ones(messages + 2, dtype=np.int8)  # one more bit at each end
    bits[1:-1] = 0
    unacked = np.unpackbits(set_bytes, bitorder="little")[:messages]
    bits[1 : 1 + len(unacked)] = unacked
    ends = (np.flatnonzero(np.diff(bits))[: 2 * RANGES_MAX] + start).tolist()
    return list(zip(ends[::2], ends[1::2], strict=True))
