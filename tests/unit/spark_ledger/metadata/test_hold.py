"""The hold: what it stops, for which versions, and how a person ends it."""

import json
import random

import pytest

from spark_ledger import errors
from spark_ledger.ledger.records import LedgerIds
from spark_ledger.metadata import chain, cluster, hold, paths
from spark_ledger.metadata.cluster import BadClusterRecord, ClusterGuard, ClusterRecord, Hold
from spark_ledger.metadata.hold import Report
from spark_ledger.metadata.store import VALUE_BYTES_MAX, Create, MultiFailed, StoreUnavailable
from tests.simulation.loop import run
from tests.simulation.restoring import copied, go_back
from tests.simulation.store import SimStore

ID = "99999999-8888-4777-8666-555555555555"
WHY = Hold("link 7 is not in it", "b1", 0)


async def begun() -> tuple[SimStore, LedgerIds]:
    """A store with a cluster and a chain, whose counter has given out a block of ids."""
    store = SimStore(random.Random(3))
    session = store.session("admin")
    await cluster.ensure(session, ID)
    await chain.extend(session, None)
    ids = LedgerIds(session)
    await ids.allocate(100)
    return store, ids


def test_the_record_of_a_cluster_is_as_before_until_it_is_held():
    assert cluster.encode(ClusterRecord(ID, 3)) == f'{{"epoch":3,"format":1,"id":"{ID}"}}'.encode()
    held = cluster.encode(ClusterRecord(ID, 3, WHY))
    assert json.loads(held)["format"] == 2
    assert cluster.decode(held) == ClusterRecord(ID, 3, WHY)
    for damaged in (held.replace(b'"format":2', b'"format":1'), held.replace(b'"why"', b'"y"')):
        with pytest.raises(BadClusterRecord):
            cluster.decode(damaged)


def test_no_ids_are_given_out_while_the_store_is_held():
    async def act() -> None:
        store, ids = await begun()
        await hold.put(store.session("b1"), ID, WHY)
        with pytest.raises(errors.MetadataHeld, match="link 7") as held:
            await ids.allocate(1)
        assert "metadata accept" in str(held.value)
        value = store.peek(paths.LEDGER_IDS).value
        with pytest.raises(ValueError):  # what an earlier version makes of it
            int(json.loads(value)["next"])

    run(act(), seed=1)


def test_a_multi_that_checks_the_cluster_fails_once_it_is_held():
    async def act() -> None:
        store, _ = await begun()
        guard = ClusterGuard(session := store.session("committer"))
        await session.multi([Create("/a"), *await guard.checks()])
        checks = await guard.checks()
        await hold.put(store.session("b1"), ID, WHY)
        with pytest.raises(MultiFailed) as failed:
            await session.multi([Create("/b"), *checks])
        assert failed.value.index == 1
        for ask in (guard.refresh, guard.checks, ClusterGuard(session).checks):
            with pytest.raises(errors.MetadataHeld):
                await ask()
        await hold.accept(store.session("person"))
        await guard.refresh()
        await session.multi([Create("/b"), *await guard.checks()])

    run(act(), seed=1)


def test_no_version_is_that_of_two_epochs_though_the_same_copy_is_put_back_again():
    async def act() -> None:
        store, _ = await begun()
        copy = copied(store)
        guard = ClusterGuard(store.session("committer"))
        for epoch in range(4):
            checks = await guard.checks()
            await store.session("now").multi([Create(f"/{epoch}"), *checks])
            go_back(store, copy)
            await hold.put(store.session("b1"), ID, Hold("older", "b1", epoch))
            await hold.accept(store.session("person"))
            with pytest.raises(MultiFailed):
                await store.session("later").multi([Create("/b"), *checks])
            assert not await guard.refresh()

    run(act(), seed=1)


def test_of_bookies_that_hold_the_store_at_once_the_first_is_named_and_the_highest_epoch_stays():
    async def act() -> None:
        store, _ = await begun()
        for by, epoch in (("b1", 2), ("b2", 5), ("b3", 1)):
            await hold.put(store.session(by), ID, Hold("older", by, epoch))
        found = await cluster.read(store.session("reader"))
        assert found == ClusterRecord(ID, 0, Hold("older", "b1", 5))
        assert (await hold.accept(store.session("person"))).cluster.epoch == 6

    run(act(), seed=1)


