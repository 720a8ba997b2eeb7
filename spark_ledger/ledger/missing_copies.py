"""Which acknowledged entries have fewer than Qw copies, as few ranges.

Always true: a range covers every entry noted for its bookie; in a striped ledger it may span
entries that the bookie does not keep. Ranges are merged while neighbours, so their number grows
with failures, not with entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spark_ledger.ledger.quorum import Quorum


@dataclass(frozen=True, slots=True)
class MissingCopy:
    """Entries first..last, acknowledged, of which `bookie_id` has not said that it has a copy."""

    first_entry: int
    last_entry: int
    bookie_id: str
    reason: str = ""


class MissingCopies:
    def __init__(self, quorum: Quorum) -> None:
        self._gap = quorum.ensemble_size
        self._ranges: list[MissingCopy] = []
        self._latest: dict[str, int] = {}

    def note(self, entry_id: int, bookies: Sequence[tuple[str, str]]) -> None:
        """Entry `entry_id` has no copy on `bookies`, each (id, why)."""
        for bookie, why in bookies:
            at = self._latest.get(bookie)
            known = None if at is None else self._ranges[at]
            if known is not None and -self._gap <= entry_id - known.last_entry <= self._gap:
                first = min(known.first_entry, entry_id)
                last = max(known.last_entry, entry_id)
                assert at is not None
                self._ranges[at] = replace(known, first_entry=first, last_entry=last)
            else:
                self._latest[bookie] = len(self._ranges)
                self._ranges.append(MissingCopy(entry_id, entry_id, bookie, why))

    def ranges(self, first_entry: int = 0) -> list[MissingCopy]:
        """What is missing from `first_entry` on, by first entry."""
        found = [
            replace(known, first_entry=max(first_entry, known.first_entry))
            for known in self._ranges
            if known.last_entry >= first_entry
        ]
        return sorted(found, key=lambda copy: (copy.first_entry, copy.bookie_id))
