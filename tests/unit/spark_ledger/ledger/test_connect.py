"""Connecting: whatever goes wrong is said in our words, and leaves no session behind."""

import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.config import ClientConfig
from spark_ledger.metadata import cluster, paths, zookeeper
from spark_ledger.process import connect
from tests.simulation.store import SimStore
from tests.unit.spark_ledger.ledger.fakes import simulated

URL = "zk://127.0.0.1:1/ledger"


async def a_store(monkeypatch, record=None):
    """The store that connections will find, with this as the cluster's record."""
    store = SimStore()
    admin = store.session("admin")
    for folder in cluster.FOLDERS:
        await admin.create(folder, parents=True)
    if record is not None:
        await admin.create(paths.CLUSTER, record)
    closed = []

    async def to_store(*_args, **_settings):
        session = store.session("client")
        close = session.close

        async def closing():
            closed.append(session)
            await close()

        monkeypatch.setattr(session, "close", closing)
        return session

    monkeypatch.setattr(zookeeper, "connect", to_store)
    return store, closed


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (None, errors.Unavailable),
        (b"{", errors.UnsupportedFormat),
        (b'{"format":2,"id":"x","epoch":0}', errors.UnsupportedFormat),
    ],
    ids=["absent", "damaged", "later format"],
)
def test_a_cluster_that_cannot_be_used_is_named_and_the_session_is_closed(
    monkeypatch, record, error
):
    @simulated
    async def test():
        _, closed = await a_store(monkeypatch, record)
        with pytest.raises(error, match=URL):
            await connect(URL, ClientConfig())
        assert len(closed) == 1

    test()


def test_a_connection_given_up_while_it_is_made_leaves_no_session_behind(monkeypatch):
    @simulated
    async def test():
        store, closed = await a_store(monkeypatch, cluster.encode(cluster.ClusterRecord("x")))
        store.stall(60)
        connecting = asyncio.ensure_future(connect(URL, ClientConfig()))
        await asyncio.sleep(1)
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        assert connecting.cancelled()
        assert len(closed) == 1

    test()


def test_a_cluster_that_is_there_is_connected_to(monkeypatch):
    @simulated
    async def test():
        _, closed = await a_store(monkeypatch, cluster.encode(cluster.ClusterRecord("x")))
        ledgers = await connect(URL, ClientConfig())
        assert not closed
        await ledgers.close()
        assert len(closed) == 1

    test()
