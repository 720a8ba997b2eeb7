"""What subscriptions hold of a topic, for whoever takes rows away (hazards 37, 38). Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from spark_ledger.metadata.store import Check

GRACE_MS = 3_600_000
"""Rows are held that a subscription had before it so long ago."""


@dataclass(frozen=True, slots=True)
class Holds:
    """From which offset on each partition is held by some subscription, and by which; one left out
    is not held. What takes rows away by them must have `check` in its multi."""

    offsets: Mapping[int, int]
    check: Check
    by: Mapping[int, str]

    def first(self, going: Mapping[int, tuple[int, int]]) -> tuple[int, int] | None:
        """Of rows that are to go, [start, end) by partition, the first partition in which some are
        held, and from which offset on; None where none is."""
        held = (
            (partition, self.offsets[partition])
            for partition, (start, end) in sorted(going.items())
            if partition in self.offsets and max(start, self.offsets[partition]) < end
        )
        return next(held, None)
