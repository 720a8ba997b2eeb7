import asyncio

import pytest

from bookie_server.disk.interface import DiskFailed
from bookie_server.journal.format import Record, RecordKind
from bookie_server.logs.index import (
    EVERY_LEDGER,
    IndexDamaged,
    LedgerState,
)
from bookie_server.start.applier import RecordApplier
from tests.simulation.disk import SimDisk
from tests.simulation.loop import run
from tests.unit.bookie_server.node import CONFIG, KIB
from tests.unit.bookie_server.several_journals import HOME, added, ids, opened, placed, state


def test_entries_of_many_ledgers_in_one_batch_are_all_put():
    async def scenario():
        storage = await opened(SimDisk())
        replayed = RecordApplier(storage)
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
        replayed = RecordApplier(storage)
        await replayed.apply([state(1), *added(1, 0, payload=b"a"), *added(1, 0, payload=b"b")])
        assert bytes((await storage.reader.read(1, range(1), 1000)).entries[0]).endswith(b"b")

    run(scenario())


@pytest.mark.parametrize("found", [added(1, 0), [Record(RecordKind.FENCE, 1, -1, b"", 0)]])
def test_a_ledger_whose_own_record_is_missing_before_the_first_that_needs_it_is_in_limbo(found):
    async def scenario():
        storage = await opened(SimDisk())
        await RecordApplier(storage).apply([*found, *added(2, 0), state(2)])
        known = storage.state(1)
        assert known is not None
        assert (storage.limbo(1), known.met) == ("lost", False)

    run(scenario())


def test_more_than_the_write_cache_holds_is_flushed_beside_the_replay():
    async def scenario():
        storage = await opened(SimDisk())
        replayed = RecordApplier(storage)
        most = 0
        for first in range(0, 400, 10):
            batch = added(1, *range(first, first + 10), payload=bytes(4 * KIB))
            await replayed.apply([state(1), *batch])
            most = max(most, storage.cache.unflushed_bytes)
        await replayed.end()
        await storage.flush()
        assert await ids(storage, 1) == list(range(400))
        assert CONFIG.write_cache_bytes // 2 < most <= CONFIG.write_cache_bytes

    run(scenario())


def test_a_flush_that_fails_ends_the_replay():
    async def scenario():
        disk = SimDisk()
        storage = await opened(disk)
        replayed = RecordApplier(storage)
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
        replayed = RecordApplier(storage)
        big = added(1, *range(30), payload=bytes(4 * KIB))
        await replayed.apply([state(1), *big, *big])
        assert storage.is_flushing
        replayed.cancel()
        await asyncio.sleep(1)
        assert storage.is_flushing and storage.flushes == 0

    run(scenario())


def logs_of(disk: SimDisk) -> list[str]:
    return [path for path in disk.paths() if path.startswith("entrylog/")]


def test_a_place_is_put_into_the_index_and_nothing_is_written_for_it():
    async def scenario():
        disk = SimDisk()
        storage = await opened(disk)
        places = await placed(storage, 1, 0, 1)
        replayed = RecordApplier(storage)
        await replayed.apply([state(1, **HOME)])
        await replayed.add_locations("ledger-1", 1, places)
        assert list(await storage.reader.stored(1, 0, 9)) == [0, 1]
        files = logs_of(disk)
        await replayed.end()
        await storage.flush()
        assert await ids(storage, 1) == [0, 1]
        assert logs_of(disk) == files
        assert storage.limbo(1) == ""

    run(scenario())


@pytest.mark.parametrize("flushed", [False, True])
def test_an_entry_that_is_known_otherwise_counts_before_its_place(flushed):
    async def scenario():
        storage = await opened(SimDisk())
        replayed = RecordApplier(storage)
        await replayed.apply([state(1, **HOME), *added(1, 1, payload=b"another")])
        if flushed:
            await storage.flush()
        await replayed.add_locations("ledger-1", 1, await placed(storage, 1, 0, 1, 2))
        await storage.flush()
        assert await ids(storage, 1) == [0, 1, 2]
        assert bytes((await storage.reader.read(1, range(1, 2), 1000)).entries[1]).endswith(
            b"another"
        )

    run(scenario())


def test_of_two_places_of_an_entry_in_one_piece_of_a_log_the_later_counts():
    async def scenario():
        storage = await opened(SimDisk())
        places = [*await placed(storage, 1, 0), *await placed(storage, 1, 0)]
        await RecordApplier(storage).apply([state(1, **HOME)])
        await RecordApplier(storage).add_locations("ledger-1", 1, places)
        await storage.flush()
        (store,) = storage.stores
        assert await store.index.range(1, 0, 9, 1 << 20) == places[1:]

    run(scenario())


def test_a_place_that_is_replayed_again_changes_nothing_that_was_moved_since():
    async def scenario():
        storage = await opened(SimDisk())
        places = await placed(storage, 1, 0)
        await RecordApplier(storage).apply([state(1, **HOME)])
        await RecordApplier(storage).add_locations("ledger-1", 1, places)
        await storage.flush()
        (store,) = storage.stores
        (old,) = await store.index.range(1, 0, 9, 1 << 20)
        moved = old._replace(log_id=77)
        await store.index.move([(old, moved)])
        await RecordApplier(storage).add_locations("ledger-1", 1, places)
        await storage.flush()
        assert await store.index.range(1, 0, 9, 1 << 20) == [moved]

    run(scenario())


