"""Compaction of one log: nothing that lives is lost, whatever happens, and nothing piles up."""

import asyncio

import pytest

from bookie_server.disk.interface import DiskFailed, NoSuchFile
from bookie_server.disk.os_disk import OsDisk
from bookie_server.lanes import Pace
from bookie_server.logs.entry_log import EntryLogs, log_path
from bookie_server.logs.rocks_index import RocksIndex
from bookie_server.reclaim.compact import Compactor
from bookie_server.reclaim.scrub import Scrub
from tests.simulation.loop import current, run
from tests.unit.bookie_server.log_store import ONE_LOG, RECORD_BYTES, SMALL_LOGS, LogStore, text

FAST = 1 << 40


def compactor(store, rate=FAST):
    return Compactor(store, store.quarantine, Pace(rate))


async def half_dead():
    """Log 1 holds ledgers 1 and 2, of which 1 is deleted; log 2 is growing."""
    store = await LogStore().start()
    keys = [(1, e) for e in range(30)] + [(2, e) for e in range(30)]
    await store.flush(*keys)
    await store.fill(3, count=1)
    await store.delete(1)
    assert store.logs.sealed_ids() == [1]
    return store


def test_what_lives_is_copied_and_the_log_goes():
    async def main():
        store = await half_dead()
        before = len(store.disk.content(log_path(1)))
        freed = await compactor(store).compact(await store.map(1))
        assert store.names() == ["2.log", "3.log"]
        assert freed == before - len(store.disk.content(log_path(3)))
        assert await store.stored(2) == [*range(30)]
        assert await store.stored(1) == []
        assert (await store.map(3)).record_bytes == 30 * RECORD_BYTES
        await store.crash()
        assert await store.stored(2) == [*range(30)]
        assert store.names() == ["2.log", "3.log"]

    run(main())


def test_a_log_without_anything_alive_goes_without_a_copy():
    async def main():
        store = await half_dead()
        await store.delete(2)
        assert await compactor(store).compact(await store.map(1))
        assert store.names() == ["2.log"]

    run(main())


def test_a_log_without_anything_alive_goes_only_after_the_index_that_says_so_was_synced():
    """Else the index that comes back after a crash points to a log that is gone."""

    async def main():
        store = await half_dead()
        await store.index.delete_ledger(2)  # visible, and not synced
        assert await compactor(store).compact(await store.map(1))
        await store.crash()
        assert await store.stored(2) == []

    run(main())


def test_a_record_that_the_index_does_not_point_to_is_not_copied():
    """Copies that a crash left behind (the entry was replayed into a later log) die here."""

    async def main():
        store = await half_dead()
        await store.flush(*((2, e) for e in range(10)))
        await compactor(store).compact(await store.map(1))
        assert (await store.map(store.logs.sealed_ids()[-1])).entries == 20
        assert await store.stored(2) == [*range(30)]

    run(main())


def test_an_entry_that_moves_while_its_log_is_compacted_stays_where_it_went():
    async def main():
        store = await half_dead()
        store.disk.faults.sync_s = (1.0, 1.0)
        compacting = asyncio.ensure_future(compactor(store).compact(await store.map(1)))
        await asyncio.sleep(0.5)
        await store.flush((2, 7))
        assert await compacting is not None
        newest = await store.index.get(2, 7)
        assert newest.log_id == 2
        assert await store.stored(2) == [*range(30)]

    run(main())


def test_a_reader_that_had_looked_up_the_old_place_finds_the_entry_by_looking_again():
    async def main():
        store = await half_dead()
        old = await store.index.get(2, 7)
        assert not isinstance((await store.logs.read([old]))[0], DiskFailed)
        await compactor(store).compact(await store.map(1))
        assert isinstance((await store.logs.read([old]))[0], DiskFailed)
        new = await store.index.get(2, 7)
        assert not isinstance((await store.logs.read([new]))[0], DiskFailed)

    run(main())


def test_reads_go_on_through_all_of_a_compaction():
    async def main():
        store = await half_dead()
        store.disk.faults.read_s = (0.0, 0.2)
        compacting = asyncio.ensure_future(compactor(store).compact(await store.map(1)))
        reads = 0
        while not compacting.done():
            place = await store.index.get(2, reads % 30)
            (found,) = await store.logs.read([place])
            if isinstance(found, DiskFailed):  # the second look
                (found,) = await store.logs.read([await store.index.get(2, reads % 30)])
            assert not isinstance(found, Exception)
            reads += 1
        assert await compacting is not None
        assert reads > 5

    run(main())


