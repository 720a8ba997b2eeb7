"""A bookie that is emptied while it is up, against scripted bookies."""

import asyncio
from contextlib import suppress

import pytest

from spark_ledger.errors import BadConfig, NotEnoughBookies
from spark_ledger.metadata import autorecovery, paths
from spark_ledger.repair.decommission import begin, cancel, decommission
from spark_ledger.repair.forget import forget
from spark_ledger.repair.service import Autorecovery
from tests.unit.spark_ledger.ledger.fakes import cluster_of, cluster_on, simulated
from tests.unit.spark_ledger.repair.test_healing import copies_of, gone
from tests.unit.spark_ledger.repair.test_limbo import ledger_of
from tests.unit.spark_ledger.repair.test_status import known


async def heals(ledgers):
    """A host of self-healing beside the test."""
    await autorecovery.change_settings(ledgers.metadata, repair_bytes_per_s=0)
    healing = await Autorecovery.start(ledgers)
    return asyncio.create_task(healing.run())


async def ended(task):
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def until_done(ledgers, name, **options):
    """Everything that was said of what is left."""
    async with asyncio.timeout(600):
        return [left async for left in decommission(ledgers, name, **options)]


@simulated
async def test_a_bookie_is_emptied_and_every_ledger_keeps_its_copies():
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    ledger_ids = [(await ledger_of(ledgers, 10)).ledger_id for _ in range(6)]
    healing = await heals(ledgers)
    said = await until_done(ledgers, "a")
    assert said[0].ledgers > 0 and said[0].bytes > 0
    assert (said[-1].ledgers, said[-1].bytes, said[-1].done) == (0, 0, True)
    for ledger_id in ledger_ids:
        assert not (await ledgers.record(ledger_id, fresh=True)).record.names("a")
        found = await copies_of(cluster, ledgers, ledger_id)
        assert all(len(names) == 3 for names in found.values())
    await ended(healing)
    await gone(cluster, "a")
    await forget(ledgers, "a")
    assert await autorecovery.draining(ledgers.metadata) == []


@simulated
async def test_one_that_was_never_seen_and_one_that_is_down_are_refused_with_what_to_do():
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    await gone(cluster, "b")
    with pytest.raises(BadConfig, match="no bookie z was ever registered"):
        await begin(ledgers, "z")
    with pytest.raises(BadConfig, match="bookie b is not registered: it is down"):
        await begin(ledgers, "b")
    assert await autorecovery.draining(ledgers.metadata) == []


@simulated
async def test_too_few_others_are_refused_and_force_stops_at_the_ack_quorum():
    cluster, ledgers = await cluster_of(3)
    await known(cluster, *"abc")
    ledger_id = (await ledger_of(ledgers, 5)).ledger_id
    with pytest.raises(NotEnoughBookies, match=r"copies of 1 ledgers.*would keep 2.*--force"):
        await begin(ledgers, "a")
    assert await autorecovery.draining(ledgers.metadata) == []
    (left,) = await until_done(ledgers, "a", force=True)
    assert (left.ledgers, left.stuck, left.done) == (1, 1, True)
    assert (await ledgers.record(ledger_id, fresh=True)).record.names("a")
    with pytest.raises(NotEnoughBookies, match=r"would keep 1.*cannot be forced below Qa"):
        await begin(ledgers, "b", force=True)
    assert await autorecovery.draining(ledgers.metadata) == ["a"]


@simulated
async def test_of_two_that_are_begun_at_once_and_cannot_both_be_not_both_go_on():
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    for _ in range(6):
        await ledger_of(ledgers, 1)
    results = await asyncio.gather(begin(ledgers, "a"), begin(ledgers, "b"), return_exceptions=True)
    refused = [one for one in results if isinstance(one, NotEnoughBookies)]
    assert refused
    assert len(await autorecovery.draining(ledgers.metadata)) == 2 - len(refused)


@simulated
async def test_one_whose_place_no_rack_allows_is_refused_and_force_leaves_its_ledgers():
    cluster, ledgers = await cluster_on("r1", "r2", "r3", racks="hard")
    await cluster.register("d", "r1")
    await asyncio.sleep(1)
    await known(cluster, *"abcd")
    for _ in range(6):
        await ledger_of(ledgers, 3)
    with pytest.raises(NotEnoughBookies, match="without bookie b 3 writable bookies remain"):
        await begin(ledgers, "b")
    assert await autorecovery.draining(ledgers.metadata) == []
    assert (await until_done(ledgers, "b", force=True))[-1].stuck == 6
    healing = await heals(ledgers)
    await cancel(ledgers, "b")
    assert (await until_done(ledgers, "a"))[-1].ledgers == 0, "d is on the rack of a"
    await ended(healing)


