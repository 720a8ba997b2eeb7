"""What is left of a deleted topic in the metadata store, taken away piece by piece: its tree, then
the node that says that it was deleted.

Always true: the topic's own node goes last of its tree, and after it no ledger is made for the
topic (ledger/records.py). A ledger made just before may be known to nobody yet: so the node that
says that the topic was deleted goes only when a listing of ledgers that began without a tree found
none of them, and a removal that ended early is gone on with. At most NODES_PER_CALL nodes go in one
call. Nobody needs them: the topic takes no commit, its ledgers are gone, and who still has its id
hears that there is no such topic.
"""

from spark_ledger.metadata import paths
from spark_ledger.metadata.store import MetadataStore, NoNode, NotEmpty, OutcomeUnknown

NODES_PER_CALL = 5_000


async def remove_tree(store: MetadataStore, topic_id: str) -> bool:
    """Remove the topic's node and all below it; whether all is gone. False: call it again.

    Raises StoreUnavailable.
    """
    return await _remove(store, paths.topic(topic_id), NODES_PER_CALL) > 0


async def forget(store: MetadataStore, topic_id: str) -> None:
    """Remove what says that the topic was deleted, if the store answers. For a topic whose tree
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
