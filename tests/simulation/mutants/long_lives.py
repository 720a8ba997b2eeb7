"""Bugs of processes that live on for months: what is made and never taken away while they do."""

from typing import Any

from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.upkeep import garbage
from tests.simulation.mutants.brokers import SERVES
from tests.simulation.mutants.mutant import Mutant


def waits_for_its_writer(waits_for: Any) -> Any:
    """Whatever was written under an open intent that does not count versions."""

    def waits(ledger: Any, intent: Any, topic: Any, now_ms: int) -> str:
        if topic.deleted_ms is None and intent.open and not intent.in_order:
            return "its writer is at work"
        return str(waits_for(ledger, intent, topic, now_ms))

    return waits


def follows_for_ever(unfollow: Any) -> Any:
    async def follows(self: Any, topic_id: str) -> None:
        return

    return follows


MUTANTS = (
    Mutant(
        *("dropped and kept for its writer", "months", garbage, "_reason_to_wait"),
        *(waits_for_its_writer, SERVES),
    ),
    Mutant(
        *("followed for ever", "months", TopicClient, "unfollow"),
        *(follows_for_ever, SERVES),
    ),
)
