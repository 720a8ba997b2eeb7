"""What of a partition a subscription has acknowledged, and what was sent to a consumer. Pure.

Always true: every offset below `mark` is acknowledged or has no row; neither it nor `durable` goes
back but by `reset`. What a client's id acknowledges is judged by what was sent, and costs no more
than the batch that it names has messages: an id's own counts are not used. For a batch that was not
sent to the consumer (another broker sent it, for example) an id's set is ignored, and an id without
a set acknowledges one message.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from spark_ledger.broker.wire.commands import MessageId, signed

RANGES_MAX = 10_000
SENT_BATCHES_MAX = 100_000
"""Of 16 bytes each."""
_BITS = 64


class Acks:
    """Always true: `ranges` are acknowledged offsets beyond the mark, apart from each other and
    rising, RANGES_MAX at most: of more, the highest are forgotten and their messages come again.
    Acknowledging twice changes nothing.

    `durable` is where a later consumer begins: one past the last acknowledged row below the mark.
    Offsets between `durable` and the mark have no rows, but may be the first chunks of a message
    that is not acknowledged: a consumer passes over them, and retention must leave them."""

    def __init__(self, mark: int) -> None:
        self.mark = self.durable = mark
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._row_ends: list[int] = []  # of each range one past its last row, 0 if it has none

    @property
    def ranges(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def reset(self, mark: int) -> None:
        """Nothing from there on is acknowledged."""
        self.mark = self.durable = mark
        self._starts.clear()
        self._ends.clear()
        self._row_ends.clear()

    def up_to(self, end: int) -> bool:
        """Everything below `end` is acknowledged; whether the mark moved."""
        return self._move(end, end)

    def add(self, start: int, end: int) -> bool:
        """Offsets [start, end) are acknowledged; whether the mark moved."""
        return self._add(start, end, end)

    def pass_over(self, start: int, end: int) -> None:
        """Offsets [start, end) have no row to acknowledge."""
        self._add(start, end, 0)

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """What of [start, end) is not acknowledged."""
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
        swallowed = 0
        while swallowed < len(self._starts) and self._starts[swallowed] <= self.mark:
            self.mark = max(self.mark, self._ends[swallowed])
            self.durable = max(self.durable, self._row_ends[swallowed])
            swallowed += 1
        for column in (self._starts, self._ends, self._row_ends):
            del column[:swallowed]
        return True


class SentBatches:
    """The batches that a consumer was sent, by the offset of the first message, SENT_BATCHES_MAX at
    most: of more, those at the lowest offsets are forgotten."""

    def __init__(self) -> None:
        self._starts = array("q")
        self._messages = array("q")

    def note(self, start: int, messages: int) -> None:
        """A batch is sent, or is sent again."""
        at = len(self._starts)
        if at and start <= self._starts[-1]:
            at = bisect_left(self._starts, start)
            if self._starts[at] == start:
                self._messages[at] = messages
                return
        self._starts.insert(at, start)
        self._messages.insert(at, messages)
        if len(self._starts) > SENT_BATCHES_MAX:
            del self._starts[: SENT_BATCHES_MAX // 4 + 1]
            del self._messages[: SENT_BATCHES_MAX // 4 + 1]

    def messages(self, start: int) -> int | None:
        """How many the batch has that begins there; None if none was sent that does."""
        at = bisect_left(self._starts, start)
        was_sent = at < len(self._starts) and self._starts[at] == start
        return self._messages[at] if was_sent else None

    def acknowledged(self, message_id: MessageId, offset: int) -> list[tuple[int, int]]:
        """The offsets that an id, which names `offset`, acknowledges by itself: one message of a
        batch, a whole batch, or the part of it in the id's set."""
        start = signed(message_id.entryId)
        messages = self.messages(start)
        if message_id.ack_set:
            return [] if messages is None else acked_in(message_id.ack_set, start, messages)
        if message_id.batch_index >= 0:
            inside = messages is None or message_id.batch_index < messages
            return [(offset, offset + 1)] if inside else []
        return [(start, start + (messages or 1))]

    def acknowledged_up_to(self, message_id: MessageId, offset: int) -> int:
        """One past the last offset that a cumulative ack names. An id that is no batch of those
        sent names the last message before a batch: its consumer is in the middle of that."""
        start = signed(message_id.entryId)
        messages = self.messages(start)
        if message_id.ack_set:
            parts = acked_in(message_id.ack_set, start, messages or 0)
            return parts[0][1] if parts and parts[0][0] == start else start
        if message_id.batch_index >= 0:
            return offset + 1 if messages is None else min(offset + 1, start + messages)
        return start + (messages or 1)


def ack_set(missing: list[tuple[int, int]], start: int, messages: int) -> list[int]:
    """The bits of the batch that begins at `start` whose messages are not acknowledged, in signed
    words of 64, as CommandMessage has them; none where all are missing."""
    if missing == [(start, start + messages)]:
        return []
    bits = np.zeros(-(-messages // _BITS) * _BITS, dtype=np.uint8)
    for lo, hi in missing:
        bits[lo - start : hi - start] = 1
    words: list[int] = np.packbits(bits, bitorder="little").view("<i8").tolist()
    return words


def acked_in(words: Sequence[int], start: int, messages: int) -> list[tuple[int, int]]:
    """The offsets of the batch at `start` that an ack's set acknowledges: those whose bits are not
    set. RANGES_MAX stretches of them at most: more would be forgotten anyway."""
    given = np.array(words[: -(-messages // _BITS)], dtype="<i8").view(np.uint8)
    bits = np.ones(messages + 2, dtype=np.int8)  # and one beside each end
    bits[1:-1] = 0
    left = np.unpackbits(given, bitorder="little")[:messages]
    bits[1 : 1 + len(left)] = left
    ends = (np.flatnonzero(np.diff(bits))[: 2 * RANGES_MAX] + start).tolist()
    return list(zip(ends[::2], ends[1::2], strict=True))
