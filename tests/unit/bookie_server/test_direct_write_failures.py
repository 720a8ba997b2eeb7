"""Directories and journals that fail on the way of large entries: nobody loses anything."""

import asyncio

import pytest

from bookie_server.api.status import Status
from bookie_server.disk.interface import DiskFailed
from bookie_server.journal.format import RecordKind
from tests.kit.nodes import on_a_node
from tests.unit.bookie_server.direct_write_node import (
    ABSENT,
    JOURNALED,
    LARGE,
    LIMBO,
    OK,
    SPLITTING,
    Wide,
    large,
    moment,
    slow,
    small,
    with_small_entries,
)
from tests.unit.bookie_server.node import KIB, entry

# -- directories that fail ----------------------------------------------------------------------


def test_without_a_home_that_has_space_large_entries_go_to_the_journal():
    async def test(node):
        node.ledgers["d0"].fill_up(128 << 20)  # full, though it would fit
        await node.bookie.disks.look()
        assert await node.add(large(1, 1)) == [OK]
        node.storage.drop("d0", DiskFailed("gone"))
        assert await node.add(large(1, 2), large(2, 1)) == [OK, OK]
        assert await node.ways(1) == dict.fromkeys(range(3), JOURNALED)
        assert not node.copies(large(1, 1)) and not node.copies(large(1, 2))

    on_a_node(test, with_small_entries())


@pytest.mark.parametrize("fault", ["append", "sync", "hangs", "full"])
@pytest.mark.parametrize("begun", [False, True])
def test_a_directory_that_fails_on_the_way_costs_nothing(fault, begun):
    async def test(node):
        disk = node.ledgers["d0"]
        if begun:
            assert await node.add(large(1, 1)) == [OK]
        if fault == "append":
            disk.faults.append_fails = 1
        elif fault == "sync":
            disk.faults.sync_fails = 1
        elif fault == "full":
            disk.fill_up(6 * KIB)
        else:
            disk.faults.hangs = True
        adds = [node.in_background(large(1, e), small(1, e + 1)) for e in (2, 4)]
        await asyncio.sleep(0.5)
        if fault == "hangs":
            assert not any(each.done() for each in adds)
            node.storage.drop("d0", DiskFailed("it hangs"))
        assert [await each for each in adds] == [[OK, OK]] * 2
        assert (await node.ways(1))[2] == JOURNALED
        assert (await node.ways(1))[4] == JOURNALED
        await node.served(1, *range(2, 6))
        disk.calm()
        if fault != "full":
            await node.flushed()
            node.out = ["d0"]
        await node.crash("none")
        await node.served(1, *range(2, 6))
        node.out = []
        await node.crash("none")
        await node.served(1, *range(0 if begun else 2, 6))

    on_a_node(test, with_small_entries())


def test_what_was_placed_in_a_directory_that_is_dropped_goes_to_another_from_memory_at_once():
    async def test(node):
        assert await node.add(large(1, 1), large(2, 1)) == [OK, OK]
        node.storage.drop("d0", DiskFailed("gone"))
        await asyncio.sleep(0.5)  # much less than until the next flush would come
        assert node.copies(large(1, 1), "d1") == node.copies(large(2, 1), "d1") == 1
        node.out = ["d0"]
        await node.crash("none")
        await node.served(1, 1)
        await node.served(2, 1)
        assert await node.statuses(1, 5, 5) == [LIMBO]

    on_a_node(test, with_small_entries(flush_interval_s=60.0))


def test_a_directory_dropped_in_the_moment_in_which_it_tells_a_place_leaves_it_to_the_journal():
    async def test(node):
        direct_log = node.storage.stores[0].direct_log
        put = direct_log.put

        def goes_once_it_is_told(*about):
            told = put(*about)
            told.add_done_callback(lambda _: node.storage.drop("d0", DiskFailed("gone")))
            return told

        direct_log.put = goes_once_it_is_told
        assert await node.add(large(1, 1)) == [OK]
        assert (await node.ways(1))[1] == JOURNALED
        node.out = ["d0"]
        await node.crash("none")
        await node.served(1, 1)

    on_a_node(test, with_small_entries())


