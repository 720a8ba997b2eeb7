"""When the delayed messages of a partition are due. Pure.

Always true: the index is a hint that all subscriptions of the partition share. Each message has its
time in its own bytes, so a read finds a message that the index lacks. A message is due once the
lower bound of the store's clock has reached its time, so no message is early. Each subscription
asks for the messages that became due since it last asked (`due_between`), whatever other
subscriptions have acknowledged. The partition's ack ledger has the index too (topic/acks): the next
owner passes over messages that are not due, without reading them.

A message takes 32 bytes: its place by offset, and its place by time in one of a few sorted runs.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from bookie_server.api.entry import Buffer
from spark_ledger import errors
from spark_ledger.broker.log.partition import READ_BYTES
from spark_ledger.broker.log.tail import PLAIN_BEGIN, STEP_BATCHES_MAX, Stored
from spark_ledger.topic.acks.delayed import DelayedRows
from spark_ledger.topic.acks.sets import ACK_BYTES_MAX, AckBudget, Measured, bytes_of, within
from spark_ledger.topic.entry import pulsar_batch

MESSAGE_BYTES = 32
INDEX_BYTES_MAX = 64 << 20
"""Of a partition: 2 million messages. Beyond it, or while all indexes of the broker take too many
bytes, no subscription reads on until some messages are due, or below the marks of all
subscriptions. An index of at most FREE_BYTES never waits for other indexes."""
FULL_WAIT_S = 1.0
"""How often a subscription looks whether a full index has room again."""
FORGOTTEN_EVERY_MS = 1_000
"""How often messages that are due are forgotten. Each time, all messages of the index are moved."""
UNSORTED_MAX = 1_000
_FORGOTTEN_SHARE = 64
"""Messages below the marks are forgotten once they are 1/64 of the index. Each time, all messages
of the index are moved."""
WINDOW_ROWS = 1 << 14
"""How far ahead of a reader one step looks for messages that it need not read."""
_TAG = b"\x98\x01"
"""Protobuf's tag of `deliver_at_time`: without it in its bytes, metadata has no such time."""
_NUMBER_MAX = (1 << 63) - 1
_NO_NUMBERS = np.empty(0, np.int64)
Numbers = npt.NDArray[np.int64]


class _Run(NamedTuple):
    """Messages by time."""

    dues_ms: Numbers
    offsets: Numbers

    def between(self, after_ms: int, until_ms: int) -> Numbers:
        lo, hi = np.searchsorted(self.dues_ms, (after_ms, until_ms), "right")
        return self.offsets[lo:hi]


