"""A ledger that is made while bookies are away: an ack quorum of each write set is enough."""

import asyncio
import json

import pytest

from bookie_server.api import messages as m
from spark_ledger import errors
from spark_ledger.metadata import autorecovery, paths
from tests.unit.spark_ledger.ledger import fakes
from tests.unit.spark_ledger.ledger.fakes import simulated

NO_TOPIC = {"intent": "", "topic": "", "durability": "synced"}


async def remembered(cluster):
    """The bookies are remembered when they are away, as all that ever registered are."""
    for name in cluster.bookies:
        value = json.dumps({"address": f"{name}:1"}).encode()
        await cluster.admin.create(f"{paths.BOOKIES_KNOWN}/{name}", value, parents=True)


async def cluster_of(count, **settings):
    cluster, ledgers = await fakes.cluster_of(count, **settings)
    await remembered(cluster)
    return cluster, ledgers


async def leaves(cluster, *names):
    for name in names:
        cluster.bookies[name].refusing = True
        await cluster.deregister(name)
    await asyncio.sleep(1)  # clients hear of it


async def is_back(cluster, name):
    cluster.bookies[name].refusing = False
    await cluster.register(name)


def now_s():
    return asyncio.get_running_loop().time()


def members(writer):
    return sorted(writer.record.last_fragment.ensemble)


def kept(cluster, name, writer):
    entries = cluster.bookies[name].entries
    return sorted(entry for ledger, entry in entries if ledger == writer.ledger_id)


@simulated
async def test_with_one_of_three_bookies_away_a_new_ledger_is_made_and_takes_entries_at_once():
    cluster, ledgers = await cluster_of(3)
    await leaves(cluster, "b")
    began_s = now_s()
    writer = await ledgers.create(3, 3, 2)
    assert await writer.append(b"0") == 0
    assert now_s() - began_s < 0.1
    assert members(writer) == ["a", "b", "c"]
    assert [kept(cluster, name, writer) for name in "abc"] == [[0], [], [0]]
    asked = {type(request) for request in cluster.bookies["b"].requests}
    assert asked <= {m.ReadLacRequest}, "whether it is back, and nothing is sent"
    assert (await writer.close()).last_entry == 0
    assert (await ledgers.open(writer.ledger_id, recover=True)).last_add_confirmed == 0


@simulated
async def test_a_bookie_that_was_away_takes_what_is_added_once_it_is_back():
    cluster, ledgers = await cluster_of(3)
    await leaves(cluster, "b")
    writer = await ledgers.create(3, 3, 2)
    await writer.append(b"0")
    await is_back(cluster, "b")
    await asyncio.sleep(2)
    await writer.append(b"1")
    await asyncio.sleep(1)
    assert kept(cluster, "b", writer) == [1]
    assert len(writer.record.fragments) == 1, "nobody took its place"


@simulated
async def test_a_bookie_that_comes_new_takes_the_place_of_one_that_was_away():
    cluster, ledgers = await cluster_of(3)
    await leaves(cluster, "b")
    writer = await ledgers.create(3, 3, 2)
    await writer.append(b"0")
    await cluster.register("d")
    await asyncio.sleep(1)
    await writer.append(b"1")
    assert members(writer) == ["a", "c", "d"]


@simulated
async def test_a_process_that_begins_while_a_bookie_is_away_names_it_too():
    cluster, _ = await cluster_of(3)
    await leaves(cluster, "b")
    writer = await (await cluster.client("later", seed=1)).create(3, 3, 2)
    assert await writer.append(b"0") == 0
    assert members(writer) == ["a", "b", "c"]


@simulated
async def test_nobody_who_is_away_is_named_while_there_are_others():
    cluster, ledgers = await cluster_of(4)
    await leaves(cluster, "b")
    for _ in range(5):
        assert members(await ledgers.create(3, 3, 2)) == ["a", "c", "d"]


@simulated
async def test_of_several_that_are_away_the_one_is_named_that_left_last():
    cluster, ledgers = await cluster_of(5)
    for name in "dbe":
        await leaves(cluster, name)
    for _ in range(5):
        assert members(await ledgers.create(3, 3, 2)) == ["a", "c", "e"]
    await is_back(cluster, "e")
    await leaves(cluster, "c")
    for _ in range(5):
        assert members(await ledgers.create(3, 3, 2)) == ["a", "c", "e"]


