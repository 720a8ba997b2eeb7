import asyncio

import pytest

from bookie_server.directory_store import Directories, JournalDirectory, LedgerDirectory
from bookie_server.disk import DiskFailed
from bookie_server.entry_index import LedgerState, Location, encode_ledger_state
from bookie_server.journal_format import Kind, Record, body_crc
from bookie_server.ledger_storage import LedgerStorage
from bookie_server.placed import Place, encode_place
from bookie_server.replayed import Replayed
from tests.simulation.disk import SimDisk
from tests.simulation.index import SimIndex
from tests.simulation.loop import run
from tests.unit.bookie_server.node import CONFIG, KIB, entry


def state(ledger_id: int, **more) -> Record:
    body = encode_ledger_state(LedgerState(ledger_id, revision=1, **more))
    return Record(Kind.LEDGER, ledger_id, -1, body, body_crc(body))


def added(ledger_id: int, *entry_ids: int, payload: bytes = b"payload") -> list[Record]:
    bodies = [(e, entry(ledger_id, e, payload)) for e in entry_ids]
    return [Record(Kind.ENTRY, ledger_id, e, body, 0) for e, body in bodies]


async def placed(storage: LedgerStorage, ledger_id: int, *entry_ids: int) -> list[Record]:
    """Records of entries that lie in the storage's only directory by now."""
    (store,) = storage.stores
    entries = [(ledger_id, each, entry(ledger_id, each)) for each in entry_ids]
    return [encode_place(Place(store.id, p)) for p in await store.placed_log.put(1, entries)]


def elsewhere(ledger_id: int, entry_id: int) -> Record:
    """A place in a directory that is not there."""
    return encode_place(Place("ledger-9", Location(ledger_id, entry_id, 1, 4096, 71)))


async def opened(disk: SimDisk) -> LedgerStorage:
    index = await SimIndex.open(disk)
    journal = JournalDirectory("journal-1", SimDisk())
    directories = Directories([journal], [LedgerDirectory("ledger-1", disk, index)])
    return (await LedgerStorage.open(directories, CONFIG))[0]


async def ids(storage: LedgerStorage, ledger_id: int) -> list[int]:
    return list((await storage.read(ledger_id, 0, 10_000, 1 << 30)).entries)


def test_entries_of_many_ledgers_in_one_batch_are_all_put():
    async def scenario():
        storage = await opened(SimDisk())
        replayed = Replayed(storage)
        mixed = [r for e in range(50) for i in (1, 2, 3) for r in added(i, e)]
        await replayed.apply([state(1), state(2), state(3), *mixed])
        await replayed.end()
        for ledger_id in (1, 2, 3):
            assert await ids(storage, ledger_id) == list(range(50))
            assert storage.limbo(ledger_id) == ""

    run(scenario())


def test_the_later_of_two_copies_in_a_batch_counts():
    async def scenario():
        storage = await opened(SimDisk())
        replayed = Replayed(storage)
        await replayed.apply([state(1), *added(1, 0, payload=b"a"), *added(1, 0, payload=b"b")])
        assert bytes((await storage.read(1, 0, 0, 1000)).entries[0]).endswith(b"b")

    run(scenario())


@pytest.mark.parametrize("found", [added(1, 0), [Record(Kind.FENCE, 1, -1, b"", 0)]])
def test_a_ledger_whose_own_record_is_missing_before_the_first_that_needs_it_is_in_limbo(found):
    async def scenario():
        storage = await opened(SimDisk())
        await Replayed(storage).apply([*found, *added(2, 0), state(2)])
        known = storage.state(1)
        assert known is not None
        assert (storage.limbo(1), known.met) == ("lost", False)

    run(scenario())


def test_more_than_the_write_cache_holds_is_flushed_beside_the_replay():
    async def scenario():
        storage = await opened(SimDisk())
        replayed = Replayed(storage)
        most = 0
        for first in range(0, 400, 10):
            batch = added(1, *range(first, first + 10), payload=bytes(4 * KIB))
            await replayed.apply([state(1), *batch])
            most = max(most, storage.unflushed_bytes)
        await replayed.end()
        await storage.flush()
        assert await ids(storage, 1) == list(range(400))
        assert CONFIG.write_cache_bytes // 2 < most <= CONFIG.write_cache_bytes

    run(scenario())


def test_a_flush_that_fails_ends_the_replay():
    async def scenario():
        disk = SimDisk()
        storage = await opened(disk)
        replayed = Replayed(storage)
        disk.faults.append_fails = 1
        with pytest.raises(DiskFailed):
            for first in range(0, 400, 10):
                batch = added(1, *range(first, first + 10), payload=bytes(4 * KIB))
                await replayed.apply([state(1), *batch])
            await replayed.end()

    run(scenario())


