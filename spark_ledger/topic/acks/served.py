"""The subscriptions whose acknowledgements the owner of a partition writes, as PartitionAcks sees
them, and the receipts that it gives."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pyroaring import BitMap64

from spark_ledger import errors
from spark_ledger.topic.acks.entries import AckKey, AckState
from spark_ledger.topic.acks.sets import AckBudget, AckChanges, Measured, bytes_of

Receipt = Callable[[errors.LedgerError | None], None]
"""Called with None once the acknowledgement is durable; with an error if it cannot become durable.
"""


class AckedSet(Protocol):
    """The acknowledgements of a subscription that consumers use, in memory."""

    durable: int
    rows: BitMap64

    def take_changes(self) -> AckChanges: ...


class Served(Protocol):
    """The subscription at this broker (ConsumerCursor)."""

    failure: errors.LedgerError | None

    def fail(self, error: errors.LedgerError) -> None:
        """Called when nothing more is written for the subscription."""

    async def verify(self) -> None:
        """Reads the subscription's record, and fails the subscription if the record names another
        owner. Raises StoreError."""

    def was_durable(self, partition: int, epoch: int, position: int) -> None:
        """Called when the position in the partition is durable, in this epoch of the owner."""


@dataclass(slots=True)
class User:
    """A subscription that consumers use here. `is_known`: the open ledger has its state, so it is
    enough to write its changes. `position`: its position in the write under way, or in the last
    write."""

    served: Served
    acks: AckedSet
    is_known: bool = False
    is_dirty: bool = False
    position: int | None = None


class IdleStates(dict[AckKey, AckState]):
    """What the subscriptions that no consumer uses acknowledged. Their sets count in the broker's
    budget, as those of subscriptions in use do."""

    def __init__(self, budget: AckBudget) -> None:
        super().__init__()
        self._budget = budget
        self._sizes: dict[AckKey, int] = {}
        self._bytes = 0
        self._memory: Measured | None = None
        self._is_dropped = False

    def __setitem__(self, key: AckKey, state: AckState) -> None:
        self._count(key, bytes_of(state.rows))
        super().__setitem__(key, state)

    def pop(self, key: AckKey, default: Any = None) -> Any:
        self._count(key, 0)
        return super().pop(key, default)

    def _count(self, key: AckKey, size: int) -> None:
        before = self._sizes.pop(key, 0)
        if size:
            self._sizes[key] = size
        if size != before and not self._is_dropped:
            self._bytes += size - before
            self._memory = self._memory or Measured(self._budget, lambda: self._bytes)
            self._memory.measure()

    def drop(self) -> None:
        """Give the memory back: another owner has the partition, or none. What is released later
        counts no more."""
        self._is_dropped = True
        if self._memory is not None:
            self._memory.drop()


async def wait_for_receipt(ask: Callable[[Receipt], None]) -> None:
    """Calls `ask` with a receipt, and waits until the receipt is called. Raises its error."""
    future = asyncio.Future[errors.LedgerError | None]()

    def receipt(error: errors.LedgerError | None) -> None:
        if not future.done():
            future.set_result(error)

    ask(receipt)
    if (error := await future) is not None:
        raise error
