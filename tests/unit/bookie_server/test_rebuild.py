"""The index made anew from the logs: everything that lies there is found, nothing is denied."""

import asyncio

import pytest

from bookie_server.disk.interface import DiskFailed
from bookie_server.disk.os_disk import OsDisk
from bookie_server.logs.entry_log import EntryLogs, log_path
from bookie_server.logs.index import EVERY_LEDGER, LedgerState, merge_by_revision
from bookie_server.logs.rebuild import INDEX, MARKER, rebuild, refuse_half_rebuilt
from bookie_server.logs.rocks_index import RocksIndex
from tests.simulation.index import SimIndex
from tests.simulation.loop import run
from tests.unit.bookie_server.log_store import ONE_LOG, RECORD_BYTES, SMALL_LOGS, LogStore, text

HERE = "directory-1"


async def filled():
    """Ledgers 1 to 3 over several logs, the last of which has no footer."""
    store = await LogStore().start()
    for first in (0, 40, 80):
        await store.flush(*((i, e) for i in (1, 2, 3) for e in range(first, first + 40)))
    assert len(store.files()) > 3
    return store


async def make_anew(store, states=None, directory_id=HERE):
    async def make_index(folder):
        return await SimIndex.open(store.disk, folder)

    found = await rebuild(store.disk, directory_id, make_index, SMALL_LOGS, states)
    await store.start()
    return found


async def states_of(store):
    return {state.ledger_id: state for state in await store.index.ledgers()}


def test_every_entry_is_found_again_without_the_old_index():
    async def main():
        store = await filled()
        await store.crash()
        for path in [p for p in store.disk.paths() if p.startswith("index/")]:
            await store.disk.remove(path)
        found = await make_anew(store)
        for ledger_id in (1, 2, 3):
            assert await store.stored(ledger_id) == [*range(120)]
        assert found.entries == 360
        await refuse_half_rebuilt(store.disk)

    run(main())


def test_a_damaged_old_index_is_kept_aside():
    async def main():
        store = await filled()
        await make_anew(store)
        assert any(path.startswith("index.damaged/") for path in store.disk.paths())
        await make_anew(store)  # and again, which replaces the one kept
        assert await store.stored(2) == [*range(120)]

    run(main())


def test_without_the_states_every_ledger_is_in_limbo_and_those_found_are_fenced():
    async def main():
        store = await filled()
        await make_anew(store)
        states = await states_of(store)
        assert states[EVERY_LEDGER].limbo == "lost"
        for ledger_id in (1, 2, 3):
            state = states[ledger_id]
            assert (state.limbo, state.fenced, state.met) == ("lost", True, False)
            assert state.directories == (HERE,)

    run(main())


def test_states_of_another_directory_are_taken_over_and_nothing_is_in_limbo():
    async def main():
        store = await filled()
        await store.disk.rename(log_path(4), "entrylog/gone")
        given = [
            LedgerState(EVERY_LEDGER),
            LedgerState(1, fenced=True, revision=3),
            LedgerState(1, explicit_lac=7, revision=4),
            LedgerState(2, revision=1),
            LedgerState(3, deleted=True, revision=1),
            LedgerState(4, revision=1),
        ]
        found = await make_anew(store, given)
        states = await states_of(store)
        assert not found.may_lack_more
        assert states[EVERY_LEDGER].limbo == "" and states[2].limbo == ""
        assert states[1].fenced and states[1].explicit_lac == 7
        assert states[4] == LedgerState(4, revision=1)
        assert await store.stored(3) == [], "it was deleted"

    run(main())


def test_a_ledger_that_no_state_speaks_of_is_in_limbo_itself():
    async def main():
        store = await filled()
        given = [LedgerState(EVERY_LEDGER), LedgerState(1), LedgerState(2)]
        await make_anew(store, given)
        states = await states_of(store)
        assert states[3].limbo == "lost" and states[EVERY_LEDGER].limbo == ""

    run(main())


def test_the_newest_log_wins():
    async def main():
        store = await filled()
        await store.flush((1, 5))
        newest = await store.index.get(1, 5)
        await make_anew(store)
        assert await store.index.get(1, 5) == newest

    run(main())


ALL_KNOWN = [LedgerState(EVERY_LEDGER), *(LedgerState(i, revision=1) for i in (1, 2, 3))]


@pytest.mark.parametrize("where", ["header", "payload"])
def test_a_damaged_record_is_unknown_and_never_absent(where):
    async def main():
        store = await filled()
        bad = await store.index.get(1, 5)
        at = bad.position + (9 if where == "header" else 200)
        store.disk.flip_bit(log_path(bad.log_id), 8 * at)
        await make_anew(store, ALL_KNOWN)
        place, states = await store.index.get(1, 5), await states_of(store)
        if where == "payload":
            assert place == bad, "the entry exists; a read of it says that it is bad"
        else:
            assert states[1].limbo == "lost", "the log's map has one more of this ledger"
        assert states[2].limbo == "" and states[EVERY_LEDGER].limbo == ""

    run(main())


def test_an_older_good_copy_counts_more_than_a_newer_bad_one():
    async def main():
        store = await filled()
        older = await store.index.get(1, 5)
        await store.flush((1, 5))
        newer = await store.index.get(1, 5)
        store.disk.flip_bit(log_path(newer.log_id), 8 * (newer.position + 200))
        await make_anew(store, ALL_KNOWN)
        assert await store.index.get(1, 5) == older

    run(main())


