"""Places of entries that a bookie told before they were asked for.

Always true: a place is given out once; no more than PLACES_MAX are kept, about half a KiB each,
those of the reads that asked longest ago go first.
"""

from collections.abc import Sequence
from typing import NamedTuple

from bookie_server.api.entry_ids import EntryIds
from bookie_server.api.messages import EntryPlace

PLACES_MAX = 4096


class Reading(NamedTuple):
    """Of whom a place was heard, about which ledger, by which right."""

    bookie_id: str
    ledger_id: int
    token: bytes


class ToldPlaces:
    def __init__(self, places_max: int = PLACES_MAX) -> None:
        self._places_max = places_max
        self._count = 0
        self._of: dict[Reading, dict[int, EntryPlace]] = {}

    def __len__(self) -> int:
        return self._count

    def remember(self, reading: Reading, ids: EntryIds, places: Sequence[EntryPlace]) -> None:
        """Of the first of these entries, as many as there are places."""
        if not places:
            return
        known = self._of.pop(reading, {})  # it becomes the youngest
        self._of[reading] = known
        before = len(known)
        known.update(zip(ids, places, strict=False))
        self._count += len(known) - before
        while self._count > self._places_max:
            self.forget(next(iter(self._of)))

    def take(self, reading: Reading, ids: EntryIds, bytes_max: int) -> list[EntryPlace]:
        """The places of the entries, as far as `bytes_max` reach, of one at least; none if one of
        these is not known."""
        known = self._of.get(reading)
        if known is None:
            return []
        taken: list[EntryPlace] = []
        left = bytes_max
        for entry_id in ids:
            if left <= 0:
                break
            if (place := known.get(entry_id)) is None:
                return []
            taken.append(place)
            left -= place.entry_bytes
        self.drop(reading, ids[: len(taken)])
        return taken

    def drop(self, reading: Reading, ids: EntryIds) -> None:
        """Places that nobody will ask for again."""
        known = self._of.get(reading, {})
        self._count -= sum(known.pop(entry_id, None) is not None for entry_id in ids)
        if not known:
            self._of.pop(reading, None)

    def forget(self, reading: Reading) -> None:
        """All of it: a place was not where the entry lies."""
        self._count -= len(self._of.pop(reading, ()))
