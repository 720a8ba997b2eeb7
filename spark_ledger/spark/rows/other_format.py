"""What a read does with rows of the other kind: columns in a read of bytes, bytes in a read of
columns. A topic has both if schemaMode=none mixed them, or if its schema was withdrawn.

Always true: rows of the read's own kind are read as ever; the others are an error, or they are
counted and logged with their places. `skip`: they are left out. `null`: they come with a payload of
nulls and all columns beside it.
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
    """The rows of the other kind in one task; `typed`: the read is of typed rows."""

    def __init__(self, policy: OnOtherFormat, *, typed: bool) -> None:
        self.policy = policy
        self.count = 0
        self._typed = typed
        self._places = 0

    def are(self, rows: Block, topic: str) -> bool:
        """Whether the rows are of the other kind and the policy accepts them; counts them then."""
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
        """Log the count."""
        if self.count:
            _log.warning(
                "%d rows of the other kind were met (onOtherFormat=%s)",
                *(self.count, self.policy.value),
            )
