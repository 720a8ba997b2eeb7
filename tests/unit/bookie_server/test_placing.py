"""Large entries go to a ledger directory first and the journal says where: what is acknowledged
when, and what happens where a directory or a journal fails on the way."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

import pytest

from bookie_server.api.status import Status
from bookie_server.disk import DiskFailed
from bookie_server.entry_index import decode_ledger_state
from bookie_server.journal import Replay
from bookie_server.journal_format import Kind, Record
from bookie_server.lanes import Lane
from bookie_server.placed import decode_place
from spark_ledger.metadata import cluster, ledger_record, paths
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord
from tests.simulation.disk import SimDisk
from tests.simulation.loop import current, run
from tests.unit.bookie_server.node import ID, KIB, entry
from tests.unit.bookie_server.test_lost_directories import CLUSTER_ID, SETTINGS, Clustered

OK, ABSENT, LIMBO, BUSY = Status.OK, Status.NO_SUCH_ENTRY, Status.LIMBO, Status.BUSY
LARGE = 16 * KIB
PLACING = dataclasses.replace(
    SETTINGS,
    large_entry_bytes=LARGE,
    journal_pending_bytes_max=1024 * KIB,
    write_cache_bytes=2048 * KIB,
    entry_log_bytes_max=1024 * KIB,
    disk_reserve_bytes=4 * KIB,
)
SPLITTING = {"entry_bytes_max": LARGE, "write_cache_bytes": 160 * KIB}
"""A flush begins with the third large entry in the write cache."""


def large(ledger_id: int, entry_id: int) -> bytes:
    return entry(ledger_id, entry_id, bytes([(7 * ledger_id + entry_id) % 251]) * LARGE)


def small(ledger_id: int, entry_id: int, size: int = 100) -> bytes:
    return entry(ledger_id, entry_id, b"s" * size)


class Wide(Clustered):
    """A node that places large entries."""

    def __init__(self, journals: int, ledgers: int, config=PLACING) -> None:
        super().__init__(journals, ledgers, config)

    async def home(self, directory: str, *ledger_ids: int) -> None:
        """These ledgers are made, and their entries go to the directory."""
        await self.create_ledger(*ledger_ids)
        for name, disk in self.ledgers.items():
            if name != directory:
                disk.fill_up(1 << 30)
        await self.bookie.disks.look()
        for ledger_id in ledger_ids:
            assert await self.add(small(ledger_id, 0)) == [OK]
            assert self.directories(ledger_id)[-1] == directory
        for disk in self.ledgers.values():
            disk.empty_out()
        await self.bookie.disks.look()

    def directories(self, ledger_id: int) -> tuple[str, ...]:
        state = self.storage.state(ledger_id)
        assert state is not None
        return state.directories

    @property
    def storage(self):
        return self.bookie._storage

    async def journaled(self, name: str = "j0") -> list[Record]:
        """What the journal would replay after a kill."""
        found = []
        async for records in Replay(self.journals[name], None).records():
            found += [r._replace(body=bytes(r.body)) for r in records]
        return found

    async def ways(self, ledger_id: int, name: str = "j0") -> dict[int, Kind]:
        """By entry, how the journal has it."""
        kinds = (Kind.ENTRY, Kind.PLACED)
        records = [r for r in await self.journaled(name) if r.kind in kinds]
        return {r.entry_id: r.kind for r in records if r.ledger_id == ledger_id}

    def copies(self, wanted: bytes, directory: str = "d0") -> int:
        """How often the entry lies in the directory's logs."""
        disk = self.ledgers[directory]
        return sum(disk.content(path).count(wanted) for path in self.files(disk, "entrylog"))

    def in_background(self, *entries: bytes, **more) -> "asyncio.Task[list[Status]]":
        return asyncio.ensure_future(self.add(*entries, **more))

    async def flushed(self) -> None:
        flushes = self.storage.flushes
        if not self.storage.is_flushing:
            self.storage.begin_flush()
        while self.storage.flushes == flushes:
            await moment()

    async def served(self, ledger_id: int, *entry_ids: int) -> None:
        """Each is there, and what was sent."""
        for each in entry_ids:
            found = await self.read(ledger_id, each, each)
            assert found.results[0].status is OK, (ledger_id, each, found.results[0])
            assert bytes(found.results[0].entry) in (small(ledger_id, each), large(ledger_id, each))


