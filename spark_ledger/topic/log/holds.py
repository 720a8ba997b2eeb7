"""The rows of a topic that subscriptions hold against every process that takes rows away (hazards
37, 38). Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from spark_ledger.metadata.store import Check

GRACE_MS = 3_600_000
"""A subscription holds the rows that were after its position this long ago."""


@dataclass(frozen=True, slots=True)
class Holds:
    """By partition the first offset that a subscription holds, and the name of this subscription
    (`holders`). A commit that takes rows away after reading these holds must have `check` in its
    multi."""

    offsets: Mapping[int, int]
    check: Check
    holders: Mapping[int, str]

    def first_held(self, removed: Mapping[int, tuple[int, int]]) -> tuple[int, int] | None:
        """The first partition of which a subscription holds a row in `removed` (offsets [start,
        end) by partition), and the first offset that is held in this partition. None if
        no subscription holds a row in `removed`."""
        first_offsets = (
            (partition, self.offsets[partition])
            for partition, (start, end) in sorted(removed.items())
            if partition in self.offsets and max(start, self.offsets[partition]) < end
        )
        return next(first_offsets, None)