def test_a_directory_dropped_while_its_places_are_flushed_is_made_good_by_the_same_flush():
    async def test(node):
        await node.home("d1", 3)
        slow(node.ledgers["d1"], 1.0)
        slow(node.ledgers["d0"], 3.0)
        add = node.in_background(large(1, 1), large(3, 1))
        await add
        while node.storage.is_flushing:
            await moment()
        assert await node.add(large(1, 2), large(3, 2)) == [OK, OK]
        slow(node.ledgers["d1"], 20.0)
        flushing = asyncio.ensure_future(node.flushed())
        await asyncio.sleep(10)
        assert not flushing.done()
        node.storage.drop("d0", DiskFailed("gone"))
        await flushing
        assert node.directories(1) == ("d0", "d1")
        assert node.copies(large(1, 2), "d1") == 1
        assert node.storage.state(1).limbo == ""
        node.out = ["d0"]
        slow(node.ledgers["d1"], 0.001)
        await node.crash("none")
        await node.served(1, 2)
        await node.served(3, 1, 2)

    on_a_node(test, with_small_entries())


def test_a_flush_waits_for_what_is_being_placed_and_writes_it_no_second_time():
    async def test(node):
        slow(node.ledgers["d0"], 2.0)
        add = node.in_background(large(1, 1), small(1, 2))
        await asyncio.sleep(0.1)
        await node.flushed()
        assert await add == [OK, OK]
        assert node.copies(large(1, 1)) == 1
        assert not node.storage.in_cache(1)
        await node.served(1, 0, 1, 2)

    on_a_node(test, with_small_entries())


def test_a_frame_in_the_middle_of_which_a_flush_begins_is_written_once_all_of_it():
    async def test(node):
        frame = [large(1, 1), large(2, 1), large(1, 2), large(2, 2), large(1, 3)]
        assert await node.add(*frame) == [OK] * 5
        assert node.storage.flushes or node.storage.is_flushing
        await asyncio.sleep(20)
        assert [node.copies(each) for each in frame] == [1] * 5
        await node.crash("none")
        await node.served(1, 1, 2, 3)
        await node.served(2, 1, 2)

    on_a_node(test, with_small_entries(**SPLITTING))


def test_a_directory_dropped_after_a_frame_in_the_middle_of_which_a_flush_began_costs_no_limbo():
    async def test(node):
        await node.home("d1", 3)
        slow(node.ledgers["d1"], 3.0)
        frame = [large(1, 1), small(3, 1), large(2, 1), large(1, 2), large(2, 2), large(1, 3)]
        add = node.in_background(*frame)
        await asyncio.sleep(1)
        assert add.done() and node.storage.is_flushing
        node.storage.drop("d0", DiskFailed("gone"))
        await asyncio.sleep(30)
        assert [node.storage.state(i).limbo for i in (1, 2)] == ["", ""]
        assert [node.copies(each, "d1") for each in (large(1, 1), large(1, 3))] == [1, 1]

    on_a_node(test, with_small_entries(**SPLITTING))


async def repaired(node: Wide, ledger_id: int) -> None:
    """Compared by somebody, and cleared."""
    asked = await node.ask(ledger_id)
    assert asked.limbo
    await node.statuses(ledger_id, 0, 9)
    assert (await node.ask(ledger_id, asked.revision)).status is OK


