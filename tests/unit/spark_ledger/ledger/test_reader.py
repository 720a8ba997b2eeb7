"""The reader against scripted bookies: only what is confirmed, from whoever has it."""

import asyncio
import itertools
import pickle

import pytest

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from spark_ledger import errors
from spark_ledger.bookies.bookie_client import CallFailed
from spark_ledger.ledger.reader import AsyncLedgerReader
from spark_ledger.metadata.ledger_record import derive
from tests.simulation.loop import current
from tests.unit.spark_ledger.ledger.fakes import cluster_of, simulated
from tests.unit.spark_ledger.ledger.reads import collect, reads_of, written


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 3, 2), (3, 2, 2), (4, 2, 1), (5, 3, 2)], ids=str)
def test_a_closed_ledger_reads_whole_and_in_parts_whatever_its_striping(sizes):
    @simulated
    async def test():
        _, ledgers = await cluster_of(5, read_request_bytes=400, read_ahead_bytes=1200)
        writer = await written(ledgers, 100, sizes=sizes)
        reader = await ledgers.open(writer.ledger_id, recover=False)
        assert reader.is_closed
        assert reader.last_add_confirmed == 99
        for first, last in ((0, 99), (7, 7), (33, 98)):
            assert await collect(reader, first, last) == list(range(first, last + 1))

    test()


@simulated
async def test_an_open_ledger_is_read_up_to_its_last_add_confirmed_and_no_further():
    _, ledgers = await cluster_of(3)
    writer = await written(ledgers, 10, close=False)
    await writer.append(b"\x0a")
    reader = await ledgers.open(writer.ledger_id, recover=False)
    confirmed = await reader.refresh_last_add_confirmed()
    assert confirmed == 9
    assert await collect(reader, 0, 9) == list(range(10))
    with pytest.raises(errors.NoSuchEntry):
        await collect(reader, 0, 10)


@simulated
async def test_what_the_caller_knows_to_be_confirmed_is_read():
    _, ledgers = await cluster_of(3)
    writer = await written(ledgers, 10, close=False)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    assert await collect(reader, 0, 9, known_confirmed=9) == list(range(10))


@simulated
async def test_beyond_the_end_of_a_closed_ledger_nothing_is_confirmed_whoever_says_so():
    _, ledgers = await cluster_of(3)
    writer = await written(ledgers, 10)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    with pytest.raises(errors.NoSuchEntry):
        await collect(reader, 5, 10, known_confirmed=10)


@simulated
async def test_a_dead_bookie_costs_nothing_but_a_moment():
    cluster, ledgers = await cluster_of(3, read_request_bytes=400, read_ahead_bytes=1200)
    writer = await written(ledgers, 100)
    cluster.bookies["a"].refusing = True
    reader = await ledgers.open(writer.ledger_id, recover=False)
    assert await collect(reader, 0, 99) == list(range(100))


@simulated
async def test_one_of_three_bookies_is_enough_to_read():
    cluster, ledgers = await cluster_of(3, read_request_bytes=400, read_ahead_bytes=1200)
    writer = await written(ledgers, 100)
    cluster.bookies["a"].refusing = cluster.bookies["b"].silent = True
    reader = await ledgers.open(writer.ledger_id, recover=False)
    began = current().time()
    assert await collect(reader, 0, 99) == list(range(100))
    assert current().time() - began < 12


@simulated
async def test_bookies_that_came_back_elsewhere_are_read_before_anybody_was_told_of_it():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 9)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    moved = {}
    plain_call = cluster.network.call

    async def call(address, *rest):
        name, _, port = address.partition(":")
        if port == "2":
            return await plain_call(address, *rest)
        if len(moved) < 3:
            moved[name] = None
            await cluster.deregister(name)
            await cluster.register(name, port=2)
        raise CallFailed("connection refused")

    await ledgers.cluster.directory.close()  # it hears of nothing
    cluster.network.call = call
    assert await collect(reader, 0, 8) == list(range(9))
    assert len(moved) == 3


@simulated
async def test_a_damaged_copy_is_read_from_the_next_replica():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 9)
    for entry in range(9):
        for name in ("ab", "bc", "ca")[entry % 3]:
            data = cluster.bookies[name].entries[writer.ledger_id, entry]
            cluster.bookies[name].entries[writer.ledger_id, entry] = data[:-1] + b"\xff"
    reader = await ledgers.open(writer.ledger_id, recover=False)
    assert await collect(reader, 0, 8) == list(range(9))


