"""The write cache: entries that are not in an entry log yet, in two halves. One half takes entries
while the other half is flushed.

Always true:
- an entry is put here before it goes to a journal or direct log, so every durable entry is in the
  index or in a half that a flush will write;
- a half is emptied only after its entries are in the index;
- entries are views into the frames in which they came; their bytes count with Python's overhead;
- if a direct log has an entry, the half has its location too, until the entry is put again;
- a half is not flushed while direct logs write entries of this half (`direct_writes`).
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bookie_server.api.entry import Buffer
from bookie_server.api.messages import EntryIds
from bookie_server.logs.index import Location

ENTRY_OVERHEAD_BYTES = 384  # a memoryview, two integers, a slot in a dictionary


class DirectLocation(NamedTuple):
    """The id of a ledger directory, and an entry's location in its direct log."""

    directory: str
    location: Location


class CacheHalf:
    """Entries by ledger and entry id."""

    def __init__(self) -> None:
        self.ledgers: dict[int, dict[int, Buffer]] = {}
        self.bytes = 0
        self.locations: dict[int, dict[int, DirectLocation]] = {}
        """By ledger and entry id. Of a replayed entry the half has only the location."""
        self.direct_bytes = 0
        """Bytes of the entries in this half whose location is known."""
        self.lost_locations: dict[int, dict[int, None]] = {}
        """By ledger, ids of entries whose location was in a lost directory. The flush writes these
        entries to another directory."""
        self.direct_writes: dict[asyncio.Future[None], None] = {}
        """Writes to direct logs under way. When a future is done, the locations of its write are in
        `locations`, or the write failed."""

    def put(self, ledger_id: int, entry_id: int, entry: Buffer) -> None:
        if self.locations:
            self._forget_locations(ledger_id, [entry_id])
        self.ledgers.setdefault(ledger_id, {})[entry_id] = entry
        self.bytes += len(entry) + ENTRY_OVERHEAD_BYTES

    def put_all(self, ledger_id: int, entries: dict[int, Buffer]) -> None:
        """`put` each entry; the bytes of an entry that is here already count twice."""
        if self.locations:
            self._forget_locations(ledger_id, entries)
        self.ledgers.setdefault(ledger_id, {}).update(entries)
        self.bytes += sum(map(len, entries.values())) + len(entries) * ENTRY_OVERHEAD_BYTES

    def set_locations(self, ledger_id: int, locations: Sequence[DirectLocation]) -> None:
        """Add locations of entries of the ledger."""
        if not locations:
            return
        self._forget_locations(ledger_id, [direct.location.entry_id for direct in locations])
        ledger_locations = self.locations.setdefault(ledger_id, {})
        entries = self.ledgers.get(ledger_id, _NO_ENTRIES)
        for direct in locations:
            entry_id = direct.location.entry_id
            ledger_locations[entry_id] = direct
            self.direct_bytes += len(entries.get(entry_id, b""))

    def _forget_locations(self, ledger_id: int, entry_ids: Iterable[int]) -> None:
        if not (locations := self.locations.get(ledger_id)):
            return
        entries = self.ledgers.get(ledger_id, _NO_ENTRIES)
        for entry_id in entry_ids:
            if locations.pop(entry_id, None) is not None:
                self.direct_bytes -= len(entries.get(entry_id, b""))

    def replay_all(self, ledger_id: int, locations: Sequence[DirectLocation]) -> None:
        """Add locations of replayed entries; the half gets no copy of the entries."""
        self.set_locations(ledger_id, locations)
        self.ledgers.setdefault(ledger_id, {})
        self.bytes += len(locations) * ENTRY_OVERHEAD_BYTES

    def drop_locations(self, lives: Callable[[str], bool]) -> None:
        """Forget the locations in directories that do not live."""
        for ledger_id in self.locations:
            if lost_ids := self._lost_entry_ids(ledger_id, lives):
                self.lost_locations.setdefault(ledger_id, {}).update(dict.fromkeys(lost_ids))
                self._forget_locations(ledger_id, lost_ids)

    def _lost_entry_ids(self, ledger_id: int, lives: Callable[[str], bool]) -> list[int]:
        locations = self.locations.get(ledger_id, _NO_LOCATIONS)
        return [e for e, direct in locations.items() if not lives(direct.directory)]

    def with_lost_locations(
        self, ledger_id: int, lives: Callable[[str], bool]
    ) -> dict[int, Buffer]:
        """The ledger's entries whose location is, or was, in a directory that does not live."""
        entries = self.ledgers.get(ledger_id, _NO_ENTRIES)
        lost_ids = [
            *self._lost_entry_ids(ledger_id, lives),
            *self.lost_locations.get(ledger_id, ()),
        ]
        return {entry_id: entries[entry_id] for entry_id in lost_ids if entry_id in entries}

    def bytes_to_write(self, ledger_ids: Sequence[int]) -> tuple[int, int]:
        """The bytes and the number of the entries that `to_write` gives."""
        size = count = 0
        for ledger_id in ledger_ids:
            entries = self.ledgers[ledger_id]
            size += sum(map(len, entries.values()))
            count += len(entries)
            direct_entries = [
                entries[e] for e in self.locations.get(ledger_id, _NO_LOCATIONS) if e in entries
            ]
            size -= sum(map(len, direct_entries))
            count -= len(direct_entries)
        return size, count

    def to_write(self, ledger_ids: Sequence[int]) -> Iterator[tuple[int, int, Buffer]]:
        """(ledger, entry id, entry) of the ledgers' entries without a location, sorted."""
        for ledger_id in sorted(ledger_ids):
            entries = self.ledgers[ledger_id]
            locations = self.locations.get(ledger_id, _NO_LOCATIONS)
            for entry_id in sorted(entries):
                if entry_id not in locations:
                    yield ledger_id, entry_id, entries[entry_id]


