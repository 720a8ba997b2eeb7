"""A bookie that was away is brought what was written meanwhile."""

from spark_ledger.metadata import paths
from spark_ledger.repair import work_list
from tests.unit.spark_ledger.ledger.fakes import cluster_of, simulated
from tests.unit.spark_ledger.repair.stage import copies_of, gone, healing, ledger_of, look_for


@simulated
async def test_what_was_written_while_a_bookie_was_away_is_brought_to_it_once_it_is_back():
    """Nobody was there to take its place, and it was not away for long enough to be lost."""
    cluster, ledgers = await cluster_of(3)
    auditor, worker = await healing(ledgers, lost_bookie_delay_s=600.0)
    for name in "abc":
        await cluster.admin.create(f"{paths.BOOKIES_KNOWN}/{name}", b"{}", parents=True)
    before = await ledger_of(ledgers, 3)
    await gone(cluster, "b")
    made_without = await ledger_of(ledgers, 5)
    await look_for(auditor, worker, 200, 10.0)
    assert await work_list.listed_ledgers(ledgers.metadata) == []
    cluster.bookies["b"].refusing = False
    await cluster.register("b")
    await look_for(auditor, worker, 200, 10.0)
    for one in (before, made_without):
        copies = await copies_of(cluster, ledgers, one.ledger_id)
        assert [*copies.values()] == [["a", "b", "c"]] * len(copies)
    assert await work_list.listed_ledgers(ledgers.metadata) == []
