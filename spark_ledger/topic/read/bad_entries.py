"""What a read does with stored bytes that cannot be decoded.

Always true: bad bytes do not change how the rows around them are read. Bad bytes raise an error, or
are counted and logged, with topic, partition, offsets, ledger and entry. `skip`: bad bytes give no
rows. `raw`: bad bytes give one row at their first offset, with the stored bytes as its value (a
Pulsar producer's batch, or the entry's payload), and no row at their other offsets. Bytes that a
later version wrote are always an error, whatever the policy is: an upgrade can read them.
"""

import logging
from dataclasses import dataclass
from enum import Enum

from spark_ledger import errors

LOGGED_MAX = 20
"""Warnings of one read; further bad bytes are only counted."""

_log = logging.getLogger(__name__)


class OnBadEntry(Enum):
    FAIL = "fail"
    SKIP = "skip"
    RAW = "raw"


@dataclass(frozen=True, slots=True)
class BadRows:
    """Stored bytes with a partition's rows at offsets [lo, hi), and the entry that has them."""

    partition: int
    lo: int
    hi: int
    ledger_id: int
    entry_id: int


class BadEntries:
    """The bytes of one read that cannot be decoded. `topic` is "" if the caller lacks the name."""

    def __init__(self, topic: str = "", policy: OnBadEntry = OnBadEntry.FAIL) -> None:
        self._topic = topic
        self.policy = policy
        self.count = 0
        """Bad batches and bad entries; an entry counts once for each of its partitions."""
        self.rows = 0
        """The number of offsets of these batches and entries."""

    def count_or_raise(self, rows: BadRows, error: errors.UnsupportedFormat) -> None:
        """Count and log the rows, or raise `error` again with the place of the rows. A BadEntry is
        raised only if the policy is FAIL; an UnsupportedFormat (of a later version) always."""
        what = f"{self._describe(rows)}: {error.what}"
        if self.policy is OnBadEntry.FAIL or not isinstance(error, errors.BadEntry):
            offsets = {"partition": rows.partition, "offset": rows.lo, "end": rows.hi}
            entry = {"ledger_id": rows.ledger_id, "entry_id": rows.entry_id}
            raise type(error)(what, error.remedy, topic=self._topic, **offsets, **entry) from error
        self.count += 1
        self.rows += rows.hi - rows.lo
        if self.count <= LOGGED_MAX:
            outcome = "left out" if self.policy is OnBadEntry.SKIP else "given as they are"
            _log.warning("rows that cannot be decoded are %s: %s", outcome, what)

    def log_counts(self) -> None:
        """Log the counts."""
        if self.count:
            _log.warning(
                "topic %s: %d batches or entries of %d offsets were not decoded (onBadEntry=%s)",
                *(self._topic, self.count, self.rows, self.policy.value),
            )

    def _describe(self, rows: BadRows) -> str:
        offsets = (
            f"offset {rows.lo}" if rows.hi == rows.lo + 1 else f"offsets {rows.lo} to {rows.hi - 1}"
        )
        topic = f"topic {self._topic!r}, " if self._topic else ""
        return (
            f"{topic}partition {rows.partition}, {offsets} (ledger {rows.ledger_id}, entry"
            f" {rows.entry_id})"
        )
