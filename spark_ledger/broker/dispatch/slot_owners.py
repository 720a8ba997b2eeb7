"""Which consumer of a Key_Shared subscription has which slots, and which rows of each slot wait.
Pure.

Always true: a slot has one owner at most. If slots are shared out evenly (EvenSlots), every slot
has an owner as long as there is a consumer, no consumer has more than one slot more than another,
and a join or a leave moves as few slots as possible. With ranges that clients give
(StickyRanges) no two consumers' ranges overlap, and a slot in no range has no owner. A waiting row
takes 4 to 5 bytes in WaitingBySlot, as long as its slot has few rows: a bitmap for each slot took
100 bytes for each row.
"""

from array import array
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap, BitMap64

from spark_ledger.broker.dispatch.key_slots import SLOTS
from spark_ledger.broker.wire.commands import Refusal, ServerError
from spark_ledger.topic.acks.sets import bytes_of, next_in

M = TypeVar("M", bound=Hashable)
SlotRange = tuple[int, int]
"""The first and the last slot."""
Range = tuple[int, int]
"""A range of offsets: the first one, and one past the last one."""
Numbers = npt.NDArray[np.uint16]
UNDIVIDED: Numbers = np.zeros(0, dtype=np.uint16)
"""The owners' numbers of a subscription with one consumer or none: no table is needed."""
LIST_ROWS_MAX = 4096
"""How many rows of a slot are in a list before they go into a bitmap."""
RUN_ROWS_MAX = 16
"""Longer runs of rows go into a bitmap at once."""
SLOTS_BYTES, SLOT_BYTES, ROW_BYTES = 8 * SLOTS, 96, 4
"""The memory of the table of slots, of a slot's list, and of a row in a list."""
LIST_SPAN = 1 << 32
OFFSETS_END = 1 << 63


class SlotOwners(Protocol[M]):
    def join(self, member: M) -> None: ...

    def leave(self, member: M) -> None: ...

    def owner_of(self, slot: int) -> M | None: ...

    def owners_of(self, slots: Sequence[int]) -> Sequence[M | None]:
        """The owner of each slot."""


class EvenSlots(Generic[M]):
    """The consumer that came first keeps its lowest slots."""

    def __init__(self) -> None:
        self._members: dict[int, M] = {}
        self._numbers: dict[M, int] = {}
        self._owners: Numbers = UNDIVIDED
        """The number of each slot's owner, if there are several consumers."""

    def owner_of(self, slot: int) -> M | None:
        if self._owners is UNDIVIDED:
            return next(iter(self._members.values()), None)
        return self._members[int(self._owners[slot])]

    def owners_of(self, slots: Sequence[int]) -> Sequence[M | None]:
        if self._owners is UNDIVIDED:
            return [next(iter(self._members.values()), None)] * len(slots)
        return list(map(self._members.__getitem__, self._owners[slots].tolist()))

    def join(self, member: M) -> None:
        """Add a consumer: it gets slots from all others, until all have equal shares."""
        number = next(free for free in range(SLOTS) if free not in self._members)
        self._members[number] = member
        self._numbers[member] = number
        if len(self._members) == 1:
            return
        if self._owners is UNDIVIDED:
            (first, *_) = self._members
            self._owners = np.full(SLOTS, first, dtype=np.uint16)
        quotas = _quotas(len(self._members))
        by_owner = np.argsort(self._owners, kind="stable")
        counts = np.bincount(self._owners, minlength=number + 1)
        ends = np.cumsum(counts)
        taken = [
            by_owner[ends[other] - counts[other] + quota : ends[other]]
            for other, quota in zip(self._members, quotas, strict=False)
            if other != number
        ]
        self._owners[np.concatenate(taken)] = number

    def leave(self, member: M) -> None:
        """Remove a consumer: its slots go to the others, so that all have equal shares."""
        number = self._numbers.pop(member)
        del self._members[number]
        free = np.flatnonzero(self._owners == number)
        if len(self._members) < 2:
            self._owners = UNDIVIDED
            return
        quotas = _quotas(len(self._members))
        counts = np.bincount(self._owners, minlength=max(self._members) + 1).tolist()
        at = 0
        for other, quota in zip(self._members, quotas, strict=True):
            count = max(0, quota - counts[other])
            self._owners[free[at : at + count]] = other
            at += count


