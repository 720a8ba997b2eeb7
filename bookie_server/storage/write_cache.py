"""Entries that are not in an entry log yet, in two halves: one fills while the other is flushed.

Always true: an entry is put here before it is given to a journal or direct log, so whatever these
made durable is in a half that some flush will see; a half is emptied only after its entries are in
the index; entries are views into the frames they came in, counted with what Python keeps around
them; of an entry that lies in a ledger directory already the half knows the place, until the entry
is put again; while places are still to come (`placing`) the half is not flushed.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bookie_server.api.entry import Buffer
from bookie_server.api.entry_ids import EntryIds
from bookie_server.logs.index import Location

ENTRY_OVERHEAD_BYTES = 384  # a memoryview, two integers, a slot in a dictionary


class Place(NamedTuple):
    """An entry's record, and the id of the ledger directory that holds it."""

    directory: str
    location: Location


class CacheHalf:
    """Entries by ledger and entry id."""

    def __init__(self) -> None:
        self.ledgers: dict[int, dict[int, Buffer]] = {}
        self.bytes = 0
        self.places: dict[int, dict[int, Place]] = {}
        """By ledger and entry id; of a replayed entry the half has nothing else."""
        self.placed_bytes = 0
        """Of the entries here that have a place."""
        self.unplaced: dict[int, dict[int, None]] = {}
        """By ledger, entries that had one in a directory that was lost: they are on their way to
        another, from memory."""
        self.placing: dict[asyncio.Future[None], None] = {}
        """Not done: places that will be told."""

    def put(self, ledger_id: int, entry_id: int, entry: Buffer) -> None:
        if self.places:
            self._displace(ledger_id, [entry_id])
        self.ledgers.setdefault(ledger_id, {})[entry_id] = entry
        self.bytes += len(entry) + ENTRY_OVERHEAD_BYTES

    def put_all(self, ledger_id: int, entries: dict[int, Buffer]) -> None:
        """`put` of entries; one that is here already is counted again."""
        if self.places:
            self._displace(ledger_id, entries)
        self.ledgers.setdefault(ledger_id, {}).update(entries)
        self.bytes += sum(map(len, entries.values())) + len(entries) * ENTRY_OVERHEAD_BYTES

    def place_all(self, ledger_id: int, places: Sequence[Place]) -> None:
        """Where entries of the ledger lie."""
        if not places:
            return
        self._displace(ledger_id, [place.location.entry_id for place in places])
        known = self.places.setdefault(ledger_id, {})
        entries = self.ledgers.get(ledger_id, _NONE)
        for place in places:
            entry_id = place.location.entry_id
            known[entry_id] = place
            self.placed_bytes += len(entries.get(entry_id, b""))

    def _displace(self, ledger_id: int, entry_ids: Iterable[int]) -> None:
        """Forget where they lie."""
        if not (places := self.places.get(ledger_id)):
            return
        entries = self.ledgers.get(ledger_id, _NONE)
        for entry_id in entry_ids:
            if places.pop(entry_id, None) is not None:
                self.placed_bytes -= len(entries.get(entry_id, b""))

    def replay_all(self, ledger_id: int, places: Sequence[Place]) -> None:
        """`place_all` of entries that only their places are known of."""
        self.place_all(ledger_id, places)
        self.ledgers.setdefault(ledger_id, {})
        self.bytes += len(places) * ENTRY_OVERHEAD_BYTES

    def unplace(self, lives: Callable[[str], bool]) -> None:
        """Forget the places in directories that do not live."""
        for ledger_id in self.places:
            if dead := self._misplaced(ledger_id, lives):
                self.unplaced.setdefault(ledger_id, {}).update(dict.fromkeys(dead))
                self._displace(ledger_id, dead)

    def _misplaced(self, ledger_id: int, lives: Callable[[str], bool]) -> list[int]:
        places = self.places.get(ledger_id, _NOWHERE)
        return [e for e, place in places.items() if not lives(place.directory)]

    def misplaced(self, ledger_id: int, lives: Callable[[str], bool]) -> dict[int, Buffer]:
        """Entries of the ledger that have, or had, their place in directories that do not live."""
        entries = self.ledgers.get(ledger_id, _NONE)
        dead = [*self._misplaced(ledger_id, lives), *self.unplaced.get(ledger_id, ())]
        return {entry_id: entries[entry_id] for entry_id in dead if entry_id in entries}

    def bytes_to_write(self, ledger_ids: Sequence[int]) -> tuple[int, int]:
        """Bytes and count of what `to_write` gives."""
        size = count = 0
        for ledger_id in ledger_ids:
            entries = self.ledgers[ledger_id]
            size += sum(map(len, entries.values()))
            count += len(entries)
            held = [entries[e] for e in self.places.get(ledger_id, _NOWHERE) if e in entries]
            size -= sum(map(len, held))
            count -= len(held)
        return size, count

    def to_write(self, ledger_ids: Sequence[int]) -> Iterator[tuple[int, int, Buffer]]:
        """(ledger, entry id, entry) of those of these ledgers that lie nowhere yet, sorted."""
        for ledger_id in sorted(ledger_ids):
            entries, places = self.ledgers[ledger_id], self.places.get(ledger_id, _NOWHERE)
            for entry_id in sorted(entries):
                if entry_id not in places:
                    yield ledger_id, entry_id, entries[entry_id]


