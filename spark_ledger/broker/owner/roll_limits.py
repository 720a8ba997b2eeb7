"""When an owner leaves a live ledger for another."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RollLimits:
    """When a live ledger is followed by another: whichever comes first. Neither its seal nor a
    reader's search grows with it, so it is left only so that retention lets go of parts of a
    partition, and of a copy when a bookie fails there is not too much to make at once. Of a topic
    with deduplication a successor reads all of it: `entries_read` bounds that."""

    bytes: int = 1 << 30
    entries: int = 1_000_000
    age_s: float = 4 * 3600.0
    entries_read: int = 20_000
