"""Entries that stream, and a ranged read that says why it stopped.

    scan = reader.scan(0)
    async for entry_id, entry in scan:
        ...
    scan.stop        # Stopped.LAST_CONFIRMED: the ledger is open, this is all that is confirmed
    scan.next_entry  # where to go on

Always true: `stop` is set exactly when the entries came to an end without an error; of an open
ledger it is never END_OF_LEDGER, however little was confirmed. A call for the next entry that
failed, or was given up (a time-out around it), is no end: the next call goes on where it was.
"""

from collections.abc import AsyncGenerator, Callable
from enum import Enum
from typing import Self

from bookie_server.api.entry import Entry

Entries = AsyncGenerator[tuple[int, Entry], None]


class Stopped(Enum):
    """Why a ranged read returned no further entries."""

    END_OF_RANGE = "end of range"  # all that was asked for was returned
    BYTE_LIMIT = "byte limit"  # the next entry would have exceeded max_bytes
    LAST_CONFIRMED = "last confirmed"  # the ledger is open; more may come
    END_OF_LEDGER = "end of ledger"  # the ledger is closed; nothing more will ever come


class EntryStream:
    """(entry id, checked entry) in order; made by LedgerReader.read and tail, iterated once."""

    def __init__(self, first: int, begin: Callable[[int], Entries]) -> None:
        """`begin` gives the entries from one on: called at first, and after a call that failed."""
        self.next_entry = first
        """The first entry that was not returned."""
        self._begin = begin
        self._entries: Entries | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Entry]:
        """The next entry. Raises what the method says that made the stream."""
        if self._entries is None:
            self._entries = self._begin(self.next_entry)
        try:
            found = await anext(self._entries)
        except StopAsyncIteration:
            raise
        except BaseException:
            self._entries = None  # it is over, which would look like the end of the ledger
            raise
        self.next_entry = found[0] + 1
        return found

    async def aclose(self) -> None:
        """Give up what is under way, without reading to the end; nothing comes after it."""
        if self._entries is None:
            self._entries = self._begin(self.next_entry)
        await self._entries.aclose()


class RangeRead(EntryStream):
    """An EntryStream made by LedgerReader.scan; what is given to `begin` sets `stop` at its end."""

    def __init__(self, first: int, begin: Callable[["RangeRead"], Entries]) -> None:
        super().__init__(first, lambda _: begin(self))
        self.stop: Stopped | None = None
        self.payload_bytes = 0
        """Of the entries that were returned."""

    async def __anext__(self) -> tuple[int, Entry]:
        found = await super().__anext__()
        self.payload_bytes += len(found[1].payload)
        return found
