"""Ranged reads stream: what was returned counts, whatever ends them."""

import asyncio

import pytest

from bookie_server.api import messages as m
from spark_ledger import errors
from spark_ledger.ledger.ledger_view import EntryStream
from tests.simulation.loop import current
from tests.unit.spark_ledger.ledger.fakes import cluster_of, simulated

SMALL = {"read_request_bytes": 400, "read_ahead_bytes": 1600}


async def ledger_of(ledgers, count):
    writer = await ledgers.create(3, 3, 2)
    await asyncio.gather(*(writer.append(bytes([n % 256]) * 10) for n in range(count)))
    await writer.close()
    return writer, await ledgers.open(writer.ledger_id, recover=False)


async def ids(stream):
    return [entry_id async for entry_id, _ in stream]


@simulated
async def test_a_range_within_the_ledger_ends_where_it_was_to_end():
    _, ledgers = await cluster_of(3, **SMALL)
    _, reader = await ledger_of(ledgers, 50)
    stream = reader.read(7, 48)
    assert await ids(stream) == list(range(7, 49))
    assert stream.next_entry == 49


@simulated
async def test_an_error_is_no_end_and_what_came_before_it_is_told():
    cluster, ledgers = await cluster_of(3, **SMALL)
    writer, reader = await ledger_of(ledgers, 50)
    for bookie in cluster.bookies.values():
        bookie.entries.pop((writer.ledger_id, 30), None)
    stream = reader.read(0, 49)
    with pytest.raises(errors.DataUnavailable):
        await ids(stream)
    assert stream.next_entry == 30


@simulated
async def test_an_unexpected_exception_is_raised_by_each_call_and_is_no_end():
    broken = True

    async def entries(first):
        for entry_id in range(first, 4):
            if broken and entry_id == 2:
                raise OSError("what nobody thought of")
            yield entry_id, None

    stream = EntryStream(0, entries)
    assert [(await anext(stream))[0] for _ in range(2)] == [0, 1]
    for _ in range(3):
        with pytest.raises(OSError):
            await anext(stream)
    broken = False
    assert await ids(stream) == [2, 3]


@simulated
async def test_a_read_given_up_in_the_middle_is_no_end_and_goes_on():
    cluster, ledgers = await cluster_of(3, **SMALL)
    _, reader = await ledger_of(ledgers, 50)
    stream = reader.read(0, 49)
    assert [(await anext(stream))[0] for _ in range(20)] == list(range(20))
    for bookie in cluster.bookies.values():
        bookie.silent = True
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await ids(stream)
    for bookie in cluster.bookies.values():
        bookie.silent = False
    expected = list(range(stream.next_entry, 50))
    assert await ids(stream) == expected
    assert expected


@simulated
async def test_entries_come_before_the_range_is_read_to_its_end():
    cluster, ledgers = await cluster_of(3, **SMALL)
    _, reader = await ledger_of(ledgers, 200)
    for bookie in cluster.bookies.values():
        bookie.delay_s = 0.1
    stream, began = reader.read(0, 199), current().time()
    assert (await anext(stream))[0] == 0
    assert current().time() - began < 0.15
    await stream.aclose()
    await asyncio.sleep(1)
    asked = [r for b in cluster.bookies.values() for r in b.requests]
    assert len([r for r in asked if isinstance(r, m.ReadRequest)]) <= 3


@simulated
async def test_what_makes_no_sense_is_refused_at_once_and_an_empty_range_is_empty():
    _, ledgers = await cluster_of(3)
    _, reader = await ledger_of(ledgers, 3)
    with pytest.raises(ValueError, match="start at 0"):
        reader.read(-1, 2)
    assert await ids(reader.read(2, 1)) == []
