"""Recovery among bookies with torn tails, and with one that is declared gone for good."""

import pytest

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from spark_ledger import errors
from spark_ledger.metadata.ledger_record import RecordState
from tests.unit.spark_ledger.ledger.fakes import cluster_of, ledger_on, put, simulated


def torn(cluster, name):
    """What this bookie lacks it answers as one whose journal ended in a torn write."""
    bookie = cluster.bookies[name]

    def lacks(request):
        if not isinstance(request, m.ReadRequest):
            return None
        answer = bookie.answer(request)
        absent = m.EntryResult(Status.LIMBO_TORN)
        results = [absent if r.status is Status.NO_SUCH_ENTRY else r for r in answer.results]
        return answer._replace(results=results)

    bookie.override = lacks


@simulated
async def test_after_a_power_loss_of_all_the_end_is_found_and_what_one_still_has_is_kept():
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    for name in "abc":
        torn(cluster, name)
    assert (await ledgers.recover(ledger_id)).record.closed


@simulated
async def test_who_lacks_an_entry_after_a_torn_tail_proves_nothing_while_another_is_silent():
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    torn(cluster, "a")
    cluster.bookies["b"].refusing = True
    with pytest.raises(errors.DataUnavailable, match="LIMBO_TORN"):
        await ledgers.recover(ledger_id)
    cluster.bookies["b"].refusing = False
    assert (await ledgers.recover(ledger_id)).record.closed


@simulated
async def test_a_bookie_declared_gone_hinders_no_decision_and_what_a_torn_one_still_has_is_kept():
    cluster, ledgers = await cluster_of(4)
    ledger_id = await ledger_on(cluster, ledgers)
    put(cluster, ledger_id, 0, "ac")
    put(cluster, ledger_id, 1, "c")
    for name in "ab":
        torn(cluster, name)
    cluster.bookies["c"].refusing = True
    with pytest.raises(errors.DataUnavailable, match=f"ledger recover {ledger_id} --gone"):
        await ledgers.recover(ledger_id)
    with pytest.raises(errors.DataUnavailable):
        await ledgers.recover(ledger_id, gone={"d"})
    record = (await ledgers.recover(ledger_id, gone={"c"})).record
    assert (record.state, record.last_entry) == (RecordState.CLOSED, 0)


@simulated
async def test_a_bookie_declared_gone_that_answers_after_all_is_heard():
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    put(cluster, ledger_id, 0, "c")
    for name in "ab":
        torn(cluster, name)
    assert (await ledgers.recover(ledger_id, gone={"c"})).record.last_entry == 0


@simulated
async def test_one_declared_gone_is_no_denial_by_itself():
    cluster, ledgers = await cluster_of(3)
    ledger_id = await ledger_on(cluster, ledgers)
    cluster.bookies["b"].override = lambda request: (
        m.ReadResponse(Status.IO_ERROR) if isinstance(request, m.ReadRequest) else None
    )
    cluster.bookies["c"].refusing = True
    with pytest.raises(errors.DataUnavailable):
        await ledgers.recover(ledger_id, gone={"c"})
