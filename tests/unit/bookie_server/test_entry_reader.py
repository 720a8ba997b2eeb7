"""Reads through caches, index and logs: what is fresh, what is quarantined, what is ahead."""

import asyncio
import random

import pytest

from bookie_server.api.entry import Buffer
from bookie_server.disk.interface import DiskFailed
from bookie_server.logs.entry_log import log_path
from bookie_server.storage import entry_reader
from bookie_server.storage.entry_reader import FailedReadLog, Undeliverable
from tests.kit.settings import with_settings
from tests.simulation.disk import SimDisk
from tests.simulation.loop import current
from tests.unit.bookie_server.entry_reading import SMALL, Reading, reading
from tests.unit.bookie_server.node import KIB, entry

READ_S = 0.01


def test_an_entry_is_read_from_the_disk_once():
    async def test(r: Reading) -> None:
        await r.store_entries((1, 0), (1, 1))
        first = await r.read(0, 1)
        assert await r.read(0, 1) == first
        assert r.reads == [(1, 0), (1, 1)]

    reading(test)


def test_without_a_read_cache_every_read_goes_to_the_disk():
    async def test(r: Reading) -> None:
        await r.store_entries((1, 0))
        await r.read(0, 0)
        await r.read(0, 0)
        assert r.reads == [(1, 0), (1, 0)]

    reading(test, with_settings(SMALL, read_cache_bytes=0))


def test_an_overwritten_entry_is_never_served_from_the_read_cache():
    async def test(r: Reading) -> None:
        await r.store_entries((1, 0), payload=b"old")
        await r.read(0, 0)
        r.cache.active.put(1, 0, entry(1, 0, b"new"))
        r.reader.drop_cached_entry(1, 0)
        await r.store_entries((1, 0), payload=b"new")  # its flush ...
        r.cache.swap()
        r.cache.drop_flushed()
        assert (await r.read(0, 0))[0] == entry(1, 0, b"new")

    reading(test)


def test_a_read_that_was_under_way_when_its_entry_was_overwritten_leaves_nothing_behind():
    async def test(r: Reading) -> None:
        await r.store_entries((1, 0), (1, 1), payload=b"old")
        r.disk.faults.read_s = (READ_S, READ_S)
        under_way = asyncio.ensure_future(r.read(0, 1))
        await asyncio.sleep(READ_S / 2)
        r.reader.drop_cached_entry(1, 0)
        await under_way
        await r.store_entries((1, 0), payload=b"new")
        assert (await r.read(0, 0))[0] == entry(1, 0, b"new")
        r.reads.clear()
        await r.read(1, 1)
        assert r.reads == [], "its neighbour was kept"

    reading(test)


def test_entries_of_a_deleted_ledger_are_not_served_from_the_read_cache():
    async def test(r: Reading) -> None:
        await r.store_entries((1, 0), (2, 0))
        await r.read(0, 0)
        await r.read(0, 0, ledger_id=2)
        await r.stores[0].index.delete_ledger(1)
        r.reader.drop_ledger(1)
        assert await r.read(0, 0) == {}
        assert 0 in await r.read(0, 0, ledger_id=2)

    reading(test)


def test_a_bad_entry_is_quarantined_and_the_others_of_the_same_read_are_served():
    async def test(r: Reading) -> None:
        places = await r.store_entries((1, 0), (1, 1), (1, 2), payload=b"payload")
        r.rot(log_path(places[1].log_id), places[1].position + 115)
        found = await r.read(0, 2)
        assert found[0] == entry(1, 0) and found[2] == entry(1, 2)
        assert isinstance(found[1], Undeliverable)
        assert r.quarantined == [(1, 1)]
        assert isinstance((await r.read(1, 1))[1], Undeliverable), "nothing bad is cached"

    reading(test)


def test_an_entry_whose_log_is_gone_is_looked_up_once_more():
    async def test(r: Reading) -> None:
        (old,) = await r.store_entries((1, 0))
        await r.reopen_logs()
        index_range = r.stores[0].index.range

        async def moved_meanwhile(*args):
            """The answer is the old place; compaction ends right after it."""
            await r.store_entries((1, 0))
            await r.disk.remove(log_path(old.log_id))
            r.stores[0].index.range = index_range
            return [old]

        r.stores[0].index.range = moved_meanwhile
        assert (await r.read(0, 0))[0] == entry(1, 0, b"x")
        assert r.quarantined == []

    reading(test)


