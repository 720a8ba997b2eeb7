"""Who decides what a bookie has asks the bookie; its files, if they are here, are for readers."""

from bookie_server.api import messages as m
from spark_ledger.ledger.client import LedgerStore
from tests.kit.limbo_repair import repair
from tests.unit.spark_ledger.ledger.fakes import FakeCluster, FakeNetwork, cluster_of, simulated
from tests.unit.spark_ledger.repair.stage import in_limbo, ledger_of


def reads(cluster: FakeCluster, *names: str) -> list[m.ReadRequest]:
    """What these bookies were asked to read since the last time, all without names."""
    found = []
    for name in names or cluster.bookies:
        requests = cluster.bookies[name].requests
        found += [one for one in requests if isinstance(one, m.ReadRequest)]
        requests.clear()
    return found


async def on_the_bookies_host(monkeypatch) -> tuple[FakeCluster, LedgerStore]:
    monkeypatch.setattr(FakeNetwork, "is_here", lambda self, address: True)
    return await cluster_of(3)


@simulated
async def test_who_recovers_a_ledger_asks_for_no_locations(monkeypatch):
    cluster, ledgers = await on_the_bookies_host(monkeypatch)
    ledger_id = (await ledger_of(ledgers, 20, close=False)).ledger_id
    reader = await (await cluster.client("another")).open(ledger_id, recover=True)
    asked = reads(cluster)
    assert asked and not any(one.locations for one in asked)
    assert len([each async for each in reader.read(0, 19)]) == 20
    assert any(one.locations for one in reads(cluster)), "who reads does"


@simulated
async def test_who_repairs_a_ledger_compares_what_the_bookie_sends(monkeypatch):
    cluster, ledgers = await on_the_bookies_host(monkeypatch)
    ledger_id = (await ledger_of(ledgers, 20)).ledger_id
    await in_limbo(cluster, "b", ledger_id)
    reads(cluster)
    (result,) = await repair(ledgers, ledger_id, ["b"])
    assert (result.cleared, result.compared, result.copied) == (True, 20, 0)
    assert [(one.last_entry, one.locations) for one in reads(cluster)] == [(19, False)]
