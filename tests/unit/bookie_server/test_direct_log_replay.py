"""A start reads what direct logs hold beyond their marks: all that was told is there, and what
cannot be read is said to be torn or lost, as it was proven to be synced or not."""

import asyncio
import random

import pytest

from bookie_server.disk.interface import DiskFailed
from bookie_server.journal.format import Record
from bookie_server.logs.entry_log import BLOCK_BYTES, FOLDER, log_path, record_end
from bookie_server.logs.index import EVERY_LEDGER, LedgerState, Location
from bookie_server.logs.scan import read_map
from bookie_server.start.applier import RecordApplier, replay_direct_logs
from bookie_server.storage.directories import Directories, JournalDirectory, LedgerDirectory
from bookie_server.storage.storage import LedgerStorage
from tests.simulation.disk import SimDisk
from tests.simulation.index import SimIndex
from tests.simulation.loop import run
from tests.unit.bookie_server.node import CONFIG, KIB, entry
from tests.unit.bookie_server.several_journals import HOME, added, ids, opened, state

LARGE = 9 * KIB
KNOWN = [state(i, **HOME) for i in range(1, 5)]


def large(ledger_id: int, entry_id: int) -> bytes:
    return entry(ledger_id, entry_id, bytes([(7 * ledger_id + entry_id) % 251]) * LARGE)


async def put(storage: LedgerStorage, ledger_id: int, *entry_ids: int) -> list[Location]:
    """One write, if nothing else is written."""
    entries = [(ledger_id, each, large(ledger_id, each)) for each in entry_ids]
    return await storage.stores[0].direct_log.put(ledger_id, entries)


async def written(disk: SimDisk, *writes: tuple[int, ...]) -> list[list[Location]]:
    """What a run left that placed these (ledger, entry ids) and was cut off."""
    storage = await opened(disk)
    places = [await put(storage, *each) for each in writes]
    crash(storage, disk)
    return places


def crash(storage: LedgerStorage, disk: SimDisk) -> None:
    storage.abandon()
    disk.crash("none")


async def started(
    disk: SimDisk, records: list[Record] = KNOWN, every: str | None = ""
) -> LedgerStorage:
    """A start that found these records in the journals, after its replay."""
    storage = await opened(disk)
    if every is not None and storage.state(EVERY_LEDGER) is None:
        storage.set_state(LedgerState(EVERY_LEDGER, limbo=every))
    replayed = RecordApplier(storage)
    await replayed.apply(records)
    await replay_direct_logs(storage, replayed)
    await replayed.end()
    return storage


async def finished(storage: LedgerStorage) -> None:
    """As open_storage goes on."""
    while storage.is_flushing or storage.has_unflushed:
        await storage.flush()
    await storage.forget_replayed_logs()


async def marks(storage: LedgerStorage) -> dict[int, int]:
    return await storage.stores[0].index.marked_logs()


def limbo(storage: LedgerStorage) -> dict[int, str]:
    """Of the ledgers, and of all of them, that are in limbo themselves."""
    return {each.ledger_id: each.limbo for each in storage.states() if each.limbo}


async def served(storage: LedgerStorage, ledger_id: int, *entry_ids: int) -> None:
    found = (await storage.reader.read(ledger_id, range(10_001), 1 << 30)).entries
    assert {each: bytes(found[each]) for each in found} == {
        each: large(ledger_id, each) for each in entry_ids
    }


def test_what_was_told_is_there_after_a_crash_and_is_not_written_again():
    async def scenario():
        disk = SimDisk()
        await written(disk, (1, 0, 1), (2, 0), (1, 2))
        logs = disk.content(log_path(1))
        storage = await started(disk)
        assert sorted(await storage.reader.stored(1, 0, 9)) == [0, 1, 2]
        await finished(storage)
        await served(storage, 1, 0, 1, 2)
        await served(storage, 2, 0)
        assert limbo(storage) == {} and await marks(storage) == {}
        assert disk.content(log_path(1)) == logs
        assert [each for each in disk.paths() if each.startswith(FOLDER)] == [log_path(1)]
        crash(storage, disk)
        storage = await opened(disk)
        assert await ids(storage, 1) == [0, 1, 2]
        assert storage.stores[0].logs.sealed_ids() == [1]

    run(scenario())


