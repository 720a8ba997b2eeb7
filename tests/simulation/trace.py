"""What happened in a run, line by line, and one hash over all of it.

Always true: a line holds nothing that differs between two runs of the same seed (no addresses of
objects, no set order, no wall clock); equal hashes mean equal runs (invariant 33).
"""

import hashlib
from collections import deque

from tests.simulation.loop import current

LINES_KEPT = 4000


class Trace:
    """Lines of the run so far; the last LINES_KEPT can be shown, all are in `digest`."""

    def __init__(self) -> None:
        self.events = 0
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._hash = hashlib.blake2b(digest_size=16)

    def note(self, who: str, what: str) -> None:
        """`who` did or met `what`, now."""
        line = f"{current().now:12.6f} {who:<14} {what}"
        self.events += 1
        self._lines.append(line)
        self._hash.update(line.encode())
        self._hash.update(b"\n")

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def tail(self, lines: int = LINES_KEPT) -> str:
        return "\n".join(list(self._lines)[-lines:])
