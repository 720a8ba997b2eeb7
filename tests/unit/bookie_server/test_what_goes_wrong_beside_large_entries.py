"""Large entries are written once: what goes wrong beside them costs no promise, keeps nobody
waiting who travels for recovery, and leaves nothing behind."""

import asyncio
import os
import threading

import pytest

from bookie_server.api.entry import HEADER_BYTES
from bookie_server.api.status import Status
from bookie_server.disk.interface import DiskFailed
from bookie_server.disk.os_disk import OsDisk
from bookie_server.logs.entry_log import BLOCK_BYTES, RECORD_HEADER_BYTES
from bookie_server.logs.index import IndexDamaged
from spark_ledger.metadata import cluster
from tests.kit.nodes import on_a_node
from tests.kit.settings import with_settings
from tests.kit.waiting import until
from tests.simulation.index import SimIndex
from tests.simulation.loop import current
from tests.unit.bookie_server.clustered_node import CLUSTER_ID, LIMBO, Clustered
from tests.unit.bookie_server.node import ABSENT, CONFIG, KIB, OK, entry, with_two_ledgers

IO_ERROR = Status.IO_ERROR
LARGE = with_settings(CONFIG, large_entry_bytes=4 * KIB)
PAYLOAD = bytes(8 * KIB)
SYNC_S = 5.0
SCARCE = with_settings(
    LARGE,
    disk_reserve_bytes=0,
    disk_free_bytes_min=0,
    disk_usage_high=1.0,
    disk_usage_low=0.99,
    disk_check_s=100.0,
    flush_chunk_bytes=4 * KIB,
)


class Placed(Clustered):
    """Of two ledger directories and some journals; what is large goes to d1."""

    def __init__(self, journals):
        super().__init__(journals, 2, LARGE)


async def with_two_large_entries(journals=1):
    node = Placed(journals)
    await cluster.ensure(node.store.session("admin"), CLUSTER_ID)
    await node.start()
    await node.create_ledger(1, 2)
    node.ledgers["d0"].fill_up(1 << 30)
    await node.bookie.disks.look()
    assert await node.add(entry(1, 0, PAYLOAD), entry(1, 1, PAYLOAD)) == [OK, OK]
    node.ledgers["d0"].empty_out()
    return node


# -- lost directories ----------------------------------------------------------------------------


def test_what_was_placed_in_a_directory_given_up_before_a_flush_is_not_denied_after_a_crash():
    """Who compared the copies found it in memory, so he copied nothing."""

    async def test(node):
        node.storage.drop("d1", DiskFailed("it is gone"))
        asked = await node.ask(1)
        assert asked.limbo == "lost"
        assert await node.statuses(1, 0, 1) == [OK, OK]
        assert (await node.ask(1, asked.revision)).status is OK
        node.out = ["d1"]
        await node.crash()
        assert await node.statuses(1, 0, 2) == [OK, OK, ABSENT]
        node.out = []
        await node.crash()
        assert await node.statuses(1, 0, 2) == [OK, OK, ABSENT]

    on_a_node(test, with_two_large_entries())


@pytest.mark.parametrize("journals", [1, 2])
def test_an_index_that_cannot_be_read_at_replay_costs_its_directory_and_no_more(
    journals, monkeypatch
):
    async def test(node):
        node.die()

        async def damaged(index, *_):
            error = IndexDamaged("a table is bad")
            index.on_damage(error)
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(SimIndex, "range", damaged)
            await node.start()
        assert node.storage.failures.keys() <= {"d0", "d1"}
        assert set(await node.statuses(1, 0, 1)) <= {OK, LIMBO}
        assert await node.add(entry(2, 0)) == [OK]

    on_a_node(test, with_two_large_entries(journals))


# -- recovery ------------------------------------------------------------------------------------


