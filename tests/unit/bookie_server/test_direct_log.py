import asyncio
from collections.abc import Awaitable, Callable

import pytest

from bookie_server.disk.interface import DiskFailed, DiskFull
from bookie_server.logs.entry_log import BadEntryLog, log_path, record_end
from bookie_server.logs.index import IndexChanges, LedgerState, Location
from bookie_server.logs.scan import read_map
from tests.simulation.index import SimIndex
from tests.simulation.loop import run
from tests.unit.bookie_server.direct_log_rig import FIRST, LARGE, SETTINGS, Rig, text
from tests.unit.bookie_server.node import KIB


def with_a_log(test: Callable[[Rig], Awaitable[None]]) -> None:
    async def main() -> None:
        await test(await Rig().start())

    run(main(), time_max_s=3600)


def test_what_was_told_is_there_after_the_worst_crash():
    async def test(rig: Rig) -> None:
        places = [*await rig.put(1, 0, 1), *await rig.put(2, 5)]
        rig.direct_log.abandon()
        rig.disk.crash("none")
        await rig.start()
        assert await rig.found(places) == [(1, 0), (1, 1), (2, 5)]
        assert rig.direct_log.pending_bytes == 0

    with_a_log(test)


def test_the_name_of_a_log_and_its_mark_are_durable_before_there_is_a_record_in_it():
    async def test(rig: Rig) -> None:
        told = rig.put(1, 0)
        seen = 0
        while not told.done():
            await asyncio.sleep(0.1)
            if log_path(1) in rig.disk.paths() and text(1, 0) in rig.disk.content(log_path(1)):
                seen += 1
                assert len(rig.disk.durable(log_path(1))) >= FIRST
                assert rig.is_marked(1, FIRST)
        assert seen > 5
        assert text(1, 0) in rig.disk.durable(log_path(1))

    with_a_log(test)


@pytest.mark.parametrize("seconds", [0.5, 1.5, 2.5, 3.5])
def test_a_crash_before_the_first_record_of_a_log_leaves_no_mark_of_a_log_that_is_not_there(
    seconds: float,
):
    async def test(rig: Rig) -> None:
        told = rig.put(1, 0)
        await asyncio.sleep(seconds)
        assert not told.done()
        await rig.crash()
        marks = await rig.marks()
        assert marks == ({1: FIRST} if seconds > 3 else {})
        for log_id, mark in marks.items():
            assert (await rig.logs.open_log(log_id)).end == mark

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
        await rig.put(1, 9)  # so a log is there
        await asyncio.sleep(0)
        assert rig.direct_log.wait_s == 0
        first = rig.put(1, 0)
        pending = rig.direct_log.pending_bytes
        assert pending == len(text(1, 0)) + 48
        await asyncio.sleep(0.1)
        second = rig.put(1, 1, 2)
        assert rig.direct_log.pending_bytes == 3 * pending
        await first
        assert rig.direct_log.pending_bytes == 2 * pending
        await asyncio.sleep(0.1)
        assert 0.5 < rig.direct_log.wait_s < 10
        await second
        assert rig.direct_log.pending_bytes == 0
        await asyncio.sleep(0)
        assert rig.direct_log.wait_s == 0

    with_a_log(test)


def test_while_a_log_is_being_made_it_is_said_how_long_that_takes():
    async def test(rig: Rig) -> None:
        await rig.put(1, 0)
        await asyncio.sleep(0)
        rig.disk.fill_up(0)
        with pytest.raises(DiskFull):  # the next one goes to a new log
            await rig.put(1, 1)
        rig.disk.empty_out()
        told = rig.put(1, 1)
        await asyncio.sleep(0.5)
        assert rig.direct_log.wait_s > 0.1
        await told

    with_a_log(test)


def test_nothing_that_was_written_is_kept_in_memory():
    async def test(rig: Rig) -> None:
        await rig.put(1, 0)
        await asyncio.sleep(0)
        assert not rig.direct_log._writing and not rig.direct_log._waiting

    with_a_log(test)


def test_without_space_those_who_wait_are_told_and_the_next_goes_to_a_new_log():
    async def test(rig: Rig) -> None:
        before = await rig.put(1, 0)
        rig.disk.fill_up(5 * KIB)
        refused = [rig.put(1, 1), rig.put(2, 0)]
        for each in refused:
            with pytest.raises(DiskFull):
                await each
        assert rig.direct_log.pending_bytes == 0 and not rig.failures
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
        assert heard == [1, 1] and rig.direct_log.pending_bytes == 0

    with_a_log(test)


