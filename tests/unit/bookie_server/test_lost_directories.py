"""What a directory that went, or comes back alone, does to the promises of a node: nothing that was
acknowledged is denied, no fence is forgotten, and the others go on."""

import asyncio
import dataclasses

import pytest

from bookie_server.api.status import Status
from bookie_server.disk.interface import DiskFailed
from bookie_server.journal import checkpoint
from bookie_server.journal.writer import JournalFailed, segment_ids, segment_path
from bookie_server.ledgers.registry import LedgerJudgement
from bookie_server.logs.index import EVERY_LEDGER
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.ledger_record import Fragment, RecordState
from tests.kit.deleting import delete_ledgers
from tests.kit.nodes import on_a_node
from tests.kit.settings import with_settings
from tests.simulation.disk import SimDisk
from tests.unit.bookie_server.clustered_node import (
    ABSENT,
    LIMBO,
    OK,
    SETTINGS,
    home_of,
    spread_over_directories,
)
from tests.unit.bookie_server.node import ID, entry
from tests.unit.bookie_server.wide_node import LEDGERS, flushed


@pytest.mark.parametrize("when", ["while it runs", "at a start"])
def test_ledgers_of_a_lost_directory_are_listed_until_each_was_repaired(when):
    async def test(node):
        await flushed(node)
        if when == "at a start":
            node.die()
            node.out = ["d1"]
            await node.start()
        else:
            node.storage.drop("d1", DiskFailed("it is gone"))
        await asyncio.sleep(15)
        assert await node.listed() == {1: "lost", 3: "lost", 5: "lost", 7: "lost"}
        asked = await node.ask(1)
        assert asked.limbo == "lost"
        assert await node.add(entry(1, 0), entry(1, 1), recovery=True) == [OK, OK]
        assert (await node.ask(1, asked.revision)).status is OK
        assert await node.statuses(1, 0, 2) == [OK, OK, ABSENT]
        await asyncio.sleep(15)
        assert await node.listed() == {3: "lost", 5: "lost", 7: "lost"}
        node.out = ["d1"]
        await node.crash()
        assert await node.statuses(1, 0, 2) == [OK, OK, ABSENT]
        assert set(await node.statuses(3, 0, 2)) == {LIMBO}
        node.out = []
        await node.crash()
        await asyncio.sleep(15)
        assert await node.listed() == {}, "it came back whole"
        assert await node.of_each(1) == {i: {OK} for i in LEDGERS}

    on_a_node(test, spread_over_directories())


def test_a_ledger_is_not_cleared_by_a_comparison_older_than_the_loss_of_a_directory():
    async def test(node):
        await flushed(node)
        node.storage.quarantine(1, 0, "a bad block")
        asked = await node.ask(1)
        assert asked.limbo == "lost"
        node.storage.drop("d1", DiskFailed("it is gone"))
        assert (await node.ask(1, asked.revision)).status is LIMBO
        assert set(await node.statuses(1, 0, 2)) == {LIMBO}

    on_a_node(test, spread_over_directories())


def test_a_deleted_ledger_of_a_lost_directory_is_not_listed_any_more():
    async def test(node):
        await flushed(node)
        node.die()
        node.out = ["d1"]
        await node.start()
        await delete_ledgers(node.store.session("admin"), 1)
        await asyncio.sleep(60)
        assert await node.listed() == {3: "lost", 5: "lost", 7: "lost"}
        assert await node.add(entry(1, 2)) == [Status.LEDGER_DELETED]

    on_a_node(test, spread_over_directories())


