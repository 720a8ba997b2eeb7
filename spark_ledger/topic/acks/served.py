"""The subscriptions whose acknowledgements the owner of a partition writes, as PartitionAcks sees
them, and the receipts that it gives."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pyroaring import BitMap64

from spark_ledger import errors
from spark_ledger.topic.acks.sets import AckChanges

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


async def wait_for_receipt(ask: Callable[[Receipt], None]) -> None:
    """Calls `ask` with a receipt, and waits until the receipt is called. Raises its error."""
    future = asyncio.Future[errors.LedgerError | None]()

    def receipt(error: errors.LedgerError | None) -> None:
        if not future.done():
            future.set_result(error)

    ask(receipt)
    if (error := await future) is not None:
        raise error
