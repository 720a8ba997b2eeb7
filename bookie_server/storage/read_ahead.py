"""Which ledgers are read in sequence, and from where on more is to be fetched for the reader.

Always true: a reader is sequential when a read begins where an earlier one ended; more is brought
once the reader has come half-way through what was brought before, for `LEDGERS_MAX` ledgers at a
time, and for one reader of a ledger at a time. It decides only; entry_reader.py reads.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

LEDGERS_MAX = 2
READERS_MAX = 1024  # remembered: about 300 bytes each


@dataclass(slots=True)
class _Reader:
    """`ahead`: the first entry that was not read ahead; at entry `again` more is."""

    ahead: int = 0
    again: int = 0


class Ahead:
    """What is under way for one ledger. A reader that arrives at `run` waits for `arrived`; what
    readers asked for themselves meanwhile, the entries before `passed`, is left to them."""

    def __init__(self, reader: _Reader, first_entry: int) -> None:
        self.reader = reader
        self.passed = first_entry
        self.run = range(0)
        self._arrived: asyncio.Future[None] | None = None

    def begin(self, run: range) -> None:
        """These entries are being read now; what was before has arrived."""
        self.end()
        self.run = run
        self._arrived = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        """They are in the read cache, or will not be."""
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
        self.run = range(0)

    async def arrives(self, entry_id: int) -> None:
        """Wait for the run under way, if the entry is in it."""
        if entry_id in self.run and self._arrived is not None:
            await asyncio.shield(self._arrived)


class ReadAhead:
    """Sequential readers by where they go on, and what is under way for them."""

    def __init__(self) -> None:
        self._readers: OrderedDict[tuple[int, int], _Reader] = OrderedDict()
        self._under_way: dict[int, Ahead] = {}

    def under_way(self, ledger_id: int) -> Ahead | None:
        return self._under_way.get(ledger_id)

    def was_read(self, ledger_id: int, first_entry: int, through: int) -> Ahead | None:
        """Entries first_entry..through were read; what to bring beforehand now, if anything.

        The caller fetches it, from `passed` on, and calls `brought` when it is done.
        """
        reader = self._readers.pop((ledger_id, first_entry), None)
        sequential = reader is not None
        reader = self._readers[ledger_id, through + 1] = reader or _Reader()
        if len(self._readers) > READERS_MAX:
            self._readers.popitem(last=False)
        if not sequential or through + 1 < reader.again:
            return None
        if ledger_id in self._under_way or len(self._under_way) >= LEDGERS_MAX:
            return None
        ahead = Ahead(reader, max(through + 1, reader.ahead))
        self._under_way[ledger_id] = ahead
        return ahead

    def brought(self, ledger_id: int, first_entry: int, through: int) -> None:
        """What was under way has ended; first_entry..through were looked at."""
        ahead = self._under_way.pop(ledger_id)
        ahead.end()
        ahead.reader.ahead = through + 1
        ahead.reader.again = (first_entry + through + 1) // 2
