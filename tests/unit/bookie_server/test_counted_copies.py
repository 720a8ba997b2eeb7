"""A copy that others count on is durable before a bookie shows it. A plain read shows an entry
while its add waits for a slow disk, and a power cut takes the entry then."""

import asyncio
from dataclasses import replace

import pytest

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from bookie_server.logs.index import EVERY_LEDGER, LimboReason
from spark_ledger.metadata import cluster, paths
from spark_ledger.metadata.ledger_record import RecordState, decode, encode
from tests.kit.nodes import on_a_node
from tests.kit.settings import with_settings
from tests.unit.bookie_server.node import CONFIG, ID, Node, entry

OK = Status.OK
LARGE = 300
CHECK_S = 2.0
CLUSTER_ID = "cluster-1"
SLOW_S = 10.0


async def that_lacks_an_entry():
    """Ledger 7 is CLOSED with the entries 0 and 1; the bookie lacks entry 1."""
    config = with_settings(CONFIG, large_entry_bytes=LARGE, limbo_check_s=CHECK_S)
    node = Node(config, cluster_id=CLUSTER_ID)
    admin = node.store.session("admin")
    await cluster.ensure(admin, CLUSTER_ID)
    await node.start()
    await node.create_ledger(7)
    assert await node.add(entry(7, 0)) == [OK]
    found = await admin.get(paths.ledger(7))
    end = {"last_entry": 1, "length_bytes": 14, "rows": 2}
    closed = replace(decode(found.value), state=RecordState.CLOSED, **end)
    await admin.set(paths.ledger(7), encode(closed), found.version)
    return node


async def begin_to_add(node, disk, payload=b"payload", *, recovery=False):
    """Entry 1, which a plain read shows from now on; `disk` takes its time."""
    disk.faults.sync_s = (SLOW_S, SLOW_S)
    adding = asyncio.ensure_future(node.add(entry(7, 1, payload), recovery=recovery))
    await asyncio.sleep(1)
    assert await node.statuses(7, 1, 1) == [OK]
    assert not adding.done()
    return adding


async def survives_a_power_cut(node, adding):
    adding.cancel()
    node.journal_disk.speed_up()
    node.ledger_disk.speed_up()
    await node.crash("none")
    assert await node.statuses(7, 1, 1) == [OK]


@pytest.mark.parametrize("slow", ["journal", "ledger directory"])
def test_an_entry_that_is_told_as_stored_survives_a_power_cut(slow):
    """Who asks counts it as a copy, or drops its own. A large entry waits for its directory."""

    async def test(node):
        large = slow == "ledger directory"
        disk, size = (node.ledger_disk, LARGE) if large else (node.journal_disk, 10)
        adding = await begin_to_add(node, disk, b"x" * size)
        told = await node.bookie.handle(m.StoredRequest(ID, 7, 0, 1))
        assert told.spans == [(0, 1)]
        await survives_a_power_cut(node, adding)

    on_a_node(test, that_lacks_an_entry())


def test_what_no_disk_takes_is_not_told_as_stored():
    async def test(node):
        adding = await begin_to_add(node, node.journal_disk)
        node.journal_disk.faults.hangs = True
        node.journal_disk.faults.sync_fails = 1
        told = await node.bookie.handle(m.StoredRequest(ID, 7, 0, 1))
        assert told.status is Status.IO_ERROR
        assert await adding == [Status.IO_ERROR]

    on_a_node(test, that_lacks_an_entry())


def test_a_comparison_ends_when_what_it_saw_is_durable():
    """Of a ledger that is not in limbo it ends with the question how the ledger stands."""

    async def test(node):
        adding = await begin_to_add(node, node.journal_disk, recovery=True)
        told = await node.request("ClearLimbo", m.ClearLimboRequest(ID, 7, b"", False, 0))
        assert (told.status, told.limbo) == (OK, "")
        await survives_a_power_cut(node, adding)

    on_a_node(test, that_lacks_an_entry())


def test_the_walk_takes_a_ledger_for_whole_when_what_it_counted_is_durable():
    """The record that ends the doubt may go to another journal than the copy: a crash would take
    the copy, and leave nothing that doubts."""

    async def test(node):
        assert await node.fence(7) is OK
        adding = await begin_to_add(node, node.journal_disk, recovery=True)
        every = node.storage.state(EVERY_LEDGER)
        node.storage.set_state(replace(every, limbo=LimboReason.TORN))
        await asyncio.sleep(2 * CHECK_S)
        assert not adding.done()
        assert await node.statuses(7, 2, 2) == [Status.LIMBO_TORN]
        assert await adding == [OK]
        await asyncio.sleep(2 * CHECK_S)
        assert await node.statuses(7, 2, 2) == [Status.NO_SUCH_ENTRY]

    on_a_node(test, that_lacks_an_entry())
