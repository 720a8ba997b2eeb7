"""A node with several journal and ledger directories: one lost, one more, one back."""

import asyncio
import random

import pytest

from bookie_server.api.status import Status
from bookie_server.disk.interface import DiskFailed
from bookie_server.disk.monitor import degraded_reason
from bookie_server.journal import checkpoint
from bookie_server.journal.checkpoint import JournalMark
from bookie_server.journal.format import Position
from tests.kit.nodes import on_a_node
from tests.simulation.disk import SimDisk
from tests.simulation.index import SimIndex
from tests.simulation.loop import run
from tests.unit.bookie_server.node import CONFIG, entry
from tests.unit.bookie_server.wide_node import (
    ABSENT,
    IO_ERROR,
    LEDGERS,
    LIMBO,
    OK,
    Wide,
    flushed,
    wide_node,
)


def test_a_ledger_is_written_where_most_space_is_and_found_there_again():
    async def test(node):
        homes = node.homes()
        assert {i: homes[i] for i in (1, 2)} == {1: ("d1",), 2: ("d0",)}
        await flushed(node)
        for name, disk in node.ledgers.items():
            logs = b"".join(disk.content(p) for p in node.files(disk, "entrylog"))
            held = [i for i in LEDGERS if entry(i, 1) in logs]
            assert held == [i for i in LEDGERS if homes[i] == (name,)]
        for restart in (node.crash, node.stop_and_start):
            await restart()
            assert await node.of_each(1) == {i: {OK} for i in LEDGERS}
            assert set(await node.statuses(1, 2, 3)) == {ABSENT}
            assert node.homes() == homes

    on_a_node(test, wide_node())


@pytest.mark.parametrize("when", ["in the cache", "in the log"])
def test_a_directory_that_fails_is_dropped_and_nothing_acknowledged_is_denied(when):
    async def test(node):
        homes = node.homes()
        if when == "in the log":
            await flushed(node)
        node.ledgers["d1"].faults.sync_fails = 1
        await node.fence(8)
        await flushed(node)
        assert not node.bookie.failed.done()
        assert list(node.storage.failures) == ["d1"]
        kept = {OK} if when == "in the cache" else {LIMBO}
        expected = {i: {OK} if homes[i] == ("d0",) else kept for i in LEDGERS}
        assert await node.of_each(1) == expected
        assert set(await node.statuses(1, 5, 6)) == {LIMBO}
        assert await node.add(entry(1, 2), entry(2, 2)) == [OK, OK]
        await flushed(node)
        assert node.homes()[1] == ("d1", "d0")
        node.out = ["d1"]
        await node.crash()
        assert await node.of_each(1) == expected
        assert await node.statuses(1, 2, 3) == [OK, LIMBO]
        assert await node.add(entry(8, 2)) == [Status.FENCED]

    on_a_node(test, wide_node())


def test_the_last_directory_that_fails_ends_the_node():
    async def test(node):
        for disk in node.ledgers.values():
            disk.faults.sync_fails = 9
        await flushed(node)
        assert isinstance(node.bookie.failed.exception(), DiskFailed)

    on_a_node(test, wide_node())


def test_a_directory_that_comes_back_heals_what_was_unknown():
    async def test(node):
        await flushed(node)
        node.out = ["d1"]
        await node.crash()
        assert await node.of_each(1) == {i: {LIMBO if i % 2 else OK} for i in LEDGERS}
        assert await node.add(entry(1, 2)) == [OK]
        assert await node.fence(3) is OK
        await node.stop_and_start()
        node.out = []
        await node.stop_and_start()
        assert await node.of_each(1) == {i: {OK} for i in LEDGERS}
        assert await node.statuses(1, 0, 3) == [OK, OK, OK, ABSENT]
        assert await node.add(entry(3, 2)) == [Status.FENCED]

    on_a_node(test, wide_node())


def test_a_directory_that_is_added_takes_new_ledgers_and_knows_the_old_ones():
    async def test(node):
        await flushed(node)
        await node.fence(2)
        node.ledgers["d2"] = SimDisk(random.Random(1))
        await node.crash()
        for name in ("d0", "d1"):
            node.ledgers[name].fill_up(1 << 29)
        await node.bookie.disks.look()
        await node.create_ledger(20)
        assert await node.add(entry(20, 0)) == [OK]
        assert node.storage.state(20).directories == ("d2",)
        await node.stop_and_start()
        known = await SimIndex.open(node.ledgers["d2"])
        assert [s.fenced for s in await known.ledgers() if s.ledger_id in (1, 2)] == [False, True]

    on_a_node(test, wide_node())


def test_an_index_that_was_lost_beside_others_costs_its_directory_only():
    async def test(node):
        await flushed(node)
        node.die()
        for path in node.files(node.ledgers["d1"], "index"):
            await node.ledgers["d1"].remove(path)
        await node.start()
        assert await node.of_each(1) == {i: {LIMBO if i % 2 else OK} for i in LEDGERS}
        assert node.bookie.readonly_reason == ""

    on_a_node(test, wide_node())