@pytest.mark.parametrize("rested", ["in the journal", "flushed"])
def test_a_checkpoint_that_calls_a_journal_retired_is_not_believed_when_it_was_used_since(rested):
    """A directory that was away since a clean stop comes back alone."""

    async def test(node):
        await flushed(node)
        await node.bookie.stop()
        node.out = ["d1"]
        await node.start()
        assert await node.add(entry(2, 2)) == [OK]
        assert await node.add(entry(1, 2)) == [OK]
        assert await node.fence(3) is OK
        if rested == "flushed":
            await flushed(node)
        node.die()
        node.out = ["d0"]
        await node.start()
        assert ABSENT not in await node.statuses(1, 2, 3)
        assert ABSENT not in await node.statuses(2, 2, 3)
        answer = await node.add(entry(3, 2))
        assert answer != [OK]

    on_a_node(test, spread_over_directories())


def test_a_journal_that_the_only_checkpoint_does_not_know_is_not_taken_for_whole():
    """It was added, used and rolled while the directory was away that comes back alone."""

    async def test(node):
        await flushed(node)
        await node.bookie.stop()
        node.out = ["d1"]
        node.journals["j9"] = type(node.journals["j0"])()
        await node.start()
        for e in range(2, 400):
            await node.add_all(*(entry(i, e, bytes(3000)) for i in (1, 3)))
        await flushed(node)
        node.die()
        node.out = ["d0"]
        await node.start()
        assert ABSENT not in [*await node.statuses(1, 2, 3), *await node.statuses(3, 2, 3)]

    on_a_node(test, spread_over_directories())


def test_a_journal_directory_that_removes_nothing_any_more_is_dropped_alone():
    async def test(node):
        async def remove(path, *, unread=False):
            raise DiskFailed(f"{path}: read-only file system")

        node.journals["j0"].remove = remove
        for e in range(2, 400):
            await node.add_all(*(entry(i, e, bytes(3000)) for i in LEDGERS[:4]))
        await flushed(node)
        assert not node.bookie.failed.done()
        assert list(node.storage.failures) == ["j0"]
        assert await node.add(entry(1, 400)) == [OK]

    on_a_node(test, spread_over_directories(journals=2))


def test_a_journal_directory_that_takes_no_segment_at_a_start_is_left_out():
    async def test(node):
        node.die()

        async def create(path, reserve_bytes=0, *, direct=False):
            raise DiskFailed(f"{path}: read-only file system")

        plain, node.journals["j0"].create = node.journals["j0"].create, create
        await node.start()
        assert list(node.storage.failures) == ["j0"]
        assert node.bookie.readonly_reason == ""
        assert await node.of_each(1) == {i: {OK} for i in LEDGERS}
        assert await node.add(entry(1, 2)) == [OK]
        node.journals["j0"].create = plain
        await node.crash()
        assert await node.statuses(1, 0, 3) == [OK, OK, OK, ABSENT]

    on_a_node(test, spread_over_directories(journals=2))


def test_a_ledger_directory_whose_free_space_cannot_be_asked_for_is_dropped_alone():
    async def test(node):
        async def free_bytes():
            raise DiskFailed("statvfs: input/output error")

        async def look():
            """Too late."""

        node.bookie.disks.look = look
        node.ledgers["d1"].free_bytes = free_bytes
        await flushed(node)
        assert not node.bookie.failed.done()
        assert list(node.storage.failures) == ["d1"]
        assert await node.of_each(1) == {i: {OK} for i in LEDGERS}

    on_a_node(test, spread_over_directories())


def test_while_a_directory_is_away_no_state_is_forgotten_that_it_would_bring_back():
    """It would come back as it was before the ledger was fenced."""

    async def test(node):
        await flushed(node)
        node.storage.drop("d1", DiskFailed("it is gone"))
        assert await node.fence(2) is OK
        await delete_ledgers(node.store.session("admin"), 2)
        for _ in range(12):
            await asyncio.sleep(20)
            await node.add(entry(4, 2 + _))
        assert await node.statuses(2, 0, 0) != [OK], "its entries went"
        assert node.storage.state(2).fenced
        await node.crash()
        assert await node.add(entry(2, 2)) == [Status.LEDGER_DELETED]

    on_a_node(test, spread_over_directories())


