"""A reader that asks for what is confirmed, and waits so long at most."""

import asyncio

import pytest

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from spark_ledger import errors
from spark_ledger.bookies.bookie_client import CallFailed
from tests.simulation.loop import current
from tests.unit.spark_ledger.ledger.fakes import SilentFor, cluster_of, simulated
from tests.unit.spark_ledger.ledger.tails import append, ended_within, waiting, written


@simulated
async def test_entries_are_read_as_soon_as_they_are_confirmed():
    _, ledgers = await cluster_of(3)
    writer = await written(ledgers, 5)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    found = await reader.read_when_confirmed(-1, 10)
    assert [e for e, _ in found] == list(range(5))
    waited = asyncio.ensure_future(reader.read_when_confirmed(4, 60))
    await asyncio.sleep(20)
    assert not waited.done()
    await append(writer, 5, 6)
    assert [e for e, _ in await ended_within(waited, 0.2)] == [5]


@simulated
async def test_when_the_time_is_over_there_is_nothing_and_nobody_waits():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 5)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    for timeout_s in (0.05, 1.0, 12.0):
        began = current().time()
        assert await reader.read_when_confirmed(4, timeout_s) == []
        assert timeout_s - 0.01 <= current().time() - began <= timeout_s + 0.1
        assert not reader.is_closed
        assert waiting(cluster) == 0


@simulated
async def test_with_no_time_at_all_what_is_confirmed_now_is_read():
    _, ledgers = await cluster_of(3)
    writer = await written(ledgers, 5)
    await asyncio.sleep(1)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    assert len(await reader.read_when_confirmed(-1, 0)) == 5
    assert await reader.read_when_confirmed(4, 0) == []


@simulated
async def test_nothing_comes_after_the_end_and_it_is_said_at_once():
    _, ledgers = await cluster_of(3)
    writer = await written(ledgers, 5)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    await writer.close()
    waited = asyncio.ensure_future(reader.read_when_confirmed(4, 60))
    assert await ended_within(waited, 0.2) == []
    assert reader.is_closed
    assert len(await reader.read_when_confirmed(2, 60)) == 2


@simulated
async def test_what_comes_at_once_is_limited_in_bytes():
    _, ledgers = await cluster_of(3, read_request_bytes=400, read_ahead_bytes=1600)
    writer = await ledgers.create(3, 3, 2)
    await asyncio.gather(*(writer.append(bytes(150)) for _ in range(10)))
    await writer.close()
    reader = await ledgers.open(writer.ledger_id, recover=False)
    assert [e for e, _ in await reader.read_when_confirmed(-1, 1)] == [0, 1]
    assert [e for e, _ in await reader.read_when_confirmed(7, 1)] == [8, 9]


@simulated
async def test_a_thousand_polls_given_up_leave_nobody_waiting():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 5)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    await reader.refresh_last_add_confirmed()
    polls = [asyncio.ensure_future(reader.wait_beyond(4, 0.5)) for _ in range(300)]
    polls += [asyncio.ensure_future(reader.wait_beyond(4, 60)) for _ in range(700)]
    await asyncio.sleep(0.1)
    assert waiting(cluster) == 3000
    for poll in polls[300:]:
        poll.cancel()
    await asyncio.gather(*polls, return_exceptions=True)
    await asyncio.sleep(0.1)
    assert waiting(cluster) == 0
    assert len(asyncio.all_tasks()) < 10


@simulated
async def test_the_time_is_kept_though_no_bookie_answers():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 5)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    for bookie in cluster.bookies.values():
        bookie.silent = True
    began = current().time()
    assert await reader.read_when_confirmed(4, 2) == []
    assert current().time() - began < 2.1
    for bookie in cluster.bookies.values():
        bookie.silent, bookie.override = False, lambda _: CallFailed("reset")
    with pytest.raises(errors.DataUnavailable, match="reset"):
        await reader.read_when_confirmed(4, 2)


@simulated
async def test_the_time_is_kept_though_what_is_confirmed_cannot_be_had():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 5)
    await asyncio.sleep(1)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    await reader.refresh_last_add_confirmed()
    for bookie in cluster.bookies.values():
        bookie.silent = True
    for timeout_s, spent_s in ((0.2, 0.2), (4.0, 4.0), (0, ledgers.config.read_timeout_s)):
        began = current().time()
        assert await reader.read_when_confirmed(-1, timeout_s) == []
        assert current().time() - began == pytest.approx(spent_s, abs=0.01)
    with pytest.raises(errors.DataUnavailable, match="too late"):
        await reader.read_when_confirmed(-1, 60)
    for bookie in cluster.bookies.values():
        bookie.silent, bookie.override = False, lambda _: m.ReadResponse(Status.UNAUTHORIZED)
    with pytest.raises(errors.Unauthorized):
        await reader.read_when_confirmed(-1, 0.2)


@simulated
async def test_when_the_time_is_over_what_came_by_then_is_returned():
    cluster, ledgers = await cluster_of(3, read_ahead_bytes=300, read_request_bytes=4000)
    writer = await written(ledgers, 20)
    await writer.close()
    reader = await ledgers.open(writer.ledger_id, recover=False)

    for bookie in cluster.bookies.values():
        bookie.override = lambda request: SilentFor(60) if request.last_entry > 10 else None
    began = current().time()
    found = [entry_id for entry_id, _ in await reader.read_when_confirmed(-1, 2)]
    assert current().time() - began == pytest.approx(2, abs=0.01)
    assert found and found == list(range(len(found))) and len(found) < 20


@simulated
async def test_two_hung_replicas_keep_nobody_from_the_third():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 5)
    await asyncio.sleep(1)
    for hung in ("ab", "bc", "ca"):
        reader = await (await cluster.client(hung)).open(writer.ledger_id, recover=False)
        await reader.refresh_last_add_confirmed()
        for name in hung:
            cluster.bookies[name].silent = True
        began = current().time()
        assert len(await reader.read_when_confirmed(-1, 5)) == 5
        assert current().time() - began < 0.7
        for name in hung:
            cluster.bookies[name].silent = False
