"""A disk that never returns: its directory fails after `disk_hang_s`, and the node goes on without
it, or says so and ends."""

import asyncio
import os
import threading

import pytest
from rocksdict import Rdict

from bookie_server.api.status import Status
from bookie_server.disk.interface import PARTS, DiskFailed, DiskHung, IoDeadline
from bookie_server.disk.os_disk import DiskThreads, OsDisk
from bookie_server.journal.writer import JournalFailed
from bookie_server.logs import rocks_index
from bookie_server.logs.rocks_index import RocksIndex
from tests.kit.forward import forward
from tests.kit.forward import run as run_forward
from tests.kit.nodes import on_a_node
from tests.kit.waiting import until
from tests.simulation.loop import run
from tests.unit.bookie_server.node import CONFIG, Node, entry
from tests.unit.bookie_server.wide_node import LEDGERS, flushed, wide_node

OK, ABSENT, LIMBO, IO_ERROR = Status.OK, Status.NO_SUCH_ENTRY, Status.LIMBO, Status.IO_ERROR
HANG_S = CONFIG.disk_hang_s
LIMIT_S = 60.0


def test_a_ledger_directory_that_hangs_is_given_up_and_the_others_take_its_part():
    async def test(node):
        node.ledgers["d1"].faults.hangs = True
        for count in range(2, 50):
            assert await node.add(*(entry(i, count) for i in LEDGERS)) == [OK] * len(LEDGERS)
            await asyncio.sleep(1)
        storage = node.storage
        assert "did not return" in storage.failures["d1"]
        assert not node.bookie.failed.done()
        assert node.bookie.readonly_reason == ""
        flushes = storage.flushes
        await flushed(node)
        assert storage.flushes > flushes
        assert await node.of_each(49) == {i: {OK} for i in LEDGERS}
        await asyncio.wait_for(node.bookie.stop(), HANG_S)
        node.out = ["d1"]
        await node.start()
        assert await node.of_each(49) == {i: {OK} for i in LEDGERS}

    on_a_node(test, wide_node())


def test_a_journal_that_hangs_is_given_up_and_its_ledgers_go_on_in_another():
    async def test(node):
        node.journals["j0"].faults.hangs = True
        adding = [asyncio.ensure_future(node.add(entry(i, 2))) for i in LEDGERS]
        async with asyncio.timeout(2 * HANG_S):
            results = await asyncio.gather(*adding)
        assert [IO_ERROR] in results
        assert list(node.storage.failures) == ["j0"]
        for ledger in LEDGERS:
            assert await node.add(entry(ledger, 2), entry(ledger, 3)) == [OK, OK]
        await asyncio.wait_for(node.bookie.stop(), HANG_S)

    on_a_node(test, wide_node(journals=2))


def test_a_read_that_fences_shows_a_copy_only_once_that_is_durable():
    async def main():
        node = await Node().start()
        await node.create_ledger(1)
        assert await node.fence(1) is OK
        node.journal_disk.faults.hangs = True
        adding = asyncio.ensure_future(node.add(entry(1, 0), recovery=True))
        await asyncio.sleep(1)
        reading = asyncio.ensure_future(node.statuses(1, 0, 0, fence=True))
        await asyncio.sleep(1)
        assert not reading.done(), "a power cut now takes the copy"
        assert await adding == [IO_ERROR]
        assert await reading == [IO_ERROR]

    run(main())


def test_a_read_that_fences_shows_what_a_failed_journal_had_once_a_flush_has_it():
    async def test(node):
        assert {await node.fence(i) for i in LEDGERS} == {OK}
        for disk in node.ledgers.values():
            disk.faults.sync_s = (5.0, 5.0)
        node.journals["j0"].faults.hangs = True
        adds = [node.add(entry(i, 2), recovery=True) for i in LEDGERS]
        results = await asyncio.gather(*adds)
        failed = [i for i, result in zip(LEDGERS, results, strict=True) if result == [IO_ERROR]]
        begun = node.storage.flushes
        assert await node.statuses(failed[0], 2, 2, fence=True) == [OK]
        assert node.storage.flushes > begun
        await node.crash("none")
        assert {i: await node.statuses(i, 2, 2) for i in failed} == {i: [OK] for i in failed}

    on_a_node(test, wide_node(journals=2))