def test_a_read_that_comes_between_a_copys_new_name_and_the_news_of_it_is_answered():
    """The thread has renamed it; the loop hears of it later."""

    async def main():
        store = await half_dead()
        rename, found = store.disk.rename, []

        async def heard_of_later(old, new):
            await rename(old, new)
            if old.endswith(".compacted"):
                place = await store.index.get(2, 7)
                found.extend(await store.logs.read([place]))

        store.disk.rename = heard_of_later
        await compactor(store).compact(await store.map(1))
        assert [bytes(each) for each in found] == [text(2, 7)]

    run(main())


# -- failures ------------------------------------------------------------------------------------


def test_bk571_a_failed_compaction_leaves_no_piles():
    """BK#571: each failed attempt left its duplicates in the current log. Here the disk fills up
    in the middle, again and again."""

    async def main():
        store = await half_dead()
        names = store.names()
        for _ in range(5):
            store.disk.fill_up(10_000)
            assert await compactor(store).compact(await store.map(1)) is None
            assert store.names() == names
            assert await store.stored(2) == [*range(30)]
        store.disk.empty_out()
        assert await compactor(store).compact(await store.map(1)) is not None
        assert await store.stored(2) == [*range(30)]

    run(main())


@pytest.mark.parametrize("syncs", range(1, 5))
def test_a_failed_sync_anywhere_loses_nothing_and_the_next_attempt_succeeds(syncs):
    async def main():
        store = await half_dead()
        plain, left = store.index.sync, [syncs]

        async def sync():
            left[0] -= 1
            if left[0] == 0:
                raise DiskFailed("EIO")
            await plain()

        store.index.sync = sync
        store.disk.faults.sync_fails = int(syncs % 2 == 0)
        work = compactor(store)
        for _ in range(6):
            if 1 in store.logs.sealed_ids():
                await work.compact(await store.map(1))
            await work.redo()
        assert await store.stored(2) == [*range(30)]
        assert store.logs.unfinished_copies() == {}
        assert len(store.names()) == 2

    run(main())


def test_it_is_taken_up_from_any_step_after_a_crash():
    """Crash after each operation of the disk in turn; then everything is there, nothing is double,
    and finishing it leaves one log."""

    async def main():
        done, step = False, 0
        while not done:
            store = await half_dead()
            done = await crash_at(store, step)
            step += 1
            assert await store.stored(2) == [*range(30)]
            await compactor(store).redo()
            for log_id in store.logs.sealed_ids():
                if (await store.map(log_id) if log_id == 1 else None) is not None:
                    await compactor(store).compact(await store.map(log_id))
            assert await store.stored(2) == [*range(30)]
            await store.crash()
            assert await store.stored(2) == [*range(30)]
            whole = [name for name in store.names() if name != "2.log"]
            assert len(whole) == 1 and whole[0].endswith(".log"), whole
        assert step > 10

    run(main())


async def crash_at(store, step):
    """Whether compaction ended before so many operations."""
    count = 0

    class Stop(BaseException):
        pass

    def counted(plain):
        async def operation(*arguments, **more):
            nonlocal count
            count += 1
            if count > step:
                raise Stop
            return await plain(*arguments, **more)

        return operation

    for name in ("create", "rename", "remove", "sync_dir"):
        setattr(store.disk, name, counted(getattr(store.disk, name)))
    for name in ("move", "sync"):
        setattr(store.index, name, counted(getattr(store.index, name)))
    try:
        await compactor(store).compact(await store.map(1))
        ended = True
    except Stop:
        ended = False
    for name in ("create", "rename", "remove", "sync_dir"):
        delattr(store.disk, name)
    await store.crash("random" if step % 2 else "none")
    return ended


def test_a_copy_that_nobody_points_to_goes():
    """An attempt that ended after its copy was published, and another one that succeeded."""

    async def main():
        store = await half_dead()
        copy = await store.logs.begin_copy()
        await copy.append([(2, e, text(2, e)) for e in range(30)])
        await store.logs.publish_copy(copy, 1)
        await store.flush(*((2, e) for e in range(30)))
        await compactor(store).redo()
        assert store.names() == ["2.log"]
        assert await store.stored(2) == [*range(30)]

    run(main())


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [5, 48 + 64 + 30])
def test_a_bad_record_costs_its_entry_and_the_source_is_set_aside(where):
    async def main():
        store = await half_dead()
        bad = await store.index.get(2, 7)
        store.disk.flip_bit(log_path(1), 8 * (bad.position + where))
        assert await compactor(store).compact(await store.map(1)) is not None
        assert list(store.quarantined) == [(2, 7)]
        assert "1.damaged" in store.names() and "1.log" not in store.names()
        assert await store.index.get(2, 7) == bad, "it is not forgotten: it cannot be delivered"
        await store.index.delete_ledger(3)
        for e in [*range(7), *range(8, 30)]:
            (found,) = await store.logs.read([await store.index.get(2, e)])
            assert not isinstance(found, Exception)

    run(main())