def _quotas(members: int) -> list[int]:
    """How many slots each consumer has."""
    share, remainder = divmod(SLOTS, members)
    return [share + (index < remainder) for index in range(members)]


class WaitingBySlot:
    """The waiting rows of each slot. The set `waiting` decides which rows wait: a row that is no
    longer in `waiting` is removed here later, when a search meets it. A slot's rows that come in
    rising order, as new rows do, are in a list of 4 bytes each. Other rows are in a bitmap: rows
    that come back, long runs, and rows of a slot that has many."""

    def __init__(self, waiting: BitMap64) -> None:
        self._waiting = waiting
        self._lists: list[array[int] | None] = []
        """By slot its rows, each as its distance from `_base`."""
        self._slots = BitMap()
        """The slots that have a list. Without this set, a join would look at each of SLOTS, which
        takes most of its time."""
        self._bitmaps: dict[int, BitMap64] = {}
        self._base = 0
        self.bytes = 0

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    def __iter__(self) -> Iterator[int]:
        """The slots that may have waiting rows now."""
        return iter(self._slots.to_array())

    def clear(self) -> None:
        self._lists = []
        self._slots.clear()
        self._bitmaps.clear()
        self.bytes = 0

    def add(self, slot: int, lo: int, hi: int) -> None:
        """The rows [lo, hi) of the slot begin to wait."""
        if not self._lists:
            self._lists, self._base, self.bytes = [None] * SLOTS, lo, SLOTS_BYTES
        rows = self._lists[slot]
        if rows is None:
            rows = self._lists[slot] = array("I")
            self._slots.add(slot)
            self.bytes += SLOT_BYTES
        begin, end = lo - self._base, hi - self._base
        follows = begin > rows[-1] if rows else begin >= 0
        if not follows or end > LIST_SPAN or hi - lo > RUN_ROWS_MAX:
            bitmap = self._bitmaps.setdefault(slot, BitMap64())
            self.bytes -= bytes_of(bitmap)
            bitmap.add_range(lo, hi)
            self.bytes += bytes_of(bitmap)
            return
        if hi - lo == 1:
            rows.append(begin)
        else:
            rows.extend(range(begin, end))
        self.bytes += ROW_BYTES * (hi - lo)
        if len(rows) >= LIST_ROWS_MAX:
            self._make_bitmap(slot, rows)

    def _make_bitmap(self, slot: int, rows: "array[int]") -> None:
        bitmap = self._bitmaps.setdefault(slot, BitMap64())
        self.bytes -= bytes_of(bitmap) + ROW_BYTES * len(rows)
        bitmap |= self._as_bitmap(rows)
        self.bytes += bytes_of(bitmap)
        del rows[:]

    def _as_bitmap(self, rows: "array[int]") -> BitMap64:
        offsets = np.frombuffer(rows, np.uint32).astype(np.uint64) + np.uint64(self._base)
        return BitMap64(array("Q", offsets.tobytes()))

    def first(self, slot: int) -> int | None:
        """The first waiting row of the slot."""
        rows = self._lists[slot] if slot in self._slots else None
        if rows is None:
            return None
        waiting, base, first = self._waiting, self._base, None
        while rows and first is None:
            row = rows[0] + base
            if row in waiting:
                first = row
            else:
                count = bisect_left(rows, next_in(waiting, row, OFFSETS_END) - base)
                del rows[:count]
                self.bytes -= ROW_BYTES * count
        bitmap = self._bitmaps.get(slot)
        if bitmap is not None:
            bytes_before = bytes_of(bitmap)
            first_of_bitmap = first_waiting(bitmap, waiting)
            self.bytes += bytes_of(bitmap) - bytes_before
            if first_of_bitmap is None:
                del self._bitmaps[slot]
            elif first is None or first_of_bitmap < first:
                first = first_of_bitmap
        if first is None:
            self._lists[slot] = None
            self._slots.remove(slot)
            self.bytes -= SLOT_BYTES
        return first

    def rows(self, slot: int) -> BitMap64:
        """The waiting rows of the slot; some of them may not wait any more."""
        rows, bitmap = self._lists[slot], self._bitmaps.get(slot)
        listed_rows = self._as_bitmap(rows) if rows else BitMap64()
        return listed_rows if bitmap is None else listed_rows | bitmap


