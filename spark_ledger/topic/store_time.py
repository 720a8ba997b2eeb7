"""What time it is by the metadata store's clock: the one that commits are stamped with.

Always true: the time told is never later than the store's own; it may be earlier when an answer
was lost or another asked at the same moment, and then what waits for a time waits for longer.
"""

from contextlib import suppress

from spark_ledger.metadata import paths
from spark_ledger.metadata.store import MetadataStore, NodeExists, NoNode, OutcomeUnknown

LONG_AGO_MS = 0


async def store_now_ms(store: MetadataStore) -> int:
    """The store's time: when it made a node that is made for it. Raises StoreUnavailable."""
    with suppress(NoNode, OutcomeUnknown):
        await store.delete(paths.STORE_CLOCK)
    with suppress(NodeExists, OutcomeUnknown):
        await store.create(paths.STORE_CLOCK)
    try:
        await store.sync(paths.STORE_CLOCK)
        return (await store.get(paths.STORE_CLOCK)).created_ms
    except NoNode:
        return LONG_AGO_MS