def on_a_node(test: Callable[[Wide], Awaitable[None]], journals: int = 1, ledgers: int = 2, **more):
    """Ledgers 1 and 2 at home in d0, each with a small entry 0."""

    async def main() -> None:
        node = Wide(journals, ledgers, dataclasses.replace(PLACING, **more))
        await cluster.ensure(node.store.session("admin"), CLUSTER_ID)
        await node.start()
        await node.home("d0", 1, 2)
        await test(node)

    run(main(), time_max_s=3600)


async def moment() -> None:
    await asyncio.sleep(0.01)


def slow(disk: SimDisk, seconds: float) -> None:
    disk.faults.sync_s = (seconds, seconds)


# -- the way ------------------------------------------------------------------------------------


def test_a_large_entry_is_written_once_and_the_journal_says_where():
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

    on_a_node(test)


def test_large_and_small_entries_of_several_ledgers_in_one_frame_each_go_their_way():
    async def test(node):
        frame = [small(1, 1), large(1, 2), large(2, 1), small(2, 2), large(1, 3), small(1, 4)]
        assert await node.add(*frame) == [OK] * 6
        assert await node.ways(1) == dict(enumerate([1, 1, 6, 6, 1]))
        assert await node.ways(2) == dict(enumerate([1, 6, 1]))
        await node.crash("none")
        await node.served(1, *range(5))
        await node.served(2, *range(3))

    on_a_node(test)


def test_an_entry_is_large_from_the_bytes_of_the_setting_on():
    async def test(node):
        at = LARGE - 64
        entries = [entry(1, 1, bytes(at - 1)), entry(1, 2, bytes(at))]
        assert await node.add(*entries) == [OK, OK]
        assert await node.ways(1) == {0: Kind.ENTRY, 1: Kind.ENTRY, 2: Kind.PLACED}

    on_a_node(test)


def test_recoverys_entries_and_those_of_page_cache_ledgers_are_not_placed():
    async def test(node):
        session = node.store.session("client")
        record = LedgerRecord(5, 1, 1, 1, (Fragment(0, (ID,)),), durability="page-cache")
        await session.create(paths.ledger(5), ledger_record.encode(record))
        assert await node.add(large(5, 0)) == [OK]
        assert await node.add(large(1, 1), recovery=True) == [OK]
        assert await node.ways(5) == {0: Kind.ENTRY}
        assert await node.ways(1) == {0: Kind.ENTRY, 1: Kind.ENTRY}

    on_a_node(test)


def test_a_copy_of_a_frame_that_was_taken_in_part_is_what_is_placed():
    async def test(node):
        assert await node.add(large(1, 3)) == [OK]
        other = entry(1, 3, b"another" * 4 * KIB)
        sent = [OK, Status.CONFLICTING_ENTRY, Status.CONFLICTING_ENTRY]
        assert await node.add(large(1, 1), other, other) == sent
        assert await node.ways(1) == {0: 1, 3: 6, 1: 6}
        assert isinstance(node.storage.cached(1, 1), bytes)
        await node.crash("none")
        await node.served(1, 1, 3)

    on_a_node(test)


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

    on_a_node(test)


def test_other_ledgers_do_not_wait_for_a_directory_that_is_slow():
    async def test(node):
        slow(node.ledgers["d0"], 5.0)
        first = node.in_background(large(1, 1))
        await asyncio.sleep(0.1)
        before = current().time()
        assert await node.add(small(2, 1)) == [OK]
        assert await node.fence(2) is OK
        assert current().time() - before < 1 and not first.done()

    on_a_node(test)


def test_a_barrier_waits_for_every_large_entry_under_way():
    async def test(node):
        slow(node.ledgers["d0"], 2.0)
        adds = [node.in_background(large(i, 1)) for i in (1, 2)]
        await asyncio.sleep(0.1)
        await node.storage.append([])
        assert node.storage._placing.pending_bytes == 0
        assert [await each for each in adds] == [[OK], [OK]]

    on_a_node(test)


def test_a_fence_does_not_wait_for_the_large_entries_of_other_ledgers():
    async def test(node):
        slow(node.ledgers["d0"], 1.0)
        bulk = [node.in_background(large(2, e)) for e in range(1, 30)]
        own = node.in_background(large(1, 1))
        await asyncio.sleep(0.1)
        before = current().time()
        assert await node.fence(1) is OK
        assert own.done() or node.storage._placing.pending_bytes < 28 * LARGE
        assert current().time() - before < 4.1
        assert sum(each.done() for each in bulk) <= 14
        await asyncio.gather(*bulk)

    on_a_node(test)


