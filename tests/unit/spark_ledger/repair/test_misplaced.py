"""Copies on one host or rack are moved when a better placed bookie is there."""

import asyncio

import pytest

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from spark_ledger.ledger.quorum import Quorum
from spark_ledger.metadata.ledger_record import RecordState
from spark_ledger.repair import auditor as auditors
from spark_ledger.repair import slots, work_list
from spark_ledger.repair.audit import audit
from spark_ledger.repair.auditor import pause_s
from spark_ledger.repair.work_list import Cause, Reason
from tests.unit.spark_ledger.ledger.fakes import FakeCluster, cluster_on, simulated
from tests.unit.spark_ledger.repair.stage import (
    DELAY_S,
    TOKENS,
    copies_of,
    gone,
    healing,
    ledger_of,
    look_for,
)


async def on_hosts(*hosts, **settings):
    """Bookies "a", "b", ... on these hosts."""
    cluster = FakeCluster(0, **settings)
    await cluster.start()
    for number, host in enumerate(hosts):
        await cluster.register(chr(ord("a") + number), host=host)
    return cluster, await cluster.client()


async def ensemble_of(ledgers, ledger_id):
    record = (await ledgers.record(ledger_id, fresh=True)).record
    assert not record.joining
    return record.last_fragment.ensemble


@simulated
async def test_one_of_two_copies_on_a_host_goes_to_a_bookie_on_another():
    cluster, ledgers = await on_hosts("h1", "h1", "h2")
    ledger_ids = [(await ledger_of(ledgers, 5)).ledger_id for _ in range(3)]
    auditor, worker = await healing(ledgers)
    await look_for(auditor, worker, 3)
    assert (await audit(ledgers, TOKENS)).misplaced == 0, "there is no other place"
    await cluster.register("d", host="h3")
    await asyncio.sleep(1)
    assert (await audit(ledgers, TOKENS)).misplaced == 3
    await look_for(auditor, worker, 3)
    assert (await audit(ledgers, TOKENS)).misplaced == 0
    for ledger_id in ledger_ids:
        ensemble = await ensemble_of(ledgers, ledger_id)
        assert {"c", "d"} < {*ensemble}
        copies = await copies_of(cluster, ledgers, ledger_id)
        assert all(len(names) == 3 for names in copies.values())
    assert await work_list.listed_ledgers(ledgers.metadata) == []


@simulated
async def test_what_was_moved_is_not_moved_again():
    cluster, ledgers = await cluster_on("r1", "r1", "r2")
    ledger_id = (await ledger_of(ledgers, 2)).ledger_id
    auditor, worker = await healing(ledgers)
    await cluster.register("d", "r3")
    await cluster.register("e", "r4")
    await asyncio.sleep(1)
    _, outcomes = await look_for(auditor, worker, 3)
    assert [outcome.copied for outcome in outcomes] == [2], "one copy of each entry"
    version = (await ledgers.record(ledger_id, fresh=True)).version
    _, outcomes = await look_for(auditor, worker, 200)
    assert outcomes == []
    assert (await ledgers.record(ledger_id, fresh=True)).version == version


@pytest.mark.parametrize(("size", "moves"), [((4, 2, 2), 0), ((4, 3, 2), 1)])
@simulated
async def test_only_what_shares_a_write_set_is_misplaced(size, moves):
    cluster, ledgers = await cluster_on("r1", "r2", "r1", "r2")
    writer = await ledger_of(ledgers, 8, size)
    ensemble = writer.record.last_fragment.ensemble
    await cluster.register("e", "r3")
    await asyncio.sleep(1)
    auditor, worker = await healing(ledgers)
    await look_for(auditor, worker, 3)
    now = await ensemble_of(ledgers, writer.ledger_id)
    assert len({*ensemble} - {*now}) == moves


@simulated
async def test_nothing_is_moved_to_a_bookie_that_is_no_better_or_takes_no_entries():
    cluster, ledgers = await on_hosts("h1", "h1", "h2")
    ledger_id = (await ledger_of(ledgers, 2)).ledger_id
    before = await ensemble_of(ledgers, ledger_id)
    await cluster.register("d", host="h2")
    await cluster.register("e", host="h3")
    await cluster.readonly("e", "it is to be drained")
    await asyncio.sleep(1)
    auditor, worker = await healing(ledgers)
    _, outcomes = await look_for(auditor, worker, 70)
    assert outcomes == []
    assert await ensemble_of(ledgers, ledger_id) == before


