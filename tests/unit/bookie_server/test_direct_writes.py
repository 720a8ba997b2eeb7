"""Large entries go to a ledger directory and to no journal: what is acknowledged when, and who
waits for whom."""

import asyncio

import pytest

from bookie_server.api.status import Status
from bookie_server.disk.interface import DiskFailed
from bookie_server.journal.format import Record, RecordKind
from bookie_server.lanes import Lane
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord
from tests.kit.deleting import delete_ledgers
from tests.kit.nodes import on_a_node
from tests.simulation.loop import current
from tests.unit.bookie_server.direct_write_node import (
    BUSY,
    JOURNALED,
    LARGE,
    OK,
    PLACED,
    large,
    slow,
    small,
    with_small_entries,
)
from tests.unit.bookie_server.node import ID, KIB, entry

# -- the way ------------------------------------------------------------------------------------


def test_a_large_entry_is_written_once_and_no_journal_has_it():
    async def test(node):
        assert await node.add(large(1, 1), large(1, 2)) == [OK, OK]
        assert node.copies(large(1, 1)) == node.copies(large(1, 2)) == 1
        await node.crash("none")
        await node.served(1, 0, 1, 2)
        await node.flushed()
        await node.crash("none")
        await node.served(1, 0, 1, 2)
        assert node.copies(large(1, 1)) == node.copies(large(1, 2)) == 1
        disk = node.journals["j0"]
        assert not any(large(1, 1) in disk.content(path) for path in disk.paths())

    on_a_node(test, with_small_entries())


def test_large_and_small_entries_of_several_ledgers_in_one_frame_each_go_their_way():
    async def test(node):
        frame = [small(1, 1), large(1, 2), large(2, 1), small(2, 2), large(1, 3), small(1, 4)]
        assert await node.add(*frame) == [OK] * 6
        assert await node.ways(1) == dict(
            enumerate([JOURNALED, JOURNALED, PLACED, PLACED, JOURNALED])
        )
        assert await node.ways(2) == dict(enumerate([JOURNALED, PLACED, JOURNALED]))
        await node.crash("none")
        await node.served(1, *range(5))
        await node.served(2, *range(3))

    on_a_node(test, with_small_entries())


def test_an_entry_is_large_from_the_bytes_of_the_setting_on():
    async def test(node):
        at = LARGE - 64
        entries = [entry(1, 1, bytes(at - 1)), entry(1, 2, bytes(at))]
        assert await node.add(*entries) == [OK, OK]
        assert await node.ways(1) == {0: JOURNALED, 1: JOURNALED, 2: PLACED}

    on_a_node(test, with_small_entries())


def test_recoverys_entries_and_those_of_page_cache_ledgers_are_not_placed():
    async def test(node):
        session = node.store.session("client")
        record = LedgerRecord(5, 1, 1, 1, (Fragment(0, (ID,)),), durability="page-cache")
        await session.create(paths.ledger(5), ledger_record.encode(record))
        assert await node.add(large(5, 0)) == [OK]
        assert await node.add(large(1, 1), recovery=True) == [OK]
        assert await node.ways(5) == {0: JOURNALED}
        assert await node.ways(1) == {0: JOURNALED, 1: JOURNALED}

    on_a_node(test, with_small_entries())


def test_a_copy_of_a_frame_that_was_taken_in_part_is_what_is_placed():
    async def test(node):
        assert await node.add(large(1, 3)) == [OK]
        other = entry(1, 3, b"another" * 4 * KIB)
        sent = [OK, Status.CONFLICTING_ENTRY, Status.CONFLICTING_ENTRY]
        assert await node.add(large(1, 1), other, other) == sent
        assert await node.ways(1) == {0: JOURNALED, 3: PLACED, 1: PLACED}
        assert isinstance(node.storage.cache.get(1, 1), bytes)
        await node.crash("none")
        await node.served(1, 1, 3)

    on_a_node(test, with_small_entries())


# -- who waits ----------------------------------------------------------------------------------


WAITING = ("small add", "lac", "repeat", "large add")


@pytest.mark.parametrize("what", [*WAITING, "fence", "fencing read", "recovery add"])
def test_what_comes_later_of_the_ledger_is_answered_after_its_large_entries_are_durable(what):
    async def test(node):
        slow(node.ledgers["d0"], 2.0)
        first = node.in_background(large(1, 1))
        await asyncio.sleep(0.5)
        asked = {
            "small add": lambda: node.add(small(1, 2)),
            "large add": lambda: node.add(large(1, 2)),
            "recovery add": lambda: node.add(small(1, 2), recovery=True),
            "repeat": lambda: node.add(large(1, 1)),
            "lac": lambda: node.write_lac(1, 0),
            "fence": lambda: node.fence(1),
            "fencing read": lambda: node.statuses(1, 9, 9, fence=True),
        }[what]
        later = asyncio.ensure_future(asked())
        await asyncio.sleep(0.5)
        if what in WAITING:
            assert not first.done() and not later.done()
        await later
        node.die("none")
        slow(node.ledgers["d0"], 0.001)
        await node.start()
        await node.served(1, 1)

    on_a_node(test, with_small_entries())