def test_a_fence_does_not_wait_for_the_small_entries_of_others_that_the_journal_has_waiting():
    """What recovery waits for has been placed, and its place goes ahead in the journal too."""

    async def test(node):
        slow(node.ledgers["d0"], 0.5)
        slow(node.journals["j0"], 1.0)
        own = node.in_background(large(1, 1))
        await asyncio.sleep(0.1)
        bulk = [node.in_background(small(2, e, 15 * KIB)) for e in range(1, 60)]
        await asyncio.sleep(0.1)
        before = current().time()
        assert await node.fence(1) is OK
        assert current().time() - before < 4.5
        assert not bulk[-1].done()
        await asyncio.gather(own, *bulk)

    on_a_node(test)


# -- budgets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["placed", "dropped", "no space"])
def test_bytes_on_the_way_count_until_they_are_acknowledged_and_beyond_the_budget_is_busy(end):
    async def test(node):
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
        assert not node.storage._placing._stores and not node.storage._placing._under_way
        node.ledgers["d0"].empty_out()
        assert await node.add(large(2, 1)) == [OK]

    on_a_node(test, journal_pending_bytes_max=8 * (LARGE + 64) + 100)


# -- ledger records -----------------------------------------------------------------------------


def first_places_are_told(records: list[Record]) -> int:
    """Before the first place of a ledger in a directory comes a record that names it."""
    told: dict[tuple[int, str], None] = {}
    places = 0
    for record in records:
        if record.kind is Kind.LEDGER:
            state = decode_ledger_state(record.body)
            told.update(dict.fromkeys((record.ledger_id, each) for each in state.directories))
        elif record.kind is Kind.PLACED:
            places += 1
            assert (record.ledger_id, decode_place(record).directory) in told
    return places


def test_a_ledger_record_that_names_the_directory_comes_before_the_first_place_in_each_run():
    async def test(node):
        for e in (1, 2):
            await node.add(large(1, e))
        assert first_places_are_told(await node.journaled()) == 2
        await node.crash("all")
        for e in (3, 4):
            await node.add(large(1, e), large(2, e))
        records = [r for r in await node.journaled() if r.entry_id != 0]
        run_two = records[[r.entry_id for r in records].index(3) - 1 :]
        assert first_places_are_told(run_two) == 4
        assert [r.kind for r in run_two if r.ledger_id == 1] == [Kind.LEDGER, 6, 6]

    on_a_node(test)


def test_where_a_ledger_goes_on_is_told_before_the_first_place_there_and_the_place_holds():
    async def test(node):
        assert await node.add(large(1, 1)) == [OK]
        node.ledgers["d0"].fill_up(1 << 10)
        await node.bookie.disks.look()
        assert await node.add(small(1, 2), large(1, 3)) == [OK, OK]
        assert (await node.ways(1))[3] is Kind.ENTRY
        await node.flushed()  # which gives the ledger another home
        assert node.directories(1) == ("d0", "d1")
        assert await node.add(large(1, 4)) == [OK]
        assert (await node.ways(1))[4] is Kind.PLACED
        assert node.copies(large(1, 4), "d1") == 1
        first_places_are_told(await node.journaled())
        node.ledgers["d0"].empty_out()
        await node.crash("none")
        await node.served(1, *range(5))
        assert node.directories(1) == ("d0", "d1")

    on_a_node(test)


# -- directories that fail ----------------------------------------------------------------------


def test_without_a_home_that_has_space_large_entries_go_to_the_journal():
    async def test(node):
        node.ledgers["d0"].fill_up(128 << 20)  # full, though it would fit
        await node.bookie.disks.look()
        assert await node.add(large(1, 1)) == [OK]
        node.storage.drop("d0", DiskFailed("gone"))
        assert await node.add(large(1, 2), large(2, 1)) == [OK, OK]
        assert await node.ways(1) == {0: Kind.ENTRY, 1: Kind.ENTRY, 2: Kind.ENTRY}
        assert not node.copies(large(1, 1)) and not node.copies(large(1, 2))

    on_a_node(test)


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
        assert (await node.ways(1))[2] is Kind.ENTRY
        assert (await node.ways(1))[4] is Kind.ENTRY
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

    on_a_node(test)


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

    on_a_node(test, flush_interval_s=60.0)


