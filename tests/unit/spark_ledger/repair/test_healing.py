"""A lost bookie's copies made elsewhere, against scripted bookies: auditor, list and worker."""

import asyncio
import json

import pytest

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from spark_ledger.errors import LedgerError
from spark_ledger.ledger import transitions as t
from spark_ledger.ledger.records import MoveRefused
from spark_ledger.metadata import autorecovery, paths
from spark_ledger.metadata.ledger_record import JoiningBookie, RecordState
from spark_ledger.metadata.store import StoreUnavailable
from spark_ledger.repair import slots, work_list
from spark_ledger.repair.work_list import Cause
from tests.unit.spark_ledger.ledger.fakes import cluster_of, cluster_on, simulated
from tests.unit.spark_ledger.repair.stage import (
    DELAY_S,
    TOKENS,
    copies_of,
    gone,
    healing,
    ledger_of,
    look_for,
    lose,
)


@simulated
async def test_copies_of_a_lost_bookie_are_made_elsewhere_after_the_delay_and_not_before():
    cluster, ledgers = await cluster_of(4)
    ledger_id = (await ledger_of(ledgers, 20)).ledger_id
    ensemble = (await ledgers.record(ledger_id)).record.last_fragment.ensemble
    auditor, worker = await healing(ledgers)
    await auditor.look()
    await gone(cluster, ensemble[0])
    report, outcomes = await look_for(auditor, worker, DELAY_S - 2)
    assert (report.lost, outcomes) == (frozenset(), [])
    report, outcomes = await look_for(auditor, worker, 5)
    assert report.lost == {ensemble[0]}
    assert [outcome[1:3] for outcome in outcomes] == [(20, "")]
    record = (await ledgers.record(ledger_id, fresh=True)).record
    assert not record.names(ensemble[0]) and not record.joining
    assert all(len(names) == 3 for names in (await copies_of(cluster, ledgers, ledger_id)).values())
    assert await work_list.listed_ledgers(ledgers.metadata) == []


@simulated
async def test_a_bookie_that_was_back_between_two_looks_is_not_lost():
    cluster, ledgers = await cluster_of(4)
    ensemble = (await ledger_of(ledgers, 20)).record.last_fragment.ensemble
    auditor, worker = await healing(ledgers)
    await auditor.look()
    await gone(cluster, ensemble[0])
    await auditor.look()
    await cluster.register(ensemble[0])
    await asyncio.sleep(DELAY_S)  # the look took so long: who is dead was asked for copies
    await gone(cluster, ensemble[0])
    assert (await auditor.look()).lost == frozenset()
    report, _ = await look_for(auditor, worker, DELAY_S + 5)
    assert report.lost == {ensemble[0]}


@simulated
async def test_a_bookie_that_came_while_a_look_began_is_not_lost_at_the_next():
    cluster, ledgers = await cluster_of(4)
    ensemble = (await ledger_of(ledgers, 20)).record.last_fragment.ensemble
    auditor, _ = await healing(ledgers)
    await auditor.look()
    await gone(cluster, ensemble[0])
    names = ledgers.metadata.children

    async def late(path, *more):
        found = await names(path, *more)
        if path == paths.BOOKIES_KNOWN:  # after those that are registered
            await cluster.register(ensemble[0])
            await asyncio.sleep(1)
        return found

    ledgers.metadata.children = late
    await auditor.look()
    ledgers.metadata.children = names
    await asyncio.sleep(DELAY_S)
    await gone(cluster, ensemble[0])
    assert (await auditor.look()).lost == frozenset()


@simulated
async def test_a_closed_ledger_is_fenced_at_the_bookie_that_joins_before_it_has_a_copy():
    cluster, ledgers = await cluster_of(4)
    ledger_id = (await ledger_of(ledgers, 5)).ledger_id
    ensemble = (await ledgers.record(ledger_id)).record.last_fragment.ensemble
    spare = next(name for name in "abcd" if name not in ensemble)
    asked = cluster.bookies[spare].requests
    await gone(cluster, ensemble[1])
    moved = await slots.give_away(ledgers, ledger_id, slots.FragmentSlot(0, 1, ensemble[1]), TOKENS)
    assert moved[1:4] == (spare, 5, "")
    fences = [at for at, one in enumerate(asked) if isinstance(one, m.ReadRequest) and one.fence]
    adds = [at for at, one in enumerate(asked) if isinstance(one, m.AddRequest)]
    assert fences[0] < adds[0]


