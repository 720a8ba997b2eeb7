"""Which logs of a directory nothing lives in, and that one is never taken for such by mistake."""

import pytest

from bookie_server.disk.interface import DiskFailed
from bookie_server.lanes import Pace
from bookie_server.logs.entry_log import log_path
from bookie_server.logs.scan import read_map
from bookie_server.reclaim.collect import StoreLogs
from tests.simulation.loop import run
from tests.unit.bookie_server.log_store import ONE_LOG, RECORD_BYTES, LogStore, text

FAST = 1 << 40


class Looker:
    """StoreLogs whose living ledgers are all but those `gone`."""

    def __init__(self, store, *gone):
        self.gone = list(gone)
        self.logs = StoreLogs(store, lambda ledger_id: ledger_id not in self.gone, Pace(FAST))

    async def once(self):
        await self.logs.look()
        return await self.logs.remove_dead_logs()


async def two_logs():
    """Log 1: ledger 1. Log 2: ledger 2, and the beginning of log 3, which grows."""
    store = await LogStore().start()
    await store.flush(*((1, e) for e in range(ONE_LOG)))
    await store.flush(*((2, e) for e in range(ONE_LOG)))
    await store.fill(3, count=1)
    assert store.logs.sealed_ids() == [1, 2]
    return store


def test_a_log_of_deleted_ledgers_goes_whole_without_being_read():
    async def main():
        store = await two_logs()
        await store.delete(1)
        reads = []
        plain = store.logs.open_log

        async def open_log(log_id):
            file = await plain(log_id)
            read = file.read

            async def counted(position, length):
                reads.append(length)
                return await read(position, length)

            file.read = counted
            return file

        store.logs.open_log = open_log
        freed = await Looker(store, 1).once()
        assert store.names() == ["2.log", "3.log"]
        assert freed > ONE_LOG * RECORD_BYTES
        assert sum(reads) < 1000, "maps only"

    run(main())


def test_a_living_ledger_keeps_its_log():
    async def main():
        store = await two_logs()
        assert await Looker(store).once() == 0
        assert store.names() == ["1.log", "2.log", "3.log"]

    run(main())


def test_a_ledger_that_nobody_knows_but_the_index_keeps_its_log():
    """After a restart without its state, say: the index decides."""

    async def main():
        store = await two_logs()
        assert await Looker(store, 1, 2).once() == 0
        assert store.names() == ["1.log", "2.log", "3.log"]

    run(main())


def test_a_ledger_called_dead_that_came_back_keeps_its_new_log():
    """Recovery may add to a deleted ledger until it is forgotten: BK#4462, BK#4840."""

    async def main():
        store = await two_logs()
        looker = Looker(store, 1)
        await store.delete(1)
        await looker.once()
        await store.flush(*((1, e) for e in range(2 * ONE_LOG)))
        await store.flush()
        assert await looker.once() == 0
        assert await store.stored(1) == [*range(2 * ONE_LOG)]

    run(main())


def test_a_log_filled_by_the_flush_under_way_is_not_taken_for_dead():
    """It has its footer before the index knows its records."""

    async def main():
        store = await two_logs()
        looker = Looker(store, 4)
        places = await store.logs.write((4, e, text(4, e)) for e in range(2 * ONE_LOG))
        filled = {place.log_id for place in places}
        assert await looker.once() == 0
        await store.index.put(places)
        await store.index.sync()
        await store.flush()
        assert filled & set(store.logs.sealed_ids())
        assert await looker.once() == 0
        assert await store.stored(4) == [*range(2 * ONE_LOG)]

    run(main())


def test_the_growing_log_is_never_touched():
    async def main():
        store = await two_logs()
        await store.delete(3)
        await Looker(store, 3).once()
        assert "3.log" in store.names()

    run(main())


# -- maps ----------------------------------------------------------------------------------------


def test_bk4607_a_damaged_footer_does_not_make_a_log_look_empty():
    """BK#4607: a garbage header of the ledgers map made a log of living ledgers look empty. Here
    every bit of footer and map is flipped in turn: the log is scanned, or the map is right."""

    async def main():
        for back in range(1, 64 + 1):
            store = await two_logs()
            size = len(store.disk.content(log_path(1)))
            store.disk.flip_bit(log_path(1), 8 * (size - back) + back % 8)
            assert await Looker(store).once() == 0
            assert "1.log" in store.names()
            assert await store.stored(1) == [*range(ONE_LOG)]
            looker = Looker(store, 1)
            await store.delete(1)
            await looker.once()
            assert "1.log" not in store.names(), "and it goes when it is dead"

    run(main())


def test_the_footer_of_another_log_is_not_taken_for_this_ones():
    async def main():
        store = await two_logs()
        one, two = (store.disk.inode_of(log_path(i)).cache for i in (1, 2))
        one[-64:] = two[-64:]
        assert await read_map(store.logs, store.disk, 1) is None

    run(main())


async def cut_off():
    """Log 1 was cut off by a crash: no footer, and a torn end."""
    store = await LogStore().start()
    await store.flush(*((i, e) for i in (1, 2) for e in range(20)))
    inode = store.disk.inode_of(log_path(1))
    inode.write(inode.size(), b"torn" * 300)
    await store.crash("all")
    await store.fill(3, count=1)
    assert store.logs.sealed_ids() == [1]
    return store


