"""Offsets that have no row: those of a chunked message's earlier chunks. Pure.

Always true: what is said of them is a count, exact up to where it lies: `number` of the places
[lo, hi), of which the first and the last are among them. So what is beyond `hi` or before `lo` is
counted exactly, and within they are taken to be spread evenly. A message whose chunks follow each
other, as one producer sends them, is exact everywhere.
"""

from collections.abc import Iterable
from typing import NamedTuple

KEPT_MAX = 256
"""Of a partition; neighbours are put together beyond that, the oldest first."""


class Rowless(NamedTuple):
    """`number` of the places [lo, hi): rows of a segment, or offsets."""

    lo: int = 0
    hi: int = 0
    number: int = 0

    def with_one(self, place: int) -> "Rowless":
        """One more, after all others."""
        return Rowless(self.lo if self.number else place, place + 1, self.number + 1)

    def moved(self, by: int) -> "Rowless":
        return Rowless(self.lo + by, self.hi + by, self.number) if self.number else NONE

    def within(self, lo: int, hi: int) -> int:
        """How many, about, are in [lo, hi); in ranges that follow each other as many as in all."""
        return self._below(hi) - self._below(lo) if lo < hi else 0

    def _below(self, place: int) -> int:
        inside = min(place, self.hi) - self.lo
        return self.number * inside // (self.hi - self.lo) if inside > 0 else 0


NONE = Rowless()


def count_within(each: Iterable[Rowless], lo: int, hi: int) -> int:
    return sum(one.within(lo, hi) for one in each)


def with_more(kept: tuple[Rowless, ...], more: Rowless, start: int) -> tuple[Rowless, ...]:
    """These and one after them, without those that are before `start`."""
    found = [one for one in (*kept, more) if one.number and one.hi > start]
    while len(found) > KEPT_MAX:
        first, second = found[:2]
        found[:2] = [Rowless(first.lo, second.hi, first.number + second.number)]
    return tuple(found)
