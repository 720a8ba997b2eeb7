"""One request for entries that lie apart says of each what a request for it alone says."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bookie_server.api import messages as m
from bookie_server.api.messages import spans_of
from bookie_server.api.status import Status, StopReason
from bookie_server.bookie import RESULTS_MAX
from spark_ledger.metadata.ledger_record import derive
from tests.kit.nodes import on_a_node
from tests.unit.bookie_server.node import Node, entry

OK, ABSENT = Status.OK, Status.NO_SUCH_ENTRY
COUNT = 24
PAYLOADS = {e: b"%02d" % e * 400 for e in range(COUNT)}
FLUSHED_S = 20


async def with_odd_entries_in_memory(*, without=()):
    """Of ledger 1 the even entries are in a log, the odd ones in memory."""
    node = await Node().start()
    await node.create_ledger(1, 2)
    for odd in (0, 1):
        kept = [e for e in range(odd, COUNT, 2) if e not in without]
        await node.add_all(*(entry(1, e, PAYLOADS[e]) for e in kept))
        if not odd:
            await asyncio.sleep(FLUSHED_S)
    return node


async def read(node, *ids, **more) -> m.ReadResponse:
    (first, last), *further = spans_of(ids)
    return await node.read(1, first, last, further=further, **more)


def statuses(response):
    return [result.status for result in response.results]


def test_entries_that_lie_apart_come_in_order_and_those_not_stored_are_denied_one_by_one():
    async def test(node):
        response = await read(node, 1, 4, 5, 9, 12, 23, 30)
        assert statuses(response) == [OK, OK, ABSENT, ABSENT, OK, OK, ABSENT]
        found = [bytes(r.entry[64:]) for r in response.results if r.status is OK]
        assert found == [PAYLOADS[e] for e in (1, 4, 12, 23)]
        assert response.stop is StopReason.END_OF_RANGE

    on_a_node(test, with_odd_entries_in_memory(without=(5, 9)))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sets(st.integers(0, COUNT + 3), min_size=1).map(sorted), min_size=8, max_size=8))
def test_what_is_read_at_once_is_what_is_read_one_by_one(several):
    async def test(node):
        for turn in range(2):
            for ids in several:
                response = await read(node, *ids)
                alone = [(await node.read(1, e, e)).results[0] for e in ids]
                assert list(response.results) == alone
            if not turn:
                await asyncio.sleep(FLUSHED_S)  # from the write cache to the log

    on_a_node(test, with_odd_entries_in_memory(without=(0, 6, 7, 13)))


@pytest.mark.parametrize("flushed", [False, True])
def test_a_read_of_entries_apart_ends_with_the_one_that_brings_it_to_its_bytes(flushed):
    async def test(node):
        if flushed:
            await asyncio.sleep(FLUSHED_S)
        size = len(entry(1, 0, PAYLOADS[0]))
        for max_bytes, count in ((0, 1), (size, 1), (size + 1, 2), (3 * size, 3)):
            response = await read(node, 2, 5, 8, 11, 14, 17, max_bytes=max_bytes)
            assert statuses(response) == [OK] * count
            assert response.stop is StopReason.BYTE_LIMIT
        response = await read(node, 2, 5, 30, 32, max_bytes=2 * size)
        assert statuses(response) == [OK, OK], "what lies beyond was not looked at"

    on_a_node(test, with_odd_entries_in_memory())


def test_a_copy_that_is_damaged_is_unknown_and_its_neighbours_are_delivered():
    async def test(node):
        await asyncio.sleep(FLUSHED_S)
        for path in node.files(node.ledger_disk, "entrylog"):
            at = node.ledger_disk.content(path).find(PAYLOADS[8])
            if at >= 0:
                node.ledger_disk.flip_bit(path, 8 * (at + 5))
        assert statuses(await read(node, 2, 8, 11, 20)) == [OK, Status.IO_ERROR, OK, OK]
        assert statuses(await read(node, 11, 30)) == [OK, Status.LIMBO], "no denials any more"

    on_a_node(test, with_odd_entries_in_memory())


def test_what_a_ledger_in_limbo_lacks_is_not_denied():
    async def test(node):
        node.storage.quarantine(1, 3, "a test says so")
        assert statuses(await read(node, 1, 5, 7)) == [OK, Status.LIMBO, OK]

    on_a_node(test, with_odd_entries_in_memory(without=(5,)))


def test_a_read_of_entries_apart_that_fences_fences_before_it_answers():
    async def test(node):
        assert statuses(await read(node, 1, 5, 7, fence=True)) == [OK, OK, OK]
        await node.crash()
        assert await node.add(entry(1, COUNT)) == [Status.FENCED]

    on_a_node(test, with_odd_entries_in_memory())


def test_who_may_not_read_a_ledger_may_not_read_entries_of_it_that_lie_apart():
    async def test(node):
        await node.create_ledger(3, tokens=derive(b"secret"))
        assert await node.add(entry(3, 0), token=derive(b"secret").add) == [OK]
        asked = {"further": [(2, 2)]}
        wrong = await node.read(3, 0, 0, token=derive(b"wrong").read, **asked)
        assert wrong.status is Status.UNAUTHORIZED
        right = await node.read(3, 0, 0, token=derive(b"secret").read, **asked)
        assert statuses(right) == [OK, ABSENT]
        assert (await node.read(77, 0, 0, **asked)).status is Status.NO_SUCH_LEDGER

    on_a_node(test, with_odd_entries_in_memory())


def test_one_reply_tells_of_so_many_entries_at_most_wherever_they_lie():
    async def test(node):
        response = await node.read(1, 0, 0, further=[(2, 2**62)])
        assert len(response.results) == RESULTS_MAX
        assert response.stop is StopReason.BYTE_LIMIT

    on_a_node(test, with_odd_entries_in_memory())
