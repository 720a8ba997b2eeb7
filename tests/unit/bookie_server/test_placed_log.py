import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable

import pytest

from bookie_server.disk import DiskFailed, DiskFull
from bookie_server.entry_index import Location
from bookie_server.entry_log import BadEntryLog, EntryLogs, log_path
from bookie_server.log_map import read_map
from bookie_server.placed_log import PlacedLog
from tests.simulation.disk import SimDisk
from tests.simulation.loop import run
from tests.unit.bookie_server.node import CONFIG, KIB, entry

LARGE = 10 * KIB
SETTINGS = dataclasses.replace(
    CONFIG,
    journal_batch_bytes_max=64 * KIB,
    entry_log_bytes_max=100 * KIB,
)


def text(ledger_id: int, entry_id: int) -> bytes:
    return entry(ledger_id, entry_id, bytes([(7 * ledger_id + entry_id) % 251]) * LARGE)


def some(ledger_id: int, *entry_ids: int) -> list[tuple[int, int, bytes]]:
    return [(ledger_id, each, text(ledger_id, each)) for each in entry_ids]


class Rig:
    """A directory's disk, its logs and its placed log."""

    def __init__(self) -> None:
        self.disk = SimDisk(random.Random(3))
        self.disk.faults.sync_s = (1.0, 1.0)
        self.logs: EntryLogs
        self.placed: PlacedLog
        self.failures: list[DiskFailed] = []

    async def start(self) -> "Rig":
        self.logs = await EntryLogs.open(self.disk, SETTINGS)
        self.placed = PlacedLog(self.disk, self.logs, SETTINGS)
        self.placed.on_failure = self.failures.append
        return self

    def put(self, ledger_id: int, *entry_ids: int) -> "asyncio.Future[list[Location]]":
        return self.placed.put(ledger_id, some(ledger_id, *entry_ids))

    async def found(self, places: list[Location]) -> list[tuple[int, int]]:
        """Which entries lie there, each as it was put."""
        found = await self.logs.read(places)
        for place, each in zip(places, found, strict=True):
            assert bytes(each) == text(place.ledger_id, place.entry_id)
        return [place[:2] for place in places]

    @property
    def log_files(self) -> list[str]:
        return [path for path in self.disk.paths() if path.endswith(".log")]


def with_a_log(test: Callable[[Rig], Awaitable[None]]) -> None:
    async def main() -> None:
        await test(await Rig().start())

    run(main(), time_max_s=3600)


def test_what_was_told_is_there_after_the_worst_crash():
    async def test(rig: Rig) -> None:
        places = [*await rig.put(1, 0, 1), *await rig.put(2, 5)]
        rig.placed.abandon()
        rig.disk.crash("none")
        await rig.start()
        assert await rig.found(places) == [(1, 0), (1, 1), (2, 5)]
        assert rig.placed.pending_bytes == 0

    with_a_log(test)


@pytest.mark.parametrize("durable", ["name", "bytes"])
def test_nothing_is_told_before_the_bytes_and_the_name_of_the_log_are_durable(durable: str):
    async def test(rig: Rig) -> None:
        told = rig.put(1, 0)
        if durable == "bytes":
            await asyncio.sleep(1.5)  # the records are synced: now the name
            assert not rig.disk.durable(log_path(1))
        else:
            await asyncio.sleep(0.5)
        assert not told.done()
        await told
        assert text(1, 0) in rig.disk.durable(log_path(1))

    with_a_log(test)


def test_what_is_put_during_a_write_goes_into_one_next_write_in_the_order_it_came():
    async def test(rig: Rig) -> None:
        first = rig.put(1, 0)
        await asyncio.sleep(0.1)
        later = [rig.put(2, 0), rig.put(1, 1), rig.put(2, 1)]
        await first
        syncs = rig.disk.syncs
        places = [place for each in later for place in await each]
        assert rig.disk.syncs == syncs + 1
        assert [place[:2] for place in places] == [(2, 0), (1, 1), (2, 1)]
        assert places == sorted(places, key=lambda place: place.position)
        await rig.found(places)

    with_a_log(test)


def test_a_write_has_at_most_the_bytes_of_a_batch_or_one_larger_put():
    async def test(rig: Rig) -> None:
        first = rig.put(1, 0)
        await asyncio.sleep(0.1)
        large = rig.put(1, *range(1, 8))
        small = [rig.put(2, each) for each in range(4)]
        await first
        syncs = rig.disk.syncs
        await large
        assert rig.disk.syncs == syncs + 1 and not any(each.done() for each in small)
        assert len(await large) == 7
        assert [len(await each) for each in small] == [1] * 4
        assert rig.disk.syncs == syncs + 2

    with_a_log(test)


