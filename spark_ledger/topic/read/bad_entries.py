"""What a read does with stored bytes that cannot be decoded.

Always true: bad bytes do not change how the rows around them are read. Bad bytes raise an error, or
are counted and logged, with topic, partition, offsets, ledger and entry. `skip`: bad bytes give no
rows. `raw`: bad bytes give one row at their first offset, and no row at their other offsets; the
row's value is the stored bytes (a Pulsar producer's batch, or the entry's payload). Bytes that a
later version wrote raise an error under every policy, because an upgraded reader can read them.
"""

import logging
from dataclasses import dataclass
from enum import Enum

from spark_ledger import errors

WARNINGS_MAX = 20
"""How many warnings one read logs; further bad bytes are only counted."""

_log = logging.getLogger(__name__)


class OnBadEntry(Enum):
    FAIL = "fail"
    SKIP = "skip"
    RAW = "raw"


@dataclass(frozen=True, slots=True)
class BadRows:
    """A partition's rows at offsets [lo, hi) with bad bytes, and the entry that has these bytes."""

    partition: int
    lo: int
    hi: int
    ledger_id: int
    entry_id: int


class BadEntries:
    """Handles the bad bytes that one read meets. `topic` is "" if the caller lacks the name."""

    def __init__(self, topic: str = "", policy: OnBadEntry = OnBadEntry.FAIL) -> None:
        self._topic = topic
        self.policy = policy
        self.count = 0
        """How many batches and entries were bad; an entry counts once for each partition in it."""
        self.rows = 0
        """How many offsets these batches and entries have."""

    def count_or_raise(self, rows: BadRows, error: errors.UnsupportedFormat) -> None:
        """Count and log the rows, or raise `error` again with the place of the rows. A BadEntry is
        raised only if the policy is FAIL; any other UnsupportedFormat is always raised."""
        what = f"{self._describe(rows)}: {error.what}"
        if self.policy is OnBadEntry.FAIL or not isinstance(error, errors.BadEntry):
            offsets = {"partition": rows.partition, "offset": rows.lo, "end": rows.hi}
            entry = {"ledger_id": rows.ledger_id, "entry_id": rows.entry_id}
            raise type(error)(what, error.remedy, topic=self._topic, **offsets, **entry) from error
        self.count += 1
        self.rows += rows.hi - rows.lo
        if self.count <= WARNINGS_MAX:
            outcome = "left out" if self.policy is OnBadEntry.SKIP else "given as they are"
            _log.warning("rows that cannot be decoded are %s: %s", outcome, what)

    def log_counts(self) -> None:
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
