"""A direct log that reclaim ends before it is full: no entry with a location is lost, and
it is sealed by a flush alone."""

import asyncio

import pytest

from bookie_server.disk.interface import DiskFull
from bookie_server.logs.scan import read_map
from tests.simulation.loop import run
from tests.unit.bookie_server.direct_log_rig import FIRST, Rig, text


def ending(test):
    async def scenario():
        await test(await Rig().start())

    run(scenario(), seed=1)


def test_a_log_that_is_ended_early_is_sealed_by_a_flush_and_the_next_entry_begins_another():
    async def test(rig):
        places = await rig.put(1, 0, 1)
        await rig.flush(places)
        await rig.direct_log.end_growing_log()
        assert rig.direct_log.growing_log is None
        assert rig.logs.sealed_ids() == []
        assert rig.direct_log.has_ended_logs
        (more,) = await rig.put(1, 2)
        assert more.log_id == places[0].log_id + 1
        await rig.flush([more])
        assert rig.logs.sealed_ids() == [places[0].log_id]
        assert list(await rig.marks()) == [more.log_id]
        found = await read_map(rig.logs, rig.disk, places[0].log_id)
        assert found.has_footer
        assert (found.ledger_ids.tolist(), found.entries) == ([1], 2)
        await rig.direct_log.end_growing_log()
        await rig.direct_log.end_growing_log()  # there is none

    ending(test)


def test_a_log_that_is_being_written_is_not_ended_early():
    async def test(rig):
        put = rig.put(1, 0)
        await rig.direct_log.end_growing_log()
        (place,) = await put
        assert rig.direct_log.growing_log.log_id == place.log_id
        assert not rig.direct_log.has_ended_logs

    ending(test)


def test_an_entry_that_comes_while_a_log_is_ended_early_goes_to_another():
    async def test(rig):
        places = await rig.put(1, 0)
        ended = asyncio.ensure_future(rig.direct_log.end_growing_log())
        await asyncio.sleep(0.5)  # its sync takes a second
        assert rig.direct_log.marks(0) == {}  # it has not ended: nothing may seal it
        (more,) = await rig.put(1, 1)
        await ended
        assert more.log_id != places[0].log_id
        assert rig.direct_log.growing_log.log_id == more.log_id
        await rig.flush([*places, more])
        assert rig.logs.sealed_ids() == [places[0].log_id]
        assert [bytes(each) for each in await rig.logs.read([*places, more])] == [
            text(1, 0),
            text(1, 1),
        ]

    ending(test)


def test_a_log_whose_footer_finds_no_space_is_ended_and_can_be_scanned():
    async def test(rig):
        places = await rig.put(1, 0)
        await rig.flush(places)
        rig.disk.fill_up(0)
        with pytest.raises(DiskFull):
            await rig.direct_log.end_growing_log()
        rig.disk.empty_out()
        await rig.flush([])
        assert rig.logs.sealed_ids() == [places[0].log_id]
        assert [bytes(each) for each in await rig.logs.read(places)] == [text(1, 0)]

    ending(test)


def test_an_entry_of_a_log_that_was_ended_early_is_there_after_a_crash_before_the_flush():
    async def test(rig):
        places = await rig.put(1, 0)
        await rig.direct_log.end_growing_log()
        await rig.crash()
        assert await rig.marks() == {places[0].log_id: FIRST}
        assert [bytes(each) for each in await rig.logs.read(places)] == [text(1, 0)]

    ending(test)
