"""Repair of a ledger that a bookie lists as in limbo, against scripted bookies."""

import asyncio

import pytest

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from spark_ledger import errors
from spark_ledger.metadata import autorecovery, paths
from spark_ledger.metadata.ledger_record import (
    Fragment,
    LedgerRecord,
    RecordState,
    entries_kept,
    should_keep,
)
from spark_ledger.repair import work_list
from spark_ledger.repair.auditor import Auditor
from spark_ledger.repair.limbo import LimboLedger, list_limbo, repair_everywhere
from spark_ledger.repair.service import repair_once, tokens_of
from spark_ledger.repair.worker import Worker
from tests.kit.limbo_repair import repair
from tests.unit.spark_ledger.ledger.fakes import cluster_of, simulated
from tests.unit.spark_ledger.repair.stage import in_limbo, ledger_of, lose


@simulated
async def test_what_a_bookie_lost_is_copied_back_and_the_rest_left_alone():
    cluster, ledgers = await cluster_of(3)
    ledger_id = (await ledger_of(ledgers, 40)).ledger_id
    whole = dict(cluster.bookies["b"].entries)
    lose(cluster, "b", *[(ledger_id, e) for e in (0, 7, 8, 9, 39)])
    await in_limbo(cluster, "b", ledger_id)
    (result,) = await repair(ledgers, ledger_id, ["b"])
    assert (result.cleared, result.copied, result.why) == (True, 5, "")
    assert cluster.bookies["b"].entries == whole
    assert not cluster.bookies["b"].limbo


@pytest.mark.parametrize(("durability", "fenced"), [("page-cache", True), ("synced", False)])
@simulated
async def test_a_ledger_of_page_cache_durability_is_fenced_where_it_is_compared(durability, fenced):
    cluster, ledgers = await cluster_of(3)
    ledger_id = (await ledger_of(ledgers, 4, durability=durability)).ledger_id
    await in_limbo(cluster, "b", ledger_id, "torn")
    (result,) = await repair(ledgers, ledger_id, ["b"])
    assert result.cleared
    assert cluster.bookies["b"].fenced.get(ledger_id, False) is fenced


@simulated
async def test_a_member_of_a_striped_ledger_gets_the_entries_of_its_slot_and_no_others():
    cluster, ledgers = await cluster_of(4)
    writer = await ledger_of(ledgers, 12, (4, 2, 2))
    ledger_id, name = writer.ledger_id, writer.record.last_fragment.ensemble[2]
    whole = dict(cluster.bookies[name].entries)
    cluster.bookies[name].entries.clear()
    await in_limbo(cluster, name, ledger_id)
    (result,) = await repair(ledgers, ledger_id, [name])
    assert result.cleared
    assert cluster.bookies[name].entries == whole
    assert sorted(e for _, e in whole) == [1, 2, 5, 6, 9, 10]


@simulated
async def test_a_copy_that_cannot_be_read_is_replaced():
    cluster, ledgers = await cluster_of(3)
    ledger_id = (await ledger_of(ledgers, 3)).ledger_id
    whole = dict(cluster.bookies["b"].entries)
    cluster.bookies["b"].entries[ledger_id, 1] = whole[ledger_id, 1][:-1] + b"?"
    await in_limbo(cluster, "b", ledger_id)
    (result,) = await repair(ledgers, ledger_id, ["b"])
    assert (result.cleared, result.copied) == (True, 1)
    assert cluster.bookies["b"].entries == whole


@simulated
async def test_what_no_peer_supplies_leaves_the_ledger_in_limbo_and_is_said():
    cluster, ledgers = await cluster_of(3)
    ledger_id = (await ledger_of(ledgers, 6)).ledger_id
    for name in "abc":
        lose(cluster, name, (ledger_id, 2))
    lose(cluster, "b", (ledger_id, 4))
    await in_limbo(cluster, "b", ledger_id)
    (result,) = await repair(ledgers, ledger_id, ["b"])
    assert not result.cleared
    assert result.copied == 1, "what can be had is copied all the same"
    assert "the first is 2" in result.why
    assert cluster.bookies["b"].limbo


@simulated
async def test_a_ledger_that_gives_more_to_doubt_meanwhile_is_compared_again():
    cluster, ledgers = await cluster_of(3)
    ledger_id = (await ledger_of(ledgers, 3)).ledger_id
    await in_limbo(cluster, "b", ledger_id)
    bookie, comparisons = cluster.bookies["b"], []

    def doubts(request):
        if isinstance(request, m.ReadRequest):
            comparisons.append(request)
            if len(comparisons) == 1:
                bookie.limbo[ledger_id] += 1

    bookie.override = doubts
    (result,) = await repair(ledgers, ledger_id, ["b"])
    assert result.cleared
    assert len(comparisons) == 2