class WriteCache:
    """The two halves: `active` takes entries; a flush writes `flushing` to entry logs."""

    def __init__(self, bytes_max: int, reserve_bytes: int) -> None:
        self.active = CacheHalf()
        self.flushing = CacheHalf()  # empty while no flush is under way
        self._half_bytes_max = bytes_max // 2
        self._reserve_bytes = reserve_bytes

    def has_room(self, entry_bytes: int, *, reserve: bool) -> bool:
        """Whether the active half has room; with `reserve`, recovery's reserve counts too."""
        limit = self._half_bytes_max + (self._reserve_bytes if reserve else 0)
        return self.active.bytes == 0 or self.active.bytes + entry_bytes <= limit

    @property
    def bytes(self) -> int:
        """Bytes of both halves."""
        return self.active.bytes + self.flushing.bytes

    @property
    def unflushed_bytes(self) -> int:
        """Bytes that a flush has to write: the bytes of each entry without a location, and for each
        entry ENTRY_OVERHEAD_BYTES, for the index."""
        return self.bytes - self.active.direct_bytes - self.flushing.direct_bytes

    @property
    def is_half_used(self) -> bool:
        """Whether half of the active half is used: then a flush begins, so early that no add has to
        be refused."""
        return self.active.bytes * 2 >= self._half_bytes_max

    def get(self, ledger_id: int, entry_id: int) -> Buffer | None:
        entry = self.active.ledgers.get(ledger_id, _NO_ENTRIES).get(entry_id)
        if entry is None:
            entry = self.flushing.ledgers.get(ledger_id, _NO_ENTRIES).get(entry_id)
        return entry

    def among(self, ledger_id: int, entry_ids: EntryIds) -> dict[int, Buffer]:
        """The entries among these that are cached."""
        if isinstance(entry_ids, range):
            return self.range(ledger_id, entry_ids[0], entry_ids[-1])
        pairs = ((entry_id, self.get(ledger_id, entry_id)) for entry_id in entry_ids)
        return {entry_id: entry for entry_id, entry in pairs if entry is not None}

    def range(self, ledger_id: int, first_entry: int, last_entry: int) -> dict[int, Buffer]:
        """The cached entries between first and last, both included."""
        cached: dict[int, Buffer] = {}
        for half in (self.flushing, self.active):
            if not (entries := half.ledgers.get(ledger_id)):
                continue
            if last_entry - first_entry < len(entries):
                ids = range(first_entry, last_entry + 1)
                cached.update((e, entries[e]) for e in ids if e in entries)
            else:
                cached.update((e, v) for e, v in entries.items() if first_entry <= e <= last_entry)
        return cached

    def ids_with_location(self, ledger_id: int, first_entry: int, last_entry: int) -> list[int]:
        """Ids between first and last, both included, of entries whose location is known."""
        entry_ids: list[int] = []
        for half in (self.flushing, self.active):
            locations = half.locations.get(ledger_id, _NO_LOCATIONS)
            if last_entry - first_entry < len(locations):
                entry_ids += [e for e in range(first_entry, last_entry + 1) if e in locations]
            else:
                entry_ids += [e for e in locations if first_entry <= e <= last_entry]
        return entry_ids

    def with_lost_locations(
        self, ledger_id: int, lives: Callable[[str], bool]
    ) -> dict[int, Buffer]:
        """As CacheHalf.with_lost_locations, without entries that were put again."""
        entries = self.flushing.with_lost_locations(ledger_id, lives)
        entries.update(self.active.with_lost_locations(ledger_id, lives))
        return {e: entry for e, entry in entries.items() if self.get(ledger_id, e) is entry}

    def half_with(self, ledger_id: int, entry_id: int) -> CacheHalf:
        """The half that has an entry. The caller has put the entry before."""
        for half in (self.active, self.flushing):
            if entry_id in half.ledgers.get(ledger_id, _NO_ENTRIES):
                return half
        raise AssertionError("the entry was put before the last flush")

    def last(self, ledger_id: int) -> int | None:
        """The highest cached entry id of the ledger."""
        halves = [half.ledgers.get(ledger_id) for half in (self.active, self.flushing)]
        return max([max(entries) for entries in halves if entries], default=None)

    def swap(self) -> CacheHalf:
        """Begin a flush: the active half takes the place of the flushing half, which is empty."""
        assert not self.flushing.ledgers, "one flush at a time"
        self.flushing, self.active = self.active, CacheHalf()
        return self.flushing

    def drop_flushed(self) -> None:
        """End a flush: the index has the entries of the flushing half."""
        self.flushing = CacheHalf()

    def compact(self, ledger_id: int, entry_id: int) -> Buffer:
        """Replace the view of an entry by a copy, so that the frame's memory can be freed. Returns
        the copy."""
        entries = self.half_with(ledger_id, entry_id).ledgers[ledger_id]
        entries[entry_id] = bytes(entries[entry_id])
        return entries[entry_id]


_NO_ENTRIES: dict[int, Buffer] = {}
_NO_LOCATIONS: Mapping[int, DirectLocation] = {}
