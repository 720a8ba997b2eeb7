"""What a read does with rows of the other kind: columns where it wants bytes, bytes where it wants
columns. A topic has both where schemaMode=none mixed them, or where its schema was withdrawn.

Always true: rows of the kind that is wanted are read as ever; the others are an error, or counted
and logged with their places. `skip`: they are left out. `null`: they come with all that is beside
the payload, which is null.
"""

import logging
from enum import Enum

from spark_ledger.topic.read.row_blocks import Block

LOGGED_MAX = 20
"""Of one task; the others are counted."""

_log = logging.getLogger(__name__)


class OnOtherFormat(Enum):
    FAIL = "fail"
    SKIP = "skip"
    NULL = "null"


class OtherRows:
    """Those of one task, whose read wants `typed` rows or others."""

    def __init__(self, policy: OnOtherFormat, *, typed: bool) -> None:
        self.policy = policy
        self.count = 0
        self._typed = typed
        self._places = 0

    def are(self, rows: Block, topic: str) -> bool:
        """Whether the rows are of the other kind and that is no error: they are counted then."""
        if self.policy is OnOtherFormat.FAIL or rows.typed == self._typed:
            return False
        self.count += rows.num_rows
        for run in rows.runs.tolist() if self._places < LOGGED_MAX else ():
            partition, offset, count = run[:3]
            self._places += 1
            _log.warning(
                "topic %r, partition %d, offsets %d to %d: rows that are %s are %s",
                *(topic, partition, offset, offset + count - 1),
                "columns" if rows.typed else "bytes",
                "left out" if self.policy is OnOtherFormat.SKIP else "given as null",
            )
        return True

    def end(self) -> None:
        """Log how many there were."""
        if self.count:
            _log.warning(
                "%d rows of the other kind were met (onOtherFormat=%s)",
                *(self.count, self.policy.value),
            )