@simulated
async def test_a_bookie_that_does_not_answer_is_told_of_and_hinders_no_other():
    cluster, ledgers = await cluster_of(3)
    ledger_id = (await ledger_of(ledgers, 3)).ledger_id
    for name in "bc":
        await in_limbo(cluster, name, ledger_id)
    cluster.bookies["b"].refusing = True
    away, there = await repair(ledgers, ledger_id, ["b", "c"])
    assert not away.cleared
    assert "no answer" in away.why
    assert there.cleared


@simulated
async def test_the_bookies_lists_are_told_with_their_reasons():
    cluster, ledgers = await cluster_of(3)
    assert await list_limbo(ledgers.metadata) == []
    await in_limbo(cluster, "b", 12, "torn")
    await in_limbo(cluster, "b", 5, "lost")
    await in_limbo(cluster, "a", 12, "lost")
    found = await list_limbo(ledgers.metadata)
    assert [one[:3] for one in found] == [("a", 12, "lost"), ("b", 5, "lost"), ("b", 12, "torn")]
    assert isinstance(found[0], LimboLedger)


async def list_and_work(auditor, worker):
    """The outcomes of one look and one round."""
    await auditor.look()
    return await worker.round()


@simulated
async def test_a_worker_leaves_a_writer_that_moves_and_recovers_one_that_does_not():
    cluster, ledgers = await cluster_of(3)
    writer = await ledger_of(ledgers, 3, close=False)
    await in_limbo(cluster, "b", writer.ledger_id, "torn")
    tokens = await tokens_of(ledgers)
    auditor, worker = Auditor(ledgers, tokens), Worker(ledgers, tokens, idle_s=300)
    for _ in range(10):
        assert not any(one.repaired for one in await list_and_work(auditor, worker))
        await writer.append([b"more"])
        await asyncio.sleep(60)
    assert not (await ledgers.record(writer.ledger_id, fresh=True)).record.closed
    outcomes = []
    for _ in range(700):
        outcomes += await worker.round()
        await asyncio.sleep(1)
    ((repaired,),) = [one.repaired for one in outcomes if one.repaired]
    assert repaired.cleared
    record = (await ledgers.record(writer.ledger_id, fresh=True)).record
    assert record.state is RecordState.CLOSED
    assert record.last_entry == 12
    assert await work_list.listed_ledgers(ledgers.metadata) == []
    with pytest.raises(errors.LedgerError):
        await writer.append([b"too late"])


@simulated
async def test_the_auditor_reads_what_is_in_limbo_once_and_lists_again_what_was_taken_off_too_early(
    monkeypatch,
):
    cluster, ledgers = await cluster_of(3)
    ledger_id = (await ledger_of(ledgers, 3, close=False)).ledger_id
    for name in "ab":
        await in_limbo(cluster, name, ledger_id)
    auditor, asked, get = Auditor(ledgers, await tokens_of(ledgers)), [], ledgers.metadata.get
    in_limbo_there = [paths.limbo(name, ledger_id) for name in "ab"]

    async def counted(path, *watch):
        asked.extend(one for one in in_limbo_there if one == path)
        return await get(path, *watch)

    monkeypatch.setattr(ledgers.metadata, "get", counted)
    await auditor.look()
    assert asked == in_limbo_there
    await auditor.look()
    assert len(asked) == 2
    await cluster.admin.delete(paths.underreplicated(ledger_id))
    await auditor.look()
    assert len(asked) == 4
    work = await work_list.find(ledgers.metadata, ledger_id)
    assert work is not None and {one.bookie_id for one in work.reasons} == {"a", "b"}


@simulated
async def test_a_ledger_with_a_password_is_repaired_with_the_others():
    cluster, ledgers = await cluster_of(3)
    ledger_id = (await ledger_of(ledgers, 3, password=b"secret")).ledger_id
    lose(cluster, "b", (ledger_id, 1))
    await in_limbo(cluster, "b", ledger_id)
    done = await repair_once(ledgers, idle_s=30)
    (result,) = done.repaired
    assert (result.cleared, result.copied, done.left) == (True, 1, {})


