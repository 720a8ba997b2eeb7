"""Whether an open ledger still moves: what one observer saw of it, again and again.

Always true: a ledger is idle only when this observer saw neither its record nor its last add
confirmed change for `idle_s`.
"""

import asyncio
from typing import NamedTuple

from spark_ledger.errors import LedgerError
from spark_ledger.ledger.cluster import Cluster
from spark_ledger.ledger.read.reader import AsyncLedgerReader
from spark_ledger.ledger.records import VersionedRecord
from spark_ledger.metadata.ledger_record import Tokens


class _Seen(NamedTuple):
    """What an open ledger looked like, and since when it does (the loop's clock)."""

    version: int
    last_add_confirmed: int
    since_s: float


class IdleLedgers:
    """One observer; it must live on from look to look."""

    def __init__(self, cluster: Cluster, tokens: Tokens) -> None:
        self._cluster = cluster
        self._tokens = tokens
        self._seen: dict[int, _Seen] = {}

    def forget_all_but(self, ledger_ids: list[int]) -> None:
        """The others are looked at no more."""
        self._seen = {each: self._seen[each] for each in ledger_ids if each in self._seen}

    def forget(self, ledger_id: int) -> None:
        """What was seen of the ledger does not count: its writer could do nothing."""
        self._seen.pop(ledger_id, None)

    def watches(self, ledger_id: int) -> bool:
        """Whether it is looked at."""
        return ledger_id in self._seen

    async def is_idle(self, known: VersionedRecord, idle_s: float) -> bool:
        """Look at the ledger; whether it did not move for `idle_s`."""
        ledger_id = known.record.ledger_id
        reader = AsyncLedgerReader(self._cluster, known, self._tokens)
        try:
            confirmed = await reader.refresh_last_add_confirmed()
        except LedgerError:  # nobody tells; then only its record moves
            confirmed = reader.last_add_confirmed
        now = asyncio.get_running_loop().time()
        seen = _Seen(reader.version, confirmed, now)
        before = self._seen.get(ledger_id)
        if before is None or before[:2] != seen[:2]:
            before = self._seen[ledger_id] = seen
        return now - before.since_s >= idle_s
