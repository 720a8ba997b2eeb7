"""A long scan is a stream of one bookie; whatever goes wrong there, the others go on."""

import pytest

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from spark_ledger import errors
from spark_ledger.bookies.bookie_client import CallFailed
from spark_ledger.ledger.range_fetch import RangeFetch
from tests.simulation.loop import current
from tests.unit.spark_ledger.ledger.fakes import SilentFor, cluster_of, simulated
from tests.unit.spark_ledger.ledger.reads import collect, reads_of, written

LONG = {"read_request_bytes": 400, "read_ahead_bytes": 1600, "speculative_read_delay_s": 0.3}
COUNT = 200


async def long_ledger():
    cluster, ledgers = await cluster_of(3, **LONG)
    writer = await written(ledgers, COUNT)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    return cluster, reader


def at_entry(entry_id, answer):
    """An override: one answer to the first read that comes so far."""
    left = [answer]

    def override(request):
        if isinstance(request, m.ReadRequest) and left and request.first_entry >= entry_id:
            return left.pop()
        return None

    return override


def length(read):
    return read.last_entry - read.first_entry + 1


def bookies_asked(cluster):
    return {r.bookie_id for r in reads_of(cluster)}


@simulated
async def test_a_long_scan_is_read_from_one_bookie_and_each_scan_from_another():
    cluster, reader = await long_ledger()
    seen = []
    for _ in range(3):
        assert await collect(reader, 0, COUNT - 1) == list(range(COUNT))
        seen.append(bookies_asked(cluster))
        for bookie in cluster.bookies.values():
            bookie.requests.clear()
    assert sorted(seen, key=str) == [{"a"}, {"b"}, {"c"}]


@pytest.mark.parametrize(
    "trouble",
    [
        CallFailed("reset"),
        SilentFor(3),
        m.ReadResponse(Status.BUSY, retry_after_ms=20),
        m.ReadResponse(Status.SHUTTING_DOWN),
        m.ReadResponse(Status.OK, [m.EntryResult(Status.IO_ERROR)]),
        m.ReadResponse(Status.OK, [m.EntryResult(Status.NO_SUCH_ENTRY)]),
        m.ReadResponse(Status.OK, [m.EntryResult(Status.OK, b"damaged")]),
        m.ReadResponse(Status.OK, []),
    ],
    ids=["reset", "silent", "busy", "stopping", "bad entry", "denied", "damaged", "empty"],
)
def test_whatever_ends_a_stream_in_the_middle_the_scan_goes_on_with_every_entry_once(trouble):
    @simulated
    async def test():
        cluster, reader = await long_ledger()
        for bookie in cluster.bookies.values():
            bookie.override = at_entry(COUNT // 2, trouble)
        began = current().time()
        assert await collect(reader, 0, COUNT - 1) == list(range(COUNT))
        assert current().time() - began < 1.5

    test()


@simulated
async def test_a_bookie_that_keeps_a_long_scan_waiting_is_chosen_last_once_another_was_sooner():
    cluster, reader = await long_ledger()
    once = at_entry(COUNT // 2, SilentFor(100))
    for bookie in cluster.bookies.values():
        bookie.override = once
    await collect(reader, 0, COUNT - 1)
    (hung,) = {r.bookie_id for r in reads_of(cluster) if r.first_entry < COUNT // 2}
    for bookie in cluster.bookies.values():
        bookie.requests.clear()
    for _ in range(3):
        await collect(reader, 0, COUNT - 1)
    assert hung not in bookies_asked(cluster)


@simulated
async def test_an_entry_that_no_bookie_delivers_ends_a_long_scan_as_any_other():
    cluster, reader = await long_ledger()
    for bookie in cluster.bookies.values():
        del bookie.entries[reader.ledger_id, 150]
    found = []
    with pytest.raises(errors.DataUnavailable):
        async for entry_id, _ in reader.read(0, COUNT - 1):
            found.append(entry_id)
    assert found == list(range(150))


@pytest.mark.parametrize(("near", "asked"), [([0, 1, 2], 3), ([1], 1), ([], 1)], ids=str)
def test_what_lies_in_files_that_can_be_read_here_is_not_streamed(monkeypatch, near, asked):
    monkeypatch.setattr("spark_ledger.ledger.reader.LOCAL_READ_BYTES_MIN", 1)
    monkeypatch.setattr(RangeFetch, "local_slots", lambda *_: near)

    @simulated
    async def test():
        cluster, reader = await long_ledger()
        assert await collect(reader, 0, COUNT - 1) == list(range(COUNT))
        assert len(bookies_asked(cluster)) == asked
        assert near == [] or max(map(length, reads_of(cluster))) < COUNT // 4

    test()


@simulated
async def test_striped_ledgers_and_short_ranges_are_not_streamed():
    cluster, ledgers = await cluster_of(3, **LONG)
    writer = await written(ledgers, COUNT, sizes=(3, 2, 2))
    reader = await ledgers.open(writer.ledger_id, recover=False)
    assert await collect(reader, 0, COUNT - 1) == list(range(COUNT))
    assert len(bookies_asked(cluster)) == 3