@pytest.mark.parametrize("back", [True, False])
def test_what_lies_only_in_memory_and_in_a_directory_that_was_given_up_is_never_denied(back):
    async def test(node):
        slow(node.ledgers["d1"], 1000.0)  # so no flush comes through
        assert await node.add(large(1, 1)) == [OK]
        node.storage.drop("d0", DiskFailed("gone"))
        await repaired(node, 1)
        assert node.directories(1) in ((), ("d1",))
        slow(node.ledgers["d1"], 0.001)
        if not back:
            node.out = ["d0"]
        await node.crash("none")
        assert await node.statuses(1, 1, 1) in ([OK], [LIMBO])
        node.out = []
        await node.crash("none")
        assert await node.statuses(1, 1, 1) in ([OK], [LIMBO])

    on_a_node(test, with_small_entries())


def test_a_directory_that_is_back_serves_what_no_flush_and_no_journal_had_of_it(caplog):
    async def test(node):
        await node.flushed()
        assert await node.add(large(1, 1)) == [OK]
        node.out = ["d0"]
        await node.crash("none")
        (line,) = [each for each in caplog.messages if "d0 is not there" in each]
        assert (
            "2 ledgers are in limbo until they are repaired or the directory comes back, 0 of"
            in line
        )
        assert await node.statuses(1, 1, 1) == [LIMBO]
        node.out = []
        await node.crash("none")
        await node.served(1, 0, 1)
        assert node.storage.limbo(1) == ""
        assert await node.statuses(1, 2, 2) == [ABSENT]
        await node.served(2, 0)

    on_a_node(test, with_small_entries())


@pytest.mark.parametrize("starts", [1, 2])
def test_a_directory_that_is_back_takes_nothing_back_of_what_came_while_it_was_away(starts):
    async def test(node):
        assert await node.add(large(1, 1), large(1, 2)) == [OK, OK]
        node.out = ["d0"]
        for _ in range(starts):
            await node.crash("none")
        assert await node.add(entry(1, 1, b"another" * 4 * KIB), recovery=True) == [OK]
        node.out = []
        await node.crash("none")
        found = await node.read(1, 1, 1)
        assert bytes(found.results[0].entry) == entry(1, 1, b"another" * 4 * KIB)
        await node.served(1, 2)

    on_a_node(test, with_small_entries())


def test_what_a_directory_brings_back_that_the_ledger_gave_up_does_not_count():
    async def test(node):
        assert await node.add(large(1, 1), large(2, 1)) == [OK, OK]
        node.out = ["d0"]
        await node.crash("none")
        await repaired(node, 1)
        assert await node.statuses(1, 1, 1) == [ABSENT], "whoever repaired found it nowhere"
        await node.flushed()
        node.out = []
        await node.crash("none")
        assert await node.statuses(1, 1, 1) == [ABSENT]
        await node.served(2, 1)

    on_a_node(test, with_small_entries())


# -- journals that fail -------------------------------------------------------------------------


async def of_j1(node: Wide) -> int:
    """A ledger whose records go to j1; nobody was told of its directory in this run."""
    await node.home("d0", 3, 4)
    homes = {i: node.journal_homes[i] for i in (1, 2, 3, 4)}
    assert set(homes.values()) == {"j0", "j1"}
    return next(i for i, journal in homes.items() if journal == "j1")


@pytest.mark.parametrize("when", ["while it is told", "after it was told"])
def test_a_journal_of_several_that_fails_on_the_way_costs_no_large_entry(when):
    async def test(node):
        await of_j1(node)
        slow(node.ledgers["d0"], 1.0)
        if when == "while it is told":
            node.journals["j1"].faults.sync_fails = 1
        adds = {i: node.in_background(large(i, 1)) for i in (1, 2, 3, 4)}
        await asyncio.sleep(0.5)
        if when == "after it was told":
            node.storage.drop("j1", DiskFailed("gone"))
        answers = {i: await each for i, each in adds.items()}
        assert list(node.storage.failures) == ["j1"]
        if when == "after it was told":
            assert set(map(tuple, answers.values())) == {(OK,)}
        assert [await node.add(large(i, 2)) for i in adds] == [[OK]] * 4
        node.out = ["j1"]
        slow(node.ledgers["d0"], 0.001)
        await node.crash("none")
        for i, answer in answers.items():
            await node.served(i, 2, *([1] if answer == [OK] else []))

    on_a_node(test, with_small_entries(journals=2))