class WriteCache:
    """Two halves within one budget. `active` fills; `flushing` is being written to an entry log."""

    def __init__(self, bytes_max: int, reserve_bytes: int) -> None:
        self.active = CacheHalf()
        self.flushing: CacheHalf | None = None
        self._half_bytes_max = bytes_max // 2
        self._reserve_bytes = reserve_bytes

    def has_room(self, entry_bytes: int, *, reserve: bool) -> bool:
        """Whether the active half takes an entry; with `reserve`, from the recovery's share too."""
        limit = self._half_bytes_max + (self._reserve_bytes if reserve else 0)
        return self.active.bytes == 0 or self.active.bytes + entry_bytes <= limit

    @property
    def bytes(self) -> int:
        """Of both halves."""
        return self.active.bytes + (self.flushing.bytes if self.flushing is not None else 0)

    @property
    def unflushed_bytes(self) -> int:
        """Of both halves, what entry logs and indexes are still to take: entries without a place,
        and the overhead of each, which an index has need of, too."""
        halves = [half for half in (self.active, self.flushing) if half is not None]
        return self.bytes - sum([half.placed_bytes for half in halves])

    @property
    def half_used(self) -> bool:
        """Time to begin a flush, so that the next one begins before adds must be refused."""
        return self.active.bytes * 2 >= self._half_bytes_max

    def get(self, ledger_id: int, entry_id: int) -> Buffer | None:
        entry = self.active.ledgers.get(ledger_id, _NONE).get(entry_id)
        if entry is None and self.flushing is not None:
            entry = self.flushing.ledgers.get(ledger_id, _NONE).get(entry_id)
        return entry

    def among(self, ledger_id: int, entry_ids: EntryIds) -> dict[int, Buffer]:
        """Those of the entries that are cached."""
        if isinstance(entry_ids, range):
            return self.range(ledger_id, entry_ids[0], entry_ids[-1])
        found = ((entry_id, self.get(ledger_id, entry_id)) for entry_id in entry_ids)
        return {entry_id: entry for entry_id, entry in found if entry is not None}

    def range(self, ledger_id: int, first_entry: int, last_entry: int) -> dict[int, Buffer]:
        """The cached entries between first and last, both included."""
        found: dict[int, Buffer] = {}
        for half in (self.flushing, self.active):
            entries = half.ledgers.get(ledger_id) if half is not None else None
            if not entries:
                continue
            if last_entry - first_entry < len(entries):
                wanted = range(first_entry, last_entry + 1)
                found.update((e, entries[e]) for e in wanted if e in entries)
            else:
                found.update((e, v) for e, v in entries.items() if first_entry <= e <= last_entry)
        return found

    def places(self, ledger_id: int, first_entry: int, last_entry: int) -> list[int]:
        """Which of the entries between first and last have a place already."""
        found: list[int] = []
        for half in (self.flushing, self.active):
            places = half.places.get(ledger_id, _NOWHERE) if half is not None else _NOWHERE
            if last_entry - first_entry < len(places):
                found += [e for e in range(first_entry, last_entry + 1) if e in places]
            else:
                found += [e for e in places if first_entry <= e <= last_entry]
        return found

    def misplaced(self, ledger_id: int, lives: Callable[[str], bool]) -> dict[int, Buffer]:
        """See CacheHalf; none that was put again."""
        found: dict[int, Buffer] = {}
        for half in (self.flushing, self.active):
            if half is not None:
                found.update(half.misplaced(ledger_id, lives))
        return {e: entry for e, entry in found.items() if self.get(ledger_id, e) is entry}

    def half_with(self, ledger_id: int, entry_id: int) -> CacheHalf:
        """The half that an entry was just put into."""
        for half in (self.active, self.flushing):
            if half is not None and entry_id in half.ledgers.get(ledger_id, _NONE):
                return half
        raise AssertionError("the entry was put in this step")

    def last(self, ledger_id: int) -> int | None:
        """The highest cached entry id of the ledger."""
        halves = [half for half in (self.active, self.flushing) if half is not None]
        ids = [max(entries) for half in halves if (entries := half.ledgers.get(ledger_id))]
        return max(ids, default=None)

    def swap(self) -> CacheHalf:
        """Begin a flush: the active half becomes the flushing one, which must have been empty."""
        assert self.flushing is None, "one flush at a time"
        self.flushing, self.active = self.active, CacheHalf()
        return self.flushing

    def drop_flushed(self) -> None:
        """The flushing half is in the index."""
        assert self.flushing is not None
        self.flushing = None

    def compact(self, ledger_id: int, entry_id: int) -> Buffer:
        """Replace the view of an entry just put by a copy, so that its frame can go."""
        for half in (self.active, self.flushing):
            if half is not None and entry_id in half.ledgers.get(ledger_id, _NONE):
                copy = half.ledgers[ledger_id][entry_id] = bytes(half.ledgers[ledger_id][entry_id])
                return copy
        raise AssertionError("compact is called before a flush can end")


_NONE: dict[int, Buffer] = {}
_NOWHERE: Mapping[int, Place] = {}