@pytest.mark.parametrize("gone", ["deleted", "kept by others"])
def test_a_directory_without_entries_brings_back_a_doubt_of_what_was_forgotten_and_no_more(gone):
    """No ledger records it, so nobody misses it. What it alone knows when it is back was
    collected: the ledger is fenced and doubted until its record says that nothing is wanted."""

    async def test(node):
        await flushed(node)
        node.ledgers["d2"] = SimDisk()
        node.config = with_settings(SETTINGS, overreplicated_wait_s=20.0)
        await node.stop_and_start()
        node.out = ["d2"]
        await node.crash()
        if gone == "deleted":
            await delete_ledgers(node.store.session("admin"), 2)
        else:
            await closed(node, 2, kept_by="another")
        for count in range(12):
            await asyncio.sleep(20)
            await node.add(entry(8, 2 + count))
        assert node.storage.state(2) is None
        node.out = []
        await node.crash()
        state = node.storage.state(2)
        assert (state.limbo, state.fenced) == ("lost", True)
        assert list(node.handles.limbo_reasons()) == [2]
        assert await node.of_each(1) == {i: {LIMBO if i == 2 else OK} for i in LEDGERS}
        assert await node.add(entry(2, 2)) == [Status.FENCED]
        await asyncio.sleep(15)
        if gone == "kept by others":
            assert await node.listed() == {2: "lost"}
            asked = await node.ask(2)
            assert (await node.ask(2, asked.revision)).status is OK
            await asyncio.sleep(15)
        assert await node.listed() == {}
        for count in range(12):
            await asyncio.sleep(20)
            await node.add(entry(8, 14 + count))
        assert node.storage.state(2) is None
        await node.crash()
        assert node.storage.state(2) is None

    on_a_node(test, spread_over_directories())


@pytest.mark.parametrize("lacking", [0, 1])
def test_what_a_closed_ledger_has_where_nobody_can_look_is_not_called_lost_by_the_walk(lacking):
    """While its directory is away it is "lost"; when that is back it is as torn as the tail was,
    which denies nothing: whether the tail took something of it is for repair to find."""

    async def test(node):
        await flushed(node)
        await closed(node, 1, last_entry=1 + lacking)
        await closed(node, 2)
        await tear(node)
        node.out = ["d1"]
        await node.start()
        await asyncio.sleep(15)
        listed = await node.listed()
        assert listed[1] == "lost"
        assert 2 not in listed
        node.out = []
        await node.crash()
        await asyncio.sleep(15)
        assert node.storage.state(1).limbo == "torn"
        assert (await node.listed())[1] == "torn"
        assert await node.statuses(1, 0, 2) == [OK, OK, Status.LIMBO_TORN]
        asked = await node.ask(1)
        assert (await node.ask(1, asked.revision)).status is OK
        assert await node.statuses(1, 0, 2) == [OK, OK, ABSENT]

    on_a_node(test, spread_over_directories())


def test_a_closed_ledger_that_lacks_something_where_everything_is_there_is_lost():
    async def test(node):
        await flushed(node)
        await closed(node, 1, last_entry=2)
        await closed(node, 2, last_entry=2)
        await tear(node)
        node.out = ["d1"]
        await node.start()
        await asyncio.sleep(15)
        node.out = []
        await node.crash()
        await tear(node)
        await node.start()
        await asyncio.sleep(15)
        for ledger in (1, 2):
            assert node.storage.state(ledger).limbo == "lost"
            assert await node.statuses(ledger, 0, 2) == [OK, OK, LIMBO]

    on_a_node(test, spread_over_directories())


async def tear(node):
    """Crash in the middle of the write of an entry of ledger 8; it is not started again."""
    tail = asyncio.ensure_future(node.add(entry(8, 7)))
    await asyncio.sleep(0.0001)
    assert not tail.done(), "written, and not synced yet"
    node.die("all")
    tail.cancel()
    disk = node.journals["j0"]
    for file_id in await segment_ids(disk):
        at = disk.content(segment_path(file_id)).find(entry(8, 7))
        if at >= 0:
            disk.flip_bit(segment_path(file_id), 8 * (at + 9))
            return
    raise AssertionError("the journal does not hold the entry")