@pytest.mark.parametrize("seconds", [1.0, 0.001])
def test_a_large_entry_fails_with_the_record_that_tells_of_its_directory_and_the_next_tells_again(
    seconds,
):
    async def test(node):
        ledger_id = await of_j1(node)
        slow(node.ledgers["d0"], seconds)
        node.journals["j1"].faults.sync_fails = 1
        assert await node.add(large(ledger_id, 1)) == [Status.IO_ERROR]
        assert await node.add(large(ledger_id, 2)) == [OK]
        assert await node.told(ledger_id, "d0", "j0")
        await node.crash("none")
        await node.served(ledger_id, 0, 2)

    on_a_node(test, with_small_entries(journals=2))


def test_a_large_entry_that_is_written_first_fails_with_the_record_that_tells_of_its_directory():
    async def test(node):
        ledger_id = await of_j1(node)
        slow(node.journals["j1"], 2.0)
        node.journals["j1"].faults.sync_fails = 1
        assert await node.add(large(ledger_id, 1)) == [Status.IO_ERROR]
        assert await node.add(large(ledger_id, 2)) == [OK]
        assert await node.told(ledger_id, "d0", "j0")
        await node.crash("none")
        await node.served(ledger_id, 0, 2)

    on_a_node(test, with_small_entries(journals=2))


def test_what_was_acknowledged_in_a_directory_that_nobody_was_told_of_is_never_denied():
    """A flush gives the ledger another home, which only a journal could tell of before it ends."""

    async def test(node):
        await node.home("d1", 5)
        assert await node.add(large(1, 1), large(5, 1)) == [OK, OK]
        journal = node.journals[node.journal_homes[1]]
        node.ledgers["d0"].fill_up(1 << 10)
        await node.bookie.disks.look()
        assert await node.add(small(1, 2)) == [OK]
        slow(node.ledgers["d0"], 1000.0)
        slow(node.ledgers["d1"], 5.0)
        node.storage.begin_flush()
        assert node.directories(1) == ("d0", "d1")
        journal.faults.sync_fails = 1
        answer = await node.add(large(1, 3))
        assert node.storage.is_flushing
        node.die("none")
        for disk in node.ledgers.values():
            disk.calm()
        await node.start()
        assert answer != [OK] or await node.statuses(1, 3, 3) != [ABSENT]

    on_a_node(test, with_small_entries(journals=2))


def test_a_log_is_sealed_by_no_flush_that_began_before_its_last_entry_came():
    async def test(node):
        await node.home("d1", 5)
        slow(node.ledgers["d1"], 5.0)
        flushes = node.storage.flushes
        node.storage.begin_flush()
        assert await node.add(small(5, 1)) == [OK]
        assert await node.add(large(1, 1)) == [OK]
        assert node.storage.flushes == flushes
        while node.storage.flushes == flushes:
            await moment()
        assert node.sealed_with(large(1, 1)) == 0
        assert (1, 1) in await node.all_placed()
        await node.flushed()
        assert node.sealed_with(large(1, 1)) == 1
        assert await node.all_placed() == []
        await node.crash("none")
        await node.served(1, 0, 1)

    on_a_node(test, with_small_entries(entry_log_bytes_max=LARGE))


def test_a_flush_settles_what_a_directory_has_though_the_only_journal_failed_beneath_its_ledger():
    async def test(node):
        slow(node.journals["j0"], 1.0)
        node.journals["j0"].faults.sync_fails = 1
        assert await node.add(large(1, 1)) == [Status.IO_ERROR]
        await node.storage.flush()
        assert node.sealed_with(large(1, 1)) == 1
        slow(node.journals["j0"], 0.001)
        await node.crash("none")
        await node.served(1, 0, 1)

    on_a_node(test, with_small_entries(entry_log_bytes_max=LARGE))


