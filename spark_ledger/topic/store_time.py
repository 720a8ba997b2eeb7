"""What time it is by the metadata store's clock: the one that commits are stamped with.

Always true: the time told lies between the call and its return, or is LONG_AGO_MS, at which nothing
is due: answers were lost, or others asked at the same moment again and again.
"""

from contextlib import suppress

from spark_ledger.metadata import paths
from spark_ledger.metadata.store import MetadataStore, NodeExists, NoNode, OutcomeUnknown

LONG_AGO_MS = 0
TRIES_MAX = 5


async def store_now_ms(store: MetadataStore) -> int:
    """The store's time: when it made a node that is made for it. Raises StoreUnavailable."""
    for _ in range(TRIES_MAX):
        with suppress(NoNode, OutcomeUnknown):
            await store.delete(paths.STORE_CLOCK)
        with suppress(NoNode, NodeExists, OutcomeUnknown):
            await store.create(paths.STORE_CLOCK)
            await store.sync(paths.STORE_CLOCK)
            return (await store.get(paths.STORE_CLOCK)).created_ms
    return LONG_AGO_MS