@simulated
async def test_the_only_spare_of_a_ledger_is_not_promised_twice():
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    record = (await ledgers.record((await ledger_of(ledgers, 1)).ledger_id)).record
    first, second, _ = record.last_fragment.ensemble
    await begin(ledgers, first)
    with pytest.raises(NotEnoughBookies, match="end another decommission"):
        await begin(ledgers, second)
    assert await autorecovery.draining(ledgers.metadata) == [first]


@simulated
async def test_who_looks_on_may_go_away_and_come_back():
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    for _ in range(4):
        await ledger_of(ledgers, 10)
    first = [left async for left in one_look(ledgers, "a")]
    assert first[0].hindrance.startswith("no process hosts autorecovery")
    healing = await heals(ledgers)
    assert (await until_done(ledgers, "a"))[-1].ledgers == 0
    await ended(healing)


async def one_look(ledgers, name, **options):
    looks = decommission(ledgers, name, **options)
    yield await anext(looks)
    await looks.aclose()


@simulated
async def test_what_hinders_is_told_and_a_cancelled_one_ends():
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    for _ in range(4):
        await ledger_of(ledgers, 1)
    await autorecovery.change_settings(ledgers.metadata, enabled=False)
    looks = decommission(ledgers, "a")
    assert "autorecovery is disabled" in (await anext(looks)).hindrance
    assert await cancel(ledgers, "a")
    (last,) = [left async for left in looks]
    assert last.hindrance == "the decommission was cancelled" and not last.done
    assert not await cancel(ledgers, "a")


@pytest.mark.parametrize("again", [False, True], ids=["the same call", "a later call"])
@simulated
async def test_what_came_to_name_it_after_the_auditors_pass_is_listed_too(again):
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    for _ in range(4):
        await ledger_of(ledgers, 1)
    healing = await heals(ledgers)
    await autorecovery.change_settings(ledgers.metadata, lost_bookie_delay_s=20)
    looks = decommission(ledgers, "a")
    await anext(looks)
    await asyncio.sleep(60)  # for the auditor's pass, and all of the work
    writers = [await ledgers.create(3, 3, 2) for _ in range(4)]  # it is not read-only here
    assert any(writer.record.names("a") for writer in writers)
    if again:
        await looks.aclose()
        looks = decommission(ledgers, "a")
    async with asyncio.timeout(600):
        said = [left async for left in looks]
    assert (said[0].ledgers > 0, said[-1].ledgers) == (True, 0)
    assert not any(
        [(await ledgers.record(w.ledger_id, fresh=True)).record.names("a") for w in writers]
    )
    await ended(healing)


@simulated
async def test_forgetting_one_that_a_ledger_names_says_to_wait_for_its_copies():
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    name = (await ledger_of(ledgers, 1)).record.last_fragment.ensemble[0]
    await cluster.admin.create(paths.draining(name), b"", parents=True)
    await gone(cluster, name)
    with pytest.raises(BadConfig, match="wait until its copies were made elsewhere"):
        await forget(ledgers, name)
    assert await autorecovery.draining(ledgers.metadata) == [name]


@simulated
async def test_two_members_of_one_ledger_are_not_drained_where_one_other_can_take_copies():
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    ledger_id = (await ledger_of(ledgers, 5)).ledger_id
    first, second, _ = (await ledgers.record(ledger_id)).record.last_fragment.ensemble
    await begin(ledgers, first)
    with pytest.raises(NotEnoughBookies, match="no other can take the copies of 1 ledgers"):
        await begin(ledgers, second)
    assert await autorecovery.draining(ledgers.metadata) == [first]


@simulated
async def test_a_forced_one_is_not_done_while_a_ledger_would_keep_fewer_copies_than_qa():
    cluster, ledgers = await cluster_of(3)
    await known(cluster, *"abc")
    await ledger_of(ledgers, 5)
    await begin(ledgers, "a", force=True)
    await gone(cluster, "b")
    first = [left async for left in one_look(ledgers, "a", force=True)]
    assert not first[0].done
    await cluster.register("b")
    cluster.bookies["b"].refusing = False
    assert (await until_done(ledgers, "a", force=True))[-1].done
