"""A lost directory is given up, ledger by ledger, once repair has brought its copies back: until
then nothing is denied, and from then on what it may bring back is garbage."""

import asyncio
import dataclasses
import random

import pytest

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from bookie_server.bookie import Bookie
from bookie_server.disk.interface import DiskFailed
from bookie_server.disk.monitor import degraded_reason
from bookie_server.logs.index import (
    LedgerState,
    Location,
    decode_ledger_state,
    encode_ledger_state,
    merge_by_revision,
    merge_outdated,
)
from bookie_server.storage.directories import Directories, JournalDirectory, LedgerDirectory
from tests.kit.deleting import delete_ledgers
from tests.kit.handling import reclaim_once
from tests.kit.nodes import on_a_node
from tests.simulation.disk import SimDisk
from tests.simulation.index import SimIndex
from tests.unit.bookie_server.clustered_node import CLUSTER_ID, SETTINGS, spread_over_directories
from tests.unit.bookie_server.node import ID, entry
from tests.unit.bookie_server.stream_caller import Caller
from tests.unit.bookie_server.wide_node import LEDGERS, flushed

OK, ABSENT, LIMBO = Status.OK, Status.NO_SUCH_ENTRY, Status.LIMBO
GONE = DiskFailed("it is gone")
STALE = 7  # an entry that only the lost directory has
PROMPTLY_S = 2.0  # well below limbo_check_s


async def lose_d1(node, when):
    if when == "while it runs":
        node.storage.drop("d1", GONE)
    else:
        node.out = ["d1"]
        await node.crash()


async def repair(node, *ledger_ids):
    """What repair.limbo does, by hand: two entries each belong there."""
    for ledger_id in ledger_ids:
        asked = await node.ask(ledger_id)
        assert asked.limbo == "lost"
        copies = (entry(ledger_id, 0), entry(ledger_id, 1))
        assert await node.add(*copies, recovery=True) == [OK, OK]
        assert (await node.ask(ledger_id, asked.revision)).status is OK


async def of_d1(node, ledger_id):
    """The entries that the index of d1 has of the ledger."""
    index = await SimIndex.open(node.ledgers["d1"])
    return [place.entry_id for place in await index.range(ledger_id, 0, 99, 1 << 30)]


@pytest.mark.parametrize("when", ["while it runs", "at a start"])
def test_every_way_to_ask_for_what_a_lost_directory_had_answers_unknown(when):
    async def test(node):
        await flushed(node)
        assert set(await node.statuses(1, 0, 1)) == {OK}, "they are in the read cache now"
        await lose_d1(node, when)
        assert set(await node.statuses(1, 0, 5)) == {LIMBO}
        assert set(await node.statuses(1, 0, 5, fence=True)) == {LIMBO}
        caller = Caller(node).begin(0, 5, 1 << 20)
        response = await caller.next()
        assert {result.status for result in response.results} == {LIMBO}
        caller.end()
        assert await caller.next() is None
        await caller.replies.aclose()
        assert (await node.read_lac(1)).last_add_confirmed == -1, "a lower bound"
        assert set(await node.statuses(2, 0, 1)) == {OK}
        assert await node.statuses(2, 2, 2) == [ABSENT]
        info = await node.request("Info", m.InfoRequest(ID))
        assert info.limbo_ledgers == 4

    on_a_node(test, spread_over_directories())


def test_the_loss_of_a_directory_is_listed_at_once():
    async def test(node):
        await flushed(node)
        await asyncio.sleep(5)
        node.storage.drop("d1", GONE)
        await asyncio.sleep(PROMPTLY_S)
        assert sorted(await node.listed()) == [1, 3, 5, 7]

    on_a_node(test, spread_over_directories())


@pytest.mark.parametrize("keep", ["none", "all"])
@pytest.mark.parametrize("rested", ["in the journal", "flushed"])
def test_a_directory_that_was_given_up_is_missed_by_no_later_run(keep, rested):
    """Not even by one that replays what was logged while it was there."""

    async def test(node):
        assert await node.fence(1) is OK
        await flushed(node)
        assert await node.write_lac(1, 0) is OK  # a change that is logged, and names the directory
        await lose_d1(node, "while it runs")
        node.out = ["d1"]
        await repair(node, 1)
        if rested == "flushed":
            await flushed(node)
        for _ in range(3):
            await node.crash(keep)
            assert await node.statuses(1, 0, 2) == [OK, OK, ABSENT]
            assert set(await node.statuses(3, 0, 2)) == {LIMBO}
            assert await node.add(entry(1, 2)) == [Status.FENCED]

    on_a_node(test, spread_over_directories())


