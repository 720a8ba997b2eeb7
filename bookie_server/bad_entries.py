"""What is said of entries that cannot be delivered: little, however many there are.

Always true: for a ledger there is a line at its 1st, 10th, 100th, ... finding, which says how many
there were; what is remembered is a number for each of LEDGERS_MAX ledgers.
"""

import logging

LEDGERS_MAX = 10_000
_log = logging.getLogger(__name__)


class BadEntries:
    """Of one node's reads."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def found(self, ledger_id: int, entry_id: int, why: str) -> None:
        """A read met the entry and could not deliver it; one that is read again counts again."""
        if len(self._counts) >= LEDGERS_MAX:
            self._counts.clear()
        count = self._counts[ledger_id] = self._counts.get(ledger_id, 0) + 1
        if _is_power_of_ten(count):
            text = "ledger %d: entry %d cannot be delivered: %s (%d such reads of the ledger)"
            _log.error(text, ledger_id, entry_id, why, count)


def _is_power_of_ten(count: int) -> bool:
    return str(count).rstrip("0") == "1"