@simulated
async def test_when_every_copy_is_damaged_the_error_says_so():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 3)
    for bookie in cluster.bookies.values():
        data = bookie.entries[writer.ledger_id, 1]
        bookie.entries[writer.ledger_id, 1] = data[:-1] + b"\xff"
    reader = await ledgers.open(writer.ledger_id, recover=False)
    with pytest.raises(errors.DigestMismatch):
        await collect(reader, 0, 2)


@simulated
@pytest.mark.parametrize(
    ("response", "damaged"),
    [
        (m.ReadResponse(Status.OK, [m.EntryResult(Status.OK, b"?")]), True),
        (m.ReadResponse(Status.OK, [m.EntryResult(Status.IO_ERROR)]), True),
        (m.ReadResponse(Status.IO_ERROR, reason="its copy is damaged or unreadable"), False),
        (m.ReadResponse(Status.BUSY, reason="BAD_DIGEST"), False),
    ],
    ids=["readers find it", "bookies find it", "a bookie's disk failed", "a bookie is busy"],
)
async def test_whether_every_copy_is_damaged_is_a_fact_of_the_error_and_no_text_decides(
    response, damaged
):
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 1)
    for bookie in cluster.bookies.values():
        bookie.override = lambda request: response if isinstance(request, m.ReadRequest) else None
    reader = await ledgers.open(writer.ledger_id, recover=False)
    with pytest.raises(errors.LedgerError) as raised:
        await collect(reader, 0, 0)
    assert pickle.loads(pickle.dumps(raised.value)).facts["damaged"] is damaged


async def read_back(reader, last, first):
    """What comes: an entry's id, or the id and the kind of error in its place."""
    came = []
    async for entry_id, entry in reader.read_back(last, first):
        if isinstance(entry, errors.LedgerError):
            came.append((entry_id, type(entry)))
        else:
            assert entry.header.entry_id == entry_id
            came.append(entry_id)
    return came


@pytest.mark.parametrize("bad", [(), (0,), (99,), (96, 97, 98), (40, 42), (3, 50, 99)], ids=str)
@simulated
async def test_entries_read_back_come_once_each_with_why_in_the_place_of_those_that_cannot_be_had(
    bad,
):
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 100)
    for bookie, entry in itertools.product(cluster.bookies.values(), bad):
        if entry % 2:
            del bookie.entries[writer.ledger_id, entry]
        else:
            data = bookie.entries[writer.ledger_id, entry]
            bookie.entries[writer.ledger_id, entry] = data[:-1] + b"\xff"
    reader = await ledgers.open(writer.ledger_id, recover=False)
    kinds = (errors.DigestMismatch, errors.DataUnavailable)
    expected = [(id_, kinds[id_ % 2]) if id_ in bad else id_ for id_ in range(99, -1, -1)]
    assert await read_back(reader, 99, 0) == expected
    assert await read_back(reader, 70, 60) == list(range(70, 59, -1))
    assert await read_back(reader, 3, 4) == []


@simulated
async def test_entries_are_read_back_in_windows_that_double_and_keep_a_requests_bytes(monkeypatch):
    cluster, ledgers = await cluster_of(3, read_request_bytes=4000)
    small, large = await written(ledgers, 500), await written(ledgers, 100, size=1000)

    def requests():
        asked = [r for b in cluster.bookies.values() for r in b.requests]
        return sum(isinstance(request, m.ReadRequest) for request in asked)

    real, windows = AsyncLedgerReader.read_entries, []

    def read_entries(reader, ids, **options):
        windows.append((ids[0], len(ids)))
        return real(reader, ids, **options)

    monkeypatch.setattr(AsyncLedgerReader, "read_entries", read_entries)
    reader = await ledgers.open(small.ledger_id, recover=False)
    before = requests()
    await read_back(reader, 499, 0)
    assert len(windows) < 15
    assert requests() - before < 100, "by bytes a request has some 50 of them"

    reader = await ledgers.open(large.ledger_id, recover=False)
    windows.clear()
    assert await read_back(reader, 99, 0) == list(range(99, -1, -1))
    assert windows[:5] == [(99, 1), (97, 2), (93, 4), (85, 8), (81, 8)], "four of eight are kept"