@pytest.mark.parametrize("rested", ["in the journal", "flushed"])
def test_what_a_given_up_directory_brings_back_is_garbage(rested):
    async def test(node):
        assert await node.add(entry(1, STALE)) == [OK]
        await flushed(node)
        await lose_d1(node, "at a start")
        await repair(node, 1, 3)
        if rested == "flushed":
            await flushed(node)
        node.out = ["d1"]
        await node.crash()  # so that it is away when the others know that it was given up
        node.out = []
        await node.stop_and_start()
        assert await node.statuses(1, 0, 2) == [OK, OK, ABSENT]
        assert await node.statuses(1, STALE, STALE) == [ABSENT]
        assert await of_d1(node, 1) == await of_d1(node, 3) == []
        assert await of_d1(node, 5) == [0, 1], "it was not given up"
        assert await node.of_each(1) == {i: {OK} for i in LEDGERS}
        await asyncio.sleep(15)
        assert await node.listed() == {}

    on_a_node(test, spread_over_directories())


def test_a_directory_that_is_back_before_anything_was_flushed_still_holds_what_it_got():
    """Replay may bring it the copies that were made for it before it reads that it was given up."""

    async def test(node):
        await flushed(node)
        node.storage.quarantine(1, STALE, "a bad block")
        await node.ask(1)
        await lose_d1(node, "while it runs")
        node.ledgers["d0"].faults.sync_s = (1000.0, 1000.0)
        asked = await node.ask(1)
        assert await node.add(entry(1, 0), entry(1, 1), recovery=True) == [OK, OK]
        for e in range(100):  # so many that the replay flushes on its way
            await node.add_all(entry(2, 2 + e, bytes(3000)))
        asked = await node.ask(1, asked.revision)  # the flush gave it another directory
        assert (await node.ask(1, asked.revision)).status is OK
        node.ledgers["d0"].speed_up()
        node.out = []
        await node.crash()
        for _ in range(2):
            assert await node.statuses(1, 0, 2) == [OK, OK, ABSENT]
            await node.stop_and_start()

    on_a_node(test, spread_over_directories())


def test_a_given_up_directory_that_is_the_only_one_left_takes_new_entries_and_denies_old_ones():
    async def test(node):
        assert await node.add(entry(1, STALE)) == [OK]
        await flushed(node)
        await lose_d1(node, "at a start")
        await repair(node, 1)
        await flushed(node)
        node.out = []
        await node.stop_and_start()
        node.storage.drop("d0", GONE)
        assert await node.add(entry(1, 2)) == [OK]
        await flushed(node)
        assert await of_d1(node, 1) == [2]
        assert set(await node.statuses(1, 0, 1)) == {LIMBO}
        await repair(node, 1)
        node.out = ["d0"]
        for _ in range(2):
            await node.crash()
            assert await node.statuses(1, 0, 3) == [OK, OK, OK, ABSENT]
            assert await node.statuses(1, STALE, STALE) == [ABSENT]

    on_a_node(test, spread_over_directories())


def test_the_logs_of_what_was_given_up_go_though_the_ledgers_live():
    async def test(node):
        for e in range(2, 100):
            await node.add_all(entry(1, e, bytes(5000)))
        await flushed(node)
        assert len(node.files(node.ledgers["d1"], "entrylog")) > 1
        await lose_d1(node, "at a start")
        asked = await node.ask(1)
        assert (await node.ask(1, asked.revision)).status is OK  # as if it belonged there no more
        node.out = []
        await node.stop_and_start()
        sealed = node.files(node.ledgers["d1"], "entrylog")
        await reclaim_once(node.bookie, below=0.5)
        left = node.files(node.ledgers["d1"], "entrylog")
        assert len(left) < len(sealed)
        held = b"".join(map(node.ledgers["d1"].content, left))
        assert not [e for e in range(2, 100) if entry(1, e, bytes(5000)) in held]
        assert await node.of_each(1) == {1: {ABSENT}, **{i: {OK} for i in LEDGERS[1:]}}

    on_a_node(test, spread_over_directories())


def test_index_entries_of_ledgers_that_are_not_the_directorys_own_are_collected():
    async def test(node):
        await flushed(node)
        index = next(s.index for s in node.storage.stores if s.id == "d1")
        await index.put([Location(99, 0, 1, 4096, 100), Location(2, 5, 1, 4096, 100)])
        await node.bookie.reclaim.collect(sweep=False, surplus=True)
        assert await index.ledger_ids() == [1, 3, 5, 7]
        assert await node.of_each(1) == {i: {OK} for i in LEDGERS}

    on_a_node(test, spread_over_directories())