def test_bytes_put_are_pending_until_they_are_told_and_say_how_long_that_takes():
    async def test(rig: Rig) -> None:
        assert rig.placed.wait_s == 0
        first = rig.put(1, 0)
        pending = rig.placed.pending_bytes
        assert pending == len(text(1, 0)) + 48
        await asyncio.sleep(0.1)
        second = rig.put(1, 1, 2)
        assert rig.placed.pending_bytes == 3 * pending
        await first
        assert rig.placed.pending_bytes == 2 * pending
        await asyncio.sleep(0.1)
        assert 0.5 < rig.placed.wait_s < 10
        await second
        assert rig.placed.pending_bytes == 0
        await asyncio.sleep(0)
        assert rig.placed.wait_s == 0

    with_a_log(test)


def test_nothing_that_was_written_is_kept_in_memory():
    async def test(rig: Rig) -> None:
        await rig.put(1, 0)
        await asyncio.sleep(0)
        assert not rig.placed._writing and not rig.placed._waiting

    with_a_log(test)


def test_without_space_those_who_wait_are_told_and_the_next_goes_to_a_new_log():
    async def test(rig: Rig) -> None:
        before = await rig.put(1, 0)
        rig.disk.fill_up(5 * KIB)
        refused = [rig.put(1, 1), rig.put(2, 0)]
        for each in refused:
            with pytest.raises(DiskFull):
                await each
        assert rig.placed.pending_bytes == 0 and not rig.failures
        rig.disk.empty_out()
        after = await rig.put(1, 1)
        assert {place.log_id for place in before} == {1}
        assert {place.log_id for place in after} == {2}
        assert await rig.found([*before, *after]) == [(1, 0), (1, 1)]

    with_a_log(test)


def test_without_space_for_a_new_log_too_those_who_wait_are_told():
    async def test(rig: Rig) -> None:
        rig.disk.fill_up(0)
        with pytest.raises(DiskFull):
            await rig.put(1, 0)
        rig.disk.empty_out()
        assert await rig.found(await rig.put(1, 0)) == [(1, 0)]

    with_a_log(test)


@pytest.mark.parametrize("fault", ["append", "sync", "new log"])
def test_a_failure_is_the_directorys_and_everybody_who_waits_is_told_after_it(fault: str):
    async def test(rig: Rig) -> None:
        if fault != "new log":
            await rig.put(1, 0)
        if fault == "sync":
            rig.disk.faults.sync_fails = 1
        else:
            rig.disk.faults.append_fails = 1
        heard: list[int] = []
        waiting = [rig.put(1, 1), rig.put(2, 0)]
        for each in waiting:
            each.add_done_callback(lambda _: heard.append(len(rig.failures)))
        for each in waiting:
            with pytest.raises(DiskFailed):
                await each
        await asyncio.sleep(0)
        assert heard == [1, 1] and rig.placed.pending_bytes == 0

    with_a_log(test)


def test_who_waits_for_a_directory_that_is_lost_is_told_at_once_though_a_write_hangs():
    async def test(rig: Rig) -> None:
        await rig.put(1, 0)
        rig.disk.faults.hangs = True
        waiting = [rig.put(1, 1), rig.put(2, 0)]
        await asyncio.sleep(5)
        waiting.append(rig.put(2, 1))
        error = DiskFailed("it was unmounted")
        rig.placed.fail(error)
        assert [each.exception() for each in waiting] == [error] * 3
        assert rig.put(3, 0).exception() is error
        assert rig.placed.pending_bytes == 0
        rig.disk.crash()

    with_a_log(test)


def test_a_write_that_ends_after_the_directory_was_lost_tells_nobody_again():
    async def test(rig: Rig) -> None:
        waiting = [rig.put(1, 0)]
        await asyncio.sleep(0.1)
        waiting.append(rig.put(1, 1))
        rig.placed.fail(DiskFailed("gone"))
        await asyncio.sleep(10)
        assert all(isinstance(each.exception(), DiskFailed) for each in waiting)
        assert rig.placed.pending_bytes == 0

    with_a_log(test)


def test_whatever_ends_a_write_those_who_wait_are_told():
    async def test(rig: Rig) -> None:
        async def broken() -> None:
            raise ValueError("a defect")

        rig.logs.begin = broken
        with pytest.raises(DiskFailed):
            await rig.put(1, 0)
        assert rig.failures

    with_a_log(test)


