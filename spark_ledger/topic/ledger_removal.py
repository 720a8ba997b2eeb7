"""Removing a ledger that a checkpoint may be about to name.

A checkpoint is published by a multi that sets its topic's checkpoint node and checks the records of
the ledgers it newly names (checkpointer.py). Always true: a ledger that was judged by a topic's
references goes only in a multi that checks that this node is as it was before they were read. So
of the two multis one fails, however long either was under way.
"""

from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.store import (
    ANY_VERSION,
    Check,
    Create,
    Delete,
    MetadataStore,
    MultiFailed,
    Operation,
    OutcomeUnknown,
    StoreUnavailable,
)
from spark_ledger.topic.store_calls import TRIES_MAX, read


async def remove_unpublished(
    store: MetadataStore, ledger_id: int, topic_id: str, checkpoint: int | None
) -> bool:
    """Remove the record of a CLOSED ledger if the topic's checkpoint node still has that version
    (None: there is still none); whether it is gone. Raises store.StoreUnavailable."""
    path = paths.ledger(ledger_id)
    for _ in range(TRIES_MAX):
        node = await read(store, path)
        if node is None:
            return True
        if not ledger_record.decode(node.value).closed:
            return False
        delete = Delete(path, node.version)
        try:
            await store.multi([*_unchanged(paths.topic_checkpoint(topic_id), checkpoint), delete])
            return True
        except MultiFailed:
            return False
        except OutcomeUnknown:
            await store.sync(path)
    raise StoreUnavailable(f"{TRIES_MAX} answers were lost while ledger {ledger_id} was removed")


def _unchanged(path: str, version: int | None) -> list[Operation]:
    """That the node has the version; or, where it is None, that there is no such node: the store
    has no such check, but makes it and takes it away in the same multi, so nobody ever sees it."""
    if version is None:
        return [Create(path), Delete(path, ANY_VERSION)]
    return [Check(path, version)]
