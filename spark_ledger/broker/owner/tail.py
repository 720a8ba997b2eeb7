"""The newest batches of the partitions, kept in memory for those who read at the end. Pure.

Always true: all that is kept comes to BYTES_MAX at most (one batch is always kept); what goes first
is what came first, of whichever partition; a batch that is not here is read from its ledger.
"""

from collections import deque
from dataclasses import dataclass

BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """A batch of a partition as its consumers get it: its first message has offset `offset`;
    `batched`: it has metadata of each message."""

    offset: int
    messages: int
    data: bytes
    batched: bool

    @property
    def end(self) -> int:
        return self.offset + self.messages


class TailBudget:
    """Of one broker."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._apart: TailBudget | None = None
        self._bytes = 0
        self._order: deque[tuple[Tail, int, int]] = deque()

    @property
    def apart(self) -> "TailBudget":
        """A quarter more, for what is read from ledgers: that is not to push out the newest."""
        if self._apart is None:
            self._apart = TailBudget(self._bytes_max // 4)
        return self._apart

    def took(self, tail: "Tail", batch: Stored) -> None:
        self._order.append((tail, batch.offset, len(batch.data)))
        self._bytes += len(batch.data)
        while self._bytes > self._bytes_max and len(self._order) > 1:
            oldest, offset, size = self._order.popleft()
            self._bytes -= size
            oldest.forget(offset)


class Tail:
    """Of one partition."""

    def __init__(self, budget: TailBudget) -> None:
        self._budget = budget
        self._by_offset: dict[int, Stored] = {}

    def apart(self) -> "Tail":
        """For batches of the partition that were read from ledgers, and are asked for next."""
        return Tail(self._budget.apart)

    def add(self, batch: Stored) -> None:
        self._by_offset[batch.offset] = batch
        self._budget.took(self, batch)

    def forget(self, offset: int) -> None:
        self._by_offset.pop(offset, None)

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
