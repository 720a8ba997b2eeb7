"""Bugs of subscriptions that consumers share by keys: which consumer has which slot."""

from typing import Any

from spark_ledger.broker.dispatch.key_shared import KeyChoice
from tests.simulation.mutants.brokers import SERVES
from tests.simulation.mutants.mutant import Mutant

BY_KEY = {**SERVES, "also": ("keys",)}


def changes_hands_at_once(free_owner: Any) -> Any:
    """A slot goes to its new owner while its old one has unacknowledged rows of it."""

    def at_once(self: Any, slot: int, first: int) -> Any:
        return self._owners.owner_of(slot)

    return at_once


MUTANTS = (
    Mutant(
        *("a slot changes hands at once", "sharing by keys", KeyChoice, "_receiver_of_slot"),
        *(changes_hands_at_once, BY_KEY),
    ),
)