def test_many_strays_go_only_when_they_are_found_again():
    async def test(node):
        await flushed(node)
        for store in node.storage.stores:
            await store.index.put([Location(100 + n, 0, 1, 4096, 100) for n in range(20)])
        for expected in (24, 4):
            await node.bookie.reclaim.collect(sweep=False, surplus=True)
            for store in node.storage.stores:
                assert len(await store.index.ledger_ids()) == expected

    on_a_node(test, spread_over_directories())


def test_in_limbo_of_every_ledger_nothing_is_a_stray():
    async def test(node):
        await flushed(node)
        storage = node.storage
        index = next(s.index for s in storage.stores if s.id == "d1")
        await index.put([Location(99, 0, 1, 4096, 100)])
        storage.set_state(dataclasses.replace(storage.state(-1), limbo="lost"))
        await node.bookie.reclaim.collect(sweep=False, surplus=True)
        assert 99 in await index.ledger_ids()

    on_a_node(test, spread_over_directories())


def test_a_read_that_began_before_the_copies_came_denies_nothing_when_they_have_come():
    async def test(node):
        await flushed(node)
        assert await node.add(entry(1, 9)) == [OK]
        await flushed(node)
        await lose_d1(node, "while it runs")
        assert await node.add(entry(1, 3, bytes(100))) == [OK]
        await flushed(node)
        node.ledgers["d0"].faults.read_s = (3.0, 3.0)
        reading = asyncio.ensure_future(node.statuses(1, 0, 4))
        await asyncio.sleep(0.1)
        await repair(node, 1)
        assert not reading.done()
        assert await reading == [OK, OK, ABSENT, OK, ABSENT]

    on_a_node(test, spread_over_directories())


def test_what_was_told_before_a_restart_clears_nothing():
    """The directory was back in between, and was read while the ledger was compared."""

    async def test(node):
        await flushed(node)
        await lose_d1(node, "at a start")
        before = await node.ask(1)
        await node.crash()
        assert (await node.ask(1, before.revision)).status is LIMBO
        asked = await node.ask(1)
        assert (await node.ask(1, before.revision)).status is LIMBO
        assert (await node.ask(1, asked.revision)).status is OK

    on_a_node(test, spread_over_directories())


def test_a_blank_directory_beside_those_that_cannot_be_opened_is_no_new_node():
    async def test(node):
        assert await node.fence(1) is OK
        await flushed(node)
        await node.bookie.stop()
        node.ledgers["d9"] = SimDisk(random.Random(9))
        index = await SimIndex.open(node.ledgers["d9"])
        ledgers = [LedgerDirectory("d9", node.ledgers["d9"], index)]
        journals = [JournalDirectory(*each) for each in node.journals.items()]
        failed = {"d0": "its index is damaged", "d1": "its index is damaged"}
        session = node.store.session("bookie")
        node.bookie = await Bookie.start(
            ID, Directories(journals, ledgers, failed), session, SETTINGS, CLUSTER_ID
        )
        assert "limbo" in node.bookie.readonly_reason
        assert ABSENT not in await node.statuses(1, 0, 2)

    on_a_node(test, spread_over_directories())


def test_a_deleted_ledger_is_not_listed_and_given_up_once_its_record_is_gone():
    async def test(node):
        await flushed(node)
        await lose_d1(node, "at a start")
        await node.handles.bury([1])
        await asyncio.sleep(15)
        assert await node.listed() == {3: "lost", 5: "lost", 7: "lost"}
        await delete_ledgers(node.store.session("admin"), 1)
        await asyncio.sleep(10)
        assert node.storage.directories.is_whole(node.storage.state(1))

    on_a_node(test, spread_over_directories())


def test_of_two_states_the_later_one_may_give_a_directory_up_and_an_older_one_does_not_undo_it():
    early = LedgerState(1, directories=("a", "b"), revision=4)
    late = LedgerState(1, directories=("b",), given_up=(("a", 5),), revision=6)
    assert (
        merge_by_revision(early, late).directories
        == merge_by_revision(late, early).directories
        == ("b",)
    )
    again = LedgerState(1, directories=("b", "a"), given_up=(("a", 5),), revision=7)
    assert merge_by_revision(late, again).directories == ("b", "a"), "it was taken again since"
    later = LedgerState(1, directories=("b",), given_up=(("a", 5),), revision=8)
    assert merge_by_revision(again, later).directories == ("a", "b"), "nobody gave it up since"
    unaware = LedgerState(1, directories=("a",), revision=9)
    assert merge_by_revision(late, unaware).directories == ("b", "a")
    assert merge_by_revision(late, unaware).given_up == (("a", 5),)
    assert decode_ledger_state(encode_ledger_state(again)) == again