def test_another_clusters_store_is_not_held_and_neither_is_an_empty_one():
    async def act() -> None:
        store, ids = await begun()
        assert await hold.put(store.session("b1"), "another", WHY) == ClusterRecord(ID)
        assert len(await ids.allocate(5)) == 5
        assert await hold.put(SimStore().session("b1"), ID, WHY) is None

    run(act(), seed=1)


def test_a_hold_that_was_judged_before_the_accept_does_not_come_after_it():
    async def act() -> None:
        store, _ = await begun()
        await hold.put(store.session("b1"), ID, WHY)
        await hold.accept(store.session("person"))
        found = await hold.put(store.session("b2"), ID, WHY)
        assert found == ClusterRecord(ID, 1)

    run(act(), seed=1)


def test_ids_after_accept_begin_above_every_id_on_any_disk_and_fit_into_63_bits():
    async def act() -> None:
        store, ids = await begun()
        await hold.put(store.session("b1"), ID, WHY)
        known = Report("b2", [(3 * 10**12 + 5, 9, 4096)], (), (), 1, 4096, 3 * 10**12 + 5, 0)
        await hold.publish(store.session("b2"), known)
        before = await hold.status(store.session("person"))
        assert before.missing == {3 * 10**12 + 5: (9, 4096)}
        after = await hold.accept(store.session("person"))
        assert after.cluster == ClusterRecord(ID, 4)
        assert after.newest[0] == before.newest[0] + 1
        assert (await ids.allocate(2))[0] == 4 * 10**12
        assert store.peek_children(paths.HELD) == []
        assert cluster.EPOCH_MAX * cluster.IDS_PER_EPOCH < paths.LEDGER_ID_MAX

    run(act(), seed=1)


def test_a_store_that_is_not_held_is_left_alone_by_accept():
    async def act() -> None:
        store, ids = await begun()
        assert (await hold.accept(store.session("person"))).cluster == ClusterRecord(ID)
        assert (await ids.allocate(1))[0] == 101

    run(act(), seed=1)


def test_hold_and_accept_come_through_a_store_that_loses_responses():
    for seed in range(20):

        async def act() -> None:
            store, _ = await begun()
            store.faults.unknown = 0.5
            await hold.put(store.session("b1"), ID, WHY)
            assert (await cluster.read(store.session("reader"))).hold is not None
            await hold.accept(store.session("person"))
            store.calm()
            found = await hold.status(store.session("reader"))
            assert found.cluster == ClusterRecord(ID, 1)
            ids = LedgerIds(store.session("writer"))
            assert (await ids.allocate(1))[0] >= 10**12

        run(act(), seed=seed)


def test_what_bookies_report_is_summed_by_ledger_and_the_silent_are_named():
    async def act() -> None:
        store, _ = await begun()
        session = store.session("admin")
        for bookie in ("b1", "b2", "b3"):
            await session.create(f"{paths.BOOKIES_KNOWN}/{bookie}")
        await hold.put(session, ID, WHY)
        await hold.publish(session, Report("b1", [(8, 3, 40), (9, 1, 7)], [4], [5], 2, 47, 9))
        await hold.publish(session, Report("b2", [(8, 5, 60)], [], [], 1, 60, 9))
        found = await hold.status(session)
        assert found.missing == {8: (5, 60), 9: (1, 7)}
        assert found.silent == ["b3"]

    run(act(), seed=1)


def test_the_longest_report_fits_into_a_node():
    ids = [10**18 + number for number in range(100_000)]
    missing = [(ledger_id, 10**10, 10**15) for ledger_id in ids]
    report = Report("b1", missing, ids, ids, len(ids), 10**18, max(ids), 10**6)
    assert len(hold.encode_report(report)) < VALUE_BYTES_MAX


def test_a_hold_that_could_not_be_put_is_an_error_and_no_store_that_is_free():
    async def act() -> None:
        store, ids = await begun()
        session = store.session("b1")
        multi = session.multi

        async def multi_beside_others(operations):
            await ids.allocate(1)
            await multi(operations)

        session.multi = multi_beside_others
        with pytest.raises(StoreUnavailable):
            await hold.put(session, ID, WHY)

    run(act(), seed=1)
