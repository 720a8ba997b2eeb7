"""How a read treats rows of the other kind: typed rows in a read of bytes, rows of bytes in a read
of typed rows. A topic has both kinds after writes with schemaMode=none, or after its schema was
withdrawn.

Always true: rows of the read's kind are not affected. `fail`: a row of the other kind is an error.
With the other policies such rows are counted and logged with their offsets: `skip` leaves them out;
`null` gives them with a payload of nulls and all other columns.
"""

import logging
from enum import Enum

import numpy as np
import numpy.typing as npt

from spark_ledger.topic.read.row_blocks import Block

LOGGED_MAX = 20
"""How many runs of rows one task logs; it only counts the rows of further runs."""

_log = logging.getLogger(__name__)


class OnOtherFormat(Enum):
    FAIL = "fail"
    SKIP = "skip"
    NULL = "null"


class OtherRows:
    """Counts the rows of the other kind in one task; `typed`: this is a read of typed rows."""

    def __init__(self, policy: OnOtherFormat, *, typed: bool) -> None:
        self.policy = policy
        self.count = 0
        self._typed = typed
        self._logged_runs = 0

    def accepts(self, rows: Block, topic: str) -> bool:
        """Whether the rows are of the other kind and the policy accepts them; such rows are
        counted."""
        if self.policy is OnOtherFormat.FAIL or rows.typed == self._typed:
            return False
        self.accept(rows, topic, np.arange(rows.num_rows))
        return True

    def accept(self, rows: Block, topic: str, numbers: npt.NDArray[np.int64]) -> None:
        """Count and log the rows of these numbers in the block, rising."""
        self.count += len(numbers)
        ends = np.cumsum(rows.runs["rows"])
        of_run = np.searchsorted(ends, numbers, side="right")
        for run in np.flatnonzero(np.bincount(of_run)).tolist():
            if self._logged_runs == LOGGED_MAX:
                break
            self._logged_runs += 1
            first, last = numbers[of_run == run][[0, -1]].tolist()
            partition, offset = rows.place_of(first)
            _log.warning(
                "topic %r, partition %d, offsets %d to %d: rows that are %s are %s",
                *(topic, partition, offset, offset + last - first),
                "columns" if rows.typed else "bytes",
                "left out" if self.policy is OnOtherFormat.SKIP else "given as null",
            )

    def end(self) -> None:
        """Log the count."""
        if self.count:
            _log.warning(
                "%d rows were of the other kind (onOtherFormat=%s)",
                *(self.count, self.policy.value),
            )