def test_an_entry_whose_log_is_lost_is_undeliverable_and_quarantined():
    async def test(r: Reading) -> None:
        (place,) = await r.store_entries((1, 0))
        await r.reopen_logs()
        await r.disk.remove(log_path(place.log_id))
        assert isinstance((await r.read(0, 0))[0], Undeliverable)
        assert r.quarantined == [(1, 0)]

    reading(test)


def test_of_two_directories_that_hold_an_entry_the_later_is_read_first():
    async def test(r: Reading) -> None:
        r.stores.append(await r.store(SimDisk(random.Random(1))))
        await r.store_entries((1, 0), (1, 2), payload=b"old")
        await r.store_entries((1, 0), (1, 1), payload=b"new", at=1)
        found = await r.read(0, 5)
        assert list(found) == [0, 1, 2]
        assert found[0] == entry(1, 0, b"new")
        assert (await r.reader.headers(1, [0]))[0].payload_bytes == 3
        assert await r.reader.last_entry(1) == 2

    reading(test)


def test_an_entry_that_a_flush_moves_into_the_index_meanwhile_is_the_last_entry_all_the_time():
    async def test(r: Reading) -> None:
        r.cache.active.put(1, 5, entry(1, 5, b"new"))
        index = r.stores[0].index
        last_of_index = index.last

        async def last_before_the_flush(ledger_id: int) -> int | None:
            last = await last_of_index(ledger_id)
            await r.store_entries((1, 5), payload=b"new")
            r.cache.swap()
            r.cache.drop_flushed()
            return last

        index.last = last_before_the_flush
        assert await r.reader.last_entry(1) == 5

    reading(test)


@pytest.mark.parametrize("bad", [[0], [1], [0, 1]], ids=["first", "second", "both"])
def test_an_entry_in_two_directories_is_undeliverable_only_if_both_copies_are(bad):
    async def test(r: Reading) -> None:
        disks = [r.disk, SimDisk(random.Random(1))]
        r.stores.append(await r.store(disks[1]))
        for at in (0, 1):
            (place,) = await r.store_entries((1, 0), payload=b"payload", at=at)
            if at in bad:
                disks[at].flip_bit(log_path(place.log_id), 8 * (place.position + 115))
        found = (await r.read(0, 0))[0]
        header = (await r.reader.headers(1, [0]))[0]
        if len(bad) == 2:
            assert isinstance(found, Undeliverable) and isinstance(header, Undeliverable)
            assert set(r.quarantined) == {(1, 0)}
        else:
            assert found == entry(1, 0) and header.payload_bytes == 7
            assert r.quarantined == []

    reading(test)


def test_a_bad_copy_beside_one_that_cannot_be_read_now_is_quarantined():
    async def test(r: Reading) -> None:
        r.stores.append(await r.store(SimDisk(random.Random(1))))
        (place,) = await r.store_entries((1, 0), payload=b"payload")
        await r.store_entries((1, 0), payload=b"payload", at=1)

        async def fails(places):
            return [DiskFailed("EIO")] * len(places)

        r.stores[1].logs.read_run = fails
        r.rot(log_path(place.log_id), place.position + 115)
        assert isinstance((await r.read(0, 0))[0], Undeliverable)
        assert r.quarantined == [(1, 0)]

    reading(test)


def test_an_entry_that_moves_between_directories_while_it_is_looked_up_is_found():
    """The look-up has passed the directory that it moves to."""

    async def test(r: Reading) -> None:
        r.stores.append(await r.store(SimDisk(random.Random(1))))
        await r.store_entries((1, 0), at=1)
        index_range = r.stores[1].index.range

        async def moves_meanwhile(*args):
            r.stores[1].index.range = index_range
            await r.store_entries((1, 0), at=0)
            r.reader.note_move()
            await r.stores[1].index.delete(1, [0])
            return await index_range(*args)

        r.stores[1].index.range = moves_meanwhile
        assert (await r.read(0, 0))[0] == entry(1, 0, b"x")

    reading(test)


