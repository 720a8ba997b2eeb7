"""The read cache (`ReadCache`), which keeps entries read from the entry logs for the next reader;
and the decisions of read-ahead (`ReadAhead`): which ledgers are read in sequence, and which entries
to fetch ahead of the reader.

Always true of the cache:
- it counts the memory that is really held. A block is one buffer from the disk and the entries that
  are views into it (or copies, if the buffer was mostly filler). The whole buffer and Python's
  overhead of each entry count until the block is removed; `bytes` never exceeds the budget;
- the cache never gives an entry that was dropped (overwritten, or its ledger deleted), and a read
  that began before the drop cannot put the entry in: the read's `Ticket` notes the drop;
- one long scan cannot evict everything: a block is on probation until its second use, then
  protected (at most 4/5 of the budget), and blocks on probation are evicted before protected ones.

A block that was read ahead has no use yet: its first reader is its first use.

Always true of read-ahead: a reader is sequential when its read begins where an earlier read ended.
The next entries are fetched when the reader is half-way through the entries fetched before; at most
LEDGERS_MAX ledgers are read ahead at a time, each for one reader. ReadAhead only decides;
entry_reader.py reads.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bookie_server.api.entry import Buffer
from bookie_server.api.messages import EntryIds

ENTRY_OVERHEAD_BYTES = 320  # a memoryview, its integers, a slot in two dictionaries
BLOCK_OVERHEAD_BYTES = 512
_PROTECTED_SHARE = 0.8
_BLOCK_SHARE_MAX = 8  # a block larger than 1/8 of the budget is not kept


@dataclass(slots=True, eq=False)
class Ticket:
    """A read under way of a ledger's entries, and the entries that were dropped since it began."""

    ledger_id: int
    dropped_ids: set[int] = field(default_factory=set)
    is_all_dropped: bool = False

    def may_keep(self, entry_id: int) -> bool:
        """Whether the cache may keep the entry that was read."""
        return not self.is_all_dropped and entry_id not in self.dropped_ids


@dataclass(slots=True, eq=False)
class _Block:
    ledger_id: int
    bytes: int
    entries: dict[int, Buffer]
    uses: int
    is_protected: bool = False


