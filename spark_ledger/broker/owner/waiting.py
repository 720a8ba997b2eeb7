"""What waits to be stored in a partition, and who hears that it is."""

from typing import Protocol

from spark_ledger import errors


class Waiting(Protocol):
    """A producer's batch until it is stored."""

    data: bytes
    messages: int
    producer_name: str
    last_sequence_id: int

    def duplicate(self) -> None:
        """It was stored before."""

    def stored(self, offset: int) -> None:
        """It is, and its first message has that offset."""

    def failed(self, error: errors.LedgerError) -> None:
        """It is not known to be stored, and is not tried again here."""


class StoredListener(Protocol):
    def __call__(self, partition: int, offset: int, batch: Waiting) -> None: ...