def first_waiting(rows: BitMap64, waiting: BitMap64, at: int = 0) -> int | None:
    """The first of the rows from `at` on that waits. Rows before it that do not wait are removed
    from the set `rows`."""
    row = next_in(rows, at, OFFSETS_END)
    while row < OFFSETS_END and row not in waiting:
        rows.remove_range(row, next_in(waiting, row, OFFSETS_END))
        row = next_in(rows, row, OFFSETS_END)
    return row if row < OFFSETS_END else None


class HasRanges(Protocol):
    ranges: Sequence[SlotRange]


R = TypeVar("R", bound=HasRanges)


class StickyRanges(Generic[R]):
    """Each consumer has the ranges that its client gave, `ranges`. The caller calls `check_ranges`
    before a consumer joins."""

    def __init__(self) -> None:
        self._members: list[R | None] = [None]
        self._owners: Numbers = np.zeros(SLOTS, dtype=np.uint16)

    def join(self, member: R) -> None:
        self._members.append(member)
        self._assign()

    def leave(self, member: R) -> None:
        self._members.remove(member)
        self._assign()

    def _assign(self) -> None:
        self._owners[:] = 0
        for number, member in enumerate(self._members):
            for lo, hi in () if member is None else member.ranges:
                self._owners[lo : hi + 1] = number

    def owner_of(self, slot: int) -> R | None:
        return self._members[int(self._owners[slot])]

    def owners_of(self, slots: Sequence[int]) -> Sequence[R | None]:
        return list(map(self._members.__getitem__, self._owners[slots].tolist()))


def check_ranges(ranges: Sequence[SlotRange], others: Iterable[SlotRange] = ()) -> None:
    """Raises Refusal unless there is at least one range, the ranges are ranges of slots, and they
    overlap neither each other nor `others`."""
    if not ranges:
        raise Refusal(ServerError.CONSUMER_ASSIGN, "no range of keys' hashes is given")
    before = -1
    for lo, hi in sorted(ranges):
        if not 0 <= lo <= hi < SLOTS or lo <= before:
            raise Refusal(
                ServerError.CONSUMER_ASSIGN,
                f"the range {lo} to {hi} of keys' hashes is malformed or overlaps another: ranges"
                f" are within 0 to {SLOTS - 1}, begin before they end, and do not overlap",
            )
        before = hi
    taken = sorted(others)
    for start, end in ranges:
        at = bisect_left(taken, (end + 1, 0)) - 1
        if at >= 0 and taken[at][1] >= start:
            lo, hi = taken[at]
            raise Refusal(
                ServerError.CONSUMER_ASSIGN,
                f"the range {start} to {end} of keys' hashes overlaps {lo} to {hi}, which a"
                " connected consumer has",
            )


def within(
    batch_offset: int, slots: Sequence[int], missing: list[Range], ranges: Sequence[SlotRange]
) -> list[Range]:
    """The rows of `missing` whose slots are in the ranges; `slots` are the slots of the batch at
    `batch_offset`."""
    if len(slots) == 1:
        return missing if any(lo <= slots[0] <= hi for lo, hi in ranges) else []
    return [
        part
        for start, end in missing
        for part in joined(
            row
            for row in range(start, end)
            if any(lo <= slots[row - batch_offset] <= hi for lo, hi in ranges)
        )
    ]


def joined(rows: Iterable[int]) -> list[Range]:
    """Rising rows as ranges."""
    ranges: list[Range] = []
    for row in rows:
        if ranges and ranges[-1][1] == row:
            ranges[-1] = (ranges[-1][0], row + 1)
        else:
            ranges.append((row, row + 1))
    return ranges
