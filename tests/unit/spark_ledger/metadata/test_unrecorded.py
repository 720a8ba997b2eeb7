"""What bookies keep without a record: listed for people, named as deleted by a person's word."""

import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.metadata import cluster, deleted_ledgers, hold, paths, unrecorded
from spark_ledger.metadata.cluster import Hold
from tests.simulation.loop import run
from tests.simulation.store import SimStore

CLUSTER = "cluster-1"


async def store_of(*recorded):
    store = SimStore()
    session = store.session("person")
    await cluster.ensure(session, CLUSTER)
    for ledger_id in recorded:
        await session.create(paths.ledger(ledger_id), b"record", parents=True)
    return store, session


async def named(session, ledger_id):
    await session.sync()
    return await deleted_ledgers.read_deleted(session, paths.ledger_folder(ledger_id))


def test_what_bookies_publish_is_listed_by_ledger_and_goes_when_there_is_none():
    async def main():
        _, session = await store_of()
        await unrecorded.publish(session, "a", [7, 3])
        await unrecorded.publish(session, "b", [7])
        assert (await unrecorded.read_unrecorded(session)).bookies == {3: ["a"], 7: ["a", "b"]}
        await unrecorded.publish(session, "a", [9])
        await unrecorded.publish(session, "b", [])
        assert (await unrecorded.read_unrecorded(session)).bookies == {9: ["a"]}

    run(main())


def test_the_list_says_when_each_bookie_counted_last_though_it_found_the_same():
    async def main():
        _, session = await store_of()
        times = []
        for _ in range(2):
            await unrecorded.publish(session, "a", [7])
            times.append((await unrecorded.read_unrecorded(session)).counted_ms["a"])
            await asyncio.sleep(3600)
        assert times[1] - times[0] >= 3_600_000

    run(main())


def test_a_list_of_many_ledgers_is_cut_and_fits_into_a_node():
    async def main():
        store, session = await store_of()
        ids = [3 * 10**12 + i for i in range(100_000)]
        await unrecorded.publish(session, "a", ids)
        assert len(store.peek(paths.unrecorded("a")).value) < 1_000_000
        assert [*(await unrecorded.read_unrecorded(session)).bookies] == ids[
            : unrecorded.LISTED_MAX
        ]

    run(main())


def test_a_person_names_what_has_no_record_and_nothing_else():
    async def main():
        _, session = await store_of(3)
        wanted = [3, 4, 5, 20_000, *range(40_000, 40_300)]
        done = await unrecorded.name_as_deleted(session, wanted)
        assert done == wanted[1:]
        assert await named(session, 4) == {4, 5}
        assert await named(session, 20_000) == {20_000}
        assert await named(session, 40_000) == {*range(40_000, 40_300)}
        assert (await session.get(paths.ledger(3))).value == b"record"
        assert await session.children(paths.ledger_folder(4)) == ["0003"], "it leaves no record"

    run(main())


def test_a_record_that_comes_meanwhile_is_not_named():
    async def main():
        _, session = await store_of()
        plain, came = session.multi, []

        async def multi(operations):
            if not came:
                came.append(5)
                await session.create(paths.ledger(5), b"back", parents=True)
            await plain(operations)

        session.multi = multi
        assert await unrecorded.name_as_deleted(session, [4, 5]) == [4]
        assert await named(session, 4) == {4}

    run(main())


def test_nothing_is_named_while_the_store_is_held():
    async def main():
        _, session = await store_of()
        await hold.put(session, CLUSTER, Hold("it went back", "a"))
        with pytest.raises(errors.MetadataHeld):
            await unrecorded.name_as_deleted(session, [4])
        assert await named(session, 4) == frozenset()

    run(main())


def test_under_a_hold_what_bookies_reported_is_listed_too_until_the_store_is_accepted():
    async def main():
        store, session = await store_of()
        await unrecorded.publish(session, "a", [7])
        await hold.put(store.session("b1"), CLUSTER, Hold("older", "b1"))
        for bookie, ids in (("a", [7, 8]), ("b", [8])):
            missing = [(ledger_id, 0, 10) for ledger_id in ids]
            await hold.publish(session, hold.Report(bookie, missing, (), (), len(ids)))
        listed = await unrecorded.read_unrecorded(session)
        assert (listed.bookies, listed.held) == ({7: ["a"], 8: ["a", "b"]}, "older")
        await hold.accept(store.session("person"))
        listed = await unrecorded.read_unrecorded(session)
        assert (listed.bookies, listed.held) == ({7: ["a"]}, "")

    run(main())