async def fill(rig: Rig, ledger_ids: tuple[int, ...] = (1,), first: int = 0) -> list[Location]:
    """One full log, entries of the ledgers in turn."""
    places: list[Location] = []
    while not places or len({place.log_id for place in places}) < 2:
        at = first + len(places)
        places += await rig.put(ledger_ids[at % len(ledger_ids)], at)
    return places


def test_a_full_log_ends_with_a_footer_whose_map_is_right():
    async def test(rig: Rig) -> None:
        *places, _ = await fill(rig, (1, 2, 2))
        log_map = await read_map(rig.logs, rig.disk, 1)
        assert log_map is not None and log_map.has_footer
        shares = log_map.shares()
        for ledger_id in (1, 2):
            own = [place for place in places if place.ledger_id == ledger_id]
            assert shares[ledger_id].entries == len(own)
            assert shares[ledger_id].bytes == sum(48 + place.entry_bytes for place in own)
        size = len(rig.disk.durable(log_path(1)))
        assert SETTINGS.entry_log_bytes_max <= size < SETTINGS.entry_log_bytes_max + 3 * LARGE
        assert size % 4096 == 0

    with_a_log(test)


def test_a_log_is_sealed_when_it_is_full_and_each_place_in_it_is_settled():
    async def test(rig: Rig) -> None:
        first = await rig.put(1, 0)
        rig.placed.settle(1, len(first))  # all of them, but the log is not full
        *places, other = await fill(rig, first=1)
        assert rig.logs.sealed() == []
        rig.placed.settle(other.log_id, 1)
        for count in range(len(places)):
            assert rig.logs.sealed() == [], count
            rig.placed.settle(1, 1)
        assert rig.logs.sealed() == [1]

    with_a_log(test)


def test_a_log_whose_places_are_all_settled_is_sealed_when_it_is_full():
    async def test(rig: Rig) -> None:
        at = 0
        while len(rig.log_files) < 2:
            assert rig.logs.sealed() == []
            (place,) = await rig.put(1, at)
            at += 1
            if place.log_id == 1:
                assert rig.logs.sealed() == []
                rig.placed.settle(1, 1)
        assert rig.logs.sealed() == [1]

    with_a_log(test)


def test_a_log_that_had_no_space_any_more_is_sealed_once_its_places_are_settled():
    async def test(rig: Rig) -> None:
        await rig.put(1, 0)
        rig.disk.fill_up(0)
        with pytest.raises(DiskFull):
            await rig.put(1, 1)
        assert rig.logs.sealed() == []
        rig.placed.settle(1, 1)
        assert rig.logs.sealed() == [1]

    with_a_log(test)


def test_a_log_whose_footer_fails_was_told_before_and_keeps_what_was_told():
    async def test(rig: Rig) -> None:
        places: list[Location] = []
        while rig.disk.paths() == [] or len(rig.disk.content(log_path(1))) < 90 * KIB:
            places += await rig.put(1, len(places))
        rig.disk.fill_up(16 * KIB)  # for the entry and not for the footer
        places += await rig.put(1, len(places))
        await asyncio.sleep(5)
        rig.disk.empty_out()
        places += await rig.put(1, len(places))
        assert {place.log_id for place in places} == {1, 2}
        assert len(await rig.found(places)) == len(places)
        assert not rig.failures

    with_a_log(test)


def test_a_log_that_is_closed_has_its_footer_and_an_empty_one_makes_none():
    async def test(rig: Rig) -> None:
        await rig.placed.close()
        assert not rig.log_files
        waited_for = rig.put(1, 0)
        await rig.placed.close()
        assert waited_for.done()
        log_map = await read_map(rig.logs, rig.disk, 1)
        assert log_map is not None and log_map.has_footer and log_map.entries == 1

    with_a_log(test)


def test_what_a_crash_cut_off_is_no_entry_and_what_was_told_is_read_beside_it():
    async def test(rig: Rig) -> None:
        places = await rig.put(1, 0)
        rig.put(1, 1, 2)
        await asyncio.sleep(0.5)
        rig.placed.abandon()
        rig.disk.crash("torn")
        await rig.start()
        assert await rig.found(places) == [(1, 0)]
        later = Location(1, 1, 1, places[0].position + 12 * KIB, places[0].entry_bytes)
        assert isinstance((await rig.logs.read([later]))[0], BadEntryLog)
        assert rig.logs.sealed() == [1]
        assert (await rig.put(1, 1))[0].log_id == 2

    with_a_log(test)