class DueOrder:
    """Messages in the order of their times. The messages that were added last are not sorted yet;
    the others are in sorted runs, each at least twice as long as the next. So an added message
    costs the sorting of a few messages, and a look costs a search in some twenty runs."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._dues_ms, self._offsets = array("q"), array("q")

    def add(self, due_ms: int, offset: int) -> None:
        self._dues_ms.append(due_ms)
        self._offsets.append(offset)
        if len(self._offsets) >= UNSORTED_MAX:
            self._sort_added()

    def add_many(self, dues_ms: Numbers, offsets: Numbers) -> None:
        order = np.argsort(dues_ms, kind="stable")
        self._runs.append(_Run(dues_ms[order], offsets[order]))
        while len(self._runs) > 1 and len(self._runs[-2].offsets) < 2 * len(self._runs[-1].offsets):
            last, before = self._runs.pop(), self._runs.pop()
            dues_ms = np.concatenate((before.dues_ms, last.dues_ms))
            order = np.argsort(dues_ms, kind="stable")
            offsets = np.concatenate((before.offsets, last.offsets))
            self._runs.append(_Run(dues_ms[order], offsets[order]))

    def between(self, after_ms: int, until_ms: int) -> Numbers:
        """The offsets, rising, of messages due after `after_ms` and not after `until_ms`."""
        self._sort_added()
        parts = [run.between(after_ms, until_ms) for run in self._runs]
        return np.sort(np.concatenate([_NO_NUMBERS, *parts]))

    def next_ms(self, after_ms: int) -> int | None:
        """The first time after `after_ms` at which a message is due; None without such a time."""
        self._sort_added()
        firsts = []
        for run in self._runs:
            at = np.searchsorted(run.dues_ms, after_ms, "right")
            firsts += run.dues_ms[at : at + 1].tolist()
        return min(firsts, default=None)

    def forget(self, is_kept: Callable[[_Run], npt.NDArray[np.bool_]]) -> None:
        """Keep of each run only the messages for which `is_kept` has True."""
        self._sort_added()
        kept = [(run, is_kept(run)) for run in self._runs]
        runs = [_Run(run.dues_ms[rows], run.offsets[rows]) for run, rows in kept]
        self._runs = [run for run in runs if len(run.offsets)]

    def _sort_added(self) -> None:
        if self._offsets:
            added = (np.frombuffer(column, np.int64) for column in (self._dues_ms, self._offsets))
            self.add_many(*added)
            self._dues_ms, self._offsets = array("q"), array("q")


class DelayIndex:
    """The delayed messages of a partition that its subscriptions have met. `broker_budget` counts
    the bytes of all indexes of a broker."""

    def __init__(self, broker_budget: AckBudget | None = None) -> None:
        self._budget = AckBudget(INDEX_BYTES_MAX, broker_budget)
        self._offsets = array("q")  # rising
        self._dues_ms = array("q")
        self._order = DueOrder()
        self._added = BitMap64()
        """Offsets that the partition's ack ledger lacks; some may have been forgotten since."""
        self._forgot_ms = 0
        self.on_added: Callable[[], None] = lambda: None
        self.asked_ms: dict[object, int] = {}
        """For each subscription that holds messages: it has asked for the messages that are due up
        to this time."""
        self.marks: dict[object, int] = {}
        """For each subscription that reads: it holds no message below this offset."""

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def bytes(self) -> int:
        return MESSAGE_BYTES * len(self._offsets)

    @property
    def is_full(self) -> bool:
        return self.bytes >= INDEX_BYTES_MAX or self._budget.is_over

    def drop(self) -> None:
        """Give the memory back: this broker no longer has the partition."""
        self.forget_below(_NUMBER_MAX)
        self._budget = AckBudget(INDEX_BYTES_MAX)  # of a step that still runs

    def _count(self) -> None:
        self._budget.add(self.bytes - self._budget.bytes)

    def add(self, offset: int, due_ms: int) -> None:
        """The message at the offset is due at `due_ms`. Adding it again changes nothing."""
        at = len(self._offsets)
        if at and offset <= self._offsets[-1]:
            at = bisect_left(self._offsets, offset)
            if self._offsets[at] == offset:
                return
        self._offsets.insert(at, offset)
        self._dues_ms.insert(at, due_ms)
        self._order.add(due_ms, offset)
        self._added.add(offset)
        self._count()
        self.on_added()

    # -- for the partition's ack ledger --------------------------------------------------------

    def load(self, rows: DelayedRows) -> bool:
        """As DelaySource."""
        offsets, dues_ms = self._columns()
        self._added |= _bitmap(offsets)
        is_new = ~np.isin(rows.offsets, offsets, assume_unique=True)
        new, new_dues_ms = rows.offsets[is_new], rows.dues_ms[is_new]
        offsets = np.concatenate((offsets, new))
        order = np.argsort(offsets, kind="stable")
        self._order.add_many(new_dues_ms, new)
        self._dues_ms = array("q", np.concatenate((dues_ms, new_dues_ms))[order].tobytes())
        self._offsets = array("q", offsets[order].tobytes())
        self._count()
        return bool(self._added)

    def take_added(self) -> DelayedRows:
        """As DelaySource."""
        offsets, dues_ms = self._columns()
        added = _numbers(self._added)
        self._added = BitMap64()
        places = np.searchsorted(offsets, added)
        is_there = places < len(offsets)
        is_there[is_there] = offsets[places[is_there]] == added[is_there]
        return DelayedRows(added[is_there], dues_ms[places[is_there]])

    def take_all(self) -> DelayedRows:
        """As DelaySource."""
        self._added = BitMap64()
        offsets, dues_ms = self._columns()
        return DelayedRows(offsets.copy(), dues_ms.copy())

    def _columns(self) -> DelayedRows:
        """Views: no message may be added as long as they are used."""
        return DelayedRows(
            np.frombuffer(self._offsets, np.int64), np.frombuffer(self._dues_ms, np.int64)
        )

    def forget_unused(self, now_ms: int, lowest: int) -> None:
        """As DelaySource."""
        self.forget_due(min(self.asked_ms.values(), default=now_ms))
        self.forget_below(min([lowest, *self.marks.values()]))

    # -- for subscriptions ---------------------------------------------------------------------

    def due_between(self, after_ms: int, until_ms: int) -> Numbers:
        """The offsets, rising, of messages that are due after `after_ms` and not after
        `until_ms`."""
        return self._order.between(after_ms, until_ms)

    def next_due_ms(self, after_ms: int) -> int | None:
        """The first time after `after_ms` at which a message is due; None if no message is due
        after it."""
        return self._order.next_ms(after_ms)

    def held_in(self, start: int, end: int, now_ms: int) -> Numbers:
        """The offsets in [start, end), rising, of messages that are not due at `now_ms`."""
        lo, hi = bisect_left(self._offsets, start), bisect_left(self._offsets, end)
        if lo == hi:
            return _NO_NUMBERS
        offsets, dues_ms = self._columns()
        rows: Numbers = offsets[lo:hi][dues_ms[lo:hi] > now_ms]
        return rows

    def forget_due(self, until_ms: int) -> None:
        """Forget the messages that are due at `until_ms`: every subscription has asked for them.
        The time rises with the number of messages, so this is done at most once in a second."""
        if until_ms < self._forgot_ms + FORGOTTEN_EVERY_MS:
            return
        self._forgot_ms = until_ms
        due = self._order.between(-1, until_ms)
        if not len(due):
            return
        self._order.forget(lambda run: run.dues_ms > until_ms)
        kept = np.ones(len(self._offsets), dtype=np.bool_)
        kept[np.searchsorted(self._offsets, due)] = False
        self._offsets = _kept(self._offsets, kept)
        self._dues_ms = _kept(self._dues_ms, kept)
        self._count()

    def forget_passed(self) -> None:
        """If the index is half full, or the broker's indexes are full: forget messages below the
        marks of all subscriptions, unless these messages are too few. A subscription without
        consumers has no mark."""
        if 2 * self.bytes < INDEX_BYTES_MAX and not self.is_full:
            return
        at = bisect_left(self._offsets, min(self.marks.values(), default=0))
        if at and at * _FORGOTTEN_SHARE >= len(self._offsets):
            self.forget_below(self._offsets[at - 1] + 1)

    def forget_below(self, offset: int) -> None:
        """Forget the messages below the offset, which no subscription gets any more."""
        at = bisect_left(self._offsets, offset)
        if at:
            self._order.forget(lambda run: run.offsets >= offset)
            del self._offsets[:at]
            del self._dues_ms[:at]
            self._count()


