"""An entry that is added again while its ledger's entries leave the index is stored again: it is
not called stored because of what is just going."""

import asyncio
import dataclasses

import pytest

from bookie_server.api.status import Status
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.ledger_record import Fragment, RecordState
from tests.kit.nodes import on_a_node
from tests.unit.bookie_server.clustered_node import spread_over_directories
from tests.unit.bookie_server.node import entry
from tests.unit.bookie_server.wide_node import flushed

OK = Status.OK
DELETION_S = 1.0


async def kept_elsewhere(node, ledger_id):
    """The ledger is closed, and another bookie's."""
    session, path = node.store.session("admin"), paths.ledger(ledger_id)
    found = await session.get(path)
    record = dataclasses.replace(
        ledger_record.decode(found.value),
        fragments=(Fragment(0, ("another",)),),
        state=RecordState.CLOSED,
        last_entry=1,
        length_bytes=14,
        rows=2,
    )
    await session.set(path, ledger_record.encode(record), found.version)


def slow_deletions(node):
    """An index that takes time for them, as in a thread; returns where they begin."""
    begun = asyncio.Event()
    for store in node.storage.stores:
        index, delete = store.index, store.index.delete_ledger

        async def slowly(ledger_id, delete=delete):
            begun.set()
            await asyncio.sleep(DELETION_S)
            await delete(ledger_id)

        index.delete_ledger = slowly
    return begun


async def surplus(node, ledger_id):
    await kept_elsewhere(node, ledger_id)
    await node.bookie.reclaim.collect(sweep=False, surplus=True)


async def stray(node, ledger_id):
    """Nothing is known of it any more but what lies there."""
    assert node.handles.forget(ledger_id)
    node.storage.forget(ledger_id)


@pytest.mark.parametrize("why", [surplus, stray])
def test_an_equal_add_while_the_entries_go_is_stored_again(why):
    async def test(node):
        await flushed(node)
        await why(node, 1)
        begun = slow_deletions(node)
        collecting = asyncio.ensure_future(node.bookie.reclaim.collect(sweep=False, surplus=True))
        await begun.wait()
        assert await node.add(entry(1, 0), entry(1, 1), recovery=True) == [OK, OK]
        await collecting
        assert await node.statuses(1, 0, 1) == [OK, OK]
        await flushed(node)
        await node.crash()
        assert await node.statuses(1, 0, 1) == [OK, OK]

    on_a_node(test, spread_over_directories(ledgers=1))
