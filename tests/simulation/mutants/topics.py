"""Bugs of commits to topics."""

from dataclasses import replace
from typing import Any

from spark_ledger.metadata.store import ANY_VERSION
from spark_ledger.topic import commit_draft
from spark_ledger.topic.commit_views import CommitViews
from spark_ledger.topic.records import IntentState
from tests.simulation.mutants.mutant import Mutant

TOPIC = {
    "topics": True,
    "faults": ("client killed", "unknown outcomes"),
    "between_s": 0.5,
    "writers": 0,
    "recoverers": 0,
    "tailers": 0,
}
CONDEMNED = {
    **TOPIC,
    "faults": ("pause", "expiry", "slow network"),
    "between_s": 0.3,
    "chaos_s": 25.0,
}


def never_settled(settled: Any) -> Any:
    return lambda record, commit_id, txn, w0: None


def believes_its_intent_open(intent: Any) -> Any:
    async def opened(self: Any, intent_id: str, *, fresh: bool) -> Any:
        found = await intent(self, intent_id, fresh=fresh)
        record = replace(found.record, state=IntentState.OPEN)
        return replace(found, record=record, version=ANY_VERSION)

    return opened


MUTANTS = (
    Mutant("recorded version ignored", "T2", commit_draft, "settled", never_settled, TOPIC),
    Mutant(
        "intent believed open",
        "T4",
        CommitViews,
        "intent",
        believes_its_intent_open,
        CONDEMNED,
    ),
)