@simulated
async def test_lost_copies_come_first_and_misplaced_ones_wait_for_them():
    cluster, ledgers = await on_hosts("h1", "h1", "h2")
    ledger_id = (await ledger_of(ledgers, 2)).ledger_id
    await cluster.register("d", host="h3")
    await asyncio.sleep(1)
    before = await ensemble_of(ledgers, ledger_id)
    store, reason = ledgers.metadata, Reason(Cause.MISPLACED, before[0], 1)
    lacking = Reason(Cause.LACKING, "c", 1)
    await work_list.add(store, 4711, [lacking])
    auditor, worker = await healing(ledgers)
    await auditor.look()
    assert await work_list.listed_ledgers(store) == [4711], "the auditor lists no move"
    await work_list.add(store, ledger_id, [reason])
    outcome = await worker.work_at(ledger_id)
    assert (outcome.copied, outcome.why) == (0, ""), "and one that is listed is taken off"
    assert await work_list.listed_ledgers(store) == [4711]
    assert await ensemble_of(ledgers, ledger_id) == before


@simulated
async def test_a_ledger_that_is_misplaced_no_more_is_taken_off_the_list_and_nobody_joins_it():
    cluster, ledgers = await on_hosts("h1", "h1", "h2")
    ledger_id = (await ledger_of(ledgers, 2)).ledger_id
    await cluster.register("d", host="h3")
    await asyncio.sleep(1)
    before = await ensemble_of(ledgers, ledger_id)

    def takes_no_copy(request):
        if isinstance(request, m.AddRequest):
            return m.AddResponse([m.AddResult(Status.IO_ERROR)] * len(request.adds))
        return None

    cluster.bookies["d"].override = takes_no_copy
    auditor, worker = await healing(ledgers)
    _, outcomes = await look_for(auditor, worker, 2)
    assert "does not take a copy" in outcomes[0].why
    assert (await ledgers.record(ledger_id, fresh=True)).record.joining[0].bookie_id == "d"
    assert (await audit(ledgers, TOKENS)).is_whole
    await gone(cluster, "d")
    await look_for(auditor, worker, 15)
    assert await ensemble_of(ledgers, ledger_id) == before
    assert await work_list.listed_ledgers(ledgers.metadata) == []


@simulated
async def test_of_an_open_ledger_all_but_the_end_is_moved_and_it_stays_open():
    cluster, ledgers = await on_hosts("h1", "h1", "h2")
    writer = await ledger_of(ledgers, 2, close=False)
    await gone(cluster, "c")
    await cluster.register("d", host="h3")
    await asyncio.sleep(1)
    await writer.append([b"on another ensemble"])
    await asyncio.sleep(1)
    assert len(writer.record.fragments) == 2
    cluster.bookies["c"].refusing = False
    await cluster.register("c", host="h2")
    await cluster.register("e", host="h4")
    await asyncio.sleep(1)
    auditor, worker = await healing(ledgers)
    await look_for(auditor, worker, 3 * DELAY_S)
    record = (await ledgers.record(writer.ledger_id, fresh=True)).record
    first, last = (fragment.ensemble for fragment in record.fragments)
    assert record.state is RecordState.OPEN
    assert {*last} == {"a", "b", "d"}
    assert len({*first} & {"a", "b"}) == 1
    assert await work_list.listed_ledgers(ledgers.metadata) == []


@simulated
async def test_what_is_the_end_of_an_open_ledger_is_not_listed():
    cluster, ledgers = await on_hosts("h1", "h1", "h2")
    await ledger_of(ledgers, 2, close=False)
    await cluster.register("d", host="h3")
    await asyncio.sleep(1)
    auditor, _ = await healing(ledgers)
    assert (await auditor.look()).listed == 0


@simulated
async def test_a_member_that_is_down_is_not_moved_and_others_beside_it_neither():
    cluster, ledgers = await on_hosts("h1", "h1", "h2", "h3")
    writer = await ledger_of(ledgers, 2)
    record = (await ledgers.record(writer.ledger_id)).record
    ensemble = ("a", "b", "c")
    assert slots.misplaced_in(ledgers.cluster, Quorum.of(record), ensemble) == [0, 1]
    await gone(cluster, "c")
    assert slots.misplaced_in(ledgers.cluster, Quorum.of(record), ensemble) == []