def test_a_fence_after_a_large_add_waits_behind_no_bulk_of_other_ledgers():
    async def test(node):
        await node.add(entry(1, 0), entry(2, 0))
        node.journal_disk.faults.sync_s = (SYNC_S, SYNC_S)
        node.ledger_disk.faults.sync_s = (8.0, 8.0)
        bulk = [
            asyncio.ensure_future(node.add(*[entry(2, e, bytes(3 * KIB)) for e in range(b, b + 9)]))
            for b in range(1, 64, 9)
        ]
        await asyncio.sleep(0.1)
        large = asyncio.ensure_future(node.add(entry(1, 1, PAYLOAD)))
        await asyncio.sleep(0.1)
        before = current().time()
        assert await node.fence(1) is OK
        assert current().time() - before <= 2 * SYNC_S
        assert large.done(), "it was taken before the fence"
        assert await node.statuses(1, 1, 1) == [OK]
        assert not bulk[-1].done(), "the bulk still waits"
        await asyncio.gather(*bulk)

    config = with_settings(LARGE, journal_batch_bytes_max=32 * KIB)
    on_a_node(test, with_two_ledgers(config))


def test_a_fence_waits_for_no_ledger_directory_that_hangs():
    async def test(node):
        await node.add(entry(1, 0))
        node.ledger_disk.faults.sync_s = (20.0, 20.0)
        large = asyncio.ensure_future(node.add(entry(1, 1, PAYLOAD)))
        await asyncio.sleep(0.1)
        before = current().time()
        assert await node.fence(1) is OK
        assert current().time() - before < 1.0
        await asyncio.sleep(0)
        assert large.done() and await large == [OK]
        await node.crash()
        assert await node.statuses(1, 0, 2) == [OK, OK, ABSENT]

    on_a_node(test, with_two_ledgers(LARGE))


def test_what_the_journal_took_over_for_a_fence_lies_once_in_the_entry_logs():
    async def test(node):
        await node.add(entry(1, 0))
        node.ledger_disk.faults.sync_s = (2.0, 2.0)
        large = asyncio.ensure_future(node.add(entry(1, 1, b"marked once" + PAYLOAD)))
        await asyncio.sleep(0.1)
        assert await node.fence(1) is OK
        node.ledger_disk.faults.sync_s = (0.001, 0.001)
        await large
        await asyncio.sleep(20)
        assert _times(node, b"marked once") == 1
        assert node.storage.pending_bytes == 0
        (store,) = node.storage.stores
        assert store.direct_log.marks(store.direct_log.puts) == {}
        await node.crash()
        assert await node.statuses(1, 0, 2) == [OK, OK, ABSENT]

    on_a_node(test, with_two_ledgers(LARGE))


def _times(node, marked):
    disk = node.ledger_disk
    return sum(disk.content(path).count(marked) for path in disk.paths() if path.endswith(".log"))


def test_writes_to_a_disk_wait_for_no_reads_and_not_for_two_long_syncs(tmp_path, monkeypatch):
    """A flush and a compaction sync, and all bulk readers are busy."""
    end, began = threading.Event(), []

    def lasts(*_):
        began.append(None)
        end.wait(60)
        return b""

    async def main():
        disk = OsDisk(tmp_path / "disk")
        log = await disk.create("log")
        monkeypatch.setattr(os, "fsync", lasts)
        monkeypatch.setattr(os, "pread", lasts)
        busy = [asyncio.ensure_future(disk.sync_dir()) for _ in range(2)]
        busy += [asyncio.ensure_future(log.read(0, 1)) for _ in range(8)]
        await until(lambda: len(began) == 10)
        try:
            async with asyncio.timeout(30):
                assert await disk.free_bytes() > 0
                file = await disk.create("a")
                await file.append([b"abc"], sync=True)
        finally:
            end.set()
            await asyncio.gather(*busy)
            disk.shut_down()

    asyncio.run(main())


# -- the write cache -----------------------------------------------------------------------------


def test_entries_of_a_frame_are_written_once_when_a_flush_begins_between_them():
    async def test(node):
        half = LARGE.write_cache_bytes // 2
        size = 0
        filler = 0
        while size < half // 2 - 20 * KIB:
            assert await node.add(entry(2, filler, bytes(3 * KIB))) == [OK]
            size = node.storage.cache.unflushed_bytes
            filler += 1
        first, last = b"first one" + bytes(30 * KIB), b"last one" + bytes(30 * KIB)
        frame = (entry(1, 0, first), entry(2, filler), entry(1, 1, last))
        assert await node.add(*frame) == [OK] * 3
        await asyncio.sleep(20)
        assert (_times(node, b"first one"), _times(node, b"last one")) == (1, 1)

    on_a_node(test, with_two_ledgers(LARGE))


# -- space ---------------------------------------------------------------------------------------