@pytest.mark.parametrize(
    ("sizes", "away"), [((3, 3, 2), "ab"), ((2, 2, 2), "bc"), ((3, 3, 3), "a")]
)
@simulated
async def test_with_fewer_there_than_acknowledge_an_entry_no_ledger_is_made(sizes, away):
    cluster, ledgers = await cluster_of(3)
    await leaves(cluster, *away)
    with pytest.raises(errors.NotEnoughBookies):
        await ledgers.create(*sizes)


@simulated
async def test_of_a_striped_ledger_every_write_set_keeps_an_ack_quorum():
    cluster, ledgers = await cluster_of(5)
    await leaves(cluster, "b")
    writer = await ledgers.create(5, 3, 2)
    assert [await writer.append(b"%d" % n) for n in range(10)] == [*range(10)]
    await leaves(cluster, "d")
    with pytest.raises(errors.NotEnoughBookies):
        await ledgers.create(5, 3, 2)


@simulated
async def test_one_that_is_to_go_is_not_named_and_one_that_is_read_only_is_not_away():
    cluster, ledgers = await cluster_of(3, spare_grace_s=1)
    await cluster.readonly("a", "disk full")
    await asyncio.sleep(1)
    with pytest.raises(errors.NotEnoughBookies, match="read-only: disk full"):
        await ledgers.create(3, 3, 2)
    cluster, ledgers = await cluster_of(3, spare_grace_s=1)
    await ledgers.metadata.create(f"{paths.BOOKIES_DRAINING}/b", b"", parents=True)
    await leaves(cluster, "b")
    assert await autorecovery.draining_bookies(ledgers.metadata) == ["b"]
    with pytest.raises(errors.NotEnoughBookies):
        await ledgers.create(3, 3, 2)


@simulated
async def test_one_that_was_forgotten_is_not_named():
    cluster, ledgers = await cluster_of(3, spare_grace_s=1)
    await leaves(cluster, "b")
    await cluster.admin.delete(f"{paths.BOOKIES_KNOWN}/b")
    with pytest.raises(errors.NotEnoughBookies):
        await ledgers.create(3, 3, 2)


@pytest.mark.parametrize(("rack", "named"), [("r3", True), ("r1", False)])
@simulated
async def test_with_hard_racks_one_that_is_away_has_a_rack_of_its_own(rack, named):
    cluster, ledgers = await fakes.cluster_on("r1", "r2", rack, racks="hard", spare_grace_s=1)
    await remembered(cluster)
    await leaves(cluster, "c")
    if named:
        assert members(await ledgers.create(3, 3, 2)) == ["a", "b", "c"]
        return
    with pytest.raises(errors.NotEnoughBookies, match="different racks"):
        await ledgers.create(3, 3, 2)


@simulated
async def test_a_hundred_ledgers_that_are_made_at_once_ask_once_which_bookies_are_away():
    cluster, ledgers = await cluster_of(3)
    await leaves(cluster, "b")
    children, asked = ledgers.metadata.children, []

    async def counted(path, *more):
        asked.append(path)
        return await children(path, *more)

    ledgers.metadata.children = counted
    ids = await ledgers.allocate_ids(100)
    made = await ledgers.create_several(ids, 3, 3, 2, **NO_TOPIC)
    assert [members(writer) for writer in made] == [["a", "b", "c"]] * 100
    assert asked.count(paths.BOOKIES_KNOWN) == 1


@simulated
async def test_one_that_is_back_since_it_was_looked_who_is_away_is_not_named_twice():
    cluster, ledgers = await cluster_of(3)
    await leaves(cluster, "b")
    await ledgers.create(3, 3, 2)
    await is_back(cluster, "b")
    await leaves(cluster, "c")
    for _ in range(5):
        assert members(await ledgers.create(3, 3, 2)) == ["a", "b", "c"]


@simulated
async def test_a_writer_that_takes_a_bookie_for_away_that_is_there_sends_to_it_all_the_same():
    cluster, ledgers = await cluster_of(3)
    await cluster.deregister("b")  # its session went, and it answers
    await asyncio.sleep(1)
    writer = await ledgers.create(3, 3, 2)
    await writer.append(b"0")
    await asyncio.sleep(1)
    await writer.append(b"1")
    await asyncio.sleep(1)
    assert kept(cluster, "b", writer)[-1] == 1