def test_bk_3329_the_checkpoint_waits_for_every_directory():
    """One directory's flush proves nothing about the others."""

    async def test(node):
        slow_s = CONFIG.disk_hang_s - 1
        node.ledgers["d1"].faults.sync_s = (slow_s, slow_s)
        mark = (await checkpoint.read(node.ledgers["d0"]))["j0"]
        await asyncio.sleep(slow_s)
        logs = node.files(node.ledgers["d0"], "entrylog")
        assert logs, "the other one has its part"
        for disk in node.ledgers.values():
            assert (await checkpoint.read(disk))["j0"] == mark
        node.ledgers["d1"].speed_up()
        await node.crash()
        assert await node.of_each(1) == {i: {OK} for i in LEDGERS}

    on_a_node(test, wide_node())


def test_bk_4844_each_journals_mark_moves_by_itself():
    async def test(node):
        for e in range(2, 60):
            await node.add_all(*(entry(i, e, bytes(3000)) for i in (1, 2)))
        await flushed(node)
        before = await checkpoint.read(node.ledgers["d0"])
        assert set(before) == {"j0", "j1"}
        await node.add_all(entry(1, 60))
        await flushed(node)
        after = await checkpoint.read(node.ledgers["d0"])
        moved = [name for name in after if after[name] > before[name]]
        assert len(moved) == 1
        assert all(after[name] == before[name] for name in after if name not in moved)
        await node.crash()
        assert await node.of_each(1) == {i: {OK} for i in LEDGERS}

    on_a_node(test, wide_node(journals=2))


def test_bk_4105_of_several_checkpoints_the_further_mark_counts():
    """A copy that is behind names segments that are gone."""

    async def test(node):
        for e in range(2, 400):
            await node.add_all(entry(1, e, bytes(3000)))
        await flushed(node)
        await node.bookie.stop()
        await checkpoint.write(node.ledgers["d1"], {"j0": JournalMark(Position(1, 4096))})
        await node.start()
        assert node.bookie.readonly_reason == ""
        assert degraded_reason(node.bookie.disks.states) == ""
        assert await node.of_each(1) == {i: {OK} for i in LEDGERS}

    on_a_node(test, wide_node())


def test_bk_4843_a_fence_on_an_idle_node_is_durable_before_the_checkpoint_passes_it():
    async def test(node):
        await flushed(node)
        before = (await checkpoint.read(node.ledgers["d0"]))["j0"]
        assert await node.fence(1) is OK
        await flushed(node)
        assert (await checkpoint.read(node.ledgers["d0"]))["j0"] > before
        await node.crash()
        assert await node.add(entry(1, 2)) == [Status.FENCED]

    on_a_node(test, wide_node())


def test_bookie_md_3_2_3_after_a_failed_flush_nothing_moves_any_more():
    async def test(node):
        node.ledgers["d0"].faults.sync_fails = 1
        marks = await checkpoint.read(node.ledgers["d0"])
        await flushed(node)
        assert node.bookie.failed.done()
        await node.fence(2)
        await flushed(node)
        assert await checkpoint.read(node.ledgers["d0"]) == marks
        await node.crash()
        assert await node.of_each(1) == {i: {OK} for i in LEDGERS}

    async def main():
        node = await Wide(1, 1).start()
        await node.create_ledger(*LEDGERS)
        for ledger in LEDGERS:
            assert await node.add(entry(ledger, 0), entry(ledger, 1)) == [OK, OK]
        await test(node)

    run(main())


# -- journals --------------------------------------------------------------------------------


def test_a_journal_that_fails_beside_another_is_given_up_and_the_node_goes_on():
    async def test(node):
        assert await node.fence(7) is OK
        node.journals["j0"].faults.sync_fails = 1
        statuses = [(await node.add(entry(i, 2)))[0] for i in range(1, 7)]
        assert set(statuses) == {OK, IO_ERROR}
        assert list(node.storage.failures) == ["j0"]
        assert [(await node.add(entry(i, 2)))[0] for i in range(1, 7)] == [OK] * 6
        await flushed(node)
        marks = await checkpoint.read(node.ledgers["d0"])
        assert (marks["j0"].retired, marks["j1"].retired) == (True, False)
        node.out = ["j0"]
        await node.crash()
        assert node.bookie.readonly_reason == ""
        assert [await node.statuses(i, 0, 3) for i in range(1, 7)] == [[OK, OK, OK, ABSENT]] * 6
        assert await node.add(entry(7, 2)) == [Status.FENCED]

    on_a_node(test, wide_node(journals=2))


def test_an_entry_again_after_its_journal_failed_is_ok_only_when_it_is_in_its_final_place():
    """It is in the cache, and in no journal."""

    async def test(node):
        node.journals["j0"].faults.sync_fails = node.journals["j1"].faults.sync_fails = 0
        failing = next(i for i in (1, 2) if node.journal_homes[i] == "j0")
        for disk in node.ledgers.values():
            disk.faults.sync_s = (3.0, 3.0)
        node.journals["j0"].faults.sync_fails = 1
        assert await node.add(entry(failing, 2)) == [IO_ERROR]
        again = asyncio.ensure_future(node.add(entry(failing, 2)))
        await asyncio.sleep(1)
        assert not again.done()
        assert await again == [OK]
        node.out = ["j0"]
        await node.crash()
        assert (await node.statuses(failing, 2, 2))[0] is OK

    on_a_node(test, wide_node(journals=2))


