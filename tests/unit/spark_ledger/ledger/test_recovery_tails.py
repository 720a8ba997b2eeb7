"""Recovery of a ledger's tail: what comes with the fence, and which entries are written back."""

import pytest

from bookie_server.api import messages as m
from bookie_server.api.entry import unpack_entry
from tests.unit.spark_ledger.ledger.fakes import cluster_of, ledger_on, put, simulated


@simulated
async def test_a_short_ledger_is_recovered_and_its_last_entry_read_by_one_request_to_each_bookie():
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    put(cluster, ledger_id, 0, "abc")
    put(cluster, ledger_id, 1, "abc", lac=0)
    cluster.bookies["a"].lac[ledger_id] = 1  # by an explicit LAC
    reader = await ledgers.open(ledger_id, recover=True, small=True)
    assert (reader.last_add_confirmed, reader.record.rows) == (1, 2)
    assert (await reader.read_entry(1)).header.entry_id == 1
    requests = [bookie.requests for bookie in cluster.bookies.values()]
    assert [[type(request) for request in of_bookie] for of_bookie in requests] == [
        [m.ReadRequest]
    ] * 3


@pytest.mark.parametrize("older", ["", "c", "abc"])
@simulated
async def test_the_last_entries_of_a_long_ledger_come_with_the_fence_and_are_read_from_it(older):
    cluster, ledgers = await cluster_of(3)
    for name in older:
        cluster.bookies[name].is_older = True
    ledger_id = await ledger_on(cluster, ledgers)
    for entry_id in range(100):
        put(cluster, ledger_id, entry_id, "abc", lac=entry_id - 1)
    reader = await ledgers.open(ledger_id, recover=True, small=True)
    assert reader.record.rows == 100
    assert [entry_id async for entry_id, _ in reader.read(94, 99)] == list(range(94, 100))
    if not older:
        assert [len(bookie.requests) for bookie in cluster.bookies.values()] == [1, 1, 1]


@pytest.mark.parametrize("small", [False, True])
@simulated
async def test_only_entries_from_the_first_that_a_member_lacks_on_are_written_back(small):
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    for entry_id in range(6):
        put(cluster, ledger_id, entry_id, "ab" if entry_id == 4 else "abc", lac=1)
    reader = await ledgers.open(ledger_id, recover=True, small=small)
    record = reader.record
    assert (record.last_entry, record.length_bytes, record.rows) == (5, 12, 6)
    assert cluster.holders(ledger_id, 4) == ["a", "b", "c"]
    for bookie in cluster.bookies.values():
        adds = [add for r in bookie.requests if isinstance(r, m.AddRequest) for add in r.adds]
        headers = [unpack_entry(b"".join(add.entry)).header for add in adds]
        assert [header.entry_id for header in headers] == [4, 5]
        assert {header.last_add_confirmed for header in headers} == {1}
    assert [entry_id async for entry_id, _ in reader.read(0, 5)] == list(range(6))


@simulated
async def test_an_entry_that_a_silent_member_may_lack_is_written_back():
    cluster, ledgers = await cluster_of(4)
    ledger_id = await ledger_on(cluster, ledgers)
    put(cluster, ledger_id, 0, "ab")
    cluster.bookies["c"].refusing = True
    record = (await ledgers.recover(ledger_id)).record
    assert record.last_entry == 0
    assert set(cluster.holders(ledger_id, 0)) >= {"a", "b", "d"}


@pytest.mark.parametrize("older", ["", "b", "abc"])
@pytest.mark.parametrize("last", [6, 7, 8, 14, 15, 16, 40])
def test_the_end_of_a_ledger_is_found_within_and_beyond_the_entries_that_come_with_the_fence(
    last, older
):
    @simulated
    async def test():
        for unconfirmed in (0, 1, 3, 12):
            cluster, ledgers = await cluster_of(3)
            for name in older:
                cluster.bookies[name].is_older = True
            ledger_id = await ledger_on(cluster, ledgers)
            for entry_id in range(last + 1):
                lac = min(entry_id - 1, max(last - unconfirmed, -1))
                at = "ab" if entry_id == last - 2 else "abc"
                put(cluster, ledger_id, entry_id, at, lac=lac)
            if not unconfirmed:
                cluster.bookies["b"].lac[ledger_id] = last
            reader = await ledgers.open(ledger_id, recover=True, small=True)
            assert (reader.last_add_confirmed, reader.record.rows) == (last, last + 1)
            assert (await reader.read_entry(last)).header.entry_id == last
            assert [id_ async for id_, _ in reader.read(0, last)] == list(range(last + 1))

    test()