@pytest.mark.parametrize(
    "more",
    [
        {"deleted": True, **HOME},
        {"directories": ("ledger-2",), "given_up": (("ledger-1", 1),)},
        {"directories": (), "given_up": (("ledger-1", 1),)},
        {"directories": ("ledger-2",)},
    ],
)
def test_places_do_not_count_of_a_ledger_that_is_deleted_or_does_not_record_the_directory(more):
    async def scenario():
        storage = await opened(SimDisk())
        await RecordApplier(storage).apply([state(1, **more)])
        known = storage.state(1)
        await RecordApplier(storage).add_locations("ledger-1", 1, await placed(storage, 1, 0))
        assert not await storage.reader.stored(1, 0, 9)
        assert storage.state(1) == known

    run(scenario())


@pytest.mark.parametrize("limbo", [None, ""])
def test_places_of_a_ledger_that_nobody_knows_are_those_of_one_that_was_forgotten(limbo):
    async def scenario():
        storage = await opened(SimDisk())
        if limbo is not None:
            storage.set_state(LedgerState(EVERY_LEDGER, limbo=limbo))
        await RecordApplier(storage).add_locations("ledger-1", 1, await placed(storage, 1, 0))
        assert not await storage.reader.stored(1, 0, 9) and storage.state(1) is None

    run(scenario())


@pytest.mark.parametrize("limbo", ["torn", "lost"])
def test_places_of_a_ledger_that_nobody_knows_count_once_records_of_any_may_be_lost(limbo):
    """A record that rotted in the last write of a journal looks torn."""

    async def scenario():
        storage = await opened(SimDisk())
        storage.set_state(LedgerState(EVERY_LEDGER, limbo=limbo))
        places = await placed(storage, 1, 0)
        await RecordApplier(storage).add_locations("ledger-1", 1, places)
        await storage.flush()
        assert await ids(storage, 1) == [0]
        known = storage.state(1)
        assert known is not None
        assert (known.fenced, known.limbo, known.met) == (limbo == "lost", limbo, False)
        assert known.directories == ("ledger-1",)

    run(scenario())


@pytest.mark.parametrize("doubt", ["ledger", "every"])
def test_a_place_where_its_ledger_went_on_counts_if_the_record_of_that_may_be_lost(doubt):
    async def scenario():
        storage = await opened(SimDisk())
        more = {"limbo": "lost"} if doubt == "ledger" else {}
        await RecordApplier(storage).apply([state(1, directories=("ledger-2",), **more)])
        if doubt == "every":
            storage.set_state(LedgerState(EVERY_LEDGER, limbo="torn"))
        await RecordApplier(storage).add_locations("ledger-1", 1, await placed(storage, 1, 0))
        assert storage.state(1).directories == ("ledger-1", "ledger-2")
        assert list(await storage.reader.stored(1, 0, 9)) == [0]

    run(scenario())


def test_a_place_whose_ledger_record_is_damaged_counts_in_its_directory():
    """Of the ledger there was a record without one."""

    async def scenario():
        storage = await opened(SimDisk())
        await RecordApplier(storage).apply([Record(RecordKind.FENCE, 1, -1, b"", 0)])
        assert storage.state(1).directories == ()
        await RecordApplier(storage).add_locations("ledger-1", 1, await placed(storage, 1, 0))
        await storage.flush()
        assert await ids(storage, 1) == [0]
        assert storage.limbo(1) == "lost" and not storage.state(1).met
        assert storage.state(1).directories == ("ledger-1",)

    run(scenario())


def test_a_place_counts_though_a_damaged_index_cannot_say_what_it_has(caplog):
    async def scenario():
        storage = await opened(SimDisk())
        places = await placed(storage, 1, 0, 1)
        await RecordApplier(storage).apply([state(1, **HOME), *added(1, 1, payload=b"another")])
        (store,) = storage.stores
        whole = store.index.range

        async def damaged(*_):
            raise IndexDamaged("a table is bad")

        store.index.range = damaged
        await RecordApplier(storage).add_locations("ledger-1", 1, places)
        store.index.range = whole
        await storage.flush()
        assert await ids(storage, 1) == [0, 1]
        assert bytes((await storage.reader.read(1, range(1, 2), 1000)).entries[1]).endswith(
            b"another"
        )
        assert "a table is bad" in caplog.text

    run(scenario())


def test_more_places_than_the_write_cache_holds_are_flushed_beside_the_replay():
    async def scenario():
        storage = await opened(SimDisk())
        replayed = RecordApplier(storage)
        await replayed.apply([state(1, **HOME)])
        for first in range(0, 3000, 500):
            places = await placed(storage, 1, *range(first, first + 500))
            await replayed.add_locations("ledger-1", 1, places)
            assert storage.cache.unflushed_bytes <= CONFIG.write_cache_bytes
        await replayed.end()
        assert storage.flushes
        await storage.flush()
        assert await ids(storage, 1) == list(range(3000))

    run(scenario())
