"""A bookie that is emptied while it is up, against scripted bookies."""

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from spark_ledger.errors import BadConfig, LedgerError, NotEnoughBookies
from spark_ledger.metadata import autorecovery, hold, ledger_record, paths, unrecorded
from spark_ledger.metadata import cluster as clusters
from spark_ledger.metadata.ledger_record import Fragment, RecordState
from spark_ledger.repair import status
from spark_ledger.repair.decommission import begin, cancel, decommission, forget
from spark_ledger.repair.service import Autorecovery
from tests.unit.spark_ledger.ledger.fakes import cluster_of, cluster_on, put, simulated
from tests.unit.spark_ledger.repair.stage import copies_of, gone, known, ledger_of


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
    assert await autorecovery.draining_bookies(ledgers.metadata) == []


@simulated
async def test_one_that_keeps_ledgers_without_a_record_is_not_done_before_a_person_says_so():
    """The store may be an older copy: what it does not name may be on this bookie alone."""
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    store, said = ledgers.metadata, []
    await unrecorded.publish(store, "a", [900, 901])
    async with asyncio.timeout(600):
        async for left in decommission(ledgers, "a"):
            said.append(left)
            if len(said) == 3:
                await unrecorded.name_as_deleted(store, [900, 901])
    assert [(left.unrecorded, left.done) for left in said] == [(2, False)] * 3 + [(0, True)]


@simulated
async def test_one_that_was_never_seen_and_one_that_is_down_are_refused_with_what_to_do():
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    await gone(cluster, "b")
    with pytest.raises(BadConfig, match="no bookie 'z' was ever registered"):
        await begin(ledgers, "z")
    with pytest.raises(BadConfig, match="bookie b is not registered: it is down"):
        await begin(ledgers, "b")
    assert await autorecovery.draining_bookies(ledgers.metadata) == []


@simulated
async def test_too_few_others_are_refused_and_force_stops_at_the_ack_quorum():
    cluster, ledgers = await cluster_of(3)
    await known(cluster, *"abc")
    ledger_id = (await ledger_of(ledgers, 5)).ledger_id
    with pytest.raises(NotEnoughBookies, match=r"copies of 1 ledger: .*would keep 2.*--force"):
        await begin(ledgers, "a")
    assert await autorecovery.draining_bookies(ledgers.metadata) == []
    (left,) = await until_done(ledgers, "a", force=True)
    assert (left.ledgers, left.stuck, left.done) == (1, 1, True)
    assert (await ledgers.record(ledger_id, fresh=True)).record.names("a")
    with pytest.raises(
        NotEnoughBookies, match=r"would keep 1.*does not allow fewer copies than Qa"
    ):
        await begin(ledgers, "b", force=True)
    assert await autorecovery.draining_bookies(ledgers.metadata) == ["a"]


@simulated
async def test_of_two_that_are_begun_at_once_and_cannot_both_be_not_both_go_on():
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    for _ in range(6):
        await ledger_of(ledgers, 1)
    results = await asyncio.gather(begin(ledgers, "a"), begin(ledgers, "b"), return_exceptions=True)
    refused = [one for one in results if isinstance(one, NotEnoughBookies)]
    assert refused
    assert len(await autorecovery.draining_bookies(ledgers.metadata)) == 2 - len(refused)


@simulated
async def test_one_whose_place_no_rack_allows_is_refused_and_force_leaves_its_ledgers():
    cluster, ledgers = await cluster_on("r1", "r2", "r3", racks="hard")
    await cluster.register("d", "r1")
    await asyncio.sleep(1)
    await known(cluster, *"abcd")
    for _ in range(6):
        await ledger_of(ledgers, 3)
    with pytest.raises(NotEnoughBookies, match="without bookie b 3 writable bookies would remain"):
        await begin(ledgers, "b")
    assert await autorecovery.draining_bookies(ledgers.metadata) == []
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
    assert await autorecovery.draining_bookies(ledgers.metadata) == [first]


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
    with pytest.raises(BadConfig, match="wait until its copies were made on other bookies"):
        await forget(ledgers, name)
    assert await autorecovery.draining_bookies(ledgers.metadata) == [name]