@pytest.mark.parametrize("hung", ["journal", "ledger"])
def test_the_last_directory_that_hangs_ends_the_node_which_says_why(hung):
    async def main():
        node = await Node().start()
        told = []
        node.bookie.disks.listeners.append(lambda: told.append(node.bookie.readonly_reason))
        await node.create_ledger(1)
        assert await node.add(entry(1, 0)) == [OK]
        disk = {"journal": node.journal_disk, "ledger": node.ledger_disk}[hung]
        disk.faults.hangs = True
        adding = asyncio.ensure_future(node.add(entry(1, 1)))
        async with asyncio.timeout(2 * HANG_S):
            with pytest.raises((DiskFailed, JournalFailed), match="did not return"):
                await asyncio.shield(node.bookie.failed)
        assert "did not return" in node.bookie.readonly_reason
        assert "did not return" in told[-1], "and it is published"
        assert await adding == [OK if hung == "ledger" else IO_ERROR]
        async with asyncio.timeout(2 * HANG_S):
            with pytest.raises((DiskFailed, JournalFailed)):
                await node.bookie.stop()
        disk.faults.hangs = False
        node.die("none")
        await node.start()
        assert await node.statuses(1, 0, 0) == [OK]

    run(main())


@pytest.mark.parametrize("hung", ["journal", "ledger"])
def test_a_node_whose_disk_hangs_stops_all_the_same(hung):
    async def main():
        node = await Node().start()
        await node.create_ledger(1)
        assert await node.add(entry(1, 0)) == [OK]
        disk = {"journal": node.journal_disk, "ledger": node.ledger_disk}[hung]
        disk.faults.hangs = True
        async with asyncio.timeout(3 * HANG_S):
            with pytest.raises((DiskFailed, JournalFailed)):
                await node.bookie.stop()

    run(main())


def test_a_read_that_hangs_is_unknown_in_time_and_holds_nothing():
    async def test(node):
        await flushed(node)
        await node.crash()
        for disk in node.ledgers.values():
            disk.faults.read_s = (1e6, 1e6)
        async with asyncio.timeout(3 * HANG_S):  # first contact reads too
            assert await node.statuses(1, 0, 1) == [IO_ERROR, IO_ERROR]
        assert node.bookie.responses.used == 0
        for disk in node.ledgers.values():
            disk.speed_up()
        assert await node.statuses(1, 0, 1) == [OK, OK]
        assert node.storage.failures == {}

    on_a_node(test, wide_node())


def test_a_read_whose_caller_goes_while_a_disk_is_slow_holds_nothing():
    async def test(node):
        await flushed(node)
        await node.crash()
        await node.statuses(1, 9, 9)  # first contact is over, and nothing is in a cache
        for disk in node.ledgers.values():
            disk.faults.read_s = (1.0, 1.0)
        reading = asyncio.ensure_future(node.statuses(1, 0, 1))
        await asyncio.sleep(0.1)
        assert node.bookie.responses.used > 0
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert reading.cancelled()
        assert node.bookie.responses.used == 0

    on_a_node(test, wide_node())


async def too_long() -> None:
    """A call that is under way has had LIMIT_S, and by the loop's clock alone: real disks and
    threads have all the time that they need."""
    for _ in range(PARTS + 1):
        forward(LIMIT_S / PARTS)
        for _ in range(2):  # the timer of this part fires, and sets that of the next
            await asyncio.sleep(0)


def test_after_a_call_that_hung_nothing_is_asked_of_the_disk_any_more():
    asked, go = [], threading.Event()

    def hang(what):
        asked.append(what)
        go.wait(30)

    def look(what):
        asked.append(what)
        return what

    async def main():
        threads = DiskThreads(3, "disk", IoDeadline(LIMIT_S))
        hanging = threads.run(hang, 1)
        await until(lambda: asked == [1])
        await too_long()
        with pytest.raises(DiskHung):
            await hanging
        assert await threads.run(look, 2) == 2
        hanging = threads.run(hang, 3, alters=True)
        await until(lambda: asked == [1, 2, 3])
        await too_long()
        with pytest.raises(DiskHung, match=f"{LIMIT_S:g} s"):
            await hanging
        for alters in (False, True):
            with pytest.raises(DiskHung, match="not used any more"):
                threads.run(look, 4, alters=alters)
        assert asked == [1, 2, 3]
        go.set()
        threads.shut_down()

    run_forward(main())


def test_a_call_that_waits_behind_one_that_hangs_is_given_up_and_never_made():
    made, begun, go = [], threading.Event(), threading.Event()

    def hang():
        begun.set()
        go.wait(30)

    async def main():
        threads = DiskThreads(1, "disk", IoDeadline(LIMIT_S))
        hanging, waiting = threads.run(hang), threads.run(made.append, 1)
        await until(begun.is_set)  # a call that is given up before is not made: it hangs nobody
        await too_long()
        for each in (hanging, waiting):
            with pytest.raises(DiskHung):
                await each
        go.set()
        await threads.run(made.append, 2)
        assert made == [2]
        threads.shut_down()

    run_forward(main())