@simulated
async def test_the_joining_bookie_is_named_before_its_first_copy_and_read_by_nobody():
    cluster, ledgers = await cluster_of(4)
    ledger_id = (await ledger_of(ledgers, 5)).ledger_id
    ensemble = (await ledgers.record(ledger_id)).record.last_fragment.ensemble
    spare = next(name for name in "abcd" if name not in ensemble)

    def takes_no_copy(request):
        if isinstance(request, m.AddRequest):
            return m.AddResponse([m.AddResult(Status.IO_ERROR)] * len(request.adds))
        return None

    cluster.bookies[spare].override = takes_no_copy
    slot = slots.FragmentSlot(0, 0, ensemble[0])
    moved = await slots.give_away(ledgers, ledger_id, slot, TOKENS)
    assert "does not take a copy" in moved.why
    record = (await ledgers.record(ledger_id, fresh=True)).record
    (joining,) = record.joining
    assert joining.bookie_id == spare
    assert record.last_fragment.ensemble == ensemble and record.names(spare)

    cluster.bookies[spare].override = None
    assert (await slots.give_away(ledgers, ledger_id, slot, TOKENS)).new == spare


@simulated
async def test_an_entry_that_nobody_supplies_leaves_the_slot_and_the_others_are_copied():
    cluster, ledgers = await cluster_of(4)
    ledger_id = (await ledger_of(ledgers, 6)).ledger_id
    ensemble = (await ledgers.record(ledger_id)).record.last_fragment.ensemble
    for name in ensemble[1:]:
        lose(cluster, name, (ledger_id, 2))
    auditor, worker = await healing(ledgers)
    await auditor.look()
    await gone(cluster, ensemble[0])
    await look_for(auditor, worker, DELAY_S + 15)
    record = (await ledgers.record(ledger_id, fresh=True)).record
    assert record.names(ensemble[0])
    spare = record.joining[0].bookie_id
    assert sorted(entry for _, entry in cluster.bookies[spare].entries) == [0, 1, 3, 4, 5]
    work = await work_list.find(ledgers.metadata, ledger_id)
    assert work is not None and work.damaged == (2,) and "no peer supplies" in work.blocked


@simulated
async def test_a_bookie_that_is_back_keeps_its_slot_and_who_joined_for_it_leaves():
    cluster, ledgers = await cluster_of(4)
    ledger_id = (await ledger_of(ledgers, 6)).ledger_id
    ensemble = (await ledgers.record(ledger_id)).record.last_fragment.ensemble
    for name in ensemble[1:]:
        lose(cluster, name, (ledger_id, 2))  # so that it cannot be swapped
    auditor, worker = await healing(ledgers)
    await auditor.look()
    await gone(cluster, ensemble[0])
    await look_for(auditor, worker, DELAY_S + 15)
    assert (await ledgers.record(ledger_id, fresh=True)).record.joining
    cluster.bookies[ensemble[0]].refusing = False
    await cluster.register(ensemble[0])
    report, _ = await look_for(auditor, worker, 2 * DELAY_S)
    record = (await ledgers.record(ledger_id, fresh=True)).record
    assert record.last_fragment.ensemble == ensemble and not record.joining
    assert await work_list.listed_ledgers(ledgers.metadata) == []
    assert report.lost == frozenset()


@simulated
async def test_nothing_is_copied_when_more_than_a_third_are_gone_until_an_operator_says_so():
    cluster, ledgers = await cluster_of(6)
    ledger_ids = [(await ledger_of(ledgers, 3)).ledger_id for _ in range(8)]
    auditor, worker = await healing(ledgers)
    await auditor.look()
    await gone(cluster, "a", "b", "c")
    report, outcomes = await look_for(auditor, worker, DELAY_S + 5)
    assert report.too_many == {"a", "b", "c"} and "--force" in report.alarm
    assert outcomes == []
    await autorecovery.change_settings(ledgers.metadata, accepted=("a", "b", "c"))
    report, _ = await look_for(auditor, worker, 30)
    assert report.too_many == frozenset()
    healed = 0
    for ledger_id in ledger_ids:
        record = (await ledgers.record(ledger_id, fresh=True)).record
        if {*record.last_fragment.ensemble} <= {*"abc"}:
            assert not record.joining, "nobody has a copy to give"
        else:
            assert not any(map(record.names, "abc"))
            healed += 1
    assert healed