def test_other_ledgers_do_not_wait_for_a_directory_that_is_slow():
    async def test(node):
        slow(node.ledgers["d0"], 5.0)
        first = node.in_background(large(1, 1))
        await asyncio.sleep(0.1)
        before = current().time()
        assert await node.add(small(2, 1)) == [OK]
        assert await node.fence(2) is OK
        assert current().time() - before < 1 and not first.done()

    on_a_node(test, with_small_entries())


def test_a_barrier_waits_for_every_large_entry_under_way():
    async def test(node):
        slow(node.ledgers["d0"], 2.0)
        adds = [node.in_background(large(i, 1)) for i in (1, 2)]
        await asyncio.sleep(0.1)
        await node.storage.append([])
        assert node.storage.pending_bytes == 0
        assert [await each for each in adds] == [[OK], [OK]]

    on_a_node(test, with_small_entries())


def test_a_fence_does_not_wait_for_the_large_entries_of_other_ledgers():
    async def test(node):
        slow(node.ledgers["d0"], 1.0)
        bulk = [node.in_background(large(2, e)) for e in range(1, 30)]
        own = node.in_background(large(1, 1))
        await asyncio.sleep(0.1)
        before = current().time()
        assert await node.fence(1) is OK
        assert own.done() or node.storage.pending_bytes < 28 * LARGE
        assert current().time() - before < 4.1
        assert sum(each.done() for each in bulk) <= 14
        await asyncio.gather(*bulk)

    on_a_node(test, with_small_entries())


@pytest.mark.parametrize("seconds", [0.5, 0.001])
@pytest.mark.parametrize("first", ["its own", "those of others"])
def test_a_fence_does_not_wait_for_the_small_entries_of_others_that_the_journal_has_waiting(
    first, seconds
):
    """What tells of the ledger's directory goes ahead in the journal too."""

    async def test(node):
        slow(node.ledgers["d0"], seconds)
        slow(node.journals["j0"], 1.0)
        own = node.in_background(large(1, 1)) if first == "its own" else None
        await asyncio.sleep(0.1)
        bulk = [node.in_background(small(2, e, 15 * KIB)) for e in range(1, 60)]
        await asyncio.sleep(0.1)
        own = own or node.in_background(large(1, 1))
        await asyncio.sleep(0.1)
        before = current().time()
        assert await node.fence(1) is OK
        assert current().time() - before < 4.5
        assert not bulk[-1].done()
        await asyncio.gather(own, *bulk)

    on_a_node(test, with_small_entries())


# -- budgets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["placed", "dropped", "no space"])
def test_bytes_on_the_way_count_until_they_are_acknowledged_and_beyond_the_budget_is_busy(end):
    async def test(node):
        assert await node.add(large(1, 20)) == [OK]  # so a log is there
        slow(node.ledgers["d0"], 2.0)
        assert node.storage.pending_bytes == 0
        adds = [node.in_background(large(1, e)) for e in range(1, 9)]
        await asyncio.sleep(0.1)
        size = len(large(1, 1))
        assert node.storage.pending_bytes == 8 * size
        assert await node.add(large(2, 1)) == [BUSY]
        assert node.storage.wait_s > 0.01
        if end == "dropped":
            node.storage.drop("d0", DiskFailed("gone"))
        elif end == "no space":
            node.ledgers["d0"].fill_up(4 * KIB)
        assert [await each for each in adds] == [[OK]] * 8
        assert node.storage.pending_bytes == 0
        writes = node.storage._direct_writes
        assert not writes._unwritten and not writes._under_way
        node.ledgers["d0"].empty_out()
        assert await node.add(large(2, 1)) == [OK]

    on_a_node(test, with_small_entries(journal_pending_bytes_max=8 * (LARGE + 64) + 100))


# -- ledger records -----------------------------------------------------------------------------


def test_in_each_run_one_ledger_record_names_the_directory_however_many_entries_go_there():
    async def test(node):
        before = await node.told(1, "d0")
        for e in (1, 2):
            assert await node.add(large(1, e)) == [OK]
        assert await node.told(1, "d0") == before + 1
        await node.crash("all")
        assert await node.told(1, "d0") == 0, "the index has it, and the journal begins anew"
        for e in (3, 4):
            assert await node.add(large(1, e), large(2, e)) == [OK, OK]
        assert await node.told(1, "d0") == await node.told(2, "d0") == 1
        await node.crash("none")
        await node.served(1, *range(5))

    on_a_node(test, with_small_entries())