def test_only_what_lies_beyond_the_mark_is_read():
    async def scenario():
        disk = SimDisk()
        storage = await opened(disk)
        first = await put(storage, 1, 0, 1)
        index = storage.stores[0].index
        await index.mark_logs({1: record_end(first[0])})
        await index.sync()
        await put(storage, 2, 0)
        crash(storage, disk)
        storage = await started(disk)
        assert sorted(await storage.reader.stored(1, 0, 9)) == [1]
        assert sorted(await storage.reader.stored(2, 0, 9)) == [0]
        assert limbo(storage) == {}

    run(scenario())


@pytest.mark.parametrize("moment", ["read", "half flushed", "flushed", "forgotten"])
def test_a_start_that_is_cut_off_at_any_moment_is_repeated(moment):
    async def scenario():
        disk = SimDisk()
        places = await written(disk, (1, *range(4)), (2, 0))
        disk.flip_bit(log_path(1), 8 * (places[0][2].position + 3000))
        storage = await started(disk)
        if moment == "half flushed":
            disk.faults.sync_s = (1.0, 1.0)
            flushing = asyncio.ensure_future(storage.flush())
            await asyncio.sleep(0.5)
            assert not flushing.done()
        elif moment != "read":
            await storage.flush()
        if moment == "forgotten":
            await storage.forget_replayed_logs()
        crash(storage, disk)
        disk.speed_up()
        storage = await started(disk)
        assert limbo(storage) == {1: "lost"}
        await finished(storage)
        await served(storage, 1, 0, 1, 3)
        await served(storage, 2, 0)
        assert await marks(storage) == {}

    run(scenario())


def test_logs_of_several_runs_that_never_came_through_are_all_read():
    async def scenario():
        disk = SimDisk()
        for entry_id in range(3):
            await written(disk, (1, entry_id))
        storage = await started(disk)
        assert len(await marks(storage)) == 3
        await finished(storage)
        await served(storage, 1, 0, 1, 2)
        assert limbo(storage) == {}

    run(scenario())


# -- logs that are missing, or end too early -------------------------------------------------------


def test_a_marked_log_that_is_missing_is_damage_of_nobody_knows_which_ledger():
    async def scenario():
        disk = SimDisk()
        await written(disk, (1, 0))
        await written(disk, (2, 0))
        await disk.remove(log_path(1))
        await disk.sync_dir(FOLDER)
        storage = await started(disk)
        assert limbo(storage) == {EVERY_LEDGER: "lost"}
        await finished(storage)
        await served(storage, 2, 0)
        assert await marks(storage) == {}
        crash(storage, disk)
        storage = await started(disk)
        assert limbo(storage) == {EVERY_LEDGER: "lost"}, "it is durable before the mark goes"

    run(scenario())


def test_a_log_that_is_missing_is_not_replaced_by_what_a_start_flushes_that_is_cut_off():
    async def scenario():
        disk = SimDisk()
        await written(disk, (1, 0))
        await disk.remove(log_path(1))
        await disk.sync_dir(FOLDER)
        storage = await opened(disk)
        await RecordApplier(storage).apply([*KNOWN, *added(2, *range(9), payload=bytes(4 * KIB))])
        await storage.flush()
        crash(storage, disk)
        assert log_path(1) not in disk.paths() and log_path(2) in disk.paths()
        storage = await started(disk)
        assert limbo(storage) == {EVERY_LEDGER: "lost"}

    run(scenario())


def test_a_log_that_ends_before_its_mark_is_damage_of_nobody_knows_which_ledger():
    async def scenario():
        disk = SimDisk()
        storage = await opened(disk)
        (place,) = await put(storage, 1, 0)
        index = storage.stores[0].index
        await index.mark_logs({1: record_end(place)})
        await index.sync()
        crash(storage, disk)
        disk.truncate(log_path(1), 2 * BLOCK_BYTES)
        storage = await started(disk)
        assert limbo(storage) == {EVERY_LEDGER: "lost"}

    run(scenario())


def test_a_log_without_a_record_is_no_damage():
    async def scenario():
        disk = SimDisk()
        places = await written(disk, (1, 0))
        disk.truncate(log_path(1), places[0][0].position)
        storage = await started(disk)
        assert limbo(storage) == {}
        await finished(storage)
        assert await ids(storage, 1) == [] and await marks(storage) == {}

    run(scenario())


# -- logs that have ended --------------------------------------------------------------------------


async def ended(disk: SimDisk) -> list[list[Location]]:
    """A log with a footer that is marked; nothing of it was flushed."""
    storage = await opened(disk)
    places = [await put(storage, 1, e) for e in range(5)]
    await storage.stores[0].direct_log.close()
    found = await read_map(storage.stores[0].logs, disk, 1)
    assert found is not None and found.has_footer
    crash(storage, disk)
    return places