@simulated
async def test_an_open_ledger_whose_writer_moves_is_left_and_its_earlier_fragments_are_made_whole():
    cluster, ledgers = await cluster_of(5)
    writer = await ledger_of(ledgers, 4, close=False)
    first = writer.record.last_fragment.ensemble
    auditor, worker = await healing(ledgers)
    await auditor.look()
    await gone(cluster, first[0])

    async def write():
        for _ in range(int(DELAY_S) + 10):
            await writer.append([b"more"])
            await asyncio.sleep(1)

    writing = asyncio.create_task(write())
    await look_for(auditor, worker, DELAY_S + 9)
    await writing
    record = (await ledgers.record(writer.ledger_id, fresh=True)).record
    assert record.state is RecordState.OPEN
    assert len(record.fragments) == 2 and not record.names(first[0])
    await writer.close()
    assert all(
        len(names) == 3 for names in (await copies_of(cluster, ledgers, writer.ledger_id)).values()
    )


@simulated
async def test_an_open_ledger_that_nobody_writes_is_closed_and_made_whole():
    cluster, ledgers = await cluster_of(4)
    writer = await ledger_of(ledgers, 4, close=False)
    ensemble = writer.record.last_fragment.ensemble
    writer.abandon(LedgerError("its process is gone"))
    auditor, worker = await healing(ledgers)
    await auditor.look()
    await gone(cluster, ensemble[2])
    await look_for(auditor, worker, 2 * DELAY_S + 5)
    record = (await ledgers.record(writer.ledger_id, fresh=True)).record
    assert record.closed and record.last_entry == 3 and not record.names(ensemble[2])


@simulated
async def test_a_worker_that_slept_while_its_bookie_left_and_joined_again_swaps_nothing():
    _, ledgers = await cluster_of(4)
    ledger_id = (await ledger_of(ledgers, 3)).ledger_id
    known = await ledgers.record(ledger_id, fresh=True)
    ensemble = known.record.last_fragment.ensemble
    old, spare = ensemble[0], next(name for name in "abcd" if name not in ensemble)
    records = ledgers.cluster.records
    first, again = (JoiningBookie(0, 0, spare, token) for token in "12")
    known = await records.move(known, lambda r: t.join(r, old, first))
    known = await records.move(known, lambda r: t.leave(r, first))
    known = await records.move(known, lambda r: t.join(r, old, again))
    with pytest.raises(MoveRefused, match="joined again"):
        await records.move(known, lambda r: t.swap(r, old, first))


@simulated
async def test_copies_that_a_close_left_missing_are_found_and_made():
    cluster, ledgers = await cluster_of(3)
    auditor, worker = await healing(ledgers)
    await auditor.look()
    cluster.bookies["b"].silent = True
    writer = await ledgers.create(3, 3, 2)
    for number in range(5):
        await writer.append([b"%d" % number])
    await writer.close()
    cluster.bookies["b"].silent = False
    assert not [key for key in cluster.bookies["b"].entries if key[0] == writer.ledger_id]
    await look_for(auditor, worker, 130)
    copies = await copies_of(cluster, ledgers, writer.ledger_id)
    assert all(len(names) == 3 for names in copies.values())
    assert await work_list.listed_ledgers(ledgers.metadata) == []


@simulated
async def test_a_ledger_with_a_password_heals_as_well():
    cluster, ledgers = await cluster_of(4)
    writer = await ledger_of(ledgers, 4, password=b"secret")
    auditor, worker = await healing(ledgers)
    await auditor.look()
    lost = writer.record.last_fragment.ensemble[0]
    await gone(cluster, lost)
    await look_for(auditor, worker, DELAY_S + 10)
    record = (await ledgers.record(writer.ledger_id, fresh=True)).record
    assert not record.names(lost)


@simulated
async def test_limbo_at_a_bookie_that_the_record_names_no_more_keeps_no_ledger_on_the_list():
    cluster, ledgers = await cluster_of(4)
    ledger_id = (await ledger_of(ledgers, 6)).ledger_id
    ensemble = (await ledgers.record(ledger_id)).record.last_fragment.ensemble
    await ledgers.metadata.create(paths.limbo(ensemble[0], ledger_id), b"{}", parents=True)
    auditor, worker = await healing(ledgers)
    await auditor.look()
    await gone(cluster, ensemble[0])
    await look_for(auditor, worker, 3 * DELAY_S)
    assert not (await ledgers.record(ledger_id, fresh=True)).record.names(ensemble[0])
    assert await work_list.listed_ledgers(ledgers.metadata) == []