@simulated
async def test_a_confirmed_entry_that_all_deny_is_unavailable_and_never_the_end():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 3)
    for bookie in cluster.bookies.values():
        del bookie.entries[writer.ledger_id, 2]
    reader = await ledgers.open(writer.ledger_id, recover=False)
    with pytest.raises(errors.DataUnavailable, match="NO_SUCH_ENTRY"):
        await collect(reader, 0, 2)


@simulated
async def test_a_reader_with_an_old_record_reads_it_again_when_entries_are_denied():
    cluster, ledgers = await cluster_of(6)
    writer = await written(ledgers, 5, close=False)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    old = writer.record.last_fragment.ensemble
    for name in old:
        cluster.bookies[name].refusing = True
    await asyncio.gather(*(writer.append(bytes([n])) for n in range(5, 10)))
    await writer.close()
    for name in old:
        cluster.bookies[name].refusing = False
    assert await collect(reader, 0, 9, known_confirmed=9) == list(range(10))
    assert reader.is_closed


@simulated
async def test_what_was_fetched_ahead_by_an_old_record_is_fetched_again_by_the_new_one():
    cluster, ledgers = await cluster_of(6, read_request_bytes=100, read_ahead_bytes=1000)
    writer = await written(ledgers, 200, close=False)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    old = writer.record.last_fragment.ensemble
    for name in old:
        cluster.bookies[name].refusing = True
    await asyncio.gather(*(writer.append(bytes([n]) * 10) for n in range(200, 250)))
    for name in old:
        cluster.bookies[name].refusing = False
    assert await collect(reader, 0, 249, known_confirmed=249) == list(range(250))
    await writer.close()


@simulated
@pytest.mark.parametrize(("count", "bookies"), [(30, 3), (200, 1)], ids=["short", "long"])
async def test_what_is_fetched_ahead_stays_within_its_bytes(count, bookies):
    """A short range is asked of several bookies, a long one is a stream of one."""
    cluster, ledgers = await cluster_of(3, read_request_bytes=2000, read_ahead_bytes=8000)
    writer = await written(ledgers, count, size=200)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    entries = reader.read(0, count - 1)
    await anext(entries)
    await asyncio.sleep(5)
    asked = [
        r
        for bookie in cluster.bookies.values()
        for r in bookie.requests
        if isinstance(r, m.ReadRequest)
    ]
    assert 2 <= len(asked) <= 5
    assert len({r.bookie_id for r in asked}) == bookies
    await entries.aclose()


@simulated
async def test_entries_larger_than_a_request_are_read_one_by_one():
    _, ledgers = await cluster_of(3, read_request_bytes=100, read_ahead_bytes=300)
    writer = await written(ledgers, 12, size=500)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    assert await collect(reader, 0, 11) == list(range(12))


@simulated
async def test_a_wrong_password_is_told_apart_from_lost_data():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 3)
    for bookie in cluster.bookies.values():
        bookie.override = lambda request: m.ReadResponse(Status.UNAUTHORIZED)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    with pytest.raises(errors.Unauthorized):
        await collect(reader, 0, 2)


@simulated
async def test_a_ledger_whose_password_one_bookie_took_for_wrong_is_not_called_unauthorized():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 3)
    cluster.bookies["a"].override = lambda request: m.ReadResponse(Status.UNAUTHORIZED)
    cluster.bookies["b"].refusing = cluster.bookies["c"].refusing = True
    reader = await ledgers.open(writer.ledger_id, recover=False)
    with pytest.raises(errors.DataUnavailable, match="UNAUTHORIZED"):
        await collect(reader, 0, 2)


# -- how far it may read ------------------------------------------------------------------------


@simulated
async def test_an_old_handle_reads_what_recovery_found_though_its_session_lags():
    cluster, ledgers = await cluster_of(6)
    writer = await written(ledgers, 10, close=False)
    other = await cluster.client("other")
    reader = await other.open(writer.ledger_id, recover=False)
    assert await reader.refresh_last_add_confirmed() < 9
    cluster.store.faults.lag_s = 3.0
    closed = await ledgers.recover(writer.ledger_id)
    assert closed.record.last_entry == 9
    assert await collect(reader, 0, 9) == list(range(10))
    assert reader.is_closed