def test_a_directory_that_was_away_takes_no_doubt_back_whatever_its_revisions():
    """Of the last flush before a crash it alone has what was logged without a revision."""

    async def test(node):
        await flushed(node)
        store = next(s for s in node.storage.stores if s.id == "d1")
        ahead = [
            dataclasses.replace(s, revision=s.revision + 9) for s in await store.index.ledgers()
        ]
        await store.index.put_ledgers(ahead)
        await store.index.sync()
        await lose_d1(node, "at a start")
        node.storage.quarantine(2, 0, "its copy is bad")
        await flushed(node)
        node.out = []
        await node.stop_and_start()
        assert node.storage.limbo(2) == "lost"
        assert await node.statuses(2, 2, 2) == [LIMBO]
        assert await node.statuses(4, 2, 2) == [ABSENT]

    on_a_node(test, spread_over_directories())


def test_what_a_directory_that_was_away_had_given_up_meanwhile_stays_given_up():
    known = LedgerState(1, directories=("b",), given_up=(("a", 5),), revision=6)
    away = LedgerState(1, fenced=True, explicit_lac=3, directories=("a",), revision=8)
    assert merge_outdated(known, away) == dataclasses.replace(known, fenced=True, explicit_lac=3)
    for limbo, revision, expected in (("lost", 5, ""), ("lost", 8, "lost"), ("lost", 6, "lost")):
        away = LedgerState(1, directories=("a",), limbo=limbo, revision=revision)
        assert merge_outdated(known, away).limbo == expected
        assert merge_outdated(known, away).revision == 6


def test_a_ledger_that_only_a_directory_of_before_knows_is_fenced_and_doubted():
    """It was forgotten while the directory was away: its fence with it."""

    async def test(node):
        await flushed(node)
        await lose_d1(node, "at a start")
        assert await node.fence(2) is OK
        await node.handles.bury([3])
        await flushed(node)
        for ledger in (1, 2, 3):
            assert node.handles.forget(ledger)
            node.storage.forget(ledger)
        await flushed(node)
        node.out = []
        await node.stop_and_start()
        for ledger in (1, 2, 3):
            assert await node.add(entry(ledger, 2)) == [Status.FENCED]
            assert await node.statuses(ledger, 2, 2) == [LIMBO]
        assert await node.add(entry(4, 2)) == [OK]
        assert await node.statuses(4, 3, 3) == [ABSENT]

    on_a_node(test, spread_over_directories())


def told(node):
    return degraded_reason(node.bookie.disks.states)


def test_a_directory_that_a_start_misses_is_named_until_the_last_ledger_gave_it_up():
    async def test(node):
        await flushed(node)
        assert told(node) == ""
        await lose_d1(node, "at a start")
        assert told(node) == (
            "ledger directory d1 failed: no directory in the settings has this id (ledgers with"
            " entries there: 4)"
        )
        info = await node.request("Info", m.InfoRequest(ID))
        assert [d.path for d in info.directories if d.failure] == ["d1"]
        changes = []
        node.bookie.disks.listeners.append(lambda: changes.append(told(node)))
        await repair(node, 1, 3, 5)
        await flushed(node)
        assert "(ledgers with entries there: 1)" in told(node)
        await repair(node, 7)
        await flushed(node)
        assert told(node) == ""
        assert changes[-1] == "", "whoever asks how we are is told"
        await node.crash()
        assert told(node) == ""

    on_a_node(test, spread_over_directories())


def test_a_directory_that_is_back_is_named_no_more():
    async def test(node):
        await flushed(node)
        await lose_d1(node, "at a start")
        node.out = []
        await node.crash()
        assert told(node) == ""

    on_a_node(test, spread_over_directories())


def test_a_directory_that_fails_is_named_once():
    async def test(node):
        await flushed(node)
        await lose_d1(node, "while it runs")
        assert told(node) == "ledger directory ledger failed: it is gone"

    on_a_node(test, spread_over_directories())


def test_the_return_of_a_directory_is_told_only_when_something_goes(caplog):
    caplog.set_level("INFO")

    def back():
        lines = [each for each in caplog.messages if "d1 is back" in each]
        caplog.clear()
        return lines

    async def test(node):
        await flushed(node)
        await lose_d1(node, "at a start")
        await repair(node, 1, 3)
        await flushed(node)
        node.out = []
        await node.crash()
        assert back() == ["directory d1 is back: its entries of 2 ledgers are removed"]
        await node.crash()
        assert back() == []

    on_a_node(test, spread_over_directories())