@simulated
async def test_a_listed_ledger_that_is_gone_or_cannot_be_recovered_hinders_no_other():
    cluster, ledgers = await cluster_of(3)
    stuck = (await ledger_of(ledgers, 1, close=False)).ledger_id
    fine = (await ledger_of(ledgers, 1)).ledger_id
    for ledger_id in (stuck, fine, 99):
        await in_limbo(cluster, "b", ledger_id)
    for name in "ac":
        cluster.bookies[name].override = lambda request: (
            m.ReadLacResponse(Status.IO_ERROR)
            if isinstance(request, m.ReadLacRequest) and request.ledger_id == stuck
            else None
        )
    done = await repair_once(ledgers, idle_s=0)
    (result,) = done.repaired
    assert (result.ledger_id, result.cleared) == (fine, True)
    assert list(done.left) == [stuck]
    assert await work_list.listed_ledgers(ledgers.metadata) == [stuck]


@simulated
async def test_an_idle_open_ledger_in_limbo_where_only_an_earlier_fragment_is_is_closed_too():
    cluster, ledgers = await cluster_of(4)
    writer = await ledger_of(ledgers, 3, close=False)
    name = writer.record.last_fragment.ensemble[0]
    cluster.bookies[name].refusing = True
    await cluster.deregister(name)
    await asyncio.gather(*[writer.append([b"more"]) for _ in range(3)])
    assert name not in writer.record.last_fragment.ensemble and writer.record.names(name)
    cluster.bookies[name].refusing = False
    await cluster.register(name)
    lose(cluster, name, (writer.ledger_id, 1))
    await in_limbo(cluster, name, writer.ledger_id)
    writer.abandon(errors.LedgerError("its process is gone"))
    done = await repair_once(ledgers, idle_s=30)
    (result,) = done.repaired
    assert (result.bookie_id, result.cleared, result.copied, done.left) == (name, True, 1, {})


@simulated
async def test_what_a_worker_of_the_cluster_repairs_now_is_left_to_it():
    cluster, ledgers = await cluster_of(3)
    ledger_id = (await ledger_of(ledgers, 1)).ledger_id
    await in_limbo(cluster, "b", ledger_id)
    await cluster.admin.create(paths.underreplicated_lock(ledger_id), b"", parents=True)
    done = await repair_once(ledgers)
    assert (done.repaired, list(done.left)) == ([], [ledger_id])


@simulated
async def test_the_command_repairs_what_is_in_limbo_though_autorecovery_is_disabled():
    cluster, ledgers = await cluster_of(3)
    ledger_id = (await ledger_of(ledgers, 1)).ledger_id
    await in_limbo(cluster, "b", ledger_id)
    await autorecovery.change_settings(ledgers.metadata, enabled=False)
    tokens = await tokens_of(ledgers)
    auditor, worker = Auditor(ledgers, tokens), Worker(ledgers, tokens)
    assert await list_and_work(auditor, worker) == []
    (result,) = (await repair_once(ledgers)).repaired
    assert result.cleared


@pytest.mark.parametrize("sizes", [(3, 3, 2), (3, 2, 2), (5, 3, 2), (4, 1, 1)], ids=str)
def test_every_entry_is_kept_by_the_members_of_its_write_set_in_its_fragment(sizes):
    ensembles = [[f"{letter}{slot}" for slot in range(sizes[0])] for letter in "xyz"]
    ensembles[1][0] = ensembles[0][0]
    firsts = (0, 4, 9)
    fragments = tuple(Fragment(f, tuple(e)) for f, e in zip(firsts, ensembles, strict=True))
    record = LedgerRecord(1, *sizes, fragments)
    bookies = dict.fromkeys(bookie for ensemble in ensembles for bookie in ensemble)
    for last in (-1, 0, 3, 4, 12):
        kept = {
            (bookie, entry)
            for bookie in bookies
            for entries, slot in entries_kept(record, bookie, last)
            for entry in entries
            if should_keep(record, slot, entry)
        }
        expected = {
            (record.fragment_of(entry).ensemble[(entry + i) % sizes[0]], entry)
            for entry in range(last + 1)
            for i in range(sizes[1])
        }
        assert kept == expected


@simulated
async def test_everywhere_each_member_is_compared_whatever_it_says_of_limbo():
    cluster, ledgers = await cluster_of(3)
    ledger_id = (await ledger_of(ledgers, 20)).ledger_id
    whole = {name: dict(cluster.bookies[name].entries) for name in "abc"}
    lose(cluster, "a", (ledger_id, 3))
    cluster.bookies["b"].entries[ledger_id, 4] = whole["b"][ledger_id, 4][:-1] + b"?"
    await in_limbo(cluster, "c", ledger_id)
    record, results = await repair_everywhere(ledgers, ledger_id)
    assert record.ledger_id == ledger_id
    found = {one.bookie_id: one[2:] for one in results}
    assert found == {
        "a": (True, 1, "", 20),
        "b": (True, 1, "", 20),
        "c": (True, 0, "", 20),
    }
    assert {name: cluster.bookies[name].entries for name in "abc"} == whole
    assert not cluster.bookies["c"].limbo