def _bitmap(offsets: Numbers) -> BitMap64:
    return BitMap64(array("Q", offsets.tobytes()))


def _numbers(offsets: BitMap64) -> Numbers:
    return np.frombuffer(offsets.to_array(), np.int64)


def _kept(column: "array[int]", kept: npt.NDArray[np.bool_]) -> "array[int]":
    return array("q", np.frombuffer(column, np.int64)[kept].tobytes())


class HeldMessages:
    """The delayed messages that one subscription has met: `rows` are not due yet, `due` are due and
    not sent. `earliest_ms` returns a time that the store's clock has passed for certain; None as
    long as no such time is known: then no message is due."""

    def __init__(
        self,
        index: DelayIndex,
        earliest_ms: Callable[[], int | None],
        budget: AckBudget | None = None,
    ) -> None:
        self.memory = Measured(budget or AckBudget(ACK_BYTES_MAX), self._bytes)
        self.rows = BitMap64()
        self.due = BitMap64()
        self.index = index
        self._earliest_ms = earliest_ms
        self.is_on = True
        """Whether messages are delayed; without, those that are held already stay so."""
        self._last_ms = 0
        self._next_ms: int | None = None
        """No message of `rows` is due before this time; None: the time is not known."""

    @property
    def now_ms(self) -> int:
        """The time by which a message is due. It never goes back."""
        self._last_ms = max(self._last_ms, self._earliest_ms() or 0)
        return self._last_ms

    @property
    def is_full(self) -> bool:
        return self.index.is_full

    def _bytes(self) -> int:
        return bytes_of(self.rows) + bytes_of(self.due)

    def begin(self) -> None:
        """Called when the subscription begins to read at its mark: the messages that it has met
        before are forgotten."""
        self.end()
        self.index.marks[self] = 0

    def end(self) -> None:
        """Called when the subscription stops reading."""
        self.rows.clear()
        self.due.clear()
        self.memory.measure()
        self.index.asked_ms.pop(self, None)
        self.index.marks.pop(self, None)

    def holds(self, batch: Stored) -> bool:
        """Whether the batch is a message that is not due. Then the subscription holds it from now
        on."""
        due_ms = deliver_at_ms(batch) if self.is_on else 0
        if due_ms <= 0:
            return False
        now_ms = self.now_ms
        if due_ms <= now_ms:
            return False
        self.index.add(batch.offset, due_ms)
        self._hold(now_ms, due_ms)
        self.rows.add(batch.offset)
        return True

    def pass_over(self, offset: int, acked: BitMap64) -> int:
        """The end of the run of messages from `offset` on that need not be read: each is `acked`,
        or the index shows that it is not due, and the subscription holds it from now on. The run
        ends at the next multiple of WINDOW_ROWS at the latest."""
        if not len(self.index) or not self.is_on:
            return offset
        now_ms, window_end = self.now_ms, (offset // WINDOW_ROWS + 1) * WINDOW_ROWS
        held = self.index.held_in(offset, window_end, now_ms)
        is_known = self._known(offset, window_end, held, acked)
        end = window_end if is_known.all() else offset + int(is_known.argmin())
        held = held[: np.searchsorted(held, end)]
        if len(held):
            rows = _bitmap(held) - acked
            if rows:
                self._hold(now_ms, None)
                self.rows |= rows
        return end

    def may_pass_on(self, begin: int, end: int) -> bool:
        """Whether `pass_over`, which came from `begin` to `end`, may pass over more if it is called
        again."""
        return end > begin and not end % WINDOW_ROWS

    def read_bytes(self, offset: int, acked: BitMap64) -> int:
        """How many bytes to read from `offset` on: READ_BYTES if most of the next messages are to
        be sent now, otherwise one batch."""
        if not len(self.index):
            return READ_BYTES
        end = offset + STEP_BATCHES_MAX
        held = self.index.held_in(offset, end, self.now_ms)
        rows_passed = int(self._known(offset, end, held, acked).sum())
        return READ_BYTES if 2 * rows_passed <= STEP_BATCHES_MAX else 1

    def _known(self, start: int, end: int, held: Numbers, acked: BitMap64) -> npt.NDArray[np.bool_]:
        """By offset of [start, end), whether the message is held or acknowledged."""
        is_known = np.zeros(end - start, np.bool_)
        is_known[held - start] = True
        if acked:
            is_known[_numbers(within(acked, start, end)) - start] = True
        return is_known

    def _hold(self, now_ms: int, due_ms: int | None) -> None:
        """Called before messages that are not due at `now_ms` are added to `rows`. The first of
        them is due at `due_ms`; None: the time is not known."""
        self.memory.changed()
        if not self.rows:
            self.index.asked_ms[self] = now_ms
            self._next_ms = due_ms
        elif due_ms is None or self._next_ms is None:
            self._next_ms = None
        else:
            self._next_ms = min(self._next_ms, due_ms)

    def look(self, mark: int) -> None:
        """Find the messages that became due. The subscription gets no message below `mark` any
        more."""
        index, now_ms = self.index, self.now_ms
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
        became_due = _bitmap(self.index.due_between(after_ms, now_ms)) & self.rows
        self.due |= became_due
        self.rows -= became_due
        self._next_ms = self.index.next_due_ms(now_ms)

    def drop(self, lo: int, hi: int) -> None:
        """No row of [lo, hi) is held any more: each is acknowledged or sent, or does not exist any
        more."""
        for rows in (self.rows, self.due):
            if rows:
                rows.remove_range(lo, hi)

    def wait_s(self) -> float | None:
        """How long until a held message may be due, or a full index may have room; None if no such
        time will come."""
        waits_s = [FULL_WAIT_S] if self.is_full else []
        if self.rows:
            now_ms = self.now_ms
            if self._next_ms is None:
                self._next_ms = self.index.next_due_ms(self.index.asked_ms[self])
            if self._next_ms is not None:
                waits_s.append(max(0, self._next_ms - now_ms) / 1000)
        return min(waits_s, default=None)


def is_plain_and_due(batch: Stored) -> bool:
    """Whether the batch is one message outside of batches, in one frame, that was never delayed."""
    data, begin = batch.data, pulsar_batch.HEAD.size
    if batch.messages != 1 or batch.batched or not data.startswith(PLAIN_BEGIN):
        return False
    end = begin + int.from_bytes(data[begin - 4 : begin], "big")
    return data.find(_TAG, begin, end) < 0 or not deliver_at_ms(batch)


def deliver_at_ms(batch: Stored) -> int:
    """When the batch is to be delivered; 0: at once. Clients never batch delayed messages; a batch
    that cannot be decoded is delivered at once."""
    if batch.batched or batch.messages != 1:
        return 0
    data: Buffer = batch.data
    try:
        if pulsar_batch.is_last_chunk(data):
            data = pulsar_batch.chunk_in(data)
        begin = pulsar_batch.HEAD.size
        end = begin + int.from_bytes(data[begin - 4 : begin], "big")
        if _TAG not in bytes(data[begin:end]):
            return 0
        return int(pulsar_batch.parse(memoryview(data)).metadata.deliver_at_time)
    except errors.BadEntry:
        return 0