@simulated
async def test_two_members_of_one_ledger_are_not_drained_where_one_other_can_take_copies():
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    ledger_id = (await ledger_of(ledgers, 5)).ledger_id
    first, second, _ = (await ledgers.record(ledger_id)).record.last_fragment.ensemble
    await begin(ledgers, first)
    with pytest.raises(NotEnoughBookies, match="no other bookie can take the copies of 1 ledger:"):
        await begin(ledgers, second)
    assert await autorecovery.draining_bookies(ledgers.metadata) == [first]


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


@simulated
async def test_copies_that_a_spare_takes_count_when_a_second_one_is_forced():
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    ledger_id = (await ledger_of(ledgers, 5)).ledger_id
    first, second, third = (await ledgers.record(ledger_id)).record.last_fragment.ensemble
    await begin(ledgers, first)
    with pytest.raises(NotEnoughBookies, match=f"members {first} .*would keep 2.*--force leaves"):
        await begin(ledgers, second)
    await begin(ledgers, second, force=True)
    with pytest.raises(
        NotEnoughBookies, match=r"would keep 1.*does not allow fewer copies than Qa"
    ):
        await begin(ledgers, third, force=True)


@simulated
async def test_a_forced_one_is_not_done_while_a_fragment_of_a_ledger_can_move():
    cluster, ledgers = await cluster_on("r1", "r2", "r1", "r3", racks="hard")
    await known(cluster, *"abcd")
    ledger_id = await ledger_on_fragments(cluster, ledgers, "bac", "bad")
    first = [left async for left in one_look(ledgers, "b", force=True)]
    assert not first[0].done, "d can take the place beside a and c"
    healing = await heals(ledgers)
    assert (await until_done(ledgers, "b", force=True))[-1].stuck == 1
    record = (await ledgers.record(ledger_id, fresh=True)).record
    assert [{*fragment.ensemble} for fragment in record.fragments] == [{*"dac"}, {*"bad"}]
    await ended(healing)


async def ledger_on_fragments(cluster, ledgers, *ensembles):
    """A closed ledger, each entry a fragment with such members."""
    writer = await ledger_of(ledgers, len(ensembles))
    record = writer.record
    for entry_id, names in enumerate(ensembles):
        put(cluster, writer.ledger_id, entry_id, names)
    fragments = tuple(Fragment(first, tuple(names)) for first, names in enumerate(ensembles))
    value = ledger_record.encode(replace(record, fragments=fragments))
    await cluster.admin.set(paths.ledger(writer.ledger_id), value, writer.version)
    return writer.ledger_id


@simulated
async def test_one_that_no_ledger_names_is_not_drained_while_another_draining_needs_it():
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    ledger_id = (await ledger_of(ledgers, 5)).ledger_id
    ensemble = (await ledgers.record(ledger_id)).record.last_fragment.ensemble
    (spare,) = {*"abcd"} - {*ensemble}
    await begin(ledgers, ensemble[0])
    with pytest.raises(NotEnoughBookies, match=f"its members {ensemble[0]} are down or drained"):
        await begin(ledgers, spare)
    assert await autorecovery.draining_bookies(ledgers.metadata) == [ensemble[0]]
    healing = await heals(ledgers)
    assert (await until_done(ledgers, ensemble[0]))[-1].ledgers == 0
    await ended(healing)


@simulated
async def test_of_a_member_and_its_only_spare_begun_at_once_not_both_go_on():
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    ledger_id = (await ledger_of(ledgers, 5)).ledger_id
    ensemble = (await ledgers.record(ledger_id)).record.last_fragment.ensemble
    (spare,) = {*"abcd"} - {*ensemble}
    both = begin(ledgers, ensemble[0]), begin(ledgers, spare)
    results = await asyncio.gather(*both, return_exceptions=True)
    refused = [one for one in results if isinstance(one, NotEnoughBookies)]
    assert refused
    assert len(await autorecovery.draining_bookies(ledgers.metadata)) == 2 - len(refused)