@simulated
async def test_an_old_handle_reads_what_recovery_wrote_elsewhere():
    cluster, ledgers = await cluster_of(6)
    writer = await written(ledgers, 10, close=False)
    other = await cluster.client("other")
    reader = await other.open(writer.ledger_id, recover=False)
    old = writer.record.last_fragment.ensemble
    gone = cluster.bookies[old[0]]
    gone.refusing = True
    await ledgers.recover(writer.ledger_id)
    for name in old[1:]:
        if not cluster.bookies[name].refusing:
            del cluster.bookies[name].entries[writer.ledger_id, 9]
    assert await collect(reader, 0, 9) == list(range(10))


@simulated
async def test_entries_that_moved_are_found_though_the_session_lags():
    cluster, ledgers = await cluster_of(6)
    writer = await written(ledgers, 5, close=False)
    other = await cluster.client("other")
    reader = await other.open(writer.ledger_id, recover=False)
    cluster.store.faults.lag_s = 30.0
    for name in writer.record.last_fragment.ensemble:
        cluster.bookies[name].refusing = True
    await asyncio.gather(*(writer.append(bytes([n])) for n in range(5, 10)))
    for name in reader.record.last_fragment.ensemble:
        cluster.bookies[name].refusing = False
    assert await collect(reader, 0, 9, known_confirmed=9) == list(range(10))


@simulated
async def test_a_record_older_than_the_one_known_is_not_taken():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 5, close=False)
    other = await cluster.client("other")
    await other.record(writer.ledger_id)
    cluster.store.faults.lag_s = 30.0
    await writer.close()
    newest = await ledgers.record(writer.ledger_id, fresh=True)
    old = await other.record(writer.ledger_id)
    assert old.version < newest.version  # what this session would say
    reader = AsyncLedgerReader(other.cluster, newest, derive(b""))
    await reader.refresh_record()
    assert (reader.version, reader.is_closed) == (newest.version, True)


@simulated
async def test_a_ledger_closed_before_what_was_confirmed_is_data_loss_said_aloud():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 10, close=False)
    await writer.append(b"\x0a")
    reader = await ledgers.open(writer.ledger_id, recover=False)
    assert await reader.refresh_last_add_confirmed() == 9
    for bookie in cluster.bookies.values():
        bookie.lac.clear()
        for entry in range(5, 11):
            bookie.entries.pop((writer.ledger_id, entry), None)
    await ledgers.recover(writer.ledger_id)
    with pytest.raises(errors.RowsLost, match="closed at entry 4"):
        await reader.refresh_last_add_confirmed()
    assert reader.last_add_confirmed == 9


@simulated
async def test_without_the_metadata_store_an_open_ledger_is_read_on():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 10, close=False)
    other = await cluster.client("other")
    reader = await other.open(writer.ledger_id, recover=False)
    other.metadata.suspend(60.0)
    await writer.append(b"\x0a")
    assert await reader.refresh_last_add_confirmed() == 9
    assert await collect(reader, 0, 9) == list(range(10))


@simulated
async def test_the_last_add_confirmed_is_not_waited_for_where_nobody_answered_lately():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 10, sizes=(3, 3, 1), close=False)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    cluster.bookies["a"].silent = True
    await reader.refresh_last_add_confirmed()  # Qa = 1: nobody can be left out, the first time
    began = current().time()
    await reader.refresh_last_add_confirmed()
    assert current().time() - began < 0.1


@simulated
async def test_ranges_up_to_the_last_id_there_is_cost_what_is_there():
    cluster, ledgers = await cluster_of(3)
    writer = await written(ledgers, 10, close=False)
    reader = await ledgers.open(writer.ledger_id, recover=False)
    last = 2**63 - 1
    with pytest.raises(errors.NoSuchEntry):
        await collect(reader, 0, last)
    found = []
    with pytest.raises(errors.DataUnavailable):
        async for entry_id, _ in reader.read(0, last, known_confirmed=last):
            found.append(entry_id)
    assert found == list(range(10))
    asked = sorted(r.last_entry for r in reads_of(cluster))
    assert asked[-2] < 20_000, "but for the stream, which had to name an end"
    with pytest.raises(errors.DataUnavailable):
        await collect(reader, last - 1, last, known_confirmed=last)
    assert max(r.last_entry for r in reads_of(cluster)) == last
