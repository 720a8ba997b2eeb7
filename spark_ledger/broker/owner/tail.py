"""The newest batches of the partitions, kept in memory for those who read at the end. Pure.

Always true: all that is kept comes to BYTES_MAX at most (what came last is always kept); what goes
first is what came first, of whichever partition; a batch that is not here is read from its ledger.
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import attrgetter
from typing import NamedTuple

from bookie_server.api.entry import Buffer
from spark_ledger.topic.entry.pulsar_batch import is_earlier_chunk

BYTES_MAX = 64 << 20


class Stored(NamedTuple):
    """A batch of a partition as its consumers get it: its first message has offset `offset`;
    `batched`: it has metadata of each message."""

    offset: int
    messages: int
    data: Buffer
    batched: bool

    @property
    def has_rows(self) -> bool:
        """Whether it is no chunk that the last one of its message counts for."""
        return self.messages > 1 or not is_earlier_chunk(self.data)

    @property
    def end(self) -> int:
        return self.offset + self.messages


def stored(
    offset: int, counts: Sequence[int], batches: Sequence[bytes], batched: bool
) -> list[Stored]:
    """Batches that follow each other from the offset on, of so many messages each."""
    fields = zip(accumulate(counts, initial=offset), counts, batches, repeat(batched), strict=False)
    return list(map(tuple.__new__, repeat(Stored), fields))


_offset = attrgetter("offset")


class TailBudget:
    """Of one broker."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._apart: TailBudget | None = None
        self._bytes = 0
        self._order: deque[tuple[Tail, Sequence[Stored], int]] = deque()

    @property
    def apart(self) -> "TailBudget":
        """A quarter more, for what is read from ledgers: that is not to push out the newest."""
        if self._apart is None:
            self._apart = TailBudget(self._bytes_max // 4)
        return self._apart

    def took(self, tail: "Tail", batches: Sequence[Stored]) -> None:
        if not batches:
            return
        size = sum(len(one.data) for one in batches)
        self._order.append((tail, batches, size))
        self._bytes += size
        while self._bytes > self._bytes_max and len(self._order) > 1:
            oldest, first, size = self._order.popleft()
            self._bytes -= size
            oldest.forget(first)


class Tail:
    """Of one partition."""

    def __init__(self, budget: TailBudget) -> None:
        self._budget = budget
        self._by_offset: dict[int, Stored] = {}

    def apart(self) -> "Tail":
        """For batches of the partition that were read from ledgers, and are asked for next."""
        return Tail(self._budget.apart)

    def add(self, batches: Sequence[Stored]) -> None:
        """Batches that came together, and go together."""
        self._by_offset.update(zip(map(_offset, batches), batches, strict=True))
        self._budget.took(self, batches)

    def forget(self, batches: Sequence[Stored]) -> None:
        for one in batches:
            self._by_offset.pop(one.offset, None)

    def since(self, offset: int, bytes_max: int) -> list[Stored]:
        """The batches that follow each other from the one that begins at `offset`, of so many bytes
        about; none where that one is not here."""
        found: list[Stored] = []
        size = 0
        while size < bytes_max and (batch := self._by_offset.get(offset)) is not None:
            found.append(batch)
            size += len(batch.data)
            offset = batch.end
        return found
