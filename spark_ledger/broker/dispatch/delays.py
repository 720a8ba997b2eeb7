"""When the delayed messages of a partition are due. Pure.

Always true: the index is a hint that all subscriptions of the partition share. The messages
themselves have the time, so an index that was lost is made again by reading. A message is due once
the lower bound of the store's clock has reached its time, so no message is early. Each subscription
asks for what became due since it last asked (`due_between`), whatever other subscriptions have
acknowledged.

A message takes 32 bytes: its place by offset, and its place by time in the bucket of its second.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from spark_ledger import errors
from spark_ledger.broker.owner.tail import Stored
from spark_ledger.topic.entry import pulsar_batch

MESSAGE_BYTES = 32
INDEX_BYTES_MAX = 64 << 20
"""Of a partition: 2 million messages. Beyond it no subscription reads on until some are due, or
below the marks of all subscriptions."""
FULL_WAIT_S = 1.0
"""So often a subscription looks whether a full index has room again."""
FORGOTTEN_MAX = 50_000
"""So many messages are forgotten in one step, at most; then others have their turn."""
_FORGOTTEN_SHARE = 64
"""Messages below the marks are forgotten once they are one of so many: each time all are moved."""
_RUN_ROWS = 1024
_TAG = b"\x98\x01"
"""Protobuf's tag of `deliver_at_time`: without it in its bytes, metadata has no such time."""
_BUCKET_MS = 1000


@dataclass(slots=True)
class _Bucket:
    """The delayed messages that are due in one second."""

    offsets: "array[int]" = field(default_factory=lambda: array("q"))
    dues_ms: "array[int]" = field(default_factory=lambda: array("q"))
    first_ms: int = 1 << 62
    """None of them is due earlier."""

    def add(self, offset: int, due_ms: int) -> None:
        self.offsets.append(offset)
        self.dues_ms.append(due_ms)
        self.first_ms = min(self.first_ms, due_ms)

    def forget_below(self, offset: int) -> None:
        kept = np.frombuffer(self.offsets, np.int64) >= offset
        self.offsets = _kept(self.offsets, kept)
        self.dues_ms = _kept(self.dues_ms, kept)


