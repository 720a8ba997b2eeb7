"""The janitor: deletes ledgers that were made for topics and are in none.

Always true: an intent is condemned by compare-and-set first, then its ledgers are recovered
(closed), then the topics are synced and folded, and only what is CLOSED and in no topic *then* is
deleted. Every commit checks its intent in its multi, so either the commit or the janitor loses
(hazard 4). Age only suggests candidates. Any error ends the pass; ledgers without an intent (made
through LedgerClient) are never touched.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata.store import MetadataStore


@dataclass(frozen=True, slots=True)
class CleanReport:
    """Ledgers and intents by what the pass did, or would do when `dry_run`."""

    dry_run: bool
    condemned: tuple[str, ...]
    closed: tuple[int, ...]
    deleted: tuple[int, ...]
    kept: tuple[int, ...]
    refused: str = ""


class Janitor:
    """Remembers from pass to pass what it saw: an intent is stale when this observer saw no
    heartbeat for a whole lease, in one unbroken session (hazard 44)."""

    def __init__(
        self,
        store: MetadataStore,
        ledgers: LedgerStore,
        rng: random.Random,
        *,
        lease_s: float = 900.0,
    ) -> None:
        self.store = store

    async def clean(
        self, *, dry_run: bool = False, force: bool = False, condemn: Sequence[str] = ()
    ) -> CleanReport:
        """One pass. `condemn` names intents to take as stale now; `force` lets the pass delete
        more than a tenth of the ledgers it knows."""
        raise NotImplementedError
