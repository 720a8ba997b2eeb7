"""What auditors and workers go by when it changes under their hands: a bookie that does not tell, a
record that moves, a session that breaks, a verb that ends half-way."""

import asyncio
from dataclasses import replace

import pytest

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from spark_ledger.ledger import transitions as t
from spark_ledger.metadata import autorecovery, ledger_record, paths
from spark_ledger.metadata.ledger_record import JoiningBookie, RecordState
from spark_ledger.metadata.store import NoNode, SessionState, StoreUnavailable
from spark_ledger.repair import slots, work_list
from spark_ledger.repair.decommission import forget
from spark_ledger.repair.work_list import Cause
from tests.simulation.loop import run
from tests.unit.spark_ledger.ledger.fakes import STEPS_MAX, cluster_of, simulated
from tests.unit.spark_ledger.repair.stage import (
    DELAY_S,
    TOKENS,
    copies_of,
    gone,
    healing,
    in_limbo,
    ledger_of,
    look_for,
    lose,
)


@simulated
async def test_a_ledger_one_of_whose_bookies_did_not_tell_is_checked_again_at_the_next_pass():
    cluster, ledgers = await cluster_of(3)
    ledger_id = (await ledger_of(ledgers, 5)).ledger_id
    lose(cluster, "b", (ledger_id, 2))
    asked = []

    def busy(request):
        if isinstance(request, m.StoredRequest):
            asked.append(request)
            return m.StoredResponse(Status.BUSY, retry_after_ms=100)
        return None

    cluster.bookies["b"].override = busy
    auditor, worker = await healing(ledgers)
    await look_for(auditor, worker, 10)
    assert asked and await work_list.listed_ledgers(ledgers.metadata) == []
    cluster.bookies["b"].override = None
    await look_for(auditor, worker, 130)
    assert (ledger_id, 2) in cluster.bookies["b"].entries


@simulated
async def test_an_open_ledger_whose_record_alone_moves_has_a_writer():
    cluster, ledgers = await cluster_of(5)
    writer = await ledger_of(ledgers, 3, close=False)
    first = writer.record.last_fragment.ensemble
    for bookie in cluster.bookies.values():  # as the fragment that follows will tell
        bookie.lac[writer.ledger_id] = writer.last_add_confirmed
    auditor, worker = await healing(ledgers)
    await in_limbo(cluster, first[1], writer.ledger_id)
    await look_for(auditor, worker, DELAY_S / 2 - 3)
    cluster.bookies[first[0]].refusing = True
    writer.append([b"makes it change its ensemble"])
    await asyncio.sleep(1)
    assert len(writer.record.fragments) == 2
    assert {bookie.lac[writer.ledger_id] for bookie in cluster.bookies.values()} == {2}
    await look_for(auditor, worker, 12)  # longer than an open ledger may stand still
    record = (await ledgers.record(writer.ledger_id, fresh=True)).record
    assert record.state is RecordState.OPEN
    await look_for(auditor, worker, 2 * DELAY_S)
    assert (await ledgers.record(writer.ledger_id, fresh=True)).record.closed


async def two_fragments(cluster, ledgers):
    """A closed ledger that has another bookie in slot 0 from entry 3 on; it, and the spare."""
    writer = await ledger_of(ledgers, 3, close=False)
    first = writer.record.last_fragment.ensemble
    cluster.bookies[first[0]].refusing = True
    await writer.append([b"in the other fragment"])
    cluster.bookies[first[0]].refusing = False
    await writer.close()
    known = await ledgers.record(writer.ledger_id, fresh=True)
    before, after = known.record.fragments
    (spare,) = {*cluster.bookies} - {*before.ensemble, *after.ensemble}
    return known, before.ensemble[0], after.ensemble[0], spare


@simulated
async def test_who_joins_for_a_member_that_stays_leaves_also_where_a_later_one_is_gone():
    cluster, ledgers = await cluster_of(5)
    known, stays, lost, spare = await two_fragments(cluster, ledgers)
    joins = JoiningBookie(0, 0, spare, "token")
    await ledgers.cluster.records.move(known, lambda record: t.join(record, stays, joins))
    _, worker = await healing(ledgers)
    await gone(cluster, lost)
    reason = work_list.Reason(Cause.LOST, lost, 0)
    await work_list.add(ledgers.metadata, known.record.ledger_id, [reason])
    await worker.round()
    record = (await ledgers.record(known.record.ledger_id, fresh=True)).record
    assert not record.joining and not record.names(lost)
    assert [one.ensemble[0] for one in record.fragments] == [stays, spare]