def test_a_bad_record_of_a_dead_ledger_is_nobodys_loss():
    async def main():
        store = await half_dead()
        store.disk.flip_bit(log_path(1), 8 * (4096 + 200))
        assert await compactor(store).compact(await store.map(1)) is not None
        assert store.quarantined == {}
        assert store.names() == ["2.log", "3.log"]

    run(main())


def test_records_that_were_zeroed_are_missed_by_the_count_in_the_footer():
    """Zeros look like the filler between two appends: only the map says that they are not."""

    async def main():
        store = await half_dead()
        inode = store.disk.inode_of(log_path(1))
        first = await store.index.get(2, 20)
        end = inode.cache.rindex(b"SLER")  # the last record, up to the end of its block
        stop = -(-(end + RECORD_BYTES) // 4096) * 4096
        inode.cache[first.position : stop] = bytes(stop - first.position)
        assert await compactor(store).compact(await store.map(1)) is not None
        assert sorted(store.quarantined) == [(2, e) for e in range(20, 30)]
        assert "1.damaged" in store.names()

    run(main())


def test_a_copy_that_is_damaged_before_it_is_read_back_does_not_replace_its_source():
    async def main():
        store = await half_dead()
        plain = store.logs.publish_copy

        async def publish_copy(copy, source):
            await plain(copy, source)
            store.disk.flip_bit(store.logs.path(copy.log_id), 8 * (4096 + 5 * RECORD_BYTES + 200))

        store.logs.publish_copy = publish_copy
        work = compactor(store)
        await work.compact(await store.map(1))
        assert store.quarantined == {}
        assert "1.log" in store.names()
        assert await store.stored(2) == [*range(30)]
        assert work.failures == 1

    run(main())


def test_compaction_is_bounded_in_bytes_per_second():
    async def main():
        store = await LogStore().start()
        await store.fill(1, 2, 3, count=3 * ONE_LOG)
        await store.delete(1)
        began = current().time()
        work = compactor(store, rate=64_000)
        copied = 0
        for log_id in store.logs.sealed_ids():
            found = await store.map(log_id)
            copied += found.record_bytes
            await work.compact(found)
        assert current().time() - began > 0.9 * copied / 64_000

    run(main())


def test_on_a_real_disk_with_the_real_index(tmp_path):
    async def main():
        store = LogStore(disk=OsDisk(tmp_path))
        store.logs = await EntryLogs.open(store.disk, SMALL_LOGS)
        store.index = await RocksIndex.open(tmp_path / "index")
        await store.flush(*((i, e) for i in (1, 2) for e in range(30)))
        await store.fill(3, count=1)
        await store.delete(1)
        assert store.logs.sealed_ids() == [1]
        old = await store.index.get(2, 7)
        assert await compactor(store).compact(await store.map(1)) is not None
        names = sorted(path.name for path in (tmp_path / "entrylog").iterdir())
        assert names == ["0000000002.log", "0000000003.log"]
        assert await store.stored(2) == [*range(30)]
        (found,) = await store.logs.read([old])
        assert isinstance(found, NoSuchFile), "the source was let go of"
        scrub = Scrub(lambda: [store], store.quarantine, SMALL_LOGS)
        await scrub.once(0)
        assert scrub.read_bytes > 30 * RECORD_BYTES and store.quarantined == {}
        await store.logs.close()
        await store.index.close()
        store.disk.shut_down()

    asyncio.run(main())


def test_after_an_index_sync_that_failed_no_source_goes():
    """A second try may succeed and prove nothing: what it should sync is forgotten by then."""

    async def main():
        store = await half_dead()
        worker, plain = compactor(store), store.index.sync

        async def failing():
            store.index.sync = plain
            store.disk.faults.sync_fails = 1
            await plain()

        store.index.sync = failing
        assert await worker.compact(await store.map(1)) is None
        await worker.redo()
        assert log_path(1) in store.files()
        await store.crash()
        assert await store.stored(2) == [*range(30)]
        await compactor(store).redo()
        assert await store.stored(2) == [*range(30)]
        assert store.names() == ["2.log", "3.log"]

    run(main())
