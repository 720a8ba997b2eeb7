"""What waits to be stored in a partition, and who hears that it is."""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from spark_ledger import errors


class Chunk(Enum):
    EARLIER = "not the last"
    LAST = "the last, at whose offset the message has its row"


class Waiting(Protocol):
    """A run: batches of a producer that follow each other, until they are stored, all in one entry.
    Their last sequence ids rise, where these are looked at."""

    batches: list[bytes]
    counts: list[int]
    """Messages of each."""
    size: int
    messages: int
    """Of all."""
    batched: bool
    """Whether each has metadata of each message."""
    producer_name: str
    chunk: Chunk | None
    """What it is of a message that comes in chunks: then it is one chunk."""

    @property
    def first_sequence_id(self) -> int:
        """The last one of the first batch."""

    @property
    def last_sequence_id(self) -> int:
        """Of the last batch."""

    def each(self) -> Sequence["Waiting"]:
        """Its batches, each as a run by itself."""

    def sent(self, offset: int) -> None:
        """It goes into an entry, and the first message gets that offset if that is stored."""

    def duplicate(self) -> None:
        """They were stored before."""

    def stored(self, offset: int) -> None:
        """They are, and the first message has that offset."""

    def failed(self, error: errors.LedgerError) -> None:
        """They are not known to be stored, and are not tried again here."""


class StoredListener(Protocol):
    def __call__(self, partition: int, offset: int, run: Waiting) -> None: ...
