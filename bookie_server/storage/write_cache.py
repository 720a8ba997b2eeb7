"""Entries that are not in an entry log yet, in two halves: one fills while the other is flushed.

Always true: an entry is put here before it is given to a journal or direct log, so each entry that
these made durable is in a half that a flush will see; a half is emptied only after its entries are
in the index; entries are views into the frames they came in, counted with Python's overhead; of an
entry that a ledger directory has already the half keeps the location, until the entry is put again;
while locations are still to come (`direct_writes`) the half is not flushed.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bookie_server.api.entry import Buffer
from bookie_server.api.messages import EntryIds
from bookie_server.logs.index import Location

ENTRY_OVERHEAD_BYTES = 384  # a memoryview, two integers, a slot in a dictionary


class DirectLocation(NamedTuple):
    """An entry's record, and the id of the ledger directory that holds it."""

    directory: str
    location: Location


class CacheHalf:
    """Entries by ledger and entry id."""

    def __init__(self) -> None:
        self.ledgers: dict[int, dict[int, Buffer]] = {}
        self.bytes = 0
        self.locations: dict[int, dict[int, DirectLocation]] = {}
        """By ledger and entry id; of a replayed entry the half has nothing else."""
        self.direct_bytes = 0
        """Bytes of the entries here that have a location."""
        self.lost_locations: dict[int, dict[int, None]] = {}
        """By ledger, entries whose location was in a directory that was lost: they are on their way
        to another directory, from memory."""
        self.direct_writes: dict[asyncio.Future[None], None] = {}
        """Writes under way: once a future is done, no location comes from that write any more."""

    def put(self, ledger_id: int, entry_id: int, entry: Buffer) -> None:
        if self.locations:
            self._forget(ledger_id, [entry_id])
        self.ledgers.setdefault(ledger_id, {})[entry_id] = entry
        self.bytes += len(entry) + ENTRY_OVERHEAD_BYTES

    def put_all(self, ledger_id: int, entries: dict[int, Buffer]) -> None:
        """`put` of entries; an entry that is here already is counted again."""
        if self.locations:
            self._forget(ledger_id, entries)
        self.ledgers.setdefault(ledger_id, {}).update(entries)
        self.bytes += sum(map(len, entries.values())) + len(entries) * ENTRY_OVERHEAD_BYTES

    def set_locations(self, ledger_id: int, locations: Sequence[DirectLocation]) -> None:
        """Note the locations that entries of the ledger have."""
        if not locations:
            return
        self._forget(ledger_id, [placed.location.entry_id for placed in locations])
        placed_entries = self.locations.setdefault(ledger_id, {})
        entries = self.ledgers.get(ledger_id, _NONE)
        for placed in locations:
            entry_id = placed.location.entry_id
            placed_entries[entry_id] = placed
            self.direct_bytes += len(entries.get(entry_id, b""))

    def _forget(self, ledger_id: int, entry_ids: Iterable[int]) -> None:
        """Forget the entries' locations."""
        if not (locations := self.locations.get(ledger_id)):
            return
        entries = self.ledgers.get(ledger_id, _NONE)
        for entry_id in entry_ids:
            if locations.pop(entry_id, None) is not None:
                self.direct_bytes -= len(entries.get(entry_id, b""))

    def replay_all(self, ledger_id: int, locations: Sequence[DirectLocation]) -> None:
        """`set_locations` of replayed entries, of which the half has only the locations."""
        self.set_locations(ledger_id, locations)
        self.ledgers.setdefault(ledger_id, {})
        self.bytes += len(locations) * ENTRY_OVERHEAD_BYTES

    def drop_locations(self, lives: Callable[[str], bool]) -> None:
        """Forget the locations in directories that do not live."""
        for ledger_id in self.locations:
            if dead := self._lost(ledger_id, lives):
                self.lost_locations.setdefault(ledger_id, {}).update(dict.fromkeys(dead))
                self._forget(ledger_id, dead)

    def _lost(self, ledger_id: int, lives: Callable[[str], bool]) -> list[int]:
        locations = self.locations.get(ledger_id, _NOWHERE)
        return [e for e, placed in locations.items() if not lives(placed.directory)]

    def with_lost_locations(
        self, ledger_id: int, lives: Callable[[str], bool]
    ) -> dict[int, Buffer]:
        """Entries of the ledger that have, or had, their location in directories that do not
        live."""
        entries = self.ledgers.get(ledger_id, _NONE)
        dead = [*self._lost(ledger_id, lives), *self.lost_locations.get(ledger_id, ())]
        return {entry_id: entries[entry_id] for entry_id in dead if entry_id in entries}

    def bytes_to_write(self, ledger_ids: Sequence[int]) -> tuple[int, int]:
        """Bytes and count of the entries that `to_write` gives."""
        size = count = 0
        for ledger_id in ledger_ids:
            entries = self.ledgers[ledger_id]
            size += sum(map(len, entries.values()))
            count += len(entries)
            held = [entries[e] for e in self.locations.get(ledger_id, _NOWHERE) if e in entries]
            size -= sum(map(len, held))
            count -= len(held)
        return size, count

    def to_write(self, ledger_ids: Sequence[int]) -> Iterator[tuple[int, int, Buffer]]:
        """(ledger, entry id, entry) of those entries of the ledgers that have no location yet,
        sorted."""
        for ledger_id in sorted(ledger_ids):
            entries, locations = self.ledgers[ledger_id], self.locations.get(ledger_id, _NOWHERE)
            for entry_id in sorted(entries):
                if entry_id not in locations:
                    yield ledger_id, entry_id, entries[entry_id]


