"""A reader while the metadata store does not answer: the bookies are heard all the same."""

import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.metadata.store import StoreUnavailable
from tests.simulation.loop import current
from tests.unit.spark_ledger.ledger.fakes import cluster_of, simulated
from tests.unit.spark_ledger.ledger.reads import written


def hang(store, call="get", seconds=15.0, then=None):
    """A call takes so long, then fails, or does what it does."""
    plain = getattr(store, call)

    async def slow(*arguments):
        await asyncio.sleep(seconds)
        if then is None:
            raise StoreUnavailable("no answer")
        return await plain(*arguments)

    setattr(store, call, slow)


async def opened(count=10):
    """A cluster, a writer of so many entries, and a reader that knows of none yet."""
    cluster, ledgers = await cluster_of(5)
    writer = await written(ledgers, count, close=False)
    client = await cluster.client("reader")
    reader = await client.open(writer.ledger_id, recover=False)
    await writer.append(bytes([count]))  # carries what is confirmed
    return cluster, writer, client, reader


@simulated
async def test_what_bookies_confirm_is_told_though_the_store_hangs():
    _, _, client, reader = await opened()
    for call in ("get", "sync"):
        hang(client.metadata, call)
    began = current().time()
    assert await reader.refresh_last_add_confirmed() == 9
    assert current().time() - began <= client.config.read_timeout_s


@simulated
async def test_beyond_what_is_confirmed_nothing_is_said_before_the_store_answers():
    _, _, client, reader = await opened()
    for call in ("get", "sync"):
        hang(client.metadata, call)
    began = current().time()
    with pytest.raises(errors.Unavailable, match="may or may not go on"):
        await anext(reader.read(0, 50))
    assert current().time() - began <= 2 * client.config.read_timeout_s
    found = [entry_id async for entry_id, _ in reader.read(0, 9)]
    assert found == list(range(10))


@simulated
async def test_a_slow_store_that_tells_of_the_end_is_believed():
    _, writer, client, reader = await opened()
    await writer.close()
    hang(client.metadata, seconds=2.0, then="answer")
    began = current().time()
    assert await reader.refresh_last_add_confirmed() == 10
    assert reader.is_closed
    assert current().time() - began < 2.1


@simulated
async def test_a_slow_store_that_names_other_bookies_sends_the_reader_there():
    cluster, writer, client, reader = await opened()
    old = writer.record.last_fragment.ensemble
    for name in old[:2]:
        cluster.bookies[name].refusing = True
    await writer.append(b"moved")
    await writer.append(b"on")
    assert writer.record.last_fragment.ensemble != old
    cluster.bookies[old[2]].lac.clear()
    hang(client.metadata, seconds=2.0, then="answer")
    assert await reader.refresh_last_add_confirmed() == 11
    assert reader.record.last_fragment == writer.record.last_fragment


@simulated
async def test_when_neither_answers_the_bookies_are_named():
    cluster, _, client, reader = await opened()
    hang(client.metadata)
    for bookie in cluster.bookies.values():
        bookie.refusing = True
    began = current().time()
    with pytest.raises(errors.DataUnavailable, match="refused"):
        await reader.refresh_last_add_confirmed()
    assert current().time() - began <= client.config.read_timeout_s