@simulated
async def test_everywhere_what_is_found_to_doubt_by_the_comparison_itself_is_cleared_too():
    cluster, ledgers = await cluster_of(3)
    ledger_id = (await ledger_of(ledgers, 3)).ledger_id
    bookie = cluster.bookies["b"]

    def doubts(request):
        if isinstance(request, m.ReadRequest) and ledger_id not in bookie.limbo:
            bookie.limbo[ledger_id] = 1
            bookie.override = None

    bookie.override = doubts
    _, results = await repair_everywhere(ledgers, ledger_id)
    assert all(one.cleared for one in results)
    assert not bookie.limbo


@simulated
async def test_everywhere_a_member_that_is_silent_or_lacks_what_nobody_has_is_not_called_whole():
    cluster, ledgers = await cluster_of(3)
    ledger_id = (await ledger_of(ledgers, 6)).ledger_id
    for name in "ab":
        lose(cluster, name, (ledger_id, 2))
    cluster.bookies["c"].refusing = True
    _, results = await repair_everywhere(ledgers, ledger_id)
    assert [one.cleared for one in results] == [False, False, False]
    whys = {one.bookie_id: one.why for one in results}
    assert "no answer" in whys["c"]
    assert "the first is 2" in whys["a"]


@simulated
async def test_everywhere_a_bookie_declared_gone_must_be_one_that_holds_the_end():
    _, ledgers = await cluster_of(3)
    ledger_id = (await ledger_of(ledgers, 3, close=False)).ledger_id
    with pytest.raises(errors.BadConfig, match=r"bookie 'z' .* end .* Its bookies are \w, \w, \w"):
        await repair_everywhere(ledgers, ledger_id, gone={"z"})
    assert not (await ledgers.record(ledger_id, fresh=True)).record.closed


@simulated
async def test_everywhere_a_name_of_no_bookie_is_refused_for_a_closed_ledger_too():
    cluster, ledgers = await cluster_of(3)
    ledger_id = (await ledger_of(ledgers, 3)).ledger_id
    for name in ("z", "", "../a"):
        with pytest.raises(errors.BadConfig, match=f"no bookie '{name}' was ever registered"):
            await repair_everywhere(ledgers, ledger_id, gone={name})
    value = b'{"address": "z:1"}'
    await cluster.admin.create(f"{paths.BOOKIES_KNOWN}/z", value, parents=True)
    _, results = await repair_everywhere(ledgers, ledger_id, gone={"z"})
    assert all(one.cleared for one in results), "it held it once, perhaps: said again, it is fine"


@simulated
async def test_everywhere_a_bookie_that_runs_is_not_declared_gone_unless_it_lists_the_ledger():
    cluster, ledgers = await cluster_of(3)
    ledger_id = (await ledger_of(ledgers, 3, close=False)).ledger_id
    with pytest.raises(errors.BadConfig, match="bookie c is registered, and does not list ledger"):
        await repair_everywhere(ledgers, ledger_id, gone={"c"})
    assert not (await ledgers.record(ledger_id, fresh=True)).record.closed
    await in_limbo(cluster, "c", ledger_id)
    record, _ = await repair_everywhere(ledgers, ledger_id, gone={"c"})
    assert record.closed


@simulated
async def test_one_pass_repairs_what_is_listed_and_leaves_a_writer_that_moves():
    cluster, ledgers = await cluster_of(3)
    closed = (await ledger_of(ledgers, 3)).ledger_id
    idle = (await ledger_of(ledgers, 3, close=False)).ledger_id
    moving = await ledger_of(ledgers, 3, close=False)
    for ledger_id in (closed, idle, moving.ledger_id):
        await in_limbo(cluster, "b", ledger_id)

    async def move():
        while True:
            await asyncio.sleep(1)
            await moving.append([b"more"])

    moves = asyncio.ensure_future(move())
    done = await repair_once(ledgers, idle_s=30)
    moves.cancel()
    assert sorted(one.ledger_id for one in done.repaired) == [closed, idle]
    assert all(one.cleared for one in done.repaired)
    assert list(done.left) == [moving.ledger_id]
