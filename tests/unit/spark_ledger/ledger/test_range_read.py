"""Ranged reads: they stream, and they say why they stopped."""

import asyncio

import pytest

from bookie_server.api import messages as m
from spark_ledger import errors
from spark_ledger.ledger.read.tail import EntryStream, Stopped
from tests.simulation.loop import current
from tests.unit.spark_ledger.ledger.fakes import cluster_of, simulated

SMALL = {"read_request_bytes": 400, "read_ahead_bytes": 1600}


async def ledger_of(ledgers, count, close=True, size=10):
    writer = await ledgers.create(3, 3, 2)
    await asyncio.gather(*(writer.append(bytes([n % 256]) * size) for n in range(count)))
    if close:
        await writer.close()
    return writer, await ledgers.open(writer.ledger_id, recover=False)


async def ids(scan):
    return [entry_id async for entry_id, _ in scan]


@simulated
async def test_a_closed_ledger_read_to_its_end_says_so():
    _, ledgers = await cluster_of(3, **SMALL)
    _, reader = await ledger_of(ledgers, 50)
    for last in (None, 50, 2**63 - 1):
        scan = reader.scan(0, last)
        assert await ids(scan) == list(range(50))
        assert (scan.stop, scan.next_entry) == (Stopped.END_OF_LEDGER, 50)


@simulated
async def test_a_range_within_the_ledger_ends_where_it_was_to_end():
    _, ledgers = await cluster_of(3, **SMALL)
    _, reader = await ledger_of(ledgers, 50)
    scan = reader.scan(7, 49)
    assert await ids(scan) == list(range(7, 50))
    assert (scan.stop, scan.next_entry) == (Stopped.END_OF_RANGE, 50)


@simulated
async def test_an_open_ledger_is_read_up_to_what_is_confirmed_when_the_read_begins():
    _, ledgers = await cluster_of(3, **SMALL)
    writer, reader = await ledger_of(ledgers, 50, close=False)
    await writer.append(b"\x32")
    for last in (None, 50, 70):
        scan = reader.scan(0, last)
        assert await ids(scan) == list(range(50))
        assert (scan.stop, scan.next_entry) == (Stopped.LAST_CONFIRMED, 50)
    await writer.close()
    scan = reader.scan(50)
    assert await ids(scan) == [50]
    assert scan.stop is Stopped.END_OF_LEDGER


@simulated
async def test_of_an_open_ledger_nothing_confirmed_is_never_its_end():
    _, ledgers = await cluster_of(3)
    writer, reader = await ledger_of(ledgers, 0, close=False)
    scan = reader.scan(0)
    assert await ids(scan) == []
    assert (scan.stop, scan.next_entry) == (Stopped.LAST_CONFIRMED, 0)
    await writer.close()
    scan = reader.scan(0)
    assert await ids(scan) == []
    assert (scan.stop, scan.next_entry) == (Stopped.END_OF_LEDGER, 0)


@simulated
async def test_a_limit_in_bytes_stops_before_the_entry_that_exceeds_it():
    cluster, ledgers = await cluster_of(3)
    _, reader = await ledger_of(ledgers, 50, size=100)
    at, parts = 0, []
    while at < 50:
        scan = reader.scan(at, max_bytes=350)
        parts.append(await ids(scan))
        at = scan.next_entry
        assert scan.stop is (Stopped.BYTE_LIMIT if at < 50 else Stopped.END_OF_LEDGER)
    assert parts == [list(range(n, min(n + 3, 50))) for n in range(0, 50, 3)]
    asked = [
        r.max_bytes
        for bookie in cluster.bookies.values()
        for r in bookie.requests
        if isinstance(r, m.ReadRequest)
    ]
    assert max(asked) <= 350 + 64


@simulated
async def test_an_entry_larger_than_the_limit_is_returned_alone():
    _, ledgers = await cluster_of(3)
    _, reader = await ledger_of(ledgers, 3, size=100)
    scan = reader.scan(0, max_bytes=1)
    assert await ids(scan) == [0]
    assert (scan.stop, scan.next_entry) == (Stopped.BYTE_LIMIT, 1)


@simulated
async def test_an_error_is_no_stop_and_what_came_before_it_is_told():
    cluster, ledgers = await cluster_of(3, **SMALL)
    writer, reader = await ledger_of(ledgers, 50)
    for bookie in cluster.bookies.values():
        bookie.entries.pop((writer.ledger_id, 30), None)
    scan = reader.scan(0)
    with pytest.raises(errors.DataUnavailable):
        await ids(scan)
    assert (scan.stop, scan.next_entry) == (None, 30)


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


@pytest.mark.parametrize("limit", [None, 255])
def test_a_read_given_up_in_the_middle_is_no_end_and_goes_on(limit):
    @simulated
    async def test():
        cluster, ledgers = await cluster_of(3, **SMALL)
        _, reader = await ledger_of(ledgers, 50)
        scan = reader.scan(0, max_bytes=limit)
        streams = [scan] if limit else [scan, reader.read(0, 49)]
        for stream in streams:
            assert [(await anext(stream))[0] for _ in range(20)] == list(range(20))
            for bookie in cluster.bookies.values():
                bookie.silent = True
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await ids(stream)
            for bookie in cluster.bookies.values():
                bookie.silent = False
            assert scan.stop is None or stream is not scan
            expected = list(range(stream.next_entry, 25 if limit else 50))
            assert await ids(stream) == expected
            assert expected
        assert scan.stop is (Stopped.BYTE_LIMIT if limit else Stopped.END_OF_LEDGER)

    test()


@simulated
async def test_entries_come_before_the_range_is_read_to_its_end():
    cluster, ledgers = await cluster_of(3, **SMALL)
    _, reader = await ledger_of(ledgers, 200)
    for bookie in cluster.bookies.values():
        bookie.delay_s = 0.1
    scan, began = reader.scan(0), current().time()
    assert (await anext(scan))[0] == 0
    assert current().time() - began < 0.15
    await scan.aclose()
    assert scan.stop is None
    await asyncio.sleep(1)
    asked = [r for b in cluster.bookies.values() for r in b.requests]
    assert len([r for r in asked if isinstance(r, m.ReadRequest)]) <= 3


@simulated
async def test_what_makes_no_sense_is_refused_at_once():
    _, ledgers = await cluster_of(3)
    _, reader = await ledger_of(ledgers, 3)
    with pytest.raises(ValueError, match="start at 0"):
        reader.scan(-1)
    with pytest.raises(ValueError, match="positive"):
        reader.scan(0, max_bytes=0)
    scan = reader.scan(2, 1)
    assert await ids(scan) == []
    assert scan.stop is Stopped.END_OF_RANGE