def test_who_waits_for_a_directory_that_is_lost_is_told_at_once_though_a_write_hangs():
    async def test(rig: Rig) -> None:
        await rig.put(1, 0)
        rig.disk.faults.hangs = True
        waiting = [rig.put(1, 1), rig.put(2, 0)]
        await asyncio.sleep(5)
        waiting.append(rig.put(2, 1))
        error = DiskFailed("it was unmounted")
        rig.direct_log.fail(error)
        assert [each.exception() for each in waiting] == [error] * 3
        assert rig.put(3, 0).exception() is error
        assert rig.direct_log.pending_bytes == 0
        rig.disk.crash()

    with_a_log(test)


def test_a_write_that_ends_after_the_directory_was_lost_tells_nobody_again():
    async def test(rig: Rig) -> None:
        waiting = [rig.put(1, 0)]
        await asyncio.sleep(0.1)
        waiting.append(rig.put(1, 1))
        rig.direct_log.fail(DiskFailed("gone"))
        await asyncio.sleep(10)
        assert all(isinstance(each.exception(), DiskFailed) for each in waiting)
        assert rig.direct_log.pending_bytes == 0

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


def test_the_mark_moves_past_what_was_put_before_the_flush_and_not_past_what_came_later():
    async def test(rig: Rig) -> None:
        first = await rig.put(1, 0, 1)
        begun = rig.direct_log.puts
        later = await rig.put(1, 2)
        assert await rig.marks() == {1: FIRST}
        await rig.flush(first, begun)
        assert await rig.marks() == {1: record_end(first[-1])}
        assert rig.is_marked(1, record_end(first[-1]))
        await rig.flush(later)
        assert await rig.marks() == {1: record_end(later[-1])}

    with_a_log(test)


def test_of_puts_that_one_write_brought_the_mark_passes_those_of_before_the_flush_alone():
    async def test(rig: Rig) -> None:
        await rig.put(1, 0)
        rig.put(1, 1)
        await asyncio.sleep(0.1)
        before, begun = rig.put(2, 0), rig.direct_log.puts
        after = rig.put(2, 1)
        places = [*await before, *await after]
        await rig.flush(places[:1], begun)
        assert await rig.marks() == {1: record_end(places[0])}
        assert places[1].position == record_end(places[0])

    with_a_log(test)


def test_a_flush_that_does_not_say_what_the_index_has_moves_no_mark():
    """One that left a full directory out says so."""

    async def test(rig: Rig) -> None:
        places = await rig.put(1, 0)
        await rig.flush([], 0)
        assert await rig.marks() == {1: FIRST}
        assert rig.logs.sealed_ids() == []
        await rig.flush(places)
        assert await rig.marks() == {1: record_end(places[0])}

    with_a_log(test)


@pytest.mark.parametrize("keep", ["none", "random", "all"])
@pytest.mark.parametrize("seconds", [0.5, 2.5])
def test_a_mark_that_has_moved_after_a_crash_passes_only_what_the_index_has(seconds, keep):
    async def test(rig: Rig) -> None:
        places = await rig.put(1, 0)
        flushing = asyncio.ensure_future(rig.flush(places))
        await asyncio.sleep(seconds)
        assert flushing.done() == (seconds > 2)
        rig.direct_log.abandon()
        rig.disk.crash(keep)
        await rig.start()
        (mark,) = (await rig.marks()).values()
        known = await rig.index.range(1, 0, 9, 1 << 30)
        assert (mark, known) in ((FIRST, []), (FIRST, places), (record_end(places[0]), places))
        assert seconds < 2 or mark > FIRST

    with_a_log(test)


def monitored(index: SimIndex, name: str, calls: list[str]) -> None:
    call = getattr(index, name)

    async def noted(*arguments: object) -> None:
        calls.append(name)
        await call(*arguments)

    setattr(index, name, noted)


def test_marks_are_written_after_all_that_the_index_needs_of_what_lies_before_them():
    async def test(rig: Rig) -> None:
        places = await rig.put(1, 0)
        wrote: list[str] = []
        for name in ("put", "put_ledgers", "mark_logs", "sync"):
            monitored(rig.index, name, wrote)
        changes = IndexChanges([LedgerState(1)], [])
        await rig.store.write(iter(()), changes, places, rig.direct_log.puts)
        assert wrote == ["put_ledgers", "put", "mark_logs", "sync"]

    with_a_log(test)


def test_a_full_log_is_sealed_when_its_mark_is_gone_durably_and_no_earlier():
    async def test(rig: Rig) -> None:
        *places, other = await fill(rig)
        assert rig.logs.sealed_ids() == []
        flushing = asyncio.ensure_future(rig.flush([*places, other]))
        await asyncio.sleep(0.5)
        assert 1 not in await rig.marks(), "it is not durable yet"
        assert rig.logs.sealed_ids() == []
        await flushing
        assert rig.logs.sealed_ids() == [1]
        await rig.crash()
        assert await rig.marks() == {2: record_end(other)}

    with_a_log(test)