@simulated
async def test_a_spare_that_is_read_only_by_now_is_not_drained_if_a_member_is(monkeypatch):
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    ledger_id = (await ledger_of(ledgers, 5)).ledger_id
    ensemble = (await ledgers.record(ledger_id)).record.last_fragment.ensemble
    (spare,) = {*"abcd"} - {*ensemble}
    create = ledgers.metadata.create

    async def others_first(path, *args, **options):
        monkeypatch.undo()
        await begin(ledgers, ensemble[0])
        await create(path, *args, **options)
        await cluster.readonly(spare, "it is being drained")
        await asyncio.sleep(1)

    monkeypatch.setattr(ledgers.metadata, "create", others_first)
    with pytest.raises(NotEnoughBookies, match=f"its members {ensemble[0]} are down or drained"):
        await begin(ledgers, spare)
    assert await autorecovery.draining_bookies(ledgers.metadata) == [ensemble[0]]


@simulated
async def test_the_only_spare_of_a_bookie_that_is_down_is_not_drained():
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    ledger_id = (await ledger_of(ledgers, 5)).ledger_id
    ensemble = (await ledgers.record(ledger_id)).record.last_fragment.ensemble
    (spare,) = {*"abcd"} - {*ensemble}
    await gone(cluster, ensemble[0])
    with pytest.raises(NotEnoughBookies, match=f"its members {ensemble[0]} are down or drained"):
        await begin(ledgers, spare)
    assert await autorecovery.draining_bookies(ledgers.metadata) == []


@simulated
async def test_one_that_is_down_and_has_no_spare_anyhow_hinders_no_other():
    cluster, ledgers = await cluster_on("r1", "r2", "r3", "r1", racks="hard")
    await known(cluster, *"abcd")
    await ledger_on_fragments(cluster, ledgers, "abc")
    await gone(cluster, "b")
    await begin(ledgers, "a")
    assert await autorecovery.draining_bookies(ledgers.metadata) == ["a"]


@simulated
async def test_an_idle_writer_replaces_the_drained_member_and_its_ledger_stays_open():
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    writer = await ledger_of(ledgers, 3, close=False)
    going = writer.record.last_fragment.ensemble[0]
    healing = await heals(ledgers)
    looks = decommission(ledgers, going)
    await anext(looks)
    await cluster.readonly(going, "it is being drained")
    said = [left async for left in looks]
    assert said[-1].ledgers == 0
    record = (await ledgers.record(writer.ledger_id, fresh=True)).record
    assert record.state is RecordState.OPEN and not record.names(going)
    assert await writer.append([b"more"]) == 3
    await writer.close()
    await ended(healing)


@simulated
async def test_a_ledger_whose_writer_is_gone_is_recovered_after_half_of_the_delay_when_drained():
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    writer = await ledger_of(ledgers, 3, close=False)
    writer.abandon(LedgerError("its process is gone"))
    healing = await heals(ledgers)
    began = asyncio.get_running_loop().time()
    going = writer.record.last_fragment.ensemble[0]
    said = await until_done(ledgers, going)
    assert {"it is open: it is recovered if it does not move for 300 s"} == {
        why for left in said for why in left.blocked.values()
    }
    assert asyncio.get_running_loop().time() - began >= 300
    record = (await ledgers.record(writer.ledger_id, fresh=True)).record
    assert record.closed and record.last_entry == 2 and not record.names(going)
    await ended(healing)


@pytest.mark.parametrize("name", ["", "z", "../b", "a/b"])
@simulated
async def test_an_odd_name_cancels_nothing(name):
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    await begin(ledgers, "a")
    assert not await cancel(ledgers, name)
    assert await autorecovery.draining_bookies(ledgers.metadata) == ["a"]
    with pytest.raises(BadConfig, match="was ever registered"):
        await begin(ledgers, name)


@simulated
async def test_a_hold_of_the_metadata_store_is_what_hinders_and_status_names_it():
    cluster, ledgers = await cluster_of(4)
    await known(cluster, *"abcd")
    for _ in range(4):
        await ledger_of(ledgers, 1)
    healing = await heals(ledgers)
    session = ledgers.metadata
    await clusters.ensure(session, "c")
    assert (await status.status(session)).held == ""
    await hold.put(session, "c", clusters.Hold("older", "b"))
    looks = [left async for left in one_look(ledgers, "a")]
    assert "the metadata store is held" in looks[0].hindrance
    assert (await status.status(session)).held == "older"
    await hold.accept(session)
    assert (await until_done(ledgers, "a"))[-1].ledgers == 0
    await ended(healing)