def test_what_takes_the_longer_the_more_there_is_has_no_limit():
    go = threading.Event()

    async def main():
        threads = DiskThreads(1, "disk", IoDeadline(LIMIT_S))
        slow = threads.run(go.wait, 30, has_deadline=False)
        behind = threads.run(divmod, 1, 1, alters=True)
        await too_long()
        with pytest.raises(DiskHung):
            await behind
        assert not slow.done()
        go.set()
        assert await slow
        assert await threads.run(divmod, 7, 2, has_deadline=False) == (3, 1)
        threads.shut_down()

    run_forward(main())


def test_each_of_many_calls_has_the_limit_and_at_most_a_part_more():
    async def main():
        loop, deadline = asyncio.get_running_loop(), IoDeadline(PARTS)

        async def lasted(begin_s):
            await asyncio.sleep(begin_s)
            began_s, done = loop.time(), loop.create_future()
            deadline.watch(done, alters=False)
            with pytest.raises(DiskHung):
                await done
            return loop.time() - began_s

        begins = [0.0, 0.0, 0.4, 0.999, 1.5, 4.2, 7.7, 30.0]
        times = await asyncio.gather(*map(lasted, begins))
        assert all(PARTS - 0.01 <= each <= PARTS + 1.01 for each in times), times
        assert times[0] == times[-1] == pytest.approx(PARTS)

    run(main())


def test_a_loop_that_was_held_up_makes_no_disk_hang():
    go = threading.Event()

    async def main():
        threads = DiskThreads(1, "disk", IoDeadline(LIMIT_S))
        call = threads.run(go.wait, 30, alters=True)
        for _ in range(3):
            await asyncio.sleep(0)
            forward(2 * LIMIT_S)  # it is held up for longer than the limit
        go.set()
        assert await call
        threads.shut_down()

    run_forward(main())


def test_a_hung_call_of_the_operating_system_leaves_its_thread_behind(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    begun, plain = threading.Event(), os.open

    def noted(*how):
        begun.set()
        return plain(*how)

    async def main():
        disk = OsDisk(tmp_path, limit_s=LIMIT_S)
        monkeypatch.setattr(os, "open", noted)
        opening = asyncio.ensure_future(disk.open("pipe"))  # waits for a writer
        await until(begun.is_set)
        await too_long()
        with pytest.raises(DiskHung):
            await opening
        file = await disk.create("file")
        await file.append([b"bytes"], sync=True)
        await file.close()
        os.close(os.open(tmp_path / "pipe", os.O_WRONLY))
        disk.shut_down()

    run_forward(main())


def test_a_write_that_hangs_ends_the_disk_and_closing_its_files_waits_for_nothing(
    tmp_path, monkeypatch
):
    begun, go = threading.Event(), threading.Event()

    def hang(*_):
        begun.set()
        go.wait(30)

    async def main():
        disk = OsDisk(tmp_path, limit_s=LIMIT_S)
        file, other = await disk.create("file"), await disk.create("other")
        monkeypatch.setattr(os, "pwritev", hang)
        appending = asyncio.ensure_future(file.append([b"bytes"], sync=True))
        await until(begun.is_set)
        await too_long()
        with pytest.raises(DiskHung):
            await appending
        for asked in (other.append([b"bytes"]), disk.list(), disk.create("more")):
            with pytest.raises(DiskHung, match="not used any more"):
                await asked
        await file.close()
        await other.close()
        go.set()
        disk.shut_down()

    run_forward(main())


def test_an_index_that_hangs_fails_as_hung_and_takes_and_says_nothing_more(tmp_path, monkeypatch):
    begun, go = threading.Event(), threading.Event()

    class Hung:
        """A database whose flush hangs."""

        def __init__(self, *of):
            self.db = Rdict(*of)

        def __getattr__(self, name):
            return getattr(self.db, name)

        def flush(self, wait):
            begun.set()
            go.wait(30)

    async def main():
        monkeypatch.setattr(rocks_index, "Rdict", Hung)
        index = await RocksIndex.open(tmp_path, limit_s=LIMIT_S)
        syncing = asyncio.ensure_future(index.sync())
        await until(begun.is_set)
        await too_long()
        with pytest.raises(DiskHung, match="did not return"):
            await syncing
        for asked in (index.get(1, 2), index.mark_logs({1: 2}), index.close()):
            with pytest.raises(DiskHung, match="not used any more"):
                await asked
        assert await index.ledgers() == []
        go.set()

    run_forward(main())