def test_an_index_that_cannot_be_read_is_an_error_and_no_absence():
    async def test(r: Reading) -> None:
        await r.store_entries((1, 0))

        async def fails(*args):
            raise DiskFailed("EIO")

        r.stores[0].index.range = fails
        with pytest.raises(DiskFailed):
            await r.read(0, 0)

    reading(test)


def test_places_apart_are_read_at_the_same_time():
    async def test(r: Reading) -> None:
        for number in range(8):
            await r.store_entries((1, number), (2, number), payload=bytes(KIB))
        await r.reader.read(2, range(1), 1)  # opens the log
        r.disk.faults.read_s = (READ_S, READ_S)
        began = current().time()
        assert len(await r.read(0, 7)) == 8
        assert current().time() - began < 2 * READ_S

    reading(test)


# -- read-ahead -------------------------------------------------------------------------------


async def _interleaved(r: Reading, count: int, size: int = KIB) -> None:
    for number in range(count):
        await r.store_entries((1, number), (2, number), payload=bytes(size))


def test_a_sequential_reader_finds_in_memory_what_comes_next():
    async def test(r: Reading) -> None:
        await _interleaved(r, 16)
        await r.read(0, 1)
        await r.read(2, 3)
        await asyncio.sleep(1)
        r.reads.clear()
        assert len(await r.read(4, 7)) == 4
        assert r.reads == []

    reading(test)


def test_nothing_is_read_ahead_of_reads_here_and_there():
    async def test(r: Reading) -> None:
        await _interleaved(r, 16)
        for number in (0, 5, 9, 3):
            await r.read(number, number)
        await asyncio.sleep(1)
        assert len(r.reads) == 4

    reading(test)


def test_nothing_is_read_ahead_of_reads_of_entries_that_lie_apart():
    async def test(r: Reading) -> None:
        await r.store_entries(*[(1, number) for number in range(30)], payload=bytes(4 * KIB))
        asked = []
        for first in range(0, 12, 3):  # each begins where the one before ended
            asked += [first, first + 2]
            found = await r.reader.read(1, (first, first + 2), 1 << 20)
            assert list(found.entries) == [first, first + 2]
            await asyncio.sleep(1)
        assert sorted(number for _, number in r.reads) == asked

    reading(test)


def test_no_request_takes_longer_because_more_is_read_ahead():
    async def test(r: Reading) -> None:
        await _interleaved(r, 32)
        await r.read(0, 1)
        r.disk.faults.read_s = (READ_S, READ_S)
        began = current().time()
        await r.read(2, 3)  # begins to read ahead
        await r.read(20, 21)  # elsewhere
        assert current().time() - began <= 2 * READ_S + 1e-6

    reading(test)


def test_a_reader_that_arrives_where_it_is_being_read_ahead_waits_for_that_read_only():
    async def test(r: Reading) -> None:
        await _interleaved(r, 32)
        await r.read(0, 1)
        await r.read(2, 3)  # read-ahead begins at entry 4
        r.disk.faults.read_s = (READ_S, READ_S)
        await asyncio.sleep(READ_S / 2)
        began = current().time()
        await r.read(4, 4)
        assert current().time() - began <= READ_S + 1e-6
        await asyncio.sleep(1)
        assert r.reads.count((1, 4)) == 1

    reading(test)


def test_read_ahead_never_reads_twice_what_a_fast_reader_asks_for_itself():
    async def test(r: Reading) -> None:
        await _interleaved(r, 64)
        r.disk.faults.read_s = (READ_S, READ_S)
        for number in range(0, 64, 8):
            await r.read(number, number + 7)
        await asyncio.sleep(1)
        mine = [one for one in r.reads if one[0] == 1]
        assert len(mine) == 64

    reading(test)


def test_what_is_read_ahead_stays_within_its_bytes():
    async def test(r: Reading) -> None:
        await _interleaved(r, 64, size=4 * KIB)
        await r.read(0, 0)
        await r.read(1, 1)
        await asyncio.sleep(1)
        ahead = [one for one in r.reads if one[0] == 1 and one[1] > 1]
        assert 0 < len(ahead) <= SMALL.read_ahead_bytes // (4 * KIB) + 1
        assert len(r.reads) * 4 * KIB <= SMALL.read_cache_bytes

    reading(test)