@simulated
async def test_with_hard_racks_a_copy_moves_only_to_a_known_rack_of_its_own():
    cluster, ledgers = await cluster_on("r1", "r2", "r3", racks="hard")
    record = (await ledgers.record((await ledger_of(ledgers, 2)).ledger_id)).record
    await cluster.register("d", "r1")
    await cluster.register("e", "")
    await asyncio.sleep(1)
    quorum = Quorum.of(record)
    assert slots.misplaced_in(ledgers.cluster, quorum, ("a", "d", "b")) == [0, 1], "c is on r3"
    await gone(cluster, "c")
    assert slots.misplaced_in(ledgers.cluster, quorum, ("a", "d", "b")) == []


@simulated
async def test_of_a_rack_that_is_gone_copies_are_made_on_others_and_move_when_it_is_back():
    racks = ("r1", "r1", "r2", "r2", "r3", "r3")
    cluster, ledgers = await cluster_on(*racks)
    ledger_ids = [(await ledger_of(ledgers, 3)).ledger_id for _ in range(6)]
    auditor, worker = await healing(ledgers)
    await auditor.look()
    await gone(cluster, "e", "f")
    report, _ = await look_for(auditor, worker, DELAY_S + 10)
    assert report.lost == {"e", "f"}
    for ledger_id in ledger_ids:
        assert not {*await ensemble_of(ledgers, ledger_id)} & {"e", "f"}
    for name in ("e", "f"):
        cluster.bookies[name].refusing = False
        await cluster.register(name, "r3")
    await asyncio.sleep(1)
    assert (await audit(ledgers, TOKENS)).misplaced == len(ledger_ids)
    await look_for(auditor, worker, 100)
    assert (await audit(ledgers, TOKENS)).counts()["misplaced"] == 0
    for ledger_id in ledger_ids:
        ensemble = await ensemble_of(ledgers, ledger_id)
        assert len({racks["abcdef".index(name)] for name in ensemble}) == 3
        copies = await copies_of(cluster, ledgers, ledger_id)
        assert all(len(names) == 3 for names in copies.values())


@simulated
async def test_of_a_rack_that_is_gone_hard_racks_say_what_they_wait_for_until_it_is_back():
    cluster, ledgers = await cluster_on("r1", "r2", "r3", "r1", "r2", racks="hard")
    ledger_ids = [(await ledger_of(ledgers, 3)).ledger_id for _ in range(4)]
    before = [await ledgers.record(one, fresh=True) for one in ledger_ids]
    auditor, worker = await healing(ledgers)
    await auditor.look()
    await gone(cluster, "c")
    _, outcomes = await look_for(auditor, worker, DELAY_S + 10)
    assert {outcome.why for outcome in outcomes} == {
        "no other bookie can take its copies (racks are hard: its rack must have no other member)"
    }
    cluster.bookies["c"].refusing = False
    await cluster.register("c", "r3")
    await look_for(auditor, worker, 2 * DELAY_S)
    assert await work_list.listed_ledgers(ledgers.metadata) == []
    assert [await ledgers.record(one, fresh=True) for one in ledger_ids] == before


@simulated
async def test_a_pass_that_a_slow_store_held_up_puts_off_the_next_by_a_limit_at_most(monkeypatch):
    assert [pause_s(passed_s) for passed_s in (0.1, 3, 1200)] == [60, 300, 3600]
    monkeypatch.setattr(auditors, "AGAIN_S_MAX", 600.0)
    _, ledgers = await on_hosts("h1", "h1", "h2")
    await ledger_of(ledgers, 2)
    auditor, _ = await healing(ledgers)
    ids, passes, slow_s = ledgers.list, 0, 120

    async def listed():
        nonlocal passes
        passes += 1
        await asyncio.sleep(slow_s)
        async for ledger_id in ids():
            yield ledger_id

    ledgers.list = listed
    await auditor.look()
    slow_s = 0
    for after_s, expected in ((599, 1), (2, 2), (59, 2), (2, 3)):
        await asyncio.sleep(after_s)
        await auditor.look()
        assert passes == expected