@simulated
async def test_who_joins_for_a_member_that_is_gone_keeps_what_it_has_where_a_later_one_stays():
    cluster, ledgers = await cluster_of(5)
    known, lost, _, spare = await two_fragments(cluster, ledgers)
    joins = JoiningBookie(0, 0, spare, "token")
    for name in {*known.record.fragments[0].ensemble} - {lost}:
        lose(cluster, name, (known.record.ledger_id, 1))  # so that it cannot be swapped
    await ledgers.cluster.records.move(known, lambda record: t.join(record, lost, joins))
    _, worker = await healing(ledgers)
    await gone(cluster, lost)
    reason = work_list.Reason(Cause.LOST, lost, 0)
    await work_list.add(ledgers.metadata, known.record.ledger_id, [reason])
    await worker.round()
    record = (await ledgers.record(known.record.ledger_id, fresh=True)).record
    assert record.joining == (joins,)


@simulated
async def test_a_ledger_in_recovery_is_given_to_no_bookie_before_its_end_is_decided():
    cluster, ledgers = await cluster_of(5)
    known, lost, _, _ = await two_fragments(cluster, ledgers)
    assert slots.slots_of(known.record, [lost])
    ended = {"last_entry": None, "length_bytes": None, "rows": None}
    undecided = replace(known.record, state=RecordState.IN_RECOVERY, **ended)
    assert not slots.slots_of(undecided, [lost])
    path = paths.ledger(known.record.ledger_id)
    await gone(cluster, lost)
    await cluster.admin.set(path, ledger_record.encode(undecided), known.version)
    moved = await slots.give_away(
        ledgers, known.record.ledger_id, slots.FragmentSlot(0, 0, lost), TOKENS
    )
    assert "its end undecided" in moved.why
    assert not (await ledgers.record(known.record.ledger_id, fresh=True)).record.joining


@simulated
async def test_a_bookie_is_not_lost_by_what_was_seen_before_a_break_of_the_session():
    cluster, ledgers = await cluster_of(4)
    ledger_id = (await ledger_of(ledgers, 5)).ledger_id
    ensemble = (await ledgers.record(ledger_id)).record.last_fragment.ensemble
    auditor, worker = await healing(ledgers)
    await auditor.look()
    await gone(cluster, ensemble[0])
    await look_for(auditor, worker, DELAY_S - 4)
    states = []
    ledgers.metadata.add_session_listener(states.append)
    ledgers.metadata.suspend(2)
    await asyncio.sleep(3)
    assert states == [SessionState.SUSPENDED, SessionState.CONNECTED], "it did not end"
    report, _ = await look_for(auditor, worker, DELAY_S - 2)
    assert report.lost == frozenset()
    report, _ = await look_for(auditor, worker, 5)
    assert report.lost == {ensemble[0]}
    copies = await copies_of(cluster, ledgers, ledger_id)
    assert all(len(names) == 3 for names in copies.values())


@pytest.mark.parametrize("call", range(8))
def test_forgetting_that_ended_half_way_is_gone_on_with_by_the_next_call(call):
    async def scenario():
        _, ledgers = await cluster_of(3)
        store, delete = ledgers.metadata, ledgers.metadata.delete
        nodes = [
            f"{paths.BOOKIES_KNOWN}/gone",
            paths.limbo("gone", 7),
            paths.draining("gone"),
            paths.unrecorded("gone"),
            paths.bookie_start("gone"),
        ]
        for path in nodes:
            await store.create(path, b"{}", parents=True)
        await autorecovery.change_settings(store, accepted=("gone",))
        made = []

        async def away(path, *version):
            made.append(path)
            if len(made) > call:
                raise StoreUnavailable("it is away")
            return await delete(path, *version)

        store.delete = away
        try:
            await forget(ledgers, "gone")
        except Exception as error:
            assert "it is away" in str(error)
            store.delete = delete
            await forget(ledgers, "gone")
        for path in nodes:
            with pytest.raises(NoNode):
                await store.get(path)
        assert (await autorecovery.read_settings(store)).accepted == ()
        await ledgers.close()

    run(scenario(), seed=1, steps_max=STEPS_MAX)


@simulated
async def test_a_reason_that_is_listed_and_is_since_later_makes_a_new_version():
    """Else who repaired it before takes it off."""
    _, ledgers = await cluster_of(3)
    store, versions = ledgers.metadata, []
    for since_ms in (1, 1, 2):
        await work_list.add(store, 7, [work_list.Reason(Cause.LACKING, "a", since_ms)])
        versions.append((await work_list.find(store, 7)).version)
    assert versions[0] == versions[1] < versions[2]