def test_a_fence_whose_journal_failed_is_logged_again():
    async def test(node):
        failing = next(i for i in (1, 2) if node.journal_homes[i] == "j0")
        node.journals["j0"].faults.sync_fails = 1
        assert (await node.read_lac(failing, fence=True)).status is IO_ERROR
        assert await node.fence(failing) is OK
        await node.crash()
        assert await node.add(entry(failing, 2)) == [Status.FENCED]

    on_a_node(test, wide_node(journals=2))


def test_a_missing_journal_puts_every_ledger_in_limbo():
    async def test(node):
        node.die()
        node.out = ["j0"]
        await node.start()
        assert "limbo" in node.bookie.readonly_reason
        assert set(await node.statuses(1, 5, 6)) == {LIMBO}
        assert "journal directory j0 failed: it was missing" in degraded_reason(
            node.bookie.disks.states
        )
        await node.stop_and_start()
        assert "limbo" in node.bookie.readonly_reason

    on_a_node(test, wide_node(journals=2))


def test_a_journal_may_be_taken_away_after_a_clean_stop():
    async def test(node):
        await node.bookie.stop()
        node.out = ["j0"]
        await node.start()
        assert node.bookie.readonly_reason == ""
        assert await node.of_each(1) == {i: {OK} for i in LEDGERS}
        node.out = []
        await node.crash()
        assert node.bookie.readonly_reason == ""
        assert await node.add(entry(1, 2)) == [OK]

    on_a_node(test, wide_node(journals=2))


def rots(disk: SimDisk, data: bytes) -> None:
    """A bit of the entry's payload, where it lies in an entry log."""
    found = [(p, disk.content(p).find(data)) for p in disk.paths() if p.startswith("entrylog")]
    ((path, at),) = [(path, at) for path, at in found if at >= 0]
    disk.flip_bit(path, 8 * (at + 66))


async def moved_by_a_repair(node: Wide) -> None:
    """Entry 1:0 rots in d1, which is full by the time it is repaired: d0 has it then."""
    await flushed(node)
    assert node.homes()[1] == ("d1",)
    rots(node.ledgers["d1"], entry(1, 0))
    assert await node.statuses(1, 0, 0) == [IO_ERROR]
    node.ledgers["d1"].fill_up(1 << 20)
    await node.bookie.disks.look()
    assert await node.add(entry(1, 0), recovery=True) == [OK]
    await flushed(node)
    assert node.homes()[1] == ("d1", "d0")
    assert await node.statuses(1, 0, 1) == [OK, OK]


def test_a_repaired_entry_stays_readable_when_its_directories_fill_up_in_turn():
    async def test(node):
        await moved_by_a_repair(node)
        d0, d1 = node.ledgers["d0"], node.ledgers["d1"]
        d1.empty_out()
        await node.bookie.disks.look()
        await asyncio.sleep(3)
        d0.fill_up(1 << 20)
        await node.bookie.disks.look()
        assert await node.add(entry(1, 2), recovery=True) == [OK]
        await flushed(node)
        assert node.homes()[1] == ("d0", "d1")
        assert await node.statuses(1, 0, 2) == [OK, OK, OK]
        d0.empty_out()
        await node.crash()
        assert await node.statuses(1, 0, 2) == [OK, OK, OK]

    on_a_node(test, wide_node())


def test_a_copy_that_was_replaced_in_another_directory_is_forgotten_durably_and_not_too_early():
    async def test(node):
        d0, d1 = node.storage.stores
        delete, deleted = d1.index.delete, []

        async def once_the_other_is_durable(ledger_id, entry_ids):
            assert await d0.index.get(ledger_id, 0) is not None
            assert await d0.index.get(ledger_id, 0) is not None
            assert not d0.index.unsynced
            deleted.extend((ledger_id, each) for each in entry_ids)
            await delete(ledger_id, entry_ids)

        d1.index.delete = once_the_other_is_durable
        await moved_by_a_repair(node)
        assert deleted == [(1, 0)]
        await node.crash()
        indexes = [store.index for store in node.storage.stores]
        assert [await each.get(1, 0) is None for each in indexes] == [False, True]
        assert [await each.get(1, 1) is None for each in indexes] == [True, False]

    on_a_node(test, wide_node())


def test_a_fence_that_no_directory_could_note_is_not_taken_for_an_older_durable_one():
    async def test(node):
        storage = node.storage
        noted, refused = storage.set_state, []

        def once_refused(state):
            if not refused:
                refused.append(state)
                raise DiskFailed("no ledger directory is left")
            return noted(state)

        storage.set_state = once_refused
        assert await node.fence(1) is IO_ERROR
        assert await node.fence(1) is OK
        await node.crash("none")
        assert await node.add(entry(1, 2)) == [Status.FENCED]

    on_a_node(test, wide_node())
