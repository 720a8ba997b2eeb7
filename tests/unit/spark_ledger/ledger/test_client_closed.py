"""What is under way when a LedgerStore is closed ends at once, and says why."""

import asyncio

import pytest

from bookie_server.api import messages as m
from spark_ledger import errors
from tests.simulation.loop import current
from tests.unit.spark_ledger.ledger.fakes import SilentFor, cluster_of, simulated
from tests.unit.spark_ledger.ledger.reads import written


async def ends_at_once_when_closed(store, *coroutines):
    """All of them wait now, and end with ClientClosed as soon as the store is closed."""
    waiting = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    await asyncio.sleep(1.5)
    assert not any(task.done() for task in waiting)
    began = current().time()
    await store.close()
    for task in waiting:
        with pytest.raises(errors.ClientClosed, match="this client was closed"):
            await task
    assert current().time() - began < 0.1


async def run_until_one_ends(entries):
    return await anext(entries)


async def appended(writer):
    await writer.append(b"x")


@simulated
async def test_a_tail_a_wait_a_read_and_an_append_end_when_the_client_is_closed():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 5, close=False)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    await reader.refresh_last_add_confirmed()
    for bookie in cluster.bookies.values():
        bookie.override = lambda r: SilentFor(60) if isinstance(r, m.ReadRequest) else None
    held = await ledgers.create(3, 3, 2)
    for name in held.record.last_fragment.ensemble[:2]:
        handle = cluster.bookies[name].handle

        async def silent(request, timeout_s, handle=handle):
            if isinstance(request, m.AddRequest):
                await asyncio.sleep(timeout_s)
            return await handle(request, timeout_s)

        cluster.bookies[name].handle = silent
    await ends_at_once_when_closed(
        ledgers,
        run_until_one_ends(reader.tail(50)),
        reader.wait_beyond(50, 60),
        run_until_one_ends(reader.read(0, 2, known_confirmed=4)),
        appended(held),
    )


@simulated
async def test_a_recovery_that_writes_back_ends_when_the_client_is_closed():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 5, close=False)
    del cluster.bookies["c"].entries[writer.ledger_id, 4]
    for bookie in cluster.bookies.values():
        bookie.override = lambda r: SilentFor(60) if isinstance(r, m.AddRequest) else None
    other = await cluster.client("other")
    await ends_at_once_when_closed(other, other.recover(writer.ledger_id))


@simulated
async def test_a_closed_client_refuses_everything_alike():
    _, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    await ledgers.close()
    for call in (
        ledgers.create(3, 3, 2),
        ledgers.open(writer.ledger_id, recover=True),
        ledgers.open(writer.ledger_id, recover=False),
        ledgers.record(writer.ledger_id),
        ledgers.delete(writer.ledger_id),
        ledgers.allocate_ids(1),
        anext(ledgers.list()),
        appended(writer),
    ):
        with pytest.raises(errors.ClientClosed):
            await call