class ReadCache:
    """Entries by ledger and entry id, within a budget of `bytes_max`; 0: no cache."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._protected_bytes = 0
        self._protected_bytes_max = int(bytes_max * _PROTECTED_SHARE)
        self._probation: OrderedDict[_Block, None] = OrderedDict()  # least recently used first
        self._protected: OrderedDict[_Block, None] = OrderedDict()
        self._ledgers: dict[int, dict[int, _Block]] = {}
        self._tickets: dict[int, dict[Ticket, None]] = {}  # by ledger

    # -- looking up ---------------------------------------------------------------------------

    def get(self, ledger_id: int, entry_id: int) -> Buffer | None:
        """The entry; counts as a use of its block."""
        return self.among(ledger_id, (entry_id,)).get(entry_id)

    def leading(self, ledger_id: int, entry_ids: EntryIds, max_bytes: int) -> dict[int, Buffer]:
        """The first of these entries, up to the first entry that is not cached, or to the entry
        with which the bytes reach `max_bytes`. Counts as one use of each of their blocks."""
        blocks = self._ledgers.get(ledger_id, _NO_BLOCKS)
        entries: dict[int, Buffer] = {}
        used: dict[_Block, None] = {}
        for entry_id in entry_ids if blocks else ():
            if max_bytes <= 0 or (block := blocks.get(entry_id)) is None:
                break
            used[block] = None
            entry = entries[entry_id] = block.entries[entry_id]
            max_bytes -= len(entry)
        for block in used:
            self._count_use(block)
        return entries

    def among(self, ledger_id: int, entry_ids: Iterable[int]) -> dict[int, Buffer]:
        """The entries among these that are cached. Counts as one use of each of their blocks."""
        blocks = self._ledgers.get(ledger_id, _NO_BLOCKS)
        entries: dict[int, Buffer] = {}
        used: dict[_Block, None] = {}
        for entry_id in entry_ids if blocks else ():
            if (block := blocks.get(entry_id)) is not None:
                used[block] = None
                entries[entry_id] = block.entries[entry_id]
        for block in used:
            self._count_use(block)
        return entries

    def has(self, ledger_id: int, entry_id: int) -> bool:
        """Whether `get` would find the entry; does not count as a use."""
        return entry_id in self._ledgers.get(ledger_id, _NO_BLOCKS)

    # -- putting in ---------------------------------------------------------------------------

    def begin(self, ledger_id: int) -> Ticket:
        """Begin a read of the ledger's entries; the caller calls `end` at last."""
        ticket = Ticket(ledger_id)
        self._tickets.setdefault(ledger_id, {})[ticket] = None
        return ticket

    def end(self, ticket: Ticket) -> None:
        """End the read."""
        tickets = self._tickets[ticket.ledger_id]
        del tickets[ticket]
        if not tickets:
            del self._tickets[ticket.ledger_id]

    def takes(self, buffer_bytes: int, entries: int) -> bool:
        """Whether a block of this size is small enough for the cache."""
        return _size(buffer_bytes, entries) * _BLOCK_SHARE_MAX <= self.bytes_max

    def put(
        self, ticket: Ticket, entries: Mapping[int, Buffer], buffer_bytes: int, *, uses: int = 1
    ) -> None:
        """Keep the entries of one read, which are views into one buffer of `buffer_bytes`, except
        entries that are cached already or were dropped since the ticket was made.

        `uses` is 0 for entries read ahead.
        """
        cached = self._ledgers.get(ticket.ledger_id, _NO_BLOCKS)
        kept_entries = {
            e: data for e, data in entries.items() if ticket.may_keep(e) and e not in cached
        }
        size = _size(buffer_bytes, len(kept_entries))
        if not kept_entries or not self.takes(buffer_bytes, len(kept_entries)):
            return
        block = _Block(ticket.ledger_id, size, kept_entries, uses)
        self._ledgers.setdefault(ticket.ledger_id, {}).update(dict.fromkeys(kept_entries, block))
        self._probation[block] = None
        self.bytes += size
        while self.bytes > self.bytes_max:
            self._evict()

    # -- dropping -----------------------------------------------------------------------------

    def drop(self, ledger_id: int, entry_id: int) -> None:
        """Forget an entry that is or will be overwritten; reads under way will not put it in."""
        for ticket in self._tickets.get(ledger_id, ()):
            ticket.dropped_ids.add(entry_id)
        block = self._ledgers.get(ledger_id, _NO_BLOCKS).get(entry_id)
        if block is not None:
            self._forget(block, entry_id)

    def drop_ledger(self, ledger_id: int) -> None:
        """Forget the ledger's entries; reads under way will not put them in."""
        for ticket in self._tickets.get(ledger_id, ()):
            ticket.is_all_dropped = True
        for block in dict.fromkeys(self._ledgers.pop(ledger_id, _NO_BLOCKS).values()):
            self._remove(block)

    def clear(self) -> None:
        """Forget all entries; reads under way will not put their entries in."""
        for ledger_id in [*self._tickets, *self._ledgers]:
            self.drop_ledger(ledger_id)

    # -- order --------------------------------------------------------------------------------

    def _count_use(self, block: _Block) -> None:
        block.uses += 1
        if block.is_protected:
            self._protected.move_to_end(block)
        elif block.uses == 1:
            self._probation.move_to_end(block)
        else:
            self._protect(block)

    def _protect(self, block: _Block) -> None:
        del self._probation[block]
        self._protected[block] = None
        block.is_protected = True
        self._protected_bytes += block.bytes
        while self._protected_bytes > self._protected_bytes_max:
            oldest, _ = self._protected.popitem(last=False)
            oldest.is_protected, oldest.uses = False, 1
            self._protected_bytes -= oldest.bytes
            self._probation[oldest] = None

    def _evict(self) -> None:
        block = next(iter(self._probation or self._protected))
        blocks = self._ledgers[block.ledger_id]
        for entry_id in block.entries:
            del blocks[entry_id]
        if not blocks:
            del self._ledgers[block.ledger_id]
        self._remove(block)

    def _forget(self, block: _Block, entry_id: int) -> None:
        """Forget one entry of the block. The block's bytes still count, as its buffer stays."""
        blocks = self._ledgers[block.ledger_id]
        del blocks[entry_id], block.entries[entry_id]
        if not block.entries:
            self._remove(block)
        if not blocks:
            del self._ledgers[block.ledger_id]

    def _remove(self, block: _Block) -> None:
        self.bytes -= block.bytes
        if block.is_protected:
            del self._protected[block]
            self._protected_bytes -= block.bytes
        else:
            del self._probation[block]