@simulated
async def test_a_member_that_was_gone_before_the_worker_began_has_its_rack_all_the_same():
    cluster, ledgers = await cluster_on("r1", "r2", "r3", racks="hard")
    ledger_ids = [(await ledger_of(ledgers, 3)).ledger_id for _ in range(6)]
    for name, rack in (("a", "r1"), ("b", "r2")):
        value = json.dumps({"address": f"{name}:1", "free_bytes": 1, "rack": rack}).encode()
        await ledgers.metadata.create(f"{paths.BOOKIES_KNOWN}/{name}", value, parents=True)
    await gone(cluster, "a", "b")
    await cluster.register("d", "r1")
    await cluster.register("e", "r2")
    for number, ledger_id in enumerate(ledger_ids):
        old, new = (("a", "d"), ("b", "e"))[number % 2]
        later = await cluster.client()
        ensemble = (await later.record(ledger_id)).record.last_fragment.ensemble
        slot = slots.FragmentSlot(0, ensemble.index(old), old)
        moved = await slots.give_away(later, ledger_id, slot, TOKENS)
        assert moved.new == new, "the other one has the rack of a member that is gone"


@simulated
async def test_a_lock_that_could_not_be_given_back_is_given_back_with_the_next_round(monkeypatch):
    _, ledgers = await cluster_of(4)
    ledger_id = (await ledger_of(ledgers, 1)).ledger_id
    store = ledgers.metadata
    await work_list.add(store, ledger_id, [work_list.Reason(Cause.LOST, "a", 0)])
    _, worker = await healing(ledgers)
    plain = store.delete

    async def fails(path, version=-1):
        if path.startswith(paths.UNDERREPLICATED_LOCKS):
            raise StoreUnavailable("away")
        await plain(path, version)

    with monkeypatch.context() as away:
        away.setattr(store, "delete", fails)
        await worker.round()
    assert await store.children(paths.UNDERREPLICATED_LOCKS) == [str(ledger_id)]
    await worker.round()
    assert await store.children(paths.UNDERREPLICATED_LOCKS) == []


@simulated
async def test_nobody_joins_for_a_bookie_that_came_back_while_the_ledger_was_closed(monkeypatch):
    cluster, ledgers = await cluster_of(3)
    writer = await ledger_of(ledgers, 4, close=False)
    old = writer.record.last_fragment.ensemble[0]
    writer.abandon(LedgerError("its process is gone"))
    auditor, worker = await healing(ledgers)
    await auditor.look()
    await cluster.register("d")
    await gone(cluster, old)
    plain = ledgers.recover

    async def takes_long(*args, **options):
        await gone(cluster, "d")
        known = await plain(*args, **options)
        await cluster.register("d")
        await cluster.register(old)
        await asyncio.sleep(1)
        return known

    monkeypatch.setattr(ledgers, "recover", takes_long)
    _, outcomes = await look_for(auditor, worker, 2 * DELAY_S + 5)
    assert "the bookie is registered again" in [outcome.why for outcome in outcomes]
    known = await ledgers.record(writer.ledger_id, fresh=True)
    assert known.record.closed and known.record.names(old)
    assert known.version == 2, "in recovery, closed, and nothing else"


@simulated
async def test_a_record_that_cannot_be_read_hinders_no_other_ledger_and_is_told(caplog):
    cluster, ledgers = await cluster_of(4)
    damaged, fine = [(await ledger_of(ledgers, 3)).ledger_id for _ in range(2)]
    node = await cluster.admin.get(paths.ledger(damaged))
    await cluster.admin.set(paths.ledger(damaged), b"{", node.version)
    name = (await ledgers.record(fine)).record.last_fragment.ensemble[0]
    auditor, worker = await healing(ledgers)
    await auditor.look()
    await gone(cluster, name)
    await look_for(auditor, worker, DELAY_S + 5)
    assert not (await ledgers.record(fine, fresh=True)).record.names(name)
    assert f"left out of repair: the record of ledger {damaged}" in caplog.text


