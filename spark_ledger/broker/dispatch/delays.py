"""When the delayed messages of a partition are due. Pure.

Always true: the index is a hint that all subscriptions of the partition share. The messages
themselves have the time, so an index that was lost is made again by reading; the index knows only
the offsets in `covered`. A message is due once the lower bound of the store's clock has reached its
time, so no message is early. Each subscription asks for what became due since it last asked
(`due_between`), whatever other subscriptions have acknowledged.

A message takes 32 bytes: its place by offset, and its place by time in the bucket of its second.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from spark_ledger import errors
from spark_ledger.broker.owner.tail import Stored
from spark_ledger.topic.entry import pulsar_batch

MESSAGE_BYTES = 32
INDEX_BYTES_MAX = 64 << 20
"""Of a partition: 2 million messages. Beyond it no subscription reads on until some are due."""
_TAG = b"\x98\x01"
"""Protobuf's tag of `deliver_at_time`: without it in its bytes, metadata has no such time."""
_BUCKET_MS = 1000

Longs = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Bucket:
    """The delayed messages that are due in one second."""

    offsets: "array[int]" = field(default_factory=lambda: array("q"))
    dues_ms: "array[int]" = field(default_factory=lambda: array("q"))


class DelayIndex:
    """The delayed messages with an offset in `covered`: [lo, hi), grown by `cover`."""

    def __init__(self, start: int = 0) -> None:
        self.covered = (start, start)
        self._offsets = array("q")  # rising
        self._dues_ms = array("q")
        self._buckets: dict[int, _Bucket] = {}
        self._seconds: list[int] = []  # the keys of `_buckets`, rising
        self.asked_ms: dict[object, int] = {}
        """By subscription the time up to which it has asked for what is due."""

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def bytes(self) -> int:
        return MESSAGE_BYTES * len(self._offsets)

    @property
    def is_full(self) -> bool:
        return self.bytes >= INDEX_BYTES_MAX

    def cover(self, lo: int, hi: int) -> None:
        """All delayed messages of [lo, hi) were added. A range that neither meets nor follows the
        covered range replaces it."""
        low, high = self.covered
        if low <= lo <= high:
            self.covered = (low, max(high, hi))
        elif hi >= low and lo < low:
            self.covered = (lo, max(high, hi))
        else:
            self.covered = (lo, hi)

    def add(self, offset: int, due_ms: int) -> None:
        """The message at the offset is due at `due_ms`. Adding it again changes nothing."""
        at = len(self._offsets)
        if at and offset <= self._offsets[-1]:
            at = bisect_left(self._offsets, offset)
            if self._offsets[at] == offset:
                return
        self._offsets.insert(at, offset)
        self._dues_ms.insert(at, due_ms)
        second = due_ms // _BUCKET_MS
        bucket = self._buckets.get(second)
        if bucket is None:
            bucket = self._buckets[second] = _Bucket()
            insort(self._seconds, second)
        bucket.offsets.append(offset)
        bucket.dues_ms.append(due_ms)

    def due_of(self, offset: int) -> int | None:
        """When the message at the offset is due; None if the index does not have it."""
        at = bisect_left(self._offsets, offset)
        has = at < len(self._offsets) and self._offsets[at] == offset
        return self._dues_ms[at] if has else None

    def due_between(self, after_ms: int, until_ms: int) -> list[int]:
        """The offsets, rising, of messages that are due after `after_ms` and not after
        `until_ms`."""
        offsets: list[int] = []
        for second in self._seconds_between(after_ms, until_ms):
            bucket = self._buckets[second]
            dues = np.frombuffer(bucket.dues_ms, np.int64)
            is_due = (dues > after_ms) & (dues <= until_ms)
            offsets += np.frombuffer(bucket.offsets, np.int64)[is_due].tolist()
        return sorted(offsets)

    def next_due_ms(self, after_ms: int) -> int | None:
        """The first time after `after_ms` at which a message is due; None if no message
        is."""
        for second in self._seconds[bisect_left(self._seconds, after_ms // _BUCKET_MS) :]:
            dues = np.frombuffer(self._buckets[second].dues_ms, np.int64)
            later = dues[dues > after_ms]
            if len(later):
                return int(later.min())
        return None

    def held_until(self, offset: int, now_ms: int) -> int:
        """The end of the run of delayed messages, one after the other from `offset` on, that are
        not due at `now_ms`; `offset` itself if that message is due, or is not in the index. So a
        reader passes over messages that it would only hold."""
        at = bisect_left(self._offsets, offset)
        offsets = np.frombuffer(self._offsets, np.int64)[at:]
        dues = np.frombuffer(self._dues_ms, np.int64)[at:]
        runs = (offsets == np.arange(offset, offset + len(offsets))) & (dues > now_ms)
        return offset + (len(runs) if runs.all() else int(runs.argmin()))

    def forget_due(self, until_ms: int) -> None:
        """Forget the messages that are due at `until_ms`: every subscription has asked for
        them."""
        past = bisect_left(self._seconds, (until_ms + 1) // _BUCKET_MS)
        for second in self._seconds[:past]:
            del self._buckets[second]
        del self._seconds[:past]
        dues = np.frombuffer(self._dues_ms, np.int64)
        self._keep(dues > until_ms)

    def forget_below(self, offset: int) -> None:
        """Forget the messages below the offset, which no subscription gets any more."""
        at = bisect_left(self._offsets, offset)
        self.covered = (max(self.covered[0], offset), max(self.covered[1], offset))
        if at:
            self._keep(np.arange(len(self._offsets)) >= at)
            for second in list(self._buckets):
                bucket = self._buckets[second]
                kept = np.frombuffer(bucket.offsets, np.int64) >= offset
                bucket.offsets = _kept(bucket.offsets, kept)
                bucket.dues_ms = _kept(bucket.dues_ms, kept)
            self._drop_empty()

    def columns(self) -> tuple[Longs, Longs]:
        """The offsets, rising, and the times, in milliseconds, for a snapshot."""
        return np.array(self._offsets, np.int64), np.array(self._dues_ms, np.int64)

    def load(self, offsets: Iterable[int], dues_ms: Iterable[int]) -> None:
        """Add the columns of a snapshot."""
        for offset, due_ms in zip(offsets, dues_ms, strict=True):
            self.add(offset, due_ms)

    def _seconds_between(self, after_ms: int, until_ms: int) -> list[int]:
        first = bisect_left(self._seconds, after_ms // _BUCKET_MS)
        return self._seconds[first : bisect_right(self._seconds, until_ms // _BUCKET_MS)]

    def _keep(self, kept: npt.NDArray[np.bool_]) -> None:
        if not kept.all():
            self._offsets = _kept(self._offsets, kept)
            self._dues_ms = _kept(self._dues_ms, kept)

    def _drop_empty(self) -> None:
        self._buckets = {second: b for second, b in self._buckets.items() if b.offsets}
        self._seconds = sorted(self._buckets)


def _kept(column: "array[int]", kept: npt.NDArray[np.bool_]) -> "array[int]":
    return array("q", np.frombuffer(column, np.int64)[kept].tobytes())


class HeldMessages:
    """The delayed messages that one subscription has met: `rows` are not due yet, `due` are due and
    not sent. `earliest_ms` returns a time that the store's clock has passed for certain, None as
    long as none is known: then no message is due."""

    def __init__(self, index: DelayIndex, earliest_ms: Callable[[], int | None]) -> None:
        self.rows = BitMap64()
        self.due = BitMap64()
        self._index = index
        self._earliest_ms = earliest_ms

    @property
    def now_ms(self) -> int:
        """The time by which a message is due. It never goes back."""
        return max(self._index.asked_ms.get(self, 0), self._earliest_ms() or 0)

    @property
    def is_full(self) -> bool:
        return self._index.is_full

    def begin(self) -> None:
        """The subscription reads from its mark on: what it has met before is forgotten."""
        self.rows.clear()
        self.due.clear()
        self._index.asked_ms[self] = self.now_ms

    def end(self) -> None:
        """The subscription reads no more."""
        self.rows.clear()
        self.due.clear()
        self._index.asked_ms.pop(self, None)

    def holds(self, batch: Stored) -> bool:
        """Whether the batch is a message that is not due; the subscription has met it then."""
        due_ms = deliver_at_ms(batch)
        if due_ms <= 0 or due_ms <= self.now_ms:
            return False
        self._index.add(batch.offset, due_ms)
        self.rows.add(batch.offset)
        return True

    def pass_over(self, offset: int) -> int:
        """The end of the run of messages from `offset` on that are known not to be due: the
        subscription has met them, and need not read them."""
        end = self._index.held_until(offset, self.now_ms) if len(self._index) else offset
        if end > offset:
            self.rows.add_range(offset, end)
        return end

    def look(self) -> None:
        """Find out what became due."""
        now_ms, asked_ms = self.now_ms, self._index.asked_ms
        if self.rows and now_ms > asked_ms[self]:
            became_due = BitMap64(self._index.due_between(asked_ms[self], now_ms)) & self.rows
            self.due |= became_due
            self.rows -= became_due
        asked_ms[self] = now_ms
        if len(self._index):
            self._index.forget_due(min(asked_ms.values()))

    def drop(self, lo: int, hi: int) -> None:
        """Rows of [lo, hi) are acknowledged, sent, or do not exist any more."""
        for rows in (self.rows, self.due):
            if rows:
                rows.remove_range(lo, hi)

    def wait_s(self) -> float | None:
        """The time until a message that is held is due; None if none is held."""
        now_ms = self.now_ms
        due_ms = self._index.next_due_ms(now_ms) if self.rows else None
        return None if due_ms is None else (due_ms - now_ms) / 1000


def deliver_at_ms(batch: Stored) -> int:
    """When the batch is to be delivered; 0: at once. Clients never batch delayed messages; a batch
    that cannot be decoded is delivered at once."""
    if batch.batched or batch.messages != 1:
        return 0
    data = memoryview(batch.data)
    try:
        if pulsar_batch.is_last_chunk(data):
            data = pulsar_batch.chunk_in(data)
        begin = pulsar_batch.HEAD.size
        end = begin + int.from_bytes(bytes(data[begin - 4 : begin]), "big")
        if _TAG not in bytes(data[begin:end]):
            return 0
        return int(pulsar_batch.parse(data).metadata.deliver_at_time)
    except errors.BadEntry:
        return 0