def test_a_log_without_footer_is_scanned_once_and_its_map_kept():
    async def main():
        store = await cut_off()
        assert await read_map(store.logs, store.disk, 1) is None
        looker = Looker(store)
        await looker.once()
        assert looker.logs.maps[1].shares()[2].entries == 20
        assert "1.map" in store.names()
        await store.crash()
        kept = await read_map(store.logs, store.disk, 1)
        assert kept.shares() == looker.logs.maps[1].shares()

    run(main())


def test_a_log_without_footer_goes_when_nothing_lives_in_it_and_its_map_with_it():
    async def main():
        store = await cut_off()
        looker = Looker(store, 1, 2)
        await looker.once()
        await store.delete(1, 2)
        looker.logs.note_dead(1)
        looker.logs.note_dead(2)
        await looker.once()
        assert store.names() == ["2.log"]

    run(main())


def test_copies_that_a_crash_left_behind_count_for_nothing():
    """The entries were replayed from the journal into a later log: this one is dead."""

    async def main():
        store = await cut_off()
        await store.flush(*((i, e) for i in (1, 2) for e in range(20)))
        await Looker(store).once()
        assert store.names() == ["2.log"]
        assert await store.stored(1) == await store.stored(2) == [*range(20)]

    run(main())


def test_a_scan_does_not_count_by_what_the_index_may_forget():
    """What the index says is made durable before a map is built on it."""

    async def main():
        store = await cut_off()
        places = await store.logs.write((i, e, text(i, e)) for i in (1, 2) for e in range(20))
        await store.index.put(places)  # a flush that has not synced it yet
        await Looker(store).once()
        assert "1.log" not in store.names()
        await store.crash()
        assert await store.stored(1) == await store.stored(2) == [*range(20)]

    run(main())


@pytest.mark.parametrize("bit", [3, 100, 250])
def test_a_damaged_map_file_is_made_again(bit):
    async def main():
        store = await cut_off()
        await Looker(store).once()
        store.disk.flip_bit("entrylog/0000000001.map", bit)
        assert await read_map(store.logs, store.disk, 1) is None
        looker = Looker(store)
        await looker.once()
        assert looker.logs.maps[1].shares()[2].entries == 20

    run(main())


def test_a_damaged_log_without_footer_is_set_aside_and_not_removed():
    async def main():
        store = await cut_off()
        bad = await store.index.get(1, 3)
        store.disk.flip_bit(log_path(1), 8 * (bad.position + 9))
        looker = Looker(store, 1, 2)
        await looker.once()
        assert "1.map" not in store.names()
        await store.delete(1, 2)
        looker.logs.note_dead(1)
        looker.logs.note_dead(2)
        await looker.once()
        assert store.names() == ["1.damaged", "2.log"]

    run(main())


# -- one bad log ---------------------------------------------------------------------------------


def test_bk2264_bk4544_one_bad_log_never_stops_the_others():
    """BK#2264, BK#4544: collection ended for ever at the first file it could not read."""

    async def main():
        store = await two_logs()
        await store.delete(1, 2)
        plain = store.logs.open_log

        async def open_log(log_id):
            if log_id == 1:
                raise DiskFailed("EIO")
            return await plain(log_id)

        store.logs.open_log = open_log
        looker = Looker(store, 1, 2)
        await looker.once()
        assert store.names() == ["1.log", "3.log"]
        assert looker.logs.failures == 1
        store.logs.open_log = plain
        await looker.once()
        assert store.names() == ["3.log"], "and it is tried again"

    run(main())


def test_a_log_that_cannot_be_removed_never_stops_the_others():
    async def main():
        store = await two_logs()
        await store.delete(1, 2)
        plain = store.disk.remove

        async def remove(path):
            if path == log_path(1):
                raise DiskFailed("EIO")
            await plain(path)

        store.disk.remove = remove
        looker = Looker(store, 1, 2)
        await looker.once()
        assert store.names() == ["1.log", "3.log"]

    run(main())


def test_a_dead_log_that_a_crash_cut_off_goes_though_there_is_no_space_for_its_map():
    async def main():
        store = await LogStore().start()
        await store.flush(*((1, e) for e in range(5)))
        await store.crash()
        await store.delete(1)
        store.disk.fill_up(0)
        opened, closed, create = [], [], store.disk.create

        async def counted(path, reserve_bytes=0, *, direct=False):
            file = await create(path, reserve_bytes, direct=direct)
            opened.append(path)
            close = file.close

            async def counted_close():
                closed.append(path)
                await close()

            file.close = counted_close
            return file

        store.disk.create = counted
        looker = Looker(store, 1)
        assert await looker.once() > 0
        assert [name for name in store.names() if name.endswith(".log")] == []
        assert closed == opened, "nothing that was made is left open"

    run(main())


def test_a_log_whose_map_cannot_be_written_is_read_through_once():
    async def main():
        store = await LogStore().start()
        await store.flush(*((1, e) for e in range(5)))
        await store.crash()
        store.disk.fill_up(0)
        looker = Looker(store)
        await looker.once()
        reads, plain = [], store.logs.open_log

        async def open_log(log_id):
            reads.append(log_id)
            return await plain(log_id)

        store.logs.open_log = open_log
        await looker.once()
        assert reads == []

    run(main())
