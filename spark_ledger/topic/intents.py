"""Intents: who makes ledgers for topics, and whether it still may.

Always true: an intent begins open and ends once, as done or condemned, by compare-and-set; every
commit checks in its multi that its intent is open, and every block of ledger ids is recorded in a
multi that does the same (hazard 4). So after an intent is condemned nothing it made can come into
a topic, and the janitor knows every ledger it can have made. Intents are kept after their end: a
zombie that mints again finds its own, ended. One query on one target has one current run: a new
run's intent condemns the older one's as superseded, in one multi (hazard 11).
"""

import random
from dataclasses import dataclass

from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata.store import MetadataStore
from spark_ledger.topic.records import IntentState

SUPERSEDED = "superseded"
STALE = "stale"
IDS_PER_BLOCK = 8


@dataclass(frozen=True, slots=True)
class Intent:
    """An intent as it was read; picklable, so a driver can send it to its tasks. `version` is
    that of its node: while it stands, the intent is in the state seen."""

    id: str
    kind: str
    app_id: str
    run_id: str
    target: str
    w0: int
    generation: int
    state: IntentState
    why: str
    version: int

    @property
    def open(self) -> bool:
        return self.state is IntentState.OPEN


class Intents:
    def __init__(self, store: MetadataStore, ledgers: LedgerStore, rng: random.Random) -> None:
        self.store = store

    async def open_query_intent(self, query_id: str, run_id: str, target: str) -> Intent:
        """The open intent of a streaming query's run on `target`, made if it is not there.

        Any number of tasks may call it at once: they get the same one. The first call of a new
        run condemns the older run's. A run condemned as stale goes on under a new generation.
        Raises errors.Fenced when a newer run has taken over.
        """
        raise NotImplementedError

    async def open_batch_intent(self, app_id: str, run_id: str, target: str) -> Intent:
        """A new intent of a batch job; the driver makes it and sends it to its tasks."""
        raise NotImplementedError

    async def get(self, intent_id: str) -> Intent:
        """The intent as it is now. Raises errors.Fenced when there is none."""
        raise NotImplementedError

    async def heartbeat(self, intent: Intent) -> None:
        """Show that somebody works under the intent. Failures of the store are no error."""
        raise NotImplementedError

    async def finish(self, intent: Intent) -> None:
        """Set it to done if it is open: its unreferenced ledgers may go."""
        raise NotImplementedError

    async def condemn(self, intent_id: str, why: str) -> Intent:
        """Condemn it if it is open; returns it as it ended. Raises errors.Fenced if absent."""
        raise NotImplementedError

    async def ledger_id(self, intent: Intent) -> int:
        """A ledger id that only this intent may use, out of a block recorded under it.

        Raises errors.Fenced when the intent is not open any more.
        """
        raise NotImplementedError