@pytest.mark.parametrize("durability", ["page-cache", "synced"])
@simulated
async def test_all_of_an_open_ledger_is_copied_for_a_plain_read_shows_what_is_not_synced(
    durability,
):
    cluster, ledgers = await cluster_of(5)
    writer = await ledgers.create(3, 3, 2, durability=durability)
    for _ in range(4):
        await writer.append([b"entry"])
    first = writer.record.last_fragment.ensemble
    await gone(cluster, first[0])
    for _ in range(4):
        await writer.append([b"more"])
    record = (await ledgers.record(writer.ledger_id, fresh=True)).record
    begin = record.last_fragment.first_entry
    assert begin and first[0] not in record.last_fragment.ensemble
    (spare,) = {*"abcde"} - {*first, *record.last_fragment.ensemble}
    others = {*"abcde"} - {*first, spare}
    for entry_id in range(begin):
        at = cluster.bookies[first[1]].entries[writer.ledger_id, entry_id]
        cluster.bookies[spare].entries[writer.ledger_id, entry_id] = at
    moved = await slots.give_away(
        ledgers, writer.ledger_id, slots.FragmentSlot(0, 0, first[0]), TOKENS, avoid=others
    )
    assert moved[1:4] == (spare, begin, "")


@simulated
async def test_a_reason_that_comes_again_is_not_taken_off_by_who_saw_that_it_was_none():
    _, ledgers = await cluster_of(4)
    store = ledgers.metadata
    lost = work_list.Reason(Cause.LOST, "a", 1)
    assert await work_list.add(store, 7, [lost])
    seen = await work_list.find(store, 7)
    assert not await work_list.add(store, 7, [lost])
    assert await work_list.find(store, 7) == seen, "said once more, it is no write"
    assert not await work_list.add(store, 7, [lost._replace(since_ms=2)])
    await work_list.remove(store, seen)
    assert (await work_list.find(store, 7)).reasons == (lost,)


@simulated
async def test_a_bookie_that_comes_back_while_a_worker_waits_for_its_pace_has_nothing_more_copied():
    cluster, ledgers = await cluster_of(4, read_request_bytes=64)
    ledger_id = (await ledger_of(ledgers, 40)).ledger_id
    ensemble = (await ledgers.record(ledger_id)).record.last_fragment.ensemble
    (spare,) = {*"abcd"} - {*ensemble}
    auditor, worker = await healing(ledgers, repair_bytes_per_s=10)
    await auditor.look()
    await gone(cluster, ensemble[0])
    for _ in range(int(DELAY_S) + 5):
        await auditor.look()
        await asyncio.sleep(1)
    working = asyncio.create_task(worker.round())
    while not cluster.bookies[spare].entries:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    await cluster.register(ensemble[0])
    copied = len(cluster.bookies[spare].entries)
    (outcome,) = await working
    assert outcome.why == "the bookie is registered again"
    assert len(cluster.bookies[spare].entries) == copied


@simulated
async def test_a_changed_rate_and_that_repair_is_disabled_count_within_the_ledger_under_way():
    cluster, ledgers = await cluster_of(4, read_request_bytes=64)
    ledger_id = (await ledger_of(ledgers, 40)).ledger_id
    ensemble = (await ledgers.record(ledger_id)).record.last_fragment.ensemble
    auditor, worker = await healing(ledgers, repair_bytes_per_s=1)
    await auditor.look()
    await gone(cluster, ensemble[0])
    for _ in range(int(DELAY_S) + 5):
        await auditor.look()
        await asyncio.sleep(1)
    working = asyncio.create_task(worker.round())
    await asyncio.sleep(20)
    copied = worker.copied_bytes
    assert 64 <= copied < 128, "the next is due after a minute"
    await autorecovery.change_settings(ledgers.metadata, enabled=False)
    (outcome,) = await working
    assert (outcome.why, worker.copied_bytes) == ("autorecovery is disabled", copied)
    assert await worker.round() == []
    await autorecovery.change_settings(ledgers.metadata, enabled=True)
    await asyncio.sleep(2)  # until it is due again
    working = asyncio.create_task(worker.round())
    await asyncio.sleep(10)
    assert worker.copied_bytes < 200
    await autorecovery.change_settings(ledgers.metadata, repair_bytes_per_s=0)
    await asyncio.sleep(6)
    assert [one.why for one in await working] == [""]
    assert not (await ledgers.record(ledger_id, fresh=True)).record.names(ensemble[0])