class DelayIndex:
    """The delayed messages of a partition that its subscriptions have met."""

    def __init__(self) -> None:
        self._offsets = array("q")  # rising
        self._dues_ms = array("q")
        self._buckets: dict[int, _Bucket] = {}
        self._seconds: list[int] = []  # the keys of `_buckets`, rising
        self.asked_ms: dict[object, int] = {}
        """By subscription that holds messages the time up to which it has asked for what is due."""
        self.marks: dict[object, int] = {}
        """By subscription that reads the offset below which it holds no message."""

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def bytes(self) -> int:
        return MESSAGE_BYTES * len(self._offsets)

    @property
    def is_full(self) -> bool:
        return self.bytes >= INDEX_BYTES_MAX

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
        bucket.add(offset, due_ms)

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
        """The first time after `after_ms` at which a message may be due; None if no message is due
        after it. It is exact unless messages were forgotten before they were due."""
        for at in range(bisect_left(self._seconds, after_ms // _BUCKET_MS), len(self._seconds)):
            bucket = self._buckets[self._seconds[at]]
            if bucket.first_ms > after_ms:
                return bucket.first_ms
            dues = np.frombuffer(bucket.dues_ms, np.int64)
            later = dues[dues > after_ms]
            if len(later):
                return int(later.min())
        return None

    def held_until(self, offset: int, now_ms: int) -> int:
        """The end of the run of delayed messages, one after the other from `offset` on, that are
        not due at `now_ms`; `offset` itself if that message is due, or is not in the index. So a
        reader passes over messages that it would only hold."""
        at, rows = bisect_left(self._offsets, offset), _RUN_ROWS
        all_offsets = np.frombuffer(self._offsets, np.int64)
        all_dues = np.frombuffer(self._dues_ms, np.int64)
        while at < len(all_offsets):
            offsets, dues = all_offsets[at : at + rows], all_dues[at : at + rows]
            runs = (offsets == np.arange(offset, offset + len(offsets))) & (dues > now_ms)
            if not runs.all():
                return offset + int(runs.argmin())
            at, offset, rows = at + len(runs), offset + len(runs), 2 * rows
        return offset

    def forget_due(self, until_ms: int) -> None:
        """Forget the messages of the seconds that are over at `until_ms`: every subscription has
        asked for them. It takes as long as many messages there are, but once in a second only."""
        past = bisect_left(self._seconds, (until_ms + 1) // _BUCKET_MS)
        if not past:
            return
        gone = array("q")
        for second in self._seconds[:past]:
            gone += self._buckets.pop(second).offsets
        del self._seconds[:past]
        kept = np.ones(len(self._offsets), dtype=np.bool_)
        kept[np.searchsorted(self._offsets, gone)] = False
        self._offsets = _kept(self._offsets, kept)
        self._dues_ms = _kept(self._dues_ms, kept)

    def forget_passed(self) -> None:
        """Forget messages below the marks of all subscriptions, unless they are too few to be worth
        it."""
        at = bisect_left(self._offsets, min(self.marks.values(), default=0))
        if at and at * _FORGOTTEN_SHARE >= len(self._offsets):
            self.forget_below(self._offsets[min(at, FORGOTTEN_MAX) - 1] + 1)

    def forget_below(self, offset: int) -> None:
        """Forget the messages below the offset, which no subscription gets any more."""
        at = bisect_left(self._offsets, offset)
        if not at:
            return
        is_emptied = False
        for second in {due_ms // _BUCKET_MS for due_ms in self._dues_ms[:at]}:
            bucket = self._buckets[second]
            bucket.forget_below(offset)
            if not bucket.offsets:
                del self._buckets[second]
                is_emptied = True
        if is_emptied:
            self._seconds = [second for second in self._seconds if second in self._buckets]
        del self._offsets[:at]
        del self._dues_ms[:at]

    def _seconds_between(self, after_ms: int, until_ms: int) -> list[int]:
        first = bisect_left(self._seconds, after_ms // _BUCKET_MS)
        return self._seconds[first : bisect_right(self._seconds, until_ms // _BUCKET_MS)]


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
        self._last_ms = 0
        self._next_ms: int | None = None
        """None of `rows` is due earlier; None: that is not known."""

    @property
    def now_ms(self) -> int:
        """The time by which a message is due. It never goes back."""
        self._last_ms = max(self._last_ms, self._earliest_ms() or 0)
        return self._last_ms

    @property
    def is_full(self) -> bool:
        return self._index.is_full

    def begin(self) -> None:
        """The subscription reads from its mark on: what it has met before is forgotten."""
        self.end()
        self._index.marks[self] = 0

    def end(self) -> None:
        """The subscription reads no more."""
        self.rows.clear()
        self.due.clear()
        self._index.asked_ms.pop(self, None)
        self._index.marks.pop(self, None)

    def holds(self, batch: Stored) -> bool:
        """Whether the batch is a message that is not due; the subscription has met it then."""
        due_ms = deliver_at_ms(batch)
        if due_ms <= 0:
            return False
        now_ms = self.now_ms
        if due_ms <= now_ms:
            return False
        self._index.add(batch.offset, due_ms)
        self._hold(now_ms, due_ms)
        self.rows.add(batch.offset)
        return True

    def pass_over(self, offset: int) -> int:
        """The end of the run of messages from `offset` on that are known not to be due: the
        subscription has met them, and need not read them."""
        if not len(self._index):
            return offset
        now_ms = self.now_ms
        end = self._index.held_until(offset, now_ms)
        if end > offset:
            self._hold(now_ms, None)
            self.rows.add_range(offset, end)
        return end

    def _hold(self, now_ms: int, due_ms: int | None) -> None:
        """Messages are to be held that are not due at `now_ms`: the first one is due at `due_ms`,
        None if that is not known. Without rows so far, there was nothing to ask for."""
        if not self.rows:
            self._index.asked_ms[self] = now_ms
            self._next_ms = due_ms
        elif due_ms is None or self._next_ms is None:
            self._next_ms = None
        else:
            self._next_ms = min(self._next_ms, due_ms)

    def look(self, mark: int) -> None:
        """Find out what became due; below `mark` the subscription gets nothing any more."""
        index, now_ms = self._index, self.now_ms
        if mark != index.marks.get(self):
            self.drop(0, mark)
            index.marks[self] = mark
        if not self.rows:
            index.asked_ms.pop(self, None)
        elif now_ms > index.asked_ms[self]:
            if self._next_ms is None or now_ms >= self._next_ms:
                self._find_due(index.asked_ms[self], now_ms)
            index.asked_ms[self] = now_ms
        if len(index):
            index.forget_due(min(index.asked_ms.values(), default=now_ms))
            index.forget_passed()

    def _find_due(self, after_ms: int, now_ms: int) -> None:
        became_due = BitMap64(self._index.due_between(after_ms, now_ms)) & self.rows
        self.due |= became_due
        self.rows -= became_due
        self._next_ms = self._index.next_due_ms(now_ms)

    def drop(self, lo: int, hi: int) -> None:
        """Rows of [lo, hi) are acknowledged, sent, or do not exist any more."""
        for rows in (self.rows, self.due):
            if rows:
                rows.remove_range(lo, hi)

    def wait_s(self) -> float | None:
        """The time until a message that is held may be due, or a full index may have room; None if
        there is nothing to wait for."""
        waits_s = [FULL_WAIT_S] if self.is_full else []
        if self.rows:
            now_ms = self.now_ms
            if self._next_ms is None:
                self._next_ms = self._index.next_due_ms(self._index.asked_ms[self])
            if self._next_ms is not None:
                waits_s.append(max(0, self._next_ms - now_ms) / 1000)
        return min(waits_s, default=None)


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