async def closed(node, ledger_id, last_entry=1, kept_by=ID):
    admin = node.store.session("admin")
    found = await admin.get(paths.ledger(ledger_id))
    record = dataclasses.replace(
        ledger_record.decode(found.value),
        fragments=(Fragment(0, (kept_by,)),),
        state=RecordState.CLOSED,
        last_entry=last_entry,
        length_bytes=7 * (last_entry + 1),
        rows=last_entry + 1,
    )
    await admin.set(paths.ledger(ledger_id), ledger_record.encode(record), found.version)


def test_entry_logs_without_index_and_checkpoint_are_no_new_node():
    async def test(node):
        await flushed(node)
        node.die()
        for folder in ("index", checkpoint.FOLDER):
            for path in node.files(node.ledgers["d0"], folder):
                await node.ledgers["d0"].remove(path)
        await node.start()
        assert ABSENT not in await node.statuses(1, 0, 2)

    on_a_node(test, spread_over_directories(ledgers=1))


def test_a_journal_that_fails_under_a_burial_does_not_end_the_node():
    async def test(node):
        await flushed(node)
        ledger = home_of(node, "j0")
        node.journals["j0"].faults.sync_fails = 1
        await delete_ledgers(node.store.session("admin"), ledger)
        await asyncio.sleep(100)
        assert not node.bookie.failed.done()
        assert list(node.storage.failures) == ["j0"]
        assert await node.add(entry(ledger, 2)) == [Status.LEDGER_DELETED]
        await node.crash()
        assert await node.add(entry(ledger, 2)) == [Status.LEDGER_DELETED]

    on_a_node(test, spread_over_directories(journals=2))


def test_a_journal_that_fails_under_a_doubt_does_not_end_the_node():
    async def test(node):
        await flushed(node)
        ledger, storage = home_of(node, "j0"), node.storage
        every = storage.state(EVERY_LEDGER)
        storage.set_state(dataclasses.replace(every, limbo="torn"))
        node.journals["j0"].faults.sync_fails = 1
        await asyncio.sleep(30)  # it looks at them
        assert not node.bookie.failed.done()
        assert list(storage.failures) == ["j0"]
        assert storage.limbo(ledger) == "torn"
        assert storage.state(EVERY_LEDGER).limbo == ""
        node.out = ["j0"]
        await node.crash()
        assert node.storage.limbo(ledger) == "torn"

    on_a_node(test, spread_over_directories(journals=2))


def test_a_forgotten_ledger_is_forgotten_by_the_journals_too():
    async def test(node):
        await flushed(node)
        ledger = home_of(node, "j0")
        await delete_ledgers(node.store.session("admin"), ledger)
        for count in range(12):
            await asyncio.sleep(20)
            await node.add(entry(8, 2 + count))
        assert node.storage.state(ledger) is None
        assert ledger not in node.journal_homes

    on_a_node(test, spread_over_directories(journals=2))


def test_a_doubt_whose_journal_failed_is_made_good_before_it_is_called_durable():
    """It is known already, and in no journal: the walk that begins again must not go past it."""

    async def test(node):
        await flushed(node)
        ledger, ledgers = home_of(node, "j0"), node.handles
        for disk in node.ledgers.values():
            disk.faults.sync_s = (3.0, 3.0)
        node.journals["j0"].faults.sync_fails = 1
        with pytest.raises(JournalFailed):
            await ledgers.put_in_limbo_or_fence([LedgerJudgement(ledger, "torn", False)])
        again = asyncio.ensure_future(
            ledgers.put_in_limbo_or_fence([LedgerJudgement(ledger, "torn", False)])
        )
        await asyncio.sleep(1)
        assert not again.done()
        await again
        node.out = ["j0"]
        await node.crash()
        assert node.storage.limbo(ledger) == "torn"

    on_a_node(test, spread_over_directories(journals=2))