@simulated
async def test_however_many_entries_nobody_supplies_all_others_are_copied_and_the_first_are_named():
    cluster, ledgers = await cluster_of(4)
    ledger_id = (await ledger_of(ledgers, 24)).ledger_id
    ensemble = (await ledgers.record(ledger_id)).record.last_fragment.ensemble
    for name in ensemble[1:]:
        lose(cluster, name, *[(ledger_id, entry) for entry in range(20)])
    auditor, worker = await healing(ledgers)
    await auditor.look()
    await gone(cluster, ensemble[0])
    await look_for(auditor, worker, DELAY_S + 15)
    record = (await ledgers.record(ledger_id, fresh=True)).record
    spare = record.joining[0].bookie_id
    assert sorted(entry for _, entry in cluster.bookies[spare].entries) == [*range(20, 24)]
    work = await work_list.find(ledgers.metadata, ledger_id)
    assert work is not None and work.damaged == (*range(16),)
    assert "no peer supplies 20 of its entries, the first is 0" in work.blocked


@simulated
async def test_a_drained_bookie_that_is_to_stay_after_all_has_nothing_more_copied():
    _, ledgers = await cluster_of(4, read_request_bytes=64)
    ledger_id = (await ledger_of(ledgers, 40)).ledger_id
    old = (await ledgers.record(ledger_id)).record.last_fragment.ensemble[0]
    auditor, worker = await healing(ledgers, repair_bytes_per_s=10)
    await ledgers.metadata.create(paths.draining(old), parents=True)
    await auditor.look()
    working = asyncio.create_task(worker.round())
    await asyncio.sleep(15)
    assert (await ledgers.record(ledger_id, fresh=True)).record.joining
    await ledgers.metadata.delete(paths.draining(old))
    (outcome,) = await working
    assert (
        0 < worker.copied_bytes < 40 * len("payload 1")
        and outcome.why == "the bookie is registered again"
    )
    await asyncio.sleep(DELAY_S)
    await worker.round()
    record = (await ledgers.record(ledger_id, fresh=True)).record
    assert record.names(old) and not record.joining


@simulated
async def test_a_bookie_that_takes_no_copy_joins_no_more_where_another_can():
    cluster, ledgers = await cluster_of(5)
    ledger_ids = [(await ledger_of(ledgers, 3)).ledger_id for _ in range(8)]
    old = "a"
    auditor, worker = await healing(ledgers)
    await auditor.look()

    def takes_no_copy(request):
        if isinstance(request, m.AddRequest):
            return m.AddResponse([m.AddResult(Status.IO_ERROR)] * len(request.adds))
        return None

    cluster.bookies["b"].override = takes_no_copy
    await gone(cluster, old)
    await look_for(auditor, worker, 6 * DELAY_S)
    for ledger_id in ledger_ids:
        record = (await ledgers.record(ledger_id, fresh=True)).record
        assert not record.names(old) and not record.joining
    assert await work_list.listed_ledgers(ledgers.metadata) == []


@simulated
async def test_an_empty_ledger_whose_bookies_are_all_gone_for_good_is_given_others():
    cluster, ledgers = await cluster_of(3)
    ledger_id = (await ledger_of(ledgers, 0)).ledger_id
    auditor, worker = await healing(ledgers)
    await auditor.look()
    for name in "def":
        await cluster.register(name)
    await autorecovery.change_settings(ledgers.metadata, accepted=(*"abc",))
    await gone(cluster, *"abc")
    await look_for(auditor, worker, 2 * DELAY_S)
    record = (await ledgers.record(ledger_id, fresh=True)).record
    assert {*record.last_fragment.ensemble} == {*"def"}
    assert all(cluster.bookies[name].fenced.get(ledger_id) for name in "def")
    assert await work_list.listed_ledgers(ledgers.metadata) == []


@simulated
async def test_a_writer_that_had_no_spare_gets_its_time_when_there_is_one():
    cluster, ledgers = await cluster_of(3)
    writer = await ledgers.create(3, 3, 2)
    await writer.append([b"x"])
    old = writer.record.last_fragment.ensemble[0]
    auditor, worker = await healing(ledgers)
    await auditor.look()
    await gone(cluster, old)
    _, outcomes = await look_for(auditor, worker, 4 * DELAY_S)
    assert {outcome.why for outcome in outcomes} == {"no other bookie can take its copies"}
    await cluster.register("d")
    await look_for(auditor, worker, DELAY_S / 2 - 1)
    await writer.append([b"y"])
    now = (await ledgers.record(writer.ledger_id, fresh=True)).record
    assert now.state is RecordState.OPEN, "it was not recovered"
    assert now.last_fragment.ensemble[0] == "d", "its writer replaced the member"
    await writer.close()
