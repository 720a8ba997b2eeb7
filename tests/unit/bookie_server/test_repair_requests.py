"""What repair asks of a bookie: which entries are stored, and, by the cluster's own credential,
what a password keeps from others."""

import pytest

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from spark_ledger.metadata.ledger_record import derive
from tests.kit.nodes import on_a_node
from tests.unit.bookie_server.node import ID, Node, entry

PASSWORD = derive(b"secret")
CREDENTIAL = b"of the cluster"


async def with_a_credential():
    node = Node(repair_credential=CREDENTIAL)
    await node.start()
    return node


async def stored(node, ledger_id, first, last, token=b""):
    return await node.bookie.handle(m.StoredRequest(ID, ledger_id, first, last, token))


@pytest.mark.parametrize("where", ["in the cache", "in a log"])
def test_the_entries_that_are_stored_are_told_as_spans(where):
    async def test(node):
        await node.create_ledger(7)
        await node.add_all(*[entry(7, e) for e in (0, 1, 2, 5, 9)])
        if where == "in a log":
            await node.crash("all")
        told = await stored(node, 7, 1, 20)
        assert told == m.StoredResponse(Status.OK, 20, [(1, 2), (5, 5), (9, 9)])

    on_a_node(test, with_a_credential())


def test_of_a_ledger_never_met_nothing_is_stored_and_a_range_that_is_none_is_refused():
    async def test(node):
        assert await stored(node, 8, 0, 5) == m.StoredResponse(Status.OK, 5)
        for first, last in ((-1, 5), (6, 5)):
            assert (await stored(node, 8, first, last)).status is Status.BAD_REQUEST

    on_a_node(test, with_a_credential())


def test_the_credential_of_repair_reads_fences_and_brings_back_but_adds_nothing_new():
    async def test(node):
        await node.create_ledger(7, tokens=PASSWORD)
        assert await node.add(entry(7, 0), token=PASSWORD.add) == [Status.OK]
        assert (await stored(node, 7, 0, 3)).status is Status.UNAUTHORIZED
        assert (await stored(node, 7, 0, 3, CREDENTIAL)).spans == [(0, 0)]
        assert await node.add(entry(7, 1), token=CREDENTIAL) == [Status.UNAUTHORIZED]
        assert await node.add(entry(7, 1), token=CREDENTIAL, recovery=True) == [Status.OK]
        assert (await node.read(7, 0, 1, token=CREDENTIAL)).status is Status.OK
        assert (await node.read(7, 0, 1, token=CREDENTIAL, fence=True)).status is Status.OK
        assert await node.add(entry(7, 2), token=PASSWORD.add) == [Status.FENCED]
        for wrong in (b"", b"of the clustes", PASSWORD.add):
            assert (await node.read(7, 0, 1, token=wrong, fence=True)).status is Status.UNAUTHORIZED

    on_a_node(test, with_a_credential())


def test_a_node_without_a_credential_takes_no_empty_one_for_it():
    async def test(node):
        node.repair_credential = b""
        await node.crash()
        await node.create_ledger(7, tokens=PASSWORD)
        assert (await node.read(7, 0, 1, fence=True)).status is Status.UNAUTHORIZED

    on_a_node(test, with_a_credential())


def test_a_node_that_is_drained_takes_no_adds_but_repairs():
    async def test(node):
        await node.create_ledger(7)
        node.bookie.is_drained = True
        assert "drained" in node.bookie.readonly_reason
        assert await node.add(entry(7, 0)) == [Status.READ_ONLY]
        assert await node.add(entry(7, 0), recovery=True) == [Status.OK]

    on_a_node(test, with_a_credential())
