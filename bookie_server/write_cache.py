"""Entries that are not in an entry log yet, in two halves: one fills while the other is flushed.

Always true: an entry is put here before it is given to the journal, so whatever the journal made
durable is in a half that some flush will see; a half is emptied only after its entries are in the
index; entries are views into the frames they came in, counted with what Python keeps around them.
"""

from collections.abc import Iterator

from bookie_server.api.entry import Buffer

ENTRY_OVERHEAD_BYTES = 384  # a memoryview, two integers, a slot in a dictionary


class CacheHalf:
    """Entries by ledger and entry id."""

    def __init__(self) -> None:
        self.ledgers: dict[int, dict[int, Buffer]] = {}
        self.bytes = 0

    def put(self, ledger_id: int, entry_id: int, entry: Buffer) -> None:
        self.ledgers.setdefault(ledger_id, {})[entry_id] = entry
        self.bytes += len(entry) + ENTRY_OVERHEAD_BYTES

    def put_all(self, ledger_id: int, entries: dict[int, Buffer]) -> None:
        """`put` of entries; one that is here already is counted again."""
        self.ledgers.setdefault(ledger_id, {}).update(entries)
        self.bytes += sum(map(len, entries.values())) + len(entries) * ENTRY_OVERHEAD_BYTES

    def in_order(self) -> Iterator[tuple[int, int, Buffer]]:
        """(ledger, entry id, entry), sorted by ledger and entry id."""
        for ledger_id in sorted(self.ledgers):
            entries = self.ledgers[ledger_id]
            for entry_id in sorted(entries):
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
    def half_used(self) -> bool:
        """Time to begin a flush, so that the next one begins before adds must be refused."""
        return self.active.bytes * 2 >= self._half_bytes_max

    def get(self, ledger_id: int, entry_id: int) -> Buffer | None:
        entry = self.active.ledgers.get(ledger_id, _NONE).get(entry_id)
        if entry is None and self.flushing is not None:
            entry = self.flushing.ledgers.get(ledger_id, _NONE).get(entry_id)
        return entry

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

    def last(self, ledger_id: int) -> int | None:
        """The highest cached entry id of the ledger."""
        halves = (self.active, self.flushing)
        ids = [
            max(half.ledgers[ledger_id]) for half in halves if half and ledger_id in half.ledgers
        ]
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
