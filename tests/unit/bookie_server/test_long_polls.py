"""Long polls at a bookie: what ends them, what does not, and that nothing of them stays."""

import asyncio

import pytest

from tests.kit.nodes import on_a_node
from tests.simulation.loop import current
from tests.unit.bookie_server.node import OK, entry, with_two_ledgers


def test_a_long_poll_returns_when_the_last_add_confirmed_moves():
    async def test(node):
        await node.add(entry(1, 0))
        polling = asyncio.ensure_future(node.read_lac(1, previous_lac=-1, wait_ms=30_000))
        await asyncio.sleep(1)
        assert not polling.done()
        await node.add(entry(1, 1, lac=0))
        assert (await polling).last_add_confirmed == 0

    on_a_node(test, with_two_ledgers())


def test_a_long_poll_does_not_return_for_what_its_caller_knew():
    """It would look like a fence to the caller, who would read the record, and pause."""

    async def test(node):
        await node.add(entry(1, 0))
        polling = asyncio.ensure_future(node.read_lac(1, previous_lac=2, wait_ms=30_000))
        await asyncio.sleep(1)
        for entry_id in (1, 2, 3):
            await node.add(entry(1, entry_id, lac=entry_id - 1))
            await asyncio.sleep(1)
            assert not polling.done()
        await node.add(entry(1, 4, lac=3))
        assert (await polling).last_add_confirmed == 3
        assert (await node.handles.meet(1)).waiter_count == 0

    on_a_node(test, with_two_ledgers())


@pytest.mark.parametrize("event", ["fence", "stop"])
def test_what_ends_a_poll_is_not_missed_while_it_looks_at_old_news(event):
    async def test(node):
        await node.add(entry(1, 0))
        polling = asyncio.ensure_future(node.read_lac(1, previous_lac=2, wait_ms=50_000))
        await asyncio.sleep(1)
        handle = await node.handles.meet(1)
        handle.raise_lac(1)  # and in the same step of the loop:
        handle.end_waiting() if event == "fence" else node.handles.wake_all()
        await asyncio.wait_for(polling, 1)
        assert handle.waiter_count == 0

    on_a_node(test, with_two_ledgers())


def test_a_long_poll_ends_at_its_time_and_leaves_nothing_behind():
    async def test(node):
        before = current().time()
        response = await node.read_lac(1, previous_lac=-1, wait_ms=2000)
        assert (response.status, response.last_add_confirmed) == (OK, -1)
        assert 2 <= current().time() - before < 3
        handle = await node.handles.meet(1)
        assert handle.waiter_count == 0

    on_a_node(test, with_two_ledgers())


@pytest.mark.parametrize("event", ["fence", "stop", "explicit lac"])
def test_what_ends_a_ledgers_quiet_wakes_long_polls(event):
    async def test(node):
        polling = asyncio.ensure_future(node.read_lac(1, previous_lac=-1, wait_ms=50_000))
        await asyncio.sleep(1)
        before = current().time()
        if event == "fence":
            await node.fence(1)
        elif event == "stop":
            await node.bookie.stop()
        else:
            await node.write_lac(1, 0)
        response = await polling
        assert current().time() - before < 5
        assert response.fenced is (event == "fence")

    on_a_node(test, with_two_ledgers())