def test_a_node_stops_though_a_journal_failed_beneath_an_entry_that_is_still_being_placed():
    async def test(node):
        await node.home("d0", 3, 4)
        home = {i: node.journal_homes[i] for i in (1, 2, 3, 4)}
        ledger_id = next(i for i, journal in home.items() if journal == "j1")
        slow(node.ledgers["d0"], 1.0)
        slow(node.journals["j1"], 0.5)
        node.journals["j1"].faults.sync_fails = 1
        add = node.in_background(small(ledger_id, 1), large(ledger_id, 2))
        await moment()
        node.storage.begin_flush()
        assert await add == [Status.IO_ERROR] * 2
        async with asyncio.timeout(100):
            await node.bookie.stop()
        await node.crash("none")
        assert await node.statuses(ledger_id, 2, 2) == [OK]

    on_a_node(test, with_small_entries(journals=2))


@pytest.mark.parametrize("seconds", [1.0, 0.001])
def test_without_a_journal_a_large_entry_is_not_acknowledged(seconds):
    async def test(node):
        slow(node.ledgers["d0"], seconds)
        slow(node.journals["j0"], 0.5)
        node.journals["j0"].faults.sync_fails = 1
        assert await node.add(large(1, 1)) == [Status.IO_ERROR]
        assert node.storage.pending_bytes < len(large(1, 1)), "it is not counted any more"

    on_a_node(test, with_small_entries())


# -- what a flush, a start and ClearLimbo make of it -----------------------------------------------


@pytest.mark.parametrize("flushing", ["before it", "since then", "through d1 too"])
def test_who_clears_a_ledger_that_is_in_memory_alone_has_the_journal_take_it_first(flushing):
    """`flushing`: the flush under way took the entry before its directory went; it began then; or
    an earlier one is still under way."""

    async def test(node):
        await node.home("d1", 5)
        slow(node.ledgers["d1"], 1000.0)  # so no flush comes through
        if flushing == "through d1 too":
            assert await node.add(small(5, 1)) == [OK]
            node.storage.begin_flush()
            await moment()
        assert await node.add(large(1, 1)) == [OK]
        if flushing == "before it":
            node.storage.begin_flush()
            await asyncio.sleep(1)
        node.storage.drop("d0", DiskFailed("gone"))
        await asyncio.sleep(1)
        assert node.storage.is_flushing
        assert 1 not in await journaled_entries(node)
        await repaired(node, 1)
        assert (await journaled_entries(node))[1] == large(1, 1)
        slow(node.ledgers["d1"], 0.001)
        node.out = ["d0"]
        await node.crash("none")
        await node.served(1, 1)
        node.out = []
        await node.crash("none")
        await node.served(1, 1)

    on_a_node(test, with_small_entries())


async def journaled_entries(node: Wide) -> dict[int, bytes]:
    """Of ledger 1, by id; what would survive the worst crash is in it, and no more: all is synced
    at once."""
    records = [r for r in await node.journaled() if r.kind is RecordKind.ENTRY and r.ledger_id == 1]
    return {r.entry_id: r.body for r in records}


def test_clear_limbo_is_answered_after_the_journal_has_what_it_rescued():
    async def test(node):
        slow(node.ledgers["d1"], 1000.0)
        assert await node.add(large(1, 1)) == [OK]
        node.storage.drop("d0", DiskFailed("gone"))
        asked = await node.ask(1)
        slow(node.journals["j0"], 3.0)
        clearing = asyncio.ensure_future(node.ask(1, asked.revision))
        await asyncio.sleep(1)
        assert not clearing.done()
        assert (await clearing).status is OK
        node.die("none")
        for disk in (*node.journals.values(), *node.ledgers.values()):
            disk.calm()
        node.out = ["d0"]
        await node.start()
        await node.served(1, 1)

    on_a_node(test, with_small_entries())


