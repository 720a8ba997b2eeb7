"""What a subscription's consumers have acknowledged up to now, for a query that begins there.

    the nodes of the partitions -> the owners' answers, else the fenced ledgers -> the subscription

Always true: the result has every acknowledgement for which a receipt was given before the call. An
owner answers with what it has in memory. It counts only in the epoch that the partition's node has,
or in a later epoch: then no later owner had given a receipt before the call. The ledger of a
partition without such an answer is fenced and read; a living owner then goes on in another ledger.
The subscription is read before the answers and after them, and the answers count only if it was not
moved between the two reads. The shares of the later read count, because an owner forgets a state
without gaps only after the state's position is in its share.
"""

from collections.abc import Awaitable, Callable, Collection
from functools import partial

from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata.store import MetadataStore
from spark_ledger.metadata.store_calls import Tries, call_each, unavailable_while
from spark_ledger.topic.acks.asking import OwnedAcks, ask_owners
from spark_ledger.topic.acks.nodes import (
    LEDGERS_AT_ONCE,
    AckNodes,
    AckPointer,
    States,
)
from spark_ledger.topic.subscription.nodes import (
    SubscriptionNodes,
    acks_key_of,
    brokers_serving,
)
from spark_ledger.topic.subscription.present import PresentPositions, present_positions
from spark_ledger.topic.subscription.records import has_acks

AskOwners = Callable[[MetadataStore, str, str, Collection[str]], Awaitable[list[OwnedAcks]]]
"""As asking.ask_owners."""


async def acked_now(
    ledgers: LedgerStore, topic_id: str, name: str, ask: AskOwners = ask_owners
) -> PresentPositions:
    """Partitions of which nothing is written are left out. Raises errors.SubscriptionNotFound,
    errors.LedgerError."""
    nodes = SubscriptionNodes(ledgers.metadata, topic_id)
    tries = Tries()
    with unavailable_while(f"reading what subscription '{name}' acknowledged"):
        while True:
            before = await nodes.get(name)
            if not has_acks(before.record):
                return await present_positions(ledgers, nodes, before)
            states = await _states(ledgers, topic_id, name, ask)
            subscription = await nodes.get(name)
            if acks_key_of(subscription) == acks_key_of(before):
                return await present_positions(ledgers, nodes, subscription, states)
            await tries.retry_or_raise(f"subscription '{name}' is moved again and again")


async def _states(
    ledgers: LedgerStore, topic_id: str, name: str, ask: AskOwners
) -> dict[int, States]:
    """By partition the states of the subscription; of a partition whose ledger was read, the states
    of all subscriptions."""
    ack_nodes, store = AckNodes(ledgers, topic_id), ledgers.metadata
    await store.sync()
    numbers = await ack_nodes.partitions()
    nodes = await call_each(lambda number: ack_nodes.get(number, fresh=False), numbers)
    pointers = {n: node.pointer for n, node in zip(numbers, nodes, strict=True) if node}
    answers: dict[int, OwnedAcks] = {}
    for owned in await ask(store, topic_id, name, await brokers_serving(store, topic_id)):
        pointer, other = pointers.get(owned.partition), answers.get(owned.partition)
        epoch_min = max(pointer.epoch if pointer else 0, other.epoch if other else 0)
        if owned.epoch >= epoch_min:
            answers[owned.partition] = owned
    unanswered = [number for number in pointers if number not in answers]
    fenced = await call_each(partial(ack_nodes.states, fence=True), unanswered, LEDGERS_AT_ONCE)
    states = dict(zip(unanswered, fenced, strict=True))
    for number, owned in answers.items():
        states[number] = _after(owned.states, pointers.get(number))
    return states


def _after(states: States, pointer: AckPointer | None) -> States:
    """An owner's states after the successions in the partition's node. The owner may not have
    applied these yet."""
    after = dict(states)
    for succession in pointer.successions if pointer else ():
        if succession.after not in after and succession.before in after:
            after[succession.after] = succession.state(after[succession.before])
    return after
