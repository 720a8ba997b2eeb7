"""Bugs of subscriptions that consumers share by keys: who has which slot, and what an
acknowledgement names."""

from typing import Any

from spark_ledger.broker.dispatch.key_shared import KeyChoice
from spark_ledger.broker.dispatch.sharing import Sharing
from tests.simulation.mutants.brokers import SERVES
from tests.simulation.mutants.mutant import Mutant

BY_KEY = {**SERVES, "also": ("keys",)}


def changes_hands_at_once(free_owner: Any) -> Any:
    """A slot goes to its new owner while its old one has unacknowledged rows of it."""

    def at_once(self: Any, slot: int, first: int) -> Any:
        return self._owners.owner_of(slot)

    return at_once


def never_goes_on(taken: Any) -> Any:
    """What waits for a slot to be free goes on waiting once it is."""

    def waits(self: Any, member: Any, part: Any) -> None:
        make_ready, self._make_ready = self._make_ready, lambda slot: None
        taken(self, member, part)
        self._make_ready = make_ready

    return waits


def counts_for_whoever_has_the_entry(owner: Any) -> Any:
    """An acknowledgement of a masked batch counts for another consumer's rows of the batch."""

    def whoever(self: Any, asker: Any, entry: int) -> Any:
        others = [member for member in self.members if entry in member.pending]
        return others[-1] if others else None

    return whoever


MUTANTS = (
    Mutant(
        *("a slot changes hands at once", "sharing by keys", KeyChoice, "_free_owner"),
        *(changes_hands_at_once, BY_KEY),
    ),
    Mutant(
        *("a slot that is free stays closed", "sharing by keys", KeyChoice, "taken"),
        *(never_goes_on, BY_KEY),
    ),
    Mutant(
        *("an ack counts for another's rows", "sharing by keys", Sharing, "_owner"),
        *(counts_for_whoever_has_the_entry, BY_KEY),
    ),
)