def test_a_log_that_a_power_loss_tore_is_no_damaged_one():
    """Of a write that was not synced later records may be whole, and earlier ones not."""

    async def test(node):
        assert await node.add(entry(1, 0, PAYLOAD)) == [OK]
        node.ledger_disk.faults.sync_s = (1.0, 1.0)
        torn = [asyncio.ensure_future(node.add(entry(2, e, PAYLOAD))) for e in range(12)]
        await asyncio.sleep(0.5)
        await node.crash("torn")
        for each in torn:
            each.cancel()
        node.ledger_disk.speed_up()
        reclaim = node.bookie.reclaim
        await reclaim.collect(sweep=False, surplus=False)
        (logs,) = [each.logs for each in reclaim._living()]
        assert [each.is_whole for each in logs.maps.values()] == [True] * len(logs.maps)
        assert logs.maps

    on_a_node(test, with_two_ledgers(LARGE))


def test_the_last_directory_that_fails_ends_the_node_by_its_name_with_places_in_memory():
    async def test(node):
        assert await node.add(entry(1, 0, PAYLOAD)) == [OK]
        node.ledger_disk.faults.sync_fails = 1
        assert await node.add(entry(1, 1, PAYLOAD)) in ([OK], [IO_ERROR])
        await asyncio.sleep(1)
        error = node.bookie.failed.exception()
        assert isinstance(error, DiskFailed) and "no ledger directory is left" in str(error)
        await node.crash()
        assert await node.statuses(1, 0, 0) == [OK]

    on_a_node(test, with_two_ledgers(LARGE))


def test_large_entries_take_no_space_that_a_flush_counts_on():
    async def test(node):
        block = bytes(BLOCK_BYTES - RECORD_HEADER_BYTES - HEADER_BYTES)  # with an append of its own
        small = [entry(2, e, block) for e in range(24)]
        assert set(await node.add(*small)) == {OK}
        node.ledger_disk.fill_up(130 * KIB)
        free_bytes = node.ledger_disk.free_bytes

        async def slowly():
            await asyncio.sleep(0.1)
            return await free_bytes()

        node.ledger_disk.free_bytes = slowly
        node.storage.begin_flush()
        adds = [asyncio.ensure_future(node.add(entry(1, e, PAYLOAD))) for e in range(10)]
        assert [await each for each in adds] == [[OK]] * 10
        await asyncio.sleep(10)
        assert not node.bookie.failed.done()
        node.ledger_disk.empty_out()
        await asyncio.sleep(200)
        assert set(await node.statuses(2, 0, 23)) == {OK}
        assert set(await node.statuses(1, 0, 9)) == {OK}

    on_a_node(test, with_two_ledgers(SCARCE))


def test_while_a_flush_waits_for_space_it_writes_nothing_not_even_places():
    async def test(node):
        assert await node.add(entry(1, 0, PAYLOAD), entry(1, 1, bytes(3 * KIB))) == [OK, OK]
        node.ledger_disk.fill_up(KIB)
        await asyncio.sleep(10)
        syncs = node.ledger_disk.syncs
        await asyncio.sleep(30)
        assert node.storage.is_flushing
        assert node.ledger_disk.syncs == syncs
        node.ledger_disk.empty_out()
        await asyncio.sleep(200)
        assert not node.storage.is_flushing
        await node.crash()
        assert await node.statuses(1, 0, 2) == [OK, OK, ABSENT]

    on_a_node(test, with_two_ledgers(SCARCE))


def test_a_log_whose_last_entry_rotted_is_a_damaged_one_though_nothing_whole_lies_behind_it():
    async def test(node):
        assert await node.add(entry(1, 0, PAYLOAD)) == [OK]
        assert await node.add(entry(2, 0, b"rotten" + PAYLOAD)) == [OK]
        await node.crash("all")
        (path,) = [path for path in node.ledger_disk.paths() if path.endswith(".log")]
        at = node.ledger_disk.content(path).index(b"rotten")
        node.ledger_disk.flip_bit(path, 8 * at)
        reclaim = node.bookie.reclaim
        await reclaim.collect(sweep=False, surplus=False)
        (logs,) = [each.logs for each in reclaim._living()]
        assert [each.is_whole for each in logs.maps.values()] == [False]

    on_a_node(test, with_two_ledgers(LARGE))
