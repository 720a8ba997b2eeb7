"""What of a partition a subscription has acknowledged. Pure.

Always true: every offset below `mark` is acknowledged; `ranges` are those beyond it that are, apart
from each other and rising, RANGES_MAX at most: of more, the highest are forgotten and come again.
Only the mark is made durable (at least once). Acknowledging twice changes nothing.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

RANGES_MAX = 10_000
_BITS = 64


class Acks:
    """Of one partition."""

    def __init__(self, mark: int) -> None:
        self.mark = mark
        self._starts: list[int] = []
        self._ends: list[int] = []

    @property
    def ranges(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def reset(self, mark: int) -> None:
        """Nothing from there on is acknowledged."""
        self.mark = mark
        self._starts.clear()
        self._ends.clear()

    def up_to(self, end: int) -> bool:
        """Everything below `end` is acknowledged; whether the mark moved."""
        if end <= self.mark:
            return False
        self.mark = end
        self._swallow()
        return True

    def add(self, start: int, end: int) -> bool:
        """Offsets [start, end) are acknowledged; whether the mark moved."""
        if start <= self.mark:
            return self.up_to(end)
        if start >= end:
            return False
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        if len(self._starts) > RANGES_MAX:
            self._starts.pop()
            self._ends.pop()
        return False

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """What of [start, end) is not acknowledged."""
        found, at = [], max(start, self.mark)
        for i in range(bisect_right(self._ends, at), len(self._starts)):
            if self._starts[i] >= end or at >= end:
                break
            if at < self._starts[i]:
                found.append((at, self._starts[i]))
            at = self._ends[i]
        if at < end:
            found.append((at, end))
        return found

    def _swallow(self) -> None:
        while self._starts and self._starts[0] <= self.mark:
            self.mark = max(self.mark, self._ends[0])
            del self._starts[0], self._ends[0]


def ack_set(missing: list[tuple[int, int]], start: int, messages: int) -> list[int]:
    """The bits of the batch that begins at `start` whose messages are not acknowledged, in signed
    words of 64, as CommandMessage has them; none where all are missing."""
    if missing == [(start, start + messages)]:
        return []
    bits = 0
    for lo, hi in missing:
        bits |= ((1 << (hi - lo)) - 1) << (lo - start)
    words = [(bits >> at) & (2**_BITS - 1) for at in range(0, messages, _BITS)]
    return [word - 2**_BITS if word >= 2 ** (_BITS - 1) else word for word in words]


def acked_in(words: list[int], start: int, messages: int) -> list[tuple[int, int]]:
    """The offsets of the batch at `start` that an ack's set says are acknowledged: bits that are
    not set."""
    found: list[tuple[int, int]] = []
    for i in range(messages):
        word = words[i // _BITS] if i // _BITS < len(words) else 0
        if not (word >> (i % _BITS)) & 1:
            if found and found[-1][1] == start + i:
                found[-1] = (found[-1][0], start + i + 1)
            else:
                found.append((start + i, start + i + 1))
    return found