def test_a_log_that_ended_with_its_footer_and_is_marked_is_whole():
    async def scenario():
        disk = SimDisk()
        await ended(disk)
        storage = await started(disk)
        assert await marks(storage) == {1: BLOCK_BYTES}
        assert limbo(storage) == {}
        await finished(storage)
        await served(storage, 1, *range(5))

    run(scenario())


def test_full_logs_that_no_flush_had_yet_are_whole():
    async def scenario():
        disk = SimDisk()
        storage = await opened(disk)
        count = 0
        while len(await marks(storage)) < 3:
            await put(storage, 1, count)
            count += 1
        crash(storage, disk)
        storage = await started(disk)
        assert limbo(storage) == {}
        await finished(storage)
        await served(storage, 1, *range(count))

    run(scenario())


@pytest.mark.parametrize("where", ["payload", "header"])
def test_the_footer_proves_that_the_last_write_was_synced(where):
    async def scenario():
        disk = SimDisk()
        places = await ended(disk)
        at = places[-1][0].position + (3000 if where == "payload" else 2)
        disk.flip_bit(log_path(1), 8 * at)
        storage = await started(disk)
        assert limbo(storage) == ({1: "lost"} if where == "payload" else {EVERY_LEDGER: "lost"})

    run(scenario())


# -- what cannot be read ---------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1, 2])
def test_rot_in_a_write_before_the_last_costs_its_ledger_and_no_other(which):
    async def scenario():
        disk = SimDisk()
        places = await written(disk, (1, 0, 1), (2, 0), (3, 0))
        rotten = [place for write in places for place in write][which]
        disk.flip_bit(log_path(1), 8 * (rotten.position + 3000))
        storage = await started(disk)
        assert limbo(storage) == {rotten.ledger_id: "lost"}
        await finished(storage)
        await served(storage, 1, *([0, 1] if which == 2 else [1 - which]))
        await served(storage, 2, *([] if which == 2 else [0]))
        await served(storage, 3, 0)

    run(scenario())


def test_rot_in_a_header_before_the_last_write_may_have_cost_any_ledger():
    async def scenario():
        disk = SimDisk()
        places = await written(disk, (1, 0, 1), (2, 0))
        disk.flip_bit(log_path(1), 8 * (places[0][1].position + 2))
        storage = await started(disk)
        assert limbo(storage) == {EVERY_LEDGER: "lost"}

    run(scenario())


def test_rot_in_the_last_write_looks_torn_and_puts_its_ledger_and_the_others_in_doubt():
    async def scenario():
        disk = SimDisk()
        places = await written(disk, (1, 0), (2, 0, 1, 2))
        disk.flip_bit(log_path(1), 8 * (places[1][1].position + 3000))
        storage = await started(disk)
        assert limbo(storage) == {2: "torn", EVERY_LEDGER: "torn"}
        await finished(storage)
        await served(storage, 2, 0, 2)

    run(scenario())


@pytest.mark.parametrize("seed", range(6))
def test_a_power_loss_under_a_write_loses_nothing_that_was_told_and_is_no_damage(seed):
    async def scenario():
        disk = SimDisk(random.Random(seed))
        storage = await opened(disk)
        await put(storage, 1, 0, 1)
        disk.faults.sync_s = (1.0, 1.0)
        asyncio.ensure_future(put(storage, 2, *range(6)))  # noqa: RUF006
        await asyncio.sleep(0.5)
        storage.abandon()
        disk.crash("torn")
        disk.speed_up()
        storage = await started(disk)
        assert "lost" not in limbo(storage).values()
        await finished(storage)
        await served(storage, 1, 0, 1)
        there = await ids(storage, 2)
        await served(storage, 2, *there)

    run(scenario())


def test_a_bad_block_in_the_last_write_is_damage_for_the_disk_says_so():
    async def scenario():
        disk = SimDisk()
        places = await written(disk, (1, 0), (2, 0, 1))
        disk.make_unreadable(log_path(1), places[1][0].position + 3000 + BLOCK_BYTES)
        storage = await started(disk)
        assert limbo(storage) == {2: "lost"}
        await finished(storage)
        await served(storage, 1, 0)
        await served(storage, 2, 1)

    run(scenario())


