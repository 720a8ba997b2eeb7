"""Sets of acknowledged offsets as roaring bitmaps: their runs, the memory that they take, and the
memory that all subscriptions of a broker may take. Pure.

Always true: a function here visits only the containers (of 65,536 offsets) of the requested range,
and changes no set.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from pyroaring import BitMap64

ACK_BYTES_MAX = 16 << 20
"""The most bytes of one subscription at a broker, if no setting has another number."""
FREE_BYTES = 16 << 10
MEASURED_AFTER_CALLS = 500
"""How many calls may change sets before their bytes are counted anew."""
OTHERS_AT_ONCE = 50
"""How many sets of other subscriptions are counted anew in one step of the loop."""
CONTAINER_BYTES = 96
"""How many bytes a container takes beside its values."""
Range = tuple[int, int]
"""Offsets: the first one, and one past the last one."""


class AckChanges(NamedTuple):
    """The changes of an acknowledged set since the last call. `was_reset`: earlier rows are gone.
    `added`: the rows that were added after this, beyond the mark."""

    was_reset: bool
    added: BitMap64


class AckBudget:
    """How many bytes the sets of a subscription take at a broker; `whole` counts the sets of all
    its subscriptions. If they take too many bytes, the subscription sends only messages that fill
    gaps below the end of its sets. No acknowledgement is refused or forgotten."""

    def __init__(self, bytes_max: int, whole: "AckBudget | None" = None) -> None:
        self.bytes = 0
        self.sets: dict[Measured, None] = {}
        """In the order in which `measure_others` measures them."""
        self._bytes_max = bytes_max
        self._whole = whole

    def enter(self, sets: "Measured") -> None:
        self.sets[sets] = None
        if self._whole is not None:
            self._whole.enter(sets)

    def leave(self, sets: "Measured") -> None:
        self.sets.pop(sets, None)
        if self._whole is not None:
            self._whole.leave(sets)

    def measure(self) -> None:
        """Count the bytes anew. If they are still too many, count some bytes of other subscriptions
        too, in turns: a subscription that frees memory and then rests does not count it itself."""
        for sets in self.sets:
            sets.measure()
        if self._whole is not None and self.is_over:
            self._whole.measure_others()

    def measure_others(self) -> None:
        for sets in list(islice(self.sets, OTHERS_AT_ONCE)):
            del self.sets[sets]
            self.sets[sets] = None
            sets.measure()

    def add(self, bytes_more: int) -> None:
        self.bytes += bytes_more
        if self._whole is not None:
            self._whole.add(bytes_more)

    @property
    def is_over(self) -> bool:
        """Whether the sets take too many bytes. A subscription whose sets take FREE_BYTES at most
        is not over, whatever others take."""
        if self._whole is not None and self._whole.is_over and self.bytes > FREE_BYTES:
            return True
        return self.bytes > self._bytes_max


class Measured:
    """The memory of some sets, as it counts in the budget. `measure` returns the bytes that the
    sets take; it is called once in MEASURED_AFTER_CALLS changes, and never after `drop`."""

    def __init__(self, budget: AckBudget, measure: Callable[[], int]) -> None:
        self.bytes = 0
        self.budget = budget
        self._measure = measure
        self._changes = 0
        budget.enter(self)

    def changed(self) -> None:
        self._changes += 1
        if self._changes >= MEASURED_AFTER_CALLS:
            self.measure()

    def measure(self) -> None:
        if self in self.budget.sets:
            before, self.bytes, self._changes = self.bytes, self._measure(), 0
            self.budget.add(self.bytes - before)

    def drop(self) -> None:
        """Give the memory back to the budget: the sets are not used any more."""
        self.budget.add(-self.bytes)
        self.bytes = 0
        self.budget.leave(self)


def within(offsets: BitMap64, start: int, end: int) -> BitMap64:
    """The offsets in [start, end)."""
    part = BitMap64()
    part.add_range(start, end)
    part &= offsets
    return part


def run_end(offsets: BitMap64, at: int) -> int:
    """The first offset from `at` on that is not in the set."""
    if at not in offsets:
        return at
    step = 1
    while offsets.contains_range(at, at + 2 * step):
        step *= 2
    low, high = at + step, at + 2 * step  # [at, low) is in the set, [at, high) is not
    while high - low > 1:
        middle = (low + high) // 2
        if offsets.contains_range(low, middle):
            low = middle
        else:
            high = middle
    return low


def after_missing(offsets: BitMap64, at: int, count: int, end: int) -> int:
    """The offset below which `count` offsets from `at` on are not in the set. `end` if fewer
    offsets below `end` are missing; at least `at`."""
    low, high = at, max(at, end)
    while low < high:
        middle = (low + high) // 2
        if middle - at - offsets.range_cardinality(at, middle) < count:
            low = middle + 1
        else:
            high = middle
    return low


def next_in(offsets: BitMap64, at: int, otherwise: int) -> int:
    """The first offset from `at` on that is in the set; `otherwise` if no offset follows."""
    if not offsets or offsets.max() < at:
        return otherwise
    return int(offsets.next_set_bit(at))


def next_row(rows: BitMap64, at: int) -> int | None:
    """The first row from `at` on."""
    if not rows or rows.max() < at:
        return None
    first: int = rows.next_set_bit(at)
    return first


def ranges_of(offsets: BitMap64) -> list[tuple[int, int]]:
    """The runs of a small set, in rising order, with gaps between them."""
    starts, ends = bounds_of(offsets)
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def first_ranges(offsets: BitMap64, most: int) -> list[tuple[int, int]]:
    """As ranges_of, at most `most` runs of a set of any size."""
    ranges: list[tuple[int, int]] = []
    start = next_row(offsets, 0)
    while start is not None and len(ranges) < most:
        ranges.append((start, end := run_end(offsets, start)))
        start = next_row(offsets, end)
    return ranges


def bounds_of(offsets: BitMap64) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """As ranges_of: the first offsets of the runs, and the offsets after them."""
    values: np.ndarray[Any, Any] = np.frombuffer(offsets.to_array(), dtype=np.int64)
    is_first = np.diff(values, prepend=-2) > 1
    lasts = np.flatnonzero(np.append(is_first[1:], True)) if len(values) else is_first
    return values[is_first], values[lasts] + 1


def rows_in(rows: BitMap64, lo: int, hi: int) -> list[Range]:
    """The runs of the rows in [lo, hi)."""
    count = rows.range_cardinality(lo, hi)
    if not count:
        return []
    return [(lo, hi)] if count == hi - lo else ranges_of(within(rows, lo, hi))


def common(ranges: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """The intersection of two lists of rising ranges."""
    both, at = [], 0
    for lo, hi in ranges:
        while at < len(others) and others[at][1] <= lo:
            at += 1
        for other_lo, other_hi in others[at:]:
            if other_lo >= hi:
                break
            both.append((max(lo, other_lo), min(hi, other_hi)))
    return both


def bytes_of(offsets: BitMap64) -> int:
    """About how many bytes the set takes in memory."""
    if not offsets:
        return 0
    counts = offsets.get_statistics()
    values = counts["n_bytes_array_containers"] + counts["n_bytes_bitset_containers"]
    values += counts["n_bytes_run_containers"]
    return values + CONTAINER_BYTES * counts["n_containers"]


class Counts:
    """How often each offset was counted: a bitmap for each binary digit of the counts."""

    def __init__(self) -> None:
        self._digits: list[BitMap64] = []

    def __bool__(self) -> bool:
        return bool(self._digits)

    def __len__(self) -> int:
        """How many offsets were counted."""
        return len(BitMap64.union(*self._digits)) if self._digits else 0

    def __getitem__(self, offset: int) -> int:
        if not self._digits:
            return 0
        return sum(1 << place for place, digit in enumerate(self._digits) if offset in digit)

    def add(self, offset: int) -> None:
        for digit in self._digits:
            if offset not in digit:
                digit.add(offset)
                return
            digit.remove(offset)
        self._digits.append(BitMap64([offset]))

    def forget(self, start: int, end: int) -> None:
        """Forget the counts of the offsets in [start, end)."""
        for digit in self._digits:
            digit.remove_range(start, end)
        while self._digits and not self._digits[-1]:
            self._digits.pop()

    @property
    def bytes(self) -> int:
        return sum(map(bytes_of, self._digits))
