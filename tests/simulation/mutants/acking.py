"""Bugs of acknowledgements and of what comes again: whose acknowledgements they are, what is left
of them at a release, what is delayed, and in which order what waits is sent."""

from typing import Any

from spark_ledger.broker.dispatch import delays
from spark_ledger.broker.dispatch.key_shared import KeyChoice
from spark_ledger.broker.dispatch.shared_dispatcher import SharedDispatcher
from spark_ledger.topic.acks.entries import AckState
from spark_ledger.topic.acks.nodes import Succession
from spark_ledger.topic.acks.partition_acks import PartitionAcks
from spark_ledger.topic.subscription import nodes
from spark_ledger.topic.subscription.nodes import SubscriptionView
from spark_ledger.topic.subscription.present import MovedPositions
from tests.simulation.mutants.by_key import BY_KEY
from tests.simulation.mutants.mutant import Mutant
from tests.simulation.mutants.sharing import SHARES

WITH_QUERIES = {**SHARES, "also": ("sharing", "queries")}


def names_alone(key: Any) -> Any:
    """A subscription's acknowledgements count by its name: also after it was moved or made anew."""
    return lambda name, token, epoch: key(name, "", 0)


def inherits(key: Any) -> Any:
    """A subscription that is made anew has what that of before had."""
    return lambda name, token, epoch: key(name, "", epoch)


def delivers_at_once(deliver_at_ms: Any) -> Any:
    """Delayed messages are due when they are stored."""
    return lambda batch: 0


def passes_over_what_waits(free_owner: Any) -> Any:
    """New rows of a slot go to its owner while earlier ones wait to be sent again."""
    return lambda self, slot, first: free_owner(self, slot, -1)


def forgets_when_released(release: Any) -> Any:
    """What is acknowledged beyond gaps is forgotten when the last consumer leaves."""
    return lambda self, key, *, is_written, is_gone=False: release(
        self, key, is_written=is_written, is_gone=True
    )


def asks_for_all_again(redeliver: Any) -> Any:
    """One message that is asked for again takes all of the consumer along."""

    def all_again(self: Any, consumer: Any, epoch: Any, entries: Any = ()) -> None:
        redeliver(self, consumer, epoch)

    return all_again


def keeps_nothing(keeping: Any) -> Any:
    """Who takes a subscription over names no succession: its acknowledgements stay under the key of
    before."""

    async def without_names(self: Any, after: Any, positions: Any, forgotten: Any = ()) -> Any:
        return await self.operations()

    return without_names


def begins_at_the_position(acked_before: Any) -> Any:
    """Consumers after a query begin at its position, without what was acknowledged beyond it."""
    return property(lambda self: None)


def position_of_before(state: Any) -> Any:
    """What a query has read counts no more when consumers come back."""

    def kept(self: Any, before: Any) -> Any:
        return AckState(before.position, before.rows.copy(), before.owner_epoch)

    return kept


MUTANTS = (
    Mutant(
        *("acknowledgements by the name alone", "ack ledger", nodes, "AckKey"),
        *(names_alone, SHARES),
    ),
    Mutant(
        *("a name made anew inherits", "ack ledger", nodes, "AckKey"),
        *(inherits, SHARES),
    ),
    Mutant(
        *("delayed message at once", "sharing", delays, "deliver_at_ms"),
        *(delivers_at_once, SHARES),
    ),
    Mutant(
        *("new rows before those that wait", "sharing by keys", KeyChoice, "_receiver_of_slot"),
        *(passes_over_what_waits, BY_KEY),
    ),
    Mutant(
        *("gaps forgotten at a release", "ack ledger", PartitionAcks, "release"),
        *(forgets_when_released, SHARES),
    ),
    Mutant(
        *("one asked for again takes all along", "sharing", SharedDispatcher, "redeliver"),
        *(asks_for_all_again, SHARES),
    ),
    Mutant(
        *("successions without names", "ack ledger", MovedPositions, "keeping"),
        *(keeps_nothing, WITH_QUERIES),
    ),
    Mutant(
        *("after a query from its position on", "ack ledger", SubscriptionView, "acked_before"),
        *(begins_at_the_position, WITH_QUERIES),
    ),
    Mutant(
        *("a query's rows come again", "ack ledger", Succession, "state"),
        *(position_of_before, WITH_QUERIES),
    ),
)
