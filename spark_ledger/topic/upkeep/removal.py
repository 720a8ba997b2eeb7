"""What the janitor removes from the metadata store that others may be looking at.

A ledger that a checkpoint may be about to name. A checkpoint is published by a multi that sets its
topic's checkpoint node and checks the records of the ledgers it newly names (checkpointer.py).
Always true: a ledger that was judged by a topic's references, and whose intent is open, goes only
in a multi that checks that this node is as it was before they were read. So of the two multis one
fails, however long either was under way.

What is left of a deleted topic, piece by piece: its tree, then the node that says that it was
deleted. Always true: the topic's own node goes last of its tree, and after it no ledger is made for
the topic (ledger/records.py). A ledger made just before may be in no list yet: so the node
that says that the topic was deleted goes only when a listing of ledgers that began without a tree
found none of them, and a removal that ended early is gone on with. Nobody needs them: the topic
takes no commit, its ledgers are gone, and a process that still has its id gets TopicNotFound.
"""

from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.store import (
    ANY_VERSION,
    Check,
    Create,
    Delete,
    MetadataStore,
    MultiFailed,
    NoNode,
    NotEmpty,
    Operation,
    OutcomeUnknown,
    StoreUnavailable,
)
from spark_ledger.metadata.store_calls import TRIES_MAX, read


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
    has no such check, but makes it and takes it away in the same multi, so no read ever sees it."""
    if version is None:
        return [Create(path), Delete(path, ANY_VERSION)]
    return [Check(path, version)]


NODES_PER_CALL = 5_000


async def remove_tree(store: MetadataStore, topic_id: str) -> bool:
    """Remove the topic's node and all below it, NODES_PER_CALL at most; whether all is gone. False:
    call it again.

    Raises StoreUnavailable.
    """
    return await _remove(store, paths.topic(topic_id), NODES_PER_CALL) > 0


async def forget(store: MetadataStore, topic_id: str) -> None:
    """Remove what says that the topic was deleted, if the store responds. For a topic whose tree
    was gone before its ledgers were listed, none of which is left.

    Raises StoreUnavailable.
    """
    await _delete(store, paths.topic_deleted(topic_id))


async def _remove(store: MetadataStore, path: str, budget: int) -> int:
    """Remove the node and all below it; what is left of the budget, 0 if something is left."""
    try:
        names = await store.children(path)
    except NoNode:
        return budget
    for name in names:
        budget = await _remove(store, f"{path}/{name}", budget)
        if budget <= 0:
            return 0
    return budget - 1 if await _delete(store, path) else 0


async def _delete(store: MetadataStore, path: str) -> bool:
    """Whether the node is gone."""
    try:
        await store.delete(path)
    except NoNode:
        return True
    except (NotEmpty, OutcomeUnknown):
        return False
    return True
