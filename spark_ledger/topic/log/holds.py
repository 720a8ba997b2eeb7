"""The rows of a topic that subscriptions hold against every process that takes rows away (hazards
37, 38). Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from spark_ledger.metadata.store import Check

GRACE_MS = 3_600_000
"""A subscription holds the rows that were after its position this long ago."""


@dataclass(frozen=True, slots=True)
class Holds:
    """For each partition that a subscription holds the first offset that is held, and in `by` the
    name of the subscription. A commit that takes rows away by them must have `check` in its
    multi."""

    offsets: Mapping[int, int]
    check: Check
    by: Mapping[int, str]

    def first(self, going: Mapping[int, tuple[int, int]]) -> tuple[int, int] | None:
        """The first partition in which rows of `going` (offsets [start, end) by partition, to be
        taken away) are held, and the first offset that is held there; None if no such row is held.
        """
        held = (
            (partition, self.offsets[partition])
            for partition, (start, end) in sorted(going.items())
            if partition in self.offsets and max(start, self.offsets[partition]) < end
        )
        return next(held, None)
