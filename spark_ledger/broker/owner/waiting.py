"""What waits to be stored in a partition, and who hears that it is."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from spark_ledger import errors
from spark_ledger.topic.entry.message_batch import Rowless


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


@dataclass(slots=True)
class Entry:
    """Runs that are under way in one. `rowless`: the offsets without a row of its segment, with
    its own."""

    runs: list[Waiting]
    rows: int
    rowless: Rowless
    acked: "asyncio.Future[int]"

    def drop(self) -> None:
        """Its outcome is not used."""
        self.acked.add_done_callback(lambda acked: acked.cancelled() or acked.exception())


def taken(queue: deque[Waiting], bytes_max: int, rows_max: int) -> tuple[list[Waiting], int, int]:
    """What goes into one entry, from the head of the queue, with its bytes and messages: more than
    one run up to so many of both, or a chunk by itself."""
    runs = [queue.popleft()]
    size, rows = runs[0].size, runs[0].messages
    while (
        queue
        and runs[-1].chunk is None
        and queue[0].chunk is None
        and size + queue[0].size <= bytes_max
        and rows + queue[0].messages <= rows_max
    ):
        runs.append(queue.popleft())
        size += runs[-1].size
        rows += runs[-1].messages
    return runs, size, rows
