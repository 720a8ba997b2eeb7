"""Which topics are read by queries without a subscription: these hold no rows against retention.

Always true: a query writes the topic's node when it begins, and again NOTED_EVERY_S later; not if
any query wrote the node within that time. A write that fails ends no query.
"""

from collections.abc import Iterable
from contextlib import suppress

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.cluster import multi_unless_held
from spark_ledger.metadata.store import Create, MetadataStore, Set, StoreError
from spark_ledger.metadata.store_calls import call_each, read, store_now_ms

NOTED_EVERY_S = 3600.0
LATELY_S = 86_400.0


async def note_reads(store: MetadataStore, topic_ids: Iterable[str], now_ms: int) -> None:
    """Note that a query without a subscription reads these topics. `now_ms` is by any clock."""

    async def note(topic_id: str) -> None:
        path = paths.topic_unheld(topic_id)
        with suppress(errors.LedgerError, StoreError):
            node = await read(store, path)
            if node is None:
                await multi_unless_held(store, [Create(path)])
            elif now_ms - node.modified_ms >= NOTED_EVERY_S * 1000:
                await multi_unless_held(store, [Set(path, b"", node.version)])

    await call_each(note, topic_ids)


async def was_read_lately(store: MetadataStore, topic_id: str) -> bool:
    """Whether such a query read the topic within LATELY_S, or NOTED_EVERY_S more. Raises
    StoreUnavailable."""
    node = await read(store, paths.topic_unheld(topic_id))
    within_ms = (LATELY_S + NOTED_EVERY_S) * 1000
    return node is not None and await store_now_ms(store) - node.modified_ms < within_ms