def test_a_bad_block_under_a_header_may_have_cost_any_ledger():
    async def scenario():
        disk = SimDisk()
        places = await written(disk, (1, 0), (2, 0, 1))
        disk.make_unreadable(log_path(1), places[1][0].position)
        storage = await started(disk)
        assert limbo(storage) == {EVERY_LEDGER: "lost"}

    run(scenario())


# -- what counts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("every", ["", "torn", "lost"])
def test_entries_of_an_unknown_ledger_count_only_if_what_told_of_it_may_be_lost_or_torn(every):
    async def scenario():
        disk = SimDisk()
        await written(disk, (1, 0), (7, 0, 1))
        storage = await started(disk, every=every)
        assert sorted(await storage.reader.stored(1, 0, 9)) == [0]
        expected = [0, 1] if every else []
        assert sorted(await storage.reader.stored(7, 0, 9)) == expected
        known = storage.state(7)
        assert (known is None) == (every == "")
        if known is not None:
            assert (known.limbo, known.fenced, known.met) == (every, every == "lost", False)

    run(scenario())


@pytest.mark.parametrize(
    "more",
    [
        {"deleted": True, **HOME},
        {"directories": ("ledger-2",), "given_up": (("ledger-1", 2),)},
    ],
)
def test_entries_of_a_ledger_that_is_deleted_or_gave_the_directory_up_do_not_come_back(more):
    async def scenario():
        disk = SimDisk()
        await written(disk, (1, 0), (2, 0))
        storage = await started(disk, [state(1, **more), *KNOWN[1:]])
        assert not await storage.reader.stored(1, 0, 9)
        assert sorted(await storage.reader.stored(2, 0, 9)) == [0]
        await finished(storage)
        assert await storage.stores[0].index.last(1) is None

    run(scenario())


def test_damage_of_a_deleted_ledger_puts_it_in_no_limbo():
    async def scenario():
        disk = SimDisk()
        places = await written(disk, (1, 0, 1), (2, 0))
        disk.flip_bit(log_path(1), 8 * (places[0][1].position + 3000))
        storage = await started(disk, [state(1, deleted=True, **HOME), *KNOWN[1:]])
        assert limbo(storage) == {}

    run(scenario())


def test_what_a_journal_has_of_an_entry_is_not_replaced():
    async def scenario():
        disk = SimDisk()
        await written(disk, (1, 0, 1))
        storage = await started(disk, [*KNOWN, *added(1, 1, payload=b"another")])
        await finished(storage)
        found = (await storage.reader.read(1, range(10), 1 << 30)).entries
        assert bytes(found[0]) == large(1, 0)
        assert bytes(found[1]) == entry(1, 1, b"another")

    run(scenario())


# -- directories that cannot be read ---------------------------------------------------------------


async def two(disks: list[SimDisk]) -> LedgerStorage:
    found = [
        LedgerDirectory(f"ledger-{number}", disk, await SimIndex.open(disk))
        for number, disk in enumerate(disks, 1)
    ]
    journal = JournalDirectory("journal-1", SimDisk())
    return (await LedgerStorage.open(Directories([journal], found), CONFIG))[0]


def unreadable(storage: LedgerStorage) -> None:
    async def fails(_: int) -> None:
        raise DiskFailed("the folder cannot be read")

    storage.stores[0].logs.open_log = fails


def test_a_directory_whose_logs_cannot_be_read_is_dropped_and_serves_all_when_it_is_back():
    async def scenario():
        disks = [SimDisk(), SimDisk()]
        await written(disks[0], (1, 0))
        storage = await two(disks)
        unreadable(storage)
        replayed = RecordApplier(storage)
        await replayed.apply(KNOWN)
        await replay_direct_logs(storage, replayed)
        assert list(storage.failures) == ["ledger-1"]
        assert storage.limbo(1) == "lost"
        await finished(storage)
        for disk in disks:
            crash(storage, disk)
        storage = await two(disks)
        replayed = RecordApplier(storage)
        await replayed.apply(KNOWN)
        await replay_direct_logs(storage, replayed)
        await finished(storage)
        await served(storage, 1, 0)
        assert storage.limbo(1) == ""

    run(scenario())


def test_without_another_directory_a_start_fails():
    async def scenario():
        disk = SimDisk()
        await written(disk, (1, 0))
        storage = await opened(disk)
        unreadable(storage)
        with pytest.raises(DiskFailed, match="cannot be read"):
            await replay_direct_logs(storage, RecordApplier(storage))

    run(scenario())
