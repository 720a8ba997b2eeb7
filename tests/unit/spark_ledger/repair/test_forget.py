import pytest

from spark_ledger.errors import BadConfig
from spark_ledger.metadata import autorecovery, paths
from spark_ledger.repair.decommission import forget
from tests.simulation.loop import run
from tests.unit.spark_ledger.ledger.fakes import STEPS_MAX, cluster_of

GONE = "gone"
KNOWN = f"{paths.BOOKIES_KNOWN}/{GONE}"


def with_a_bookie_gone(test):
    """`test` gets a client of four bookies, and one more that was seen once."""

    async def scenario():
        _, store = await cluster_of(4)
        await store.metadata.create(KNOWN, b"{}", parents=True)
        await store.metadata.create(paths.limbo(GONE, 7), b"{}", parents=True)
        try:
            await test(store)
        finally:
            await store.close()

    run(scenario(), seed=1, steps_max=STEPS_MAX)


def test_a_bookie_that_nothing_names_is_forgotten_with_what_it_listed():
    async def test(store):
        await (await store.create(3, 3, 2)).close()
        await forget(store, GONE)
        assert GONE not in await store.metadata.children(paths.BOOKIES_KNOWN)
        assert GONE not in await store.metadata.children(paths.LIMBO)

    with_a_bookie_gone(test)


def test_one_that_was_accepted_as_lost_is_so_no_more():
    async def test(store):
        await autorecovery.change_settings(store.metadata, accepted=("a", GONE))
        await forget(store, GONE)
        assert (await autorecovery.read_settings(store.metadata)).accepted == ("a",)

    with_a_bookie_gone(test)


@pytest.mark.parametrize("folder", [paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY])
def test_a_bookie_that_is_registered_is_not_forgotten(folder):
    async def test(store):
        await store.metadata.create(f"{folder}/{GONE}", b"{}", parents=True)
        with pytest.raises(BadConfig, match="is registered"):
            await forget(store, GONE)
        assert GONE in await store.metadata.children(paths.BOOKIES_KNOWN)

    with_a_bookie_gone(test)


def test_a_bookie_that_a_ledger_names_is_not_forgotten():
    async def test(store):
        writer = await store.create(4, 3, 2)
        ensemble = (await store.record(writer.ledger_id)).record.fragments[0].ensemble
        there = ensemble[0]
        await store.metadata.create(f"{paths.BOOKIES_KNOWN}/{there}", b"{}")
        await store.metadata.delete(f"{paths.BOOKIES_AVAILABLE}/{there}")
        with pytest.raises(BadConfig, match=f"1 ledger still on bookie {there}, the first is"):
            await forget(store, there)
        assert there in await store.metadata.children(paths.BOOKIES_KNOWN)

    with_a_bookie_gone(test)


def test_a_bookie_never_seen_is_a_mistake():
    async def test(store):
        with pytest.raises(BadConfig, match="no bookie 'nobody' was ever registered"):
            await forget(store, "nobody")

    with_a_bookie_gone(test)