def test_what_is_read_ahead_never_hides_an_entry_that_waits_in_the_write_cache():
    async def test(r: Reading) -> None:
        await _interleaved(r, 8)
        newer: Buffer = entry(1, 5, b"newer")
        r.cache.active.put(1, 5, newer)
        r.reader.drop_cached_entry(1, 5)
        await r.read(0, 1)
        await r.read(2, 3)
        await asyncio.sleep(1)
        await r.store_entries((1, 5), payload=b"newer")
        r.cache.swap()
        r.cache.drop_flushed()
        assert (await r.read(5, 5))[5] == newer

    reading(test)


def test_entries_too_large_to_be_kept_are_not_read_ahead():
    async def test(r: Reading) -> None:
        await _interleaved(r, 8, size=40 * KIB)  # more than 1/8 of the cache
        await r.read(0, 0)
        await r.read(1, 1)
        await asyncio.sleep(1)
        assert [one for one in r.reads if one[0] == 1] == [(1, 0), (1, 1)]

    reading(test)


def test_what_read_ahead_finds_bad_is_quarantined_only_when_somebody_asks_for_it():
    """Else each comparison of what belongs here would find it again, behind the ledger's end."""

    async def test(r: Reading) -> None:
        places = await r.store_entries(*((1, n) for n in range(8)), payload=bytes(KIB))
        bad = places[6]
        r.rot(log_path(bad.log_id), bad.position + 115)
        await r.read(0, 1)
        await r.read(2, 3)  # begins to read ahead
        await asyncio.sleep(1)
        assert (1, 6) in r.reads
        assert r.quarantined == []
        assert isinstance((await r.read(4, 7))[6], Undeliverable)
        assert r.quarantined == [(1, 6)]

    reading(test)


def test_closing_ends_what_is_under_way_ahead():
    async def test(r: Reading) -> None:
        await _interleaved(r, 16)
        await r.read(0, 1)
        await r.read(2, 3)
        await r.reader.close()
        r.reads.clear()
        await r.read(0, 15)
        assert r.reads == [(1, e) for e in range(16)], "nothing is kept"

    reading(test)


@pytest.mark.parametrize("replaced", ["in the write cache", "in another directory's log"])
def test_a_look_up_that_stopped_at_its_bytes_denies_nothing_behind_it(replaced):
    async def test(r):
        await r.store_entries((1, 0), (1, 1), (1, 2), payload=b"x" * KIB)
        if replaced == "in the write cache":
            r.cache.active.put(1, 1, entry(1, 1, b"y"))
        else:
            r.stores.append(await r.store(SimDisk(random.Random(1))))
            await r.store_entries((1, 1), payload=b"y", at=1)
        found = await r.reader.read(1, range(3), 2 * KIB)
        assert (list(found.entries), found.known_through) == ([0, 1], 1)
        found = await r.reader.read(1, range(2, 3), 2 * KIB)
        assert (list(found.entries), found.known_through) == ([2], 2)

    reading(test, with_settings(SMALL, read_cache_bytes=0))


def test_a_ledger_of_many_bad_entries_is_told_of_in_few_lines_that_count(caplog):
    bad = FailedReadLog()
    for entry_id in range(1000):
        bad.count(7, entry_id, "damaged")
    assert len(caplog.messages) == 4
    assert "ledger 7: entry 999 cannot be delivered: damaged (1000" in caplog.messages[-1]


def test_each_ledger_is_told_of_and_what_is_remembered_is_bounded(caplog, monkeypatch):
    monkeypatch.setattr(entry_reader, "BAD_LEDGERS_MAX", 3)
    bad = FailedReadLog()
    for ledger_id in range(10):
        bad.count(ledger_id, 0, "damaged")
    assert len(caplog.messages) == 10
    bad.count(0, 0, "damaged")
    assert len(caplog.messages) == 11, "of the first one nothing is remembered any more"