def test_records_that_were_zeroed_are_missed_by_the_map():
    async def main():
        store = await filled()
        first = await store.index.get(1, 0)
        inode = store.disk.inode_of(log_path(first.log_id))
        inode.cache[first.position : first.position + 4096] = bytes(4096)
        await make_anew(store, ALL_KNOWN)
        assert (await states_of(store))[1].limbo == "lost"

    run(main())


def test_damage_of_nobody_knows_whom_puts_every_ledger_in_limbo():
    """A log without footer cannot tell a torn end from acknowledged entries that rotted."""

    async def main():
        store = await filled()
        last = int(store.names()[-1].split(".")[0])
        size = len(store.disk.content(log_path(last)))
        store.disk.truncate(log_path(last), size - 4096 - RECORD_BYTES // 2)
        inode = store.disk.inode_of(log_path(last))
        inode.cache[-200:] = b"?" * 200
        await make_anew(store, ALL_KNOWN)
        assert (await states_of(store))[EVERY_LEDGER].limbo == "lost"

    run(main())


def test_a_replayed_record_does_not_take_back_the_limbo():
    """The journal has what was known at first contact; the rebuilt state is of later."""

    async def main():
        store = await filled()
        await make_anew(store)
        rebuilt = (await states_of(store))[1]
        assert merge_by_revision(LedgerState(1, revision=5), rebuilt).limbo == "lost"

    run(main())


def test_a_compaction_that_was_not_finished_is_no_obstacle():
    async def main():
        store = await LogStore().start()
        await store.fill(1, 2, count=ONE_LOG)
        copy = await store.logs.begin_copy()
        await copy.append([(2, e, text(2, e)) for e in range(ONE_LOG)])
        await store.logs.publish_copy(copy, store.logs.sealed_ids()[-1])
        await store.logs.begin_copy()
        await store.crash()
        await make_anew(store)
        assert await store.stored(1) == [*range(ONE_LOG)]
        assert await store.stored(2) == [*range(ONE_LOG)]
        assert (await store.index.get(2, 40)).log_id == copy.log_id

    run(main())


@pytest.mark.parametrize("keep", ["none", "random", "all"])
def test_interrupted_anywhere_no_bookie_starts_on_it_and_the_command_finishes_it(keep):
    """Stopped before each operation of the disk that changes a name, with or without power."""

    async def main():
        step, done = 0, False
        while not done:
            store = await filled()
            done = await stopped_at(store, step)
            store.disk.crash(keep)
            begun = any(path == MARKER for path in store.disk.paths())
            if begun:
                with pytest.raises(DiskFailed, match="--rebuild-index"):
                    await refuse_half_rebuilt(store.disk)
                await make_anew(store, ALL_KNOWN)
            await store.start()
            for ledger_id in (1, 2, 3):
                assert await store.stored(ledger_id) == [*range(120)], step
            step += 1
        assert step > 6

    run(main())


async def stopped_at(store, step):
    class Stop(BaseException):
        pass

    count = 0

    def counted(plain):
        async def operation(*arguments, **more):
            nonlocal count
            count += 1
            if count > step:
                raise Stop
            return await plain(*arguments, **more)

        return operation

    names = ("create", "rename", "remove", "sync_dir")
    for name in names:
        setattr(store.disk, name, counted(getattr(store.disk, name)))
    try:
        await make_anew(store, ALL_KNOWN)
        done = True
    except Stop:
        done = False
    for name in names:
        delattr(store.disk, name)
    return done


def test_on_a_real_disk_with_the_real_index(tmp_path):
    async def main():
        disk = OsDisk(tmp_path)
        index = await RocksIndex.open(tmp_path / INDEX)
        logs = await EntryLogs.open(disk, SMALL_LOGS)
        places = await logs.write((i, e, text(i, e)) for i in (1, 2) for e in range(60))
        await index.put(places)
        await index.sync()
        await index.close()
        await logs.close()
        for name in ("CURRENT", "IDENTITY"):
            (tmp_path / INDEX / name).write_bytes(b"rot")
        for _ in range(2):  # and again, over what the first one left
            found = await rebuild(
                disk, HERE, lambda folder: RocksIndex.open(tmp_path / folder), SMALL_LOGS, ALL_KNOWN
            )
            assert (found.entries, found.logs) == (120, 2)
        index = await RocksIndex.open(tmp_path / INDEX)
        assert await index.range(2, 0, 100, 1 << 60) == places[60:]
        assert [state.ledger_id for state in await index.ledgers()] == [1, 2, 3, EVERY_LEDGER]
        await index.close()
        left = sorted(path.name for path in tmp_path.iterdir())
        assert left == ["entrylog", "index", "index.damaged"]
        disk.shut_down()

    asyncio.run(main())


def test_the_marker_is_refused_by_name_and_nothing_else_is():
    async def main():
        store = await filled()
        await refuse_half_rebuilt(store.disk)
        await store.disk.create(MARKER)
        with pytest.raises(DiskFailed):
            await refuse_half_rebuilt(store.disk)

    run(main())