def test_a_start_settles_what_it_has_read_and_the_next_reads_it_no_more(caplog):
    caplog.set_level("INFO")

    async def test(node):
        assert await node.add(large(1, 1), large(2, 1)) == [OK, OK]
        await node.crash("none")
        assert "2 entries replayed" in caplog.text
        assert await node.all_placed() == []
        assert node.sealed_with(large(1, 1)) == 1
        caplog.clear()
        await node.crash("none")
        assert "entries replayed" not in caplog.text
        await node.served(1, 0, 1)
        await node.served(2, 0, 1)

    on_a_node(test, with_small_entries())


def test_a_flush_passes_nothing_that_was_put_after_it_began_though_one_write_brought_both():
    async def test(node):
        assert await node.add(large(1, 1)) == [OK]
        await node.flushed()
        slow(node.ledgers["d0"], 2.0)
        adds = [node.in_background(large(1, 2))]
        await asyncio.sleep(0.1)
        adds.append(node.in_background(large(1, 3)))
        await asyncio.sleep(0.1)
        flushes = node.storage.flushes
        node.storage.begin_flush()
        adds.append(node.in_background(large(1, 4)))
        assert [await each for each in adds] == [[OK]] * 3
        while node.storage.flushes == flushes:
            await moment()
        assert await node.all_placed() == [(1, 4)]
        node.die("none")
        slow(node.ledgers["d0"], 0.001)
        await node.start()
        await node.served(1, *range(5))

    on_a_node(test, with_small_entries(flush_interval_s=60.0))


def test_a_flush_that_finds_a_directory_full_moves_no_mark_of_any():
    """What lies in one may be of a ledger whose part goes to another."""

    async def test(node):
        await node.home("d1", 3)
        assert await node.add(large(1, 1), large(3, 1), small(1, 2)) == [OK] * 3
        marked = {store.id: await store.index.marked_logs() for store in node.storage.stores}
        write, after = node.storage.directories.write, []

        async def noted(*arguments):
            homeless = await write(*arguments)
            now = {each.id: await each.index.marked_logs() for each in node.storage.stores}
            after.append((bool(homeless), now))
            return homeless

        node.storage.directories.write = noted
        node.ledgers["d0"].fill_up(6 * KIB)
        await node.flushed()
        assert [homeless for homeless, _ in after] == [True, False]
        assert [now for _, now in after] == [marked, marked]
        node.ledgers["d0"].empty_out()
        await node.crash("none")
        await node.served(1, 0, 1, 2)
        await node.served(3, 0, 1)

    on_a_node(test, with_small_entries(flush_interval_s=60.0))


def test_an_idle_node_seals_a_log_that_ended_after_the_flush_of_its_last_entry_began():
    async def test(node):
        await node.flushed()
        slow(node.ledgers["d0"], 1.0)
        assert await node.add(large(1, 1)) == [OK]
        await node.flushed()
        assert node.sealed_with(large(1, 1)) == 0
        assert not node.storage.cache.unflushed_bytes and not node.storage._states.has_changes
        await asyncio.sleep(60)
        assert node.sealed_with(large(1, 1)) == 1
        assert await node.all_placed() == []

    on_a_node(test, with_small_entries(entry_log_bytes_max=LARGE))


def test_a_ledger_is_not_cleared_before_what_was_rescued_is_durable():
    async def test(node):
        node.storage.drop("d0", DiskFailed("gone"))
        asked = await node.ask(1)
        rescued = asyncio.get_running_loop().create_future()
        node.storage.rescue = lambda _: [rescued]
        clearing = asyncio.ensure_future(node.ask(1, asked.revision))
        await asyncio.sleep(1)
        assert not clearing.done()
        rescued.set_result(None)
        assert (await clearing).status is OK

    on_a_node(test, with_small_entries())
