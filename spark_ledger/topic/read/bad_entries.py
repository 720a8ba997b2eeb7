"""What a read does with stored bytes that cannot be decoded.

Always true: rows beside them are read as ever; what cannot be decoded is an error, or is counted
and logged, each with its topic, partition, offsets, ledger and entry. `skip`: it has no rows.
`raw`: it is one row at its first offset, whose value are the bytes as they are stored: a Pulsar
producer's batch, or the entry's payload; its other offsets have none. What a later version wrote is
no such thing: it is an error whatever the read says, since an upgrade reads it.
"""

import logging
from dataclasses import dataclass
from enum import Enum

from spark_ledger import errors

LOGGED_MAX = 20
"""Of one read; the others are counted."""

_log = logging.getLogger(__name__)


class OnBadEntry(Enum):
    FAIL = "fail"
    SKIP = "skip"
    RAW = "raw"


@dataclass(frozen=True, slots=True)
class BadRows:
    """The rows of a partition, at offsets [lo, hi), that some stored bytes have."""

    partition: int
    lo: int
    hi: int
    ledger_id: int
    entry_id: int


class BadEntries:
    """Those of one read. `topic` "": it is not known here."""

    def __init__(self, topic: str = "", policy: OnBadEntry = OnBadEntry.FAIL) -> None:
        self._topic = topic
        self.policy = policy
        self.count = 0
        """How many there were: batches, or the rows that an entry has of a partition."""
        self.rows = 0
        """How many offsets they have."""

    def meet(self, rows: BadRows, why: errors.UnsupportedFormat) -> None:
        """Raises `why` with the place unless it is passed over: errors.BadEntry, or
        errors.UnsupportedFormat of a later version."""
        what = f"{self._place(rows)}: {why.what}"
        if self.policy is OnBadEntry.FAIL or not isinstance(why, errors.BadEntry):
            facts = {"partition": rows.partition, "offset": rows.lo, "end": rows.hi}
            place = {"ledger_id": rows.ledger_id, "entry_id": rows.entry_id}
            raise type(why)(what, why.remedy, topic=self._topic, **facts, **place) from why
        self.count += 1
        self.rows += rows.hi - rows.lo
        if self.count <= LOGGED_MAX:
            done = "left out" if self.policy is OnBadEntry.SKIP else "given as they are"
            _log.warning("rows that cannot be decoded are %s: %s", done, what)

    def end(self) -> None:
        """Log how many there were."""
        if self.count:
            _log.warning(
                "topic %s: %d batches or entries of %d offsets were not decoded (onBadEntry=%s)",
                *(self._topic, self.count, self.rows, self.policy.value),
            )

    def _place(self, rows: BadRows) -> str:
        offsets = (
            f"offset {rows.lo}" if rows.hi == rows.lo + 1 else f"offsets {rows.lo} to {rows.hi - 1}"
        )
        topic = f"topic {self._topic!r}, " if self._topic else ""
        return (
            f"{topic}partition {rows.partition}, {offsets} (ledger {rows.ledger_id}, entry"
            f" {rows.entry_id})"
        )