def test_a_log_is_not_sealed_by_a_flush_whose_sync_fails():
    async def test(rig: Rig) -> None:
        *places, _ = await fill(rig)
        rig.disk.faults.sync_fails = 1
        with pytest.raises(DiskFailed):
            await rig.flush(places)
        assert rig.logs.sealed_ids() == []
        await rig.crash()
        assert (await rig.marks())[1] == FIRST

    with_a_log(test)


def test_a_full_log_keeps_its_mark_while_a_later_flush_has_need_of_it():
    async def test(rig: Rig) -> None:
        first = await rig.put(1, 0)
        begun = rig.direct_log.puts
        *places, other = await fill(rig, first=1)
        await rig.flush(first, begun)
        assert await rig.marks() == {1: record_end(first[0]), 2: FIRST}
        assert rig.logs.sealed_ids() == []
        await rig.flush([*places, other])
        assert await rig.marks() == {2: record_end(other)}
        assert rig.logs.sealed_ids() == [1]

    with_a_log(test)


def test_a_log_that_had_no_space_any_more_is_sealed_by_the_next_flush():
    async def test(rig: Rig) -> None:
        places = await rig.put(1, 0)
        rig.disk.fill_up(0)
        with pytest.raises(DiskFull):
            await rig.put(1, 1)
        assert rig.logs.sealed_ids() == [] and await rig.marks() == {1: FIRST}
        rig.disk.empty_out()
        await rig.flush(places)
        assert rig.logs.sealed_ids() == [1] and await rig.marks() == {}

    with_a_log(test)


def test_what_a_mark_passed_is_kept_in_memory_no_longer():
    async def test(rig: Rig) -> None:
        places = await fill(rig)
        await rig.flush(places)
        assert rig.direct_log.marks(rig.direct_log.puts) == {} and not rig.direct_log.has_ended_logs

    with_a_log(test)


def test_a_log_whose_footer_fails_was_told_before_and_keeps_what_was_told():
    async def test(rig: Rig) -> None:
        places: list[Location] = []
        while not places or len(rig.disk.content(log_path(1))) < 80 * KIB:
            places += await rig.put(1, len(places))
        rig.disk.fill_up(14 * KIB)  # for the entry and not for the footer
        places += await rig.put(1, len(places))
        await asyncio.sleep(5)
        assert {place.log_id for place in places} == {1}
        assert await read_map(rig.logs, rig.disk, 1) is None
        rig.disk.empty_out()
        places += await rig.put(1, len(places))
        assert {place.log_id for place in places} == {1, 2}
        assert len(await rig.found(places)) == len(places)
        assert not rig.failures

    with_a_log(test)


def test_a_log_that_is_closed_has_its_footer_and_an_empty_one_makes_none():
    async def test(rig: Rig) -> None:
        await rig.direct_log.close()
        assert not rig.log_files
        waited_for = rig.put(1, 0)
        await rig.direct_log.close()
        assert waited_for.done()
        log_map = await read_map(rig.logs, rig.disk, 1)
        assert log_map is not None and log_map.has_footer and log_map.entries == 1

    with_a_log(test)


@pytest.mark.parametrize("flushed", [True, False])
def test_a_log_that_is_closed_keeps_its_mark_only_if_the_index_lacks_something_of_it(flushed: bool):
    async def test(rig: Rig) -> None:
        first = await rig.put(1, 0)
        await rig.flush(first)
        if not flushed:
            await rig.put(1, 1)
        await rig.direct_log.close()
        rig.disk.crash("none")
        await rig.start()
        assert await rig.marks() == ({} if flushed else {1: record_end(first[0])})

    with_a_log(test)


def test_marks_of_logs_of_earlier_runs_are_forgotten_together():
    async def test(rig: Rig) -> None:
        for entry_id in range(2):
            await rig.put(1, entry_id)
            await rig.crash()
        assert await rig.marks() == {1: FIRST, 2: FIRST}
        await rig.store.forget_replayed_logs()
        await rig.crash()
        assert await rig.marks() == {}

    with_a_log(test)


def test_what_a_crash_cut_off_is_no_entry_and_what_was_told_is_read_beside_it():
    async def test(rig: Rig) -> None:
        places = await rig.put(1, 0)
        rig.put(1, 1, 2)
        await asyncio.sleep(0.5)
        rig.direct_log.abandon()
        rig.disk.crash("torn")
        await rig.start()
        assert await rig.found(places) == [(1, 0)]
        later = Location(1, 1, 1, places[0].position + 12 * KIB, places[0].entry_bytes)
        assert isinstance((await rig.logs.read([later]))[0], BadEntryLog)
        assert rig.logs.sealed_ids() == [1]
        assert (await rig.put(1, 1))[0].log_id == 2

    with_a_log(test)