class WriteCache:
    """Two halves within one budget. `active` fills; `flushing` is being written to an entry log."""

    def __init__(self, bytes_max: int, reserve_bytes: int) -> None:
        self.active = CacheHalf()
        self.flushing = CacheHalf()  # empty while no flush is under way
        self._half_bytes_max = bytes_max // 2
        self._reserve_bytes = reserve_bytes

    def has_room(self, entry_bytes: int, *, reserve: bool) -> bool:
        """Whether the active half takes an entry; with `reserve`, from the recovery's share too."""
        limit = self._half_bytes_max + (self._reserve_bytes if reserve else 0)
        return self.active.bytes == 0 or self.active.bytes + entry_bytes <= limit

    @property
    def bytes(self) -> int:
        """Of both halves."""
        return self.active.bytes + self.flushing.bytes

    @property
    def unflushed_bytes(self) -> int:
        """Bytes of both halves that entry logs and indexes are still to take: entries without a
        location, and the overhead of each entry, as the index takes each."""
        return self.bytes - self.active.direct_bytes - self.flushing.direct_bytes

    @property
    def half_used(self) -> bool:
        """Whether to begin a flush, so that the next one begins before adds must be refused."""
        return self.active.bytes * 2 >= self._half_bytes_max

    def get(self, ledger_id: int, entry_id: int) -> Buffer | None:
        entry = self.active.ledgers.get(ledger_id, _NONE).get(entry_id)
        if entry is None:
            entry = self.flushing.ledgers.get(ledger_id, _NONE).get(entry_id)
        return entry

    def among(self, ledger_id: int, entry_ids: EntryIds) -> dict[int, Buffer]:
        """Those of the entries that are cached."""
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

    def located(self, ledger_id: int, first_entry: int, last_entry: int) -> list[int]:
        """Which of the entries between first and last have a location already."""
        entry_ids: list[int] = []
        for half in (self.flushing, self.active):
            locations = half.locations.get(ledger_id, _NOWHERE)
            if last_entry - first_entry < len(locations):
                entry_ids += [e for e in range(first_entry, last_entry + 1) if e in locations]
            else:
                entry_ids += [e for e in locations if first_entry <= e <= last_entry]
        return entry_ids

    def with_lost_locations(
        self, ledger_id: int, lives: Callable[[str], bool]
    ) -> dict[int, Buffer]:
        """See CacheHalf; without entries that were put again."""
        entries = self.flushing.with_lost_locations(ledger_id, lives)
        entries.update(self.active.with_lost_locations(ledger_id, lives))
        return {e: entry for e, entry in entries.items() if self.get(ledger_id, e) is entry}

    def half_with(self, ledger_id: int, entry_id: int) -> CacheHalf:
        """The half that an entry was just put into."""
        for half in (self.active, self.flushing):
            if entry_id in half.ledgers.get(ledger_id, _NONE):
                return half
        raise AssertionError("no flush that was begun after the entry was put can have ended")

    def last(self, ledger_id: int) -> int | None:
        """The highest cached entry id of the ledger."""
        halves = [half.ledgers.get(ledger_id) for half in (self.active, self.flushing)]
        return max([max(entries) for entries in halves if entries], default=None)

    def swap(self) -> CacheHalf:
        """Begin a flush: the active half becomes the flushing one, which must have been empty."""
        assert not self.flushing.ledgers, "one flush at a time"
        self.flushing, self.active = self.active, CacheHalf()
        return self.flushing

    def drop_flushed(self) -> None:
        """The flushing half is in the index."""
        self.flushing = CacheHalf()

    def compact(self, ledger_id: int, entry_id: int) -> Buffer:
        """Replace the view of an entry just put by a copy, which is returned: its frame can go."""
        entries = self.half_with(ledger_id, entry_id).ledgers[ledger_id]
        entries[entry_id] = bytes(entries[entry_id])
        return entries[entry_id]


_NONE: dict[int, Buffer] = {}
_NOWHERE: Mapping[int, DirectLocation] = {}