def test_a_directory_dropped_in_the_moment_in_which_it_tells_a_place_leaves_it_to_the_journal():
    async def test(node):
        placed_log = node.storage.stores[0].placed_log
        tell = placed_log._tell

        def tells_and_goes(put, told):
            tell(put, told)
            node.storage.drop("d0", DiskFailed("gone"))

        placed_log._tell = tells_and_goes
        assert await node.add(large(1, 1)) == [OK]
        assert (await node.ways(1))[1] is Kind.ENTRY
        node.out = ["d0"]
        await node.crash("none")
        await node.served(1, 1)

    on_a_node(test)


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

    on_a_node(test)


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

    on_a_node(test)


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

    on_a_node(test, **SPLITTING)


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

    on_a_node(test, **SPLITTING)


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

    on_a_node(test)


# -- journals that fail -------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before the place", "with the place"])
def test_a_journal_of_several_that_fails_on_the_way_costs_no_large_entry(when):
    async def test(node):
        await node.home("d0", 3, 4)
        home = {i: node.storage._journals._home[i] for i in (1, 2, 3, 4)}
        slow(node.ledgers["d0"], 1.0)
        assert set(home.values()) == {"j0", "j1"}
        adds = {i: node.in_background(large(i, 1)) for i in home}
        await asyncio.sleep(0.5)
        if when == "before the place":
            node.storage.drop("j1", DiskFailed("gone"))
        else:
            node.journals["j1"].faults.sync_fails = 1
        answers = {i: await each for i, each in adds.items()}
        assert node.storage._journals.live == ["j0"]
        for i, answer in answers.items():
            assert answer == [OK] or (when == "with the place" and home[i] == "j1")
        assert {i: await node.add(large(i, 2)) for i in home} == {i: [OK] for i in home}
        assert first_places_are_told(await node.journaled("j0"))
        node.out = ["j1"]
        slow(node.ledgers["d0"], 0.001)
        await node.crash("none")
        for i, answer in answers.items():
            await node.served(i, 2, *([1] if answer == [OK] else []))

    on_a_node(test, journals=2)


def test_without_a_journal_a_large_entry_is_not_acknowledged():
    async def test(node):
        slow(node.ledgers["d0"], 1.0)
        add = node.in_background(large(1, 1))
        await asyncio.sleep(0.5)
        node.journals["j0"].faults.sync_fails = 1
        assert await add == [Status.IO_ERROR]
        assert node.storage._placing.pending_bytes == 0

    on_a_node(test)


# -- reclaim ------------------------------------------------------------------------------------


def test_a_ledger_that_is_buried_while_its_large_entry_is_on_the_way_goes_and_stays_gone():
    async def test(node):
        slow(node.ledgers["d0"], 3.0)
        add = node.in_background(large(1, 1))
        await asyncio.sleep(0.1)
        await node.store.session("admin").delete(paths.ledger(1))
        burying = asyncio.ensure_future(node.bookie._ledgers.bury([1]))
        await asyncio.gather(burying, add)
        slow(node.ledgers["d0"], 0.001)
        await asyncio.sleep(200)
        await node.crash("none")
        assert not await node.storage.stored(1, 0, 9)

    on_a_node(test)


def test_an_append_waits_for_what_came_before_it_whichever_way_that_went():
    async def test(node):
        slow(node.ledgers["d0"], 1.0)
        placing, journals = node.storage._placing, node.storage._journals
        order: list[str] = []
        node.storage.put_all(1, {1: large(1, 1)})
        node.storage.put_all(1, {2: large(1, 2)})
        for name, records, lane, after in (
            ("large", [Record(Kind.ENTRY, 1, 1, large(1, 1), 0)], Lane.BULK, ()),
            ("after", [], Lane.BULK, (1,)),
            ("next", [Record(Kind.ENTRY, 1, 2, large(1, 2), 0)], Lane.BULK, ()),
            ("barrier", [], Lane.BULK, ()),
            ("fence", [Record(Kind.FENCE, 1, -1, b"", 0)], Lane.RECOVERY, ()),
        ):
            done = placing.append(journals, records, lane, after)
            done.add_done_callback(lambda _, name=name: order.append(name))
        await done
        await asyncio.sleep(0.1)
        assert order.index("large") < order.index("after") < order.index("next")
        assert order.index("next") < order.index("barrier")
        assert order.index("next") < order.index("fence")

    on_a_node(test)