def _size(buffer_bytes: int, entries: int) -> int:
    return buffer_bytes + BLOCK_OVERHEAD_BYTES + entries * ENTRY_OVERHEAD_BYTES


_NO_BLOCKS: dict[int, _Block] = {}


LEDGERS_MAX = 2
READERS_MAX = 1024  # that are remembered, with about 300 bytes each


@dataclass(slots=True)
class _Reader:
    """A sequential reader. `unread`: the first entry that was not read ahead for the reader.
    `next_at`: when the reader reaches this entry, the next entries are read ahead."""

    unread: int = 0
    next_at: int = 0


class Ahead:
    """Read-ahead under way for one ledger. A reader that needs an entry of `run` waits until the
    run is in the cache. Entries before `passed` are not read ahead: readers have requested them."""

    def __init__(self, reader: _Reader, first_entry: int) -> None:
        self.reader = reader
        self.passed = first_entry
        self.run = range(0)
        self._arrived: asyncio.Future[None] | None = None

    def begin(self, run: range) -> None:
        """Begin the next run, and end the earlier run."""
        self.end()
        self.run = run
        self._arrived = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        """End the run: it is in the read cache, or its read has failed."""
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
        self.run = range(0)

    async def arrives(self, entry_id: int) -> None:
        """Wait for the run under way, if the entry is in it."""
        if entry_id in self.run and self._arrived is not None:
            await asyncio.shield(self._arrived)


class ReadAhead:
    """Readers, by the entry at which their next read should begin; and read-ahead under way."""

    def __init__(self) -> None:
        self._readers: OrderedDict[tuple[int, int], _Reader] = OrderedDict()
        self._under_way: dict[int, Ahead] = {}

    def under_way(self, ledger_id: int) -> Ahead | None:
        return self._under_way.get(ledger_id)

    def note_read(self, ledger_id: int, first_entry: int, through: int) -> Ahead | None:
        """Note a read of the entries first_entry..through. Returns the read-ahead to begin now, if
        any.

        The caller fetches entries from `Ahead.passed` on, and then calls `note_end`.
        """
        reader = self._readers.pop((ledger_id, first_entry), None)
        is_sequential = reader is not None
        reader = self._readers[ledger_id, through + 1] = reader or _Reader()
        if len(self._readers) > READERS_MAX:
            self._readers.popitem(last=False)
        if not is_sequential or through + 1 < reader.next_at:
            return None
        if ledger_id in self._under_way or len(self._under_way) >= LEDGERS_MAX:
            return None
        ahead = Ahead(reader, max(through + 1, reader.unread))
        self._under_way[ledger_id] = ahead
        return ahead

    def note_end(self, ledger_id: int, first_entry: int, through: int) -> None:
        """Note the end of the ledger's read-ahead, which looked up first_entry..through."""
        ahead = self._under_way.pop(ledger_id)
        ahead.end()
        ahead.reader.unread = through + 1
        ahead.reader.next_at = (first_entry + through + 1) // 2
