"""A ranged read that streams, and says why it stopped.

    scan = reader.scan(0)
    async for entry_id, entry in scan:
        ...
    scan.stop        # Stopped.LAST_CONFIRMED: the ledger is open, this is all that is confirmed
    scan.next_entry  # where to go on

Always true: `stop` is set exactly when the entries came to an end without an error; of an open
ledger it is never END_OF_LEDGER, however little was confirmed.
"""

from collections.abc import AsyncGenerator
from enum import Enum

from bookie_server.api.entry import Entry

Entries = AsyncGenerator[tuple[int, Entry], None]


class Stopped(Enum):
    """Why a ranged read returned no further entries."""

    END_OF_RANGE = "end of range"  # all that was asked for was returned
    BYTE_LIMIT = "byte limit"  # the next entry would have exceeded max_bytes
    LAST_CONFIRMED = "last confirmed"  # the ledger is open; more may come
    END_OF_LEDGER = "end of ledger"  # the ledger is closed; nothing more will ever come


class RangeRead:
    """(entry id, checked entry) in order; made by LedgerReader.scan, iterated once."""

    def __init__(self, first: int) -> None:
        self.stop: Stopped | None = None
        self.next_entry = first
        """The first entry that was not returned."""
        self._entries: Entries | None = None

    def begin(self, entries: Entries) -> "RangeRead":
        """`entries` sets `stop` at its end."""
        self._entries = entries
        return self

    def __aiter__(self) -> "RangeRead":
        return self

    async def __anext__(self) -> tuple[int, Entry]:
        """The next entry. Raises what LedgerReader.scan says."""
        assert self._entries is not None
        found = await anext(self._entries)
        self.next_entry = found[0] + 1
        return found

    async def aclose(self) -> None:
        """Give up what is under way, without reading to the end."""
        if self._entries is not None:
            await self._entries.aclose()
