"""Which consumer of a Key_Shared subscription has which slots. Pure.

Always true: a slot has one owner at most. If slots are shared out evenly (EvenSlots), every slot
has an owner as long as there is a consumer, the numbers of two consumers' slots differ by one at
most, and a join or a leave moves as few slots as possible. With ranges that clients give
(StickyRanges) no two consumers' ranges overlap, and a slot in no range has no owner.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from spark_ledger.broker.dispatch.key_slots import SLOTS
from spark_ledger.broker.wire.commands import Refusal, ServerError

M = TypeVar("M", bound=Hashable)
SlotRange = tuple[int, int]
"""The first and the last slot."""
Range = tuple[int, int]
"""A range of offsets: the first one, and one past the last one."""
Numbers = npt.NDArray[np.uint16]
UNDIVIDED: Numbers = np.zeros(0, dtype=np.uint16)


class SlotOwners(Protocol[M]):
    def join(self, member: M) -> None: ...

    def leave(self, member: M) -> None: ...

    def owner_of(self, slot: int) -> M | None: ...


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
        taken = [
            np.flatnonzero(self._owners == other)[quota:]
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
        at = 0
        for other, quota in zip(self._members, quotas, strict=True):
            more = max(0, quota - int(np.count_nonzero(self._owners == other)))
            self._owners[free[at : at + more]] = other
            at += more


def _quotas(members: int) -> list[int]:
    """How many slots each consumer has."""
    share, more = divmod(SLOTS, members)
    return [share + (i < more) for i in range(members)]


class HasRanges(Protocol):
    ranges: Sequence[SlotRange]


R = TypeVar("R", bound=HasRanges)


class StickyRanges(Generic[R]):
    """Each consumer has the ranges that its client gave, `ranges`; `check_ranges` was called before
    it joined."""

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
    for lo, hi in others:
        for start, end in ranges:
            if start <= hi and lo <= end:
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
