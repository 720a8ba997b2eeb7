"""Ledgers as a store of them: deleted, listed, given ids; and the bookies they are found on."""

import asyncio
import json

import pytest

from spark_ledger import errors
from spark_ledger.bookies.directory import BookieDirectory
from spark_ledger.metadata import paths
from tests.unit.spark_ledger.ledger.fakes import cluster_of, simulated
from tests.unit.spark_ledger.ledger.reads import written


@simulated
async def test_a_deleted_ledger_is_gone_and_deleting_again_is_no_error():
    _, ledgers = await cluster_of(3)
    writer = await written(ledgers, 1, close=False)
    with pytest.raises(errors.LedgerNotClosed, match="not CLOSED"):
        await ledgers.delete(writer.ledger_id)
    await writer.close()
    await ledgers.delete(writer.ledger_id)
    await ledgers.delete(writer.ledger_id)
    with pytest.raises(errors.NoSuchLedger):
        await ledgers.open(writer.ledger_id, recover=True)


@simulated
async def test_all_ledgers_are_listed_in_order_of_their_ids():
    _, ledgers = await cluster_of(3)
    assert [ledger_id async for ledger_id in ledgers.list()] == []
    for ledger_id in (12345678901, 7, 2**63 - 1):
        await ledgers.create(3, 3, 2, ledger_id=ledger_id)
    assert [ledger_id async for ledger_id in ledgers.list()] == [7, 12345678901, 2**63 - 1]


@simulated
async def test_ids_are_never_handed_out_twice_not_even_with_lost_answers():
    cluster, ledgers = await cluster_of(3)
    other = await cluster.client("other")
    cluster.store.faults.unknown = 0.4
    blocks = await asyncio.gather(*(s.allocate_ids(3) for s in (ledgers, other) for _ in range(20)))
    given = [ledger_id for block in blocks for ledger_id in block]
    assert len(set(given)) == len(given) == 120


@simulated
async def test_a_create_whose_answer_was_lost_is_one_ledger():
    cluster, ledgers = await cluster_of(3)
    cluster.store.faults.unknown = 0.6
    writers = [await ledgers.create(3, 3, 2) for _ in range(10)]
    cluster.store.calm()
    assert [i async for i in ledgers.list()] == sorted(w.ledger_id for w in writers)


@simulated
async def test_an_id_that_is_taken_is_refused():
    _, ledgers = await cluster_of(3)
    await ledgers.create(3, 3, 2, ledger_id=5)
    with pytest.raises(errors.LedgerError, match="taken"):
        await ledgers.create(3, 3, 2, ledger_id=5)


@simulated
async def test_the_rack_of_a_bookie_that_is_away_is_known_once_it_was_looked_for():
    cluster, _ = await cluster_of(1)
    away = json.dumps({"address": "away:1", "free_bytes": 1, "rack": "r7"}).encode()
    await cluster.admin.create(f"{paths.BOOKIES_KNOWN}/away", away, parents=True)
    directory = BookieDirectory(cluster.store.session("another"), 30.0)
    await directory.start()
    assert directory.rack("away") == ""
    assert await directory.find("away") == "away:1"
    assert directory.rack("away") == "r7"
    await directory.close()


@simulated
async def test_the_directory_follows_registrations_and_keeps_addresses():
    cluster, _ = await cluster_of(2)
    directory = BookieDirectory(cluster.store.session("another"), 30.0)
    await directory.start()
    told = []
    directory.add_listener(lambda: told.append([b.id for b in directory.writable()]))
    await cluster.register("c")
    await asyncio.sleep(1)
    await cluster.deregister("a")
    await asyncio.sleep(1)
    assert told[-1] == ["b", "c"]
    assert directory.address("a") == "a:1"
    assert await directory.find("nobody") is None
    await directory.close()