def test_a_replay_that_is_given_up_leaves_no_flush_behind():
    async def scenario():
        storage = await opened(SimDisk())
        replayed = Replayed(storage)
        big = added(1, *range(30), payload=bytes(4 * KIB))
        await replayed.apply([state(1), *big, *big])
        assert storage.is_flushing
        replayed.cancel()
        await asyncio.sleep(1)
        assert storage.is_flushing and storage.flushes == 0

    run(scenario())


HOME = {"directories": ("ledger-1",)}


def test_a_place_is_put_into_the_index_and_nothing_is_written_for_it():
    async def scenario():
        disk = SimDisk()
        storage = await opened(disk)
        records = await placed(storage, 1, 0, 1)
        replayed = Replayed(storage)
        await replayed.apply([state(1, **HOME), *records])
        assert list(await storage.stored(1, 0, 9)) == [0, 1]
        files = [path for path in disk.paths() if path.startswith("entrylog/")]
        await replayed.end()
        await storage.flush()
        assert await ids(storage, 1) == [0, 1]
        assert [path for path in disk.paths() if path.startswith("entrylog/")] == files
        assert storage.limbo(1) == "" and not replayed.absent

    run(scenario())


@pytest.mark.parametrize("first", ["place", "entry"])
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("flushed", [False, True])
def test_an_entry_that_came_otherwise_counts_before_its_place(first, batches, flushed):
    async def scenario():
        storage = await opened(SimDisk())
        records = [await placed(storage, 1, 0), added(1, 0, payload=b"another")]
        if first == "entry":
            records.reverse()
        replayed = Replayed(storage)
        await replayed.apply([state(1, **HOME)])
        if batches == 1:
            await replayed.apply([*records[0], *records[1]])
        for each in records if batches == 2 else ():
            await replayed.apply(each)
            if flushed:
                await storage.flush()
        await storage.flush()
        assert bytes((await storage.read(1, 0, 0, 1000)).entries[0]).endswith(b"another")

    run(scenario())


def test_a_place_that_is_replayed_again_changes_nothing_that_was_moved_since():
    async def scenario():
        storage = await opened(SimDisk())
        records = [state(1, **HOME), *await placed(storage, 1, 0)]
        await Replayed(storage).apply(records)
        await storage.flush()
        (store,) = storage.stores
        (old,) = await store.index.range(1, 0, 9, 1 << 20)
        moved = old._replace(log_id=77)
        await store.index.move([(old, moved)])
        await Replayed(storage).apply(records)
        await storage.flush()
        assert await store.index.range(1, 0, 9, 1 << 20) == [moved]

    run(scenario())


def test_places_of_a_deleted_ledger_are_none():
    async def scenario():
        storage = await opened(SimDisk())
        records = [state(1, deleted=True, **HOME), *await placed(storage, 1, 0), elsewhere(1, 1)]
        replayed = Replayed(storage)
        await replayed.apply(records)
        assert not await storage.stored(1, 0, 9) and not replayed.absent

    run(scenario())


def test_places_that_count_nowhere_are_told_unless_the_entry_is_here():
    async def scenario():
        storage = await opened(SimDisk())
        replayed = Replayed(storage)
        directories = {"directories": ("ledger-9", "ledger-1")}
        here = [*await placed(storage, 1, 0), *added(1, 1)]
        lost = [elsewhere(1, e) for e in (1, 2)]
        await replayed.apply([state(1, **directories), state(2, **HOME), *here, *lost])
        await replayed.apply([elsewhere(2, 5)])
        assert list(await storage.stored(1, 0, 9)) == [1, 0]
        assert {i: list(each) for i, each in replayed.absent.items()} == {1: [2], 2: [5]}

    run(scenario())


def test_a_place_whose_ledger_record_is_damaged_counts_in_the_directory_it_names():
    async def scenario():
        storage = await opened(SimDisk())
        await Replayed(storage).apply(await placed(storage, 1, 0))
        await storage.flush()
        assert await ids(storage, 1) == [0]
        assert storage.limbo(1) == "lost" and not storage.state(1).met
        assert storage.state(1).directories == ("ledger-1",)

    run(scenario())


def test_more_places_than_the_write_cache_holds_are_flushed_beside_the_replay():
    async def scenario():
        storage = await opened(SimDisk())
        replayed = Replayed(storage)
        for first in range(0, 3000, 500):
            records = await placed(storage, 1, *range(first, first + 500))
            await replayed.apply([state(1, **HOME), *records])
            assert storage.unflushed_bytes <= CONFIG.write_cache_bytes
        await replayed.end()
        assert storage.flushes
        await storage.flush()
        assert await ids(storage, 1) == list(range(3000))

    run(scenario())