def test_a_large_entry_is_acknowledged_after_the_record_that_names_its_directory_is_durable():
    async def test(node):
        slow(node.journals["j0"], 3.0)
        before = current().time()
        add = node.in_background(large(1, 1))
        await asyncio.sleep(1)
        assert node.storage.cache.get(1, 1) and node.copies(large(1, 1), "d0"), "it is written"
        assert not add.done()
        assert await add == [OK]
        assert current().time() - before > 2.9
        slow(node.journals["j0"], 0.001)
        await node.crash("none")
        await node.served(1, 1)

    on_a_node(test, with_small_entries())


def test_a_large_entry_of_a_ledger_that_told_where_it_lies_waits_for_no_journal():
    async def test(node):
        assert await node.add(large(1, 1)) == [OK]
        slow(node.journals["j0"], 100.0)
        before = current().time()
        assert await node.add(large(1, 2)) == [OK]
        assert current().time() - before < 1
        node.die("none")
        slow(node.journals["j0"], 0.001)
        await node.start()
        await node.served(1, 1, 2)

    on_a_node(test, with_small_entries())


def test_entries_that_come_while_the_ledger_record_is_on_its_way_wait_for_it_too():
    async def test(node):
        slow(node.journals["j0"], 3.0)
        adds = [node.in_background(large(1, 1))]
        await asyncio.sleep(1)
        adds.append(node.in_background(large(1, 2)))
        await asyncio.sleep(1)
        assert not any(each.done() for each in adds)
        assert [await each for each in adds] == [[OK], [OK]]
        slow(node.journals["j0"], 0.001)
        await node.crash("none")
        await node.served(1, 1, 2)

    on_a_node(test, with_small_entries())


def test_where_a_ledger_goes_on_is_told_before_the_first_place_there_and_the_place_holds():
    async def test(node):
        assert await node.add(large(1, 1)) == [OK]
        node.ledgers["d0"].fill_up(1 << 10)
        await node.bookie.disks.look()
        assert await node.add(small(1, 2), large(1, 3)) == [OK, OK]
        assert (await node.ways(1))[3] == JOURNALED
        await node.flushed()  # which gives the ledger another home
        assert node.directories(1) == ("d0", "d1")
        assert await node.add(large(1, 4)) == [OK]
        assert (await node.ways(1))[4] == PLACED
        assert node.copies(large(1, 4), "d1") == 1
        assert await node.told(1, "d1")
        node.ledgers["d0"].empty_out()
        await node.crash("none")
        await node.served(1, *range(5))
        assert node.directories(1) == ("d0", "d1")

    on_a_node(test, with_small_entries())


# -- reclaim ------------------------------------------------------------------------------------


def test_a_ledger_that_is_buried_while_its_large_entry_is_on_the_way_goes_and_stays_gone():
    async def test(node):
        slow(node.ledgers["d0"], 3.0)
        add = node.in_background(large(1, 1))
        await asyncio.sleep(0.1)
        await delete_ledgers(node.store.session("admin"), 1)
        burying = asyncio.ensure_future(node.handles.bury([1]))
        await asyncio.gather(burying, add)
        slow(node.ledgers["d0"], 0.001)
        await asyncio.sleep(200)
        await node.crash("none")
        assert not await node.storage.reader.stored(1, 0, 9)

    on_a_node(test, with_small_entries())


def test_an_append_waits_for_what_came_before_it_whichever_way_that_went():
    async def test(node):
        slow(node.ledgers["d0"], 1.0)
        order: list[str] = []
        node.storage.put_all(1, {1: large(1, 1)})
        node.storage.put_all(1, {2: large(1, 2)})
        for name, records, lane, after in (
            ("large", [Record(RecordKind.ENTRY, 1, 1, large(1, 1), 0)], Lane.BULK, ()),
            ("after", [], Lane.BULK, (1,)),
            ("next", [Record(RecordKind.ENTRY, 1, 2, large(1, 2), 0)], Lane.BULK, ()),
            ("barrier", [], Lane.BULK, ()),
            ("fence", [Record(RecordKind.FENCE, 1, -1, b"", 0)], Lane.RECOVERY, ()),
        ):
            done = node.storage.append(records, lane, after)
            done.add_done_callback(lambda _, name=name: order.append(name))
        await done
        await asyncio.sleep(0.1)
        assert order.index("large") < order.index("after") < order.index("next")
        assert order.index("next") < order.index("barrier")
        assert order.index("next") < order.index("fence")

    on_a_node(test, with_small_entries())
