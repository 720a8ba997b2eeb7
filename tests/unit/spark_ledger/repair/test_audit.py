"""The audit of ledgers against scripted bookies: it counts what is wrong, and changes nothing."""

import dataclasses

import pytest

from spark_ledger.metadata.ledger_record import RecordState, derive
from spark_ledger.repair import work_list
from spark_ledger.repair.audit import audit, check_ledger
from spark_ledger.repair.work_list import Cause, Reason
from tests.unit.spark_ledger.ledger.fakes import cluster_of, cluster_on, simulated
from tests.unit.spark_ledger.repair.stage import gone, ledger_of, lose

TOKENS = derive(b"")


@pytest.mark.parametrize("deep", [False, True])
@simulated
async def test_whole_ledgers_are_counted_and_nothing_is_wrong(deep):
    _, ledgers = await cluster_of(4)
    for entries in (0, 5, 9):
        await ledger_of(ledgers, entries)
    found = await audit(ledgers, TOKENS, deep=deep)
    assert found.counts() == {
        "ledgers": 3,
        "entries": 14,
        "under_replicated": 0,
        "misplaced": 0,
        "damaged": 0,
        "blocked": 0,
        "unreferenced": 0,
    }
    assert found.is_whole


@simulated
async def test_entries_of_a_fragment_that_is_not_checked_do_not_count():
    _, ledgers = await cluster_of(3)
    written = (await ledgers.record((await ledger_of(ledgers, 10)).ledger_id)).record
    (first,) = written.fragments
    record = dataclasses.replace(
        written,
        last_entry=None,
        fragments=(first, dataclasses.replace(first, first_entry=6)),
        state=RecordState.OPEN,
    )
    assert (await check_ledger(ledgers, record, TOKENS)).entries == 6
    record = dataclasses.replace(record, state=RecordState.IN_RECOVERY)
    assert (await check_ledger(ledgers, record, TOKENS)).entries == 0


@pytest.mark.parametrize("deep", [False, True])
@simulated
async def test_a_missing_copy_is_told_by_its_bookie_and_one_that_nobody_has_as_damaged(deep):
    cluster, ledgers = await cluster_of(3)
    ledger_id = (await ledger_of(ledgers, 10)).ledger_id
    for name in "abc":
        lose(cluster, name, (ledger_id, 3))
    lose(cluster, "b", (ledger_id, 0), (ledger_id, 9))
    found = await audit(ledgers, TOKENS, deep=deep)
    (wrong,) = found.wrong
    assert wrong.lacking == {"a": 1, "b": 3, "c": 1}
    assert (wrong.nowhere, wrong.first_nowhere, found.damaged) == (1, 3, 1)
    assert not found.is_whole


@pytest.mark.parametrize("deep", [False, True])
@simulated
async def test_who_does_not_answer_is_named(deep):
    cluster, ledgers = await cluster_of(3)
    await ledger_of(ledgers, 10)
    assert not (await audit(ledgers, TOKENS, deep=deep)).silent
    for name in "ab":
        await gone(cluster, name)
    found = await audit(ledgers, TOKENS, deep=deep)
    assert found.silent == {*"ab"}
    assert (found.under_replicated, found.damaged) == (1, 0)


@pytest.mark.parametrize("deep", [False, True])
@simulated
async def test_what_no_bookie_answers_for_is_missing_and_not_damaged(deep):
    cluster, ledgers = await cluster_of(3)
    await ledger_of(ledgers, 10)
    for name in "abc":
        await gone(cluster, name)
    found = await audit(ledgers, TOKENS, deep=deep)
    assert (found.under_replicated, found.damaged) == (1, 0)
    assert not found.is_whole


@simulated
async def test_a_copy_that_cannot_be_read_is_found_by_the_deep_audit_alone():
    cluster, ledgers = await cluster_of(3)
    ledger_id = (await ledger_of(ledgers, 3)).ledger_id
    rotten = cluster.bookies["c"].entries[ledger_id, 1]
    cluster.bookies["c"].entries[ledger_id, 1] = rotten[:-1] + b"?"
    assert (await audit(ledgers, TOKENS)).is_whole
    assert (await audit(ledgers, TOKENS, deep=True)).wrong[0].lacking == {"c": 1}


@simulated
async def test_the_slots_of_a_striped_ledger_are_asked_for_their_own_entries_only():
    cluster, ledgers = await cluster_of(4)
    writer = await ledger_of(ledgers, 12, (4, 2, 2))
    assert (await audit(ledgers, TOKENS)).is_whole
    name = writer.record.last_fragment.ensemble[2]
    lose(cluster, name, (writer.ledger_id, 5))
    assert (await audit(ledgers, TOKENS)).wrong[0].lacking == {name: 1}


@simulated
async def test_what_a_bookie_that_is_gone_should_keep_is_missing_and_what_hinders_repair_is_told():
    cluster, ledgers = await cluster_of(3)
    ledger_id = (await ledger_of(ledgers, 4)).ledger_id
    cluster.bookies["a"].refusing = True
    await work_list.add(ledgers.metadata, ledger_id, [Reason(Cause.LOST, "a", 0)])
    work = await work_list.find(ledgers.metadata, ledger_id)
    assert work is not None
    await work_list.update(ledgers.metadata, dataclasses.replace(work, blocked="no spare"))
    found = await audit(ledgers, TOKENS)
    assert (found.under_replicated, found.blocked) == (1, 1)
    assert found.wrong[0].lacking == {"a": 4}


@simulated
async def test_two_copies_on_one_rack_are_misplaced_only_where_there_are_racks_enough():
    _, ledgers = await cluster_on("r1", "r1", "r2")
    await ledger_of(ledgers, 2)
    assert (await audit(ledgers, TOKENS)).misplaced == 0
    cluster, ledgers = await cluster_on("r1", "r1", "r2")
    await ledger_of(ledgers, 2)
    await cluster.register("d", "r3")
    await ledgers.cluster.directory.refresh()
    assert (await audit(ledgers, TOKENS)).misplaced == 1


@simulated
async def test_what_was_made_for_a_topic_that_does_not_refer_to_it_is_counted():
    cluster, ledgers = await cluster_of(3)
    await cluster.admin.create("/topic-ids/t", parents=True)
    kept = await ledger_of(ledgers, 1, topic="t", intent="i")
    await ledger_of(ledgers, 1, topic="t", intent="i")
    await ledger_of(ledgers, 1)

    referred = {"t": frozenset({kept.ledger_id})}
    assert (await audit(ledgers, TOKENS, referred=referred)).unreferenced == 1
    assert (await audit(ledgers, TOKENS, referred={})).unreferenced == 2
    assert (await audit(ledgers, TOKENS, referred={"t": None})).unreferenced == 0
