"""The simulated metadata store's folder copied, and put back: it goes back in time.

copy = copied(store); go_back(store, copy)
"""

import asyncio
from collections.abc import Mapping

from spark_ledger.metadata.store import Versioned
from tests.simulation.network import _outside
from tests.simulation.store import SimStore


def copied(store: SimStore) -> dict[str, Versioned]:
    """All nodes as they are now, as a copy of the server's folder has them."""
    return dict(store.tree.nodes)


def go_back(store: SimStore, copy: Mapping[str, Versioned]) -> None:
    """The server's folder was replaced by the copy: nodes have the versions that they had; every
    session ends, and ephemerals of sessions long gone go at the time-out. Who judges the store's
    history hears nothing more: it has two now."""
    store.listeners.clear()
    store.write("", lambda write: write.become(dict(copy)))
    for session in store.sessions:
        session.expire()
    loop = asyncio.get_running_loop()
    for owner in sorted({node.owner for node in copy.values()} - {0}):
        timeout_s = store.faults.session_timeout_s
        loop.call_later(timeout_s, store.drop_ephemerals, owner, context=_outside(loop))
